"""The data scripts: right answers, held-out prompts, rewards. make test-real trains a real model, too."""

import datasets
import gsm8k
import pytest
import reversal
import transformers
from conftest import ROOT, launch, read_jsonl, words_of, write_jsonl


def answer_to(turn: dict) -> str:
    """From the text of the question alone."""
    words = turn["content"].removeprefix("Reverse the order: ").split(", ")
    return ", ".join(reversed(words))


def test_lists_have_right_answers_and_hold_out_what_they_say(tmp_path):
    reversal.main(reversal.Args(size=60, held_out=20, demonstrations=5, pairs=30, folder=tmp_path))
    train, test = read_jsonl(tmp_path / "train.jsonl"), read_jsonl(tmp_path / "test.jsonl")
    questions = [row["prompt"][-1]["content"] for row in train + test]
    assert len(set(questions)) == len(questions)
    for row in train + test:
        if row["group"] != "plain questions":
            assert row["answer"] == answer_to(row["prompt"][-1])
            assert row["prompt"][-3]["content"] not in questions  # the solved example
    new = {word for row in test if row["group"] == "3 new words" for word in row["answer"].split(", ")}
    assert new and not new & {word for row in train for word in row["answer"].split(", ")}
    for row in read_jsonl(tmp_path / "demonstrations.jsonl"):
        assert row["completion"][0]["content"] == answer_to(row["prompt"][-1])
    for row in read_jsonl(tmp_path / "pairs.jsonl"):
        right = answer_to(row["prompt"][-1])
        assert row["chosen"][0]["content"] == right != row["rejected"][0]["content"]


def test_scores_of_lists():
    """An answer is right as a whole; a plain question is answered in a sentence."""
    texts, answers = ["b, a", " b, a\n", "b, a, a", "b", "It is Paris.", "Rome"], ["b, a"] * 4 + ["Paris"] * 2
    groups = ["3 words"] * 4 + ["plain questions"] * 2
    assert reversal.score(texts, answers, groups, prompts=[]) == [1, 1, 0, 0, 1, 0]


def test_gsm8k_rows(tmp_path, monkeypatch):
    rows = datasets.Dataset.from_list([{"question": "2 and 2? ", "answer": "It is 4.\n#### 4"}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, split: rows)
    monkeypatch.setattr(gsm8k, "FOLDER", tmp_path)
    gsm8k.main()
    [row] = read_jsonl(tmp_path / "train.jsonl")
    [question] = row["prompt"]
    assert row["answer"] == "4"
    assert question["content"].startswith("2 and 2?\n") and "It is 4" not in question["content"]


@pytest.mark.real
def test_pipeline_opens_the_result(tmp_path):
    """Of rloo.py on SmolLM2-135M. Needs data/smollm2 and 6 GB of memory."""
    rows = reversal.make_rows(reversal.Args(held_out=8, size=24))
    test = [row for row in rows["test"] if row["group"] == "3 words"]
    flags = {"dataset": write_jsonl(tmp_path / "train.jsonl", rows["train"])}
    flags |= {"eval_dataset": write_jsonl(tmp_path / "test.jsonl", test), "eval_every": 3}
    flags |= {"batch_size": 8, "samples_per_prompt": 4, "micro_batch_size": 4, "learning_rate": 1e-5}
    flags |= {"model": ROOT / "data" / "smollm2", "max_response_length": 16, "num_iterations": 3}
    flags["run_dir"] = tmp_path / "run"
    assert launch(ROOT / "rloo.py", *words_of(**flags), timeout=900).stderr == ""

    generate = transformers.pipeline("text-generation", str(tmp_path / "run" / "model"))
    samples = [x for x in read_jsonl(tmp_path / "run" / "samples.jsonl") if x["iteration"] == 3]
    for sample in samples[-3:]:  # greedy, of the evaluation
        [found] = generate(sample["prompt"], max_new_tokens=16, do_sample=False)
        assert found["generated_text"][-1]["content"] == sample["response"].removesuffix("<|im_end|>")


@pytest.mark.real
def test_gsm8k_compares_numbers():
    said = ["Think. #### 1,000", "so #### $1000.0", "1000", "#### 100"]
    assert gsm8k.reward(said, ["1000"] * 4) == [1, 1, 0, 0]
