"""Compute exactly what the estimators do, for the three answers of docs/exact.md.

    python experiments/exact.py        computes what has no row in results/exact_kl.jsonl yet, in a minute

compute_advantages and policy_loss of the scripts run on float64 tensors, for every group or response that a small
policy can sample. Weights and lengths are computed when a page or a picture needs them.
"""

import math
from functools import cache
from importlib import import_module
from itertools import product
from statistics import median

import torch
from common import group_by, load, run_all, table
from explain import loss_and_push, make_rollout

float64 = {"dtype": torch.float64}


def make_args(script: str, **values):
    """The default flags of a script with these values. Unless given, there is no KL and no length penalty."""
    args = import_module(script).Args()
    for name, value in {"kl_coef": 0.0, "overlong_buffer": 0, **values}.items():
        setattr(args, name, value)
    return args


def one_token(scores) -> dict:
    """A rollout of responses of one token."""
    return make_rollout(scores, torch.ones_like(scores, dtype=torch.long))


def slopes(script, args, rollout, num_sequences, num_tokens) -> torch.Tensor:
    """(B, T): minus the derivative of the loss with respect to the log-prob of each token, on policy."""
    module = import_module(script)
    if "advantages" not in rollout:
        rollout = rollout | module.compute_advantages(args, rollout)
    return loss_and_push(module, args, rollout, rollout["old_logprobs"], num_sequences, num_tokens)[1]


def advantages(script: str, scores) -> torch.Tensor:
    """The advantage of each response's first token."""
    return import_module(script).compute_advantages(make_args(script), one_token(scores))["advantages"][:, 0]


def binomial(count: int, rate) -> torch.Tensor:
    """The probabilities of 0 ... count right responses. rate is a number or (P, 1)."""
    rights, rate = torch.arange(count + 1, **float64), torch.as_tensor(rate, **float64)
    return torch.distributions.Binomial(count, rate).log_prob(rights).exp()


def short(values, digits: int = 4) -> list[float]:
    return [float(f"{float(x):.{digits}g}") for x in values]


# --- 1. weight of a prompt with pass rate p: the expected update is w(p) times grad p ---
RATES = torch.tensor([0.002, 0.005, *(i / 100 for i in range(1, 100)), 0.995, 0.998], **float64)


def moments(script: str, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """w at RATES, and the expected sum of squared slopes over the responses of a group."""
    args, p = make_args(script, samples_per_prompt=k), RATES
    w, squares, chances = torch.zeros_like(p), torch.zeros_like(p), binomial(k, p[:, None])
    for s in range(k + 1):
        slope = slopes(script, args, one_token((torch.arange(k) < s).double()), k, k)[:, 0]
        # The gradient of log pi is on average grad p / p for a right and -grad p / (1 - p) for a wrong response.
        w += chances[:, s] * (slope[:s].sum() / p - slope[s:].sum() / (1 - p))
        squares += chances[:, s] * slope.square().sum()
    return w, squares


def weights(script: str, k: int) -> list[float]:
    """w at RATES, relative to a pass rate of 0.5."""
    w, _ = moments(script, k)
    return (w / w[RATES == 0.5]).tolist()


# --- 2. length: the first token decides between right and wrong, and then a response stops at each token or not ---
LONGEST, LENGTH_GROUP = 64, 8
LENGTHS = torch.arange(2, LONGEST + 1).repeat(2)  # of right responses, then of wrong ones
IS_RIGHT = torch.arange(len(LENGTHS)) < len(LENGTHS) // 2


def length_logprobs(theta) -> torch.Tensor:
    """(N, LONGEST): log-probs of all responses. theta: logits of being right, of stopping if right, and if wrong."""
    choice = torch.where(IS_RIGHT, theta[0], -theta[0])[:, None]
    stop = torch.where(IS_RIGHT, theta[1], theta[-1])[:, None]
    choice, go_on, end = torch.nn.functional.logsigmoid(torch.stack([choice, -stop, stop]))
    t, lengths = torch.arange(LONGEST), LENGTHS[:, None]
    logprobs = torch.where(t == lengths - 1, torch.where(lengths < LONGEST, end, 0.0), go_on)
    return torch.where(t == 0, choice, logprobs) * (t < lengths)


@cache
def length_advantages(script: str) -> torch.Tensor:
    """(k, 2): the mean advantages of a wrong and a right response if 0 ... k - 1 of the others are right."""
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
    slope = slopes(script, args, rollout, 1, float((chance * LENGTHS).sum()))  # tokens of a large batch
    return torch.autograd.grad((chance[:, None] * slope * logprobs).sum(), theta)[0]


def lengths(script: str, can_tell: bool, pace: float = 0.1) -> list[list[float]]:
    """Pass rate and mean lengths of right and wrong responses during training.

    With can_tell, right and wrong responses have separate probabilities of stopping.
    """
    theta = torch.tensor([math.log(0.1 / 0.9)] + [-math.log(15.0)] * (2 if can_tell else 1), **float64)
    path = []
    while theta[0] < math.log(19.0):
        chance = length_logprobs(theta).sum(1).exp()
        means = [(chance * LENGTHS)[x].sum() / chance[x].sum() for x in (IS_RIGHT, ~IS_RIGHT)]
        path.append(short([theta[0].sigmoid(), *means]))
        update = length_update(script, theta)
        theta = theta + pace * update / update[0]  # the logit of the pass rate grows equally in all scripts
    return path


# --- 3. kl: policies whose KL is known, and the slopes of each term ---
class Tree:
    """S policies on all responses of `depth` tokens, in which each prefix has its own logits."""

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
        """(S, N, D): the log-prob of every token of every response."""
        return logits.log_softmax(-1)[:, self.prefixes, self.responses]

    def kl(self, one, other) -> torch.Tensor:
        """(S,): KL(one || other) of whole responses."""
        one, other = self.logprobs(one).sum(2), self.logprobs(other).sum(2)
        return (one.exp() * (one - other)).sum(1)

    def tilted(self, logits, values, strength) -> torch.Tensor:
        """The policy proportional to the given policy times exp(strength * values). values (S, N), strength (S,)."""
        log_old, result = logits.log_softmax(-1), torch.zeros_like(logits)
        value = strength[:, None] * values
        for t in reversed(range(self.depth)):
            rows = slice(self.firsts[t], self.firsts[t + 1])
            result[:, rows] = log_old[:, rows] + value.view(len(logits), -1, self.vocabulary)
            value = result[:, rows].logsumexp(2)
        return result


def bisect(function, target: float, seeds: int) -> torch.Tensor:
    """(S,): the points where rising functions reach the target."""
    low, high = torch.zeros(seeds, **float64), torch.ones(seeds, **float64)
    for _ in range(12):
        high = torch.where(function(high) < target, 2 * high, high)
    for _ in range(24):
        middle = (low + high) / 2
        is_low = function(middle) < target
        low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
    return high


def kl_slopes(term: str, ref, new) -> torch.Tensor:
    """(R, D): the slopes of a KL term alone, on policy, from the log-probs (R, D). Losses are sums over tokens."""
    script = {"k1 in the reward": "remax", "k2 in the loss": "reinforce_pp_baseline"}.get(term, "grpo")
    zero, depth = torch.zeros(len(new)), new.shape[1]
    rollout = make_rollout(zero, torch.full((len(new),), depth))
    rollout |= {"old_logprobs": new, "ref_logprobs": ref, "kl": new - ref, "greedy_scores": zero}
    if script != "remax":
        rollout["advantages"] = torch.zeros_like(new)
    num_sequences = 1 / depth if script == "grpo" else 1  # so that its mean over tokens becomes a sum
    return slopes(script, make_args(script, kl_coef=1.0), rollout, num_sequences, 1)


KLS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3)  # nats per token
TERMS = ("k1 in the reward", "k2 in the loss", "k3 in the loss")
# Vocabulary, tokens, and how the policy left its reference: towards one rare response, or at random
FAMILIES = [(*tree, way) for tree in ((3, 4), (3, 8), (8, 3)) for way in ("rare", "random")]


@cache
def kl_policies(vocabulary: int, depth: int, way: str, count: int):
    """The tree, the references (S, prefixes, V), and the policies at each distance in KLS."""
    tree, generator = Tree(vocabulary, depth), torch.Generator().manual_seed(depth)
    found = []
    while len(found) < count:
        ref, noise = tree.random(1, generator), tree.random(1, generator)
        value = torch.randn(1, vocabulary**depth, generator=generator, **float64)
        # The largest KL that a tilt reaches is the KL of the best response alone.
        farthest = -tree.logprobs(ref).sum(2)[0, value.argmax()]
        if way == "random" or farthest > KLS[-1] * depth + 4:
            found.append((ref, value, noise))
    ref, value, noise = (torch.cat(tensors) for tensors in zip(*found))

    def path(strength):
        return ref + strength[:, None, None] * noise if way == "random" else tree.tilted(ref, value, strength)

    return tree, ref, [path(bisect(lambda x: tree.kl(path(x), ref), y * depth, count)) for y in KLS]


def measure_kl(run_dir, vocabulary: int, depth: int, way: str, term: str, count: int = 32) -> dict:
    """For each KL, the medians over policies of the cosine with the gradient of the KL and of noise over signal."""
    tree, ref, policies = kl_policies(vocabulary, depth, way, count)
    cosines, noises = [], []
    for new in policies:
        leaf = new.clone().requires_grad_()
        (exact,) = torch.autograd.grad(tree.kl(leaf, ref).sum(), leaf)  # (S, prefixes, V)
        ref_lp, new_lp = tree.logprobs(ref), tree.logprobs(new)  # (S, N, D)
        slope = -kl_slopes(term, ref_lp.flatten(0, 1), new_lp.flatten(0, 1)).view_as(new_lp)  # of the penalty
        weight = slope * new_lp.sum(2).exp()[..., None]
        (found,) = torch.autograd.grad((tree.logprobs(leaf) * weight).sum(), leaf)
        # Squared norm of the gradient of each log-prob
        norms = 1 - 2 * new_lp.exp() + new.softmax(-1).square().sum(-1)[:, tree.prefixes]
        size, exact_size = (x.flatten(1).norm(dim=1) for x in (found, exact))
        cosines.append(((found * exact).sum((1, 2)) / (size * exact_size)).median())
        noises.append(((weight * slope * norms).sum((1, 2)) / size.square() - 1).median())
    return {"cosine": short(cosines, 3), "noise": short(noises, 3)}


def kl_of_terms() -> dict[str, tuple]:
    """For each term and each of KLS, the families' cosines, and their noise relative to k2 in the loss."""
    found = {term: ([], []) for term in TERMS}
    families = group_by(load("exact_kl"), lambda row: (row["vocabulary"], row["depth"], row["way"]))
    for family in families.values():
        of = {row["term"]: row for row in family}
        for term, (cosines, noises) in found.items():
            cosines.append(of[term]["cosine"])
            noises.append([x / y for x, y in zip(of[term]["noise"], of["k2 in the loss"]["noise"])])
    return {term: tuple([*zip(*values)] for values in pair) for term, pair in found.items()}


def print_kl() -> None:
    """Print the median and the worst of the families of policies."""
    kls, terms, lines = (0.01, 0.03, 0.1, 0.3), kl_of_terms(), []
    for term in ("k2 in the loss", "k3 in the loss"):
        at = [terms[term][0][KLS.index(kl)] for kl in kls]
        lines.append([f"{term[:2]}: cosine (lowest)", *(f"{median(x):.2f} ({min(x):.2f})" for x in at)])
    for term in ("k1 in the reward", "k3 in the loss"):
        at = [terms[term][1][KLS.index(kl)] for kl in kls]
        lines.append([f"{term[:2]}: noise (highest)", *(f"{median(x):.1f} ({max(x):.1f})" for x in at)])
    table(["KL per token", *(f"{kl:g} nats" for kl in kls)], lines, load("exact_kl"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    names = ("vocabulary", "depth", "way", "term")
    run_all("exact_kl", [dict(zip(names, (*x, term))) for x in FAMILIES for term in TERMS], measure_kl, 1)
