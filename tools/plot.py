"""Draw the metrics of runs into a PNG: score, KL, response length, entropy and evaluations.

    python tools/plot.py runs/a runs/b --out b.png

Each run folder is a line. For sft.py, reward_model.py and dpo.py, the panels are loss, accuracy and margin. Install
matplotlib with `pip install matplotlib`.
"""

import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Annotated

import tyro

METRICS = "score kl response_length entropy loss accuracy margin".split()
# Okabe and Ito's colors, which color-blind readers can tell apart, and a grey. The first five are so dark that their
# contrast with white is 4.5, and so light that it is 3.5 with the black of GitHub's dark pages. In the docs, blue means
# more likely or right, orange means less likely or wrong, and the other three distinguish series.
BLUE, ORANGE, GREEN, PINK, GREY = "#0072B2", "#C05500", "#00825E", "#B4568C", "#757575"
COLORS = [BLUE, ORANGE, GREEN, PINK, "#000000", "#E69F00", "#56B4E9"]


def read_jsonl(path: Path) -> list[dict]:
    """The rows of a file. A last line without its end is left out, because a program may be writing it."""
    return [json.loads(line) for line in path.open() if line.endswith("\n")]


def read_run(folder: Path) -> tuple[dict, list[dict]]:
    """The flags and the lines of metrics.jsonl, one for each iteration."""
    path, rows = folder / "metrics.jsonl", defaultdict(dict)
    if not path.exists():
        raise ValueError(f"{folder}: not a run folder, because it contains no metrics.jsonl")
    try:
        for line in path.read_text().splitlines():
            if line.endswith("}"):  # otherwise it is half a line, where the run was killed
                row = json.loads(line)
                rows[row["iteration"]] |= row
        return json.loads((folder / "args.json").read_text()), list(rows.values())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder}: metrics.jsonl or args.json is damaged ({error!r})") from error


def print_table(heads: list[str], lines: Iterable[list[str]]) -> None:
    """Print a Markdown table."""
    print("\n| " + " | ".join(heads) + " |")
    print("|" + "---|" * len(heads))
    for line in lines:
        print("| " + " | ".join(line) + " |")
    print()


def draw(runs: dict[str, list[dict]], path: Path):
    """Draw a panel for each metric of the runs, given as rows by label, and save the figure."""
    import matplotlib.pyplot as plt
    from matplotlib import cycler

    found = dict.fromkeys(chain(*chain(*runs.values())))  # names of metrics, in their order
    names = [name for name in METRICS if name in found] + [name for name in found if name.startswith("eval/")]
    if not names:
        raise ValueError("there are no metrics to draw. Give folders of runs, such as runs/a.")
    height = math.ceil(len(names) / 2)
    plt.rc("axes", prop_cycle=cycler(linestyle=["-", "--", ":"]) * cycler(color=COLORS))
    size = (8, 2.2 * height + 0.4)
    figure, axes = plt.subplots(height, 2, layout="constrained", squeeze=False, figsize=size)
    for axis in axes.flat[len(names) :]:
        axis.set_axis_off()
    for axis, name in zip(axes.flat, names):
        for label, rows in runs.items():
            values = {row["iteration"]: row[name] for row in rows if name in row}
            xs, marker = sorted(values), "." if len(values) < 10 else ""
            axis.plot(xs, [values[x] for x in xs], linewidth=1.3, marker=marker, label=label)
        axis.set_title(name, fontsize=10)
        axis.grid(alpha=0.25)
    figure.supxlabel("iteration", fontsize=10)
    figure.legend(handles=axes.flat[0].lines, loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)
    return figure


run_folders = tyro.conf.arg(help="run folders", metavar="RUN ...", help_behavior_hint="")
Runs = Annotated[tuple[Path, ...], run_folders]
Out = Annotated[Path, tyro.conf.arg(help="the PNG to write")]


def main(runs: tyro.conf.Positional[Runs], out: Out = Path("plot.png")) -> None:
    draw({str(run): read_run(run)[1] for run in runs}, out)
    print(f"Wrote {out}.")


def command(function: Callable, description: str) -> None:
    """Run the main function of a tool. If the input is bad, print the ValueError and exit with code 2."""
    try:
        tyro.cli(function, description=description, use_underscores=True)
    except (OSError, ValueError, ModuleNotFoundError) as error:  # No module named 'matplotlib'
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    command(main, __doc__)
