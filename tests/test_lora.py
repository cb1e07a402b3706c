"""Tests of LoRA: only the adapter is trained, the frozen model is the reference, and the saved model is merged."""

import peft
import pytest
import sync
import torch
import transformers
import zoo
from conftest import ROOT, SOURCES, read_jsonl
from torch.testing import assert_close
from zoo import few, recorded, run, run_stage

import grpo_lora

OUTPUTS = {"sft": "completion_loss", "dpo": "response_logprobs", "reward_model": "pair_scores"}
TOY = ROOT / "toy" / "policy"
load_lm = transformers.AutoModelForCausalLM.from_pretrained


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["grpo", *sync.STAGES])
def test_only_the_adapter_is_trained_and_the_saved_model_is_merged(
    name, dtype, tmp_path, monkeypatch, load, capfd
):
    """In a reward model, the head is trained too. What is trained is what is saved, in float32."""
    monkeypatch.setitem(SOURCES, f"{name}_lora", sync.combine(name, ["lora"]))
    made = load(f"{name}_lora")
    calls = recorded(monkeypatch, made, "add_adapter")
    outputs = recorded(monkeypatch, made, OUTPUTS.get(name, "log_distribution"))
    flags = {"run_dir": tmp_path / "run", "learning_rate": 0.01, "dtype": dtype, "eval_every": 0}
    if name == "grpo":
        run(made.__name__, **flags, max_response_length=12, num_iterations=3, kl_coef=0.1)
        kl = [line["kl"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
        assert abs(kl[0]) < (1e-5 if dtype == "float32" else 0.2) and abs(kl[-1]) > 1e-4
    else:
        flags |= {"model": TOY, "dataset": few(name, 24, tmp_path), "batch_size": 8, "num_epochs": 1}
        run_stage(made, **flags, **({"eval_size": 0} if name == "sft" else {}))
    assert capfd.readouterr().err == "" and {x.dtype for _, x in outputs} == {torch.float32}
    [((_, base, *_), model)] = calls
    trained = {part: x for part, x in model.named_parameters() if x.requires_grad}
    heads = [part for part in trained if "lora_" not in part]
    assert len(trained) == 2 * 21 + len(heads) and len(heads) == (name == "reward_model")
    checkpoint = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    saved = next(iter(checkpoint.values()))
    assert {*saved} == {*trained} and len(checkpoint["optimizer"]["state"]) == len(trained)
    for part, x in saved.items():
        assert x.dtype == torch.float32 and torch.equal(x, trained[part]) and x.any(), part
    frozen = load_lm(TOY, dtype=dtype).state_dict()
    for part, x in model.named_parameters():
        original = part.removeprefix("base_model.model.").replace(".base_layer", "")
        assert part in trained or "score" in part or torch.equal(x, frozen[original]), part

    # model/ contains the merged model, and model/adapter the adapter for --model.
    auto_class = getattr(transformers, type(base).__name__)
    merged = auto_class.from_pretrained(tmp_path / "run" / "model", dtype=torch.float32)
    ids = torch.randint(3, 19, (4, 10))
    assert_close(merged(ids).logits, model.float()(ids).logits, rtol=1e-4, atol=1e-4)
    new = made.load_model(made.Args(device="cpu", model=str(TOY)))[0] if heads else load_lm(TOY, dtype=dtype)
    with_adapter = peft.PeftModel.from_pretrained(new, tmp_path / "run" / "model" / "adapter").float()
    atol = (
        0.1 if heads and dtype == "bfloat16" else 1e-4
    )  # in `new`, weights of a reward model are not rounded
    assert_close(with_adapter(ids).logits, merged(ids).logits, rtol=0.0, atol=atol)
    with with_adapter.disable_adapter():
        assert (merged(ids).logits - with_adapter(ids).logits).abs().max() > 1e-3


def test_a_run_can_continue_an_earlier_adapter(tmp_path):
    """It keeps its A, B, rank and alpha. The reference is still --model, so the first KL is not 0."""
    flags = {"max_response_length": 12, "num_iterations": 2, "learning_rate": 0.01}
    run("grpo_lora", **flags, lora_rank=4, lora_alpha=2.0, run_dir=tmp_path / "a")
    adapter = str(tmp_path / "a" / "model" / "adapter")
    policy = grpo_lora.add_adapter(grpo_lora.Args(adapter=adapter), load_lm(TOY))
    ids = torch.randint(3, 19, (4, 10))
    assert_close(policy(ids).logits, load_lm(tmp_path / "a" / "model")(ids).logits, rtol=1e-4, atol=1e-4)
    assert not any(layer.training for layer in policy.modules())
    trained = {name: x for name, x in policy.named_parameters() if x.requires_grad}
    assert len(trained) == 2 * 21 and all("lora_" in name and 4 in x.shape for name, x in trained.items())

    run("grpo_lora", **flags, adapter=adapter, run_dir=tmp_path / "b")
    assert abs(read_jsonl(tmp_path / "b" / "metrics.jsonl")[0]["kl"]) > 1e-3


def test_a_run_keeps_what_else_an_earlier_adapter_trains(tmp_path, capsys):
    """An adapter of peft can have dropout, and train whole layers. A resumed run has their weights again."""
    config = peft.LoraConfig(target_modules="all-linear", modules_to_save=["norm"], lora_dropout=0.5)
    peft.get_peft_model(load_lm(TOY), config).save_pretrained(tmp_path / "adapter")
    flags = {
        "adapter": tmp_path / "adapter",
        "max_response_length": 8,
        "learning_rate": 0.01,
        "save_every": 1,
    }
    run("grpo_lora", **flags, num_iterations=3, run_dir=tmp_path / "whole")
    assert f"was trained for {TOY}, and not for toy/policy" in capsys.readouterr().out
    run("grpo_lora", **flags, num_iterations=2, run_dir=tmp_path / "parts")
    run("grpo_lora", **flags, num_iterations=3, run_dir=tmp_path / "parts")
    zoo.assert_same_run(tmp_path / "whole", tmp_path / "parts")
    assert all(line["logprob_difference"] < 1e-5 for line in read_jsonl(tmp_path / "whole" / "metrics.jsonl"))


def test_the_reference_of_dpo_is_the_model_without_its_adapter(tmp_path, monkeypatch, load):
    """This also holds after a resume, when B is no longer 0."""
    monkeypatch.setitem(SOURCES, "dpo_lora", sync.combine("dpo", ["lora"]))
    made, plain = load("dpo_lora"), load("dpo")
    flags = {"batch_size": 8, "eval_every": 0, "learning_rate": 0.01, "dataset": few("dpo", 16, tmp_path)}
    for epochs in (1, 2):
        calls = recorded(monkeypatch, made, "all_logprobs")
        run_stage(made, num_epochs=epochs, **flags, run_dir=tmp_path / "run")
        (args, _, dataset), ref_logprobs = calls[0]
        assert torch.equal(ref_logprobs, plain.all_logprobs(args, load_lm(TOY), dataset))
        assert ref_logprobs.any()
