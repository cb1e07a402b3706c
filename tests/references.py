"""Each policy script once more, as loops over tokens in float64, from the papers' equations.

A script NAME.py has two functions here:

    NAME_advantages(args, rollout) -> (B, T), 0 where response_mask is false
    NAME_loss(args, batch, new, num_sequences, num_tokens) -> loss, share of clipped tokens (None: no clip)

The loss is a sum over entries of new (B, T), so that autograd differentiates it; all else is plain numbers.
"""

import math
import re

import torch


def missing(name: str, readme: str) -> list[str]:
    """What a policy script still needs beside its own file."""
    parts = [f"{name}_advantages", f"{name}_loss"]
    found = [f"tests/references.py has no {part}" for part in parts if part not in globals()]
    row = re.search(rf"^\|.*\[`{name}\.py`\]\({name}\.py\)", readme, re.MULTILINE)
    return found + [f"README.md has no row [`{name}.py`]({name}.py) in its table of scripts"] * (not row)


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
    pairs = zip(rollout["kl"], tokens(rollout["response_mask"]))
    return [[float(row[t]) for t in positions] for row, positions in pairs]


def in_groups(values: list[float], k: int, function) -> list[float]:
    """function(i, group) for the i-th member of each k values in a row."""
    return [function(j % k, values[j // k * k : j // k * k + k]) for j in range(len(values))]


def minus_mean(i: int, group: list[float]) -> float:
    return 0.0 if len(set(group)) == 1 else group[i] - math.fsum(group) / len(group)


def returns_to_go(args, rollout) -> list[list[float]]:
    """The score minus beta times the KL of this token and all after it."""
    return [
        [score - args.kl_coef * math.fsum(row[n:]) for n in range(len(row))]
        for score, row in zip(rollout["scores"].tolist(), kl_of(rollout))
    ]


def token_terms(batch, new):
    """For each response token: row, new log-prob (differentiable), ratio, reference log-prob, advantage."""
    for i, positions in enumerate(tokens(batch["response_mask"])):
        for t in positions:
            ratio = (new[i, t] - float(batch["old_logprobs"][i, t])).exp()
            yield i, new[i, t], ratio, float(batch["ref_logprobs"][i, t]), float(batch["advantages"][i, t])


def clipped(ratio, advantage: float, low: float, high: float | None = None):
    """PPO's objective of a token, and whether it is constant there."""
    if advantage > 0 and ratio > 1 + (high or low):
        return (1 + (high or low)) * advantage, True
    if advantage < 0 and ratio < 1 - low:
        return (1 - low) * advantage, True
    return ratio * advantage, False


def normalized(i: int, group: list[float]) -> float:
    mean = math.fsum(group) / len(group)
    std = math.sqrt(math.fsum((x - mean) ** 2 for x in group) / (len(group) - 1))
    return minus_mean(i, group) / (std + 1e-4)


def grpo_advantages(args, rollout):
    scores = in_groups(rollout["scores"].tolist(), args.samples_per_prompt, normalized)
    return spread(scores, rollout["response_mask"])


def grpo_loss(args, batch, new, num_sequences, num_tokens):
    lengths, loss, share = batch["response_mask"].sum(1).tolist(), 0.0, 0.0
    for i, lp, ratio, ref, advantage in token_terms(batch, new):
        objective, stopped = clipped(ratio, advantage, args.clip_eps)
        k3 = (ref - lp).exp() - 1 - (ref - lp)
        loss = loss + (args.kl_coef * k3 - objective) / lengths[i] / num_sequences
        share += stopped / num_tokens
    return loss, share


def reinforce_pp_baseline_advantages(args, rollout):
    centered = in_groups(rollout["scores"].tolist(), args.samples_per_prompt, minus_mean)
    std = math.sqrt(max(math.fsum(x * x for x in centered) / len(centered), 1e-8))
    return spread([x / std for x in centered], rollout["response_mask"])


def reinforce_pp_baseline_loss(args, batch, new, num_sequences, num_tokens):
    loss, share = 0.0, 0.0
    for _, lp, ratio, ref, advantage in token_terms(batch, new):
        objective, stopped = clipped(ratio, advantage, args.clip_eps)
        loss = loss + (args.kl_coef * (lp - ref) ** 2 / 2 - objective) / num_tokens
        share += stopped / num_tokens
    return loss, share


def rloo_advantages(args, rollout):
    rewards = [row[0] for row in returns_to_go(args, rollout)]  # with the KL of the whole response

    def minus_others(i, group):
        return group[i] - math.fsum(group[:i] + group[i + 1 :]) / (len(group) - 1)

    return spread(in_groups(rewards, args.samples_per_prompt, minus_others), rollout["response_mask"])


def rloo_loss(args, batch, new, num_sequences, num_tokens):
    return -sum(advantage * lp for _, lp, _, _, advantage in token_terms(batch, new)) / num_sequences, None


def reinforce_advantages(args, rollout):
    rewards = [row[0] for row in returns_to_go(args, rollout)]
    mean = math.fsum(rewards) / len(rewards)
    return spread([x - mean for x in rewards], rollout["response_mask"])


reinforce_loss = rloo_loss


def raft_advantages(args, rollout):
    rewards = [row[0] for row in returns_to_go(args, rollout)]

    def imitated(i, group):
        return len(group) if i == min(j for j, x in enumerate(group) if x == max(group)) else 0

    return spread(in_groups(rewards, args.samples_per_prompt, imitated), rollout["response_mask"])


raft_loss = rloo_loss


def dr_grpo_advantages(args, rollout):
    return spread(in_groups(rollout["scores"].tolist(), args.samples_per_prompt, minus_mean), rollout["response_mask"])


def dr_grpo_loss(args, batch, new, num_sequences, num_tokens):
    loss, share = 0.0, 0.0
    for _, _, ratio, _, advantage in token_terms(batch, new):
        objective, stopped = clipped(ratio, advantage, args.clip_eps)
        loss = loss - objective / args.max_response_length / num_sequences
        share += stopped / num_tokens
    return loss, share


def dapo_advantages(args, rollout):
    scores, start = [], args.max_response_length - args.overlong_buffer
    for score, positions in zip(rollout["scores"].tolist(), tokens(rollout["response_mask"])):
        over = len(positions) - start
        scores.append(score - over / args.overlong_buffer if over > 0 and args.overlong_buffer else score)
    return spread(in_groups(scores, args.samples_per_prompt, normalized), rollout["response_mask"])


def dapo_loss(args, batch, new, num_sequences, num_tokens):
    loss, share = 0.0, 0.0
    for _, _, ratio, _, advantage in token_terms(batch, new):
        objective, stopped = clipped(ratio, advantage, args.clip_eps_low, args.clip_eps_high)
        loss, share = loss - objective / num_tokens, share + stopped / num_tokens
    return loss, share


gspo_advantages = cispo_advantages = grpo_advantages


def gspo_loss(args, batch, new, num_sequences, num_tokens):
    """Word for word as in the paper where the advantage is the same on all tokens; else its mean over tokens."""
    loss, share = 0.0, 0.0
    for i, positions in enumerate(tokens(batch["response_mask"])):
        ratio = (sum(new[i, t] - float(batch["old_logprobs"][i, t]) for t in positions) / len(positions)).exp()
        for t in positions:
            advantage = float(batch["advantages"][i, t])
            objective, stopped = clipped(ratio, advantage, args.clip_eps_low, args.clip_eps_high)
            loss = loss - objective / len(positions) / num_sequences
            share += stopped / num_tokens
    return loss, share


def cispo_loss(args, batch, new, num_sequences, num_tokens):
    loss, share = 0.0, 0.0
    for _, lp, ratio, _, advantage in token_terms(batch, new):
        weight = min(max(float(ratio.detach()), 1 - args.clip_eps_low), 1 + args.clip_eps_high)
        loss = loss - weight * advantage * lp / num_tokens
        share += (weight != float(ratio.detach())) / num_tokens
    return loss, share


def remax_advantages(args, rollout):
    pairs = zip(returns_to_go(args, rollout), rollout["greedy_scores"].tolist())
    return spread([[x - greedy for x in row] for row, greedy in pairs], rollout["response_mask"])


def remax_loss(args, batch, new, num_sequences, num_tokens):
    return -sum(advantage * lp for _, lp, _, _, advantage in token_terms(batch, new)) / num_tokens, None


def reinforce_pp_advantages(args, rollout):
    return spread(whitened(returns_to_go(args, rollout)), rollout["response_mask"])


def reinforce_pp_loss(args, batch, new, num_sequences, num_tokens):
    loss, share = 0.0, 0.0
    for _, _, ratio, _, advantage in token_terms(batch, new):
        objective, stopped = clipped(ratio, advantage, args.clip_eps)
        loss, share = loss - objective / num_tokens, share + stopped / num_tokens
    return loss, share


def generalized_advantages(args, rollout) -> tuple[list[list[float]], list[list[float]]]:
    """A_t as the sum over s >= t of lambda^(s-t) delta_s, word for word, and the targets A_t + V_t."""
    advantages, targets = [], []
    values = zip(rollout["scores"].tolist(), kl_of(rollout), rollout["values"], tokens(rollout["response_mask"]))
    for score, kl, row, positions in values:
        n = len(positions)
        V = [float(row[t]) for t in positions] + [0.0]
        reward = [-args.kl_coef * kl[t] + (score if t == n - 1 else 0.0) for t in range(n)]
        delta = [reward[t] + V[t + 1] - V[t] for t in range(n)]
        sums = [math.fsum(args.gae_lambda ** (s - t) * delta[s] for s in range(t, n)) for t in range(n)]
        advantages.append(sums)
        targets.append([a + v for a, v in zip(sums, V)])
    return advantages, targets


def ppo_advantages(args, rollout):
    return spread(whitened(generalized_advantages(args, rollout)[0]), rollout["response_mask"])


def ppo_returns(args, rollout):
    return spread(generalized_advantages(args, rollout)[1], rollout["response_mask"])


ppo_loss = reinforce_pp_loss


def ppo_value_loss(args, batch, values, num_tokens):
    loss = 0.0
    for i, positions in enumerate(tokens(batch["response_mask"])):
        for t in positions:
            old, target, eps = float(batch["values"][i, t]), float(batch["returns"][i, t]), args.value_clip_eps
            near = min(max(values[i, t], old - eps), old + eps)
            loss = loss + 0.5 * max((values[i, t] - target) ** 2, (near - target) ** 2) / num_tokens
    return loss
