"""Generation, log-probs and micro-batches, in grpo.py: all policy scripts have the same functions.

A sampled token's log-prob must be that of a plain forward pass, whatever padding, cache and batch are.
"""

import math
from collections import Counter

import pytest
import torch
import transformers
from conftest import read_jsonl, write_jsonl
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import ARCHITECTURES, make_model, make_tokenizer, run, save

import grpo
import ppo

CPU = torch.device("cpu")
PROMPTS = ["3 + 5 ?", "1 - 2 + 3 - 4 + 5 - 6 ?", "9 ?", "4 + 4 - 4 ?", "3 + 5 ?", "2 ?", "2 - 1 + 8 ?"]
STOP_IDS = [1, 6, 7, 9, 12, 14, 17, 19]
NO_FLOAT64 = {"gemma2", "bloom", "qwen3_moe", "qwen3_next"}  # they give NaN in it, or have no kernel for it
TOKENIZER = make_tokenizer()
IDS = [TOKENIZER(prompt)["input_ids"] for prompt in PROMPTS]


@pytest.fixture(params=ARCHITECTURES)
def model(request):
    model = make_model(request.param)
    model.generation_config.eos_token_id = STOP_IDS
    return model


def generate(model, greedy=False, prompts=IDS, samples=1, tokenizer=TOKENIZER, **flags):
    torch.manual_seed(0)
    return grpo.generate(model, tokenizer, prompts, grpo.Args(**flags), samples, greedy=greedy)


def loaded(model, folder, **flags):
    """The model after the script's own load."""
    save(folder, model, TOKENIZER, model.generation_config.eos_token_id)
    args = grpo.Args(model=str(folder), **flags)
    return grpo.load(args, transformers.AutoModelForCausalLM, "model", args.model, CPU)[0]


def attended(rollout, i: int) -> torch.Tensor:
    """The ids of prompt and response i, without padding."""
    return rollout["sequences"][i][rollout["attention_mask"][i].bool()]


def with_holes(rollout: dict) -> dict:
    """The rollout as a tool would make it: some tokens of each response are attended to and not sampled."""
    B, T = rollout["response_mask"].shape
    is_answer = torch.arange(T) % (2 + torch.arange(B)[:, None] % 3) == 1  # more in some rows than in others
    return rollout | {"response_mask": rollout["response_mask"] & ~is_answer}


def gradients(model, loss: torch.Tensor) -> dict:
    model.zero_grad()
    loss.backward()
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def assert_same_gradients(one: dict, other: dict, tolerance: float):
    """The tolerance is a share of the largest number."""
    scale = max(float(x.abs().max()) for x in other.values())
    assert one.keys() == other.keys() and len(one) > 10 and scale > 0
    for name, x in other.items():
        torch.testing.assert_close(one[name], x, rtol=0, atol=tolerance * scale)


def test_log_probs_and_entropy_are_those_of_a_plain_forward(model):
    """One sequence at a time, without padding, mask, cache and batch."""
    rollout = generate(model, samples=4, max_response_length=14, temperature=0.6)
    sampled, entropy, mask = rollout["old_logprobs"], rollout["entropy"], rollout["response_mask"]
    lengths = mask.sum(1).tolist()
    assert len(set(lengths)) > 2
    assert not any(x.requires_grad or x.is_inference() for x in rollout.values())  # the update can use them
    with torch.no_grad():
        again = grpo.token_logprobs(model, rollout, 0.6)
        for i, n in enumerate(lengths):
            ids = attended(rollout, i)
            assert ids[:-n].tolist() == IDS[i // 4]
            logits = model(ids[None]).logits[0, -n - 1 : -1].float() / 0.6
            logprobs = logits.log_softmax(-1).gather(1, ids[-n:, None])[:, 0]
            torch.testing.assert_close(sampled[i, :n], logprobs, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(again[i, :n], logprobs, rtol=1e-4, atol=1e-4)
            expected = torch.distributions.Categorical(logits=logits).entropy()
            torch.testing.assert_close(entropy[i, :n], expected, rtol=1e-4, atol=1e-4)
    for x in (sampled, entropy, again):
        assert x.dtype == torch.float32 and (x[~mask] == 0).all()


def test_greedy_is_that_of_transformers(model):
    """Prompt by prompt, with several EOS ids, so that rows leave the batch at different times."""
    stop_ids = STOP_IDS[::3]  # with all of them a small random model stops at once
    model.generation_config.eos_token_id = stop_ids
    rollout = generate(model, greedy=True, max_response_length=14)
    for i, prompt in enumerate(IDS):
        options = {"do_sample": False, "max_new_tokens": 14, "eos_token_id": stop_ids, "pad_token_id": 0}
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0]
        assert attended(rollout, i).tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_samples_follow_the_softmax_and_not_the_generation_config(name, tmp_path):
    """Chi-square of pairs of tokens. The generation config would allow two tokens only."""
    model, temperature, draws = make_model(name), 1.7, 30_000
    save(tmp_path, model, TOKENIZER)
    prompt, vocabulary = IDS[0], model.config.vocab_size
    rollout = generate(model, prompts=[prompt], samples=draws, max_response_length=2, temperature=temperature)
    pairs = rollout["sequences"][:, -2:]
    observed = torch.zeros(vocabulary, vocabulary)
    observed.index_put_((pairs[:, 0], pairs[:, 1]), torch.tensor(1.0), accumulate=True)
    with torch.no_grad():
        first = (model(torch.tensor([prompt])).logits[0, -1] / temperature).softmax(-1)
        after = torch.tensor([[*prompt, token] for token in range(vocabulary)])
        second = (model(after).logits[:, -1] / temperature).softmax(-1)
    second[1] = torch.eye(vocabulary)[0]  # after EOS there is padding
    expected = draws * first[:, None] * second
    enough = expected >= 5
    statistic, dof = float(((observed - expected).square() / expected)[enough].sum()), int(enough.sum())
    bound = dof * (1 - 2 / (9 * dof) + 4.75 * math.sqrt(2 / (9 * dof))) ** 3  # Wilson-Hilferty, 4.75 sigma
    assert dof > 50 and statistic < bound
    assert (rollout["response_mask"].sum(1) == 1).sum() == observed[1].sum()


@pytest.mark.parametrize("pad", ["<pad>", "<eos>", None])
@pytest.mark.parametrize("stop_ids", [1, [3, 12], None])
def test_the_mask_ends_with_the_first_eos(pad, stop_ids):
    """Also where pad is EOS: with a mask of `ids != pad` the policy would never learn to stop."""
    model, tokenizer = make_model("llama", seed=5), make_tokenizer(pad=pad)
    model.generation_config.eos_token_id = stop_ids
    ends = {1} | set(stop_ids if isinstance(stop_ids, list) else [])  # the tokenizer's too
    rollout = generate(model, samples=20, tokenizer=tokenizer, max_response_length=6)
    masks, truncated, T = rollout["response_mask"], rollout["truncated"], rollout["response_mask"].shape[1]
    assert torch.equal(masks, rollout["attention_mask"][:, -T:].bool())
    for ids, mask, cut in zip(rollout["sequences"][:, -T:].tolist(), masks, truncated.tolist()):
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
    assert read[0] == (2, len(IDS[1])) and len(read) == response_mask.any(0).sum()
    for (rows, columns), running in zip(read[1:], response_mask.sum(0)[1:].tolist()):
        assert columns == 1 and running <= rows and 0.75 * rows < max(running, 1) + 1
    assert read[-1][0] < 12


@pytest.mark.parametrize("holes", [False, True])
def test_cut_micro_batches_have_the_gradient_of_the_whole_batch(model, holes):
    """That of the padded batch, without a cut and without logits_to_keep."""
    if model.config.model_type not in NO_FLOAT64:
        model = model.double()
    rollout = generate(model, samples=2, max_response_length=10)
    rollout = with_holes(rollout) if holes else rollout
    sequences, mask, dtype = rollout["sequences"], rollout["response_mask"], next(model.parameters()).dtype
    weights = torch.randn(mask.shape, dtype=dtype).masked_fill(~mask, 0.0)
    T, positions = mask.shape[1], (rollout["attention_mask"].cumsum(1) - 1).clamp(min=0)
    inputs = {"attention_mask": rollout["attention_mask"], "position_ids": positions}
    logits = model(sequences, **inputs, use_cache=False).logits[:, -T - 1 : -1] / 0.7
    whole = logits.log_softmax(-1).gather(-1, sequences[:, -T:, None])[:, :, 0] * mask
    expected, loss = gradients(model, (whole * weights).sum()), 0.0

    for index, batch in grpo.micro_batches(rollout | {"weights": weights}, torch.arange(14), 4):
        logprobs = grpo.token_logprobs(model, batch, 0.7)
        torch.testing.assert_close(logprobs, whole[index, : logprobs.shape[1]], rtol=1e-4, atol=1e-4)
        assert (logprobs[~batch["response_mask"]] == 0).all()
        loss = loss + (logprobs * batch["weights"]).sum()
    assert_same_gradients(gradients(model, loss), expected, 1e-6 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("size", [1, 4, 100])
def test_micro_batches_hold_each_row_once_and_cut_only_padding(size, holes):
    model = make_model("gpt2").double()
    model.generation_config.eos_token_id = STOP_IDS
    rollout = generate(model, samples=2, max_response_length=14)
    rollout = with_holes(rollout) if holes else rollout
    rollout |= {"scores": torch.arange(14.0), "full": grpo.token_logprobs(model, rollout, 1.0)}
    seen, cells = [], 0
    for rows, batch in grpo.micro_batches(rollout, torch.arange(1, 14), size):
        seen += rows.tolist()
        assert len(rows) <= size and batch["scores"].tolist() == rows.tolist()
        for name in ("response_mask", "attention_mask"):
            assert batch[name].sum() == rollout[name][rows].sum()
        assert batch["attention_mask"].any(0).all()  # no column of padding
        logprobs = grpo.token_logprobs(model, batch, 1.0)
        torch.testing.assert_close(logprobs, batch["full"], rtol=1e-9, atol=1e-9)
        cells += batch["sequences"].numel()
    assert sorted(seen) == list(range(1, 14))
    T = rollout["response_mask"].shape[1]
    lengths = rollout["attention_mask"][:, -T:].sum(1)[seen].tolist()
    assert lengths == sorted(lengths)  # rows of similar length go together
    assert size > 13 or cells < rollout["sequences"][1:].numel()


def test_a_response_of_one_token():
    rollout = generate(make_model("llama"), max_response_length=1)
    assert rollout["response_mask"].shape == (7, 1) and rollout["sequences"].shape == (7, 13)
    for rows, batch in grpo.micro_batches(rollout, torch.arange(7), 3):
        assert batch["old_logprobs"].tolist() == rollout["old_logprobs"][rows].tolist()


def test_the_critic_knows_positions_without_padding():
    """Each value of a padded batch, by a model of absolute positions, is that of its sequence alone."""
    model, head = make_model("gpt2"), torch.nn.Linear(32, 1, bias=False)
    critic = torch.nn.ModuleDict({"decoder": model.get_decoder(), "head": head})
    rollout = generate(model, max_response_length=9)
    with torch.no_grad():
        values = ppo.critic_values(ppo.Args(), critic, rollout)
        for i, n in enumerate(rollout["response_mask"].sum(1)):
            hidden = model.get_decoder()(attended(rollout, i)[None]).last_hidden_state[0, -n - 1 : -1]
            torch.testing.assert_close(values[i, :n], head(hidden)[:, 0], rtol=1e-4, atol=1e-4)


class Casts(TorchDispatchMode):
    """Counts how often each tensor is cast."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._to_copy.default:
            self.seen[args[0].data_ptr()] += 1
        return function(*args, **kwargs or {})


def test_bfloat16_under_autocast_has_a_bfloat16_cache_and_float32_log_probs(model, tmp_path, monkeypatch):
    caches, Cache = [], grpo.BFloat16Cache
    monkeypatch.setattr(grpo, "BFloat16Cache", lambda **k: caches.append(Cache(**k)) or caches[-1])
    half = loaded(model, tmp_path, dtype="bfloat16")
    assert {x.dtype for x in half.parameters()} == {torch.float32}
    with Casts() as casts:
        rollout = generate(half, samples=4, max_response_length=8, dtype="bfloat16")
    weights = [x.weight for x in half.modules() if isinstance(x, torch.nn.Linear)]
    assert {casts.seen[x.data_ptr()] for x in weights} in ({1}, {0, 1})  # once, not for every token
    layers = [layer for layer in caches[0].layers if getattr(layer, "keys", None) is not None]
    assert layers and {x.dtype for y in layers for x in (y.keys, y.values)} == {torch.bfloat16}
    sampled, mask = rollout["old_logprobs"], rollout["response_mask"]
    with torch.no_grad():
        assert half(rollout["sequences"]).logits.dtype == torch.bfloat16
        logprobs, exact = grpo.token_logprobs(half, rollout, 1.0), grpo.token_logprobs(model, rollout, 1.0)
    assert logprobs.dtype == sampled.dtype == torch.float32 and not torch.equal(logprobs, exact)
    for x in (logprobs, sampled):
        assert (exact - x)[mask].abs().mean() < 0.2  # experts may change where two are about equal


def test_gradient_checkpointing_recomputes_and_changes_nothing(model, tmp_path):
    rollout, results, calls = generate(model, max_response_length=10), [], []
    for on in (False, True):
        again = loaded(model, tmp_path / str(on), gradient_checkpointing=on)
        assert torch.equal(generate(again, max_response_length=10)["sequences"], rollout["sequences"])
        kind = transformers.modeling_layers.GradientCheckpointingLayer
        layer = next(x for x in again.modules() if isinstance(x, kind))
        for part in layer.modules():
            part.register_forward_pre_hook(lambda *_, on=on: calls.append(on))
        results.append(gradients(again, grpo.token_logprobs(again, rollout, 1.0).sum()))
    assert_same_gradients(*results, 1e-5)
    assert calls.count(True) > 1.3 * calls.count(False) > 0


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_log_probs_are_those_of_sampling_with_dropout_in_the_config(kind, checkpointing, tmp_path):
    """So that the first ratio of a rollout is 1. OPT's layers decide about dropout by their own mode."""
    model = make_model("gpt2")
    if kind == "opt":
        sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 4, "dropout": 0.5, "init_std": 0.3}
        model = transformers.OPTForCausalLM(transformers.OPTConfig(vocab_size=22, **sizes))
    model = loaded(model, tmp_path, gradient_checkpointing=checkpointing)
    rollout = generate(model, samples=8, max_response_length=8)
    again = grpo.token_logprobs(model, rollout, 1.0)  # with gradients, as in the update
    assert 0 < float((again - rollout["old_logprobs"]).detach().abs().max()) < 2e-4


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "lfm2", "qwen3_moe"])
def test_a_run_learns_to_stop_and_saves_what_it_learned(name, tmp_path):
    """Short responses score higher. Chats, BOS by the tokenizer, two EOS ids, one not the tokenizer's."""
    tokenizer = make_tokenizer(bos=True, pad="<eos>", chat=True)
    folder = save(tmp_path / "model", make_model(name), tokenizer, [1, 3])
    rows = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in PROMPTS * 3]
    (tmp_path / "short.py").write_text(
        "def f(completions, **_): return [-len(x.split()) for x in completions]"
    )
    flags = {"model": folder, "dataset": write_jsonl(tmp_path / "p.jsonl", rows), "run_dir": tmp_path / "run"}
    flags |= {"reward": f"{tmp_path / 'short.py'}:f", "batch_size": 64, "max_response_length": 10}
    run("grpo", num_iterations=8, learning_rate=1e-2, kl_coef=0, **flags)
    metrics = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert metrics[-1]["response_length"] < 0.75 * metrics[0]["response_length"]
    weights = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["policy"]
    result = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    before = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(x, weights[key]) for key, x in result.state_dict().items())
    moved = [not torch.equal(before[key], weights[key]) for key, _ in result.named_parameters()]
    assert sum(moved) > 0.9 * len(moved)
    assert result.generation_config.eos_token_id == [1, 3]
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert again(PROMPTS[1])["input_ids"] == tokenizer(PROMPTS[1])["input_ids"]


def test_prompts_get_one_bos_and_too_long_ones_are_left_out(tmp_path, capsys):
    """Llama's and Gemma's tokenizers put BOS before a text, and their templates write one too."""
    tokenizer, model = make_tokenizer(bos=True, chat=True), make_model("llama")
    texts = ["3 + 5 ?", [{"role": "user", "content": "3 + 5 ?"}], PROMPTS[1]]
    for name, rows in (("text", texts[::2]), ("chat", texts[1:2])):
        data = str(write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": prompt} for prompt in rows]))
        args = grpo.Args(max_prompt_length=9)
        (row,) = grpo.load_rows(args, "dataset", data, "train", model, tokenizer)
        assert row["prompt_ids"] == ([2, *IDS[0]] if name == "text" else [2, 4, *IDS[0], 3, 5])
    assert "dataset: 1 of 2 prompts" in capsys.readouterr().out


def test_a_template_may_write_a_system_prompt_where_there_is_none(tmp_path):
    tokenizer, user = make_tokenizer(), {"role": "user", "content": "3 + 5 ?"}
    default = "{% if messages[0].role != 'system' %}0 {% endif %}"
    tokenizer.chat_template = default + "{% for m in messages %}{{ m.content }} {% endfor %}answer"
    chats = [[user], [{"role": "system", "content": "1"}, user]]
    data = str(write_jsonl(tmp_path / "chats.jsonl", [{"prompt": chat} for chat in chats]))
    rows = grpo.load_rows(grpo.Args(), "dataset", data, "train", make_model("llama"), tokenizer)
    texts = [tokenizer.decode(row["prompt_ids"]) for row in rows]
    assert texts == ["0 3 + 5 ? answer", "1 3 + 5 ? answer"]


def test_each_epoch_has_every_prompt_once_in_a_new_order(monkeypatch):
    dataset, epochs = list(range(12)), []
    for epoch in (0, 1):
        batches = [grpo.choose_prompts(grpo.Args(), dataset, 4, 3 * epoch + step) for step in range(3)]
        epochs.append([row for batch in batches for row in batch])
    assert sorted(epochs[0]) == sorted(epochs[1]) == dataset != epochs[0] != epochs[1]
    whole = epochs[0][:4]
    assert grpo.choose_prompts(grpo.Args(seed=2), dataset, 4, 0) != whole
    monkeypatch.setattr(grpo, "WORLD_SIZE", 2)
    halves = []
    for rank in (0, 1):
        monkeypatch.setattr(grpo, "RANK", rank)
        halves += grpo.choose_prompts(grpo.Args(), dataset, 4, 0)
    assert halves == whole


def test_a_step_is_no_longer_than_max_grad_norm():
    layer = torch.nn.Linear(3, 1)
    before = [x.detach().clone() for x in layer.parameters()]
    layer(torch.full((1, 3), 100.0)).sum().backward()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    norm = grpo.optimizer_step(grpo.Args(max_grad_norm=0.1), layer, optimizer)
    step = torch.cat([(x - y).flatten() for x, y in zip(layer.parameters(), before)])
    assert float(norm) > 100 and float(step.norm().detach()) == pytest.approx(0.1, rel=1e-3)
    assert all(x.grad is None for x in layer.parameters())
