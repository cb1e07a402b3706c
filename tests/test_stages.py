"""Tests of sft.py, reward_model.py and dpo.py: losses, where texts begin and end, rows that are refused, runs."""

import importlib
import math

import pytest
import sync
import tokenizers
import torch
import transformers
import zoo
from conftest import read_jsonl, write_jsonl
from zoo import STAGE_MODELS, few, make_model, make_tokenizer, run_stage

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
of_each_stage = pytest.mark.parametrize("script", STAGES, ids=lambda script: script.__name__)


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
    data = write_jsonl(tmp_path / "data.jsonl", ROWS)
    args = sft.Args(dataset=str(data), batch_size=3, eval_size=0, micro_batch_size=2, device="cpu")
    rows = sft.load_rows(args, model, tokenizer)
    losses = [sft.completion_loss(model, batch, count) for batch in sft.micro_batches(args, rows)]
    assert len(losses) == 2
    assert float(sum(losses)) == pytest.approx(plain, rel=1e-12)


USER, PREFIX = {"role": "user", "content": "3 ?"}, {"role": "assistant", "content": "think 3"}
ANSWER = {"role": "assistant", "content": "answer 8"}
TURN, CHAT_ENDS = "<bos> <user> 3 ? <end> <model>", "answer 8 <end>"
TWO_TOKENS = TURN.replace("<end>", "<end> =")
TOOLS = {"tools": [{"type": "function", "function": {"name": "7"}}], "chat_template_kwargs": {"think": True}}
TEMPLATES = {
    "chat": zoo.CHAT,
    "two tokens": zoo.CHAT.replace("<end>", "<end> ="),  # as ChatML: <|im_end|> and a newline
    "no special": "{% for m in messages %}{{ m.content }} - {% endfor %}",
    "opened": zoo.CHAT.replace("<model> {% endif", "<model> <think>\n{% endif"),
    "tools": "{{ tools[0].function.name if tools }} {{ '+' if think }} " + zoo.CHAT,
}
# The template, the columns of a row, its response, and the texts, written by hand, that must be read as the prompt
# and learned as the response.
TRAPS = {
    "text": ("chat", {"prompt": "3 ?"}, "answer 8", "<bos> 3 ?", "answer 8 <eos>"),
    "text with EOS": ("chat", {"prompt": "3 ?"}, "answer 8 <eos>", "<bos> 3 ?", "answer 8 <eos>"),
    "text with BOS": ("chat", {"prompt": TURN}, "answer 8", TURN, "answer 8 <eos>"),
    "prompt with EOS": ("chat", {"prompt": "3 ? <eos>"}, "answer 8", "<bos> 3 ? <eos>", "answer 8 <eos>"),
    "text with a tag": ("chat", {"prompt": "<think>"}, "<think> 8", "<bos> <think>", "<think> 8 <eos>"),
    "special": ("chat", {"prompt": "3 <user> ?"}, "<end> 8", "<bos> 3 <user> ?", "<end> 8 <eos>"),
    "chat": ("chat", {"prompt": [USER]}, "answer 8", TURN, CHAT_ENDS),
    "chat with its end": ("chat", {"prompt": [USER]}, "answer 8 <end>", TURN, CHAT_ENDS),
    "two tokens": ("two tokens", {"prompt": [USER]}, "answer 8", TWO_TOKENS, CHAT_ENDS + " ="),
    "half its end": ("two tokens", {"prompt": [USER]}, CHAT_ENDS, TWO_TOKENS, CHAT_ENDS + " ="),
    "no special end": ("no special", {"prompt": [USER]}, "answer 8", "3 ? -", "answer 8 - <eos>"),
    "continued": ("chat", {"prompt": [USER, PREFIX]}, "= 3", TURN + " think 3", "= 3 <end>"),
    "messages": ("chat", {"prompt": [USER]}, [ANSWER], TURN, CHAT_ENDS),
    "conversation": ("chat", {"prompt": None}, [USER, ANSWER], TURN, CHAT_ENDS),
    "opened": ("opened", {"prompt": [USER]}, " <think> 3 = 3", TURN + " <think> \n", "3 = 3 <end>"),
    "not opened": ("chat", {"prompt": [USER]}, "<think> 3", TURN, "<think> 3 <end>"),
    "tools": ("tools", {"prompt": [USER], **TOOLS}, "answer 8", "7 + " + TURN, CHAT_ENDS),
}


@pytest.mark.parametrize("trap", TRAPS)
@of_each_stage
def test_texts_and_chats_begin_and_end_as_tokenizer_and_template_write_them(script, trap, tmp_path):
    """BOS, EOS and the end of a turn occur once, even if the text contains them, and no word of the text is lost."""
    template, columns, response, prompt, learned = TRAPS[trap]
    tokenizer, model = zoo.make_tokenizer(bos=True), zoo.make_model("llama")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>", "<user>", "<model>"]})
    tokenizer.add_tokens(["<think>", "\n"])
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
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
        ids, start = found["chosen_ids"], found.get("prompt_length", len(prompt.split(" ")))
    assert tokenizer.decode(ids[:start]) == prompt
    if script is reward_model:  # it reads what the template writes, as in load_reward, and no EOS after it
        learned = learned.replace("- <eos>", "-")
    assert tokenizer.decode(ids[start:]) == learned


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
    """This lets `make sync` carry edits into them, and makes a test of one script valid for the others."""
    own = {"Args", "main", "check_args", "load_rows", "choose_rows", "micro_batches", "update", "evaluate"}
    own |= {"log_samples"}
    sources = {name: sync.functions(sync.paths()[name].read_text()) for name in ("grpo", *sync.STAGES)}
    # These scripts do not train on samples, so they do not compare sampling with training.
    call = (
        "    if auto_class is transformers.AutoModelForCausalLM:\n        check_sampling(args, flag, model)\n"
    )
    sources["grpo"]["load_model"] = sources["grpo"]["load_model"].replace(call, "")
    for name in sync.STAGES:
        texts = sources["grpo"] | {x: sources["sft"][x] for x in ["split_chat"]}
        names = {function for function, text in sources[name].items() if texts.get(function, text) != text}
        assert names <= (own | {"load_model"} if name == "reward_model" else own)
    assert sources["reward_model"]["accuracies"] == sources["dpo"]["accuracies"]
    assert sources["sft"]["completion_ids"] == sources["dpo"]["completion_ids"]


@of_each_stage
def test_an_interrupted_run_resumes_to_the_last_bit_and_a_finished_one_does_nothing(tmp_path, capsys, script):
    """The interrupted run leaves half a line in its metrics."""
    data = few(script.__name__, 64, tmp_path)
    flags = {"dataset": data, "batch_size": 8, "num_epochs": 3, "save_every": 5, "eval_every": 7}
    flags |= {"warmup_iterations": 4, "keep_models": True} | zoo.held_out(script.__name__, data, 8)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_stage(script, **flags, run_dir=whole)
    for name, call in (("log", 11), ("save_model", 1)):  # in iteration 10, before its checkpoint
        with zoo.interrupted(script, name, call=call):
            run_stage(script, **flags, run_dir=killed)
        assert torch.load(killed / "checkpoint.pt", weights_only=True)["iteration"] == 5
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 11, "lo')
    run_stage(script, **flags, run_dir=killed)
    zoo.assert_same_run(whole, killed)
    lines = read_jsonl(killed / "metrics.jsonl")
    losses = [x["loss"] for x in lines if "loss" in x]
    assert sum(losses[-8:]) < sum(losses[:8])  # the last and the first epoch
    rates = [x["learning_rate"] for x in lines if "learning_rate" in x]
    linear = [min((i + 1) / 4, 1 - i / len(rates)) for i in range(len(rates))]
    assert rates == pytest.approx([script.Args.learning_rate * x for x in linear])
    evaluated = {*range(0, len(rates), 7), len(rates)}
    assert {x["iteration"] for x in lines if "eval/loss" in x} == evaluated
    models = {path.name: (path / "model.safetensors").read_bytes() for path in killed.glob("model*")}
    saved = [f"model-{i}" for i in {*range(5, len(rates), 5), len(rates)}]
    assert {*models} == {"model", *saved} and len({*models.values()}) == len(saved)
    before = {path: path.read_bytes() for path in killed.rglob("*") if path.is_file()}
    run_stage(script, **flags, run_dir=killed)
    assert before == {path: path.read_bytes() for path in before}
    flags["batch_size"] = 4
    assert "batch_size" in zoo.refused(capsys, run_stage, script, **flags, run_dir=killed)


PAIR = {"prompt": "3 ?", "chosen": "answer 3", "rejected": "answer 4"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function"}]}
NEEDS, PAIRS = "not empty", "`chosen` and `rejected`"
# Columns of the third row, and a part of the message about it
OF_SFT = [
    ({"completion": None}, NEEDS),
    ({"completion": ""}, NEEDS),
    ({"prompt": ""}, NEEDS),
    ({"messages": "3 ?"}, NEEDS),
    ({"messages": [USER, {"role": "assistant"}]}, NEEDS),
    ({"messages": [ANSWER, USER]}, "the last message must be the assistant's"),
    ({"messages": [USER, CALL]}, "['tool_calls'] of the last message would be ignored"),
]
OF_PAIRS = [
    ({"rejected": None}, PAIRS),
    ({"prompt": 5}, PAIRS),
    ({"prompt": "3 ?", "chosen": [ANSWER], "rejected": [PREFIX]}, "Give `prompt` as a chat"),
    ({"prompt": None, "chosen": [USER, ANSWER], "rejected": [USER, ANSWER, USER, PREFIX]}, "one `prompt`"),
    ({"prompt": None, "chosen": [USER, CALL], "rejected": [USER, ANSWER]}, "['tool_calls']"),
]


@pytest.mark.parametrize(
    "script, columns, words",
    [(sft, *x) for x in OF_SFT] + [(script, *x) for x in OF_PAIRS for script in (reward_model, dpo)],
)
def test_a_bad_row_is_named(script, columns, words, tmp_path, capsys):
    model, tokenizer = zoo.make_model("llama"), zoo.make_tokenizer(chat=True)
    good = ROWS[2] if script is sft else PAIR
    data = str(write_jsonl(tmp_path / "data.jsonl", [good, good, good | columns]))
    args = script.Args(dataset=data, batch_size=3)
    given = (args,) if script is sft else (args, data, "train")
    said = zoo.refused(capsys, script.load_rows, *given, model, tokenizer)
    assert f"--dataset {data}, row 2: " in said and words in said


@pytest.mark.parametrize(
    "script, columns, flags, words",
    [
        (sft, {}, {"batch_size": 4}, "3 of 3 examples need 4. --batch_size"),
        (sft, {}, {"eval_size": 1}, "3 of 3 examples need 4. --eval_size"),
        (sft, {"completion": "3 + " * 100}, {}, "--max_length 1024: 128 positions"),
        (sft, {"messages": [USER, ANSWER]}, {}, "row 2 chat template"),
        *((x, {"prompt": [USER]}, {}, "row 2 chat template") for x in STAGES),
        (reward_model, {"rejected": "answer 3"}, {}, "2 of 3 pairs 3 are needed. --batch_size"),
        (reward_model, {"margin": "0.5"}, {}, "row 2 `margin` number"),
        (reward_model, {"margin": math.nan}, {}, "row 2 `margin` number"),
        (reward_model, {}, {"eval_dataset": "toy/train.jsonl"}, "--eval_dataset row 0 `chosen`"),
        (reward_model, {}, {"margin": math.nan}, "--margin nan"),
        (reward_model, {}, {"center_rewards_coefficient": -1.0}, "--center_rewards_coefficient -1.0"),
        (dpo, {}, {"beta": 0.0}, "--beta 0.0"),
        *((x, {}, {"model": "toy"}, "--model toy") for x in STAGES),
        *((script, {}, {name: 0}, f"--{name} 0: above 0") for script in STAGES for name in COUNTS),
        *((script, {}, {"max_grad_norm": 0.0}, "0.0: above 0") for script in STAGES),
        *((x, {}, {"learning_rate": y}, f"{y}: 0 or more") for x in STAGES for y in (-1.0, math.nan)),
    ],
)
def test_bad_input_gets_one_line(tmp_path, capsys, script, columns, flags, words):
    good = ROWS[2] if script is sft else PAIR
    data = write_jsonl(tmp_path / "data.jsonl", [good, good, good | columns])
    default = {"dataset": data, "batch_size": 3, "run_dir": tmp_path / "run"}
    default |= zoo.held_out(script.__name__, None, 0)
    said = zoo.refused(capsys, run_stage, script, **default | flags)
    assert all(word in said for word in words.split()) and not (tmp_path / "run").exists(), said


@pytest.mark.parametrize("name", ["reward_model", "dpo"])
def test_a_long_pair_is_cut_at_its_end(name, tmp_path):
    module, tokenizer, model = importlib.import_module(name), zoo.make_tokenizer(), zoo.make_model("llama")
    pair = {"prompt": "3 + 5 ?", "chosen": "think 3 + 5 = 8 answer 8", "rejected": "answer 7"}
    data, found = str(write_jsonl(tmp_path / "pairs.jsonl", [pair])), []
    for length in (100, 7):
        (row,) = module.load_rows(module.Args(max_length=length), data, "train", model, tokenizer)
        found.append(row["chosen_ids"])
    assert len(found[1]) == 7 and found[1] == found[0][:7]


def test_an_example_of_max_length_tokens_is_kept(tmp_path):
    """The EOS counts. A longer example is left out, and so is an example whose prompt has no token."""
    rows = [{"prompt": "3 ?", "completion": " ".join("1" * n)} for n in (1, 4, 5, 6, 9)]
    rows.append({"prompt": " ", "completion": "1 1"})
    data, tokenizer = str(write_jsonl(tmp_path / "data.jsonl", rows)), zoo.make_tokenizer()
    args = sft.Args(dataset=data, batch_size=1, eval_size=0, max_length=8)
    found = sft.load_rows(args, zoo.make_model("llama"), tokenizer)
    assert [len(row["input_ids"]) for row in found] == [4, 7, 8]


def test_held_out_examples_of_sft_are_the_last_and_not_learned(tmp_path, monkeypatch):
    rows = read_jsonl(few("sft", 20, tmp_path))
    learned, evaluated = (zoo.recorded(monkeypatch, sft, name) for name in ("choose_rows", "evaluate"))
    flags = {"dataset": tmp_path / "sft.jsonl", "eval_size": 4, "batch_size": 8, "num_epochs": 2}
    run_stage(sft, run_dir=tmp_path / "run", **flags)
    prompts = [row["prompt"] for row in rows]
    assert {row["prompt"] for _, found in learned for row in found} == {*prompts[:16]}
    assert [[row["prompt"] for row in args[-1]] for args, _ in evaluated] == [prompts[16:]] * 2
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert {x["prompt"] for x in samples} <= {*prompts[16:]}
    assert not [x for x in samples if "?" in x["response"]]  # the last word of each prompt


@pytest.mark.parametrize("name", ["reward_model", "dpo"])
def test_held_out_pairs_are_those_of_the_split_test(name, tmp_path, monkeypatch):
    module, rows = importlib.import_module(name), read_jsonl(few(name, 24, tmp_path))
    (tmp_path / "data").mkdir()
    for split, part in (("train", rows[:16]), ("test", rows[16:])):
        write_jsonl(tmp_path / "data" / f"{split}.jsonl", part)
    evaluated = zoo.recorded(monkeypatch, module, "evaluate")
    data = {"dataset": tmp_path / "data", "eval_dataset": tmp_path / "data"}
    run_stage(module, batch_size=8, num_epochs=1, run_dir=tmp_path / "run", **data)
    for args, _ in evaluated:
        [found] = [x for x in args if isinstance(x, list)]
        assert [row["prompt"] for row in found] == [row["prompt"] for row in rows[16:]]
    assert len(evaluated) == 2
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert {x["prompt"] for x in samples} <= {row["prompt"] for row in rows[16:]}
    if name == "reward_model":
        shown = [row[side] for row in rows[16:19] for side in ("chosen", "rejected")]
        assert [x["response"] for x in samples[6:]] == shown
        assert [x["score"] for x in samples[6:]] == evaluated[-1][1][1].T[:3].flatten().tolist()


# reward_model.py


def test_a_difference_for_which_exp_overflows_has_a_finite_loss():
    assert reward_model.preference_loss(torch.tensor([1000.0, -1000.0]), torch.zeros(2)) == 500.0


def test_a_text_without_a_prompt_has_one_bos():
    """The BOS comes from the tokenizer or from the text. In the tokenizer of OPT, the BOS is also the EOS."""
    tokenizer = zoo.make_tokenizer(bos=True)
    for text in ("3 + 5 ? answer 8", "<bos> 3 + 5 ? answer 8"):
        assert tokenizer.decode(reward_model.encode(tokenizer, "", text)) == "<bos> 3 + 5 ? answer 8 <eos>"
    template = tokenizers.processors.TemplateProcessing
    tokenizer.backend_tokenizer.post_processor = template("<eos> $A", special_tokens=[("<eos>", 1)])
    tokenizer.bos_token = "<eos>"
    for prompt, text in (("", "3 + 5 ? answer 8"), ("3 + 5 ?", "answer 8")):
        ids = reward_model.encode(tokenizer, prompt, text)
        assert tokenizer.decode(ids) == "<eos> 3 + 5 ? answer 8 <eos>"


@pytest.mark.parametrize("pad", ["<pad>", "<eos>", None])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_saved_model_scores_the_last_attended_token(tmp_path, name, pad):
    """Padding may be on either side. transformers needs a pad token that differs from EOS."""
    start = zoo.save(tmp_path / "start", zoo.make_model(name), zoo.make_tokenizer(pad=pad))
    data, folder = write_jsonl(tmp_path / "pairs.jsonl", zoo.PAIRS), tmp_path / "run" / "model"
    run_stage(reward_model, model=start, dataset=data, batch_size=3, num_epochs=2, run_dir=tmp_path / "run")
    saved = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert saved.config.num_labels == 1
    assert saved.config.pad_token_id == tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)

    lists = [reward_model.encode(tokenizer, row["prompt"], row["chosen"]) for row in zoo.PAIRS]
    lists += [reward_model.encode(tokenizer, row["prompt"], row["rejected"]) for row in zoo.PAIRS]
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
    """The expected scores come from the head of transformers. test_metrics.py tests the loss and the metrics."""
    start = zoo.save(tmp_path / "start", zoo.make_model(name), zoo.make_tokenizer())
    args = reward_model.Args(model=start, device="cpu", micro_batch_size=2, margin=0.7)
    model, tokenizer = reward_model.load_model(args)
    model.double()
    data = write_jsonl(tmp_path / "pairs.jsonl", zoo.PAIRS)
    rows = reward_model.load_rows(args, str(data), "train", model, tokenizer)
    for batch in reward_model.micro_batches(args, rows):
        part = batch["index"].tolist()
        for scores, side in zip(reward_model.pair_scores(args, model, batch), ("chosen", "rejected")):
            for i, score in zip(part, scores):
                text = f"{zoo.PAIRS[i]['prompt']} {zoo.PAIRS[i][side]} <eos>"
                expected = model(tokenizer(text, return_tensors="pt")["input_ids"]).logits[0, 0]
                torch.testing.assert_close(score, expected, rtol=1e-12, atol=0)
        expected = [zoo.PAIRS[i].get("margin", args.margin) for i in part]
        assert batch["margins"].tolist() == pytest.approx(expected)


# dpo.py. test_conformance.py tests its loss.


@torch.no_grad()
@pytest.mark.parametrize("name", STAGE_MODELS)
def test_log_probs_are_those_of_the_responses_and_their_eos(name, tmp_path):
    model, tokenizer = zoo.make_model(name).double(), zoo.make_tokenizer()
    data, args = write_jsonl(tmp_path / "pairs.jsonl", zoo.PAIRS), dpo.Args(device="cpu", micro_batch_size=2)
    rows = dpo.load_rows(args, str(data), "train", model, tokenizer)
    for batch in dpo.micro_batches(args, rows):
        part = batch["index"].tolist()
        for found, side in zip(dpo.response_logprobs(model, batch), ("chosen", "rejected")):
            for i, logprob in zip(part, found):
                start = len(tokenizer(zoo.PAIRS[i]["prompt"])["input_ids"])
                ids = tokenizer(f"{zoo.PAIRS[i]['prompt']} {zoo.PAIRS[i][side]} <eos>")["input_ids"]
                logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
                expected = sum(logprobs[t - 1, ids[t]] for t in range(start, len(ids)))
                torch.testing.assert_close(logprob, expected, rtol=1e-12, atol=0)


def test_a_pair_can_be_two_conversations(tmp_path):
    """Each begins with the prompt, which may also be in a column of its own. They may have several turns."""
    tokenizer = zoo.make_tokenizer(bos=True, chat=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    right, wrong = (ANSWER | {"content": f"answer {x}"} for x in "34")
    rows = [
        {"chosen": [USER, right], "rejected": [USER, wrong]},
        {"prompt": "3 ?", "chosen": [USER, right], "rejected": [USER, wrong]},
        {"prompt": [USER], "chosen": [right, USER, right], "rejected": [right, USER, wrong]},
    ]
    data = write_jsonl(tmp_path / "pairs.jsonl", rows)
    args = dpo.Args(device="cpu", batch_size=3)
    *rows, long = dpo.load_rows(args, str(data), "train", zoo.make_model("llama"), tokenizer)
    for row in rows:
        assert tokenizer.decode(row["chosen_ids"]) == "<bos> <user> 3 ? <end> <model> answer 3 <end>"
    assert tokenizer.decode(long["rejected_ids"]).count("3 ?") == 2
    [batch] = dpo.micro_batches(args, rows)
    assert batch["response_mask"].tolist() == [[False] * 6 + [True] * 3] * 4


def test_pairs_without_a_difference_or_a_response_after_the_cut_are_left_out(tmp_path, capsys):
    args, model = dpo.Args(max_length=12), zoo.make_model("llama")
    rows = [*zoo.PAIRS, zoo.PAIRS[2] | {"rejected": "answer 9"}, zoo.PAIRS[0] | {"prompt": "3 + " * 9 + "?"}]
    data = str(write_jsonl(tmp_path / "pairs.jsonl", rows))
    kept = dpo.load_rows(args, data, "train", model, zoo.make_tokenizer())
    assert [row["prompt"] for row in kept] == [row["prompt"] for row in zoo.PAIRS]
    assert "3 of 5 pairs" in capsys.readouterr().out


def test_pairs_without_a_group_are_in_no_group():
    """A dataset fills the column of such a row with None."""
    for script in (reward_model, dpo):
        found = script.accuracies([{"group": "a"}, {"group": None}, {}], torch.tensor([True, False, False]))
        assert found == {"eval/accuracy": 1 / 3, "eval/accuracy/a": 1.0}


@pytest.mark.parametrize("script", [sft, dpo], ids=["sft", "dpo"])
def test_samples_ignore_the_settings_of_the_model(script, tmp_path):
    model, tokenizer, data = make_model("llama"), make_tokenizer(), few(script.__name__, 8, tmp_path)
    args = script.Args(dataset=str(data), device="cpu", batch_size=4)
    if script is sft:
        args.eval_size = 0
    given = (args, model, tokenizer) if script is sft else (args, args.dataset, "train", model, tokenizer)
    rows = script.load_rows(*given)
    for penalty in (1, 50):
        model.generation_config.repetition_penalty = float(penalty)
        script.log_samples(args, tmp_path, penalty, model, tokenizer, rows)
    responses = [x["response"] for x in read_jsonl(tmp_path / "samples.jsonl")]
    assert responses[:3] == responses[3:] and any(responses)
