"""Each policy script once more, as loops over tokens in float64, from the papers' equations.

A script NAME.py has two functions here:

    NAME_advantages(args, rollout)                          of each response: one number, or one for each token
    NAME_loss(args, batch, new, num_sequences, num_tokens)  loss, share of clipped tokens (None: no clip)

A loss is a sum over entries of new (B, T), so that autograd differentiates it; all else is plain numbers.
"""

import math

import torch


def tokens(mask) -> list[list[int]]:
    """The true positions of each row."""
    return [row.nonzero()[:, 0].tolist() for row in mask]


def spread(values: list, mask) -> torch.Tensor:
    """(B, T): values[i] on every token of response i; a list gives one number to each."""
    result = torch.zeros(mask.shape, dtype=torch.float64)
    for i, positions in enumerate(tokens(mask)):
        for n, t in enumerate(positions):
            result[i, t] = values[i][n] if isinstance(values[i], list) else values[i]
    return result


def whitened(rows: list[list[float]]) -> list[list[float]]:
    flat = [x for row in rows for x in row]
    mean = math.fsum(flat) / len(flat)
    std = math.sqrt(max(math.fsum((x - mean) ** 2 for x in flat) / len(flat), 1e-8))
    return [[(x - mean) / std for x in row] for row in rows]


def kl_of(rollout) -> list[list[float]]:
    """The k1 of each response token, row by row."""
    return [[float(row[t]) for t in ts] for row, ts in zip(rollout["kl"], tokens(rollout["response_mask"]))]


def returns_to_go(args, rollout) -> list[list[float]]:
    """The score minus beta times the KL of this token and all after it; the first is the reward of the response."""
    pairs = zip(rollout["scores"].tolist(), kl_of(rollout))
    return [[score - args.kl_coef * math.fsum(kl[n:]) for n in range(len(kl))] for score, kl in pairs]


def in_groups(function, values: list[float], args) -> list[float]:
    """function(i, group) for the i-th of the samples_per_prompt values of each prompt."""
    k = args.samples_per_prompt
    return [function(j % k, values[j // k * k : j // k * k + k]) for j in range(len(values))]


def minus_mean(i: int, group: list[float]) -> float:
    return 0.0 if len(set(group)) == 1 else group[i] - math.fsum(group) / len(group)


def minus_others(i: int, group: list[float]) -> float:
    return group[i] - math.fsum(group[:i] + group[i + 1 :]) / (len(group) - 1)


def normalized(i: int, group: list[float]) -> float:
    mean = math.fsum(group) / len(group)
    std = math.sqrt(math.fsum((x - mean) ** 2 for x in group) / (len(group) - 1))
    return minus_mean(i, group) / (std + 1e-4)


def best(i: int, group: list[float]) -> float:
    return len(group) if i == group.index(max(group)) else 0.0


def grpo_advantages(args, rollout):
    return in_groups(normalized, rollout["scores"].tolist(), args)


gspo_advantages = cispo_advantages = grpo_advantages


def dapo_advantages(args, rollout):
    scores, start = [], args.max_response_length - args.overlong_buffer
    for score, positions in zip(rollout["scores"].tolist(), tokens(rollout["response_mask"])):
        over = len(positions) - start
        scores.append(score - over / args.overlong_buffer if over > 0 and args.overlong_buffer else score)
    return in_groups(normalized, scores, args)


def dr_grpo_advantages(args, rollout):
    return in_groups(minus_mean, rollout["scores"].tolist(), args)


def reinforce_pp_baseline_advantages(args, rollout):
    centered = dr_grpo_advantages(args, rollout)
    std = math.sqrt(max(math.fsum(x * x for x in centered) / len(centered), 1e-8))
    return [x / std for x in centered]


def rloo_advantages(args, rollout):
    return in_groups(minus_others, [row[0] for row in returns_to_go(args, rollout)], args)


def raft_advantages(args, rollout):
    return in_groups(best, [row[0] for row in returns_to_go(args, rollout)], args)


def reinforce_advantages(args, rollout):
    rewards = [row[0] for row in returns_to_go(args, rollout)]
    return [x - math.fsum(rewards) / len(rewards) for x in rewards]


def reinforce_pp_advantages(args, rollout):
    return whitened(returns_to_go(args, rollout))


def remax_advantages(args, rollout):
    pairs = zip(returns_to_go(args, rollout), rollout["greedy_scores"].tolist())
    return [[x - greedy for x in row] for row, greedy in pairs]


def generalized_advantages(args, rollout) -> tuple[list[list[float]], list[list[float]]]:
    """A_t as the sum over s >= t of lambda^(s-t) delta_s, as in the paper, and the targets A_t + V_t."""
    advantages, targets = [], []
    rows = zip(
        rollout["scores"].tolist(), kl_of(rollout), rollout["values"], tokens(rollout["response_mask"])
    )
    for score, kl, values, positions in rows:
        n = len(positions)
        V = [float(values[t]) for t in positions] + [0.0]
        reward = [-args.kl_coef * kl[t] + (score if t == n - 1 else 0.0) for t in range(n)]
        delta = [reward[t] + V[t + 1] - V[t] for t in range(n)]
        A = [math.fsum(args.gae_lambda ** (s - t) * delta[s] for s in range(t, n)) for t in range(n)]
        advantages.append(A)
        targets.append([A[t] + V[t] for t in range(n)])
    return advantages, targets


def ppo_advantages(args, rollout):
    return whitened(generalized_advantages(args, rollout)[0])


def ppo_returns(args, rollout):
    return generalized_advantages(args, rollout)[1]


def token_terms(batch, new):
    """For each response token: row, new log-prob (differentiable), ratio, reference log-prob, advantage."""
    for i, positions in enumerate(tokens(batch["response_mask"])):
        for t in positions:
            ratio = (new[i, t] - float(batch["old_logprobs"][i, t])).exp()
            yield i, new[i, t], ratio, float(batch["ref_logprobs"][i, t]), float(batch["advantages"][i, t])


def policy_gradient(batch, new, divisor):
    """REINFORCE's loss: nothing is clipped."""
    return -sum(
        advantage * logprob for _, logprob, _, _, advantage in token_terms(batch, new)
    ) / divisor, None


def clipped(args, ratio, advantage: float):
    """PPO's objective of a token, and whether it is constant there."""
    low, high = (
        (args.clip_eps, args.clip_eps)
        if hasattr(args, "clip_eps")
        else (args.clip_eps_low, args.clip_eps_high)
    )
    if advantage > 0 and ratio > 1 + high:
        return (1 + high) * advantage, True
    if advantage < 0 and ratio < 1 - low:
        return (1 - low) * advantage, True
    return ratio * advantage, False


def clipped_loss(args, batch, new, divisors: list, num_tokens):
    """Minus the clipped objective of each token over divisors[i], where i is its response; the share clipped."""
    loss, share = 0.0, 0.0
    for i, _, ratio, _, advantage in token_terms(batch, new):
        objective, is_constant = clipped(args, ratio, advantage)
        loss, share = loss - objective / divisors[i], share + is_constant / num_tokens
    return loss, share


def rloo_loss(args, batch, new, num_sequences, num_tokens):
    return policy_gradient(batch, new, num_sequences)


def remax_loss(args, batch, new, num_sequences, num_tokens):
    return policy_gradient(batch, new, num_tokens)


def reinforce_pp_loss(args, batch, new, num_sequences, num_tokens):
    return clipped_loss(args, batch, new, [num_tokens] * len(new), num_tokens)


reinforce_loss = raft_loss = rloo_loss
ppo_loss = dapo_loss = reinforce_pp_loss


def reinforce_pp_baseline_loss(args, batch, new, num_sequences, num_tokens):
    loss, share = reinforce_pp_loss(args, batch, new, num_sequences, num_tokens)
    k2 = sum((logprob - ref) ** 2 / 2 for _, logprob, _, ref, _ in token_terms(batch, new))
    return loss + args.kl_coef * k2 / num_tokens, share


def grpo_loss(args, batch, new, num_sequences, num_tokens):
    divisors = [num_sequences * length for length in batch["response_mask"].sum(1).tolist()]
    loss, share = clipped_loss(args, batch, new, divisors, num_tokens)
    for i, logprob, _, ref, _ in token_terms(batch, new):
        k3 = (ref - logprob).exp() - 1 - (ref - logprob)
        loss = loss + args.kl_coef * k3 / divisors[i]
    return loss, share


def dr_grpo_loss(args, batch, new, num_sequences, num_tokens):
    return clipped_loss(args, batch, new, [num_sequences * args.max_response_length] * len(new), num_tokens)


def gspo_loss(args, batch, new, num_sequences, num_tokens):
    """As in the paper where the advantage is the same on all tokens; otherwise its mean over tokens."""
    loss, share = 0.0, 0.0
    for i, positions in enumerate(tokens(batch["response_mask"])):
        ratio = (
            sum(new[i, t] - float(batch["old_logprobs"][i, t]) for t in positions) / len(positions)
        ).exp()
        for t in positions:
            objective, is_constant = clipped(args, ratio, float(batch["advantages"][i, t]))
            loss, share = loss - objective / len(positions) / num_sequences, share + is_constant / num_tokens
    return loss, share


def cispo_loss(args, batch, new, num_sequences, num_tokens):
    loss, share = 0.0, 0.0
    for _, logprob, ratio, _, advantage in token_terms(batch, new):
        weight = min(max(float(ratio.detach()), 1 - args.clip_eps_low), 1 + args.clip_eps_high)
        loss = loss - weight * advantage * logprob / num_tokens
        share += (weight != float(ratio.detach())) / num_tokens
    return loss, share


def ppo_value_loss(args, batch, values, num_tokens):
    loss = 0.0
    for i, positions in enumerate(tokens(batch["response_mask"])):
        for t in positions:
            old, target, eps = (
                float(batch["values"][i, t]),
                float(batch["returns"][i, t]),
                args.value_clip_eps,
            )
            near = min(max(values[i, t], old - eps), old + eps)
            loss = loss + 0.5 * max((values[i, t] - target) ** 2, (near - target) ** 2) / num_tokens
    return loss


def over_mean(i: int, group: list[float]) -> float:
    mean = math.fsum(group) / len(group)
    return 0.0 if mean == 0 else (group[i] - mean) / mean


def maxrl_advantages(args, rollout):
    return in_groups(over_mean, rollout["scores"].tolist(), args)


sapo_advantages = dppo_advantages = grpo_advantages


def distill_advantages(args, rollout):
    rows = zip(rollout["old_logprobs"], rollout["ref_logprobs"], tokens(rollout["response_mask"]))
    return [[float(ref[t]) - float(old[t]) for t in positions] for old, ref, positions in rows]


maxrl_loss, distill_loss = rloo_loss, remax_loss


def sapo_loss(args, batch, new, num_sequences, num_tokens):
    loss, lengths = 0.0, batch["response_mask"].sum(1).tolist()
    for i, _, ratio, _, advantage in token_terms(batch, new):
        tau = args.tau_pos if advantage > 0 else args.tau_neg
        gate = 4 / tau / (1 + (-tau * (ratio - 1)).exp())
        loss = loss - gate * advantage / lengths[i] / num_sequences
    return loss, None


def dppo_loss(args, batch, new, num_sequences, num_tokens):
    loss, share = 0.0, 0.0
    for i, positions in enumerate(tokens(batch["response_mask"])):
        for t in positions:
            advantage, p, old_p = (
                float(batch["advantages"][i, t]),
                new[i, t].exp(),
                batch["old_logprobs"][i, t].exp(),
            )
            moved = float(p - old_p) if advantage > 0 else float(old_p - p)
            if moved > args.delta:
                share += 1 / num_tokens
            else:
                weight = min(float(p / old_p), args.max_ratio)
                loss = loss - weight * advantage * new[i, t] / num_tokens
    return loss, share
