"""Make toy/tools from a seed: sums that are too hard for the model, which may call a calculator.

    python toy/make_tools.py --out /tmp/tools       some minutes on two cores; by default it writes into toy/tools

A prompt such as `4 8 + 7 1 5 + 9 0 ?` is the sum of two to four numbers of two or three digits, with a token per digit.
A response guesses (`answer 8 1 1`) or calls the calculator for each plus:

    call 4 8 + 7 1 5 = 7 6 3 call 7 6 3 + 9 0 = 8 5 3 answer 8 5 3

The calculator (toy/tools/calculator.py) writes what follows `=`. The demonstrations call it in a third of the cases,
sometimes with a wrong digit. Otherwise they guess near the sum, and never the sum itself. Sums of four numbers are in
the demonstrations but in no rollout.
"""

import random
import tempfile
from pathlib import Path

import tyro
from make_toy import CURRICULUM_FLAGS, HERE, save_untrained, train, write_jsonl

WORDS = ["<pad>", "<eos>", "<unk>", *"0123456789", "+", "=", "?", "call", "answer"]
CALL_SHARE = 0.33  # of the demonstrations; the others guess
SLIP_RATE = 0.06  # of the calls have a second number with one digit that is off by 1
HELDOUT = 200  # prompts per group
CURRICULUM_STEPS = 1280  # batches of 128, which teach the form of a call


def spaced(number: int) -> str:
    return " ".join(str(number))


def prompt(numbers: list[int]) -> str:
    return " + ".join(map(spaced, numbers)) + " ?"


def with_calls(rng: random.Random, numbers: list[int], slip_rate: float) -> str:
    """A call for each plus, with the calculator's answers, and the final answer."""
    parts, total = [], numbers[0]
    for number in numbers[1:]:
        if rng.random() < slip_rate:
            number += rng.choice([-1, 1]) * rng.choice([1, 10])
        parts.append(f"call {spaced(total)} + {spaced(number)} = {spaced(total + number)}")
        total += number
    return " ".join([*parts, "answer", spaced(total)])


def guess(rng: random.Random, numbers: list[int]) -> str:
    return f"answer {spaced(max(1, sum(numbers) + rng.choice([-1, 1]) * rng.randint(1, 99)))}"


def make_data(seed: int) -> dict[str, list[dict]]:
    """The rows of every JSONL file by its name. "curriculum" is only for training."""
    rng = random.Random(seed)
    heldout_prompts = set()

    def draw(count: int) -> list[int]:
        """Numbers whose prompt is not held out."""
        while True:
            numbers = [rng.randint(*rng.choice([(10, 99), (100, 999)])) for _ in range(count)]
            if prompt(numbers) not in heldout_prompts:
                return numbers

    def row(numbers: list[int], **columns) -> dict:
        return {"prompt": prompt(numbers), "answer": spaced(sum(numbers))} | columns

    heldout = []
    for count in [2] * HELDOUT + [3] * HELDOUT + [4] * HELDOUT:
        heldout.append(row(draw(count), group=f"{count} numbers"))
        heldout_prompts.add(heldout[-1]["prompt"])
    train = [row(draw(rng.randint(2, 3))) for _ in range(2000)]

    curriculum = []
    for i in range(128 * CURRICULUM_STEPS):
        longest = min(4, 2 + 4 * i // (128 * CURRICULUM_STEPS))  # grows from 2 to 4 over the first half
        numbers = draw(rng.randint(2, longest))
        completion = with_calls(rng, numbers, 0.0) if rng.random() < 0.8 else guess(rng, numbers)
        curriculum.append({"prompt": prompt(numbers), "completion": completion})
    demonstrations = []
    for _ in range(10240):
        numbers = draw(rng.randint(2, 4))
        calls = rng.random() < CALL_SHARE
        completion = with_calls(rng, numbers, SLIP_RATE) if calls else guess(rng, numbers)
        demonstrations.append({"prompt": prompt(numbers), "completion": completion})
    return {"train": train, "heldout": heldout, "demonstrations": demonstrations, "curriculum": curriculum}


def main(seed: int = 0, out: Path = HERE / "tools") -> None:
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for name, rows in make_data(seed).items():
            write_jsonl((out if name in ("train", "heldout") else scratch) / f"{name}.jsonl", rows)
        save_untrained(scratch / "untrained", seed, WORDS)
        base = scratch / "base"
        train("sft.py", scratch / "untrained", scratch / "curriculum.jsonl", base, seed, CURRICULUM_FLAGS)
        train("sft.py", base, scratch / "demonstrations.jsonl", out / "policy", seed)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
