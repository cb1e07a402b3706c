"""The data scripts: right answers, held-out prompts, rewards."""

import gsm8k
import reversal
import unsure


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


def test_chains_of_a_policy_that_is_unsure():
    """No prompt is in both files. The demonstrations have one to eight results for each of the 200 sums, one right."""
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
    """A step is judged from the result before it. A response that does not work out its chain scores 0."""
    right = "think 3 + 5 = 8 - 9 = 9 answer 9"
    texts = {right: 1, "think 3 + 5 = 7 - 9 = 8 answer 8": 0.5, "think 3 + 5 = 7 - 9 = 9 answer 9": 0}
    texts |= dict.fromkeys((right[6:], right[:-2], right + " 9", right.replace("5", "6"), "answer 9", ""), 0)
    texts |= {"think 3 + 5 = 8 - 9 = 9 answer 8": 0, "think 3 + 5 = 8 - 9 = think answer think": 0.5}
    texts |= {"think 3 + 5 = 8 - 9 = 9 - 9 = 0 answer 0": 0, "think 3 + 5 = 8 answer 8": 0}
    assert unsure.share(["3 + 5 - 9 ?"] * len(texts), [*texts]) == [*texts.values()]
