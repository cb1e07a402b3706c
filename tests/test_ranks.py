"""Micro-batches and ranks change memory and time, never a gradient: a script's own main, on a fixed rollout."""

import dataclasses
import importlib
from itertools import chain

import pytest
import torch
from conftest import POLICY_SCRIPTS, ROOT, SKELETONS, launch, the_run, write_jsonl
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


@pytest.mark.parametrize("name", ["reinforce_pp", "ppo"])
def test_a_shared_optimizer_changes_memory_and_nothing_else(tmp_path, name):
    """Weights of the run and its checkpoint are those of whole optimizers to the last bit,
    also over --resume."""
    small = "--batch_size 16 --max_response_length 12 --eval_every 0 --num_samples 0".split()
    script, runs = ROOT / f"{name}.py", {}
    for kind, flags in {"whole": [], "shared": ["--shard_optimizer"]}.items():
        launch(script, *small, *flags, "--runs_dir", tmp_path / kind, "--num_iterations", 2, ranks=2)
        runs[kind] = the_run(tmp_path / kind)
        flags = [*small, *flags, "--runs_dir", tmp_path / kind, "--resume", runs[kind], "--num_iterations", 3]
        launch(script, *flags, ranks=2)
    states = [torch.load(run / "checkpoints" / "000003.pt", weights_only=True) for run in runs.values()]
    for key in [key for key in states[0] if key.endswith("optimizer")]:
        one, other = (state[key]["state"] for state in states)
        assert one.keys() == other.keys() and len(one) > 10
        for index, moments in one.items():
            assert all(torch.equal(x, other[index][moment]) for moment, x in moments.items())
    for key in ("policy", "critic"):
        for weight, x in states[0].get(key, {}).items():
            assert torch.equal(x, states[1][key][weight])


def test_each_rank_keeps_a_share_of_the_optimizer(tmp_path):
    (tmp_path / "count.py").write_text(
        "import os, sys, torch, torch.distributed as dist\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import grpo\n"
        "dist.init_process_group('gloo')\n"
        "model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(8)])\n"
        "for x in model.parameters(): x.grad = torch.ones_like(x)\n"
        "optimizer = grpo.make_optimizer(grpo.Args(shard_optimizer=True), model, 1e-3, 2)\n"
        "optimizer.step()\n"
        "sizes = [x.numel() for state in optimizer.optim.state.values() for x in state.values()]\n"
        "print('share', sum(sizes) / sum(2 * x.numel() for x in model.parameters()), flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    output = launch(tmp_path / "count.py", ranks=2).stdout
    shares = [float(line.split()[1]) for line in output.splitlines() if line.startswith("share")]
    assert len(shares) == 2 and all(0.4 < share < 0.6 for share in shares)
