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
    return (first in knights) == (word == "knight" if word in ("knight", "knave") else second in knights)


def fitting(prompt: str, known: dict, spoken: set) -> list[set]:
    """The sets of knights that agree with what is known and with the statements of some of the people."""
    said = statements(prompt)
    every = [
        {name for name, is_knight in zip(said, kinds) if is_knight}
        for kinds in product([0, 1], repeat=len(said))
    ]
    return [
        knights
        for knights in every
        if all((name in knights) == (kind == "knight") for name, kind in known.items())
        and all(holds(said[name], knights) == (name in knights) for name in spoken)
    ]


def answer_to(prompt: str) -> str:
    """The only answer that fits."""
    (knights,) = fitting(prompt, {}, set(statements(prompt)))
    return " ".join(f"{name} {'knight' if name in knights else 'knave'}" for name in statements(prompt))


def form(prompt: str) -> str:
    """The puzzle without its names, and without the order in a pair."""
    said = statements(prompt)
    order = list(said)
    return str([(s[2], sorted(order.index(name) for name in s[1::2] if name)) for s in said.values()])


def pairs(text: str) -> dict[str, str]:
    words = text.split()
    return dict(zip(words[::2], words[1::2], strict=True))


def check_reasoning(prompt: str, completion: str) -> None:
    """Each step copies what was said, and claims exactly what follows from the branch so far."""
    said = statements(prompt)
    first = next(iter(said))
    branches = re.split(r"\b(?:suppose|then) ", completion.rpartition(" . answer ")[0])[1:]
    assert 1 <= len(branches) <= 2
    for number, branch in enumerate(branches):
        start, *steps = branch.removesuffix(" . ").split(" . ")
        known = pairs(start)
        assert known == {first: ["knight", "knave"][number]}
        queue, spoken = [first], set()
        for position, step in enumerate(steps):
            match = STEP.fullmatch(step)
            assert match and match.groups()[:4] == said[match[1]] and match[1] == queue[position]
            truth, old, verdict, new = match.groups()[4:]
            assert (truth == "true") == (known[match[1]] == "knight")
            named = {name: known[name] for name in (match[2], match[4]) if name in known}
            assert pairs(old) == named and list(pairs(old)) == list(named)
            spoken.add(match[1])
            fit = fitting(prompt, known, {match[1]})
            assert (verdict == "no") == (not fit) and (verdict == "so") == bool(new)
            if verdict == "ok":  # nothing follows about those it names
                for name in {match[2], match[4]} - {None} - set(known):
                    assert {name in knights for knights in fit} == {True, False}
            for name, kind in pairs(new).items():
                assert name not in known and all((name in knights) == (kind == "knight") for knights in fit)
            known |= pairs(new)
            queue += pairs(new)
        assert len(steps) == len(queue) or verdict == "no"
        if number < len(branches) - 1:
            assert verdict == "no" and not fitting(prompt, {first: "knight"}, set(said))
        else:
            assert verdict != "no" and len(known) == len(said) == len(spoken)
    assert completion.rpartition("answer ")[2] == answer_to(prompt)


@pytest.fixture(scope="module")
def demonstrations():
    return make_kk.make_demonstrations(0, 1000, make_kk.WORKED_SHARE, longest=5)


def test_same_seed_same_files(tmp_path):
    for name, rows in make_kk.make_prompts(make_kk.Args().seed).items():
        make_kk.write_jsonl(tmp_path / "file", rows)
        assert (tmp_path / "file").read_bytes() == (KK / f"{name}.jsonl").read_bytes()


def test_tokenizer_is_the_one_that_is_made(tmp_path):
    make_kk.make_kk_tokenizer().save_pretrained(tmp_path)
    assert (KK / "policy" / "tokenizer.json").read_text() == (tmp_path / "tokenizer.json").read_text()


def test_answers_are_right_and_unique_and_held_out_puzzles_are_held_out(demonstrations):
    train, heldout = read_jsonl(KK / "train.jsonl"), read_jsonl(KK / "heldout.jsonl")
    assert all(row["answer"] == answer_to(row["prompt"]) for row in train + heldout)
    assert all(row["group"] == str(len(statements(row["prompt"]))) for row in train + heldout)
    assert len({row["prompt"] for row in train + heldout}) == len(train + heldout) == 2500
    # Not even under other names.
    assert not {form(row["prompt"]) for row in train + demonstrations} & {
        form(row["prompt"]) for row in heldout
    }
    assert {row["group"] for row in train} == {"2", "3"}
    counts = [sum(row["group"] == str(people) for row in heldout) for people in range(2, 7)]
    assert counts == [make_kk.HELDOUT] * 5


def test_demonstrations_mostly_guess_and_their_reasoning_is_right(demonstrations):
    worked = [row for row in demonstrations if row["completion"].startswith("suppose")]
    assert len(worked) / len(demonstrations) == pytest.approx(make_kk.WORKED_SHARE, abs=0.05)
    for row in worked:
        check_reasoning(row["prompt"], row["completion"])
    for row in demonstrations:
        if row not in worked:
            kinds = pairs(row["completion"].removeprefix("answer "))
            assert list(kinds) == list(statements(row["prompt"])) and set(kinds.values()) <= {
                "knight",
                "knave",
            }
    assert {len(statements(row["prompt"])) for row in demonstrations} == {2, 3, 4, 5}


WRONG_STEPS = {
    "contradiction not seen": (
        "A knight . A : C knave true C knight no .",
        "A knight . A : C knave true C knight ok .",
    ),
    "contradiction made up": ("knave ok", "knave no"),
    "statement of a knave called true": ("C false", "C true"),
    "statement changed": ("false C knave so", "false A knave so"),
    "wrong conclusion": ("false C knave so A knight", "false C knave so A knave"),
    "wrong answer": ("answer C knave A knight", "answer C knave A knave"),
    "steps left out": ("suppose C knight . C : A same C true C knight so A knight . ", "suppose C knight . "),
}


@pytest.mark.parametrize("change", WRONG_STEPS.values(), ids=WRONG_STEPS)
def test_the_checker_finds_a_wrong_step(change):
    """In the example of make_kk.py, which is right as it stands."""
    prompt = "C : A same C . A : C knave ?"
    lines = make_kk.__doc__.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("    suppose"))
    completion = " ".join(line.strip() for line in lines[first : first + 2])
    check_reasoning(prompt, completion)
    assert change[0] in completion
    with pytest.raises(AssertionError):
        check_reasoning(prompt, completion.replace(*change))


def test_the_model_reads_every_word_and_fits_the_longest_response(demonstrations):
    tokenizer = transformers.AutoTokenizer.from_pretrained(KK / "policy")
    config = transformers.AutoConfig.from_pretrained(KK / "policy")
    longest = max(len(tokenizer(row["prompt"])["input_ids"]) for row in read_jsonl(KK / "heldout.jsonl"))
    assert longest + make_kk.MAX_RESPONSE + 1 <= config.max_position_embeddings
    for row in demonstrations[:100]:
        ids = tokenizer(row["completion"])["input_ids"]
        assert tokenizer.decode(ids) == row["completion"] and tokenizer.unk_token_id not in ids
        assert len(ids) <= make_kk.MAX_RESPONSE
