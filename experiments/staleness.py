"""flash_reinforce.py on the toy with responses that are some updates old, behind gates of several widths.

    python experiments/staleness.py        train, draw and print the tables: 100 runs of half a minute

One process does what flash_reinforce_async.py does with two, and needs half the CPU: patches/delayed.patch samples with
the weights of --staleness updates ago. A test compares the two, bit by bit.
"""

from dataclasses import dataclass
from itertools import product

import tyro
from common import curve, run_all, train

STALENESS = (0, 1, 2, 4)
DELTAS = (1e6, 0.01, 0.003)  # the first leaves out nothing
KEYS = ("score", "rejected", "logprob_difference", "grad_norm")
FLAGS = {"eval_every": 0, "save_every": 0, "log_every": 10**6}


@dataclass
class Args:
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    learning_rates: tuple[float, ...] = (2e-4, 5e-5)


def cells(args: Args) -> list[dict]:
    """With fresh responses every gate is open, so that one delta is enough."""
    settings = product(args.seeds, args.learning_rates, STALENESS, DELTAS)
    return [
        {"script": "flash_reinforce", "patches": ["delayed"], "staleness": n, "seed": seed}
        | {"flags": {"learning_rate": rate, "delta": delta}}
        for seed, rate, n, delta in settings
        if n > 0 or delta == DELTAS[-1]
    ]


def measure(run_dir, script: str, patches: list[str], staleness: int, seed: int, flags: dict) -> dict:
    options = FLAGS | flags | {"seed": seed}
    lines, seconds = train(script, options, run_dir, {"STALENESS": str(staleness)}, patches)
    return {"seconds": seconds} | {key: curve(lines, key, 5) for key in KEYS}


def main(args: Args) -> None:
    run_all("staleness", cells(args), measure, workers=1)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, use_underscores=True))
