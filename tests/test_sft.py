"""sft.py: the loss is on completion and EOS only, each token with the same weight. Runs of stages 1 and 2."""

import inspect
import json
import signal
from pathlib import Path

import pytest
import soak
import torch
import transformers
import zoo
from conftest import ROOT, launch, read_jsonl, words_of, write_jsonl

import dpo
import grpo
import reward_model
import sft

DATA = {sft: "demonstrations.jsonl", reward_model: "preferences_train.jsonl", dpo: "preferences_train.jsonl"}
ROWS = [
    {"prompt": "3 + 5 ?", "completion": "think 3 + 5 = 8 answer 8"},
    {"prompt": "1 - 2 + 3 - 4 ?", "completion": "answer 8"},
    {"prompt": "9 ?", "completion": "think 9 answer 9"},
]
ARCHITECTURES = ["llama", "gpt2", "gemma2", "bloom", "mistral", "lfm2", "falcon_h1"]
FLOAT32_INSIDE = ("gemma2", "bloom", "falcon_h1")  # also after .double()
IN_FLOAT64 = """
import sys
import torch
import tyro
sys.path.insert(0, {root!r})
import {name} as script

def load_float64(*args):
    model, tokenizer = load(*args)
    return model.double(), tokenizer

torch.set_default_dtype(torch.float64)
load, script.load = script.load, load_float64
script.main(tyro.cli(script.Args, use_underscores=True))
sys.path.append({root!r} + "/tests")
import driver
driver.check_gloo_ended()
"""


def run(script=sft, **flags) -> None:
    flags = {name: x if isinstance(x, int | float) else str(x) for name, x in flags.items()}
    script.main(script.Args(**{"device": "cpu"} | flags))


def launch_in_turn(script, folder, **flags) -> list[Path]:
    """Run in float64 with micro-batches of 16, and of 3 on 2 ranks. Nothing is printed to stderr."""
    program, runs = folder / "program.py", []
    program.write_text(IN_FLOAT64.format(root=str(ROOT), name=script.__name__))
    for size, ranks in ((16, 1), (3, 2)):
        runs.append(folder / str(size))
        more = words_of(device="cpu", micro_batch_size=size, run_dir=runs[-1], **flags)
        assert launch(program, *more, ranks=ranks).stderr == ""
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


def gradient_of(model, loss: torch.Tensor) -> torch.Tensor:
    parts = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return torch.cat([x.flatten() for x in parts if x is not None])


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The norm of the difference, as a share."""
    return float((one - other).norm() / other.norm())


def save_start(folder, tokenizer, name="llama", pad="<pad>", chat_template=None):
    """A model with random weights and the toy's tokenizer, with this pad token in tokenizer and config."""
    tokenizer.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token, tokenizer.chat_template = pad, chat_template
    tokenizer.save_pretrained(folder)
    model = zoo.make_model(name, vocab_size=19)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def start(tmp_path, tokenizer):
    return save_start(tmp_path / "start", tokenizer)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_loss_and_gradient_are_the_plain_ones(name):
    """Those of one unpadded example at a time, token by token."""
    model, tokenizer = zoo.make_model(name).double(), zoo.make_tokenizer()
    rows = [sft.encode(tokenizer, row, "") for row in ROWS]
    count = sum(sum(row["completion_mask"]) for row in rows)
    assert count == 9 + 3 + 5
    plain = 0.0
    for row in ROWS:
        prompt = tokenizer(row["prompt"])["input_ids"]
        ids = prompt + tokenizer(row["completion"])["input_ids"] + [tokenizer.eos_token_id]
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        plain = plain - sum(logprobs[t - 1, ids[t]] for t in range(len(prompt), len(ids))) / count
    expected, tolerance = gradient_of(model, plain), 1e-6 if name in FLOAT32_INSIDE else 1e-12
    for size in (3, 2):
        loss = sum(sft.completion_loss(model, mb, count) for mb in sft.micro_batches(rows, size, "cpu"))
        assert loss.dtype == torch.float64
        assert float(loss.detach()) == pytest.approx(float(plain.detach()), rel=tolerance)
        assert difference(gradient_of(model, loss), expected) < tolerance


def test_texts_and_chats_become_ids_with_one_bos_and_one_eos():
    tokenizer = zoo.make_tokenizer(bos=True, chat=True)
    text = sft.encode(tokenizer, {"prompt": "3 + 5 ?", "completion": "answer 8"}, "")
    assert tokenizer.decode(text["input_ids"]) == "<bos> 3 + 5 ? answer 8 <eos>"
    assert len(text["prompt_ids"]) == 5 and text["completion_mask"] == [False] * 5 + [True] * 3
    user, assistant = {"role": "user", "content": "3 + 5 ?"}, {"role": "assistant", "content": "answer 8"}
    rows = [{"messages": [user, assistant]}]
    rows += [{"prompt": [user], "completion": x, "messages": None} for x in ([assistant], "answer 8")]
    for row in rows:
        chat = sft.encode(tokenizer, row, "")
        assert tokenizer.decode(chat["input_ids"]) == "<bos> <user> 3 + 5 ? <end> <model> answer 8 <eos>"
        assert len(chat["prompt_ids"]) == 8 and chat["completion_mask"] == [False] * 8 + [True] * 3


def test_gradient_depends_on_neither_micro_batches_nor_ranks(tmp_path, start):
    data = write_jsonl(tmp_path / "few.jsonl", read_jsonl(ROOT / "toy" / DATA[sft])[:24])
    flags = {"model": start, "dataset": data, "batch_size": 16, "eval_size": 8, "num_epochs": 1}
    runs = launch_in_turn(sft, tmp_path, **flags, max_grad_norm=1e9, warmup_iterations=0)
    metrics = [read_jsonl(run_dir / "metrics.jsonl") for run_dir in runs]
    losses = [[x.get("loss") or x["eval/loss"] for x in lines] for lines in metrics]
    assert len(losses[0]) == 3 and losses[0][2] < losses[0][0]  # evaluated, trained, evaluated
    assert difference(gradient(runs[1]), gradient(runs[0])) < 1e-12
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)


def test_it_learns_to_stop(tmp_path, start):
    """From random weights to the right answer and EOS."""
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


def test_samples_stay_within_the_positions_of_the_model(tmp_path, tokenizer):
    """A model that never stops, and an example that takes all positions."""
    start = save_start(tmp_path / "start", tokenizer, "gpt2")
    model = transformers.AutoModelForCausalLM.from_pretrained(start)
    model.transformer.wte.weight.data[1] = 0  # the logit of EOS, which the others exceed
    model.save_pretrained(start)
    long = {"prompt": "3 + " * 62 + "?", "completion": "answer 3"}
    assert len(sft.encode(tokenizer, long, "")["input_ids"]) == 128
    flags = {"model": start, "batch_size": 2, "eval_size": 3, "num_epochs": 1, "learning_rate": 0}
    data = write_jsonl(tmp_path / "data.jsonl", [*ROWS, ROWS[0], long])
    run(**flags, dataset=data, run_dir=tmp_path / "run")
    lengths = [len(x["response"].split()) for x in read_jsonl(tmp_path / "run" / "samples.jsonl")]
    assert lengths[:3] == [126, 124, 3]


# From here on: sft.py, reward_model.py and dpo.py.


def test_helpers_are_those_of_grpo():
    """So that the tests of grpo.py hold for them."""
    shared = "all_sum optimizer_step check explain say choose_device connect_ranks recomputed replacing"
    for mother, names in ((grpo, f"{shared} start_run save_checkpoint"), (sft, "check_args locate find_run")):
        for name in names.split():
            for script in DATA:
                assert inspect.getsource(getattr(script, name)) == inspect.getsource(getattr(mother, name))


@pytest.mark.parametrize("script", DATA)
def test_checkpointing_and_bfloat16(tmp_path, script):
    data = write_jsonl(tmp_path / "few.jsonl", read_jsonl(ROOT / "toy" / DATA[script])[: 256 + 64])
    losses = {}
    for name, more in {"a": {}, "b": {"gradient_checkpointing": True}, "c": {"dtype": "bfloat16"}}.items():
        run(script, **more, dataset=data, batch_size=32, num_epochs=1, eval_every=1, run_dir=tmp_path / name)
        losses[name] = [x["loss"] for x in read_jsonl(tmp_path / name / "metrics.jsonl") if "loss" in x]
    assert losses["b"] == pytest.approx(losses["a"], rel=1e-5)
    assert losses["c"] != losses["a"] and losses["c"] == pytest.approx(losses["a"], rel=0.1)
    key = "reward_model" if script is reward_model else "policy"
    weights = torch.load(tmp_path / "c" / "checkpoint.pt", weights_only=True)[key]
    assert {x.dtype for x in weights.values()} == {torch.float32}


@pytest.mark.parametrize("script", DATA)
def test_activations_are_recomputed_only_for_gradients(script, monkeypatch):
    model, _ = script.load(script.Args(gradient_checkpointing=True), torch.device("cpu"))
    assert not model.training
    calls = []
    model.get_decoder().layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    model(torch.tensor([[3, 4, 5]])).logits.sum().backward()
    assert len(calls) == 2
    monkeypatch.setattr(script, "checkpoint_activations", None)
    with torch.no_grad():
        model(torch.tensor([[3, 4, 5]]))
    assert len(calls) == 3


@pytest.mark.parametrize("script", DATA, ids=lambda script: script.__name__)
def test_a_killed_run_resumes_to_the_last_bit_and_a_finished_one_does_nothing(tmp_path, capsys, script):
    data = write_jsonl(tmp_path / "few.jsonl", read_jsonl(ROOT / "toy" / DATA[script])[:64])
    flags = {"dataset": data, "batch_size": 8, "num_epochs": 3, "save_every": 5, "eval_every": 7}
    flags |= {"warmup_iterations": 4} | ({"eval_size": 8} if script is sft else {"eval_dataset": data})
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(script, **flags, run_dir=whole)
    process = soak.start(script.__name__, 1, killed, *words_of(device="cpu", **flags), kill="torn line:11")
    assert soak.wait(process, killed) == -signal.SIGKILL
    assert torch.load(killed / "checkpoint.pt", weights_only=True)["iteration"] == 5
    run(script, **flags, run_dir=killed)
    assert soak.differences(whole, killed) == []
    lines = read_jsonl(killed / "metrics.jsonl")
    rates = [x["learning_rate"] for x in lines if "learning_rate" in x]
    linear = [min(i / 4, (len(rates) - i) / (len(rates) - 4)) for i in range(len(rates))]
    assert rates == pytest.approx([script.Args.learning_rate * x for x in linear])
    before = {path: path.stat().st_mtime_ns for path in killed.rglob("*")}
    capsys.readouterr()
    run(script, **flags, run_dir=killed)
    assert f"is finished after {len(rates)} iterations" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in killed.rglob("*")}
    assert "--batch_size 4, was 8" in refused(script, capsys, **flags | {"batch_size": 4}, run_dir=killed)


PAIR = {"prompt": "3 ?", "chosen": "answer 3", "rejected": "answer 4"}
CHAT = [{"role": "assistant", "content": "4 ?"}, {"role": "user", "content": "3 ?"}]
LONG = "3 + " * 100


@pytest.mark.parametrize(
    "script, row, flags, words",
    [
        (sft, {}, {"batch_size": 4}, "3 of 3 examples --batch_size"),
        (sft, {}, {"learning_rate": float("nan")}, "--learning_rate nan"),
        (sft, {}, {"micro_batch_size": 0}, "--micro_batch_size 0"),
        (sft, {}, {"model": "no_eos"}, "--model no_eos: EOS"),
        (sft, {}, {"dataset": "toy/train.jsonl"}, "toy/train.jsonl: row 0 `completion`"),
        (sft, {}, {"model": "toy/reward_model"}, "toy/reward_model SequenceClassification"),
        (sft, {"completion": LONG}, {}, "--max_length 1024 128 positions"),
        (sft, {"completion": None}, {}, "row 0 `completion`"),
        (sft, {"prompt": ""}, {}, "row 0 `prompt`"),
        (sft, {"messages": CHAT}, {}, "row 0 `messages`"),
        (sft, {"messages": CHAT[::-1]}, {}, "row 0 chat template"),
        (reward_model, {}, {"batch_size": 4}, "3 of 3 pairs give 4 or more"),
        (reward_model, {}, {"dataset": "toy/train.jsonl"}, "--dataset toy/train.jsonl: row 0 `chosen`"),
        (reward_model, {}, {"eval_dataset": "toy/train.jsonl"}, "--eval_dataset row 0 `chosen`"),
        (reward_model, {}, {"model": "outputs"}, "outputs score.weight"),
        (reward_model, {"rejected": "answer 3"}, {}, "0 of 3 pairs"),
        (reward_model, {"rejected": LONG}, {}, "--max_length 1024 128 positions"),
        (reward_model, {"rejected": None}, {}, "row 0 `rejected`"),
        (reward_model, {"prompt": CHAT[1:]}, {}, "row 0 chat_template"),
        (dpo, {}, {"batch_size": 4}, "3 of 3 pairs give 4 or more"),
        (dpo, {}, {"model": "toy/reward_model"}, "toy/reward_model SequenceClassification"),
        (dpo, {}, {"beta": -0.1}, "--beta -0.1"),
        (dpo, {"rejected": None}, {}, "row 0 `rejected`"),
        (dpo, {"prompt": None}, {}, "row 0 empty prompt"),
        (dpo, {"prompt": CHAT[1:]}, {}, "row 0 chat_template"),
        (dpo, {"rejected": LONG}, {}, "--max_length 1024 128 positions"),
    ],
)
def test_bad_input_gets_one_line(tmp_path, capsys, monkeypatch, tokenizer, script, row, flags, words):
    monkeypatch.chdir(tmp_path)  # for the folders "outputs" and "no_eos"
    data = write_jsonl(tmp_path / "data.jsonl", [(ROWS[2] if script is sft else PAIR) | row] * 3)
    if flags.get("model") == "outputs":
        auto = transformers.AutoModelForSequenceClassification
        auto.from_pretrained(ROOT / "toy" / "policy", num_labels=3).save_pretrained("outputs")
        tokenizer.save_pretrained("outputs")
    if flags.get("model") == "no_eos":
        save_start(tmp_path / "no_eos", tokenizer)
        config = json.loads(Path("no_eos/tokenizer_config.json").read_text())
        del config["eos_token"]
        Path("no_eos/tokenizer_config.json").write_text(json.dumps(config))
    default = {"dataset": data, "batch_size": 3, "run_dir": "run"} | (
        {"eval_size": 0} if script is sft else {}
    )
    said = refused(script, capsys, **default | flags)
    assert all(word in said for word in words.split()) and not Path("run").exists(), said


def test_ranks_must_divide_the_batch(capsys, monkeypatch):
    monkeypatch.setattr(sft, "WORLD_SIZE", 2)
    assert "--batch_size 5: use a multiple of 2" in refused(sft, capsys, batch_size=5)
