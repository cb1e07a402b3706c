"""What fits: the memory of a rank by model size, computed, and the same computation beside measured peaks.

    python benchmark/fits.py               tabulates, with the measured peaks that results/ has
    python benchmark/fits.py --measure     first measures grpo.py on this machine (data/smollm2 and .reversal, 6 GB)

What layers keep for the backward pass is counted on the model itself, with tensors that have a shape and no memory.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import memory
import torch
import transformers
import tyro
from real import FLAGS
from torch._subclasses.fake_tensor import FakeTensorMode
from toy_seeds import processor

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results" / "fits.json"
sys.path.insert(0, str(ROOT))
import grpo  # noqa: E402

SHAPES = {  # hidden size, of the MLP, layers, heads, key-value heads, vocabulary, whether head and embedding are one
    "SmolLM2-135M": (576, 1536, 30, 9, 3, 49152, True),
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "Qwen2.5-3B": (2048, 11008, 36, 16, 2, 151936, True),
    "Qwen2.5-7B": (3584, 18944, 28, 28, 4, 152064, False),
}
NAMES = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size"
# README's command for 8 GPUs: 256 responses, 4 in a micro-batch
README = {
    "rows": 32,
    "micro_rows": 4,
    "prompt": 256,
    "response": 1024,
    "bfloat16": True,
    "checkpointing": True,
}
PASS = {"rows": 0, "micro_rows": 8, "prompt": 64, "response": 256}  # of memory.py
REAL = {"rows": 32, "micro_rows": 16, "prompt": 57, "response": 16}  # of real.py
RUNS = {"": REAL, "--kl_coef 0 --gradient_checkpointing": REAL | {"reference": False, "checkpointing": True}}


@dataclass
class Args:
    measure: bool = False
    """Measure the peak RSS of three runs of grpo.py, two iterations each."""


def config_of(name):
    kind = transformers.Qwen2Config if "Qwen" in name else transformers.LlamaConfig
    *sizes, tied = SHAPES[name]
    return kind(**dict(zip(NAMES.split(), sizes)), tie_word_embeddings=tied)


def kept(config, rows, length, bfloat16=False):
    """The parameters of a model, and the bytes that its layers keep for the backward pass of rows x length tokens."""
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        weights, sizes = {x.untyped_storage()._cdata for x in model.parameters()}, {}

        def count(x):
            if x.untyped_storage()._cdata not in weights:
                sizes[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
            return x

        ids, mask = torch.ones(2, rows, length, dtype=torch.long)
        mask[0, 0] = 0  # some padding, since without any there would be no mask to keep
        inputs = grpo.model_inputs(ids, mask)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            model.get_decoder()(**inputs, use_cache=False)
    return model.num_parameters(), sum(sizes.values())


def parts(config, rows, micro_rows, prompt, response, bfloat16=False, checkpointing=False, reference=True):
    """Bytes by purpose, and the parameters."""
    layers, width, vocab = config.num_hidden_layers, config.hidden_size, config.vocab_size
    length, head = prompt + response, width // config.num_attention_heads
    count, activations = kept(config, micro_rows, length, bfloat16)
    layer = activations / layers
    if checkpointing:  # every layer's input, and one layer whole
        activations = layers * micro_rows * length * width * 4 + layer
    logits = micro_rows * (response + 1) * vocab * 4
    result = {"parameters": count, "weights": 4 * count, "gradients": 4 * count, "AdamW": 8 * count}
    result |= {"reference": 4 * count * reference, "copy": 2 * count * bfloat16}
    result["cache"] = rows * length * 2 * layers * config.num_key_value_heads * head * (2 if bfloat16 else 4)
    result["sampling"] = 6 * rows * vocab * 4  # logits, and what is made of them
    # In the backward pass: log-probs, their gradient and that of the logits, or the gradients of a layer
    result |= {"activations": activations, "logits": max(3 * logits + 4 * vocab * width, 2 * layer)}
    return result


def peak(x):
    """Bytes at most: what is always there, and the larger of rollout and backward pass."""
    always = x["weights"] + x["gradients"] + x["AdamW"] + x["reference"]
    return always + x["copy"] + max(x["cache"] + x["sampling"], x["activations"] + x["logits"])


def measure():
    """Peak RSS in GiB of grpo.py on the toy, which is all but the model, and on the real model."""
    toy, real = (
        "--num_iterations 2 --eval_every 0",
        f"{' '.join(FLAGS.format(task='reversal').split())} --num_iterations 2 --eval_every 0",
    )
    # By default glibc keeps what is freed, 0.6 GiB of it here, so that the peak would be that of its heap.
    results, environment = {}, os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    for name, flags in {"toy": toy, **{extra: f"{real} {extra}" for extra in RUNS}}.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, ROOT / "grpo.py", *flags.split(), "--run_dir", folder]
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, env=environment)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode:
                sys.exit(f"grpo.py {flags} ended with {process.returncode}")
        results[name] = usage.ru_maxrss / 2**20
        print(f"{results[name]:6.2f} GiB  grpo.py {flags}", flush=True)
    machine = f"{os.cpu_count()} cores, {processor()}, torch {torch.__version__}"
    RESULTS.write_text(json.dumps({"machine": machine, "gib": results}, indent=1) + "\n")


def models_table():
    lines = [
        "| model | parameters | weights, gradients, AdamW | reference | bfloat16 copy | cache | activations |"
    ]
    lines[0] += " logits | at most | GPU of |"
    lines += ["|" + "---|" * 10]
    for name in SHAPES:
        x = parts(config_of(name), **README)
        cells = [
            x["weights"] + x["gradients"] + x["AdamW"],
            x["reference"],
            x["copy"],
            x["cache"] + x["sampling"],
        ]
        cells = " | ".join(f"{y / 2**30:.1f}" for y in [*cells, x["activations"], x["logits"], peak(x)])
        card = next((f"{gb} GB" for gb in (16, 24, 48, 80, 141) if peak(x) < 0.95e9 * gb), "none")
        lines.append(f"| {name} | {x['parameters'] / 1e9:.3f} B | {cells} | {card} |")
    return lines


def checks_table():
    gib, runs = (
        json.loads((ROOT / "benchmark/results/memory.json").read_text()),
        json.loads(RESULTS.read_text()),
    )
    rows = []
    for label, case in memory.CASES.items():
        if "logsumexp" in case:
            continue
        options = PASS | {"checkpointing": case.get("checkpointing", False)}
        options |= {"micro_rows": case.get("rows", 8), "response": case.get("response", 256)}
        x = parts(transformers.Qwen2Config(**case["shape"]), **options)
        rows.append((f"a pass, {label}", x["activations"] + x["logits"], gib["gib"][label]))
    for flags, options in RUNS.items():
        x, measured = parts(config_of("SmolLM2-135M"), **options), runs["gib"][flags] - runs["gib"]["toy"]
        rows.append((f"SmolLM2-135M, `{f'grpo.py {flags}'.strip()}`", peak(x), measured))
    lines = ["| what | computed | measured |", "|---|---|---|"]
    lines += [f"| {label} | {x / 2**30:.2f} | {y:.2f} |" for label, x, y in rows]
    return lines, runs["machine"]


def main(args):
    if args.measure:
        measure()
    checks, machine = checks_table()
    lines = [*models_table(), "", *checks, "", f"GiB; measured on {machine}."]
    RESULTS.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print(*lines, sep="\n")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
