"""sft.py: the loss is on completion and EOS only, each token with the same weight. Runs of stages 1 and 2."""

import pytest
import resume
import sync
import torch
import zoo
from conftest import read_jsonl, write_jsonl
from zoo import STAGE_MODELS, few, run_stage

import dpo
import reward_model
import sft

STAGES = [sft, reward_model, dpo]
ROWS = [
    {"prompt": "3 + 5 ?", "completion": "think 3 + 5 = 8 answer 8"},
    {"prompt": "1 - 2 + 3 - 4 ?", "completion": "answer 8"},
    {"prompt": "9 ?", "completion": "think 9 answer 9"},
]


def load(tmp_path, tokenizer, rows, model=None):
    """The rows as sft.py reads them from a file."""
    data = write_jsonl(tmp_path / "data.jsonl", rows)
    args = sft.Args(dataset=str(data), batch_size=len(rows), eval_size=0, micro_batch_size=2, device="cpu")
    return args, sft.load_rows(args, model or zoo.make_model("llama"), tokenizer)


@torch.no_grad()
@pytest.mark.parametrize("name", STAGE_MODELS)
def test_the_loss_is_that_of_one_unpadded_example_at_a_time(tmp_path, name):
    model, tokenizer = zoo.make_model(name).double(), zoo.make_tokenizer()
    count = 9 + 3 + 5
    plain = 0.0
    for row in ROWS:
        prompt = tokenizer(row["prompt"])["input_ids"]
        ids = prompt + tokenizer(row["completion"])["input_ids"] + [tokenizer.eos_token_id]
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        plain -= sum(float(logprobs[t - 1, ids[t]]) for t in range(len(prompt), len(ids))) / count
    args, rows = load(tmp_path, tokenizer, ROWS, model)
    losses = [sft.completion_loss(model, batch, count) for batch in sft.micro_batches(args, rows)]
    assert len(losses) == 2
    assert float(sum(losses)) == pytest.approx(plain, rel=1e-12)


def test_texts_and_chats_become_ids_with_one_bos_and_one_eos(tmp_path):
    tokenizer = zoo.make_tokenizer(bos=True, chat=True)
    user, assistant = {"role": "user", "content": "3 + 5 ?"}, {"role": "assistant", "content": "answer 8"}
    rows = [{"prompt": "3 + 5 ?", "completion": "answer 8"}, {"messages": [user, assistant]}]
    rows += [{"prompt": [user], "completion": "answer 8", "messages": None}]
    _, found = load(tmp_path, tokenizer, rows)
    for row, prompt in zip(found, ["<bos> 3 + 5 ?", *["<bos> <user> 3 + 5 ? <end> <model>"] * 2]):
        assert tokenizer.decode(row["input_ids"]) == f"{prompt} answer 8 <eos>"
        assert row["completion_mask"] == [False] * len(prompt.split()) + [True] * 3


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_has_every_example_once(tmp_path, monkeypatch, shuffle):
    calls = zoo.recorded(monkeypatch, sft, "choose_rows")
    prompts = [f"{i} ?" for i in range(10)]
    data = write_jsonl(tmp_path / "data.jsonl", [{"prompt": x, "completion": "answer 1"} for x in prompts])
    flags = {"batch_size": 2, "eval_size": 0, "num_epochs": 2, "shuffle": shuffle}
    run_stage(sft, dataset=data, run_dir=tmp_path / "run", **flags)
    seen = [row["prompt"] for _, rows in calls for row in rows]
    assert sorted(seen[:10]) == sorted(seen[10:]) == prompts
    assert (seen[:10] == prompts) == (seen[10:] == prompts) == (seen[:10] == seen[10:]) == (not shuffle)


def test_shared_functions_are_the_same():
    """So that `make sync` carries them, and a test of one script holds for the others."""
    own = {"Args", "main", "check_args", "load_rows", "choose_rows", "micro_batches", "evaluate"}
    own |= {"log", "log_samples", "open_run"}
    sources = {name: sync.functions(sync.paths()[name].read_text()) for name in ("grpo", *sync.STAGES)}
    grpo = sources["grpo"]
    for name in sync.STAGES:
        names = {function for function, text in sources[name].items() if grpo.get(function, text) != text}
        assert names <= (own | {"load_model"} if name == "reward_model" else own)
        text = sources[name]["open_run"].replace("num_epochs", "num_iterations")
        assert text.replace('state["model"]', 'state["policy"]') == grpo["open_run"]


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
    evaluated = {*range(0, len(rates), 7), len(rates)}
    assert {x["iteration"] for x in lines if "eval/loss" in x} == evaluated
    before = {path: path.read_bytes() for path in killed.rglob("*") if path.is_file()}
    run_stage(script, **flags, run_dir=killed)
    assert before == {path: path.read_bytes() for path in before}
    flags["batch_size"] = 4
    assert "batch_size" in zoo.refused(capsys, run_stage, script, **flags, run_dir=killed)


PAIR = {"prompt": "3 ?", "chosen": "answer 3", "rejected": "answer 4"}
CHAT = [{"role": "assistant", "content": "4 ?"}, {"role": "user", "content": "3 ?"}]
CHATS = {"prompt": None, "chosen": CHAT[::-1], "rejected": CHAT[::-1]}


@pytest.mark.parametrize(
    "script, row, flags, words",
    [
        (sft, {}, {"batch_size": 4}, "3 of 3 examples --batch_size"),
        (sft, {"completion": "3 + " * 100}, {}, "--max_length 128"),
        (sft, {"completion": None}, {}, "row 2 `completion`"),
        (sft, {"messages": CHAT}, {}, "row 2 `messages`"),
        (reward_model, {"rejected": "answer 3"}, {}, "2 of 3 pairs give 3 or more"),
        (reward_model, CHATS | {"chosen": [CHAT[1]] * 2}, {}, "last message"),
        (reward_model, CHATS | {"rejected": [CHAT[1], *CHAT[::-1]]}, {}, "row 2 one prompt"),
        (reward_model, {}, {"eval_dataset": "toy/train.jsonl"}, "--eval_dataset row 0 `chosen`"),
        (dpo, {"rejected": None}, {}, "row 2 `rejected`"),
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
