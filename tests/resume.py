"""Kill or interrupt a training run at a bad moment, and compare the folders of two runs.

    resume.py run-and-kill KILL SCRIPT FLAGS...        what `start` starts

KILL is a moment and a number: with "torn line:3", rank 0 writes half of the third line of metrics.jsonl and dies. The
other moments are "torn checkpoint", "before rename" (of a checkpoint) and "half a model".
"""

import io
import json
import os
import runpy
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


def run_and_kill(kill: str, script: str, *flags: str) -> None:
    """Run a script as the main program, until it is killed with SIGKILL."""
    moment, _, number = kill.partition(":")
    count, save = 0, torch.save

    def is_due() -> bool:
        nonlocal count
        count += 1
        return count == int(number)

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def write_and_die(file, content: bytes):
        file.write(content)
        file.flush()
        die()

    def watch(event: str, args: tuple):
        """Python calls it before it opens or renames a file."""
        if event not in ("open", "os.rename"):
            return
        path = str(args[0])
        if moment == "before rename" and event == "os.rename" and "checkpoint" in path and is_due():
            die()
        if moment == "torn line" and path.endswith("metrics.jsonl") and args[1] == "a" and is_due():
            write_and_die(open(path, "ab"), b'{"iteration": 3, "sco')
        if moment == "half a model" and "model.tmp" in path and "tokenizer" in path and is_due():
            die()

    def save_half(state, file):
        if moment == "torn checkpoint" and is_due():
            buffer = io.BytesIO()
            save(state, buffer)
            content = buffer.getvalue()
            write_and_die(file, content[: len(content) // 2])
        save(state, file)

    if kill and os.environ.get("RANK", "0") == "0":
        torch.save = save_half
        sys.addaudithook(watch)
    sys.argv = [script, *flags]
    runpy.run_path(script, run_name="__main__")


def start(script: str, ranks: int, run_dir: Path, *flags: str, kill: str = "") -> subprocess.Popen:
    """Start a run in the background. Its output goes to a file next to run_dir."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [__file__, "run-and-kill", kill, ROOT / f"{script}.py", "--run_dir", run_dir, *flags]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with run_dir.with_suffix(".log").open("a") as file:
        return subprocess.Popen([*map(str, command)], env=env, stdout=file, stderr=file)


@contextmanager
def interrupted(module, name: str, call: int):
    """In this block a run ends, as by Ctrl-C, when it calls a function of its script for the n-th time."""
    calls, function = [], getattr(module, name)

    def stop(*args, **options):
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return function(*args, **options)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, name, stop)
        yield


def without_clock(path: Path) -> list[dict]:
    """The lines of a .jsonl without the metrics that depend on the time."""
    lines = [json.loads(line) for line in path.open()]
    for line in lines:
        for name in ("seconds", "tokens_per_second", "pairs_per_second"):
            line.pop(name, None)
    return lines


def equal(a, b) -> bool:
    """Whether two nested dicts and lists hold the same tensors and numbers, bit by bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def differences(one: Path, other: Path) -> list[str]:
    """What is not the same in two run folders."""
    logs = ("metrics.jsonl", "samples.jsonl")
    found = [name for name in logs if without_clock(one / name) != without_clock(other / name)]
    names = [sorted(str(path.relative_to(run)) for path in run.rglob("*")) for run in (one, other)]
    if names[0] != names[1]:
        found.append("names of files")
    if (one / "model/model.safetensors").read_bytes() != (other / "model/model.safetensors").read_bytes():
        found.append("weights")
    states = [torch.load(run / "checkpoint.pt", weights_only=True) for run in (one, other)]
    for state in states:
        del state["log_sizes"]  # they depend on the digits of tokens_per_second
    if not equal(*states):
        found.append("checkpoint")
    return found


if __name__ == "__main__":
    run_and_kill(*sys.argv[2:])
