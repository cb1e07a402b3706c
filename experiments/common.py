"""What the experiments share: rows of results, runs of scripts, and Markdown tables.

An experiment is a list of cells, dicts such as {"script": "grpo", "seed": 1}, and a function that measures one.
`run_all` adds a row with the cell and the numbers to results/<name>.jsonl. The line above a group of rows says what
made them. If an experiment is interrupted, the next call continues it. The pages show tables of the rows, which cog
fills.

    python experiments/common.py        lists the commits of all rows, and which scripts have changed since
"""

import dataclasses
import datetime
import importlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from statistics import fmean as mean

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"
sys.path[:0] = [str(ROOT / name) for name in ("tools", "tests", ".", "methods", "variants")]

import sync  # noqa: E402
from plot import print_table, read_jsonl  # noqa: E402

POLICY_SCRIPTS = tuple(sync.policy_scripts())
MADE = ("commit", "date", "machine", "versions")


def load(name: str) -> list[dict]:
    """The rows of a result file, each with its provenance."""
    rows, made = [], {}
    for line in read_jsonl(RESULTS / f"{name}.jsonl"):
        if "commit" in line:
            made = line
        else:
            rows.append(made | line)
    return rows


def save(name: str, rows: list[dict]) -> None:
    """Write the rows, with their provenance above each group."""
    lines, above = [], {}
    for row in rows:
        made = {key: row[key] for key in MADE}
        lines += [made] * (made != above) + [{key: x for key, x in row.items() if key not in MADE}]
        above = made
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    (RESULTS / f"{name}.tmp").write_text(text)
    (RESULTS / f"{name}.tmp").replace(RESULTS / f"{name}.jsonl")  # at once, so that a kill loses no row


# --- provenance ---


@cache
def provenance() -> dict:
    """What makes the rows of this process. If code is not committed, the commit ends in -dirty."""
    head = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    changes = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", ".", ":!experiments/results"], cwd=ROOT)
    commit = head + "-dirty" * changes.returncode
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    found = re.search(r"^model name\s*: (.*)", cpuinfo, re.MULTILINE)
    machine = f"{os.cpu_count()} cores, {found[1] if found else platform.machine()}"
    packages = [f"{x} {importlib.metadata.version(x).partition('+')[0]}" for x in ("torch", "transformers")]
    return {"commit": commit, "date": str(datetime.date.today()), "machine": machine, "versions": packages}


def print_provenance(rows: list[dict]) -> None:
    """Print the date, machine, packages and commits of the rows."""
    dates = sorted({row["date"] for row in rows})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    machines = ", and on ".join(dict.fromkeys(row["machine"] for row in rows))
    packages = ", ".join(dict.fromkeys(package for row in rows for package in row["versions"]))
    commits = [*dict.fromkeys(row["commit"] for row in rows)]
    at = ", ".join(commits[:3]) + " and others" * (len(commits) > 3)
    text = f"Measured {when} on {machines}, with {packages}, at commit {at}."
    print(textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n")


# --- running a script ---


@cache
def defaults(script: str) -> dict:
    """The flags of a script with their defaults."""
    fields = dataclasses.fields(importlib.import_module(script).Args)
    return {field.name: field.default for field in fields}


def words_of(flags: dict) -> list[str]:
    """The words of a command line with these flags."""
    words = []
    for name, value in flags.items():
        text = f"{value:g}".replace("e-0", "e-") if isinstance(value, float) else str(value)
        words += [f"--{name}"] if value is True else [f"--{name}", text]
    return words


def train(script: str, flags: dict, run_dir: Path, change: Callable | None = None) -> list[dict]:
    """Run a copy of a script, which `change` may edit. Returns the lines of its metrics.jsonl."""
    path = sync.paths()[script]
    copy = run_dir.parent / path.name
    source = path.read_text()
    copy.write_text(change(source) if change else source)
    command = [sys.executable, copy, *words_of(flags | {"run_dir": run_dir})]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env=env)
    return read_jsonl(run_dir / "metrics.jsonl")


def curve(metrics: list[dict], key: str, digits: int = 5) -> list[float]:
    """The values of a metric in all iterations that log it, rounded to significant digits."""
    return [float(f"{line[key]:.{digits}g}") for line in metrics if key in line]


def run_all(name: str, cells: list[dict], measure: Callable, workers: int = 2) -> None:
    """For each cell without a row in results/<name>.jsonl, add the cell, its provenance, and what measure returns.

    The rows have the order of the cells. Other rows of the file follow.
    """
    rows = load(name) if (RESULTS / f"{name}.jsonl").exists() else []
    made = provenance()  # before a row changes the working tree

    def cell_of(row: dict) -> int:
        return next((i for i, cell in enumerate(cells) if cell.items() <= row.items()), len(cells))

    def run(cell: dict) -> dict:
        with tempfile.TemporaryDirectory() as folder:
            return cell | made | measure(Path(folder, "run"), **cell)

    found = {cell_of(row) for row in rows}
    missing = [cell for i, cell in enumerate(cells) if i not in found]
    with ThreadPoolExecutor(workers) as pool:
        for cell, row in zip(missing, pool.map(run, missing)):
            rows.append(row)
            save(name, sorted(rows, key=cell_of))
            print(*cell.values(), flush=True)


# --- printing ---


def demo() -> None:
    """Print the first and the last evaluation of `make demo`, and a sample after the last."""
    lines = (RESULTS / "demo.txt").read_text().splitlines()
    first, *_, last = (i for i, line in enumerate(lines) if line.startswith("held out, iteration"))
    print("\n```", lines[first], *lines[last : last + 2], "```\n", sep="\n")


def group_by(rows: list, key: Callable) -> dict:
    """The rows by the value of key, in the order in which the values first occur."""
    groups = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def label(run: dict) -> str:
    """Script and flags of a run, such as `raft.py --num_iterations 160`."""
    return f"`{' '.join([run['script'] + '.py', *words_of(run['flags'])])}`"


def show(values: list[float]) -> str:
    """The mean and, if there are several values, the lowest and the highest."""
    if len(values) < 2:
        return "".join(f"{value:.2f}" for value in values)
    return f"{mean(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def table(heads: list[str], lines: Iterable[list[str]], rows: Iterable[dict] = ()) -> None:
    """Print a Markdown table, and the provenance of its rows."""
    print_table(heads, lines)
    if rows:
        print_provenance(rows)


def code_of(source: str, part: str) -> list[str]:
    """The code and flags of a part of a script, without comments."""
    lines = zip(source.splitlines(), sync.kinds(source))
    return [
        line.partition("  # ")[0] for line, (its_part, kind) in lines if its_part == part and kind != "text"
    ]


def print_changes() -> None:
    """For each commit of a row, print its files, and the scripts whose code has changed since."""
    commits = {}
    for path in sorted(RESULTS.glob("*.jsonl")):
        for row in load(path.stem):
            commits.setdefault(row["commit"], {})[path.stem] = None
    for commit, files in commits.items():
        print(f"{commit}: {', '.join(files)}")
        for part in ("method", "rest"):
            names = []
            for name, path in sync.paths().items():
                then = sync.git(ROOT, "show", f"{commit}:./{path.relative_to(ROOT)}")
                names += [name] * (code_of(then, part) != code_of(path.read_text(), part))
            title = {"method": "estimator block", "rest": "rest of the script"}[part]
            print(f"    changed since, {title}: {', '.join(names) or 'none'}")


if __name__ == "__main__":
    print_changes()
