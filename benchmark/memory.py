"""The peak memory of one forward and backward pass: what logits take, and what recomputed activations save.

    python benchmark/memory.py                      on a GPU if there is one (torch's peak), else on CPU (peak RSS)

Every case is a process of its own. On CPU the peak is what the process held at most, less what it held before,
so weights and imports do not count; on a GPU what torch had allocated at most, less what it had before.
Writes results/<name>.json and .md.
"""

import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from toy_seeds import processor

ROOT = Path(__file__).resolve().parent.parent
QWEN = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}
QWEN |= {"vocab_size": 151936, "tie_word_embeddings": True, "num_hidden_layers": 24}
WIDE = QWEN | {"num_hidden_layers": 1}
DEEP = QWEN | {"vocab_size": 1000, "num_hidden_layers": 12, "hidden_size": 448, "intermediate_size": 2432}
DEEP |= {"num_attention_heads": 7, "num_key_value_heads": 1}
CASES = {  # label: options of measure
    "4 x 1,024 tokens": {"shape": WIDE, "rows": 4, "response": 1024},
    "4 x 1,024 tokens, gather minus logsumexp": {
        "shape": WIDE,
        "rows": 4,
        "response": 1024,
        "logsumexp": True,
    },
    "8 x 256 tokens": {"shape": WIDE},
    "activations kept": {"shape": DEEP},
    "activations recomputed (--gradient_checkpointing)": {"shape": DEEP, "checkpointing": True},
}
PASSES = """\
Rows have 64 tokens of prompt each; float32. The first three have a vocabulary of 151,936 and one layer of
Qwen2.5-0.5B's width, the others 12 layers of half that width, a vocabulary of 1,000 and 8 x 256 tokens."""


@dataclass
class Args:
    name: str = "memory"
    """Name of the result files."""
    case: str = ""
    """Measure this one case in this process and print its GiB; used by the benchmark itself."""


def by_logsumexp(model, batch, temperature):
    """grpo.token_logprobs with another formula."""
    import grpo

    T = batch["response_mask"].shape[1]
    inputs = grpo.model_inputs(batch["sequences"], batch["attention_mask"])
    logits = model(**inputs, use_cache=False, logits_to_keep=T + 1).logits[:, :-1] / temperature
    tokens = batch["sequences"][:, -T:].unsqueeze(2)
    return logits.gather(2, tokens).squeeze(2) - logits.logsumexp(2)


def measure(shape: dict, rows=8, response=256, checkpointing=False, logsumexp=False) -> float:
    """GiB."""
    sys.path.insert(0, str(ROOT))
    import torch
    import transformers
    from peak import peak_gib

    import grpo

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape)).to(device).eval()
    ids = torch.randint(0, shape["vocab_size"], (rows, 64 + response), device=device)
    batch = {"sequences": ids, "attention_mask": torch.ones_like(ids)}
    batch["response_mask"] = batch["attention_mask"][:, 64:].bool()
    if checkpointing:
        for layer in model.model.layers:  # as grpo.load does
            layer.forward = functools.partial(grpo.recomputed, layer.forward)
    for x in model.parameters():
        x.grad = torch.zeros_like(x)  # there for every optimizer step, however the pass goes
    before = torch.cuda.memory_allocated() if device.type == "cuda" else resident()
    token_logprobs = by_logsumexp if logsumexp else grpo.token_logprobs
    token_logprobs(model, batch, 1.0).sum().backward()
    return peak_gib(device.type == "cuda") - before / 2**30


def resident() -> int:
    """Bytes that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(args: Args) -> None:
    if args.case:
        print(f"GiB {measure(**CASES[args.case])}", flush=True)
        return
    results = {}
    for label in CASES:
        command = [sys.executable, __file__, "--case", label]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        results[label] = float(output.rpartition("GiB ")[2])
        print(f"{results[label]:7.2f} GiB  {label}", flush=True)
    import torch
    import transformers

    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({processor()}), peak RSS"
    head = f"`python benchmark/memory.py` on {machine}, torch {torch.__version__}"
    lines = [f"{head}, transformers {transformers.__version__}.", "", "| what | GiB |", "|---|---|"]
    lines += [f"| {label} | {value:.2f} |" for label, value in results.items()]
    lines += ["", PASSES]
    path = ROOT / "benchmark" / "results" / args.name
    path.with_suffix(".json").write_text(json.dumps({"machine": machine, "gib": results}, indent=1) + "\n")
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
