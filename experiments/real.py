"""SmolLM2-135M learns to reverse lists of words: the demonstration of `make real`, and three policy scripts.

    python experiments/real.py --demo        rloo.py once: its command, accuracy and responses before and after
    python experiments/real.py               train, draw and print the tables: an hour on two cores

Needs data/smollm2 and data/reversal, which data/smollm2.py and data/reversal.py write; `make real` does all of it.
"""

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import common
import plot
import tyro
from common import ROOT, group_by, label, load, read_jsonl, show, table

FLAGS = {"dataset": "data/reversal/train.jsonl", "eval_dataset": "data/reversal/test.jsonl"}
FLAGS |= {"model": "data/smollm2", "reward": "data/reversal.py:score", "max_response_length": 16}
FLAGS |= {"batch_size": 32, "samples_per_prompt": 8, "micro_batch_size": 16, "num_minibatches": 1}
FLAGS |= {"learning_rate": 1e-5, "warmup_iterations": 2, "num_iterations": 20}
FLAGS |= {"eval_every": 1000, "log_every": 5, "save_every": 0}  # of every run; a cell has further ones
DEMO = {"kl_coef": 0.3}  # of `make real`: large enough to keep the answers to plain questions
SHORT = {"kl_coef": 0.001, "num_iterations": 12}  # of the tables of scripts and of LoRA

RUNS = [("rloo", 1, {"kl_coef": beta}) for beta in (0.001, 0.3)]
RUNS += [("grpo_lora", 1, SHORT | {"learning_rate": 1e-4})]
RUNS += [(script, 1, SHORT) for script in ("grpo", "reinforce_pp", "rloo")]
CELLS = [dict(zip(("script", "seed", "flags"), run)) for run in RUNS]


@dataclass
class Args:
    demo: bool = False  # run rloo.py once, and print its accuracy and its responses before and after


def all_flags(script: str, seed: int, flags: dict) -> dict:
    """The flags of a run. A script whose default is one response per prompt keeps it."""
    defaults = common.defaults(script)
    left_out = {"kl_coef", "num_minibatches"} - defaults.keys()  # some scripts do not have these
    if defaults["samples_per_prompt"] == "1":
        left_out.add("samples_per_prompt")
    flags = FLAGS | flags | {"seed": seed}
    return {name: value for name, value in flags.items() if name not in left_out}


def read(run_dir: Path) -> dict:
    """The evaluations of a run, and the samples of the first and of the last."""
    metrics, samples = (read_jsonl(run_dir / f"{name}.jsonl") for name in ("metrics", "samples"))
    evaluations = [line for line in metrics if "eval/score/plain questions" in line]
    return {"evaluations": evaluations, "samples": samples[:3] + samples[-3:]}


def measure(run_dir: Path, script: str, seed: int, flags: dict) -> dict:
    lines = common.train(script, all_flags(script, seed, flags), run_dir)
    return {key: common.curve(lines, key, 6) for key in ("score", "kl", "entropy")} | read(run_dir)


def held_out(run: dict) -> dict[str, tuple[float, float]]:
    """Greedy accuracy before and after the run, by group of held-out prompts."""
    before, *_, after = run["evaluations"]
    names = [name for name in before if name.startswith("eval/score/")]
    return {name.removeprefix("eval/score/"): (before[name], after[name]) for name in names}


def print_run(run: dict) -> None:
    """Print accuracy and responses before and after a run."""
    print(f"{'held out, greedy':20}before  after")
    for name, (before, after) in held_out(run).items():
        print(f"{name:20}{before:.2f}    {after:.2f}")
    for i, sample in enumerate(run["samples"]):
        if i % 3 == 0:
            print("\nafter:" if i else "\nbefore:")
        print(f"    {sample['prompt'][-1]['content']} -> {sample['response']}")


def runs_of(flags: dict) -> list[dict]:
    """The committed runs with exactly these flags."""
    return [run for run in load("real") if run["flags"] == flags]


def demo() -> None:
    run_dir = f"runs/real__{time.strftime('%Y%m%d-%H%M%S')}"
    words = ["rloo.py", *common.flags_of("rloo", all_flags("rloo", 1, DEMO) | {"run_dir": run_dir})]
    print("python", *words, flush=True)
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True)
    print_run(read(ROOT / run_dir))


def demo_output() -> None:
    """Print what `make real` prints of the committed run."""
    [run] = runs_of(DEMO)
    print("\n```")
    print_run(run)
    print("```\n")
    common.print_provenance([run])


def print_lines(runs: list[dict], name) -> None:
    """Print a line for each group of runs with the same name: held-out accuracy after training."""
    lines = []
    for (head,), part in group_by(runs, name).items():
        cells = [show([held_out(run)[group][1] for run in part]) for group in held_out(part[0])]
        lines.append([head, *cells])
    table(["script", *held_out(runs[0])], lines, runs)
    before = ", ".join(f"{before:.2f} on {name}" for name, (before, _) in held_out(runs[0]).items())
    print(f"Before training: {before}.\n")


def summary() -> None:
    """Print a line for each script."""
    print_lines(runs_of(SHORT), lambda run: f"`{run['script']}.py`")


def plain_questions() -> None:
    """Print a line for each KL coefficient of rloo.py in float32."""
    print_lines(runs_of({"kl_coef": 0.001}) + runs_of(DEMO), label)


def lora() -> None:
    """Print a line for grpo.py, and one for grpo_lora.py."""
    runs = [run for run in load("real") if run["script"] in ("grpo", "grpo_lora")]
    rates = {run["script"]: (FLAGS | run["flags"])["learning_rate"] for run in runs}
    print_lines(runs, lambda run: f"`{run['script']}.py --learning_rate {rates[run['script']]:g}`")


def draw() -> None:
    """Draw the runs of the table of all scripts."""
    groups = {}
    for (script,), runs in group_by(runs_of(SHORT), "script").items():
        groups[script] = [common.plot_rows(run, "score", "kl", "entropy") for run in runs]
    plot.draw(groups, ROOT / "docs" / "real.png", columns=3)


def main(args: Args) -> None:
    if args.demo:
        demo()
    else:
        common.run_all("real", CELLS, measure)
        draw()
        summary()
        plain_questions()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, use_underscores=True))
