"""reinforce_pp_tools.py on its toy, with the calculator and without it.

    python experiments/variants.py               train and print the table: some minutes on two cores

Writes results/variants.json.
"""

import tyro
from common import curve, group_by, label, load, mean, run_all, show, table, train

CELLS = [
    {"script": "reinforce_pp_tools", "flags": flags, "seed": seed}
    for flags in ({}, {"max_calls": 0})
    for seed in (1,)
]
GROUPS = ("2 numbers", "3 numbers", "4 numbers")
FIRST, LAST = slice(3), slice(-10, None)  # iterations


def measure(run_dir, script: str, flags: dict, seed: int) -> dict:
    lines, seconds = train(script, flags | {"seed": seed}, run_dir)
    evaluations = [line for line in lines if "eval/score/2 numbers" in line]
    held_out = {group: round(evaluations[-1][f"eval/score/{group}"], 4) for group in GROUPS}
    return {"seconds": seconds, "held_out": held_out} | {
        key: curve(lines, key) for key in ("score", "calls", "kl")
    }


def summary() -> None:
    """Print a row for each setting."""
    rows = []
    for (name,), runs in group_by(load("variants")["runs"], label).items():
        cells = [
            show([mean(run[key][part]) for run in runs])
            for key in ("score", "calls")
            for part in (FIRST, LAST)
        ]
        cells += [show([run["held_out"][group] for run in runs]) for group in GROUPS]
        rows.append([name, *cells])
    heads = ["", "sampled, first 3", "last 10", "calls per response, first 3", "last 10"]
    table([*heads, *(f"greedy, {group}" for group in GROUPS)], rows)


def main() -> None:
    run_all("variants", CELLS, measure)
    summary()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
