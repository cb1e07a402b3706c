"""Helpers that kill or interrupt a run at a bad moment, and compare the folders of two runs."""

import json
import multiprocessing
import os
import signal
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
import torch


def stop_in_call(patch, module, name: str, number: int, stop) -> None:
    """Call stop() before the n-th call of a function of a module or class."""
    calls, function = count(1), getattr(module, name)

    def stand_in(*args, **options):
        if next(calls) == number:
            stop()
        return function(*args, **options)

    patch.setattr(module, name, stand_in)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_and_kill(module, name: str, number: int, run, *args, **flags) -> int:
    """Run in a fork that kills itself before the n-th call of a function. Return its exit code."""

    def start():
        stop_in_call(pytest.MonkeyPatch(), module, name, number, kill)
        run(*args, **flags)

    process = multiprocessing.get_context("fork").Process(target=start)
    process.start()
    process.join(100)
    return process.exitcode


@contextmanager
def interrupted(module, name: str, call: int):
    """In this block, raise KeyboardInterrupt, as Ctrl-C does, before the n-th call of a function."""

    def interrupt():
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_in_call(patch, module, name, call, interrupt)
        yield


def without_clock(path: Path) -> list[dict]:
    """Return the lines of a .jsonl file without the metrics that depend on the time."""
    lines = [json.loads(line) for line in path.open()]
    for line in lines:
        for name in [name for name in line if name.endswith(("_per_second", "_seconds"))]:
            del line[name]
    return lines


def assert_same_run(one: Path, other: Path) -> None:
    """Check that two folders have the same files, and the same bits in logs, models and checkpoints, except times."""
    names = [sorted(str(path.relative_to(run)) for path in run.rglob("*")) for run in (one, other)]
    assert names[0] == names[1]
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert without_clock(one / name) == without_clock(other / name)
    models = [(run / "model" / "model.safetensors").read_bytes() for run in (one, other)]
    assert models[0] == models[1]
    states = [torch.load(run / "checkpoint.pt", weights_only=True) for run in (one, other)]
    torch.testing.assert_close(*states, rtol=0, atol=0)
