"""flash_reinforce.py on the toy with responses that are some updates old, behind gates of several widths.

    python experiments/staleness.py        train, draw and print the tables: 100 runs of half a minute

One process does what flash_reinforce_async.py does with two ranks, and needs half the CPU: patches/delayed.patch
samples with the weights of n updates ago, n from the environment. A test compares the two, bit by bit.
"""

from dataclasses import dataclass
from itertools import product

import tyro
from common import ROOT, curve, group_by, load, mean, run_all, show, table, train

STALENESS = (0, 1, 2, 4)
DELTAS = {1e6: "off", 0.01: "0.01", 0.003: "0.003"}
KEYS = ("score", "rejected", "logprob_difference")
FLAGS = {"eval_every": 0, "save_every": 0, "log_every": 10**6}


@dataclass
class Args:
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    learning_rates: tuple[float, ...] = (2e-4, 5e-5)


def cells(args: Args) -> list[dict]:
    """With fresh responses every gate is open, so n = 0 needs one delta only."""
    cells = []
    for seed, rate, n, delta in product(args.seeds, args.learning_rates, STALENESS, DELTAS):
        cell = {"script": "flash_reinforce", "patches": ["delayed"], "staleness": n, "seed": seed}
        if n > 0 or delta == 0.003:
            cells.append(cell | {"flags": {"learning_rate": rate, "delta": delta}})
    return cells


def measure(run_dir, script: str, patches: list[str], staleness: int, seed: int, flags: dict) -> dict:
    env = {"STALENESS": str(staleness)}
    lines, _ = train(script, FLAGS | flags | {"seed": seed}, run_dir, env, patches)
    return {key: curve(lines, key, 5) for key in KEYS}


# --- the table and the picture ---


def groups() -> dict[tuple, list[dict]]:
    """The runs with each learning rate, n and delta."""
    return group_by(
        load("staleness"),
        lambda run: run["flags"]["learning_rate"],
        "staleness",
        lambda run: DELTAS[run["flags"]["delta"]] if run["staleness"] else "any",
    )


def last(runs: list[dict]) -> list[float]:
    """The mean score of each run in its last ten iterations."""
    return [mean(run["score"][-10:]) for run in runs]


def summary() -> None:
    """Print score, share of rejected responses, and change of the policy between sampling and training."""
    lines, found = [], groups()
    for (rate, n, delta), runs in found.items():
        rejected = [x for run in runs for x in run["rejected"]]
        shares = [f"{100 * x:.1f} %" for x in (mean(rejected), max(rejected))]
        moved = mean([mean(run["logprob_difference"][n:]) for run in runs])
        numbers = [show(last(runs), 3), *shares, f"{moved:.4f}"]
        lines.append([f"{rate:g}", str(n), delta, str(len(runs)), *numbers])
    heads = ["learning rate", "n", "δ", "seeds", "score", "rejected", "at most", "log-prob difference"]
    table(heads, lines, [run for runs in found.values() for run in runs])


def draw() -> None:
    """Draw the score against n: a panel for each learning rate, a line for each delta."""
    import plot
    from matplotlib import pyplot

    found = groups()
    rates = list(dict.fromkeys(rate for rate, *_ in found))
    figure, axes = pyplot.subplots(1, len(rates), figsize=(8, 3), layout="constrained", squeeze=False)
    for axis, rate in zip(axes.flat, rates):
        for delta, color in zip(DELTAS.values(), plot.COLORS):
            runs = {n: found.get((rate, n, delta if n else "any")) for n in STALENESS}
            scores = {n: last(x) for n, x in runs.items() if x}
            axis.plot(
                [*scores], [mean(x) for x in scores.values()], color=color, marker=".", label=f"δ {delta}"
            )
            lows, highs = zip(*((min(x), max(x)) for x in scores.values()))
            axis.fill_between([*scores], lows, highs, color=color, alpha=0.12, linewidth=0)
        axis.set_title(f"learning rate {rate:g}", fontsize=10)
        axis.set_xticks(STALENESS)
        axis.grid(alpha=0.25)
    axes[0, 0].set_ylabel("score, last 10 iterations")
    axes[0, 0].legend(frameon=False, fontsize=9)
    figure.supxlabel("n: updates since the sampling weights", fontsize=10)
    figure.savefig(ROOT / "docs" / "staleness.png")


def main(args: Args) -> None:
    run_all("staleness", cells(args), measure)
    draw()
    summary()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, use_underscores=True))
