"""sft.py: the loss is on completion and EOS only, weighs every token alike, and learning lowers it."""

import signal
import subprocess
import sys
import time

import pytest
import torch
import transformers
from conftest import ROOT, launch, make_gpt2, make_llama, read_jsonl, write_jsonl

import sft

ROWS = [
    {"prompt": "3 + 5 ?", "completion": "think 3 + 5 = 8 answer 8"},
    {"prompt": "1 - 2 + 3 - 4 ?", "completion": "answer 8"},
    {"prompt": "9 ?", "completion": "think 9 answer 9"},
]
CLOCK = "tokens_per_second"


def run(**flags) -> None:
    sft.main(sft.Args(**{name: x if isinstance(x, int | float) else str(x) for name, x in flags.items()}))


def as_flags(**flags) -> list[str]:
    return [x for name, value in flags.items() for x in (f"--{name}", str(value))]


@pytest.fixture
def start(tmp_path, tokenizer):
    """An untrained model with the toy's tokenizer, whose gradients are no difference of large numbers."""
    make_llama().save_pretrained(tmp_path / "start")
    tokenizer.save_pretrained(tmp_path / "start")
    return tmp_path / "start"


@pytest.mark.parametrize("max_logits", [sft.MAX_LOGITS, 40])  # at once, and two positions at a time
@pytest.mark.parametrize("make", [make_llama, make_gpt2])
def test_loss_and_gradient_are_the_plain_ones(tokenizer, monkeypatch, make, max_logits):
    """Against one unpadded example at a time, token by token from the first of the completion to EOS."""
    monkeypatch.setattr(sft, "MAX_LOGITS", max_logits)
    model = make().double().eval()
    rows = [sft.encode(tokenizer, row, "") for row in ROWS]
    count = sum(row["num_tokens"] for row in rows)
    assert count == 9 + 3 + 5
    plain = 0.0
    for row in ROWS:
        prompt = tokenizer(row["prompt"])["input_ids"]
        ids = prompt + tokenizer(row["completion"])["input_ids"] + [tokenizer.eos_token_id]
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        plain = plain - sum(logprobs[t - 1, ids[t]] for t in range(len(prompt), len(ids)))
    plain = plain / count
    expected = torch.autograd.grad(plain, list(model.parameters()))
    for size in (3, 2):
        losses = [sft.completion_loss(model, *mb, count) for mb in sft.micro_batches(rows, size, "cpu")]
        assert float(sum(losses).detach()) == pytest.approx(float(plain.detach()), rel=1e-10)
        for x, y in zip(torch.autograd.grad(sum(losses), list(model.parameters())), expected):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-12)


def test_texts_and_chats_as_ids_with_one_bos_and_one_eos(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    chatty = transformers.AutoTokenizer.from_pretrained(tmp_path)
    from tokenizers.processors import TemplateProcessing

    bos = tokenizer.convert_tokens_to_ids("=")  # before every text, as Llama's, and in the template too
    chatty._tokenizer.post_processor = TemplateProcessing(single="= $A", special_tokens=[("=", bos)])
    chatty.bos_token = "="
    chatty.chat_template = (
        "{{ bos_token }} {% for m in messages %}{{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}think{% endif %}"
    )
    text = sft.encode(chatty, {"prompt": "3 + 5 ?", "completion": "answer 8"}, "")
    assert text["ids"] == tokenizer("= 3 + 5 ? answer 8 <eos>")["input_ids"]
    assert text["prompt_length"] == 5 and text["num_tokens"] == 3
    user, assistant = {"role": "user", "content": "3 + 5 ?"}, {"role": "assistant", "content": "answer 8"}
    rows = [{"messages": [user, assistant]}]
    rows += [{"prompt": [user], "completion": x, "messages": None} for x in ([assistant], "answer 8")]
    for row in rows:
        chat = sft.encode(chatty, row, "")
        assert chat["ids"] == tokenizer("= 3 + 5 ? think answer 8 <eos>")["input_ids"]
        assert chat["prompt_length"] == 6 and chat["num_tokens"] == 3


def test_gradient_depends_on_neither_micro_batches_nor_ranks(tmp_path, start):
    """AdamW's first moment after one step is a tenth of the gradient. Nothing is said on stderr."""
    data = write_jsonl(tmp_path / "few.jsonl", read_jsonl(ROOT / "toy" / "demonstrations.jsonl")[:24])
    flags = {"model": start, "dataset": data, "batch_size": 16, "eval_size": 8, "num_epochs": 1}
    flags["max_grad_norm"] = 1e9
    for size in (16, 5):
        run(**flags, micro_batch_size=size, run_dir=tmp_path / str(size))
    more = as_flags(**flags, micro_batch_size=3, run_dir=tmp_path / "ranks")
    assert launch(ROOT / "sft.py", *more, ranks=2).stderr == ""
    moments, metrics = [], []
    for name in ("16", "5", "ranks"):
        state = torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["optimizer"]["state"]
        moments.append(torch.cat([x["exp_avg"].flatten() for x in state.values()]))
        metrics.append(
            [x.get("loss") or x["eval/loss"] for x in read_jsonl(tmp_path / name / "metrics.jsonl")]
        )
    for other, numbers in zip(moments[1:], metrics[1:]):
        assert float((moments[0] - other).norm() / moments[0].norm()) < 1e-6
        assert numbers == pytest.approx(metrics[0], rel=1e-5)
    assert len(metrics[0]) == 3  # held out before, trained, held out after


def test_it_learns_to_stop(tmp_path, start):
    """From random weights to the right answer and EOS, which would never be sampled if it were not learned."""
    data = write_jsonl(tmp_path / "data.jsonl", ROWS * 9)
    flags = {"model": start, "dataset": data, "batch_size": 24, "num_epochs": 60, "learning_rate": 1e-2}
    run(**flags, eval_size=3, eval_every=60, run_dir=tmp_path / "run")
    metrics = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert metrics[-1]["eval/loss"] < 0.01 < 1 < metrics[0]["eval/loss"]
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")[-3:]
    assert [x["response"] for x in samples] == [f"{row['completion']} <eos>" for row in ROWS]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    for row in ROWS:
        ids = tokenizer(row["prompt"], return_tensors="pt")["input_ids"]
        output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=30)
        assert tokenizer.decode(output[0]) == f"{row['prompt']} {row['completion']} <eos>"


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_has_every_example_once(tmp_path, start, monkeypatch, shuffle):
    seen, micro_batches = [], sft.micro_batches

    def recording(rows, *rest):
        seen.extend(row["prompt"] for row in rows)
        return micro_batches(rows, *rest)

    monkeypatch.setattr(sft, "micro_batches", recording)
    prompts = [f"{i} ?" for i in range(10)]
    data = write_jsonl(tmp_path / "data.jsonl", [{"prompt": x, "completion": "answer 1"} for x in prompts])
    flags = {"model": start, "dataset": data, "batch_size": 2, "eval_size": 0, "num_epochs": 2}
    run(**flags, shuffle=shuffle, run_dir=tmp_path / "run")
    first, second = seen[:10], seen[10:]
    assert sorted(first) == sorted(second) == prompts
    assert (
        (first == second == prompts) if not shuffle else (first != second and prompts not in (first, second))
    )


def test_checkpointing_and_bfloat16(tmp_path, start):
    data = write_jsonl(tmp_path / "few.jsonl", read_jsonl(ROOT / "toy" / "demonstrations.jsonl")[:40])
    flags = {"model": start, "dataset": data, "batch_size": 16, "eval_size": 8, "num_epochs": 2}
    losses = {}
    for name, more in {"a": {}, "b": {"gradient_checkpointing": True}, "c": {"dtype": "bfloat16"}}.items():
        run(**flags, **more, run_dir=tmp_path / name)
        metrics = read_jsonl(tmp_path / name / "metrics.jsonl")
        losses[name] = [x["loss"] for x in metrics if "loss" in x]
    assert losses["b"] == pytest.approx(losses["a"], rel=1e-5)
    assert losses["c"] != losses["a"] and losses["c"] == pytest.approx(losses["a"], rel=0.05)
    state = torch.load(tmp_path / "c" / "checkpoint.pt", weights_only=True)
    assert {x.dtype for x in state["policy"].values()} == {torch.float32}


def test_a_killed_run_goes_on_to_the_last_bit_and_a_finished_one_does_nothing(tmp_path, capsys):
    data = write_jsonl(tmp_path / "few.jsonl", read_jsonl(ROOT / "toy" / "demonstrations.jsonl")[:72])
    flags = {"dataset": data, "batch_size": 8, "eval_size": 8, "num_epochs": 12}
    flags |= {"save_every": 5, "eval_every": 7}
    run(**flags, run_dir=tmp_path / "whole")
    command = [sys.executable, ROOT / "sft.py", *as_flags(**flags, run_dir=tmp_path / "killed")]
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL)
    while not (tmp_path / "killed" / "checkpoint.pt").exists() and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    run(**flags, run_dir=tmp_path / "killed")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    lines = [[x | {CLOCK: 0} for x in read_jsonl(folder / "metrics.jsonl")] for folder in (whole, killed)]
    assert lines[0] == lines[1] and len(lines[0]) == 96 + 15
    for name in ("samples.jsonl", "model/model.safetensors"):
        assert (whole / name).read_bytes() == (killed / name).read_bytes()
    before = {path: path.stat().st_mtime_ns for path in killed.rglob("*")}
    capsys.readouterr()
    run(**flags, run_dir=killed)
    assert "is finished after 96 iterations" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in killed.rglob("*")}


LONG = {"prompt": "3 + " * 100 + "?", "completion": "answer 3"}
CHAT = [{"role": "assistant", "content": "4 ?"}, {"role": "user", "content": "3 ?"}]


@pytest.mark.parametrize(
    "rows, flags, words",
    [
        ([*ROWS, LONG], {}, ["--max_length 1024", "128 positions"]),
        (ROWS, {"batch_size": 4}, ["3 of 3 examples", "--batch_size"]),
        (ROWS, {"max_length": 8}, ["1 of 3 examples", "--max_length 8"]),
        (ROWS, {"learning_rate": float("nan")}, ["--learning_rate nan"]),
        (ROWS, {"dataset": "no/such.jsonl"}, ["--dataset no/such.jsonl"]),
        (ROWS, {"dataset": "toy/train.jsonl"}, ["--dataset toy/train.jsonl: row 0", "`completion`"]),
        (ROWS, {"model": "no/such"}, ["--model no/such"]),
        (ROWS, {"model": "toy/reward_model"}, ["--model toy/reward_model", "SequenceClassification"]),
        ([ROWS[0], {"prompt": "3 ?", "completion": None}], {}, ["row 1"]),
        ([ROWS[0], {"prompt": "", "completion": "answer 3"}], {}, ["row 1"]),
        ([{"messages": CHAT}], {}, ["row 0", "`messages`"]),
        ([{"messages": CHAT[::-1]}], {}, ["row 0", "no chat template"]),
    ],
)
def test_bad_input_gets_one_sentence(tmp_path, capsys, rows, flags, words):
    data = write_jsonl(tmp_path / "data.jsonl", rows)
    flags = {"dataset": data, "eval_size": 0, "batch_size": 3, "run_dir": tmp_path / "run"} | flags
    with pytest.raises(SystemExit) as end:
        run(**flags)
    said = capsys.readouterr().err.strip()
    assert end.value.code == 2 and said.startswith("error: ") and "\n" not in said
    assert all(word in said for word in words), said
    assert not (tmp_path / "run").exists()


def test_samples_stay_within_the_positions_of_the_model(tmp_path, tokenizer):
    """A model of learned positions that never stops, and an example that takes all of them."""
    model = make_gpt2()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path / "start")
    tokenizer.save_pretrained(tmp_path / "start")
    rows = [LONG | {"prompt": "3 + " * 62 + "?"}, *ROWS, ROWS[0]]
    data = write_jsonl(tmp_path / "data.jsonl", rows[::-1])
    run(
        model=tmp_path / "start",
        dataset=data,
        batch_size=2,
        eval_size=3,
        num_epochs=1,
        run_dir=tmp_path / "run",
    )
    assert len(read_jsonl(tmp_path / "run" / "samples.jsonl")) == 6


def test_other_flags_are_another_run(tmp_path, capsys, start):
    flags = {"model": start, "dataset": write_jsonl(tmp_path / "data.jsonl", ROWS), "batch_size": 3}
    run(**flags, eval_size=0, num_epochs=1, run_dir=tmp_path / "run")
    with pytest.raises(SystemExit):
        run(**flags, eval_size=0, num_epochs=2, run_dir=tmp_path / "run")
    assert "--num_epochs 1" in capsys.readouterr().err
