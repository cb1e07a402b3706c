"""The data scripts: right answers, held-out prompts, rewards. make test-real trains a real model, too."""

import gsm8k
import pytest
import reversal
import transformers
from conftest import ROOT, launch, read_jsonl, words_of, write_jsonl


def answer_to(turn: dict) -> str:
    """From the text of the question alone."""
    words = turn["content"].removeprefix("Reverse the order: ").split(", ")
    return ", ".join(reversed(words))


def test_lists_have_right_answers_and_hold_out_what_they_say():
    files = reversal.make_rows(reversal.Args(size=60, held_out=20))
    rows = files["train"] + files["test"]
    questions = [row["prompt"][-1]["content"] for row in rows]
    assert len(set(questions)) == len(questions)
    for row in rows:
        if row["group"] != "plain questions":
            assert row["answer"] == answer_to(row["prompt"][-1])
            assert row["prompt"][-3]["content"] not in questions  # the solved example


def test_scores_of_lists():
    """An answer is right as a whole; a plain question is answered in a sentence."""
    texts, answers = ["b, a", " b, a\n", "b, a, a", "b", "It is Paris.", "Rome"], ["b, a"] * 4 + ["Paris"] * 2
    groups = ["3 words"] * 4 + ["plain questions"] * 2
    assert reversal.score(texts, answers, groups, prompts=[]) == [1, 1, 0, 0, 1, 0]


@pytest.mark.real
def test_pipeline_opens_the_result(tmp_path):
    """Of rloo.py on SmolLM2-135M. Needs data/smollm2 and 6 GB of memory."""
    rows = reversal.make_rows(reversal.Args(train=("3 words",), test=("3 words",), held_out=8, size=24))
    flags = {"model": ROOT / "data" / "smollm2", "max_response_length": 16, "run_dir": tmp_path / "run"}
    flags |= {"dataset": write_jsonl(tmp_path / "train.jsonl", rows["train"])}
    flags |= {"eval_dataset": write_jsonl(tmp_path / "test.jsonl", rows["test"][:8]), "eval_every": 3}
    flags |= {"batch_size": 8, "samples_per_prompt": 4, "micro_batch_size": 4}
    flags |= {"learning_rate": 1e-5, "num_iterations": 3}
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
