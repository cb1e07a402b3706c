"""Kill training runs at bad moments, start them again, and check that they end as if nothing had happened.

    python tests/soak.py

Runs of grpo.py and ppo.py, on one rank and on two, are killed (SIGKILL) four times: when half of a checkpoint is
written, before it is renamed, and when half a line of metrics.jsonl or half of model/ is written. Then the same command
runs to its end. Metrics (except those per second), samples, weights and optimizer states must equal those of an
uninterrupted run to the last bit. Writes experiments/results/soak.jsonl.
"""

import io
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ["--num_iterations=8", "--batch_size=16", "--max_response_length=12"]
FLAGS += ["--save_every=2", "--eval_every=4", "--log_every=1"]
KILLS = ["torn checkpoint:2", "before rename:1", "torn line:3", "half a model:1"]  # see run_and_kill


def run_and_kill(kill: str, script: str, *flags: str) -> None:
    """Run a script as the main program. kill is MOMENT:N: rank 0 dies at the N-th moment of this kind."""
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


def without_clock(path: Path) -> list[dict]:
    """The lines of a .jsonl without the metrics that depend on the time."""
    lines = [json.loads(line) for line in path.open()]
    return [
        {k: v for k, v in line.items() if k != "seconds" and not k.endswith("per_second")} for line in lines
    ]


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


def soak(script: str, ranks: int, folder: Path) -> dict:
    """Kill a run four times, let it end, and compare it with an uninterrupted one."""
    whole, killed = folder / f"{script}_{ranks}", folder / f"{script}_{ranks}_killed"
    assert start(script, ranks, whole, *FLAGS).wait() == 0
    for kill in KILLS:
        assert start(script, ranks, killed, *FLAGS, kill=kill).wait() != 0, f"{kill} did not come"
    code = start(script, ranks, killed, *FLAGS).wait()
    wrong = differences(whole, killed) if code == 0 else [f"exit code {code}"]
    if wrong:
        print(killed.with_suffix(".log").read_text()[-3000:])
    kills = [kill.partition(":")[0] for kill in KILLS]
    return {"script": script, "ranks": ranks, "kills": kills, "wrong": wrong}


def main() -> None:
    sys.path.insert(0, str(ROOT / "experiments"))
    import common

    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for script in ("grpo", "ppo"):
            for ranks in (1, 2):
                runs.append(soak(script, ranks, Path(folder)))
                print(json.dumps(runs[-1]), flush=True)
    kills = sum(len(run["kills"]) for run in runs)
    differing = sum(bool(run["wrong"]) for run in runs)
    print(f"{kills} kills in {len(runs)} runs, {differing} runs differ from an uninterrupted one")
    common.save("soak", [run | common.provenance() for run in runs])
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["run-and-kill"]:
        run_and_kill(*sys.argv[2:])
    else:
        main()
