"""The last settings of section 6 of docs/exact.md: python experiments/exact_training_last.py

Longer runs on many prompts, smaller noise, no easy prompts, and the accuracy of the base policy. Rates are chosen as in
exact_training_more.py. Rows with "by": "score" have rates chosen on the score, and the score at the end in percent.
"""

import json

import exact_training
import torch
from common import RESULTS
from exact_training import SHARPS, TEST, USUAL, make_setting, train, tune, variances

SEEDS, TUNING_SEEDS = range(64), range(1000, 1032)
ONE = (("rloo", 8), ("reinforce", 1))
FOUR = (("rloo", 4), ("grpo", 4), ("reinforce_pp_baseline", 4))


def make_plan():
    for sharp in SHARPS:
        yield {"sharp": sharp, "prompts": 1024, "iterations": 400}, ONE
    for sharp in (1, 3):
        yield {"sharp": sharp, "noise": 0.005}, FOUR
        yield {"sharp": sharp, "noise": 0.02, "hard": 2}, FOUR
        yield {"sharp": sharp, "noise": 0.5}, FOUR
        yield {"sharp": sharp, "flip": 0.1}, (("rloo", 4), ("rloo", 8))


def score_plan():
    for scale in ("answer", "prompt"):
        for sharp in SHARPS:
            yield {"sharp": sharp, "scale": scale}, [(script, k) for k in (4, 8) for script, _ in FOUR]


def tune_on_score(cell: dict) -> float:
    """As `tune`, then the better of the neighbors that are half a power away, by the score."""
    means, todo = {}, list(exact_training.FIRST_RATES[cell["optimizer"]])
    while todo:
        means |= dict(zip(todo, train(cell, TUNING_SEEDS, todo)[1].mean(1).tolist()))
        best = max(means, key=means.get)
        todo = [min(means) - 1] * (best == min(means)) + [max(means) + 1] * (best == max(means))
    powers = [best - 0.5, best, best + 0.5]
    return powers[int(train(cell, range(1000, 1064), powers)[1].mean(1).argmax())]


def base_accuracy(cell: dict) -> float:
    """Of the base policies on the prompts for the test, in percent."""
    features, base, right, _ = make_setting(cell, SEEDS)
    chances = (features[:, -TEST:] @ base).softmax(2)
    return 100 * float(chances.gather(2, right[:, -TEST:, None]).mean())


if __name__ == "__main__":
    torch.set_num_threads(1)
    exact_training.TUNING_SEEDS = TUNING_SEEDS
    for sharp in (1, 1.5, 2, 3, 6):
        print(sharp, base_accuracy(USUAL | {"sharp": sharp}), flush=True)
    for setting, arms in make_plan():
        for script, k in arms:
            cell = USUAL | setting | {"script": script, "k": k}
            best = tune(cell)["accuracy"]
            powers = [best - 0.5, best, best + 0.5]
            best = powers[int(train(cell, range(1000, 1064), powers)[0].mean(1).argmax())]
            accuracy = [round(x, 3) for x in (100 * train(cell, SEEDS, [best])[0][0]).tolist()]
            row = cell | {"rate": best, "variances": variances(cell), "accuracy": accuracy}
            with open(RESULTS / "exact_training_last.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")
            print(setting, script, k, flush=True)
    for setting, arms in score_plan():
        for script, k in arms:
            cell = USUAL | setting | {"script": script, "k": k}
            best = tune_on_score(cell)
            accuracy, score = (
                [round(x, 3) for x in (100 * found[0]).tolist()] for found in train(cell, SEEDS, [best])
            )
            row = cell | {"by": "score", "rate": best, "accuracy": accuracy, "score": score}
            with open(RESULTS / "exact_training_last.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")
            print(setting, script, k, flush=True)
