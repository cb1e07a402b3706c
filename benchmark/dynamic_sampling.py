"""dapo.py's dynamic sampling against grpo.py, where most groups teach nothing, at equal numbers of generated tokens.

    python benchmark/dynamic_sampling.py               nine runs: some five minutes on two cores
    python benchmark/dynamic_sampling.py --no_run      only draws and tabulates the committed results again

The toy's prompts with another reward: 35 % of them are scored 1 whatever the response, 35 % are scored 0, as prompts
that are solved or out of reach, and 30 % by the rule. So 70 % of the groups have equal scores from the start. What is
compared is the sampled accuracy on the prompts of the rule, against all tokens that were generated, those of groups
that were left out included. dapo.py runs with and without its dynamic sampling, both without the overlong penalty.

Writes results/dynamic_sampling.json, results/dynamic_sampling.md and docs/dynamic_sampling.png.
"""

import importlib
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
RESULTS = ROOT / "benchmark" / "results" / "dynamic_sampling.json"
# label: script, flags; iterations such that all generate about as many tokens
RUNS = {
    "grpo.py": ("grpo", {"num_iterations": 160}),
    "dapo.py": ("dapo", {"num_iterations": 45, "overlong_buffer": 0}),
    "dapo.py, max_rollouts 1": ("dapo", {"num_iterations": 160, "overlong_buffer": 0, "max_rollouts": 1}),
}
BUDGETS = (50_000, 100_000, 150_000, 200_000)  # generated tokens at which accuracies are compared


@dataclass
class Args:
    seeds: tuple[int, ...] = (1, 2, 3)
    """Which seeds."""
    workers: int = os.cpu_count() or 1
    """Runs at a time, each with one thread."""
    run: bool = True
    """Train; without it the results that lie there are drawn again."""
    one: str = ""
    """A label and a seed: this run alone, its result to stdout."""


def score(prompts, completions, kind, answer, **columns):
    """1 for a prompt that is given, 0 for one out of reach, else by the rule."""
    texts = (text.rpartition("answer")[2].strip() for text in completions)
    right = {"given": lambda text, answer: 1.0, "out of reach": lambda text, answer: 0.0}
    rule = lambda text, answer: float(text == answer)  # noqa: E731
    return [right.get(k, rule)(text, a) for k, text, a in zip(kind, texts, answer)]


def train(label: str, seed: int) -> list[dict]:
    """A line for each iteration: tokens generated so far, right and all responses to the rule's prompts, metrics."""
    name, flags = RUNS[label]
    script = importlib.import_module(name)
    lines, now = [], {"tokens": 0}

    def watched_score(reward, tokenizer, rows, rollout, score=script.score):
        scores = score(reward, tokenizer, rows, rollout)
        now["tokens"] += int(rollout["response_mask"].sum())
        now.setdefault("rule", []).extend(x for row, x in zip(rows, scores.tolist()) if row["kind"] == "rule")
        return scores

    def watched_log(run_dir, track, iteration, metrics, *rest, log=script.log, **options):
        log(run_dir, track, iteration, metrics, *rest, **options)
        rule, few = now.pop("rule"), ("rollouts", "equal_groups", "response_length")
        lines.append({"tokens": now["tokens"], "right": sum(rule), "rows": len(rule)})
        lines[-1] |= {key: metrics[key] for key in few if key in metrics}

    script.score, script.log = watched_score, watched_log
    with tempfile.TemporaryDirectory() as folder:
        rows = [json.loads(line) for line in (ROOT / "toy" / "train.jsonl").open()]
        kinds = (["given"] * 7 + ["out of reach"] * 7 + ["rule"] * 6) * (len(rows) // 20)
        data = Path(folder, "data.jsonl")
        data.write_text("".join(json.dumps(r | {"kind": k}) + "\n" for r, k in zip(rows, kinds)))
        flags = flags | {"dataset": str(data), "reward": f"{__file__}:score", "run_dir": f"{folder}/run"}
        script.main(script.Args(seed=seed, log_every=10**6, **flags))
    return lines


def recent(lines: list[dict]) -> float:
    """The accuracy of the 200 or more responses sampled last."""
    right = rows = 0
    for line in reversed(lines):
        right, rows = right + line["right"], rows + line["rows"]
        if rows >= 200:
            break
    return right / rows


def at(lines: list[dict], tokens: int) -> float:
    """The same when so many tokens were generated."""
    return recent([line for line in lines if line["tokens"] <= tokens])


def show(values: list[float]) -> str:
    return f"{sum(values) / len(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def table(results: dict) -> str:
    heads = " | ".join(f"{budget:,}" for budget in BUDGETS)
    lines = [
        f"| | rollouts per step | groups left out | 30 steps | {heads} |",
        "|---" * (4 + len(BUDGETS)) + "|",
    ]
    for label in RUNS:
        runs = [run["lines"] for run in results["runs"] if run["label"] == label]
        cells = [show([recent(lines[:30]) for lines in runs])]
        cells += [show([at(lines, budget) for lines in runs]) for budget in BUDGETS]
        means = ["1", ""]
        if "rollouts" in runs[0][0]:
            mean = lambda key: sum(x[key] for lines in runs for x in lines) / sum(map(len, runs))  # noqa: B023, E731
            means = [f"{mean('rollouts'):.2f}", f"{mean('equal_groups'):.2f}"]
        lines.append(f"| `{label}` | {' | '.join(means)} | {' | '.join(cells)} |")
    seeds = sorted({run["seed"] for run in results["runs"]})
    lines += [
        "",
        "Sampled accuracy on the prompts of the rule, after 30 steps and so many generated tokens: mean over the",
    ]
    lines += [f"seeds {seeds} (lowest-highest). Made by `{results['command']}` on {results['machine']}."]
    return "\n".join(lines) + "\n"


def draw(results: dict) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.4, 3.4), constrained_layout=True)
    for color, label in enumerate(RUNS):
        runs = [run["lines"] for run in results["runs"] if run["label"] == label]
        x = range(10_000, min(lines[-1]["tokens"] for lines in runs), 2_000)
        curves = [[at(lines, tokens) for tokens in x] for lines in runs]
        axis.plot(x, [sum(y) / len(y) for y in zip(*curves)], color=f"C{color}", label=label)
        axis.fill_between(
            x, [*map(min, zip(*curves))], [*map(max, zip(*curves))], color=f"C{color}", alpha=0.15
        )
    axis.set_xlabel("generated tokens")
    axis.set_ylabel("sampled accuracy, prompts of the rule")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, loc="lower right")
    figure.savefig(ROOT / "docs" / "dynamic_sampling.png", dpi=110)


def main(args: Args) -> None:
    if args.one:
        label, _, seed = args.one.rpartition(":")
        return print(json.dumps(train(label, int(seed))))
    if args.run:

        def run(cell: tuple) -> dict:
            label, seed = cell
            command = [sys.executable, __file__, "--one", f"{label}:{seed}"]
            env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            output = subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout
            lines = json.loads(output.splitlines()[-1])
            print(label, seed, lines[-1], flush=True)
            return {"label": label, "seed": seed, "lines": lines}

        with ThreadPoolExecutor(args.workers) as pool:
            runs = [*pool.map(run, [(label, seed) for label in RUNS for seed in args.seeds])]
        versions = ", ".join(
            f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers")
        )
        machine = f"{os.cpu_count()} cores, {processor()}, {versions}"
        command = " ".join(["python benchmark/dynamic_sampling.py", *sys.argv[1:]])
        RESULTS.write_text(json.dumps({"command": command, "machine": machine, "runs": runs}) + "\n")
    results = json.loads(RESULTS.read_text())
    RESULTS.with_suffix(".md").write_text(table(results))
    draw(results)
    print(table(results))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
