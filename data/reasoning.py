"""A task of reasoning-gym, such as Knights and Knaves, with its own score: pip install --group data.

    python data/reasoning.py --task knights_knaves --train n_people=3 n_people=4 --test n_people=2 n_people=8
    python grpo.py --dataset data/knights_knaves/train.jsonl --reward data/reasoning.py:score ...  see docs/recipes.md

A level is settings of the task: name=value, separated by commas. Levels that are only in --test show how well the model
generalizes. Prompts ask for <think> and <answer>. The score of a row needs its columns `task` and `entry`.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass
class Args:
    task: str  # its name in reasoning-gym
    train: tuple[str, ...] = ("",)  # levels to train on; by default the task's own settings
    test: tuple[str, ...] = ("",)  # levels to hold out; by default the task's own settings
    size: int = 1000  # prompts to train on, of each level; fewer if the task has no more
    held_out: int = 32  # prompts to evaluate on, of each level; none of them is trained on


def make_rows(args: Args) -> dict[str, list[dict]]:
    """The rows of train and test. All prompts differ."""
    import reasoning_gym

    system = {"role": "system", "content": reasoning_gym.utils.SYSTEM_PROMPTS["DeepSeekZero"]}
    rows, seen = {"train": [], "test": []}, set()
    for i, level in enumerate(dict.fromkeys([*args.train, *args.test])):
        pairs = (setting.split("=") for setting in level.split(",") if setting)
        settings = {name: json.loads(value) for name, value in pairs}
        settings["seed"] = i * 10**6  # plus the index of the entry
        wanted = ["train"] * args.size if level in args.train else []
        wanted += ["test"] * args.held_out if level in args.test else []  # filled first
        for entry in reasoning_gym.create_dataset(args.task, size=20 * len(wanted) + 100, **settings):
            if not wanted:
                break
            question = {"role": "user", "content": entry["question"].strip()}
            if question["content"] not in seen:
                seen.add(question["content"])
                row = {"prompt": [system, question], "group": level or args.task, "task": args.task}
                row |= {"answer": str(entry["answer"]), "entry": json.dumps(entry, default=str)}
                rows[wanted.pop()].append(row)
    return rows


def score(completions, task, entry, **columns) -> list[float]:
    """1 for an answer that the task's own score_answer finds right, else 0. Half right is wrong."""
    import reasoning_gym

    scores = []
    for text, name, line in zip(completions, task, entry):
        said = reasoning_gym.utils.extract_answer(text) or text.strip()
        scores.append(float(reasoning_gym.get_score_answer_fn(name)(said, json.loads(line)) == 1))
    return scores


def main(args: Args) -> None:
    for name, rows in make_rows(args).items():
        path = Path(__file__).parent / args.task / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{path}: {len(rows)} prompts")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, use_underscores=True))
