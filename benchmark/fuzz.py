"""Feed the answer rule and the checkpoint reader nonsense until something gives.

    python benchmark/fuzz.py                    150,000 texts and 60,000 files; some ten minutes on one core
    python benchmark/fuzz.py --answers 1000 --checkpoints 1000

Hypothesis makes the nonsense. An answer must be scored 1 or -1, as a slow and plain rule says, whatever the text. A
checkpoint that was cut, flipped, filled or put together anew must be refused with exit code 2 and a sentence, or be
what was written; with its digest made to fit, as somebody who means harm would, too. Writes results/fuzz.json.
"""

import contextlib
import hashlib
import io
import json
import shutil
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import torch
import tyro
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import grpo  # noqa: E402  (the rule and the reader are the same in every policy script)


@dataclass
class Args:
    answers: int = 150_000
    """Texts."""
    checkpoints: int = 60_000
    """Files."""


CHUNK = 2000  # Hypothesis remembers what it has tried, and slows down with it: so many at a time
SETTINGS = {
    "database": None,
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "derandomize": False,
}
WORDS = ["answer", "answer ", " answer", "Answer", "8", " 8", "08", "-", "\n", "\x00", "\u202e", "((a+)+)+$"]
WORDS += [
    "####",
    "\\boxed{",
    "{",
    "}",
    "<answer>",
    "</answer>",
    "1,000",
    "1000.0",
    ".5",
    "$",
    "\\$",
    ",",
    "+",
    "٣",
]
WORDS = st.sampled_from(WORDS)
TEXTS = st.one_of(st.text(), st.lists(st.one_of(WORDS, st.text(max_size=5)), max_size=12).map("".join))
MARKERS = st.one_of(
    st.sampled_from(["answer", "####", "\\boxed{", "<answer>"]), st.text(min_size=1, max_size=4)
)
ANSWERS = st.one_of(st.text(max_size=8), st.integers(), st.floats(), st.booleans(), WORDS)


def plain_find(text: str, marker: str) -> str | None:
    """What stands behind the last marker, letter by letter from the right."""
    is_tag = (
        len(marker) > 2
        and marker[0] + marker[-1] == "<>"
        and all(c.isalnum() or c == "_" for c in marker[1:-1])
    )
    for i in range(len(text) - len(marker), -1, -1):
        if all(text[i + j] == letter for j, letter in enumerate(marker)):
            rest = text[i + len(marker) :]
            if is_tag:
                return rest.split(f"</{marker[1:]}")[0] if f"</{marker[1:]}" in rest else None
            if marker[-1] == "{":
                closes = [i for i in range(len(rest)) if rest[: i + 1].count("}") > rest[: i + 1].count("{")]
                return rest[: closes[0]] if closes else None
            return rest
    return None


def plain_value(text: str) -> Fraction | str:
    """The number that the text is, or the text."""
    text = " ".join(text.split())
    number = text.replace("\\$", "$").strip("$")
    sign = -1 if number[:1] == "-" else 1
    if number[:1] in ("-", "+"):
        number = number[1:].removeprefix("$")
    whole, _, part = number.partition(".")
    groups = whole.split(",")
    if len(groups) > 1 and (not 1 <= len(groups[0]) <= 3 or any(len(group) != 3 for group in groups[1:])):
        return text
    if not set("".join(groups) + part) <= set("0123456789") or not (whole or part):
        return text
    return sign * (Fraction(int("".join(groups) or "0")) + Fraction(int(part or "0"), 10 ** len(part)))


def plain_rule(text: str, answer, marker: str) -> float:
    """The same as exact_answer, in other words."""
    found, inside = plain_find(text, marker), plain_find(str(answer), marker)
    expected = inside if inside and inside.strip() else str(answer)
    return 1.0 if found is not None and plain_value(found) == plain_value(expected) else -1.0


def fuzz_answers(count: int) -> dict:
    """How many cases, and the longest one took."""
    seen = {"cases": 0, "right": 0, "slowest_ms": 0.0}

    @settings(max_examples=min(count, CHUNK), **SETTINGS)
    @given(TEXTS, ANSWERS, MARKERS, st.booleans())
    def check(text, answer, marker, append):
        if append:
            text = f"{text}{marker} {answer} "
        start = time.thread_time()
        (score,) = grpo.exact_answer([text], [answer], answer_marker=marker)
        seen["slowest_ms"] = max(seen["slowest_ms"], 1000 * (time.thread_time() - start))
        assert score == plain_rule(text, answer, marker)
        seen["cases"] += 1
        seen["right"] += score == 1

    while seen["cases"] < count:
        check()
    # Time may grow with the length of the text, not with its square: ten times the text, far less than 100 times.
    times = []
    for size in (10**6, 10**7):
        start = time.perf_counter()
        for text in ("answer " * (size // 7), "a" * size, "answe" * (size // 5)):
            grpo.exact_answer([text], ["8"], answer_marker="answer")
        times.append(time.perf_counter() - start)
    return seen | {"times_as_long_for_ten_times_the_text": round(times[1] / times[0], 1)}


class Run:
    """A run folder with one small checkpoint, as a script writes it."""

    def __init__(self, folder: Path):
        self.args = grpo.Args(runs_dir=str(folder))
        self.folder = folder / "run"
        (self.folder / "checkpoints").mkdir(parents=True)
        (self.folder / "args.json").write_text(json.dumps(json.loads(json.dumps(vars(self.args)))))
        shutil.copy(ROOT / "grpo.py", self.folder)
        layer = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(layer.parameters())
        layer(torch.ones(3)).sum().backward()
        optimizer.step()
        state = {"policy": layer.state_dict(), "optimizer": optimizer.state_dict()}
        grpo.save_checkpoint(self.args, self.folder, 3, 1, state)
        self.path = self.folder / "checkpoints" / "000003.pt"
        self.whole = self.path.read_bytes()
        self.digest = self.path.with_name("000003.pt.sha256").read_bytes()

    def read(self, content: bytes, digest_fits: bool) -> str:
        """What becomes of the content: refused, the same, or another state; anything else is an exception."""
        self.path.write_bytes(content)
        line = f"{hashlib.sha256(content).hexdigest()}  000003.pt\n".encode() if digest_fits else self.digest
        self.path.with_name("000003.pt.sha256").write_bytes(line)
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                state = grpo.load_checkpoint(self.args, str(self.folder), 1)
        except SystemExit as exit:
            assert (
                exit.code == 2
                and said.getvalue().startswith("error: --resume")
                and said.getvalue().count("\n") == 1
            )
            return "refused"
        assert isinstance(state, dict)
        return "the same" if content == self.whole else "another state"


def fuzz_checkpoints(count: int, folder: Path) -> dict:
    """How many cases, and what became of them."""
    run, seen = Run(folder), {"cases": 0, "digest_as_written": {}, "digest_made_to_fit": {}}
    place, byte = st.integers(0, len(run.whole) - 1), st.integers(0, 255)
    edits = st.one_of(
        st.tuples(st.just("set"), place, byte),
        st.tuples(st.just("cut"), place, place),
        st.tuples(st.just("insert"), place, st.binary(min_size=1, max_size=20)),
        st.tuples(st.just("truncate"), place, st.none()),
        st.tuples(st.just("copy"), place, place),
    )

    @settings(max_examples=min(count, CHUNK), **SETTINGS)
    @given(st.lists(edits, max_size=4), st.booleans())
    def check(edits, digest_fits):
        content = bytearray(run.whole)
        for kind, at, what in edits:
            at = min(at, len(content))
            if kind == "set" and at < len(content):
                content[at] = what
            elif kind == "cut":
                del content[min(at, what) : max(at, what)]
            elif kind == "insert":
                content[at:at] = what
            elif kind == "truncate":
                del content[at:]
            elif kind == "copy":
                content[at : at + 30] = run.whole[what : what + 30]
        outcome = run.read(bytes(content), digest_fits)
        kinds = seen["digest_made_to_fit" if digest_fits else "digest_as_written"]
        kinds[outcome] = kinds.get(outcome, 0) + 1
        assert digest_fits or outcome == ("the same" if bytes(content) == run.whole else "refused")
        seen["cases"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells of a pickle protocol that it does not know
        while seen["cases"] < count:
            check()
    return seen


def main(args: Args) -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = {
            "answers": fuzz_answers(args.answers),
            "checkpoints": fuzz_checkpoints(args.checkpoints, Path(folder)),
        }
    print(json.dumps(results, indent=1))
    if args == Args():
        made = {"made": {"command": "python benchmark/fuzz.py", "torch": torch.__version__}}
        (ROOT / "benchmark" / "results" / "fuzz.json").write_text(json.dumps(made | results, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
