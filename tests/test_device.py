"""On a GPU, each tensor of the training must be there. These tests notice one on the wrong device without a GPU.

What is made without `device=`, or by .cpu(), is marked as the host's, and so is what is computed from it. As CUDA and
NCCL do, the tests refuse a collective on it, and an operation on both kinds that does not copy, index or take a number.
"""

import importlib

import pytest
from torch import Tensor, device
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from zoo import STAGE_DATA, few, held_out


class Devices(TorchFunctionMode):
    """torch calls it instead of each of its functions."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = [x for x in tree_leaves([args, kwargs]) if isinstance(x, Tensor)]
        on_host = [x for x in inputs if hasattr(x, "is_on_host")]
        may_mix = all(x.dim() == 0 for x in on_host)
        may_mix |= function in (Tensor.copy_, Tensor.__getitem__)
        # A model is copied, or moves to the other kind, which sets the data of its weights.
        may_mix |= function.__name__ in ("__deepcopy__", "_has_compatible_shallow_copy_type", "__set__")
        assert may_mix or len(on_host) == len(inputs), f"{function.__name__} gets tensors of both"
        result = function(*args, **kwargs)
        if function is Tensor.to and any(isinstance(x, device | str) for x in [*args, *kwargs.values()]):
            return result.clone()  # without the mark
        if function is Tensor.cpu or (len(on_host) == len(inputs) and not kwargs.get("device")):
            for x in tree_leaves(result):
                if isinstance(x, Tensor):
                    x.is_on_host = True
        return result


NAMES = "ppo dapo distill gdpo sdpo flash_reinforce grpo_lora reinforce_pp_tools sft reward_model dpo".split()
FLAGS = {name: {} for name in NAMES}
FLAGS["grpo"] = {"reward_zscore": True, "dtype": "bfloat16", "gradient_checkpointing": True}
FLAGS["remax"] = {"reward": "toy/reward_model", "eval_reward": "exact_answer", "missing_eos_penalty": 0.5}


@pytest.mark.parametrize("name", FLAGS)
def test_a_run_that_evaluates_and_resumes_has_all_tensors_on_the_device(name, tmp_path, monkeypatch):
    def all_sum(x):
        assert not hasattr(x, "is_on_host"), "a collective gets a tensor of the host"
        return x

    script, data = importlib.import_module(name), str(few(name, 24, tmp_path))
    monkeypatch.setattr(script, "all_sum", all_sum)
    flags = FLAGS[name] | {"batch_size": 16, "eval_every": 1, "anneal_lr": False, "device": "cpu"}
    flags |= held_out(name, data, 8)
    flags |= {"dataset": data} if name in STAGE_DATA else {"max_response_length": 6}
    for length in (1, 2):
        flags["num_epochs" if name in STAGE_DATA else "num_iterations"] = length
        with Devices():
            script.main(script.Args(**flags, run_dir=f"{tmp_path}/run"))
