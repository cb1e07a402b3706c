"""Plant a known bug in a script, to see what it does to a run. `git restore reinforce.py` removes it again.

    python tests/planted.py "no baseline"        changes a line of reinforce.py and prints the change
    python tests/planted.py --all                lists all bugs of planted.toml
    python tests/planted.py --check              plants each bug in a copy, and checks that its tests fail
    python tests/planted.py --check --only kl --tests test_ranks
                                                 only bugs whose name contains kl, and which test_ranks.py notices

docs/learn.md and docs/bugs.md use some of them. --check leaves out the bugs of estimators and patches, which their
tests plant in each run. If a bug is not noticed, the exit code is 1.
"""

import difflib
import importlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tools"))

from sync import functions, patches, paths  # noqa: E402


@dataclass(frozen=True)
class Planted:
    """A table of planted.toml, which explains the fields."""

    name: str
    old: str
    new: str
    tests: str
    where: str = "references"
    old_in_references: str = ""
    new_in_references: str = ""

    @property
    def script(self) -> str:
        return self.where.partition(".")[0]

    def in_script(self, script: str) -> "Planted":
        """The same bug in another script, which a bug of the skeleton allows."""
        return replace(self, where=f"{script}.{self.where.partition('.')[2]}")

    def path(self, folder: Path = ROOT) -> Path:
        found = paths(folder) | patches(folder) | {"references": folder / "tests" / "references.py"}
        return found[self.script]

    def plant(self, source: str) -> str:
        """The source with the bug. If there is not exactly one place for it, raise a ValueError."""
        if self.where == "references":
            return self.plant_in_references(source)
        function = (functions(source) | {"patch": source}).get(self.where.partition(".")[2], "")
        if function.count(self.old) != 1:
            count = function.count(self.old)
            raise ValueError(f"{self.name!r}: {self.where} contains {self.old!r} {count} times")
        return source.replace(function, function.replace(self.old, self.new))

    def plant_in_references(self, source: str) -> str:
        """The source of tests/references.py with the bug in all its places. If it has none, raise a ValueError."""
        old, new = self.old_in_references, self.new_in_references
        if self.where == "references":
            old, new = self.old, self.new
        if not old or old not in source:
            raise ValueError(f"{self.name!r}: tests/references.py has no {old!r}")
        return source.replace(old, new)

    def plant_in(self, folder: Path) -> None:
        """Change the script in this folder."""
        self.path(folder).write_text(self.plant(self.path(folder).read_text()))

    def change(self) -> list[str]:
        """The lines that it changes, as a diff."""
        before = self.path().read_text()
        lines = difflib.unified_diff(before.splitlines(), self.plant(before).splitlines(), n=0, lineterm="")
        return [line for line in [*lines][2:] if line[0] in "-+"]

    def print_change(self) -> None:
        """Print the change as Markdown, for docs/bugs.md."""
        print(f"\n```diff\n {self.where}", *self.change(), "```\n", sep="\n")

    def module(self) -> SimpleNamespace:
        """The functions and classes of the script with the bug."""
        namespace = dict(vars(importlib.import_module(self.script)))
        exec(self.plant(self.path().read_text()), namespace)
        return SimpleNamespace(**namespace)


ROWS = tomllib.loads((ROOT / "tests" / "planted.toml").read_text())
for row in ROWS.values():
    row.setdefault("tests", f"test_{'patches' if '.patch' in row.get('where', '') else 'estimators'}.py")
BUGS = {name: Planted(name, **row) for name, row in ROWS.items()}
# The bugs whose numbers are in conformance/vectors.json
IN_VECTORS = [bug for bug in BUGS.values() if bug.old_in_references or bug.where == "references"]


VLLM = ROOT / ".venv-vllm" / "bin" / "python"  # made by make test-vllm
SKIPPED = [".git", ".venv*", ".site", "site", "smollm2", "runs"]
SKIPPED += ["__pycache__", ".*_cache", "*.png", "results"]


def tests_pass(tests: str, bug: Planted | None = None) -> bool:
    """Whether the tests pass in a copy of the repository, with a bug if one is given."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*SKIPPED))
        if bug:
            bug.plant_in(copy)
        python = VLLM if "-m vllm" in tests else sys.executable
        command = [python, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
        options = dict(cwd=copy, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        result = subprocess.run([*command, *shlex.split(f"tests/{tests}")], **options)
    if result.returncode not in (0, 1):  # nothing was tested
        raise SystemExit(f"{tests}: pytest ended with {result.returncode}\n{result.stdout[-2000:]}")
    return result.returncode == 0


def check(only: str = "", tests: str = "") -> int:
    """Plant the bugs, two at a time. Returns the exit code."""
    bugs = [bug for bug in BUGS.values() if only in bug.name and tests in bug.tests]
    if not bugs:
        raise SystemExit(f"error: no bug has {only!r} in its name and {tests!r} in its tests")
    if not VLLM.exists():
        bugs = [bug for bug in bugs if "-m vllm" not in bug.tests]
    files = list(dict.fromkeys(bug.tests for bug in bugs))
    bugs = [bug for bug in bugs if bug.tests not in ("test_estimators.py", "test_patches.py")]
    survivors = 0
    with ThreadPoolExecutor(2) as pool:
        for file, passed in zip(files, pool.map(tests_pass, files)):
            if not passed:
                raise SystemExit(f"{file} fails without a bug, so it cannot notice one")
        survived = pool.map(tests_pass, [bug.tests for bug in bugs], bugs)
        for bug, passed in zip(bugs, survived):
            print(f"{'SURVIVED' if passed else 'noticed':8}  {bug.name}  ({bug.tests})", flush=True)
            survivors += passed
    print(f"{len(bugs) - survivors} of {len(bugs)} bugs noticed")
    return int(survivors > 0)


def main(words: list[str]) -> int:
    """Plant the bug that the words name. Returns the exit code."""
    if words in ([], ["--help"], ["-h"]):
        print(__doc__)
        return 0 if words else 2
    if words == ["--all"]:
        print("\n".join(f"{bug.name:45} {bug.where}" for bug in BUGS.values()))
        return 0
    if words[0] == "--check":
        import tyro

        return tyro.cli(check, args=words[1:])
    name = " ".join(words)
    if name not in BUGS:
        print(f"error: no bug is named {name!r}. python tests/planted.py --all lists them.", file=sys.stderr)
        return 2
    path = BUGS[name].path()
    shown = os.path.relpath(path)
    status = subprocess.run(["git", "status", "--porcelain", "--", path], cwd=ROOT, capture_output=True)
    if status.stdout:
        remedy = f"If they are a planted bug, undo it: git restore {shown}. Otherwise commit them."
        print(f"error: {shown} has changes. {remedy}", file=sys.stderr)
        return 2
    print(*BUGS[name].change(), sep="\n")
    BUGS[name].plant_in(ROOT)
    print(f"Changed {shown}. To undo it: git restore {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
