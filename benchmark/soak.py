"""Kill runs at bad moments, give the same command again, and require that nothing shows.

    python benchmark/soak.py                40 kills (SIGKILL), six to twelve minutes on two cores
    python benchmark/soak.py --kills 3

Runs of grpo.py and ppo.py, on one rank and on two, are each killed several times in a row:

    at any time         of two ranks one of them, or all at once with torchrun
    torn checkpoint     with half of a checkpoint written
    before rename       with a checkpoint written and synced, under its temporary name
    torn line           with half a line of metrics.jsonl written
    half a model        in the middle of the result, model/

Then the same command runs to its end, and metrics (less tokens_per_second), samples, weights and optimizer
states must be those of a run left alone, to the last bit. Writes results/soak.json; exit code 1 if a run
differs.
"""

import contextlib
import importlib.metadata
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
ITERATIONS = 8
FLAGS = (
    f"--num_iterations {ITERATIONS} --batch_size 16 --max_response_length 12 --save_every 2 --eval_every 4"
)
FLAGS += " --log_every 1"  # with more, samples come once a minute too
MOMENTS = ["torn checkpoint", "before rename", "torn line", "half a model"]

# Starts a script as the main program, and kills it at the n-th moment of a kind: MOMENT:N script flags
KILLER = """
import io, os, runpy, signal, sys

_, kill, script, *flags = sys.argv
moment, _, number = kill.partition(":")
count = 0

def is_due():
    global count
    count += 1
    return count == int(number)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def watch(event, args):
    path = str(args[0]) if event in ("open", "os.rename") else ""
    if moment == "before rename" and event == "os.rename" and path.endswith("checkpoint.tmp") and is_due():
        die()
    if moment == "half a model" and "model.tmp" in path and "tokenizer" in path:
        die()
    if moment == "torn line" and path.endswith("metrics.jsonl") and args[1] == "a" and is_due():
        with open(path, "ab", buffering=0) as file:
            file.write(b'{"iteration": 3, "sco')
        die()

if moment and os.environ.get("RANK", "0") == "0":
    import torch

    save = torch.save

    def torn(state, file):
        if moment == "torn checkpoint" and is_due():
            buffer = io.BytesIO()
            save(state, buffer)
            file.write(buffer.getvalue()[: len(buffer.getvalue()) // 2])
            file.flush()
            die()
        save(state, file)

    torch.save = torn
    sys.addaudithook(watch)
sys.argv = [script, *flags]
sys.path[0] = os.path.dirname(script)
runpy.run_path(script, run_name="__main__")
"""


@dataclass
class Args:
    kills: int = 40  # how many must hit


def start(script: str, ranks: int, run_dir: Path, *flags: str, kill: str = "") -> subprocess.Popen:
    """A run in the background; what it says goes to a file beside run_dir."""
    killer, log = run_dir.with_suffix(".py"), run_dir.with_suffix(".log")
    killer.parent.mkdir(parents=True, exist_ok=True)
    killer.write_text(KILLER)
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [killer, kill or ":", ROOT / f"{script}.py", "--run_dir", run_dir, *flags]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "SOAK": str(run_dir)}
    with log.open("a") as file:
        return subprocess.Popen(
            [*map(str, command)], env=env, stdout=file, stderr=file, start_new_session=True
        )


def processes(run_dir: Path, rank: int | None = None) -> list[int]:
    """Those of a run, by a mark in their environment: torchrun gives each rank a session of its own."""
    found, marks = [], [f"SOAK={run_dir}".encode()]
    marks += [] if rank is None else [f"RANK={rank}".encode()]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # gone meanwhile, or not ours
            continue
        if all(mark in variables for mark in marks):
            found.append(int(folder.name))
    return found


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def end(process: subprocess.Popen, run_dir: Path) -> int:
    """Its exit code, when all of its processes have gone."""
    code = process.wait(timeout=300)
    while left := processes(run_dir):
        kill_all(left)
        time.sleep(0.05)
    return code


def timeless(path: Path) -> list[dict]:
    """The lines of a .jsonl, without what a clock says."""
    lines = [json.loads(line) for line in path.open()]
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]


def leaves(x) -> list:
    """Tensors and numbers of nested dicts and lists, in order."""
    values = x.values() if isinstance(x, dict) else x
    return [y for value in values for y in leaves(value)] if isinstance(x, dict | list | tuple) else [x]


def differences(one: Path, other: Path) -> list[str]:
    """What is not the same in two run folders."""
    found = [x for x in ("metrics.jsonl", "samples.jsonl") if timeless(one / x) != timeless(other / x)]
    files = sorted(str(path.relative_to(one)) for path in one.rglob("*"))
    if files != sorted(str(path.relative_to(other)) for path in other.rglob("*")):
        found.append("names of files")
    if (one / "model/model.safetensors").read_bytes() != (other / "model/model.safetensors").read_bytes():
        found.append("weights")
    states = [leaves(torch.load(run / "checkpoint.pt", weights_only=True)) for run in (one, other)]
    tensors = [isinstance(x, torch.Tensor) for x in states[0]]
    equal = [torch.equal(a, b) if tensor else a == b for tensor, a, b in zip(tensors, *states)]
    # The sizes of the logs count the digits of tokens_per_second, and may differ.
    sizes = sum(not same and isinstance(a, int) for same, a in zip(equal, states[0]))
    if len(states[0]) != len(states[1]) or equal.count(False) > sizes or sizes > 1:
        found.append("checkpoint")
    return found


def soak(number: int, whole: Path, script: str, ranks: int, most: int, folder: Path) -> dict:
    """One run, killed up to most times, and compared with the whole one."""
    rng, run_dir, kills, code = random.Random(number), folder / str(number), [], 1
    for _ in range(20):
        if len(kills) == most or code == 0:
            break
        # Half of the kills come at any time, imports, training and the end included.
        moment = rng.choice(MOMENTS) if rng.random() < 0.5 else "any time"
        kill = (
            "" if moment == "any time" else f"{moment}:{rng.choice([1, 2] if moment != MOMENTS[-1] else [1])}"
        )
        process = start(script, ranks, run_dir, *FLAGS.split(), kill=kill)
        if not kill:
            time.sleep(rng.uniform(1.5, 5.0) if ranks == 1 else rng.uniform(3.0, 8.0))
            victim = rng.choice(["rank 0", "rank 1", "all"][: 3 if ranks > 1 else 1])
            rank = int(victim[-1]) if ranks > 1 and victim != "all" else None
            if process.poll() is None:
                kill_all(processes(run_dir, rank))
            moment += f", {victim}" * (ranks > 1)
        code = end(process, run_dir)
        kills += [kill or moment] if code else []
    if code:
        code = end(start(script, ranks, run_dir, *FLAGS.split()), run_dir)
    wrong = differences(whole, run_dir) if code == 0 else [f"exit code {code}"]
    if wrong:
        print(run_dir.with_suffix(".log").read_text()[-3000:])
    shutil.rmtree(run_dir)
    return {"number": number, "script": script, "ranks": ranks, "kills": kills, "wrong": wrong}


def main(args: Args) -> None:
    runs, whole = [], {}
    with tempfile.TemporaryDirectory() as folder:
        while (hit := sum(len(run["kills"]) for run in runs)) < args.kills:
            script, ranks = ["grpo", "ppo"][len(runs) % 2], [1, 2][len(runs) // 2 % 2]
            if (script, ranks) not in whole:
                whole[script, ranks] = path = Path(folder) / f"{script}_{ranks}"
                assert end(start(script, ranks, path, *FLAGS.split()), path) == 0
            most = min(5, args.kills - hit)
            runs.append(soak(len(runs), whole[script, ranks], script, ranks, most, Path(folder)))
            print(json.dumps(runs[-1]), flush=True)
    bad = sum(bool(run["wrong"]) for run in runs)
    print(f"{hit} kills of {len(runs)} runs, {bad} runs that differ from one left alone")
    if args == Args():
        versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
        made = {"command": "python benchmark/soak.py", **versions, "kills": hit, "differing": bad}
        text = ",\n".join(json.dumps(run) for run in runs)
        path = ROOT / "benchmark" / "results" / "soak.json"
        path.write_text(f'{{"made": {json.dumps(made)},\n"runs": [\n{text}\n]}}\n')
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
