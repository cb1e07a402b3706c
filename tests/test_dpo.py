"""dpo.py: log-probs of responses only, pairs from texts and chats. The loss: test_conformance.py."""

import pytest
import torch
import zoo
from conftest import write_jsonl
from zoo import PAIRS, STAGE_MODELS

import dpo

USER, ANSWER = {"role": "user", "content": "3 ?"}, {"role": "assistant", "content": "answer 3"}


@torch.no_grad()
@pytest.mark.parametrize("name", STAGE_MODELS)
def test_log_probs_are_those_of_the_responses_and_their_eos(name, tmp_path):
    model, tokenizer = zoo.make_model(name).double(), zoo.make_tokenizer()
    data, args = write_jsonl(tmp_path / "pairs.jsonl", PAIRS), dpo.Args(device="cpu", micro_batch_size=2)
    rows = dpo.load_rows(args, str(data), "train", model, tokenizer)
    for batch in dpo.micro_batches(args, rows):
        part = batch["index"].tolist()
        for found, side in zip(dpo.response_logprobs(model, batch), ("chosen", "rejected")):
            for i, logprob in zip(part, found):
                start = len(tokenizer(PAIRS[i]["prompt"])["input_ids"])
                ids = tokenizer(f"{PAIRS[i]['prompt']} {PAIRS[i][side]} <eos>")["input_ids"]
                logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
                expected = sum(logprobs[t - 1, ids[t]] for t in range(start, len(ids)))
                torch.testing.assert_close(logprob, expected, rtol=1e-12, atol=0)


def test_texts_chats_and_whole_conversations_are_the_same_ids(tmp_path):
    tokenizer = zoo.make_tokenizer(bos=True, chat=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    other = ANSWER | {"content": "answer 4"}
    rows = [
        {"prompt": [USER], "chosen": "answer 3", "rejected": "answer 4"},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [other]},
        {"prompt": "3 ?", "chosen": [USER, ANSWER], "rejected": [USER, other]},
        {"chosen": [USER, ANSWER], "rejected": [USER, other]},
        {"prompt": [USER], "chosen": [ANSWER, USER, ANSWER], "rejected": [ANSWER, USER, other]},
    ]
    data = write_jsonl(tmp_path / "pairs.jsonl", rows)
    args = dpo.Args(device="cpu", batch_size=5)
    *rows, long = dpo.load_rows(args, str(data), "train", zoo.make_model("llama"), tokenizer)
    for row in rows:
        assert tokenizer.decode(row["chosen_ids"]) == "<bos> <user> 3 ? <end> <model> answer 3 <end>"
    assert tokenizer.decode(long["rejected_ids"]).count("3 ?") == 2  # nothing of the conversation is lost
    for batch in dpo.micro_batches(args, rows):
        assert batch["response_mask"].tolist() == [[False] * 6 + [True] * 3] * 8


def test_pairs_without_a_difference_or_a_response_after_the_cut_are_left_out(tmp_path, capsys):
    args, model = dpo.Args(max_length=12), zoo.make_model("llama")
    rows = [*PAIRS, PAIRS[2] | {"rejected": "answer 9"}, PAIRS[0] | {"prompt": "3 + " * 9 + "?"}]
    data = str(write_jsonl(tmp_path / "pairs.jsonl", rows))
    kept = dpo.load_rows(args, data, "train", model, zoo.make_tokenizer())
    assert [row["prompt"] for row in kept] == [row["prompt"] for row in PAIRS]
    assert "3 of 5 pairs" in capsys.readouterr().out
