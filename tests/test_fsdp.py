"""grpo_fsdp.py: each rank keeps its part, and the gradients and weights are grpo.py's. One launch for all runs."""

import pytest
import torch
import transformers
from conftest import ROOT, read_jsonl, write_jsonl
from resume import without_clock
from zoo import record


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder, and what the ranks saw of grpo.py and of grpo_fsdp.py; the third run is stopped and resumed as well.

    Clipping is active, and ranks finish responses apart. Of five held-out prompts, one rank has more.
    """
    folder = tmp_path_factory.mktemp("fsdp")
    heldout = write_jsonl(folder / "heldout.jsonl", read_jsonl(ROOT / "toy" / "heldout.jsonl")[:5])
    common = {"batch_size": 48, "num_iterations": 3, "max_response_length": 12}
    flags = common | {"max_grad_norm": 0.1, "eval_dataset": heldout, "eval_every": 2}
    half = common | {"dtype": "bfloat16", "gradient_checkpointing": True, "eval_every": 0}
    stopped = half | {"run_dir": folder / "resumed", "num_iterations": 2}
    resumed = half | {"run_dir": folder / "resumed"}
    cases = [{"script": "grpo", "sample": True, "flags": flags}]
    for its_flags in (flags, half | {"run_dir": folder / "whole"}, stopped, resumed):
        cases.append({"script": "grpo_fsdp", "sample": True, "flags": its_flags})
    whole, sharded, *_ = record(folder, cases, ranks=2)
    return folder, whole, sharded


def test_gradients_and_norm_are_grpos(runs):
    """A sum over ranks: AdamW would hide a mean."""
    folder, whole, sharded = runs
    for ours, expected in zip(sharded[0]["gradients"], whole[0]["gradients"], strict=True):
        assert (ours - expected).norm() < 1e-4 * expected.norm()
    for seen in sharded:
        assert seen["digests"] == sharded[0]["digests"]
        assert max(seen["unsharded"]) == 0  # a whole weight would take memory until the backward pass
    norms = [[x["grad_norm"] for x in seen["metrics"] if "grad_norm" in x] for seen in (whole[0], sharded[0])]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4) and min(norms[0]) > 0.1
    load = transformers.AutoModelForCausalLM.from_pretrained
    one, other = (load(folder / f"seen.run{i}" / "model").state_dict() for i in (0, 1))
    assert one.keys() == other.keys()
    assert all(torch.allclose(x, other[name], rtol=0, atol=1e-6) for name, x in one.items())


def test_resumed_on_all_ranks(runs):
    """The checkpoint is whole: it opens without FSDP, and the resumed run ends with the same bits."""
    folder, _, _ = runs
    one, other = (torch.load(folder / x / "checkpoint.pt", weights_only=True) for x in ("whole", "resumed"))
    assert all(torch.equal(x, other["policy"][name]) for name, x in one["policy"].items())
    assert all(x.dtype == torch.float32 for x in one["policy"].values())
    lines = [without_clock(folder / name / "metrics.jsonl") for name in ("whole", "resumed")]
    assert lines[0] == lines[1] and len(lines[0]) == 3
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "whole" / "model")
    assert torch.equal(model.get_input_embeddings().weight, one["policy"]["model.embed_tokens.weight"])
