"""Feed random files to load_rows: prompts of any kind, and edited bytes. It reads a file, or refuses it in one line.

    python tests/fuzz.py                1,250 files; writes experiments/results/fuzz.json

Any exception ends this program.
"""

import contextlib
import io
import json
import logging
import sys
import tempfile
from collections import Counter
from pathlib import Path

import datasets
import torch
import transformers
import tyro
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "experiments")]
import common  # noqa: E402

import grpo  # noqa: E402

SOME_WORDS = st.lists(st.sampled_from("3 + - ? answer think <eos>".split())).map(" ".join)
TEXTS = st.text(max_size=40) | SOME_WORDS
TURNS = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": TEXTS})
CHATS = st.lists(TURNS, max_size=3)
NUMBERS = st.integers(-(2**40), 2**40) | st.floats() | st.booleans()
ANY_ROW = st.dictionaries(st.sampled_from(["prompt", "answer", "group"]), st.none() | NUMBERS | TEXTS | CHATS)
GOOD_ROW = st.fixed_dictionaries({"prompt": TEXTS, "answer": TEXTS})
ROWS = st.lists(ANY_ROW, max_size=6) | st.lists(GOOD_ROW, min_size=1, max_size=6)
EDITS = st.lists(st.tuples(st.integers(0, 10_000), st.binary(max_size=8), st.integers(0, 30)), max_size=3)
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"


def fuzz_data(count: int, folder: Path) -> Counter:
    """Files of rows through load_rows."""
    seen, auto = Counter(), transformers.AutoModelForCausalLM
    model, tokenizer = grpo.load(grpo.Args(), auto, "model", "toy/policy", torch.device("cpu"))

    def read(path, rows, chats, edits):
        try:
            if path.suffix == ".parquet":
                datasets.Dataset.from_list(rows).to_parquet(path)
            else:
                path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        except Exception:  # no table can hold them
            return
        content = bytearray(path.read_bytes())
        for place, new, length in edits:
            place %= len(content) + 1
            content[place : place + length] = new
        path.write_bytes(content)
        tokenizer.chat_template = TEMPLATE if chats else None
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
                rows = grpo.load_rows(grpo.Args(), "dataset", str(path), "train", model, tokenizer)
        except SystemExit as end:
            text = said.getvalue()
            assert end.code == 2 and text.startswith("error: ") and text.count("\n") == 1, text
            seen["refused"] += 1
        else:
            assert all(row["prompt"] and row["prompt_ids"] for row in rows)
            seen["read"] += 1

    rare = [HealthCheck.too_slow, HealthCheck.data_too_large]
    options = {"deadline": None, "database": None, "derandomize": True, "suppress_health_check": rare}
    for name, part in (("rows.jsonl", count), ("rows.parquet", count // 4)):
        test = given(st.just(folder / name), ROWS, st.booleans(), EDITS)(read)
        settings(max_examples=part, **options)(test)()
    return seen


def main(cases: int = 1000) -> None:
    datasets.logging.set_verbosity(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        seen = fuzz_data(cases, Path(folder))
    print(dict(seen))
    if cases == 1000:
        text = json.dumps({"made": common.made(), "data": seen}, indent=1)
        (common.RESULTS / "fuzz.json").write_text(text + "\n")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
