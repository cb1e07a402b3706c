"""Lists of words to reverse, which a small real model can learn, and plain questions, which show what it forgets.

    python data/reversal.py                 writes data/reversal/train.jsonl and test.jsonl
    python rloo.py --dataset data/reversal/train.jsonl --reward data/reversal.py:score ...        see docs/recipes.md

A prompt is a chat with one solved example, so that a small model answers in the same form. A row has `prompt`, `answer`
and `group`, the level, such as "3 new words". Levels that are only in test.jsonl show how well the model generalizes.
"""

import json
import random
from pathlib import Path

import tyro

FOLDER = Path(__file__).parent / "reversal"
WORDS = """
apple arm baby bag ball bank bear bed bell bird boat book box boy bread bridge brush bus cake car card cat chair
child city clock cloud coat coffee cold cook corn cow cup dance day desk doctor dog door dream dress drum earth egg
eye face farm field fire fish floor flower fly food foot forest fox friend fruit game garden girl glass gold grass
green hair hand hat heart hill home horse hot house ice island juice key king kitchen knife lake lamp leaf leg
letter light lion love lunch man map market meat milk mirror money moon mother mountain mouse mouth music name night
""".split()
NEW_WORDS = """
nose ocean office orange paint paper park pen pencil picture pig plane plant plate queen rain red ring river road
rock roof room rose salt sand school sea sheep ship shirt shoe shop
""".split()
QUESTIONS = {
    "What is the capital of France?": "Paris",
    "What is the capital of Japan?": "Tokyo",
    "What is the opposite of hot?": "cold",
    "How many days are in a week?": "7",
    "What is 2 + 2?": "4",
    "Who wrote Romeo and Juliet?": "Shakespeare",
    "What language is spoken in Spain?": "Spanish",
    "In which month is Christmas?": "December",
    "What is the chemical symbol of water?": "H2O",
    "Who painted the Mona Lisa?": "Leonardo",
}
LEVELS = ["3 words", "3 new words", "4 words"]  # to evaluate on. The first is also trained on
SIZE = 1000  # prompts to train on
HELD_OUT = 32  # prompts to evaluate on, of each level; none of them is trained on


def turn(role: str, text: str) -> dict:
    return {"role": role, "content": text}


def make_rows() -> dict[str, list[dict]]:
    """The rows of each file, which are always the same. No two prompts are equal, and none is the solved example."""
    train, test, head = [], [], []
    for level in LEVELS:
        draw, lists, rows = random.Random(f"1 {level}"), {}, []
        for _ in range(2 * (HELD_OUT + SIZE)):  # some may be equal
            words = draw.sample(NEW_WORDS if "new" in level else WORDS, int(level.split()[0]))
            lists[", ".join(words)] = ", ".join(reversed(words))
        for words, answer in lists.items():
            question = turn("user", f"Reverse the order: {words}")
            if not head:  # the first list of all is the example
                head = [turn("system", "Reply with the answer only."), question, turn("assistant", answer)]
                continue
            rows.append({"prompt": [*head, question], "answer": answer, "group": level})
        test += rows[:HELD_OUT]
        train = train or rows[HELD_OUT : HELD_OUT + SIZE]
    for question, answer in QUESTIONS.items():
        test.append({"prompt": [turn("user", question)], "answer": answer, "group": "plain questions"})
    return {"train": train, "test": test}


def score(completions, answer, group, **columns) -> list[float]:
    """1 for a right answer, otherwise 0. The answer to a plain question may stand in a sentence."""
    scores = []
    for text, right, level in zip(completions, answer, group):
        scores.append(float(right in text if level == "plain questions" else right == text.strip()))
    return scores


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, rows in make_rows().items():
        path = FOLDER / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{path}: {len(rows)} prompts")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
