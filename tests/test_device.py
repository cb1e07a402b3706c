"""On a GPU, each tensor of the training must be there. These tests notice one on the wrong device without a GPU.

All tensors are in the CPU's memory. One that is made without `device=`, or by .cpu(), is marked as the host's, and so
is what is computed from it. `.to(device)` gives one without the mark. As CUDA and NCCL do, the tests refuse an
operation on tensors of both kinds, unless it copies or the host's is a number or an index, and a collective on the
host's.
"""

import importlib

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, read_jsonl, write_jsonl
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


def is_on_host(x) -> bool:
    return getattr(x, "is_on_host", False)


class Devices(TorchFunctionMode):
    """torch calls it instead of each of its functions."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = [x for x in tree_leaves([args, kwargs]) if isinstance(x, torch.Tensor)]
        on_host = [x for x in inputs if is_on_host(x)]
        on_device = [x for x in inputs if not is_on_host(x)]
        is_index = function is torch.Tensor.__getitem__ and not is_on_host(args[0])
        may_mix = function is torch.Tensor.copy_ or is_index or all(x.dim() == 0 for x in on_host)
        if on_host and on_device and not may_mix:
            raise RuntimeError(f"{function.__name__} gets tensors of the device and of the host")

        result = function(*args, **kwargs)
        names_device = any(isinstance(x, torch.device | str) for x in [*args, *kwargs.values()])
        if function is torch.Tensor.to and names_device:
            return result.clone() if on_host else result  # without the mark
        if function is torch.Tensor.cpu or not (on_device or kwargs.get("device")):
            for x in tree_leaves(result):
                if isinstance(x, torch.Tensor):
                    x.is_on_host = True
        return result


def all_reduce(x):
    """Stands in for torch's, on one rank."""
    if is_on_host(x):
        raise RuntimeError("a collective gets a tensor of the host")


EVALUATED = {"batch_size": 16, "max_response_length": 6, "eval_dataset": "heldout.jsonl", "eval_every": 1}
EVALUATED["missing_eos_penalty"] = 0.5
PAIRS = {"dataset": "preferences_train.jsonl", "eval_dataset": "preferences_heldout.jsonl"}
STAGES = {"reward_model": PAIRS, "dpo": PAIRS, "sft": {"dataset": "demonstrations.jsonl", "eval_size": 8}}
NAMES = "ppo dapo distill gdpo sdpo flash_reinforce grpo_lora reinforce_pp_tools".split()
CASES = dict.fromkeys(NAMES, EVALUATED)
CASES |= {name: flags | {"batch_size": 8, "anneal_lr": False} for name, flags in STAGES.items()}
CASES["grpo"] = EVALUATED | {"reward_zscore": True, "reward_clip": 1.5}
CASES["grpo bfloat16"] = EVALUATED | {"dtype": "bfloat16", "gradient_checkpointing": True}
CASES["remax"] = EVALUATED | {"reward": "toy/reward_model", "eval_reward": "exact_answer"}


@pytest.mark.parametrize("case", CASES)
def test_a_run_and_its_resume_have_all_tensors_on_the_device(case, tmp_path, monkeypatch):
    """It evaluates, stops half-way and resumes. all_sum runs as on several ranks."""
    script = importlib.import_module(case.split()[0])
    flags = dict(CASES[case])
    for flag in ("dataset", "eval_dataset"):
        if flag in flags:
            rows = read_jsonl(ROOT / "toy" / flags[flag])[:16]
            flags[flag] = str(write_jsonl(tmp_path / flags[flag], rows))
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    for length in (1, 2):
        flags["num_epochs" if case in STAGES else "num_iterations"] = length
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            with Devices():
                script.main(script.Args(**flags, device="cpu", run_dir=str(tmp_path / "run")))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    assert (tmp_path / "run" / "model").exists()
