"""Speed and peak memory of grpo.py, of TRL's GRPOTrainer and of the variants, on CPU.

    python experiments/speed.py                                                     the toy and the long tail
    python experiments/speed.py --workloads real --name speed_real                  after make real: SmolLM2-135M
    python experiments/speed.py --workloads ranks --name speed_ranks                one rank and two, a core each
    python experiments/speed.py --workloads sharded --name speed_sharded            two ranks, with and without FSDP2
    python experiments/speed.py --workloads lora --name speed_lora                  SmolLM2-135M with and without LoRA
    python experiments/speed.py --workloads vllm --name speed_vllm                  with and without vLLM

The workloads, all with a learning rate too small to change the lengths:

    toy     the toy's policy and prompts
    tail    a Llama of 10 M parameters with random weights. The probability of EOS is the same at every step, so that
            the lengths have a geometric distribution with a long tail
    real    SmolLM2-135M and lists of words to reverse, in float32
    ranks   the model of tail: on one core, as two ranks with a core each, and as two runs of half the batch with a
            core each. The two runs never wait for each other, which bounds the speed of two ranks
    sharded the two ranks of ranks with grpo.py and with grpo_fsdp.py
    lora    the model of real with grpo.py and with grpo_lora.py
    vllm    the model of real with grpo.py and with grpo_vllm.py, both in the environment of vLLM

The systems take turns, so that a slow minute of the machine does not hit only one of them. The first iteration of a
run does not count. TRL has its own environment in experiments/.trl, which the first call makes.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tyro
from common import ROOT, environment, group_by, load, mean, run_all, table

TOY = {"batch_size": 128, "micro_batch_size": 64, "max_response_length": 40, "num_iterations": 16}
TAIL = {"batch_size": 64, "micro_batch_size": 8, "max_response_length": 256, "num_iterations": 5}
REAL = {"batch_size": 64, "micro_batch_size": 16, "max_response_length": 16, "num_iterations": 3}
WORKLOADS = {
    "toy": TOY,
    "tail": TAIL,
    "ranks": TAIL | {"batch_size": 128},
    "real": REAL,
    "sharded": TAIL | {"batch_size": 128},
    "lora": REAL | {"batch_size": 32},
    "vllm": REAL | {"batch_size": 32},
}
FLAGS = {
    "samples_per_prompt": 8,
    "num_minibatches": 2,
    "learning_rate": 1e-9,
    "dtype": "float32",
    "device": "cpu",
    "eval_every": 0,
    "log_every": 10**6,
}
TRL = {"ours": "grpo", "trl": ""}
# The systems of each workload, and the script that runs in each
SYSTEMS = {
    "toy": TRL,
    "tail": TRL,
    "real": TRL,
    "ranks": {"1 rank": "grpo", "2 ranks": "grpo", "2 runs": "grpo"},
    "sharded": {"2 ranks": "grpo", "2 ranks, FSDP2": "grpo_fsdp"},
    "lora": {"grpo.py": "grpo", "grpo_lora.py": "grpo_lora"},
    "vllm": {"grpo.py": "grpo", "grpo_vllm.py": "grpo_vllm"},
}


@dataclass
class Args:
    workloads: tuple[str, ...] = ("toy", "tail")
    """Any of toy, tail, ranks, sharded, real, lora and vllm."""
    repeats: int = 3
    """Runs of each, with the seeds 1, 2, ..."""
    name: str = "speed"
    """Name of the result file."""


def make_tail(folder: Path) -> None:
    """The model and the prompts of the workload tail. A tokenizer with words as tokens needs no download."""
    import tokenizers
    import torch
    import transformers

    vocab_size = 4096
    words = ["<pad>", "<eos>", "?", *(f"w{i}" for i in range(vocab_size - 3))]
    ids = {word: i for i, word in enumerate(words)}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="?"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "<eos>", "pad_token": "<pad>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, **special)
    tokenizer.save_pretrained(folder / "model")

    generator = torch.Generator().manual_seed(1)
    with (folder / "prompts.jsonl").open("w") as file:
        for _ in range(512):
            length = int(torch.randint(8, 33, (1,), generator=generator))
            numbers = torch.randint(0, vocab_size - 3, (length,), generator=generator).tolist()
            prompt = " ".join(f"w{i}" for i in numbers)
            file.write(json.dumps({"prompt": prompt, "answer": "w1"}) + "\n")

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


def run_child(command: list, cores: list[int] | None = None) -> list[dict]:
    """The JSON lines that a program prints, one for each iteration. With cores, on these and with one thread."""
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    if cores:
        command = ["taskset", "-c", ",".join(map(str, cores)), *command]
        env |= {"OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout
    return [json.loads(line) for line in output.splitlines() if line.startswith('{"')]


def columns(lines: list[dict]) -> dict:
    """Lists over the iterations after the first, and what the last line says of the whole run."""
    whole = {key: lines[-1][key] for key in ("peak_gib", "trl") if key in lines[-1]}
    return {key: [line[key] for line in lines[1:]] for key in lines[-1] if key not in whole} | whole


def measure(tail: Path, run_dir: Path, workload: str, system: str, seed: int) -> dict:
    """Seconds and mean lengths of the iterations of one run, and its peak memory."""
    model, dataset = tail / "model", tail / "prompts.jsonl"
    if workload == "toy":
        model, dataset = ROOT / "toy" / "policy", ROOT / "toy" / "train.jsonl"
    if workload in ("real", "lora", "vllm"):
        model, dataset = ROOT / "data" / "smollm2", ROOT / "data" / "reversal" / "train.jsonl"
    flags = FLAGS | WORKLOADS[workload]
    flags |= {"model": str(model), "dataset": str(dataset), "seed": seed, "run_dir": str(run_dir)}

    python = ROOT / ".venv-vllm" / "bin" / "python" if workload == "vllm" else sys.executable
    ours = [python, ROOT / "experiments" / "speed_ours.py", SYSTEMS[workload][system]]
    if system == "trl":
        trl = ROOT / "experiments" / "speed_trl.py"
        return columns(run_child([environment("trl"), trl, json.dumps(flags)]))
    if system == "1 rank":
        return columns(run_child([*ours, json.dumps(flags)], [0]))
    if system.startswith("2 ranks"):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        return columns(run_child([*torchrun, *ours[1:], json.dumps(flags)], [0, 1]))
    if system == "2 runs":
        flags["batch_size"] //= 2

        def run_half(core: int) -> dict:
            half = flags | {"seed": 2 * seed + core, "run_dir": f"{run_dir}{core}"}
            return columns(run_child([*ours, json.dumps(half)], [core]))

        with ThreadPoolExecutor() as pool:
            first, second = pool.map(run_half, [0, 1])
        both = {key: [mean(pair) for pair in zip(first[key], second[key])] for key in ("seconds", "lengths")}
        return both | {"peak_gib": max(first["peak_gib"], second["peak_gib"])}
    return columns(run_child([*ours, json.dumps(flags)]))


# --- tables ---


def tokens_per_second(runs: list[dict]) -> float:
    """All tokens over all seconds."""
    tokens = sum(sum(run["lengths"]) * WORKLOADS[run["workload"]]["batch_size"] for run in runs)
    return tokens / sum(sum(run["seconds"]) for run in runs)


def show_speed(runs: list[dict]) -> str:
    each = [tokens_per_second([run]) for run in runs]
    digits = 0 if min(each) >= 100 else 1
    text = f"{tokens_per_second(runs):.{digits}f}"
    return text if len(runs) == 1 else f"{text} ({min(each):.{digits}f}-{max(each):.{digits}f})"


def show_peak(runs: list[dict]) -> str:
    return f"{max(run['peak_gib'] for run in runs):.2f}"


def comparison(*names: str) -> None:
    """Ours against TRL."""
    rows = []
    for name in names:
        runs = group_by(load(name)["runs"], "workload", "system")
        for workload in dict.fromkeys(workload for workload, _ in runs):
            ours, trl = runs[workload, "ours"], runs[workload, "trl"]
            faster = tokens_per_second(ours) / tokens_per_second(trl)
            speeds = [show_speed(ours), show_speed(trl), f"{faster:.2f}"]
            rows.append([workload, *speeds, show_peak(ours), show_peak(trl)])
    heads = ["workload", "grpo.py, tokens/s", f"TRL {trl[0]['trl']}", "ratio", "grpo.py, GiB", "TRL"]
    table(heads, rows)


def others(workload: str) -> None:
    """The systems of a workload, relative to the first."""
    runs = group_by(load(f"speed_{workload}")["runs"], "system")
    first, *_ = SYSTEMS[workload]
    rows = []
    for system in SYSTEMS[workload]:
        some = runs[system,]
        share = tokens_per_second(some) / tokens_per_second(runs[first,])
        rows.append([system, show_speed(some), f"{share:.2f}", show_peak(some)])
    table(["", "tokens/s", f"speed / {first}", "GiB of a rank"], rows)


def machines(*names: str) -> None:
    """Print the commands and the machines of these results."""
    heads = [load(name)["made"] for name in names]
    table(["command", "machine"], [[f"`{head['command']}`", head["machine"]] for head in heads])


def main(args: Args) -> None:
    cells = []
    for seed in range(1, args.repeats + 1):
        for workload in args.workloads:
            for system in SYSTEMS[workload]:
                cells.append({"workload": workload, "system": system, "seed": seed})
    with tempfile.TemporaryDirectory() as folder:
        tail = Path(folder)
        if {"tail", "ranks", "sharded"} & set(args.workloads):
            make_tail(tail)
        run_all(args.name, cells, functools.partial(measure, tail), workers=1)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, use_underscores=True))
