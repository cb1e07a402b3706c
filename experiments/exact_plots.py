"""The pictures and tables of docs/exact.md and docs/exact_tables.md: python experiments/exact_plots.py"""

import math
import textwrap

import matplotlib.pyplot as plt
import torch
from common import ROOT, group_by, load, table
from exact import KLS, RATES
from exact_training import KNOBS, SCALES, T_99, TRAPS, USUAL
from PIL import Image

P = RATES.tolist()
BLUE, ORANGE, GREEN, BLACK = "#0072B2", "#D55E00", "#009E73", "#222222"
STYLE = {"axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.use": True}
STYLE |= {"axes.titlelocation": "left", "axes.titleweight": "bold", "axes.formatter.min_exponent": 8}
RUNS = (0.07, 0.5)  # nats per token: the ends and peaks of the toy's runs; SmolLM2 lies between


FAMILY = ("vocabulary", "depth", "way")


def find(rows: list[dict], **wanted) -> list[dict]:
    return [row for row in rows if wanted.items() <= row.items()]


def relative(row: dict) -> list[float]:
    """The weights of prompts, divided by the weight at a pass rate of 0.5."""
    return [x / row["w"][P.index(0.5)] for x in row["w"]]


def draw_weights():
    rows = load("exact_weights")
    figure, axes = plt.subplots(1, 3, figsize=(11, 4.2))
    families = {GREEN: [], ORANGE: [], BLUE: []}
    for (script,), runs in group_by(rows, "script").items():
        w = relative(runs[0])  # at k = 8
        color = GREEN if w[2] > 2 * w[-3] else ORANGE if w[2] > 1.1 else BLUE
        families[color].append(script)
        axes[0].plot(P, w, color=color)
    for (color, names), x, y in zip(families.items(), (0.15, 0.3, 0.05), (4.5, 1.8, 0.33)):
        axes[0].text(x, y, textwrap.fill(", ".join(names), 30), color=color, fontsize=9)
    for i, k in enumerate((2, 4, 8, 16, 64)):
        for axis, script, color in ((axes[1], "grpo", ORANGE), (axes[2], "maxrl", GREEN)):
            w = relative(find(rows, script=script, k=k)[0])
            axis.plot(P, w, color=color, alpha=0.4 + 0.15 * i)
            axis.text(-0.02, min(w[0], 11), f"k = {k}", color=color, ha="right", va="center")
    axes[1].plot(P, [0.5 / math.sqrt(p * (1 - p)) for p in P], color=BLACK, ls=":")
    axes[1].text(0.1, 7, r"dotted, $k\to\infty$: climbs $\arcsin\sqrt{p}$")
    axes[2].plot(P, [0.5 / p for p in P], color=BLACK, ls=":")
    axes[2].text(0.2, 5, r"dotted, $k\to\infty$: climbs $\log\,p$")
    for axis, title in zip(axes, ("Three families, k = 8", "grpo", "maxrl, raft")):
        axis.set(
            title=title, xlabel="pass rate p", xlim=(-0.25 * (axis is not axes[0]), 1), xticks=(0, 0.5, 1)
        )
        axis.set_yscale("log", base=2)
        axis.set_ylim(0.3, 12)
    axes[0].set(ylabel="weight, relative to p = 0.5")
    return figure


def weights() -> None:
    """Print the weights at some pass rates, and the responses for the same ratio of signal to noise."""
    rows, lines = load("exact_weights"), {}
    for row in rows:
        words = [f"k = {row['k']}"] * (row["k"] != 8) + [f"{row['groups']} groups"] * (row["groups"] > 1)
        words += ["the others 98 % right"] * (row["others"] is not None)
        cells = [f"{relative(row)[P.index(p)]:.2f}" for p in (0.01, 0.1, 0.9, 0.99)]
        for p in (0.1, 0.5, 0.9):
            i, (base,) = P.index(p), find(rows, script="rloo", k=8)
            one, two = (x["k"] * x["noise"][i] / x["w"][i] ** 2 for x in (row, base))
            cells.append(f"{one / two:.2f}")
        lines.setdefault(tuple(cells), []).append(
            f"`{row['script']}`" + f" ({', '.join(words)})" * bool(words)
        )
    heads = [f"weight at p = {p:g}" for p in (0.01, 0.1, 0.9, 0.99)]
    heads += [f"responses at p = {p:g}" for p in (0.1, 0.5, 0.9)]
    table(["script", *heads], [[", ".join(names), *cells] for cells, names in lines.items()], rows)


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


def draw_kl():
    rows = load("exact_kl")
    figure, (a, b) = plt.subplots(1, 2, figsize=(9.5, 4.2))
    colors = {
        "k1 in the reward": BLUE,
        "k2 in the loss": GREEN,
        "k3 in the loss": ORANGE,
        "k3, clamped": BLACK,
    }
    for _, terms in group_by(rows, "vocabulary", "depth", "way").items():
        (k2,) = find(terms, term="k2 in the loss")
        for row, (term, color) in zip(terms, colors.items()):
            label = term if row in rows[:4] else None
            style = {"color": color, "lw": 1, "ls": "--" if term == "k3, clamped" else "-"}
            a.plot(KLS, row["cosine"], label=label, **style)
            b.plot(KLS, [x / y for x, y in zip(row["noise"], k2["noise"])], **style)
    for axis in (a, b):
        axis.axvspan(*RUNS, color="#EEEEEE", zorder=0)
        axis.set(xscale="log", xlabel="KL from the reference, nats per token")
    a.set(title="Cosine with the gradient of the KL", ylim=(0.4, 1.02))
    a.legend(loc="lower left", frameon=False)
    b.set(title="Noise, relative to k2", yscale="log", ylim=(0.7, 1000))
    b.text(RUNS[0], 500, " our runs")
    return figure


def kl_terms() -> None:
    """Print cosine / noise relative to k2 of each term: the range over the families of policies."""
    rows, lines = load("exact_kl"), []
    k2 = {
        family: row["noise"]
        for family, (row,) in group_by(find(rows, term="k2 in the loss"), *FAMILY).items()
    }
    for (term,), runs in group_by(rows, "term").items():
        lines.append([term])
        for i in range(len(KLS)):
            cosines = [row["cosine"][i] for row in runs]
            ratios = [row["noise"][i] / k2[tuple(row[name] for name in FAMILY)][i] for row in runs]
            lines[-1].append(f"{min(cosines):.2f}–{max(cosines):.2f} / {min(ratios):.1f}–{max(ratios):.1f}")
    table(["cosine / noise", *(f"{x:g} nats" for x in KLS)], lines, rows)


def settings() -> dict[tuple, dict]:
    """By setting: the rows of its arms, by script and k."""
    groups = group_by(load("exact_training"), *USUAL).items()
    return {key: {(row["script"], row["k"]): row for row in rows} for key, rows in groups}


def difference(row: dict, base: dict, outcome: str) -> tuple[float, float]:
    """Mean difference over the seeds and half of its 99 % interval, in points."""
    values = 100 * (torch.tensor(row[outcome]) - torch.tensor(base[outcome]))
    return float(values.mean()), float(T_99 * values.std() / math.sqrt(len(values)))


def ratio(row: dict) -> float:
    """score_variance_ratio of the base policy at k = 8."""
    return 7 / 8 * row["variances"][0] / row["variances"][1]


RLOO, GRPO, BATCH_STD, MAXRL = ("rloo", 8), ("grpo", 8), ("reinforce_pp_baseline", 8), ("maxrl", 8)
ONE, SAME_PROMPTS = (
    ("reinforce", 1),
    ("reinforce", 8),
)  # the batch's mean as baseline, with k = 1 and with k = 8


def contrasts():
    """Text of a claim, its two arms, the settings it is about, and the outcome."""
    plain = {"trap": (0.0,)}
    for k, other in ((4, 8), (2, 8), (2, 4), (4, 16), (8, 16), (8, 64)):
        yield f"`rloo`: k = {k} ahead of {other}", ("rloo", k), ("rloo", other), plain
    for k, other in ((4, 8), (4, 16), (8, 64)):
        yield f"`grpo`: k = {k} ahead of {other}", ("grpo", k), ("grpo", other), plain
    for scale, text in (
        ("equal", "equal scales"),
        ("prompt", "scales by prompt"),
        ("answer", "scales by answer"),
    ):
        yield f"std of the group ahead of none, {text}", GRPO, RLOO, plain | {"scale": (scale,)}
        yield f"std of the batch ahead of none, {text}", BATCH_STD, RLOO, plain | {"scale": (scale,)}
    for k in (16, 64):
        yield (
            f"std of the group ahead of none at k = {k}, equal scales",
            ("grpo", k),
            ("rloo", k),
            {"scale": ("equal",)},
        )
    for x in TRAPS:
        yield f"std of the group ahead of none, a wrong answer pays {x:g}", GRPO, RLOO, {"trap": (x,)}
    yield "one response per prompt ahead of `rloo`, k = 8", ONE, RLOO, plain
    yield "the batch's mean ahead of the group's, same prompts", SAME_PROMPTS, RLOO, plain
    yield "one response per prompt ahead of 8, the batch's mean in both", ONE, SAME_PROMPTS, plain
    for scale in SCALES:
        yield f"`maxrl` ahead of `rloo`, {scale}", MAXRL, RLOO, plain | {"scale": (scale,)}


def claims() -> None:
    """Print in how many settings each claim holds, shows no difference, and reverses."""
    lines = []
    for text, one, two, about in contrasts():
        arms = [
            x for key, x in settings().items() if all(dict(zip(USUAL, key))[y] in z for y, z in about.items())
        ]
        found = [difference(x[one], x[two], "accuracy") for x in arms if one in x and two in x]
        counts = [sum(sign * m > half for m, half in found) for sign in (1, -1)]
        between = f"{min(found)[0]:+.1f} to {max(found)[0]:+.1f}"
        lines.append([text, *map(str, (counts[0], len(found) - sum(counts), counts[1])), between])
    table(["claim", "holds", "no difference", "reverses", "points"], lines, load("exact_training"))


def draw_training():
    figure, axes = plt.subplots(1, 2, figsize=(9.5, 4.4), sharey=True)
    for arms in settings().values():
        for axis, arm in zip(axes, (ONE, SAME_PROMPTS)):
            row = arms[RLOO]
            if arm in arms and not row["trap"]:
                turned = sum(row[name] != USUAL[name] for name in KNOBS)
                color = (BLUE, ORANGE)[turned > 0]
                axis.errorbar(
                    ratio(row), *difference(arms[arm], row, "accuracy"), fmt="o", ms=4, lw=1, color=color
                )
    for axis in axes:
        axis.axhline(0, color=BLACK, lw=1)
        axis.set(
            xscale="log",
            xlabel="score_variance_ratio at the start",
            xticks=(1, 2, 4, 8),
            xticklabels=("1", "2", "4", "8"),
        )
    axes[0].set(title="k = 1 less rloo, k = 8", ylabel="accuracy, points")
    axes[1].set(title="The batch's mean less the group's, same prompts")
    return figure


if __name__ == "__main__":
    plt.rcParams.update(STYLE)  # not on import: the tests import this module, and others that draw
    for draw in (draw_weights, draw_length, draw_kl, draw_training):
        file = ROOT / "docs" / f"exact_{draw.__name__.removeprefix('draw_')}.png"
        draw().savefig(file, dpi=110)
        Image.open(file).convert("RGB").quantize(96).save(file, optimize=True)  # a third of the bytes
