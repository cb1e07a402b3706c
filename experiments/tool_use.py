"""reinforce_pp_tools.py on its toy: with the calculator, without it, and with its results in the loss.

    python experiments/tool_use.py        train and print the table: 3 minutes on two cores

The last is a copy of the script to which patches/results_in_loss.patch is applied.
"""

import tyro
from common import curve, group_by, label, load, mean, run_all, show, table, train

CELLS = [
    {"script": "reinforce_pp_tools", "flags": flags, "patches": patches, "seed": seed}
    for flags, patches in (({}, []), ({"max_calls": 0}, []), ({}, ["results_in_loss"]))
    for seed in (1, 2, 3)
]
GROUPS = ("2 numbers", "3 numbers", "4 numbers")
LAST = ("calls", "kl", "entropy", "grad_norm")  # metrics of the last 10 iterations


def measure(run_dir, script: str, flags: dict, patches: list, seed: int) -> dict:
    lines = train(script, flags | {"seed": seed}, run_dir, patches=patches)
    evaluations = [line for line in lines if "eval/score/2 numbers" in line]
    held_out = {group: round(evaluations[-1][f"eval/score/{group}"], 4) for group in GROUPS}
    return {"held_out": held_out} | {key: curve(lines, key) for key in ("score", *LAST)}


def summary() -> None:
    """Print a line for each setting: mean, lowest and highest of the seeds."""
    lines, rows = [], load("tool_use")
    for (name,), runs in group_by(rows, label).items():
        cells = [show([mean(run[key][:3]) for run in runs]) for key in ("score", "calls")]
        cells += [show([mean(list(run["held_out"].values())) for run in runs])]
        cells += [show([mean(run[key][-10:]) for run in runs]) for key in ("score", *LAST)]
        lines.append([name, *cells])
    heads = ["", "sampled, first 3", "calls, first 3", "greedy", "sampled, last 10"]
    table([*heads, "calls", "KL", "entropy", "gradient norm"], lines, rows)


def main() -> None:
    run_all("tool_use", CELLS, measure)
    summary()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
