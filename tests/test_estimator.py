"""The estimator against an independent reference: plain loops in float64, written from docs and paper, not from the
script. Each mistake that such code is known for has its test here."""

import math
from itertools import product

import pytest
import torch

import reinforce_pp as rpp


def make_rollout(seed: int, dtype=torch.float64, lengths=(1, 4, 7, 2, 7), garbage: float = math.nan) -> dict:
    """Uneven lengths (one of a single token), anything but zeros on the padding."""
    g = torch.Generator().manual_seed(seed)
    B, T = len(lengths), max(lengths)
    mask = torch.arange(T) < torch.tensor(lengths)[:, None]
    draw = lambda: torch.randn(B, T, generator=g, dtype=dtype).masked_fill(~mask, garbage)  # noqa: E731
    logprobs, ref_logprobs = -draw().abs(), -draw().abs()
    return {
        "response_mask": mask,
        "scores": torch.randn(B, generator=g, dtype=dtype),
        "logprobs": logprobs,
        "ref_logprobs": ref_logprobs,
        "kl": logprobs - ref_logprobs,
        "advantages": draw(),
    }


def reference_advantages(rollout: dict, beta: float) -> list[list[float]]:
    """Eq. 8-10 word for word, sequence by sequence and token by token."""
    returns = []
    for score, kls, mask in zip(rollout["scores"], rollout["kl"], rollout["response_mask"]):
        length = int(mask.sum())
        returns.append(
            [float(score) - beta * math.fsum(float(kls[s]) for s in range(t, length)) for t in range(length)]
        )
    flat = [value for row in returns for value in row]
    mean = math.fsum(flat) / len(flat)
    variance = math.fsum((value - mean) ** 2 for value in flat) / len(flat)
    return [[(value - mean) / math.sqrt(max(variance, 1e-8)) for value in row] for row in returns]


@pytest.mark.parametrize("beta", [0.0, 0.01, 0.7])
@pytest.mark.parametrize("lengths", [(1, 4, 7, 2, 7), (1, 1, 1), (6, 6), (3, 9, 1, 1, 5, 2, 8)])
def test_advantages_equal_the_loops(beta, lengths):
    for seed in range(5):
        rollout = make_rollout(seed, lengths=lengths)
        advantages = rpp.compute_advantages(rpp.Args(kl_coef=beta), rollout)["advantages"]
        expected = reference_advantages(rollout, beta)
        assert advantages.shape == rollout["response_mask"].shape and advantages.dtype == torch.float64
        for row, reference, mask in zip(advantages, expected, rollout["response_mask"]):
            torch.testing.assert_close(row[mask], torch.tensor(reference, dtype=torch.float64), rtol=1e-12, atol=1e-12)
            assert (row[~mask] == 0).all()


def test_policy_is_charged_for_kl_not_paid():
    """One token that is likelier than under the reference must come out below one that is not (Rule 1)."""
    rollout = make_rollout(0, lengths=(1, 1), garbage=0.0)
    rollout |= {"scores": torch.zeros(2).double(), "kl": torch.tensor([[1.0], [-1.0]]).double()}
    advantages = rpp.compute_advantages(rpp.Args(kl_coef=0.1), rollout)["advantages"]
    assert advantages[0, 0] < 0 < advantages[1, 0]


def test_score_counts_once():
    """With beta = 0 every token's return is the score itself; a score on every token would make it a ramp."""
    rollout = make_rollout(0, lengths=(5, 5))
    rollout["scores"] = torch.tensor([1.0, -1.0]).double()
    advantages = rpp.compute_advantages(rpp.Args(kl_coef=0.0), rollout)["advantages"]
    torch.testing.assert_close(advantages, torch.tensor([[1.0], [-1.0]]).double().expand(2, 5))


@pytest.mark.parametrize("scale, shift", [(1.0, 1.0), (0.5, 0.5), (37.0, -1e3)])
def test_advantages_do_not_change_with_the_scale_of_the_score(scale, shift):
    rollout = make_rollout(1)
    before = rpp.compute_advantages(rpp.Args(kl_coef=0.0), rollout)["advantages"]
    rollout["scores"] = scale * rollout["scores"] + shift
    torch.testing.assert_close(rpp.compute_advantages(rpp.Args(kl_coef=0.0), rollout)["advantages"], before)


def test_whitening_survives_float32():
    """Mean 1e4, std 1e-1: E[x^2] - E[x]^2 in float32 gives a variance of any sign."""
    x = 1e4 + 0.1 * torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(64, 32, dtype=torch.bool)
    white = rpp.whiten(x, mask)
    assert abs(float(white.mean())) < 1e-2 and abs(float(white.std(correction=0)) - 1) < 1e-2


def test_equal_scores_give_no_advantage():
    rollout = make_rollout(0, dtype=torch.float32, lengths=(3, 1, 4))
    rollout["scores"] = torch.full((3,), 0.1)
    assert rpp.compute_advantages(rpp.Args(kl_coef=0.0), rollout)["advantages"].abs().max() < 1e-3


def test_advantages_carry_no_gradient():
    rollout = make_rollout(0)
    rollout["kl"] = rollout["kl"].nan_to_num().requires_grad_()
    assert not rpp.compute_advantages(rpp.Args(), rollout)["advantages"].requires_grad


def reference_loss(mb: dict, logprobs, eps: float, num_tokens: float):
    """Eq. 1 token by token; returns loss, the gradient with respect to every log-prob, and the clipped share."""
    loss, clipped, gradient = 0.0, 0, torch.zeros_like(logprobs)
    for i, t in product(range(logprobs.shape[0]), range(logprobs.shape[1])):
        if not mb["response_mask"][i, t]:
            continue
        advantage = float(mb["advantages"][i, t])
        ratio = math.exp(float(logprobs[i, t]) - float(mb["logprobs"][i, t]))
        if advantage > 0:
            binding = ratio > 1 + eps
        else:
            binding = ratio < 1 - eps
        bound = 1 + eps if advantage > 0 else 1 - eps
        loss -= (bound if binding else ratio) * advantage / num_tokens
        clipped += binding
        gradient[i, t] = 0.0 if binding else -ratio * advantage / num_tokens
    return loss, gradient, clipped / num_tokens


@pytest.mark.parametrize("seed", range(10))
def test_loss_and_gradient_equal_the_loops(seed):
    mb = make_rollout(seed)
    mask = mb["response_mask"]
    noise = 0.5 * torch.randn(mask.shape, generator=torch.Generator().manual_seed(100 + seed), dtype=torch.float64)
    logprobs = (mb["logprobs"] + noise).requires_grad_()  # ratios from about 0.4 to 2.7: both sides of the clip
    loss, stats = rpp.policy_loss(rpp.Args(clip_eps=0.2), mb, logprobs, num_sequences=5, num_tokens=31)
    loss.backward()
    expected, gradient, clipped = reference_loss(mb, logprobs.detach(), 0.2, 31)
    assert 0 < clipped < 1
    torch.testing.assert_close(loss.item(), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(stats["policy_loss"].item(), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(float(stats["clip_fraction"]), clipped, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logprobs.grad, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "advantage, ratio, slope",
    [(1.0, 1.5, 0.0), (1.0, 0.5, -0.5), (-1.0, 1.5, 1.5), (-1.0, 0.5, 0.0), (1.0, 1.1, -1.1), (-1.0, 0.9, 0.9)],
)
def test_clip_is_one_sided(advantage, ratio, slope):
    """min, not max: a bad token that has become likelier is still pushed down."""
    mb = {"response_mask": torch.ones(1, 1, dtype=torch.bool), "logprobs": torch.zeros(1, 1).double()}
    mb["advantages"] = torch.tensor([[advantage]]).double()
    logprobs = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    loss, _ = rpp.policy_loss(rpp.Args(clip_eps=0.2), mb, logprobs, 1, 1)
    loss.backward()
    assert logprobs.grad.item() == pytest.approx(slope, abs=1e-12)


# A policy small enough to write down every response. Its probabilities are multiples of 1/4, so that a batch of 64 rows
# can hold each response exactly as often as it is probable: averages over the batch are expectations, to rounding.
EOS, T, ROWS = 2, 3, 64
PROBS = {(): [2, 1, 1], (0,): [1, 1, 2], (1,): [1, 2, 1]}  # quarters for tokens 0, 1, EOS after each prefix
PROBS |= {(0, 0): [1, 2, 1], (0, 1): [2, 1, 1], (1, 0): [1, 1, 2], (1, 1): [1, 1, 2]}
PREFIXES = list(PROBS)


def all_responses() -> list[tuple[int, ...]]:
    found = []
    for tokens in product(range(3), repeat=T):
        end = tokens.index(EOS) + 1 if EOS in tokens else T
        found.append(tokens[:end])
    return sorted(set(found))


def exact_objective(logits, ref_logits, score, beta):
    """J = E[score] - beta KL(pi || ref) over whole responses, differentiable, and its KL; no sampling, no estimator."""
    logprob = dict(zip(PREFIXES, logits.log_softmax(-1)))
    ref_logprob = dict(zip(PREFIXES, ref_logits.log_softmax(-1)))
    reward, kl = 0.0, 0.0
    for response in all_responses():
        lp = sum(logprob[response[:t]][token] for t, token in enumerate(response))
        ref = sum(ref_logprob[response[:t]][token] for t, token in enumerate(response))
        reward = reward + lp.exp() * score(response)
        kl = kl + lp.exp() * (lp - ref)
    return reward - beta * kl, kl


@pytest.mark.parametrize("beta", [0.0, 0.05, 0.5])
def test_expected_gradient_is_that_of_reward_minus_beta_kl(beta):
    """The whitened token-mean loss over the whole population is -ROWS / (N_tok std) times grad J, exactly."""
    probs = torch.tensor([PROBS[prefix] for prefix in PREFIXES], dtype=torch.float64) / 4
    logits = probs.log().requires_grad_()
    ref_logits = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def score(response) -> float:
        return math.sin(7.0 * sum((t + 1) * (token + 1) for t, token in enumerate(response)))

    rows = []
    for response in all_responses():
        p = math.prod(float(probs[PREFIXES.index(response[:t]), token]) for t, token in enumerate(response))
        rows += [response] * round(ROWS * p)
    assert len(rows) == ROWS and len({len(row) for row in rows}) == T
    mask = torch.tensor([[t < len(row) for t in range(T)] for row in rows])
    state = torch.tensor([[PREFIXES.index(row[:t]) if t < len(row) else 0 for t in range(T)] for row in rows])
    token = torch.tensor([[row[t] if t < len(row) else 0 for t in range(T)] for row in rows])
    logprobs = logits.log_softmax(-1)[state, token]
    ref_logprobs = ref_logits.log_softmax(-1)[state, token]

    kl = (logprobs - ref_logprobs).detach().masked_fill(~mask, 0.0)
    rollout = {
        "scores": torch.tensor([score(row) for row in rows], dtype=torch.float64),
        "response_mask": mask,
        "kl": kl,
    }
    rollout |= {"logprobs": logprobs.detach(), "ref_logprobs": ref_logprobs}
    args = rpp.Args(kl_coef=beta)
    rollout |= rpp.compute_advantages(args, rollout)
    loss, _ = rpp.policy_loss(args, rollout, logprobs, ROWS, int(mask.sum()))
    (gradient,) = torch.autograd.grad(loss, logits)

    objective, exact_kl = exact_objective(logits, ref_logits, score, beta)
    (true_gradient,) = torch.autograd.grad(objective, logits)
    returns = kl.flip(1).cumsum(1).flip(1).mul(-beta) + rollout["scores"][:, None]
    factor = -ROWS / (mask.sum() * returns[mask].std(correction=0))
    torch.testing.assert_close(gradient, factor * true_gradient, rtol=1e-9, atol=1e-10)

    # As values, k1 and k3 have the KL as their expectation, k2 = d^2 / 2 does not.
    d = kl[mask]
    assert float(kl.sum() / ROWS) == pytest.approx(float(exact_kl.detach()), rel=1e-9)
    assert float(((-d).exp() - 1 + d).sum() / ROWS) == pytest.approx(float(exact_kl.detach()), rel=1e-9)
    assert abs(float((d.square() / 2).sum() / ROWS) / float(exact_kl.detach()) - 1) > 0.05
