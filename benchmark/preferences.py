"""The same preference pairs in two ways: dpo.py on them, and reinforce_pp.py against a reward model of them.

    python benchmark/preferences.py               some five minutes on two cores
    python benchmark/preferences.py --no_run      only tabulates the committed results again

dpo.py learns from toy/preferences_train.jsonl with several learning rates; toy/reward_model has learned from the same
pairs, and reinforce_pp.py is trained on its score, with a KL and without. The rule judges greedy responses of all to
the toy's held-out prompts; nobody is trained on it. Writes results/preferences.json and results/preferences.md.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tyro
from toy_seeds import GROUPS, processor

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results" / "preferences.json"
REWARD = "--reward toy/reward_model --eval_every 0 --num_iterations"
RUNS = (
    "dpo.py --learning_rate 2e-5",
    "dpo.py --learning_rate 5e-5",
    "dpo.py --learning_rate 1e-4",
    "dpo.py --learning_rate 2e-4",
    f"reinforce_pp.py {REWARD} 20 --kl_coef 0.05",
    f"reinforce_pp.py {REWARD} 80 --kl_coef 0.05",
    f"reinforce_pp.py {REWARD} 80 --kl_coef 0",
)


@dataclass
class Args:
    seeds: tuple[int, ...] = (1, 2, 3)
    """Which seeds."""
    workers: int = os.cpu_count() or 1
    """Runs at a time, each with one thread."""
    run: bool = True
    """Train; without it the results that lie there are tabulated again."""


def train(command: str, seed: int) -> dict:
    """The true accuracy after a run, the reward model's score of the same responses, and seconds of training."""
    script, *flags = command.split()
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:

        def run(script: str, *flags: str) -> None:
            start = [sys.executable, str(ROOT / script), *flags]
            subprocess.run(start, check=True, stdout=subprocess.DEVNULL, env=env)

        began = time.perf_counter()
        run(script, *flags, "--seed", str(seed), "--run_dir", f"{folder}/run")
        result = {"command": command, "seed": seed, "seconds": round(time.perf_counter() - began, 1)}
        for name, reward in (("accuracy", "exact_answer"), ("score", "toy/reward_model")):
            judge = f"--num_iterations 0 --reward {reward} --run_dir {folder}/{name}"
            run("grpo.py", "--model", f"{folder}/run/model", *judge.split())
            line = json.loads(Path(folder, name, "metrics.jsonl").read_text().splitlines()[0])
            result[name] = {group: line[f"eval/score/{group}"] for group in GROUPS}
    print(command, seed, result["accuracy"], flush=True)
    return result


def table(results: dict) -> str:
    lines = [
        "| | accuracy on 2-5 | 6 | 8 | score of the reward model, 2-5 | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for command in RUNS:
        runs = [run for run in results["runs"] if run["command"] == command]
        columns = [[run["accuracy"][group] for run in runs] for group in GROUPS]
        columns.append([run["score"]["2-5"] for run in runs])
        cells = [f"{sum(x) / len(x):.2f} ({min(x):.2f}-{max(x):.2f})" for x in columns]
        seconds = sum(run["seconds"] for run in runs) / len(runs)
        lines.append(f"| `{command}` | {' | '.join(cells)} | {seconds:.0f} |")
    seeds = sorted({run["seed"] for run in results["runs"]})
    lines += [
        "",
        f"Greedy, held out; mean over the seeds {seeds} (lowest-highest). Made by `{results['made']}` on",
    ]
    lines += [f"{results['machine']}."]
    return "\n".join(lines) + "\n"


def main(args: Args) -> None:
    if args.run:
        with ThreadPoolExecutor(args.workers) as pool:
            cells = [(command, seed) for command in RUNS for seed in args.seeds]
            runs = [*pool.map(lambda cell: train(*cell), cells)]
        versions = ", ".join(
            f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers")
        )
        machine = f"{os.cpu_count()} cores, {processor()}, {args.workers} runs at a time, {versions}"
        made = " ".join(["python benchmark/preferences.py", *sys.argv[1:]])
        text = ",\n".join(map(json.dumps, runs))
        text = f'{{"made": {json.dumps(made)}, "machine": {json.dumps(machine)}, "runs": [\n{text}\n]}}\n'
        RESULTS.write_text(text)
    results = json.loads(RESULTS.read_text())
    RESULTS.with_suffix(".md").write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
