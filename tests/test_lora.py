"""grpo_lora.py: only the adapter is trained, the frozen model is the reference, and the result is merged."""

import peft
import pytest
import torch
import transformers
from conftest import ROOT, read_jsonl
from zoo import make_model, make_tokenizer, run

import grpo_lora as script


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
