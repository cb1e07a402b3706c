"""Every architecture and cache of the zoo, every habit of a tokenizer: what is sampled, scored, learned and saved.

The functions are the same in all policy scripts (test_skeleton.py), so one script stands for them here.
"""

import importlib
import json
import math
import sys

import pytest
import torch
import transformers
from conftest import read_jsonl, the_run, write_jsonl
from zoo import ARCHITECTURES, make_model, make_tokenizer, save

import grpo

PROMPTS = ["3 + 5 ?", "1 - 2 + 3 - 4 + 5 - 6 ?", "9 ?", "4 + 4 - 4 ?", "3 + 5 ?", "2 ?", "2 - 1 + 8 ?"]
STOP_IDS = [1, 6, 7, 9, 12, 14, 17, 19]
NAMES = list(ARCHITECTURES)
NO_FLOAT64 = {"gemma2", "bloom", "qwen3_moe", "qwen3_next"}  # they give NaN in it, or have no kernel for it


@pytest.fixture(params=NAMES)
def model(request):
    model = make_model(request.param)
    model.generation_config.eos_token_id = STOP_IDS
    return model


def plain_logprobs(model, ids: list[int], length: int) -> torch.Tensor:
    """Of the last tokens of one sequence: no padding, no mask, no cache, no batch."""
    logits = model(torch.tensor([ids])).logits[0, -length - 1 : -1]
    return logits.float().log_softmax(-1).gather(1, torch.tensor(ids[-length:])[:, None])[:, 0]


def test_greedy_is_transformers_greedy_and_log_probs_are_those_of_a_plain_forward(model):
    """With a batch, padding, a cache (plain, sliding, hybrid) and rows that leave it, against none of them."""
    tokenizer, args = make_tokenizer(), grpo.Args(max_response_length=14)
    for greedy in (True, False):
        torch.manual_seed(0)
        stop_ids = STOP_IDS[::3] if greedy else STOP_IDS  # greedy, a small random model stops at once or never
        model.generation_config.eos_token_id = stop_ids
        sequences, attention_mask, response_mask = grpo.generate(model, tokenizer, PROMPTS * 2, args, greedy=greedy)
        lengths = response_mask.sum(1).tolist()
        assert max(lengths) > 3 and (greedy or len(set(lengths)) > 2), "no row left before the others"
        with torch.no_grad():
            inputs = sequences, attention_mask, response_mask.shape[1], 1.0
            logprobs, _ = grpo.token_logprobs(model, *inputs)
            for i, prompt in enumerate(PROMPTS):
                prompt_ids = tokenizer(prompt)["input_ids"]
                ids = sequences[i][attention_mask[i].bool()].tolist()
                assert ids[: len(prompt_ids)] == prompt_ids
                plain = plain_logprobs(model, ids, lengths[i])
                torch.testing.assert_close(logprobs[i, : lengths[i]], plain, rtol=1e-4, atol=1e-4)
                if greedy:
                    prompt_ids = torch.tensor([prompt_ids])
                    options = {"do_sample": False, "max_new_tokens": 14, "eos_token_id": stop_ids, "pad_token_id": 0}
                    mask = torch.ones_like(prompt_ids)
                    assert ids == model.generate(prompt_ids, attention_mask=mask, **options)[0].tolist()


def test_samples_are_as_frequent_as_those_of_transformers(model):
    """Chi-square of two samples of whole responses, two prompts of different length in one batch. With the right
    distribution it fails with a probability below 2e-6 per prompt and architecture (4.75 sigma), and the seed is fixed.
    Rows leave at each step, so a cache whose rows are mixed up, or a mask one column off, shows in what follows."""
    tokenizer, draws, T = make_tokenizer(), 4000, 4
    prompts = ["3 + 5 ?", "1 - 2 + 3 - 4 + 5 - 6 ?"]
    model.generation_config.eos_token_id = stop_ids = list(range(1, 14))  # about half of the tokens end a response
    torch.manual_seed(0)
    args = grpo.Args(max_response_length=T)
    sequences, _, response_mask = grpo.generate(model, tokenizer, prompts * draws, args)
    ours = sequences[:, -T:].masked_fill(~response_mask, 0)
    assert 0.1 < response_mask[:, 1:].any(1).float().mean() < 0.9  # many left at once, and many did not
    for i, prompt in enumerate(prompts):
        ids = tokenizer(prompt, return_tensors="pt")
        options = {"do_sample": True, "max_new_tokens": T, "eos_token_id": stop_ids, "pad_token_id": 0, "top_k": 0}
        many = {name: x.expand(draws, -1) for name, x in ids.items()}
        theirs = model.generate(input_ids=many["input_ids"], attention_mask=many["attention_mask"], **options)
        theirs = theirs[:, ids["input_ids"].shape[1] :]
        theirs = torch.nn.functional.pad(theirs, (0, T - theirs.shape[1]))
        both, index = torch.cat([ours[i :: len(prompts)], theirs]).unique(dim=0, return_inverse=True)
        counts = torch.stack([index[:draws].bincount(minlength=len(both)), index[draws:].bincount(minlength=len(both))])
        rare = counts.sum(0) < 10
        counts = torch.cat([counts[:, ~rare], counts[:, rare].sum(1, keepdim=True)], dim=1).double()
        dof = counts.shape[1] - 1
        assert dof > 20
        statistic = float(((counts[0] - counts[1]).square() / counts.sum(0).clamp(min=1)).sum())
        bound = dof * (1 - 2 / (9 * dof) + 4.75 * math.sqrt(2 / (9 * dof))) ** 3  # Wilson-Hilferty
        assert statistic < bound, (statistic, bound)


def gradients(model, loss: torch.Tensor) -> dict:
    model.zero_grad()
    loss.backward()
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def test_pieces_of_logits_and_cut_micro_batches_have_the_gradient_of_the_plain_form(model, monkeypatch):
    """Against (B, T, V) logits of the whole padded batch, differentiated in one go: to 1e-6 of the largest
    gradient, or 5e-6 where float32 is all that an architecture can do."""
    torch.manual_seed(0)
    if model.config.model_type not in NO_FLOAT64:
        model = model.double()
    args, dtype = grpo.Args(max_response_length=10), model.dtype
    with torch.no_grad():
        generated = grpo.generate(model, make_tokenizer(), PROMPTS * 2, args)
    sequences, attention_mask, response_mask = generated
    T = response_mask.shape[1]
    weights = torch.randn(response_mask.shape, dtype=dtype).masked_fill(~response_mask, 0.0)

    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=sequences, attention_mask=attention_mask, position_ids=positions, use_cache=False).logits
    logprobs = (logits[:, -T - 1 : -1] / 0.7).log_softmax(-1).gather(-1, sequences[:, -T:, None])[:, :, 0]
    plain = gradients(model, (logprobs * weights).sum())

    for max_logits in (2**26, 5 * 22):  # in one piece; and in pieces of five tokens, made again in the backward pass
        monkeypatch.setattr(grpo, "MAX_LOGITS", max_logits)
        rollout = {"sequences": sequences, "attention_mask": attention_mask, "response_mask": response_mask}
        loss = 0.0
        for _, mb in grpo.micro_batches(rollout | {"weights": weights}, torch.arange(len(sequences)), 4):
            inputs = mb["sequences"], mb["attention_mask"], mb["response_mask"].shape[1], 0.7
            logprobs, entropy = grpo.token_logprobs(model, *inputs)
            assert (logprobs[~mb["response_mask"]] == 0).all() and (entropy[~mb["response_mask"]] == 0).all()
            loss = loss + (logprobs * mb["weights"]).sum()
        ours = gradients(model, loss)
        assert ours.keys() == plain.keys() and len(plain) > 10
        scale = max(float(x.abs().max()) for x in plain.values())
        for name, expected in plain.items():
            torch.testing.assert_close(
                ours[name], expected, rtol=0, atol=scale * (1e-6 if dtype == torch.float64 else 5e-6)
            )


def test_reference_in_bfloat16_has_the_numbers_of_autocast(model):
    """Half the memory of the matrices and not another distribution: the KL of the first iteration is 0 to the last
    bit, where a reference that is bfloat16 through and through would start with rounding noise."""
    name = model.config.model_type
    args = grpo.Args(dtype="bfloat16", max_response_length=8)
    with torch.no_grad(), grpo.autocast(args, torch.device("cpu")):
        generated = grpo.generate(model, make_tokenizer(), PROMPTS, args)
        inputs = generated[0], generated[1], generated[2].shape[1], 1.0
        before, _ = grpo.token_logprobs(model, *inputs)
        size = sum(x.nbytes for x in model.parameters())
        grpo.freeze(args, model)
        after, _ = grpo.token_logprobs(model, *inputs)
    assert torch.equal(before, after) and before.dtype == torch.float32
    assert not any(x.requires_grad for x in model.parameters())
    assert sum(x.nbytes for x in model.parameters()) < 0.9 * size or "moe" in name or "next" in name


@pytest.mark.parametrize("name", ["grpo", "sft"])
def test_logits_are_taken_in_pieces_and_again_in_the_backward_pass(name, monkeypatch):
    """Else the gradient is right and the memory is not."""
    script, model, rows = importlib.import_module(name), make_model("qwen2"), []
    monkeypatch.setattr(script, "MAX_LOGITS", 5 * len(model.get_output_embeddings().weight))
    ids = torch.randint(3, 22, (3, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0  # 8 tokens of response each, less these: 21
    model.get_output_embeddings().register_forward_hook(lambda head, inputs, _: rows.append(inputs[0].shape[-2]))
    if name == "grpo":
        loss = script.token_logprobs(model, ids, mask, 8, 1.0)[0].sum()
    else:
        completion = mask.bool() & (torch.arange(12) >= 4)
        loss = script.completion_loss(model, ids, mask, completion, 21)
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].log_softmax(-1)
        plain = -logits.gather(-1, ids[:, 1:, None])[:, :, 0].masked_fill(~completion[:, 1:], 0.0).sum() / 21
        torch.testing.assert_close(loss, plain)
        rows.pop()
    pieces = [5, 5, 5, 5, 1]
    assert rows == [1, *pieces]  # the first is the model's own, which nobody needs
    loss.backward()
    assert sorted(rows[6:]) == sorted(pieces)
    assert "forward" not in vars(model.base_model)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_prompts_are_read_once_and_the_cache_is_as_small_as_the_arithmetic(name, monkeypatch):
    """Two prompts, six responses: two rows are read. Under bfloat16 the cache holds bfloat16, and the tokens are those
    of a float32 cache, because attention casts what it gets."""
    model, tokenizer, caches, read = make_model(name), make_tokenizer(), [], []
    args = grpo.Args(dtype="bfloat16", max_response_length=8)
    Cache = transformers.DynamicCache
    monkeypatch.setattr(transformers, "DynamicCache", lambda **options: caches.append(Cache(**options)) or caches[-1])
    model.register_forward_pre_hook(lambda _, __, inputs: read.append(inputs["input_ids"].shape), with_kwargs=True)
    prompts = [PROMPTS[1], PROMPTS[0], PROMPTS[1], PROMPTS[1], PROMPTS[0], PROMPTS[0]]
    torch.manual_seed(0)
    with grpo.autocast(args, torch.device("cpu")):
        small = grpo.generate(model, tokenizer, prompts, args, greedy=True)
        assert tuple(read[0]) == (2, 12) and read[1][1] == 1
        assert {layer.keys.dtype for layer in caches[0].layers} == {torch.bfloat16}
        assert {layer.values.dtype for layer in caches[0].layers} == {torch.bfloat16}
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
        large = grpo.generate(model, tokenizer, prompts, args, greedy=True)
    assert all(map(torch.equal, small, large))
    for i, prompt in enumerate(prompts):
        ids = tokenizer(prompt)["input_ids"]
        assert small[0][i][small[1][i].bool()].tolist()[: len(ids)] == ids


TOKENIZERS = [  # bos, pad, chat, ids that end a response
    {"stop_ids": [1]},
    {"stop_ids": [1, 3], "bos": True, "chat": True},
    {"stop_ids": [1, 3, 12], "pad": "<eos>"},
    {"stop_ids": [1], "pad": None},
    {"stop_ids": [3], "pad": "<eos>", "chat": True, "enable_thinking": False},
]


@pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)
def test_a_run_starts_at_ratio_one_learns_to_stop_and_saves_what_it_learned(number, tmp_path, monkeypatch):
    """The longer a response, the lower its score: it pays to sample an EOS, which is only learned if it is a token of
    the response. Architectures and tokenizers in turn; prompts as texts or as chats."""
    habits = TOKENIZERS[number % len(TOKENIZERS)]
    stop_ids, thinking = habits["stop_ids"], habits.get("enable_thinking")
    tokenizer = make_tokenizer(**{k: v for k, v in habits.items() if k not in ("stop_ids", "enable_thinking")})
    folder = save(tmp_path / "model", make_model(NAMES[number]), tokenizer, stop_ids)
    chat = habits.get("chat")
    rows = [{"prompt": [{"role": "user", "content": p}] if chat else p} for p in PROMPTS * 3]
    data = write_jsonl(tmp_path / "prompts.jsonl", rows)
    (tmp_path / "short.py").write_text("def score(completions, **_): return [-len(x.split()) for x in completions]\n")
    flags = ["--model", folder, "--dataset", data, "--eval_dataset", "None", "--runs_dir", tmp_path / "runs"]
    flags += ["--reward", f"{tmp_path / 'short.py'}:score", "--batch_size", 64, "--max_response_length", 10]
    flags += ["--num_iterations", 8, "--learning_rate", 1e-2, "--log_every", 1, "--num_samples", 1, "--kl_coef", 0]
    flags += ["--gradient_checkpointing"] * (number % 2)
    if thinking is not None:
        flags += ["--chat_template_kwargs", json.dumps({"enable_thinking": thinking})]
    script = importlib.import_module("grpo")
    monkeypatch.setattr(sys, "argv", ["grpo", *map(str, flags)])
    script.main(script.parse_args())

    run = the_run(tmp_path / "runs")
    metrics = read_jsonl(run / "metrics.jsonl")[1:]
    assert all(line["ratio_deviation"] < 2e-4 for line in metrics)
    assert metrics[-1]["response_length"] < 0.75 * metrics[0]["response_length"], "EOS was not learned"
    last = read_jsonl(run / "samples.jsonl")[-1]
    if chat:
        assert last["prompt"][0]["role"] == "user"
    (checkpoint,) = (run / "checkpoints").glob("*8.pt")
    weights = torch.load(checkpoint, weights_only=True)["policy"]
    reopened = transformers.AutoModelForCausalLM.from_pretrained(run / "model")
    for name, x in reopened.state_dict().items():
        assert torch.equal(x, weights[name]), name
    before = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    changed = [name for name, x in before.items() if not torch.equal(x, weights[name])]
    assert len(changed) > 0.9 * len([name for name, _ in reopened.named_parameters()])
    again = transformers.AutoTokenizer.from_pretrained(run / "model")
    assert again(PROMPTS[1])["input_ids"] == tokenizer(PROMPTS[1])["input_ids"]
    ends = reopened.generation_config.eos_token_id
    assert (ends if isinstance(ends, list) else [ends]) == stop_ids


def test_prompts_get_bos_once_and_the_template_its_arguments(tmp_path):
    """Llama's and Gemma's tokenizers put BOS before a text by themselves, and their templates write one too."""
    rows = [{"prompt": "3 + 5 ?"}, {"prompt": [{"role": "user", "content": "3 + 5 ?"}]}]
    for kwargs, tail in (("{}", []), ('{"enable_thinking": false}', [21, 21])):
        read = []
        for row in rows:
            data, tokenizer = write_jsonl(tmp_path / "p.jsonl", [row]), make_tokenizer(bos=True, chat=True)
            args = grpo.Args(reward="file.py:f", chat_template_kwargs=kwargs)
            read += grpo.load_rows(args, str(data), "train", "dataset", tokenizer)
        ids = tokenizer("3 + 5 ?", add_special_tokens=False)["input_ids"]
        assert read[0]["prompt_ids"] == [2, *ids]
        assert read[1]["prompt_ids"] == [2, 4, *ids, 3, 5, *tail]
