"""A model with 135 M parameters learns to reverse lists of words: the demonstration of `make real`, and all scripts.

    python benchmark/real.py --demo                              rloo.py once, with what it prints; no result file
    python benchmark/real.py --scripts grpo rloo --seeds 1 2     adds runs to results/real.json, and tabulates
    python benchmark/real.py --scripts rloo --extra kl_coef=0.1 kl_coef=0.3        with other flags, a run for each
    python benchmark/real.py --no-run                            only tabulates and draws the committed results again

Needs data/smollm2 and data/reversal, which data/smollm2.py and data/reasoning.py write; `make real` does all of it.
Each script gets the same flags, less those that it does not have. Two runs at a time, with a thread each. Runs that
results/real.json has are kept, so that an interrupted benchmark goes on.
"""

import concurrent.futures
import importlib.metadata
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import tyro
from toy_seeds import POLICY_SCRIPTS, curves, processor
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "data"), str(ROOT / "tools")]
from plot import draw  # noqa: E402
from reasoning import QUESTIONS  # noqa: E402

RESULTS = ROOT / "benchmark" / "results" / "real.json"
FLAGS = """--model data/smollm2 --dataset data/{task}/train.jsonl --eval_dataset data/{task}/test.jsonl
--reward data/reasoning.py:score --batch_size 32 --samples_per_prompt 8 --max_response_length 16
--micro_batch_size 16 --num_minibatches 1 --learning_rate 1e-5 --warmup_iterations 2
--num_iterations 20 --eval_every 1000 --log_every 5 --save_every 0"""

SETTING = "dtype=bfloat16,kl_coef=0.001"  # of the table of all scripts
KEEPING = "kl_coef=0.3"  # of `make real`: with it the model remembers what it was not trained on
KEY = "script", "seed", "task", "extra"
LOADING = threading.Lock()  # from_pretrained in two threads at a time leaves tied weights random


@dataclass
class Args:
    demo: bool = False
    """Run rloo.py once and show its table and its responses before and after."""
    task: str = "reversal"
    """A task of data/reasoning.py."""
    scripts: tuple[str, ...] = POLICY_SCRIPTS
    """Which scripts, by name."""
    seeds: tuple[int, ...] = (1,)
    """Which seeds."""
    extra: tuple[str, ...] = (SETTING,)
    """Further flags, as name=value,name=value; a run for each text."""
    run: bool = True
    """Train; without it the results that lie there are tabulated and drawn again."""


def command_of(
    run_dir: str, script: str, seed: int, task: str = "reversal", extra: str = KEEPING
) -> list[str]:
    """The command line, without flags that the script does not have."""
    words, source = FLAGS.format(task=task).split(), (ROOT / f"{script}.py").read_text()
    flags = dict(zip(words[::2], words[1::2]))
    flags |= {"--" + name: value for name, value in (pair.split("=") for pair in extra.split(",") if pair)}
    if re.search(r"samples_per_prompt: int = 1\b", source):  # may have more than one, and is not meant to
        del flags["--samples_per_prompt"]
    flags |= {"--seed": str(seed), "--run_dir": run_dir}
    pairs = [pair for pair in flags.items() if f"\n    {pair[0][2:]}: ClassVar" not in source]
    return ["python", f"{script}.py", *sum(pairs, ())]


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
    command = command_of(run_dir, "rloo", 1)
    print(" ".join(command), flush=True)
    seconds = train(command)
    _, evaluations, samples = read(ROOT / run_dir)
    print(f"\n{seconds / 60:.1f} minutes\n", *held_out(evaluations), sep="\n")
    for when, part in (("before", samples[:3]), ("after", samples[3:])):
        print(f"\n{when}:", *(f"    {x['prompt'][-1]['content']} -> {x['response']}" for x in part), sep="\n")


def ask(folder: str) -> list[str]:
    """What a model answers to the ten plain questions, greedily."""
    with LOADING:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    ids = [
        model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=16, do_sample=False)
        for text in texts
    ]
    return [tokenizer.decode(x[0]).removeprefix(text) for x, text in zip(ids, texts)]


def measure(cell: tuple[str, int, str, str]) -> dict:
    """One run, with what the table and the picture need of it."""
    with tempfile.TemporaryDirectory() as folder:
        command = command_of(f"{folder}/run", *cell)
        seconds = train(command, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
        lines, evaluations, samples = read(Path(folder, "run"))
        answers = ask(f"{folder}/run/model")
    run = dict(zip(KEY, cell)) | {"seconds": round(seconds, 1)}
    size = float(command[command.index("--batch_size") + 1])
    run["tokens"] = sum(size * line["response_length"] * line.get("rollouts", 1) for line in lines)
    run["answers"] = answers
    run |= {name: [line[name] for line in lines if name in line] for name in ("score", "kl", "entropy")}
    return run | {"evaluations": evaluations, "samples": samples}


def rows_of(results: dict, task: str, among=lambda extra: True) -> list[dict]:
    runs = [run for run in results["runs"] if run["task"] == task and among(run["extra"])]
    return sorted(runs, key=lambda run: (run["script"], run["extra"], run["seed"]))


def table(runs: list[dict]) -> list[str]:
    groups = [key for key in runs[0]["evaluations"][0] if key.startswith("eval/score/")]
    names = " | ".join(key.removeprefix("eval/score/") for key in groups)
    lines = [
        f"| script, further flags | seed | sampled, first and last 3 | {names} | KL, last 3 | tokens | minutes |"
    ]
    lines.append("|---|---|---|" + "---|" * (len(groups) + 3))
    for run in runs:
        first, last = (statistics.mean(part) for part in (run["score"][:3], run["score"][-3:]))
        before, *_, after = run["evaluations"]
        cells = " | ".join(f"{before[key]:.2f} → {after[key]:.2f}" for key in groups)
        kl = f"{statistics.mean(run['kl'][-3:]):.2f}" if run["kl"] else ""
        cells += f" | {kl} | {run['tokens']:.0f} | {run['seconds'] / 60:.1f}"
        flags = run["extra"].replace(",", " ")
        lines.append(f"| `{run['script']}.py` {flags} | {run['seed']} | {first:.2f} → {last:.2f} | {cells} |")
    return lines


def report(results: dict) -> str:
    """Three tables, and what became of the plain questions."""
    lines = ["## All scripts, reversal", "", *table(rows_of(results, "reversal", lambda x: x == SETTING))]
    others = rows_of(results, "reversal", lambda x: x != SETTING)
    if others:
        lines += ["", "## Reversal with other flags", "", *table(others)]
    if rows_of(results, "largest"):
        lines += ["", "## The largest of some numbers", "", *table(rows_of(results, "largest"))]
        for run in rows_of(results, "largest"):
            scores = " ".join(f"{score:.2f}" for score in run["score"])
            lines.append(f"\n`{run['script']}.py` {run['extra'].replace(',', ' ')}: score {scores}")
    lines += [
        "",
        "## Plain questions after the run",
        "",
        "| script, further flags | answers that differ |",
        "|---|---|",
    ]
    for run in rows_of(results, "reversal"):
        answers = zip(QUESTIONS.items(), run.get("answers") or [])
        wrong = [f"{question} {said!r}" for (question, right), said in answers if right not in said]
        if run.get("answers"):
            lines.append(
                f"| `{run['script']}.py` {run['extra'].replace(',', ' ')} | {'; '.join(wrong) or 'none'} |"
            )
    lines += [
        "",
        "Held-out scores are greedy, 32 prompts of each level and 10 plain questions, before and after. Flags of",
    ]
    lines += [
        f"all runs, behind which the further ones stand: `{' '.join(FLAGS.split())}`.",
        f"{results['machine']}.",
    ]
    return "\n".join(lines) + "\n"


def main(args: Args) -> None:
    for name, script in {"smollm2": "smollm2.py", args.task: f"reasoning.py --task {args.task}"}.items():
        if not (ROOT / "data" / name).exists() and (args.run or args.demo):
            sys.exit(f"error: no data/{name}; run python data/{script}")
    if args.demo:
        return demo()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"runs": []}
    have = {tuple(run[name] for name in KEY) for run in results["runs"]}
    cells = itertools.product(args.scripts, args.seeds, [args.task], args.extra)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for run in pool.map(measure, [cell for cell in cells if cell not in have] if args.run else []):
            results["runs"].append(run)
            results["machine"] = (
                f"{os.cpu_count()} cores, {processor()}, {versions}; two runs at a time, a thread each"
            )
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            print(
                *(run[name] for name in KEY),
                *held_out(run["evaluations"])[2:],
                f"{run['seconds']:.0f} s",
                flush=True,
            )
    RESULTS.with_suffix(".md").write_text(report(results))
    groups = defaultdict(list)
    for run in rows_of(results, "reversal", lambda x: x == SETTING):
        groups[run["script"]].append(curves(run))
    draw(groups, ROOT / "docs" / "real.png", columns=3)
    print(report(results))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
