"""What bfloat16 does to a small first step, and to the first ratio of a rollout, on a real model.

    python benchmark/bfloat16.py              writes results/bfloat16.json and .md, about 8 minutes on two cores

Weights, gradients and AdamW are float32 in the scripts; with --dtype bfloat16 the model computes with weights rounded
to bfloat16. A step of size --learning_rate is seen only where it carries a weight over a rounding boundary. The weights
of data/smollm2 come from a file of 4 bits a weight, and many of them lie on such a boundary, a tie; those of a model
from the hub are bfloat16 numbers already, as far from it as they can be. Measures, for both: the share of ties, the
share of weights whose rounded value changes by a step of 1e-5 (AdamW's first steps are of that size for every weight),
and the KL of four iterations of rloo.py. Then, of a rollout in its first optimizer step, against the log-probs of
sampling and between micro-batches of 16 rows and of 5, on the toy too: the largest and mean abs(rho - 1) of a token,
and the mean of abs(s - 1) of a response, whose ratio s is the geometric mean of its tokens' (gspo.py).
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers
import tyro
from real import ROOT, command_of
from toy_seeds import processor

sys.path.insert(0, str(ROOT))
import rloo

RESULTS = ROOT / "benchmark" / "results" / "bfloat16.json"
MODEL = ROOT / "data" / "smollm2"
TASKS = {
    "toy": (ROOT / "toy" / "policy", "toy/train.jsonl", 40),
    "SmolLM2-135M": (MODEL, "data/reversal/train.jsonl", 16),
}


def steps(weights: list[torch.Tensor], rate: float = 1e-5) -> dict:
    """Shares of all weights: on a tie, and with another rounded value after a step of the rate up or down."""
    total = sum(x.numel() for x in weights)
    ties = sum(int((x.view(torch.int32) & 0xFFFF == 0x8000).sum()) for x in weights)
    moved = {}
    for sign in (1, -1):
        moved[sign] = sum(int(((x + sign * rate).bfloat16() != x.bfloat16()).sum()) for x in weights)
    return {"ties": ties / total, "moved": (moved[1] + moved[-1]) / 2 / total}


def run(model: Path, dtype: str) -> list[float]:
    """The KL of four iterations."""
    with tempfile.TemporaryDirectory() as folder:
        extra = f"model={model},dtype={dtype},kl_coef=0.001,num_iterations=4,eval_every=0"
        command = command_of(f"{folder}/run", "rloo", 1, extra=extra)
        subprocess.run([sys.executable, *command[1:]], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").open()]
    return [line["kl"] for line in lines]


@torch.no_grad()
def ratios(task: str, dtype: str) -> dict:
    """abs(rho - 1) over the tokens of 32 sampled responses: (largest, mean), and of whole responses the mean."""
    model, dataset, length = TASKS[task]
    args = rloo.Args(model=str(model), dtype=dtype, max_response_length=length)
    auto, device = transformers.AutoModelForCausalLM, torch.device("cpu")
    model, tokenizer = rloo.load(args, auto, "model", args.model, device)
    rows = rloo.load_rows(args, "dataset", str(ROOT / dataset), "train", model, tokenizer)
    torch.manual_seed(1)
    prompts = [row["prompt_ids"] for row in rows[:4]]
    rollout = rloo.generate(model, tokenizer, prompts, args, samples_per_prompt=8)
    again = {}
    for size in (16, 5):
        again[size] = torch.zeros_like(rollout["old_logprobs"])
        for index, batch in rloo.micro_batches(rollout, torch.arange(32), size):
            logprobs = rloo.token_logprobs(model, batch, 1.0)
            again[size][index, : logprobs.shape[1]] = logprobs
    mask, found = rollout["response_mask"], {}
    for name, old in {
        "sampled against recomputed": rollout["old_logprobs"],
        "16 rows against 5": again[5],
    }.items():
        log_ratio = (again[16] - old) * mask
        off = log_ratio[mask].exp().sub(1).abs()
        response = (log_ratio.sum(1) / mask.sum(1)).exp().sub(1).abs()
        found[name] = [float(off.max()), float(off.mean()), float(response.mean())]
    return found


def table(results: dict) -> str:
    lines = ["| weights | dtype | ties | rounded value moves by a step of 1e-5 | KL of iterations 2, 3, 4 |"]
    lines += ["|---|---|---|---|---|"]
    for cell in results["runs"]:
        kl = ", ".join(f"{x:.3f}" for x in cell["kl"][1:])
        lines.append(
            f"| {cell['weights']} | {cell['dtype']} | {cell['ties']:.3f} | {cell['moved']:.3f} | {kl} |"
        )
    head = "| abs(rho - 1), largest (mean); abs(s - 1), mean | sampled against recomputed | 16 against 5 |"
    lines += ["", head, "|---|---|---|"]
    for name, found in results["ratios"].items():
        cells = " | ".join(f"{a:.2g} ({b:.2g}); {s:.2g}" for a, b, s in found.values())
        lines.append(f"| {name} | {cells} |")
    return "\n".join([*lines, "", f"{results['machine']}."]) + "\n"


def main() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    results = {"runs": [], "machine": f"{os.cpu_count()} cores, {processor()}, torch {torch.__version__}"}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("of 4 bits, in float32", "the same rounded to bfloat16"):
            if results["runs"]:
                with torch.no_grad():
                    for x in model.parameters():
                        x.copy_(x.bfloat16().float())
            model.save_pretrained(folder)
            transformers.AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
            shares = steps([x.detach() for x in model.parameters()])
            for dtype in ("float32", "bfloat16"):
                cell = {"weights": name, "dtype": dtype, "kl": run(Path(folder), dtype)} | shares
                results["runs"].append(cell)
                print(cell, flush=True)
    pairs = [(task, dtype) for task in TASKS for dtype in ("float32", "bfloat16")]
    results["ratios"] = {f"{task}, {dtype}": ratios(task, dtype) for task, dtype in pairs}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
