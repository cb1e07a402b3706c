"""Generation, log-probs, micro-batches: what is sampled, what is masked, under which distribution it is scored."""

import math

import pytest
import torch
import transformers
from conftest import make_gpt2, make_llama

PROMPTS = ["3 + 5 ?", "1 - 2 + 3 - 4 + 5 - 6 ?", "9 ?", "4 + 4 - 4 ?"]


def plain_logprobs(model, ids: list[int], length: int, temperature: float):
    """Log-probs of the last tokens of one unpadded sequence: no mask, no position ids, no batch."""
    logits = model(torch.tensor([ids])).logits[0, -length - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[-length:])[:, None])[:, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_equal_an_unpadded_forward(script, model, tokenizer, temperature):
    """Left padding without position ids, or scoring at another temperature, shows here."""
    torch.manual_seed(0)
    model = model.double()
    args = script.Args(max_response_length=12, temperature=temperature)
    sequences, attention_mask, response_mask = script.generate(model, tokenizer, PROMPTS, args)
    logprobs, entropy = script.token_logprobs(model, sequences, attention_mask, response_mask.shape[1], temperature)
    assert response_mask.sum(1).unique().numel() > 1  # uneven lengths
    for i, prompt in enumerate(PROMPTS):
        length = int(response_mask[i].sum())
        ids = tokenizer(prompt)["input_ids"] + sequences[i, -response_mask.shape[1] :][:length].tolist()
        assert sequences[i][attention_mask[i].bool()].tolist() == ids
        plain = plain_logprobs(model, ids, length, temperature)
        torch.testing.assert_close(logprobs[i, :length], plain, rtol=1e-9, atol=1e-9)
        logits = model(torch.tensor([ids])).logits[0, -length - 1 : -1] / temperature
        expected = torch.distributions.Categorical(logits=logits).entropy()
        torch.testing.assert_close(entropy[i, :length], expected, rtol=1e-9, atol=1e-9)


def test_logprobs_are_float32_at_least(script):
    """A bfloat16 log-softmax has two to three digits; the ratio would be noise."""
    model = make_llama().bfloat16()
    ids = torch.randint(3, 19, (2, 6))
    logprobs, entropy = script.token_logprobs(model, ids, torch.ones_like(ids), 3, 1.0)
    assert logprobs.dtype == entropy.dtype == torch.float32


def test_greedy_equals_transformers_generate(script, model, tokenizer):
    """Row by row without padding, with several EOS ids: rows finish at different times and leave the batch."""
    stop_ids = [1, 4, 9, 12]
    model.generation_config.eos_token_id = stop_ids
    prompts = [f"{a} {op} {b} ?" for a in range(10) for op in "+-" for b in ("2", "7 + 1")]  # of uneven length
    args = script.Args(max_response_length=20)
    sequences, attention_mask, response_mask = script.generate(model, tokenizer, prompts, args, greedy=True)
    lengths = response_mask.sum(1)
    assert lengths.unique().numel() > 3  # some left early, more than once
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        options = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": stop_ids, "pad_token_id": 0}
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0]
        assert sequences[i][attention_mask[i].bool()].tolist() == expected.tolist()


def test_samples_follow_the_softmax_and_not_the_generation_config(script, tokenizer):
    """Pairs of tokens against their exact probabilities, by chi-square: error probability about 1e-6, and the seed is
    fixed. The generation config would allow one token only."""
    model = make_llama(seed=3)
    config = {"do_sample": False, "top_k": 1, "top_p": 0.1, "temperature": 0.1, "repetition_penalty": 9.0}
    model.generation_config = transformers.GenerationConfig(**config, eos_token_id=1, pad_token_id=0)
    temperature, draws, prompt = 1.7, 30_000, "3 + 5 ?"
    torch.manual_seed(0)
    args = script.Args(max_response_length=2, temperature=temperature)
    sequences, _, response_mask = script.generate(model, tokenizer, [prompt] * draws, args)
    pairs = sequences[:, -2:]
    observed = torch.zeros(19, 19).index_put((pairs[:, 0], pairs[:, 1]), torch.tensor(1.0), accumulate=True)

    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    with torch.no_grad():
        first = (model(ids).logits[0, -1] / temperature).softmax(-1)
        after = torch.cat([ids.expand(19, -1), torch.arange(19)[:, None]], dim=1)
        second = (model(after).logits[:, -1] / temperature).softmax(-1)
    second[1] = torch.eye(19)[0]  # after EOS there is padding
    expected = draws * first[:, None] * second
    enough = expected >= 5
    statistic = float(((observed - expected).square() / expected)[enough].sum())
    dof = int(enough.sum())
    bound = dof * (1 - 2 / (9 * dof) + 4.75 * math.sqrt(2 / (9 * dof))) ** 3  # Wilson-Hilferty, 4.75 sigma
    assert dof > 50 and statistic < bound, (statistic, bound)
    assert (response_mask.sum(1) == 1).sum() == observed[1].sum()


@pytest.mark.parametrize("pad_is_eos", [False, True])
def test_eos_is_part_of_the_response_and_padding_is_not(script, tokenizer, pad_is_eos, tmp_path):
    """Also when pad is EOS, where a mask made of `ids != pad` would never let the policy learn to stop."""
    tokenizer.save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    if pad_is_eos:
        tokenizer.pad_token = tokenizer.eos_token
    torch.manual_seed(1)
    model, args = make_llama(seed=5), script.Args(max_response_length=15)
    sequences, attention_mask, response_mask = script.generate(model, tokenizer, PROMPTS * 30, args)
    T = response_mask.shape[1]
    ended = 0
    for ids, mask, attended in zip(sequences[:, -T:], response_mask, attention_mask[:, -T:]):
        length = int(mask.sum())
        assert mask[:length].all() and not mask[length:].any() and torch.equal(mask, attended.bool())
        assert (ids[: length - 1] != 1).all()  # nothing goes on after EOS
        assert ids[length - 1] == 1 or length == args.max_response_length
        assert (ids[length:] == tokenizer.pad_token_id).all()
        ended += int(ids[length - 1] == 1)
    assert 0 < ended < len(sequences)  # both kinds occurred, so both were looked at


def test_prompts_may_be_ids_or_text(script, tokenizer):
    model, args = make_llama(), script.Args(max_response_length=5)
    ids = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    from_text = script.generate(model, tokenizer, PROMPTS, args, greedy=True)
    assert all(map(torch.equal, from_text, script.generate(model, tokenizer, ids, args, greedy=True)))


def test_all_end_in_one_token(script, tokenizer):
    """T = 1 is a shape like any other."""
    model, args = make_llama(), script.Args(max_response_length=1)
    sequences, attention_mask, response_mask = script.generate(model, tokenizer, PROMPTS, args)
    assert response_mask.shape == (4, 1) and sequences.shape == attention_mask.shape
    rollout = {"sequences": sequences, "attention_mask": attention_mask, "response_mask": response_mask}
    rollout |= {"scores": torch.arange(4.0), "kl": torch.zeros(4, 1)}
    for rows, mb in script.micro_batches(rollout, torch.arange(4), 3):
        assert mb["scores"].tolist() == rows.tolist() and mb["kl"].shape == (len(rows), 1)


@pytest.fixture
def gpt2_with_dropout(tmp_path, tokenizer):
    """As GPT-2 comes from the hub: dropout 0.1 in the config, no pad token."""
    make_gpt2().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return str(tmp_path)


def test_dropout_is_off_and_the_first_ratio_is_one(script, tokenizer, gpt2_with_dropout):
    policy = script.load_policy(gpt2_with_dropout, "model", torch.device("cpu"))
    assert policy.config.resid_pdrop == 0.1
    policy.activation_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(3, 19, (4, 10), generator=torch.Generator().manual_seed(0))
    inputs = ids, torch.ones_like(ids), 6, 1.0
    with torch.no_grad():
        before, _ = script.token_logprobs(policy, *inputs)
    script.checkpoint_layers(policy, True)  # training mode reaches the layers, and must not reach their dropout
    during, _ = script.token_logprobs(policy, *inputs)
    torch.testing.assert_close(during, before, rtol=0, atol=1e-6)


def test_dropout_of_a_layer_itself_is_off(script, tokenizer, tmp_path):
    """OPT's layers call the functional dropout by their own mode, which gradient checkpointing sets."""
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_hidden_layers": 2}
    config = transformers.OPTConfig(vocab_size=19, num_attention_heads=4, dropout=0.5, init_std=0.3, **sizes)
    transformers.OPTForCausalLM(config).save_pretrained(tmp_path)
    policy = script.load_policy(str(tmp_path), "model", torch.device("cpu"))
    policy.activation_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(3, 19, (4, 10), generator=torch.Generator().manual_seed(0))
    script.checkpoint_layers(policy, True)
    one, other = (script.token_logprobs(policy, ids, torch.ones_like(ids), 6, 1.0)[0] for _ in range(2))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    assert policy.config.dropout == 0.5  # what is saved says what it said


@pytest.mark.parametrize("make", [make_llama, make_gpt2])
def test_gradient_checkpointing_recomputes_and_changes_nothing(script, make):
    ids = torch.randint(3, 19, (4, 10), generator=torch.Generator().manual_seed(0))
    results = []
    for on in (False, True):
        model, calls = make().eval(), []
        model.activation_checkpointing_enable({"use_reentrant": False})
        layer = model.model.layers[0].mlp if hasattr(model, "model") else model.transformer.h[0].mlp
        layer.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        script.checkpoint_layers(model, on)
        script.token_logprobs(model, ids, torch.ones_like(ids), 6, 1.0)[0].sum().backward()
        results.append([parameter.grad for parameter in model.parameters()])
        assert len(calls) == 1 + on  # the forward pass, and its repetition in the backward pass
        script.checkpoint_layers(model, False)
        assert not any(module.training for module in model.modules())
    for plain, recomputed in zip(*results):
        torch.testing.assert_close(plain, recomputed, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("size", [1, 3, 4, 100])
def test_micro_batches_hold_each_row_once_and_cut_only_padding(script, model, tokenizer, size):
    """Cut or whole, the log-probs are the same."""
    torch.manual_seed(2)
    model = model.double()
    args = script.Args(max_response_length=14)
    sequences, attention_mask, response_mask = script.generate(model, tokenizer, PROMPTS * 3, args)
    full, _ = script.token_logprobs(model, sequences, attention_mask, response_mask.shape[1], 1.0)
    rollout = {"sequences": sequences, "attention_mask": attention_mask, "response_mask": response_mask}
    rollout |= {"scores": torch.arange(12.0), "full": full}
    seen, columns = [], 0
    for rows, mb in script.micro_batches(rollout, torch.arange(1, 12), size):
        seen += rows.tolist()
        assert len(rows) <= size and mb["scores"].tolist() == rows.tolist()
        assert mb["response_mask"].sum() == response_mask[rows].sum()
        assert mb["attention_mask"].sum() == attention_mask[rows].sum()
        inputs = mb["sequences"], mb["attention_mask"], mb["response_mask"].shape[1]
        logprobs, _ = script.token_logprobs(model, *inputs, 1.0)
        mask = mb["response_mask"]
        torch.testing.assert_close(logprobs[mask], mb["full"][mask], rtol=1e-9, atol=1e-9)
        columns += mb["sequences"].numel()
    assert sorted(seen) == list(range(1, 12))
    if size < 11:
        assert columns < sequences[1:].numel()


def test_left_out_prompts_are_those_that_are_too_long(script, tokenizer, tmp_path, capsys):
    from conftest import write_jsonl

    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": prompt, "answer": "1"} for prompt in PROMPTS])
    rows = script.load_rows(script.Args(max_prompt_length=6), str(path), "train", "dataset", tokenizer)
    assert [row["prompt"] for row in rows] == ["3 + 5 ?", "9 ?", "4 + 4 - 4 ?"]
    assert "3 prompts, 1 left out" in capsys.readouterr().out
