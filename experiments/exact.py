"""What the estimators do, computed instead of sampled: sections 1 to 5 of docs/exact.md.

    python experiments/exact.py

compute_advantages and policy_loss of the scripts run on float64 tensors, for every group or response that a small
policy can give. exact_training.py has section 6, exact_plots.py the pictures. A script that joins the repository gets
its curves without an edit, or an entry in LEFT_OUT.
"""

import importlib.util
import math
import shutil
import sys
import tempfile
from functools import cache, partial
from itertools import product
from pathlib import Path

import torch
from common import PATCHES, POLICY_SCRIPTS, ROOT, apply, run_all

LEFT_OUT = {
    "distill": "it has no scores",
    "sdpo": "its advantages come from the log-probs of a teacher",
    "gdpo": "it needs several scores for each response",
}
SCRIPTS = [script for script in POLICY_SCRIPTS if script not in LEFT_OUT]
# The advantages of these look at the whole batch, those of the others at the group.
WHOLE_BATCH = {"reinforce", "reinforce_pp", "reinforce_pp_baseline", "ppo", "flash_reinforce"}
BATCH = 128  # the default batch_size
float64 = {"dtype": torch.float64}


# --- the scripts ---


@cache
def module(script: str, patches: tuple[str, ...] = ()):
    """A copy of the script with these patches, as a module."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(shutil.copy(ROOT / f"{script}.py", folder))
        apply(patches, folder)
        name = "_".join(["exact", script, *patches])
        spec = importlib.util.spec_from_file_location(name, file)
        made = importlib.util.module_from_spec(spec)
        sys.modules[name] = made  # dataclasses look there
        spec.loader.exec_module(made)
    return made


def has(patch: str) -> bool:
    return (PATCHES / f"{patch}.patch").exists()


def make_args(script: str, patches=(), **values):
    """The script's default flags with these values; no KL and no length penalty unless given."""
    args = module(script, tuple(patches)).Args()
    for name, value in {"kl_coef": 0.0, "overlong_buffer": 0, **values}.items():
        setattr(args, name, value)
    return args


def make_rollout(scores, lengths=None, **more) -> dict:
    """Responses without a KL, of one token each unless lengths are given."""
    lengths = torch.ones_like(scores, dtype=torch.long) if lengths is None else lengths
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    zero = torch.zeros(mask.shape, **float64)
    rollout = {
        "response_mask": mask,
        "scores": scores,
        "old_logprobs": zero,
        "ref_logprobs": zero,
        "kl": zero,
    }
    return rollout | more


def slopes(script, args, rollout, num_sequences, num_tokens, logprobs=None, patches=()):
    """(B, T): minus the derivative of the loss with respect to the log-prob of each token; on policy by default."""
    code = module(script, tuple(patches))
    if "advantages" not in rollout:
        rollout = rollout | code.compute_advantages(args, rollout)
    leaf = (rollout["old_logprobs"] if logprobs is None else logprobs).detach().clone().requires_grad_()
    loss, _ = code.policy_loss(args, rollout, leaf, num_sequences, num_tokens)
    return -torch.autograd.grad(loss, leaf)[0]


def binomial(count: int, rate) -> torch.Tensor:
    """The chances of 0 ... count right responses; rate is a number or (P, 1)."""
    rate = torch.as_tensor(rate, **float64)
    rights = torch.arange(count + 1, **float64)
    ways = torch.tensor([math.comb(count, i) for i in range(count + 1)], **float64)
    return ways * rate**rights * (1 - rate) ** (count - rights)


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
        for value, (chance, rights) in states.items():
            for s, chance_of_s in enumerate(chances):
                key = value + (s * (k - s) if k > 1 else s)
                before, example = longer.get(key, (0.0, [*rights, s]))
                longer[key] = (before + chance * chance_of_s, example)
        states = longer
    return list(states.values())


def moments(script, k, groups=1, others=None, critic_error=None, lengths=(1, 1), all_right=False):
    """w and the noise at RATES, summed over the right responses of the group and the states of the other groups.

    Noise is the expected sum of squared slopes over the tokens of the group: the variance of the update, if the
    gradients of tokens have the same norm and are uncorrelated, as those of a large model nearly are. `lengths` are
    those of right and wrong responses. With a critic_error the baseline of remax is the pass rate plus that error.
    """
    args = make_args(script, samples_per_prompt=k)
    is_right = torch.arange(k) < torch.arange(k + 1)[:, None]  # (k + 1, k): s right responses in row s
    chance = binomial(k, RATES[:, None])  # (P, k + 1)
    w, noise = torch.zeros_like(RATES), torch.zeros_like(RATES)
    knows_rate = script in ("ppo", "remax")  # the critic is exact; the greedy response is the likelier one
    for chance_of_others, example in other_groups(k, groups - 1, others):
        other_scores = torch.tensor([float(i < s) for s in example for i in range(k)], **float64)
        for at in range(len(RATES)) if knows_rate else [slice(None)]:
            right, wrong, squares = [], [], []
            for row in is_right:
                rates = torch.full((groups * k,), 0.5 if others is None else others, **float64)
                rates[:k] = RATES[at] if knows_rate else 0.5
                baseline = (rates > 0.5).double() if critic_error is None else rates + critic_error
                scores = torch.cat([row.double(), other_scores])
                tokens = torch.where(scores > 0, *lengths)
                rollout = make_rollout(scores, tokens, values=rates[:, None], greedy_scores=baseline)
                if all_right:  # of RAFT in arXiv 2504.11343: every right response has the advantage 1
                    rollout["advantages"] = scores[:, None]
                slope = slopes(script, args, rollout, k, k)[:k]
                right.append(slope[row, 0].sum())
                wrong.append(slope[~row, 0].sum())
                squares.append(slope.square().sum())
            # The gradient of log pi is on average grad p / p for a right and -grad p / (1 - p) for a wrong response.
            p = RATES[at][..., None]
            update = torch.stack(right) / p - torch.stack(wrong) / (1 - p)
            w[at] += chance_of_others * (chance[at] * update).sum(-1)
            noise[at] += chance_of_others * (chance[at] * torch.stack(squares)).sum(-1)
    return w, noise


def weight_cells() -> list[dict]:
    cells = []
    for script in SCRIPTS:
        k = make_args(script).samples_per_prompt
        groups = BATCH // k if script in WHOLE_BATCH else 1
        # ppo: the other prompts have the rate 0.5, so that their states can be counted.
        cells.append({"script": script, "k": k, "groups": groups, "others": 0.5 if script == "ppo" else None})
    for script, k in product(("grpo", "maxrl", "raft", "rloo"), (2, 4, 8, 16, 64)):
        cells.append({"script": script, "k": k})
    for groups, others in ((1, None), (2, None), (4, None), (16, None), (16, 0.98)):
        cells.append({"script": "reinforce_pp_baseline", "k": 8, "groups": groups, "others": others})
    for groups, others in ((4, None), (16, None), (16, 0.98)):
        cells.append({"script": "reinforce_pp", "k": 1, "groups": groups, "others": others})
    cells.append({"script": "reinforce", "k": 8, "all_right": True})
    cells += [{"script": "remax", "k": 1, "critic_error": error} for error in (0.0, 0.1, 0.3)]
    for script, lengths in product(("rloo", "opo"), ([1, 3], [3, 1])):
        cells.append({"script": script, "k": 8, "lengths": lengths})
    same = {"groups": 1, "others": None, "critic_error": None, "lengths": [1, 1], "all_right": False}
    cells = [same | cell for cell in cells if cell["script"] in SCRIPTS]
    return [cell for i, cell in enumerate(cells) if cell not in cells[:i]]


def measure_weight(run_dir, **cell) -> dict:
    w, noise = moments(**cell)
    return {"w": w.tolist(), "noise": [float(f"{x:.6g}") for x in noise.tolist()]}


# --- policies on all responses of `depth` tokens, many at once; each prefix has its own logits ---


class Tree:
    def __init__(self, vocabulary: int, depth: int):
        self.vocabulary, self.depth = vocabulary, depth
        self.responses = torch.tensor(list(product(range(vocabulary), repeat=depth)))  # (N, D)
        self.prefixes = torch.zeros_like(self.responses)  # the number of the prefix before each token
        first, number = 0, torch.zeros(len(self.responses), dtype=torch.long)
        for t in range(depth):
            self.prefixes[:, t] = first + number
            first += vocabulary**t
            number = number * vocabulary + self.responses[:, t]
        self.num_prefixes = first

    def random(self, seeds: int, scale: float, generator) -> torch.Tensor:
        """(S, prefixes, V): the logits of random policies."""
        return scale * torch.randn(seeds, self.num_prefixes, self.vocabulary, generator=generator, **float64)

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
            first = int(self.prefixes[0, t])
            rows = slice(first, first + self.vocabulary**t)
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
KL_TERMS["k1 in the reward, less its mean"] = ("remax", [])
KL_TERMS["k1 in the loss"] = ("grpo", ["k1_in_loss"])
KL_TERMS["k2 in the loss"] = ("reinforce_pp_baseline", [])
KL_TERMS["k3 in the loss"] = ("grpo", [])
KL_TERMS["rho * k3 in the loss"] = ("grpo", ["unbiased_kl"])


@cache
def kl_policies(depth: int, target: float, stale: bool):
    """Tree, references, policies at this KL from them, and the policies that sampled."""
    tree, generator = Tree(3, depth), torch.Generator().manual_seed(depth)
    refs, values = [], []
    while len(refs) < KL_POLICIES:
        ref, value = tree.random(1, 1.0, generator), torch.randn(1, 3**depth, generator=generator, **float64)
        best, second = value.topk(2).values[0]
        # Else a KL of 4 is out of reach, or only where float64 ends
        if tree.logprobs(ref).sum(2)[0, value.argmax()] < -6 and best - second > 0.3:
            refs.append(ref)
            values.append(value)
    ref, value = torch.cat(refs), torch.cat(values)
    path = partial(tree.tilted, ref, value)
    new = path(bisect(lambda x: tree.kl(path(x), ref), target, KL_POLICIES))
    back = partial(tree.tilted, new, torch.randn(value.shape, generator=generator, **float64))
    old = back(bisect(lambda x: tree.kl(back(x), new), STEP, KL_POLICIES)) if stale else new
    return tree, ref, new, old


def kl_slopes(term: str, ref, new, old, mean_kl=0.0) -> torch.Tensor:
    """(R, D): the slopes of a KL term alone, from the log-probs (R, D); sums over tokens."""
    script, patches = KL_TERMS[term]
    rows, depth = new.shape
    zero = torch.zeros(rows, **float64)
    rollout = make_rollout(zero, torch.full((rows,), depth), old_logprobs=old, ref_logprobs=ref)
    args = make_args(script, patches, kl_coef=1.0)
    if script == "remax":
        rollout["kl"] = IN_REWARD[term[:2]](old - ref)
        rollout["greedy_scores"] = zero - mean_kl
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
        new, new_logits = new.clone(), new.clone().requires_grad_()
        (exact,) = torch.autograd.grad(tree.kl(new_logits, ref).sum(), new_logits)  # (S, prefixes, V)
        ref_lp, new_lp, old_lp = (tree.logprobs(x) for x in (ref, new, old))  # (S, N, D)
        flat = [x.flatten(0, 1) for x in (ref_lp, new_lp, old_lp)]
        mean_kl = 0.0
        if "mean" in term:
            mean_kl = ((old_lp - ref_lp).sum(2) * old_lp.sum(2).exp()).sum(1)
            mean_kl = mean_kl.repeat_interleave(new_lp.shape[1])
        slope = -kl_slopes(term, *flat, mean_kl).view_as(new_lp)  # of the penalty
        weight = slope * old_lp.sum(2).exp()[..., None]
        leaf = new.clone().requires_grad_()
        (found,) = torch.autograd.grad((tree.logprobs(leaf) * weight).sum(), leaf)
        probs = new.softmax(-1)
        # Squared norm of the gradient of each log-prob
        norms = 1 - 2 * new_lp.exp() + probs.square().sum(-1)[:, tree.prefixes]
        second = (weight * slope * norms).sum((1, 2))
        size, exact_size = found.flatten(1).norm(dim=1), exact.flatten(1).norm(dim=1)
        cosine = (found * exact).sum((1, 2)) / (size * exact_size)
        values = {"cosine": cosine, "size": size / exact_size, "noise": second / size.square() - 1}
        for name, value in values.items():
            quartiles = value.quantile(torch.tensor([0.25, 0.5, 0.75], **float64))
            result[name].append([float(f"{x:.4g}") for x in quartiles.tolist()])
    return result


def kl_cells() -> list[dict]:
    found = {
        term: made
        for term, made in KL_TERMS.items()
        if all((PATCHES / f"{x}.patch").exists() for x in made[1])
    }
    cells = []
    for (term, (script, patches)), depth, stale in product(found.items(), (4, 6, 8), (False, True)):
        cells.append({"script": script, "patches": patches, "term": term, "depth": depth, "stale": stale})
    return cells


# --- 2. length: the first token settles right or wrong; after it, a response stops with a separate probability ---

LONGEST, LENGTH_GROUP = 64, 8
LENGTHS = torch.arange(2, LONGEST + 1).repeat(2)  # of right responses, then of wrong ones
IS_RIGHT = torch.arange(len(LENGTHS)) < len(LENGTHS) // 2
OTHER_LENGTHS_MATTER = {"reinforce_pp", "ppo", "opo"}  # to their advantages; they are left out


def length_logprobs(theta) -> torch.Tensor:
    """(N, LONGEST): of all responses. theta: the logits of being right and of stopping if right, and if wrong."""
    t, rows, lengths = torch.arange(LONGEST), [], LENGTHS[: LONGEST - 1, None]
    for choice, stop in ((theta[0], theta[1]), (-theta[0], theta[-1])):
        choice, go_on, end = torch.nn.functional.logsigmoid(torch.stack([choice, -stop, stop]))
        last = torch.where(lengths < LONGEST, end, 0.0)
        row = torch.where(t == lengths - 1, last, torch.where(t < lengths, go_on, 0.0))
        rows.append(torch.where(t == 0, choice, row))
    return torch.cat(rows)


def length_advantages(script: str, rate: float) -> torch.Tensor:
    """(k, 2): the advantage of a wrong and a right response if 0 ... k - 1 of the others are right."""
    k = 1 if script == "remax" else LENGTH_GROUP
    args = make_args(script, samples_per_prompt=k)
    result = torch.zeros(k, 2, **float64)
    for s, own, position in product(range(k), (0, 1), range(k)):  # raft: the first of equals counts
        scores = (torch.arange(k - 1) < s).double()
        scores = torch.cat([scores[:position], torch.tensor([float(own)], **float64), scores[position:]])
        rollout = make_rollout(scores, greedy_scores=torch.full((k,), float(rate > 0.5), **float64))
        result[s, own] += module(script).compute_advantages(args, rollout)["advantages"][position, 0] / k
    return result


def length_update(script: str, theta, advantages) -> torch.Tensor:
    """The exact expected update of theta."""
    theta = theta.clone().requires_grad_()
    logprobs = length_logprobs(theta)
    chance = logprobs.detach().sum(1).exp()
    k, rows = len(advantages), torch.arange(len(LENGTHS)).repeat_interleave(len(advantages))
    weight = chance[rows] * binomial(k - 1, theta[0].detach().sigmoid()).repeat(len(LENGTHS))
    own = torch.stack([advantages[:, 1] if right else advantages[:, 0] for right in IS_RIGHT]).flatten()
    rollout = make_rollout(own, LENGTHS[rows])
    rollout["advantages"] = own[:, None] * rollout["response_mask"]
    args = make_args(script, max_response_length=LONGEST)
    slope = slopes(script, args, rollout, 1, float((chance * LENGTHS).sum()))  # N_tok of a large batch
    return torch.autograd.grad((weight[:, None] * slope * logprobs[rows]).sum(), theta)[0]


def measure_length(run_dir, script, can_tell, speed=0.1, **_) -> dict:
    """Pass rate and mean length of right and wrong responses along the path; the push on a token by length."""
    theta = torch.tensor([math.log(0.1 / 0.9)] + [-math.log(15.0)] * (2 if can_tell else 1), **float64)
    path, cached = [], {}
    while theta[0] < math.log(19.0):
        rate = float(theta[0].sigmoid())
        chance = length_logprobs(theta).sum(1).exp()
        means = [float((chance * LENGTHS)[x].sum() / chance[x].sum()) for x in (IS_RIGHT, ~IS_RIGHT)]
        path.append([round(x, 4) for x in (rate, *means)])
        known = rate > 0.5 if script == "remax" else None
        if known not in cached:
            cached[known] = length_advantages(script, rate)
        update = length_update(script, theta, cached[known])
        theta = (
            theta + speed * update / update[0]
        )  # the same pace in the logit of the pass rate for every script
    ones = torch.ones(len(LENGTHS) // 2, **float64)
    rollout = make_rollout(ones, LENGTHS[: len(ones)])
    rollout["advantages"] = rollout["response_mask"].double()
    slope = slopes(script, make_args(script, max_response_length=LONGEST), rollout, 1, 1)[:, 0]
    return {"path": path, "per_token": [float(f"{x:.4g}") for x in (slope / slope[15]).tolist()]}


def length_cells() -> list[dict]:
    scripts = [script for script in SCRIPTS if script not in OTHER_LENGTHS_MATTER]
    return [{"script": script, "can_tell": can_tell} for can_tell in (True, False) for script in scripts]


# --- 4. reuse: many steps on one rollout, and steps on rollouts of older policies ---

POLICIES, RESPONSES, REUSE_TREE = 128, 64, (6, 4)
STEPS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 19, 23, 27, 32, 38, 45, 54, 64, 76, 91, 108, 128)
AT_KL = (0.05, 0.1, 0.5)
DELAYS = (0, 2, 8, 32)
# GSPO's clip is meant for responses of 1,000 tokens, whose ratio it keeps below exp(0.3) and exp(0.4).
GSPO_FLAGS = {"clip_eps_low": 0.3 / REUSE_TREE[1], "clip_eps_high": 0.4 / REUSE_TREE[1]}


@cache
def reuse_policies():
    """Tree, policies, which responses are right (S, N; pass rate below 0.3), generator."""
    tree, generator = Tree(*REUSE_TREE), torch.Generator().manual_seed(0)
    old = tree.random(POLICIES, 1.5, generator)
    points = torch.randn(POLICIES, tree.depth, tree.vocabulary, generator=generator, **float64)
    total = points[:, torch.arange(tree.depth), tree.responses].sum(2)  # (S, N)
    order = total.argsort(1, descending=True)
    is_in = tree.logprobs(old).sum(2).exp().gather(1, order).cumsum(1) < 0.3
    return tree, old, torch.zeros_like(total).scatter(1, order, is_in.double()), generator.get_state()


def sample(tree, logits, right, generator) -> dict:
    """A rollout of RESPONSES of each policy, with those of all policies side by side; advantages without a std."""
    chances = tree.logprobs(logits).sum(2).exp()
    rows = torch.multinomial(chances, RESPONSES, replacement=True, generator=generator)
    prefixes, tokens = tree.prefixes[rows], tree.responses[rows]  # (S, R, D)
    scores = right.gather(1, rows).flatten()
    rollout = make_rollout(scores, torch.full((len(scores),), tree.depth))
    args = make_args("dr_grpo", samples_per_prompt=RESPONSES)
    rollout |= module("dr_grpo").compute_advantages(args, rollout)
    policy = torch.arange(POLICIES)[:, None, None]
    old = logits.log_softmax(2)[policy, prefixes, tokens].flatten(0, 1)
    return rollout | {"old_logprobs": old, "ref_logprobs": old, "index": (policy, prefixes, tokens)}


def reuse_update(script, patches, flags, rollout, logits) -> torch.Tensor:
    logits = logits.clone().requires_grad_()
    logprobs = logits.log_softmax(2)[rollout["index"]].flatten(0, 1)  # (S * R, D)
    if patches:  # of tis and icepop: the trainer knows the policy before the step and the one that sampled
        rollout = rollout | {"sampler_logprobs": rollout["old_logprobs"], "old_logprobs": logprobs.detach()}
    args = make_args(script, patches, max_response_length=REUSE_TREE[1], **flags)
    loss, _ = module(script, tuple(patches)).policy_loss(args, rollout, logprobs, RESPONSES, RESPONSES)
    return -torch.autograd.grad(loss, logits)[0]


def state_of(tree, old, logits, right) -> torch.Tensor:
    """(3, S): pass rate, KL from old, and entropy of a response; old are log-probs (S, N)."""
    new = tree.logprobs(logits).sum(2)
    terms = torch.stack([right, new - old, -new])
    return (new.exp() * terms).sum(2)


def rate_for(tree, old, right, start, update, first: float) -> torch.Tensor:
    """(S, 1, 1): the learning rates with which the first step moves each policy by `first` nats."""
    rate = bisect(lambda x: state_of(tree, old, start + x[:, None, None] * update, right)[1], first, POLICIES)
    return rate[:, None, None]


def measure_reuse(run_dir, script, patches, flags, first, delay) -> dict:
    """Means along the steps, and for every policy pass rate and entropy where its KL first reaches AT_KL.

    All steps use one rollout; or, with a delay, each uses a new one, of the policy that many steps before.
    """
    tree, start, right, random_state = reuse_policies()
    old = tree.logprobs(start).sum(2)
    generator = torch.Generator()
    generator.set_state(random_state)
    rate, path, history = None, [], [start]
    for step in range(STEPS[-1] + 1):
        logits = history[-1]
        if step in STEPS:
            path.append(state_of(tree, old, logits, right))
        if step == 0 or delay is not None:
            rollout = sample(tree, history[max(0, step - (delay or 0))], right, generator)
        update = reuse_update(script, patches, flags, rollout, logits)
        if rate is None:
            rate = rate_for(tree, old, right, start, update, first)
        history.append(logits + rate * update)
    path = torch.stack(path)  # (steps, 3, S)
    result = {"steps": STEPS, "mean": [[float(f"{x:.4g}") for x in row] for row in path.mean(2).tolist()]}
    for target in AT_KL if first == 0.01 else ():
        result[f"at {target}"] = []
        for one in path.unbind(2):  # (steps, 3)
            above = (one[:, 1] >= target).nonzero()
            if len(above) == 0:
                result[f"at {target}"].append(None)
                continue
            low, high = one[above[0, 0] - 1], one[above[0, 0]]
            # Pass rate and entropy change in proportion to the square root of a small KL.
            share = (math.sqrt(target) - low[1].sqrt()) / (high[1].sqrt() - low[1].sqrt())
            found = low + share * (high - low)
            result[f"at {target}"].append([round(float(x), 4) for x in found[[0, 2]]])
    return result


def reuse_cells() -> list[dict]:
    losses = [{"script": s, "patches": [], "flags": GSPO_FLAGS if s == "gspo" else {}} for s in SCRIPTS]
    losses += [{"script": "grpo", "patches": [x], "flags": {}} for x in ("tis", "icepop") if has(x)]
    cells = [loss | {"first": 0.01, "delay": None} for loss in losses]
    # Losses without a ratio are all that of reinforce, and the clip of ppo and others is that of grpo.
    same = "rloo raft remax maxrl opo ppo reinforce_pp reinforce_pp_baseline dr_grpo"
    losses = [loss for loss in losses if loss["script"] not in same.split()]
    return cells + [loss | {"first": 0.001, "delay": delay} for delay in (None, *DELAYS) for loss in losses]


def main() -> None:
    torch.set_num_threads(1)
    run_all("exact_weights", weight_cells(), measure_weight, workers=1)
    run_all("exact_length", length_cells(), measure_length, workers=1)
    run_all("exact_kl", kl_cells(), measure_kl, workers=1)
    run_all("exact_reuse", reuse_cells(), measure_reuse, workers=1)


if __name__ == "__main__":
    main()
