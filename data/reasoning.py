"""Prompts with a right answer: lists to reverse, which a small model can learn, and the tasks of reasoning-gym.

    python data/reasoning.py                           writes data/reversal/train.jsonl and test.jsonl
    python data/reasoning.py --task knights_knaves --train n_people=3 n_people=4 --test n_people=2 n_people=8 --think
    python rloo.py --dataset data/reversal/train.jsonl --eval_dataset data/reversal/test.jsonl
        --reward data/reasoning.py:score --model data/smollm2 ...                 docs/recipes.md has all flags

Any other --task is one of reasoning-gym's (pip install --group data). Its levels are settings of the task: name=value,
separated by commas. The task's own score_answer judges the answers. A prompt is a chat with one solved example, so
that a small model answers in the same form. A row has `prompt`, `answer`, `task`, `entry` (for score_answer) and
`group`, the level. Levels in --test that are not in --train show how well the model generalizes. The held-out rows
also have ten plain questions, which show what the model forgets.
"""

import itertools
import json
import random
import sys
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


@dataclass
class Args:
    task: str = "reversal"
    """reversal, or the name of a task of reasoning-gym."""
    train: tuple[str, ...] = ()
    """Levels to train on; by default the task's own."""
    test: tuple[str, ...] = ()
    """Levels to hold out; by default the task's own."""
    size: int = 1000
    """Prompts to train on, of each level; fewer if the task has no more."""
    held_out: int = 32
    """Prompts to evaluate on, of each level; none of them is trained on."""
    demonstrations: int = 0
    """Prompts of train.jsonl with their answer, for sft.py."""
    pairs: int = 0
    """Prompts of train.jsonl with a right and a wrong answer, for reward_model.py and dpo.py."""
    think: bool = False
    """For larger models: ask for <think> and <answer>, without an example."""
    folder: Path | None = None
    """Where the files go; by default data/<task>."""
    seed: int = 1
    """For the prompts."""


REVERSAL = {"train": ["3 words"], "test": ["3 words", "3 new words", "4 words"]}  # its levels


def reversal(draw: random.Random, level: str) -> tuple[str, str]:
    words = draw.sample(NEW_WORDS if "new" in level else WORDS, int(level[0]))
    return "Reverse the order: " + ", ".join(words), ", ".join(reversed(words))


def library():
    try:
        import reasoning_gym
    except ImportError:
        sys.exit("error: reasoning-gym is missing; run pip install --group data")
    return reasoning_gym


def items(task: str, level: str, seed: int):
    """Yield (question, answer, entry) without end, the same ones for the same seed."""
    draw = random.Random(f"{seed} {level}")
    while task == "reversal":
        yield *reversal(draw, level), ""
    pairs = (setting.split("=") for setting in level.split(",") if setting)
    settings = {name: json.loads(value) for name, value in pairs}
    while True:
        for entry in library().create_dataset(task, size=1000, seed=draw.randrange(2**31), **settings):
            yield entry["question"].strip(), str(entry["answer"]), json.dumps(entry, default=str)


def make_rows(args: Args) -> dict[str, list[dict]]:
    """The rows of train and test: all prompts differ, and none is the example in front of the question."""
    levels = REVERSAL if args.task == "reversal" else {"train": [""], "test": [""]}
    train, test = args.train or levels["train"], args.test or levels["test"]
    rows, seen, head = {"train": [], "test": []}, set(), None
    for level in dict.fromkeys([*train, *test]):
        wanted = ["train"] * (args.size * (level in train)) + ["test"] * (args.held_out * (level in test))
        stream = items(args.task, level, args.seed)
        for question, answer, entry in itertools.islice(stream, 20 * len(wanted) + 100):
            if not wanted:
                break
            if question in seen:
                continue
            seen.add(question)
            if head is None:  # the first of all is the example
                head = [{"role": "system", "content": "Reply with the answer only."}]
                head += [{"role": "user", "content": question}, *turn(answer)]
                if args.think:
                    head = [{"role": "system", "content": library().utils.SYSTEM_PROMPTS["DeepSeekZero"]}]
                continue
            row = {"prompt": [*head, {"role": "user", "content": question}], "answer": answer, "entry": entry}
            rows[wanted.pop()].append(row | {"group": level or args.task, "task": args.task})
        if "test" in wanted:
            sys.exit(f"error: --held_out {args.held_out}: too many for {args.task} {level}; lower it")
    for question, answer in QUESTIONS.items():
        row = {"prompt": [{"role": "user", "content": question}], "answer": answer, "entry": ""}
        rows["test"].append(row | {"group": "plain questions", "task": "plain questions"})
    return rows | examples(args, rows["train"])


def examples(args: Args, rows: list[dict]) -> dict[str, list[dict]]:
    """What sft.py and reward_model.py learn from, made from the prompts of train.jsonl."""
    draw, demonstrations, pairs = random.Random(args.seed), [], []
    for row in draw.sample(rows, args.demonstrations):
        demonstrations.append({"prompt": row["prompt"], "completion": turn(row["answer"])})
    for row in draw.sample(rows, args.pairs):
        other = wrong(draw, row["answer"], draw.choice(rows)["answer"])
        pairs.append({"prompt": row["prompt"], "chosen": turn(row["answer"]), "rejected": turn(other)})
    return {"demonstrations": demonstrations, "pairs": pairs}


def turn(text: str) -> list[dict]:
    return [{"role": "assistant", "content": text}]


def wrong(draw: random.Random, answer: str, other: str) -> str:
    """Of a list its words in another order, or with one of another answer's; else another answer."""
    words, others = answer.split(", "), other.split(", ")
    if len(words) == 1:
        words = others
    elif draw.random() < 0.5:
        draw.shuffle(words)
    else:
        words[draw.randrange(len(words))] = draw.choice(others)
    text = ", ".join(words)
    return text if text != answer else f"{answer}, {others[0]}"


def score(completions, answer, task, entry, **columns) -> list[float]:
    """1 for a right answer, else 0; what reasoning-gym would call half right is wrong."""
    return [float(is_right(*row)) for row in zip(completions, answer, task, entry)]


def is_right(text: str, answer: str, task: str, entry: str) -> bool:
    if task == "plain questions":  # asked without an example, so that they are answered in a sentence
        return answer in text
    if not entry:
        return text.strip() == answer
    said = library().utils.extract_answer(text) or text.strip()
    return library().get_score_answer_fn(task)(said, json.loads(entry)) == 1


def main(args: Args) -> None:
    folder = args.folder or Path(__file__).parent / args.task
    rows = make_rows(args)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in ((name, part) for name, part in rows.items() if part):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in part))
        print(f"{path}: {len(part)} prompts")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, use_underscores=True))
