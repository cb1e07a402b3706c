"""toy/kk: the puzzles have one solution and the reasoning in the demonstrations is right, by an independent check."""

import re
from itertools import product

import make_kk
import pytest
import transformers
from conftest import ROOT, read_jsonl

KK = ROOT / "toy" / "kk"
STATEMENT = re.compile(r"([A-H]) : ([A-H]) (knight|knave|same|excludes)(?: ([A-H]))?")
STEP = re.compile(rf"{STATEMENT.pattern} (true|false)((?: [A-H] kn\w+)*) (so|ok|no)((?: [A-H] kn\w+)*)")


def statements(prompt: str) -> dict[str, tuple]:
    """What each person says: the speaker, the first name, the word, the second name or nothing."""
    *parts, last = prompt.split(" . ")
    matches = [STATEMENT.fullmatch(part) for part in [*parts, last.removesuffix(" ?")]]
    assert last.endswith(" ?") and all(matches)
    return {match[1]: match.groups() for match in matches}


def holds(statement: tuple, knights: set) -> bool:
    _, first, word, second = statement
    if word == "excludes":
        return not {first, second} <= knights
    if word == "same":
        return (first in knights) == (second in knights)
    return (first in knights) == (word == "knight")


def solve(prompt: str) -> dict[str, str]:
    """The kind of each person, in the only way that fits all statements."""
    said = statements(prompt)
    solutions = []
    for kinds in product(["knight", "knave"], repeat=len(said)):
        kind_of = dict(zip(said, kinds))
        knights = {name for name in said if kind_of[name] == "knight"}
        if all(holds(said[name], knights) == (name in knights) for name in said):
            solutions.append(kind_of)
    (solution,) = solutions
    return solution


def answer_to(prompt: str) -> str:
    return " ".join(f"{name} {kind}" for name, kind in solve(prompt).items())


def form(prompt: str) -> str:
    """The puzzle without its names, and without the order in a pair."""
    said = statements(prompt)
    order = list(said)
    return str([(s[2], sorted(order.index(name) for name in s[1::2] if name)) for s in said.values()])


def pairs(text: str) -> dict[str, str]:
    words = text.split()
    return dict(zip(words[::2], words[1::2], strict=True))


def check_reasoning(prompt: str, completion: str) -> None:
    """Each step copies what was said, and judges it by what is known. The last branch finds the solution."""
    said, solution = statements(prompt), solve(prompt)
    reasoning, _, answer = completion.rpartition(" . answer ")
    assert answer == answer_to(prompt)
    branches = re.split(r"(?: \. )?(?:suppose|then) ", reasoning)[1:]
    for branch in branches:
        start, *steps = branch.split(" . ")
        known = pairs(start)
        for step in steps:
            match = STEP.fullmatch(step)
            assert match.groups()[:4] == said[match[1]]
            truth, old, verdict, new = match.groups()[4:]
            assert (truth == "true") == (known[match[1]] == "knight")
            assert pairs(old).items() <= known.items()
            assert (verdict == "so") == bool(new)
            known |= pairs(new)
        assert (verdict == "no") == (known != solution)


@pytest.fixture(scope="module")
def demonstrations():
    return make_kk.make_demonstrations(0, 1000, make_kk.WORKED_SHARE, longest=5)


def test_same_seed_same_files(tmp_path):
    for name, rows in make_kk.make_prompts(seed=0).items():
        make_kk.write_jsonl(tmp_path / "file", rows)
        assert (tmp_path / "file").read_bytes() == (KK / f"{name}.jsonl").read_bytes()


def test_tokenizer_is_the_one_that_is_made(tmp_path):
    make_kk.make_kk_tokenizer().save_pretrained(tmp_path)
    assert (KK / "policy" / "tokenizer.json").read_text() == (tmp_path / "tokenizer.json").read_text()


def test_answers_are_right_and_unique_and_held_out_puzzles_are_held_out(demonstrations):
    train, heldout = read_jsonl(KK / "train.jsonl"), read_jsonl(KK / "heldout.jsonl")
    for row in train + heldout:
        assert row["answer"] == answer_to(row["prompt"])
        assert row["group"] == str(len(statements(row["prompt"])))
    assert len({row["prompt"] for row in train + heldout}) == len(train + heldout) == 2500
    seen = {form(row["prompt"]) for row in train + demonstrations}
    assert not seen & {form(row["prompt"]) for row in heldout}  # not even under other names
    assert {row["group"] for row in train} == {"2", "3"}
    counts = [sum(row["group"] == str(people) for row in heldout) for people in range(2, 7)]
    assert counts == [make_kk.HELDOUT] * 5


def test_demonstrations_mostly_guess_and_their_reasoning_is_right(demonstrations):
    worked = [row for row in demonstrations if row["completion"].startswith("suppose")]
    guesses = [row for row in demonstrations if row["completion"].startswith("answer ")]
    assert len(worked) + len(guesses) == len(demonstrations)
    assert len(worked) / len(demonstrations) == pytest.approx(make_kk.WORKED_SHARE, abs=0.05)
    for row in worked:
        check_reasoning(row["prompt"], row["completion"])
    for row in guesses:
        guess = pairs(row["completion"].removeprefix("answer "))
        assert list(guess) == list(statements(row["prompt"]))
        assert set(guess.values()) <= {"knight", "knave"}
    assert {len(statements(row["prompt"])) for row in demonstrations} == {2, 3, 4, 5}


def test_the_model_reads_every_word_and_fits_the_longest_response(demonstrations):
    tokenizer = transformers.AutoTokenizer.from_pretrained(KK / "policy")
    config = transformers.AutoConfig.from_pretrained(KK / "policy")
    longest = max(len(tokenizer(row["prompt"])["input_ids"]) for row in read_jsonl(KK / "heldout.jsonl"))
    assert longest + make_kk.MAX_RESPONSE + 1 <= config.max_position_embeddings
    for row in demonstrations[:100]:
        ids = tokenizer(row["completion"])["input_ids"]
        assert tokenizer.decode(ids) == row["completion"] and tokenizer.unk_token_id not in ids
        assert len(ids) <= make_kk.MAX_RESPONSE
