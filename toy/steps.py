"""Rewards for reinforce_pp_process.py: each result in `think 3 + 5 = 8 - 2 = 6 answer 6` ends a step."""

import re


def value(words):
    """What words such as 3 + 5 - 2 come to, modulo 10; None if they are something else."""
    text = "".join(words)
    if re.fullmatch(r"\d([+-]\d)*", text):
        return str(sum(map(int, re.findall(r"[+-]?\d", text))) % 10)


def score_tokens(prompts, tokens, answer, expected):
    """1 for a right answer, and for each result, what follows "=", that is as expected."""
    scores = []
    for prompt, words, right in zip(prompts, tokens, answer):
        chain = prompt.split()[:-1]
        row = [0.0] * len(words)
        words = [word for word in words if word != "<eos>"]
        for t in range(1, len(words)):
            if words[t - 1] == "=" and words[t] == expected(chain, words[:t]):
                row[t] = 1.0
        if words[-2:] == ["answer", right]:
            row[len(words) - 1] = 1.0
        scores.append(row)
    return scores


def right_steps(prompts, tokens, answer, **columns):
    """Result i must be the value of the prompt's first i + 1 numbers."""

    def expected(chain, before):
        length = 2 * before.count("=") + 1
        return value(chain[:length]) if length <= len(chain) else None

    return score_tokens(prompts, tokens, answer, expected)


def true_steps(prompts, tokens, answer, **columns):
    """The equation must be true, be it useful or not: 8 + 0 = 8 counts as often as it is written."""
    return score_tokens(prompts, tokens, answer, lambda chain, before: value(before[-4:-1]))
