"""What has to hold on a GPU, in ten minutes and without a network: PASS or FAIL with limits.

    python experiments/gpu_check.py                                     all but `ranks`; or --only attention toy
    python experiments/gpu_check.py --small --json runs/small.json      tiny models, also on a CPU: tests this file
    torchrun --nproc-per-node 2 experiments/gpu_check.py --only ranks --json runs/ranks.json            on two GPUs

Models have random weights and the sizes of Qwen2.5. Limits of memory are those of experiments/memory.py; those of time
are estimates, since no GPU has run this yet. Attach runs/gpu_check.json to an issue, whatever it says.
"""

import argparse
import contextlib
import gc
import importlib
import json
import os
import sys
import tempfile
import time
import types
from pathlib import Path
from unittest import mock

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
for name in ("datasets", "tyro"):  # a machine may lack them, and nothing here calls them
    try:
        importlib.import_module(name)
    except ImportError:
        sys.modules[name] = types.ModuleType(name)

import torch  # noqa: E402
import transformers  # noqa: E402
from common import load, versions  # noqa: E402
from memory import SIZES, make_model  # noqa: E402

import grpo  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--only", nargs="*")
parser.add_argument("--small", action="store_true")
parser.add_argument("--json", default="runs/gpu_check.json", type=Path)
options = parser.parse_args()
DEVICE = grpo.Args.device
LARGE = not options.small
LONG = {"dtype": "bfloat16", "gradient_checkpointing": True, "learning_rate": 1e-6, "num_iterations": 2}
LONG |= {"batch_size": 128, "micro_batch_size": 4} if LARGE else {"batch_size": 16}
RESULTS = []


def report(name, value, low=None, high=None):
    """Print and keep a number, and whether it is within its limits. Without limits it is a note."""
    is_within = (low is None or value >= low) and (high is None or value <= high)  # NaN is not
    word = "note" if low is high is None else "PASS" if is_within else "FAIL"
    RESULTS.append({"check": name, "value": value, "low": low, "high": high, "result": word})
    if grpo.RANK == 0:
        print(f"{word}  {name:50} {value:10.4g}   limits: {low} to {high}", flush=True)


def files(size):
    """Flags: a random model of this size, which hardly ever samples an EOS, and 128 prompts of up to 512 tokens."""
    folder, prompts = f"{options.folder}/{size}", Path(f"{options.folder}/{size}.jsonl")
    if not prompts.exists():
        with torch.device(DEVICE):
            shape = (SIZES[size], "bfloat16") if LARGE else ((64, 128, 2, 4, 2), "bfloat16", 1000)
            make_model(*shape).save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained("toy/policy").save_pretrained(folder)
        texts = ["1 + " * ((256 if LARGE else 8) - i % 4) for i in range(128)]
        prompts.write_text("\n".join(json.dumps({"prompt": text, "answer": "1"}) for text in texts))
    return {"model": folder, "dataset": str(prompts), "eval_dataset": str(prompts)}


def run(name, script, limit, **flags):
    """Run a script in this process, without saving if the model is large. Returns its metrics."""
    module = importlib.import_module(script)
    flags = {"run_dir": tempfile.mkdtemp(dir=options.folder), "device": DEVICE, "eval_every": 0} | flags
    save = mock.Mock(side_effect=StopIteration) if "model" in flags else module.save_checkpoint
    with contextlib.suppress(StopIteration), open(f"{options.folder}/output.txt", "a") as output:
        with mock.patch.object(module, "save_checkpoint", save), contextlib.redirect_stdout(output):
            module.main(module.Args(**flags))
    rows = [json.loads(line) for line in open(f"{flags['run_dir']}/metrics.jsonl")]
    report(f"{name}: logprob_difference", max(row.get("logprob_difference", 0) for row in rows), 0, limit)
    return rows


def attention():
    """Padding on the left leaves queries without a key. Are outputs and gradients finite, and right?"""
    kernels = torch.nn.attention.SDPBackend
    for length in (64, 704, 1088, 1536):
        inputs = [torch.randn(4, 4, length, 128, device=DEVICE) for _ in range(3)]
        mask = torch.ones(4, 1, length, length, dtype=torch.bool, device=DEVICE).tril()
        mask[0, ..., : length // 3] = False
        results = []
        for dtype, kernel in (torch.float32, kernels.MATH), (torch.bfloat16, kernels.EFFICIENT_ATTENTION):
            leaves = [x.to(dtype).detach().requires_grad_() for x in inputs]
            with torch.nn.attention.sdpa_kernel(kernel if LARGE else kernels.MATH):
                output = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=mask)
            output = output.where(mask.any(-1, keepdim=True), 0)  # without the queries that have no key
            output.square().sum().backward()
            results.append(torch.stack([output.detach(), *(x.grad for x in leaves)]).flatten(1).float())
        error = (results[0] - results[1]).norm(dim=1) / results[0].norm(dim=1)
        report(f"attention, {length} tokens: relative error", float(error.max()), 0, 0.02)


def toy():
    """The toy learns as on a CPU."""
    flags = {} if LARGE else {"num_iterations": 2, "batch_size": 16}
    first, *rows = run("toy", "grpo", 1e-5, **flags, eval_every=40)
    report("toy: eval/score/2-5 before training", first["eval/score/2-5"], 0.08, 0.11)
    report("toy: kl of iteration 1", abs(rows[0]["kl"]), 0, 1e-4)
    report("toy: score at the end", sum(row["score"] for row in rows[-5:]) / 5, 0.95 if LARGE else None)
    run("toy in bfloat16", "grpo", 0.05, **flags, dtype="bfloat16", gradient_checkpointing=True)


def decode():
    """Milliseconds for a token of a 1.5B: some 25, for 8 rows as for 256."""
    args = grpo.Args(device=DEVICE, dtype="bfloat16", max_response_length=64 if LARGE else 4)
    for args.gradient_checkpointing in (False, True):
        model, tokenizer = grpo.load_model(args, files("1.5B")["model"], transformers.AutoModelForCausalLM)
        for num_rows in (8, 128, 256):
            prompts = [[3] * (20 + i % 7) for i in range(num_rows // 8)]
            grpo.generate(args, model, tokenizer, prompts, 8)
            began = time.perf_counter()
            grpo.generate(args, model, tokenizer, prompts, 8)["truncated"].tolist()  # waits for the GPU
            milliseconds = 1000 * (time.perf_counter() - began) / args.max_response_length
            name = f"decode, {num_rows} rows{', checkpointing' * args.gradient_checkpointing}: ms a token"
            report(name, milliseconds, 0, 30 if LARGE else None)


def readme():
    """README's command: time, and memory against the table of docs/recipes.md."""
    row = run("README", "grpo", 0.05, **files("1.5B"), **LONG, max_response_length=1024 if LARGE else 8)[-1]
    report("README: tokens per second", row["tokens_per_second"], 2000 if LARGE else 0)
    report("README: seconds of sampling", row["sampling_seconds"], 0, 40 if LARGE else None)
    if LARGE:
        peak = max(load("memory")[1][stage] for stage in ("sampling", "update"))  # of this command
        peak_now = torch.accelerator.max_memory_allocated() / 2**30
        report("README: peak, GiB", peak_now, 0.94 * peak, 1.06 * peak)
        report("README: reserved, GiB", torch.accelerator.max_memory_reserved() / 2**30, 0, 1.2 * peak)


def small_card():
    """The recipes for 24 GB, with an evaluation, if a GPU has 23 GiB to give."""
    flags = LONG | {"max_response_length": 128 if LARGE else 8, "eval_every": 1}
    if LARGE:
        torch.cuda.set_per_process_memory_fraction(23 * 2**30 / torch.cuda.mem_get_info()[1])
    run("24 GB, LoRA 1.5B", "grpo_lora", 0.05, **files("1.5B"), **flags)
    flags |= {"batch_size": 48, "micro_batch_size": 1} if LARGE else {}
    run("24 GB, LoRA 7B", "grpo_lora", 0.05, **files("7B"), **flags)


def resume():
    """Stopped and resumed, a run goes on as it would have. On a GPU attention adds in any order."""
    norms = []
    for name, num_iterations in (("whole", 4), ("resumed", 2), ("resumed", 4)):
        flags = {"batch_size": 32, "num_iterations": num_iterations, "run_dir": f"{options.folder}/{name}"}
        norms.append([row["grad_norm"] for row in run(name, "grpo", 1e-5, **flags)])
    report("resume: difference of grad_norm", max(abs(a - b) for a, b in zip(norms[0], norms[2])), 0, 0.1)


def sharded():
    """FSDP on one rank."""
    run("FSDP", "grpo_fsdp", 1e-5, num_iterations=2, batch_size=64)


def ranks():
    """The collectives, on the ranks that torchrun has started."""
    run_dir = f"runs/gpu_check_{os.environ['MASTER_PORT']}"  # the same on all ranks
    run("ranks", "grpo", 1e-5, num_iterations=2, batch_size=64, run_dir=run_dir)


CHECKS = ["attention", "toy", "decode", "readme", "small_card", "resume", "sharded"]
device = torch.cuda.get_device_name() if DEVICE.startswith("cuda") else DEVICE
machine = [device, torch.version.cuda, *versions(), os.popen("git describe --always --dirty").read().strip()]
print(*machine, sep=", ")
options.json.parent.mkdir(exist_ok=True)
with tempfile.TemporaryDirectory(dir=options.json.parent) as options.folder:
    for name in options.only or CHECKS:
        began = time.time()
        try:
            globals()[name]()
        except (Exception, SystemExit) as error:  # a script exits with its message
            sys.excepthook(*sys.exc_info())
            RESULTS.append({"check": name, "result": "FAIL", "error": repr(error)})
        print(f"      {name}: {time.time() - began:.0f} s", flush=True)
        gc.collect()
        if grpo.RANK == 0:
            options.json.write_text(json.dumps({"machine": machine, "results": RESULTS}, indent=1))
failed = [row["check"] for row in RESULTS if row["result"] == "FAIL"]
print(f"{len(RESULTS)} results, {len(failed)} FAIL {failed}; see {options.json}")
sys.exit(bool(failed))
