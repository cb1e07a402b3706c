"""The data scripts: right answers, prompts that are held out, rewards, and one sentence where a package is missing."""

import json
import sys

import pytest
from conftest import ROOT, read_jsonl, write_jsonl

sys.path.insert(0, str(ROOT / "data"))
import gsm8k
import reasoning
import smollm2


def answer_to(question: str) -> str:
    """From the text of the question alone."""
    numbers = [int(x) for x in question.replace("?", "").replace(",", "").split() if x.isdigit()]
    if question.startswith("Reverse the order: "):
        return ", ".join(question.removeprefix("Reverse the order: ").split(", ")[::-1])
    if question.startswith("Largest of "):
        return str(max(numbers))
    return str(sum(numbers) if "+" in question else numbers[0] * numbers[1])


@pytest.mark.parametrize("task", reasoning.OWN)
def test_tasks_have_right_answers_and_hold_out_what_they_say(task, tmp_path):
    reasoning.main(reasoning.Args(task, size=60, held_out=20, demonstrations=5, pairs=30, folder=tmp_path))
    train, test = read_jsonl(tmp_path / "train.jsonl"), read_jsonl(tmp_path / "test.jsonl")
    questions = [row["prompt"][-1]["content"] for row in train + test]
    assert len(set(questions)) == len(questions)
    own = [row for row in train + test if row["task"] == task]
    assert len(own) == len(train) + len(test) - 10
    for row in own:
        *_, example, example_answer, question = row["prompt"]
        assert row["answer"] == answer_to(question["content"])
        assert example["content"] not in questions and example_answer["content"] == answer_to(example["content"])
    _, levels, held_out = reasoning.OWN[task]
    assert {row["group"] for row in train} == set(levels) < set(held_out)
    assert {row["group"] for row in test} == {*held_out, "plain questions"}
    if task == "reversal":
        new = {word for row in test if row["group"] == "3 new words" for word in row["answer"].split(", ")}
        assert not new & {word for row in train for word in row["answer"].split(", ")}
    for row in read_jsonl(tmp_path / "demonstrations.jsonl"):
        assert row["completion"][0]["content"] == answer_to(row["prompt"][-1]["content"])
    for row in read_jsonl(tmp_path / "pairs.jsonl"):
        right = answer_to(row["prompt"][-1]["content"])
        assert row["chosen"][0]["content"] == right != row["rejected"][0]["content"]


def test_the_same_seed_writes_the_same_and_another_one_does_not():
    make = lambda seed: json.dumps(reasoning.make_rows(reasoning.Args(size=20, seed=seed)))  # noqa: E731
    assert make(1) == make(1) != make(2)


def test_scores_of_tasks():
    """An answer is right as a whole; a plain question is answered in a sentence."""
    texts, answers = ["b, a", " b, a\n", "b, a, a", "b", "It is Paris.", "Rome"], ["b, a"] * 4 + ["Paris"] * 2
    tasks = ["reversal"] * 4 + ["plain questions"] * 2
    assert reasoning.score(texts, answers, tasks, [""] * 6, prompts=[]) == [1, 1, 0, 0, 1, 0]


@pytest.mark.parametrize("text", [False, True])
def test_gsm8k_rows(text, tmp_path, capsys):
    solution = {"question": "2 and 2? ", "answer": "It is 4.\n#### 4"}
    for split in ("train", "test"):
        (tmp_path / "hub").mkdir(exist_ok=True)
        write_jsonl(tmp_path / "hub" / f"{split}.jsonl", [solution])
    gsm8k.main(gsm8k.Args(source=f"{tmp_path}/hub", config="default", folder=tmp_path / "out", text=text))
    [row] = read_jsonl(tmp_path / "out" / "train.jsonl")
    question = row["prompt"] if text else row["prompt"][0]["content"]
    assert row["answer"] == "4" and "2 and 2?" in question and "It is 4" not in question


def test_a_missing_package_is_one_sentence(monkeypatch, tmp_path):
    for name in ("reasoning_gym", "math_verify", "accelerate"):
        monkeypatch.setitem(sys.modules, name, None)
    calls = {
        "reasoning-gym": lambda: reasoning.main(reasoning.Args("knights_knaves", folder=tmp_path)),
        "math-verify": lambda: gsm8k.reward(["#### 1"], ["1"]),
        "accelerate": lambda: smollm2.convert(tmp_path / "x.gguf", tmp_path),
    }
    for name, call in calls.items():
        with pytest.raises(SystemExit, match=f"error: {name} is missing; run pip install ") as stop:
            call()
        assert "\n" not in str(stop.value)


def test_a_model_that_is_there_is_left_alone(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").touch()
    monkeypatch.setattr(smollm2.subprocess, "run", None)  # nothing is fetched
    smollm2.main(smollm2.Args(folder=tmp_path))
    assert "nothing to do" in capsys.readouterr().out and [*tmp_path.iterdir()] == [tmp_path / "config.json"]
