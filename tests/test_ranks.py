"""Micro-batches and ranks change memory and time, never a gradient: a script's own main, on a fixed rollout."""

import dataclasses
import importlib
from itertools import chain

import pytest
import torch
from conftest import POLICY_SCRIPTS, ROOT, SKELETONS, launch, write_jsonl
from driver import record

DRIVER = ROOT / "tests" / "driver.py"
COMMON = ["--num_iterations", "1", "--batch_size", "16", "--max_grad_norm", "1e9"]
COMMON += ["--ref_model", str(ROOT / "toy" / "base"), "--reward", f"{DRIVER}:reward", "--eval_every", "0"]


def drive(tmp_path, script: str, dtype: str, *flags) -> list[dict]:
    """The record of each of two ranks."""
    launch(DRIVER, tmp_path / "seen", script, dtype, "--runs_dir", tmp_path / "runs", *flags, ranks=2)
    return [torch.load(tmp_path / f"seen.{rank}.pt") for rank in range(2)]


def distance(one: list, other: list) -> float:
    """Relative, over the whole gradient."""
    one, other = (torch.cat([x.flatten() for x in gradient]) for gradient in (one, other))
    return float((one - other).norm() / one.norm())


CASES = [("float64", 1e-12, 0.3, name) for name in POLICY_SCRIPTS] + [("float32", 1e-6, 0.01, s) for s in SKELETONS]


@pytest.mark.parametrize("dtype, tolerance, beta, name", CASES)
def test_gradient_does_not_depend_on_micro_batches_or_ranks(tmp_path, name, dtype, tolerance, beta):
    script = importlib.import_module(name)
    flags = [*COMMON, "--kl_coef", beta, "--runs_dir", tmp_path / "runs"]
    if any(field.name == "num_minibatches" for field in dataclasses.fields(script.Args)):
        flags += ["--num_minibatches", 1]  # rank by rank, minibatches would be others
    whole = record(script, dtype, *flags, "--micro_batch_size", 16)
    gradient = [*chain(*whole["gradients"])]  # of the policy, and in ppo of the critic
    assert max(float(g.abs().max()) for g in gradient) > 1e-3
    for size in (1, 4):
        pieces = record(script, dtype, *flags, "--micro_batch_size", size)
        assert distance(gradient, [*chain(*pieces["gradients"])]) < tolerance

    ranks = drive(tmp_path, name, dtype, *flags, "--micro_batch_size", 3)
    tokens = [int((rank["advantages"][0] != 0).sum()) for rank in ranks]
    assert tokens[0] != tokens[1]  # were they equal, denominators per rank would pass
    for rank in ranks:
        assert distance(gradient, [*chain(*rank["gradients"])]) < tolerance
    both = torch.cat([rank["advantages"][0].flatten() for rank in ranks])
    one = whole["advantages"][0].flatten()
    torch.testing.assert_close(
        one[one != 0].sort()[0], both[both != 0].sort()[0], rtol=0, atol=max(tolerance, 1e-5 * (dtype == "float32"))
    )


@pytest.mark.parametrize("script", ["reinforce_pp", "ppo"])
def test_ranks_sample_apart_and_stay_equal(tmp_path, script):
    """Real sampling, several steps: different prompts and draws on each rank, the same parameters to the last bit."""
    flags = ["--num_iterations", "3", "--batch_size", "16", "--eval_every", "0", "--sample"]
    one, other = drive(tmp_path, script, "float32", *flags)
    for mine, yours in zip(one["prompts"], other["prompts"]):
        rows = [{tuple(row.tolist()) for row in sequences} for sequences in (mine, yours)]
        assert not rows[0] & rows[1]
    assert all(map(torch.equal, one["parameters"], other["parameters"]))
    assert len(one["gradients"]) >= 3


def test_ranks_with_the_same_prompts_draw_different_responses(tmp_path):
    """A dataset of one prompt repeated: what differs between the ranks can only be the draw."""
    data = write_jsonl(tmp_path / "same.jsonl", [{"prompt": "3 + 5 - 2 + 4 ?", "answer": "0"}] * 64)
    flags = ["--num_iterations", "1", "--batch_size", "64", "--eval_every", "0", "--sample", "--temperature", "2"]
    one, other = drive(tmp_path, "reinforce_pp", "float32", *flags, "--dataset", data)
    assert one["prompts"][0].shape != other["prompts"][0].shape or not torch.equal(
        one["prompts"][0], other["prompts"][0]
    )
