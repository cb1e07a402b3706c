"""What the estimators do, computed instead of sampled: sections 1 to 5 of docs/exact.md.

    python experiments/exact.py

compute_advantages and policy_loss of the scripts run on float64 tensors, for every group or response that a small
policy can give. A script that joins the repository gets its curves without an edit, or an entry in LEFT_OUT.
"""

import math
import runpy
import tempfile
from functools import cache, partial
from itertools import product
from types import SimpleNamespace

import torch
from common import POLICY_SCRIPTS, patched, run_all
from explain import loss_and_push, make_rollout

LEFT_OUT = {"distill", "sdpo", "gdpo"}  # no scores, advantages from a teacher, several scores for a response
SCRIPTS = [script for script in POLICY_SCRIPTS if script not in LEFT_OUT]
# The advantages of these look at the whole batch, those of the others at the group.
WHOLE_BATCH = {"reinforce", "reinforce_pp", "reinforce_pp_baseline", "ppo", "flash_reinforce"}
BATCH = 128  # the default batch_size
float64 = {"dtype": torch.float64}


@cache
def module(script: str, patches: tuple[str, ...] = ()) -> SimpleNamespace:
    """What a copy of the script with these patches defines."""
    with tempfile.TemporaryDirectory() as folder:
        return SimpleNamespace(**runpy.run_path(patched(script, patches, folder)))


def make_args(script: str, patches=(), **values):
    """The script's default flags with these values; no KL and no length penalty unless given."""
    args = module(script, tuple(patches)).Args()
    for name, value in {"kl_coef": 0.0, "overlong_buffer": 0, **values}.items():
        setattr(args, name, value)
    return args


def one_token(scores, **tensors) -> dict:
    """A rollout of responses of one token."""
    return make_rollout(scores, torch.ones_like(scores, dtype=torch.long), **tensors)


def slopes(script, args, rollout, num_sequences, num_tokens, logprobs=None, patches=()):
    """(B, T): minus the derivative of the loss with respect to the log-prob of each token; on policy by default."""
    code = module(script, tuple(patches))
    if "advantages" not in rollout:
        rollout = rollout | code.compute_advantages(args, rollout)
    logprobs = rollout["old_logprobs"] if logprobs is None else logprobs
    return loss_and_push(code, args, rollout, logprobs, num_sequences, num_tokens)[1]


@cache
def looks_at_batch(script: str) -> bool | None:
    """Whether the advantages of a group change with the scores of others; None if not even its own change them."""
    args = make_args(script)
    k = max(args.samples_per_prompt, 2)
    one, two = torch.zeros(2 * k), torch.zeros(2 * k)
    one[1] = two[1] = two[-1] = 1.0
    try:
        found = [
            module(script).compute_advantages(args, one_token(x))["advantages"][:k]
            for x in (0 * one, one, two)
        ]
    except (
        AttributeError,
        KeyError,
    ):  # it has no advantages, or they need what a group of scores does not have
        return None
    return None if found[0].equal(found[1]) else not found[1].equal(found[2])


def binomial(count: int, rate) -> torch.Tensor:
    """The chances of 0 ... count right responses; rate is a number or (P, 1)."""
    rights, rate = torch.arange(count + 1, **float64), torch.as_tensor(rate, **float64)
    return torch.distributions.Binomial(count, rate).log_prob(rights).exp()


def short(values, digits: int = 4) -> list[float]:
    return [float(f"{float(x):.{digits}g}") for x in values]


# --- 1 and 5. weights and noise of a prompt with pass rate p: the expected update is w(p) times grad p ---
RATES = torch.tensor([0.002, 0.005, *(i / 100 for i in range(1, 100)), 0.995, 0.998], **float64)


def other_groups(k: int, count: int, rate: float | None) -> list[tuple[float, list[int]]]:
    """Every state of `count` other groups, as its chance and the right responses of each; rate None: uniform rates.

    Only a mean and a variance over the batch see them. They depend on the number of right responses at k = 1, and
    else on the sum of s (k - s) over the groups, since the group's mean is taken first. One example stands for all.
    """
    chances = [1 / (k + 1)] * (k + 1) if rate is None else binomial(k, rate).tolist()
    states = {0: (1.0, [])}
    for _ in range(count):
        longer = {}
        for (value, (chance, rights)), s in product(states.items(), range(k + 1)):
            key = value + (s * (k - s) if k > 1 else s)
            before, example = longer.get(key, (0.0, [*rights, s]))
            longer[key] = (before + chance * chances[s], example)
        states = longer
    return list(states.values())


def moments(script, k, groups=1, others=None, critic_error=None, lengths=(1, 1), all_right=False):
    """w and the noise at RATES, summed over the right responses of the group and the states of the other groups.

    Noise is the expected sum of squared slopes over the tokens of the group: the second moment of the update, if the
    gradients of tokens have the same norm and are uncorrelated. `lengths` are those of right and wrong responses.
    With a critic_error the baseline of remax is the pass rate plus that error; all_right is RAFT of arXiv 2504.11343.
    """
    args = make_args(script, samples_per_prompt=k)
    w, noise, chances = torch.zeros_like(RATES), torch.zeros_like(RATES), binomial(k, RATES[:, None])
    knows_rate = script in ("ppo", "remax")  # the critic is exact; the greedy response is the likelier one
    rows = range(len(RATES)) if knows_rate else [slice(None)]
    for (chance, example), s, at in product(other_groups(k, groups - 1, others), range(k + 1), rows):
        p = RATES[at]
        rates = torch.full((groups * k,), 0.5 if others is None else others, **float64)
        rates[:k] = p if knows_rate else 0.5
        baseline = (rates > 0.5).double() if critic_error is None else rates + critic_error
        scores = torch.tensor([float(i < rights) for rights in (s, *example) for i in range(k)], **float64)
        tokens = torch.where(scores > 0, *lengths)
        rollout = make_rollout(scores, tokens, values=rates[:, None], greedy_scores=baseline)
        if all_right:
            rollout["advantages"] = scores[:, None]
        slope = slopes(script, args, rollout, k, k)[:k]
        # The gradient of log pi is on average grad p / p for a right and -grad p / (1 - p) for a wrong response.
        update = slope[:s, 0].sum() / p - slope[s:, 0].sum() / (1 - p)
        w[at] += chance * chances[at, s] * update
        noise[at] += chance * chances[at, s] * slope.square().sum()
    return w, noise


def weight_cells() -> list[dict]:
    cells = []
    for script in SCRIPTS:
        k = make_args(script).samples_per_prompt
        groups = BATCH // k if script in WHOLE_BATCH else 1
        # ppo: the other prompts have the rate 0.5, so that their states can be counted.
        cells.append({"script": script, "k": k, "groups": groups, "others": 0.5 if script == "ppo" else None})
    cells += [{"script": x, "k": k} for x in ("grpo", "maxrl", "raft", "rloo") for k in (2, 4, 16, 64)]
    for groups, others in ((1, None), (2, None), (4, None), (16, 0.98)):
        cells.append({"script": "reinforce_pp_baseline", "k": 8, "groups": groups, "others": others})
    cells += [{"script": "remax", "k": 1, "critic_error": error} for error in (0.0, 0.3)]
    cells.append({"script": "reinforce", "k": 8, "all_right": True})
    cells += [{"script": x, "k": 8, "lengths": y} for x in ("rloo", "opo") for y in ([1, 3], [3, 1])]
    usual = {"groups": 1, "others": None, "critic_error": None, "lengths": [1, 1], "all_right": False}
    return [usual | cell for cell in cells]


def measure_weight(run_dir, **cell) -> dict:
    w, noise = moments(**cell)
    return {"w": w.tolist(), "noise": short(noise, 6)}


def two_answers(script: str, rate: float, k: int = 8) -> float:
    """Responses for a signal, in a softmax over a right and a wrong answer: gradients 1 - p and -p of one logit."""
    args, first, second = make_args(script, samples_per_prompt=k), 0.0, 0.0
    for rights, chance in enumerate(binomial(k, rate)):
        is_right = torch.arange(k) < rights
        slope = slopes(script, args, one_token(is_right.double()), k, k)[:, 0]
        update = (slope * torch.where(is_right, 1 - rate, -rate)).sum()
        first, second = first + chance * update, second + chance * update**2
    return float(k * (second - first**2) / first**2)


class Tree:
    """Policies on all responses of `depth` tokens, many at once; each prefix has its own logits."""

    def __init__(self, vocabulary: int, depth: int):
        self.vocabulary, self.depth = vocabulary, depth
        self.responses = torch.tensor(list(product(range(vocabulary), repeat=depth)))  # (N, D)
        # The numbers of the prefixes of t tokens begin at firsts[t], in the order of their responses.
        self.firsts = [sum(vocabulary**i for i in range(t)) for t in range(depth + 1)]
        places = [torch.arange(vocabulary**depth) // vocabulary ** (depth - t) for t in range(depth)]
        self.prefixes = torch.stack(places, 1) + torch.tensor(self.firsts[:-1])  # (N, D): before each token

    def random(self, seeds: int, scale: float, generator) -> torch.Tensor:
        """(S, prefixes, V): the logits of random policies."""
        shape = (seeds, self.firsts[-1], self.vocabulary)
        return scale * torch.randn(shape, generator=generator, **float64)

    def logprobs(self, logits) -> torch.Tensor:
        """(S, N, D): of every token of every response."""
        return logits.log_softmax(-1)[:, self.prefixes, self.responses]

    def kl(self, one, other) -> torch.Tensor:
        """(S,): KL(one || other) of whole responses."""
        one, other = self.logprobs(one).sum(2), self.logprobs(other).sum(2)
        return (one.exp() * (one - other)).sum(1)

    def tilted(self, logits, values, strength) -> torch.Tensor:
        """The policy proportional to the given one times exp(strength * values); values (S, N), strength (S,)."""
        log_old, result = logits.log_softmax(-1), torch.zeros_like(logits)
        value = strength[:, None] * values
        for t in reversed(range(self.depth)):
            rows = slice(self.firsts[t], self.firsts[t + 1])
            result[:, rows] = log_old[:, rows] + value.view(len(logits), -1, self.vocabulary)
            value = result[:, rows].logsumexp(2)
        return result


def bisect(function, target: float, seeds: int) -> torch.Tensor:
    """(S,): where each of the rising functions reaches the target."""
    low, high = torch.zeros(seeds, **float64), torch.ones(seeds, **float64)
    for _ in range(12):
        high = torch.where(function(high) < target, 2 * high, high)
    for _ in range(30):
        middle = (low + high) / 2
        is_low = function(middle) < target
        low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
    return high


# --- 3. kl: the expected gradient of each KL term, against that of the KL of whole responses ---
KLS = (0.01, 0.03, 0.1, 0.3, 1.0, 2.0, 4.0)
KL_POLICIES = 48
STEP = 0.01  # nats between the policy that sampled and the one in training, if samples are stale
IN_REWARD = {"k1": lambda d: d, "k2": lambda d: d.square() / 2, "k3": lambda d: (-d).exp() - 1 + d}
KL_TERMS = {f"{kind} in the reward": ("remax", []) for kind in IN_REWARD}
KL_TERMS |= {"k1 in the loss": ("grpo", ["k1_in_loss"]), "k2 in the loss": ("reinforce_pp_baseline", [])}
KL_TERMS |= {"k3 in the loss": ("grpo", []), "rho * k3 in the loss": ("grpo", ["unbiased_kl"])}


@cache
def kl_policies(depth: int, target: float, stale: bool):
    """Tree, references, policies at this KL from them, and the policies that sampled."""
    tree, generator = Tree(3, depth), torch.Generator().manual_seed(depth)
    found = []
    while len(found) < KL_POLICIES:
        ref, value = tree.random(1, 1.0, generator), torch.randn(1, 3**depth, generator=generator, **float64)
        best, second = value.topk(2).values[0]
        # Else a KL of 4 is out of reach, or only where float64 ends
        if tree.logprobs(ref).sum(2)[0, value.argmax()] < -6 and best - second > 0.3:
            found.append((ref, value))
    ref, value = (torch.cat(tensors) for tensors in zip(*found))
    path = partial(tree.tilted, ref, value)
    new = path(bisect(lambda x: tree.kl(path(x), ref), target, KL_POLICIES))
    back = partial(tree.tilted, new, torch.randn(value.shape, generator=generator, **float64))
    old = back(bisect(lambda x: tree.kl(back(x), new), STEP, KL_POLICIES)) if stale else new
    return tree, ref, new, old


def kl_slopes(term: str, ref, new, old) -> torch.Tensor:
    """(R, D): the slopes of a KL term alone, from the log-probs (R, D); sums over tokens."""
    script, patches = KL_TERMS[term]
    rows, depth = new.shape
    zero = torch.zeros(rows, **float64)
    rollout = make_rollout(zero, torch.full((rows,), depth), old_logprobs=old, ref_logprobs=ref)
    args = make_args(script, patches, kl_coef=1.0)
    if script == "remax":
        rollout |= {"kl": IN_REWARD[term[:2]](old - ref), "greedy_scores": zero}
        rollout |= module(script).compute_advantages(args, rollout)
        script, args = "reinforce_pp", make_args("reinforce_pp")  # which has a ratio, for stale samples
    else:
        rollout["advantages"] = torch.zeros_like(new)
    num_sequences = 1 / depth if script == "grpo" else 1  # its mean over tokens, too, becomes a sum
    return slopes(script, args, rollout, num_sequences, 1, new, patches)


def measure_kl(run_dir, term, depth, stale, **_) -> dict:
    """Per KL, over the policies: cosine with the gradient of the KL, relative norm, and noise to signal."""
    result = {"cosine": [], "size": [], "noise": []}
    for target in KLS:
        tree, ref, new, old = kl_policies(depth, target, stale)
        leaf = new.clone().requires_grad_()
        (exact,) = torch.autograd.grad(tree.kl(leaf, ref).sum(), leaf)  # (S, prefixes, V)
        ref_lp, new_lp, old_lp = (tree.logprobs(x) for x in (ref, new, old))  # (S, N, D)
        flat = [x.flatten(0, 1) for x in (ref_lp, new_lp, old_lp)]
        slope = -kl_slopes(term, *flat).view_as(new_lp)  # of the penalty
        weight = slope * old_lp.sum(2).exp()[..., None]
        (found,) = torch.autograd.grad((tree.logprobs(leaf) * weight).sum(), leaf)
        # Squared norm of the gradient of each log-prob
        norms = 1 - 2 * new_lp.exp() + new.softmax(-1).square().sum(-1)[:, tree.prefixes]
        size, exact_size = found.flatten(1).norm(dim=1), exact.flatten(1).norm(dim=1)
        cosine = (found * exact).sum((1, 2)) / (size * exact_size)
        noise = (weight * slope * norms).sum((1, 2)) / size.square() - 1
        values = {"cosine": cosine, "size": size / exact_size, "noise": noise}
        for name, value in values.items():
            result[name].append(short(value.quantile(torch.tensor([0.25, 0.5, 0.75], **float64))))
    return result


# --- 2. length: the first token settles right or wrong; after it, a response stops with a separate probability ---
LONGEST, LENGTH_GROUP = 64, 8
LENGTHS = torch.arange(2, LONGEST + 1).repeat(2)  # of right responses, then of wrong ones
IS_RIGHT = torch.arange(len(LENGTHS)) < len(LENGTHS) // 2
OTHER_LENGTHS_MATTER = {"reinforce_pp", "ppo", "opo"}  # to their advantages; they are left out


def length_logprobs(theta) -> torch.Tensor:
    """(N, LONGEST): of all responses. theta: the logits of being right and of stopping if right, and if wrong."""
    choice = torch.where(IS_RIGHT, theta[0], -theta[0])[:, None]
    stop = torch.where(IS_RIGHT, theta[1], theta[-1])[:, None]
    choice, go_on, end = torch.nn.functional.logsigmoid(torch.stack([choice, -stop, stop]))
    t, lengths = torch.arange(LONGEST), LENGTHS[:, None]
    logprobs = torch.where(t == lengths - 1, torch.where(lengths < LONGEST, end, 0.0), go_on)
    return torch.where(t == 0, choice, logprobs) * (t < lengths)


@cache
def length_advantages(script: str, greedy_is_right: bool) -> torch.Tensor:
    """(k, 2): the advantage of a wrong and a right response if 0 ... k - 1 of the others are right."""
    k = 1 if script == "remax" else LENGTH_GROUP
    args = make_args(script, samples_per_prompt=k)
    result = torch.zeros(k, 2, **float64)
    for s, own, position in product(range(k), (0, 1), range(k)):  # raft: the first of equals counts
        scores = [float(i < s) for i in range(k - 1)]
        scores.insert(position, float(own))
        greedy_scores = torch.full((k,), float(greedy_is_right), **float64)
        rollout = one_token(torch.tensor(scores, **float64), greedy_scores=greedy_scores)
        result[s, own] += module(script).compute_advantages(args, rollout)["advantages"][position, 0] / k
    return result


def length_update(script: str, theta, advantages) -> torch.Tensor:
    """The exact expected update of theta. On policy, the gradient of every loss is linear in the advantage."""
    theta = theta.clone().requires_grad_()
    logprobs = length_logprobs(theta)
    chance = logprobs.detach().sum(1).exp()
    mean = binomial(len(advantages) - 1, theta[0].detach().sigmoid()) @ advantages  # (2,): wrong and right
    rollout = make_rollout(IS_RIGHT.double(), LENGTHS)
    rollout["advantages"] = mean[IS_RIGHT.long(), None] * rollout["response_mask"]
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
        update = length_update(script, theta, length_advantages(script, rate > 0.5))
        theta = theta + pace * update / update[0]  # the logit of the pass rate has one pace for all scripts
    return {"path": path}


# --- 4. reuse: many steps on one rollout, and steps on rollouts of older policies ---
POLICIES, RESPONSES, REUSE_TREE = 128, 64, (6, 4)
STEPS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 19, 23, 27, 32, 38, 45, 54, 64, 76, 91, 108, 128)
AT_KL, DELAYS = (0.05, 0.1, 0.5), (0, 2, 8, 32)
# GSPO's clip is meant for responses of 1,000 tokens, whose ratio it keeps below exp(0.3) and exp(0.4).
GSPO_FLAGS = {"clip_eps_low": 0.3 / REUSE_TREE[1], "clip_eps_high": 0.4 / REUSE_TREE[1]}


@cache
def reuse_policies():
    """Tree, policies, and which responses are right (S, N; pass rate below 0.3)."""
    tree, generator = Tree(*REUSE_TREE), torch.Generator().manual_seed(0)
    old = tree.random(POLICIES, 1.5, generator)
    points = torch.randn(POLICIES, tree.depth, tree.vocabulary, generator=generator, **float64)
    total = points[:, torch.arange(tree.depth), tree.responses].sum(2)  # (S, N)
    order = total.argsort(1, descending=True)
    is_in = tree.logprobs(old).sum(2).exp().gather(1, order).cumsum(1) < 0.3
    return tree, old, torch.zeros_like(total).scatter(1, order, is_in.double())


def sample(tree, logits, right, generator) -> dict:
    """A rollout of RESPONSES of each policy, with those of all policies side by side; advantages without a std."""
    chances = tree.logprobs(logits).sum(2).exp()
    rows = torch.multinomial(chances, RESPONSES, replacement=True, generator=generator)
    index = (torch.arange(POLICIES)[:, None, None], tree.prefixes[rows], tree.responses[rows])  # (S, R, D)
    old = logits.log_softmax(2)[index].flatten(0, 1)
    scores = right.gather(1, rows).flatten()
    rollout = make_rollout(scores, torch.full((len(scores),), tree.depth), old_logprobs=old, ref_logprobs=old)
    args = make_args("dr_grpo", samples_per_prompt=RESPONSES)
    return rollout | module("dr_grpo").compute_advantages(args, rollout) | {"index": index}


def reuse_update(script, patches, flags, rollout, logits) -> torch.Tensor:
    logits = logits.clone().requires_grad_()
    logprobs = logits.log_softmax(2)[rollout["index"]].flatten(0, 1)  # (S * R, D)
    if patches:  # of tis and icepop: the trainer knows the policy before the step and the one that sampled
        rollout = rollout | {"sampler_logprobs": rollout["old_logprobs"], "old_logprobs": logprobs.detach()}
    args = make_args(script, patches, max_response_length=REUSE_TREE[1], **flags)
    loss, _ = module(script, tuple(patches)).policy_loss(args, rollout, logprobs, RESPONSES, RESPONSES)
    return -torch.autograd.grad(loss, logits)[0]


def reaches(path, target: float) -> list[float] | None:
    """Pass rate and entropy where the KL along a path (steps, 3) first reaches the target."""
    above = (path[:, 1] >= target).nonzero()
    if len(above) == 0:
        return None
    low, high = path[above[0, 0] - 1], path[above[0, 0]]
    # Pass rate and entropy change in proportion to the square root of a small KL.
    share = (math.sqrt(target) - low[1].sqrt()) / (high[1].sqrt() - low[1].sqrt())
    return short((low + share * (high - low))[[0, 2]])


def measure_reuse(run_dir, script, patches, flags, delay) -> dict:
    """Means along the steps, and for every policy pass rate and entropy where its KL first reaches AT_KL.

    All steps use one rollout; or, with a delay, each uses a new one, of the policy that many steps before.
    """
    tree, start, right = reuse_policies()
    old, generator = tree.logprobs(start).sum(2), torch.Generator().manual_seed(1)

    def state(logits):
        """(3, S): pass rate, KL from the start, and entropy of a response."""
        new = tree.logprobs(logits).sum(2)
        return (new.exp() * torch.stack([right, new - old, -new])).sum(2)

    rollout = sample(tree, start, right, generator)
    update = reuse_update(script, patches, flags, rollout, start)
    # The learning rates with which the first step moves each policy by as many nats
    first = 0.01 if delay is None else 0.001
    rates = bisect(lambda x: state(start + x[:, None, None] * update)[1], first, POLICIES)[:, None, None]
    path, history = [state(start)], [start, start + rates * update]
    for step in range(1, STEPS[-1] + 1):
        if step in STEPS:
            path.append(state(history[step]))
        if delay is not None:
            rollout = sample(tree, history[max(0, step - delay)], right, generator)
        history.append(history[step] + rates * reuse_update(script, patches, flags, rollout, history[step]))
    path = torch.stack(path)  # (steps, 3, S)
    result = {"steps": STEPS, "mean": [short(row) for row in path.mean(2)]}
    return result | {f"at {x}": [reaches(one, x) for one in path.unbind(2)] for x in AT_KL}


if __name__ == "__main__":
    torch.set_num_threads(1)
    run = partial(run_all, workers=1)
    run("exact_weights", weight_cells(), measure_weight)
    lengths = [{"script": script} for script in SCRIPTS if script not in OTHER_LENGTHS_MATTER]
    run("exact_length", [cell | {"can_tell": x} for x in (True, False) for cell in lengths], measure_length)
    samples = [{"depth": depth, "stale": False} for depth in (4, 6, 8)] + [{"depth": 6, "stale": True}]
    terms = [{"script": x, "patches": patches, "term": term} for term, (x, patches) in KL_TERMS.items()]
    run("exact_kl", [term | sample for term in terms for sample in samples], measure_kl)
    losses = [{"script": x, "patches": [], "flags": GSPO_FLAGS if x == "gspo" else {}} for x in SCRIPTS]
    losses += [{"script": "grpo", "patches": [x], "flags": {}} for x in ("tis", "icepop")]
    run("exact_reuse", [loss | {"delay": x} for x in (None, *DELAYS) for loss in losses], measure_reuse)
