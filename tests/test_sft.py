"""sft.py: the loss is on completion and EOS only, weighs every token alike, and learning lowers it."""

import importlib
import sys

import pytest
import torch
import transformers
from conftest import ROOT, launch, make_gpt2, make_llama, read_jsonl, the_run, write_jsonl

import sft

ROWS = [
    {"prompt": "3 + 5 ?", "completion": "think 3 + 5 = 8 answer 8"},
    {"prompt": "1 - 2 + 3 - 4 ?", "completion": "answer 8"},
    {"prompt": "9 ?", "completion": "think 9 answer 9"},
]


@pytest.mark.parametrize("make", [make_llama, make_gpt2])
def test_loss_is_the_mean_over_completion_tokens_and_eos(tokenizer, make):
    """Against one unpadded example at a time, token by token."""
    model = make().double().eval()
    rows = [sft.encode(tokenizer, row) for row in ROWS]
    assert [row["ids"][row["prompt_length"] :][-1] for row in rows] == [tokenizer.eos_token_id] * 3
    count = sft.num_completion_tokens(rows)
    batch = sft.collate(rows, pad_id=0, device=torch.device("cpu"))
    assert count == 9 + 3 + 5 == int(batch[2].sum())
    total = 0.0
    for row in rows:
        logprobs = model(torch.tensor([row["ids"]])).logits[0].log_softmax(-1)
        for t in range(row["prompt_length"], len(row["ids"])):
            total -= float(logprobs[t - 1, row["ids"][t]].detach())
    assert float(sft.completion_loss(model, *batch, count).detach()) == pytest.approx(total / count, rel=1e-10)


def test_eos_counts_when_it_is_the_pad_token_too(tokenizer):
    rows = [sft.encode(tokenizer, row) for row in ROWS]
    input_ids, attention_mask, completion_mask = sft.collate(rows, pad_id=1, device=torch.device("cpu"))
    for ids, attended, completion, row in zip(input_ids, attention_mask, completion_mask, rows):
        assert int(attended.sum()) == len(row["ids"]) and completion.nonzero().max() == len(row["ids"]) - 1
        assert ids[completion][-1] == 1


def test_messages_and_chats_are_the_same_example(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    chatty = transformers.AutoTokenizer.from_pretrained(tmp_path)
    chatty.chat_template = (
        "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    user, assistant = {"role": "user", "content": "3 + 5 ?"}, {"role": "assistant", "content": "answer 8"}
    one = sft.encode(chatty, {"messages": [user, assistant]})
    other = sft.encode(chatty, {"prompt": [user], "completion": [assistant]})
    assert one == other
    assert one["ids"] == tokenizer("3 + 5 ? = answer 8 <eos>")["input_ids"] and one["prompt_length"] == 5


def run_sft(monkeypatch, *flags) -> None:
    monkeypatch.setattr(sys, "argv", ["sft", *map(str, flags)])
    importlib.import_module("sft").main(sft.parse_args())


def last_gradient_step(runs_dir) -> dict:
    """First moment of AdamW after one step: a tenth of the gradient."""
    state = torch.load(next(the_run(runs_dir).glob("checkpoints/*.pt")), weights_only=True)["optimizer"]["state"]
    return {name: entry["exp_avg"] for name, entry in state.items()}


def test_gradient_does_not_depend_on_micro_batches_or_ranks(tmp_path, monkeypatch):
    lines = (ROOT / "toy" / "demonstrations.jsonl").open().readlines()[:16]
    (tmp_path / "few.jsonl").write_text("".join(lines))
    flags = ["--dataset", tmp_path / "few.jsonl", "--batch_size", "16", "--eval_size", "0", "--num_epochs", "1"]
    make_llama().save_pretrained(tmp_path / "start")  # untrained: its gradient is no difference of large numbers
    transformers.AutoTokenizer.from_pretrained(ROOT / "toy" / "base").save_pretrained(tmp_path / "start")
    flags += ["--max_grad_norm", "1e9", "--model", tmp_path / "start"]
    moments = []
    for size in (16, 4, 1):
        run_sft(monkeypatch, *flags, "--micro_batch_size", size, "--runs_dir", tmp_path / str(size))
        moments.append(last_gradient_step(tmp_path / str(size)))
    launch(ROOT / "sft.py", *flags, "--micro_batch_size", "3", "--runs_dir", tmp_path / "ranks", ranks=2)
    moments.append(last_gradient_step(tmp_path / "ranks"))
    flat = [torch.cat([x.flatten() for x in moment.values()]) for moment in moments]
    for other in flat[1:]:
        assert float((flat[0] - other).norm() / flat[0].norm()) < 1e-6


def test_it_learns_to_stop(tmp_path, monkeypatch):
    """From random weights to the one right answer with EOS; an EOS outside the loss would never be sampled."""
    make_llama().save_pretrained(tmp_path / "start")
    transformers.AutoTokenizer.from_pretrained(ROOT / "toy" / "base").save_pretrained(tmp_path / "start")
    data = write_jsonl(tmp_path / "data.jsonl", ROWS * 8)
    flags = ["--model", tmp_path / "start", "--dataset", data, "--batch_size", "24", "--num_epochs", "60"]
    run_sft(monkeypatch, *flags, "--eval_size", "0", "--runs_dir", tmp_path / "runs", "--learning_rate", "1e-2")
    metrics = read_jsonl(the_run(tmp_path / "runs") / "metrics.jsonl")
    assert metrics[-1]["loss"] < 0.01 < 1 < metrics[1]["loss"]
    folder = the_run(tmp_path / "runs") / "model"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for row in ROWS:
        ids = tokenizer(row["prompt"], return_tensors="pt")["input_ids"]
        output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=30)
        assert tokenizer.decode(output[0]) == f"{row['prompt']} {row['completion']} <eos>"


def test_order_of_the_file_is_kept_without_shuffle(tmp_path, monkeypatch):
    seen = []
    collate = sft.collate
    monkeypatch.setattr(
        sft, "collate", lambda rows, *a: (seen.append([r["prompt"] for r in rows]), collate(rows, *a))[1]
    )
    data = write_jsonl(tmp_path / "data.jsonl", [{"prompt": f"{i} ?", "completion": "answer 1"} for i in range(10)])
    flags = ["--dataset", data, "--batch_size", "2", "--eval_size", "0", "--num_epochs", "1", "--no_shuffle"]
    run_sft(monkeypatch, *flags, "--runs_dir", tmp_path / "runs")
    assert [prompt for batch in seen for prompt in batch] == [f"{i} ?" for i in range(10)]


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--batch_size", "100000"], ["--batch_size 100000", "examples"]),
        (["--dataset", "no/such.jsonl"], ["cannot be read"]),
        (["--dataset", str(ROOT / "toy" / "train.jsonl")], ["`completion`"]),
        (["--num_epochs", "0"], ["--num_epochs 0"]),
        (["--model", "no/such"], ["--model no/such"]),
        (["--dataset", "{tmp}/null.jsonl"], ["row 0 cannot be made tokens"]),
    ],
)
def test_bad_input_gets_one_sentence(tmp_path, monkeypatch, capsys, flags, words):
    write_jsonl(tmp_path / "null.jsonl", [{"prompt": "3 ?", "completion": None}])
    with pytest.raises(SystemExit) as exit:
        run_sft(monkeypatch, "--runs_dir", tmp_path / "runs", *(flag.format(tmp=tmp_path) for flag in flags))
    said = capsys.readouterr().err.strip()
    assert exit.value.code == 2 and said.startswith("error: ") and "\n" not in said
    assert all(word in said for word in words), said
    assert not (tmp_path / "runs").exists()
