"""The estimator of every script equals the loops of references.py in float64."""

import dataclasses
import importlib
import inspect
import re
from itertools import product

import pytest
import references
import torch
from conftest import POLICY_SCRIPTS
from planted import BUGS
from references import FOR_0_AND_1, make_rollout

MODULES = {name: importlib.import_module(name) for name in POLICY_SCRIPTS}
EXACT = dict(rtol=1e-10, atol=1e-11)
each_script = pytest.mark.parametrize("name", POLICY_SCRIPTS)


def make_args(name: str, **flags):
    """The flags of a script. Those that it does not have are left out."""
    known = {field.name for field in dataclasses.fields(MODULES[name].Args)}
    return MODULES[name].Args(**{flag: value for flag, value in flags.items() if flag in known})


def ks_of(name: str) -> range:
    """Group sizes to test a script with."""
    least = max(2, MODULES[name].Args.min_samples_per_prompt)
    return range(least, least + 7)


@each_script
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_advantages_equal_the_loops_and_carry_no_gradient(name, beta):
    for seed, k in product(range(2), ks_of(name)):
        args = make_args(name, kl_coef=beta, samples_per_prompt=k, max_response_length=9, overlong_buffer=4)
        rollout = make_rollout(seed, k)
        equal = 1 / 3
        if name in FOR_0_AND_1:
            rollout["scores"] = (rollout["scores"] > 0).double()
            equal = 1.0
        if name == "gdpo":
            rollout["scores"] = torch.stack([rollout["scores"], 9 * rollout["greedy_scores"]], dim=1)
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
    """num_sequences and num_tokens belong to a whole step, and not to this micro-batch."""
    for seed in range(5):
        batch = make_rollout(seed, k=3)
        args = make_args(name, kl_coef=0.2, delta=0.1, max_ratio=1.5, dual_clip_c=1.5)
        mask = batch["response_mask"]
        noise = 0.5 * torch.randn(mask.shape, dtype=torch.float64) * mask  # ratios from 0.3 to 3
        logprobs = (batch["old_logprobs"] + noise).requires_grad_()
        if name == "gkd":  # two distributions over two tokens
            student = torch.stack([logprobs, 2 * logprobs], dim=2).log_softmax(2)
            batch |= {"all_logprobs": student, "teacher_all_logprobs": student.detach().flip(2)}
        loss, stats = MODULES[name].policy_loss(args, batch, logprobs, num_sequences=13, num_tokens=57)
        expected, share = getattr(references, f"{name}_loss")(args, batch, logprobs, 13, 57)
        torch.testing.assert_close(loss, expected, **EXACT)
        (gradient,) = torch.autograd.grad(loss, logprobs, retain_graph=True)
        (expected_gradient,) = torch.autograd.grad(expected, logprobs)
        torch.testing.assert_close(gradient[mask], expected_gradient[mask], **EXACT)
        assert (gradient[~mask] == 0).all() and not any(value.requires_grad for value in stats.values())

        parts = stats["policy_loss"] + stats.get("kl_loss", 0.0)
        torch.testing.assert_close(parts, loss.detach(), **EXACT)
        other_ref = batch | {"ref_logprobs": 2 * batch["ref_logprobs"]}
        other_loss, _ = MODULES[name].policy_loss(args, other_ref, logprobs, num_sequences=13, num_tokens=57)
        assert ("kl_loss" in stats) == bool(other_loss != loss)
        limited = stats.get("clip_fraction", stats.get("rejected"))  # share of tokens, or of responses
        assert (limited is None) == (share is None)
        if share is not None:
            assert float(limited) == pytest.approx(share, rel=1e-6) and 0 < share < 1


def test_value_loss_and_its_gradient_equal_the_loops():
    batch, args = make_rollout(0, k=8), MODULES["ppo"].Args(value_clip_eps=0.2)
    noise, batch["returns"] = torch.randn(2, 32, 9, dtype=torch.float64) * batch["response_mask"]
    values = (batch["values"] + 0.3 * noise).requires_grad_()
    loss, _ = MODULES["ppo"].value_loss(args, batch, values, num_tokens=41)
    expected = references.ppo_value_loss(args, batch, values, 41)
    torch.testing.assert_close(loss, expected, **EXACT)
    (gradient,) = torch.autograd.grad(loss, values)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, values)[0], **EXACT)


def divides_by_a_std(name: str) -> bool:
    return bool(re.search(r"\.std\(|variance", inspect.getsource(MODULES[name].compute_advantages)))


@pytest.mark.parametrize("name", [name for name in POLICY_SCRIPTS if divides_by_a_std(name)])
def test_equal_scores_in_float32(name):
    """The mean of k equal floats may have a rounding error, and so may their std. The advantage must stay about 0.

    A batch of equal scores must not be normalized to a std of 1, either.
    """
    for k, score, is_batch in product(ks_of(name), (0.1, 1 / 3, -0.7, 0.9), (False, True)):
        scores = torch.full((2 * k,), score)
        if not is_batch:
            scores[k:] = torch.arange(k) % 2.0
        mask = torch.ones(2 * k, 3, dtype=torch.bool)
        rollout = {"scores": scores, "response_mask": mask} | dict.fromkeys(references.EXTRA, mask.float())
        result = MODULES[name].compute_advantages(make_args(name, samples_per_prompt=k), rollout)
        assert result["advantages"][:k].abs().max() <= 0.003 * abs(score)
        assert result["advantages"].dtype == torch.float32


def test_whitening_survives_float32():
    """With a mean of 1e4 and a std of 0.1, E[x^2] - E[x]^2 in float32 could even be negative."""
    x = 1e4 + 0.1 * torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    for name in ("reinforce_pp", "ppo"):
        white = MODULES[name].whiten(x, torch.ones_like(x, dtype=torch.bool))
        assert abs(float(white.mean())) < 1e-2 and abs(float(white.std(correction=0)) - 1) < 1e-2


OURS = [bug for bug in BUGS.values() if bug.tests == "test_estimators.py" and bug.where != "references"]


@pytest.mark.parametrize("bug", OURS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_noticed(bug, monkeypatch):
    """One of the tests above sees a difference, and the script raises no exception."""
    has_std = divides_by_a_std(bug.script)
    monkeypatch.setitem(MODULES, bug.script, bug.module())
    with pytest.raises(AssertionError):
        if bug.where == "ppo.value_loss":
            test_value_loss_and_its_gradient_equal_the_loops()
        else:
            test_loss_gradient_and_clip_fraction_equal_the_loops(bug.script)
            test_advantages_equal_the_loops_and_carry_no_gradient(bug.script, 0.3)
        if has_std:
            test_equal_scores_in_float32(bug.script)
