"""sft.py: the loss is on completion and EOS only, and weighs every token alike. Runs of stages 1 and 2."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
from conftest import ROOT, launch, make_gpt2, make_llama, read_jsonl, write_jsonl
from tokenizers.processors import TemplateProcessing

import dpo
import reward_model
import sft

ROWS = [
    {"prompt": "3 + 5 ?", "completion": "think 3 + 5 = 8 answer 8"},
    {"prompt": "1 - 2 + 3 - 4 ?", "completion": "answer 8"},
    {"prompt": "9 ?", "completion": "think 9 answer 9"},
]


def run(script=sft, **flags) -> None:
    flags = {name: x if isinstance(x, int | float) else str(x) for name, x in flags.items()}
    script.main(script.Args(**flags))


def launch_in_turn(script, folder, **flags) -> list[Path]:
    """Run with micro-batches of 16 and 5 here and with 3 on 2 ranks, which say nothing on stderr."""
    runs = [folder / str(size) for size in (16, 5, 3)]
    for size, run_dir in zip((16, 5), runs):
        run(script, **flags, micro_batch_size=size, run_dir=run_dir)
    more = as_flags(**flags, micro_batch_size=3, run_dir=runs[2])
    assert launch(script.__file__, *more, ranks=2).stderr == ""
    return runs


def refused(script, capsys, **flags) -> str:
    with pytest.raises(SystemExit) as end:
        run(script, **flags)
    said = capsys.readouterr().err.strip()
    assert end.value.code == 2 and said.startswith("error: ") and "\n" not in said
    return said


def gradient(run_dir) -> torch.Tensor:
    """Of a run of one step: ten times AdamW's first moment."""
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)["optimizer"]["state"]
    return torch.cat([x["exp_avg"].flatten() for x in state.values()]) * 10


def as_flags(**flags) -> list[str]:
    return [x for name, value in flags.items() for x in (f"--{name}", str(value))]


def save_start(folder, tokenizer, make=make_llama, pad="<pad>", chat_template=None):
    """A model with random weights and the toy's tokenizer, with this pad token in tokenizer and config."""
    tokenizer.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token, tokenizer.chat_template = pad, chat_template
    tokenizer.save_pretrained(folder)
    model = make()
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def start(tmp_path, tokenizer):
    return save_start(tmp_path / "start", tokenizer)


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
    data = write_jsonl(tmp_path / "few.jsonl", read_jsonl(ROOT / "toy" / "demonstrations.jsonl")[:24])
    flags = {"model": start, "dataset": data, "batch_size": 16, "eval_size": 8, "num_epochs": 1}
    runs = launch_in_turn(sft, tmp_path, **flags, max_grad_norm=1e9)
    gradients = [gradient(run_dir) for run_dir in runs]
    metrics = [read_jsonl(run_dir / "metrics.jsonl") for run_dir in runs]
    losses = [[x.get("loss") or x["eval/loss"] for x in lines] for lines in metrics]
    assert len(losses[0]) == 3  # held out before, trained, held out after
    for i in (1, 2):
        assert float((gradients[0] - gradients[i]).norm() / gradients[0].norm()) < 1e-6
        assert losses[i] == pytest.approx(losses[0], rel=1e-5)


def test_it_learns_to_stop(tmp_path, start):
    """From random weights to the right answer and EOS, which is never sampled if it was not learned."""
    data = write_jsonl(tmp_path / "data.jsonl", ROWS * 9)
    flags = {"model": start, "dataset": data, "batch_size": 24, "num_epochs": 60, "learning_rate": 1e-2}
    run(**flags, eval_size=3, eval_every=60, run_dir=tmp_path / "run")
    metrics = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert metrics[-1]["eval/loss"] < 0.01 < 1 < metrics[0]["eval/loss"]
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")[-3:]
    assert [x["response"] for x in samples] == [f"{row['completion']} <eos>" for row in ROWS]


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
    assert len({tuple(x) for x in (first, second, prompts)}) == (3 if shuffle else 1)


TOY = {sft: "demonstrations.jsonl", reward_model: "preferences_train.jsonl", dpo: "preferences_train.jsonl"}


@pytest.mark.parametrize("script", TOY)
def test_checkpointing_and_bfloat16(tmp_path, script):
    data = write_jsonl(tmp_path / "few.jsonl", read_jsonl(ROOT / "toy" / TOY[script])[: 256 + 64])
    losses = {}
    for name, more in {"a": {}, "b": {"gradient_checkpointing": True}, "c": {"dtype": "bfloat16"}}.items():
        run(script, **more, dataset=data, batch_size=32, num_epochs=1, eval_every=1, run_dir=tmp_path / name)
        losses[name] = [x["loss"] for x in read_jsonl(tmp_path / name / "metrics.jsonl") if "loss" in x]
    assert losses["b"] == pytest.approx(losses["a"], rel=1e-5)
    assert losses["c"] != losses["a"] and losses["c"] == pytest.approx(losses["a"], rel=0.1)
    weights = next(iter(torch.load(tmp_path / "c" / "checkpoint.pt", weights_only=True).values()))
    assert {x.dtype for x in weights.values()} == {torch.float32}


@pytest.mark.parametrize("script", TOY)
def test_a_killed_run_goes_on_to_the_last_bit_and_a_finished_one_does_nothing(tmp_path, capsys, script):
    data = write_jsonl(tmp_path / "few.jsonl", read_jsonl(ROOT / "toy" / TOY[script])[:64])
    flags = {"dataset": data, "batch_size": 8, "num_epochs": 12, "save_every": 5, "eval_every": 7}
    flags |= {"eval_size": 8, "num_epochs": 14} if script is sft else {"eval_dataset": data}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(script, **flags, run_dir=whole)
    command = [sys.executable, script.__file__, *as_flags(**flags, run_dir=killed)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while not (killed / "checkpoint.pt").exists() and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    for name in ("metrics.jsonl", "samples.jsonl"):  # logged after the checkpoint, to be made again
        (killed / name).open("a").write('{"iteration": 1000}\n')
    run(script, **flags, run_dir=killed)
    clock = {"tokens_per_second": 0, "pairs_per_second": 0}
    lines = [[x | clock for x in read_jsonl(folder / "metrics.jsonl")] for folder in (whole, killed)]
    assert lines[0] == lines[1] and len(lines[0]) > 110
    for name in ("samples.jsonl", "model/model.safetensors"):
        assert (whole / name).read_bytes() == (killed / name).read_bytes()
    before = {path: path.stat().st_mtime_ns for path in killed.rglob("*")}
    capsys.readouterr()
    run(script, **flags, run_dir=killed)
    assert "is finished after 9" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in killed.rglob("*")}
    assert "--batch_size 8" in refused(script, capsys, **flags | {"batch_size": 4}, run_dir=killed)


def test_samples_stay_within_the_positions_of_the_model(tmp_path, tokenizer):
    """Learned positions, a model that never stops, and a held-out example that takes all of them."""
    start, model = save_start(tmp_path / "start", tokenizer, make_gpt2), make_gpt2()
    model.transformer.wte.weight.data[1] = 0  # the logit of EOS, which the others exceed
    model.save_pretrained(start)
    long = {"prompt": "3 + " * 62 + "?", "completion": "answer 3"}
    assert sft.encode(tokenizer, long, "")["prompt_length"] + 3 == 128
    flags = {"model": start, "batch_size": 2, "eval_size": 3, "num_epochs": 1, "learning_rate": 0}
    data = write_jsonl(tmp_path / "data.jsonl", [*ROWS, ROWS[0], long])
    run(**flags, dataset=data, run_dir=tmp_path / "run")
    lengths = [len(x["response"].split()) for x in read_jsonl(tmp_path / "run" / "samples.jsonl")]
    assert lengths[:3] == [126, 124, 3]


PAIR = {"prompt": "3 ?", "chosen": "answer 3", "rejected": "answer 4"}
CHAT = [{"role": "assistant", "content": "4 ?"}, {"role": "user", "content": "3 ?"}]
LONG = "3 + " * 100


@pytest.mark.parametrize(
    "script, row, flags, words",
    [
        (sft, {}, {"batch_size": 4}, "3 of 3 examples --batch_size"),
        (sft, {}, {"learning_rate": float("nan")}, "--learning_rate nan"),
        (sft, {}, {"dataset": "toy/train.jsonl"}, "toy/train.jsonl: row 0 `completion`"),
        (sft, {}, {"model": "toy/reward_model"}, "toy/reward_model SequenceClassification"),
        (sft, {"completion": LONG}, {}, "--max_length 1024 128 positions"),
        (sft, {"completion": None}, {}, "row 0 `completion`"),
        (sft, {"prompt": ""}, {}, "row 0 `prompt`"),
        (sft, {"messages": CHAT}, {}, "row 0 `messages`"),
        (sft, {"messages": CHAT[::-1]}, {}, "row 0 no chat template"),
        (reward_model, {}, {"batch_size": 4}, "3 of 3 pairs give 4 or more"),
        (reward_model, {}, {"dataset": "toy/train.jsonl"}, "--dataset toy/train.jsonl: row 0 `chosen`"),
        (reward_model, {}, {"eval_dataset": "toy/train.jsonl"}, "--eval_dataset row 0 `chosen`"),
        (reward_model, {}, {"model": "outputs"}, "outputs score.weight"),
        (reward_model, {"rejected": "answer 3"}, {}, "0 of 3 pairs"),
        (reward_model, {"rejected": LONG}, {}, "--max_length 1024 128 positions"),
        (reward_model, {"rejected": None}, {}, "row 0 `rejected`"),
        (reward_model, {"prompt": CHAT[1:]}, {}, "row 0 chat_template"),
    ],
)
def test_bad_input_gets_one_sentence(tmp_path, capsys, monkeypatch, tokenizer, script, row, flags, words):
    monkeypatch.chdir(tmp_path)  # where "outputs" is a model of three outputs
    data = write_jsonl(tmp_path / "data.jsonl", [(ROWS[2] if script is sft else PAIR) | row] * 3)
    if flags.get("model") == "outputs":
        auto = transformers.AutoModelForSequenceClassification
        auto.from_pretrained(ROOT / "toy" / "policy", num_labels=3).save_pretrained("outputs")
        tokenizer.save_pretrained("outputs")
    default = {"dataset": data, "batch_size": 3, "run_dir": "run"} | ({"eval_size": 0} if script is sft else {})
    said = refused(script, capsys, **default | flags)
    assert all(word in said for word in words.split()) and not Path("run").exists(), said
