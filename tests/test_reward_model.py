"""reward_model.py: the Bradley-Terry loss, scores at the last token, the same scores in other programs."""

import functools
import math

import pytest
import test_sft
import torch
import transformers
import zoo
from conftest import ROOT, read_jsonl, write_jsonl
from test_rewards import scores
from test_sft import difference, one_step

import reward_model as rm

TOY = ROOT / "toy"
PAIRS = [
    {"prompt": "3 + 5 ?", "chosen": "think 3 + 5 = 8 answer 8", "rejected": "answer 7"},
    {"prompt": "1 - 2 + 3 - 4 ?", "chosen": "answer 8", "rejected": "think 9 answer 9", "margin": 0.5},
    {"prompt": "9 ?", "chosen": "answer 9", "rejected": "answer 1"},
]
CHATS = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in PAIRS]
TEMPLATE = "{% for m in messages %}{{ m.content }} "
TEMPLATE += "{% if m.role == 'user' %}= {% else %}<eos> -{% endif %}{% endfor %}"

CPU = torch.device("cpu")
auto = transformers.AutoModelForSequenceClassification
run = functools.partial(test_sft.run, rm)


def test_large_differences_do_not_overflow():
    assert rm.preference_loss(torch.tensor([1000.0, -1000.0]), torch.zeros(2)) == 500.0


@pytest.mark.parametrize("pad", ["<pad>", "<eos>", None])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_saved_model_scores_the_last_attended_token(tmp_path, name, pad):
    """With padding on either side. transformers needs a pad token that is not EOS."""
    start = zoo.save(tmp_path / "start", zoo.make_model(name), zoo.make_tokenizer(pad=pad))
    data, folder = write_jsonl(tmp_path / "pairs.jsonl", PAIRS), tmp_path / "run" / "model"
    run(model=start, dataset=data, batch_size=3, num_epochs=2, run_dir=tmp_path / "run")
    saved, tokenizer = auto.from_pretrained(folder).eval(), transformers.AutoTokenizer.from_pretrained(folder)
    assert saved.config.num_labels == 1
    assert saved.config.pad_token_id == tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)

    lists = [rm.encode(tokenizer, row["prompt"], row["chosen"]) for row in PAIRS]
    lists += [rm.encode(tokenizer, row["prompt"], row["rejected"]) for row in PAIRS]
    assert all(ids[-1] == tokenizer.eos_token_id for ids in lists)
    with torch.no_grad():
        alone = torch.stack([saved(torch.tensor([ids])).logits[0] for ids in lists])
        assert alone.std() > 1e-3
        for side in ("right", "left"):
            batch = tokenizer.pad({"input_ids": lists}, padding_side=side, return_tensors="pt")
            positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
            scores = saved(**batch, position_ids=positions).logits
            torch.testing.assert_close(scores, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "bloom", "mistral", "qwen2"])
def test_scores_of_a_batch_are_those_of_each_text_alone(name, tmp_path):
    """With --dtype bfloat16 the decoder computes in it, and the head gives float32."""
    tokenizer = zoo.make_tokenizer()
    zoo.save(tmp_path, zoo.make_model(name), tokenizer)
    args = rm.Args(model=str(tmp_path))
    model = rm.load_model(args, CPU)[0].double()
    data = str(write_jsonl(tmp_path / "pairs.jsonl", PAIRS))
    rows = rm.load_rows(args, "dataset", data, "train", model, tokenizer)
    [(part, batch)] = rm.micro_batches(rows, range(3), 3, CPU)
    half = rm.Args(model=str(tmp_path), dtype="bfloat16")
    with torch.no_grad():
        alone = torch.zeros(2, 3, dtype=torch.float64)
        for i, number in enumerate(part):
            for side, name in enumerate(["chosen_ids", "rejected_ids"]):
                alone[side, i] = model(torch.tensor([rows[number][name]])).logits[0, 0]
        torch.testing.assert_close(rm.score(args, model, batch), alone, rtol=1e-6, atol=1e-12)
        scores = rm.score(half, rm.load_model(half, CPU)[0], batch)
    assert alone.std() > 1e-4 and scores.dtype == torch.float32
    assert not torch.equal(scores, scores.bfloat16().float())
    assert (scores - alone).abs().max() < 0.2 * alone.abs().max()


def test_gradient_is_the_plain_one_for_any_micro_batch_and_number_of_ranks(tmp_path):
    """That of one unpadded text at a time through transformers' own head."""
    rows = read_jsonl(TOY / "preferences_train.jsonl")[:16]
    for i, row in enumerate(rows):
        row["margin"] = 0.3 * (i % 3)
    rows[5]["margin"] = None  # takes the flag's
    data = write_jsonl(tmp_path / "few.jsonl", rows)
    start = zoo.save(tmp_path / "start", zoo.make_model("llama"), zoo.make_tokenizer())
    flags = {"dataset": data, "eval_dataset": data, "margin": 0.7, "center_rewards_coefficient": 0.3}
    gradient, (_, metrics) = one_step(rm, tmp_path, model=start, **flags)

    model, tokenizer = rm.load_model(rm.Args(model=start), CPU)
    model.double()
    loss, all_scores = 0.0, []
    for row in rows:
        texts = [f"{row['prompt']} {row[side]} <eos>" for side in ("chosen", "rejected")]
        chosen, rejected = (model(tokenizer(x, return_tensors="pt")["input_ids"]).logits[0, 0] for x in texts)
        margin = 0.7 if row["margin"] is None else row["margin"]
        loss = loss + (1 + torch.exp(rejected + margin - chosen)).log() / 16
        loss = loss + 0.3 * (chosen + rejected) ** 2 / 16
        all_scores.append(torch.stack([chosen, rejected]).detach())
    loss.backward()
    expected_gradient = torch.cat([x.grad.flatten() for x in model.parameters()])
    assert difference(gradient, expected_gradient) < 1e-12

    scores = torch.stack(all_scores)
    margins = scores[:, 0] - scores[:, 1]
    expected = {
        "loss": float(loss.detach()),
        "accuracy": float((margins > 0).double().mean()),
        "margin": float(margins.mean()),
        "score_mean": float(scores.mean()),
        "score_std": float(scores.std(correction=0)),
    }
    found = {name: metrics[name] for name in expected}
    assert found == pytest.approx(expected, rel=1e-6)


def test_pairs_that_are_equal_after_the_cut_are_left_out(tmp_path, capsys, tokenizer):
    rows = [*PAIRS, {"prompt": "3 ?", "chosen": "answer 3", "rejected": "answer 3"}]
    worked = "think 1 + 2 = 3 answer"
    rows.append({"prompt": "1 + 2 ?", "chosen": f"{worked} 3", "rejected": f"{worked} 4"})
    data = str(write_jsonl(tmp_path / "pairs.jsonl", rows))
    kept = rm.load_rows(rm.Args(max_length=11), "dataset", data, "train", zoo.make_model("llama"), tokenizer)
    assert [row["prompt"] for row in kept] == [row["prompt"] for row in PAIRS]
    assert "3 of 5 pairs" in capsys.readouterr().out
    assert kept[0]["chosen_ids"] == tokenizer("3 + 5 ? think 3 + 5 = 8 answer")["input_ids"]
    assert [row["margin"] for row in kept] == [0.0, 0.5, 0.0]


@pytest.mark.parametrize("rows", [PAIRS, CHATS], ids=["texts", "chats"])
def test_a_policy_reads_texts_and_chats_as_they_were_learned(rows, tmp_path):
    """The saved tokenizer has the template for chats only. A conversation may contain the prompt."""
    tokenizer = zoo.make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    start = zoo.save(tmp_path / "start", zoo.make_model("llama"), tokenizer)
    data, folder = write_jsonl(tmp_path / "pairs.jsonl", rows), tmp_path / "run" / "model"
    run(model=start, dataset=data, batch_size=3, num_epochs=1, run_dir=tmp_path / "run")
    (line,) = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert "eval/loss" not in line  # not evaluated on the toy's pairs
    model, own = auto.from_pretrained(folder).eval(), transformers.AutoTokenizer.from_pretrained(folder)
    assert bool(own.chat_template) == (rows is CHATS)
    ids = [rm.encode(own, row["prompt"], row["chosen"]) for row in rows]
    form = "{} = {} <eos> -" if rows is CHATS else "{} {} <eos>"
    assert own.batch_decode(ids) == [form.format(row["prompt"], row["chosen"]) for row in PAIRS]
    with torch.no_grad():
        learned = [float(model(torch.tensor([x])).logits) for x in ids]
    responses = [row["chosen"] for row in rows]
    read = scores(folder, rows=rows, texts=responses, ended=[True] * 3)
    assert read.tolist() == pytest.approx(learned, abs=1e-5)
    if rows is CHATS:
        whole = [*CHATS[0]["prompt"], {"role": "assistant", "content": PAIRS[0]["chosen"]}]
        for prompt, response in (("", whole), (PAIRS[0]["prompt"], whole), (CHATS[0]["prompt"], whole[1:])):
            assert rm.encode(own, *rm.split_response(prompt, response)) == ids[0]


def test_it_learns_styles_and_not_sums(tmp_path):
    """In one of the two default epochs. In pairs of one style it cannot tell right from wrong."""
    run(num_epochs=1, run_dir=tmp_path / "run")
    first, *_, last = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert first["eval/loss"] == pytest.approx(math.log(2), abs=0.05)  # the new head is small
    model = auto.from_pretrained(TOY / "reward_model").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(TOY / "reward_model")
    rows = rm.load_rows(rm.Args(), "dataset", "toy/preferences_heldout.jsonl", "test", model, tokenizer)
    for metrics in (last, rm.evaluate(rm.Args(), model, rows)[0]):  # also the committed model
        assert metrics["eval/accuracy"] >= 0.7 and metrics["eval/accuracy/different style"] >= 0.9
        assert abs(metrics["eval/accuracy/same style"] - 0.5) < 0.1
