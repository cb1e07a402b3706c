"""Run scripts' own main on a fixed rollout, or a sampled one, and keep what its optimizer sees.

    driver.py OUT CASES.json     one process, or as many as torchrun starts: a file OUT.<rank>.pt for each

CASES.json is a list of {"key": any, "script": "grpo", "dtype": "float64", "sample": false, "flags": [...]}.
All run in one process group. Of main only generation is replaced, by responses that follow from the prompt
alone and are of uneven length, so that any number of ranks sees the same batch; scores, KL, advantages and
denominators are the script's own.
"""

import copy
import datetime
import functools
import hashlib
import importlib
import json
import os
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def reward(completions, prompts, **columns):
    """A number that differs from response to response."""
    return [len(text.split()) * 0.37 - len(prompt) * 0.11 for prompt, text in zip(prompts, completions)]


def fixed_response(tokenizer, ids: list[int], number: int) -> list[int]:
    """A guess, or the beginning of a worked-out answer with slips, of 3 to 12 tokens."""
    numbers = [id - 3 for id in ids[::2]]
    text = f"answer {(sum(numbers) + number) % 10}"
    if (sum(ids) + number) % 2:
        steps = [f"{b} = {(a + b + number) % 10}" for a, b in pairwise(numbers)]
        text = f"think {numbers[0]} + " + " + ".join(steps) + f" {text}"
    response = [*tokenizer(text)["input_ids"], 1]
    return response[: 4 + (sum(ids) * 3 + number * 5) % 9]


def fixed_generate(script, model, tokenizer, prompts, args, samples_per_prompt=1, greedy=False):
    """What script.generate gives. The log-probs are a little off the policy's, so that ratios are not 1."""
    pairs = [(ids, 0 if greedy else 1 + i) for ids in prompts for i in range(samples_per_prompt)]
    responses = [fixed_response(tokenizer, ids, number) for ids, number in pairs]
    P, T = max(map(len, prompts)), args.max_response_length
    sequences, attention_mask = torch.zeros(2, len(pairs), P + T, dtype=torch.long)
    for i, ((prompt, _), response) in enumerate(zip(pairs, responses)):
        sequences[i, P - len(prompt) : P + len(response)] = torch.tensor(prompt + response)
        attention_mask[i, P - len(prompt) : P + len(response)] = 1
    mask = attention_mask[:, P:].bool()
    rollout = {"sequences": sequences, "attention_mask": attention_mask, "response_mask": mask}
    with torch.no_grad():
        logprobs = script.token_logprobs(model, rollout, args.temperature)
    noise = (sequences[:, P:] * torch.arange(1, T + 1)).to(logprobs.dtype).mul(7.1).sin() * 0.3 * mask
    rollout |= {"old_logprobs": logprobs + noise, "entropy": noise.abs()}
    return rollout | {"truncated": torch.tensor([response[-1] != 1 for response in responses])}


MODELS = {}  # loaded once for all cases


def digest(tensors) -> str:
    return hashlib.sha256(b"".join(x.detach().numpy().tobytes() for x in tensors)).hexdigest()


def record(script, dtype: torch.dtype, flags: list[str], sample: bool) -> dict:
    """Run the script's main and return what it did. There is a gradient for each step of an optimizer, and an
    entry of calls for each call of policy_loss."""
    seen = {"gradients": [], "calls": [], "prompts": [], "responses": [], "advantages": [], "scores": [], "kl": []}
    trained, loaded = {}, []
    load, score, generate, clip = script.load, script.score, script.generate, torch.nn.utils.clip_grad_norm_
    compute_advantages, policy_loss = script.compute_advantages, script.policy_loss

    def load_copy(args, auto_class, flag, name, device):
        """With a fixed rollout the reference is another model than the policy, so that their KL is not 0."""
        loaded.append(flag)
        is_reference = loaded == ["model", "model"] and getattr(script.Args, "kl_coef", 0) != 0
        name = "toy/base" if is_reference and not sample else name
        if name not in MODELS:
            MODELS[name] = load(args, auto_class, flag, name, device)
        model, tokenizer = MODELS[name]
        return copy.deepcopy(model).to(dtype), tokenizer

    def load_critic(args, tokenizer, device):
        critic = original_load_critic(args, tokenizer, device)
        weight = critic["head"].weight.data  # 0, and so would be the values and the decoder's gradient
        weight.copy_(torch.linspace(-1, 1, weight.numel()))
        return critic

    def recording_generate(model, tokenizer, prompts, args, samples_per_prompt=1, greedy=False):
        source = generate if sample else functools.partial(fixed_generate, script)
        rollout = source(model, tokenizer, prompts, args, samples_per_prompt, greedy)
        if not greedy:
            mask = rollout["response_mask"]
            pairs = zip(rollout["sequences"][:, -mask.shape[1] :], mask)
            seen["prompts"] += [ids for ids in prompts for _ in range(samples_per_prompt)]
            seen["responses"].append([ids[m].tolist() for ids, m in pairs])
        return rollout

    def recording_advantages(args, rollout):
        result = compute_advantages(args, rollout)
        pairs = zip(result["advantages"], rollout["response_mask"])
        seen["advantages"] += [row[mask].tolist() for row, mask in pairs]
        names = [name for name in ("scores", "greedy_scores") if name in rollout]
        difference = rollout["old_logprobs"] - rollout["ref_logprobs"]
        seen["kl"].append(float((rollout["kl"] - difference)[rollout["response_mask"]].abs().max()))
        seen["scores"] += zip(*(rollout[name].tolist() for name in names))
        return result

    def recording_loss(args, batch, logprobs, num_sequences, num_tokens):
        mask = batch["response_mask"]
        deviation = float((logprobs - batch["old_logprobs"])[mask].detach().exp().sub(1).abs().max())
        counts = len(mask), int(mask.sum()), int(num_sequences), int(num_tokens)
        seen["calls"].append((len(seen["gradients"]), counts, deviation))
        return policy_loss(args, batch, logprobs, num_sequences, num_tokens)

    def recording_clip(parameters, max_norm):
        parameters = [x for x in parameters if x.grad is not None]
        seen["gradients"].append(torch.cat([x.grad.flatten() for x in parameters]))
        trained[id(parameters[0])] = parameters
        return clip(parameters, max_norm)

    with pytest.MonkeyPatch.context() as patch:
        torch.set_default_dtype(dtype)
        patch.setattr(script, "load", load_copy)
        patch.setattr(script, "score", lambda *args: score(*args).to(dtype))
        patch.setattr(script, "generate", recording_generate)
        patch.setattr(script, "compute_advantages", recording_advantages)
        patch.setattr(script, "policy_loss", recording_loss)
        patch.setattr(torch.nn.utils, "clip_grad_norm_", recording_clip)
        patch.setattr(dist, "init_process_group", lambda backend: None)  # there is one already
        patch.setattr(dist, "destroy_process_group", lambda: None)
        if hasattr(script, "load_critic"):
            original_load_critic = script.load_critic
            patch.setattr(script, "load_critic", load_critic)
        args = tyro.cli(script.Args, args=flags, use_underscores=True)
        script.main(args)
    seen["metrics"] = [json.loads(line) for line in (Path(args.run_dir) / "metrics.jsonl").open()]
    return seen | {"parameters": [digest(x) for x in trained.values()]}


def main(out: str, cases: str) -> None:
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    results = []
    for i, case in enumerate(json.loads(Path(cases).read_text())):
        flags = [*case["flags"], "--run_dir", f"{out}.run{i}", "--device", "cpu"]
        script, dtype = importlib.import_module(case["script"]), getattr(torch, case["dtype"])
        seen = record(script, dtype, flags, case["sample"])
        gradients = digest(seen["gradients"])
        if rank:
            del seen["gradients"]  # the same as rank 0's, to the last bit
        results.append(seen | {"key": case["key"], "digest": gradients})
    torch.save(results, f"{out}.{rank}.pt")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
