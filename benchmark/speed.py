"""Seconds per iteration and peak memory: our grpo.py and rloo.py, TRL's GRPOTrainer and RLOOTrainer, the bare calls.

    python benchmark/speed.py                              the toy and the long tail, on CPU
    python benchmark/speed.py --works real real_bf16 --name speed_real                     a real model, on CPU
    python benchmark/speed.py --works gpu gpu_real --name speed_gpu                                    on a GPU
    python benchmark/speed.py --works ranks --name speed_ranks       one rank and two, with one core each

Works, all with a learning rate too small to change lengths; the weights are random, but for the toy and the real model:
    toy     toy/policy and its prompts, 16 prompts x 8 responses of at most 40 tokens
    tail    a Llama of 10 M parameters, 8 prompts x 8, lengths geometric: mean about 40, longest about 200
    real    SmolLM2-135M and lists of words to reverse (data/smollm2.py, data/reasoning.py), 8 prompts x 8 responses of
            at most 16 tokens, in float32; real_bf16 the same in bfloat16; gpu_real 64 prompts x 8, bfloat16, on a GPU
    gpu     random weights of Qwen2.5-0.5B's shape, bfloat16, 64 prompts x 8 responses, all of 512 tokens
    ranks   tail, with 16 prompts; ours alone: on one core, under torchrun as two ranks with one core each, and as two
            runs of half the batch side by side, which never wait for one another: the bound of two ranks here

Everything runs in turn, repeated, so that a slow minute of the machine hits all of them. Tokens per second are pooled:
all tokens over all seconds, without the first iteration of a run. TRL is installed into benchmark/.trl, an environment
of its own. Writes results/<name>.json and .md.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro
from toy_seeds import processor

ROOT = Path(__file__).resolve().parent.parent
TRL = ROOT / "benchmark" / ".trl"
WORKS = {
    "toy": {"batch_size": 128, "micro_batch_size": 64, "max_response_length": 40, "iterations": 16},
    "tail": {"batch_size": 64, "micro_batch_size": 8, "max_response_length": 256, "iterations": 5},
    "ranks": {"batch_size": 128, "micro_batch_size": 8, "max_response_length": 256, "iterations": 5},
    "real": {"batch_size": 64, "micro_batch_size": 16, "max_response_length": 16, "iterations": 3},
    "real_bf16": {"batch_size": 64, "micro_batch_size": 16, "max_response_length": 16, "iterations": 3},
    "gpu_real": {"batch_size": 512, "micro_batch_size": 64, "max_response_length": 16, "iterations": 6},
    "gpu": {"batch_size": 512, "micro_batch_size": 32, "max_response_length": 512, "iterations": 4},
}
RANKS = {"2 ranks": "two ranks take", "2 runs": "two runs of half the batch, side by side, take"}
SYSTEMS = {"ours": "ours", "bare": "bare calls", "trl": "TRL"}


@dataclass
class Args:
    works: tuple[str, ...] = ("toy", "tail")
    """Which of toy, tail, ranks, real, real_bf16, gpu, gpu_real."""
    scripts: tuple[str, ...] = ("grpo", "rloo")
    """Which scripts."""
    systems: tuple[str, ...] = ("ours", "bare", "trl")
    """Which of ours, bare, trl."""
    repeats: int = 3
    """Repetitions of everything."""
    name: str = "speed"
    """Name of the result files."""
    run: bool = True
    """Measure; without it the results that lie there are tabulated again."""


def make_words(folder: Path, vocab_size: int, lengths: tuple[int, int]):
    """A tokenizer with words as tokens, and prompts of so many random ones: no hub is needed for that. Gives
    the ids that the config must know."""
    import tokenizers
    import torch
    import transformers

    words = ["<pad>", "<eos>", "?", *(f"w{i}" for i in range(vocab_size - 3))]
    core = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="?")
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", pad_token="<pad>"
    )
    tokenizer.save_pretrained(folder / "model")
    generator = torch.Generator().manual_seed(1)
    with (folder / "prompts.jsonl").open("w") as file:
        for _ in range(512):
            length = int(torch.randint(*lengths, (1,), generator=generator))
            numbers = torch.randint(0, vocab_size - 3, (length,), generator=generator).tolist()
            file.write(json.dumps({"prompt": " ".join(f"w{i}" for i in numbers), "answer": "w1"}) + "\n")
    return {"vocab_size": vocab_size, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}


def make_tail(folder: Path) -> None:
    """A Llama of 10 M parameters with random weights whose EOS has a probability of about 1/40 at every step."""
    import torch
    import transformers

    ids = make_words(folder, 4096, (8, 33))
    torch.manual_seed(0)
    sizes = {"hidden_size": 320, "intermediate_size": 864, "num_hidden_layers": 6, "num_attention_heads": 5}
    config = transformers.LlamaConfig(**sizes, **ids, max_position_embeddings=512)
    model = transformers.LlamaForCausalLM(config)
    # The first number of every state becomes large, and the head reads EOS's logit off it.
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        state = model.model(torch.randint(3, 4096, (64, 64))).last_hidden_state[:, :, 0]
        model.lm_head.weight[1] = 0.0
        model.lm_head.weight[1, 0] = 4.65 / state.mean()  # exp(4.65) = 105 = 4096 / 39
    model.save_pretrained(folder / "model")


def make_gpu(folder: Path) -> None:
    """Random weights of Qwen2.5-0.5B's shape."""
    import torch
    import transformers

    ids = make_words(folder, 151936, (64, 65))
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    }
    rest = {"num_key_value_heads": 2, "tie_word_embeddings": True, "max_position_embeddings": 32768}
    config = transformers.Qwen2Config(**sizes, **ids, **rest)
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder / "model")


def work_of(name: str, script: str, folder: Path) -> dict:
    """Everything that a run needs to know, as JSON."""
    model, dataset = ROOT / "toy" / "policy", ROOT / "toy" / "train.jsonl"
    if "real" in name:
        model, dataset = ROOT / "data" / "smollm2", ROOT / "data" / "reversal" / "train.jsonl"
        if not (model.exists() and dataset.exists()):
            sys.exit("error: no data/smollm2 or no data/reversal; run make real")
    elif name != "toy":
        model, dataset = folder / name / "model", folder / name / "prompts.jsonl"
        if not model.exists():
            model.parent.mkdir()
            (make_gpu if name == "gpu" else make_tail)(model.parent)
    return WORKS[name] | {
        "name": name,
        "script": script,
        "model": str(model),
        "dataset": str(dataset),
        "k": 8,
        "steps": 2 if script == "grpo" else 1,  # RLOO takes one optimizer step per rollout
        "learning_rate": 1e-9,
        "device": "cuda" if name.startswith("gpu") else "cpu",
        "dtype": "bfloat16" if name in ("gpu", "gpu_real", "real_bf16") else "float32",
    }


def command_of(system: str, work: dict) -> list[str]:
    if system == "trl":
        return [str(TRL / "bin" / "python"), str(ROOT / "benchmark" / "speed_trl.py"), json.dumps(work)]
    names = "model dataset seed batch_size micro_batch_size max_response_length learning_rate device dtype".split()
    flags = {name: work[name] for name in names}
    flags |= {"samples_per_prompt": work["k"], "num_iterations": work["iterations"]}
    flags |= {"run_dir": f"{work['folder']}/run", "eval_every": 0, "log_every": 10**6}
    start = [sys.executable]
    if work.get("ranks", 1) > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(work["ranks"])]
    return [*start, str(ROOT / "benchmark" / f"speed_{system}.py"), json.dumps(work | {"flags": flags})]


def run(system: str, work: dict) -> dict:
    """One run: seconds of each iteration but the first, lengths, peak memory."""
    lines = []
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryDirectory() as folder:
        # TRL's cache of datasets, new each time: ours reads the prompts anew in every run, too.
        environment["HF_DATASETS_CACHE"] = f"{folder}/datasets"
        command = command_of(system, work | {"folder": folder})
        if "cores" in work:
            command = ["taskset", "-c", ",".join(map(str, work["cores"])), *command]
            environment |= {"OMP_NUM_THREADS": "1"}
        with tempfile.TemporaryFile("w+") as errors:
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, stdout=pipe, stderr=errors, text=True, env=environment)
            for line in process.stdout:
                if line.startswith(('{"time"', '{"seconds"')):
                    lines.append(json.loads(line))
            if process.wait():
                errors.seek(0)
                said = errors.read()[-3000:]
                raise SystemExit(f"{' '.join(command)}\nended with {process.returncode}\n{said}")
    if system == "bare":
        phases = {name: [x["phases"][name] for x in lines[1:]] for name in lines[0]["phases"]}
        pair = {"seconds": [x["bare"] for x in lines[1:]], "with_script": [x["seconds"] for x in lines[1:]]}
        return pair | {"inference": [x["inference"] for x in lines[1:]], "phases": phases}
    return {
        "seconds": [b["time"] - a["time"] for a, b in itertools.pairwise(lines)],
        "lengths": [line["length"] for line in lines[1:]],
        "rollouts": [line.get("rollout") for line in lines[1:]],
        "peak_gib": lines[-1]["peak"],
    }


def run_apart(work: dict) -> dict:
    """Two runs of half the batch at the same time, a core each: what two ranks would take that never wait."""
    half = work | {"batch_size": work["batch_size"] // 2}
    halves = [half | {"cores": [core], "seed": 2 * work["seed"] + core} for core in (0, 1)]
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(run, ["ours"] * 2, halves))
    means = {}
    for name in ("seconds", "lengths"):
        means[name] = [statistics.mean(pair) for pair in zip(*(x[name] for x in results))]
    return means | {"peak_gib": max(x["peak_gib"] for x in results)}


def summary(runs: list[dict], batch_size: int) -> dict:
    """Tokens per second pooled over all runs; seconds and memory as medians over them."""
    seconds = [statistics.median(run["seconds"]) for run in runs]
    result = {"seconds": statistics.median(seconds), "low": min(seconds), "high": max(seconds)}
    if "with_script" in runs[0]:  # iteration by iteration, since these two have the same shapes
        for bare in ("seconds", "inference"):
            ratios = [b / a for run in runs for a, b in zip(run[bare], run["with_script"], strict=True)]
            result[f"over_{bare}"] = statistics.quantiles(ratios if len(ratios) > 1 else ratios * 2, n=4)
        phases = {name: statistics.mean(runs[-1]["phases"][name]) for name in runs[-1]["phases"]}
        return result | {"phases": phases}
    tokens = batch_size * sum(sum(run["lengths"]) for run in runs)
    return result | {
        "tokens_per_second": tokens / sum(sum(run["seconds"]) for run in runs),
        "length": statistics.mean(x for run in runs for x in run["lengths"]),
        "peak_gib": statistics.median(run["peak_gib"] for run in runs),
    }


def table(results: dict) -> str:
    lines = [
        "| work | script | | seconds per iteration (low-high) | tokens/s | mean length | peak memory, GiB |"
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    cells, ratios = {}, []
    for cell in results["cells"]:
        s = summary(cell["runs"], WORKS[cell["work"]]["batch_size"])
        cells[cell["work"], cell["script"], cell["system"]] = s
        numbers = f"{s['seconds']:.3f} ({s['low']:.3f}-{s['high']:.3f}) |"
        rest = " | | |"
        if "length" in s:
            rest = f" {s['tokens_per_second']:.0f} | {s['length']:.1f} | {s['peak_gib']:.2f} |"
        name = SYSTEMS.get(cell["system"], cell["system"])
        lines.append(f"| {cell['work']} | {cell['script']} | {name} | {numbers}{rest}")
    for (work, script, system), s in cells.items():
        ours = cells.get((work, script, "ours")) or cells.get((work, script, "1 rank"))
        if system == "bare":
            low, median, high = s["over_seconds"]
            ratios.append(
                f"{work}, {script}: ours takes {median:.3f} of the bare calls' time ({low:.3f}-{high:.3f}), "
                f"median and quartiles over pairs of iterations; "
                f"{s['over_inference'][1]:.3f} where these sample in inference mode too"
            )
            total = sum(s["phases"].values())
            parts = ", ".join(f"{name} {x / total:.2f}" for name, x in s["phases"].items())
            ratios.append(f"{work}, {script}: shares of the bare calls: {parts}")
        elif system == "trl" and ours:
            faster = ours["tokens_per_second"] / s["tokens_per_second"]
            memory = ours["peak_gib"] / s["peak_gib"]
            ratios.append(
                f"{work}, {script}: {faster:.2f} times TRL's tokens/s, {memory:.2f} of its peak memory"
            )
        elif system in RANKS:
            ratio = ours["tokens_per_second"] / s["tokens_per_second"]
            ratios.append(f"{work}, {script}: {RANKS[system]} {ratio:.3f} of one rank's time per token")
        if work == "gpu" and system == "ours":
            runs = next(x["runs"] for x in results["cells"] if (x["script"], x["system"]) == (script, system))
            rollout = statistics.median(x for run in runs for x in run["rollouts"])
            # A step reads the weights, 494 M in bfloat16, and 12 KiB for each of 320 tokens (on average) of 512 rows.
            speed = 512 * (2 * 494e6 + 512 * 320 * 12288) / rollout / 1e9
            share = speed / results["copy_gb_per_second"]
            ratios.append(
                f"{work}, {script}: the rollout reads {speed:.0f} GB/s, {share:.2f} of what a copy reads and writes"
            )
    head = f"`{results['command']}` on {results['machine']}, {results['versions']}."
    return "\n".join([head, "", *lines, "", *(f"- {ratio}" for ratio in ratios)]) + "\n"


def versions(python: str) -> str:
    code = "import importlib.metadata as m; print(', '.join(f'{x} {m.version(x)}' for x in %r.split()))"
    names = "torch transformers" + (" trl" if python != sys.executable else "")
    command = [python, "-c", code % names]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main(args: Args) -> None:
    path = ROOT / "benchmark" / "results" / f"{args.name}.json"
    if args.run:
        if "trl" in args.systems and not (TRL / "installed").exists():
            subprocess.run([sys.executable, "-m", "venv", TRL], check=True)
            requirements = ROOT / "benchmark" / "trl_requirements.txt"
            subprocess.run([TRL / "bin" / "pip", "install", "--quiet", "-r", requirements], check=True)
            (TRL / "installed").touch()
        cells = {}
        with tempfile.TemporaryDirectory() as folder:
            for repeat in range(args.repeats):
                for name in args.works:
                    for script in args.scripts:
                        work = work_of(name, script, Path(folder)) | {"seed": repeat + 1}
                        if name == "ranks":
                            two = work | {"cores": [0, 1], "ranks": 2}
                            todo = {"1 rank": (run, "ours", work | {"cores": [0]})}
                            todo |= {"2 ranks": (run, "ours", two), "2 runs": (run_apart, work)}
                        else:
                            todo = {system: (run, system, work) for system in args.systems}
                        for system, (function, *its_arguments) in todo.items():
                            result = function(*its_arguments)
                            cells.setdefault((name, script, system), []).append(result)
                            median = statistics.median(result["seconds"])
                            print(f"{name} {script} {system}: {median:.3f} s", flush=True)
        import torch

        cuda = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
        copy_speed = None
        if "gpu" in args.works:
            one, other = (torch.empty(2**30, dtype=torch.uint8, device="cuda") for _ in range(2))
            for count in (1, 50):  # the first to warm up
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(count):
                    one.copy_(other)
                torch.cuda.synchronize()
                copy_speed = 2 * count * 2**30 / (time.perf_counter() - start) / 1e9
        results = {
            "command": " ".join(["python", *sys.argv]),
            "args": asdict(args),
            "copy_gb_per_second": copy_speed,
            "machine": f"{os.cpu_count()} cores, {processor()}{cuda}",
            "versions": versions(sys.executable)
            + (f"; for TRL: {versions(str(TRL / 'bin' / 'python'))}" if "trl" in args.systems else ""),
            "cells": [
                {"work": w, "script": s, "system": x, "runs": runs} for (w, s, x), runs in cells.items()
            ],
        }
        path.write_text(json.dumps(results, indent=1) + "\n")
    results = json.loads(path.read_text())
    path.with_suffix(".md").write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
