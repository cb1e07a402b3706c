"""Every script's estimator against loops in float64 (references.py), and what docs/estimators.md says of it."""

import dataclasses
import importlib
import re
import runpy
from itertools import product
from typing import NamedTuple

import pytest
import references
import torch
from common import patched
from conftest import POLICY_SCRIPTS, ROOT, is_for_0_and_1

MODULES = {name: importlib.import_module(name) for name in POLICY_SCRIPTS}
EXACT = dict(rtol=1e-10, atol=1e-11)
each_script = pytest.mark.parametrize("name", POLICY_SCRIPTS)


class Row(NamedTuple):
    """A row of the table in docs/estimators.md, without the script."""

    advantage: str
    loss: str
    k: str  # responses per prompt, by default
    compared_with: str  # whose scores, besides its own, change the advantages of a response
    scale: str  # yes: scores times 9 give the same advantages without KL; 0 or 1: it takes no others
    kl_in: str  # the reward, and so the advantages, or the loss
    clip: str  # of the objective, so that a token beyond it has no gradient, or of a weight
    steps: str  # optimizer steps per rollout, by default


PAGE = (ROOT / "docs" / "estimators.md").read_text()
TABLE = re.findall(r"^\| \[`(\w+)`\]\S+ \| (.*) \|$", PAGE, re.MULTILINE)
ROWS = {name: Row(*cells.split(" | ")) for name, cells in TABLE}


def make_args(name: str, **flags):
    """The script's flags with those of flags that it has."""
    known = {field.name for field in dataclasses.fields(MODULES[name].Args)}
    return MODULES[name].Args(**{flag: value for flag, value in flags.items() if flag in known})


def ks_of(name: str) -> list[int]:
    """Group sizes to test a script with."""
    return [k for k in range(2, 9) if k >= MODULES[name].Args.min_samples_per_prompt]


def make_rollout(seed: int, k: int) -> dict:
    """k responses to each of 3 prompts, of 1 to 9 tokens, two with holes in their mask; 0 where it is false."""
    torch.manual_seed(seed)
    lengths = torch.randint(1, 10, (3 * k,))
    lengths[:2] = 9
    mask = torch.arange(9) < lengths[:, None]
    mask[0, [0, 4]] = mask[1, 3:8] = False  # the first token, one and several in the middle
    numbers = torch.randn(4, 3 * k, 9, dtype=torch.float64) * mask
    old_logprobs, ref_logprobs = -numbers[:2].abs()
    scores, greedy_scores = torch.randn(2, 3 * k, dtype=torch.float64)
    return {
        "response_mask": mask,
        "scores": scores,
        "greedy_scores": greedy_scores,
        "old_logprobs": old_logprobs,
        "ref_logprobs": ref_logprobs,
        "teacher_logprobs": -numbers[2].abs(),
        "kl": old_logprobs - ref_logprobs,
        "values": numbers[2],
        "advantages": numbers[3],
    }


def with_two_rewards(rollout: dict) -> dict:
    """For gdpo.py: a second score of each response, of another scale."""
    return rollout | {"scores": torch.stack([rollout["scores"], 9 * rollout["greedy_scores"]], dim=1)}


@each_script
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_advantages_equal_the_loops_and_carry_no_gradient(name, beta):
    for seed, k in product(range(2), ks_of(name)):
        args = make_args(name, kl_coef=beta, samples_per_prompt=k, max_response_length=9, overlong_buffer=4)
        rollout = make_rollout(seed, k)
        equal = 1 / 3
        if is_for_0_and_1(name):
            rollout["scores"] = (rollout["scores"] > 0).double()
            equal = 1.0
        if name == "gdpo":
            rollout = with_two_rewards(rollout)
            rollout["scores"][:k, 1] = 1 / 3  # one group that differs in the first reward only
            args.reward_weights = [None, [1.0, 0.25]][seed % 2]
        rollout["scores"][-k:] = equal  # one group whose scores are all equal
        attached = {key: x.clone().requires_grad_(x.is_floating_point()) for key, x in rollout.items()}
        for key, result in MODULES[name].compute_advantages(args, attached).items():
            values = getattr(references, f"{name}_{key}")(args, rollout)
            expected = references.spread(values, rollout["response_mask"])
            torch.testing.assert_close(result, expected, **EXACT)
            assert not result.requires_grad


@each_script
def test_loss_gradient_and_clip_fraction_equal_the_loops(name):
    """num_sequences and num_tokens are those of a whole step, and not those of this micro-batch."""
    for seed in range(5):
        batch, args = make_rollout(seed, k=3), make_args(name, kl_coef=0.2, delta=0.1)
        mask = batch["response_mask"]
        noise = 0.5 * torch.randn(mask.shape, dtype=torch.float64) * mask  # ratios from 0.3 to 3
        logprobs = (batch["old_logprobs"] + noise).requires_grad_()
        loss, stats = MODULES[name].policy_loss(args, batch, logprobs, num_sequences=13, num_tokens=57)
        expected, share = getattr(references, f"{name}_loss")(args, batch, logprobs, 13, 57)
        torch.testing.assert_close(loss, expected, **EXACT)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        (expected_gradient,) = torch.autograd.grad(expected, logprobs)
        torch.testing.assert_close(gradient[mask], expected_gradient[mask], **EXACT)
        assert (gradient[~mask] == 0).all() and not any(value.requires_grad for value in stats.values())

        parts = stats["policy_loss"] + stats.get("kl_loss", 0.0)
        torch.testing.assert_close(parts, loss.detach(), **EXACT)
        assert ("kl_loss" in stats) == (ROWS[name].kl_in == "loss")
        limited = stats.get("clip_fraction", stats.get("rejected"))  # share of tokens, or of responses
        assert (limited is None) == (share is None)
        if share is not None:
            assert float(limited) == pytest.approx(share, rel=1e-6) and 0 < share < 1


def test_value_loss_and_its_gradient_equal_the_loops():
    batch, args = make_rollout(0, k=8), MODULES["ppo"].Args(value_clip_eps=0.2)
    noise, batch["returns"] = torch.randn(2, 24, 9, dtype=torch.float64) * batch["response_mask"]
    values = (batch["values"] + 0.3 * noise).requires_grad_()
    loss, _ = MODULES["ppo"].value_loss(args, batch, values, num_tokens=41)
    expected = references.ppo_value_loss(args, batch, values, 41)
    torch.testing.assert_close(loss, expected, **EXACT)
    (gradient,) = torch.autograd.grad(loss, values)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, values)[0], **EXACT)


@pytest.mark.parametrize(
    "name", [name for name in ROWS if re.search("std}_|as `grpo`", ROWS[name].advantage)]
)
def test_equal_scores_in_float32(name):
    """The mean of k equal floats may be off by a rounding; over a std of that size it would be |A| = 0.95."""
    for k, score in product(ks_of(name), (0.1, 1 / 3, -0.7)):
        scores = torch.cat([torch.full((k,), score), torch.arange(k) % 2.0])
        rollout = {"scores": scores, "response_mask": torch.ones(2 * k, 3, dtype=torch.bool)}
        result = MODULES[name].compute_advantages(make_args(name, samples_per_prompt=k), rollout)
        assert (result["advantages"][:k] == 0).all() and result["advantages"].dtype == torch.float32


def test_whitening_survives_float32():
    """Mean 1e4, std 0.1: E[x^2] - E[x]^2 in float32 gives a variance of any sign."""
    x = 1e4 + 0.1 * torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    for name in ("reinforce_pp", "ppo"):
        white = MODULES[name].whiten(x, torch.ones_like(x, dtype=torch.bool))
        assert abs(float(white.mean())) < 1e-2 and abs(float(white.std(correction=0)) - 1) < 1e-2


# Three groups of eight responses without holes
BASE = make_rollout(0, 8)
BASE["response_mask"][:2] = True


def advantages_of(name: str, **changes) -> torch.Tensor:
    """Of the first group."""
    args = make_args(name, samples_per_prompt=8, kl_coef=0.5, max_response_length=9, overlong_buffer=0)
    rollout = BASE | changes
    if name == "gdpo":  # with one reward, the std of the batch is always the same
        rollout = with_two_rewards(rollout)
    return MODULES[name].compute_advantages(args, rollout)["advantages"][:8]


def slopes(name: str, log_ratio: float) -> torch.Tensor:
    """The gradient of the loss without KL at each token, where all ratios are equal and all advantages 1."""
    logprobs = (BASE["old_logprobs"] + log_ratio).requires_grad_()
    batch = BASE | {"advantages": BASE["response_mask"].double()}
    loss, _ = MODULES[name].policy_loss(make_args(name, kl_coef=0.0), batch, logprobs, 5, 7)
    return torch.autograd.grad(loss, logprobs)[0]


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-3)


@each_script
def test_what_the_table_says_of_advantages(name):
    row, scores, response = ROWS[name], BASE["scores"], torch.arange(24)
    if is_for_0_and_1(name):
        scores = (response % 4 == 0).double()
        neighbor_changed = advantages_of(name, scores=scores + (response == 1))
        is_alone = equal(neighbor_changed[0], advantages_of(name, scores=scores)[0])
        assert is_alone != any(x in row.compared_with for x in ("group", "batch"))
    else:
        group_moved = advantages_of(name, scores=scores + 7.0 * (response < 8))
        is_shift_free = any(x in row.compared_with for x in ("the group", "the teacher"))
        assert equal(group_moved, advantages_of(name)) == is_shift_free
        times_nine = {key: 9 * BASE[key] for key in ("scores", "greedy_scores", "values")}
        no_kl = {"kl": 0 * BASE["kl"]}
        is_scale_free = equal(advantages_of(name, **no_kl, **times_nine), advantages_of(name, **no_kl))
        assert is_scale_free == (row.scale == "yes")
    advantages = advantages_of(name, scores=scores)
    another_changed = advantages_of(name, scores=scores + (response == 9))
    assert equal(another_changed, advantages) != ("the batch" in row.compared_with)
    other_values = advantages_of(name, scores=scores, values=3 * BASE["values"])
    assert equal(other_values, advantages) != ("the critic" in row.compared_with)
    other_greedy = advantages_of(name, scores=scores, greedy_scores=3 * BASE["greedy_scores"])
    assert equal(other_greedy, advantages) != ("the greedy response" in row.compared_with)
    other_kl = advantages_of(name, scores=scores, kl=-50 * BASE["kl"])
    assert equal(other_kl, advantages) != (row.kl_in == "reward")


@each_script
def test_what_the_table_says_of_flags_and_clip(name):
    args, row = make_args(name), ROWS[name]
    far = slopes(name, 3.0)[BASE["response_mask"]]  # good responses, far beyond any clip
    assert bool((far == 0).all()) == row.clip.startswith(("objective", "probability", "response"))
    flags = [flag for flag in ("clip_eps", "clip_eps_low", "clip_eps_high", "delta") if hasattr(args, flag)]
    assert all(f"{getattr(args, flag):g}" in row.clip for flag in flags)
    steps = str(args.num_minibatches * args.update_epochs)
    if "num_minibatches" not in vars(args):  # it is not a flag
        steps += ", fixed"
    assert (row.k, row.steps) == (str(args.samples_per_prompt), steps)


WEIGHTS = {"tis": lambda x: min(x, 2.0), "icepop": lambda x: x if 0.5 <= x <= 5.0 else 0.0}


@pytest.mark.parametrize("patch", WEIGHTS)
@pytest.mark.parametrize("part", ["policy gradient", "KL"])
def test_a_patch_weighs_a_token_by_its_ratio_to_the_sampler(patch, part, tmp_path):
    """The policy gradient of grpo.py, times a function of pi_old / mu; the KL is not weighted."""
    batch = make_rollout(0, 4)
    sampler_ratio = (1.5 * batch["values"].flip(0)).exp()
    batch["sampler_logprobs"] = batch["old_logprobs"] - sampler_ratio.log()
    weights, kl_coef = sampler_ratio.clone().apply_(WEIGHTS[patch]), 0.0
    if part == "KL":
        batch["advantages"] = 0 * batch["advantages"]
        weights, kl_coef = 1.0, 0.3
    script = patched("grpo", [patch], tmp_path)
    gradients = []
    for grpo in (vars(MODULES["grpo"]), runpy.run_path(script)):
        logprobs = (batch["old_logprobs"] + 0.5 * batch["values"]).requires_grad_()
        loss, _ = grpo["policy_loss"](grpo["Args"](kl_coef=kl_coef), batch, logprobs, 13, 57)
        gradients += torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradients[1], weights * gradients[0], **EXACT)
