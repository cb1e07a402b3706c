"""Numbers of docs/exact.md that are in no table: python experiments/exact_checks.py

The cosine of k2 in the loss where the first token decides the KL of all later ones, in closed form. Noise of the scores
with fewer groups that are all wrong, and errors of a judge that are fixed for each prompt and answer.
"""

import json
import math

import exact_training
import torch
from common import RESULTS
from exact_training import TEST, USUAL, make_setting, make_world, train, tune

SEEDS, TUNING_SEEDS = range(48), range(1000, 1016)
ARMS = ("rloo", "grpo")


def branch_cosine(length: int, kl: float, shared: bool) -> float:
    """Tokens are 0 or 1, at first with probability 1/2. After a first 1, all later ones have moved."""
    low, high = 0.5, 1 - 1e-12
    for _ in range(200):  # the probability of 1 in the moved mode, by the KL per token
        p = (low + high) / 2
        token_kl = p * math.log(2 * p) + (1 - p) * math.log(2 - 2 * p)
        low, high = (p, high) if (length - 1) * token_kl / 2 < kl * length else (low, p)
    first = (length - 1) * token_kl / 4  # gradient of the KL in the first token's logit; k2 has 0 there
    later = p * (1 - p) * math.log(p / (1 - p)) / 2  # in a later token's, where k2 has the same
    size = later * ((length - 1) if shared else math.sqrt(length - 1))
    return size / math.hypot(first, size)


def hard_known(x: float, call):
    """Run with another value of what the base knows of the hard half; exact_training has -0.5."""
    plain = torch.where
    make_world.cache_clear()
    torch.where = lambda c, a, b: plain(c, x if (a, b) == (-0.5, 2.0) else a, b)
    try:
        return call()
    finally:
        torch.where = plain
        make_world.cache_clear()


def all_wrong(cell: dict) -> float:
    """The share of groups of 4 of the base policy without a right response."""
    features, base, right, _ = make_setting(cell, SEEDS)
    chances = (features @ base).softmax(2)[:, :-TEST].gather(2, right[:, :-TEST, None])
    return float((1 - chances).pow(4).mean())


def judged(call):
    """Run with scores that have an error of std 0.02, fixed for each prompt and answer."""
    plain = exact_training.make_setting

    def with_errors(cell, seeds):
        features, base, right, scores = plain(cell, seeds)
        generator = torch.Generator().manual_seed(7)
        return features, base, right, scores + 0.02 * torch.randn(scores.shape, generator=generator)

    exact_training.make_setting = with_errors
    try:
        return call()
    finally:
        exact_training.make_setting = plain


def compare(name: str, setting: dict, k: int) -> None:
    found, rates = [], []
    for script in ARMS:
        cell = USUAL | setting | {"script": script, "k": k}
        rates.append(tune(cell)["accuracy"])
        found.append(100 * train(cell, SEEDS, rates[-1:])[0][0])
    difference = found[1] - found[0]
    half = 2.685 * float(difference.std()) / math.sqrt(len(SEEDS))
    row = {"name": name, "k": k, "rates": rates, "all_wrong": all_wrong(USUAL | setting)}
    row |= {"grpo - rloo": round(float(difference.mean()), 2), "half": round(half, 2)}
    with open(RESULTS / "exact_checks.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    print(row, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    exact_training.TUNING_SEEDS = TUNING_SEEDS
    for length in (8, 100, 1000):
        print(length, [round(branch_cosine(length, 0.01, shared), 3) for shared in (False, True)])
    noise = {"noise": 0.02}
    for x in (-0.5, 0.0, 0.5):
        hard_known(x, lambda: compare(f"noise, the base knows {x} of the hard half", noise, 4))
    compare("noise, no hard half", noise | {"hard": 0}, 4)
    for k in (4, 8):
        judged(lambda: compare("a judge's errors", {}, k))
        judged(lambda: compare("a judge's errors, no hard half", {"hard": 0}, k))
