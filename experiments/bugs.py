"""Train with known bugs: which of them does the score hide, and what shows them?

    python experiments/bugs.py        train and draw docs/bugs/*.png: 30 minutes on two cores

A bug of tools/planted.toml is trained on the toy, beside the unchanged script with the same flags. A row has the
metrics of every iteration, which tools/diagnose.py reads.
"""

import json
import math
import shutil
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import common
import diagnose
import tyro
from common import POLICY_SCRIPTS, ROOT, mean, run_all, show, words_of
from planted import BUGS

ITERATIONS, SEEDS = 60, (1, 2, 3)
PLANTED = {bug.name: bug for bug in BUGS.values() if bug.trained is not None}
FLAGS = {name: bug.trained for name, bug in PLANTED.items()}
# grpo.py would stop: it divides by the length, which is 0 for a response that is only an EOS.
PLANTED["eos masked"] = replace(BUGS["eos masked"], where="reinforce_pp.generate")
LEFT_OUT = ("iteration", "tokens_per_second", "learning_rate", "policy_loss")


def parent(bug: str) -> tuple[str, dict]:
    """Script and flags of the unchanged run that a bug is compared with: its own, if they change a result."""
    changes_nothing = FLAGS[bug].keys() & {"micro_batch_size", "model"}
    return PLANTED[bug].script, {} if changes_nothing else FLAGS[bug]


def measure(run_dir: Path, bug: str, script: str, flags: dict, seed: int) -> dict:
    if "model" in flags:  # toy/policy, with a dropout in its config
        model = shutil.copytree(ROOT / "toy" / "policy", run_dir.parent / flags["model"])
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
        flags = {"model": model}
    # An evaluation changes nothing, and costs time.
    evaluates = not bug or "eval_reward" in flags
    flags = {"num_iterations": ITERATIONS} | flags | {"seed": seed, "eval_every": 30 if evaluates else 0}
    lines = common.train(script, flags, run_dir, change=PLANTED[bug].plant_in if bug else None)
    metrics, held_out = {}, {}
    for line in lines:
        for name, value in line.items():
            if name.startswith("eval/"):
                held_out.setdefault(name, {})[str(line["iteration"])] = round(value, 4)
            elif name not in LEFT_OUT:
                metrics.setdefault(name, []).append(float(f"{value:.3g}"))
    return {"held_out": held_out, "metrics": metrics}


def cells_of() -> list[dict]:
    """Each bug and what it is compared with, and every script."""
    runs = [("", *parent(bug)) for bug in FLAGS] + [(bug, PLANTED[bug].script, FLAGS[bug]) for bug in FLAGS]
    runs += [("", script, {}) for script in POLICY_SCRIPTS]
    cells = []
    for seed, (bug, script, flags) in product(SEEDS, runs):
        cell = {"bug": bug, "script": script, "flags": flags, "seed": seed}
        if cell not in cells:
            cells.append(cell)
    return cells


# --- what the pages print ---

# A metric shows a bug if it differs from that of all unchanged runs by a factor of 3, and by more than this
SIGNS = {"logprob_difference": 1e-4, "kl": 0.02, "clip_fraction": 0.002, "grad_norm": 0.1, "entropy": 0.01}
SIGNS |= {"truncated": 0.01, "response_length": 1}
# How much of the unchanged script's rise in score the bugs of a group leave, at least
GROUPS = {"silent": 0.97, "slow": 0.4, "loud": -math.inf}
# The questions of docs/bugs.md, with the metric that its picture shows beside the score
SHOWN = {
    "groups along the wrong axis": "entropy",
    "kl with the wrong sign": "kl",
    "sampling without temperature": "logprob_difference",
    "a reference that moves": "kl",
    "no zero_grad": "grad_norm",
    "reference log-probs of other rows": "kl",
    "eos masked": "entropy",
    "old log-probs of the reference": "clip_fraction",
}


@cache
def results() -> list[dict]:
    return common.load("bugs")


def runs_of(bug: str) -> list[dict]:
    return [run for run in results() if run["bug"] == bug]


def unchanged(bug: str) -> list[dict]:
    """The runs without a bug that a bug is compared with."""
    return [run for run in runs_of("") if (run["script"], run["flags"]) == parent(bug)]


def diagnosed(run: dict) -> set[str]:
    """The names of what tools/diagnose.py finds in a run."""
    lines = [{"iteration": 0}, *common.plot_rows(run["metrics"])]
    for name, values in run["held_out"].items():
        for iteration, value in values.items():
            lines[int(iteration)][name] = value
    return {*diagnose.findings(common.defaults(run["script"]), lines)}


def scores(runs: list[dict]) -> tuple[list[float], list[float]]:
    """The score of each run at its start and end, or the true accuracy if a reward model gives the score."""
    if "eval_reward" in runs[0]["flags"]:
        truths = [run["held_out"]["eval/score/2-5"] for run in runs]
        return [truth["0"] for truth in truths], [truth[str(ITERATIONS)] for truth in truths]
    curves = [run["metrics"]["score"] for run in runs]
    return [curve[0] for curve in curves], [mean(curve[-10:]) for curve in curves]


def share(bug: str) -> float:
    """How much of the rise in score a bug leaves."""
    start, end = map(mean, scores(unchanged(bug)))
    return (mean(scores(runs_of(bug))[1]) - start) / (end - start)


def signs(bug: str) -> str:
    """The first two metrics that all runs of a bug have far from all unchanged runs, at the start or the end."""
    found = {}
    for name, least in SIGNS.items():
        for part in (slice(0, 10), slice(-10, None)):
            pair = runs_of(bug), unchanged(bug)
            wrong, right = ([mean(run["metrics"].get(name, [0])[part]) for run in runs] for runs in pair)
            if min(wrong) > 3 * max(right) + least or 3 * max(wrong) + least < min(right):
                found.setdefault(name, f"`{name}` {mean(wrong):.2g} ({mean(right):.2g})")
    return "<br>".join([*found.values()][:2]) or "nothing"


def question(number: int) -> None:
    """Print a bug of SHOWN as the lines that it changes."""
    bug = PLANTED[[*SHOWN][number - 1]]
    flags = " ".join(words_of(bug.trained))
    print(f"\n```diff\n {bug.where}{' with ' * bool(flags)}{flags}", *bug.changed_lines(), "```\n", sep="\n")


def summary() -> None:
    """Print a table of the bugs, the most silent first."""
    lines = []
    for left, bug in sorted(((share(bug), bug) for bug in FLAGS), reverse=True):
        group = next(name for name, least in GROUPS.items() if left >= least)
        flags = " ".join(words_of(FLAGS[bug]))
        cells = [group, f"{bug} (`{PLANTED[bug].where}`)" + f"<br>`{flags}`" * bool(flags)]
        cells += [show(scores(runs)[1]) for runs in (runs_of(bug), unchanged(bug))]
        found = sorted(set.intersection(*map(diagnosed, runs_of(bug))))
        cells += [signs(bug), ", ".join(found) or "nothing", f"`{PLANTED[bug].tests.split()[0]}`"]
        lines.append(cells)
    heads = ["", "bug", "end score", "unchanged", "metric", "`diagnose.py`", "test"]
    common.table(heads, lines, results())


def draw() -> None:
    """Draw docs/bugs/1.png and so on: score and a metric of each bug in SHOWN, the unchanged script in grey."""
    import matplotlib.pyplot as plt
    import plot

    for number, (bug, metric) in enumerate(SHOWN.items(), 1):
        figure, axes = plt.subplots(1, 2, figsize=(6, 1.9), dpi=110, layout="constrained")
        for axis, name in zip(axes, ("score", metric)):
            for runs, color in ((unchanged(bug), "#999999"), (runs_of(bug), plot.COLORS[1])):
                for run in runs:
                    axis.plot(range(1, 1 + ITERATIONS), run["metrics"][name], color=color, lw=1)
            axis.set_title(name, fontsize=9)
            axis.set_xlabel("iteration", fontsize=8)
            axis.tick_params(labelsize=8)
            axis.grid(alpha=0.25)
        axes[0].set_ylim(0, 1.03)
        plot.save(figure, ROOT / "docs" / "bugs" / f"{number}.png")
        plt.close(figure)


def main() -> None:
    run_all("bugs", cells_of(), measure)
    draw()
    summary()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
