"""Every script's estimator against loops in float64 (references.py), what changes its advantages and its loss, and its
expected gradient by enumerating all responses of a small policy."""

import dataclasses
import importlib
import math
import re
import runpy
import shutil
import subprocess
from itertools import product
from typing import NamedTuple

import pytest
import references
import torch
from conftest import POLICY_SCRIPTS, ROOT, is_for_0_and_1
from torch.nn.utils.rnn import pad_sequence

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


def formula(name: str, column: str) -> str:
    """The cell of a script, after the one that it refers to."""
    cell = getattr(ROWS[name], column)
    other = re.match(r"as `(\w+)`", cell)
    return formula(other[1], column) + cell if other else cell


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


@pytest.mark.parametrize("seed", range(5))
def test_value_loss_and_its_gradient_equal_the_loops(seed):
    batch, args = make_rollout(seed, k=3), MODULES["ppo"].Args(value_clip_eps=0.2)
    numbers = torch.randn(2, *batch["values"].shape, dtype=torch.float64)
    noise, batch["returns"] = numbers * batch["response_mask"]
    values = (batch["values"] + 0.3 * noise).requires_grad_()
    loss, stats = MODULES["ppo"].value_loss(args, batch, values, num_tokens=41)
    expected = references.ppo_value_loss(args, batch, values, 41)
    torch.testing.assert_close(loss, expected, **EXACT)
    torch.testing.assert_close(stats["value_loss"], expected.detach(), **EXACT)
    (gradient,) = torch.autograd.grad(loss, values)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, values)[0], **EXACT)


@pytest.mark.parametrize("name", [name for name in ROWS if "std" in formula(name, "advantage")])
def test_equal_scores_in_float32(name):
    """The mean of k equal floats may be off by a rounding; over a std of that size it would be |A| = 0.95."""
    for k, score in product(ks_of(name), (0.0, 1.0) if is_for_0_and_1(name) else (0.1, 1 / 3, -0.7)):
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


def loss_of(name: str, num_sequences=5, num_tokens=7, max_response_length=9, **changes) -> torch.Tensor:
    args = make_args(name, kl_coef=0.5, max_response_length=max_response_length)
    logprobs = BASE["old_logprobs"] + 0.1
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
def test_what_the_table_says_of_the_loss(name):
    """Its KL, and what divides a token: 1/N_tok or 1/N_seq, and then 1/T_i or 1/L_max."""
    loss, text = loss_of(name), formula(name, "loss")
    assert equal(loss_of(name, ref_logprobs=2 * BASE["ref_logprobs"]), loss) != (ROWS[name].kl_in == "loss")
    assert equal(2 * loss_of(name, num_tokens=14), loss) == ("N_{tok}" in text)
    assert equal(2 * loss_of(name, num_sequences=10), loss) == ("N_{seq}" in text)
    assert equal(2 * loss_of(name, max_response_length=18), loss) == ("L_{max}" in text)
    slope, lengths = slopes(name, 0.0)[:, 0], BASE["response_mask"].sum(1).double()  # of first tokens
    expected = 1 / lengths if "T_i" in text else torch.ones_like(lengths)
    assert equal(slope / slope[0], expected / expected[0])


@each_script
def test_what_the_table_says_of_flags_and_clip(name):
    args, row = make_args(name), ROWS[name]
    far = slopes(name, 3.0)[BASE["response_mask"]]  # good responses, far beyond any clip
    assert bool((far == 0).all()) == row.clip.startswith(("objective", "probability", "response"))
    if hasattr(args, "clip_eps"):
        assert row.clip.endswith(f", -{args.clip_eps:g} +{args.clip_eps:g}")
    elif hasattr(args, "clip_eps_low"):
        assert row.clip.endswith(f", -{args.clip_eps_low:g} +{args.clip_eps_high:g}")
    elif hasattr(args, "delta"):
        assert row.clip.endswith(f", {args.delta:g}")
    else:
        assert row.clip in ("soft gate", "none")
    steps = str(args.num_minibatches * args.update_epochs)
    if "num_minibatches" not in vars(args):  # it is not a flag
        steps += ", fixed"
    assert (row.k, row.steps) == (str(args.samples_per_prompt), steps)


def patched_grpo(patch: str, folder) -> dict:
    """What grpo.py defines with this patch of experiments/patches."""
    script = shutil.copy(ROOT / "grpo.py", folder)
    subprocess.run(["git", "apply", ROOT / f"experiments/patches/{patch}.patch"], cwd=folder, check=True)
    return runpy.run_path(script)


def gradient_of_grpo(grpo: dict, batch: dict, moved: torch.Tensor, kl_coef: float) -> torch.Tensor:
    """Of the loss at each token, where the log-probs have moved so far from the old ones."""
    logprobs = (batch["old_logprobs"] + moved).requires_grad_()
    loss, _ = grpo["policy_loss"](grpo["Args"](kl_coef=kl_coef), batch, logprobs, 13, 57)
    return torch.autograd.grad(loss, logprobs)[0]


def test_the_unbiased_kl_has_the_gradient_of_k2(tmp_path):
    """rho k3 has rho times the gradient of k2, token by token; on policy rho is 1."""
    batch = make_rollout(0, 4)
    batch["advantages"] = 0 * batch["advantages"]
    lengths = batch["response_mask"].sum(1, keepdim=True)
    grpo = patched_grpo("unbiased_kl", tmp_path)
    for moved in (0 * batch["values"], 0.5 * batch["values"]):
        k2_slope = batch["old_logprobs"] + moved - batch["ref_logprobs"]
        expected = 0.3 * moved.exp() * k2_slope / lengths / 13
        torch.testing.assert_close(gradient_of_grpo(grpo, batch, moved, 0.3), expected, **EXACT)


WEIGHTS = {"tis": lambda x: min(x, 2.0), "icepop": lambda x: x if 0.5 <= x <= 5.0 else 0.0}


@pytest.mark.parametrize("patch", WEIGHTS)
def test_the_ratio_to_the_sampler_weighs_a_token(patch, tmp_path):
    """The policy gradient of grpo.py, times a function of pi_old / mu; the KL is not weighted."""
    batch = make_rollout(0, 4)
    moved, sampler_ratio = 0.5 * batch["values"], (1.5 * batch["values"].flip(0)).exp()
    batch["sampler_logprobs"] = batch["old_logprobs"] - sampler_ratio.log()
    weights = sampler_ratio.clone().apply_(WEIGHTS[patch])
    grpo, original = patched_grpo(patch, tmp_path), vars(MODULES["grpo"])
    expected = weights * gradient_of_grpo(original, batch, moved, 0.0)
    torch.testing.assert_close(gradient_of_grpo(grpo, batch, moved, 0.0), expected, **EXACT)
    batch["advantages"] = 0 * batch["advantages"]
    expected = gradient_of_grpo(original, batch, moved, 0.3)
    torch.testing.assert_close(gradient_of_grpo(grpo, batch, moved, 0.3), expected, **EXACT)


@pytest.mark.parametrize("k", [2, 3, 4])
def test_maxrl_ascends_the_truncated_log_of_the_pass_rate(k):
    """The expectation over all groups is the sum over j < k of the gradient of pass@j / j. With groups without a
    success at 0 and the group's mean subtracted, the term j = k is lost."""
    logits = torch.tensor([0.3, -0.5, 0.1, -1.0], dtype=torch.float64, requires_grad=True)
    scores = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    args, mask = make_args("maxrl", samples_per_prompt=k), torch.ones(k, 1, dtype=torch.bool)
    logprobs, expected = logits.log_softmax(0), 0.0
    for group in map(list, product(range(4), repeat=k)):
        rollout = {"response_mask": mask, "scores": scores[group]}
        rollout |= MODULES["maxrl"].compute_advantages(args, rollout)
        loss, _ = MODULES["maxrl"].policy_loss(args, rollout, logprobs[group].view(k, 1), k, k)
        probability = logprobs[group].sum().exp().item()
        expected = expected - probability * torch.autograd.grad(loss, logits, retain_graph=True)[0]
    failure = 1 - (logprobs.exp() * scores).sum()
    truncated = sum((1 - failure**j) / j for j in range(1, k))
    torch.testing.assert_close(expected, torch.autograd.grad(truncated, logits)[0], **EXACT)


# A policy small enough to write down every response: quarters for the tokens 0, 1, EOS after each prefix.
EOS, T = 2, 3
PROBS = {(): [2, 1, 1], (0,): [1, 1, 2], (1,): [1, 2, 1]}
PROBS |= {(0, 0): [1, 2, 1], (0, 1): [2, 1, 1], (1, 0): [1, 1, 2], (1, 1): [1, 1, 2]}
PREFIXES = list(PROBS)
RESPONSES = [(*prefix, EOS) for prefix in PREFIXES] + list(product((0, 1), repeat=T))
LOGITS = (torch.tensor(list(PROBS.values()), dtype=torch.float64) / 4).log().requires_grad_()
REF_LOGITS = torch.randn(LOGITS.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def scores_of(responses) -> torch.Tensor:
    sums = [sum((t + 1) * (token + 1) for t, token in enumerate(response)) for response in responses]
    return torch.tensor(sums, dtype=torch.float64).mul(7.0).sin()


def log_probs(logits, responses) -> torch.Tensor:
    """(B, T), with 0 after the end of a response and nowhere else."""
    table, rows = logits.log_softmax(-1), []
    for response in responses:
        states = [PREFIXES.index(response[:t]) for t in range(len(response))]
        rows.append(table[states, list(response)])
    return pad_sequence(rows, batch_first=True)


def gradient_of(name: str, args, responses, num_sequences, num_tokens) -> torch.Tensor:
    """The gradient of the script's loss on these responses with respect to the logits."""
    new, ref = log_probs(LOGITS, responses), log_probs(REF_LOGITS, responses)
    rollout = {"response_mask": new != 0, "old_logprobs": new.detach(), "ref_logprobs": ref}
    rollout |= {"kl": new.detach() - ref, "scores": scores_of(responses)}
    rollout["greedy_scores"] = scores_of([(0, EOS)] * len(responses))
    rollout |= MODULES[name].compute_advantages(args, rollout)
    loss, _ = MODULES[name].policy_loss(args, rollout, new, num_sequences, num_tokens)
    return torch.autograd.grad(loss, LOGITS)[0]


def exact_gradient(beta: float) -> torch.Tensor:
    """The gradient of E[score] - beta KL(policy, reference) over whole responses."""
    new, ref = log_probs(LOGITS, RESPONSES).sum(1), log_probs(REF_LOGITS, RESPONSES).sum(1)
    objective = (new.exp() * (scores_of(RESPONSES) - beta * (new - ref))).sum()
    return torch.autograd.grad(objective, LOGITS)[0]


UNBIASED = {"rloo": (2, 1), "remax": (1, 1), "reinforce": (2, 1 / 2), "dr_grpo": (2, 1 / 2 / T)}  # k, factor


@pytest.mark.parametrize("name", UNBIASED)
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_these_are_unbiased(name, beta):
    """The expectation over all groups of k responses, up to a constant factor: (k - 1)/k where a response is part of
    its baseline, and 1/L_max. remax.py's token mean has a random denominator, which is 1 here."""
    k, factor = UNBIASED[name]
    args = make_args(name, kl_coef=beta, samples_per_prompt=k, max_response_length=T)
    probabilities = log_probs(LOGITS, RESPONSES).sum(1).exp().tolist()
    expected = 0.0
    for group in product(zip(RESPONSES, probabilities), repeat=k):
        responses, chances = zip(*group)
        expected = expected - math.prod(chances) * gradient_of(name, args, responses, k, k)
    torch.testing.assert_close(expected, factor * exact_gradient(args.kl_coef), rtol=0, atol=1e-10)


@pytest.mark.parametrize("beta", [0.0, 0.05, 0.5])
def test_reinforce_pp_ascends_reward_minus_beta_kl(beta):
    """Up to the factor of whitening, in a batch of 64 responses that holds each as often as it is probable."""
    batch = []
    for response in RESPONSES:
        quarters = math.prod(PROBS[response[:t]][token] for t, token in enumerate(response))
        batch += [response] * (quarters * 4 ** (T - len(response)))
    args = make_args("reinforce_pp", kl_coef=beta)
    gradient = -gradient_of("reinforce_pp", args, batch, len(batch), sum(map(len, batch)))
    exact = exact_gradient(beta)
    torch.testing.assert_close(gradient / gradient.norm(), exact / exact.norm(), rtol=1e-9, atol=1e-10)
