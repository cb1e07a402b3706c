"""What the tests of sft.py, reward_model.py and dpo.py share."""

from pathlib import Path

from conftest import ROOT, read_jsonl, write_jsonl

PAIRS_FILE = "preferences_train.jsonl"
DATA = {"sft": "demonstrations.jsonl", "reward_model": PAIRS_FILE, "dpo": PAIRS_FILE}  # in toy/
PAIRS = [
    {"prompt": "3 + 5 ?", "chosen": "think 3 + 5 = 8 answer 8", "rejected": "answer 7"},
    {"prompt": "1 - 2 + 3 - 4 ?", "chosen": "answer 8", "rejected": "think 9 answer 9", "margin": 0.5},
    {"prompt": "9 ?", "chosen": "answer 9", "rejected": "answer 1"},
]
ARCHITECTURES = ["llama", "gpt2", "gemma2", "bloom", "mistral", "lfm2", "falcon_h1"]
FLOAT32_INSIDE = ("gemma2", "bloom", "falcon_h1")  # also after .double()


def few(name: str, count: int, folder: Path) -> Path:
    """A file with the first rows of the toy's data for a script."""
    return write_jsonl(folder / f"{name}.jsonl", read_jsonl(ROOT / "toy" / DATA[name])[:count])


def run(script, **flags) -> None:
    """Run a script in this process."""
    flags = {name: str(x) if isinstance(x, Path) else x for name, x in flags.items()}
    script.main(script.Args(device="cpu", **flags))
