"""Run the main function of scripts, and record what their optimizers see. `zoo.record` starts this program.

    driver.py OUT CASES.json     writes a file OUT.<rank>.pt for each process that torchrun starts

CASES.json is a list of {"script": "grpo", "sample": false, "flags": {...}}. All cases run in one process group. With
"sample", a run is like a user's run. Otherwise it is in float64, and the responses, of different lengths, depend only
on the prompt, so that any number of ranks sees the same batch. The script computes everything else itself.
"""

import datetime
import hashlib
import importlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from references import EXTRA
from torch.distributed.tensor import DTensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in (".", "methods", "variants")]
RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def reward(completions, prompts, **columns):
    """A different score for each response."""
    return [len(text.split()) * 0.37 - len(prompt) * 0.11 for prompt, text in zip(prompts, completions)]


def right_or_wrong(completions, **columns):
    """1 or 0, for the scripts that accept no other scores."""
    return [float(sum(map(ord, text)) % 2) for text in completions]


def reward_of_threes(completions, prompts, **columns):
    """Different scores where the prompt begins with 3, and equal scores for all other prompts."""
    return [float(len(text) % 3) if prompt[0] == "3" else 1.0 for prompt, text in zip(prompts, completions)]


def two_rewards(completions, prompts, **columns):
    """Two scores for each response, whose sum is `reward`."""
    parts = [float(text.count("3")) for text in completions]
    return [[x - y, y] for x, y in zip(reward(completions, prompts), parts)]


def fixed_response(ids: list[int], number: int) -> list[int]:
    """3 to 12 tokens that depend on the prompt. Every other response ends in EOS, which is 1."""
    length = 3 + (3 * sum(ids) + 7 * number) % 10
    response = [3 + (sum(ids) * t + number * (t + 5)) % 16 for t in range(length)]
    return [*response[:-1], 1] if (sum(ids) + number) % 2 else response


def without_clock(path: Path) -> list[dict]:
    """Return the lines of a .jsonl file without the metrics that depend on the time."""
    lines = [json.loads(line) for line in path.open()]
    for line in lines:
        for name in [name for name in line if name.endswith(("_per_second", "_seconds"))]:
            del line[name]
    return lines


def whole(x: torch.Tensor) -> torch.Tensor:
    """The tensor, gathered from all ranks if FSDP shards it."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def digest(tensors) -> str:
    return hashlib.sha256(b"".join(whole(x).detach().numpy().tobytes() for x in tensors)).hexdigest()


class Recorder:
    """Its methods replace the functions of a script with the same names, call them, and record."""

    def __init__(self, script, sample: bool):
        self.script = script
        self.sample = sample
        self.dtype = torch.float32 if sample else torch.float64
        names = [name for name in vars(Recorder) if not name.startswith("_") and hasattr(script, name)]
        self.original = {name: getattr(script, name) for name in names}
        self.clip_grad_norm_ = torch.nn.utils.clip_grad_norm_
        self.models = []  # as they were loaded: the policy first
        self.trained = {}  # the parameters of each model with an optimizer
        self.seen = {
            "prompts": [],  # token ids of the prompt of each sampled response
            "responses": [],  # token ids of the responses, a list for each rollout
            "scores": [],  # of each response, in remax.py with the greedy score
            "advantages": [],  # of each response, token by token
            "unsharded": [],  # in each call of policy_loss, how many weights of the policy are whole on this rank
            "gradients": [],  # a vector for each step of an optimizer
            "events": [],  # (name, tensors) of calls whose numbers become metrics, in order
        }

    def load_model(self, *args):
        model, tokenizer = self.original["load_model"](*args)
        self.models.append(model.to(self.dtype))
        return self.models[-1], tokenizer

    def rollout_logprobs(self, args, model, rollout):
        """If the rollout is fixed, change the weights of the reference, so that the KL is not 0."""
        if not self.sample and not self.seen["advantages"]:
            for parameter in model.parameters():
                parameter.data *= 1.1
        return self.original["rollout_logprobs"](args, model, rollout)

    def load_critic(self, *args):
        """Replace the critic's head of zeros, with which values and the gradient of the decoder would be 0."""
        critic = self.original["load_critic"](*args)
        weight = critic["head"].weight.data
        weight.copy_(torch.linspace(-1, 1, weight.numel()))
        return critic

    def generate(self, args, model, tokenizer, prompts, samples_per_prompt=1, greedy=False):
        source = self.original["generate"] if self.sample else self.fixed_rollout
        rollout = source(args, model, tokenizer, prompts, samples_per_prompt, greedy)
        if not greedy:
            mask = rollout["response_mask"]
            rows = zip(rollout["sequences"][:, -mask.shape[1] :], mask)
            self.seen["prompts"] += [ids for ids in prompts for _ in range(samples_per_prompt)]
            self.seen["responses"].append([ids[row_mask].tolist() for ids, row_mask in rows])
        self.seen["events"].append(("greedy" if greedy else "generate", dict(rollout)))
        return rollout

    def fixed_rollout(self, args, model, tokenizer, prompts, samples_per_prompt, greedy):
        """Its log-probs differ a little from the policy's, so that ratios are not 1."""
        pairs = [(ids, 0 if greedy else 1 + i) for ids in prompts for i in range(samples_per_prompt)]
        responses = [fixed_response(ids, number) for ids, number in pairs]
        P, T = max(map(len, prompts)), args.max_response_length
        sequences, attention_mask = torch.zeros(2, len(pairs), P + T, dtype=torch.long)
        for i, ((prompt, _), response) in enumerate(zip(pairs, responses)):
            columns = slice(P - len(prompt), P + len(response))
            sequences[i, columns] = torch.tensor(prompt + response)
            attention_mask[i, columns] = 1
        mask = attention_mask[:, P:].bool()
        rollout = {"sequences": sequences, "attention_mask": attention_mask, "response_mask": mask}
        with torch.no_grad():
            logprobs = self.script.token_logprobs(args, model, rollout)
        noise = (sequences[:, P:] * torch.arange(1, T + 1)).to(logprobs.dtype).mul(7.1).sin() * 0.3 * mask
        truncated = torch.tensor([response[-1] != 1 for response in responses])
        rollout |= {name: function(noise) * mask for name, function in EXTRA.items()}
        return rollout | {"old_logprobs": logprobs + noise, "entropy": noise.abs(), "truncated": truncated}

    def compute_advantages(self, args, rollout):
        result = self.original["compute_advantages"](args, rollout)
        mask = rollout["response_mask"]
        for row, row_mask in zip(result["advantages"], mask):
            self.seen["advantages"].append(row[row_mask].tolist())
        scores = [rollout[name] for name in ("scores", "greedy_scores") if name in rollout]
        scores = [x.view(len(mask), -1).sum(1).tolist() for x in scores]  # in gdpo.py several for each
        self.seen["scores"] += zip(*scores)
        self.seen["events"].append(("compute_advantages", rollout | result))
        return result

    def policy_loss(self, args, batch, logprobs, num_sequences, num_tokens):
        self.seen["unsharded"].append(sum(not isinstance(x, DTensor) for x in self.models[0].parameters()))
        self.seen["events"].append(("policy_loss", batch | {"logprobs": logprobs.detach()}))
        return self.original["policy_loss"](args, batch, logprobs, num_sequences, num_tokens)

    def value_loss(self, args, batch, values, num_tokens):
        self.seen["events"].append(("value_loss", batch | {"new_values": values.detach()}))
        return self.original["value_loss"](args, batch, values, num_tokens)

    def log(self, *args):
        self.seen["events"].append(("log", {}))
        return self.original["log"](*args)

    def record_gradient(self, parameters, max_norm):
        """Replace clip_grad_norm_, which a script calls before each step of an optimizer."""
        parameters = [x for x in parameters if x.grad is not None]
        self.seen["gradients"].append(torch.cat([whole(x.grad).flatten() for x in parameters]))
        self.trained[id(parameters[0])] = parameters
        self.seen["events"].append(("step", {}))
        return self.clip_grad_norm_(parameters, max_norm)

    def run(self, flags: dict) -> dict:
        """Run the script. Returns the record, the lines of metrics.jsonl, and digests of weights and gradients."""
        args = self.script.Args(**flags)
        with pytest.MonkeyPatch.context() as patch:
            for name in self.original:
                patch.setattr(self.script, name, getattr(self, name))
            patch.setattr(torch.nn.utils, "clip_grad_norm_", self.record_gradient)
            patch.setattr(dist, "init_process_group", lambda *_, **__: None)  # there is one already
            patch.setattr(dist, "destroy_process_group", dist.barrier)  # until rank 0 has written its files
            torch.set_default_dtype(self.dtype)
            self.script.main(args)
            torch.set_default_dtype(torch.float32)
        self.seen["metrics"] = without_clock(Path(args.run_dir) / "metrics.jsonl")
        self.seen["digests"] = [digest(self.seen["gradients"]), *map(digest, self.trained.values())]
        return self.seen


def main(out: str, cases: str) -> None:
    cases = json.loads(Path(cases).read_text())
    scripts = [importlib.import_module(case["script"]) for case in cases]
    if WORLD_SIZE > 1:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    results = []
    for i, (case, script) in enumerate(zip(cases, scripts)):
        flags = {"run_dir": f"{out}.run{i}", "device": "cpu"} | case["flags"]
        results.append(Recorder(script, case["sample"]).run(flags))
    torch.save(results, f"{out}.{RANK}.pt")
    if WORLD_SIZE > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
