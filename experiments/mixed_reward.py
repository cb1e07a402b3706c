"""The reward of dynamic_sampling.py, which also notes what each rollout generated, in the file $ROLLOUTS."""

import json
import os


def score(prompts, completions, truncated, kind, answer, **columns):
    """1 for a prompt that is given, 0 for one out of reach, and the rule for the others."""
    scores = []
    for text, group, right in zip(completions, kind, answer):
        is_right = text.rpartition("answer")[2].strip() == right
        scores.append({"given": 1.0, "out of reach": 0.0, "rule": float(is_right)}[group])
    rule = [value for value, group in zip(scores, kind) if group == "rule"]
    # A word of the toy is a token, and a response that is not truncated has an EOS.
    tokens = sum(len(text.split()) for text in completions) + truncated.count(False)
    with open(os.environ["ROLLOUTS"], "a") as file:
        file.write(json.dumps({"tokens": tokens, "right": sum(rule), "rows": len(rule)}) + "\n")
    return scores
