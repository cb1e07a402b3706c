"""Speed and peak memory of grpo.py and TRL's GRPOTrainer, and of asynchronous sampling, on CPU.

    python experiments/speed.py        the workloads toy and tail; --workloads real async: the others

docs/speed.md has the workloads, all with a learning rate too small to change the lengths. In tail, the probability of
EOS is the same at every step, so that the lengths have a geometric distribution with a long tail. The systems take
turns, so that a slow minute of the machine does not hit only one of them. The first iteration of a run does not count.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import sync
import torch
import transformers
import tyro
from common import ROOT, curve, environment, flags_of, group_by, load, run_all, table

TOY = {"batch_size": 128, "micro_batch_size": 64, "max_response_length": 40, "num_iterations": 16}
TAIL = {"batch_size": 64, "micro_batch_size": 8, "max_response_length": 256, "num_iterations": 5}
REAL = {"batch_size": 64, "micro_batch_size": 16, "max_response_length": 16, "num_iterations": 3}
WORKLOADS = {"toy": TOY, "tail": TAIL, "real": REAL, "async": TAIL | {"num_iterations": 8}}
FLAGS = {"samples_per_prompt": 8, "learning_rate": 1e-9, "dtype": "float32"}
FLAGS |= {"device": "cpu", "eval_every": 0, "log_every": 10**6, "save_every": 0}
SYSTEMS = {  # script, ranks, flags
    "TRL": (None, 1, {"num_minibatches": 2}),
    "grpo.py": ("grpo", 1, {"num_minibatches": 2}),
    "flash_reinforce.py": ("flash_reinforce", 1, {}),
    "flash_reinforce.py, 2 ranks": ("flash_reinforce", 2, {}),
    "flash_reinforce_async.py, 2 ranks": ("flash_reinforce_async", 2, {"staleness": 1}),
}
COMPARED = {name: ("TRL", "grpo.py") for name in ("toy", "tail", "real")}  # the first is the yardstick
COMPARED["async"] = tuple(SYSTEMS)[2:]
REPEATS = {"toy": 3, "tail": 3, "real": 1, "async": 3}  # runs of each system, with the seeds 1, 2, ...


@dataclass
class Args:
    workloads: tuple[str, ...] = ("toy", "tail")  # any of toy, tail, real and async


def make_tail(folder: Path) -> None:
    """The model and the prompts of the workload tail."""
    from make_toy import make_tokenizer, write_jsonl

    vocab_size = 4096
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(vocab_size - 3))]
    make_tokenizer(words).save_pretrained(folder / "model")
    generator, rows = torch.Generator().manual_seed(1), []
    for _ in range(512):
        length = int(torch.randint(8, 33, (1,), generator=generator))
        numbers = torch.randint(0, vocab_size - 3, (length,), generator=generator).tolist()
        rows.append({"prompt": " ".join(f"w{i}" for i in numbers), "answer": "w1"})
    write_jsonl(folder / "prompts.jsonl", rows)

    torch.manual_seed(0)
    sizes = {"hidden_size": 320, "intermediate_size": 864, "num_hidden_layers": 6, "num_attention_heads": 5}
    sizes |= {"vocab_size": vocab_size, "max_position_embeddings": 512}
    config = transformers.LlamaConfig(**sizes, eos_token_id=1, pad_token_id=0, bos_token_id=None)
    model = transformers.LlamaForCausalLM(config)
    # The first number of every state becomes large, and the head takes the logit of EOS from it.
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        state = model.model(torch.randint(3, vocab_size, (64, 64))).last_hidden_state[:, :, 0]
        model.lm_head.weight[1] = 0.0
        model.lm_head.weight[1, 0] = 4.65 / state.mean()  # exp(4.65) = 105, about 4096 / 39
    model.save_pretrained(folder / "model")


def run_child(command: list, run_dir: Path) -> float:
    """Run a program, with what it prints in run_dir.log. Returns its peak memory in GiB. Linux only."""
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    with run_dir.with_suffix(".log").open("w") as file:
        process = subprocess.Popen([*map(str, command)], stdout=file, env=env)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{command[1]} ended with exit status {status}")
    return usage.ru_maxrss / 2**20


def measure(tail: Path, run_dir: Path, workload: str, system: str, seed: int, **_) -> dict:
    """Seconds and mean lengths of the iterations of one run after the first, and its peak memory."""
    model, dataset = tail / "model", tail / "prompts.jsonl"
    if workload == "toy":
        model, dataset = ROOT / "toy" / "policy", ROOT / "toy" / "train.jsonl"
    if workload == "real":
        model, dataset = ROOT / "data" / "smollm2", ROOT / "data" / "reversal" / "train.jsonl"
    script, ranks, flags = SYSTEMS[system]
    flags = FLAGS | WORKLOADS[workload] | flags
    flags |= {"model": str(model), "dataset": str(dataset), "seed": seed, "run_dir": str(run_dir)}
    if system == "TRL":
        command = [environment("trl"), ROOT / "experiments" / "speed_trl.py", json.dumps(flags)]
    else:
        command = [sys.executable, sync.paths()[script], *flags_of(script, flags)]
    if ranks > 1:  # torchrun gives each a core
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    peak = run_child(command, run_dir)
    log = run_dir.with_suffix(".log") if system == "TRL" else run_dir / "metrics.jsonl"
    _, *lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"')]
    row = {
        "seconds": curve(lines, "seconds", 6),
        "lengths": curve(lines, "response_length", 6),
        "peak_gib": peak,
    }
    return row | ({"versions": lines[-1]["versions"]} if system == "TRL" else {})


# --- the table ---


def tokens_per_second(runs: list[dict]) -> float:
    """All tokens over all seconds."""
    tokens = sum(sum(run["lengths"]) * WORKLOADS[run["workload"]]["batch_size"] for run in runs)
    return tokens / sum(sum(run["seconds"]) for run in runs)


def summary(*workloads: str) -> None:
    """Print a line for each system: all runs together, and the slowest and the fastest."""
    lines, rows = [], [row for row in load("speed") if row["workload"] in workloads]
    groups = group_by(rows, "workload", "system")
    for workload in workloads:
        for system in COMPARED[workload]:
            runs, first = groups[workload, system], groups[workload, COMPARED[workload][0]]
            speed, each = tokens_per_second(runs), [tokens_per_second([run]) for run in runs]
            digits = 0 if speed >= 100 else 1
            between = f" ({min(each):.{digits}f}-{max(each):.{digits}f})" if len(runs) > 1 else ""
            ratio = f"{speed / tokens_per_second(first):.2f}"
            gib = f"{max(run['peak_gib'] for run in runs):.2f}"
            lines.append([workload, system, f"{speed:.{digits}f}{between}", ratio, gib])
    table(["workload", "system", "tokens/s", "relative to the first", "peak, GiB"], lines, rows)


def main(args: Args) -> None:
    cells = []
    for workload in args.workloads:
        for seed in range(1, REPEATS[workload] + 1):
            for system in COMPARED[workload]:
                script = {} if system == "TRL" else {"script": SYSTEMS[system][0]}
                cells.append({"workload": workload, "system": system, "seed": seed} | script)
    with tempfile.TemporaryDirectory() as folder:
        tail = Path(folder)
        make_tail(tail)
        run_all("speed", cells, functools.partial(measure, tail), workers=1)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, use_underscores=True))
