"""Lists of words to be reversed: a task that a model of 135 M parameters can half do, and learns in minutes.

    python data/reversal.py              writes data/reversal/train.jsonl and test.jsonl
    python rloo.py --model data/smollm2 --dataset data/reversal/train.jsonl        benchmark/real.py has all flags

A prompt is a chat with one worked example, which is what makes such a model answer in the form of it. The answer is
text, for --reward exact_answer. Held out are other lists of three words, three words that are in no training prompt,
and lists of four, which training does not have either: the groups of the evaluation.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import tyro

WORDS = """apple arm baby bag ball bank bear bed bell bird boat book box boy bread bridge brush bus cake car card cat
chair child city clock cloud coat coffee cold cook corn cow cup dance day desk doctor dog door dream dress drum earth
egg eye face farm field fire fish floor flower fly food foot forest fox friend fruit game garden girl glass gold grass
green hair hand hat heart hill home horse hot house ice island juice key king kitchen knife lake lamp leaf leg letter
light lion love lunch man map market meat milk mirror money moon mother mountain mouse mouth music name night""".split()
NEW_WORDS = """nose ocean office orange paint paper park pen pencil picture pig plane plant plate queen rain red ring
river road rock roof room rose salt sand school sea sheep ship shirt shoe shop""".split()


@dataclass
class Args:
    folder: Path = Path(__file__).parent / "reversal"
    """Where train.jsonl and test.jsonl go."""
    size: int = 1000
    """Prompts to train on, of three words each."""
    held_out: int = 32
    """Prompts in each group to evaluate on."""
    seed: int = 1
    """For the lists."""


def make_row(words: list[str], group: str) -> dict:
    prompt = [
        {"role": "system", "content": "Reply with the answer only."},
        {"role": "user", "content": "Reverse the order: cat, dog, sun"},
        {"role": "assistant", "content": "sun, dog, cat"},
        {"role": "user", "content": "Reverse the order: " + ", ".join(words)},
    ]
    return {"prompt": prompt, "answer": ", ".join(reversed(words)), "group": group}


def main(args: Args) -> None:
    draw = random.Random(args.seed)
    groups = {"3 words": (WORDS, 3), "3 new words": (NEW_WORDS, 3), "4 words": (WORDS, 4)}
    test = [make_row(draw.sample(*of), group) for group, of in groups.items() for _ in range(args.held_out)]
    known = {row["answer"] for row in test}
    train = []
    while len(train) < args.size:
        row = make_row(draw.sample(WORDS, 3), "3 words")
        if row["answer"] not in known:
            known.add(row["answer"])
            train.append(row)
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, rows in {"train": train, "test": test}.items():
        path = args.folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{path}: {len(rows)} prompts")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
