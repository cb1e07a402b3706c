"""sft.py: the loss is on completion and EOS only, each token with the same weight. Runs of stages 1 and 2."""

import dataclasses
import json
import math

import pytest
import resume
import sync
import torch
import zoo
from conftest import ROOT, read_jsonl, write_jsonl
from zoo import STAGE_MODELS, few, run_stage

import dpo
import reward_model
import sft

STAGES = [sft, reward_model, dpo]
COUNTS = ["num_epochs", "batch_size", "micro_batch_size", "max_length"]
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


USER, PREFIX = {"role": "user", "content": "3 ?"}, {"role": "assistant", "content": "think 3"}
ANSWER = {"role": "assistant", "content": "answer 8"}
TURN, CHAT_ENDS = "<bos> <user> 3 ? <end> <model>", "answer 8 <end>"
TOOLS = {"tools": [{"type": "function", "function": {"name": "7"}}], "chat_template_kwargs": {"think": True}}
TEMPLATES = {
    "chat": zoo.CHAT,
    "two tokens": zoo.CHAT.replace("<end>", "<end> ="),  # as ChatML: <|im_end|> and a newline
    "no special": "{% for m in messages %}{{ m.content }} - {% endfor %}",
    "tools": "{{ tools[0].function.name if tools }} {{ '+' if think }} " + zoo.CHAT,
}
# A template, the columns of a row, the response, and by hand: what is read as the prompt, and what is learned
TRAPS = {
    "text": ("chat", {"prompt": "3 ?"}, "answer 8", "<bos> 3 ?", "answer 8 <eos>"),
    "text with EOS": ("chat", {"prompt": "3 ?"}, "answer 8 <eos>", "<bos> 3 ?", "answer 8 <eos>"),
    "text with BOS": ("chat", {"prompt": TURN}, "answer 8", TURN, "answer 8 <eos>"),
    "prompt with EOS": ("chat", {"prompt": "3 ? <eos>"}, "answer 8", "<bos> 3 ? <eos>", "answer 8 <eos>"),
    "special": ("chat", {"prompt": "3 <user> ?"}, "<end> 8", "<bos> 3 <user> ?", "<end> 8 <eos>"),
    "chat": ("chat", {"prompt": [USER]}, "answer 8", TURN, CHAT_ENDS),
    "chat with its end": ("chat", {"prompt": [USER]}, "answer 8 <end>", TURN, CHAT_ENDS),
    "two tokens": (
        "two tokens",
        {"prompt": [USER]},
        "answer 8",
        TURN.replace("<end>", "<end> ="),
        CHAT_ENDS + " =",
    ),
    "half its end": (
        "two tokens",
        {"prompt": [USER]},
        CHAT_ENDS,
        TURN.replace("<end>", "<end> ="),
        CHAT_ENDS + " =",
    ),
    "no special end": ("no special", {"prompt": [USER]}, "answer 8", "3 ? -", "answer 8 - <eos>"),
    "continued": ("chat", {"prompt": [USER, PREFIX]}, "= 3", TURN + " think 3", "= 3 <end>"),
    "messages": ("chat", {"prompt": [USER]}, [ANSWER], TURN, CHAT_ENDS),
    "conversation": ("chat", {"prompt": None}, [USER, ANSWER], TURN, CHAT_ENDS),
    "tools": ("tools", {"prompt": [USER], **TOOLS}, "answer 8", "7 + " + TURN, CHAT_ENDS),
}


@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("script", STAGES, ids=lambda script: script.__name__)
def test_texts_and_chats_begin_and_end_as_tokenizer_and_template_write_them(script, trap, tmp_path):
    """A BOS, EOS or end of turn is there once, also if the text brings it, and nothing in the text is lost."""
    template, columns, response, prompt, learned = TRAPS[trap]
    tokenizer, model = zoo.make_tokenizer(bos=True), zoo.make_model("llama")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>", "<user>", "<model>"]})
    tokenizer.chat_template = TEMPLATES[template]
    other = [*response[:-1], PREFIX] if isinstance(response, list) else "answer 1"
    row = columns | {"completion": response, "chosen": response, "rejected": other}
    data = str(write_jsonl(tmp_path / "data.jsonl", [row]))
    if script is sft:
        args = sft.Args(dataset=data, batch_size=1, eval_size=0)
        (found,) = sft.load_rows(args, model, tokenizer)
        ids, start = found["input_ids"], found["completion_mask"].index(True)
        assert all(found["completion_mask"][start:])
    else:
        (found,) = script.load_rows(script.Args(), data, "train", model, tokenizer)
        ids, start = found["chosen_ids"], found.get("prompt_length", len(prompt.split()))
    assert tokenizer.decode(ids[:start]) == prompt
    if script is reward_model:  # as load_reward: what the template writes, though sampling may not stop there
        learned = learned.replace("- <eos>", "-")
    assert tokenizer.decode(ids[start:]) == learned


@pytest.mark.parametrize("script", STAGES, ids=lambda script: script.__name__)
def test_the_screen_has_a_header_a_row_an_iteration_and_what_to_do_next(
    script, tmp_path, monkeypatch, capsys
):
    (tmp_path / "toy").symlink_to(ROOT / "toy")
    monkeypatch.chdir(tmp_path)
    data = f"{'as_long_as_the_names':_<22}.jsonl"  # of the toy
    few(script.__name__, 16, tmp_path).rename(data)
    flags = {"dataset": data, "batch_size": 4, "run_dir": "run"}
    flags |= {"eval_size": 4} if script is sft else {"eval_dataset": data}
    count = 3 if script is sft else 4  # iterations of an epoch
    for epochs, words in ((1, "(new)"), (2, f"(resumed after iteration {count})")):
        run_stage(script, num_epochs=epochs, **flags)
        said, errors = capsys.readouterr()
        lines = said.splitlines()
        assert errors == "" and max(map(len, lines)) <= 100
        assert lines[0] == f"{script.__name__}.py: 1 process on cpu, float32" and lines[1].startswith(
            "  model "
        )
        assert f"  run folder  run {words}" in lines and lines.count(script.HEADER) == 1
        rows = [int(line[:5]) for line in lines if line[:5].strip().isdigit() and line[5:6] == " "]
        assert rows == [*range((epochs - 1) * count + 1, epochs * count + 1)]
        assert f"held out, iteration {epochs * count}:   loss" in said and "  ->  " in said
        assert f"Complete: {epochs * count} iterations." in said
        assert said.endswith(f"the same command with --run_dir run --num_epochs {2 * epochs}\n")
    assert "changed     num_epochs 1 (now 2); the learning rate jumps to its new decay" in said


@pytest.mark.parametrize("script", STAGES, ids=lambda script: script.__name__)
def test_help_has_every_flag(script, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", [f"{script.__name__}.py"])
    script.print_help()
    lines = capsys.readouterr().out.splitlines()
    found = {line.split()[0] for line in lines if line.startswith("  --")}
    assert found == {f"--{field.name}" for field in dataclasses.fields(script.Args)}
    assert max(map(len, lines)) <= 100


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
    own = {"Args", "main", "check_args", "load_rows", "choose_rows", "micro_batches", "update", "evaluate"}
    own |= {"log_samples"}
    sources = {name: sync.functions(sync.paths()[name].read_text()) for name in ("grpo", *sync.STAGES)}
    # They do not sample with a cache.
    check = (
        "    if auto_class is transformers.AutoModelForCausalLM:\n        check_sampling(args, flag, model)\n"
    )
    sources["grpo"]["load_model"] = sources["grpo"]["load_model"].replace(check, "")
    for name in sync.STAGES:
        texts = sources["grpo"] | {x: sources["sft"][x] for x in ["split_chat"]}
        names = {function for function, text in sources[name].items() if texts.get(function, text) != text}
        assert names <= (own | {"load_model"} if name == "reward_model" else own)
    assert sources["reward_model"]["accuracies"] == sources["dpo"]["accuracies"]
    assert sources["sft"]["completion_ids"] == sources["dpo"]["completion_ids"]


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
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function"}]}
NO_ROLE, NO_CONTENT = {"content": "3 ?"}, {"role": "assistant"}
# Columns of the third row, and what is said about it
MESSAGE, NEEDS, PAIRS = 'needs a "role" and a "content" string', "not empty", "`chosen` and `rejected`"
OF_SFT = [
    ({"completion": None}, NEEDS),
    ({"completion": ""}, NEEDS),
    ({"completion": 5}, NEEDS),
    ({"prompt": ""}, NEEDS),
    ({"prompt": 5}, NEEDS),
    ({"messages": "3 ?"}, NEEDS),
    ({"messages": ["3 ?"]}, MESSAGE),
    ({"messages": [NO_ROLE, ANSWER]}, MESSAGE),
    ({"messages": [USER, NO_CONTENT]}, MESSAGE),
    ({"messages": [ANSWER, USER]}, "the last message must be the assistant's"),
    ({"messages": [ANSWER]}, NEEDS),
    ({"messages": [USER, PREFIX, ANSWER]}, "Join them"),
    ({"messages": [USER, CALL]}, "['tool_calls'] of the last message would be ignored"),
    ({"messages": [USER, ANSWER | {"content": ""}]}, NEEDS),
]
OF_PAIRS = [
    ({"rejected": None}, PAIRS),
    ({"chosen": []}, PAIRS),
    ({"chosen": ANSWER}, PAIRS),
    ({"chosen": ["answer 3"]}, MESSAGE),
    ({"prompt": 5}, PAIRS),
    ({"prompt": [NO_ROLE]}, MESSAGE),
    ({"prompt": "3 ?", "chosen": [ANSWER], "rejected": [PREFIX]}, "Give `prompt` as a chat"),
    ({"prompt": None, "chosen": [USER, ANSWER], "rejected": [USER, ANSWER, USER, PREFIX]}, "one `prompt`"),
    ({"prompt": None, "chosen": [USER, CALL], "rejected": [USER, ANSWER]}, "['tool_calls']"),
]


@pytest.mark.parametrize(
    "script, columns, words",
    [(sft, *x) for x in OF_SFT] + [(script, *x) for x in OF_PAIRS for script in (reward_model, dpo)],
)
def test_a_bad_row_is_named(script, columns, words, tmp_path, capsys):
    start = zoo.save(tmp_path / "start", zoo.make_model("llama"), zoo.make_tokenizer(chat=True))
    good = ROWS[2] if script is sft else PAIR
    data = write_jsonl(tmp_path / "data.jsonl", [good, good, good | columns])
    flags = {"model": start, "dataset": data, "batch_size": 3, "run_dir": tmp_path / "run", "eval_every": 0}
    said = zoo.refused(capsys, run_stage, script, **flags)
    assert f"--dataset {data}, row 2: " in said and words in said and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "script, columns, flags, words",
    [
        (sft, {}, {"batch_size": 4}, "3 of 3 examples need 4. --batch_size"),
        (sft, {"completion": "3 + " * 100}, {}, "--max_length 1024: 128 positions"),
        (sft, {"messages": [USER, ANSWER]}, {}, "row 2 toy/base template"),
        (sft, {}, {"eval_size": -1}, "--eval_size -1 0 or more."),
        (reward_model, {"rejected": "answer 3"}, {}, "2 of 3 pairs 3 are needed. --batch_size"),
        (reward_model, {"margin": "0.5"}, {}, "row 2 `margin` number"),
        (reward_model, {}, {"eval_dataset": "toy/train.jsonl"}, "--eval_dataset row 0 `chosen`"),
        (reward_model, {}, {"margin": math.nan}, "--margin nan"),
        (reward_model, {}, {"center_rewards_coefficient": -1.0}, "--center_rewards_coefficient -1.0"),
        (dpo, {}, {"beta": 0.0}, "--beta 0.0"),
        (dpo, {}, {"eval_dataset": "no.jsonl"}, "--eval_dataset no.jsonl"),
        *((script, {}, {name: 0}, f"--{name} 0: above 0") for script in STAGES for name in COUNTS),
        *(
            (script, {}, {"max_grad_norm": x}, f"--max_grad_norm {x}: above 0")
            for script in STAGES
            for x in (0.0, math.nan)
        ),
        *(
            (script, {}, {"learning_rate": x}, f"{x}: 0 or more")
            for script in STAGES
            for x in (-1.0, math.nan)
        ),
    ],
)
def test_bad_input_gets_one_line(tmp_path, capsys, script, columns, flags, words):
    good = ROWS[2] if script is sft else PAIR
    data = write_jsonl(tmp_path / "data.jsonl", [good, good, good | columns])
    default = {"dataset": data, "batch_size": 3, "run_dir": tmp_path / "run"}
    if script is sft:
        default["eval_size"] = 0
    said = zoo.refused(capsys, run_stage, script, **default | flags)
    assert all(word in said for word in words.split()) and not (tmp_path / "run").exists(), said


GOOD = json.dumps(ROWS[2] | PAIR).encode()


@pytest.mark.parametrize("script", STAGES, ids=lambda script: script.__name__)
@pytest.mark.parametrize("end", [b'\n{"prompt": "3', b'\n{"prompt": "\xe9"}', b"\n[1,]"])
def test_a_broken_line_is_named_and_a_bom_and_blank_lines_are_read(script, end, tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    data.write_bytes(b"\xef\xbb\xbf" + GOOD + b"\n\n" + GOOD + b"\n\n")
    flags = {"dataset": data, "batch_size": 2, "num_epochs": 1, "eval_every": 0, "run_dir": tmp_path / "run"}
    if script is sft:
        flags["eval_size"] = 0
    data.write_bytes(data.read_bytes()[:-2] + end)
    assert f"--dataset {data}, line 4: not valid JSON" in zoo.refused(capsys, run_stage, script, **flags)
    data.write_bytes(data.read_bytes().removesuffix(end) + b"\n\n")
    run_stage(script, **flags)
    assert "2 of 2" in capsys.readouterr().out
