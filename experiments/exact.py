"""What the estimators do, computed instead of sampled: sections 1 to 4 of docs/exact.md.

    python experiments/exact.py

compute_advantages and policy_loss of the scripts run on float64 tensors, for every group or response that a small
policy can give. A script that joins the repository gets its curves without an edit.
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


def advantages(script: str, scores, lengths=None) -> torch.Tensor | None:
    """The advantage of each response's first token; None if the script needs more than scores and lengths."""
    lengths = torch.ones_like(scores, dtype=torch.long) if lengths is None else lengths
    try:
        return module(script).compute_advantages(make_args(script), make_rollout(scores, lengths))[
            "advantages"
        ][:, 0]
    except (AttributeError, KeyError):
        return None


@cache
def looks_at_batch(script: str) -> bool | None:
    """Whether the advantages of a group change with the scores of others; None if not even its own change them."""
    k = max(make_args(script).samples_per_prompt, 2)
    scores = torch.zeros(3, 2 * k)
    scores[1:, 1] = scores[2, -1] = 1.0  # of no response, of one, and of one in each group
    found = [advantages(script, x) for x in scores]
    if found[0] is None or found[0].equal(found[1]):
        return None
    return not found[1][:k].equal(found[2][:k])


@cache
def group_scripts() -> list[str]:
    """Those whose advantages come from the scores of several responses to a prompt."""
    scripts = [x for x in POLICY_SCRIPTS if looks_at_batch(x) is not None]
    return [x for x in scripts if make_args(x).samples_per_prompt > 1]


def binomial(count: int, rate) -> torch.Tensor:
    """The chances of 0 ... count right responses; rate is a number or (P, 1)."""
    rights, rate = torch.arange(count + 1, **float64), torch.as_tensor(rate, **float64)
    return torch.distributions.Binomial(count, rate).log_prob(rights).exp()


def short(values, digits: int = 4) -> list[float]:
    return [float(f"{float(x):.{digits}g}") for x in values]


# --- 1. weight of a prompt with pass rate p: the expected update is w(p) times grad p ---
RATES = torch.tensor([0.002, 0.005, *(i / 100 for i in range(1, 100)), 0.995, 0.998], **float64)


def other_groups(k: int, count: int, rate: float | None) -> list[tuple[float, list[int]]]:
    """Every state of `count` other groups, as its chance and the right responses of each; rate None: uniform rates.

    Only a variance over the batch sees them. It depends on the sum of s (k - s) over the groups with s right
    responses, since the group's mean is taken first. One example stands for all.
    """
    chances = [1 / (k + 1)] * (k + 1) if rate is None else binomial(k, rate).tolist()
    states = {0: (1.0, [])}
    for _ in range(count):
        longer = {}
        for (value, (chance, rights)), s in product(states.items(), range(k + 1)):
            key = value + s * (k - s)
            before, example = longer.get(key, (0.0, [*rights, s]))
            longer[key] = (before + chance * chances[s], example)
        states = longer
    return list(states.values())


def moments(script: str, k: int, groups: int = 1, others: float | None = None):
    """w and the noise at RATES, summed over the right responses of the group and the states of the other groups.

    Noise is the expected sum of squared slopes over the responses of the group: the second moment of the update, if
    all responses have gradients of the same norm that are uncorrelated.
    """
    args, p = make_args(script, samples_per_prompt=k), RATES
    w, noise, chances = torch.zeros_like(p), torch.zeros_like(p), binomial(k, p[:, None])
    for (chance, example), s in product(other_groups(k, groups - 1, others), range(k + 1)):
        scores = torch.tensor([float(i < rights) for rights in (s, *example) for i in range(k)], **float64)
        slope = slopes(script, args, one_token(scores), k, k)[:k, 0]
        # The gradient of log pi is on average grad p / p for a right and -grad p / (1 - p) for a wrong response.
        w += chance * chances[:, s] * (slope[:s].sum() / p - slope[s:].sum() / (1 - p))
        noise += chance * chances[:, s] * slope.square().sum()
    return w, noise


def weight_cells() -> list[dict]:
    cells = [{"script": x, "k": 8, "groups": BATCH // 8 if looks_at_batch(x) else 1} for x in group_scripts()]
    cells += [
        {"script": x, "k": k, "groups": 1} for x in ("grpo", "maxrl", "raft", "rloo") for k in (2, 4, 16, 64)
    ]
    cells += [{"script": "reinforce_pp_baseline", "k": 8, "groups": 2}]
    cells = [{"others": None} | cell for cell in cells]
    return [*cells, {"others": 0.98, "script": "reinforce_pp_baseline", "k": 8, "groups": 16}]


def measure_weight(run_dir, **cell) -> dict:
    w, noise = moments(**cell)
    return {"w": w.tolist(), "noise": short(noise, 6)}


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
    scores = torch.arange(LENGTH_GROUP) % 2.0
    return [
        x
        for x in group_scripts()
        if advantages(x, scores).equal(advantages(x, scores, LENGTHS[:LENGTH_GROUP]))
    ]


@cache
def length_advantages(script: str) -> torch.Tensor:
    """(k, 2): the advantage of a wrong and a right response if 0 ... k - 1 of the others are right."""
    result = torch.zeros(LENGTH_GROUP, 2, **float64)
    for s, own, position in product(
        range(LENGTH_GROUP), (0, 1), range(LENGTH_GROUP)
    ):  # raft: the first of equals counts
        scores = [float(i < s) for i in range(LENGTH_GROUP - 1)]
        scores.insert(position, float(own))
        result[s, own] += advantages(script, torch.tensor(scores, **float64))[position] / LENGTH_GROUP
    return result


def length_update(script: str, theta) -> torch.Tensor:
    """The exact expected update of theta. On policy, the gradient of every loss is linear in the advantage."""
    theta = theta.clone().requires_grad_()
    logprobs = length_logprobs(theta)
    chance = logprobs.detach().sum(1).exp()
    mean = binomial(LENGTH_GROUP - 1, theta[0].detach().sigmoid()) @ length_advantages(
        script
    )  # (2,): wrong, right
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
        update = length_update(script, theta)
        theta = theta + pace * update / update[0]  # the logit of the pass rate has one pace for all scripts
    return {"path": path}


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
    for _ in range(24):
        middle = (low + high) / 2
        is_low = function(middle) < target
        low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
    return high


# --- 3. kl: the expected gradient of each KL term, against that of the KL of whole responses ---
KLS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3)  # nats per token
KL_POLICIES = 32
# Vocabulary, tokens, and how the policy left its reference: towards a response that was rare, towards any, or at random
KL_FAMILIES = [(*tree, way) for tree in ((3, 4), (3, 8), (8, 3)) for way in ("rare", "any", "random")]
KL_TERMS = ("k1 in the reward", "k2 in the loss", "k3 in the loss", "k3, clamped")


@cache
def kl_policies(vocabulary: int, depth: int, way: str):
    """Tree, references (S, prefixes, V), and for each of KLS the policies at that distance."""
    tree, generator = Tree(vocabulary, depth), torch.Generator().manual_seed(depth)
    found = []
    while len(found) < KL_POLICIES:
        ref, noise = tree.random(1, 1.0, generator), tree.random(1, 1.0, generator)
        value = torch.randn(1, vocabulary**depth, generator=generator, **float64)
        # The largest KL that a tilt reaches is that of the best response alone.
        farthest = -tree.logprobs(ref).sum(2)[0, value.argmax()]
        if way == "random" or farthest > KLS[-1] * depth + (4 if way == "rare" else 0.5):
            found.append((ref, value, noise))
    ref, value, noise = (torch.cat(tensors) for tensors in zip(*found))

    def path(strength):
        return ref + strength[:, None, None] * noise if way == "random" else tree.tilted(ref, value, strength)

    targets = [x * depth for x in KLS]
    return tree, ref, [path(bisect(lambda x: tree.kl(path(x), ref), y, KL_POLICIES)) for y in targets]


def kl_slopes(term: str, ref, new) -> torch.Tensor:
    """(R, D): on policy, the slopes of a KL term alone, from the log-probs (R, D); sums over tokens."""
    script = {"k1 in the reward": "remax", "k2 in the loss": "reinforce_pp_baseline"}.get(term, "grpo")
    patches = ("unbiased_kl",) if term.startswith("rho") else ()
    zero, depth = torch.zeros(len(new)), new.shape[1]
    lengths = torch.full((len(new),), depth)
    rollout = make_rollout(
        zero, lengths, old_logprobs=new, ref_logprobs=ref, kl=new - ref, greedy_scores=zero
    )
    if script != "remax":
        rollout["advantages"] = torch.zeros_like(new)
    num_sequences = 1 / depth if script == "grpo" else 1  # its mean over tokens, too, becomes a sum
    slope = slopes(
        script, make_args(script, patches, kl_coef=1.0), rollout, num_sequences, 1, patches=patches
    )
    k3 = (ref - new).exp() - 1 - (ref - new)
    return slope * (k3 < 10) if term == "k3, clamped" else slope  # as verl: no gradient where k3 is above 10


def measure_kl(run_dir, vocabulary, depth, way, term) -> dict:
    """Per KL, medians over the policies: cosine with the gradient of the KL, and noise to signal."""
    tree, ref, policies = kl_policies(vocabulary, depth, way)
    result = {"cosine": [], "noise": []}
    for new in policies:
        leaf = new.clone().requires_grad_()
        (exact,) = torch.autograd.grad(tree.kl(leaf, ref).sum(), leaf)  # (S, prefixes, V)
        ref_lp, new_lp = tree.logprobs(ref), tree.logprobs(new)  # (S, N, D)
        slope = -kl_slopes(term, ref_lp.flatten(0, 1), new_lp.flatten(0, 1)).view_as(new_lp)  # of the penalty
        weight = slope * new_lp.sum(2).exp()[..., None]
        (found,) = torch.autograd.grad((tree.logprobs(leaf) * weight).sum(), leaf)
        # Squared norm of the gradient of each log-prob
        norms = 1 - 2 * new_lp.exp() + new.softmax(-1).square().sum(-1)[:, tree.prefixes]
        size, exact_size = found.flatten(1).norm(dim=1), exact.flatten(1).norm(dim=1)
        cosine = (found * exact).sum((1, 2)) / (size * exact_size)
        noise = (weight * slope * norms).sum((1, 2)) / size.square() - 1
        for name, value in {"cosine": cosine, "noise": noise}.items():
            result[name].append(float(value.median()))
    return {name: short(values) for name, values in result.items()}


# --- 4. reuse: samples of an older policy, from several steps per rollout or from a sampler that lags behind ---
POLICIES, RESPONSES, STEPS = 32, 64, 96
REUSE_TREES, FIRST_STEPS = (
    ((6, 4), (3, 6), (24, 2)),
    (0.0003, 0.003),
)  # the KL of the first step, nats per token
AT_KL = 0.1  # nats per token from the start
LOSSES = ("reinforce", "grpo", "gspo", "cispo", "flash_reinforce")


@cache
def reuse_policies(vocabulary: int, depth: int):
    """Tree, policies, and which responses are right (S, N; pass rate below 0.3)."""
    tree, generator = Tree(vocabulary, depth), torch.Generator().manual_seed(0)
    start = tree.random(POLICIES, 1.5, generator)
    points = torch.randn(POLICIES, depth, vocabulary, generator=generator, **float64)
    total = points[:, torch.arange(depth), tree.responses].sum(2)  # (S, N)
    order = total.argsort(1, descending=True)
    is_in = tree.logprobs(start).sum(2).exp().gather(1, order).cumsum(1) < 0.3
    return tree, start, torch.zeros_like(total).scatter(1, order, is_in.double())


def sample(tree, logits, right, generator) -> dict:
    """A rollout of RESPONSES of each policy, with those of all policies side by side; advantages without a std."""
    chances = tree.logprobs(logits).sum(2).exp()
    rows = torch.multinomial(chances, RESPONSES, replacement=True, generator=generator)
    index = (torch.arange(POLICIES)[:, None, None], tree.prefixes[rows], tree.responses[rows])  # (S, R, D)
    old = logits.log_softmax(2)[index].flatten(0, 1)
    scores = right.gather(1, rows).flatten()
    rollout = make_rollout(scores, torch.full((len(scores),), tree.depth), old_logprobs=old, ref_logprobs=old)
    args = make_args("dr_grpo", samples_per_prompt=RESPONSES)
    return rollout | module("dr_grpo").compute_advantages(args, rollout) | {"index": index, "sampler": logits}


def reuse_update(script: str, rollout: dict, logits) -> torch.Tensor:
    logits = logits.clone().requires_grad_()
    logprobs = logits.log_softmax(2)[rollout["index"]].flatten(0, 1)  # (S * R, D)
    # GSPO's clip is meant for 1,000 tokens, whose ratio it keeps between exp(-0.3) and exp(0.4).
    depth = logprobs.shape[1]
    flags = {"clip_eps_low": 0.3 / depth, "clip_eps_high": 0.4 / depth} if script == "gspo" else {}
    args = make_args(script, max_response_length=depth, **flags)
    loss, _ = module(script).policy_loss(args, rollout, logprobs, RESPONSES, RESPONSES)
    return -torch.autograd.grad(loss, logits)[0]


def measure_reuse(run_dir, vocabulary, depth, first, steps_per_rollout, lag, script) -> dict:
    """Per policy, where its KL from the start reaches AT_KL: the pass rate, and how stale the samples were until then.

    Staleness is the KL of the policy in training from the one that sampled, mean over steps, in nats per token.
    """
    tree, start, right = reuse_policies(vocabulary, depth)
    generator = torch.Generator().manual_seed(1)
    update = reuse_update(script, sample(tree, start, right, generator), start)
    # The learning rates with which the first step moves each policy by as many nats
    rates = bisect(lambda x: tree.kl(start + x[:, None, None] * update, start), first * depth, POLICIES)[
        :, None, None
    ]
    history, kl, passed, stale = [start], [], [], []
    for step in range(STEPS):
        logits = history[step]
        if step % steps_per_rollout == 0:
            rollout = sample(tree, history[max(0, step - lag)], right, generator)
        kl.append(tree.kl(logits, start) / depth)
        passed.append((tree.logprobs(logits).sum(2).exp() * right).sum(1))
        stale.append(tree.kl(logits, rollout["sampler"]) / depth)
        history.append(logits + rates * reuse_update(script, rollout, logits))
    kl, passed, stale = torch.stack(kl), torch.stack(passed), torch.stack(stale)  # (STEPS, S)
    result = {"pass rate": [], "staleness": []}
    for i in range(POLICIES):
        above = (kl[:, i] >= AT_KL).nonzero()
        if len(above):
            at = int(above[0, 0])
            # The pass rate changes in proportion to the square root of a small KL.
            low, high = kl[at - 1 : at + 1, i].sqrt()
            share = (AT_KL**0.5 - low) / (high - low)
            values = torch.lerp(passed[at - 1, i], passed[at, i], share), stale[:at, i].mean()
        for name, value in zip(result, values if len(above) else (math.nan, math.nan)):
            result[name].append(value)
    return {name: [None if math.isnan(x) else x for x in short(values)] for name, values in result.items()}


def reuse_cells() -> list[dict]:
    schedules = [(2, 0), (8, 0), (32, 0), (1, 2), (1, 32)]
    names = ("vocabulary", "depth", "first", "steps_per_rollout", "lag", "script")
    cells = product(REUSE_TREES, FIRST_STEPS, schedules, LOSSES)
    return [dict(zip(names, (*tree, first, *schedule, script))) for tree, first, schedule, script in cells]


if __name__ == "__main__":
    torch.set_num_threads(1)
    run = partial(run_all, workers=1)
    run("exact_weights", weight_cells(), measure_weight)
    run(
        "exact_length",
        [{"script": x, "can_tell": y} for y in (True, False) for x in length_scripts()],
        measure_length,
    )
    families = [dict(zip(("vocabulary", "depth", "way"), family)) for family in KL_FAMILIES]
    run("exact_kl", [family | {"term": term} for family in families for term in KL_TERMS], measure_kl)
    run("exact_reuse", reuse_cells(), measure_reuse)
