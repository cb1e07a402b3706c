"""Train with known bugs: which of them does the score hide, and what shows them?

    python experiments/bugs.py        train, draw and print the table: 35 minutes on a core

A bug is a mutant of tests/mutants.py, a change of one line. Each is trained on the toy beside the unchanged script with
the same flags. A row has the metrics of every iteration, so tools/diagnose.py can read it like a run folder. Writes
docs/bugs.png and docs/metrics.png, too.
"""

import ast
import difflib
import json
import math
import multiprocessing
import os
import runpy
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
LEFT_OUT = ("seconds", "tokens_per_second", "learning_rate", "policy_loss")


def parent(bug: str) -> tuple[str, dict]:
    """Script and flags of the unchanged run that a bug is compared with."""
    flags = BUGS[bug]
    return MUTANT[bug].function.split(".")[0], {} if flags in (SMALL, DROPOUT) else flags


def measure(run_dir: Path, bug: str, change: list[str], script: str, flags: dict, seed: int) -> dict:
    """Train in a fork of this process, which has imported the packages already."""
    if bug:
        file = Path(shutil.copy(ROOT / f"{script}.py", run_dir.parent))
        MUTANT[bug].change(run_dir.parent)
    else:
        file = ROOT / f"{script}.py"
    if flags == DROPOUT:
        model = shutil.copytree(ROOT / "toy" / "policy", run_dir.parent / "dropout")
        config = json.loads((model / "config.json").read_text()) | {"attention_dropout": 0.1}
        (model / "config.json").write_text(json.dumps(config))
        flags = {"model": str(model)}
    # An evaluation changes nothing, and costs time.
    evaluates = not bug or "eval_reward" in flags
    flags = COMMON | flags | {"seed": seed, "run_dir": run_dir, "eval_every": 30 if evaluates else 0}
    sys.argv = [str(file), *common.flags_of(script, flags)]
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=runpy.run_path, args=[str(file)], kwargs={"run_name": "__main__"})
    process.start()
    process.join()
    metrics, held_out, path = {}, {}, run_dir / "metrics.jsonl"
    for row in map(json.loads, path.open() if path.exists() else []):  # a bug may end the run at once
        for name, value in row.items():
            if name.startswith("eval/"):
                held_out.setdefault(name, {})[str(row["iteration"])] = round(value, 4)
            elif name not in LEFT_OUT and name != "iteration":
                metrics.setdefault(name, []).append(float(f"{value:.3g}"))
    return {"held_out": held_out, "metrics": metrics}


def cells_of() -> list[dict]:
    """Two seeds of each bug, three of what it is compared with, one of the other scripts."""
    bugs = [(bug, MUTANT[bug].function.split(".")[0], flags) for bug, flags in BUGS.items()]
    healthy = [("", *pair) for pair in map(parent, BUGS)]
    others = [("", script, {}) for script in POLICY_SCRIPTS]
    mistakes = [("", *pair) for pair in MISTAKES]
    cells = []
    parts = [([*healthy, *bugs, *mistakes], 1), (healthy, 2), (others, 1), (bugs, 2), (healthy, 3)]
    for runs, seed in parts:
        for bug, script, flags in runs:
            change = [MUTANT[bug].old, MUTANT[bug].new] if bug else []
            cell = {"bug": bug, "change": change, "script": script, "flags": flags, "seed": seed}
            cells += [cell] * (cell not in cells)
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


@cache
def results() -> list[dict]:
    return common.load("bugs")


def runs_of(bug: str, script: str = "", flags: dict | None = None) -> list[dict]:
    """The runs of a bug, or without its name, those of an unchanged script."""
    rows = [row for row in results() if row["bug"] == bug]
    return rows if bug else [row for row in rows if (row["script"], row["flags"]) == (script, flags)]


def lines_of(run: dict) -> list[dict]:
    """The lines of a run's metrics.jsonl."""
    rows = [{"iteration": i} for i in range(COMMON["num_iterations"] + 1)]
    for name, values in run["metrics"].items():
        for row, value in zip(rows[1:], values):
            row[name] = value
    for name, values in run["held_out"].items():
        for iteration, value in values.items():
            rows[int(iteration)][name] = value
    return rows


def diagnosed(run: dict) -> dict[str, str]:
    """What tools/diagnose.py finds in a run."""
    texts = common.defaults(run["script"])
    names = ("dtype", "max_grad_norm", "num_minibatches", "update_epochs", "clip_eps_low", "teacher")
    return diagnose.findings(
        {name: ast.literal_eval(texts[name]) for name in names if name in texts}, lines_of(run)
    )


def scores(runs: list[dict]) -> tuple[list[float], list[float]]:
    """The score of each run at its start and end, or the true accuracy if a reward model gives the score."""
    if "eval_reward" in runs[0]["flags"]:
        return tuple([run["held_out"]["eval/score/2-5"][i] for run in runs] for i in ("0", "60"))
    curves = [run["metrics"]["score"] for run in runs]
    return [curve[0] for curve in curves], [mean(curve[-10:]) for curve in curves]


def stops(run: dict) -> bool:
    """Whether the run ended before its last iteration, as with a loss that is not finite."""
    return len(run["metrics"].get("score", [])) < COMMON["num_iterations"]


def share(bug: str) -> float:
    """How much of the rise in score a bug leaves; none if a run stops."""
    if any(map(stops, runs_of(bug))):
        return -1.0
    start, end = map(mean, scores(runs_of("", *parent(bug))))
    return (mean(scores(runs_of(bug))[1]) - start) / (end - start)


def signs(bug: str) -> str:
    """The first two metrics that all runs of a bug have far from all unchanged runs, at the start or the end."""
    found = {}
    for name, least in SIGNS.items():
        for part in (slice(0, 10), slice(-10, None)):
            pair = runs_of(bug), runs_of("", *parent(bug))
            wrong, right = ([mean(run["metrics"].get(name, [0])[part]) for run in runs] for runs in pair)
            if min(wrong) > FACTOR * max(right) + least or FACTOR * max(wrong) + least < min(right):
                found.setdefault(name, f"`{name}` {mean(wrong):.2g} ({mean(right):.2g})")
    return "<br>".join([*found.values()][:2]) or "nothing"


def summary() -> None:
    """Print a table of the bugs for each group."""
    tests = {row[0]: tests.split()[0] for tests, rows in MUTANTS.items() for row in rows}
    shares = sorted(((share(bug), bug) for bug in BUGS if runs_of(bug)), reverse=True)
    for i, (group, least) in enumerate(GROUPS.items()):
        most = [math.inf, *GROUPS.values()][i]
        print(f"\n### {group}\n")
        print("| bug | change | end score | unchanged | metric | `diagnose.py` | test |")
        print("|" + "---|" * 7)
        for _, bug in [pair for pair in shares if least <= pair[0] < most]:
            function, old, new = MUTANT[bug][1:]
            flags = " ".join(words_of(BUGS[bug]))
            found = [diagnosed(run) for run in runs_of(bug)]
            names = [name for name in found[0] if all(name in other for other in found)]
            cells = [bug + f"<br>`{flags}`" * bool(flags), f"`{function}`: `{old}` → `{new}`"]
            cells += [
                "stops" if share(bug) == -1 else show(scores(runs_of(bug))[1]),
                show(scores(runs_of("", *parent(bug)))[1]),
                signs(bug),
            ]
            print("| " + " | ".join([*cells, ", ".join(names) or "nothing", f"`{tests[bug]}`"]) + " |")
    print()
    common.print_provenance(results())


def counts() -> None:
    """Print how often tools/diagnose.py finds something in unchanged scripts and in those with a bug."""
    rows = [run for run in results() if (run["script"], run["flags"]) not in MISTAKES]
    healthy, broken = ([run for run in rows if bool(run["bug"]) == is_bug] for is_bug in (False, True))
    scripts = {run["script"] for run in healthy}
    alarms = [
        f"{name} ({common.label(run)}, seed {run['seed']})" for run in healthy for name in diagnosed(run)
    ]
    noticed = [run["bug"] for run in broken if diagnosed(run)]
    print(f"\n- Unchanged: {len(healthy)} runs of {len(scripts)} scripts, {len(alarms)} findings", end="")
    print(": " * bool(alarms) + ", ".join(alarms) + ".")
    print(f"- With a bug: findings in {len(noticed)} of {len(broken)} runs, ", end="")
    print(f"for {len(set(noticed))} of {len({run['bug'] for run in broken})} bugs.\n")


def examples() -> None:
    """Print what tools/diagnose.py says about the two mistakes in docs/metrics.png."""
    print("\n```")
    for script, flags in MISTAKES:
        print("#", common.label({"script": script, "flags": flags}).strip("`"))
        for text in diagnosed(runs_of("", script, flags)[0]).values():
            print(textwrap.fill(text, 116, subsequent_indent="    "))
    print("```\n")


def changes() -> None:
    """Print the bugs in the picture as diffs."""
    for number, bug in enumerate(SHOWN, 1):
        script, function = MUTANT[bug].function.split(".")
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(shutil.copy(ROOT / f"{script}.py", folder))
            before = copy.read_text().splitlines()
            MUTANT[bug].change(copy.parent)
            lines = [*difflib.unified_diff(before, copy.read_text().splitlines(), n=0)][2:]
        print(f"\n{number}. {bug}, in `{function}` of `{script}.py`\n\n   ```diff")
        print(*(f"   {line[0]} {line[1:].strip()}" for line in lines if line[0] in "+-"), "   ```", sep="\n")
    print()


def draw() -> None:
    """Draw docs/bugs.png: score and a metric of each bug in SHOWN, over the runs of the unchanged script in grey."""
    import matplotlib.pyplot as plt
    import plot

    figure, axes = plt.subplots(4, 4, figsize=(10, 8), dpi=110, layout="constrained")
    for number, (bug, metric) in enumerate(SHOWN.items()):
        pair = axes[number // 4 * 2 : number // 4 * 2 + 2, number % 4]
        for axis, name in zip(pair, ("score", metric)):
            for runs, color in ((runs_of("", *parent(bug)), "#999999"), (runs_of(bug), plot.COLORS[1])):
                for run in runs:
                    axis.plot(
                        range(1, 1 + len(run["metrics"][name])), run["metrics"][name], color=color, lw=1
                    )
            axis.set_ylabel(name, fontsize=7)
            axis.tick_params(labelsize=7)
            axis.grid(alpha=0.25)
        pair[0].set_title(f"{number + 1}. {bug}", fontsize=8, loc="left", fontweight="bold")
        pair[0].set_ylim(0, 1.03)
        pair[1].set_yscale("log" if metric == "logprob_difference" else "linear")
    figure.supxlabel("iteration", fontsize=9)
    plot.save(figure, ROOT / "docs" / "bugs.png")


def draw_metrics() -> None:
    """Draw docs/metrics.png: a healthy run and three that are not, each with two metrics and a note."""
    import matplotlib.pyplot as plt
    import plot

    [hacked] = [
        run for run in common.load("hacking") if (run["script"], run["beta"]) == ("reinforce_pp", 0.0)
    ]
    good, high, wrong = (runs_of("", *pair)[0]["metrics"] for pair in (("grpo", {}), *MISTAKES))
    hacked["held-out accuracy"] = [value for value in hacked["truth"] for _ in range(5)]
    panels = [
        ("healthy", good, "equal_groups", "at first, all groups differ", (8, 0), (18, 0.1)),
        ("equal groups", wrong, "equal_groups", "every response scores 0", (10, 0), (20, 0.3)),
        ("learning rate too high", high, "entropy", "score falls to chance", (49, 0.2), (36, 1.0)),
        (
            "reward hacking",
            hacked,
            "held-out accuracy",
            "accuracy falls, score rises",
            (35, 0.55),
            (50, 0.95),
        ),
    ]
    figure, axes = plt.subplots(2, 2, figsize=(8, 5), dpi=110, layout="constrained")
    for axis, (title, curves, other, note, end, start) in zip(axes.flat, panels):
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
    os.environ["OMP_NUM_THREADS"] = "1"
    os.chdir(ROOT)
    import transformers.models.llama.modeling_llama  # noqa: F401

    import grpo  # noqa: F401  so that the forks have what the scripts import

    run_all("bugs", cells_of(), measure, workers=1)
    draw()
    draw_metrics()
    summary()
    counts()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
