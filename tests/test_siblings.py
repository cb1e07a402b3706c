"""Every estimator against plain loops in float64, the identities that bind them, and their expected gradients by exact
enumeration. The loops are written from the papers' equations, one number at a time."""

import importlib
import math
from itertools import product

import pytest
import torch
from conftest import POLICY_SCRIPTS
from test_estimator import PREFIXES, PROBS, all_responses, exact_objective, make_rollout

GROUPED = ["reinforce_pp_baseline", "rloo", "grpo"]
CLIPPED = ["reinforce_pp", "reinforce_pp_baseline", "grpo", "ppo"]
MODULES = {name: importlib.import_module(name) for name in POLICY_SCRIPTS}


def full_rollout(seed: int, k: int, num_prompts: int = 3, longest: int = 9) -> dict:
    """k responses to each prompt of 1 to longest tokens; NaN on the padding of everything; the last group's scores are
    all equal, and are a number that float32 does not hold."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (num_prompts * k,), generator=g).tolist()
    rollout = make_rollout(seed, lengths=(*lengths[:-1], longest))
    mask = rollout["response_mask"]
    rollout["scores"][-k:] = 0.1 if seed % 2 else 1 / 3
    rollout["greedy_scores"] = torch.randn(len(mask), generator=g, dtype=torch.float64)
    rollout["values"] = torch.randn(mask.shape, generator=g, dtype=torch.float64).masked_fill(~mask, math.nan)
    return rollout


def whitened(rows: list[list[float]]) -> list[list[float]]:
    flat = [x for row in rows for x in row]
    mean = math.fsum(flat) / len(flat)
    std = math.sqrt(max(math.fsum((x - mean) ** 2 for x in flat) / len(flat), 1e-8))
    return [[(x - mean) / std for x in row] for row in rows]


def reference_advantages(name: str, args, rollout: dict) -> list[list[float]]:
    """One list of numbers per response; for ppo also the critic's targets, as a second result."""
    lengths = rollout["response_mask"].sum(1).tolist()
    scores = rollout["scores"].tolist()
    kl = [[float(x) for x in row[:n]] for row, n in zip(rollout["kl"], lengths)]
    beta, k = args.kl_coef, args.samples_per_prompt
    if name in GROUPED:
        rewards = [r - beta * math.fsum(row) for r, row in zip(scores, kl)] if name == "rloo" else scores
        result = []
        for i, r in enumerate(rewards):
            group = rewards[i // k * k : i // k * k + k]
            if name == "rloo":
                others = [x for j, x in enumerate(group) if j != i % k]
                result.append(r - math.fsum(others) / (k - 1))
            else:
                mean = math.fsum(group) / k
                result.append(0.0 if len(set(group)) == 1 else r - mean)
                if name == "grpo":
                    result[-1] /= math.sqrt(math.fsum((x - mean) ** 2 for x in group) / (k - 1)) + 1e-4
        if name == "reinforce_pp_baseline":
            std = math.sqrt(math.fsum(x * x for x in result) / len(result))
            result = [x / std for x in result]
        return [[x] * n for x, n in zip(result, lengths)]
    if name in ("reinforce_pp", "remax"):
        baseline = rollout["greedy_scores"].tolist() if name == "remax" else [0.0] * len(scores)
        result = [
            [r - b - beta * math.fsum(row[t:]) for t in range(len(row))] for r, b, row in zip(scores, baseline, kl)
        ]
        return whitened(result) if name == "reinforce_pp" else result
    advantages, targets = [], []
    for r, row, values, n in zip(scores, kl, rollout["values"], lengths):
        V = [float(values[t]) for t in range(n)] + [0.0]
        reward = [-beta * row[t] + (r if t == n - 1 else 0.0) for t in range(n)]
        delta = [reward[t] + V[t + 1] - V[t] for t in range(n)]
        advantages.append([math.fsum(args.gae_lambda ** (s - t) * delta[s] for s in range(t, n)) for t in range(n)])
        targets.append([a + v for a, v in zip(advantages[-1], V)])
    return whitened(advantages), targets


def assert_rows(tensor: torch.Tensor, rows: list[list[float]]) -> None:
    for values, row in zip(tensor, rows, strict=True):
        expected = torch.tensor(row, dtype=torch.float64)
        torch.testing.assert_close(values[: len(row)], expected, rtol=1e-10, atol=1e-11)
        assert (values[len(row) :] == 0).all()


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("k", [2, 3, 8])
def test_advantages_equal_the_loops(name, beta, k):
    for seed in range(4):
        args = MODULES[name].Args(kl_coef=beta, samples_per_prompt=k)
        rollout = full_rollout(seed, k)
        result, expected = MODULES[name].compute_advantages(args, rollout), reference_advantages(name, args, rollout)
        if name == "ppo":
            expected, targets = expected
            assert_rows(result["returns"], targets)
        assert_rows(result["advantages"], expected)
        assert result["advantages"].dtype == torch.float64 and not result["advantages"].requires_grad


def reference_loss(name: str, args, mb: dict, logprobs: torch.Tensor, num_sequences: int, num_tokens: int):
    """The loss and its gradient with respect to every log-prob, token by token."""
    loss, gradient = 0.0, torch.zeros_like(logprobs)
    for i, length in enumerate(mb["response_mask"].sum(1).tolist()):
        for t in range(length):
            new, old, ref = (float(x[i, t]) for x in (logprobs, mb["logprobs"], mb["ref_logprobs"]))
            A, ratio, d = float(mb["advantages"][i, t]), math.exp(new - old), new - ref
            if name in CLIPPED:
                bound = 1 + args.clip_eps if A > 0 else 1 - args.clip_eps
                stopped = ratio > bound if A > 0 else ratio < bound
                value, slope = (-bound * A, 0.0) if stopped else (-ratio * A, -ratio * A)
            else:
                value, slope = -A * new, -A
            if name == "grpo":
                value, slope = value + args.kl_coef * (math.exp(-d) - 1 + d), slope + args.kl_coef * (1 - math.exp(-d))
            if name == "reinforce_pp_baseline":
                value, slope = value + args.kl_coef * d * d / 2, slope + args.kl_coef * d
            weight = {"grpo": 1 / length / num_sequences, "rloo": 1 / num_sequences}.get(name, 1 / num_tokens)
            loss += weight * value
            gradient[i, t] = weight * slope
    return loss, gradient


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
@pytest.mark.parametrize("seed", range(6))
def test_loss_and_gradient_equal_the_loops(name, seed):
    mb = full_rollout(seed, k=3)
    noise = torch.randn(mb["response_mask"].shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logprobs = (mb["logprobs"] + 0.5 * noise).requires_grad_()
    args = MODULES[name].Args(kl_coef=0.2)
    loss, stats = MODULES[name].policy_loss(args, mb, logprobs, num_sequences=13, num_tokens=57)
    loss.backward()
    expected, gradient = reference_loss(name, args, mb, logprobs.detach(), 13, 57)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-11)
    torch.testing.assert_close(logprobs.grad, gradient, rtol=1e-11, atol=1e-12)
    assert all(not torch.is_tensor(value) or not value.requires_grad for value in stats.values())


def test_value_loss_equals_the_loops():
    ppo = MODULES["ppo"]
    for seed in range(6):
        mb = full_rollout(seed, k=2)
        mask = mb["response_mask"]
        g = torch.Generator().manual_seed(seed)
        mb["returns"] = torch.randn(mask.shape, generator=g, dtype=torch.float64).masked_fill(~mask, math.nan)
        values = (mb["values"] + 0.3 * torch.randn(mask.shape, generator=g, dtype=torch.float64)).requires_grad_()
        loss, _ = ppo.value_loss(ppo.Args(value_clip_eps=0.2), mb, values, num_tokens=41)
        loss.backward()
        expected, gradient = 0.0, torch.zeros_like(values)
        for i, t in mask.nonzero().tolist():
            v, old, target = float(values[i, t].detach()), float(mb["values"][i, t]), float(mb["returns"][i, t])
            near = min(max(v, old - 0.2), old + 0.2)
            larger_is_clipped = (near - target) ** 2 > (v - target) ** 2
            expected += 0.5 * max((v - target) ** 2, (near - target) ** 2) / 41
            gradient[i, t] = 0.0 if larger_is_clipped else (v - target) / 41
        assert float(loss.detach()) == pytest.approx(expected, rel=1e-11)
        torch.testing.assert_close(values.grad, gradient, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ["grpo", "reinforce_pp_baseline"])
@pytest.mark.parametrize("score", [0.1, 1 / 3, -0.7])
@pytest.mark.parametrize("k", range(2, 9))
def test_equal_scores_give_exactly_nothing_in_float32(name, score, k):
    """The mean of k equal floats may be off by a rounding; with a std of the same size that once was |A| = 0.95."""
    args = MODULES[name].Args(samples_per_prompt=k)
    scores = torch.cat([torch.full((k,), score), torch.linspace(-1, 1, k)])
    mask = torch.arange(7) < torch.arange(1, 2 * k + 1).remainder(7).add(1)[:, None]  # lengths differ
    advantages = MODULES[name].compute_advantages(args, {"scores": scores, "response_mask": mask})["advantages"]
    assert (advantages[:k] == 0).all() and (advantages[k:].abs().sum(1) > 0).sum() >= k - 1


def test_identities():
    k, rollout = 4, full_rollout(0, 4)
    advantages = lambda name, **flags: MODULES[name].compute_advantages(  # noqa: E731
        MODULES[name].Args(samples_per_prompt=k, **flags), rollout
    )["advantages"]
    mask, scores = rollout["response_mask"], rollout["scores"].view(-1, k)
    scaled = k / (k - 1) * (scores - scores.mean(1, keepdim=True)).view(-1, 1) * mask
    torch.testing.assert_close(advantages("rloo", kl_coef=0.0), scaled, rtol=1e-12, atol=1e-12)
    rollout["values"] = torch.zeros_like(rollout["values"])
    torch.testing.assert_close(advantages("ppo", gae_lambda=1.0), advantages("reinforce_pp"), rtol=1e-10, atol=1e-12)
    before = {name: advantages(name, kl_coef=0.0) for name in ("reinforce_pp", "reinforce_pp_baseline")}
    rollout["scores"] = 0.5 * rollout["scores"] + 0.5  # from -1/1 to 0/1
    for name, value in before.items():
        torch.testing.assert_close(advantages(name, kl_coef=0.0), value, rtol=1e-9, atol=1e-11)


def enumerated_gradient(name: str, beta: float, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Expected gradient of the script's loss over every group of k responses that a small policy can give, and the
    gradient of expected score minus beta KL; both with respect to the policy's logits."""
    script = MODULES[name]
    logits = (torch.tensor([PROBS[p] for p in PREFIXES], dtype=torch.float64) / 4).log().requires_grad_()
    ref_logits = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def score(response) -> float:
        return math.sin(7.0 * sum((t + 1) * (token + 1) for t, token in enumerate(response)))

    responses = all_responses()
    logprob, ref_logprob = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    args = script.Args(kl_coef=beta, samples_per_prompt=k)
    greedy = ()
    while len(greedy) < 3 and (not greedy or greedy[-1] != 2):
        greedy += (int(logits[PREFIXES.index(greedy)].argmax()),)

    expected = torch.zeros_like(logits)
    for group in product(responses, repeat=k):
        mask = torch.tensor([[t < len(row) for t in range(3)] for row in group])
        state = torch.tensor([[PREFIXES.index(r[:t]) if t < len(r) else 0 for t in range(3)] for r in group])
        token = torch.tensor([[row[t] if t < len(row) else 0 for t in range(3)] for row in group])
        new, ref = logprob[state, token], ref_logprob[state, token]
        rollout = {"scores": torch.tensor([score(row) for row in group], dtype=torch.float64), "response_mask": mask}
        rollout |= {"logprobs": new.detach(), "ref_logprobs": ref, "kl": (new.detach() - ref).masked_fill(~mask, 0.0)}
        rollout["greedy_scores"] = torch.full((k,), score(greedy), dtype=torch.float64)
        rollout |= script.compute_advantages(args, rollout)
        # A token mean has a random denominator; 1 makes it the sum, whose expectation is the estimator's.
        loss, _ = script.policy_loss(args, rollout, new, k, k)
        probability = float(new.detach().masked_fill(~mask, 0.0).sum().exp())
        expected += probability * torch.autograd.grad(loss, logits, retain_graph=True)[0]
    objective, _ = exact_objective(logits, ref_logits, score, beta)
    return -expected, torch.autograd.grad(objective, logits)[0]


@pytest.mark.parametrize("name, k", [("rloo", 2), ("remax", 1)])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_rloo_and_remax_are_unbiased(name, k, beta):
    estimate, truth = enumerated_gradient(name, beta, k)
    torch.testing.assert_close(estimate, truth, rtol=0, atol=1e-10)


def test_grpo_is_biased_and_by_how_much():
    """k = 2, no KL: 1/std makes every advantage +-0.707, so that the size of a difference counts for nothing, and 1/T
    weighs short responses more. The expected gradient is another direction, not only another length."""
    estimate, truth = enumerated_gradient("grpo", 0.0, 2)
    cosine = float((estimate * truth).sum() / estimate.norm() / truth.norm())
    print(f"cosine {cosine:.3f}, norm ratio {float(estimate.norm() / truth.norm()):.3f}")
    assert 0.5 < cosine < 0.99
