"""Run the policy scripts on the toy over several seeds, and draw and tabulate what they reached.

    python benchmark/toy_seeds.py                          everything: some ten minutes on two cores
    python benchmark/toy_seeds.py --no_run                 only draws and tabulates the committed results again
    python benchmark/toy_seeds.py --flags="--kl_coef 0"    other settings, to a file of another --name

Writes results/<name>.json (every curve, with command, machine and versions), results/<name>.md and docs/<name>.png,
and without --name docs/scripts/<script>.png too.
"""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from plot import draw  # noqa: E402
from sync import policy_scripts  # noqa: E402

POLICY_SCRIPTS = tuple(policy_scripts())
KEYS = ["score", "kl", "response_length", "entropy", "grad_norm"]
GROUPS = ["2-5", "6", "8"]


@dataclass
class Args:
    scripts: tuple[str, ...] = POLICY_SCRIPTS
    """Which scripts, by name."""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Which seeds."""
    flags: str = ""
    """Flags for every script, beside --seed."""
    workers: int = os.cpu_count() or 1
    """Runs at a time, each with one thread."""
    name: str = "toy_seeds"
    """Name of the result files."""
    run: bool = True
    """Train; without it the results that lie there are drawn again."""


def processor() -> str:
    """The processor's name, where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def train(script: str, seed: int, flags: str) -> dict:
    """One run: its curves, its held-out results before and after, and its seconds from start to exit."""
    with tempfile.TemporaryDirectory() as runs:
        command = [
            sys.executable,
            str(ROOT / f"{script}.py"),
            "--seed",
            str(seed),
            "--run_dir",
            f"{runs}/run",
            *flags.split(),
        ]
        start = time.perf_counter()
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=env)
        seconds = time.perf_counter() - start
        metrics = Path(runs, "run", "metrics.jsonl")
        lines = [json.loads(line) for line in metrics.open()]
    curves = {key: [round(line[key], 6) for line in lines if key in line] for key in KEYS}
    held_out = {
        str(line["iteration"]): {group: round(line[f"eval/score/{group}"], 4) for group in GROUPS}
        for line in lines
        if f"eval/score/{GROUPS[0]}" in line
    }
    return {"script": script, "seed": seed, "seconds": round(seconds, 1), "held_out": held_out, **curves}


def last(curve: list[float], n: int = 10) -> float:
    """Mean over the last iterations: one batch of 128 has a standard error of up to 0.04."""
    return sum(curve[-n:]) / len(curve[-n:])


def table(results: dict) -> str:
    lines = [
        "| script | seed | sampled accuracy, training: iteration 1 / last 10 | length: iteration 1 / last 10 "
        "| greedy 2-5 | greedy 6 | greedy 8 | KL | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for run in results["runs"]:
        before, *_, after = run["held_out"].values()
        greedy = " | ".join(f"{before[group]:.2f} → {after[group]:.2f}" for group in GROUPS)
        kl = f"{last(run['kl']):.2f}" if run["kl"] else ""
        lines.append(
            f"| `{run['script']}.py` | {run['seed']} | {run['score'][0]:.2f} / {last(run['score']):.3f} "
            f"| {run['response_length'][0]:.1f} / {last(run['response_length']):.1f} | {greedy} "
            f"| {kl} | {run['seconds']:.0f} |"
        )
    made = results["made"]
    lines += ["", f"Made by `{made['command']}` on {made['machine']}, {made['versions']}."]
    return "\n".join(lines) + "\n"


def summary(results: dict) -> str:
    """A line for each script: mean over the seeds, and from the lowest to the highest."""
    lines = [
        "| script | accuracy in training, iteration 1 | last 10 iterations | length | greedy 2-5 | 6 | 8 | seconds |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for script in dict.fromkeys(run["script"] for run in results["runs"]):
        runs = [run for run in results["runs"] if run["script"] == script]

        def show(values: list[float], digits: int) -> str:
            mean = sum(values) / len(values)
            return f"{mean:.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"

        after = [list(run["held_out"].values())[-1] for run in runs]
        length = f"{sum(run['response_length'][0] for run in runs) / len(runs):.1f} → "
        length += f"{sum(last(run['response_length']) for run in runs) / len(runs):.1f}"
        first, end = [run["score"][0] for run in runs], [last(run["score"]) for run in runs]
        greedy = " | ".join(show([held_out[group] for held_out in after], 2) for group in GROUPS)
        seconds = show([run["seconds"] for run in runs], 0)
        lines.append(
            f"| `{script}.py` | {show(first, 2)} | {show(end, 3)} | {length} | {greedy} | {seconds} |"
        )
    before = next(iter(results["runs"][0]["held_out"].values()))
    greedy = ", ".join(f"{before[group]:.3f} on {group}" for group in GROUPS)
    lines += ["", f"Greedy accuracy before training: {greedy}."]
    return "\n".join(lines) + "\n"


def curves(run: dict) -> list[dict]:
    """The rows of a run, an iteration each, as tools/plot.py draws them."""
    rows = defaultdict(dict)
    for key in ("score", "kl", "response_length", "entropy"):
        for iteration, value in enumerate(run.get(key, ()), 1):
            rows[iteration] |= {"iteration": iteration, key: value}
    return [*rows.values()]


def draw_results(results: dict, name: str) -> None:
    """docs/<name>.png with all scripts; of the five seeds that the docs show, also a picture for each script."""
    groups = defaultdict(list)
    for run in results["runs"]:
        groups[run["script"]].append(curves(run))
    draw(groups, ROOT / "docs" / f"{name}.png")
    for script in groups if name == Args.name else ():
        draw({script: groups[script]}, ROOT / "docs" / "scripts" / f"{script}.png", columns=4)


def main(args: Args) -> None:
    results_path = ROOT / "benchmark" / "results" / f"{args.name}.json"
    results_path.parent.mkdir(exist_ok=True)
    if args.run:
        versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
        made = {
            "command": " ".join(["python benchmark/toy_seeds.py", *sys.argv[1:]]),
            "machine": f"{os.cpu_count()} cores, {processor()}, {args.workers} runs at a time with a thread each",
            "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        }
        runs, cells = [], [(script, seed, args.flags) for script in args.scripts for seed in args.seeds]
        with ThreadPoolExecutor(args.workers) as pool:
            for run in pool.map(lambda cell: train(*cell), cells):
                runs.append(run)
                print(run["script"], run["seed"], f"{run['seconds']} s", run["held_out"], flush=True)
        text = ",\n".join(json.dumps(run) for run in runs)
        results_path.write_text(f'{{"made": {json.dumps(made)},\n"runs": [\n{text}\n]}}\n')
    results = json.loads(results_path.read_text())
    results_path.with_suffix(".md").write_text(summary(results) + "\n" + table(results))
    draw_results(results, args.name)
    print(summary(results))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, use_underscores=True))
