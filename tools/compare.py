"""Compare methods over seeds: the mean and 95 % interval of each, and the difference between runs of the same seed.

    python tools/compare.py runs/rloo_* runs/grpo_*
    python tools/compare.py runs/rloo_* runs/grpo_* --metric eval/score/all

Runs with the same script and the same flags are one group. Their seed, folder and number of ranks may differ, and so
may flags that change only logging, memory or speed. Each group is compared with the first one. All runs are read up to
the last iteration of the shortest run and, if they log a KL, also up to the same KL.
"""

import json
import math
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean as mean
from statistics import stdev
from typing import Annotated

import plot
import tyro

# Flags in which the runs of a group may differ. tests/test_seeds.py checks that a run may change them on resume, too.
FREE = {"seed", "run_dir", "ranks", "eval_every", "log_every", "log_kl", "save_every", "keep_models", "track"}
FREE |= {"micro_batch_size", "gradient_checkpointing"}
LAST = 10  # iterations at the end over which to average
# Quantiles 0.975 of Student's t for 1 to 30 degrees of freedom
# fmt: off
T95 = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
]
# fmt: on


@dataclass
class Run:
    folder: Path
    flags: dict
    source: str  # the copy of the script in the folder, and the versions with which the run was resumed
    metrics: dict[str, dict[int, float]]  # by name and iteration
    end: int  # the last iteration

    def at(self, metric: str, end: int, last: int) -> float:
        """The mean of a metric over the `last` iterations up to `end`, or its latest value if none of them has it."""
        values = self.metrics[metric]
        recent = [values[i] for i in range(end - last + 1, end + 1) if i in values]
        return mean(recent or [values[max(i for i in values if i <= end)]])

    def logs_kl(self, end: int) -> bool:
        """Whether it logged the KL in all iterations up to `end`. When a run is resumed, --log_kl may change."""
        return {*range(1, end + 1)} <= self.metrics.get("kl", {}).keys()

    def highest_kl(self, end: int, last: int) -> float:
        return max(self.at("kl", i, last) for i in range(last, end + 1))

    def reaches(self, kl: float, last: int) -> int:
        """The first iteration at which the mean KL of the `last` iterations is at least kl."""
        return next(i for i in range(last, self.end + 1) if self.at("kl", i, last) >= kl)


# --- statistics ---


def t95(degrees: int) -> float:
    """The quantile 0.975 of Student's t. Above 30 degrees of freedom, the normal quantile is at most 4 % too small."""
    return T95[degrees - 1] if degrees <= len(T95) else 1.96


def half_interval(values: list[float]) -> float:
    """Half of the 95 % interval of the mean of two or more values."""
    return t95(len(values) - 1) * stdev(values) / math.sqrt(len(values))


def interval(values: list[float]) -> str:
    """The mean and, if there are several values, half of its 95 % interval."""
    if len(values) < 2:
        return "".join(f"{value:.3f}" for value in values)
    return f"{round(mean(values), 3) + 0:.3f} ± {half_interval(values):.3f}"  # + 0: no -0


# --- runs and groups ---


def read(folder: Path) -> Run:
    flags, rows = plot.read_run(folder)
    if not isinstance(flags, dict) or not {"seed", "script"} <= flags.keys():
        raise ValueError(
            f"{folder}: args.json lacks the seed or the script. Is it a run of the scripts here?"
        )
    metrics = {}
    for row in rows:
        for name, x in row.items():
            metrics.setdefault(name, {})[row["iteration"]] = x
    script = folder / f"{flags['script']}.py"
    source = script.read_text() if script.exists() else ""
    return Run(folder, flags, source, metrics, max(metrics.get("iteration", [0])))


def group(runs: list[Run]) -> dict[str, list[Run]]:
    """The groups of runs by name, in their order. A name is the script and the flags in which the groups differ."""
    groups = {}
    for run in runs:
        flags = {name: x for name, x in run.flags.items() if name not in FREE}
        groups.setdefault((run.source, json.dumps(flags, sort_keys=True)), []).append(run)
    firsts = [found[0] for found in groups.values()]
    names = [f"{run.flags['script']}.py" for run in firsts]
    for flag in dict.fromkeys(chain(*(run.flags for run in firsts))):
        values = [run.flags[flag] for run in firsts if flag in run.flags]
        if flag not in FREE | {"script"} and values.count(values[0]) < len(values):
            shown = [f" --{flag} {run.flags[flag]}" if flag in run.flags else "" for run in firsts]
            names = [name + text for name, text in zip(names, shown)]
    same = Counter(names)  # above 1 if only the texts of the scripts differ
    names = [f"{name} ({run.folder})" if same[name] > 1 else name for name, run in zip(names, firsts)]
    return dict(zip(names, groups.values()))


def check(groups: dict[str, list[Run]], metric: str) -> int:
    """Return the iteration up to which to compare. If the runs cannot be compared, raise a ValueError."""
    runs = [*chain(*groups.values())]
    if len(groups) < 2:
        raise ValueError("give runs of two or more groups, which differ in their script or their flags.")
    for name, found in groups.items():
        for seed, count in Counter(run.flags["seed"] for run in found).items():
            if count > 1:
                raise ValueError(f"{name}: {count} runs have seed {seed}. Give each seed once.")
    short = min(runs, key=lambda run: run.end)
    if not short.end:
        raise ValueError(f"{short.folder}: it has no iteration to compare.")
    for run in runs:
        if min(run.metrics.get(metric, [short.end + 1])) > min(LAST, short.end):
            text = f"{run.folder} does not log it up to iteration {min(LAST, short.end)}"
            raise ValueError(f"--metric {metric}: {text}. It logs {', '.join(run.metrics)}.")
    return short.end


# --- results ---


def measure(groups: dict[str, list[Run]], metric: str, end: int, last: int) -> tuple[dict, list[Path]]:
    """For each column of the table, a number for each group and seed; and the folders of runs without some KL."""
    runs = [*chain(*groups.values())]
    without = [run.folder for run in runs if not run.logs_kl(end)]
    columns = {f"{metric}, all {end}": lambda run: run.at(metric, end, end)}
    columns[f"{metric}, last {last}"] = lambda run: run.at(metric, end, last)
    if not without:
        level = min(run.highest_kl(end, last) for run in runs)
        columns[f"kl, last {last}"] = lambda run: run.at("kl", end, last)
        columns[f"{metric} at kl {level:.3g}"] = lambda run: run.at(metric, run.reaches(level, last), last)
    found = {
        head: {name: {run.flags["seed"]: number(run) for run in runs} for name, runs in groups.items()}
        for head, number in columns.items()
    }
    return found, without


def differences(numbers: dict[str, dict], name: str) -> list[float]:
    """The numbers of a group minus the numbers of the first group at the same seeds."""
    first = next(iter(numbers.values()))
    return [x - first[seed] for seed, x in numbers[name].items() if seed in first]


def print_results(found: dict) -> None:
    """Print a table with a line for each group and a line for its difference from the first."""
    heads, numbers = list(found), list(found.values())
    first, *others = numbers[0]
    lines = []
    for name in (first, *others):
        intervals = [interval([*x[name].values()]) for x in numbers]
        lines.append([f"`{name}`", str(len(numbers[0][name])), *intervals])
        if name in others:
            pairs = [differences(x, name) for x in numbers]
            lines.append([f"minus `{first}`", str(len(pairs[0])), *map(interval, pairs)])
    plot.print_table(["", "seeds", *heads], lines)


def print_notes(found: dict, without: list[Path]) -> None:
    """Print how to read the table, and what it lacks."""
    print(
        "Numbers are means over seeds ± half of the 95 % interval (Student's t). Differences are means over"
    )
    print(
        "pairs of runs with the same seed. If the interval of a difference contains 0, chance can explain it."
    )
    if without:
        print(f"Nothing is compared at equal KL, because {', '.join(map(str, without))} logged no kl in")
        print("some iterations. Runs log it with --log_kl, or with a --kl_coef above 0.")
    _, *others = next(iter(found.values()))
    for name in others:
        if (count := len(differences(next(iter(found.values())), name))) < 2:
            print(f"{name} and the first group need two seeds in common for an interval, but have {count}.")


Metric = Annotated[str, tyro.conf.arg(help="metric to compare")]


def main(runs: tyro.conf.Positional[plot.Runs], metric: Metric = "score") -> None:
    groups = group([read(run) for run in runs])
    end = check(groups, metric)
    found, without = measure(groups, metric, end, min(LAST, end))
    print_results(found)
    print_notes(found, without)
    if end < (longest := max(run.end for run in chain(*groups.values()))):
        print(f"The runs are compared up to iteration {end}, and the longest has {longest}.")


if __name__ == "__main__":
    plot.command(main, __doc__)
