"""grpo_fsdp.py: each rank keeps its part, and the gradients and weights are grpo.py's."""

import json
import os
import shutil

import pytest
import safetensors.torch
import torch
import transformers
from conftest import ROOT, launch, read_jsonl, write_jsonl

# The driver records what the optimizer sees in a run of either script, on each rank.
DRIVER = """
import importlib, json, os, sys
import torch
import tyro

name, out, *flags = sys.argv[1:]
script = importlib.import_module(name)
whole = lambda x: x.full_tensor() if hasattr(x, "full_tensor") else x
seen = {"gradients": [], "local": 0, "total": 0, "whole": 0}
clip, load, policy_loss = torch.nn.utils.clip_grad_norm_, script.load, script.policy_loss
models = []

def noted_load(*arguments):
    models.append(load(*arguments))
    return models[-1]

def noted_loss(*arguments):
    "After the forward pass no weight is whole: it would take memory until the backward pass."
    seen["whole"] += sum(not hasattr(x, "to_local") for x in models[0][0].parameters())
    return policy_loss(*arguments)

def record(parameters, max_norm):
    parameters = list(parameters)
    seen["gradients"].append([whole(x.grad).clone() for x in parameters])
    seen["total"] = sum(x.numel() for x in parameters)
    seen["local"] = sum(getattr(x, "to_local", lambda x=x: x)().numel() for x in parameters)
    return clip(parameters, max_norm)

torch.nn.utils.clip_grad_norm_, script.load, script.policy_loss = record, noted_load, noted_loss
args = tyro.cli(script.Args, args=flags, use_underscores=True)
script.main(args)
torch.save(seen, f"{out}.{os.environ.get('RANK', 0)}.pt")
"""
FLAGS = [
    "--device",
    "cpu",
    "--batch_size",
    48,
    "--num_iterations",
    3,
    "--eval_every",
    2,
    "--max_grad_norm",
    0.1,
]


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    path = tmp_path_factory.mktemp("driver") / "driver.py"
    path.write_text(DRIVER)
    return path


@pytest.fixture(scope="module")
def heldout(tmp_path_factory):
    """Five prompts for 3 ranks: an evaluation in which the last rank has no rows."""
    path = tmp_path_factory.mktemp("data") / "heldout.jsonl"
    return write_jsonl(path, read_jsonl(ROOT / "toy" / "heldout.jsonl")[:5])


def record(driver, folder, name, ranks, *flags):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [
        driver,
        name,
        folder / f"{name}{ranks}",
        *FLAGS,
        *flags,
        "--run_dir",
        folder / f"run{name}{ranks}",
    ]
    launch(*command, ranks=ranks, timeout=120, cwd=ROOT, env=env)
    return [torch.load(folder / f"{name}{ranks}.{rank}.pt") for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_gradients_and_norm_are_grpos(ranks, driver, heldout, tmp_path):
    """A sum over ranks: AdamW would hide a mean. Clipping is active, and ranks finish responses apart."""
    flags = ["--eval_dataset", heldout]
    expected = record(driver, tmp_path, "grpo", ranks, *flags)
    sharded = record(driver, tmp_path, "grpo_fsdp", ranks, *flags)
    for seen in sharded:
        for ours, theirs in zip(seen["gradients"], expected[0]["gradients"], strict=True):
            for x, y in zip(ours, theirs, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-5 * float(y.abs().max()) + 1e-7)
        assert seen["local"] <= seen["total"] / ranks * 1.1 and seen["whole"] == 0
    metrics = [read_jsonl(tmp_path / f"run{name}{ranks}" / "metrics.jsonl") for name in ("grpo", "grpo_fsdp")]
    norms = [[x["grad_norm"] for x in lines if "grad_norm" in x] for lines in metrics]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4) and min(norms[0]) > 0.1
    models = [tmp_path / f"run{name}{ranks}" / "model" for name in ("grpo", "grpo_fsdp")]
    one, other = (transformers.AutoModelForCausalLM.from_pretrained(path).state_dict() for path in models)
    assert one.keys() == other.keys()
    assert all(torch.allclose(x, other[name], rtol=0, atol=1e-6) for name, x in one.items())


def test_killed_and_resumed_on_two_ranks(tmp_path):
    """The checkpoint is whole: it opens without FSDP, and the resumed run ends with the same bits."""
    common = ["grpo_fsdp.py", "--device", "cpu", "--batch_size", 16, "--save_every", 1, "--eval_every", 0]
    common += ["--dtype", "bfloat16", "--gradient_checkpointing"]
    launch(*common, "--num_iterations", 4, "--run_dir", tmp_path / "whole", ranks=2, cwd=ROOT)
    for iterations in (2, 4):
        flags = ["--num_iterations", iterations, "--run_dir", tmp_path / "resumed"]
        launch(*common, *flags, ranks=2, cwd=ROOT)
    one, other = (torch.load(tmp_path / x / "checkpoint.pt", weights_only=True) for x in ("whole", "resumed"))
    assert all(torch.equal(x, other["policy"][name]) for name, x in one["policy"].items())
    assert all(x.dtype == torch.float32 for x in one["policy"].values())
    lines = [
        [json.dumps(x | {"tokens_per_second": 0}) for x in read_jsonl(tmp_path / name / "metrics.jsonl")]
        for name in ("whole", "resumed")
    ]
    assert lines[0] == lines[1]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "model")
    assert torch.equal(model.get_input_embeddings().weight, one["policy"]["model.embed_tokens.weight"])


# Runs the script with a Llama that has a weight without a use, and so without a gradient.
WITH_UNUSED = """
import runpy, sys
import torch
import transformers

init = transformers.LlamaForCausalLM.__init__

def with_unused(self, config):
    init(self, config)
    self.unused = torch.nn.Parameter(torch.zeros(3))

transformers.LlamaForCausalLM.__init__ = with_unused
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.long
def test_a_weight_that_nothing_uses_does_not_stop_a_resume(tmp_path):
    """AdamW has no state for it."""
    (tmp_path / "driver.py").write_text(WITH_UNUSED)
    shutil.copytree(ROOT / "toy" / "policy", tmp_path / "model")
    weights = safetensors.torch.load_file(tmp_path / "model" / "model.safetensors")
    weights["unused"] = torch.zeros(3)
    safetensors.torch.save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    flags = ["--model", tmp_path / "model", "--device", "cpu", "--batch_size", 16, "--eval_every", 0]
    for iterations in (1, 2):
        flags += ["--num_iterations", iterations, "--run_dir", tmp_path / "run"]
        launch(tmp_path / "driver.py", ROOT / "grpo_fsdp.py", *flags, ranks=2, cwd=ROOT)
    assert "unused" in torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["policy"]


def test_without_torchrun_it_learns_the_toy(tmp_path):
    launch(
        "grpo_fsdp.py",
        "--num_iterations",
        40,
        "--eval_every",
        0,
        "--device",
        "cpu",
        "--run_dir",
        tmp_path / "run",
        cwd=ROOT,
    )
    scores = [x["score"] for x in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "score" in x]
    assert sum(scores[:3]) / 3 < 0.5 and sum(scores[-3:]) / 3 > 0.8
