"""Rewards for reinforce_pp_process.py. Each result in `think 3 + 5 = 8 - 2 = 6 answer 6` ends a step."""

import re


def value(words):
    """The value of words such as 3 + 5 - 2, modulo 10, or None if they are no chain."""
    text = "".join(words)
    if re.fullmatch(r"\d([+-]\d)*", text):
        return str(sum(map(int, re.findall(r"[+-]?\d", text))) % 10)


def right_steps(prompts, tokens, answer, may_be_useless=False, **columns):
    """1 for a right answer, and 1 for result i if it is the value of the prompt's first i + 1 numbers."""
    scores = [[0.0] * len(words) for words in tokens]
    for row, prompt, words, right in zip(scores, prompts, tokens, answer):
        chain, words = prompt.split()[:-1], [word.strip() for word in words if word.strip() != "<eos>"]
        for t in range(1, len(words)):
            end = 2 * words[:t].count("=") + 1
            step = words[t - 4 : t - 1] if may_be_useless else chain[:end] if end <= len(chain) else []
            row[t] = float(words[t - 1] == "=" and words[t] == value(step))
        if words[-2:] == ["answer", right]:
            row[len(words) - 1] = 1.0
    return scores


def true_steps(**columns):
    """1 for a right answer, and 1 for each result of a true equation, so 8 + 0 = 8 scores each time."""
    return right_steps(may_be_useless=True, **columns)
