"""reward_model.py: the Bradley-Terry loss, scores at the right token, and the same scores for others."""

import functools
import math

import pytest
import test_sft
import torch
import transformers
import zoo
from conftest import ROOT, make_gpt2, make_llama, read_jsonl, write_jsonl
from test_sft import gradient, launch_in_turn, save_start

import grpo
import reward_model as rm

TOY = ROOT / "toy"
PAIRS = [
    {"prompt": "3 + 5 ?", "chosen": "think 3 + 5 = 8 answer 8", "rejected": "answer 7"},
    {"prompt": "1 - 2 + 3 - 4 ?", "chosen": "answer 8", "rejected": "think 9 answer 9", "margin": 0.5},
    {"prompt": "9 ?", "chosen": "answer 9", "rejected": "answer 1"},
]
CHATS = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in PAIRS]
TEMPLATE = "{% for m in messages %}{{ m.content }} {% if m.role == 'user' %}= {% else %}<eos> -{% endif %}{% endfor %}"


run = functools.partial(test_sft.run, rm)


def test_preference_loss_and_its_gradient_are_the_plain_ones():
    chosen = torch.tensor([1.0, -2.0, 0.3], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([0.5, 1.0, 0.3], dtype=torch.float64, requires_grad=True)
    margin, center = torch.tensor([0.0, 0.5, 2.0]).double(), 0.3
    plain = sum(-math.log(1 / (1 + math.exp(d))) for d in (rejected - chosen).tolist()) / 3
    assert rm.preference_loss(chosen, rejected).item() == pytest.approx(plain, rel=1e-12)
    loss = rm.preference_loss(chosen, rejected, margin, center, 12)
    loss.backward()
    total = 0.0
    for i, (c, r, m) in enumerate(zip(chosen.tolist(), rejected.tolist(), margin.tolist())):
        total += (math.log(1 + math.exp(r + m - c)) + center * (c + r) ** 2) / 12
        slope, level = -1 / (1 + math.exp(c - r - m)), 2 * center * (c + r)
        assert float(chosen.grad[i]) == pytest.approx((slope + level) / 12, rel=1e-12)
        assert float(rejected.grad[i]) == pytest.approx((level - slope) / 12, rel=1e-12)
    assert loss.item() == pytest.approx(total, rel=1e-12) and loss.dtype == torch.float64
    assert rm.preference_loss(torch.tensor([1000.0, -1000.0]), torch.zeros(2)) == 500.0  # without overflow


@pytest.mark.parametrize("pad", ["<pad>", "<eos>", None])
@pytest.mark.parametrize("make", [make_llama, make_gpt2])
def test_a_score_is_the_last_attended_tokens_and_the_saved_folder_gives_it(tmp_path, tokenizer, make, pad):
    """Under either padding; transformers looks for a pad id that ends nothing."""
    start = save_start(tmp_path / "start", tokenizer, make, pad)
    data, folder = write_jsonl(tmp_path / "pairs.jsonl", PAIRS), tmp_path / "run" / "model"
    run(model=start, dataset=data, batch_size=3, num_epochs=2, run_dir=tmp_path / "run")
    assert not any("eval/loss" in x for x in read_jsonl(tmp_path / "run" / "metrics.jsonl"))  # not the toy's
    saved = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    reread = transformers.AutoTokenizer.from_pretrained(folder)
    assert saved.config.num_labels == 1
    assert saved.config.pad_token_id == reread.pad_token_id not in (None, reread.eos_token_id)

    lists = [rm.encode(reread, row["prompt"], row[name]) for row in PAIRS for name in ("chosen", "rejected")]
    assert all(ids[-1] == reread.eos_token_id for ids in lists)
    width, pad_id = max(map(len, lists)) + 3, reread.pad_token_id
    right = torch.tensor([ids + [pad_id] * (width - len(ids)) for ids in lists])
    right_mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in lists])
    left = torch.tensor([[pad_id] * (width - len(ids)) + ids for ids in lists])
    with torch.no_grad():
        alone = torch.stack([saved(torch.tensor([ids])).logits[0, 0] for ids in lists])
        assert alone.std() > 1e-3
        found = [rm.score(saved, lists), saved(right, attention_mask=right_mask).logits[:, 0]]
        left_mask = right_mask.flip(1)
        positions = (left_mask.cumsum(1) - 1).clamp(min=0)
        found.append(saved(left, attention_mask=left_mask, position_ids=positions).logits[:, 0])
    for scores in found:
        torch.testing.assert_close(scores, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "bloom", "mistral", "qwen3"])
def test_scores_of_a_batch_are_those_of_each_text_alone(name, tmp_path):
    """Also in bfloat16, which the decoder computes in; the head gives float32."""
    tokenizer = zoo.make_tokenizer()
    zoo.save(tmp_path, zoo.make_model(name), tokenizer)
    lists = [rm.encode(tokenizer, row["prompt"], row["chosen"]) for row in PAIRS]
    scores = {}
    for dtype in ("float32", "bfloat16"):
        model, _ = rm.load(rm.Args(model=str(tmp_path), dtype=dtype), torch.device("cpu"))
        if dtype == "float32":
            model.double()
            with torch.no_grad():
                alone = torch.stack([model(torch.tensor([ids])).logits[0, 0] for ids in lists])
        with torch.no_grad():
            scores[dtype] = rm.score(model, lists)
    torch.testing.assert_close(scores["float32"], alone, rtol=1e-6, atol=1e-12)
    assert alone.std() > 1e-4 and scores["bfloat16"].dtype == torch.float32
    assert not torch.equal(scores["bfloat16"], scores["bfloat16"].bfloat16().float())
    assert (scores["bfloat16"] - alone).abs().max() < 0.2 * alone.abs().max()


def test_gradient_is_the_plain_one_for_any_micro_batch_and_number_of_ranks(tmp_path, tokenizer):
    """From one unpadded response at a time through transformers' own head."""
    few = read_jsonl(TOY / "preferences_train.jsonl")[:16]
    rows = [row | {"margin": 0.3 * (i % 3)} for i, row in enumerate(few)]
    rows[5]["margin"] = None  # takes the flag's
    data = write_jsonl(tmp_path / "few.jsonl", rows)
    flags = {"model": save_start(tmp_path / "start", tokenizer), "dataset": data, "eval_dataset": data}
    flags |= {"batch_size": 16, "num_epochs": 1, "max_grad_norm": 1e9, "margin": 0.7}
    flags |= {"center_rewards_coefficient": 0.3, "warmup_iterations": 0}
    runs = launch_in_turn(rm, tmp_path, **flags)
    model, _ = rm.load(rm.Args(model=str(flags["model"])), torch.device("cpu"))
    model.double()
    plain, scores = 0.0, []
    for row in rows:
        texts = [f"{row['prompt']} {row[name]} <eos>" for name in ("chosen", "rejected")]
        chosen, rejected = (model(tokenizer(x, return_tensors="pt")["input_ids"]).logits[0, 0] for x in texts)
        margin = 0.7 if row["margin"] is None else row["margin"]
        plain = plain + (1 + torch.exp(rejected + margin - chosen)).log() + 0.3 * (chosen + rejected) ** 2
        scores.append([float(chosen.detach()), float(rejected.detach())])
    scores = torch.tensor(scores, dtype=torch.float64)
    differences = scores[:, 0] - scores[:, 1]
    expected = torch.autograd.grad(plain / 16, list(model.parameters()))
    expected, metrics = torch.cat([x.flatten() for x in expected]), []
    for run_dir in runs:
        assert float((gradient(run_dir) - expected).norm() / expected.norm()) < 1e-12
        lines = read_jsonl(run_dir / "metrics.jsonl")
        metrics.append({k: v for line in lines for k, v in line.items() if "per_second" not in k})
    trained = {"loss": float(plain.detach()) / 16, "accuracy": float((differences > 0).double().mean())}
    trained |= {"margin": float(differences.mean()), "score_mean": float(scores.mean())}
    trained["score_std"] = float(scores.std(correction=0))
    # accuracy is taken in float32
    assert {name: metrics[0][name] for name in trained} == pytest.approx(trained, rel=1e-6)
    for other in metrics[1:]:
        assert other == pytest.approx(metrics[0], rel=1e-10, abs=1e-12)


def test_what_is_equal_after_the_cut_is_left_out(tmp_path, capsys, tokenizer):
    rows = [*PAIRS, {"prompt": "3 ?", "chosen": "answer 3", "rejected": "answer 3"}]
    worked = "think 1 + 2 = 3 answer"
    rows.append({"prompt": "1 + 2 ?", "chosen": f"{worked} 3", "rejected": f"{worked} 4"})
    data = str(write_jsonl(tmp_path / "pairs.jsonl", rows))
    kept = rm.load_rows(rm.Args(max_length=11), "dataset", data, "train", make_llama(), tokenizer)
    assert [row["prompt"] for row in kept] == [row["prompt"] for row in PAIRS]
    assert "3 of 5 pairs" in capsys.readouterr().out
    assert kept[0]["chosen_ids"] == tokenizer("3 + 5 ? think 3 + 5 = 8 answer")["input_ids"]
    assert [row["margin"] for row in kept] == [0.0, 0.5, 0.0]


def test_a_policy_reads_texts_and_chats_as_they_were_learned(tmp_path, tokenizer):
    """grpo.py's scores are those of the ids learned here; the template stays for chats and goes for texts."""
    start = save_start(tmp_path / "start", tokenizer, chat_template=TEMPLATE)
    for name, rows in {"texts": PAIRS, "chats": CHATS}.items():
        data = write_jsonl(tmp_path / f"{name}.jsonl", rows)
        run(model=start, dataset=data, batch_size=3, num_epochs=1, run_dir=tmp_path / name)
        folder = tmp_path / name / "model"
        own = transformers.AutoTokenizer.from_pretrained(folder)
        assert bool(own.chat_template) == (name == "chats")
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
        ids = [rm.encode(own, row["prompt"], row["chosen"]) for row in rows]
        form = "{} {} <eos>" if name == "texts" else "{} = {} <eos> -"
        assert own.batch_decode(ids) == [form.format(row["prompt"], row["chosen"]) for row in PAIRS]
        with torch.no_grad():
            learned = rm.score(model, ids).tolist()
            reward = grpo.load_reward(grpo.Args(), "reward", str(folder), torch.device("cpu"))
            prompts, responses = [row["prompt"] for row in rows], [row["chosen"] for row in rows]
            read = reward.function(prompts=prompts, completions=responses, truncated=[False] * 3)
        assert read == pytest.approx(learned, abs=1e-5)
    whole = [*CHATS[0]["prompt"], {"role": "assistant", "content": PAIRS[0]["chosen"]}]
    for prompt, response in (("", whole), (PAIRS[0]["prompt"], whole), (CHATS[0]["prompt"], whole[1:])):
        assert rm.encode(own, prompt, response) == ids[0]  # as UltraFeedback has it, with the prompt twice


def test_it_learns_styles_and_not_sums(tmp_path):
    """One of the two default epochs. Pairs of one style are a coin toss: a judge that can be fooled."""
    run(num_epochs=1, run_dir=tmp_path / "run")
    first, *_, last = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert first["eval/loss"] == pytest.approx(math.log(2), abs=0.05)  # the new head is small
    model = transformers.AutoModelForSequenceClassification.from_pretrained(TOY / "reward_model").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(TOY / "reward_model")
    rows = rm.load_rows(rm.Args(), "dataset", "toy/preferences_heldout.jsonl", "test", model, tokenizer)
    for metrics in (last, rm.evaluate(rm.Args(), model, rows)[0]):  # and the committed model
        assert metrics["eval/accuracy"] >= 0.73 and metrics["eval/accuracy/different style"] >= 0.9
        assert abs(metrics["eval/accuracy/same style"] - 0.5) < 0.1


def test_it_learns_pairs_that_can_be_told_apart(tmp_path):
    """Guesses preferred to worked-out answers, the other way round than on the toy."""
    rows = [row for row in read_jsonl(TOY / "preferences_train.jsonl") if row["group"] == "different style"]
    sides = [sorted((row["chosen"], row["rejected"])) for row in rows]  # "answer ..." before "think ..."
    rows = [{"prompt": r["prompt"], "chosen": a, "rejected": b} for r, (a, b) in zip(rows, sides)]
    train, test = rows[:1280], write_jsonl(tmp_path / "test.jsonl", rows[-300:])
    train = write_jsonl(tmp_path / "train.jsonl", train)
    run(dataset=train, eval_dataset=test, num_epochs=1, run_dir=tmp_path / "run")
    last = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["eval/accuracy"] > 0.99 and not any(name.startswith("eval/accuracy/") for name in last)
