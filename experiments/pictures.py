"""Draw the pictures of README.md and docs/.

    python experiments/pictures.py              draws all of them; make pictures does it
    python experiments/pictures.py train        trains the runs that have no row in results/curves.jsonl, 15 minutes

Pictures are computed, or drawn from the rows in results/. The same rows give the same files.
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean as mean
from statistics import median
from typing import Literal

import common
import exact
import explain
import grid
import learn
import matplotlib.pyplot as plt
import torch
import tyro
from common import ROOT, load
from matplotlib.colors import LinearSegmentedColormap
from planted import BUGS
from plot import BLUE, GREEN, GREY, ORANGE, PINK

import dr_grpo

# The background is transparent, and grey text can be read on white and on black.
COLORED = "text.color axes.edgecolor axes.labelcolor axes.titlecolor grid.color xtick.color ytick.color"
STYLE = dict.fromkeys(COLORED.split(), GREY)
STYLE |= dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize"), 9)
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left"}
STYLE |= {"axes.grid": True, "grid.alpha": 0.25, "legend.frameon": False}
STYLE |= {"figure.constrained_layout.use": True, "savefig.dpi": 200}
WIDTH = 4.6  # inches, so that text of 9 points can be read on a screen of 390 pixels
# From less likely to more likely. ORANGE and BLUE would be too dark for black text.
MOVES = LinearSegmentedColormap.from_list("moves", ["#E68A45", "#f7f7f7", "#4C9FD3"])


# --- runs whose curves are drawn ---

# By the number in docs/bugs.md: bug, script, flags, and the metric that is drawn beside the score
QUESTIONS = {
    1: ("groups along the wrong axis", "grpo", {}, "entropy"),
    2: ("kl with the wrong sign", "reinforce_pp", {}, "kl"),
    3: ("sampling without temperature", "grpo", {"temperature": 0.7}, "logprob_difference"),
    4: ("a reference that moves", "grpo", {}, "kl"),
    5: ("no zero_grad", "grpo", {}, "grad_norm"),
    6: ("reference log-probs of other rows", "grpo", {}, "kl"),
    7: ("eos masked", "reinforce_pp", {}, "entropy"),
    8: ("old log-probs of the reference", "grpo", {}, "clip_fraction"),
}
TOO_FAST = {"learning_rate": 0.005}
NO_REWARD = {"reward": "data/gsm8k.py:reward"}  # it looks for ####, which the toy's policy never writes
# Bug, script, flags, number of seeds, and the metrics of a row besides the score
RUNS = [
    ("", "grpo", {}, 3, ["entropy", "kl", "grad_norm", "clip_fraction", "equal_groups"]),
    ("", "grpo", {"temperature": 0.7}, 3, ["logprob_difference"]),
    ("", "reinforce_pp", {}, 3, ["entropy", "kl"]),
    *((bug, script, flags, 3, [metric]) for bug, script, flags, metric in QUESTIONS.values()),
    ("", "grpo", TOO_FAST, 1, ["entropy"]),
    ("", "grpo", NO_REWARD, 1, ["equal_groups"]),
]
CELLS = [
    {"bug": bug, "script": script, "flags": flags, "seed": seed}
    for bug, script, flags, seeds, _ in RUNS
    for seed in range(1, seeds + 1)
]


def measure(run_dir: Path, bug: str, script: str, flags: dict, seed: int) -> dict:
    [metrics] = [run[4] for run in RUNS if run[:3] == (bug, script, flags)]
    change = BUGS[bug].in_script(script).plant if bug else None
    given = {"num_iterations": 60, "eval_every": 0} | flags | {"seed": seed}
    lines = common.train(script, given, run_dir, change)
    return {key: common.curve(lines, key, 2) for key in ("score", *metrics)}


def curves(bug: str, script: str, flags: dict) -> list[dict]:
    """The rows of a run, one for each seed."""
    cell = {"bug": bug, "script": script, "flags": flags}
    return [row for row in load("curves") if cell.items() <= row.items()]


# --- pictures: each function returns a figure, and a test may pass arguments that make it faster ---


def draw_curve(axis, values: list[float], step: int = 1, **style):
    """Draw a metric against the iteration. Evaluations, every `step` iterations, begin at iteration 0."""
    return axis.plot([i * step + (step == 1) for i in range(len(values))], values, **style)[0]


def draw_group(script: str):
    """How far one step of a script moves the logits of the tokens in the responses of explain.GROUP."""
    probs, scores = explain.choices(ROOT / "toy" / "policy"), list(explain.GROUP.values())
    pushes = len(probs) * learn.push(script, scores, list(map(len, probs)))
    figure, axis = plt.subplots(figsize=(WIDTH, 2.7))
    y = 0.0
    for response, score, row, own in zip(explain.GROUP, scores, pushes.tolist(), probs):
        axis.text(-0.65, y, f"score {score}", ha="right", va="center")
        for t, (token, push, p) in enumerate(zip(response.split(), row, own)):
            x, line = t % 7, y + 0.88 * (t // 7)  # the long response takes two lines
            move = push * (1 - p)
            place = (x - 0.5, line - 0.44)
            axis.add_patch(plt.Rectangle(place, 1, 0.88, facecolor=MOVES(0.5 + move), edgecolor=GREY, lw=0.5))
            number = f"\n{move:+.2f}" if abs(move) >= 0.005 else ""
            axis.text(x, line, token + number, ha="center", va="center", color="black")
        y = line + 1.05
    axis.set(xlim=(-1.9, 6.6), ylim=(y - 0.5, -0.5))
    axis.set_axis_off()
    return figure


def draw_baseline(count: int = 1000):
    """How far the logit of `think` moves in many batches of 128 responses, with three baselines."""
    (think, *path), *_, (answer, six, _) = explain.choices(ROOT / "toy" / "policy")
    right = math.prod(path)
    p = torch.tensor([think * right, think * (1 - right), answer * six, answer * (1 - six)])
    scores, lengths = torch.tensor([1, 0, 1, 0]), torch.tensor([13, 13, 3, 3])
    figure, axes = plt.subplots(3, 1, figsize=(WIDTH, 3.6), sharex=True)
    torch.manual_seed(0)
    for axis, (b, bug) in zip(axes, (("-10", "baseline too low"), ("0", "no baseline"), ("the mean", ""))):
        rows = p.multinomial(128 * count, replacement=True).view(count, 128)
        pushes = torch.stack([learn.push("reinforce", scores[row], lengths[row], bug)[:, 0] for row in rows])
        sums = (pushes * ((rows < 2).double() - think)).sum(1)
        bins = [-1.2 + 0.05 * i for i in range(60)]
        for part, color in ((sums[sums >= 0], BLUE), (sums[sums < 0], ORANGE)):
            axis.hist(part, bins, color=color)
        axis.set(title=f"b = {b}: mean {sums.mean():.2f}, std {sums.std():.2f}", yticks=[], ylabel="batches")
    axes[-1].set_xlabel("move of the logit of think")
    return figure


def draw_clip():
    """The push of dr_grpo.py on a token against the ratio, without the constant divisor."""
    low, high = 1 - dr_grpo.Args.clip_eps, 1 + dr_grpo.Args.clip_eps
    args, length = dr_grpo.Args(), dr_grpo.Args.max_response_length
    figure, axis = plt.subplots(figsize=(WIDTH, 2.6))
    for sign, color in ((1, BLUE), (-1, ORANGE)):
        for start, end in ((0.5, low), (low, high), (high, 1.5)):  # without a line at the jump
            ratio = torch.linspace(start + 1e-6, end - 1e-6, 50, dtype=torch.float64).view(-1, 1)
            batch = explain.make_rollout([0] * 50, [1] * 50, advantages=sign * torch.ones_like(ratio))
            _, pushes = explain.loss_and_push(dr_grpo, args, batch, ratio.log(), 1 / length, 50)
            axis.plot(ratio, pushes, color=color, lw=2)
        axis.text(1, 1.3 * sign, f"A = {sign}", color=color, ha="center", va="center")
        edge, end = (high, 1.5) if sign > 0 else (0.5, low)
        axis.axvspan(edge, end, color=color, alpha=0.12, lw=0)
        text = f"clipped\nif A = {sign}"
        axis.text((edge + end) / 2, 0.5 * sign, text, ha="center", va="center", color=color)
    axis.set(
        xlabel="ratio: probability now / when it was sampled", ylabel="push", xticks=(0.5, low, 1, high, 1.5)
    )
    axis.set(xlim=(0.5, 1.5), ylim=(-1.8, 1.8))
    return figure


def draw_weights(methods: dict, sizes: tuple[int, ...]):
    """The weight of a prompt against its pass rate. methods: color, and the weight in an infinite group."""
    figure, axes = plt.subplots(1, len(methods), figsize=(WIDTH, 2.8), sharey=True, squeeze=False)
    p = exact.RATES.tolist()
    for axis, (script, (color, limit)) in zip(axes.flat, methods.items()):
        axis.axhline(1, color=GREY, lw=1)
        for k in sizes:
            w = exact.weights(script, k)
            axis.plot(p, w, color=color, lw=0.5 + 0.25 * math.log2(k))
            # Beside the end where the lines are furthest apart
            x, y, side = (1.03, w[-1], "left") if script == "grpo" else (-0.03, w[0], "right")
            axis.text(x, y, f"k = {k}", color=color, ha=side, va="center")
        axis.plot(p, [limit(x) for x in p], color=color, ls=":")
        axis.text(0.14, 14, "dotted: k → ∞", color=color)
        axis.set(title=f"{script}.py", xlabel="pass rate", xticks=(0, 0.5, 1), xlim=(0, 1))
        axis.set_yscale("log", base=2)
        axis.set_ylim(0.4, 40)
        axis.set_yticks((0.5, 1, 2, 4, 8, 16, 32), ("½", "1", "2", "4", "8", "16", "32"))
    axes[0, 0].set_ylabel("weight")
    axes[0, 0].text(0.5, 0.93, "rloo.py", ha="center", va="top")
    return figure


STD = (PINK, lambda p: 0.5 / math.sqrt(p * (1 - p)))
MEAN = (GREEN, lambda p: 0.5 / p)


def draw_lengths(pace: float = 0.1):
    """Mean lengths of right and wrong responses while the pass rate rises."""
    figure, axis = plt.subplots(figsize=(WIDTH, 2.6))
    rate, right, wrong = zip(*exact.lengths("grpo", True, pace))
    axis.plot(rate, wrong, color=ORANGE, lw=2)
    axis.plot(rate, right, color=BLUE, lw=2)
    for script, can_tell in (("grpo", False), ("rloo", True)):
        for x in list(zip(*exact.lengths(script, can_tell, pace)))[1:]:
            axis.plot(rate, x, color=GREY, lw=2)
    axis.text(0.3, 38, "wrong, with 1/length", color=ORANGE)
    axis.text(0.1, 3, "right, with 1/length", color=BLUE)
    axis.text(0.95, 19, "both, without 1/length\nor if it cannot tell", ha="right")
    axis.set(xlabel="pass rate", ylabel="tokens", ylim=(0, 50))
    return figure


def draw_kl():
    """Cosine and noise of each KL term, as the median and the range of the families of policies."""
    figure, axes = plt.subplots(2, 1, figsize=(WIDTH, 4.6), sharex=True)
    for (term, pair), color in zip(exact.kl_of_terms().items(), (GREEN, GREY, PINK)):
        for axis, values in zip(axes, pair):
            axis.plot(exact.KLS, [median(x) for x in values], color=color, label=term, lw=2)
            low, high = ([f(x) for x in values] for f in (min, max))
            axis.fill_between(exact.KLS, low, high, color=color, alpha=0.2, lw=0)
    axes[0].set(title="cosine with the gradient of the KL", ylim=(0.6, 1.02), xscale="log")
    axes[1].set(title="noise, relative to k2", yscale="log", xlabel="KL from the reference, nats per token")
    axes[1].set_yticks((1, 10, 100, 1000), ("1", "10", "100", "1000"))
    axes[1].set_xticks((0.001, 0.01, 0.1), ("0.001", "0.01", "0.1"))
    axes[0].legend(loc="lower left")
    return figure


def draw_hacking():
    """Score by the reward model, true accuracy and KL of reinforce_pp.py with three betas."""
    figure, axes = plt.subplots(3, 1, figsize=(WIDTH, 5), sharex=True)
    rows = [row for row in load("hacking") if "kl curve" in row]
    for row, style, beta in zip(rows, ("-", "--", ":"), ("0", "0.05", "1")):
        panels = zip(axes, ("score curve", "greedy 2-5 curve", "kl curve"), (1, 5, 1), (GREEN, PINK, GREY))
        for axis, key, step, color in panels:
            draw_curve(axis, row[key], step, color=color, ls=style, label=f"β = {beta}")
    axes[0].set_title("score, by the reward model")
    axes[1].set(title="true accuracy on held-out sums", ylim=(0, 1.05))
    axes[1].axhline(rows[0]["greedy 2-5 curve"][0], color=GREY, ls=":", lw=1)
    axes[1].text(100, 0.13, "before training", ha="right", va="bottom")
    axes[2].set(title="KL from the start, nats per response", xlabel="iteration")
    axes[0].legend(ncols=3, loc="lower right")
    return figure


def draw_metrics():
    """A healthy run and three others, each with the score and a metric that tells them apart."""
    (healthy, *_), (fast,), (no_reward,) = (curves("", "grpo", flags) for flags in ({}, TOO_FAST, NO_REWARD))
    hacked = next(row for row in load("hacking") if "kl curve" in row)
    hacked = {"score": hacked["score curve"], "accuracy": hacked["greedy 2-5 curve"]}
    panels = {  # run, second metric, and the places of the two labels
        "healthy": (healthy, "equal_groups", (22, 1.03), (28, 0.22)),
        "every response scores 0": (no_reward, "equal_groups", (22, 0.05), (22, 0.87)),
        "learning rate too high": (fast, "entropy", (30, 0.27), (30, 1.2)),
        "reward hacking": (hacked, "accuracy", (45, 1.42), (32, 0.62)),
    }
    figure, axes = plt.subplots(2, 2, figsize=(WIDTH, 3.8))
    for axis, (title, (run, other, *places)) in zip(axes.flat, panels.items()):
        for key, color, place in zip(("score", other), (GREEN, PINK), places):
            draw_curve(axis, run[key], 5 if key == "accuracy" else 1, color=color)
            axis.text(*place, key, color=color)
        axis.set(title=title, ylim=(0, 1.15), xlim=(0, None))
    axes[1, 0].set_ylim(0, 1.5)
    axes[1, 1].set_ylim(0, 2)
    figure.supxlabel("iteration", fontsize=9)
    return figure


def draw_question(number: int):
    """The score and another metric, with and without the bug of a question of docs/bugs.md."""
    bug, script, flags, metric = QUESTIONS[number]
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 2.1))
    for axis, key in zip(axes, ("score", metric)):
        for name, color, width in (("", GREY, 2.5), (bug, ORANGE, 1.2)):
            for row in curves(name, script, flags):
                line = draw_curve(axis, row[key], color=color, lw=width)
            line.set_label("with the bug" if name else "unchanged")
        if key == "grad_norm":
            axis.set_yscale("log")
            axis.set_yticks((0.0001, 0.01, 1, 100), ("0.0001", "0.01", "1", "100"))
        else:
            top = 1.05 if key == "score" else axis.get_ylim()[1]
            axis.set_ylim(-0.03 * top, top)
        axis.set(title=key, xlabel="iteration")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
    return figure


def draw_grid():
    """The mean score of each advantage with each loss. The color shows the difference from the mean of the panel."""
    rows = load("grid")
    figure, axes = plt.subplots(1, len(grid.RATES), figsize=(WIDTH, 2.5), sharey=True)
    for axis, rate in zip(axes, grid.RATES):
        cells = {
            (y, x): mean(found)
            for y, advantage in enumerate(grid.ADVANTAGES)
            for x, loss in enumerate(grid.LOSSES)
            if (found := grid.means(rows, learning_rate=rate, advantage=advantage, loss=loss))
        }
        middle = mean(cells.values())
        for (y, x), score in cells.items():
            color = MOVES(0.5 + 4 * (score - middle))
            axis.add_patch(plt.Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=color, edgecolor=GREY, lw=0.5))
            axis.text(x, y, f"{score:.2f}", ha="center", va="center", color="black")
        axis.set(xlim=(-0.5, len(grid.LOSSES) - 0.5), ylim=(len(grid.ADVANTAGES) - 0.5, -0.5))
        axis.set_title(f"learning rate {rate:g}")
        names = [name.replace(" ", "\n") for name in grid.LOSSES.values()]
        axis.set_xticks(range(len(names)), names)
        axis.tick_params(length=0)
        axis.grid(visible=False)
        axis.spines[:].set_visible(False)
    names = [name.replace("pp_", "pp_\n") for name in grid.ADVANTAGES]
    axes[0].set_yticks(range(len(names)), names)
    return figure


PICTURES: dict[str, Callable] = {
    "learn_push": partial(draw_group, "reinforce"),
    "learn_baseline": draw_baseline,
    "learn_std": partial(draw_weights, {"grpo": STD}, (8,)),
    "learn_length": partial(draw_group, "flash_reinforce"),
    "learn_clip": draw_clip,
    "learn_grid": draw_grid,
    "exact_weights": partial(draw_weights, {"grpo": STD, "maxrl": MEAN}, (4, 16, 64)),
    "exact_length": draw_lengths,
    "exact_kl": draw_kl,
    "hacking": draw_hacking,
    "metrics": draw_metrics,
    **{f"bugs/{number}": partial(draw_question, number) for number in QUESTIONS},
}


def save(name: str, folder: Path, **smaller) -> Path:
    """Draw a picture into a folder. The same rows give the same bytes."""
    path = folder / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        figure = PICTURES[name](**smaller)
        figure.savefig(path, transparent=True, metadata={"Software": None})
        plt.close(figure)
    return path


def main(command: tyro.conf.Positional[Literal["draw", "train"]] = "draw") -> None:
    if command == "train":
        return common.run_all("curves", CELLS, measure)
    for name in PICTURES:
        print(save(name, ROOT / "docs").relative_to(ROOT), flush=True)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
