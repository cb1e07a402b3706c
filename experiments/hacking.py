"""Reward hacking: train on the score of the toy's reward model, evaluate with the rule.

    python experiments/hacking.py        train, draw and print the table: 20 minutes on two cores

toy/reward_model prefers worked-out answers and does not check the sums. Every policy script with a KL term is trained
on its score with three --kl_coef; --eval_reward exact_answer scores greedy responses to held-out prompts. Beta 0 is run
as --kl_coef 1e-9, so that the KL is logged.
"""

from itertools import product

import common
import tyro
from common import ROOT, curve, group_by, load, mean, run_all, table, train

SCRIPTS = tuple(script for script in common.POLICY_SCRIPTS if "kl_coef" in common.defaults(script))
BETAS = (0.0, 0.05, 1.0)
EVERY = 5  # iterations between evaluations
FLAGS = {"reward": "toy/reward_model", "eval_reward": "exact_answer"}
FLAGS |= {"eval_every": EVERY, "num_iterations": 100, "seed": 1}


def measure(run_dir, script: str, beta: float) -> dict:
    lines = train(script, FLAGS | {"kl_coef": beta or 1e-9}, run_dir)
    curves = {key: curve(lines, key) for key in ("score", "kl", "response_length")}
    return {"truth": curve(lines, "eval/score/2-5")} | curves


def summary() -> None:
    """Print a line for each script: the true accuracy and the KL at the end, for each beta."""
    lines, rows = [], load("hacking")
    for (script,), runs in group_by(rows, "script").items():
        line = [f"`{script}.py`"]
        for run in sorted(runs, key=lambda run: run["beta"]):
            line.append(f"{run['truth'][-1]:.2f} at {mean(run['kl'][-10:]):.1f}")
        lines.append(line)
    table(["script", *(f"β = {beta:g}" for beta in BETAS)], sorted(lines), rows)


def draw() -> None:
    """Draw reinforce_pp.py for each beta."""
    import plot

    groups = {}
    for run in load("hacking"):
        if run["script"] == "reinforce_pp":
            points = common.plot_rows(run, "score", "kl", "response_length")
            for i, value in enumerate(run["truth"]):
                points.append({"iteration": i * EVERY, "eval/score/2-5": value})
            groups[f"beta {run['beta']:g}"] = [points]
    plot.draw(groups, ROOT / "docs" / "hacking.png")


def main() -> None:
    cells = [{"script": script, "beta": beta} for script, beta in product(SCRIPTS, BETAS)]
    run_all("hacking", cells, measure)
    draw()
    summary()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
