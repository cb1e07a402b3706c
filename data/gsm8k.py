"""GSM8K as the scripts take it: prompts as chats, the number behind #### as answer, and a reward.

    pip install --group data                math-verify, which compares the numbers
    python data/gsm8k.py                    openai/gsm8k from the hub to data/gsm8k/train.jsonl and test.jsonl
    python grpo.py --dataset data/gsm8k/train.jsonl --reward data/gsm8k.py:reward ...      see docs/recipes.md

The hub's columns are `question` and `answer`, a whole solution that ends in "#### 42".
"""

import json
from pathlib import Path

import datasets

FOLDER = Path(__file__).parent / "gsm8k"
TASK = "Think step by step. End with the answer, a number: #### 42"


def reward(completions: list[str], answer: list[str], **columns) -> list[float]:
    """1 where what stands behind the last #### equals the answer, by math-verify: 1,000 is $1000.0; else 0."""
    from math_verify import parse, verify

    said = [parse(text.rpartition("####")[2]) if "####" in text else [] for text in completions]
    return [float(verify(parse(right), x)) for right, x in zip(answer, said)]


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
    main()
