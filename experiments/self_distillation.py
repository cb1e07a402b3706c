"""sdpo.py, grpo.py and distill.py from the same start, after equally many generated tokens.

    python experiments/self_distillation.py        train and print the table: 8 minutes on two cores

The start is toy/hinted, which has learned to use a demonstration, and once toy/policy, which has not.
"""

from itertools import accumulate

import tyro
from common import curve, group_by, label, load, mean, run_all, show, table, train

HINTED = {"model": "toy/hinted"}
RUNS = [("sdpo", {}), ("sdpo", {"learning_rate": 2e-4}), ("sdpo", {"model": "toy/policy"})]
RUNS += [("grpo", HINTED), ("distill", HINTED)]
CELLS = [{"script": script, "seed": seed, "flags": flags} for script, flags in RUNS for seed in (1, 2)]
BATCH = 128  # responses of an iteration
BUDGETS = (25_000, 50_000, 100_000)  # generated tokens at which accuracies are compared
KEYS = ("score", "response_length", "entropy", "grad_norm", "demonstrations")


def measure(run_dir, script: str, seed: int, flags: dict) -> dict:
    lines = train(script, flags | {"seed": seed, "log_every": 10**6}, run_dir)
    held_out = {group: round(lines[-1][f"eval/score/{group}"], 4) for group in ("2-5", "6", "8")}
    return {"held_out": held_out} | {key: curve(lines, key) for key in KEYS}


def accuracy(run: dict, budget: int) -> float:
    """The sampled accuracy of the five iterations up to the one that reaches this number of tokens."""
    totals = [BATCH * total for total in accumulate(run["response_length"])]
    last = next((i for i, total in enumerate(totals) if total >= budget), len(totals) - 1)
    return mean(run["score"][max(0, last - 4) : last + 1])


def summary() -> None:
    """Print a line for each setting: mean, lowest and highest of the seeds."""
    lines, rows = [], load("self_distillation")
    for (name,), runs in group_by(rows, label).items():
        cells = [show([mean(run["score"][:1]) for run in runs])]
        cells += [show([accuracy(run, budget) for run in runs]) for budget in BUDGETS]
        cells += [show([mean(run["score"][-10:]) for run in runs])]
        cells += [show([run["held_out"][group] for run in runs]) for group in ("2-5", "8")]
        lines.append([name, *cells])
    heads = ["", "first rollout", *(f"{budget // 1000} k tokens" for budget in BUDGETS)]
    table([*heads, "last 10 iterations", "greedy 2-5", "greedy 8"], lines, rows)


def main() -> None:
    run_all("self_distillation", CELLS, measure)
    summary()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
