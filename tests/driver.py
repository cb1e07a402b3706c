"""Run a script's own main with a fixed rollout, and keep what its optimizer sees: gradients, advantages, parameters.

    driver.py OUT SCRIPT DTYPE [flags]         one file OUT.<rank>.pt for each rank

Only generation is replaced, by responses that follow from the prompt alone and are of uneven length, so that one rank
and two see the same batch. Everything behind it is the script's own: scores, KL, advantages, denominators, no_sync.
"""

import importlib
import os
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def reward(completions, prompts, **columns):
    """A number that differs from response to response."""
    return [len(text.split()) * 0.37 - len(prompt) * 0.11 for prompt, text in zip(prompts, completions)]


def fixed_response(tokenizer, ids: list[int], copy: int) -> list[int]:
    """A guess, or the beginning of a worked-out answer with slips, cut so that lengths are uneven: 3 to 12 tokens."""
    numbers = [id - 3 for id in ids[::2]]
    text = f"answer {(sum(numbers) + copy) % 10}"
    if (sum(ids) + copy) % 2:
        steps = [f"{b} = {(a + b + copy) % 10}" for a, b in pairwise(numbers)]
        text = f"think {numbers[0]} + " + " + ".join(steps) + f" {text}"
    response = [*tokenizer(text)["input_ids"], 1]
    return response[: 4 + (sum(ids) * 3 + copy * 5) % 9]


def fixed_generate(model, tokenizer, prompts, args, greedy=False):
    copies = [prompts[:i].count(ids) for i, ids in enumerate(prompts)]
    responses = [fixed_response(tokenizer, ids, 0 if greedy else copy + 1) for ids, copy in zip(prompts, copies)]
    P, T = max(map(len, prompts)), max(map(len, responses))
    sequences, mask = torch.zeros(len(prompts), P + T, dtype=torch.long), torch.zeros(len(prompts), P + T).long()
    for i, (prompt, response) in enumerate(zip(prompts, responses)):
        sequences[i, P - len(prompt) : P + len(response)] = torch.tensor(prompt + response)
        mask[i, P - len(prompt) : P + len(response)] = 1
    return sequences, mask, mask[:, P:].bool()


def record(script, dtype: str, *flags: str, sample: bool = False) -> dict:
    """Run script.main(flags) and return what its optimizer saw; everything patched is put back."""
    seen = {"gradients": [], "advantages": [], "prompts": []}
    load_policy, compute_advantages = script.load_policy, script.compute_advantages
    step, clip = torch.optim.AdamW.step, torch.nn.utils.clip_grad_norm_

    def recording_clip(parameters, max_norm):
        parameters = list(parameters)
        seen["gradients"].append([parameter.grad.clone() for parameter in parameters])
        return clip(parameters, max_norm)

    def recording_step(optimizer, *args, **kwargs):
        result = step(optimizer, *args, **kwargs)
        seen["parameters"] = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
        return result

    def recording_advantages(args, rollout):
        result = compute_advantages(args, rollout)
        seen["advantages"].append(result["advantages"].clone())
        seen["prompts"].append(rollout["sequences"].clone())
        return result

    with pytest.MonkeyPatch.context() as patch:
        torch.set_default_dtype(getattr(torch, dtype))
        if not sample:
            patch.setattr(script, "generate", fixed_generate)
        patch.setattr(script, "load_policy", lambda *args: load_policy(*args).to(torch.get_default_dtype()))
        if hasattr(script, "load_critic"):
            load_critic = script.load_critic
            patch.setattr(script, "load_critic", lambda *args: load_critic(*args).to(torch.get_default_dtype()))
        patch.setattr(script, "compute_advantages", recording_advantages)
        patch.setattr(torch.optim.AdamW, "step", recording_step)
        patch.setattr(torch.nn.utils, "clip_grad_norm_", recording_clip)
        patch.setattr(sys, "argv", [script.__name__, *map(str, flags)])
        script.main(script.parse_args())
    torch.set_default_dtype(torch.float32)
    return seen


if __name__ == "__main__":
    out, name, dtype, *flags = sys.argv[1:]
    sample = "--sample" in flags
    seen = record(importlib.import_module(name), dtype, *(f for f in flags if f != "--sample"), sample=sample)
    torch.save(seen, f"{out}.{os.environ.get('RANK', 0)}.pt")
