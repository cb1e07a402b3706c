"""Reward hacking you can watch: every policy script against the toy's reward model, the true accuracy beside it.

    python benchmark/hacking.py                            everything: an hour or two on two cores
    python benchmark/hacking.py --no_run                   only draws and tabulates the committed results again
    python benchmark/hacking.py --scripts grpo --betas 0   some of it; what results/hacking.json has already is kept

toy/reward_model is a good judge and an imperfect one: it has learned that worked-out answers are better, and never
checks the sums. A policy that is trained on its score (`--reward`) is watched by the rule (`--monitor exact_answer`).

Writes results/hacking.json (every curve, with command, machine and versions), results/hacking.md, docs/hacking.png
(REINFORCE++) and docs/hacking_all.png (all scripts).
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tyro
from toy_seeds import processor

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results" / "hacking.json"
KEYS = ["score", "monitor_pass_rate", "kl", "response_length"]


@dataclass
class Args:
    scripts: tuple[str, ...] = ("reinforce_pp", "reinforce_pp_baseline", "rloo", "grpo", "ppo", "remax")
    """Which scripts, by name."""
    betas: tuple[float, ...] = (0.0, 0.01, 0.05, 0.2, 1.0)
    """Which --kl_coef."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Which seeds."""
    iterations: int = 100
    """Rollouts of 128 responses in a run."""
    workers: int = os.cpu_count() or 1
    """Runs at a time, each with one thread."""
    run: bool = True
    """Train; without it the results that lie there are drawn again."""


def train(script: str, beta: float, seed: int, iterations: int) -> dict:
    """One run and its curves."""
    with tempfile.TemporaryDirectory() as runs:
        flags = ["--reward", str(ROOT / "toy" / "reward_model"), "--monitor", "exact_answer", "--kl_coef", str(beta)]
        flags += ["--seed", str(seed), "--num_iterations", str(iterations), "--eval_every", "0", "--runs_dir", runs]
        command = [sys.executable, str(ROOT / f"{script}.py"), *flags]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=env)
        (metrics,) = Path(runs).glob("*/metrics.jsonl")
        lines = [json.loads(line) for line in metrics.open()]
    curves = {key: [round(line[key], 4) for line in lines if key in line] for key in KEYS}
    return {"script": script, "beta": beta, "seed": seed, **curves}


def key(run: dict) -> tuple:
    return run["script"], run["beta"], run["seed"]


def write(results: dict) -> None:
    text = ",\n".join(json.dumps(run) for run in results["runs"])
    RESULTS.write_text(f'{{"made": {json.dumps(results["made"])},\n"runs": [\n{text}\n]}}\n')


def smooth(curve: list[float], n: int = 5) -> list[float]:
    """Mean over up to n iterations: one batch of 128 responses has a standard error of up to 0.04 in accuracy."""
    return [sum(curve[max(0, i - n + 1) : i + 1]) / len(curve[max(0, i - n + 1) : i + 1]) for i in range(len(curve))]


def mean_curve(runs: list[dict], name: str) -> list[float]:
    """Mean over the seeds, smoothed."""
    return smooth([sum(values) / len(values) for values in zip(*(run[name] for run in runs))])


def table(results: dict) -> str:
    """A line for each script and beta: mean over the seeds, and from the lowest to the highest."""
    lines = ["| script | beta | score: first → last 10 | true accuracy: first | highest | last 10 | KL, last 10 |"]
    lines.append("|---|---|---|---|---|---|---|")

    def show(values: list[float], digits: int = 2) -> str:
        return f"{sum(values) / len(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"

    groups = {}
    for run in results["runs"]:
        groups.setdefault((run["script"], run["beta"]), []).append(run)
    order = list(dict.fromkeys(run["script"] for run in results["runs"]))
    for (script, beta), runs in sorted(groups.items(), key=lambda item: (order.index(item[0][0]), item[0][1])):
        end = {name: [sum(run[name][-10:]) / 10 for run in runs] for name in KEYS}
        first = {name: [run[name][0] for run in runs] for name in KEYS}
        best = [max(smooth(run["monitor_pass_rate"])) for run in runs]
        lines.append(
            f"| `{script}.py` | {beta:g} | {sum(first['score']) / len(runs):.2f} → {show(end['score'])} "
            f"| {sum(first['monitor_pass_rate']) / len(runs):.2f} | {show(best)} | {show(end['monitor_pass_rate'])} "
            f"| {show(end['kl'], 1)} |"
        )
    made = results["made"]
    commands = ", ".join(f"`{command}`" for command in made["commands"])
    count = f"{len(results['runs'][0]['score'])} iterations, seeds {sorted({run['seed'] for run in results['runs']})}"
    lines += ["", "Highest: of the means over 5 iterations in a row.", ""]
    lines += [f"Made by {commands}: {count}; {made['machine']}, {made['versions']}."]
    return "\n".join(lines) + "\n"


def summary(results: dict) -> str:
    """True accuracy and KL at the end of each script for each beta, mean over the seeds."""
    betas = sorted({run["beta"] for run in results["runs"]})
    lines = ["| script | " + " | ".join(f"β = {beta:g}" for beta in betas) + " |", "|---" * (len(betas) + 1) + "|"]
    for script in dict.fromkeys(run["script"] for run in results["runs"]):
        cells = []
        for beta in betas:
            runs = [run for run in results["runs"] if (run["script"], run["beta"]) == (script, beta)]
            accuracy, kl = (sum(sum(run[x][-10:]) / 10 for run in runs) for x in ("monitor_pass_rate", "kl"))
            cells.append(f"{accuracy / len(runs):.2f} at {kl / len(runs):.1f}" if runs else "")
        lines.append(f"| `{script}.py` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw_row(axes, runs: list[dict]) -> None:
    """Four panels: score of the reward model and true accuracy, against iterations and against KL."""
    betas = sorted({run["beta"] for run in runs})
    for color, beta in enumerate(betas):
        group = [run for run in runs if run["beta"] == beta]
        style = {"color": f"C{color}", "linewidth": 1.6, "label": f"beta {beta:g}"}
        kl = [max(0.0, x) for x in mean_curve(group, "kl")]
        for panel, name in enumerate(("score", "monitor_pass_rate")):
            curve = mean_curve(group, name)
            for axis, x in ((axes[panel], range(1, len(curve) + 1)), (axes[panel + 2], kl)):
                axis.plot(x, curve, **style)
                axis.plot(x[-1], curve[-1], "o", color=f"C{color}", markersize=4)
            for run in group:
                axes[panel].plot(
                    range(1, len(curve) + 1), smooth(run[name]), color=f"C{color}", linewidth=0.5, alpha=0.5
                )
    for axis in axes[2:]:
        axis.set_xscale("function", functions=(lambda x: x.clip(0) ** 0.5, lambda x: x**2))
        axis.set_xlim(0, None)
    for axis in axes:
        axis.grid(alpha=0.25)
    for axis in (axes[1], axes[3]):
        axis.set_ylim(0, 1.02)


def draw(results: dict) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    titles = ["score of the reward model", "true accuracy (not trained on)"] * 2
    labels = ["iteration", "iteration", "KL to the start policy, nats", "KL to the start policy, nats"]
    scripts = list(dict.fromkeys(run["script"] for run in results["runs"]))
    pictures = {"hacking": ["reinforce_pp"], "hacking_all": scripts}
    for name, shown in pictures.items():
        figure, rows = plt.subplots(
            len(shown), 4, figsize=(13, 0.6 + 2.7 * len(shown)), constrained_layout=True, squeeze=False, sharey="col"
        )
        for axes, script in zip(rows, shown):
            draw_row(axes, [run for run in results["runs"] if run["script"] == script])
            axes[0].set_ylabel(f"{script}.py")
        for axis, title in zip(rows[0], titles):
            axis.set_title(title, fontsize=10)
        for axis, label in zip(rows[-1], labels):
            axis.set_xlabel(label)
        for axes in rows:
            axes[0].legend(frameon=False, loc="lower right", fontsize=9)
        figure.savefig(ROOT / "docs" / f"{name}.png", dpi=110)
        plt.close(figure)


def main(args: Args) -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"runs": []}
    if args.run:
        versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
        command = " ".join(["python benchmark/hacking.py", *sys.argv[1:]])
        before = [text for text in results.get("made", {}).get("commands", []) if text != command]
        results["made"] = {
            "commands": [*before, command],
            "machine": f"{os.cpu_count()} cores, {processor()}, {args.workers} runs at a time with a thread each",
            "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        }
        done = {key(run) for run in results["runs"] if len(run["score"]) == args.iterations}
        work = [(script, beta, seed) for seed in args.seeds for beta in args.betas for script in args.scripts]
        order = {
            (s, b, i): n
            for n, (s, b, i) in enumerate((s, b, i) for s in args.scripts for b in args.betas for i in args.seeds)
        }
        with ThreadPoolExecutor(args.workers) as pool:
            for run in pool.map(
                lambda item: train(*item, args.iterations), [item for item in work if item not in done]
            ):
                results["runs"] = [other for other in results["runs"] if key(other) != key(run)] + [run]
                results["runs"].sort(key=lambda run: order.get(key(run), -1))
                write(results)  # after each, so that an interruption loses little
                print(
                    *key(run), f"score {run['score'][-1]:.2f}, accuracy {run['monitor_pass_rate'][-1]:.2f}", flush=True
                )
    text = (
        "True accuracy at KL in nats, means of the last 10 iterations:\n\n" + summary(results) + "\n" + table(results)
    )
    RESULTS.with_suffix(".md").write_text(text)
    draw(results)
    print(text)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, use_underscores=True))
