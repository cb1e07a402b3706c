"""dpo.py: the loss, log-probs of responses only, a reference that stays the start. Runs: test_sft.py."""

import math

import pytest
import test_sft
import torch
import transformers
import zoo
from conftest import ROOT, read_jsonl, write_jsonl
from test_reward_model import PAIRS
from test_sft import difference, gradient, gradient_of, launch_in_turn, save_start

import dpo


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
        assert float(new[0].grad[i]) == pytest.approx(slope) and float(new[1].grad[i]) == pytest.approx(
            -slope
        )
    assert float(loss.detach()) == pytest.approx(total, rel=1e-12)
    assert float(dpo.dpo_loss(*new, *ref, 0.3).detach()) == pytest.approx(total * 12 / 3, rel=1e-12)


@pytest.mark.parametrize("name", test_sft.ARCHITECTURES)
def test_log_probs_and_gradient_are_those_of_the_responses_and_their_eos(name, tmp_path):
    """Computed for one unpadded text at a time."""
    model, data = zoo.make_model(name).double(), write_jsonl(tmp_path / "pairs.jsonl", PAIRS)
    tokenizer, args = zoo.make_tokenizer(), dpo.Args(micro_batch_size=2)
    rows = dpo.load_rows(args, "dataset", str(data), "train", model, tokenizer)
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
    tolerance = 1e-6 if name in test_sft.FLOAT32_INSIDE else 1e-12
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=tolerance, atol=0)
    losses = [sum((1 + i) * x[key] for i, key in enumerate(expected)) for x in (found, expected)]
    assert difference(*(gradient_of(model, loss) for loss in losses)) < tolerance


def test_gradient_depends_on_neither_micro_batches_nor_ranks(tmp_path, tokenizer):
    data = write_jsonl(tmp_path / "few.jsonl", read_jsonl(ROOT / "toy" / "preferences_train.jsonl")[:16])
    flags = {"model": save_start(tmp_path / "start", tokenizer), "dataset": data, "eval_dataset": data}
    flags |= {"batch_size": 16, "num_epochs": 1, "max_grad_norm": 1e9}
    flags |= {"learning_rate": 1e-3, "warmup_iterations": 0}
    runs, metrics = launch_in_turn(dpo, tmp_path, **flags), []
    for run_dir in runs:
        assert difference(gradient(run_dir), gradient(runs[0])) < 1e-12
        evaluated, trained, after = read_jsonl(run_dir / "metrics.jsonl")
        assert evaluated["eval/loss"] == pytest.approx(
            math.log(2), abs=1e-12
        )  # policy and reference are equal
        assert trained["loss"] == pytest.approx(math.log(2), abs=1e-12)
        assert after["eval/loss"] < math.log(2) - 0.01
        metrics.append({name: x for name, x in (trained | after).items() if "per_second" not in name})
        del metrics[-1]["accuracy"]  # of margins near 0
        assert metrics[-1] == pytest.approx(metrics[0], rel=1e-9, abs=1e-12)


def split(text) -> tuple[list[int], list[int]]:
    """The ids where response_mask is False, and those after them, where it is True."""
    start = text["response_mask"].index(True)
    assert all(text["response_mask"][start:]) and len(text["response_mask"]) == len(text["input_ids"])
    return text["input_ids"][:start], text["input_ids"][start:]


def test_texts_chats_and_whole_conversations_are_the_same_ids():
    tokenizer = zoo.make_tokenizer(bos=True, chat=True)
    user, answer = {"role": "user", "content": "3 ?"}, {"role": "assistant", "content": "answer 3"}
    forms = [([user], "answer 3"), ([user], [answer]), ("", [user, answer])]
    forms += [("3 ?", [user, answer]), ("3 ?", [answer])]
    for form in forms:
        prompt, response = split(dpo.encode(tokenizer, *form, 99))
        assert tokenizer.decode(prompt) == "<bos> <user> 3 ? <end> <model>"
        assert tokenizer.decode(response) == "answer 3 <eos>"
    prompt, _ = split(dpo.encode(tokenizer, [user], [answer, user, answer], 99))
    assert tokenizer.decode(prompt).count("3 ?") == 2  # nothing of the conversation is lost


def test_pairs_without_a_difference_or_a_response_after_the_cut_are_left_out(tmp_path, capsys):
    args, model = dpo.Args(max_length=12), zoo.make_model("llama")
    rows = [*PAIRS, PAIRS[2] | {"rejected": "answer 9"}, PAIRS[0] | {"prompt": "3 + " * 9 + "?"}]
    data = str(write_jsonl(tmp_path / "pairs.jsonl", rows))
    kept = dpo.load_rows(args, "dataset", data, "train", model, zoo.make_tokenizer())
    assert [row["prompt"] for row in kept] == [row["prompt"] for row in PAIRS]
    assert "3 of 5 pairs" in capsys.readouterr().out
    user, answer = {"role": "user", "content": "3 ?"}, {"role": "assistant", "content": "answer 3"}
    cut = {"chosen": [{"role": "user", "content": "3 + " * 9}, answer], "rejected": [user, answer]}
    rows = [{"prompt": [user], "chosen": "answer 3", "rejected": "answer 4"}, cut]
    data = str(write_jsonl(tmp_path / "chats.jsonl", rows))
    kept = dpo.load_rows(args, "dataset", data, "train", model, zoo.make_tokenizer(bos=True, chat=True))
    assert [row["prompt"] for row in kept] == [[user]]


def test_it_learns_the_toys_pairs_and_transformers_opens_the_result(tmp_path):
    """One epoch: from one right greedy answer in ten to most."""
    test_sft.run(dpo, run_dir=tmp_path / "run", num_epochs=1, eval_every=1000, learning_rate=1e-4)
    first, *_, last = (x for x in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "eval/loss" in x)
    assert first["eval/margin"] == pytest.approx(0, abs=1e-6)
    assert last["eval/accuracy/different style"] > 0.95
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
