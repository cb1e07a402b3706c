"""Draw score, KL, response length, entropy and evaluations of runs into a PNG. Needs matplotlib (the group test).

    python tools/plot.py runs/a runs/b --out b.png

Each run is a line. For sft.py, reward_model.py and dpo.py it draws loss, accuracy and margin.
"""

import json
import math
from collections import defaultdict
from itertools import chain
from pathlib import Path
from statistics import mean

import tyro

METRICS = "score kl response_length entropy loss accuracy margin".split()
COLORS = "#0072B2 #D55E00 #009E73 #CC79A7 #000000 #E69F00 #56B4E9".split()  # Okabe and Ito's, for all eyes


def read_run(folder: Path) -> tuple[dict, list[dict]]:
    """The flags and the lines of metrics.jsonl, one for each iteration."""
    rows = defaultdict(dict)
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        if line.endswith("}"):  # else it is half a line, where the run was killed
            row = json.loads(line)
            rows[row["iteration"]] |= row
    return json.loads((folder / "args.json").read_text()), list(rows.values())


def draw(groups: dict[str, list[list[dict]]], path: Path):
    """A panel for each metric that there is. groups has, for each label, the rows of each seed. Returns the figure."""
    import matplotlib.pyplot as plt
    from matplotlib import cycler

    found = dict.fromkeys(chain(*chain(*chain(*groups.values()))))  # names of metrics, in their order
    names = [name for name in METRICS if name in found] + [name for name in found if name.startswith("eval/")]
    height = math.ceil(len(names) / 2)
    plt.rc("axes", prop_cycle=cycler(linestyle=["-", "--", ":"]) * cycler(color=COLORS))
    size = (8, 2.2 * height + 0.4)
    figure, axes = plt.subplots(height, 2, layout="constrained", squeeze=False, figsize=size)
    for axis in axes.flat[len(names) :]:
        axis.set_axis_off()
    for axis, name in zip(axes.flat, names):
        for label, seeds in groups.items():
            values = defaultdict(list)  # by iteration
            for row in chain(*seeds):
                if name in row:
                    values[row["iteration"]].append(row[name])
            xs, marker = sorted(values), "." if len(values) < 10 else ""
            axis.plot(xs, [mean(values[x]) for x in xs], linewidth=1.3, marker=marker, label=label)
        axis.set_title(name, fontsize=10)
        axis.grid(alpha=0.25)
    figure.supxlabel("iteration", fontsize=10)
    figure.legend(handles=axes.flat[0].lines, loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)
    return figure


def main(runs: tyro.conf.Positional[tuple[Path, ...]], out: Path = Path("plot.png")) -> None:
    draw({str(run): [read_run(run)[1]] for run in runs}, out)
    print(f"wrote {out}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
