"""The data scripts: right answers, held-out prompts, rewards."""

import gsm8k
import pytest
import reversal


def test_lists_have_right_answers_and_hold_out_what_they_say():
    files = reversal.make_rows()
    rows = files["train"] + files["test"]
    questions = [row["prompt"][-1]["content"] for row in rows]
    assert len(set(questions)) == len(questions)
    for row in rows:
        if row["group"] != "plain questions":
            words = row["prompt"][-1]["content"].removeprefix("Reverse the order: ").split(", ")
            assert row["answer"] == ", ".join(reversed(words))
            assert row["prompt"][-3]["content"] not in questions  # the solved example


def test_scores_of_lists():
    """An answer is right as a whole; a plain question is answered in a sentence."""
    texts, answers = ["b, a", " b, a\n", "b, a, a", "b", "It is Paris.", "Rome"], ["b, a"] * 4 + ["Paris"] * 2
    groups = ["3 words"] * 4 + ["plain questions"] * 2
    assert reversal.score(texts, answers, groups, prompts=[]) == [1, 1, 0, 0, 1, 0]


def test_gsm8k_compares_numbers():
    pytest.importorskip("math_verify")
    said = ["Think. #### 1,000", "so #### $1000.0", "1000", "#### 100"]
    assert gsm8k.reward(said, ["1000"] * 4) == [1, 1, 0, 0]
