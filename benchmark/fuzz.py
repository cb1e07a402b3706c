"""Nonsense in, a sentence out: files and texts that nobody would write, through the scripts' functions.

    python benchmark/fuzz.py                    half a minute; writes results/fuzz.json

Data: rows of a JSONL or parquet file with prompts of any kind, and such files edited byte by byte, through
load_rows. Scores: texts of any characters, through exact_answer, against the same rule in other words, and
through a reward model with and without a template. Either the function gives what it promises, or it refuses
in one sentence with exit code 2; any other exception ends this program.
"""

import contextlib
import importlib.metadata
import io
import json
import logging
import math
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import datasets
import torch
import transformers
import tyro
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import grpo  # noqa: E402

TEXTS = st.one_of(
    st.text(max_size=40), st.lists(st.sampled_from("3 + - ? answer think <eos>".split())).map(" ".join)
)
CHATS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": TEXTS}), max_size=3
)
VALUES = st.one_of(st.none(), st.integers(-(2**40), 2**40), st.floats(), st.booleans(), TEXTS, CHATS)
ROWS = st.lists(st.dictionaries(st.sampled_from(["prompt", "answer", "group"]), VALUES), max_size=6)
LIKELY = st.lists(st.fixed_dictionaries({"prompt": TEXTS, "answer": TEXTS}), min_size=1, max_size=6)
EDITS = st.lists(st.tuples(st.integers(0, 10_000), st.binary(max_size=8), st.integers(0, 30)), max_size=3)
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"


@dataclass
class Args:
    cases: int = 1000  # of each kind


def fuzzed(count: int, *strategies):
    """A test of hypothesis with that many examples, drawn from a fixed seed."""
    rare = [HealthCheck.too_slow, HealthCheck.data_too_large]
    options = {"deadline": None, "database": None, "derandomize": True, "suppress_health_check": rare}
    return lambda test: settings(max_examples=count, **options)(given(*strategies)(test))


def outcome(function, *args):
    """What the function gives, or the one sentence with which it refuses."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            return function(*args)
    except SystemExit as exit:
        text = said.getvalue()
        assert exit.code == 2 and text.startswith("error: ") and text.count("\n") == 1, text
        return text


def load(auto_class, name: str):
    return grpo.load(grpo.Args(), auto_class, "model", f"toy/{name}", torch.device("cpu"))


def fuzz_data(count: int, folder: Path) -> Counter:
    """Files of rows through load_rows."""
    seen, (model, tokenizer) = Counter(), load(transformers.AutoModelForCausalLM, "policy")

    def read(path: Path, chats: bool) -> None:
        tokenizer.chat_template = TEMPLATE if chats else None
        rows = outcome(grpo.load_rows, grpo.Args(), "dataset", str(path), "train", model, tokenizer)
        seen["refused" if isinstance(rows, str) else "read"] += 1
        assert isinstance(rows, str) or all(row["prompt"] and row["prompt_ids"] for row in rows)

    @fuzzed(count, st.one_of(ROWS, LIKELY), st.booleans(), EDITS)
    def jsonl(rows, chats, edits):
        content = bytearray("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        for at, new, length in edits:
            content[at % (len(content) + 1) : at % (len(content) + 1) + length] = new
        path = folder / "rows.jsonl"
        path.write_bytes(content)
        read(path, chats)

    @fuzzed(count // 4, st.one_of(ROWS, LIKELY), st.booleans(), EDITS)
    def parquet(rows, chats, edits):
        path = folder / "rows.parquet"
        try:
            datasets.Dataset.from_list(rows).to_parquet(path)
        except Exception:  # no table can hold them
            return
        content = bytearray(path.read_bytes())
        for at, new, length in edits:
            content[at % (len(content) + 1) : at % (len(content) + 1) + length] = new
        path.write_bytes(content)
        read(path, chats)

    jsonl()
    parquet()
    return seen


def plain_rule(text: str, answer, marker: str) -> float:
    """The same as exact_answer, letter by letter from the right."""
    places = [i for i in range(len(text)) if text[i : i + len(marker)] == marker]
    rest = text[places[-1] + len(marker) :] if places else text
    return 1.0 if rest.strip() == str(answer).strip() else 0.0


def fuzz_scores(count: int) -> Counter:
    """Texts through the rule and through the toy's reward model."""
    seen, size = Counter(), 3
    reward_model, tokenizer = load(transformers.AutoModelForSequenceClassification, "reward_model")
    reward_model.config.pad_token_id = -1
    some = st.integers(1, 5)
    answers = st.one_of(TEXTS, st.integers(), st.floats(), st.booleans())

    @fuzzed(count, TEXTS, answers, st.sampled_from(["answer", "####", "\\boxed{", "?"]), st.booleans())
    def rule(text, answer, marker, append):
        text += f"{marker} {answer} " if append else ""
        (found,) = grpo.exact_answer(marker, [text], [answer])
        assert found == plain_rule(text, answer, marker)
        seen["right" if found else "wrong"] += 1

    @fuzzed(count // 4, st.data(), some, st.booleans())
    def model(data, number, template):
        tokenizer.chat_template = TEMPLATE if template else None
        kinds = [
            CHATS.filter(bool) if template and i % 2 else TEXTS.map("{} ?".format) for i in range(number)
        ]
        prompts = [data.draw(kind) for kind in kinds]  # load_rows lets no empty one pass
        completions, truncated = (
            [data.draw(TEXTS) for _ in prompts],
            [data.draw(st.booleans()) for _ in prompts],
        )
        given = prompts, completions, truncated
        with torch.no_grad():
            scores = grpo.model_scores(reward_model, tokenizer, size, *given)
            alone = [
                grpo.model_scores(reward_model, tokenizer, size, *([x] for x in row))[0]
                for row in zip(*given)
            ]
        assert len(scores) == number and all(map(math.isfinite, scores))
        assert all(abs(a - b) < 1e-4 for a, b in zip(scores, alone))
        seen["scored by the model"] += number

    rule()
    model()
    return seen


def main(args: Args) -> None:
    datasets.logging.set_verbosity(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        results = {"data": fuzz_data(args.cases, Path(folder)), "scores": fuzz_scores(args.cases)}
    print(json.dumps(results, indent=1))
    if args == Args():
        made = {"command": "python benchmark/fuzz.py", "datasets": importlib.metadata.version("datasets")}
        path = ROOT / "benchmark" / "results" / "fuzz.json"
        path.write_text(json.dumps({"made": made} | results, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
