"""Kill runs at bad moments, resume them, and require that nothing shows: weights, optimizer, metrics to the last bit.

    python benchmark/soak.py                    24 runs, killed once or twice each; a quarter of an hour on two cores
    python benchmark/soak.py --seeds 7          one of them

A case is drawn from its seed: a script, one process or two ranks under torchrun, and one or two kills (SIGKILL, which
nothing can catch) in one of these ways:

    random             some time after some iteration; of two ranks one of them
    torn checkpoint    with half of a checkpoint written
    before rename      with a checkpoint written and synced, but under its temporary name
    torn line          with half a line of metrics.jsonl written

Then it is resumed until it ends, and compared with a run of the same flags that nobody disturbed. Writes
results/soak.json and exits with 1 if any run differs.
"""

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

import tyro

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ["reinforce_pp", "reinforce_pp_baseline", "rloo", "grpo", "ppo", "remax"]
FLAGS = "--batch_size 16 --num_iterations 8 --save_every 2 --eval_every 4 --max_response_length 12 --num_samples 2"
FLAGS += " --log_every 1"
HOW = ["random", "torn checkpoint", "before rename", "torn line"]

# Put on the path of the process to kill as sitecustomize.py, which Python runs at its start.
KILLER = """
import io, os, signal, sys
how, _, number = os.environ.get("KILL", "").partition(":")
count = 0

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def is_due():
    global count
    count += 1
    return count == int(number)

def watch(event, args):
    if how == "before rename" and event == "os.rename" and str(args[0]).endswith(".pt.tmp") and is_due():
        die()
    if how == "torn line" and event == "open" and str(args[0]).endswith("metrics.jsonl") and args[1] == "a":
        if not is_due():
            return
        with open(args[0], "ab", buffering=0) as file:
            file.write(b'{"iteration": 3, "sco')
        die()

if how and os.environ.get("RANK", "0") == "0" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
    sys.addaudithook(watch)
    if how == "torn checkpoint":
        import torch
        save = torch.save

        def torn(state, file):
            if is_due():
                buffer = io.BytesIO()
                save(state, buffer)
                file.write(buffer.getvalue()[: len(buffer.getvalue()) // 2])
                file.flush()
                die()
            save(state, file)

        torch.save = torn
"""


@dataclass
class Args:
    seeds: tuple[int, ...] = tuple(range(24))
    """Which cases."""


def start(
    script: str, ranks: int, *flags: str, kill: str = "", folder: Path, more: tuple = ()
) -> subprocess.Popen:
    """A run in the background, in a session of its own."""
    (folder / "sitecustomize.py").write_text(KILLER)
    env = os.environ | {
        "KILL": kill,
        "PYTHONPATH": str(folder),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *more]
    command += [str(ROOT / f"{script}.py"), *map(str, flags)]
    log = (folder / "log").open("a")
    return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)


def wait_for_lines(run_dir: Path, count: int, process: subprocess.Popen) -> None:
    """Until metrics.jsonl has so many lines, or the process has ended."""
    while process.poll() is None:
        files = list(run_dir.glob("metrics.jsonl")) or list(run_dir.glob("*/metrics.jsonl"))
        if files and files[0].read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.01)


def pid_of_rank(process: subprocess.Popen, rank: int) -> int:
    """The process of a rank: the descendant of torchrun whose environment says so; without torchrun this one."""
    for folder in Path("/proc").iterdir():
        try:
            if b"RANK=%d" % rank in (folder / "environ").read_bytes().split(b"\0") and is_below(
                folder.name, process.pid
            ):
                return int(folder.name)
        except OSError:  # gone meanwhile, or no process at all
            continue
    return process.pid


def is_below(pid: str, ancestor: int) -> bool:
    """Whether ancestor is among the parents of pid."""
    while int(pid) > 1:
        pid = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        if int(pid) == ancestor:
            return True
    return False


def timeless(path: Path) -> list[dict]:
    """The lines of a .jsonl, without what a clock says."""
    lines = [json.loads(line) for line in path.open()]
    return [
        {k: v for k, v in line.items() if "seconds" not in k and k != "tokens_per_second"} for line in lines
    ]


def differences(one: Path, other: Path) -> list[str]:
    """What is not the same in two run folders."""
    import torch

    found = []
    for name in ("metrics.jsonl", "samples.jsonl"):
        if timeless(one / name) != timeless(other / name):
            found.append(name)
    if [line["iteration"] for line in timeless(other / "metrics.jsonl")] != list(range(9)):
        found.append("gap or duplicate in metrics.jsonl")
    if (one / "model" / "model.safetensors").read_bytes() != (
        other / "model" / "model.safetensors"
    ).read_bytes():
        found.append("weights")
    states = [torch.load(sorted(run.glob("checkpoints/*.pt"))[-1], weights_only=True) for run in (one, other)]
    flat = [[leaf for part in state.values() for leaf in leaves(part)] for state in states]
    same = len(flat[0]) == len(flat[1]) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(*flat)
    )
    if not same:
        found.append("checkpoint")
    if list(other.rglob("*.tmp")):
        found.append("temporary files left")
    return found


def leaves(x):
    """Tensors and numbers of nested dicts and lists, in order."""
    if isinstance(x, dict):
        return [leaf for value in x.values() for leaf in leaves(value)]
    return [leaf for value in x for leaf in leaves(value)] if isinstance(x, list | tuple) else [x]


def soak(seed: int, undisturbed: dict, scratch: Path) -> dict:
    """One case: killed, resumed, compared."""
    rng = random.Random(seed)
    script, ranks = SCRIPTS[seed % len(SCRIPTS)], 1 + (seed // len(SCRIPTS)) % 2
    folder = scratch / f"case{seed}"
    folder.mkdir()
    if (script, ranks) not in undisturbed:
        whole = scratch / f"{script}{ranks}"
        whole.mkdir()
        code = start(script, ranks, *FLAGS.split(), "--runs_dir", whole / "runs", folder=whole).wait()
        assert code == 0, (whole / "log").read_text()
        undisturbed[script, ranks] = next((whole / "runs").iterdir())

    kills, run, where = [], None, ["--runs_dir", folder / "runs"]
    for _ in range(rng.choice([1, 1, 2])):
        how = rng.choice(HOW)
        number = rng.randint(1, 3)
        process = start(
            script,
            ranks,
            *FLAGS.split(),
            *where,
            folder=folder,
            kill="" if how == "random" else f"{how}:{number}",
        )
        if how == "random":
            number = rng.randint(1, 7)
            wait_for_lines(run or folder / "runs", number, process)
            time.sleep(rng.uniform(0, 0.3))
            victim = rng.randrange(ranks)
            if process.poll() is None:
                os.kill(pid_of_rank(process, victim), signal.SIGKILL)
            how += f" rank {victim}" * (ranks > 1)
        code = process.wait(timeout=300)
        kills.append({"how": how, "number": number, "code": code})
        run = run or next(folder.glob("runs/*/args.json"), folder / "none" / "args.json").parent
        run = run if run.exists() else None  # killed before it had a folder that is whole
        where = ["--resume", run] if run else where
        if code == 0:
            break
    code = start(script, ranks, *FLAGS.split(), *where, folder=folder).wait(timeout=300)
    run = run or next(folder.glob("runs/*/model")).parent
    wrong = differences(undisturbed[script, ranks], run) if code == 0 else [f"exit code {code} on --resume"]
    if wrong:
        print((folder / "log").read_text()[-3000:])
    else:
        shutil.rmtree(folder)
    return {"seed": seed, "script": script, "ranks": ranks, "kills": kills, "wrong": wrong}


def main(args: Args) -> None:
    undisturbed, cases = {}, []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in args.seeds:
            cases.append(soak(seed, undisturbed, Path(scratch)))
            print(json.dumps(cases[-1]), flush=True)
    hit = sum(kill["code"] != 0 for case in cases for kill in case["kills"])
    bad = sum(bool(case["wrong"]) for case in cases)
    print(f"{len(cases)} runs, {hit} kills that hit, {bad} runs that differ from the undisturbed one")
    if args == Args():
        versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
        text = ",\n".join(json.dumps(case) for case in cases)
        made = {"command": "python benchmark/soak.py", "versions": versions, "kills": hit, "differing": bad}
        path = ROOT / "benchmark" / "results" / "soak.json"
        path.write_text(f'{{"made": {json.dumps(made)},\n"cases": [\n{text}\n]}}\n')
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
