"""reinforce_pp_tools.py on its toy, with the calculator and without it; speed and memory of grpo_vllm.py.

    python experiments/variants.py               train and print the table: some minutes on two cores
    python experiments/variants.py --vllm        SmolLM2-135M with and without vLLM, after make real and make test-vllm

Writes results/variants.json, or results/variants_vllm.json. Both scripts run in the environment of vLLM. The first
iteration, in which vLLM compiles, does not count.
"""

import os
import subprocess
import sys
from dataclasses import dataclass

import tyro
from common import (
    RESULTS,
    ROOT,
    curve,
    flags_of,
    group_by,
    label,
    load,
    mean,
    read_metrics,
    run_all,
    show,
    table,
    train,
)
from memory import REAL

CELLS = [
    {"script": "reinforce_pp_tools", "flags": flags, "seed": seed}
    for flags in ({}, {"max_calls": 0})
    for seed in (1,)
]
GROUPS = ("2 numbers", "3 numbers", "4 numbers")
FIRST, LAST = slice(3), slice(-10, None)  # iterations
VLLM_CELLS = [
    {"script": script, "flags": {"max_response_length": length}, "seed": seed}
    for seed in (1, 2)
    for length in (16, 128)
    for script in ("grpo", "grpo_vllm")
]


@dataclass
class Args:
    vllm: bool = False
    """Measure grpo_vllm.py instead."""


def measure(run_dir, script: str, flags: dict, seed: int) -> dict:
    lines, seconds = train(script, flags | {"seed": seed}, run_dir)
    evaluations = [line for line in lines if "eval/score/2 numbers" in line]
    held_out = {group: round(evaluations[-1][f"eval/score/{group}"], 4) for group in GROUPS}
    return {"seconds": seconds, "held_out": held_out} | {
        key: curve(lines, key) for key in ("score", "calls", "kl")
    }


def summary() -> None:
    """Print a row for each setting."""
    rows = []
    for (name,), runs in group_by(load("variants")["runs"], label).items():
        cells = [
            show([mean(run[key][part]) for run in runs])
            for key in ("score", "calls")
            for part in (FIRST, LAST)
        ]
        cells += [show([run["held_out"][group] for run in runs]) for group in GROUPS]
        rows.append([name, *cells])
    heads = ["", "sampled, first 3", "last 10", "calls per response, first 3", "last 10"]
    table([*heads, *(f"greedy, {group}" for group in GROUPS)], rows)


def measure_vllm(run_dir, script: str, flags: dict, seed: int) -> dict:
    """Tokens per second of whole iterations, and the peak memory of the process."""
    flags = REAL | {"num_iterations": 5} | flags | {"seed": seed, "run_dir": run_dir}
    command = [ROOT / ".venv-vllm" / "bin" / "python", f"{script}.py", *flags_of(script, flags)]
    # As in memory.py: else the peak would be that of glibc's heap, which keeps memory that was freed.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, env=env)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{script}.py: exit code {process.returncode}")
    lines = read_metrics(run_dir)
    keys = ("tokens_per_second", "response_length")
    return {"gib": round(usage.ru_maxrss / 2**20, 2)} | {key: curve(lines, key, 1)[1:] for key in keys}


def vllm_summary() -> None:
    """Print a row for each script and length, or that there is no result yet."""
    if not (RESULTS / "variants_vllm.json").exists():
        print("\nSpeed and memory were not measured yet.\n")
        return
    rows = []
    for (name,), runs in group_by(load("variants_vllm")["runs"], label).items():
        speeds = [mean(run["tokens_per_second"]) for run in runs]
        lengths = [x for run in runs for x in run["response_length"]]
        rows.append([name, f"{mean(lengths):.0f}", show(speeds, 0), show([run["gib"] for run in runs], 1)])
    table(
        ["SmolLM2-135M, float32, two cores", "response length", "tokens per second", "peak memory, GiB"], rows
    )


def main(args: Args) -> None:
    if args.vllm:
        run_all("variants_vllm", VLLM_CELLS, measure_vllm, workers=1)
        vllm_summary()
    else:
        run_all("variants", CELLS, measure)
        summary()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
