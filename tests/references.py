"""The equations of each policy script, written from the papers as loops over tokens in float64.

For a script NAME.py, there are two functions:

    NAME_advantages(args, rollout)                           a number for each response, or a list with one per token
    NAME_loss(args, batch, new, num_sequences, num_tokens)   the loss, and the share of clipped tokens or None

A loss is a sum over entries of new (B, T), so that autograd differentiates it. Everything else is plain numbers. The
constants are what the tests must know about a method.
"""

import math
from functools import partial
from itertools import repeat
from typing import NamedTuple

import torch

FOR_0_AND_1 = {"maxrl"}  # scripts that accept no other scores
# The (B, T) tensors that only some methods use, made from random numbers. A method with a new tensor adds a line.
EXTRA = {"values": lambda x: x, "teacher_logprobs": lambda x: -x.abs()}


def make_rollout(seed: int, k: int) -> dict:
    """k responses of 1 to 9 tokens to each of 4 prompts. Two masks have holes, and tensors are 0 where it is False."""
    torch.manual_seed(seed)
    lengths = torch.randint(1, 10, (4 * k,))
    lengths[:2] = 9
    mask = torch.arange(9) < lengths[:, None]
    mask[0, [0, 4]] = mask[1, 3:8] = False  # the first token, one and several in the middle
    scores, greedy_scores = torch.randn(2, 4 * k, dtype=torch.float64)
    old, ref, advantages = torch.randn(3, 4 * k, 9, dtype=torch.float64)
    tensors = {"old_logprobs": -old.abs(), "ref_logprobs": -ref.abs(), "advantages": advantages}
    tensors["kl"] = tensors["old_logprobs"] - tensors["ref_logprobs"]
    for name, function in EXTRA.items():
        tensors[name] = function(torch.randn(4 * k, 9, dtype=torch.float64))
    tensors = {name: x * mask for name, x in tensors.items()}
    return {"response_mask": mask, "scores": scores, "greedy_scores": greedy_scores} | tensors


def spread(values: list, mask) -> torch.Tensor:
    """(B, T): values[i] on every token of response i. If it is a list, each token has its own number."""
    result = torch.zeros(mask.shape, dtype=torch.float64)
    for row, row_mask, x in zip(result, mask, values):
        row[row_mask] = torch.tensor(x, dtype=torch.float64)
    return result


def rows_of(name: str, rollout) -> list[list[float]]:
    """The numbers of rollout[name] at the tokens of each response."""
    return [row[row_mask].tolist() for row, row_mask in zip(rollout[name], rollout["response_mask"])]


def returns_to_go(args, rollout) -> list[list[float]]:
    """For each token, the score minus beta times the KL of this token and all later ones."""
    pairs = zip(rollout["scores"].tolist(), rows_of("kl", rollout))
    return [[score - args.kl_coef * math.fsum(kl[t:]) for t in range(len(kl))] for score, kl in pairs]


def rewards(args, rollout) -> list[float]:
    """For each response, the score minus beta times its KL."""
    return [row[0] for row in returns_to_go(args, rollout)]


def whitened(rows: list[list[float]]) -> list[list[float]]:
    numbers = [x for row in rows for x in row]
    mean = math.fsum(numbers) / len(numbers)
    variance = math.fsum((x - mean) ** 2 for x in numbers) / len(numbers)
    std = math.sqrt(max(variance, 1e-8))
    return [[(x - mean) / std for x in row] for row in rows]


def groups(values: list[float], args) -> list[list[float]]:
    k = args.samples_per_prompt
    return [values[i : i + k] for i in range(0, len(values), k)]


def minus_group_means(scores: list[float], args) -> list[float]:
    centered = []
    for group in groups(scores, args):
        mean = group[0] if len(set(group)) == 1 else math.fsum(group) / len(group)
        centered += [x - mean for x in group]
    return centered


def normalized(scores: list[float], args) -> list[float]:
    results = []
    for group in groups(minus_group_means(scores, args), args):
        std = math.sqrt(math.fsum(x * x for x in group) / (len(group) - 1))
        results += [x / (std + 1e-4) for x in group]
    return results


def grpo_advantages(args, rollout):
    return normalized(rollout["scores"].tolist(), args)


gspo_advantages = cispo_advantages = sapo_advantages = dppo_advantages = vespo_advantages = grpo_advantages


def dapo_advantages(args, rollout):
    scores, start = [], args.max_response_length - args.overlong_buffer
    for score, length in zip(rollout["scores"].tolist(), rollout["response_mask"].sum(1).tolist()):
        if args.overlong_buffer and length > start:
            score -= (length - start) / args.overlong_buffer
        scores.append(score)
    return normalized(scores, args)


def dr_grpo_advantages(args, rollout):
    return minus_group_means(rollout["scores"].tolist(), args)


def reinforce_pp_baseline_advantages(args, rollout):
    centered = minus_group_means(rollout["scores"].tolist(), args)
    std = math.sqrt(max(math.fsum(x * x for x in centered) / len(centered), 1e-8))
    return [x / std for x in centered]


def gdpo_advantages(args, rollout):
    rewards = list(zip(*rollout["scores"].tolist()))  # for each reward the scores of all responses
    sums = [0.0] * len(rollout["scores"])
    for weight, scores in zip(args.reward_weights or [1.0] * len(rewards), rewards, strict=True):
        for i, x in enumerate(normalized(list(scores), args)):
            sums[i] += weight * x
    return whitened([sums])[0]


def maxrl_advantages(args, rollout):
    advantages = []
    for group in groups(rollout["scores"].tolist(), args):
        mean = math.fsum(group) / len(group)
        advantages += [0.0 if mean == 0 else (x - mean) / mean for x in group]
    return advantages


def rloo_advantages(args, rollout):
    advantages = []
    for group in groups(rewards(args, rollout), args):
        for i, x in enumerate(group):
            others = group[:i] + group[i + 1 :]
            advantages.append(x - math.fsum(others) / len(others))
    return advantages


def opo_advantages(args, rollout):
    advantages = []
    lengths = rollout["response_mask"].sum(1).tolist()
    for scores, T in zip(groups(rollout["scores"].tolist(), args), groups(lengths, args)):
        baseline = math.fsum(t * r for t, r in zip(T, scores)) / sum(T)
        advantages += [r - baseline for r in scores]
    return advantages


def raft_advantages(args, rollout):
    advantages = []
    for group in groups(rewards(args, rollout), args):
        best = group.index(max(group))
        advantages += [len(group) if i == best else 0.0 for i in range(len(group))]
    return advantages


def reinforce_advantages(args, rollout):
    R = rewards(args, rollout)
    return [x - math.fsum(R) / len(R) for x in R]


def flash_reinforce_advantages(args, rollout):
    scores = rollout["scores"].tolist()
    return [x - math.fsum(scores) / len(scores) for x in scores]


def reinforce_pp_advantages(args, rollout):
    return whitened(returns_to_go(args, rollout))


def remax_advantages(args, rollout):
    pairs = zip(returns_to_go(args, rollout), rollout["greedy_scores"].tolist())
    return [[x - greedy for x in row] for row, greedy in pairs]


def teacher_minus_old(name, args, rollout):
    pairs = zip(rows_of(name, rollout), rows_of("old_logprobs", rollout))
    return [[teacher - old for teacher, old in zip(*pair)] for pair in pairs]


distill_advantages = partial(teacher_minus_old, "ref_logprobs")
sdpo_advantages = partial(teacher_minus_old, "teacher_logprobs")


def generalized_advantages(args, rollout) -> tuple[list[list[float]], list[list[float]]]:
    """A_t as the sum over s >= t of lambda^(s-t) delta_s, as in the paper, and the targets A_t + V_t."""
    advantages, targets = [], []
    rows = zip(rollout["scores"].tolist(), rows_of("kl", rollout), rows_of("values", rollout))
    for score, kl, values in rows:
        n, V = len(kl), [*values, 0.0]
        reward = [-args.kl_coef * x for x in kl]
        reward[-1] += score
        delta = [reward[t] + V[t + 1] - V[t] for t in range(n)]
        A = [math.fsum(args.gae_lambda ** (s - t) * delta[s] for s in range(t, n)) for t in range(n)]
        advantages.append(A)
        targets.append([A[t] + V[t] for t in range(n)])
    return advantages, targets


def ppo_advantages(args, rollout):
    return whitened(generalized_advantages(args, rollout)[0])


def ppo_returns(args, rollout):
    return generalized_advantages(args, rollout)[1]


class Token(NamedTuple):
    row: int  # of its response in the batch
    length: int  # of its response
    new: torch.Tensor  # log-prob under pi_theta, differentiable
    old: float  # log-prob under pi_old
    ref: float  # log-prob under pi_ref
    advantage: float
    ratio: torch.Tensor  # differentiable


def tokens(batch, new) -> list[Token]:
    """All response tokens."""
    mask, found = batch["response_mask"], []
    for i, t in mask.nonzero().tolist():
        old, ref, A = (float(batch[name][i, t]) for name in ("old_logprobs", "ref_logprobs", "advantages"))
        found.append(Token(i, int(mask[i].sum()), new[i, t], old, ref, A, (new[i, t] - old).exp()))
    return found


def reinforce_loss(args, batch, new, num_sequences, num_tokens):
    return -sum(token.advantage * token.new for token in tokens(batch, new)) / num_sequences, None


def remax_loss(args, batch, new, num_sequences, num_tokens):
    return -sum(token.advantage * token.new for token in tokens(batch, new)) / num_tokens, None


rloo_loss = raft_loss = maxrl_loss = opo_loss = reinforce_loss
distill_loss = sdpo_loss = remax_loss


def clipped(args, ratio, advantage: float):
    """PPO's objective of a token, and whether it is constant there."""
    if hasattr(args, "clip_eps"):
        low = high = args.clip_eps
    else:
        low, high = args.clip_eps_low, args.clip_eps_high
    if advantage > 0 and ratio > 1 + high:
        return (1 + high) * advantage, True
    if advantage < 0 and ratio < 1 - low:
        return (1 - low) * advantage, True
    if advantage < 0 and ratio > getattr(args, "dual_clip_c", math.inf):
        return args.dual_clip_c * advantage, False
    return ratio * advantage, False


def clipped_loss(args, batch, new, divisor, num_tokens):
    loss, count = 0.0, 0
    for token in tokens(batch, new):
        objective, is_constant = clipped(args, token.ratio, token.advantage)
        loss = loss - objective / divisor
        count += is_constant
    return loss, count / num_tokens


def reinforce_pp_loss(args, batch, new, num_sequences, num_tokens):
    return clipped_loss(args, batch, new, num_tokens, num_tokens)


ppo_loss = dapo_loss = reinforce_pp_loss


def reinforce_pp_baseline_loss(args, batch, new, num_sequences, num_tokens):
    loss, share = clipped_loss(args, batch, new, num_tokens, num_tokens)
    k2 = sum((token.new - token.ref) ** 2 / 2 for token in tokens(batch, new))
    return loss + args.kl_coef * k2 / num_tokens, share


def dr_grpo_loss(args, batch, new, num_sequences, num_tokens):
    return clipped_loss(args, batch, new, num_sequences * args.max_response_length, num_tokens)


def k3(token: Token):
    d = token.new - token.ref
    return (-d).exp() - 1 + d


def grpo_loss(args, batch, new, num_sequences, num_tokens, kl=k3, weights=None):
    loss, count = 0.0, 0
    for token, weight in zip(tokens(batch, new), weights or repeat(1.0)):
        objective, is_constant = clipped(args, token.ratio, token.advantage)
        loss = loss + (args.kl_coef * kl(token) - weight * objective) / token.length / num_sequences
        count += is_constant
    return loss, count / num_tokens


gdpo_loss = grpo_loss  # its kl_coef is 0

# Patches of grpo.py, and the feature of grpo_correction.py
dual_clip_advantages = entropy_bonus_advantages = correction_advantages = grpo_advantages
dual_clip_loss = grpo_loss
unbiased_kl_loss = partial(grpo_loss, kl=lambda token: token.ratio * k3(token))


def entropy_bonus_loss(args, batch, new, num_sequences, num_tokens):
    loss, share = grpo_loss(args, batch, new, num_sequences, num_tokens)
    return loss - args.entropy_coef * math.fsum(map(sum, rows_of("entropy", batch))) / num_tokens, share


def correction_weights(args, batch) -> list[list[float]]:
    weights = []
    for old, mu in zip(rows_of("old_logprobs", batch), rows_of("sampler_logprobs", batch)):
        ratios = of_tokens = [math.exp(x - y) for x, y in zip(old, mu)]
        if args.correction_level == "sequence":
            ratios = [math.prod(ratios)] * len(ratios)
        elif args.correction_level == "geometric":
            ratios = [math.prod(ratios) ** (1 / len(ratios))] * len(ratios)
        if args.correction_mode == "truncate":
            weights.append([min(x, args.correction_cap) for x in ratios])
        else:
            pairs = zip(ratios, of_tokens)
            weights.append([x if args.correction_low <= x <= args.correction_cap else 0.0 for x, _ in pairs])
    return weights


def correction_loss(args, batch, new, num_sequences, num_tokens):
    weights = [x for row in correction_weights(args, batch) for x in row]
    return grpo_loss(args, batch, new, num_sequences, num_tokens, weights=weights)


def kept_by_entropy(share: float, entropies: list[float]) -> list[bool]:
    """For each number, whether it is in the share of the largest ones. Their count is rounded up."""
    count = math.ceil(share * len(entropies))
    chosen = sorted(range(len(entropies)), key=lambda i: -entropies[i])[:count]
    return [i in chosen for i in range(len(entropies))]


# Preferences: rows 2i and 2i + 1 are the chosen and the rejected response of a pair


def sums(batch, x, power: int = 0) -> list:
    """For each response, the sum over its tokens, divided by a power of its length."""
    return [row[mask].sum() / mask.sum() ** power for row, mask in zip(x, batch["response_mask"])]


def pair_loss(loss, args, batch, new, num_sequences, num_tokens, **power):
    """The mean of a loss of log(pi / pi_ref) or, with power=1, of the mean log-prob of a token."""
    values, references = sums(batch, new, **power), sums(batch, batch["ref_logprobs"])
    if not power:
        values = [x - y for x, y in zip(values, references)]
    losses = [loss(args, chosen, rejected) for chosen, rejected in zip(values[::2], values[1::2])]
    return sum(losses) / len(losses), None


def log_odds(x):
    return (x.exp() / (1 - x.exp())).log()


dpo_loss = partial(pair_loss, lambda args, c, r: (1 + (-args.beta * (c - r)).exp()).log())
ipo_loss = partial(pair_loss, lambda args, c, r: (c - r - 1 / (2 * args.beta)) ** 2)
simpo = lambda args, c, r: (1 + (args.gamma - args.beta * (c - r)).exp()).log()  # noqa: E731
simpo_loss = partial(pair_loss, simpo, power=1)
orpo = lambda args, c, r: -c + args.beta * (1 + (log_odds(r) - log_odds(c)).exp()).log()  # noqa: E731
orpo_loss = partial(pair_loss, orpo, power=1)


def reward_model_loss(args, batch, scores, num_sequences, num_tokens):
    """Differentiated with respect to the scores."""
    return (1 + (scores[1::2] - scores[::2]).exp()).log().mean(), None


def gspo_loss(args, batch, new, num_sequences, num_tokens):
    """As in the paper if the advantage is the same on all tokens. Otherwise, its mean over tokens takes its place."""
    log_ratios = [0.0] * len(new)
    for token in tokens(batch, new):
        log_ratios[token.row] += (token.new - token.old) / token.length
    loss, count = 0.0, 0
    for token in tokens(batch, new):
        objective, is_constant = clipped(args, log_ratios[token.row].exp(), token.advantage)
        loss = loss - objective / token.length / num_sequences
        count += is_constant
    return loss, count / num_tokens


def cispo_loss(args, batch, new, num_sequences, num_tokens):
    loss, count = 0.0, 0
    for token in tokens(batch, new):
        ratio = token.ratio.item()
        weight = min(max(ratio, 1 - args.clip_eps_low), 1 + args.clip_eps_high)
        loss = loss - weight * token.advantage * token.new / num_tokens
        count += weight != ratio
    return loss, count / num_tokens


def vespo_loss(args, batch, new, num_sequences, num_tokens):
    """A response with the ratio W has the weight W^kappa exp(-lambda W), scaled to 1 at W = 1."""
    products = {}
    for token in tokens(batch, new):
        products[token.row] = products.get(token.row, 1.0) * token.ratio.item()
    loss = 0.0
    for token in tokens(batch, new):
        sign, W = "neg" if token.advantage < 0 else "pos", products[token.row]
        kappa, rate = getattr(args, f"kappa_{sign}"), getattr(args, f"lambda_{sign}")
        weight = W**kappa * math.exp(-rate * W) / math.exp(-rate)
        loss = loss - weight * token.advantage * token.new / num_tokens
    return loss, None


def sapo_loss(args, batch, new, num_sequences, num_tokens):
    loss = 0.0
    for token in tokens(batch, new):
        tau = args.tau_pos if token.advantage > 0 else args.tau_neg
        gate = 4 / tau / (1 + (-tau * (token.ratio - 1)).exp())
        loss = loss - gate * token.advantage / token.length / num_sequences
    return loss, None


def dppo_loss(args, batch, new, num_sequences, num_tokens):
    loss, count = 0.0, 0
    for token in tokens(batch, new):
        change = math.exp(token.new.item()) - math.exp(token.old)
        too_far = change > args.delta if token.advantage > 0 else change < -args.delta
        if too_far:
            count += 1
        else:
            weight = min(token.ratio.item(), args.max_ratio)
            loss = loss - weight * token.advantage * token.new / num_tokens
    return loss, count / num_tokens


def flash_reinforce_loss(args, batch, new, num_sequences, num_tokens):
    """Returns the share of rejected responses instead of clipped tokens."""
    divergence, loss = [0.0] * len(new), 0.0
    for token in tokens(batch, new):
        p, q = (min(max(math.exp(x), 1e-6), 1 - 1e-6) for x in (token.old, token.new.item()))
        d = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
        divergence[token.row] += d / token.length
    for token in tokens(batch, new):
        if divergence[token.row] <= args.delta:
            weight = token.ratio.item() * token.advantage / token.length
            loss = loss - weight * token.new / num_sequences
    return loss, sum(x > args.delta for x in divergence) / num_sequences


def ppo_value_loss(args, batch, values, num_tokens):
    loss = 0.0
    for i, t in batch["response_mask"].nonzero().tolist():
        value, old, target = values[i, t], float(batch["values"][i, t]), float(batch["returns"][i, t])
        near = min(max(value, old - args.value_clip_eps), old + args.value_clip_eps)
        loss = loss + 0.5 * max((value - target) ** 2, (near - target) ** 2) / num_tokens
    return loss


def kl_of(p, q):
    return (p * (p / q).log()).sum()


def gkd_divergence(beta: float, p, q):
    """From the probabilities of the teacher, p, and of the student, q, at a token."""
    if beta in (0, 1):
        return kl_of(q, p) if beta else kl_of(p, q)
    m = beta * p + (1 - beta) * q
    return beta * kl_of(p, m) + (1 - beta) * kl_of(q, m)


def gkd_advantages(args, rollout):
    return [0.0] * len(rollout["response_mask"])


def gkd_loss(args, batch, new, num_sequences, num_tokens):
    loss, names = 0.0, ("teacher_all_logprobs", "all_logprobs")
    for i, t in batch["response_mask"].nonzero().tolist():
        p, q = (batch[name][i, t].exp() for name in names)
        if 0 < args.top_k < len(p):
            order = p.argsort(descending=True)
            p, q = (torch.cat([x[: args.top_k], x[args.top_k :].sum()[None]]) for x in (p[order], q[order]))
        loss = loss + gkd_divergence(args.beta, p, q) / num_tokens
    return loss, None


def reinforce_pp_process_advantages(args, rollout):
    pairs = zip(rows_of("token_scores", rollout), rows_of("kl", rollout))
    rewards = [[score - args.kl_coef * k1 for score, k1 in zip(*pair)] for pair in pairs]
    return whitened([[math.fsum(row[t:]) for t in range(len(row))] for row in rewards])
