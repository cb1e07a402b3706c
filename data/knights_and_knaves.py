"""Knights and Knaves: puzzles with one solution each, proven by search, and the reward for solving them.

On an island every inhabitant is a knight, who always tells the truth, or a knave, who always lies. Each makes
one statement about the others or themselves; who is what? REINFORCE++ (arXiv 2501.03262, section 4.2.2) has
these puzzles from Logic-RL (arXiv 2502.14768): the number of people is the difficulty, and 8 people are never
trained on.

    python data/knights_and_knaves.py          data/knights_and_knaves/train.jsonl (3-7), test.jsonl (2-8)
    python grpo.py --reward data/knights_and_knaves.py:reward ...                      see docs/recipes.md

A line has `prompt` (chat messages, or with --text one text), `answer` ("Ann is a knight, Bob is a knave") and
`group` ("3 people"). The function reward takes the statements of the answer in any order.
"""

import itertools
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

import tyro

NAMES = (
    "Ann Bob Carol Dave Emma Frank Grace Henry Iris Jack Kate Liam Mia Noah Olive Paul Ruth Sam Tess Victor"
)
NAMES = NAMES.split()
TASK = """An island has two kinds of inhabitants: knights, who always tell the truth, and knaves, who always \
lie. "Or" means at least one of the two. Think step by step between <think> and </think>. Then give the \
answer between <answer> and </answer>, in the order in which the people are named, such as: \
<answer>Ann is a knight, Bob is a knave</answer>"""


@dataclass
class Args:
    folder: Path = Path(__file__).parent / "knights_and_knaves"
    """Where train.jsonl and test.jsonl go."""
    train_people: tuple[int, ...] = (3, 4, 5, 6, 7)
    """Difficulties to train on."""
    test_people: tuple[int, ...] = (2, 3, 4, 5, 6, 7, 8)
    """Difficulties to test on."""
    train_puzzles: int = 900
    """Puzzles of each difficulty to train on."""
    test_puzzles: int = 100
    """Puzzles of each difficulty to test on; none of them is trained on."""
    text: bool = False
    """Prompts as one text for base models, and not as chat messages."""
    seed: int = 1
    """Seeds everything: the same seed writes the same files."""


def holds(statement: tuple, knights: tuple[bool, ...]) -> bool:
    """Whether a statement is true where knights[i] says if person i is a knight.

    A statement is ("is", person, knight) or (connective, statement, statement).
    """
    kind, one, other = statement
    if kind == "is":
        return knights[one] == other
    a, b = holds(one, knights), holds(other, knights)
    return {"and": a and b, "or": a or b, "if": not a or b, "iff": a == b}[kind]


def solutions(statements: list[tuple]) -> list[tuple[bool, ...]]:
    """All ways in which everyone can be what they are: person i is a knight if and only if statement i is."""
    ways = itertools.product((False, True), repeat=len(statements))
    return [way for way in ways if all(holds(s, way) == is_knight for s, is_knight in zip(statements, way))]


def words(statement: tuple, names: list[str]) -> str:
    kind, one, other = statement
    if kind == "is":
        return f"{names[one]} is a {'knight' if other else 'knave'}"
    a, b = words(one, names), words(other, names)
    return {
        "and": f"{a} and {b}",
        "or": f"{a} or {b}",
        "if": f"if {a} then {b}",
        "iff": f"{a} if and only if {b}",
    }[kind]


def make_statement(speaker: int, count: int, rng: random.Random) -> tuple:
    """About one person or two, never only about the speaker.

    "I am a knight" tells nothing, "I am a knave" nobody can say.
    """
    kind = rng.choice(["is", "is", "and", "or", "if", "iff"])
    others = [person for person in range(count) if person != speaker]
    one = ("is", rng.choice(others), rng.random() < 0.5)
    if kind == "is":
        return one
    other = ("is", rng.choice([person for person in range(count) if person != one[1]]), rng.random() < 0.5)
    return kind, *rng.sample([one, other], 2)


def make_puzzle(count: int, rng: random.Random) -> tuple[list[str], list[tuple], tuple[bool, ...]]:
    """Names, statements and the one solution: statements are drawn until there is exactly one."""
    while True:
        statements = [make_statement(speaker, count, rng) for speaker in range(count)]
        found = solutions(statements)
        if len(found) == 1:
            return rng.sample(NAMES, count), statements, found[0]


def make_row(count: int, rng: random.Random, text: bool) -> dict:
    names, statements, solution = make_puzzle(count, rng)
    said = " ".join(f'{name} says: "{words(s, names)}."' for name, s in zip(names, statements))
    puzzle = f"You meet {count} inhabitants: {', '.join(names[:-1])} and {names[-1]}. {said} Who is what?"
    prompt = [{"role": "system", "content": TASK}, {"role": "user", "content": puzzle}]
    answer = ", ".join(f"{name} is a {'knight' if x else 'knave'}" for name, x in zip(names, solution))
    return {
        "prompt": f"{TASK}\n\n{puzzle}\n" if text else prompt,
        "answer": answer,
        "group": f"{count} people",
    }


def who_is_what(text: str) -> dict[str, set[str]]:
    """For each name what the text calls them; two kinds for one name are a contradiction."""
    found = {}
    for name, kind in re.findall(r"(\w+)\W+is\W+an?\W+(knight|knave)\b", text, re.IGNORECASE):
        found.setdefault(name.lower(), set()).add(kind.lower())
    return found


def reward(completions: list[str], answer: list[str], **columns) -> list[float]:
    """1 where the last <answer>...</answer> says of everyone, and of nobody else, what they are; else 0."""
    scores = []
    for text, expected in zip(completions, answer):
        said = re.findall(r"<answer>((?:(?!<answer>).)*?)</answer>", text, re.DOTALL)
        scores.append(float(bool(said) and who_is_what(said[-1]) == who_is_what(expected)))
    return scores


def main(args: Args) -> None:
    rng, seen = random.Random(args.seed), set()
    args.folder.mkdir(parents=True, exist_ok=True)
    files = {"test": (args.test_people, args.test_puzzles), "train": (args.train_people, args.train_puzzles)}
    for name, (difficulties, puzzles) in files.items():
        with (args.folder / f"{name}.jsonl").open("w") as file:
            for count in difficulties:
                for _ in range(puzzles):
                    row = make_row(count, rng, args.text)
                    while str(row["prompt"]) in seen:
                        row = make_row(count, rng, args.text)
                    seen.add(str(row["prompt"]))
                    file.write(json.dumps(row) + "\n")
        people = ", ".join(map(str, difficulties))
        print(f"{args.folder / name}.jsonl: {puzzles} puzzles each of {people} people")


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    wrong = [n for n in args.train_people + args.test_people if not 2 <= n <= len(NAMES)]
    if wrong:
        raise SystemExit(f"error: --train_people, --test_people {wrong[0]}: must be from 2 to {len(NAMES)}")
    main(args)
