"""Copy an edit of grpo.py's skeleton into the other policy scripts, or show how two scripts differ.

    python tools/sync.py                      make sync
    python tools/sync.py --diff grpo rloo     make diff A=grpo B=rloo

The skeleton is everything except the docstring and the estimator block. Most scripts have exactly grpo.py's skeleton.
Those in INSERTS have a few more lines, and a three-way merge keeps them. The base of the merge is the last skeleton
with which the script agreed, committed or not. If an edit does not merge, the script is named, nothing is written, and
the exit code is 1. The versions in requirements.txt are copied into the first lines of every script.
"""

import difflib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARKER = "    # --- estimator: begin"
VARIANT = re.compile(
    r"^# variant of (\w+)\.py$", re.MULTILINE
)  # a script that is its parent with a system feature
INSERTS = {
    "distill": 2,
    "remax": 6,
    "dapo": 25,
    "ppo": 25,
}  # lines that a script may have beyond grpo.py's skeleton
OWN = re.compile(
    r'^""".*?^"""$|^    # --- estimator: begin.*?^# --- estimator: end[^\n]*$', re.MULTILINE | re.DOTALL
)


def policy_scripts(root: Path = ROOT) -> list[str]:
    """The names of the top-level files that have their own estimator block."""
    sources = {path.stem: path.read_text() for path in sorted(root.glob("*.py"))}
    return [
        name for name, source in sources.items() if f"\n{MARKER}" in source and not VARIANT.search(source)
    ]


def variants(root: Path = ROOT) -> dict[str, str]:
    """The parent of each variant, by name."""
    found = {path.stem: VARIANT.search(path.read_text()) for path in sorted(root.glob("*.py"))}
    return {name: match[1] for name, match in found.items() if match}


def skeleton(source: str) -> str:
    """The source with docstring and estimator block replaced by a line each."""
    bare, count = OWN.subn("# own", source)
    if count != 2:
        raise ValueError(
            f"a policy script has a docstring and an estimator block, this one {count} of the two"
        )
    return bare


def dress(bare: str, source: str) -> str:
    """A skeleton with the docstring and the block of source."""
    own = iter(match.group() for match in OWN.finditer(source))
    return re.sub(r"^# own$", lambda _: next(own), bare, flags=re.MULTILINE)


def inserted(mother: str, sibling: str) -> list[str]:
    """The lines that sibling's skeleton has beyond mother's, blank ones left out. ValueError if it changes or drops
    one, or inserts one other than between blank or comment lines, where a neighbouring edit could not merge."""
    a, b = skeleton(mother).splitlines(), skeleton(sibling).splitlines()
    lines = []
    for tag, i, k, j, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        if tag != "insert":
            raise ValueError(f"{tag}: {a[i:k]} -> {b[j:m]}")
        edges = [
            line
            for line in (b[j - 1], b[j], b[m - 1], b[m])
            if not line.strip() or line.strip().startswith("#")
        ]
        if len(edges) < 2:
            raise ValueError(f"no blank or comment line around {b[j:m]}")
        lines += b[j:m]
    return [line for line in lines if line.strip()]


def agrees(mother: str, sibling: str) -> bool:
    try:
        return inserted(mother, sibling) is not None
    except ValueError:
        return False


def base_of(sibling: str, versions) -> str | None:
    """The newest version of the mother with which sibling's skeleton agreed."""
    return next((mother for mother in versions if agrees(mother, sibling)), None)


def merge(mine: str, before: str, after: str) -> str | None:
    """mine with the change from before to after, or None where they conflict."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in {"mine": mine, "before": before, "after": after}.items():
            Path(folder, name).write_text(text)
        command = ["git", "merge-file", "-p", "mine", "before", "after"]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return result.stdout if result.returncode == 0 else None


def merge_variant(mine: str, before: str, after: str) -> str | None:
    """A variant with the change of its parent. What stands above the imports is its own."""
    start = mine.index("\nimport ")
    body = merge(mine[start:], *(text[text.index("\nimport ") :] for text in (before, after)))
    return body and mine[:start] + body


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True).stdout


def parent_before(root: Path, name: str, parent: str) -> str:
    """The parent in the last commit that changed the variant, when the two agreed; without one, the parent today."""
    commit = git(root, "log", "-1", "--format=%H", "--", f"{name}.py").strip()
    committed = commit and git(root, "show", f"{commit}:{parent}.py")
    return committed or (root / f"{parent}.py").read_text()


def history(root: Path, name: str):
    """The skeleton newest first: grpo.py's, that of name's siblings since the last sync, grpo.py's in each commit."""
    yield (root / "grpo.py").read_text()
    siblings = [x for x in policy_scripts(root) if x not in INSERTS and x != name]
    yield from ((root / f"{x}.py").read_text() for x in siblings)
    for commit in git(root, "log", "--format=%H", "--", "grpo.py").split():
        text = git(root, "show", f"{commit}:grpo.py")
        if f"\n{MARKER}" in text:
            yield text


def pin(source: str, requirements: str) -> str:
    """The source with the versions of requirements.txt in its inline metadata."""
    begin, header, rest = source.partition("# dependencies = [")
    line, end, rest = rest.partition("]\n")
    for name, version in re.findall(r"^(\w+)==(\S+)", requirements, re.MULTILINE):
        line = re.sub(f'"{name}==[^"]*"', f'"{name}=={version}"', line)
    return begin + header + line + end + rest


def sync(root: Path) -> int:
    mother, merged = (root / "grpo.py").read_text(), {}
    for name in policy_scripts(root):
        mine = (root / f"{name}.py").read_text()
        if name in INSERTS:
            base = base_of(mine, history(root, name))
            merged[name] = base and merge(mine, *(dress(skeleton(text), mine) for text in (base, mother)))
        else:  # an edit made here and not in grpo.py is not overwritten
            known = any(skeleton(mine) == skeleton(x) for x in history(root, name))
            merged[name] = dress(skeleton(mother), mine) if known else None
    for name, parent in variants(root).items():
        mine, before = (root / f"{name}.py").read_text(), parent_before(root, name, parent)
        merged[name] = merged[parent] and merge_variant(mine, before, merged[parent])
    conflicts = [name for name, text in merged.items() if text is None]
    for name in conflicts:
        print(f"{name}.py: the edit does not merge, or one was made here only; make it by hand in both")
    if conflicts:
        print("nothing written")
        return 1
    requirements = (root / "requirements.txt").read_text()
    for path in sorted(root.glob("*.py")):
        text = pin(merged.get(path.stem, path.read_text()), requirements)
        if text != path.read_text():
            path.write_text(text)
            print(f"{path.name}: updated")
    return 0


def print_diff(a: str, b: str, function: str, root: Path = ROOT) -> None:
    """Print how a function differs between two scripts, as Markdown. README.md and the site show it."""
    sources = [(root / f"{name}.py").read_text() for name in (a, b)]
    bodies = [re.search(rf"^def {function}\(.*?(?=\n\n\n)", source, re.M | re.S)[0] for source in sources]
    lines = difflib.unified_diff(
        *(body.splitlines() for body in bodies), f"{a}.py", f"{b}.py", "", "", n=99, lineterm=""
    )
    print("\n```diff", *(line.rstrip() for line in lines if not line.startswith("@@")), "```\n", sep="\n")


def main(arguments: list[str], root: Path = ROOT) -> int:
    if arguments[:1] != ["--diff"]:
        if not arguments:
            return sync(root)
        print(__doc__)
        return 2
    scripts = sorted(path.stem for path in root.glob("*.py"))
    names = [name.removesuffix(".py") for name in arguments[1:]]
    if len(names) != 2 or not set(names) <= set(scripts):
        print(
            f"make diff A=... B=... takes two of {', '.join(scripts)}; got {' and '.join(names) or 'none'}",
            file=sys.stderr,
        )
        return 2
    subprocess.run(["git", "diff", "--no-index", "--", *(f"{name}.py" for name in names)], cwd=root)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
