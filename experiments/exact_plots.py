"""The pictures and tables of docs/exact.md, from the results of exact.py and exact_training.py.

python experiments/exact_plots.py
"""

import io
import math

import matplotlib.pyplot as plt
import torch
from common import ROOT, group_by, load, mean, table
from exact import DELAYS, KLS, LENGTHS, RATES
from exact_training import MARGIN, label_of
from PIL import Image

P = RATES.tolist()
HALF = P.index(0.5)
PLAIN = {"lengths": [1, 1], "critic_error": None, "all_right": False}
BLUE, ORANGE, GREEN, PURPLE, GREY, BLACK = "#0072B2", "#D55E00", "#009E73", "#AA4499", "#888888", "#222222"
STYLE = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "lines.linewidth": 2}
STYLE |= {"axes.titlelocation": "left", "axes.titlesize": 12, "axes.titleweight": "bold"}


def find(rows: list[dict], **wanted) -> list[dict]:
    return [row for row in rows if wanted.items() <= row.items()]


def name_of(row: dict) -> str:
    return row["patches"][0] if row.get("patches") else row["script"]


def code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))


def about(row: dict) -> str:
    """What a weight is computed for, such as " (k = 8, 16 groups)"."""
    words = [f"k = {row['k']}"]
    words += [f"{row['groups']} groups"] * (row["groups"] > 1)
    words += ["the others at 98 %"] * (row["others"] == 0.98)
    words += ["every right response imitated"] * row["all_right"]
    words += [f"critic off by {row['critic_error']}"] * (row["critic_error"] is not None)
    words += ["lengths {} right, {} wrong".format(*row["lengths"])] * (row["lengths"] != [1, 1])
    return f" ({', '.join(words)})"


def print_shared(heads: list[str], found: list[tuple[str, str, list[str]]], rows: list[dict]) -> None:
    """A table of (script, text, cells) in which those with the same cells share a line."""
    lines = {}
    for script, text, cells in found:
        lines.setdefault(tuple(cells), {}).setdefault(text, []).append(script)
    texts = {
        cells: "; ".join(f"{code(x)}{text}" for text, x in names.items()) for cells, names in lines.items()
    }
    table(heads, [[text, *cells] for cells, text in texts.items()], rows)


def canvas(columns: int, height: float, rows: int = 1):
    figure, axes = plt.subplots(rows, columns, figsize=(9.5, height), squeeze=False, layout="constrained")
    return figure, list(axes.flat)


def save(figure, name: str) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=120)
    Image.open(buffer).convert("RGB").quantize(96).save(ROOT / "docs" / f"exact_{name}.png", optimize=True)


def ticks(axis, x=(), y=()) -> None:
    for which, values in (("x", x), ("y", y)):
        if len(values):
            getattr(axis, f"set_{which}ticks")(values, [f"{value:g}" for value in values])
            getattr(axis, f"set_{which}ticks")([], minor=True)


def label(axis, x, y, text, color, **options) -> None:
    axis.text(x, y, text, color=color, **{"va": "center", "fontsize": 10.5} | options)


def label_ends(axis, x, ends: dict, gap: float, is_log: bool = False) -> None:
    """Labels at the ends of curves, {text: (y, color)}, moved upward until they are a gap apart."""
    last = -math.inf
    for text, (y, color) in sorted(ends.items(), key=lambda item: item[1][0]):
        last = max(math.log(y) if is_log else y, last + gap)
        label(axis, x, math.exp(last) if is_log else last, text, color)


def shades(color: str, count: int) -> list:
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [tuple(1 - (1 - x) * (0.45 + 0.55 * i / (count - 1)) for x in channels) for i in range(count)]


# --- 1. weights ---


def relative(row: dict) -> list[float]:
    return [x / row["w"][HALF] for x in row["w"]]


def draw_weights() -> None:
    rows = find(load("exact_weights"), **PLAIN)
    figure, (a, b, c, d) = canvas(2, 7.2, rows=2)
    families = {GREEN: [], ORANGE: [], BLUE: []}
    for (script,), runs in group_by(rows, "script").items():
        w = relative(runs[0])  # at the default k
        color = GREEN if w[2] > 2 * w[-3] else ORANGE if w[2] > 1.1 else BLUE
        families[color].append(script)
        a.plot(P, w, color=color)
    for (color, names), x, y in zip(families.items(), (0.1, 0.32, 0.02), (6.5, 3.0, 0.62)):
        lines = ["  ".join(names[i : i + 4]) for i in range(0, len(names), 4)]
        label(a, x, y, "\n".join(lines), color, fontweight="bold", fontsize=9.5)
    for k, orange, green in zip((2, 4, 8, 16, 64), shades(ORANGE, 5), shades(GREEN, 5)):
        grpo, maxrl, raft = (relative(find(rows, script=x, k=k)[0]) for x in ("grpo", "maxrl", "raft"))
        b.plot(P, grpo, color=orange)
        c.plot(P, maxrl, color=green)
        c.plot(P[2::7], raft[2::7], ".", color=green, ms=7)
        label(b, 1.02, grpo[-1] * {2: 0.92, 4: 1.06}.get(k, 1), f"k = {k}", orange)
        label(c, *((0.07, 10) if k == 64 else (-0.18, maxrl[0])), f"k = {k}", green)
    b.plot(P, [0.5 / math.sqrt(p * (1 - p)) for p in P], color=BLACK, lw=1, ls=":")
    c.plot(P, [0.5 / p for p in P], color=BLACK, lw=1, ls=":")
    label(b, 0.06, 8, r"k $\to\infty$: climbs $\arcsin\sqrt{p}$", BLACK)
    label(b, 0.3, 0.75, "k = 2 is rloo: climbs p", shades(ORANGE, 5)[2])
    label(c, 0.17, 5, r"k $\to\infty$: climbs $\log\,p$", BLACK)
    for (n, others), color in zip(
        ((16, None), (4, None), (2, None), (1, None), (16, 0.98)), [*shades(PURPLE, 4), GREY]
    ):
        (row,) = find(rows, script="reinforce_pp_baseline", groups=n, others=others)
        d.plot(P, relative(row), color=color, ls="--" if others else "-")
        text = f"n = {n}" + " (as grpo)" * (n == 1) + (", others\npass at 98 %" if others else "")
        label(d, 1.02, relative(row)[-1], text, color)
    titles = ("Three families, at the default k", "Std of the group: grpo", "maxrl (lines), raft (dots)")
    limits = ((0, 1), (0, 1.2), (-0.2, 1), (0, 1.4))
    for axis, title, limit in zip((a, b, c, d), (*titles, "Std of the batch: n groups of 8"), limits):
        axis.axhline(1, color="#DDDDDD", lw=1, zorder=0)
        axis.set(title=title, xlim=limit, xlabel="pass rate p of a prompt" if axis in (c, d) else "")
        axis.set_ylabel("weight, relative to p = 0.5" if axis in (a, c) else "")
        ticks(axis, x=(0, 0.25, 0.5, 0.75, 1))
        if axis is not d:
            axis.set(yscale="log", ylim=(0.45, 12))
            ticks(axis, y=(0.5, 1, 2, 4, 8))
    d.set_ylim(0.95, 1.45)
    save(figure, "weights")


def weights() -> None:
    """Print the weights at some pass rates, relative to 0.5."""
    rows = [row for row in load("exact_weights") if row["critic_error"] is None and row["lengths"] == [1, 1]]
    rows = [row for row in rows if row["script"] != "rloo" or row["k"] == 8]
    shown, found = [P.index(p) for p in (0.01, 0.1, 0.25, 0.75, 0.9, 0.99)], []
    for row in rows:
        found.append((row["script"], about(row), [f"{relative(row)[i]:.2f}" for i in shown]))
    print_shared(["weight, relative to p = 0.5", *(f"p = {P[i]:g}" for i in shown)], found, rows)


# --- 2. length ---


def draw_length() -> None:
    figure, (a, b, c) = canvas(3, 4)
    names = {ORANGE: [], BLUE: []}
    for row in load("exact_length"):
        color = BLUE if row["per_token"][0] == row["per_token"][-1] else ORANGE
        rate, right, wrong = zip(*row["path"])
        axis = b if row["can_tell"] else c
        axis.plot(rate, right, color=color)
        axis.plot(rate, wrong, color=color, ls="--")
        if row["can_tell"]:
            names[color].append(row["script"])
            a.plot(LENGTHS[: len(row["per_token"])], row["per_token"], color=color)
    a.set(
        title="Push on a token", xlabel="tokens of the response", ylabel="relative to 17 tokens", ylim=(0, 5)
    )
    label(a, 9, 3.6, "1/length in the loss:\n" + "\n".join(names[ORANGE]), ORANGE)
    lines = ["  ".join(names[BLUE][i : i + 2]) for i in range(0, len(names[BLUE]), 2)]
    label(a, 21, 1.9, "\n".join(lines), BLUE, fontsize=9)
    b.set(title="If it can tell that it is wrong", ylabel="mean length")
    c.set_title("If it cannot")
    for axis in (b, c):
        axis.set(xlabel="pass rate, as it is trained", ylim=(0, 50), xlim=(0.08, 0.97))
        ticks(axis, x=(0.1, 0.5, 0.9))
    label(b, 0.12, 38, "wrong responses", ORANGE)
    label(b, 0.42, 10.5, "right responses", ORANGE)
    label(b, 0.3, 19.5, "both, without 1/length", BLUE)
    label(c, 0.15, 19.5, "all scripts", BLACK)
    save(figure, "length")


def lengths() -> None:
    """Print the mean lengths at the end."""
    rows = load("exact_length")
    found = []
    for row in rows:
        cells = [f"{x:.1f}" for x in (row["path"][0][1], *row["path"][-1][1:])]
        found.append((row["script"], "", ["yes" if row["can_tell"] else "no", *cells]))
    print_shared(
        ["script", "can tell", "tokens at the start", "right, at the end", "wrong, at the end"], found, rows
    )


# --- 3. kl ---

KL_STYLES = {"k1 in the reward": (BLUE, "-"), "k2 in the loss": (GREEN, "-"), "k3 in the loss": (ORANGE, "-")}
KL_STYLES |= {"k2 in the reward": (GREEN, ":"), "k3 in the reward": (ORANGE, ":")}


def draw_kl() -> None:
    rows = find(load("exact_kl"), depth=6)
    figure, axes = canvas(2, 7, rows=2)
    cosine = "cosine with the KL's gradient"
    titles = ("Direction, on policy", "Size", "Noise", "Direction, stale samples")
    units = (cosine, "relative to that gradient", "responses for signal = noise", cosine)
    limits = ((-0.1, 1.06), (0, 1.6), (3, 1e4), (-0.1, 1.06))
    for axis, name, title, unit, limit in zip(
        axes, ("cosine", "size", "noise", "cosine"), titles, units, limits
    ):
        is_noise, ends = name == "noise", {}
        for term, (color, style) in KL_STYLES.items():
            low, middle, high = zip(*find(rows, term=term, stale=axis is axes[3])[0][name])
            axis.plot(KLS, middle, color=color, ls=style)
            if style == "-":
                axis.fill_between(KLS, low, high, color=color, alpha=0.13, lw=0)
            ends[term.replace(" in the", ",")] = (min(middle[-1], limit[1] / 4 if is_noise else 9), color)
        axis.set(title=title, ylabel=unit, xscale="log", xlim=(0.009, 90), ylim=limit)
        axis.set(
            yscale="log" if is_noise else "linear",
            xlabel="KL to the reference, nats" if axis in axes[2:] else "",
        )
        label_ends(axis, 4.7, ends, 0.6 if is_noise else 0.075 * (limit[1] - limit[0]), is_noise)
        ticks(axis, x=(0.01, 0.1, 1, 4))
    save(figure, "kl")


def kl_terms() -> None:
    """Print cosine / size / noise of each term: medians of the policies."""
    rows, lines = load("exact_kl"), []
    columns = [(6, 0.1, False), (4, 1.0, False), (6, 1.0, False), (8, 1.0, False), (6, 4.0, False)]
    columns += [(6, 0.01, True), (6, 0.1, True), (6, 1.0, True)]
    for (term,), runs in group_by(rows, "term").items():
        lines.append([term])
        for depth, target, stale in columns:
            (row,) = find(runs, depth=depth, stale=stale)
            cosine, size, noise = (row[name][KLS.index(target)][1] for name in ("cosine", "size", "noise"))
            noise = f"{noise:.0f}" if noise < 1e5 else "> 100,000"
            lines[-1].append("zero" if size < 1e-9 else f"{cosine:.2f} / {size:.2f} / {noise}")
    heads = [f"{'stale, ' * stale}{target:g} nats, {depth} tokens" for depth, target, stale in columns]
    table(["cosine / size / noise", *heads], lines, rows)


# --- 4. reuse ---

LOSS_COLORS = {
    "reinforce": BLACK,
    "cispo": GREEN,
    "sapo": BLUE,
    "dppo": PURPLE,
    "dapo": "#E69F00",
    "grpo": ORANGE,
}
LOSS_COLORS |= {"gspo": GREY, "tis": "#56B4E9", "icepop": "#7B3F00", "flash_reinforce": "#B22222"}


def different(rows: list[dict]) -> list[tuple[str, list[str], dict]]:
    """The rows with different curves: a name, all names that share the curve, and the row."""
    found = []
    for group in group_by(rows, lambda row: str(row["mean"])).values():
        names = [name_of(row) for row in group]
        found.append((next(x for x in (*LOSS_COLORS, *names) if x in names), names, group[0]))
    return found


def draw_reuse() -> None:
    rows = find(load("exact_reuse"), first=0.01, delay=None)
    figure, (a, b) = canvas(2, 4.6)
    start, roads, ends = rows[0]["mean"][0][0], {}, {}
    for name, _, row in different(rows):
        color = LOSS_COLORS.get(name, GREY)
        rate, kl, _ = zip(*row["mean"][1:])
        a.plot(kl, rate, color=color, lw=1.6)
        a.plot(kl[-1], rate[-1], "o", color=color, ms=6, zorder=3)
        b.plot(row["steps"][1:], kl, color=color)
        roads[name], ends[name] = (rate[-1], color), (kl[-1], color)
    best = [start + (1 - start) * i / 200 for i in range(1, 200)]
    costs = [q * math.log(q / start) + (1 - q) * math.log((1 - q) / (1 - start)) for q in best]
    a.plot(costs, best, color=GREY, lw=1, ls=":")
    label(a, 0.02, 0.7, "the most that\na KL can buy", GREY)
    label_ends(a, 6, roads, 0.04)
    label_ends(b, 145, ends, 0.33, True)
    a.set(xscale="log", xlim=(0.008, 60), ylabel="pass rate", title="One rollout, up to 128 steps")
    a.set_xlabel("KL from the policy that sampled, nats")
    b.set(
        xscale="log",
        yscale="log",
        xlim=(1, 2200),
        title="How far it goes, in nats",
        xlabel="steps on the rollout",
    )
    ticks(a, x=(0.01, 0.1, 1))
    ticks(b, x=(1, 4, 16, 64), y=(0.01, 0.1, 1))
    save(figure, "reuse")


def paired(row: dict, base: dict, target: float, which: int) -> str:
    """The mean difference from base at the same KL, with two standard errors, over policies where both get there."""
    pairs = [(x[which], y[which]) for x, y in zip(row[f"at {target}"], base[f"at {target}"]) if x and y]
    if len(pairs) < len(row[f"at {target}"]) / 2:
        return "-"
    values = torch.tensor([x - y for x, y in pairs])
    return f"{values.mean():+.3f} ± {2 * values.std() / len(values) ** 0.5:.3f}"


def reuse() -> None:
    """Print how far each loss goes, and pass rate and entropy at the same KL, less those of grpo or reinforce."""
    rows, lines = find(load("exact_reuse"), first=0.01, delay=None), []
    (grpo,), (reinforce,) = find(rows, script="grpo", patches=[]), find(rows, script="reinforce")
    for _, names, row in different(rows):
        rates = [paired(row, base, target, 0) for base, target in ((grpo, 0.1), (reinforce, 0.5))]
        entropy = [paired(row, grpo, target, 1) for target in (0.05, 0.1)]
        lines.append([code(names), f"{row['mean'][-1][1]:.3g}", *rates, *entropy])
    heads = ["loss", "KL after 128 steps", "pass rate at 0.1 nats, less `grpo`", "at 0.5, less `reinforce`"]
    table([*heads, "entropy at 0.05 nats, less `grpo`", "at 0.1, less `grpo`"], lines, rows)


def delays() -> None:
    """Print pass rate and KL after 128 steps on samples that are some steps old."""
    rows, lines = [row for row in load("exact_reuse") if row["delay"] is not None], []
    for runs in group_by(rows, name_of).values():
        ends = [row["mean"][-1] for row in runs]
        lines.append([code([name_of(runs[0])]), *(f"{rate:.2f} at {kl:.2g}" for rate, kl, _ in ends)])
    table(["loss", *(f"{delay} steps old" for delay in DELAYS)], lines, rows)


# --- 5. noise ---


def responses(row: dict) -> list[float]:
    """Responses for a given ratio of signal to noise, up to a factor that all rows share."""
    return [row["k"] * noise / (w * p * (1 - p)) ** 2 for p, w, noise in zip(P, row["w"], row["noise"])]


def draw_noise() -> None:
    rows = load("exact_weights")
    unit = responses(find(rows, script="rloo", k=8, **PLAIN)[0])[HALF]
    figure, (a, b) = canvas(2, 4.4)
    colors = {
        "rloo": BLUE,
        "grpo": ORANGE,
        "maxrl": GREEN,
        "raft": "#4FA885",
        "remax": PURPLE,
        "reinforce": BLACK,
    }
    for script, color in colors.items():
        runs = find(rows, script=script, **PLAIN)
        a.plot(P, [x / unit for x in responses(runs[0])], color=color, ls="--" if script == "remax" else "-")
        if len(runs) > 1:
            at_k = {run["k"]: responses(run)[P.index(0.1)] / unit for run in runs}
            b.plot(sorted(at_k), [at_k[k] for k in sorted(at_k)], color=color, marker="o", ms=4)
            label(b, 72, at_k[64] * {"maxrl": 1.12, "rloo": 0.9}.get(script, 1), script, color)
    (critic,) = find(rows, script="remax", critic_error=0.3)
    a.plot(P, [x / unit for x in responses(critic)], color=GREY, ls=":")
    label(a, 0.07, 400, "reinforce", BLACK)
    label(a, 0.2, 21, "critic, off by 0.3", GREY)
    label(a, 0.62, 60, "raft", colors["raft"])
    label(a, 0.26, 0.6, "rloo, grpo, maxrl;  dashed: remax", BLUE)
    a.set(
        yscale="log",
        ylim=(0.4, 1000),
        xlim=(0, 1),
        xlabel="pass rate p of a prompt",
        title="At the default k",
    )
    a.set_ylabel("responses for the same signal")
    b.set(xscale="log", yscale="log", xlim=(1.8, 180), title="At p = 0.1", xlabel="k, responses for a prompt")
    ticks(a, y=(1, 10, 100, 1000))
    ticks(b, x=(2, 4, 8, 16, 64), y=(2, 5, 10, 50))
    save(figure, "noise")


def noise() -> None:
    """Print the responses for the same signal, relative to rloo with k = 8 at the same pass rate and lengths."""
    rows, shown, found = load("exact_weights"), [P.index(p) for p in (0.01, 0.1, 0.5, 0.9, 0.99)], []
    rows = [row for row in rows if row["groups"] in (1, 16, 128) and row["k"] in (1, 2, 8, 64)]
    rows = [
        row
        for row in rows
        if row["others"] != 0.98 and (row["script"], row["groups"]) != ("reinforce_pp", 16)
    ]
    for row in rows:
        (base,) = find(rows, script="rloo", lengths=row["lengths"], k=8)
        ratios = [responses(row)[i] / responses(base)[i] for i in shown]
        if row is not base or row["lengths"] == [1, 1]:
            found.append((row["script"], about(row), [f"{x:.2f}" if x < 100 else f"{x:.0f}" for x in ratios]))
    print_shared(["responses, relative to `rloo`", *(f"p = {P[i]:g}" for i in shown)], found, rows)


# --- 6. training ---


def arm_name(row: dict) -> str:
    return f"{name_of(row)}, k = {row['k']}"


def training() -> None:
    """Print each arm against the first arm of its setting."""
    rows, lines = load("exact_training"), []
    for (setting, optimizer), arms in group_by(rows, "setting", "optimizer").items():
        for row in arms:
            lines.append([f"{setting}, {optimizer}", arm_name(row), f"{mean(row['end']):.3f}"])
            for outcome in ("end", "run", "pass@16"):
                difference, half, text = label_of(torch.tensor(row[outcome]) - torch.tensor(arms[0][outcome]))
                lines[-1].append("" if row is arms[0] else f"{difference:+.3f} ± {half:.3f} {text}")
            power, beta = row["best"]["end"]
            rate = f"$2^{{{power}}}$" + f", β = {beta:g}" * row["kl"]
            lines[-1] += [f"{row['mean kl'][-1]:.2g}", rate]
    heads = [
        "setting",
        "arm",
        "accuracy",
        "less the first arm",
        "over the run",
        "pass@16",
        "KL",
        "learning rate",
    ]
    table(heads, lines, rows)


def draw_training() -> None:
    rows = load("exact_training")
    figure, (a, b, c) = canvas(3, 4.8)
    for axis, outcome, title in ((a, "end", "Accuracy at the end"), (b, "pass@16", "pass@16")):
        for optimizer, shift, fill in (("adam", 0.15, None), ("sgd", -0.15, "white")):
            base, *arms = find(rows, setting="mixed", optimizer=optimizer)
            for i, row in enumerate(arms):
                difference, half, _ = label_of(torch.tensor(row[outcome]) - torch.tensor(base[outcome]))
                color = {"maxrl": GREEN, "raft": GREEN, "grpo": ORANGE}.get(row["script"], BLUE)
                axis.errorbar(difference, shift - i, xerr=half, fmt="o", color=color, mfc=fill or color, ms=6)
        axis.axvspan(-MARGIN, MARGIN, color="#EEEEEE", zorder=0)
        axis.axvline(0, color=GREY, lw=1)
        axis.set(title=title, xlabel="less grpo, k = 8")
        axis.set_yticks([-i for i in range(len(arms))], [arm_name(row) if axis is a else "" for row in arms])
    label(b, 0.055, -6, "filled: Adam\nopen: SGD", BLACK)
    ends = {}
    for script, color in {"grpo": ORANGE, "reinforce_pp_baseline": GREEN, "rloo": BLUE}.items():
        (row,) = find(rows, setting="trap", script=script, patches=[])
        c.plot(row["mean kl"], row["mean accuracy"], color=color)
        c.plot(row["mean kl"], row["mean score"], color=color, ls=":")
        ends[script] = (row["mean accuracy"][-1], color)
    label_ends(c, 1.05 * max(row["mean kl"]), ends, 0.03)
    label(c, 1.6, 0.48, "score, of all three", BLACK)
    c.set(title="A trap in the reward", xlabel="KL from the base, nats", ylabel="accuracy")
    c.set(xlim=(0, 5), ylim=(0, 0.55))
    save(figure, "training")


if __name__ == "__main__":
    plt.rcParams.update(STYLE)  # not on import: the tests import this module, and others that draw
    for draw in (draw_weights, draw_length, draw_kl, draw_reuse, draw_noise, draw_training):
        draw()
