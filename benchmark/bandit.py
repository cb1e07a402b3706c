"""Bias and variance of every estimator's gradient on a bandit whose true gradient is known.

    python benchmark/bandit.py            about six minutes on one core
    python benchmark/bandit.py --no_run   only draws and tabulates the committed results again

Every prompt has its own softmax over actions, an action is a response of one token, and the gradient of the expected
score with respect to all logits is exact. compute_advantages and policy_loss are the scripts' own; ppo gets the best
critic there is, the exact expected score of the prompt. Of each estimator's gradient, over many batches drawn: the
cosine of its mean with the true gradient, the norm of its mean over the true norm, and its noise-to-signal ratio
E|g - E g|^2 / |E g|^2 in a batch of that size. The KL is left out (kl_coef 0).

Writes results/bandit.json, results/bandit.md and docs/bandit.png.
"""

import importlib
import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from toy_seeds import POLICY_SCRIPTS

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SCRIPTS = {name: importlib.import_module(name) for name in POLICY_SCRIPTS}
DRAWN = ["reinforce_pp", "reinforce_pp_baseline", "rloo", "grpo", "ppo", "remax"]  # the table has all
PROMPTS, ACTIONS = 16, 8
SETTINGS = {
    "alike": "prompts alike: scores of all actions of all prompts from N(0, 1)",
    "means": "prompts of different mean: the same, plus N(0, 3) for each prompt",
    "rates": "scores 0 and 1, pass rates from 0.02 to 0.98",
    "scales": "prompts of different scale: the same, times 0.1 to 10",
}


@dataclass
class Args:
    draws: int = 2000
    """Batches drawn for each cell."""
    seed: int = 0
    """Seeds bandits and draws."""
    run: bool = True
    """Measure; without it the results that lie there are drawn again."""


def make_bandit(setting: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and scores, each (PROMPTS, ACTIONS), float64."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(PROMPTS, ACTIONS, generator=g, dtype=torch.float64)
    scores = torch.randn(PROMPTS, ACTIONS, generator=g, dtype=torch.float64)
    if setting == "means":
        scores = scores + 3 * torch.randn(PROMPTS, 1, generator=g, dtype=torch.float64)
    if setting == "scales":
        scores = scores * torch.logspace(-1, 1, PROMPTS, dtype=torch.float64)[:, None]
    if setting == "rates":  # one right action, whose probability is the pass rate
        rate = torch.linspace(0.02, 0.98, PROMPTS, dtype=torch.float64)
        rest = logits[:, 1:].softmax(1) * (1 - rate)[:, None]
        logits = torch.cat([rate[:, None], rest], dim=1).log()
        scores = torch.zeros_like(scores)
        scores[:, 0] = 1.0
    return logits, scores


def measure(name: str, logits: torch.Tensor, scores: torch.Tensor, k: int, size: int, args: Args) -> dict:
    """Cosine, norm ratio and noise-to-signal of one estimator, with size responses a batch, k of them a prompt."""
    script = SCRIPTS[name]
    flags = script.Args(samples_per_prompt=k)
    flags.kl_coef = 0.0
    probs = logits.softmax(1)
    values = (probs * scores).sum(1)  # (PROMPTS,) expected scores: a perfect critic
    truth = probs * (scores - values[:, None]) / PROMPTS
    greedy = scores.gather(1, logits.argmax(1, keepdim=True))[:, 0]
    g = torch.Generator().manual_seed(args.seed + 1)
    mask = torch.ones(size, 1, dtype=torch.bool)
    zero = torch.zeros(size, 1, dtype=torch.float64)
    total, squares = torch.zeros_like(truth), 0.0
    for _ in range(args.draws):
        prompt = torch.randint(PROMPTS, (size // k,), generator=g).repeat_interleave(k)  # (B,), prompt-major
        action = torch.multinomial(probs[prompt], 1, generator=g)  # (B, 1)
        logprobs = logits[prompt].log_softmax(1).gather(1, action)  # (B, 1)
        rollout = {"scores": scores[prompt].gather(1, action)[:, 0], "response_mask": mask, "kl": zero}
        rollout |= {"old_logprobs": logprobs, "ref_logprobs": logprobs, "greedy_scores": greedy[prompt]}
        rollout["values"] = values[prompt][:, None]
        rollout |= script.compute_advantages(flags, rollout)
        leaf = logprobs.clone().requires_grad_()
        loss, _ = script.policy_loss(flags, rollout, leaf, size, size)
        (weight,) = torch.autograd.grad(loss, leaf)  # (B, 1): d loss / d log-prob of the action drawn
        rows = torch.zeros(size, ACTIONS, dtype=torch.float64).scatter(1, action, 1.0) - probs[prompt]
        gradient = torch.zeros_like(truth).index_add_(0, prompt, -weight * rows)
        total += gradient
        squares += float(gradient.square().sum())
    mean = total / args.draws
    noise = squares / args.draws - float(mean.square().sum())
    # The mean of finitely many draws is too long by noise / draws, which would pass for a bias.
    signal = max(float(mean.square().sum()) - noise / args.draws, 1e-12)
    along = float((mean * truth).sum()) / float(truth.norm())
    return {
        "cosine": round(min(along / math.sqrt(signal), 1.0), 4),
        "norm": round(math.sqrt(signal) / float(truth.norm()), 4),
        "noise": round(noise / signal, 3),
    }


def cells():
    """Name, setting, k and batch size of every cell: against k at 128 responses, against the size at k = 4."""
    for setting in SETTINGS:
        for name in SCRIPTS:
            sizes = [(k, 128) for k in (2, 4, 8, 16)] + [(4, size) for size in (4, 16, 64, 512)]
            for k, size in sizes:
                yield setting, name, k, size


def table(results: dict) -> str:
    lines = []
    for setting, title in SETTINGS.items():
        lines += [
            f"**{title[0].upper()}{title[1:]}.** 128 responses; cosine / norm ratio / noise-to-signal",
            "",
        ]
        lines += ["| | k = 2 | k = 4 | k = 8 | k = 16 |", "|---|---|---|---|---|"]
        for name in SCRIPTS:
            row = [results["cells"][f"{setting} {name} {k} 128"] for k in (2, 4, 8, 16)]
            shown = " | ".join(f"{c['cosine']:.3f} / {c['norm']:.2f} / {c['noise']:.2f}" for c in row)
            lines.append(f"| `{name}` | {shown} |")
        lines += ["", "k = 4; cosine / norm ratio / noise-to-signal", ""]
        lines += ["| | 4 responses | 16 | 64 | 512 |", "|---|---|---|---|---|"]
        for name in SCRIPTS:
            row = [results["cells"][f"{setting} {name} 4 {size}"] for size in (4, 16, 64, 512)]
            shown = " | ".join(f"{c['cosine']:.3f} / {c['norm']:.2f} / {c['noise']:.2f}" for c in row)
            lines.append(f"| `{name}` | {shown} |")
        lines.append("")
    lines += [
        "**Weight of a prompt in GRPO's expected gradient** against one of pass rate 0.5; exact",
        "",
        grpo_weights(),
        "",
    ]
    lines.append(
        f"Made by `{results['command']}`: {results['draws']} batches a cell, seed {results['seed']}."
    )
    return "\n".join(lines) + "\n"


def grpo_weights() -> str:
    """How much more a prompt of pass rate p weighs in GRPO's expected gradient than one of 0.5, for scores 0 and 1.

    With m of k responses right, the group's part in direction of the right answer is sqrt(m (k-m) (k-1) / k) / k, where
    the true gradient has p (1-p); exact, by the sum over the binomial distribution of m.
    """
    lines = ["| pass rate | k = 2 | k = 8 | k = 64 |", "|---|---|---|---|"]
    for p in (0.01, 0.1, 0.3, 0.5):
        row = []
        for k in (2, 8, 64):
            weight = {}
            for q in (p, 0.5):
                odds = [math.comb(k, m) * q**m * (1 - q) ** (k - m) for m in range(k + 1)]
                mean = math.fsum(odds[m] * math.sqrt(m * (k - m) * (k - 1) / k) / k for m in range(k + 1))
                weight[q] = mean / (q * (1 - q))
            row.append(f"{weight[p] / weight[0.5]:.2f}")
        lines.append(f"| {p} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def draw(results: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    by_k, by_size = [(k, 128) for k in (2, 4, 8, 16)], [(4, size) for size in (4, 16, 64, 512)]
    rows = [("cosine", by_k), ("noise", by_k), ("cosine", by_size), ("noise", by_size)]
    labels = {"cosine": "cosine with the true gradient", "noise": "noise-to-signal"}
    figure, axes = plt.subplots(4, 4, figsize=(13, 11), constrained_layout=True)
    for column, setting in enumerate(SETTINGS):
        for axis, (key, points) in zip(axes[:, column], rows):
            xs = [k if points is by_k else size for k, size in points]
            for name in DRAWN:
                ys = [results["cells"][f"{setting} {name} {k} {size}"][key] for k, size in points]
                axis.plot(xs, ys, marker="o", markersize=4, linewidth=1.3, label=name)
            axis.set_xscale("log", base=2)
            axis.set_xticks(xs, list(map(str, xs)))
            axis.set_xlabel("k, of 128 responses" if points is by_k else "responses, k = 4")
            axis.grid(alpha=0.25)
            if key == "cosine":
                axis.set_ylim(0.4, 1.03)
            elif points is by_size:
                axis.set_yscale("log")
            else:
                axis.set_ylim(0, 6)
        axes[0][column].set_title(SETTINGS[setting].split(":")[0].split(",")[0], fontsize=11)
    for axis, (key, _) in zip(axes[:, 0], rows):
        axis.set_ylabel(labels[key])
    axes[0][0].legend(frameon=False, fontsize=8, loc="lower left")
    figure.savefig(path, dpi=100)


def main(args: Args) -> None:
    path = ROOT / "benchmark" / "results" / "bandit.json"
    if args.run:
        torch.set_num_threads(1)
        command = " ".join(["python benchmark/bandit.py", *sys.argv[1:]])
        results = {
            "command": command,
            "draws": args.draws,
            "seed": args.seed,
            "cores": os.cpu_count(),
            "cells": {},
        }
        for setting, name, k, size in cells():
            logits, scores = make_bandit(setting, args.seed)
            results["cells"][f"{setting} {name} {k} {size}"] = measure(name, logits, scores, k, size, args)
        path.write_text(json.dumps(results, indent=0) + "\n")
    results = json.loads(path.read_text())
    path.with_suffix(".md").write_text(table(results))
    draw(results, ROOT / "docs" / "bandit.png")
    print(table(results))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, use_underscores=True))
