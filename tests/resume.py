"""Kill or interrupt a training run at a bad moment, and compare the folders of two runs.

    resume.py KILL SCRIPT FLAGS...      run a script as the main program, until it is killed with SIGKILL

KILL is a moment and a number: with "torn checkpoint:2", the run dies when half of the second checkpoint is written. The
other moment is "half a model".
"""

import io
import json
import os
import runpy
import signal
import sys
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
import torch


def run_and_kill(kill: str, script: str, *flags: str) -> None:
    moment, number = kill.split(":")
    times, save = count(1), torch.save

    def die_if_due(now: str):
        if now == moment and next(times) == int(number):
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(event: str, args: tuple):
        """Python calls it before it opens a file."""
        if event == "open" and "/model/tokenizer" in str(args[0]):
            die_if_due("half a model")

    def save_in_two_parts(state, file):
        buffer = io.BytesIO()
        save(state, buffer)
        half = buffer.tell() // 2
        file.write(buffer.getvalue()[:half])
        file.flush()
        die_if_due("torn checkpoint")
        file.write(buffer.getvalue()[half:])

    torch.save = save_in_two_parts
    sys.addaudithook(watch)
    sys.argv = [script, *flags]
    runpy.run_path(script, run_name="__main__")


@contextmanager
def interrupted(module, name: str, call: int):
    """In this block a run ends, as by Ctrl-C, when it calls a function of its script for the n-th time."""
    calls, function = count(1), getattr(module, name)

    def stop(*args, **options):
        if next(calls) == call:
            raise KeyboardInterrupt
        return function(*args, **options)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, name, stop)
        yield


def without_clock(path: Path) -> list[dict]:
    """The lines of a .jsonl without the metrics that depend on the time."""
    lines = [json.loads(line) for line in path.open()]
    for line in lines:
        for name in ("tokens_per_second", "pairs_per_second", "sampling_seconds"):
            line.pop(name, None)
    return lines


def assert_same_run(one: Path, other: Path) -> None:
    """Both run folders have the same files, and exactly the same logs, model and checkpoint, apart from times."""
    names = [sorted(str(path.relative_to(run)) for path in run.rglob("*")) for run in (one, other)]
    assert names[0] == names[1]
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert without_clock(one / name) == without_clock(other / name)
    models = [(run / "model" / "model.safetensors").read_bytes() for run in (one, other)]
    assert models[0] == models[1]
    states = [torch.load(run / "checkpoint.pt", weights_only=True) for run in (one, other)]
    torch.testing.assert_close(*states, rtol=0, atol=0)


if __name__ == "__main__":
    run_and_kill(*sys.argv[1:])
