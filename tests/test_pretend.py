"""The scripts find a pretend accelerator by themselves, and give there the numbers that they give on the CPU.

Most of a short run is its imports, so all runs on one rank share a process, and so do those on two ranks:

    python tests/pretend.py tests/test_pretend.py RUNS.json

RUNS.json is a list of [script, flags]. An error is written next to the run's folder.
"""

import contextlib
import importlib
import json
import os
import sys
import traceback
from pathlib import Path

import pytest
import torch
from conftest import ROOT, launch, read_jsonl, write_jsonl
from soak import without_clock

POLICY = {"batch_size": 16, "max_response_length": 6, "missing_eos_penalty": 0.5, "num_iterations": 2}
STAGE = {"batch_size": 8, "lr_schedule": "constant_with_warmup", "num_epochs": 2}
CASES = {
    "grpo": POLICY | {"reward_zscore": True, "reward_clip": 1.5},
    # With a learning rate of 0: a rounding of bfloat16 in the update could change what is sampled next.
    "grpo bfloat16": POLICY | {"dtype": "bfloat16", "gradient_checkpointing": True, "learning_rate": 0.0},
    "ppo": POLICY,
    "remax": POLICY | {"reward": "toy/reward_model", "eval_reward": "exact_answer"},
    "dapo": POLICY | {"max_rollouts": 2},
    "reward_model": STAGE,
    "sft": STAGE | {"batch_size": 4, "eval_size": 4, "max_length": 20},
    "dpo": STAGE,
}


def run(script, flags):
    module = importlib.import_module(script)
    module.main(module.Args(**flags))


def main(file):
    """In a process that has the device."""
    for script, flags in json.loads(file.read_text()):
        try:
            run(script, flags)
        except BaseException:  # a SystemExit too
            Path(flags["run_dir"] + ".error").write_text(traceback.format_exc())
            if "RANK" in os.environ:
                raise  # so that torchrun stops the other rank


def launch_runs(folder, runs, ranks):
    """Returns stderr."""
    (folder / "runs.json").write_text(json.dumps(runs))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # pytest has added to it, see pyproject.toml
    files = [ROOT / "tests" / name for name in ("pretend.py", "test_pretend.py")]
    return launch(*files, "runs.json", ranks=ranks, env=env, cwd=folder).stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder whose toy/, which the scripts prefer to their own, has few rows."""
    folder = tmp_path_factory.mktemp("pretend")
    (folder / "toy").mkdir()
    for path in (ROOT / "toy").iterdir():
        if path.suffix == ".jsonl":
            rows = read_jsonl(path)
            write_jsonl(folder / "toy" / path.name, rows[:: len(rows) // 24][:24])
        elif path.is_dir():
            (folder / "toy" / path.name).symlink_to(path)
    return folder


def flags_of(case, folder, **changed):
    return CASES[case] | {"eval_every": 1, "log_every": 1, "run_dir": str(folder / case)} | changed


@pytest.fixture(scope="module")
def stderr(folder):
    """What the process prints there that runs all cases on the device. Each stops half-way and is resumed."""
    runs = []
    for case in CASES:
        length = "num_epochs" if "num_epochs" in CASES[case] else "num_iterations"
        runs += [(case.split()[0], flags_of(case, folder, **{length: n})) for n in (1, 2)]
    return launch_runs(folder, runs, ranks=1)


def check_run(run_dir, cpu_run_dir, tolerance):
    assert json.loads((run_dir / "args.json").read_text())["device"] == "pretend"
    metrics = [without_clock(x / "metrics.jsonl") for x in (run_dir, cpu_run_dir)]
    for line, cpu_line in zip(*metrics, strict=True):
        assert line == pytest.approx(cpu_line, rel=tolerance, abs=tolerance)
    assert (run_dir / "model" / "config.json").exists()


@pytest.mark.parametrize("case", CASES)
def test_a_run_on_the_device_gives_the_numbers_of_the_cpu(case, folder, stderr):
    error = folder / f"{case}.error"
    assert not error.exists(), error.read_text()
    cpu = str(folder / f"{case} cpu")
    # The attention that the device has: in bfloat16, another kernel's rounding samples other tokens.
    with contextlib.chdir(folder), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        run(case.split()[0], flags_of(case, folder, run_dir=cpu, device="cpu"))
    check_run(folder / case, Path(cpu), 3e-3 if "bfloat16" in case else 1e-5)


def test_nothing_is_printed_to_stderr(stderr):
    assert stderr == ""


def test_two_ranks_give_the_numbers_of_the_cpu(folder):
    run_dirs = [folder / "two", folder / "two cpu"]
    flags = [flags_of("grpo", folder, run_dir=str(x)) for x in run_dirs]
    flags[1]["device"] = "cpu"
    assert launch_runs(folder, [("grpo", x) for x in flags], ranks=2) == ""
    check_run(*run_dirs, 1e-5)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
