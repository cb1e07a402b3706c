"""The pictures and tables of docs/exact.md and docs/exact_tables.md: python experiments/exact_plots.py"""

import math
import textwrap
from itertools import product

import matplotlib.pyplot as plt
import torch
from common import ROOT, group_by, load, mean, table
from exact import FAMILY, KLS, RATES
from exact_training import SCALES, T_99, TRAPS, USUAL
from PIL import Image

P = RATES.tolist()
BLUE, ORANGE, GREEN, BLACK = "#0072B2", "#D55E00", "#009E73", "#222222"
STYLE = {"axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.use": True}
STYLE |= {"axes.titlelocation": "left", "axes.titleweight": "bold", "axes.formatter.min_exponent": 8}
OUR_RUNS = (
    0.07,
    0.5,
)  # nats per token: from the ends to the peaks of `kl` in runs of the toy; SmolLM2 lies between


def relative(row: dict) -> list[float]:
    """The weights of prompts, divided by the weight at a pass rate of 0.5."""
    return [x / row["w"][P.index(0.5)] for x in row["w"]]


def draw_weights():
    figure, axes = plt.subplots(1, 3, figsize=(11, 4.2))
    families = {GREEN: [], ORANGE: [], BLUE: []}
    for row in load("exact_weights"):
        w, k = relative(row), row["k"]
        color = GREEN if w[0] > 2 * w[-1] else ORANGE if w[0] > 1.1 else BLUE
        if k == 8:
            families[color].append(row["script"])
            axes[0].plot(P, w, color=color)
        for axis, script, color in ((axes[1], "grpo", ORANGE), (axes[2], "maxrl", GREEN)):
            if row["script"] == script:
                axis.plot(P, w, color=color, alpha=0.4 + 0.1 * math.log2(k))
                axis.text(
                    -0.02, min(w[0], 11), f"k = {k}" * (w[0] != 1), color=color, ha="right", va="center"
                )
    for (color, names), x, y in zip(families.items(), (0.15, 0.25, 0.05), (4.5, 1.8, 0.33)):
        axes[0].text(x, y, textwrap.fill(", ".join(names), 30), color=color, fontsize=9)
    limits = {axes[1]: ([0.5 / math.sqrt(p * (1 - p)) for p in P], r"\arcsin\sqrt{p}", 0.1)}
    limits |= {axes[2]: ([0.5 / p for p in P], r"\log\,p", 0.3)}
    for axis, (w, objective, x) in limits.items():
        axis.plot(P, w, color=BLACK, ls=":")
        axis.text(x, 6, rf"dotted, $k\to\infty$: climbs ${objective}$")
    for axis, title in zip(axes, ("Three families, k = 8", "grpo", "maxrl and raft")):
        axis.set(title=title, xlabel="pass rate p", xlim=(-0.25 * (axis in limits), 1), xticks=(0, 0.5, 1))
        axis.set_yscale("log", base=2)
        axis.set_ylim(0.3, 12)
    axes[0].set(ylabel="weight, relative to p = 0.5")
    return figure


def weights() -> None:
    """Print the weights at some pass rates, and the responses for the same ratio of signal to noise."""
    rows, lines = load("exact_weights"), {}
    (base,) = (row for row in rows if row["script"] == "rloo")
    for row in rows:
        cells = [f"{relative(row)[P.index(p)]:.2f}" for p in (0.01, 0.1, 0.9, 0.99)]
        for i in map(P.index, (0.1, 0.5, 0.9)):
            one, two = (x["k"] * x["noise"][i] / x["w"][i] ** 2 for x in (row, base))
            cells.append(f"{one / two:.2f}")
        lines.setdefault(tuple(cells), []).append(
            f"`{row['script']}`" + f" (k = {row['k']})" * (row["k"] != 8)
        )
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


def kl_by_term() -> dict[str, list[tuple]]:
    """For each term and family of policies: the cosines, and the noise relative to that of k2."""
    result = {}
    for terms in group_by(load("exact_kl"), *FAMILY).values():
        noise = {row["term"]: row["noise"] for row in terms}
        for row in terms:
            ratios = [x / y for x, y in zip(row["noise"], noise["k2 in the loss"])]
            result.setdefault(row["term"], []).append((row["cosine"], ratios))
    return result


def draw_kl():
    figure, axes = plt.subplots(1, 2, figsize=(9.5, 4.2))
    for (term, runs), color in zip(kl_by_term().items(), (BLUE, GREEN, ORANGE, BLACK)):
        for run in runs:
            for axis, values in zip(axes, run):
                axis.plot(KLS, values, color=color, lw=1, ls="--" if "clamped" in term else "-")
        axes[0].plot([], [], color=color, ls="--" if "clamped" in term else "-", label=term)
    for axis in axes:
        axis.axvspan(*OUR_RUNS, color="#EEEEEE", zorder=0)
        axis.set(xscale="log", xlim=(KLS[0], OUR_RUNS[1]), xlabel="KL from the reference, nats per token")
    axes[0].set(title="Cosine with the gradient of the KL", ylim=(0.6, 1.01))
    axes[0].legend(loc="lower left", frameon=False)
    axes[1].set(title="Noise, relative to k2", yscale="log", ylim=(0.7, 1500))
    axes[1].text(OUR_RUNS[0], 0.8, " our runs")
    return figure


def kl_terms() -> None:
    """Print the range of each term over the families of policies."""
    lines = []
    for term, runs in kl_by_term().items():
        lines.append([term])
        for values in zip(*(zip(*run) for run in runs)):  # of a KL
            (low, high), (least, most) = ((min(x), max(x)) for x in zip(*values))
            lines[-1].append(f"{low:.2f} to {high:.2f} / {least:.1f} to {most:.1f}")
    table(["cosine / noise", *(f"{x:g} nats" for x in KLS)], lines, load("exact_kl"))


RLOO, GRPO, STD, MAXRL = ("rloo", 8), ("grpo", 8), ("reinforce_pp_baseline", 8), ("maxrl", 8)
ONE, SAME = (
    ("reinforce", 1),
    ("reinforce", 8),
)  # the batch's mean as baseline; k = 8 draws the same prompts as rloo


def settings() -> list[tuple[dict, dict]]:
    """Each setting, with score_variance_ratio of the base policy and passes over the prompts at k = 8, and its rows."""
    result = []
    for key, rows in group_by(load("exact_training"), *USUAL).items():
        V, W = rows[0]["variances"]
        setting = dict(zip(USUAL, key)) | {"ratio": 7 / 8 * V / W}
        setting["passes"] = setting["iterations"] * setting["batch"] / 8 / setting["prompts"]
        result.append((setting, {(row["script"], row["k"]): row for row in rows}))
    return result


def difference(row: dict, base: dict, outcome: str = "accuracy") -> tuple[float, float]:
    """Mean difference over the seeds and half of its 99 % interval, in points."""
    values = 100 * (torch.tensor(row[outcome]) - torch.tensor(base[outcome]))
    return float(values.mean()), float(T_99 * values.std() / math.sqrt(len(values)))


def plan_of_claims():
    """Text, the arm that is ahead, the other, which settings are counted, and the outcome."""
    end, by_score = "accuracy", "accuracy, tuned on the score"

    def no_trap(ratio=(0, math.inf), passes=(0, math.inf), **wanted):
        ranges = {"trap": (0, 1), "ratio": ratio, "passes": passes}
        return lambda x: wanted.items() <= x.items() and all(a <= x[y] < b for y, (a, b) in ranges.items())

    for k, other in ((4, 2), (4, 8), (4, 16), (8, 64)):
        yield f"k = {k} ahead of {other} (`rloo`)", ("rloo", k), ("rloo", other), no_trap(), end
    yield "k = 8 ahead of 64 (`grpo`)", GRPO, ("grpo", 64), no_trap(), end
    for scale, text in zip(SCALES, ("scores of one scale", "scaled by prompt", "scaled by answer")):
        for arm, name in ((GRPO, "std of the group"), (STD, "std of the batch"), (MAXRL, "`maxrl`")):
            yield f"{text}: {name} ahead of `rloo`", arm, RLOO, no_trap(scale=scale), end
    for pay, outcome in product(TRAPS, (end, by_score)):
        text = f"a wrong answer pays {pay:g}: std of the group ahead{outcome.removeprefix(end)}"
        yield text, GRPO, RLOO, lambda x, pay=pay: x["trap"] == pay, outcome
    for text, ratio in {"below 2": (0, 2), "2 to 4": (2, 4), "above 4": (4, math.inf)}.items():
        yield f"ratio {text}: the batch's mean ahead of the group's", SAME, RLOO, no_trap(ratio), end
    for text, passes in {"below 3": (0, 3), "3 to 10": (3, 10), "above 10": (10, math.inf)}.items():
        for below, ratio in {"below": (0, 2), "above": (2, math.inf)}.items():
            text_ = f"passes {text}, ratio {below} 2: one response per prompt ahead of 8"
            yield text_, ONE, RLOO, no_trap(ratio, passes), end


def claims() -> None:
    """Print in how many settings the first arm is ahead, there is no difference, and the second is ahead."""
    lines = []
    for text, one, two, is_counted, outcome in plan_of_claims():
        pairs = [
            (rows[one], rows[two]) for x, rows in settings() if is_counted(x) and {one, two} <= rows.keys()
        ]
        found = [difference(*pair, outcome) for pair in pairs]
        ahead, behind = (sum(sign * m > half for m, half in found) for sign in (1, -1))
        points = f"{min(found)[0]:+.1f} to {max(found)[0]:+.1f}" if found else ""
        lines.append([text, *map(str, (ahead, len(found) - ahead - behind, behind)), points])
    table(["claim", "holds", "no difference", "reverses", "points"], lines, load("exact_training"))


def every_setting() -> None:
    """Print accuracy of rloo, score_variance_ratio, and the differences of the arms from rloo in each setting."""
    arms, lines = [ONE, SAME, ("rloo", 4), ("rloo", 16), GRPO, STD, MAXRL], []
    for setting, rows in settings():
        words = [f"{name} {setting[name]}" for name in USUAL if setting[name] != USUAL[name]]
        cells = [f"{100 * mean(rows[RLOO]['accuracy']):.1f}", f"{setting['ratio']:.1f}"]
        found = [difference(rows[arm], rows[RLOO]) if arm in rows else None for arm in arms]
        cells += ["{:+.1f} ± {:.1f}".format(*x) if x else "" for x in found]
        lines.append([", ".join(words) or "usual", *cells])
    heads = ["setting", "`rloo`", "ratio", *(f"`{script}`, k = {k}" for script, k in arms)]
    table(heads, lines, load("exact_training"))


def draw_training():
    figure, axes = plt.subplots(1, 2, figsize=(9.5, 4.4), sharey=True)
    for axis, arm, title in zip(
        axes, (ONE, SAME), ("One response per prompt", "Same prompts, the batch's mean")
    ):
        for setting, rows in settings():
            if arm in rows and not setting["trap"]:
                color = GREEN if setting["passes"] < 3 else BLUE if setting["passes"] < 10 else ORANGE
                points, half = difference(rows[arm], rows[RLOO])
                axis.errorbar(setting["ratio"], points, half, fmt="o", ms=4, lw=1, color=color)
        axis.axhline(0, color=BLACK, lw=1)
        axis.set(title=title, xscale="log", xlabel="score_variance_ratio before training")
        axis.set_xticks((1, 2, 4, 8), ("1", "2", "4", "8"))
        axis.minorticks_off()
    axes[0].set(ylabel="accuracy less that of rloo, k = 8, points")
    return figure


if __name__ == "__main__":
    plt.rcParams.update(STYLE)  # not on import: the tests import this module, and others that draw
    for draw in (draw_weights, draw_length, draw_kl, draw_training):
        file = ROOT / "docs" / f"exact_{draw.__name__.removeprefix('draw_')}.png"
        draw().savefig(file, dpi=110)
        Image.open(file).convert("RGB").quantize(96).save(file, optimize=True)  # a third of the bytes
