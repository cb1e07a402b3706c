"""Speed and peak memory of grpo.py and of TRL's GRPOTrainer on a CPU; docs/results.md has the workloads.

    python -m venv experiments/.trl
    experiments/.trl/bin/pip install --group trl        with pip 25.1 or later
    python experiments/speed.py

The systems take turns, so that a slow minute of the machine does not hit only one of them. The first iteration of a
run does not count.
"""

import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from common import ROOT, curve, group_by, load, run_all, table, words_of

TOY = {"batch_size": 128, "micro_batch_size": 64, "max_response_length": 40, "num_iterations": 16}
TOY |= {"model": ROOT / "toy" / "policy", "dataset": ROOT / "toy" / "train.jsonl"}
TAIL = {"batch_size": 64, "micro_batch_size": 8, "max_response_length": 256, "num_iterations": 5}
WORKLOADS = {"toy": TOY, "tail": TAIL}
FLAGS = {"samples_per_prompt": 8, "num_minibatches": 2, "dtype": "float32", "device": "cpu"}
FLAGS |= {"eval_every": 0, "log_every": 10**6, "save_every": 0}
FLAGS |= {"learning_rate": 1e-9}  # lengths hardly change
COMMANDS = {
    "TRL": [ROOT / "experiments" / ".trl" / "bin" / "python", ROOT / "experiments" / "speed_trl.py"],
    "grpo.py": [sys.executable, ROOT / "grpo.py"],
}
# The peak of a process begins with that of the process which starts it, so a small one does.
WATCH = "import os, sys; _, code, usage = os.wait4(os.spawnv(os.P_NOWAIT, sys.argv[1], sys.argv[1:]), 0); "
WATCH += "print('peak', usage.ru_maxrss); sys.exit(code != 0)"


def make_tail(folder: Path) -> None:
    """A model that ends a response with the same probability at every token, and prompts of 8 to 32 tokens."""
    from make_toy import make_tokenizer, write_jsonl

    torch.manual_seed(0)
    vocab_size = 4096
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(vocab_size - 3))]
    make_tokenizer(words).save_pretrained(folder)
    prompts = [torch.randint(3, vocab_size, (length,)) for length in torch.randint(8, 33, (512,)).tolist()]
    rows = [{"prompt": " ".join(words[i] for i in prompt), "answer": "w1"} for prompt in prompts]
    write_jsonl(folder / "prompts.jsonl", rows)
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
    model.save_pretrained(folder)


def measure(tail: Path, run_dir: Path, workload: str, system: str, seed: int, **_) -> dict:
    """Seconds and mean lengths of the iterations of one run after the first, and the peak of its memory."""
    flags = {"model": tail, "dataset": tail / "prompts.jsonl"} | FLAGS | WORKLOADS[workload]
    words = words_of(flags | {"seed": seed, "run_dir": run_dir})
    command = [sys.executable, "-c", WATCH, *COMMANDS[system], *words]
    options = {"env": os.environ | {"HF_HUB_OFFLINE": "1"}, "stdout": subprocess.PIPE, "text": True}
    output = subprocess.run(command, check=True, **options).stdout.splitlines()
    text = output if system == "TRL" else (run_dir / "metrics.jsonl").read_text().splitlines()
    _, *lines = [json.loads(line) for line in text if line.startswith('{"')]
    if system != "TRL":  # grpo.py logs the speed
        size = WORKLOADS[workload]["batch_size"]
        lines = [x | {"seconds": size * x["response_length"] / x["tokens_per_second"]} for x in lines]
    row = {"seconds": curve(lines, "seconds"), "response_length": curve(lines, "response_length")}
    row |= {"peak_gib": int(output[-1].split()[1]) / 2**20}
    return row | ({"versions": lines[-1]["versions"]} if system == "TRL" else {})


def tokens_per_second(runs: list[dict]) -> float:
    tokens = sum(sum(run["response_length"]) * WORKLOADS[run["workload"]]["batch_size"] for run in runs)
    return tokens / sum(sum(run["seconds"]) for run in runs)


def summary() -> None:
    """Print the speed of all runs of a system together, that of the slowest and the fastest, and the highest peak."""
    lines, yardstick = [], {}
    for (workload, system), runs in group_by(load("speed"), "workload", "system").items():
        speed, each = tokens_per_second(runs), [tokens_per_second([run]) for run in runs]
        ratio = speed / yardstick.setdefault(workload, speed)
        peak = max(run["peak_gib"] for run in runs)
        cells = [f"{speed:.0f} ({min(each):.0f}-{max(each):.0f})", f"{ratio:.2f}", f"{peak:.2f}"]
        lines.append([workload, system, *cells])
    table(["workload", "system", "tokens/s", "relative to TRL", "peak, GiB"], lines, load("speed"))


if __name__ == "__main__":
    cells = []
    for workload, seed in itertools.product(WORKLOADS, (1, 2, 3)):
        cells.append({"workload": workload, "seed": seed, "system": "TRL"})
        cells.append({"workload": workload, "seed": seed, "system": "grpo.py", "script": "grpo"})
    with tempfile.TemporaryDirectory() as folder:
        make_tail(Path(folder))
        run_all("speed", cells, functools.partial(measure, Path(folder)), workers=1)
