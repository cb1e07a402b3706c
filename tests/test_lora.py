"""LoRA: only the adapter is trained, the frozen model is the reference, and the result is merged."""

import importlib

import peft
import pytest
import sync
import torch
import transformers
from conftest import ROOT, SOURCES, read_jsonl
from torch.testing import assert_close
from zoo import few, make_model, make_tokenizer, recorded, run, run_stage

import grpo_lora as script

OUTPUTS = {"sft": "completion_loss", "dpo": "response_logprobs", "reward_model": "pair_scores"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run(dtype, tmp_path, capfd):
    """Only the adapter is trained and saved. model/ is the merged model, and peft loads model/adapter."""
    flags = {"max_response_length": 12, "num_iterations": 3, "kl_coef": 0.1, "dtype": dtype}
    run("grpo_lora", **flags, run_dir=tmp_path / "run")
    assert capfd.readouterr().err == ""
    metrics = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    kl = [x["kl"] for x in metrics if "kl" in x]
    assert abs(kl[0]) < (1e-5 if dtype == "float32" else 0.2) and abs(kl[-1]) > 1e-4
    checkpoint = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    adapter = checkpoint["policy"].values()
    assert all(16 in x.shape and x.dtype == torch.float32 for x in adapter)
    assert len(checkpoint["optimizer"]["state"]) == len(adapter) == 2 * 21

    load = transformers.AutoModelForCausalLM.from_pretrained
    weights_dtype = getattr(torch, dtype)
    base = load(ROOT / "toy" / "policy", dtype=weights_dtype)
    with_adapter = peft.PeftModel.from_pretrained(base, tmp_path / "run" / "model" / "adapter").float()
    merged = load(tmp_path / "run" / "model", dtype=torch.float32)
    ids = torch.randint(3, 19, (4, 10))
    torch.testing.assert_close(merged(ids).logits, with_adapter(ids).logits, rtol=1e-4, atol=1e-4)
    layers = [module for module in with_adapter.modules() if isinstance(module, peft.tuners.lora.Linear)]
    assert {layer.scaling["default"] for layer in layers} == {script.Args.lora_alpha / script.Args.lora_rank}
    with with_adapter.disable_adapter():
        assert (merged(ids).logits - with_adapter(ids).logits).abs().max() > 1e-3


def test_the_bits_are_those_of_an_adapter_that_peft_casts_to_float32():
    """Autocast would cast it back."""
    args, tokenizer = script.Args(max_response_length=12, dtype="bfloat16"), make_tokenizer()
    policy, results = script.add_adapter(args, make_model("llama").bfloat16()), []
    layers = [part for part in policy.modules() if isinstance(part, peft.tuners.lora.LoraLayer)]
    for layer in layers:
        assert not layer.cast_input_dtype_enabled
        torch.nn.init.normal_(layer.lora_B["default"].weight)
    batch = script.generate(args, policy, tokenizer, [tokenizer("3 + 5 ?")["input_ids"]], 4)
    for is_cast in (False, True):
        for layer in layers:
            layer.cast_input_dtype_enabled = is_cast
        with torch.no_grad(), script.autocast(args):
            results.append(script.token_logprobs(args, policy, batch))
    assert torch.equal(*results) and results[0].any()


def test_adapter_goes_on_from_an_earlier_one(tmp_path):
    """With its A, B, rank and alpha. The reference stays --model, so that the first KL is not 0."""
    flags = {"max_response_length": 12, "num_iterations": 2, "learning_rate": 0.01}
    run("grpo_lora", **flags, lora_rank=4, lora_alpha=2.0, run_dir=tmp_path / "a")
    adapter = str(tmp_path / "a" / "model" / "adapter")
    load = transformers.AutoModelForCausalLM.from_pretrained
    policy = script.add_adapter(script.Args(adapter=adapter), load(ROOT / "toy" / "policy"))
    ids = torch.randint(3, 19, (4, 10))
    assert_close(policy(ids).logits, load(tmp_path / "a" / "model")(ids).logits, rtol=1e-4, atol=1e-4)
    trained = {name: x for name, x in policy.named_parameters() if x.requires_grad}
    assert len(trained) == 2 * 21 and all("lora_" in name and 4 in x.shape for name, x in trained.items())

    run("grpo_lora", **flags, adapter=adapter, run_dir=tmp_path / "b")
    metrics = read_jsonl(tmp_path / "b" / "metrics.jsonl")
    assert abs(metrics[0]["kl"]) > 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sync.STAGES)
def test_a_stage(name, dtype, tmp_path, monkeypatch):
    """Only A, B and the head of a reward model change. What is trained is what is saved, in float32."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"{name}_lora_{dtype}.py").write_text(sync.combine(name, ["lora"]))
    made = importlib.import_module(f"{name}_lora_{dtype}")
    calls = recorded(monkeypatch, made, "add_adapter")
    outputs = recorded(monkeypatch, made, OUTPUTS[name])
    flags = {
        "model": ROOT / "toy" / "policy",
        "dataset": few(name, 24, tmp_path),
        "run_dir": tmp_path / "run",
    }
    flags |= {"batch_size": 8, "eval_every": 0, "dtype": dtype, "learning_rate": 0.01}
    flags |= {"eval_size": 0} if name == "sft" else {}
    run_stage(made, num_epochs=1, **flags)
    [((_, base, *_), model)] = calls
    assert {x.dtype for _, x in outputs} == {torch.float32}
    trained = {part: x for part, x in model.named_parameters() if x.requires_grad}
    heads = [part for part in trained if "lora_" not in part]
    assert len(trained) == 2 * 21 + len(heads) and len(heads) == (name == "reward_model")
    checkpoint = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    saved = next(iter(checkpoint.values()))
    assert {*saved} == {*trained} and len(checkpoint["optimizer"]["state"]) == len(trained)
    for part, x in saved.items():
        assert x.dtype == torch.float32 and torch.equal(x, trained[part]) and x.any(), part
    load = transformers.AutoModelForCausalLM.from_pretrained
    frozen = load(ROOT / "toy" / "policy", dtype=dtype).state_dict()
    for part, x in model.named_parameters():
        original = part.removeprefix("base_model.model.").replace(".base_layer", "")
        assert part in trained or "score" in part or torch.equal(x, frozen[original]), part

    # model/ is the merged model, and of a reward model it contains the trained head.
    auto_class = getattr(transformers, type(base).__name__)
    merged = auto_class.from_pretrained(tmp_path / "run" / "model", dtype=torch.float32)
    ids = torch.randint(3, 19, (4, 10))
    assert_close(merged(ids).logits, model.float()(ids).logits, rtol=1e-4, atol=1e-4)
    if heads:
        assert torch.equal(merged.score.weight, trained[heads[0]].cpu())
        new = made.load_model(made.Args(device="cpu", model=str(ROOT / "toy" / "policy")))[0]
        assert (merged.score.weight - new.score.weight).abs().max() > 1e-3
        with_adapter = peft.PeftModel.from_pretrained(new, tmp_path / "run" / "model" / "adapter")
        atol = 0.1 if dtype == "bfloat16" else 1e-4  # the weights of --model are rounded
        assert_close(with_adapter(ids).logits, merged(ids).logits, rtol=0.0, atol=atol)


def test_the_reference_of_dpo_is_the_model_without_its_adapter(tmp_path, monkeypatch, load):
    """Also after a resume, when the adapter is no longer 0."""
    monkeypatch.setitem(SOURCES, "dpo_lora", sync.combine("dpo", ["lora"]))
    made, plain = load("dpo_lora"), load("dpo")
    flags = {"batch_size": 8, "eval_every": 0, "learning_rate": 0.01, "dataset": few("dpo", 16, tmp_path)}
    reference = transformers.AutoModelForCausalLM.from_pretrained(ROOT / "toy" / "policy")
    for epochs in (1, 2):
        calls = recorded(monkeypatch, made, "all_logprobs")
        run_stage(made, num_epochs=epochs, **flags, run_dir=tmp_path / "run")
        (args, _, dataset), ref_logprobs = calls[0]
        assert torch.equal(ref_logprobs, plain.all_logprobs(args, reference, dataset))
        assert ref_logprobs.any()
