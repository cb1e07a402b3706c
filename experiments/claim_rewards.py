"""The rewards of claims.py: the toy's rule with other values, or with noise."""

import torch


def rule(completions: list[str], answer: list[str]) -> list[float]:
    """exact_answer on the toy."""
    pairs = zip(completions, answer)
    return [float(text.rpartition("answer")[2].strip() == right) for text, right in pairs]


def signed(prompts, completions, truncated, answer, **columns):
    """1 if the answer is right, else -1."""
    return [2 * score - 1 for score in rule(completions, answer)]


def flipped(probability: float, completions: list[str], answer: list[str]) -> list[float]:
    """The rule, with each score flipped with this probability. The script has seeded torch."""
    flips = torch.rand(len(completions)) < probability
    return [abs(score - flip) for score, flip in zip(rule(completions, answer), flips.tolist())]


def flip_10(prompts, completions, truncated, answer, **columns):
    return flipped(0.1, completions, answer)


def flip_20(prompts, completions, truncated, answer, **columns):
    return flipped(0.2, completions, answer)


def flip_30(prompts, completions, truncated, answer, **columns):
    return flipped(0.3, completions, answer)
