"""GSM8K as the scripts take it: prompts as chats (or texts), the number behind #### as answer, and a reward.

    python data/gsm8k.py                    openai/gsm8k from the hub to data/gsm8k/train.jsonl and test.jsonl
    python grpo.py --dataset data/gsm8k/train.jsonl --reward data/gsm8k.py:reward ...      see docs/recipes.md

The hub's columns are `question` and `answer`, a whole solution that ends in "#### 42".
"""

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import datasets
import tyro


@dataclass
class Args:
    source: str = "openai/gsm8k"
    """Hub id or folder with the splits train and test."""
    config: str = "main"
    """The dataset's configuration."""
    folder: Path = Path(__file__).parent / "gsm8k"
    """Where train.jsonl and test.jsonl go."""
    text: bool = False
    """Prompts as one text for base models, and not as chat messages."""


def make_row(row: dict, text: bool) -> dict:
    task = "Think step by step. End with the answer, a number: #### 42"
    question, answer = row["question"].strip(), row["answer"].rpartition("####")[2].strip()
    chat = [{"role": "user", "content": f"{question}\n\n{task}"}]
    return {"prompt": f"Question: {question}\n{task}\nAnswer:" if text else chat, "answer": answer}


def reward(completions: list[str], answer: list[str], **columns) -> list[float]:
    """1 where what stands behind the last #### equals the answer, by math-verify: 1,000 is $1000.0; else 0."""
    try:
        from math_verify import parse, verify
    except ImportError:
        sys.exit("error: math-verify is missing; run pip install --group data")
    said = [parse(text.rpartition("####")[2]) if "####" in text else [] for text in completions]
    return [float(verify(parse(right), x)) for right, x in zip(answer, said)]


def main(args: Args) -> None:
    args.folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        # a fresh cache, since the usual one would take a folder for an older one of its name
        with tempfile.TemporaryDirectory() as fresh:
            cache = {"cache_dir": fresh} if Path(args.source).is_dir() else {}
            rows = datasets.load_dataset(args.source, args.config, split=split, **cache).to_list()
        path = args.folder / f"{split}.jsonl"
        path.write_text("".join(json.dumps(make_row(row, args.text)) + "\n" for row in rows))
        print(f"{path}: {len(rows)} prompts")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
