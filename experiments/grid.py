"""Six advantages with four losses on the toy: the papers' controlled comparison.

    python experiments/grid.py        trains the runs that have no row yet, seed by seed, and prints the tables

All runs have one k, no KL, and two optimizer steps per rollout, also with a loss that has no ratio.
"""

import importlib.util
import os
from itertools import product
from pathlib import Path

import common
import sync
import tyro
from common import ROOT, mean
from mix import mixed

ADVANTAGES = ("reinforce", "rloo", "dr_grpo", "reinforce_pp_baseline", "grpo", "remax")
LOSSES = {"rloo": "sum, no ratio", "reinforce_pp": "token mean", "gdpo": "1/T", "gspo": "gspo"}
RATES = (2e-4, 5e-4)
SEEDS = 5
FLAGS = {"device": "cpu", "samples_per_prompt": 8, "num_iterations": 40, "max_grad_norm": 1.0}
FLAGS |= {"eval_every": 0, "log_every": 0, "save_every": 0}


def measure(run_dir: Path, seed: int, learning_rate: float, advantage: str, loss: str) -> dict:
    """Train in this process, and keep the norm of each step's gradient."""
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
    script.say = script.say_result = lambda *given: None
    args = script.Args(**FLAGS, learning_rate=learning_rate, seed=seed, run_dir=str(run_dir))
    vars(args).update(kl_coef=0.0, num_minibatches=2)  # also where the script fixes them
    script.main(args)
    lines = common.read_jsonl(run_dir / "metrics.jsonl")
    score = [line["score"] for line in lines]
    return {
        "score": round(mean(score), 6),
        "score, last 10": round(mean(score[-10:]), 6),
        "norm clipped": round(mean(norm > args.max_grad_norm for norm in norms), 6),
        "ratio clipped": round(mean(line.get("clip_fraction", 0.0) for line in lines), 6),
    }


def main() -> None:
    os.chdir(ROOT)  # the scripts find the toy from here
    names = ("seed", "learning_rate", "advantage", "loss")
    cells = [dict(zip(names, x)) for x in product(range(1, SEEDS + 1), RATES, ADVANTAGES, LOSSES)]
    common.run_all("grid", cells, measure, workers=1)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
