"""Experiments on the toy: which runs to train, and the columns of a table.

    python experiments/toy.py hacking            trains the runs that have no row yet, and prints the table

A page prints `table("hacking")`. A row contains the numbers of its columns, and curves if a picture needs them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from typing import Literal

import common
import tyro
from common import POLICY_SCRIPTS, curve, defaults, group_by, label, load, mean, show, train

BATCH = 128  # responses of an iteration
CHAINS = ("greedy 2-5", "greedy 6", "greedy 8")  # held-out chains by their length


@dataclass(frozen=True)
class Experiment:
    runs: list[tuple]  # script and flags
    seeds: int
    columns: dict[str, Callable]  # by its head, the number of a run, which a row keeps
    shared: dict = field(default_factory=dict)  # flags of all runs whose script has them
    line: Callable = label  # runs with the same text share a line
    split: tuple[str, dict] = ("", {"": None})  # a flag and its values by their names: columns for each value
    drawn: str = ""  # the script whose curves a row keeps for experiments/pictures.py
    change: Callable | None = None  # edits the source of a script


def last(count: int, *keys: str) -> dict[str, Callable]:
    return {f"{key}, last {count}": lambda run, key=key: mean(run[key][-count:]) for key in keys}


def final(*keys: str) -> dict[str, Callable]:
    return {key: lambda run, key=key: run[key][-1] for key in keys}


def after_tokens(budget: int, run: dict) -> float:
    """The mean score of five iterations, the last of which reaches this number of generated tokens."""
    totals = [BATCH * total for total in accumulate(run["response_length"])]
    end = next((i for i, total in enumerate(totals) if total >= budget), len(totals) - 1)
    return mean(run["score"][max(0, end - 4) : end + 1])


# --- the experiments ---

EXPERIMENTS = {}

EXPERIMENTS["toy_seeds"] = Experiment(
    [*((script, {}) for script in POLICY_SCRIPTS), ("raft", {"num_iterations": 160})],
    seeds=5,
    columns=last(10, "score") | final(*CHAINS),
)

MODEL = {"reward": "toy/reward_model"}
BETAS = {"β = 0": 1e-9, "β = 0.05": 0.05, "β = 1": 1.0}  # 1e-9, so that the KL is logged
WITH_KL = sorted(script for script in POLICY_SCRIPTS if "kl_coef" in defaults(script))
EXPERIMENTS["hacking"] = Experiment(
    [(script, {"kl_coef": beta}) for script in WITH_KL for beta in BETAS.values()],
    seeds=1,
    columns=final("greedy 2-5") | last(10, "kl"),
    line=lambda run: f"`{run['script']}.py`",
    split=("kl_coef", BETAS),
    shared=MODEL | {"eval_reward": "exact_answer", "eval_every": 5, "num_iterations": 100},
    drawn="reinforce_pp",
)

# Distillation on the sampled token or on the whole vocabulary. The default of gkd.py is --beta 0.5.
BUDGETS = {f"{n} k tokens": partial(after_tokens, 1000 * n) for n in (25, 50, 100)}
GKD = [("gkd", flags) for flags in ({"beta": 0.0}, {}, {"beta": 1.0}, {"beta": 1.0, "top_k": 2})]
EXPERIMENTS["divergences"] = Experiment(
    [("distill", {}), *GKD], seeds=5, columns=BUDGETS | last(10, "score") | final("greedy 2-5", "greedy 8")
)

# Scores for the answer only, for each right step, or for each true equation
STEPS = [("reinforce_pp_process", {"reward": f"toy/steps.py:{x}_steps"}) for x in ("right", "true")]
EXPERIMENTS["process"] = Experiment(
    [("reinforce_pp", {}), *STEPS],
    seeds=5,
    columns=final(*CHAINS) | last(10, "response_length", "kl"),
    shared={"eval_reward": "exact_answer"},
)

SUMS = ("greedy 2 numbers", "greedy 3 numbers", "greedy 4 numbers")  # held-out sums for the calculator
EXPERIMENTS["tools"] = Experiment(
    [("reinforce_pp_tools", flags) for flags in ({}, {"max_calls": 0})],
    seeds=3,
    columns=last(10, "score", "calls", "response_length") | final(*SUMS),
)

# The share of optimizer steps whose gradient norm is above --max_grad_norm. The scripts log the mean norm.
NORMS = '"grad_norm": float(sum(grad_norms)) / len(grad_norms),'
CLIPPED = '"norm_clipped": sum(float(x > args.max_grad_norm) for x in grad_norms) / len(grad_norms),'
EXPERIMENTS["norms"] = Experiment(
    [(script, {}) for script in POLICY_SCRIPTS],
    seeds=1,
    columns={"steps clipped": lambda run: mean(run["norm_clipped"])},
    shared={"num_iterations": 40, "eval_every": 0},
    change=lambda source: source.replace(NORMS, f"{NORMS} {CLIPPED}"),
)

# --- training, tables ---


def measure(experiment, run_dir: Path, script: str, flags: dict, seed: int) -> dict:
    shared = {name: value for name, value in experiment.shared.items() if name in defaults(script)}
    flags = shared | flags | {"seed": seed, "log_every": 10**6}
    lines = train(script, flags, run_dir, experiment.change)
    run = {key.replace("eval/score/", "greedy "): curve(lines, key) for key in lines[-1]}
    row = {head: round(number(run), 6) for head, number in experiment.columns.items()}
    for key in ("score", "kl", "greedy 2-5") if script == experiment.drawn else ():
        row[f"{key} curve"] = [float(f"{x:.3g}") for x in run[key]]
    return row


def table(name: str) -> None:
    """Print a line for each setting, with the mean, the lowest and the highest of its seeds."""
    experiment, rows = EXPERIMENTS[name], load(name)
    flag, values = experiment.split
    columns = list(product(values, experiment.columns))
    lines = []
    for text, runs in group_by(rows, experiment.line).items():
        lines.append([text])
        for value, head in columns:
            lines[-1].append(show([run[head] for run in runs if run["flags"].get(flag) == values[value]]))
    common.table(["", *(f"{value}: {head}" if value else head for value, head in columns)], lines, rows)


def main(name: tyro.conf.Positional[Literal[tuple(EXPERIMENTS)]]) -> None:
    experiment = EXPERIMENTS[name]
    runs = product(experiment.runs, range(1, experiment.seeds + 1))
    cells = [{"script": script, "flags": flags, "seed": seed} for (script, flags), seed in runs]
    common.run_all(name, cells, partial(measure, experiment))
    table(name)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
