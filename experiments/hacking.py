"""Reward hacking: train on the score of the toy's reward model, evaluate with the rule.

    python experiments/hacking.py               train, draw and print the table: 20 minutes on two cores
    python experiments/hacking.py --no_run      only draw and print the committed results

toy/reward_model prefers worked-out answers and does not check the sums. Every policy script with a KL term is trained
on its score with three --kl_coef; --eval_reward exact_answer scores greedy responses to held-out prompts. Beta 0 is run
as --kl_coef 1e-9, so that the KL is logged.
"""

from dataclasses import dataclass
from itertools import product

import tyro
from common import (
    POLICY_SCRIPTS,
    ROOT,
    curve,
    defaults,
    group_by,
    load,
    mean,
    plot_rows,
    run_all,
    table,
    train,
)

SCRIPTS = tuple(script for script in POLICY_SCRIPTS if "kl_coef" in defaults(script))
BETAS = (0.0, 0.05, 1.0)
EVERY = 5  # iterations between evaluations
FLAGS = {
    "reward": "toy/reward_model",
    "eval_reward": "exact_answer",
    "eval_every": EVERY,
    "num_iterations": 100,
}


@dataclass
class Args:
    scripts: tuple[str, ...] = SCRIPTS
    """Which scripts, by name."""
    betas: tuple[float, ...] = BETAS
    """Which --kl_coef."""
    seeds: tuple[int, ...] = (1,)
    """Which seeds."""
    run: bool = True
    """Train what the result file lacks."""


def measure(run_dir, script: str, beta: float, seed: int) -> dict:
    lines, _ = train(script, FLAGS | {"kl_coef": beta or 1e-9, "seed": seed}, run_dir)
    curves = {key: curve(lines, key) for key in ("score", "kl", "response_length")}
    return {"truth": curve(lines, "eval/score/2-5")} | curves


def summary() -> None:
    """Print a row for each script: the true accuracy and the KL at the end, for each beta, mean over the seeds."""
    rows = []
    for (script,), runs in group_by(load("hacking")["runs"], "script").items():
        row = [f"`{script}.py`"]
        for beta in BETAS:
            truth = mean([run["truth"][-1] for run in runs if run["beta"] == beta])
            kl = mean([mean(run["kl"][-10:]) for run in runs if run["beta"] == beta])
            row.append(f"{truth:.2f} at {kl:.1f}")
        rows.append(row)
    table(["script", *(f"β = {beta:g}" for beta in BETAS)], sorted(rows))


def draw() -> None:
    """Draw reinforce_pp.py for each beta."""
    import plot

    groups = {}
    for run in load("hacking")["runs"]:
        if run["script"] == "reinforce_pp":
            truth = [
                {"iteration": i * EVERY, "eval/score/2-5": value} for i, value in enumerate(run["truth"])
            ]
            rows = plot_rows(run, "score", "kl", "response_length")
            groups.setdefault(f"beta {run['beta']:g}", []).append(rows + truth)
    plot.draw(groups, ROOT / "docs" / "hacking.png")


def main(args: Args) -> None:
    each = product(args.scripts, args.betas, args.seeds)
    cells = [{"script": script, "beta": beta, "seed": seed} for script, beta, seed in each]
    if args.run:
        run_all("hacking", cells, measure)
    draw()
    summary()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, use_underscores=True))
