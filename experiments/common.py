"""What the experiments share: run a script with flags over seeds, keep its metrics, print Markdown from the results.

An experiment is a list of cells, dicts such as {"script": "grpo", "seed": 1}, and a function that measures one.
`run_all` adds a row for each cell to results/<name>.jsonl: the cell, what made the row, and the numbers. An interrupted
experiment resumes. The pages print the tables of the experiments in blocks that cog fills (`make tables`).
"""

import ast
import datetime
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
import tokenize
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"
PATCHES = ROOT / "experiments" / "patches"
sys.path[:0] = [str(ROOT / name) for name in (".", "methods", "variants", "tools", "toy")]

import sync  # noqa: E402
from sync import OWN, policy_scripts  # noqa: E402

POLICY_SCRIPTS = tuple(policy_scripts())


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.open()]


def load(name: str) -> list[dict]:
    """The rows of a result file."""
    return read_jsonl(RESULTS / f"{name}.jsonl")


# --- provenance: what made a row, and whether its script has changed since ---


def provenance(script: str | None = None, patches: Iterable[str] = (), part: str = "code") -> dict:
    """What made a row that is measured now: also a hash, under the name of the part of the script that it covers.

    "code" is all above the plumbing, "estimator" the estimator block. Without a script, the row is never stale.
    """
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    found = re.search(r"^model name\s*: (.*)", cpuinfo, re.MULTILINE)
    processor = found[1] if found else platform.machine()
    code = {part: code_hash(script, patches, part)} if script else {}
    machine = f"{os.cpu_count()} cores, {processor}"
    return code | {"versions": versions(), "machine": machine, "date": str(datetime.date.today())}


def versions(*more: str) -> list[str]:
    """The versions of packages in the environment of this process, without builds such as +cpu."""
    names = ("torch", "transformers", *more)
    return [f"{name} {importlib.metadata.version(name).partition('+')[0]}" for name in names]


def code_hash(script: str, patches: Iterable[str] = (), part: str = "code") -> str:
    """A hash of the code that decides a script's numbers, and of the patches that a run applies to it."""
    parts = [code_of(sync.paths()[script].read_text(), part)]
    paths = [PATCHES / f"{patch}.patch" for patch in patches]
    parts += [path.read_text() if path.exists() else "gone" for path in paths]
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:12]


@cache
def code_of(source: str, part: str) -> str:
    """The lines of a script above its plumbing or of its estimator, without comments, docstrings and blank lines."""
    if part == "estimator":
        _, source = OWN.findall(source)
    source = source.partition("\n# --- plumbing")[0]
    lines = source.splitlines()
    # Not ast.unparse, whose text depends on the version of Python.
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        first, last, column = token.start[0] - 1, token.end[0], token.start[1]
        if token.type == tokenize.COMMENT:
            lines[first] = lines[first][:column]
        elif token.string.startswith('"""') and not lines[first][:column].strip():
            lines[first:last] = [""] * (last - first)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def is_stale(row: dict) -> bool:
    """Whether the code that made a row has changed."""
    parts = [part for part in ("code", "estimator") if part in row]
    return any(row[part] != code_hash(row["script"], row.get("patches", []), part) for part in parts)


def print_provenance(rows: list[dict]) -> None:
    """Print when, where and with what the rows were measured, and whose scripts have changed since."""
    dates = sorted({row["date"] for row in rows})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    machines = ", and on ".join(dict.fromkeys(row["machine"] for row in rows))
    packages = ", ".join(dict.fromkeys(package for row in rows for package in row["versions"]))
    text = f"Measured {when} on {machines}, with {packages}."
    stale = [row for row in rows if is_stale(row)]
    if stale:
        names = ", ".join(dict.fromkeys(f"`{row['script']}.py`" for row in stale))
        text += f" Stale, since the script has changed: {'all rows' if len(stale) == len(rows) else names}."
    print(textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n")


# --- running a script ---


@cache
def defaults(script: str) -> dict[str, str]:
    """The flags of a script with their defaults, as its class Args has them. Does not import the script."""
    tree = ast.parse(sync.paths()[script].read_text())
    [args] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args"]
    fields = [line for line in args.body if isinstance(line, ast.AnnAssign)]
    flags = [field for field in fields if "ClassVar" not in ast.unparse(field.annotation)]
    return {flag.target.id: ast.unparse(flag.value) for flag in flags}


def words_of(flags: dict) -> list[str]:
    """A command line of these flags; True stands for a flag without a value, a list for several values."""
    words = []
    for name, value in flags.items():
        words.append(f"--{name}")
        for x in value if isinstance(value, list) else [value]:
            if x is not True:
                words.append(f"{x:g}".replace("e-0", "e-") if isinstance(x, float) else str(x))
    return words


def flags_of(script: str, flags: dict) -> list[str]:
    """A command line of these flags, which the script must have."""
    unknown = [name for name in flags if name not in defaults(script)]
    if unknown:
        raise ValueError(f"{script}.py has no flag --{', --'.join(unknown)}; leave it out")
    return words_of(flags)


def patched(script: str, patches: Iterable[str], folder: Path) -> Path:
    """A copy of a script in this folder, in methods/ or variants/ if it is there, with these patches."""
    path = sync.paths()[script]
    copy = Path(folder, path.relative_to(ROOT))
    copy.parent.mkdir(exist_ok=True)
    shutil.copy(path, copy)
    # Git would skip the file if it took the folder for a part of a repository.
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(Path(folder).resolve().parent)}
    for patch in patches:
        subprocess.run(["git", "apply", PATCHES / f"{patch}.patch"], cwd=folder, env=env, check=True)
    return copy


def train(script: str, flags: dict, run_dir: Path, patches=(), change=None, **env: str) -> list[dict]:
    """Run a copy of a script with these patches. Returns the lines of its metrics.jsonl.

    change is a function that gets the folder of the copy and edits it; env are environment variables.
    """
    file = patched(script, patches, run_dir.parent)
    if change:
        change(run_dir.parent)
    command = [sys.executable, file, *flags_of(script, flags | {"run_dir": run_dir})]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | env
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env=env)
    return read_jsonl(run_dir / "metrics.jsonl")


def environment(group: str) -> Path:
    """The Python of an environment with a dependency group of pyproject.toml. The first call makes it."""
    folder = ROOT / "experiments" / f".{group}"
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--upgrade", "pip"], check=True)  # --group needs pip 25.1
        subprocess.run([*pip, "--group", f"{ROOT / 'pyproject.toml'}:{group}"], check=True)
        (folder / "installed").touch()
    return python


def curve(metrics: list[dict], key: str, digits: int = 4) -> list[float]:
    """The values of a metric over the iterations that have it."""
    return [round(line[key], digits) for line in metrics if key in line]


def run_all(name: str, cells: list[dict], measure: Callable, workers: int = 2, part: str = "code") -> None:
    """Add a row to results/<name>.jsonl for each cell that has none: the cell, its provenance, and what measure gives.

    The rows have the order of the cells; other rows of the file come after them.
    """
    rows = load(name) if (RESULTS / f"{name}.jsonl").exists() else []

    def cell_of(row: dict) -> int:
        return next((i for i, cell in enumerate(cells) if cell.items() <= row.items()), len(cells))

    def run(cell: dict) -> dict:
        made = provenance(cell.get("script"), cell.get("patches", []), part)
        with tempfile.TemporaryDirectory() as folder:
            return cell | made | measure(Path(folder, "run"), **cell)

    found = {cell_of(row) for row in rows}
    missing = [cell for i, cell in enumerate(cells) if i not in found]
    with ThreadPoolExecutor(workers) as pool:
        for cell, row in zip(missing, pool.map(run, missing)):
            rows.append(row)
            text = "".join(json.dumps(row) + "\n" for row in sorted(rows, key=cell_of))
            (RESULTS / f"{name}.jsonl").write_text(text)
            print(*cell.values(), flush=True)


# --- printing ---


def demo() -> None:
    """Print the first and the last evaluation of `make demo`, each with a sample."""
    lines = (RESULTS / "demo.txt").read_text().splitlines()
    first, *_, last = (i for i, line in enumerate(lines) if "eval/score" in line)
    print("\n```")
    print(*lines[first : first + 2], *lines[last : last + 2], sep="\n")
    print("```\n")


def group_by(runs: list[dict], *keys: str | Callable) -> dict[tuple, list[dict]]:
    """The runs with equal values under these keys, or of these functions, in the order in which they first come."""
    groups = {}
    for run in runs:
        values = tuple(key(run) if callable(key) else run[key] for key in keys)
        groups.setdefault(values, []).append(run)
    return groups


def label(run: dict) -> str:
    """Script, flags and patches of a run, such as `raft.py --num_iterations 160`."""
    command = " ".join([f"{run['script']}.py", *words_of(run["flags"])])
    return ", ".join([f"`{command}`", *(f"`{patch}.patch`" for patch in run.get("patches", []))])


def plot_rows(run: dict, *keys: str) -> list[dict]:
    """The curves of a run as rows, one for each iteration: what tools/plot.py draws."""
    rows = [{"iteration": i} for i in range(1, 1 + max(len(run[key]) for key in keys))]
    for key in keys:
        for row, value in zip(rows, run[key]):
            row[key] = value
    return rows


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def show(values: list[float], digits: int = 2) -> str:
    """Mean, and with several values the lowest and the highest."""
    text = f"{mean(values):.{digits}f}"
    if len(values) == 1:
        return text
    between = " to " if min(values) < 0 else "-"
    return f"{text} ({min(values):.{digits}f}{between}{max(values):.{digits}f})"


def table(heads: list[str], lines: Iterable[list[str]], rows: Iterable[dict] = ()) -> None:
    """Print a Markdown table, and the provenance of the rows of the results in it."""
    print("\n| " + " | ".join(heads) + " |")
    print("|" + "---|" * len(heads))
    for line in lines:
        print("| " + " | ".join(line) + " |")
    print()
    if rows:
        print_provenance(rows)


def print_commands(*commands: list[str]) -> None:
    """Print commands as a code block, whose lines end before a flag."""
    print("\n```")
    for words in commands:
        text = shlex.join(words).replace(" ", "\xa0").replace("\xa0--", " --")
        lines = textwrap.wrap(text, 114, break_long_words=False, break_on_hyphens=False)
        print(" \\\n    ".join(lines).replace("\xa0", " "))
    print("```\n")
