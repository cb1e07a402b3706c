"""The pictures and tables of docs/exact.md and docs/exact_tables.md: python experiments/exact_plots.py"""

import math
import textwrap

import matplotlib.pyplot as plt
from common import ROOT, load, table
from exact import RATES
from PIL import Image

P = RATES.tolist()
BLUE, ORANGE, GREEN, BLACK = "#0072B2", "#D55E00", "#009E73", "#222222"
STYLE = {"axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.use": True}
STYLE |= {"axes.titlelocation": "left", "axes.titleweight": "bold", "axes.formatter.min_exponent": 8}


def relative(row: dict) -> list[float]:
    """The weights of prompts, divided by the weight at a pass rate of 0.5."""
    return [x / row["w"][P.index(0.5)] for x in row["w"]]


def draw_weights():
    figure, axes = plt.subplots(1, 3, figsize=(11, 4.2))
    families = {GREEN: [], ORANGE: [], BLUE: []}
    panels = {"grpo": (axes[1], ORANGE), "maxrl": (axes[2], GREEN)}
    for row in load("exact_weights"):
        w, k, script = relative(row), row["k"], row["script"]
        if k == 8:
            color = GREEN if w[0] > 2 * w[-1] else ORANGE if w[0] > 1.1 else BLUE
            families[color].append(script)
            axes[0].plot(P, w, color=color)
        if script in panels:
            axis, color = panels[script]
            axis.plot(P, w, color=color, alpha=0.4 + 0.1 * math.log2(k))
            if k > 2:
                axis.text(-0.02, min(w[0], 11), f"k = {k}", color=color, ha="right", va="center")
    for (color, names), x, y in zip(families.items(), (0.15, 0.25, 0.05), (4.5, 1.8, 0.33)):
        axes[0].text(x, y, textwrap.fill(", ".join(names), 30), color=color, fontsize=9)
    axes[1].plot(P, [0.5 / math.sqrt(p * (1 - p)) for p in P], color=BLACK, ls=":")
    axes[1].text(0.1, 6, r"dotted, $k\to\infty$: climbs $\arcsin\sqrt{p}$")
    axes[2].plot(P, [0.5 / p for p in P], color=BLACK, ls=":")
    axes[2].text(0.3, 6, r"dotted, $k\to\infty$: climbs $\log\,p$")
    for axis, title, left in zip(axes, ("Three families, k = 8", "grpo", "maxrl, raft"), (0, -0.25, -0.25)):
        axis.set(title=title, xlabel="pass rate p", xlim=(left, 1), xticks=(0, 0.5, 1))
        axis.set_yscale("log", base=2)
        axis.set_ylim(0.3, 12)
    axes[0].set(ylabel="weight, relative to p = 0.5")
    return figure


def weights() -> None:
    """Print the weights at some pass rates, and the responses for the same ratio of signal to noise."""
    rows, lines = load("exact_weights"), {}
    [base] = [row for row in rows if row["script"] == "rloo"]
    for row in rows:
        cells = [f"{relative(row)[P.index(p)]:.2f}" for p in (0.01, 0.1, 0.9, 0.99)]
        for i in map(P.index, (0.1, 0.5, 0.9)):
            one, two = (x["k"] * x["noise"][i] / x["w"][i] ** 2 for x in (row, base))
            cells.append(f"{one / two:.2f}")
        name = f"`{row['script']}`" if row["k"] == 8 else f"`{row['script']}` (k = {row['k']})"
        lines.setdefault(tuple(cells), []).append(name)
    heads = ["script", *(f"w at p = {p:g}" for p in (0.01, 0.1, 0.9, 0.99))]
    heads += [f"responses at p = {p:g}" for p in (0.1, 0.5, 0.9)]
    table(heads, [[", ".join(names), *cells] for cells, names in lines.items()], rows)


def draw_length():
    figure, axis = plt.subplots(figsize=(6, 4))
    for row in load("exact_length"):
        rate, right, wrong = zip(*row["path"])
        color = ORANGE if right[-1] < right[0] - 1 else BLUE
        axis.plot(rate, right, color=color)
        axis.plot(rate, wrong, color=color, ls="--")
    axis.set(title="Mean length during training", xlabel="pass rate", ylabel="tokens", ylim=(0, 50))
    axis.text(0.1, 38, "wrong responses", color=ORANGE)
    axis.text(0.5, 8, "right responses", color=ORANGE)
    axis.text(0.3, 18, "both, without 1/length\nor if the policy cannot tell", color=BLUE)
    return figure


if __name__ == "__main__":
    plt.rcParams.update(STYLE)  # not on import: cog imports this module beside others that draw
    for draw in (draw_weights, draw_length):
        file = ROOT / "docs" / f"exact_{draw.__name__.removeprefix('draw_')}.png"
        draw().savefig(file, dpi=110)
        Image.open(file).convert("RGB").quantize(96).save(file, optimize=True)  # a third of the bytes
