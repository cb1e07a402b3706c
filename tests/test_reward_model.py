"""reward_model.py: the Bradley-Terry loss, scores at the last token, the same scores in other programs."""

import math

import pytest
import tokenizers
import torch
import transformers
import zoo
from conftest import write_jsonl
from zoo import PAIRS, STAGE_MODELS, run_stage

import reward_model as rm

auto = transformers.AutoModelForSequenceClassification


def test_large_differences_do_not_overflow():
    assert rm.preference_loss(torch.tensor([1000.0, 1000.0, 1000.0, -1000.0]), torch.zeros(4)) == 250.0


def test_the_loss_is_the_equation_of_the_docstring():
    chosen, rejected, margins = [1.0, -0.5, 2.0], [0.25, 0.75, -1.0], [0.0, 0.5, 1.5]
    rows = list(zip(chosen, margins, rejected))
    expected = [-math.log(1 / (1 + math.exp(-(c - m - r)))) for c, m, r in rows]
    tensors = [torch.tensor(x, dtype=torch.float64) for x in (chosen, rejected, margins)]
    assert rm.preference_loss(*tensors).item() == pytest.approx(sum(expected) / 3, rel=1e-12)
    args = rm.Args(center_rewards_coefficient=0.3)
    centers = [0.3 * (c + r) ** 2 for c, _, r in rows]
    assert rm.center_loss(args, *tensors[:2]).item() == pytest.approx(sum(centers) / 3, rel=1e-12)


def test_a_text_without_a_prompt_has_one_bos():
    """Of the tokenizer, of the text, or a BOS that is also EOS, as OPT's."""
    tokenizer = zoo.make_tokenizer(bos=True)
    for text in ("3 + 5 ? answer 8", "<bos> 3 + 5 ? answer 8"):
        assert tokenizer.decode(rm.encode(tokenizer, "", text)) == "<bos> 3 + 5 ? answer 8 <eos>"
    template = tokenizers.processors.TemplateProcessing
    tokenizer.backend_tokenizer.post_processor = template("<eos> $A", special_tokens=[("<eos>", 1)])
    tokenizer.bos_token = "<eos>"
    for prompt, text in (("", "3 + 5 ? answer 8"), ("3 + 5 ?", "answer 8")):
        assert tokenizer.decode(rm.encode(tokenizer, prompt, text)) == "<eos> 3 + 5 ? answer 8 <eos>"


@pytest.mark.parametrize("pad", ["<pad>", "<eos>", None])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_saved_model_scores_the_last_attended_token(tmp_path, name, pad):
    """With padding on either side. transformers needs a pad token that is not EOS."""
    start = zoo.save(tmp_path / "start", zoo.make_model(name), zoo.make_tokenizer(pad=pad))
    data, folder = write_jsonl(tmp_path / "pairs.jsonl", PAIRS), tmp_path / "run" / "model"
    run_stage(rm, model=start, dataset=data, batch_size=3, num_epochs=2, run_dir=tmp_path / "run")
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


@torch.no_grad()
@pytest.mark.parametrize("name", STAGE_MODELS[:4])
def test_scores_are_those_of_one_unpadded_text_at_a_time(tmp_path, name):
    """Through transformers' own head. Loss and metrics: test_metrics.py."""
    start = zoo.save(tmp_path / "start", zoo.make_model(name), zoo.make_tokenizer())
    args = rm.Args(model=start, device="cpu", micro_batch_size=2, margin=0.7)
    model, tokenizer = rm.load_model(args)
    model.double()
    data = write_jsonl(tmp_path / "pairs.jsonl", PAIRS)
    rows = rm.load_rows(args, str(data), "train", model, tokenizer)
    for batch in rm.micro_batches(args, rows):
        part = batch["index"].tolist()
        for scores, side in zip(rm.pair_scores(args, model, batch), ("chosen", "rejected")):
            for i, score in zip(part, scores):
                text = f"{PAIRS[i]['prompt']} {PAIRS[i][side]} <eos>"
                expected = model(tokenizer(text, return_tensors="pt")["input_ids"]).logits[0, 0]
                torch.testing.assert_close(score, expected, rtol=1e-12, atol=0)
        expected = [PAIRS[i].get("margin", args.margin) for i in part]
        assert batch["margins"].tolist() == pytest.approx(expected)
