"""GSM8K for the scripts: prompts as chats, the number after #### as the answer, and a reward.

    python data/gsm8k.py                    openai/gsm8k from the hub to data/gsm8k/train.jsonl and test.jsonl
    python grpo.py --dataset data/gsm8k/train.jsonl --reward data/gsm8k.py:reward ...      see docs/recipes.md

On the hub, the columns are `question` and `answer`, which is a whole solution that ends in "#### 42".
"""

import json
import re
from pathlib import Path

import datasets
import tyro

FOLDER = Path(__file__).parent / "gsm8k"
TASK = "Think step by step. End with the answer, a number: #### 42"
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?|\.\d+")


def number(text: str) -> float | None:
    """The only number in the first line of a text. If there is none, or several as in 5 + 37, the result is None."""
    line = text.strip().partition("\n")[0]
    found = list(NUMBER.finditer(line))
    if len(found) != 1:
        return None
    before = line[: found[0].start()].rstrip(r" \$*({")  # a minus may stand before these
    sign = -1 if before.endswith(("-", "\u2212")) else 1
    return sign * float(found[0][0].replace(",", ""))


def reward(completions: list[str], answer: list[str], **columns) -> list[float]:
    """1 if the only number in the line after the last #### is the answer, otherwise 0. Words may stand beside it."""
    scores = []
    for text, right in zip(completions, answer):
        _, mark, said = text.rpartition("####")
        scores.append(float(mark != "" and number(said) == number(right) is not None))
    return scores


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for split in ("train", "test"):
        rows = []
        for row in datasets.load_dataset("openai/gsm8k", "main", split=split):
            question = {"role": "user", "content": f"{row['question'].strip()}\n\n{TASK}"}
            rows.append({"prompt": [question], "answer": row["answer"].rpartition("####")[2].strip()})
        path = FOLDER / f"{split}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{path}: {len(rows)} prompts")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
