"""Peak memory of grpo.py and grpo_lora.py on a GPU, for the table of docs/recipes.md. Needs no GPU.

    python experiments/memory.py        5 minutes

The functions of the scripts run on tensors with shapes and no content, with the sizes of Qwen2.5, bfloat16, gradient
checkpointing, prompts of 512 and responses of 1024 tokens; the bytes of the tensors that live at a time are added up.
"""

import importlib
import weakref
from functools import partial
from unittest import mock

import torch
import transformers
from common import load, run_all, table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

P, T = 512, 1024  # tokens of a prompt and of a response
# Hidden and intermediate size, layers, heads, heads of the cache
SIZES = {"0.5B": (896, 4864, 24, 14, 2), "1.5B": (1536, 8960, 28, 12, 2)}
SIZES |= {"3B": (2048, 11008, 36, 16, 2), "7B": (3584, 18944, 28, 28, 4)}
FLAGS, STAGES = ("script", "model", "batch_size", "micro_batch_size"), ("evaluation", "sampling", "update")
CELLS = [("grpo", "0.5B", 128, 4), ("grpo", "1.5B", 128, 4), ("grpo", "1.5B", 128, 1), ("grpo", "3B", 128, 4)]
CELLS += [("grpo_lora", "1.5B", 128, 4), ("grpo_lora", "1.5B", 128, 1), ("grpo_lora", "3B", 128, 4)]
CELLS += [("grpo_lora", "7B", 128, 4), ("grpo_lora", "7B", 48, 1)]


def make_model(size, dtype, vocab_size=151936):
    """A Qwen2 with random weights."""
    hidden, inner, layers, heads, kv_heads = size
    shape = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    shape |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab_size}
    config = transformers.Qwen2Config(**shape, eos_token_id=1, tie_word_embeddings=hidden < 3584)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


class Tracker(TorchDispatchMode):
    """Adds up the bytes of living tensors."""

    living, now, peak = weakref.WeakSet(), 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage() not in self.living:
                self.living.add(x.untyped_storage())
                self.add(x.untyped_storage().nbytes())
                weakref.finalize(x.untyped_storage(), self.add, -x.untyped_storage().nbytes())
        return result

    def add(self, size):
        self.now += size
        self.peak = max(self.peak, self.now)


def measure(_, script, model, batch_size, micro_batch_size):
    """GiB of the tensors at the peak of each stage."""
    module, tracker, peaks = importlib.import_module(script), Tracker(), {}
    args = module.Args(dtype="bfloat16", device="cpu")
    as_padded = mock.patch("transformers.masking_utils._ignore_causal_mask_sdpa", return_value=False)
    in_place = mock.patch("torch.nn.Module.to", lambda module, *_, **__: module)  # peft moves its weights
    with FakeTensorMode(), tracker, as_padded, in_place:
        policy = make_model(SIZES[model], "bfloat16" if script == "grpo_lora" else "float32")
        for layer in policy.model.layers:
            layer.forward = partial(torch.utils.checkpoint.checkpoint, layer.forward, use_reentrant=False)
        if script == "grpo_lora":
            policy = module.add_adapter(args, policy)
        trained = [x for x in policy.parameters() if x.requires_grad]
        kept = [torch.empty_like(x) for x in trained + trained]  # AdamW
        kept += [torch.empty_like(x) for x in trained if script == "grpo"]  # the reference

        # An evaluation reads batch_size prompts at once. A forward pass of T - 1 tokens then fills the cache.
        cache = module.Cache(config=policy.config)
        for stage, length in (("evaluation", P), ("", T - 1), ("sampling", 1)):
            tracker.peak = tracker.now
            mask = torch.ones(batch_size, cache.get_seq_length() + length).long()
            inputs = module.model_inputs(mask[:, :length], mask)
            with torch.no_grad(), module.autocast(args):
                output = policy(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
                torch.special.entr(module.log_distribution(output.logits, 1.0).exp())
            peaks[stage] = tracker.peak
        del cache, output

        tokens, values = torch.ones(micro_batch_size, P + T).long(), torch.ones(micro_batch_size, T)
        batch = {"sequences": tokens, "attention_mask": tokens, "response_mask": values.bool()}
        batch |= {"old_logprobs": values, "ref_logprobs": values, "advantages": values}
        tracker.peak = tracker.now
        for _ in range(2):  # the second micro-batch finds gradients
            with module.autocast(args):
                logprobs = module.token_logprobs(args, policy, batch)
            module.policy_loss(args, batch, logprobs, 64, 1000.0)[0].backward()
    peaks["update"] = tracker.peak
    return {stage: round(peaks[stage] / 2**30, 2) for stage in STAGES}


def summary():
    """Print the peaks. The largest of a line is what a GPU needs, besides CUDA's own memory."""
    rows = load("memory")
    lines = [[*(str(row[x]) for x in FLAGS), *(f"{row[x]:.1f}" for x in STAGES)] for row in rows]
    table([*FLAGS, *STAGES], lines, rows)


if __name__ == "__main__":
    run_all("memory", [dict(zip(FLAGS, cell)) for cell in CELLS], measure, workers=1)
