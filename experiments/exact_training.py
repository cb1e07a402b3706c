"""Training a small policy whose accuracy is known exactly, in many settings: section 6 of docs/exact.md.

    python experiments/exact_training.py

A policy is softmax(features of the prompt @ W) over ANSWERS; a seed draws prompts, right answers and the base policy.
A cell is a setting and an arm. It has the learning rate, a power of 2, with the best accuracy at the end on
TUNING_SEEDS; the grid of rates grows until its edge is not the best. Then SEEDS are run, which tune nothing.
"""

import math
import random
from functools import cache, partial
from itertools import product

import torch
from common import run_all
from exact import looks_at_batch, make_args, module, one_token, short, slopes

SEEDS, TUNING_SEEDS = range(64), range(1000, 1016)
T_99 = 2.656  # of Student's t with 63 degrees of freedom
ANSWERS, RANK, TEST = 16, 32, 128
OPTIMIZERS = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
FIRST_RATES = {"adam": (-3, -2, -1), "sgd": (6, 7, 8)}  # powers of 2

# sharp: a factor of the base policy's logits. scale: of the scores, equal, or between 1/4.5 and 4.5 for each prompt or
# each right answer. trap: what one wrong answer of each prompt pays. hard: of every 2 prompts so many are hard.
# flip, noise: errors of the scores.
USUAL = {"sharp": 1, "scale": "equal", "trap": 0.0, "prompts": 256, "batch": 128, "optimizer": "adam"}
USUAL |= {"hard": 1, "flip": 0.0, "noise": 0.0, "iterations": 100}
KNOBS = {"prompts": (16, 64, 1024), "batch": (32, 256), "optimizer": ("sgd",), "iterations": (300,)}
KNOBS |= {"hard": (0,), "flip": (0.2,), "noise": (0.5,)}
SHARPS, SCALES, TRAPS = (1, 3, 6), ("equal", "prompt", "answer"), (1.0, 1.2, 2.0, 4.0)
# Script and k. reinforce has the batch's mean as baseline; with k = 8 it draws prompts as the others do.
ARMS = [("rloo", 8), ("grpo", 8), ("reinforce", 1)]
KNOB_ARMS = [*ARMS, ("reinforce", 8), ("rloo", 4), ("rloo", 16)]
MAIN_ARMS = [*KNOB_ARMS, ("reinforce_pp_baseline", 8), ("maxrl", 8), ("rloo", 2), ("rloo", 64), ("grpo", 64)]


def make_cells() -> list[dict]:
    """All arms at three sharpnesses and scales, and some with traps, with one knob turned, and with several."""
    main = [{"sharp": sharp, "scale": scale} for scale in SCALES for sharp in SHARPS]
    traps = [{"trap": x, "sharp": sharp} for x in TRAPS for sharp in SHARPS]
    between = [{"sharp": sharp, "scale": scale} for scale in SCALES for sharp in (1.5, 2)]
    turned = [{"sharp": sharp, name: x} for name, values in KNOBS.items() for x in values for sharp in (1, 3)]
    draw = random.Random(0)
    for _ in range(20):
        setting = {name: draw.choice((USUAL[name], *values)) for name, values in KNOBS.items()}
        setting |= {"sharp": draw.choice(SHARPS), "scale": draw.choice(SCALES), "iterations": 100}
        setting["batch"] = min(setting["batch"], 128)
        # Only scores of 0 and 1 are flipped.
        turned.append(setting if setting["scale"] == "equal" else setting | {"flip": 0.0})
    plan = [(main, MAIN_ARMS), (traps, ARMS), (between + turned, KNOB_ARMS)]
    cells = {}  # by its values, since a random setting may be one of the others
    for settings, arms in plan:
        for setting, (script, k) in product(settings, arms):
            cell = USUAL | setting | {"script": script, "k": k}
            cells[tuple(cell.values())] = cell
    return list(cells.values())


@cache
def make_world(prompts: int, hard: int, seeds: range) -> dict:
    """Prompts for training and for the test, right answers and base policies, each seed with its own generator."""
    # Easy and hard prompts, in turn: most of what they have lies in one half of the dimensions.
    is_hard = torch.arange(prompts + TEST) % 2 < hard
    in_second = torch.arange(RANK) >= RANK // 2
    size = torch.where(is_hard[:, None] == in_second, 1.0, 0.3) / math.sqrt(RANK / 2)
    known = torch.where(in_second, -0.5, 2.0)[:, None]  # of the hard half, the base knows less than nothing
    worlds = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        draw = partial(torch.randn, generator=generator)
        features, truth, noise, trap = (draw(*x) for x in ((prompts + TEST, RANK), *[(RANK, ANSWERS)] * 3))
        features = size * features
        right = (features @ truth).argmax(1)
        trapped = (features @ trap).scatter(1, right[:, None], -math.inf).argmax(1)
        scales = 3 * torch.rand(prompts + TEST, ANSWERS, generator=generator) - 1.5
        by_prompt, by_answer = scales[:, 0].exp(), (3 * right / (ANSWERS - 1) - 1.5).exp()
        world = {"features": features, "base": known * truth + noise, "trap_direction": trap}
        worlds.append(world | {"right": right, "trap": trapped, "prompt": by_prompt, "answer": by_answer})
    return {name: torch.stack([world[name] for world in worlds]) for name in worlds[0]}


def make_setting(cell: dict, seeds: range) -> tuple[torch.Tensor, ...]:
    """Features (S, P, RANK), base policy (S, RANK, ANSWERS), right answers (S, P), and scores (S, P, ANSWERS)."""
    world = make_world(cell["prompts"], cell["hard"], seeds)
    base = cell["sharp"] * (world["base"] - 0.5 * world["trap_direction"] * bool(cell["trap"]))
    one_hot = partial(torch.nn.functional.one_hot, num_classes=ANSWERS)
    scores = one_hot(world["right"]) + cell["trap"] * one_hot(world["trap"])
    if cell["scale"] != "equal":
        scores = scores * world[cell["scale"]][..., None]
    return world["features"], base, world["right"], scores


def variances(cell: dict) -> tuple[float, float]:
    """V, of all scores, and W, the mean within a prompt, of the base policy on the prompts for training."""
    features, base, _, scores = make_setting(cell, SEEDS)
    chances = (features @ base).softmax(2)
    mean, second = ((chances * x).sum(2)[:, :-TEST] for x in (scores, scores.square()))
    if cell["flip"]:  # of scores of 0 and 1
        mean = second = cell["flip"] + (1 - 2 * cell["flip"]) * mean
    within = second - mean.square() + cell["noise"] ** 2
    return float((within + (mean - mean.mean(1, keepdim=True)).square()).mean()), float(within.mean())


def train(cell: dict, seeds: range, powers: list[int]) -> torch.Tensor:
    """(2, powers, seeds): accuracy and score of the trained policies on the prompts for the test."""
    script, k, batch = cell["script"], cell["k"], cell["batch"]
    features, base, right, all_scores = make_setting(cell, seeds)
    rates = torch.tensor([2.0**power for power in powers])[:, None, None, None]
    generator = torch.Generator().manual_seed(seeds[0])
    moved = torch.zeros(len(powers), *base.shape)  # with a learning rate of 1, which each run scales
    stepper = OPTIMIZERS[cell["optimizer"]]([moved], lr=1.0)
    args, compute_advantages = make_args(script, samples_per_prompt=k), module(script).compute_advantages
    seed = torch.arange(len(seeds))[:, None]
    for _ in range(cell["iterations"]):
        # All rates see the same prompts of a seed.
        rows = torch.randint(cell["prompts"], (len(seeds), batch // k), generator=generator)
        x, given = features[seed, rows], all_scores[seed, rows]  # (S, G, RANK), (S, G, ANSWERS)
        chances = (x @ (base + rates * moved)).softmax(3)  # (L, S, G, ANSWERS)
        answers = torch.multinomial(chances.view(-1, ANSWERS), k, replacement=True, generator=generator)
        answers = answers.view(*chances.shape[:3], k)
        scores = given.expand_as(chances).gather(3, answers)
        if cell["flip"]:
            is_flipped = torch.rand(scores.shape, generator=generator) < cell["flip"]
            scores = torch.where(is_flipped, 1 - scores, scores)
        if cell["noise"]:
            scores = scores + cell["noise"] * torch.randn(scores.shape, generator=generator)
        # Statistics of a batch come from the run's own.
        runs = scores.view(-1, batch) if looks_at_batch(script) else scores.view(1, -1)
        advantages = torch.cat([compute_advantages(args, one_token(run))["advantages"] for run in runs])
        rollout = one_token(scores.flatten()) | {"advantages": advantages}
        slope = slopes(script, args, rollout, batch, batch).view_as(scores).float()
        # The sum over responses of slope * (one-hot - probabilities), for each prompt
        push = torch.zeros_like(chances).scatter_add(3, answers, slope) - slope.sum(3, keepdim=True) * chances
        moved.grad = -x.mT @ push
        stepper.step()
    chances = (features[:, -TEST:] @ (base + rates * moved)).softmax(3)
    accuracy = chances.gather(3, right[:, -TEST:, None].expand(len(powers), -1, -1, 1))[..., 0]
    score = (chances * all_scores[:, -TEST:]).sum(3)
    return torch.stack([accuracy, score]).mean(3)


def tune(cell: dict) -> dict:
    """{"accuracy": ..., "score": ...}: the power of 2 with the best mean of each over TUNING_SEEDS."""
    means = {}
    todo = list(FIRST_RATES[cell["optimizer"]])
    while todo:
        accuracy, score = train(cell, TUNING_SEEDS, todo).mean(2).tolist()
        means |= {power: {"accuracy": accuracy[i], "score": score[i]} for i, power in enumerate(todo)}
        wanted = ("accuracy", "score") if cell["trap"] else ("accuracy",)
        best = {name: max(means, key=lambda power: means[power][name]) for name in wanted}
        low, high = min(means), max(means)
        todo = [low - 1] * (low in best.values()) + [high + 1] * (high in best.values())
    return best


def measure(run_dir, **cell) -> dict:
    """Accuracy of SEEDS with the rate tuned for it; with a trap, also with the rate tuned for the score."""
    best = tune(cell)
    found = train(cell, SEEDS, [*best.values()])
    names = ("accuracy", "accuracy, tuned on the score")
    accuracy = {name: short(x) for name, x in zip(names, found[0])}
    return {"rates": best, "variances": short(variances(cell))} | accuracy


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_all("exact_training", make_cells(), measure, workers=1)
