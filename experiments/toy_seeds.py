"""Run every policy script on the toy over five seeds: training curves, and held-out accuracy.

    python experiments/toy_seeds.py        train, draw and print the table: an hour on two cores

Writes docs/toy_seeds.png, too.
"""

from pathlib import Path

import common
import tyro
from common import POLICY_SCRIPTS, ROOT, curve, group_by, label, load, mean, run_all, show, table

BEFORE = {"num_iterations": 0}  # flags of the run that only evaluates the model before training
RUNS = [("reinforce", BEFORE), *((script, {}) for script in POLICY_SCRIPTS)]
RUNS += [("raft", {"num_iterations": 160})]
KEYS = ("score", "kl", "response_length", "entropy", "grad_norm")
GROUPS = ("2-5", "6", "8")  # held-out chains by their length
SEEDS = (1, 2, 3, 4, 5)


def measure(run_dir: Path, script: str, seed: int, flags: dict) -> dict:
    lines = common.train(script, flags | {"seed": seed}, run_dir)
    held_out = {group: round(lines[-1][f"eval/score/{group}"], 4) for group in GROUPS}
    curves = {key: curve(lines, key, 6) for key in KEYS}
    return {"held_out": {str(lines[-1]["iteration"]): held_out}} | curves


def summary() -> None:
    """Print a line for each script: mean, lowest and highest of the seeds."""
    lines, rows = [], load("toy_seeds")
    # Sampled by the model before training; sdpo.py starts from another one
    starts = [row["score"][:1] for row in rows if row["score"] and row["script"] != "sdpo"]
    for (name,), runs in group_by(rows, label).items():
        if runs[0]["flags"] == BEFORE:
            name = "before training"
        sampled = [run["score"][-10:] for run in runs] if runs[0]["score"] else starts
        after = [[*run["held_out"].values()][-1] for run in runs]  # the last evaluation of each run
        cells = [show([held_out[group] for held_out in after]) for group in GROUPS]
        lines.append([name, show([mean(scores) for scores in sampled], 3), *cells])
    table(["script", "sampled, last 10", *(f"greedy {group}" for group in GROUPS)], lines, rows)


def draw() -> None:
    """Draw all scripts into one picture. Of one with a teacher, kl is not the KL to the start."""
    import plot

    groups = {}
    for run in load("toy_seeds"):
        if run["flags"] == {}:
            keys = ["score", "response_length", "entropy"]
            keys += [] if "teacher" in common.defaults(run["script"]) else ["kl"]
            groups.setdefault(run["script"], []).append(common.plot_rows(run, *keys))
    plot.draw(groups, ROOT / "docs" / "toy_seeds.png")


def main() -> None:
    cells = []
    for script, flags in RUNS:
        for seed in SEEDS if flags != BEFORE else (1,):
            cells.append({"script": script, "seed": seed, "flags": flags})
    run_all("toy_seeds", cells, measure)
    draw()
    summary()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
