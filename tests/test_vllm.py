"""grpo_vllm.py: vLLM samples from the policy as it is now, and says with which log-probs. Run by make test-vllm."""

import copy
import math

import pytest
import torch
import transformers
import variant
from conftest import ROOT, launch, words_of
from resume import without_clock
from zoo import WORDS, make_model, make_tokenizer, run, save

import grpo
import grpo_vllm as script

pytestmark = pytest.mark.vllm
TOKENIZER = make_tokenizer()
# Some prompts have several blocks of vLLM's cache, which keeps whole blocks; one prompt is there twice.
LONG = "1 + 2 - 3 = 4 think 5 + 6 - " * 30
PROMPTS = ("3 + 5 ?", "1 - 2 + 3 - 4 ?", "1 - 2 + 3 - 4 ?", LONG + "7 ?", LONG + "8 - 9 ?")
IDS = [TOKENIZER(prompt)["input_ids"] for prompt in PROMPTS]
ARGS = script.Args(max_response_length=24, temperature=0.7, kv_cache_gib=0.1)


@pytest.fixture(scope="module", params=["untied", "tied"])
def policy(request, tmp_path_factory):
    """A small Llama with heads of 32, and vLLM with its weights."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"vocab_size": len(WORDS), "max_position_embeddings": 512, "eos_token_id": 1, "bos_token_id": 2}
    config = transformers.LlamaConfig(**shape, tie_word_embeddings=request.param == "tied")
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    # With top_k, top_p and penalties to be ignored, and an EOS besides the tokenizer's, which is 1.
    save(folder, transformers.LlamaForCausalLM(config), TOKENIZER, stop_ids=[19])
    args = copy.copy(ARGS)
    args.model = str(folder)
    policy, _ = script.load_model(args, "model", transformers.AutoModelForCausalLM, torch.device("cpu"))
    policy.engine = script.start_engine(args, policy, 480)
    yield policy
    policy.engine.llm_engine.engine_core.shutdown()


def change(policy):
    """Other weights in all layers, so large that another model would be noticed."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


def test_logprobs_are_those_of_the_policy_after_every_sync(policy):
    torch.manual_seed(1)
    for _ in range(4):
        change(policy)
        rollout = script.generate(policy, TOKENIZER, IDS, ARGS, samples_per_prompt=4)
        with torch.no_grad():
            expected = script.token_logprobs(policy, rollout, ARGS.temperature)
        difference = (rollout["old_logprobs"] - expected).abs().max()
        assert difference < 1e-4
        assert expected.min() < -3  # not all of them are near 0


def test_the_output_layer_has_weights_of_its_own(policy):
    """Some CPUs, such as those with AMX, use a packed copy of the weights. vLLM does not update that of a tied one."""
    [is_tied] = policy.engine.apply_model(
        lambda model: model.lm_head.weight is model.model.embed_tokens.weight
    )
    assert not is_tied


def test_greedy_responses_are_those_of_grpo(policy):
    torch.manual_seed(2)
    change(policy)
    ours = script.generate(policy, TOKENIZER, IDS, ARGS, greedy=True)
    expected = grpo.generate(policy, TOKENIZER, IDS, ARGS, greedy=True)
    for name in ("sequences", "attention_mask", "response_mask", "truncated"):
        assert torch.equal(ours[name], expected[name]), name


def test_a_rollout_has_the_shapes_and_masks_of_grpo(policy):
    """Padding is 0, a response is masked after its EOS, and only one without EOS is truncated."""
    torch.manual_seed(3)
    ours = script.generate(policy, TOKENIZER, IDS, ARGS, samples_per_prompt=8)
    theirs = grpo.generate(policy, TOKENIZER, IDS, ARGS, samples_per_prompt=8)
    assert ours.keys() == theirs.keys()
    assert all(x.shape == theirs[name].shape and x.dtype == theirs[name].dtype for name, x in ours.items())
    T = ARGS.max_response_length
    assert torch.equal(ours["sequences"][:, :-T], theirs["sequences"][:, :-T])
    mask = ours["response_mask"]
    ended = torch.zeros(len(mask), dtype=torch.bool)
    for t in range(T):
        assert torch.equal(mask[:, t], ~ended)
        ended |= torch.isin(ours["sequences"][:, t - T], torch.tensor([1, 19]))
    assert torch.equal(ours["truncated"], ~ended) and 0 < ended.sum() < len(ended)
    assert not ours["old_logprobs"][~mask].any() and not ours["sequences"][:, -T:][~mask].any()


def test_seeds(policy):
    """Torch's seed decides the responses. Those to a prompt, or to a prompt that is there twice, all differ."""
    rollouts = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        rollout = script.generate(policy, TOKENIZER, [IDS[0]] * 2, ARGS, samples_per_prompt=8)
        rollouts.append(rollout["sequences"])
    assert torch.equal(rollouts[0], rollouts[1]) and not torch.equal(rollouts[0], rollouts[2])
    assert len(rollouts[0].unique(dim=0)) == 16


def test_the_distribution_that_is_sampled_from(policy):
    """The shares of the first tokens of 4,000 responses are the probabilities at the temperature."""
    torch.manual_seed(7)
    change(policy)
    args = script.Args(max_response_length=1, temperature=0.7)
    rollout = script.generate(policy, TOKENIZER, IDS[:2], args, samples_per_prompt=2000)
    for tokens, ids in zip(rollout["sequences"][:, -1].view(2, -1), IDS):
        logits = policy(torch.tensor([ids])).logits[0, -1] / args.temperature
        shares = tokens.bincount(minlength=len(WORDS)) / len(tokens)
        assert (shares - logits.softmax(-1)).abs().max() < 4 * math.sqrt(0.25 / len(tokens))


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """The toy's policy with heads of 32 instead of 16, which computes the same.

    Rotary frequency i of d is frequency 2i of 2d: each dimension moves to twice its place in its half, and the places
    between are 0. q is multiplied by sqrt(2), since scores are divided by the root of the head size.
    """
    old = transformers.AutoModelForCausalLM.from_pretrained(ROOT / "toy" / "policy", dtype=torch.float32)
    d = old.config.head_dim
    config = copy.deepcopy(old.config)
    config.head_dim = 2 * d
    new = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    places = torch.cat([torch.arange(0, d, 2), torch.arange(d, 2 * d, 2)])
    weights = new.state_dict()
    for name, x in old.state_dict().items():
        if "q_proj" in name or "k_proj" in name or "v_proj" in name:
            heads = torch.zeros(len(x) // d, 2 * d, x.shape[1])
            heads[:, places] = x.view(-1, d, x.shape[1]) * (math.sqrt(2) if "q_proj" in name else 1)
            x = heads.flatten(0, 1)
        if "o_proj" in name:
            heads = torch.zeros(len(x), x.shape[1] // d, 2 * d)
            heads[:, :, places] = x.view(len(x), -1, d)
            x = heads.flatten(1)
        weights[name] = x
    new.load_state_dict(weights)
    ids = torch.randint(0, config.vocab_size, (8, 40))
    torch.testing.assert_close(old(ids).logits, new(ids).logits, rtol=1e-3, atol=1e-3)
    folder = tmp_path_factory.mktemp("toy")
    new.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(ROOT / "toy" / "policy").save_pretrained(folder)
    return folder


def test_it_learns_the_toy(toy, tmp_path):
    """And before the first update, the log-probs are the reference's: the KL is 0."""
    flags = {"batch_size": 128, "max_response_length": 40, "num_iterations": 30, "kv_cache_gib": 0.1}
    run("grpo_vllm", **flags, model=toy, run_dir=tmp_path / "run")
    metrics = without_clock(tmp_path / "run" / "metrics.jsonl")
    scores = [line["score"] for line in metrics]
    assert sum(scores[:3]) / 3 < 0.5 and sum(scores[-3:]) / 3 > 0.7
    assert abs(metrics[0]["kl"]) < 1e-5 and metrics[-1]["kl"] > 1e-3


@pytest.mark.parametrize("name", ["rloo_lora_vllm", "rloo_fsdp_vllm", "remax_vllm", "ppo_vllm", "dapo_vllm"])
def test_other_scripts_take_vllm(name, toy, tmp_path, monkeypatch):
    """After updates, too, the log-probs are the policy's: vLLM has its weights, with the adapter and all parts."""
    source = variant.combine(name.split("_")[0], name.split("_")[1:])
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    run(name, num_iterations=3, max_response_length=20, model=toy, kv_cache_gib=0.1, run_dir=tmp_path / "run")
    metrics = without_clock(tmp_path / "run" / "metrics.jsonl")
    assert all(line["logprob_difference"] < 1e-5 for line in metrics) and metrics[0]["grad_norm"] > 0


def test_stopped_and_resumed_it_ends_with_the_same_bits(toy, tmp_path):
    """With evaluations, whose samples are written too."""
    flags = {"model": toy, "save_every": 1, "eval_every": 2, "log_every": 1, "kv_cache_gib": 0.1}
    run("grpo_vllm", **flags, num_iterations=4, run_dir=tmp_path / "whole")
    run("grpo_vllm", **flags, num_iterations=2, run_dir=tmp_path / "resumed")
    flags |= {"num_iterations": 4, "kv_cache_gib": 0.2, "run_dir": tmp_path / "resumed"}  # another cache
    small = words_of(batch_size=16, max_response_length=8, device="cpu")
    launch("grpo_vllm.py", *words_of(**flags), *small, cwd=ROOT)  # in another process
    one, other = (torch.load(tmp_path / x / "checkpoint.pt", weights_only=True) for x in ("whole", "resumed"))
    assert all(torch.equal(x, other["policy"][name]) for name, x in one["policy"].items())
    metrics = without_clock(tmp_path / "resumed" / "metrics.jsonl")
    assert [line["iteration"] for line in metrics] == [0, 1, 2, 2, 3, 4, 4]  # an evaluation at 0, 2 and 4
    assert without_clock(tmp_path / "whole" / "metrics.jsonl") == metrics
    texts = [(tmp_path / x / "samples.jsonl").read_text() for x in ("whole", "resumed")]
    assert texts[0] == texts[1]


def test_two_ranks(toy, tmp_path):
    """Each has an engine, whose log-probs are the reference's, and which does not complain at the end."""
    flags = {"batch_size": 16, "max_response_length": 20, "num_iterations": 2, "eval_every": 0}
    flags |= {"model": toy, "kv_cache_gib": 0.1, "device": "cpu", "run_dir": tmp_path / "run"}
    assert "Traceback" not in launch("grpo_vllm.py", *words_of(**flags), ranks=2, cwd=ROOT).stderr
    metrics = without_clock(tmp_path / "run" / "metrics.jsonl")
    assert len(metrics) == 2 and abs(metrics[0]["kl"]) < 1e-5 < abs(metrics[1]["kl"])


def test_experts_are_refused(capsys):
    """vLLM would sample from their first weights without a word, at least on a CPU."""
    with pytest.raises(SystemExit) as error:
        script.start_engine(ARGS, make_model("qwen3_moe"), 100)
    assert error.value.code == 2 and "has experts" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, reason",
    [
        ({}, "head_dim=16"),
        ({"model": "widened", "kv_cache_gib": 1e-6}, "--kv_cache_gib"),
        ({"temperature": 0.005}, "--temperature 0.005"),
        ({"temperature": 3}, "--temperature 3"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(flags, reason, toy, tmp_path):
    if "model" in flags:
        flags = flags | {"model": toy}
    command = ["grpo_vllm.py", *words_of(**flags, device="cpu", run_dir=tmp_path / "run")]
    result = launch(*command, check=False, cwd=ROOT)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    [line] = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert reason in line
