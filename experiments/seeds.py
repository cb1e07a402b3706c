"""Can a few seeds tell methods apart? Compare RLOO with changes of one line, on data/unsure.py.

    python experiments/seeds.py        trains the runs that have no row yet, seed by seed, and prints the table

The table is what tools/compare.py prints for these runs.
"""

import math
import sys
from itertools import product
from pathlib import Path
from statistics import stdev

import common
import compare
import tyro
from common import ROOT, curve, load

sys.path.append(str(ROOT / "data"))

import unsure

GROUP = "(groups - others)"  # of rloo.py: each reward minus the mean of the others
METHODS = {
    "rloo": GROUP,
    "divided by the std of the group": f"({GROUP} / (groups.std(1, keepdim=True) + 1e-4))",
    "no baseline": "groups",
}
SEEDS = 4
DIFFERENCES = (0.02, 0.05, 0.1)
FLAGS = {
    "model": "data/unsure/policy",
    "dataset": "data/unsure/train.jsonl",
    "reward": "data/unsure.py:share",
}
FLAGS |= {"device": "cpu", "batch_size": 16, "num_iterations": 120, "learning_rate": 1e-4}
FLAGS |= {"eval_every": 0, "log_every": 0, "save_every": 0}


def measure(run_dir: Path, method: str, seed: int) -> dict:
    def change(source: str) -> str:
        assert source.count(GROUP) == 1
        return source.replace(GROUP, METHODS[method])

    lines = common.train("rloo", FLAGS | {"seed": seed}, run_dir, change)
    return {key: curve(lines, key, 3) for key in ("score", "kl")}


def seeds_needed(std: float, difference: float) -> int:
    """The number of seeds with which 4 of 5 studies see a difference, from the std of the differences over seeds."""
    return max(2, math.ceil((1.96 + 0.84) ** 2 * (std / difference) ** 2 + 1.96**2 / 2))


def table(rows: list[dict]) -> None:
    """Print what tools/compare.py prints for these runs, and how many seeds would show some differences."""
    groups = {method: [] for method in METHODS}
    for row in rows:
        metrics = {key: dict(enumerate(row[key], 1)) for key in ("score", "kl")}
        run = compare.Run(Path(), {"seed": row["seed"]}, "", metrics, len(row["score"]))
        groups[row["method"]].append(run)
    found, _ = compare.measure(groups, "score", FLAGS["num_iterations"], last=10)
    compare.print_results(found)
    lines = []
    for method in [*METHODS][1:]:
        for head, numbers in list(found.items())[:2]:
            std = stdev(compare.differences(numbers, method))
            needed = [str(seeds_needed(std, x)) for x in DIFFERENCES]
            lines.append([f"`{method}` minus `rloo`", head, f"{std:.3f}", *needed])
    common.table(["", "", "std", *(f"seeds for {x}" for x in DIFFERENCES)], lines, rows)


def main() -> None:
    if not (unsure.FOLDER / "policy").exists():
        unsure.main()
    cells = [{"method": method, "seed": seed} for seed, method in product(range(1, SEEDS + 1), METHODS)]
    common.run_all("seeds", cells, measure, workers=1)
    table(load("seeds"))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
