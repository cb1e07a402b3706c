"""Rewards of toy.py: two numbers for each toy response, the second higher the shorter the response."""


def words(completions, answer, **columns):
    """1 if the answer is right, else 0; and minus the number of words."""
    scores = []
    for text, right in zip(completions, answer):
        is_right = text.rpartition("answer")[2].strip() == right
        scores.append([float(is_right), -float(len(text.split()))])
    return scores


def share(completions, answer, **columns):
    """The same, with the length as a share of 40 words, so that it is between -1 and 0."""
    return [[right, length / 40] for right, length in words(completions, answer)]


def words_sum(**columns):
    """One number for each response, for scripts that take no list."""
    return [sum(scores) for scores in words(**columns)]


def share_sum(**columns):
    return [sum(scores) for scores in share(**columns)]
