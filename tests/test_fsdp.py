"""grpo_fsdp.py: each rank keeps its part, and the gradients and weights are grpo.py's."""

import pytest
import torch
import transformers
from conftest import ROOT, launch, read_jsonl, words_of, write_jsonl
from soak import without_clock
from zoo import record


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_gradients_and_norm_are_grpos(ranks, tmp_path):
    """A sum over ranks: AdamW would hide a mean. Clipping is active, and ranks finish responses apart.

    With five held-out prompts on 3 ranks, the last has none in an evaluation.
    """
    heldout = write_jsonl(tmp_path / "heldout.jsonl", read_jsonl(ROOT / "toy" / "heldout.jsonl")[:5])
    flags = {"batch_size": 48, "num_iterations": 3, "max_grad_norm": 0.1}
    flags |= {"eval_dataset": heldout, "eval_every": 2}
    cases = [{"script": name, "sample": True, "flags": flags} for name in ("grpo", "grpo_fsdp")]
    whole, sharded = record(tmp_path, cases, ranks)
    for ours, expected in zip(sharded[0]["gradients"], whole[0]["gradients"], strict=True):
        assert (ours - expected).norm() < 1e-4 * expected.norm()
    for seen in sharded:
        assert seen["digests"] == sharded[0]["digests"]
        assert max(seen["kept"]) <= 1.1 / ranks
        assert max(seen["unsharded"]) == 0  # a whole weight would take memory until the backward pass
    norms = [[x["grad_norm"] for x in seen["metrics"] if "grad_norm" in x] for seen in (whole[0], sharded[0])]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4) and min(norms[0]) > 0.1
    load = transformers.AutoModelForCausalLM.from_pretrained
    one, other = (load(tmp_path / f"seen.run{i}" / "model").state_dict() for i in (0, 1))
    assert one.keys() == other.keys()
    assert all(torch.allclose(x, other[name], rtol=0, atol=1e-6) for name, x in one.items())


def test_killed_and_resumed_on_two_ranks(tmp_path):
    """The checkpoint is whole: it opens without FSDP, and the resumed run ends with the same bits."""
    common = words_of(device="cpu", batch_size=16, save_every=1, eval_every=0, dtype="bfloat16")
    for name, iterations in (("whole", 4), ("resumed", 2), ("resumed", 4)):
        flags = words_of(num_iterations=iterations, run_dir=tmp_path / name)
        launch("grpo_fsdp.py", *common, "--gradient_checkpointing", *flags, ranks=2, cwd=ROOT)
    one, other = (torch.load(tmp_path / x / "checkpoint.pt", weights_only=True) for x in ("whole", "resumed"))
    assert all(torch.equal(x, other["policy"][name]) for name, x in one["policy"].items())
    assert all(x.dtype == torch.float32 for x in one["policy"].values())
    lines = [without_clock(tmp_path / name / "metrics.jsonl") for name in ("whole", "resumed")]
    assert lines[0] == lines[1]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "model")
    assert torch.equal(model.get_input_embeddings().weight, one["policy"]["model.embed_tokens.weight"])


def test_without_torchrun_it_learns_the_toy(tmp_path):
    flags = words_of(num_iterations=40, eval_every=0, device="cpu", run_dir=tmp_path / "run")
    launch("grpo_fsdp.py", *flags, cwd=ROOT)
    scores = [x["score"] for x in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "score" in x]
    assert sum(scores[:3]) / 3 < 0.5 and sum(scores[-3:]) / 3 > 0.8
