"""What the estimators do, computed instead of sampled: sections 1 to 3 of docs/exact.md.

    python experiments/exact.py

compute_advantages and policy_loss of the scripts run on float64 tensors, for every group or response that a small
policy can give. A script that joins the repository gets its curves without an edit.
"""

import math
from functools import cache
from importlib import import_module
from itertools import product

import torch
from common import POLICY_SCRIPTS, run_all
from explain import loss_and_push, make_rollout

float64 = {"dtype": torch.float64}


def make_args(script: str, **values):
    """The script's default flags with these values; no KL and no length penalty unless given."""
    args = import_module(script).Args()
    for name, value in {"kl_coef": 0.0, "overlong_buffer": 0, **values}.items():
        setattr(args, name, value)
    return args


def one_token(scores) -> dict:
    """A rollout of responses of one token."""
    return make_rollout(scores, torch.ones_like(scores, dtype=torch.long))


def slopes(script, args, rollout, num_sequences, num_tokens) -> torch.Tensor:
    """(B, T): on policy, minus the derivative of the loss with respect to the log-prob of each token."""
    module = import_module(script)
    if "advantages" not in rollout:
        rollout = rollout | module.compute_advantages(args, rollout)
    return loss_and_push(module, args, rollout, rollout["old_logprobs"], num_sequences, num_tokens)[1]


def advantages(script: str, scores, lengths=None) -> torch.Tensor | None:
    """The advantage of each response's first token; None if the script needs more than scores and lengths."""
    rollout = one_token(scores) if lengths is None else make_rollout(scores, lengths)
    try:
        return import_module(script).compute_advantages(make_args(script), rollout)["advantages"][:, 0]
    except (AttributeError, KeyError):
        return None


@cache
def looks_at_batch(script: str) -> bool | None:
    """Whether the advantages of a group change with the scores of others; None if not even its own change them."""
    k = max(make_args(script).samples_per_prompt, 2)
    scores = torch.zeros(3, 2 * k)
    scores[1:, 1] = scores[2, -1] = 1.0  # of no response, of one, and of one in each group
    none, one, two = (advantages(script, x) for x in scores)
    return None if none is None or none.equal(one) else not one[:k].equal(two[:k])


@cache
def group_scripts() -> list[str]:
    """Those whose advantages come from the scores of several responses to a prompt."""
    with_scores = (x for x in POLICY_SCRIPTS if looks_at_batch(x) is not None)
    return [x for x in with_scores if make_args(x).samples_per_prompt > 1]


def binomial(count: int, rate) -> torch.Tensor:
    """The chances of 0 ... count right responses; rate is a number or (P, 1)."""
    rights, rate = torch.arange(count + 1, **float64), torch.as_tensor(rate, **float64)
    return torch.distributions.Binomial(count, rate).log_prob(rights).exp()


def short(values, digits: int = 4) -> list[float]:
    return [float(f"{float(x):.{digits}g}") for x in values]


# --- 1. weight of a prompt with pass rate p: the expected update is w(p) times grad p ---
RATES = torch.tensor([0.002, 0.005, *(i / 100 for i in range(1, 100)), 0.995, 0.998], **float64)


def moments(script: str, k: int, others=()) -> tuple[torch.Tensor, torch.Tensor]:
    """w and the noise at RATES, summed over the right responses of a group; `others` are those of other groups.

    Noise is the expected sum of squared slopes over the responses of the group: the second moment of the update, if
    all responses have gradients of the same norm that are uncorrelated.
    """
    args, p = make_args(script, samples_per_prompt=k), RATES
    w, noise, chances = torch.zeros_like(p), torch.zeros_like(p), binomial(k, p[:, None])
    for s in range(k + 1):
        scores = torch.tensor([float(i < rights) for rights in (s, *others) for i in range(k)], **float64)
        slope = slopes(script, args, one_token(scores), k, k)[:k, 0]
        # The gradient of log pi is on average grad p / p for a right and -grad p / (1 - p) for a wrong response.
        w += chances[:, s] * (slope[:s].sum() / p - slope[s:].sum() / (1 - p))
        noise += chances[:, s] * slope.square().sum()
    return w, noise


def measure_weight(run_dir, script, k) -> dict:
    """With 16 groups in a batch, of which the others have 0 ... k right responses in turn."""
    others = [i % (k + 1) for i in range(15)] if looks_at_batch(script) else []
    w, noise = moments(script, k, others)
    return {"w": short(w, 6), "noise": short(noise, 6)}


# --- 2. length: the first token settles right or wrong; after it, a response stops with a separate probability ---
LONGEST, LENGTH_GROUP = 64, 8
LENGTHS = torch.arange(2, LONGEST + 1).repeat(2)  # of right responses, then of wrong ones
IS_RIGHT = torch.arange(len(LENGTHS)) < len(LENGTHS) // 2


def length_logprobs(theta) -> torch.Tensor:
    """(N, LONGEST): of all responses. theta: the logits of being right and of stopping if right, and if wrong."""
    choice = torch.where(IS_RIGHT, theta[0], -theta[0])[:, None]
    stop = torch.where(IS_RIGHT, theta[1], theta[-1])[:, None]
    choice, go_on, end = torch.nn.functional.logsigmoid(torch.stack([choice, -stop, stop]))
    t, lengths = torch.arange(LONGEST), LENGTHS[:, None]
    logprobs = torch.where(t == lengths - 1, torch.where(lengths < LONGEST, end, 0.0), go_on)
    return torch.where(t == 0, choice, logprobs) * (t < lengths)


def length_scripts() -> list[str]:
    """Those whose advantages do not depend on lengths."""
    scores, lengths = torch.arange(LENGTH_GROUP) % 2.0, LENGTHS[:LENGTH_GROUP]
    return [x for x in group_scripts() if advantages(x, scores).equal(advantages(x, scores, lengths))]


@cache
def length_advantages(script: str) -> torch.Tensor:
    """(k, 2): the mean advantage of a wrong and of a right response if 0 ... k - 1 of the others are right."""
    k = LENGTH_GROUP
    found = [advantages(script, (torch.arange(k) < s).double()) for s in range(k + 1)]
    return torch.stack([torch.stack([found[s][s:].mean(), found[s + 1][: s + 1].mean()]) for s in range(k)])


def length_update(script: str, theta) -> torch.Tensor:
    """The exact expected update of theta. On policy, the gradient of every loss is linear in the advantage."""
    theta = theta.clone().requires_grad_()
    logprobs = length_logprobs(theta)
    chance = logprobs.detach().sum(1).exp()
    wrong, right = binomial(LENGTH_GROUP - 1, theta[0].detach().sigmoid()) @ length_advantages(script)
    rollout = make_rollout(IS_RIGHT.double(), LENGTHS)
    rollout["advantages"] = torch.where(IS_RIGHT, right, wrong)[:, None] * rollout["response_mask"]
    args = make_args(script, max_response_length=LONGEST)
    slope = slopes(script, args, rollout, 1, float((chance * LENGTHS).sum()))  # N_tok of a large batch
    return torch.autograd.grad((chance[:, None] * slope * logprobs).sum(), theta)[0]


def measure_length(run_dir, script, can_tell, pace=0.1) -> dict:
    """Pass rate and mean length of right and wrong responses along the path."""
    theta = torch.tensor([math.log(0.1 / 0.9)] + [-math.log(15.0)] * (2 if can_tell else 1), **float64)
    path = []
    while theta[0] < math.log(19.0):
        rate = float(theta[0].sigmoid())
        chance = length_logprobs(theta).sum(1).exp()
        means = [(chance * LENGTHS)[x].sum() / chance[x].sum() for x in (IS_RIGHT, ~IS_RIGHT)]
        path.append(short([rate, *means]))
        update = length_update(script, theta)
        theta = theta + pace * update / update[0]  # the logit of the pass rate has one pace for all scripts
    return {"path": path}


# --- 3. kl: policies whose KL is known, and the slopes of each term, for tests/test_exact.py ---
class Tree:
    """Policies on all responses of `depth` tokens, many at once; each prefix has its own logits."""

    def __init__(self, vocabulary: int, depth: int):
        self.vocabulary, self.depth = vocabulary, depth
        self.responses = torch.tensor(list(product(range(vocabulary), repeat=depth)))  # (N, D)
        # The numbers of the prefixes of t tokens begin at firsts[t], in the order of their responses.
        self.firsts = [sum(vocabulary**i for i in range(t)) for t in range(depth + 1)]
        places = [torch.arange(vocabulary**depth) // vocabulary ** (depth - t) for t in range(depth)]
        self.prefixes = torch.stack(places, 1) + torch.tensor(self.firsts[:-1])  # (N, D): before each token

    def random(self, seeds: int, generator) -> torch.Tensor:
        """(S, prefixes, V): the logits of random policies."""
        return torch.randn(seeds, self.firsts[-1], self.vocabulary, generator=generator, **float64)

    def logprobs(self, logits) -> torch.Tensor:
        """(S, N, D): of every token of every response."""
        return logits.log_softmax(-1)[:, self.prefixes, self.responses]

    def kl(self, one, other) -> torch.Tensor:
        """(S,): KL(one || other) of whole responses."""
        one, other = self.logprobs(one).sum(2), self.logprobs(other).sum(2)
        return (one.exp() * (one - other)).sum(1)


def kl_slopes(term: str, ref, new) -> torch.Tensor:
    """(R, D): on policy, the slopes of a KL term alone, from the log-probs (R, D); sums over tokens."""
    script = {"k1 in the reward": "remax", "k2 in the loss": "reinforce_pp_baseline"}.get(term, "grpo")
    zero, depth = torch.zeros(len(new)), new.shape[1]
    rollout = make_rollout(zero, torch.full((len(new),), depth))
    rollout |= {"old_logprobs": new, "ref_logprobs": ref, "kl": new - ref, "greedy_scores": zero}
    if script != "remax":
        rollout["advantages"] = torch.zeros_like(new)
    num_sequences = 1 / depth if script == "grpo" else 1  # its mean over tokens, too, becomes a sum
    return slopes(script, make_args(script, kl_coef=1.0), rollout, num_sequences, 1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sizes = [{"script": x, "k": k} for x in ("grpo", "maxrl") for k in (2, 4, 16, 64)]
    run_all("exact_weights", [{"script": x, "k": 8} for x in group_scripts()] + sizes, measure_weight, 1)
    lengths = [{"script": x, "can_tell": y} for y in (True, False) for x in length_scripts()]
    run_all("exact_length", lengths, measure_length, 1)
