"""The runs, numbers, diffs and pictures of docs/learn.md.

    python experiments/learn.py           the runs that have no row yet; 12 minutes on one core
    python experiments/learn.py draw      the pictures

A row has metrics, the mean over the first and over the last third of the run, and the choices of the trained policy.
"""

from pathlib import Path

import common
import explain
from common import mean, run_all
from planted import BUGS

SHORT = {"num_iterations": 30}
STRONG = {"num_iterations": 60, "kl_coef": 1}
EPOCHS = {"num_iterations": 8, "update_epochs": 8, "learning_rate": 5e-4}
# Script, flags and a bug of tools/planted.toml, by the name that the page uses
RUNS = {
    "mean": ("reinforce", SHORT, ""),
    "ones": ("reinforce", SHORT, "weight 1 for all"),
    "score": ("reinforce", SHORT, "no baseline"),
    "low": ("reinforce", SHORT, "baseline too low"),
    "sum": ("reinforce", SHORT | {"kl_coef": 0}, ""),
    "1/T": ("flash_reinforce", SHORT, ""),
    "clip": ("dr_grpo", EPOCHS, ""),
    "no clip": ("dr_grpo", EPOCHS | {"clip_eps": 1000}, ""),
    "beta 1": ("reinforce", STRONG, ""),
    "k2": ("reinforce_pp_baseline", SHORT | {"kl_coef": 0.3}, ""),
    "k1": ("reinforce_pp_baseline", SHORT | {"kl_coef": 0.3}, "k1 for k2"),
    "whitened": ("reinforce_pp", SHORT, ""),
    "critic": ("ppo", SHORT, ""),
    "no critic": ("ppo", SHORT | {"gae_lambda": 1, "critic_learning_rate": 0}, ""),
    "critic alone": ("ppo", SHORT | {"gae_lambda": 0}, ""),
}
SEEDS = (1, 2)
KEYS = (
    "score",
    "kl",
    "response_length",
    "equal_groups",
    "clip_fraction",
    "grad_norm",
    "truncated",
    "entropy",
)


def measure(run_dir: Path, script: str, flags: dict, bug: str, seed: int) -> dict:
    flags = flags | {"seed": seed, "eval_every": 0}  # evaluations do not change the training
    lines = common.train(script, flags, run_dir, change=BUGS[bug].plant_in if bug else None)
    curves = {key: common.curve(lines, key, 6) for key in KEYS}
    n = max(1, len(lines) // 3)
    row = {key: [round(mean(part), 4) for part in (x[:n], x[-n:])] for key, x in curves.items() if x}
    return row | {"choices": explain.choices(run_dir / "model")}


def main() -> None:
    cells = []
    for script, flags, bug in RUNS.values():
        cells += [{"script": script, "flags": flags, "bug": bug, "seed": seed} for seed in SEEDS]
    run_all("learn", cells, measure, workers=1)


if __name__ == "__main__":
    main()
