"""Compare six advantages and four losses on the toy, each with each.

    python experiments/grid.py        trains the runs that have no row yet, seed by seed, and prints the tables

All runs use the same k, no KL, and two optimizer steps per rollout, even if the loss has no ratio.
"""

import importlib.util
import os
from functools import partial
from itertools import product
from pathlib import Path

import common
import sync
import tyro
from common import ROOT, group_by, load, mean
from compare import half_interval, interval
from mix import mixed

ADVANTAGES = ("reinforce", "rloo", "dr_grpo", "reinforce_pp_baseline", "grpo", "remax")
LOSSES = {"rloo": "sum, no ratio", "reinforce_pp": "token mean", "gdpo": "1/T", "gspo": "gspo"}
RATES = (2e-4, 5e-4)
SEEDS = 5
CELLS = [  # if you stop it after whole seeds, the rows are balanced
    {"seed": seed, "learning_rate": rate, "advantage": advantage, "loss": loss}
    for seed, rate, advantage, loss in product(range(1, SEEDS + 1), RATES, ADVANTAGES, LOSSES)
]
FLAGS = {"device": "cpu", "samples_per_prompt": 8, "num_iterations": 40, "max_grad_norm": 1.0}
FLAGS |= {"eval_every": 0, "log_every": 0, "save_every": 0}


def measure(run_dir: Path, seed: int, learning_rate: float, advantage: str, loss: str) -> dict:
    """Train in this process, and record the gradient norm of each step."""
    path = run_dir.parent / f"{advantage}_{loss}.py"
    path.write_text(sync.paths()[loss].read_text() if advantage == loss else mixed(advantage, [loss]))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    step, norms = script.optimizer_step, []

    def optimizer_step(*given):
        norms.append(float(step(*given)))
        return norms[-1]

    script.optimizer_step = optimizer_step
    script.say = script.say_result = lambda *given, **named: None
    args = script.Args(**FLAGS, learning_rate=learning_rate, seed=seed, run_dir=str(run_dir))
    vars(args).update(kl_coef=0.0, num_minibatches=2)  # even if the script fixes them
    script.main(args)
    lines = common.read_jsonl(run_dir / "metrics.jsonl")
    score = [line["score"] for line in lines]
    return {
        "score": round(mean(score), 6),
        "score, last 10": round(mean(score[-10:]), 6),
        "norm clipped": round(mean(norm > args.max_grad_norm for norm in norms), 6),
        "ratio clipped": round(mean(line.get("clip_fraction", 0.0) for line in lines), 6),
    }


# --- tables ---


def means(rows: list[dict], key: str = "score", **cell) -> list[float]:
    """For each seed, the mean over all rows with the given values."""
    found = [row for row in rows if cell.items() <= row.items()]
    seeds = sorted(group_by(found, lambda row: row["seed"]).items())
    return [mean(row[key] for row in runs) for _, runs in seeds]


def spread(values: list[float], others: list[float] | None = None) -> str:
    """The mean over seeds and half of its 95 % interval. With others, of the differences at the same seed.

    A star marks a difference whose interval excludes 0.
    """
    if others is not None:
        values = [] if values == others else [x - y for x, y in zip(values, others)]
    if len(values) < 2:
        return ""
    is_beyond = others is not None and abs(mean(values)) > half_interval(values)
    return f"{interval(values)}{' *' if is_beyond else ''}"


def share(rows: list[dict], key: str, **cell) -> str:
    """The mean, the lowest and the highest share of the advantages, in percent."""
    found = [mean(x) for a in ADVANTAGES if (x := means(rows, key, advantage=a, **cell))]
    return "{:.1f} % ({:.1f}-{:.1f})".format(*(100 * f(found) for f in (mean, min, max))) if found else ""


def table(rows: list[dict]) -> None:
    """Print a table for each learning rate."""
    for rate in RATES:
        lines, some = [], partial(means, rows, learning_rate=rate)
        for advantage in ADVANTAGES:
            cells = [spread(some(advantage=advantage, loss=loss)) for loss in LOSSES]
            own = some(advantage=advantage)
            lines.append([f"`{advantage}`", *cells, spread(own), spread(own, some(advantage="rloo"))])
        lines.append(["all six", *(spread(some(loss=loss)) for loss in LOSSES), "", ""])
        token_mean = some(loss="reinforce_pp")
        lines.append(["minus token mean", *(spread(some(loss=loss), token_mean) for loss in LOSSES), "", ""])
        last = (spread(some("score, last 10", loss=loss)) for loss in LOSSES)
        lines.append(["all six, last 10", *last, "", ""])
        for key in ("norm clipped", "ratio clipped"):
            cells = (share(rows, key, learning_rate=rate, loss=loss) for loss in LOSSES)
            lines.append([key, *cells, "", ""])
        common.table([f"learning rate {rate:g}", *LOSSES.values(), "mean", "minus `rloo`"], lines)
    common.print_provenance(rows)


def main() -> None:
    os.chdir(ROOT)  # the scripts find the toy from here
    common.run_all("grid", CELLS, measure, workers=1)
    table(load("grid"))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
