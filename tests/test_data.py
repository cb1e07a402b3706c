"""Tests of data: rows with their types, tokens of texts and chats, the ends of responses, the toy, scripts in data/."""

import json
import random
import re
from collections import Counter

import datasets
import gsm8k
import make_tools
import make_toy
import pytest
import reversal
import tokenizers
import unsure
from conftest import ROOT, read_jsonl, write_jsonl
from zoo import CHAT, make_model, make_tokenizer, refused, run

import dpo
import grpo
import reward_model
import sft

PROMPT = "3 + 5 ?"
USER = {"role": "user", "content": PROMPT}
OPENED = f"<bos> <user> {PROMPT} <end> <model>"


def test_values_of_a_dataset_keep_their_type(tmp_path):
    """JSON lines may begin with a BOM, and blank lines are skipped."""
    answers = [8, 8.5, "007", 2**63, "2026-01-01", True, [1, "a"]]
    rows = [{"prompt": "3 ?", "answer": answer} for answer in answers]
    path = write_jsonl(tmp_path / "data.jsonl", rows)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\n\n"))
    (tmp_path / "folder").mkdir()
    datasets.Dataset.from_list(rows[2:5:2]).to_parquet(tmp_path / "folder" / "train.parquet")
    for name, expected in ((path, answers), (tmp_path / "folder", answers[2:5:2])):
        found = grpo.load_rows(grpo.Args(), str(name), "train", make_model("llama"), make_tokenizer())
        assert repr([row["answer"] for row in found]) == repr(expected)


# Tokens of texts and chats. test_stages.py has more cases, for functions that all scripts share.


def ids_of(text: str) -> list[int]:
    """Return the ids of these words and nothing else."""
    return make_tokenizer()(text)["input_ids"]


def adding(template: str, **special):
    """Return a tokenizer that adds the special tokens of the template to each text."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(special)
    tokens = [x for x in (("<eos>", 1), ("<bos>", 2)) if x[0] in template]
    processor = tokenizers.processors.TemplateProcessing(template, special_tokens=tokens)
    tokenizer.backend_tokenizer.post_processor = processor
    return tokenizer


@pytest.mark.parametrize("text", [PROMPT, f"<bos> {PROMPT}", f"{PROMPT} <eos>", f"<bos> {PROMPT} <eos>"])
def test_a_text_has_one_bos_and_its_own_eos(text):
    """A BOS is added if the tokenizer adds one and the text has none. An EOS is never added."""
    for template in ("$A", "$A <eos>"):
        assert grpo.token_ids(adding(template), text) == ids_of(text)
    for template in ("<bos> $A", "<bos> $A <eos>"):
        assert grpo.token_ids(adding(template), text) == ids_of(f"<bos> {text.removeprefix('<bos> ')}")


def test_a_token_that_is_bos_and_eos_stays_at_both_ends():
    """Examples are <|endoftext|> of GPT-2, and </s> of OPT, whose tokenizer puts it before a text."""
    for template, begin in (("$A", ""), ("<eos> $A", "<eos> ")):
        tokenizer = adding(template, bos_token="<eos>")
        for text in (PROMPT, f"{PROMPT} <eos>"):
            assert grpo.token_ids(tokenizer, text) == ids_of(begin + text)
        assert grpo.token_ids(tokenizer, f"<eos> {PROMPT}") == ids_of(f"<eos> {PROMPT}")


def test_the_template_receives_tools_and_options(tmp_path):
    """An option of a row overrides the option of the flag. None is no option, because parquet fills it in."""
    tokenizer = make_tokenizer(chat=True)
    tokenizer.chat_template = "{% for tool in tools or [] %}= {{tool.function.name}} {% endfor %}"
    thinking = "{% if enable_thinking is defined %}{{'+' if enable_thinking else '-'}} {% endif %}"
    tokenizer.chat_template += thinking + CHAT
    tool = {"type": "function", "function": {"name": "think", "parameters": {}}}
    rows = [{}, {"tools": [tool, tool]}, {"chat_template_kwargs": {"enable_thinking": False}}]
    rows.append({"tools": None, "chat_template_kwargs": {"enable_thinking": None}})
    data = str(write_jsonl(tmp_path / "data.jsonl", [{"prompt": [USER]} | row for row in rows]))
    for option, begins in (
        (None, ["", "= think = think ", "- ", ""]),
        ({"enable_thinking": True}, ["+ ", "= think = think + ", "- ", "+ "]),
    ):
        args = grpo.Args(chat_template_kwargs=option)
        found = grpo.load_rows(args, data, "train", make_model("llama"), tokenizer)
        assert [row["prompt_ids"] for row in found] == [ids_of(begin + OPENED) for begin in begins]


def test_a_row_without_tools_gives_the_template_none():
    """Templates such as Llama 3.1's ask whether tools are none, and write a list of no tools, too."""
    tokenizer = make_tokenizer(chat=True)
    tokenizer.chat_template = "{{ '=' if tools is not none }} " + CHAT
    for row in ({}, {"tools": None}):
        assert grpo.token_ids(tokenizer, [USER], **grpo.template_options(grpo.Args(), row)) == ids_of(OPENED)


def test_a_string_is_no_option_of_a_template(capsys):
    """A string "false" would be true for a template."""
    for script in (grpo, sft, reward_model, dpo):
        args = script.Args(chat_template_kwargs={"enable_thinking": "false"})
        assert "enable_thinking false: write True or False" in refused(capsys, script.check_args, args)


@pytest.mark.parametrize(
    "end, right", [("<end>", [1, 3]), ("<end>\n", [1, 3]), ("= 9", [1]), ("<eos>\n", [1]), ("", [1])]
)
@pytest.mark.parametrize("configured", [None, 1, [1, 7]])
def test_the_special_token_that_ends_a_turn_ends_a_response(end, right, configured):
    """A newline after it, or an end in plain words, must not end a response, because texts contain them, too."""
    tokenizer, model = make_tokenizer(), make_model("llama")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>", "<user>", "<model>"]})
    tokenizer.add_tokens("\n")
    assert tokenizer("9\n")["input_ids"] == [15, len(tokenizer) - 1]
    tokenizer.chat_template = CHAT.replace(" <end> ", f" {end}")
    model.generation_config.eos_token_id = configured
    if isinstance(configured, list):
        right = sorted({*right, *configured})
    assert grpo.eos_ids(model, tokenizer) == right
    tokenizer.chat_template = None
    assert grpo.eos_ids(model, tokenizer) == ([1, 7] if isinstance(configured, list) else [1])


# toy/: make_toy.py makes the committed files, and scripts learn the task.

TOY = ROOT / "toy"


@pytest.mark.parametrize("module, folder", [(make_toy, TOY), (make_tools, TOY / "tools")])
def test_same_seed_same_files(module, folder, tmp_path):
    data = module.make_data(seed=0)
    for path in folder.glob("*.jsonl"):
        make_toy.write_jsonl(tmp_path / "file", data[path.stem])
        assert (tmp_path / "file").read_bytes() == path.read_bytes(), path.name


def chain_value(prompt: str) -> int:
    """The value of a chain, computed from the text."""
    signs = ["+", *re.findall(r"[+-]", prompt)]
    return sum(int(sign + number) for sign, number in zip(signs, re.findall(r"\d", prompt))) % 10


def test_answers_are_right_and_held_out_prompts_are_held_out():
    train, heldout = read_jsonl(TOY / "train.jsonl"), read_jsonl(TOY / "heldout.jsonl")
    assert all(int(row["answer"]) == chain_value(row["prompt"]) for row in train + heldout)
    assert len({row["prompt"] for row in train + heldout}) == len(train + heldout) == 2600
    seen = read_jsonl(TOY / "demonstrations.jsonl") + read_jsonl(TOY / "preferences_train.jsonl")
    assert not {row["prompt"] for row in seen} & {row["prompt"] for row in heldout}
    pairs = read_jsonl(TOY / "preferences_train.jsonl"), read_jsonl(TOY / "preferences_heldout.jsonl")
    assert not {row["prompt"] for row in pairs[0]} & {row["prompt"] for row in pairs[1]}
    for row in pairs[0] + pairs[1]:
        ends = [row[side].endswith(f"answer {chain_value(row['prompt'])}") for side in ("chosen", "rejected")]
        assert ends == [True, False]


def test_a_hint_is_right_and_the_response_repeats_it():
    """toy/hinted learns it, and sdpo.py relies on it. In the demonstrations, most of the guesses are wrong."""
    demonstrations = read_jsonl(TOY / "demonstrations.jsonl")[:200]
    rows = make_toy.with_hints(random.Random(0), demonstrations)
    assert rows[:200] == demonstrations and len(rows) > 300
    for row in rows[200:]:
        prompt = row["prompt"].removeprefix(f"{row['completion']} ")
        assert prompt != row["prompt"] and row["completion"].endswith(f"answer {chain_value(prompt)}")


@pytest.mark.parametrize("name", ["grpo", "ppo", "gkd"])
def test_the_score_rises_within_a_few_iterations(tmp_path, name):
    """With a wrong sign, it would fall. experiments/toy.py trains all scripts."""
    run(name, run_dir=tmp_path, num_iterations=15, batch_size=128, max_response_length=40, learning_rate=4e-4)
    lines = read_jsonl(tmp_path / "metrics.jsonl")
    score, length = ([line[key] for line in lines] for key in ("score", "response_length"))
    assert sum(score[:3]) / 3 < 0.5 and sum(score[-5:]) / 5 > sum(score[:3]) / 3 + 0.15
    assert sum(length[-5:]) / 5 > 1.2 * sum(length[:3]) / 3


# data/


def test_lists_have_right_answers_and_new_held_out_prompts(tmp_path, monkeypatch):
    """Each level has held-out prompts, and only the first level is trained on."""
    monkeypatch.setattr(reversal, "FOLDER", tmp_path / "reversal")
    reversal.main()
    train, test = (read_jsonl(tmp_path / "reversal" / f"{x}.jsonl") for x in ("train", "test"))
    assert reversal.make_rows() == {"train": train, "test": test}
    assert Counter(row["group"] for row in train) == {"3 words": 1000}
    levels = {level: 32 for level in ("3 words", "3 new words", "4 words")}
    assert Counter(row["group"] for row in test) == levels | {"plain questions": len(reversal.QUESTIONS)}
    questions = [row["prompt"][-1]["content"] for row in train + test]
    assert len(set(questions)) == len(questions)
    assert not {*reversal.WORDS} & {*reversal.NEW_WORDS}
    for row, question in zip(train + test, questions):
        if row["group"] != "plain questions":
            words = question.removeprefix("Reverse the order: ").split(", ")
            assert len({*words}) == int(row["group"][0]) and len(row["prompt"]) == 4
            assert {*words} <= {*(reversal.NEW_WORDS if "new" in row["group"] else reversal.WORDS)}
            assert row["answer"] == ", ".join(reversed(words))
            assert row["prompt"][-3]["content"] not in questions  # the solved example


def test_scores_of_lists():
    """A whole list must be right. The answer to a plain question may be a part of a sentence."""
    texts, answers = ["b, a", " b, a\n", "b, a, a", "b", "It is Paris.", "Rome"], ["b, a"] * 4 + ["Paris"] * 2
    groups = ["3 words"] * 4 + ["plain questions"] * 2
    assert reversal.score(texts, answers, groups, prompts=[]) == [1, 1, 0, 0, 1, 0]


# What a response may end with if 42 is right, and what scores 0
RIGHT = ["#### 42", "#### $42.00", r"#### \$42", "#### **42**", r"#### \boxed{42}", "#### 42 dollars"]
RIGHT += ["#### 42.", "####42", "#### 42%", "#### x = 42", "####\n42", "#### 7\n#### 42"]
RIGHT += ["#### 42\n\nIn May she sold 42 of 50."]
WRONG = ["42", "####", "#### none", "#### 41", "#### 42\n#### 41", "#### 42 ####", "#### -$42"]
WRONG += ["#### \u221242", "#### 5 + 37", "#### 84/2", "#### 18^(10^9)", "#### 41, 42", "#### 42 or 41"]
WRONG += ["#### {41, 42}", "#### 1 1 1 42", "#### 10:42", "#### 2 hours 42", "#### 4.2e1", "#### .42"]
WRONG += ["#### 42,000", "#### 4,2"]


def test_gsm8k_accepts_one_number_and_computes_nothing():
    scores = gsm8k.reward(RIGHT + WRONG, ["42"] * len(RIGHT + WRONG))
    assert dict(zip(RIGHT + WRONG, scores)) == dict.fromkeys(RIGHT, 1.0) | dict.fromkeys(WRONG, 0.0)


def test_gsm8k_reads_numbers_in_answers_as_in_responses():
    pairs = {"#### 1,234,567": "1234567", "#### 1000.0": "1,000", "#### -$5": "-5", "#### 0.5": ".5"}
    assert gsm8k.reward([*pairs], [*pairs.values()]) == [1.0] * len(pairs)
    assert gsm8k.reward(["#### none"], ["none"]) == [0.0]


def test_the_files_of_gsm8k(tmp_path, monkeypatch):
    """Each split has its own file. The answer is the number at the very end of the solution."""

    def load_dataset(name, config, split):
        assert (name, config) == ("openai/gsm8k", "main")
        return [{"question": f" {split}? ", "answer": f"<<1+1=2>> #### 2 is half of\n#### {len(split)},000"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(gsm8k, "FOLDER", tmp_path / "gsm8k")
    gsm8k.main()
    for split in ("train", "test"):
        [row] = map(json.loads, (tmp_path / "gsm8k" / f"{split}.jsonl").open())
        assert row["answer"] == f"{len(split)},000"
        [question] = row["prompt"]
        assert question == {"role": "user", "content": f"{split}?\n\n{gsm8k.TASK}"}


def test_chains_of_a_policy_that_is_unsure():
    """No prompt is in both files. Demonstrations give each of the 200 sums one to eight results, one of them right."""
    files = unsure.make_data(0)
    prompts = [row["prompt"] for row in files["train"] + files["heldout"]]
    assert len(prompts) == len({*prompts}) == 2200 and files == unsure.make_data(0)
    found = {}
    for row in files["demonstrations"]:
        words = row["completion"].split()
        for a, operator, b, _, result in zip(*(words[i:-2] for i in range(1, 6))):
            if operator in "+-":
                found.setdefault((a, operator, b), set()).add(int(result))
    assert len(found) == 200 and {len(results) for results in found.values()} == {*range(1, 9)}
    assert all(
        (int(a) + int(f"{operator}{b}")) % 10 in results for (a, operator, b), results in found.items()
    )


def test_the_share_of_right_steps():
    """A step may start from a wrong result. A response that does not work out the whole prompt scores 0."""
    right = "think 3 + 5 = 8 - 9 = 9 answer 9"
    texts = {right: 1, "think 3 + 5 = 7 - 9 = 8 answer 8": 0.5, "think 3 + 5 = 7 - 9 = 9 answer 9": 0}
    texts |= dict.fromkeys((right[6:], right[:-2], right + " 9", right.replace("5", "6"), "answer 9", ""), 0)
    texts |= {"think 3 + 5 = 8 - 9 = 9 answer 8": 0, "think 3 + 5 = 8 - 9 = think answer think": 0.5}
    texts |= {"think 3 + 5 = 8 - 9 = 9 - 9 = 0 answer 0": 0, "think 3 + 5 = 8 answer 8": 0}
    assert unsure.share(["3 + 5 - 9 ?"] * len(texts), [*texts]) == [*texts.values()]
