"""Generation, log-probs and micro-batches, in grpo.py, whose functions all policy scripts share, and with a tool.

The log-prob of a sampled token must equal the log-prob of a plain forward pass, for any padding, cache and batch.
"""

import gc

import pytest
import tokenizers
import torch
import transformers
from zoo import ARCHITECTURES, make_model, make_tokenizer, recorded, refused, run, save

import grpo
import ppo
import reinforce_pp_tools

PROMPTS = ["3 + 5 ?", "1 - 2 + 3 - 4 + 5 - 6 ?", "9 ?", "4 + 4 - 4 ?", "3 + 5 ?", "2 ?", "2 - 1 + 8 ?"]
STOP_IDS = [1, 6, 7, 9, 12, 14, 17, 19]
TOKENIZER = make_tokenizer()
IDS = [TOKENIZER(prompt)["input_ids"] for prompt in PROMPTS]


@pytest.fixture(params=ARCHITECTURES)
def model(request):
    model = make_model(request.param)
    model.generation_config.eos_token_id = STOP_IDS
    return model


def generate(model, greedy=False, prompts=IDS, samples=1, tokenizer=TOKENIZER, **flags):
    torch.manual_seed(0)
    return grpo.generate(grpo.Args(device="cpu", **flags), model, tokenizer, prompts, samples, greedy)


def token_logprobs(model, batch, temperature=1.0):
    return grpo.token_logprobs(grpo.Args(temperature=temperature), model, batch)


def loaded(model, folder, **flags):
    save(folder, model, TOKENIZER, model.generation_config.eos_token_id)
    args = grpo.Args(device="cpu", **flags)
    return grpo.load_model(args, str(folder), transformers.AutoModelForCausalLM)[0]


def attended(rollout, i: int) -> torch.Tensor:
    """The ids of prompt and response i, without padding."""
    return rollout["sequences"][i][rollout["attention_mask"][i].bool()]


def plain_logits(model, rollout, i: int) -> torch.Tensor:
    """The logits for the tokens of response i, from one forward pass without padding, mask and cache."""
    n = int(rollout["response_mask"][i].sum())
    with torch.no_grad():
        return model(attended(rollout, i)[None]).logits[0, -n - 1 : -1].float()


def test_log_probs_and_entropy_are_those_of_a_plain_forward(model):
    """Both when they are sampled and when they are computed again, in micro-batches without columns of padding."""
    rollout = generate(model, samples=4, max_response_length=14, temperature=0.6)
    sampled, entropy, mask = rollout["old_logprobs"], rollout["entropy"], rollout["response_mask"]
    assert not any(x.requires_grad for x in rollout.values())
    again, widths = torch.zeros_like(sampled), []
    with torch.no_grad():
        for index, batch in grpo.micro_batches(rollout, torch.arange(28), 8):
            assert len(index) <= 8 and batch["attention_mask"].any(0).all()
            logprobs = token_logprobs(model, batch, 0.6)
            widths.append(logprobs.shape[1])
            again[index, : widths[-1]] = logprobs
    assert widths == sorted(widths) and widths[0] < widths[-1]
    for i, n in enumerate(mask.sum(1)):
        ids = attended(rollout, i)
        assert ids[:-n].tolist() == IDS[i // 4]
        logits = plain_logits(model, rollout, i) / 0.6
        logprobs = logits.log_softmax(-1).gather(1, ids[-n:, None])[:, 0]
        torch.testing.assert_close(sampled[i, :n], logprobs, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(again[i, :n], logprobs, rtol=1e-4, atol=1e-4)
        expected = torch.distributions.Categorical(logits=logits).entropy()
        torch.testing.assert_close(entropy[i, :n], expected, rtol=1e-4, atol=1e-4)
    for x in (sampled, entropy, again):
        assert x.dtype == torch.float32 and (x[~mask] == 0).all()

    greedy = generate(model, greedy=True, max_response_length=14)
    for i, n in enumerate(greedy["response_mask"].sum(1)):
        assert attended(greedy, i)[-n:].tolist() == plain_logits(model, greedy, i).argmax(-1).tolist()


def test_samples_follow_the_softmax_and_not_the_generation_config(tmp_path):
    """The first token is drawn as often as it should be. The generation config would allow only two tokens."""
    model, draws = make_model("llama"), 30_000
    save(tmp_path, model, TOKENIZER)
    rollout = generate(model, prompts=IDS[:1], samples=draws, max_response_length=1, temperature=1.7)
    observed = torch.bincount(rollout["sequences"][:, -1], minlength=model.config.vocab_size)
    expected = draws * (plain_logits(model, rollout, 0)[0] / 1.7).softmax(-1)
    deviations = ((observed - expected) / expected.sqrt())[expected >= 10]
    assert len(deviations) > 10 and deviations.abs().max() < 5


@pytest.mark.parametrize("pad", ["<pad>", "<eos>"])
@pytest.mark.parametrize("stop_ids", [1, [3, 12], None])
def test_the_mask_ends_with_the_first_eos(pad, stop_ids):
    """Even if the pad token is EOS. With a mask of `ids != pad`, the policy would never learn to stop."""
    model, tokenizer = make_model("llama"), make_tokenizer(pad=pad)
    model.generation_config.eos_token_id = stop_ids
    ends = {1} | set(stop_ids if isinstance(stop_ids, list) else [])  # and the EOS of the tokenizer
    rollout = generate(model, samples=20, tokenizer=tokenizer, max_response_length=6)
    masks, truncated = rollout["response_mask"], rollout["truncated"]
    assert torch.equal(masks, rollout["attention_mask"][:, -6:].bool())
    for ids, mask, cut in zip(rollout["sequences"][:, -6:].tolist(), masks, truncated.tolist()):
        n = int(mask.sum())
        assert mask[:n].all() and not ends & set(ids[: n - 1])
        assert cut == (ids[n - 1] not in ends) and (n == 6 or not cut)
    assert 0 < truncated.sum() < len(masks)


def test_a_prompt_is_read_once_and_finished_rows_leave_the_batch():
    model, read = make_model("llama"), []
    model.generation_config.eos_token_id = STOP_IDS
    hook = lambda _, __, inputs: read.append(tuple(inputs["input_ids"].shape))  # noqa: E731
    model.register_forward_pre_hook(hook, with_kwargs=True)
    response_mask = generate(model, prompts=IDS[:2], samples=12, max_response_length=14)["response_mask"]
    assert read[0] == (2, len(IDS[1])) and all(columns == 1 for _, columns in read[1:])
    assert len(read) == response_mask.any(0).sum() and read[-1][0] < 12 < read[1][0]


def test_the_critic_knows_positions_without_padding():
    """With absolute positions, each value of a padded batch is the value of the sequence alone."""
    model, head = make_model("gpt2"), torch.nn.Linear(32, 1, bias=False)
    critic = ppo.Critic({"decoder": model.get_decoder(), "head": head})
    rollout = generate(model, max_response_length=9)
    with torch.no_grad():
        values = critic(rollout)
        for i, n in enumerate(rollout["response_mask"].sum(1)):
            hidden = model.get_decoder()(attended(rollout, i)[None]).last_hidden_state[0, -n - 1 : -1]
            torch.testing.assert_close(values[i, :n], head(hidden)[:, 0], rtol=1e-4, atol=1e-4)


def test_bfloat16_has_a_bfloat16_cache_and_float32_weights_and_log_probs(model, tmp_path):
    half, caches = loaded(model, tmp_path, dtype="bfloat16"), []
    assert {x.dtype for x in half.parameters()} == {torch.float32}
    hook = lambda _, __, inputs: caches.append(inputs["past_key_values"])  # noqa: E731
    handle = half.register_forward_pre_hook(hook, with_kwargs=True)
    rollout = generate(half, samples=4, max_response_length=8, dtype="bfloat16")
    handle.remove()
    layers = [layer for layer in caches[0].layers if getattr(layer, "keys", None) is not None]
    assert {x.dtype for layer in layers for x in (layer.keys, layer.values)} == {torch.bfloat16}
    with torch.no_grad(), grpo.autocast(grpo.Args(dtype="bfloat16", device="cpu")):
        logprobs = token_logprobs(half, rollout)
    exact = grpo.rollout_logprobs(grpo.Args(), model, rollout)
    for x in (logprobs, rollout["old_logprobs"]):
        assert x.dtype == torch.float32 and not torch.equal(x, exact)
        # if two experts are about equal, another one may be chosen
        assert (exact - x)[rollout["response_mask"]].abs().mean() < 0.2


def test_the_reference_has_linear_layers_in_bfloat16_and_the_same_log_probs(model, tmp_path):
    """They are bitwise the same, because autocast rounds the weights in each pass. In float32 it is a copy."""
    half, args = loaded(model, tmp_path, dtype="bfloat16"), grpo.Args(dtype="bfloat16", device="cpu")
    rollout, reference = generate(half, max_response_length=8), grpo.make_reference(args, half)
    found = [grpo.rollout_logprobs(args, x, rollout) for x in (half, reference)]
    assert torch.equal(*found)
    layers = [x for x in reference.modules() if isinstance(x, torch.nn.Linear)]
    is_tied = [x.weight is reference.get_input_embeddings().weight for x in layers]
    assert {x.weight.dtype for x, tied in zip(layers, is_tied) if not tied} <= {torch.bfloat16}
    assert reference.get_input_embeddings().weight.dtype == torch.float32
    exact = grpo.make_reference(grpo.Args(device="cpu"), half)
    assert {x.dtype for x in [*exact.parameters(), *half.parameters()]} == {torch.float32}


def test_only_sampling_keeps_the_weights_that_autocast_has_cast():
    """In training, the cast weights of all layers would stay in memory until the end of the forward pass."""
    args = grpo.Args(dtype="bfloat16", device="cpu")
    with grpo.autocast(args):
        assert torch.is_autocast_enabled("cpu") and not torch.is_autocast_cache_enabled()
    with torch.no_grad(), grpo.autocast(args):
        assert torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()


def test_sampling_does_not_go_through_the_checkpoints(tmp_path, monkeypatch):
    """Checkpoints would cost a quarter of the time of sampling."""
    model = loaded(make_model("llama"), tmp_path, gradient_checkpointing=True)
    calls = recorded(monkeypatch, torch.utils.checkpoint, "checkpoint")
    rollout = generate(model, max_response_length=4)
    assert not calls
    token_logprobs(model, rollout)
    assert len(calls) == 3  # layers


def test_gradient_checkpointing_recomputes_and_changes_nothing(model, tmp_path):
    rollout, gradients, calls = generate(model, max_response_length=10), [], []
    for on in (False, True):
        again = loaded(model, tmp_path / str(on), gradient_checkpointing=on)
        for part in again.modules():
            part.register_forward_pre_hook(lambda *_, on=on: calls.append(on))
        token_logprobs(again, rollout).sum().backward()
        gradients.append(torch.cat([x.grad.flatten() for x in again.parameters() if x.grad is not None]))
    tolerance = 1e-5 * gradients[0].abs().max().item()
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=tolerance)
    assert calls.count(True) > 1.3 * calls.count(False)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_log_probs_are_those_of_sampling_with_dropout_in_the_config(checkpointing, tmp_path):
    """So the first ratio of a rollout is 1. OPT's layers apply dropout according to their own mode."""
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "dropout": 0.5, "init_std": 0.3}
    model = transformers.OPTForCausalLM(transformers.OPTConfig(vocab_size=22, **sizes))
    model = loaded(model, tmp_path, gradient_checkpointing=checkpointing)
    rollout = generate(model, samples=8, max_response_length=8)
    again = token_logprobs(model, rollout)  # with gradients, as in the update
    torch.testing.assert_close(again.detach(), rollout["old_logprobs"], rtol=0, atol=2e-4)


def test_a_step_is_no_longer_than_max_grad_norm_and_leaves_no_gradient():
    layer = torch.nn.Linear(3, 1, bias=False)
    before = layer.weight.detach().clone()
    layer(torch.full((1, 3), 100.0)).sum().backward()
    optimizer = torch.optim.SGD(layer.parameters(), lr=9.0)  # optimizer_step sets the rate
    norm = grpo.optimizer_step(grpo.Args(max_grad_norm=0.1), layer, optimizer, 1.0)
    assert norm > 100 and (layer.weight - before).norm().item() == pytest.approx(0.1, rel=1e-3)
    assert layer.weight.grad is None  # otherwise the next step would add to it


def test_an_update_frees_the_log_probs_of_all_tokens_before_the_next_forward_pass():
    """They are the largest tensor, and two of them at once would raise the peak of memory by a third."""
    model, found = make_model(next(iter(ARCHITECTURES))), []
    rollout = generate(model, max_response_length=8)
    rollout |= {"scores": torch.zeros(len(IDS)), "ref_logprobs": rollout["old_logprobs"]}
    rollout["advantages"] = torch.ones_like(rollout["old_logprobs"])

    def look(*_):
        tensors = [x for x in gc.get_objects() if torch.is_tensor(x)]
        found.extend(x for x in tensors if x.shape[2:] == (model.config.vocab_size,))

    model.register_forward_pre_hook(look)
    state = {"policy": model, "optimizer": torch.optim.AdamW(model.parameters())}
    grpo.update(grpo.Args(device="cpu", micro_batch_size=2, num_minibatches=1), state, rollout, 1.0)
    assert not found


# reinforce_pp_tools.py. The tool is called after every token, and returns up to three tokens, one of them an EOS.

EOS_IDS = [1, 6, 14]
TOOL = """
def tool(text):
    return [None, "7", "7 <eos> =", "8 - 9", "", None, None][sum(map(ord, text)) % 7]
"""


@pytest.fixture
def tool(tmp_path):
    (tmp_path / "tool.py").write_text(TOOL)
    return f"{tmp_path / 'tool.py'}:tool"


with_a_tool = pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mistral", "lfm2", "qwen3_next"])


def generate_with(tool, name, greedy=False, prompts=IDS, k=1, call_end="", tokenizer=TOKENIZER, **flags):
    """A rollout of reinforce_pp_tools.py, and its model."""
    model = make_model(name, vocab_size=max(tokenizer.vocab.values()) + 1)
    model.generation_config.eos_token_id = EOS_IDS
    torch.manual_seed(0)
    args = reinforce_pp_tools.Args(tool=tool, call_end=call_end, **flags)
    reinforce_pp_tools.load_tool(args, tokenizer)
    return reinforce_pp_tools.generate(args, model, tokenizer, prompts, k, greedy), model


def test_the_calculator_adds_and_answers_nothing_else():
    calculate = reinforce_pp_tools.load_function("toy/tools/calculator.py:calculate")
    calls = {"call 4 8 + 7 1 5 =": "7 6 3", "call 5 =": "5", "call 4 + =": None, "call =": None, "5 =": None}
    assert {text: calculate(text) for text in calls} == calls


def plain_greedy(model, prompt, length, max_calls, call_end):
    """One response without a cache and a batch: its ids, which of them are sampled, and whether it ended."""
    names = {}
    exec(TOOL, names)
    ids, sampled, ended, calls = [], [], False, 0
    while len(ids) < length and not ended:
        with torch.no_grad():
            token = int(model(torch.tensor([prompt + ids])).logits[0, -1].argmax())
        ids, sampled = [*ids, token], [*sampled, True]
        answer = None
        if calls < max_calls and (token in EOS_IDS or call_end in TOKENIZER.decode([token])):
            answer = names["tool"](TOKENIZER.decode(ids))
        answer_ids = TOKENIZER(answer or "", add_special_tokens=False)["input_ids"][: length - len(ids)]
        calls += len(answer_ids) > 0
        ended = token in EOS_IDS and not answer_ids
        ids, sampled = ids + answer_ids, sampled + [False] * len(answer_ids)
    return ids, sampled, ended


@with_a_tool
@pytest.mark.parametrize("max_calls, call_end", [(0, ""), (1, ""), (4, ""), (4, "+")])
def test_greedy_responses_with_a_tool_equal_the_plain_loop(name, tool, max_calls, call_end, monkeypatch):
    """So do the masks. EOS calls the tool, too, an answer may contain an EOS, and a finished row calls nothing."""
    calls = recorded(monkeypatch, reinforce_pp_tools, "call_tool")
    flags = {"max_calls": max_calls, "call_end": call_end, "max_response_length": 16}
    rollout, model = generate_with(tool, name, greedy=True, **flags)
    responses = []
    for i, prompt in enumerate(IDS):
        ids, sampled, ended = plain_greedy(model, prompt, 16, max_calls, call_end)
        responses.append(ids)
        assert attended(rollout, i).tolist() == prompt + ids
        assert rollout["response_mask"][i].tolist() == sampled + [False] * (16 - len(sampled))
        assert rollout["attention_mask"][i, -16:].tolist() == [1] * len(ids) + [0] * (16 - len(ids))
        assert bool(rollout["truncated"][i]) != ended
    for (_, _, callers), _ in calls:
        for ids in callers.tolist():
            assert any(ids == response[: len(ids)] for response in responses)


@with_a_tool
def test_log_probs_with_a_tool_are_those_of_the_update(name, tool):
    flags = {"k": 2, "max_response_length": 24, "temperature": 0.8}
    rollout, model = generate_with(tool, name, prompts=IDS * 2, **flags)
    mask = rollout["response_mask"]
    in_answer = rollout["attention_mask"][:, -24:].bool() & ~mask
    assert (in_answer[:, :-1] & mask[:, 1:]).any()  # some rows go on after an answer
    again = reinforce_pp_tools.rollout_logprobs(reinforce_pp_tools.Args(temperature=0.8), model, rollout)
    torch.testing.assert_close(again, rollout["old_logprobs"], rtol=1e-4, atol=1e-4)
    assert (rollout["old_logprobs"][~mask] == 0).all() and (rollout["entropy"][~mask] == 0).all()


def test_a_call_end_is_a_part_of_a_token_or_refused(tmp_path, capsys):
    """For example, `)` is a part of the token `=)`."""
    run("reinforce_pp_tools", call_end="al", num_iterations=1, run_dir=tmp_path / "run")
    assert "--call_end §: " in refused(capsys, run, "reinforce_pp_tools", call_end="§", run_dir=tmp_path)


def test_answers_of_a_tool_become_ids_in_order_and_without_a_bos():
    tokenizer, ids = make_tokenizer(bos=True), [[9], [8]]
    assert reinforce_pp_tools.call_tool(lambda text: None, tokenizer, ids) == [[], []]
    assert reinforce_pp_tools.call_tool(lambda text: int(text), tokenizer, ids) == [[9], [8]]
    assert (
        reinforce_pp_tools.call_tool(lambda text: 0, tokenizer, ids) == [tokenizer("0")["input_ids"][-1:]] * 2
    )


def test_ids_stay_as_they_were_sampled(tool):
    """The tokenizer would encode the text of two ids as one id, but the ids stay two."""
    words = {"<pad>": 0, "<eos>": 1, "a": 2, "b": 3, "ab": 4, "+": 5}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(words, [("a", "b")]))
    core.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    assert tokenizer("ab")["input_ids"] == [4]
    flags = {"tokenizer": tokenizer, "call_end": "+", "max_response_length": 30}
    rollout, _ = generate_with(tool, "llama", prompts=[[2, 3]] * 400, **flags)
    before, after = rollout["sequences"][:, 2:-1], rollout["sequences"][:, 3:]
    assert ((before == 2) & (after == 3)).any()


def test_an_added_token_can_end_a_call(monkeypatch):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["</call>"])
    monkeypatch.setattr(reinforce_pp_tools, "load_function", lambda name: None)
    monkeypatch.setattr(reinforce_pp_tools.load_tool, "end_ids", [], raising=False)
    reinforce_pp_tools.load_tool(reinforce_pp_tools.Args(device="cpu", call_end="</call>"), tokenizer)
    assert reinforce_pp_tools.load_tool.end_ids == [tokenizer.convert_tokens_to_ids("</call>")]
