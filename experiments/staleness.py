"""flash_reinforce.py on the toy with responses that are some updates old, behind gates of several widths.

    python experiments/staleness.py        train, draw and print the table: 100 runs of half a minute

One process does what flash_reinforce_async.py does with two ranks, and needs half the CPU: patches/delayed.patch
samples with the weights of n updates ago, n from the environment. A test compares the two, bit by bit.
"""

from itertools import product

import tyro
from common import ROOT, curve, group_by, load, mean, run_all, show, table, train

SEEDS = (1, 2, 3, 4, 5)
RATES = (2e-4, 1e-4)
STALENESS = (0, 1, 2, 4)
DELTAS = {1e6: "off", 0.01: "0.01", 0.003: "0.003"}
FLAGS = {"eval_every": 0, "save_every": 0, "log_every": 10**6}


def cells() -> list[dict]:
    """With fresh responses every gate is open, so n = 0 needs one delta only."""
    cells = []
    for seed, rate, n, delta in product(SEEDS, RATES, STALENESS, DELTAS):
        cell = {"script": "flash_reinforce", "patches": ["delayed"], "staleness": n, "seed": seed}
        if n > 0 or delta == 0.003:
            cells.append(cell | {"flags": {"learning_rate": rate, "delta": delta}})
    return cells


def measure(run_dir, script: str, patches: list[str], staleness: int, seed: int, flags: dict) -> dict:
    lines = train(script, FLAGS | flags | {"seed": seed}, run_dir, patches, STALENESS=str(staleness))
    return {key: curve(lines, key, 5) for key in ("score", "rejected", "logprob_difference")}


def summary() -> None:
    """Print score, share of rejected responses, and change of the policy between sampling and training."""
    lines, rows = [], load("staleness")
    settings = group_by(rows, "staleness", lambda run: tuple(run["flags"].values()))
    for (n, (rate, delta)), runs in settings.items():
        scores = [mean(run["score"][-10:]) for run in runs]
        rejected = [x for run in runs for x in run["rejected"]]
        shares = [f"{100 * x:.1f} %" for x in (mean(rejected), max(rejected))]
        moved = mean([mean(run["logprob_difference"][n:]) for run in runs])
        head = [f"{rate:g}", str(n), DELTAS[delta] if n else "any", str(len(runs))]
        lines.append([*head, show(scores, 3), *shares, f"{moved:.4f}"])
    heads = ["learning rate", "n", "δ", "seeds", "score", "rejected", "at most", "log-prob difference"]
    table(heads, lines, rows)


def draw() -> None:
    """Draw the score against n, mean and range of the seeds: a panel for each rate, a line for each delta."""
    import matplotlib.pyplot as plt
    import plot

    figure, axes = plt.subplots(1, len(RATES), figsize=(8, 3), sharey=True, layout="constrained")
    for axis, rate in zip(axes, RATES):
        for delta, color in zip(DELTAS, plot.COLORS):
            scores = {n: [] for n in STALENESS}
            for run in load("staleness"):
                flags, n = run["flags"], run["staleness"]
                if flags["learning_rate"] == rate and (n == 0 or flags["delta"] == delta):
                    scores[n].append(mean(run["score"][-10:]))
            lows, means, highs = zip(*((min(x), mean(x), max(x)) for x in scores.values()))
            axis.plot(STALENESS, means, color=color, marker=".", label=f"δ {DELTAS[delta]}")
            axis.fill_between(STALENESS, lows, highs, color=color, alpha=0.12, linewidth=0)
        axis.set(title=f"learning rate {rate:g}", xticks=STALENESS, xlabel="n: updates since sampling")
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("score, last 10 iterations")
    axes[0].legend(frameon=False)
    plot.save(figure, ROOT / "docs" / "staleness.png")


def main() -> None:
    run_all("staleness", cells(), measure)
    draw()
    summary()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
