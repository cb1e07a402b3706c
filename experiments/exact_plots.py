"""The pictures and tables of docs/exact.md: python experiments/exact_plots.py"""

import math
import textwrap

import matplotlib.pyplot as plt
import torch
from common import ROOT, group_by, load, mean, table
from exact import DELAYS, KLS, RATES, two_answers
from exact_training import MARGIN, label_of
from PIL import Image

P = RATES.tolist()
BLUE, ORANGE, GREEN, PURPLE, GREY, BLACK = "#0072B2", "#D55E00", "#009E73", "#AA4499", "#888888", "#222222"
STYLE = {"axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.use": True}
STYLE |= {"axes.titlelocation": "left", "axes.titleweight": "bold", "axes.formatter.min_exponent": 8}


def find(rows: list[dict], **wanted) -> list[dict]:
    return [row for row in rows if wanted.items() <= row.items()]


def name_of(row: dict) -> str:
    return row["patches"][0] if row.get("patches") else row["script"]


def print_shared(heads: list[str], lines: list[list[str]], rows: list[dict]) -> None:
    """A table in which lines that differ in their first cell only are one."""
    groups = group_by(lines, lambda line: tuple(line[1:]))
    table(heads, [[", ".join(line[0] for line in x), *cells] for (cells,), x in groups.items()], rows)


def label_ends(axis) -> None:
    """Write the label of each curve beside its end, moved downward until labels are 13 points apart."""
    axis.figure.draw_without_rendering()
    points = 72 / axis.figure.dpi
    lines = [line for line in axis.lines if not line.get_label().startswith("_")]
    ends = {line: points * axis.transData.transform(line.get_xydata()[-1])[1] for line in lines}
    options = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "center"}
    last = math.inf
    for line in sorted(lines, key=ends.get, reverse=True):
        last = min(ends[line], points * axis.bbox.y1, last - 13)
        offset = (6, last - points * axis.bbox.y0)
        axis.annotate(line.get_label(), (1, 0), offset, color=line.get_color(), **options)


def relative(row: dict) -> list[float]:
    return [x / row["w"][P.index(0.5)] for x in row["w"]]


def draw_weights():
    rows = [row for row in load("exact_weights") if not row["all_right"] and row["critic_error"] is None]
    figure, (a, b, c) = plt.subplots(1, 3, figsize=(11, 4.2))
    families = {GREEN: [], ORANGE: [], BLUE: []}
    for (script,), runs in group_by(rows, "script").items():
        w = relative(runs[0])  # at the default k
        color = GREEN if w[2] > 2 * w[-3] else ORANGE if w[2] > 1.1 else BLUE
        families[color].append(script)
        a.plot(P, w, color=color)
    for (color, names), x, y in zip(families.items(), (0.1, 0.4, 0), (4.5, 2, 0.33)):
        a.text(x, y, textwrap.fill(", ".join(names), 26), color=color, fontsize=9)
    for i, k in enumerate((2, 4, 8, 16, 64)):
        grpo, maxrl, raft = (relative(find(rows, script=x, k=k)[0]) for x in ("grpo", "maxrl", "raft"))
        b.plot(P, grpo, color=ORANGE, alpha=0.4 + 0.15 * i, label=f"k = {k}")
        c.plot(P, maxrl, color=GREEN, alpha=0.4 + 0.15 * i)
        c.plot(P, raft, ".", color=GREEN, markevery=(2, 7))
        c.text(-0.02, min(maxrl[0], 11), f"k = {k}", color=GREEN, ha="right", va="center")
    b.plot(P, [0.5 / math.sqrt(p * (1 - p)) for p in P], color=BLACK, ls=":")
    b.text(0.1, 7, r"dotted, $k\to\infty$: climbs $\arcsin\sqrt{p}$")
    c.plot(P, [0.5 / p for p in P], color=BLACK, ls=":")
    c.text(0.2, 5, r"dotted, $k\to\infty$: climbs $\log\,p$")
    a.set(title="Three families", ylabel="weight, relative to p = 0.5")
    b.set(title="Std of the group: grpo", xlabel="pass rate p")
    c.set(title="maxrl (lines), raft (dots)", xlim=(-0.25, 1), xticks=(0, 0.5, 1))
    for axis in (a, b, c):
        axis.set_yscale("log", base=2)
        axis.set_ylim(0.3, 12)
    return figure


def name_with_setting(row: dict) -> str:
    """The script of a weight, with what is not as usual, such as `grpo` (k = 16)."""
    if row["critic_error"] is not None:
        return f"a baseline off by {row['critic_error']:g}"
    words = [f"k = {row['k']}"] * (row["k"] not in (1, 8))
    words += [f"groups: {row['groups']}"] * (row["script"] == "reinforce_pp_baseline" and row["groups"] < 16)
    words += ["other prompts at 98 %"] * (row["others"] == 0.98)
    words += ["all right ones imitated"] * row["all_right"]
    words += ["length {} if right, {} if wrong".format(*row["lengths"])] * (row["lengths"] != [1, 1])
    return f"`{row['script']}`" + f" ({', '.join(words)})" * bool(words)


def weights() -> None:
    """Print the weights at some pass rates, relative to 0.5."""
    rows = find(load("exact_weights"), critic_error=None)
    rows = [row for row in rows if 4 not in (row["k"], row["groups"])]
    rows = [row for row in rows if row["script"] != "rloo" or (row["k"] == 8 and row["lengths"] == [1, 1])]
    shown = [P.index(p) for p in (0.01, 0.1, 0.9, 0.99)]
    lines = [[name_with_setting(row), *(f"{relative(row)[i]:.2f}" for i in shown)] for row in rows]
    print_shared(["weight, relative to p = 0.5", *(f"p = {P[i]:g}" for i in shown)], lines, rows)


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


def lengths() -> None:
    """Print the mean lengths at the end."""
    rows, lines = load("exact_length"), []
    for row in rows:
        cells = [f"{x:.1f}" for x in (row["path"][0][1], *row["path"][-1][1:])]
        lines.append([f"`{row['script']}`", "yes" if row["can_tell"] else "no", *cells])
    heads = ["script", "can tell", "tokens at the start", "right, at the end", "wrong, at the end"]
    print_shared(heads, lines, rows)


def draw_kl():
    rows, per_token = find(load("exact_kl"), depth=6), [x / 6 for x in KLS]
    figure, axes = plt.subplots(2, 2, figsize=(9.5, 7))
    titles = ("Cosine, on policy", "Size, on policy", "Noise, on policy", "Cosine, stale samples")
    limits = {"cosine": (-0.1, 1.06), "size": (0, 1.6), "noise": (3, 1e4)}
    styles = {"k1 in the reward": (BLUE, "-"), "k2 in the reward": (GREEN, ":")}
    styles |= {"k3 in the reward": (ORANGE, ":"), "k2 in the loss": (GREEN, "-")}
    styles |= {"k3 in the loss": (ORANGE, "-"), "rho * k3 in the loss": (BLACK, "--")}
    for axis, title, name in zip(axes.flat, titles, ("cosine", "size", "noise", "cosine")):
        for term, (color, style) in styles.items():
            low, middle, high = zip(*find(rows, term=term, stale="stale" in title)[0][name])
            axis.plot(per_token, middle, color=color, ls=style, label=term.replace(" in the", ","))
            axis.fill_between(per_token, low, high, color=color, alpha=0.13 * (style == "-"), lw=0)
        axis.set(title=title, ylim=limits[name])
        axis.set(xscale="log", yscale="log" if name == "noise" else "linear", xlabel="KL per token, nats")
    return figure


def kl_terms() -> None:
    """Print cosine / size / noise of each term: medians of the policies."""
    rows, lines = load("exact_kl"), []
    columns = [(4, 0.1, False), (8, 0.1, False), (6, 1.0, False), (6, 4.0, False), (6, 0.01, True)]
    for (term,), runs in group_by(rows, "term").items():
        lines.append([term])
        for depth, target, stale in columns:
            (row,) = find(runs, depth=depth, stale=stale)
            cosine, size, noise = (row[name][KLS.index(target)][1] for name in ("cosine", "size", "noise"))
            noise = f"{noise:.0f}" if noise < 1e5 else "> 100,000"
            lines[-1].append("zero" if size < 1e-9 else f"{cosine:.2f} / {size:.2f} / {noise}")
    heads = [f"KL {target:g} in {depth} tokens, {target / depth:.2g} each" for depth, target, _ in columns]
    heads[-1] += ", samples 0.01 old"
    table(["cosine / size / noise", *heads], lines, rows)


def draw_reuse():
    figure, axes = plt.subplots(2, 2, figsize=(9.5, 8.4))
    colors = {"reinforce": BLACK, "cispo": GREEN, "tis": BLUE, "dppo": PURPLE, "grpo": ORANGE, "gspo": GREY}
    colors |= {"dapo": "#E69F00", "flash_reinforce": "#B22222"}
    for (a, b), delay, title in zip(axes, (None, DELAYS[-1]), ("One rollout", "Samples 32 steps old")):
        for row in find(load("exact_reuse"), delay=delay):
            if color := colors.get(name_of(row)):
                rate, kl, _ = zip(*row["mean"][1:])
                a.plot(kl, rate, color=color, marker="o", markevery=[-1], label=name_of(row))
                b.plot(row["steps"][1:], kl, color=color, label=name_of(row))
        a.set(title=f"{title}: pass rate", xlabel="KL from the start", xscale="log", xlim=(0.008, 5))
        b.set(title=f"{title}: KL", xlabel="steps", yscale="log")
        b.set_xscale("log", base=2)
    return figure


def paired(row: dict, base: dict, target: float, which: int) -> str:
    """Mean difference from base at the same KL, ± two standard errors; the number of policies, if not all reach it."""
    pairs = [(x[which], y[which]) for x, y in zip(row[f"at {target}"], base[f"at {target}"]) if x and y]
    if len(pairs) < len(row[f"at {target}"]) / 2:
        return "-"
    values = torch.tensor([x - y for x, y in pairs])
    text = f"{values.mean():+.3f} ± {2 * values.std() / len(values) ** 0.5:.3f}"
    return text if len(values) == len(row[f"at {target}"]) else f"{text} ({len(values)})"


def reuse() -> None:
    """Print how far each loss goes, and pass rate and entropy at the same KL, less those of grpo or reinforce."""
    rows, lines = find(load("exact_reuse"), delay=None), []
    (grpo,), (reinforce,) = find(rows, script="grpo", patches=[]), find(rows, script="reinforce")
    for row in rows:
        rates = [paired(row, base, kl, 0) for base, kl in ((grpo, 0.05), (grpo, 0.1), (reinforce, 0.5))]
        entropy = [paired(row, grpo, kl, 1) for kl in (0.05, 0.1)]
        lines.append([f"`{name_of(row)}`", f"{row['mean'][-1][1]:.3g}", *rates, *entropy])
    heads = ["loss", "KL after 128 steps", "pass rate at 0.05 nats, less `grpo`", "at 0.1, less `grpo`"]
    heads += ["at 0.5, less `reinforce`", "entropy at 0.05 nats, less `grpo`", "at 0.1, less `grpo`"]
    print_shared(heads, lines, rows)


def delays() -> None:
    """Print pass rate and KL after 128 steps, and pass rate at the same KL, on samples that are some steps old."""
    rows, lines = [row for row in load("exact_reuse") if row["delay"] is not None], []
    for (name,), runs in group_by(rows, name_of).items():
        rate, kl, _ = runs[-1]["mean"][-1]
        gains = [paired(x, find(rows, script="reinforce", delay=x["delay"])[0], 0.5, 0) for x in runs[1:]]
        lines.append([f"`{name}`", f"{rate:.2f}", f"{kl:.2g}", *gains])
    heads = ["loss", "pass rate after 128 steps, samples 32 steps old", "KL"]
    heads += [f"at 0.5 nats, {delay} steps old, less `reinforce`" for delay in DELAYS[1:]]
    print_shared(heads, lines, rows)


def responses(row: dict) -> list[float]:
    """Responses for a given ratio of signal to noise, up to a factor that all rows share."""
    return [row["k"] * noise / (w * p * (1 - p)) ** 2 for p, w, noise in zip(P, row["w"], row["noise"])]


def draw_noise():
    rows = load("exact_weights")
    figure, (a, b) = plt.subplots(1, 2, figsize=(9.5, 4.4), sharey=True)
    colors = {"rloo": BLUE, "maxrl": GREEN, "raft": ORANGE, "remax": PURPLE, "reinforce": BLACK}
    for script, color in colors.items():
        a.plot(P, responses(find(rows, script=script, critic_error=None)[0]), color=color, label=script)
        if script in ("rloo", "maxrl", "raft"):
            b.plot(P, [two_answers(script, p) for p in P], color=color)
    a.plot(P, responses(find(rows, critic_error=0.3)[0]), color=GREY, label="a baseline off by 0.3")
    a.set(title="Gradients of equal norm", ylabel="responses for signal = noise")
    a.set(yscale="log", ylim=(0.01, 1e4))
    b.set(title="A softmax over two answers")
    figure.supxlabel("pass rate p", fontsize=10)
    a.legend(loc="lower center", frameon=False, ncols=2)
    return figure


def noise() -> None:
    """Print the responses for the same signal, relative to rloo with k = 8 at the same pass rate and lengths."""
    rows, lines = load("exact_weights"), []
    shown = [P.index(p) for p in (0.01, 0.1, 0.5, 0.75, 0.9, 0.99)]
    for row in rows:
        (base,) = find(rows, script="rloo", lengths=row["lengths"], k=8)
        ratios = [responses(row)[i] / responses(base)[i] for i in shown]
        is_shown = row["script"] == "raft" or row["k"] not in (4, 16)
        if is_shown and row["groups"] not in (2, 4) and row["others"] != 0.98:
            lines.append([name_with_setting(row), *(f"{x:.2f}" if x < 100 else f"{x:.0f}" for x in ratios)])
    for script in ("grpo", "maxrl", "raft"):
        ratios = [two_answers(script, P[i]) / two_answers("rloo", P[i]) for i in shown]
        lines.append([f"`{script}` (two answers)", *(f"{x:.2f}" if x > 0.005 else "< 0.01" for x in ratios)])
    print_shared(["responses, relative to `rloo`", *(f"p = {P[i]:g}" for i in shown)], lines, rows)


def training(*settings: str) -> None:
    """Print each arm against the first, and k = 4 against 2 and 16; pass@16 only at equal rates of Adam."""
    rows, lines = [row for row in load("exact_training") if row["setting"] in settings], []
    for (setting, optimizer), arms in group_by(rows, "setting", "optimizer").items():
        sizes = {row["k"]: row for row in find(arms, script="grpo")}
        pairs = [(row, arms[0]) for row in arms] + [(sizes[4], sizes[k]) for k in (2, 16) if k in sizes]
        for row, base in pairs:
            name = f"{name_of(row)}, k = {row['k']}" + f" (less k = {base['k']})" * (base is not arms[0])
            power, beta = row["best"]["end"]
            rate = f"$2^{{{power}}}$" + f", β = {beta:g}" * row["kl"]
            means = [f"{mean(row[outcome]):.3f}" for outcome in ("end", "pass@16")]
            lines.append([f"{setting}, {optimizer}", name, rate, *means])
            is_fair = optimizer == "adam" and row["best"]["end"] == base["best"]["end"]
            for outcome in ("end", "run", "pass@16"):
                difference, half, text = label_of(row[outcome], base[outcome])
                cell = f"{difference:+.3f} ± {half:.3f} {text}" if half else "the same run"
                lines[-1].append(cell if row is not base and (is_fair or outcome != "pass@16") else "")
    heads = ["setting", "arm", "rate", "accuracy", "pass@16", "accuracy, less the first"]
    table([*heads, "over the run", "pass@16, less the first"], lines, rows)
    count = sum("±" in cell for line in lines for cell in line)
    print(f"Of these {count} intervals of 99 %, about {count / 100:.1f} miss the truth by chance.\n")


def draw_training():
    rows = load("exact_training")
    figure, (a, b) = plt.subplots(1, 2, figsize=(9.5, 4.4))
    for optimizer, shift, fill in (("adam", 0.15, None), ("sgd", -0.15, "white")):
        base, *arms = find(rows, setting="mixed", optimizer=optimizer)
        for i, row in enumerate(arms):
            difference, half, _ = label_of(row["end"], base["end"])
            color = {"maxrl": GREEN, "raft": GREEN, "grpo": ORANGE}.get(row["script"], BLUE)
            a.errorbar(difference, shift - i, xerr=half, fmt="o", color=color, mfc=fill or color)
    a.axvspan(-MARGIN, MARGIN, color="#EEEEEE", zorder=0)
    a.set(title="mixed: accuracy", xlabel="less grpo, k = 8")
    a.set_yticks([-i for i in range(len(arms))], [f"{row['script']}, k = {row['k']}" for row in arms])
    a.text(-0.055, -9, "filled: Adam\nopen: SGD\ngrey: ± 0.02")
    for script, color in {"grpo": ORANGE, "reinforce_pp_baseline": GREEN, "rloo": BLUE}.items():
        (row,) = find(rows, setting="trap", script=script, patches=[])
        b.plot(row["mean kl"], row["mean accuracy"], color=color, label=script)
        b.plot(row["mean kl"], row["mean score"], color=color, ls=":")
    b.text(0, 0.5, "dotted: the score")
    b.set(title="trap", xlabel="KL from the base, nats", ylabel="accuracy", ylim=(0, 0.55))
    return figure


if __name__ == "__main__":
    plt.rcParams.update(STYLE)  # not on import: the tests import this module, and others that draw
    for draw in (draw_weights, draw_length, draw_kl, draw_reuse, draw_noise, draw_training):
        figure = draw()
        for axis in figure.axes:
            if axis.get_legend() is None:
                label_ends(axis)
        file = ROOT / "docs" / f"exact_{draw.__name__.removeprefix('draw_')}.png"
        figure.savefig(file, dpi=110)
        Image.open(file).convert("RGB").quantize(96).save(file, optimize=True)  # a third of the bytes
