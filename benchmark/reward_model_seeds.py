"""Train the reward model on the toy over several seeds, and tabulate what it tells apart.

    python benchmark/reward_model_seeds.py       about half a minute a seed on two cores

Writes results/reward_model_seeds.json and .md.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro
from toy_seeds import processor

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results" / "reward_model_seeds.json"
COLUMNS = {
    "eval/accuracy": "held-out accuracy",
    "eval/accuracy/different style": "different style",
    "eval/accuracy/same style": "same style",
    "eval/loss": "loss",
    "eval/margin": "margin",
}


@dataclass
class Args:
    seeds: tuple[int, ...] = (1, 2, 3)
    """Which seeds."""
    flags: str = ""
    """Flags for every run, beside --seed."""


def train(seed: int, flags: str) -> dict:
    """One run: the last evaluation, and the seconds from start to exit."""
    with tempfile.TemporaryDirectory() as runs:
        script = str(ROOT / "reward_model.py")
        command = [sys.executable, script, "--seed", str(seed), "--run_dir", f"{runs}/run", *flags.split()]
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        metrics = Path(runs, "run", "metrics.jsonl")
        last = json.loads(metrics.read_text().splitlines()[-1])
    return {"seed": seed, "seconds": round(seconds, 1)} | {name: round(last[name], 4) for name in COLUMNS}


def main(args: Args) -> None:
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    made = {
        "command": " ".join(["python benchmark/reward_model_seeds.py", *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} cores, {processor()}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    runs = [train(seed, args.flags) for seed in args.seeds]
    RESULTS.write_text(json.dumps({"made": made, "runs": runs}, indent=1) + "\n")
    lines = ["| seed | " + " | ".join(COLUMNS.values()) + " | seconds |", "|---" * (len(COLUMNS) + 2) + "|"]
    for run in runs:
        numbers = " | ".join(f"{run[name]:.3f}" for name in COLUMNS)
        lines.append(f"| {run['seed']} | {numbers} | {run['seconds']:.0f} |")
    lines += ["", f"Made by `{made['command']}` on {made['machine']}, {made['versions']}."]
    RESULTS.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, use_underscores=True))
