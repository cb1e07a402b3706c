"""Four responses per prompt, with and without a std, with and without noise: section 6 of docs/exact.md.

    python experiments/exact_training_k4.py     with exact_training.py, at commit 67bfb35

Rates are chosen as in exact_training_more.py. One response per prompt with wrong answers that pay less than the right
one is here, too.
"""

import json
import sys

import exact_training
import torch
from common import RESULTS
from exact_training import SHARPS, USUAL, train, tune, variances

SEEDS, TUNING_SEEDS = range(192), range(1000, 1032)
FOUR = (("rloo", 4), ("grpo", 4), ("reinforce_pp_baseline", 4))


def make_plan():
    for sharp in SHARPS:
        for noise in (0.0, 0.02, 0.1):
            yield {"sharp": sharp, "noise": noise}, FOUR
    for sharp in (1, 3):
        for noise in (0.0, 0.02):
            yield {"sharp": sharp, "noise": noise, "scale": "prompt"}, FOUR
    for sharp in (1, 3):
        for pay in (0.2, 0.5):
            yield {"sharp": sharp, "trap": pay}, (("reinforce", 1),)


if __name__ == "__main__":
    torch.set_num_threads(1)
    exact_training.TUNING_SEEDS = TUNING_SEEDS
    for setting, arms in make_plan():
        for script, k in arms:
            cell = USUAL | setting | {"script": script, "k": k}
            best = tune(cell)["accuracy"]
            powers = [best - 0.5, best, best + 0.5]
            best = powers[int(train(cell, range(1000, 1064), powers)[0].mean(1).argmax())]
            accuracy = [round(x, 3) for x in (100 * train(cell, SEEDS, [best])[0][0]).tolist()]
            row = cell | {"rate": best, "variances": variances(cell), "accuracy": accuracy}
            with open(RESULTS / "exact_training_k4.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")
            print(setting, script, flush=True)
