"""grpo_lora.py: only the adapter is trained, the frozen model is the reference, and the result is merged."""

import peft
import pytest
import torch
import transformers
from conftest import ROOT, read_jsonl
from zoo import make_model, make_tokenizer, run

import grpo_lora as script

TOKENIZER = make_tokenizer()
IDS = [TOKENIZER(prompt)["input_ids"] for prompt in ("3 + 5 ?", "1 - 2 + 3 - 4 ?", "9 ?")]
ARGS = script.Args(max_response_length=12)


@pytest.fixture(params=["llama", "qwen2", "gpt2", "gemma2"])
def models(request):
    """A model, and a copy of it with an adapter."""
    model, copy = make_model(request.param), make_model(request.param)
    return model, script.add_adapter(ARGS, copy)


def randomize(policy):
    """B is 0 at first."""
    torch.manual_seed(3)
    for name, x in policy.named_parameters():
        if "lora_B" in name:
            x.data = 0.1 * torch.randn_like(x)


def batch_of(model):
    torch.manual_seed(0)
    return script.generate(ARGS, model, TOKENIZER, IDS, samples_per_prompt=2)


def test_a_new_or_disabled_adapter_is_the_model_exactly(models):
    model, policy = models
    batch = batch_of(model)
    with torch.no_grad():
        expected = script.token_logprobs(ARGS, model, batch)
        assert torch.equal(script.token_logprobs(ARGS, policy, batch), expected)
        randomize(policy)
        assert not torch.equal(script.token_logprobs(ARGS, policy, batch), expected)
        with policy.disable_adapter():
            assert torch.equal(script.token_logprobs(ARGS, policy, batch), expected)


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
    assert {layer.scaling["default"] for layer in layers} == {ARGS.lora_alpha / ARGS.lora_rank}
    with with_adapter.disable_adapter():
        assert (merged(ids).logits - with_adapter(ids).logits).abs().max() > 1e-3
