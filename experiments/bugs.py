"""Train with known bugs: which of them does the score hide, and what shows them?

    python experiments/bugs.py        train, draw and print the table: 45 minutes on two cores

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
from pathlib import Path

import common
import diagnose
import tyro
from common import POLICY_SCRIPTS, ROOT, mean, run_all, show

sys.path.append(str(ROOT / "tests"))
from mutants import MUTANTS, Mutant

COMMON = {"num_iterations": 60, "eval_every": 30}
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
    sys.argv = [str(file), *common.flags_of(script, COMMON | flags | {"seed": seed, "run_dir": str(run_dir)})]
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=runpy.run_path, args=[str(file)], kwargs={"run_name": "__main__"})
    process.start()
    process.join()
    metrics, held_out = {}, {}
    for line in (run_dir / "metrics.jsonl").open():
        row = json.loads(line)
        for name, value in row.items():
            if name.startswith("eval/"):
                held_out.setdefault(name, {})[str(row["iteration"])] = round(value, 4)
            elif name not in LEFT_OUT and name != "iteration":
                metrics.setdefault(name, []).append(float(f"{value:.3g}"))
    return {"exit_code": process.exitcode, "held_out": held_out, "metrics": metrics}


def cells_of() -> list[dict]:
    """Seed 1 of everything, then the other seeds."""
    bugs = [(bug, MUTANT[bug].function.split(".")[0], flags) for bug, flags in BUGS.items()]
    healthy = [("", *pair) for pair in map(parent, BUGS)]
    others = [("", script, {}) for script in POLICY_SCRIPTS]
    mistakes = [("", *pair) for pair in MISTAKES]
    cells = []
    parts = [([*healthy, *bugs, *mistakes], 1), (healthy, 2), (healthy, 3), (others, 1), (bugs, 2), (bugs, 3)]
    for runs, seed in parts:
        for bug, script, flags in runs:
            change = [MUTANT[bug].old, MUTANT[bug].new] if bug else []
            cell = {"bug": bug, "change": change, "script": script, "flags": flags, "seed": seed}
            cells += [cell] * (cell not in cells)
    return cells


# --- pages ---

# What may show a bug, and from how far off the unchanged runs: a factor
SIGNS = ("logprob_difference", "kl", "clip_fraction", "grad_norm", "entropy", "truncated", "response_length")
FACTOR = 3
GROUPS = {
    "silent": 0.97,
    "slow": 0.4,
    "loud": -math.inf,
}  # share of the unchanged script's rise in score, at least
# Those in docs/bugs.png, with the metric below the score
SHOWN = {
    "eos masked": "response_length", "kl with the wrong sign": "kl", "a reference that moves": "kl",
    "ratio always 1": "clip_fraction", "old log-probs of the reference": "clip_fraction",
    "padding counts in positions": "logprob_difference", "log-probs one column off": "logprob_difference",
    "groups along the wrong axis": "equal_groups",
}  # fmt: skip
# What docs/metrics.png says in its four panels, where the arrow ends, and where the text stands
NOTES = [
    ("half of the groups differ:\nmuch to learn from", (8, 0.3), (20, 0.3)),
    ("all responses score 0:\nthe parser never matches", (30, 0.0), (15, 0.4)),
    ("note", (10, 0.1), (25, 0.5)),
    ("the score still rises,\nthe true accuracy falls", (40, 0.2), (50, 0.6)),
]


def runs_of(bug: str = "", script: str = "", flags: dict | None = None) -> list[dict]:
    rows = [row for row in common.load("bugs") if row["bug"] == bug]
    return [row for row in rows if bug or (row["script"], row["flags"]) == (script, flags or {})]


def lines_of(run: dict) -> list[dict]:
    """A run's metrics.jsonl, as far as the row has it."""
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
    values = common.defaults(run["script"]) | COMMON | run["flags"]
    flags = {
        name: ast.literal_eval(value) if isinstance(value, str) else value for name, value in values.items()
    }
    return diagnose.findings(flags, lines_of(run))


def end(run: dict, name: str = "score") -> float:
    return mean(run["metrics"][name][-10:])


def signs(bug: str) -> str:
    """Metrics that all runs of a bug have far from all unchanged runs, in the first or last ten iterations."""
    found = []
    for name in SIGNS:
        for part in (slice(0, 10), slice(-10, None)):
            wrong, right = (
                [abs(mean(run["metrics"][name][part])) for run in runs if name in run["metrics"]]
                for runs in (runs_of(bug), runs_of("", *parent(bug)))
            )
            if not wrong:
                continue
            if min(wrong) > FACTOR * max(right) + 1e-6 or FACTOR * max(wrong) < min(right):
                found.append(f"`{name}` {mean(wrong):.2g}, not {mean(right):.2g}")
                break
    return "<br>".join(found[:2]) or "nothing"


def share_of_rise(bug: str) -> float:
    healthy = runs_of("", *parent(bug))
    start, right = mean([run["metrics"]["score"][0] for run in healthy]), mean([end(run) for run in healthy])
    return (mean([end(run) for run in runs_of(bug)]) - start) / (right - start)


def summary() -> None:
    """Print a table for each group of bugs, then that of the unchanged scripts."""
    measured = [bug for bug in BUGS if runs_of(bug)]
    tests = {row[0]: name.split()[0] for name, rows in MUTANTS.items() for row in rows}
    group_of = {
        bug: next(name for name, least in GROUPS.items() if share_of_rise(bug) >= least) for bug in measured
    }
    for group in GROUPS:
        print(f"\n**{group.capitalize()}**\n")
        print("| bug | script | end score | unchanged | metric | `diagnose.py` | test |")
        print("|" + "---|" * 7)
        for bug in sorted(
            (bug for bug in measured if group_of[bug] == group), key=share_of_rise, reverse=True
        ):
            script, flags = MUTANT[bug].function.split(".")[0], BUGS[bug]
            command = f"`{common.label({'script': script, 'flags': flags}).strip('`')}`"
            names = [diagnosed(run) for run in runs_of(bug)]
            always = [name for name in names[0] if all(name in found for found in names)]
            scores = [show([end(run) for run in runs]) for runs in (runs_of(bug), runs_of("", *parent(bug)))]
            cells = [bug, command, *scores, signs(bug), ", ".join(always) or "nothing", f"`{tests[bug]}`"]
            print("| " + " | ".join(cells) + " |")
    print()
    common.print_provenance(common.load("bugs"))


def alarms() -> None:
    """Print how often tools/diagnose.py finds something in the unchanged scripts and in those with a bug."""
    rows = [run for run in common.load("bugs") if (run["script"], run["flags"]) not in MISTAKES]
    healthy = [run for run in rows if not run["bug"]]
    found = [(run, name) for run in healthy for name in diagnosed(run)]
    scripts = len({run["script"] for run in healthy})
    broken = [run for run in rows if run["bug"]]
    noticed = [run["bug"] for run in broken if diagnosed(run)]
    print(f"\n- Unchanged scripts: {len(healthy)} runs of {scripts} scripts, {len(found)} findings.")
    for run, name in found:
        print(f"    - {name}: {common.label(run)}, seed {run['seed']}")
    print(f"- Bugs: something is found in {len(noticed)} of {len(broken)} runs, ", end="")
    print(f"for {len(set(noticed))} of {len({run['bug'] for run in broken})} bugs.\n")


def changes() -> None:
    """Print the diffs of the bugs in the picture."""
    for number, bug in enumerate(SHOWN, 1):
        script, function = MUTANT[bug].function.split(".")
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(shutil.copy(ROOT / f"{script}.py", folder))
            before = copy.read_text().splitlines()
            MUTANT[bug].change(Path(folder))
            lines = [*difflib.unified_diff(before, copy.read_text().splitlines(), n=0, lineterm="")][2:]
        lines = [line[0] + " " + line[1:].strip() for line in lines if line[0] in "+-"]
        print(f"\n{number}. **{bug}**, in `{script}.py:{function}`\n")
        print("   ```diff", *("   " + line for line in lines), "   ```", sep="\n")
    print()


def draw_bugs() -> None:
    """Draw score and a metric of each bug in SHOWN, over the runs of the unchanged script in grey."""
    import matplotlib.pyplot as plt
    import plot

    figure, axes = plt.subplots(4, 4, figsize=(10, 8), dpi=110, layout="constrained")
    for number, (bug, metric) in enumerate(SHOWN.items()):
        row, column = 2 * (number // 4), number % 4
        for axis, name in zip((axes[row, column], axes[row + 1, column]), ("score", metric)):
            for runs, color in ((runs_of("", *parent(bug)), "#999999"), (runs_of(bug), "#D55E00")):
                for run in runs:
                    values = run["metrics"][name]
                    axis.plot(range(1, len(values) + 1), values, color=color, lw=1)
            axis.set_title(name, fontsize=8, loc="right")
            axis.tick_params(labelsize=7)
            axis.grid(alpha=0.25)
        axes[row, column].set_title(f"{number + 1}", fontsize=10, loc="left", fontweight="bold")
        axes[row, column].set_ylim(0, 1.03)
        if metric == "logprob_difference":
            axis.set_yscale("log")
    figure.supxlabel("iteration; unchanged script grey, bug orange", fontsize=9)
    plot.save(figure, ROOT / "docs" / "bugs.png")


def draw_metrics() -> None:
    """Draw a healthy run and three that are not, each with two metrics and a note."""
    import matplotlib.pyplot as plt
    import plot

    [hacked] = [
        run for run in common.load("hacking") if (run["script"], run["beta"]) == ("reinforce_pp", 0.0)
    ]
    high, wrong = (runs_of("", *mistake)[0]["metrics"] for mistake in MISTAKES)
    healthy = runs_of("", "grpo")[0]["metrics"]
    panels = {
        "healthy": ({"score": healthy["score"], "equal_groups": healthy["equal_groups"]}, NOTES[0]),
        "equal groups": ({"score": wrong["score"], "equal_groups": wrong["equal_groups"]}, NOTES[1]),
        "learning rate too high": ({"score": high["score"], "entropy": high["entropy"]}, NOTES[2]),
        "reward hacking": ({"score": hacked["score"], "eval/score/2-5": hacked["truth"]}, NOTES[3]),
    }
    figure, axes = plt.subplots(2, 2, figsize=(8, 5), dpi=110, layout="constrained")
    for axis, (title, (curves, note)) in zip(axes.flat, panels.items()):
        for (name, values), color in zip(curves.items(), plot.COLORS):
            every = 5 if name.startswith("eval/") else 1
            start = 0 if name.startswith("eval/") else 1
            axis.plot(
                [start + every * i for i in range(len(values))], values, color=color, lw=1.3, label=name
            )
        axis.set_title(title, fontsize=10)
        axis.annotate(
            *note[:1], fontsize=8, xy=note[1], xytext=note[2], arrowprops={"arrowstyle": "->", "lw": 0.7}
        )
        axis.legend(fontsize=8, frameon=False, loc="best")
        axis.grid(alpha=0.25)
    figure.supxlabel("iteration", fontsize=9)
    plot.save(figure, ROOT / "docs" / "metrics.png")


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.chdir(ROOT)
    import transformers.models.llama.modeling_llama  # noqa: F401

    import grpo  # noqa: F401  so that the forks have what the scripts import

    run_all("bugs", cells_of(), measure, workers=1)
    draw_bugs()
    draw_metrics()
    summary()
    alarms()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
