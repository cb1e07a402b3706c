"""sft.py: the loss is on completion and EOS only, each token with the same weight. Runs of stages 1 and 2."""

import inspect

import pytest
import resume
import torch
import zoo
from conftest import read_jsonl, write_jsonl
from zoo import FLOAT32_INSIDE, STAGE_MODELS, few, run_stage

import dpo
import grpo
import reward_model
import sft

STAGES = [sft, reward_model, dpo]
ROWS = [
    {"prompt": "3 + 5 ?", "completion": "think 3 + 5 = 8 answer 8"},
    {"prompt": "1 - 2 + 3 - 4 ?", "completion": "answer 8"},
    {"prompt": "9 ?", "completion": "think 9 answer 9"},
]


@torch.no_grad()
@pytest.mark.parametrize("name", STAGE_MODELS)
def test_the_loss_is_that_of_one_unpadded_example_at_a_time(name):
    model, tokenizer = zoo.make_model(name).double(), zoo.make_tokenizer()
    rows = [sft.encode(tokenizer, row) for row in ROWS]
    count = 9 + 3 + 5
    plain = 0.0
    for row in ROWS:
        prompt = tokenizer(row["prompt"])["input_ids"]
        ids = prompt + tokenizer(row["completion"])["input_ids"] + [tokenizer.eos_token_id]
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        plain -= sum(float(logprobs[t - 1, ids[t]]) for t in range(len(prompt), len(ids))) / count
    for size in (3, 2):
        batches = [batch for _, batch in sft.micro_batches(rows, range(3), size, "cpu")]
        loss = sum(sft.completion_loss(model, batch, count) for batch in batches)
        assert float(loss) == pytest.approx(plain, rel=1e-6 if name in FLOAT32_INSIDE else 1e-12)


def test_texts_and_chats_become_ids_with_one_bos_and_one_eos():
    tokenizer = zoo.make_tokenizer(bos=True, chat=True)
    text = sft.encode(tokenizer, {"prompt": "3 + 5 ?", "completion": "answer 8"})
    assert tokenizer.decode(text["input_ids"]) == "<bos> 3 + 5 ? answer 8 <eos>"
    assert len(text["prompt_ids"]) == 5 and text["completion_mask"] == [False] * 5 + [True] * 3
    user, assistant = {"role": "user", "content": "3 + 5 ?"}, {"role": "assistant", "content": "answer 8"}
    rows = [
        {"messages": [user, assistant]},
        {"prompt": [user], "completion": [assistant], "messages": None},
        {"prompt": [user], "completion": "answer 8"},
    ]
    for row in rows:
        chat = sft.encode(tokenizer, row)
        assert tokenizer.decode(chat["input_ids"]) == "<bos> <user> 3 + 5 ? <end> <model> answer 8 <eos>"
        assert len(chat["prompt_ids"]) == 8 and chat["completion_mask"] == [False] * 8 + [True] * 3


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_has_every_example_once(tmp_path, monkeypatch, shuffle):
    calls = zoo.recorded(monkeypatch, sft, "micro_batches")
    prompts = [f"{i} ?" for i in range(10)]
    data = write_jsonl(tmp_path / "data.jsonl", [{"prompt": x, "completion": "answer 1"} for x in prompts])
    flags = {"batch_size": 2, "eval_size": 0, "num_epochs": 2, "shuffle": shuffle}
    run_stage(sft, dataset=data, run_dir=tmp_path / "run", **flags)
    seen = [rows[i]["prompt"] for (rows, indices, *_), _ in calls for i in indices]
    first, second = seen[:10], seen[10:]
    assert sorted(first) == sorted(second) == prompts
    assert (first == prompts) == (second == prompts) == (first == second) == (not shuffle)


def test_shared_functions_are_the_same():
    """So that a test of one script holds for the others."""
    own = ["main", "evaluate", "encode", "micro_batches", "load_rows", "check_args", "choose_rows"]
    differing = {dpo: own, reward_model: [*own, "load_model", "save_model", "log"]}
    differing[grpo] = [*own, "token_ids", "find_run", "describe", "log"]
    for script, names in differing.items():
        for name, function in inspect.getmembers(sft, inspect.isfunction):
            if name not in names and hasattr(script, name):
                assert inspect.getsource(getattr(script, name)) == inspect.getsource(function)
    for name in ("choose_rows", "split_response"):
        assert inspect.getsource(getattr(dpo, name)) == inspect.getsource(getattr(reward_model, name))


@pytest.mark.parametrize("script", STAGES, ids=lambda script: script.__name__)
def test_an_interrupted_run_resumes_to_the_last_bit_and_a_finished_one_does_nothing(tmp_path, capsys, script):
    """It ends in half a line of the metrics."""
    data = few(script.__name__, 64, tmp_path)
    flags = {"dataset": data, "batch_size": 8, "num_epochs": 3, "save_every": 5, "eval_every": 7}
    flags |= {"warmup_iterations": 4} | ({"eval_size": 8} if script is sft else {"eval_dataset": data})
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_stage(script, **flags, run_dir=whole)
    with resume.interrupted(script, "optimizer_step", call=9):
        run_stage(script, **flags, run_dir=killed)
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 9, "lo')
    assert torch.load(killed / "checkpoint.pt", weights_only=True)["iteration"] == 5
    run_stage(script, **flags, run_dir=killed)
    resume.assert_same_run(whole, killed)
    lines = read_jsonl(killed / "metrics.jsonl")
    losses = [x["loss"] for x in lines if "loss" in x]
    assert sum(losses[-8:]) < sum(losses[:8])  # the last epoch and the first
    rates = [x["learning_rate"] for x in lines if "learning_rate" in x]
    linear = [min((i + 1) / 4, 1 - i / len(rates)) for i in range(len(rates))]
    assert rates == pytest.approx([script.Args.learning_rate * x for x in linear])
    evaluated = {x["iteration"] for x in lines if "eval/loss" in x}
    assert evaluated == {*range(0, len(rates), 7), len(rates)}
    before = {path: path.read_bytes() for path in killed.rglob("*") if path.is_file()}
    capsys.readouterr()
    run_stage(script, **flags, run_dir=killed)
    assert f"finished: {killed / 'model'}" in capsys.readouterr().out
    assert before == {path: path.read_bytes() for path in before}
    flags["batch_size"] = 4
    assert "has --batch_size 8, not 4" in zoo.refused(capsys, run_stage, script, **flags, run_dir=killed)


PAIR = {"prompt": "3 ?", "chosen": "answer 3", "rejected": "answer 4"}
CHAT = [{"role": "assistant", "content": "4 ?"}, {"role": "user", "content": "3 ?"}]
CHATS = {"prompt": None, "chosen": CHAT[::-1], "rejected": CHAT[::-1]}
OTHER = [{"role": "user", "content": "5 ?"}, CHAT[0]]
LONG = "3 + " * 100


@pytest.mark.parametrize(
    "script, row, flags, words",
    [
        (sft, {}, {"batch_size": 4}, "3 of 3 examples --batch_size"),
        (sft, {}, {"micro_batch_size": 0}, "--micro_batch_size 0"),
        (sft, {"completion": LONG}, {}, "--max_length 1024 128 positions"),
        (sft, {"completion": None}, {}, "row 2 `completion`"),
        (sft, {"messages": CHAT}, {}, "row 2 `messages`"),
        (sft, {"messages": CHAT[::-1]}, {}, "row 2 chat template"),
        (reward_model, {}, {"eval_dataset": "toy/train.jsonl"}, "--eval_dataset row 0 chosen"),
        (reward_model, {"rejected": "answer 3"}, {}, "2 of 3 pairs give 3 or more"),
        (reward_model, CHATS | {"chosen": CHAT}, {}, "row 2 last message"),
        (reward_model, CHATS | {"rejected": OTHER}, {}, "row 2 different prompts"),
        (reward_model, {"margin": "0.5"}, {}, "row 2 `margin`"),
        (dpo, {"rejected": None}, {}, "row 2 `rejected`"),
        (dpo, {"prompt": None}, {}, "row 2 prompt is empty"),
    ],
)
def test_bad_input_gets_one_line(tmp_path, capsys, script, row, flags, words):
    good = ROWS[2] if script is sft else PAIR
    data = write_jsonl(tmp_path / "data.jsonl", [good, good, good | row])
    default = {"dataset": data, "batch_size": 3, "run_dir": tmp_path / "run"}
    if script is sft:
        default["eval_size"] = 0
    said = zoo.refused(capsys, run_stage, script, **default | flags)
    assert all(word in said for word in words.split()) and not (tmp_path / "run").exists(), said
