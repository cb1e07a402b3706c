"""Print the advantage of each token in a group of responses, and the push of each policy script on the token.

    python tools/explain.py --scores 1 0 0 0 --lengths 3 5 2 4
    python tools/explain.py --model toy/policy        shows what a policy does with the prompt of docs/learn.md

The push is minus the gradient of the loss with respect to the token's log-prob. If it is above 0, an optimizer step
makes the token more likely. All numbers come from the functions of the scripts, in float64, without length penalties.
"""

import dataclasses
import importlib
import math
import sys
from pathlib import Path
from typing import Annotated

import plot
import sync
import torch
import transformers
import tyro

sys.path[:0] = [str(sync.ROOT / folder) for folder in sync.FOLDERS]

# The prompt of docs/learn.md, and four of the toy policy's responses to it with their scores
PROMPT = "3 + 5 - 2 ?"
GROUP = {
    "think 3 + 5 = 8 - 2 = 6 answer 6 <eos>": 1,
    "answer 2 <eos>": 0,
    "answer 3 <eos>": 0,
    "answer 6 <eos>": 1,
}


@dataclasses.dataclass
class Args:
    scores: tuple[float, ...] = (1, 0, 0, 0)  # score of each response
    lengths: tuple[int, ...] = (3, 5, 2, 4)  # tokens of each response, with its EOS
    samples_per_prompt: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Size of a group. By default all responses are one group."""
    scripts: tuple[str, ...] = tuple(sync.policy_scripts())  # policy scripts, such as rloo grpo
    model: Annotated[str | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = None
    """Show the choices of the toy's policy in this folder, instead of a group."""

    def check(self) -> None:
        """If no script accepts these values, raise a ValueError."""
        if len(self.scores) != len(self.lengths) or len(self.scores) < 2:
            found = f"{len(self.scores)} --scores, {len(self.lengths)} --lengths"
            raise ValueError(f"{found}: give two or more of each")
        if min(self.lengths) < 1:
            raise ValueError("--lengths must be 1 or more")
        k = self.samples_per_prompt
        if k is not None and (k < 1 or len(self.scores) % k):
            raise ValueError(f"--samples_per_prompt {k}: it must divide the {len(self.scores)} responses")


def loss_and_push(script, args, batch, logprobs, num_sequences, num_tokens):
    """The loss of a script, and its gradient with respect to the log-probs (B, T) with the opposite sign."""
    logprobs = logprobs.detach().clone().requires_grad_()
    loss, _ = script.policy_loss(args, batch, logprobs, num_sequences, num_tokens)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), 0.0 - gradient  # -gradient would print 0 as -0.000


def make_rollout(scores, lengths, **tensors) -> dict:
    """A rollout of responses of these lengths in float64. Log-probs and KL are 0 unless they are given."""
    scores, lengths = torch.as_tensor(scores, dtype=torch.float64), torch.as_tensor(lengths)
    mask = torch.arange(int(lengths.max())) < lengths[:, None]  # (B, T)
    zeros = dict.fromkeys(("old_logprobs", "ref_logprobs", "kl"), 0.0 * mask.double())
    return {"response_mask": mask, "scores": scores} | zeros | tensors


def pushes(module, args, rollout):
    """The advantages and pushes (B, T) of a script on a rollout, on policy."""
    rollout = rollout | module.compute_advantages(args, rollout)
    mask = rollout["response_mask"]
    _, push = loss_and_push(module, args, rollout, rollout["old_logprobs"], len(mask), int(mask.sum()))
    return rollout["advantages"], push


def explain(args: Args, script: str):
    """The advantages and pushes (B, T) of a script. If it needs more than a group, raise a KeyError."""
    module = importlib.import_module(script)
    settings = module.Args(samples_per_prompt=args.samples_per_prompt or len(args.scores))
    settings.overlong_buffer = 0  # the penalty of dapo.py is for the 40 tokens of the toy
    settings.max_response_length = max(settings.max_response_length, *args.lengths)
    rollout = make_rollout(args.scores, args.lengths)
    rollout["old_logprobs"] = rollout["ref_logprobs"] = math.log(0.4) * rollout["response_mask"]  # arbitrary
    if not settings.kl_coef:  # there is no reference
        del rollout["ref_logprobs"]
    return pushes(module, settings, rollout)


@torch.no_grad()
def next_probs(folder: str | Path, texts: list[str]) -> list[torch.Tensor]:
    """For each text, the probabilities (length, V) of the next token after each of its tokens."""
    kind = str(transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False).architectures)
    if "CausalLM" not in kind:
        raise ValueError(f"--model {folder}: it is no policy, because its config.json names {kind}.")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=False, use_safetensors=True, dtype=torch.float32
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return [model(**tokenizer(text, return_tensors="pt")).logits[0].softmax(-1) for text in texts]


def choices(folder: str | Path) -> list[list[float]]:
    """The probability of each token of the responses of GROUP, under the policy in a folder."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    found = []
    for response, probs in zip(GROUP, next_probs(folder, [f"{PROMPT} {response}" for response in GROUP])):
        ids = tokenizer(response).input_ids
        found.append([round(p, 4) for p in probs[-len(ids) - 1 : -1][range(len(ids)), ids].tolist()])
    return found


def print_tree(probs: list[list[float]]) -> None:
    """Print the result of choices() as a tree: where the responses to PROMPT differ, and how likely each is."""
    (think, *path), *_, (answer, six, _) = probs
    ends = [
        f"{share:.3f}   {word} {first * share:.3f}"
        for first, p in ((think, math.prod(path)), (answer, six))
        for word, share in (("right", p), ("wrong", 1 - p))
    ]
    print(f"""
```
              ┌─ think  {think:.3f} ─┬─ 3 + 5 = 8 - 2 = 6 answer 6 <eos>  {ends[0]}
{PROMPT} ──┤                └─ a slip in a step                  {ends[1]}
              └─ answer {answer:.3f} ─┬─ 6 <eos>                           {ends[2]}
                               └─ another digit <eos>               {ends[3]}
```
""")


def show(row: torch.Tensor, digits: int = 3) -> str:
    """The numbers of a response's tokens, or one number if all are equal."""
    numbers = [f"{x:.{digits}f}" for x in row.tolist()]
    return numbers[0] if len(set(numbers)) == 1 else " ".join(numbers)


def print_group(args: Args) -> None:
    """Print advantage → push of each response's tokens. Scripts with the same numbers share a line."""
    lines, left_out = {}, []
    for script in args.scripts:
        try:
            rows = zip(args.lengths, *explain(args, script))
        except KeyError as error:
            left_out.append(f"`{script}` needs `{error.args[0]}`")
            continue
        cells = tuple(f"{show(advantages[:n])} → {show(push[:n], 4)}" for n, advantages, push in rows)
        lines.setdefault(cells, []).append(f"`{script}`")
    heads = [f"score {score:g}, {length} tokens" for score, length in zip(args.scores, args.lengths)]
    plot.print_table(
        ["advantage → push", *heads], ([", ".join(same), *cells] for cells, same in lines.items())
    )
    if left_out:
        print(f"Left out: {'; '.join(left_out)}.\n")


def main(args: tyro.conf.OmitArgPrefixes[Args]) -> None:
    args.check()
    if args.model:
        transformers.logging.disable_progress_bar()
        print_tree(choices(args.model))
    else:
        print_group(args)


if __name__ == "__main__":
    plot.command(main, __doc__)
