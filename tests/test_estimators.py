"""Every script's estimator against loops in float64 (references.py), what does and does not change its advantages and
its loss, and its expected gradient by enumerating all responses of a small policy."""

import dataclasses
import importlib
import math
import re
from itertools import product
from typing import NamedTuple

import pytest
import references
import torch
from conftest import POLICY_SCRIPTS, ROOT

MODULES = {name: importlib.import_module(name) for name in POLICY_SCRIPTS}
EXACT = dict(rtol=1e-10, atol=1e-11)
each_script = pytest.mark.parametrize("name", POLICY_SCRIPTS)


class Properties(NamedTuple):
    """A row of the table in docs/estimators.md."""

    k: int  # responses per prompt, by default
    compared_with: str  # whose scores, besides its own, change the advantages of a response
    scale: str  # yes: scores times 9 give the same advantages without KL
    kl_in: str  # the reward, and so the advantages, or the loss
    clip: str  # of the objective, so that a token beyond it has no gradient, or of a weight
    mean_over: str  # what divides the sum over tokens
    steps: str  # optimizer steps per rollout, by default


CLIP, PER_LENGTH = "objective, -0.2 +0.2", "responses, each over its length"
PROPERTIES = {
    "reinforce": Properties(1, "the batch", "no", "reward", "none", "responses", "1, fixed"),
    "rloo": Properties(8, "the group", "no", "reward", "none", "responses", "1, fixed"),
    "raft": Properties(8, "the group", "yes", "reward", "none", "responses", "1, fixed"),
    "reinforce_pp": Properties(1, "the batch", "yes", "reward", CLIP, "tokens", "2"),
    "reinforce_pp_baseline": Properties(8, "the group and the batch", "yes", "loss", CLIP, "tokens", "2"),
    "ppo": Properties(1, "the batch and the critic", "yes", "reward", CLIP, "tokens", "2"),
    "remax": Properties(1, "the greedy response", "no", "reward", "none", "tokens", "1, fixed"),
    "grpo": Properties(8, "the group", "yes", "loss", CLIP, PER_LENGTH, "2"),
    "dr_grpo": Properties(8, "the group", "no", "none", CLIP, "responses, each over L_max", "2"),
    "dapo": Properties(8, "the group", "yes", "none", "objective, -0.2 +0.28", "tokens", "2"),
    "gspo": Properties(8, "the group", "yes", "none", "objective, -0.0003 +0.0004", PER_LENGTH, "2"),
    "cispo": Properties(8, "the group", "yes", "none", "weight, -1 +0.28", "tokens", "2"),
    "sapo": Properties(8, "the group", "yes", "none", "soft gate", PER_LENGTH, "2"),
    "dppo": Properties(8, "the group", "yes", "none", "probability, 0.15", "tokens", "2"),
    "maxrl": Properties(8, "its group's mean", "yes", "none", "none", "responses", "1, fixed"),
    "distill": Properties(1, "the teacher", "yes", "the objective", "none", "tokens", "1, fixed"),
}


def make_args(name: str, **flags):
    """The script's flags with those of flags that it has."""
    known = {field.name for field in dataclasses.fields(MODULES[name].Args)}
    return MODULES[name].Args(**{flag: value for flag, value in flags.items() if flag in known})


def make_rollout(
    seed: int, k: int = 1, prompts: int = 3, dtype=torch.float64, garbage: float = math.nan
) -> dict:
    """k responses to each prompt, of 1 to 9 tokens, two with holes in their mask; garbage where it is false."""
    g = torch.Generator().manual_seed(seed)
    B, T = prompts * k, 9
    lengths = torch.randint(1, T + 1, (B,), generator=g)
    lengths[:2] = T
    mask = torch.arange(T) < lengths[:, None]
    mask[0, [0, 4]] = mask[1, 3:8] = False  # the first token, one and several in the middle
    draw = lambda: torch.randn(B, T, generator=g, dtype=dtype).masked_fill(~mask, garbage)  # noqa: E731
    rollout = {"response_mask": mask, "scores": torch.randn(B, generator=g, dtype=dtype)}
    rollout |= {"old_logprobs": -draw().abs(), "ref_logprobs": -draw().abs(), "values": draw()}
    rollout |= {"kl": rollout["old_logprobs"] - rollout["ref_logprobs"], "advantages": draw().nan_to_num(5.0)}
    return rollout | {"greedy_scores": torch.randn(B, generator=g, dtype=dtype)}


@each_script
def test_every_script_has_a_reference_and_a_row(name):
    for part in (f"{name}_advantages", f"{name}_loss"):
        assert hasattr(references, part), f"tests/references.py has no {part}"
    assert name in PROPERTIES, f"PROPERTIES in tests/test_estimators.py has no {name}"
    row = rf"^\|.*\[`{name}\.py`\]\({name}\.py\)"
    assert re.search(row, (ROOT / "README.md").read_text(), re.MULTILINE), f"README.md has no row {row}"


@each_script
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_advantages_equal_the_loops_and_carry_no_gradient(name, beta):
    for seed, k in product(range(4), (2, 3, 8)):
        args = make_args(name, kl_coef=beta, samples_per_prompt=k, max_response_length=9, overlong_buffer=4)
        rollout = make_rollout(seed, k)
        rollout["scores"][-k:] = 1 / 3  # one group whose scores are all equal
        attached = {key: x.clone().requires_grad_(x.is_floating_point()) for key, x in rollout.items()}
        for key, values in MODULES[name].compute_advantages(args, attached).items():
            expected = references.spread(
                getattr(references, f"{name}_{key}")(args, rollout), rollout["response_mask"]
            )
            torch.testing.assert_close(values, expected, **EXACT)
            assert not values.requires_grad


@each_script
def test_loss_gradient_and_clip_fraction_equal_the_loops(name):
    """num_sequences and num_tokens are those of a whole step, and not those of this micro-batch."""
    loss_of = getattr(references, f"{name}_loss")
    for seed in range(5):
        batch, args = make_rollout(seed, k=3), make_args(name, kl_coef=0.2)
        mask = batch["response_mask"]
        noise = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        logprobs = (batch["old_logprobs"] + 0.5 * noise).requires_grad_()  # ratios from 0.3 to 3
        loss, stats = MODULES[name].policy_loss(args, batch, logprobs, num_sequences=13, num_tokens=57)
        expected, share = loss_of(args, batch, logprobs, 13, 57)
        torch.testing.assert_close(loss, expected, **EXACT)
        without_kl, _ = loss_of(make_args(name, kl_coef=0.0), batch, logprobs, 13, 57)
        torch.testing.assert_close(stats["policy_loss"], without_kl.detach(), **EXACT)
        assert ("kl_loss" in stats) == (PROPERTIES[name].kl_in == "loss")
        kl_loss = (expected - without_kl).detach()
        torch.testing.assert_close(stats.get("kl_loss", torch.zeros_like(kl_loss)), kl_loss, **EXACT)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        torch.testing.assert_close(gradient[mask], torch.autograd.grad(expected, logprobs)[0][mask], **EXACT)
        assert (gradient[~mask] == 0).all() and not any(value.requires_grad for value in stats.values())
        assert ("clip_fraction" in stats) == (share is not None)
        if share is not None:
            assert float(stats["clip_fraction"]) == pytest.approx(share, rel=1e-6) and 0 < share < 1


@pytest.mark.parametrize("seed", range(5))
def test_value_loss_and_its_gradient_equal_the_loops(seed):
    batch, ppo = make_rollout(seed, k=3, garbage=5.0), MODULES["ppo"]
    shape, args = batch["values"].shape, ppo.Args(value_clip_eps=0.2)
    g = torch.Generator().manual_seed(seed)
    batch["returns"] = torch.randn(shape, generator=g, dtype=torch.float64)
    values = batch["values"] + 0.3 * torch.randn(shape, generator=g, dtype=torch.float64)
    loss, stats = ppo.value_loss(args, batch, values.requires_grad_(), num_tokens=41)
    expected = references.ppo_value_loss(args, batch, values, 41)
    torch.testing.assert_close(loss, expected, **EXACT)
    torch.testing.assert_close(stats["value_loss"], expected.detach(), **EXACT)
    (gradient,) = torch.autograd.grad(loss, values)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, values)[0], **EXACT)


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "cispo", "reinforce_pp_baseline"])
def test_equal_scores_in_float32(name):
    """The mean of k equal floats may be off by a rounding; over a std of that size it would be |A| = 0.95."""
    for k, score in product(range(2, 9), (0.1, 1 / 3, -0.7)):
        rollout = make_rollout(k, k, prompts=2, dtype=torch.float32)
        rollout["scores"] = torch.cat([torch.full((k,), score), torch.linspace(-1, 1, k)])
        advantages = MODULES[name].compute_advantages(make_args(name, samples_per_prompt=k), rollout)[
            "advantages"
        ]
        assert (advantages[:k] == 0).all() and advantages.dtype == torch.float32


def test_whitening_survives_float32():
    """Mean 1e4, std 0.1: E[x^2] - E[x]^2 in float32 gives a variance of any sign."""
    x = 1e4 + 0.1 * torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    for name in ("reinforce_pp", "ppo"):
        white = MODULES[name].whiten(x, torch.ones_like(x, dtype=torch.bool))
        assert abs(float(white.mean())) < 1e-2 and abs(float(white.std(correction=0)) - 1) < 1e-2


# The rows of PROPERTIES, on three groups of four responses without holes.
BASE = make_rollout(0, 4, garbage=0.0)
BASE["response_mask"][:2] = True
FLAGS = {"samples_per_prompt": 4, "kl_coef": 0.5, "overlong_buffer": 0}


def advantages_of(name: str, **changes) -> torch.Tensor:
    args = make_args(name, **FLAGS, max_response_length=9)
    return MODULES[name].compute_advantages(args, BASE | changes)["advantages"]


def loss_of(name: str, num_sequences=5, num_tokens=7, max_response_length=9, **changes) -> torch.Tensor:
    args, logprobs = (
        make_args(name, **FLAGS, max_response_length=max_response_length),
        BASE["old_logprobs"] + 0.1,
    )
    return MODULES[name].policy_loss(args, BASE | changes, logprobs, num_sequences, num_tokens)[0]


def slopes(name: str, log_ratio: float) -> torch.Tensor:
    """The gradient of the loss without KL at each token, where all ratios are equal and all advantages 1."""
    logprobs = (BASE["old_logprobs"] + log_ratio).requires_grad_()
    batch = BASE | {"advantages": BASE["response_mask"].double()}
    loss, _ = MODULES[name].policy_loss(make_args(name, kl_coef=0.0), batch, logprobs, 5, 7)
    return torch.autograd.grad(loss, logprobs)[0]


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-3)


@each_script
def test_a_constant_added_to_the_scores_of_a_group(name):
    moved = BASE["scores"] + 7.0 * (torch.arange(12) < 4)
    unchanged = equal(advantages_of(name, scores=moved)[:4], advantages_of(name)[:4])
    assert unchanged == any(x in PROPERTIES[name].compared_with for x in ("the group", "the teacher"))


@each_script
def test_scores_of_others_and_values(name):
    another = BASE["scores"] + 7.0 * (torch.arange(12) == 4)
    changes = {"the batch": {"scores": another}, "the critic": {"values": 3 * BASE["values"]}}
    changes["the greedy response"] = {"greedy_scores": 3 * BASE["greedy_scores"]}
    for source, change in changes.items():
        unchanged = equal(advantages_of(name, **change)[:4], advantages_of(name)[:4])
        assert unchanged != (source in PROPERTIES[name].compared_with)


@each_script
def test_scores_times_nine(name):
    times = {key: 9 * BASE[key] for key in ("scores", "greedy_scores", "values")}
    no_kl = {"kl": 0 * BASE["kl"]}
    unchanged = equal(advantages_of(name, **no_kl, **times), advantages_of(name, **no_kl))
    assert unchanged == (PROPERTIES[name].scale == "yes")


@each_script
def test_another_kl_changes_advantages_or_loss(name):
    in_reward = not equal(advantages_of(name, kl=-50 * BASE["kl"]), advantages_of(name))
    in_loss = not equal(loss_of(name, ref_logprobs=2 * BASE["ref_logprobs"]), loss_of(name))
    assert (in_reward, in_loss) == (PROPERTIES[name].kl_in == "reward", PROPERTIES[name].kl_in == "loss")


@each_script
def test_what_divides_a_token(name):
    """The tokens or the responses of the step, and then its response's length, L_max, or nothing."""
    over = PROPERTIES[name].mean_over
    assert equal(2 * loss_of(name, num_tokens=14), loss_of(name)) == (over == "tokens")
    assert equal(2 * loss_of(name, num_sequences=10), loss_of(name)) == (over != "tokens")
    assert equal(2 * loss_of(name, max_response_length=18), loss_of(name)) == over.endswith("L_max")
    slope, lengths = slopes(name, 0.0)[:, 0], BASE["response_mask"].sum(1)  # of first tokens
    expected = 1 / lengths.double() if over.endswith("its length") else torch.ones(12, dtype=torch.float64)
    assert equal(slope / slope[0], expected / expected[0])


@each_script
def test_flags_and_clip(name):
    """The row of the table in docs/estimators.md is that of PROPERTIES too."""
    args, row = make_args(name), PROPERTIES[name]
    is_flat = bool(
        (slopes(name, 3.0)[BASE["response_mask"]] == 0).all()
    )  # good responses, far beyond any clip
    assert is_flat == row.clip.startswith(("objective", "probability"))
    low, high = (
        getattr(args, f"clip_eps{side}", getattr(args, "clip_eps", None)) for side in ("_low", "_high")
    )
    without = {"sapo": "soft gate", "dppo": f"probability, {getattr(args, 'delta', 0):g}"}
    if low is None:
        assert row.clip == without.get(name, "none")
    else:
        assert row.clip.endswith(f", -{low:g} +{high:g}")
    steps = (
        f"{args.num_minibatches * args.update_epochs}{'' if 'num_minibatches' in vars(args) else ', fixed'}"
    )
    assert (row.k, row.steps) == (args.samples_per_prompt, steps)
    text = f"| [`{name}`](../{name}.py) | " + " | ".join(map(str, row)) + " |"
    assert text in (ROOT / "docs" / "estimators.md").read_text(), (
        f"docs/estimators.md lacks this row:\n{text}"
    )


@pytest.mark.parametrize("k", [2, 3, 4])
def test_maxrl_ascends_the_truncated_log_of_the_pass_rate(k):
    """The expectation over all groups is the sum over j < k of the gradient of pass@j / j. With groups without a
    success at 0 and the group's mean subtracted, the term j = k is lost."""
    logits = torch.tensor([0.3, -0.5, 0.1, -1.0], dtype=torch.float64, requires_grad=True)
    scores = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    args, logprobs, expected = make_args("maxrl", samples_per_prompt=k), logits.log_softmax(0), 0.0
    for group in product(range(4), repeat=k):
        rows, mask = list(group), torch.ones(k, 1, dtype=torch.bool)
        rollout = {"response_mask": mask, "scores": scores[rows]}
        rollout |= MODULES["maxrl"].compute_advantages(args, rollout)
        loss, _ = MODULES["maxrl"].policy_loss(args, rollout, logprobs[rows].view(k, 1), k, k)
        probability = float(logprobs[rows].sum().detach().exp())
        expected = expected - probability * torch.autograd.grad(loss, logits, retain_graph=True)[0]
    failure = 1 - (logprobs.exp() * scores).sum()
    truncated = sum((1 - failure**j) / j for j in range(1, k))
    torch.testing.assert_close(expected, torch.autograd.grad(truncated, logits)[0], **EXACT)


# A policy small enough to write down every response: quarters for the tokens 0, 1, EOS after each prefix.
EOS, T = 2, 3
PROBS = {(): [2, 1, 1], (0,): [1, 1, 2], (1,): [1, 2, 1]}
PROBS |= {(0, 0): [1, 2, 1], (0, 1): [2, 1, 1], (1, 0): [1, 1, 2], (1, 1): [1, 1, 2]}
PREFIXES = list(PROBS)
RESPONSES = sorted({row[: row.index(EOS) + 1] if EOS in row else row for row in product(range(3), repeat=T)})


def score_of(response) -> float:
    return math.sin(7.0 * sum((t + 1) * (token + 1) for t, token in enumerate(response)))


class SmallPolicy:
    """Its logits, those of a reference, and the exact gradient of E[score] - beta KL over whole responses."""

    def __init__(self):
        self.logits = (torch.tensor(list(PROBS.values()), dtype=torch.float64) / 4).log().requires_grad_()
        self.logprob = self.logits.log_softmax(-1)
        generator = torch.Generator().manual_seed(0)
        self.ref_logprob = torch.randn(len(PROBS), 3, generator=generator, dtype=torch.float64).log_softmax(
            -1
        )

    def rollout(self, rows) -> tuple[dict, torch.Tensor]:
        """The rollout of these responses, and their differentiable log-probs."""
        mask = torch.tensor([[t < len(row) for t in range(T)] for row in rows])
        state = torch.tensor(
            [[PREFIXES.index(row[:t]) if t < len(row) else 0 for t in range(T)] for row in rows]
        )
        token = torch.tensor([[row[t] if t < len(row) else 0 for t in range(T)] for row in rows])
        new, ref = (x[state, token].masked_fill(~mask, 0.0) for x in (self.logprob, self.ref_logprob))
        rollout = {
            "response_mask": mask,
            "old_logprobs": new.detach(),
            "ref_logprobs": ref,
            "kl": new.detach() - ref,
        }
        rollout["scores"] = torch.tensor([score_of(row) for row in rows], dtype=torch.float64)
        rollout["greedy_scores"] = torch.full((len(rows),), score_of((0, EOS)), dtype=torch.float64)
        return rollout, new

    def gradient(self, name: str, rows, args, num_sequences, num_tokens) -> torch.Tensor:
        """Of the script's loss on these responses, with respect to the logits."""
        rollout, new = self.rollout(rows)
        rollout |= MODULES[name].compute_advantages(args, rollout)
        loss, _ = MODULES[name].policy_loss(args, rollout, new, num_sequences, num_tokens)
        return torch.autograd.grad(loss, self.logits, retain_graph=True)[0]

    def exact_gradient(self, beta: float) -> torch.Tensor:
        rollout, new = self.rollout(RESPONSES)
        new, ref = new.sum(1), rollout["ref_logprobs"].sum(1)
        objective = (new.exp() * (rollout["scores"] - beta * (new - ref))).sum()
        return torch.autograd.grad(objective, self.logits, retain_graph=True)[0]


def expected_gradient(name: str, k: int, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The expectation over all groups of k responses, and the exact one. A token mean has a random denominator: it is
    taken with 1, and is the sum then."""
    args = make_args(name, kl_coef=beta, samples_per_prompt=k, max_response_length=T, overlong_buffer=0)
    policy = SmallPolicy()
    probability = dict(zip(RESPONSES, policy.rollout(RESPONSES)[1].sum(1).exp().tolist()))
    expected = sum(
        math.prod(probability[row] for row in group) * policy.gradient(name, group, args, k, k)
        for group in product(RESPONSES, repeat=k)
    )
    return -expected, policy.exact_gradient(beta)


UNBIASED = {"rloo": (2, 1), "remax": (1, 1), "reinforce": (2, 1 / 2), "dr_grpo": (2, 1 / 2 / T)}  # k, factor
BIASED = {
    "grpo": 0.971,
    "gspo": 0.971,
    "cispo": 0.983,
    "dapo": 0.983,
    "raft": 0.983,
}  # cosine with the exact gradient


@pytest.mark.parametrize("name", UNBIASED)
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_these_are_unbiased(name, beta):
    """Up to a constant factor: (k - 1)/k where a response is part of its baseline, and 1/L_max."""
    k, factor = UNBIASED[name]
    if beta == 0 or PROPERTIES[name].kl_in != "none":
        expected, exact = expected_gradient(name, k, beta)
        torch.testing.assert_close(expected, factor * exact, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", BIASED)
def test_these_are_biased(name):
    """At k = 2, as docs/estimators.md says."""
    expected, exact = expected_gradient(name, 2, 0.0)
    cosine = torch.cosine_similarity(expected.flatten(), exact.flatten(), dim=0)
    assert float(cosine) == pytest.approx(BIASED[name], abs=6e-4)


@pytest.mark.parametrize("beta", [0.0, 0.05, 0.5])
def test_reinforce_pp_ascends_reward_minus_beta_kl(beta):
    """A batch that holds each response as often as it is probable: the whitened token mean of its 4^T = 64 responses is
    -64 / (N_tok std) times the exact gradient."""
    policy, args, rows = SmallPolicy(), make_args("reinforce_pp", kl_coef=beta), []
    for response in RESPONSES:
        quarters = math.prod(PROBS[response[:t]][token] for t, token in enumerate(response))
        rows += [response] * (quarters * 4 ** (T - len(response)))
    rollout, _ = policy.rollout(rows)
    mask = rollout["response_mask"]
    gradient = policy.gradient("reinforce_pp", rows, args, len(rows), int(mask.sum()))
    returns = rollout["scores"][:, None] - beta * rollout["kl"].flip(1).cumsum(1).flip(1)
    factor = -(4**T) / (mask.sum() * returns[mask].std(correction=0))
    torch.testing.assert_close(gradient, factor * policy.exact_gradient(beta), rtol=1e-9, atol=1e-10)
