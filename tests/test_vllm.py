"""Tests of grpo_vllm.py: vLLM samples from the current weights of the policy, and returns their log-probs.

`make test-vllm` runs the tests that need vLLM. The last test uses tests/stand_in/vllm.py.
"""

import dataclasses
import sys

import pytest
import torch
import transformers
from conftest import ROOT, launch, words_of, write_jsonl
from driver import without_clock
from zoo import WORDS, make_model, make_tokenizer, refused, run, save

import grpo
import grpo_vllm as script

needs_vllm = pytest.mark.vllm
TOKENIZER = make_tokenizer()
# vLLM caches whole blocks of a prompt, so some prompts are several blocks long, and one prompt occurs twice.
LONG = "1 + 2 - 3 = 4 think 5 + 6 - " * 30
PROMPTS = ("3 + 5 ?", "1 - 2 + 3 - 4 ?", "1 - 2 + 3 - 4 ?", LONG + "7 ?", LONG + "8 - 9 ?")
IDS = [TOKENIZER(prompt)["input_ids"] for prompt in PROMPTS]
ARGS = script.Args(max_response_length=24, temperature=0.7, device="cpu")


def save_llama(folder, tied: bool) -> str:
    """Save a small Llama. Its heads have 32 dimensions, because vLLM needs them on a CPU."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"vocab_size": len(WORDS), "max_position_embeddings": 512, "eos_token_id": 1, "bos_token_id": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, tie_word_embeddings=tied))
    # Its generation config has settings that must be ignored, and an EOS in addition to the tokenizer's, which is 1.
    return save(folder, model, TOKENIZER, stop_ids=[19])


@pytest.fixture(scope="module", params=["untied", "tied"])
def policy(request, tmp_path_factory):
    """The Llama, for which vLLM has been started."""
    folder = save_llama(tmp_path_factory.mktemp(request.param), request.param == "tied")
    args = dataclasses.replace(ARGS, model=folder)
    policy, _ = script.load_model(args, folder, transformers.AutoModelForCausalLM)
    script.start_engine(args, policy, 480)
    yield policy
    script.start_engine.engine.llm_engine.engine_core.shutdown()


@pytest.fixture
def small(tmp_path):
    reward = "def f(completions, **columns): return [len(text) for text in completions]"
    (tmp_path / "mine.py").write_text(reward)
    flags = {"model": save_llama(tmp_path / "start", tied=False), "reward": f"{tmp_path}/mine.py:f"}
    flags |= {"batch_size": 16, "max_response_length": 20, "eval_every": 0, "device": "cpu"}
    return flags | {"learning_rate": 1e-3}


def change(policy):
    """Change the weights of all layers so much that old weights would give other log-probs."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


@needs_vllm
def test_logprobs_are_those_of_the_policy_after_every_sync(policy):
    torch.manual_seed(1)
    for _ in range(4):
        change(policy)
        rollout = script.generate(ARGS, policy, TOKENIZER, IDS, samples_per_prompt=4)
        with torch.no_grad():
            expected = script.token_logprobs(ARGS, policy, rollout)
        assert (rollout["old_logprobs"] - expected).abs().max() < 1e-4
        assert expected.min() < -3  # not all log-probs are near 0


@needs_vllm
def test_greedy_responses_are_those_of_grpo(policy):
    torch.manual_seed(2)
    change(policy)
    ours = script.generate(ARGS, policy, TOKENIZER, IDS, greedy=True)
    expected = grpo.generate(ARGS, policy, TOKENIZER, IDS, greedy=True)
    assert ours.keys() == expected.keys()
    for name in ("sequences", "attention_mask", "response_mask", "truncated"):
        assert torch.equal(ours[name], expected[name]), name


@needs_vllm
def test_stopped_and_resumed_it_ends_with_the_same_bits(small, tmp_path):
    """Each part has its own process, because an engine does not survive the end of an earlier run."""
    for folder, iterations in (("whole", 4), ("resumed", 2), ("resumed", 4)):
        flags = words_of(**small, num_iterations=iterations, run_dir=tmp_path / folder)
        launch("variants/grpo_vllm.py", *flags, cwd=ROOT)
    one, other = (torch.load(tmp_path / x / "checkpoint.pt", weights_only=True) for x in ("whole", "resumed"))
    assert all(torch.equal(x, other["policy"][name]) for name, x in one["policy"].items())
    lines = [without_clock(tmp_path / x / "metrics.jsonl") for x in ("whole", "resumed")]
    assert lines[0] == lines[1] and len(lines[0]) == 4


@needs_vllm
def test_two_ranks(small, tmp_path):
    """Each rank has its own engine, whose first log-probs equal those of the reference, and ends without an error."""
    flags = words_of(**small, num_iterations=2, run_dir=tmp_path / "run")
    assert "Traceback" not in launch("variants/grpo_vllm.py", *flags, ranks=2, cwd=ROOT).stderr
    metrics = without_clock(tmp_path / "run" / "metrics.jsonl")
    assert len(metrics) == 2 and abs(metrics[0]["kl"]) < 1e-5 < abs(metrics[1]["kl"])


@pytest.mark.parametrize("name", ["qwen3_moe", "falcon_h1", "qwen3_next", "lfm2"])
def test_experts_and_recurrent_layers_are_refused(name, capsys):
    """vLLM would go on sampling from old weights of experts on a CPU, and of Mamba layers (vLLM pull request 48284)."""
    assert "experts or Mamba" in refused(capsys, script.start_engine, ARGS, make_model(name), 100)


def test_the_engine_has_room_for_the_longest_held_out_prompt(tmp_path, monkeypatch):
    lengths, files = [], []
    monkeypatch.setattr(script, "start_engine", lambda *args: sys.exit(lengths.append(args[2])))
    for prompt in ("3 ?", "1 + 2 + 3 + 4 ?"):
        files.append(write_jsonl(tmp_path / f"{len(prompt)}.jsonl", [{"prompt": prompt}] * 2))
    for data, held_out in (files, files[::-1]):
        with pytest.raises(SystemExit):
            run("grpo_vllm", dataset=data, eval_dataset=held_out, eval_every=1, run_dir=tmp_path / "run")
    assert lengths == [8 + 8, 8 + 8]


def test_the_engine_has_room_for_a_rollout_and_sleeps_after_it(tmp_path, monkeypatch):
    """Each prompt has its own seed, and ends at each EOS. Log-probs are computed at the temperature."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "stand_in")
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    policy = make_model("qwen2")
    args = dataclasses.replace(ARGS, model=save(tmp_path, policy, TOKENIZER), dtype="bfloat16", batch_size=16)
    policy.generation_config.eos_token_id = [1, 7]
    script.start_engine(args, policy, 480)
    token_size = 2 * 3 * 2 * 8 * 2  # 3 layers, 2 heads of 8, 2 bytes
    engine = script.start_engine.engine
    assert 16 * 496 <= engine.options["kv_cache_memory_bytes"] / token_size <= 16 * 520
    assert engine.options["max_num_seqs"] == 16 and engine.options["logprobs_mode"] == "processed_logprobs"
    seeds = []
    for _ in range(2):
        assert script.generate(args, policy, TOKENIZER, IDS[:2])["old_logprobs"].isfinite().all()
        assert engine.is_asleep
        seeds += [settings.seed for settings in engine.settings]
        assert all({*settings.stop_token_ids} == {1, 7} for settings in engine.settings)
    assert len({*seeds}) == 4
    monkeypatch.delitem(sys.modules, "vllm")
