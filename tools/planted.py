"""Known bugs by name, from planted.toml. To plant one in a script:

    python tools/planted.py "no baseline"        git restore reinforce.py undoes it

tests/mutants.py checks that a test notices each. experiments/learn.py trains with some.
"""

import difflib
import importlib
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from sync import ROOT, functions, patches, paths


@dataclass(frozen=True)
class Planted:
    """A row of planted.toml, which explains the fields."""

    name: str
    tests: str
    where: str
    old: str
    new: str
    old_in_references: str = ""
    new_in_references: str = ""

    @property
    def script(self) -> str:
        return self.where.partition(".")[0]

    def path(self, folder: Path = ROOT) -> Path:
        found = paths(folder) | patches(folder) | {"references": folder / "tests" / "references.py"}
        return found[self.script]

    def plant(self, source: str) -> str:
        """The source with the bug. ValueError if there is not exactly one place for it."""
        if self.where == "references":
            return self.plant_in_references(source)
        function = (functions(source) | {"patch": source}).get(self.where.partition(".")[2], "")
        if function.count(self.old) != 1:
            raise ValueError(f"{self.name!r}: {self.where} has {function.count(self.old)} times {self.old!r}")
        return source.replace(function, function.replace(self.old, self.new))

    def plant_in_references(self, source: str) -> str:
        """The source of tests/references.py with the bug, wherever it fits. ValueError if it fits nowhere."""
        old, new = self.old_in_references, self.new_in_references
        if self.where == "references":
            old, new = self.old, self.new
        if not old or old not in source:
            raise ValueError(f"{self.name!r}: tests/references.py has no {old!r}")
        return source.replace(old, new)

    def plant_in(self, folder: Path) -> None:
        """Change the script in this folder."""
        self.path(folder).write_text(self.plant(self.path(folder).read_text()))

    def print_change(self) -> None:
        """Print the lines that it changes, as Markdown. docs/bugs.md asks what that does."""
        before = self.path().read_text()
        lines = difflib.unified_diff(before.splitlines(), self.plant(before).splitlines(), n=0, lineterm="")
        changed = [line for line in [*lines][2:] if line[0] in "-+"]
        print(f"\n```diff\n {self.where}", *changed, "```\n", sep="\n")

    def module(self) -> SimpleNamespace:
        """What the script with the bug defines."""
        namespace = dict(vars(importlib.import_module(self.script)))
        exec(self.plant(self.path().read_text()), namespace)
        return SimpleNamespace(**namespace)


ROWS = tomllib.loads((ROOT / "tools" / "planted.toml").read_text())
BUGS = {name: Planted(name, **row) for name, row in ROWS.items()}
# Those whose numbers are in conformance/vectors.json
IN_VECTORS = [bug for bug in BUGS.values() if bug.old_in_references or bug.where == "references"]

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in BUGS:
        sys.exit("error: give one of these names:\n" + "\n".join(BUGS))
    path = BUGS[sys.argv[1]].path()
    if subprocess.run(["git", "diff", "--quiet", "--", path], cwd=ROOT).returncode:
        sys.exit(f"error: {path.name} has an edit that git restore would undo, too: commit it first")
    BUGS[sys.argv[1]].plant_in(ROOT)
