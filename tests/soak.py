"""Kill training runs at bad moments, start them again, and check that they end as if nothing had happened.

    python tests/soak.py                     16 runs, each killed (SIGKILL) up to three times
    python tests/soak.py --repetitions 1     4 runs

Runs of grpo.py and ppo.py, on one rank and on two, are killed when half of a checkpoint is written, before it is
renamed, and when half a line of metrics.jsonl or half of model/ is written; those on one rank also at any time. Then
the same command runs to its end. Metrics (except tokens_per_second), samples, weights and optimizer states must equal
those of an uninterrupted run to the last bit. Writes experiments/results/soak.jsonl.
"""

import io
import itertools
import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
FLAGS = "--num_iterations 8 --batch_size 16 --max_response_length 12".split()
FLAGS += "--save_every 2 --eval_every 4 --log_every 1".split()
MOMENTS = ["torn checkpoint", "before rename", "torn line", "half a model"]


def run_and_kill(kill: str, script: str, *flags: str) -> None:
    """Run a script as the main program. kill is MOMENT:N: rank 0 dies at the N-th moment of this kind."""
    moment, _, number = kill.partition(":")
    left, save = int(number or 0), torch.save

    def is_due() -> bool:
        nonlocal left
        left -= 1
        return left == 0

    def die(file=None, text: bytes = b""):
        if file:
            file.write(text)
            file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    def watch(event, args):
        path = str(args[0]) if event in ("open", "os.rename") else ""
        if moment == "half a model" and "model.tmp" in path and "tokenizer" in path:
            die()
        if moment == "before rename" and event == "os.rename" and "checkpoint" in path and is_due():
            die()
        if moment == "torn line" and path.endswith("metrics.jsonl") and args[1] == "a" and is_due():
            die(open(path, "ab"), b'{"iteration": 3, "sco')

    def save_half(state, file):
        if moment == "torn checkpoint" and is_due():
            buffer = io.BytesIO()
            save(state, buffer)
            die(file, buffer.getvalue()[: len(buffer.getvalue()) // 2])
        save(state, file)

    if moment and os.environ.get("RANK", "0") == "0":
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


def without_clock(path: Path) -> list[dict]:
    """The lines of a .jsonl without the metrics that depend on the time."""
    lines = [json.loads(line) for line in path.open()]
    return [{k: v for k, v in line.items() if not k.endswith("per_second")} for line in lines]


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


def soak(rng: random.Random, whole: Path, script: str, ranks: int, run_dir: Path) -> dict:
    """Kill one run up to three times, let it end, and compare it with the uninterrupted one."""
    kills = []
    for _ in range(3):
        moment = rng.choice(MOMENTS if ranks == 2 else [*MOMENTS, "any time"])
        if moment == "any time":  # also during imports and at the end
            process = start(script, ranks, run_dir, *FLAGS)
            time.sleep(rng.uniform(1.5, 5.0))
            process.kill()
        else:
            process = start(script, ranks, run_dir, *FLAGS, kill=f"{moment}:{rng.choice([1, 2])}")
        if process.wait() == 0:  # it was faster
            break
        kills.append(moment)
    code = start(script, ranks, run_dir, *FLAGS).wait()
    wrong = differences(whole, run_dir) if code == 0 else [f"exit code {code}"]
    if wrong:
        print(run_dir.with_suffix(".log").read_text()[-3000:])
    shutil.rmtree(run_dir)
    return {"script": script, "ranks": ranks, "kills": kills, "wrong": wrong}


def main(repetitions: int = 4) -> None:
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for script, ranks in itertools.product(("grpo", "ppo"), (1, 2)):
            whole = Path(folder, f"{script}_{ranks}")
            assert start(script, ranks, whole, *FLAGS).wait() == 0
            for _ in range(repetitions):
                number = len(runs)
                runs.append(soak(random.Random(number), whole, script, ranks, Path(folder, str(number))))
                print(json.dumps(runs[-1]), flush=True)
    kills, bad = sum(len(run["kills"]) for run in runs), sum(bool(run["wrong"]) for run in runs)
    print(f"{kills} kills in {len(runs)} runs, {bad} runs differ from an uninterrupted one")
    if repetitions == 4:
        sys.path.insert(0, str(ROOT / "experiments"))
        import common

        common.save("soak", [run | common.provenance() for run in runs])
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["run-and-kill"]:
        run_and_kill(*sys.argv[2:])
    else:
        tyro.cli(main, description=__doc__)
