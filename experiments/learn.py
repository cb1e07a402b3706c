"""The runs of docs/learn.md: the toy with each script of the ladder, its predictions, and its edits that break it.

    python experiments/learn.py           12 minutes on one core
    python experiments/learn.py runs/a    print the means of a run

A row has the mean of each metric over the first and over the last third.
"""

from pathlib import Path

import common
import explain
import plot
import sync
import tyro
from common import ROOT, curve, label, load, mean, run_all, words_of
from planted import BUGS

KEYS = ("score", "kl", "response_length", "equal_groups", "clip_fraction", "grad_norm", "truncated")
SHORT = {"num_iterations": 30}
ONE = {"num_iterations": 1}
EPOCHS = {"num_iterations": 8, "update_epochs": 8, "learning_rate": 5e-4}
NO_CRITIC = {"gae_lambda": 1, "critic_learning_rate": 0}
# Script, flags and a bug of tools/planted.toml, by the name that the page uses
RUNS = {
    "reinforce": ("reinforce", SHORT, ""),
    "reinforce broken": ("reinforce", SHORT, "baseline too low"),
    "rloo": ("rloo", SHORT, ""),
    "rloo broken": ("rloo", SHORT, "groups across prompts"),
    "dr_grpo": ("dr_grpo", EPOCHS, ""),
    "dr_grpo no clip": ("dr_grpo", EPOCHS | {"clip_eps": 1000}, ""),
    "dr_grpo broken": ("dr_grpo", EPOCHS, "no ratio"),
    "grpo": ("grpo", SHORT, ""),
    "grpo kl": ("grpo", SHORT | {"kl_coef": 1}, ""),
    "grpo broken": ("grpo", SHORT, "old log-probs of the reference"),
    "dr_grpo one": ("dr_grpo", ONE, ""),
    "dr_grpo scaled": ("dr_grpo", ONE | {"reward_scale": 100}, ""),
    "baseline one": ("reinforce_pp_baseline", ONE, ""),
    "baseline scaled": ("reinforce_pp_baseline", ONE | {"reward_scale": 100}, ""),
    "baseline kl": ("reinforce_pp_baseline", SHORT | {"kl_coef": 0.3}, ""),
    "baseline broken": ("reinforce_pp_baseline", SHORT | {"kl_coef": 0.3}, "k1 for k2"),
    "reinforce_pp": ("reinforce_pp", SHORT, ""),
    "reinforce_pp kl": ("reinforce_pp", SHORT | {"kl_coef": 0.3}, ""),
    "reinforce_pp broken": ("reinforce_pp", SHORT | {"kl_coef": 0.3}, "kl with the wrong sign"),
    "ppo": ("ppo", SHORT, ""),
    "ppo lambda": ("ppo", SHORT | {"gae_lambda": 0}, ""),
    "ppo no critic": ("ppo", SHORT | NO_CRITIC, ""),
    "ppo broken": ("ppo", SHORT, "score on every token"),
}
SEEDS = (1, 2)


def ends(lines: list[dict]) -> dict:
    curves = {key: curve(lines, key, 6) for key in KEYS}
    n = max(1, len(curves["score"]) // 3)
    return {key: [round(mean(part), 4) for part in (x[:n], x[-n:])] for key, x in curves.items() if x}


def measure(run_dir: Path, script: str, flags: dict, bug: str, seed: int) -> dict:
    flags = flags | {"seed": seed, "eval_every": 0}  # evaluations do not change the training
    lines = common.train(script, flags, run_dir, change=BUGS[bug].plant_in if bug else None)
    return ends(lines)


# --- what the page prints ---


def code(script: str, *functions: str) -> None:
    """Print functions of a script."""
    source = sync.paths()[script].read_text()
    bodies = [sync.function_of(source, name) for name in functions]
    print("\n```python\n" + "\n\n\n".join(bodies) + "\n```\n")


def rung(a: str, b: str, *functions: str) -> None:
    """Print the command that shows how two scripts differ, and how these functions do."""
    print(f"`make diff A={a} B={b}`")
    for function in functions:
        sync.print_diff(a, b, function)


def worked(flags: str) -> None:
    """Print a command of tools/explain.py, and its table."""
    print(f"`python tools/explain.py {flags}`")
    explain.print_group(tyro.cli(explain.Args, args=flags.split()))


def command(name: str) -> str:
    script, flags, _ = RUNS[name]
    return " ".join(["python", str(sync.paths()[script].relative_to(ROOT)), *words_of(flags)])


def commands(*names: str) -> None:
    """Print the commands of these runs."""
    print("\n```", *map(command, names), "```\n", sep="\n")


def edit(name: str) -> None:
    """Print the lines that the bug of a run changes, and the commands that plant it, run it and undo it."""
    bug, run = BUGS[RUNS[name][2]], command(name)
    print("\n```diff", *bug.changed_lines(), "```", sep="\n")
    plant, undo = f"python tools/planted.py '{bug.name}'", f"git restore {run.split()[1]}"
    print("\n```", plant, run, undo, "```\n", sep="\n")


def runs(*names: str, keys: tuple[str, ...] = ()) -> None:
    """Print a line for each run: the score and these metrics, mean of the first third -> of the last."""
    lines, columns = [], ("score", *keys)
    for name in names:
        rows = [row for row in load("learn") if (row["script"], row["flags"], row["bug"]) == RUNS[name]]
        line = [", ".join(filter(None, [label(rows[0]), rows[0]["bug"]]))]
        for key in columns:
            line.append("; ".join(" → ".join(dict.fromkeys(f"{x:.3g}" for x in row[key])) for row in rows))
        lines.append(line)
    common.table([f"run, seeds {' and '.join(map(str, SEEDS))}", *columns], lines)


def main(run: tyro.conf.Positional[Path | None] = None) -> None:
    if run:
        print(*ends(plot.read_run(run)[1]).items(), sep="\n")
        return
    cells = []
    for script, flags, bug in RUNS.values():
        cells += [{"script": script, "flags": flags, "bug": bug, "seed": seed} for seed in SEEDS]
    run_all("learn", cells, measure, workers=1)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
