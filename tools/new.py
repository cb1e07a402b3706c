"""Add an algorithm: make new NAME=mine copies grpo.py; make test then says what it still lacks.

python tools/new.py mine     copy grpo.py to mine.py
python tools/new.py          check that every policy script has its five files; exit code 1 if one lacks something
"""

import re
import sys
from pathlib import Path

import sync

SECTIONS = ("Overview", "Equations", "Implementation details", "Limitations")


def create(name: str, root: Path = sync.ROOT) -> None:
    """Copy grpo.py under this name."""
    path = root / "methods" / f"{name}.py"
    if not name.isidentifier() or path.exists():
        sys.exit(f"error: make new NAME={name}: use a new name of letters, digits and underscores")
    source = (root / "grpo.py").read_text()
    docstring = source.partition('"""')[2].partition('"""')[0]
    path.write_text(source.replace(docstring, docstring.replace("grpo.py", path.name)))
    print(f"{path.name}: a copy of grpo.py; make test says what is missing")


def missing(name: str, root: Path = sync.ROOT) -> list[str]:
    """What a policy script lacks, in the order of CONTRIBUTING.md."""

    def read(path: str) -> str:
        return (root / path).read_text() if (root / path).exists() else ""

    found = []
    where = str(sync.paths(root)[name].relative_to(root))
    title = re.search(r'^""".*$', read("grpo.py"), re.MULTILINE)[0]
    if name != "grpo" and title in read(where):
        found.append(f"{where}: its own docstring; it has grpo.py's")
    for function in (f"{name}_advantages", f"{name}_loss"):
        if not re.search(rf"^(def )?(\w+ = )*{function}\b", read("tests/references.py"), re.MULTILINE):
            found.append(f"tests/references.py: {function}, as plain loops")
    if f"\n| [`{name}.py`]({where}) |" not in read("README.md"):
        found.append(f"README.md: a row | [`{name}.py`]({where}) | ... | in the table of scripts")
    if f"\n| [`{name}`](../{where}) |" not in read("docs/estimators.md"):
        found.append(f"docs/estimators.md: a row | [`{name}`](../{where}) | ... | in the table")
    page = f"docs/scripts/{name}.md"
    lacking = [f"## {section}" for section in SECTIONS if f"\n## {section}\n" not in read(page)]
    if not re.search(rf"`make diff A=\w+\s+B={name}`", read(page)):
        lacking.append(f"`make diff A=grpo B={name}`")
    if lacking:
        found.append(f"{page}: a page with {', '.join(lacking)}")
    return found


def main() -> None:
    if len(sys.argv) > 1:
        return create(sys.argv[1])
    lines = [line for name in sync.policy_scripts() for line in missing(name)]
    if lines:
        sys.exit("\n".join(["error: CONTRIBUTING.md, Adding an algorithm. Missing:", *lines]))


if __name__ == "__main__":
    main()
