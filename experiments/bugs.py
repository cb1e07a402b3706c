"""Train with known bugs: which of them does the score hide, and what shows them?

    python experiments/bugs.py        train, draw and print the table: 30 minutes on two cores

A bug is a mutant of tests/mutants.py. Each is trained on the toy beside the unchanged script with the same flags. A row
has the metrics of every iteration, which tools/diagnose.py reads. Writes docs/bugs.png and docs/metrics.png, too.
"""

import ast
import difflib
import json
import math
import shutil
import sys
import tempfile
import textwrap
from functools import cache
from pathlib import Path

import common
import diagnose
import tyro
from common import POLICY_SCRIPTS, ROOT, mean, run_all, show, words_of

sys.path.append(str(ROOT / "tests"))
from mutants import MUTANTS, Mutant

COMMON = {"num_iterations": 60}
# The flags at which a bug matters. The unchanged script runs with them, too.
COOL = {"temperature": 0.7}
REWARD_MODEL = {"reward": "toy/reward_model", "eval_reward": "exact_answer", "kl_coef": 1.0}
# These change no result of the unchanged script. The model is toy/policy with a dropout of 0.1 in its config.
DROPOUT = {"model": "dropout"}
SMALL = {"micro_batch_size": 16}

BUGS = {
    "eos masked": {}, "log-probs one column off": {}, "padding counts in positions": {}, "attention to the padding": {},
    "cache of other rows": {}, "micro-batch cut too short": {}, "scores of another prompt": {},
    "groups along the wrong axis": {}, "a group spans two prompts": {}, "token mean in grpo": {}, "clip with max": {},
    "k3 upside down": {}, "old log-probs of the reference": {}, "ratio always 1": {}, "kl the other way round": {},
    "a reference that moves": {}, "reference log-probs of other rows": {}, "no zero_grad": {},
    "no gradient clipping": {}, "it learns the wrong way": {}, "no baseline": {}, "kl with the wrong sign": {},
    "whitened with the padding": {}, "returns from the left": {}, "k2 of the old policy": {},
    "ppo: critic one token off": {}, "sampling without temperature": COOL, "log-probs without temperature": COOL,
    "reference at temperature 1": COOL, "a reward model reads padding": REWARD_MODEL,
    "responses of a micro-batch": SMALL, "dropout on": DROPOUT,
}  # fmt: skip
MUTANT = {row[0]: Mutant(*row) for rows in MUTANTS.values() for row in rows}
# grpo.py would stop: it divides by the length, which is 0 for a response that is only an EOS.
MUTANT["eos masked"] = MUTANT["eos masked"]._replace(function="reinforce_pp.generate")
# Not bugs of the code, but of the flags: for docs/metrics.md
MISTAKES = [("grpo", {"learning_rate": 5e-3}), ("grpo", {"answer_marker": "Answer"})]
LEFT_OUT = ("iteration", "seconds", "tokens_per_second", "learning_rate", "policy_loss")


def script_of(bug: str) -> str:
    return MUTANT[bug].function.split(".")[0]


def parent(bug: str) -> tuple[str, dict]:
    """Script and flags of the unchanged run that a bug is compared with."""
    return script_of(bug), {} if BUGS[bug] in (SMALL, DROPOUT) else BUGS[bug]


def measure(run_dir: Path, bug: str, change: list[str], script: str, flags: dict, seed: int) -> dict:
    folder = run_dir.parent
    if flags == DROPOUT:
        shutil.copytree(ROOT / "toy" / "policy", folder / "dropout")
        config = folder / "dropout" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"attention_dropout": 0.1}))
        flags = {"model": folder / "dropout"}
    # An evaluation changes nothing, and costs time.
    evaluates = not bug or "eval_reward" in flags
    flags = COMMON | flags | {"seed": seed, "eval_every": 30 if evaluates else 0}
    lines = common.train(script, flags, run_dir, change=MUTANT[bug].change if bug else None)
    metrics, held_out = {}, {}
    for line in lines:
        for name, value in line.items():
            if name.startswith("eval/"):
                held_out.setdefault(name, {})[str(line["iteration"])] = round(value, 4)
            elif name not in LEFT_OUT:
                metrics.setdefault(name, []).append(float(f"{value:.3g}"))
    return {"held_out": held_out, "metrics": metrics}


def cells_of() -> list[dict]:
    """Three seeds of each bug and of what it is compared with, and of every script."""
    parents = [*map(parent, BUGS)]
    runs = [("", *pair, seed) for seed in (1, 2, 3) for pair in parents]
    runs += [(bug, script_of(bug), flags, seed) for seed in (1, 2, 3) for bug, flags in BUGS.items()]
    runs += [("", *pair, 1) for pair in MISTAKES]
    runs += [("", script, {}, seed) for seed in (1, 2, 3) for script in POLICY_SCRIPTS]
    cells = []
    for bug, script, flags, seed in runs:
        change = [MUTANT[bug].old, MUTANT[bug].new] if bug else []
        cell = {"bug": bug, "change": change, "script": script, "flags": flags, "seed": seed}
        if cell not in cells:
            cells.append(cell)
    return cells


# --- pages ---

# A metric shows a bug if it differs from that of all unchanged runs by this factor, and by more than this
FACTOR = 3
SIGNS = {"logprob_difference": 1e-4, "kl": 0.02, "clip_fraction": 0.002, "grad_norm": 0.1, "entropy": 0.01}
SIGNS |= {"truncated": 0.01, "response_length": 1}
# How much of the unchanged script's rise in score the bugs of a group leave, at least
GROUPS = {"Silent": 0.97, "Slow": 0.4, "Loud": -math.inf}
# Those in docs/bugs.png, with the metric below the score
SHOWN = {
    "kl with the wrong sign": "kl", "a reference that moves": "kl", "no zero_grad": "grad_norm",
    "eos masked": "entropy", "sampling without temperature": "logprob_difference",
    "old log-probs of the reference": "clip_fraction", "reference log-probs of other rows": "kl",
    "groups along the wrong axis": "entropy",
}  # fmt: skip
WHY = {
    "kl with the wrong sign": "At β = 0.01 the score outweighs it.",
    "a reference that moves": "Policy and reference are one model, so their KL is 0.",
    "no zero_grad": "Each step adds the gradients of all steps before it.",
    "eos masked": "The EOS gets no gradient, but responses already end well.",
    "sampling without temperature": "The samples are not of the policy that is trained.",
    "old log-probs of the reference": "A token ε away from the reference gets no push further away.",
    "reference log-probs of other rows": "The KL term pulls a token to another's probability.",
    "groups along the wrong axis": "Each response gets the advantage of another.",
}


@cache
def results() -> list[dict]:
    return common.load("bugs")


def runs_of(bug: str) -> list[dict]:
    return [run for run in results() if run["bug"] == bug]


def unchanged(script: str, flags: dict) -> list[dict]:
    """The runs of a script without a bug."""
    return [run for run in runs_of("") if (run["script"], run["flags"]) == (script, flags)]


def lines_of(run: dict) -> list[dict]:
    """The lines of a run's metrics.jsonl."""
    lines = [{"iteration": 0}, *common.plot_rows(run["metrics"], *run["metrics"])]
    for name, values in run["held_out"].items():
        for iteration, value in values.items():
            lines[int(iteration)][name] = value
    return lines


def diagnosed(run: dict) -> dict[str, str]:
    """What tools/diagnose.py finds in a run."""
    texts = common.defaults(run["script"])
    names = ("dtype", "max_grad_norm", "num_minibatches", "update_epochs", "clip_eps_low", "teacher")
    flags = {name: ast.literal_eval(texts[name]) for name in names if name in texts}
    return diagnose.findings(flags, lines_of(run))


def scores(runs: list[dict]) -> tuple[list[float], list[float]]:
    """The score of each run at its start and end, or the true accuracy if a reward model gives the score."""
    if "eval_reward" in runs[0]["flags"]:
        truths = [run["held_out"]["eval/score/2-5"] for run in runs]
        return [truth["0"] for truth in truths], [truth["60"] for truth in truths]
    curves = [run["metrics"]["score"] for run in runs]
    return [curve[0] for curve in curves], [mean(curve[-10:]) for curve in curves]


def share(bug: str) -> float:
    """How much of the rise in score a bug leaves."""
    start, end = map(mean, scores(unchanged(*parent(bug))))
    return (mean(scores(runs_of(bug))[1]) - start) / (end - start)


def signs(bug: str) -> str:
    """The first two metrics that all runs of a bug have far from all unchanged runs, at the start or the end."""
    found = {}
    for name, least in SIGNS.items():
        for part in (slice(0, 10), slice(-10, None)):
            pair = runs_of(bug), unchanged(*parent(bug))
            wrong, right = ([mean(run["metrics"].get(name, [0])[part]) for run in runs] for runs in pair)
            if min(wrong) > FACTOR * max(right) + least or FACTOR * max(wrong) + least < min(right):
                found.setdefault(name, f"`{name}` {mean(wrong):.2g} ({mean(right):.2g})")
    return "<br>".join([*found.values()][:2]) or "nothing"


def cells_in_table(bug: str) -> list[str]:
    old, new = (line[2:].partition("  #")[0] for line in changed_lines(bug))
    flags = " ".join(words_of(BUGS[bug]))
    first, *others = map(diagnosed, runs_of(bug))
    names = [name for name in first if all(name in other for other in others)]
    [test] = [tests.split()[0] for tests, rows in MUTANTS.items() if bug in [row[0] for row in rows]]
    ends = [show(scores(runs)[1]) for runs in (runs_of(bug), unchanged(*parent(bug)))]
    cells = [bug + f"<br>`{flags}`" * bool(flags), f"`{MUTANT[bug].function}`: `{old}` → `{new}`", *ends]
    return [*cells, signs(bug), ", ".join(names) or "nothing", f"`{test}`"]


def summary() -> None:
    """Print a table of the bugs for each group."""
    shares = sorted(((share(bug), bug) for bug in BUGS if runs_of(bug)), reverse=True)
    most = math.inf
    for group, least in GROUPS.items():
        print(f"\n### {group}")
        lines = [cells_in_table(bug) for left, bug in shares if least <= left < most]
        common.table(["bug", "change", "end score", "unchanged", "metric", "`diagnose.py`", "test"], lines)
        most = least
    common.print_provenance(results())


def counts() -> None:
    """Print how often tools/diagnose.py finds something in unchanged scripts and in those with a bug."""
    runs = [run for run in results() if (run["script"], run["flags"]) not in MISTAKES]
    healthy, broken = ([run for run in runs if bool(run["bug"]) == is_bug] for is_bug in (False, True))
    scripts, bugs = {run["script"] for run in healthy}, {run["bug"] for run in broken}
    alarms = [name for run in healthy for name in diagnosed(run)]
    noticed = [run["bug"] for run in broken if diagnosed(run)]
    print(f"\n- Unchanged: {len(healthy)} runs of {len(scripts)} scripts, {len(alarms)} findings.")
    print(f"- With a bug: findings in {len(noticed)} of {len(broken)} runs, ", end="")
    print(f"for {len(set(noticed))} of {len(bugs)} bugs.\n")


def examples() -> None:
    """Print what tools/diagnose.py says about the two mistakes in docs/metrics.png."""
    print("\n```")
    for script, flags in MISTAKES:
        print("#", common.label({"script": script, "flags": flags}).strip("`"))
        for text in diagnosed(unchanged(script, flags)[0]).values():
            print(textwrap.fill(text, 116, subsequent_indent="    "))
    print("```\n")


def changed_lines(bug: str) -> list[str]:
    """The lines of a script that a bug changes, before and after."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copy(ROOT / f"{script_of(bug)}.py", folder))
        before = copy.read_text().splitlines()
        MUTANT[bug].change(copy.parent)
        lines = [*difflib.unified_diff(before, copy.read_text().splitlines(), n=0)][2:]
    return [f"{line[0]} {line[1:].strip()}" for line in lines if line[0] in "+-"]


def changes() -> None:
    """Print the bugs in the picture as diffs."""
    for number, bug in enumerate(SHOWN, 1):
        function = MUTANT[bug].function.split(".")[1]
        print(f"\n{number}. {bug}, in `{function}` of `{script_of(bug)}.py`. {WHY[bug]}\n\n   ```diff")
        print(*(f"   {line}" for line in changed_lines(bug)), "   ```", sep="\n")
    print()


def draw() -> None:
    """Draw docs/bugs.png: score and a metric of each bug in SHOWN, over the runs of the unchanged script in grey."""
    import matplotlib.pyplot as plt
    import plot

    steps = range(1, 1 + COMMON["num_iterations"])
    figure, axes = plt.subplots(4, 4, figsize=(10, 8), dpi=110, layout="constrained")
    for number, (bug, metric) in enumerate(SHOWN.items()):
        top, column = number // 4 * 2, number % 4
        for axis, name in zip(axes[top : top + 2, column], ("score", metric)):
            for runs, color in ((unchanged(*parent(bug)), "#999999"), (runs_of(bug), plot.COLORS[1])):
                for run in runs:
                    axis.plot(steps, run["metrics"][name], color=color, lw=1)
            axis.set_ylabel(name, fontsize=7)
            axis.tick_params(labelsize=7)
            axis.grid(alpha=0.25)
        axes[top, column].set_title(f"{number + 1}. {bug}", fontsize=8, loc="left", fontweight="bold")
        axes[top, column].set_ylim(0, 1.03)
    figure.supxlabel("iteration", fontsize=9)
    plot.save(figure, ROOT / "docs" / "bugs.png")


def draw_metrics() -> None:
    """Draw docs/metrics.png: a healthy run and three that are not, each with two metrics and a note."""
    import matplotlib.pyplot as plt
    import plot

    [hacked] = [x for x in common.load("hacking") if (x["script"], x["beta"]) == ("reinforce_pp", 0)]
    hacked["held-out accuracy"] = [value for value in hacked["truth"] for _ in range(5)]
    good, high, wrong = (unchanged(*pair)[0]["metrics"] for pair in (("grpo", {}), *MISTAKES))
    panels = {  # run, second metric, note and the points that its arrow joins
        "healthy": (good, "equal_groups", "at first, all groups differ", (8, 0), (18, 0.1)),
        "equal groups": (wrong, "equal_groups", "every response scores 0", (10, 0), (20, 0.3)),
        "learning rate too high": (high, "entropy", "score falls to chance", (49, 0.2), (36, 1.0)),
        "reward hacking": (hacked, "held-out accuracy", "accuracy falls", (35, 0.55), (50, 0.95)),
    }
    figure, axes = plt.subplots(2, 2, figsize=(8, 5), dpi=110, layout="constrained")
    for axis, (title, (curves, other, note, end, start)) in zip(axes.flat, panels.items()):
        for name, color in zip(("score", other), plot.COLORS):
            axis.plot(range(1, 1 + len(curves[name])), curves[name], color=color, lw=1.3, label=name)
        axis.set_title(title, fontsize=10)
        axis.annotate(note, end, start, fontsize=8, arrowprops={"arrowstyle": "->", "lw": 0.7})
        axis.set_ylim(-0.05, 1.3 * max(curves["score"] + curves[other]))  # room for the legend
        axis.legend(fontsize=8, frameon=False, loc="upper center", ncols=2)
        axis.grid(alpha=0.25)
    figure.supxlabel("iteration", fontsize=9)
    plot.save(figure, ROOT / "docs" / "metrics.png")


def main() -> None:
    run_all("bugs", cells_of(), measure)
    draw()
    draw_metrics()
    summary()
    counts()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
