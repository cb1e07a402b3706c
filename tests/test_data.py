"""The data scripts: right answers, held-out prompts, rewards."""

import gsm8k
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


# What a response may end with when 42 is right, and what scores 0
RIGHT = [
    "#### 42",
    "#### $42.00",
    r"#### \$42",
    "#### **42**",
    r"#### \boxed{42}",
    "#### 42 dollars",
    "#### 42.",
]
RIGHT += [
    "####42",
    "#### 42%",
    "#### x = 42",
    "####\n42",
    "#### 7\n#### 42",
    "#### 42\n\nIn May she sold 42 of 50.",
]
WRONG = [
    "42",
    "####",
    "#### none",
    "#### 41",
    "#### 42\n#### 41",
    "#### 42 ####",
    "#### -42",
    "#### -$42",
    "#### \u221242",
]
WRONG += [
    "#### 5 + 37",
    "#### 6*7",
    "#### 84/2",
    "#### 18^(10^9)",
    "#### 41, 42",
    "#### 42 or 41",
    "#### {41, 42}",
]
WRONG += [
    "#### 1 1 1 42",
    "#### 10:42",
    "#### 2 hours 42",
    "#### 4.2e1",
    "#### .42",
    "#### 42,000",
    "#### 4,2",
]


def test_gsm8k_takes_one_number_and_computes_nothing():
    scores = gsm8k.reward(RIGHT + WRONG, ["42"] * len(RIGHT + WRONG))
    assert dict(zip(RIGHT + WRONG, scores)) == dict.fromkeys(RIGHT, 1.0) | dict.fromkeys(WRONG, 0.0)


def test_gsm8k_reads_numbers_in_answers_as_in_responses():
    pairs = {"#### 1,234,567": "1234567", "#### 1000.0": "1,000", "#### -$5": "-5", "#### 0.5": ".5"}
    assert gsm8k.reward([*pairs], [*pairs.values()]) == [1.0] * len(pairs)
    assert gsm8k.reward(["#### none"], ["none"]) == [0.0]  # an answer that cannot be read pays nobody
