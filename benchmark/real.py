"""A model with 135 M parameters learns to reverse lists of words: the demonstration of `make real`, and all scripts.

    python benchmark/real.py --demo                              rloo.py once, with what it prints; no result file
    python benchmark/real.py --scripts grpo rloo --seeds 1 2     adds runs to results/real.json, and tabulates
    python benchmark/real.py --no_run                            only tabulates the committed results again

Needs data/smollm2 and data/reversal, which data/smollm2.py and data/reversal.py write; `make real` does all of it. Each
script gets the same flags, less those that it does not have. Runs that results/real.json has are kept, so that an
interrupted benchmark goes on.
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
from toy_seeds import POLICY_SCRIPTS, processor

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results" / "real.json"
FLAGS = """--model data/smollm2 --dataset data/reversal/train.jsonl --eval_dataset data/reversal/test.jsonl
--batch_size 32 --samples_per_prompt 8 --max_response_length 16 --micro_batch_size 16 --num_minibatches 1
--learning_rate 1e-5 --warmup_iterations 2 --kl_coef 0.001 --num_iterations 20 --eval_every 1000 --log_every 5
--save_every 0"""


@dataclass
class Args:
    demo: bool = False
    """Run rloo.py once and show its table and its responses before and after."""
    scripts: tuple[str, ...] = POLICY_SCRIPTS
    """Which scripts, by name."""
    seeds: tuple[int, ...] = (1,)
    """Which seeds."""
    run: bool = True
    """Train; without it the results that lie there are tabulated again."""


def command_of(script: str, seed: int, run_dir: str) -> list[str]:
    """The command line, without flags that the script does not have."""
    words, source = FLAGS.split(), (ROOT / f"{script}.py").read_text()
    pairs = [pair for pair in zip(words[::2], words[1::2]) if f"\n    {pair[0][2:]}: ClassVar" not in source]
    if script in ("reinforce", "reinforce_pp", "ppo", "remax"):  # one response per prompt
        pairs.remove(("--samples_per_prompt", "8"))
    return ["python", f"{script}.py", *sum(pairs, ()), "--seed", str(seed), "--run_dir", run_dir]


def train(command: list[str], **options) -> float:
    """Seconds of the run."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *command[1:]], cwd=ROOT, check=True, **options)
    return time.perf_counter() - began


def read(run_dir: Path) -> tuple[list[dict], list[dict], list[dict]]:
    """Lines of the iterations, of the evaluations, and samples of the evaluations."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    evaluations = [line for line in lines if any(key.startswith("eval/") for key in line)]
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").open()]
    last = lines[-1]["iteration"]
    first = [sample for sample in samples if sample["iteration"] == 0]
    return (
        [x for x in lines if "score" in x],
        evaluations,
        first + [x for x in samples if x["iteration"] == last][-3:],
    )


def held_out(evaluations: list[dict]) -> list[str]:
    """A table: greedy accuracy of each group before and after."""
    before, after = evaluations[0], evaluations[-1]
    lines = ["| held out, greedy | before | after |", "|---|---|---|"]
    groups = [key for key in before if key.startswith("eval/score/")]
    return lines + [
        f"| {key.removeprefix('eval/score/')} | {before[key]:.2f} | {after[key]:.2f} |" for key in groups
    ]


def demo() -> None:
    run_dir = f"runs/real__{time.strftime('%Y%m%d-%H%M%S')}"
    command = command_of("rloo", 1, run_dir)
    print(" ".join(command), flush=True)
    seconds = train(command)
    _, evaluations, samples = read(ROOT / run_dir)
    print(f"\n{seconds / 60:.1f} minutes\n", *held_out(evaluations), sep="\n")
    for when, part in (("before", samples[:3]), ("after", samples[3:])):
        print(f"\n{when}:", *(f"    {x['prompt'][-1]['content']} -> {x['response']}" for x in part), sep="\n")


def table(results: dict) -> str:
    groups = [key for key in results["runs"][0]["evaluations"][0] if key.startswith("eval/score/")]
    names = " | ".join(key.removeprefix("eval/score/") for key in groups)
    lines = [f"| script | seed | sampled, first and last 3 iterations | {names} | KL | tokens | minutes |"]
    lines.append("|---|---|---|" + "---|" * (len(groups) + 3))
    for run in sorted(results["runs"], key=lambda run: (run["script"], run["seed"])):
        first, last = (sum(part) / 3 for part in (run["score"][:3], run["score"][-3:]))
        before, *_, after = run["evaluations"]
        cells = " | ".join(f"{before[key]:.2f} → {after[key]:.2f}" for key in groups)
        kl = f"{run['kl'][-1]:.2f}" if run["kl"] else ""
        cells += f" | {kl} | {run['tokens']:.0f} | {run['seconds'] / 60:.1f}"
        lines.append(f"| `{run['script']}.py` | {run['seed']} | {first:.2f} → {last:.2f} | {cells} |")
    lines += [
        "",
        f"Greedy on 32 held-out prompts each, before and after; flags: `{' '.join(FLAGS.split())}`.",
    ]
    lines += [f"{results['machine']}."]
    return "\n".join(lines) + "\n"


def main(args: Args) -> None:
    for name in ("smollm2", "reversal"):
        if not (ROOT / "data" / name).exists() and (args.run or args.demo):
            sys.exit(f"error: no data/{name}; run python data/{name}.py, or make real")
    if args.demo:
        return demo()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"runs": []}
    have = {(run["script"], run["seed"]) for run in results["runs"]}
    cells = [(script, seed) for seed in args.seeds for script in args.scripts if (script, seed) not in have]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    for script, seed in cells if args.run else ():
        with tempfile.TemporaryDirectory() as folder:
            seconds = train(command_of(script, seed, f"{folder}/run"), stdout=subprocess.DEVNULL)
            lines, evaluations, samples = read(Path(folder, "run"))
        run = {"script": script, "seed": seed, "seconds": round(seconds, 1), "evaluations": evaluations}
        run["tokens"] = sum(32 * line["response_length"] * line.get("rollouts", 1) for line in lines)
        run["score"] = [line["score"] for line in lines]
        run |= {"kl": [line["kl"] for line in lines if "kl" in line], "samples": samples}
        results["runs"].append(run)
        results["machine"] = f"{os.cpu_count()} cores, {processor()}, {versions}"
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(script, seed, *held_out(evaluations)[2:], flush=True)
    RESULTS.with_suffix(".md").write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
