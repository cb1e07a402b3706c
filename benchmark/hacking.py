"""Reward hacking to watch: every policy script against the toy's reward model, the true accuracy beside it.

    python benchmark/hacking.py                            everything: some 20 minutes on two cores
    python benchmark/hacking.py --no_run                   only draws and tabulates the committed results again
    python benchmark/hacking.py --scripts grpo --betas 0   some of it; what results/hacking.json has is kept

toy/reward_model is a good judge and an imperfect one: it has learned that worked-out answers are better, and
never checks the sums. A policy is trained on its score (`--reward`), and the rule judges greedy responses to
held-out prompts (`--eval_reward exact_answer`). At beta 0 runs have `--kl_coef 1e-9`, so that the KL is logged.

Writes results/hacking.json (every curve, with command, machine and versions), results/hacking.md, docs/hacking.png.
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
from toy_seeds import POLICY_SCRIPTS, processor

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results" / "hacking.json"
KEYS = ["score", "kl", "response_length"]
SCRIPTS = tuple(x for x in POLICY_SCRIPTS if "\n    kl_coef: float" in (ROOT / f"{x}.py").read_text())
EVERY = 5  # iterations between evaluations


@dataclass
class Args:
    scripts: tuple[str, ...] = SCRIPTS
    """Which scripts, by name; by default those with a KL term."""
    betas: tuple[float, ...] = (0.0, 0.05, 1.0)
    """Which --kl_coef."""
    seeds: tuple[int, ...] = (1, 2)
    """Which seeds."""
    iterations: int = 100
    """Rollouts of 128 responses in a run."""
    workers: int = os.cpu_count() or 1
    """Runs at a time, each with one thread."""
    run: bool = True
    """Train; without it the results that lie there are drawn again."""


def train(script: str, beta: float, seed: int, iterations: int) -> dict:
    """One run and its curves."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--reward toy/reward_model --eval_reward exact_answer --kl_coef {beta or 1e-9} --seed {seed}"
        flags += f" --num_iterations {iterations} --eval_every {EVERY} --run_dir {folder}/run"
        command = [sys.executable, str(ROOT / f"{script}.py"), *flags.split()]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=env)
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").open()]
    curves = {key: [round(line[key], 4) for line in lines if key in line] for key in KEYS}
    truth = [round(line["eval/score/2-5"], 4) for line in lines if "eval/score/2-5" in line]
    return {"script": script, "beta": beta, "seed": seed, "truth": truth, **curves}


def write(results: dict) -> None:
    text = ",\n".join(json.dumps(run) for run in results["runs"])
    RESULTS.write_text(f'{{"made": {json.dumps(results["made"])},\n"runs": [\n{text}\n]}}\n')


def end(runs: list[dict], name: str) -> list[float]:
    """The last value of a run's truth, and the mean of the last 10 iterations of what is logged in each."""
    return [run[name][-1] if name == "truth" else sum(run[name][-10:]) / 10 for run in runs]


def show(values: list[float], digits: int = 2) -> str:
    return f"{sum(values) / len(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def table(results: dict) -> str:
    """A line for each script and beta: mean over the seeds, and from the lowest to the highest."""
    lines = ["| script | beta | score of the reward model | true accuracy: highest | last | KL, nats |"]
    lines.append("|---|---|---|---|---|---|")
    groups = {}
    for run in sorted(results["runs"], key=lambda run: (run["script"], run["beta"], run["seed"])):
        groups.setdefault((run["script"], run["beta"]), []).append(run)
    for (script, beta), runs in groups.items():
        best = show([max(run["truth"]) for run in runs])
        numbers = (
            f"{show(end(runs, 'score'))} | {best} | {show(end(runs, 'truth'))} | {show(end(runs, 'kl'), 1)}"
        )
        lines.append(f"| `{script}.py` | {beta:g} | {numbers} |")
    made, first = results["made"], results["runs"][0]
    seeds = sorted({run["seed"] for run in results["runs"]})
    commands = ", ".join(f"`{command}`" for command in made["commands"])
    lines += [
        "",
        f"True accuracy: greedy, on held-out chains of 2-5 numbers; {first['truth'][0]} at the start.",
    ]
    lines += ["Score and KL: means of the last 10 iterations.", ""]
    lines += [f"Made by {commands}: {len(first['score'])} iterations, seeds {seeds};"]
    lines += [f"{made['machine']}, {made['versions']}."]
    return "\n".join(lines) + "\n"


def draw(results: dict) -> None:
    """Score of the reward model and true accuracy of reinforce_pp.py, against iterations and against the KL."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.2), constrained_layout=True)
    runs = [run for run in results["runs"] if run["script"] == "reinforce_pp"]
    for color, beta in enumerate(sorted({run["beta"] for run in runs})):
        group = [run for run in runs if run["beta"] == beta]
        style = {"color": f"C{color}", "linewidth": 1.6, "label": f"beta {beta:g}"}
        score, truth, kl = (
            [sum(values) / len(group) for values in zip(*(run[name] for run in group))]
            for name in ("score", "truth", "kl")
        )
        axes[0].plot(range(1, len(score) + 1), score, **style)
        axes[1].plot([EVERY * i for i in range(len(truth))], truth, **style)
        axes[2].plot([0.0, *kl[EVERY - 1 :: EVERY]][: len(truth)], truth, "o-", markersize=3, **style)
    titles = "score of the reward model", "true accuracy (not trained on)", "true accuracy (not trained on)"
    labels = "iteration", "iteration", "KL to the start policy, nats"
    for axis, title, label in zip(axes, titles, labels):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(label)
        axis.grid(alpha=0.25)
    axes[2].set_xscale("function", functions=(lambda x: x.clip(0) ** 0.5, lambda x: x**2))
    axes[0].legend(frameon=False, loc="lower right", fontsize=9)
    figure.savefig(ROOT / "docs" / "hacking.png", dpi=110)


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
        cells = [
            (script, beta, seed) for script in args.scripts for beta in args.betas for seed in args.seeds
        ]
        have = {(run["script"], run["beta"], run["seed"]) for run in results["runs"]}
        todo = [cell for cell in cells if cell not in have]
        with ThreadPoolExecutor(args.workers) as pool:
            for run in pool.map(lambda cell: train(*cell, args.iterations), todo):
                results["runs"].append(run)
                write(results)
                print(run["script"], run["beta"], run["seed"], f"truth {run['truth'][-1]}", flush=True)
    RESULTS.with_suffix(".md").write_text(table(results))
    draw(results)
    print(table(results))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, use_underscores=True))
