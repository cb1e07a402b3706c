"""Print what the policy scripts do to a group of responses: the advantage of each token, and the push on it.

    python tools/explain.py --scores 1 0 0 0 --lengths 3 5 2 4

The push is minus the gradient of the loss with respect to the token's log-prob: an optimizer step makes a token with a
push above 0 more likely. All numbers come from the functions of the scripts, in float64. docs/learn.md shows some.
"""

import dataclasses
import importlib
import math
import sys

import sync
import torch
import tyro

sys.path[:0] = [str(sync.ROOT / folder) for folder in (*sync.FOLDERS, "experiments")]
from common import table  # noqa: E402

# What a group of responses does not have, by its name in the rollout
NEEDS = {"values": "a critic", "greedy_scores": "a greedy response", "ref_logprobs": "a teacher"}
NEEDS |= {"teacher_logprobs": "a teacher", "all_logprobs": "a teacher"}


@dataclasses.dataclass
class Args:
    scores: tuple[float, ...] = (1, 0, 0, 0)
    lengths: tuple[int, ...] = (3, 5, 2, 4)  # tokens of each response, with its EOS
    samples_per_prompt: int | None = None  # k; by default all responses are one group
    kl: float = 0.0  # log(pi_old / pi_ref) of every token
    kl_coef: float | None = None  # beta; by default that of each script
    ratio: float = 1.0  # pi_theta / pi_old of every token
    scripts: tuple[str, ...] = tuple(sync.policy_scripts())


def loss_and_push(script, args, batch, logprobs, num_sequences, num_tokens):
    """The loss of a script, and minus its gradient with respect to the log-probs (B, T)."""
    logprobs = logprobs.detach().clone().requires_grad_()
    loss, _ = script.policy_loss(args, batch, logprobs, num_sequences, num_tokens)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), 0.0 - gradient  # -gradient would print 0 as -0.000


def make_rollout(scores, lengths, **tensors) -> dict:
    """A rollout of responses of these lengths, with log-probs and a KL of 0 unless given; in float64."""
    scores, lengths = torch.as_tensor(scores, dtype=torch.float64), torch.as_tensor(lengths)
    mask = torch.arange(int(lengths.max())) < lengths[:, None]  # (B, T)
    zeros = dict.fromkeys(("old_logprobs", "ref_logprobs", "kl"), 0.0 * mask.double())
    return {"response_mask": mask, "scores": scores} | zeros | tensors


def explain(args: Args, script: str):
    """Advantages and pushes (B, T) of a script. A KeyError if it needs more than a group."""
    module = importlib.import_module(script)
    flags = {"samples_per_prompt": args.samples_per_prompt or len(args.scores)}
    if args.kl_coef is not None and "kl_coef" in {field.name for field in dataclasses.fields(module.Args)}:
        flags["kl_coef"] = args.kl_coef
    settings = module.Args(**flags)
    rollout = make_rollout(args.scores, args.lengths)
    mask = rollout["response_mask"].double()
    rollout |= {"old_logprobs": math.log(0.4) * mask, "kl": args.kl * mask}  # 0.4 is arbitrary
    rollout["ref_logprobs"] = rollout["old_logprobs"] - rollout["kl"]
    if not settings.kl_coef:  # there is no reference
        del rollout["ref_logprobs"]
    rollout |= module.compute_advantages(settings, rollout)
    logprobs = rollout["old_logprobs"] + math.log(args.ratio) * mask
    _, push = loss_and_push(module, settings, rollout, logprobs, len(mask), int(mask.sum()))
    return rollout["advantages"], push


def show(row: torch.Tensor, digits: int = 3) -> str:
    """The numbers of a response's tokens; one number if they are equal."""
    numbers = [f"{x:.{digits}f}" for x in row.tolist()]
    return numbers[0] if len(set(numbers)) == 1 else " ".join(numbers)


def print_group(args: Args) -> None:
    """A line for each script, or for those with the same numbers: advantage → push of a response's tokens."""
    lines, left_out = {}, []
    for script in args.scripts:
        try:
            rows = zip(args.lengths, *explain(args, script))
        except KeyError as error:
            left_out.append(f"`{script}` needs {NEEDS.get(error.args[0], error.args[0])}")
            continue
        cells = tuple(f"{show(advantages[:n])} → {show(push[:n], 4)}" for n, advantages, push in rows)
        lines.setdefault(cells, []).append(f"`{script}`")
    heads = [f"score {score:g}, {length} tokens" for score, length in zip(args.scores, args.lengths)]
    table(["advantage → push", *heads], [[", ".join(same), *cells] for cells, same in lines.items()])
    if left_out:
        print(f"Left out: {'; '.join(left_out)}.\n")


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    if len(args.scores) != len(args.lengths):
        sys.exit("error: give as many --lengths as --scores")
    print_group(args)
