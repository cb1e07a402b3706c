"""Peak memory of one forward and backward pass on CPU, each in its own process.

    python experiments/memory.py        needs 9 GB

What the process held before the pass does not count: the imports, the weights and the gradients.
"""

import functools
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from common import load, memory_gib, run_all, table

# Qwen2.5-0.5B has 24 layers of this width.
WIDE = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}
WIDE |= {"num_hidden_layers": 1, "vocab_size": 151936, "tie_word_embeddings": True}
DEEP = {"hidden_size": 448, "intermediate_size": 2432, "num_attention_heads": 7, "num_key_value_heads": 1}
DEEP |= {"num_hidden_layers": 12, "vocab_size": 1000, "tie_word_embeddings": True}
LAYERS = {"shape": DEEP, "rows": 8, "length": 256}
PASSES = {
    "4 x 1,024 tokens": {"shape": WIDE, "rows": 4, "length": 1024},
    "8 x 256 tokens": {"shape": WIDE, "rows": 8, "length": 256},
    "activations kept": LAYERS,
    "activations recomputed (--gradient_checkpointing)": LAYERS | {"checkpointing": True},
}


def measure_pass(shape: dict, rows: int, length: int, checkpointing: bool = False) -> float:
    """GiB of a forward and backward pass over rows of 64 tokens of prompt and a response, in float32."""
    import torch
    import transformers

    import grpo

    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape)).eval()
    ids = torch.randint(0, shape["vocab_size"], (rows, 64 + length))
    batch = {"sequences": ids, "attention_mask": torch.ones_like(ids)}
    batch["response_mask"] = batch["attention_mask"][:, 64:].bool()
    if checkpointing:
        for layer in model.model.layers:  # as grpo.load does
            layer.forward = functools.partial(grpo.recomputed, layer.forward)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = memory_gib("VmRSS")
    grpo.token_logprobs(model, batch, 1.0).sum().backward()
    return memory_gib("VmHWM") - before


def measure(run_dir, script: str, case: str) -> dict:
    # In a new process, since the highest peak is that of a process.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return {"gib": pool.submit(measure_pass, **PASSES[case]).result()}


def passes() -> None:
    """One forward and backward pass, next to the size of its logits."""
    rows = load("memory")
    gib = {row["case"]: row["gib"] for row in rows}
    lines = []
    for case, options in PASSES.items():
        logits = 4 * options["rows"] * options["length"] * options["shape"]["vocab_size"] / 2**30
        lines.append([case, f"{options['shape']['vocab_size']:,}", f"{logits:.2f}", f"{gib[case]:.2f}"])
    table(["pass", "vocabulary", "logits, GiB", "peak, GiB"], lines, rows)


if __name__ == "__main__":
    run_all("memory", [{"script": "grpo", "case": case} for case in PASSES], measure, workers=1)
