"""reward_model.py: the Bradley-Terry loss, scores at the last token, the same scores in other programs."""

import pytest
import torch
import transformers
import zoo
from conftest import ROOT, read_jsonl, write_jsonl
from driver import Recorder
from zoo import PAIRS, STAGE_MODELS, run_stage

import reward_model as rm

TOY = ROOT / "toy"
auto = transformers.AutoModelForSequenceClassification


def test_large_differences_do_not_overflow():
    assert rm.preference_loss(torch.tensor([1000.0, -1000.0]), torch.zeros(2)) == 500.0


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


@pytest.mark.parametrize("name", STAGE_MODELS[:4])
def test_the_gradient_is_the_plain_one(tmp_path, name):
    """That of one unpadded text at a time through transformers' own head. Metrics: test_metrics.py."""
    rows = read_jsonl(TOY / "preferences_train.jsonl")[:16]
    for i, row in enumerate(rows):
        row["margin"] = (0.0, 0.3, None)[i % 3]  # None takes the flag's
    data = str(write_jsonl(tmp_path / "few.jsonl", rows))
    start = zoo.save(tmp_path / "start", zoo.make_model(name), zoo.make_tokenizer())
    flags = {"model": start, "dataset": data, "run_dir": str(tmp_path / "run")}
    flags |= {"device": "cpu", "margin": 0.7, "center_rewards_coefficient": 0.3, "warmup_iterations": 0}
    flags |= {"num_epochs": 1, "batch_size": 16, "max_grad_norm": 1e9}
    seen = Recorder(rm, sample=False).run(flags)
    (gradient,) = seen["gradients"]

    model, tokenizer = rm.load_model(rm.Args(model=start, device="cpu"))
    model.double()
    loss = 0.0
    for row in rows:
        texts = [f"{row['prompt']} {row[side]} <eos>" for side in ("chosen", "rejected")]
        chosen, rejected = (model(tokenizer(x, return_tensors="pt")["input_ids"]).logits[0, 0] for x in texts)
        margin = 0.7 if row["margin"] is None else row["margin"]
        loss = loss + (1 + torch.exp(rejected + margin - chosen)).log() / 16
        loss = loss + 0.3 * (chosen + rejected) ** 2 / 16
    loss.backward()
    expected_gradient = torch.cat([x.grad.flatten() for x in model.parameters()])
    assert (gradient - expected_gradient).norm() < 1e-12 * expected_gradient.norm()
