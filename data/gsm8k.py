"""GSM8K as the scripts take it: prompts as chats (or texts), and the number behind #### as the answer.

    python data/gsm8k.py                    openai/gsm8k from the hub to data/gsm8k/train.jsonl and test.jsonl

The hub's columns are `question` and `answer`, a whole solution that ends in "#### 42". Trains with --reward
exact_answer --answer_marker "####", or with --marker "\\boxed{" here and there.
"""

import json
import re
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
    marker: str = "####"
    """What the model is asked to put before its answer; a { or a <tag> is closed behind it."""
    text: bool = False
    """Prompts as one text for base models, and not as chat messages."""


def make_row(row: dict, marker: str, text: bool) -> dict:
    tag = re.fullmatch(r"<(\w+)>", marker)  # as the scripts' find_answer has it
    close = f"</{tag[1]}>" if tag else "}" if marker.endswith("{") else ""
    space = "" if close else " "
    task = f"Think step by step. End with the answer, a number: {marker}{space}42{close}"
    question, answer = row["question"].strip(), row["answer"].rpartition("####")[2].strip()
    chat = [{"role": "user", "content": f"{question}\n\n{task}"}]
    return {"prompt": f"Question: {question}\n{task}\nAnswer:" if text else chat, "answer": answer}


def main(args: Args) -> None:
    args.folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        with tempfile.TemporaryDirectory() as fresh:  # the cache would take a folder for an older one of its name
            cache = {"cache_dir": fresh} if Path(args.source).is_dir() else {}
            rows = datasets.load_dataset(args.source, args.config, split=split, **cache).to_list()
        path = args.folder / f"{split}.jsonl"
        path.write_text("".join(json.dumps(make_row(row, args.marker, args.text)) + "\n" for row in rows))
        print(f"{path}: {len(rows)} prompts")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
