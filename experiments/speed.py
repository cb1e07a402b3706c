"""Speed and peak memory of grpo.py and of TRL's GRPOTrainer on a CPU; docs/results.md has the workloads.

    python -m venv experiments/.trl
    experiments/.trl/bin/pip install --group trl        with pip 25.1 or later
    experiments/.trl/bin/python experiments/speed.py

The first iteration of a run does not count, and the learning rate is so small that lengths stay.
"""

import subprocess
import sys
from itertools import product
from operator import itemgetter
from pathlib import Path

import torch
import transformers
from common import ROOT, curve, group_by, load, read_jsonl, run_all, table, versions, words_of
from make_toy import make_tokenizer, write_jsonl

COMMANDS = {"TRL": ROOT / "experiments" / "speed_trl.py", "grpo.py": ROOT / "grpo.py"}
TAIL = {"batch_size": 64, "micro_batch_size": 8, "max_response_length": 256, "num_iterations": 5}
TAIL |= {"model": ROOT / "runs" / "tail", "dataset": ROOT / "runs" / "tail" / "prompts.jsonl"}
WORKLOADS = {"toy": {"batch_size": 128, "num_iterations": 16}, "tail": TAIL}  # the toy is the default
FLAGS = {"device": "cpu", "eval_every": 0, "log_every": 10**6, "save_every": 0, "learning_rate": 1e-9}
# The peak of a process begins with that of the process which starts it, so a small one does.
WATCH = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True); "
WATCH += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"


def make_tail(folder: Path) -> None:
    """A model that ends a response with the same probability at every token, and prompts of 8 to 32 tokens."""
    torch.manual_seed(0)
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(4093))]
    make_tokenizer(words).save_pretrained(folder)
    prompts = [" ".join(words[i : i + 8 + i % 25]) for i in range(3, 515)]
    write_jsonl(folder / "prompts.jsonl", [{"prompt": prompt, "answer": "w1"} for prompt in prompts])
    sizes = {"hidden_size": 320, "intermediate_size": 864, "num_hidden_layers": 6, "num_attention_heads": 5}
    config = transformers.LlamaConfig(**sizes, vocab_size=4096, eos_token_id=1, pad_token_id=0)
    model = transformers.LlamaForCausalLM(config)
    # The first number of every state becomes large, and the head takes the logit of EOS from it.
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        state = model.model(torch.randint(3, 4096, (64, 64))).last_hidden_state[:, :, 0]
        model.lm_head.weight[1] = 0.0
        model.lm_head.weight[1, 0] = 4.65 / state.mean()  # exp(4.65) = 105, about 4096 / 39
    model.save_pretrained(folder)


def measure(run_dir: Path, workload: str, system: str, seed: int) -> dict:
    """Seconds and mean lengths of the iterations of one run after the first, and the peak of its memory."""
    flags = FLAGS | WORKLOADS[workload] | {"seed": seed, "run_dir": run_dir}
    command = [sys.executable, "-c", WATCH, sys.executable, COMMANDS[system], *words_of(flags)]
    peak = subprocess.check_output(command, cwd=ROOT, text=True).split()[-1]
    _, *lines = read_jsonl(run_dir / "metrics.jsonl")
    for line in lines:
        line["seconds"] = flags["batch_size"] * line["response_length"] / line["tokens_per_second"]
    row = {key: curve(lines, key) for key in ("seconds", "response_length")}
    return row | {"peak_gib": int(peak) / 2**20, "versions": versions("trl")}


def tokens_per_second(runs: list[dict]) -> float:
    tokens = sum(sum(run["response_length"]) * WORKLOADS[run["workload"]]["batch_size"] for run in runs)
    return tokens / sum(sum(run["seconds"]) for run in runs)


def summary() -> None:
    """Print the speed of all runs of a system together, that of the slowest and the fastest, and the highest peak."""
    lines, yardstick = [], {}
    for (workload, system), runs in group_by(load("speed"), itemgetter("workload", "system")).items():
        speed, each = tokens_per_second(runs), [tokens_per_second([run]) for run in runs]
        ratio = speed / yardstick.setdefault(workload, speed)
        peak = max(run["peak_gib"] for run in runs)
        cells = [f"{speed:.0f} ({min(each):.0f}-{max(each):.0f})", f"{ratio:.2f}", f"{peak:.2f}"]
        lines.append([workload, system, *cells])
    table(["workload", "system", "tokens/s", "relative to TRL", "peak, GiB"], lines, load("speed"))


if __name__ == "__main__":
    make_tail(TAIL["model"])
    cells = product(WORKLOADS, (1, 2, 3), COMMANDS)  # in turns: a slow minute does not hit one system only
    run_all("speed", [dict(zip(("workload", "seed", "system"), cell)) for cell in cells], measure, workers=1)
