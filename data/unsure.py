"""Chains of sums for a policy that is unsure of most sums. After a minute on a CPU, methods differ on this task.

    python data/unsure.py               writes prompts and a starting policy to data/unsure/, in half a minute
    python rloo.py --model data/unsure/policy --dataset data/unsure/train.jsonl --reward data/unsure.py:share

The policy works out chains of eight numbers step by step, as the toy's does. For each of the 200 sums and differences
of two digits, its demonstrations draw the result from one to eight digits, of which one is right. RL has to find the
right one. The score is the share of right steps, so it rises with every sum that is learned.
"""

import random
import sys
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "toy"))

import steps  # noqa: E402
from make_toy import make_chain, prompt, train, value, write_jsonl  # noqa: E402

FOLDER = ROOT / "data" / "unsure"
NUMBERS = 8  # of a chain
CHOICES = 8  # results from which a demonstration draws, at most


def working(chain: list, results: list) -> str:
    """A response with these results: think 3 + 5 = 8 - 2 = 6 answer 6."""
    words = ["think", chain[0]]
    for operator, number, result in zip(chain[1::2], chain[2::2], results):
        words += [operator, number, "=", result]
    return " ".join(map(str, [*words, "answer", *results[-1:]]))


def make_data(seed: int) -> dict[str, list[dict]]:
    """The rows of every file by its name. Training and held-out prompts differ."""
    rng = random.Random(seed)
    table = {}
    for step in ([a, operator, b] for a in range(10) for operator in "+-" for b in range(10)):
        wrong = [x for x in range(10) if x != value(step)]
        table[tuple(step)] = [value(step), *rng.sample(wrong, rng.randrange(CHOICES))]
    chains = {}
    while len(chains) < 2200:
        chain = make_chain(rng, NUMBERS)
        chains[prompt(chain)] = {"prompt": prompt(chain), "answer": str(value(chain))}
    demonstrations = []
    for _ in range(10240):
        chain, results = make_chain(rng, NUMBERS), []
        total = chain[0]
        for operator, number in zip(chain[1::2], chain[2::2]):
            total = rng.choice(table[total, operator, number])
            results.append(total)
        demonstrations.append({"prompt": prompt(chain), "completion": working(chain, results)})
    rows = [*chains.values()]
    return {"train": rows[200:], "heldout": rows[:200], "demonstrations": demonstrations}


def share(prompts: list[str], completions: list[str], **columns) -> list[float]:
    """The share of right steps, given the result before each. A response that does not work out its chain scores 0."""
    scores = []
    for text, words in zip(prompts, map(str.split, completions)):
        chain = text.split()[:-1]
        results = words[5::4]
        parts = [*zip([chain[0], *results], chain[1::2], chain[2::2], results)]
        is_working = len(results) == len(chain) // 2 and " ".join(words) == working(chain, results)
        right = sum(steps.value(part[:3]) == part[3] for part in parts)
        scores.append(right / len(parts) if is_working else 0.0)
    return scores


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, rows in make_data(0).items():
        write_jsonl(FOLDER / f"{name}.jsonl", rows)
    start, demonstrations = ROOT / "toy" / "policy", FOLDER / "demonstrations.jsonl"
    train("sft.py", start, demonstrations, FOLDER / "policy", 0, ["--num_epochs", "2"])


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
