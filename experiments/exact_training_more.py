"""Settings of section 6 of docs/exact.md that came later: python experiments/exact_training_more.py

Rates are half powers of 2: the best power of 2 on the first tuning seeds, then the best of it and its two neighbors
on twice as many. Accuracies are in points.
"""

import json

import exact_training
import torch
from common import RESULTS
from exact_training import SHARPS, USUAL, train, tune, variances

RLOO, GRPO, STD = ("rloo", 8), ("grpo", 8), ("reinforce_pp_baseline", 8)


def make_plan():
    """Setting, arms, seeds, and seeds for tuning."""
    stds, ones = (RLOO, GRPO, STD), (RLOO, ("reinforce", 1))
    settings = [({"noise": noise, "sharp": sharp}, stds) for noise in (0.02, 0.1) for sharp in SHARPS]
    settings += [({"trap": pay, "sharp": sharp}, stds) for pay in (0.2, 0.5, 0.8) for sharp in SHARPS]
    settings += [({"noise": 0.02, "sharp": 3, "hard": 0}, stds)]
    settings += [({"noise": 0.02, "sharp": 3, "optimizer": "sgd"}, stds)]
    settings += [({"iterations": 30, "sharp": sharp}, ones) for sharp in SHARPS]
    settings += [({"noise": 0.02, "sharp": sharp, "scale": "prompt"}, stds) for sharp in SHARPS]
    settings += [({"noise": 0.1, "sharp": 3, "scale": "prompt"}, stds)]
    settings += [({"noise": 0.02, "sharp": 3, "scale": "answer"}, stds)]
    for setting, arms in settings:
        yield setting, arms, range(192), range(1000, 1032)
    for sharp in (1, 3):
        arms = [RLOO, ("rloo", 2), ("rloo", 4), ("rloo", 64)] + [("reinforce", 1)] * (sharp == 1)
        yield {"batch": 1024, "iterations": 50, "sharp": sharp}, arms, range(64), range(1000, 1016)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for setting, arms, seeds, tuning_seeds in make_plan():
        exact_training.TUNING_SEEDS = tuning_seeds
        for script, k in arms:
            cell = USUAL | setting | {"script": script, "k": k}
            best = tune(cell)["accuracy"]
            powers = [best - 0.5, best, best + 0.5]
            more = range(1000, 1000 + 2 * len(tuning_seeds))
            best = powers[int(train(cell, more, powers)[0].mean(1).argmax())]
            accuracy = [round(x, 3) for x in (100 * train(cell, seeds, [best])[0][0]).tolist()]
            row = cell | {"rate": best, "variances": variances(cell), "accuracy": accuracy}
            with open(RESULTS / "exact_training_more.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")
