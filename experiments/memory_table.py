"""The memory that grpo.py and grpo_lora.py need: arithmetic for Qwen2.5, and measured peaks of small models.

    MALLOC_MMAP_THRESHOLD_=65536 python experiments/memory_table.py        5 minutes on a core; Linux only

The variable makes malloc return the memory of freed tensors at once, so that the peak is that of the tensors.
"""

import gc
import importlib
from pathlib import Path

from common import ROOT, load, run_all, table

# Hidden and intermediate size, layers, width of the keys, size of the vocabulary, matrices with that size; then
# responses of a rollout and of a micro-batch, tokens of a response and of a prompt
SETTING = (128, 4, 1024, 512)
QWEN = {"0.5B": (896, 4864, 24, 128, 151936, 1, *SETTING), "1.5B": (1536, 8960, 28, 256, 151936, 1, *SETTING)}
QWEN |= {"3B": (2048, 11008, 36, 256, 151936, 1, *SETTING), "7B": (3584, 18944, 28, 512, 152064, 2, *SETTING)}
# To measure. In each, another term is the largest.
SMALL = {"weights": (768, 2048, 8, 768, 16000, 1, 2, 1, 2, 8)}
SMALL |= {"logits": (64, 64, 2, 64, 50000, 1, 8, 4, 128, 8)}
SMALL |= {"cache": (64, 64, 24, 64, 1000, 1, 128, 16, 64, 8)}
SCRIPTS = ("grpo", "grpo_lora")
TOY = (64, 176, 3, 64, 19, 1, 2, 2, 4, 8)  # loads the libraries


def gib(script, hidden, inner, layers, kv, vocab, matrices, batch, micro_batch, response, prompt):
    """With --dtype bfloat16 --gradient_checkpointing, if every prompt and response has the largest length."""
    count = layers * hidden * (2 * hidden + 2 * kv + 3 * inner + 2) + matrices * vocab * hidden
    terms = {"weights": (4 + 2) * count, "AdamW": 8 * count, "reference": 4 * count}  # 2: autocast's copy
    gradients, stored = 4 * count, 4
    if script == "grpo_lora":
        trained = 16 * layers * (9 * hidden + 2 * kv + 3 * inner)  # A and B, rank 16
        terms = {"weights": 2 * count + 6 * trained, "AdamW": 8 * trained, "reference": 0}
        gradients, stored = 4 * trained, 2
    kept = sum(terms.values())
    terms["cache"] = 2 * 2 * layers * kv * batch * (prompt + response)
    sampling = terms["cache"] + (2 + 5 * 4) * batch * vocab  # the second: logits and probabilities of a token
    terms["gradients"] = gradients
    terms["logits"] = 3 * 4 * micro_batch * response * vocab
    # The input of each layer, and one layer that is computed again
    terms["activations"] = micro_batch * (prompt + response) * (stored * hidden * layers + 12 * inner)
    terms["peak"] = kept + max(sampling, gradients + terms["logits"] + terms["activations"])
    return {name: x / 2**30 for name, x in terms.items()}


def status(name: str) -> float:  # VmRSS, the memory of this process in GiB, or VmHWM, its peak
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) / 2**20


def measure(run_dir: Path, script: str, model: str) -> dict:
    """The peak of two iterations of a Llama with random weights, without what the process has before."""
    import transformers

    module = importlib.import_module(script)
    module.open_run = lambda *_: Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    module.log = module.save_checkpoint = module.save_model = lambda *_: None
    for hidden, inner, layers, kv, vocab, _, batch, micro_batch, response, _ in (TOY, SMALL[model]):
        sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
        sizes |= {"num_attention_heads": hidden // 64, "num_key_value_heads": kv // 64, "vocab_size": vocab}
        config = transformers.LlamaConfig(**sizes, tie_word_embeddings=True, eos_token_id=1)
        transformers.AutoModelForCausalLM.from_config(config, dtype="bfloat16").save_pretrained(run_dir)
        transformers.AutoTokenizer.from_pretrained(ROOT / "toy" / "policy").save_pretrained(run_dir)
        args = module.Args(model=str(run_dir), dataset=str(ROOT / "toy" / "train.jsonl"), device="cpu")
        args.dtype, args.gradient_checkpointing, args.samples_per_prompt = "bfloat16", True, 2
        args.batch_size, args.micro_batch_size, args.max_response_length = batch, micro_batch, response
        args.num_iterations, args.eval_every, args.run_dir = 2, 0, f"{run_dir}.run"
        gc.collect()  # the model before
        before = status("VmRSS")
        module.main(args)
    return {"peak": round(status("VmHWM") - before, 3)}


def summary() -> None:
    """Print the terms for each size of Qwen2.5, and for the small models, whose peak was measured."""
    rows = load("memory")
    lines = []
    for row in [*({"script": script, "model": model} for script in SCRIPTS for model in QWEN), *rows]:
        terms = gib(row["script"], *(QWEN | SMALL)[row["model"]])
        numbers = [f"{x:.{2 if row in rows else 1}f}" for x in terms.values()]
        numbers.append(f"{row['peak']:.2f}" if row in rows else "")
        lines.append([f"`{row['script']}.py`", row["model"], *numbers])
    table(["script", "model", *terms, "measured"], lines, rows)


if __name__ == "__main__":
    cells = [{"script": script, "model": model} for script in SCRIPTS for model in SMALL]
    run_all("memory", cells, measure, workers=1)
