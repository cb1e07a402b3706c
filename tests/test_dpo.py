"""dpo.py: the loss, log-probs of responses only, and a reference that stays the start. Its runs: test_sft.py."""

import math

import pytest
import test_sft
import torch
import transformers
import zoo
from conftest import ROOT, make_llama, read_jsonl, write_jsonl
from test_sft import gradient, launch_in_turn, refused, save_start
from zoo import make_tokenizer

import dpo

PAIRS = [
    {"prompt": "3 + 5 ?", "chosen": "think 3 + 5 = 8 answer 8", "rejected": "answer 7"},
    {"prompt": "1 - 2 + 3 - 4 ?", "chosen": "answer 8", "rejected": "think 9 answer 9"},
    {"prompt": "9 ?", "chosen": "answer 9", "rejected": "answer 1"},
]


def test_the_loss_and_its_gradient_are_the_plain_ones():
    g = torch.Generator().manual_seed(0)
    new = [torch.randn(3, generator=g, dtype=torch.float64).mul(3).requires_grad_() for _ in range(2)]
    ref = [torch.randn(3, generator=g, dtype=torch.float64) for _ in range(2)]
    loss = dpo.dpo_loss(*new, *ref, 0.3, 12)
    loss.backward()
    total = 0.0
    for i, (c, r, rc, rr) in enumerate(zip(*(x.tolist() for x in (*new, *ref)))):
        x = 0.3 * ((c - rc) - (r - rr))
        total += math.log(1 + math.exp(-x)) / 12
        slope = -0.3 / (1 + math.exp(x)) / 12
        assert float(new[0].grad[i]) == pytest.approx(slope) and float(new[1].grad[i]) == pytest.approx(-slope)
    assert float(loss.detach()) == pytest.approx(total, rel=1e-12)
    assert float(dpo.dpo_loss(*new, *ref, 0.3).detach()) == pytest.approx(total * 12 / 3, rel=1e-12)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "bloom", "mistral", "lfm2", "falcon_h1"])
def test_log_probs_are_those_of_the_responses_and_their_eos(name, tmp_path):
    """Against one unpadded text at a time, and the gradient too."""
    model, data = zoo.make_model(name).double(), write_jsonl(tmp_path / "pairs.jsonl", PAIRS)
    tokenizer, args = zoo.make_tokenizer(), dpo.Args(micro_batch_size=2)
    rows = dpo.load_rows(args, "dataset", str(data), "train", model, tokenizer)
    exact = name in ("llama", "gpt2", "bloom", "mistral", "lfm2")  # the others have float32 inside
    found, expected = {}, {}
    for batch in dpo.micro_batches(args, rows, "cpu"):
        logprobs = dpo.response_logprobs(model, batch)  # (2, b)
        assert logprobs.dtype == torch.float64
        found |= {(i, side): logprobs[side, n] for side in (0, 1) for n, i in enumerate(batch["index"])}
    for i, row in enumerate(PAIRS):
        for side, key in enumerate(("chosen", "rejected")):
            start = len(tokenizer(row["prompt"])["input_ids"])
            ids = tokenizer(f"{row['prompt']} {row[key]} <eos>")["input_ids"]
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            expected[i, side] = sum(logprobs[t - 1, ids[t]] for t in range(start, len(ids)))
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-12 if exact else 1e-6, atol=0)
    weights = {key: 1.0 + i for i, key in enumerate(expected)}
    gradients = []
    for logprobs in (found, expected):
        loss = sum(weights[key] * logprobs[key] for key in weights)
        grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        gradients.append(torch.cat([x.flatten() for x in grads if x is not None]))
    assert float((gradients[0] - gradients[1]).norm() / gradients[1].norm()) < (1e-12 if exact else 1e-6)


def test_gradient_depends_on_neither_micro_batches_nor_ranks(tmp_path, tokenizer):
    data = write_jsonl(tmp_path / "few.jsonl", read_jsonl(ROOT / "toy" / "preferences_train.jsonl")[:16])
    flags = {"model": save_start(tmp_path / "start", tokenizer), "dataset": data, "eval_dataset": data}
    flags |= {"batch_size": 16, "num_epochs": 1, "max_grad_norm": 1e9, "learning_rate": 1e-3, "warmup_iterations": 0}
    runs, metrics = launch_in_turn(dpo, tmp_path, **flags), []
    for run_dir in runs:
        lines = read_jsonl(run_dir / "metrics.jsonl")
        metrics.append({f"{k} {i}": x for i, line in enumerate(lines) for k, x in line.items() if "per_sec" not in k})
    assert metrics[0]["eval/loss 0"] == pytest.approx(math.log(2), abs=1e-12)  # the policy starts as its reference
    assert metrics[0]["loss 1"] == pytest.approx(math.log(2), abs=1e-12)
    assert metrics[0]["eval/loss 2"] < math.log(2) - 0.01
    for run_dir, other in zip(runs[1:], metrics[1:]):
        assert float((gradient(runs[0]) - gradient(run_dir)).norm() / gradient(run_dir).norm()) < 1e-12
        ties = [name for name in other if "accuracy" in name and name.endswith((" 0", " 1"))]  # of margins near 0
        assert {k: x for k, x in other.items() if k not in ties} == pytest.approx(
            {k: x for k, x in metrics[0].items() if k not in ties}, rel=1e-9, abs=1e-12
        )


def split(text) -> tuple[list[int], list[int]]:
    """The ids where response_mask is False, and those after them, where it is True."""
    start = text["response_mask"].index(True)
    assert all(text["response_mask"][start:]) and len(text["response_mask"]) == len(text["input_ids"])
    return text["input_ids"][:start], text["input_ids"][start:]


def test_texts_chats_and_whole_conversations_are_the_same_ids(tmp_path, capsys):
    tokenizer = make_tokenizer(bos=True, chat=True)
    user, answer = {"role": "user", "content": "3 ?"}, {"role": "assistant", "content": "answer 3"}
    forms = [([user], "answer 3"), ([user], [answer]), ("", [user, answer]), ("3 ?", [user, answer]), ("3 ?", [answer])]
    assert {str(dpo.encode(tokenizer, *form, 99)) for form in forms} == {str(dpo.encode(tokenizer, *forms[0], 99))}
    prompt, response = split(dpo.encode(tokenizer, *forms[0], 99))
    assert tokenizer.decode(prompt) == "<bos> <user> 3 ? <end> <model>"
    assert tokenizer.decode(response) == "answer 3 <eos>"
    prompt, _ = split(dpo.encode(tokenizer, [user], [answer, user, answer], 99))  # nothing of the conversation is lost
    assert tokenizer.decode(prompt).count("3 ?") == 2
    rows = [*PAIRS, PAIRS[2] | {"rejected": "answer 9"}, PAIRS[0] | {"prompt": "3 + " * 9 + "?"}]
    data = str(write_jsonl(tmp_path / "pairs.jsonl", rows))
    kept = dpo.load_rows(dpo.Args(max_length=12), "dataset", data, "train", make_llama(22), make_tokenizer())
    assert [row["prompt"] for row in kept] == [row["prompt"] for row in PAIRS]
    assert "3 of 5 pairs" in capsys.readouterr().out
    cut = {
        "chosen": [{"role": "user", "content": "3 + " * 9}, answer],
        "rejected": [user, answer],
    }  # no response is left
    rows = [{"prompt": [user], "chosen": "answer 3", "rejected": "answer 4"}, cut]
    data = str(write_jsonl(tmp_path / "chats.jsonl", rows))
    kept = dpo.load_rows(dpo.Args(max_length=12), "dataset", data, "train", make_llama(22), tokenizer)
    assert [row["prompt"] for row in kept] == [[user]]


@pytest.mark.parametrize(
    "row, flags, words",
    [
        ({}, {"batch_size": 4}, "3 of 3 pairs give 4 or more"),
        ({}, {"model": "toy/reward_model"}, "toy/reward_model SequenceClassification"),
        ({}, {"beta": -0.1}, "--beta -0.1"),
        ({"rejected": None}, {}, "row 0 `rejected`"),
        ({"prompt": None}, {}, "row 0 empty prompt"),
        ({"prompt": [{"role": "user", "content": "3 ?"}]}, {}, "row 0 chat_template"),
        ({"rejected": "3 + " * 100}, {}, "--max_length 1024 128 positions"),
    ],
)
def test_bad_input_gets_one_sentence(tmp_path, capsys, row, flags, words):
    data = write_jsonl(tmp_path / "data.jsonl", [PAIRS[2] | row] * 3)
    said = refused(dpo, capsys, **{"dataset": data, "batch_size": 3, "run_dir": tmp_path / "run"} | flags)
    assert all(word in said for word in words.split()) and not (tmp_path / "run").exists(), said


def test_it_learns_the_toys_pairs_and_a_policy_script_opens_the_result(tmp_path):
    """One epoch: from one right answer in ten, greedily, to most."""
    test_sft.run(dpo, run_dir=tmp_path / "run", num_epochs=1, eval_every=1000, learning_rate=1e-4)
    first, *_, last = (x for x in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "eval/loss" in x)
    assert first["eval/margin"] == pytest.approx(0, abs=1e-6) and last["eval/accuracy/different style"] > 0.95
    folder = tmp_path / "run" / "model"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    right = 0
    rows = [row for row in read_jsonl(ROOT / "toy" / "heldout.jsonl") if row["group"] == "2-5"][:50]
    for row in rows:
        ids = torch.tensor([tokenizer(row["prompt"])["input_ids"]])
        text = tokenizer.decode(model.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :])
        right += text.endswith(f"answer {row['answer']} <eos>")
    assert right > 40
