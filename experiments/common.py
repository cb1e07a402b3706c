"""What the experiments share: run a script with flags over seeds, keep its metrics, print Markdown from the results.

An experiment is a list of cells, dicts such as {"script": "grpo", "seed": 1}, and a function that measures one.
`run_all` keeps the outcome of each cell in results/<name>.json, so an interrupted experiment resumes.
The pages call `table` and the tables of the experiments in blocks that cog fills (`make tables`).
"""

import ast
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from sync import policy_scripts  # noqa: E402

POLICY_SCRIPTS = tuple(policy_scripts())


def load(name: str) -> dict:
    """The committed results of an experiment."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def save(name: str, results: dict) -> None:
    """Write the results, a line for each run, so that a diff of two result files can be read."""
    head = {key: value for key, value in results.items() if key != "runs"}
    runs = ",\n".join(json.dumps(run) for run in results["runs"])
    (RESULTS / f"{name}.json").write_text(f'{json.dumps(head)[:-1]}, "runs": [\n{runs}\n]}}\n')


def made() -> dict:
    """The command, the machine and the versions of the packages, to be kept with a result."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        processor = platform.processor() or platform.machine()
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers")]
    script = Path(sys.argv[0]).resolve().relative_to(ROOT)
    return {
        "command": " ".join(["python", str(script), *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} cores, {processor}",
        "versions": ", ".join(versions),
    }


@cache
def defaults(script: str) -> dict[str, str]:
    """The flags of a script with their defaults, as its class Args has them. Does not import the script."""
    tree = ast.parse((ROOT / f"{script}.py").read_text())
    [args] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args"]
    fields = [line for line in args.body if isinstance(line, ast.AnnAssign)]
    flags = [field for field in fields if "ClassVar" not in ast.unparse(field.annotation)]
    return {flag.target.id: ast.unparse(flag.value) for flag in flags}


def words_of(flags: dict) -> list[str]:
    """A command line of these flags; True stands for a flag without a value."""
    words = []
    for name, value in flags.items():
        words.append(f"--{name}")
        if value is not True:
            words.append(f"{value:g}".replace("e-0", "e-") if isinstance(value, float) else str(value))
    return words


def flags_of(script: str, flags: dict) -> list[str]:
    """A command line of those flags that the script has."""
    known = defaults(script)
    return words_of({name: value for name, value in flags.items() if name in known})


def train(
    script: str, flags: dict, run_dir: str | Path, env: dict | None = None, patches: Iterable[str] = ()
) -> tuple[list[dict], float]:
    """Run a script, or a copy with these patches. Returns the lines of its metrics.jsonl, and the seconds it took."""
    file = shutil.copy(ROOT / f"{script}.py", Path(run_dir).parent) if patches else f"{script}.py"
    for patch in patches:
        path = ROOT / "experiments" / "patches" / f"{patch}.patch"
        subprocess.run(["git", "apply", path], cwd=Path(run_dir).parent, check=True)
    command = [sys.executable, file, *flags_of(script, flags | {"run_dir": run_dir})]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | (env or {})
    start = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env=env)
    seconds = time.perf_counter() - start
    lines = [json.loads(line) for line in Path(run_dir, "metrics.jsonl").open()]
    return lines, round(seconds, 1)


def environment(group: str, *without_dependencies: str) -> Path:
    """The Python of an environment with a dependency group of pyproject.toml. The first call makes it."""
    folder = ROOT / "experiments" / f".{group}"
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--upgrade", "pip"], check=True)  # --group needs pip 25.1
        subprocess.run([*pip, "--group", f"{ROOT / 'pyproject.toml'}:{group}"], check=True)
        if without_dependencies:
            subprocess.run([*pip, "--no-deps", *without_dependencies], check=True)
        (folder / "installed").touch()
    return python


def memory_gib(field: str) -> float:
    """VmRSS, the memory that this process holds now, or VmHWM, the most it held. Linux only."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 2**20


def curve(metrics: list[dict], key: str, digits: int = 4) -> list[float]:
    """The values of a metric over the iterations that have it."""
    return [round(line[key], digits) for line in metrics if key in line]


def run_all(name: str, cells: Iterable[dict], measure: Callable[..., dict], workers: int = 2) -> dict:
    """Add measure(run_dir, **cell) to results/<name>.json for each cell that is not in it. Returns the results."""
    results = load(name) if (RESULTS / f"{name}.json").exists() else {"runs": []}
    missing = [cell for cell in cells if not any(cell.items() <= run.items() for run in results["runs"])]

    def run(cell: dict) -> dict:
        with tempfile.TemporaryDirectory() as folder:
            return cell | measure(Path(folder, "run"), **cell)

    with ThreadPoolExecutor(workers) as pool:
        for outcome in pool.map(run, missing):
            results["made"] = made() | {"runs at a time": workers}
            results["runs"].append(outcome)
            save(name, results)
            print(*(value for value in outcome.values() if isinstance(value, str | int | float)), flush=True)
    return results


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


def print_patch(name: str) -> None:
    """Print the changed lines of a patch."""
    lines = (ROOT / "experiments" / "patches" / f"{name}.patch").read_text().splitlines()
    changed = [line for line in lines if line[0] in "+-" and not line.startswith(("+++", "---"))]
    print("\n```diff\n" + "\n".join(changed) + "\n```\n")


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


def table(heads: list[str], rows: Iterable[list[str]]) -> None:
    """Print a Markdown table between blank lines."""
    print("\n| " + " | ".join(heads) + " |")
    print("|" + "---|" * len(heads))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def print_commands(*commands: list[str]) -> None:
    """Print commands as a code block, whose lines end before a flag."""
    print("\n```")
    for words in commands:
        text = shlex.join(words).replace(" ", "\xa0").replace("\xa0--", " --")
        lines = textwrap.wrap(text, 114, break_long_words=False, break_on_hyphens=False)
        print(" \\\n    ".join(lines).replace("\xa0", " "))
    print("```\n")
