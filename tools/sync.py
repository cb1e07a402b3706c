"""Copy an edit of grpo.py's skeleton into the other scripts: make sync.

The skeleton is everything except the docstring and the estimator block. Most policy scripts have exactly grpo.py's.
Those in INSERTS have a few more lines, and the variants other ones too; a three-way merge keeps them. If an edit does
not merge, the script is named, nothing is written, and the exit code is 1. A variant gets its parent's estimator block,
and every script the versions of requirements.txt.
"""

import difflib
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (".", "methods", "variants")
MARKER = "    # --- estimator: begin"
# A variant is its parent with a system feature. The marker of one that variant.py made names its features.
VARIANT = re.compile(r"^# variant of (\w+)\.py(?: with (.+))?$", re.MULTILINE)
# The number of lines that a script may have beyond grpo.py's skeleton
INSERTS = {"distill": 4, "gdpo": 6, "remax": 6, "dapo": 10, "sdpo": 12, "ppo": 25}
DOCSTRING = r'^""".*?^"""$'
BLOCK = r"^    # --- estimator: begin.*?^# --- estimator: end[^\n]*$"
OWN = re.compile(f"{DOCSTRING}|{BLOCK}", re.MULTILINE | re.DOTALL)


def paths(root: Path = ROOT) -> dict[str, Path]:
    """The path of each script by its name, which is the same in all folders: `dapo` is methods/dapo.py."""
    found = [path for folder in FOLDERS for path in (root / folder).glob("*.py")]
    return {path.stem: path for path in sorted(found, key=lambda path: path.stem)}


def policy_scripts(root: Path = ROOT) -> list[str]:
    """The names of the scripts that have their own estimator block."""
    sources = {name: path.read_text() for name, path in paths(root).items()}
    return [name for name, text in sources.items() if f"\n{MARKER}" in text and not VARIANT.search(text)]


def variants(root: Path = ROOT) -> dict[str, str]:
    """The parent of each variant, by name."""
    found = {name: VARIANT.search(path.read_text()) for name, path in paths(root).items()}
    return {name: match[1] for name, match in found.items() if match}


def features(root: Path = ROOT) -> dict[str, str]:
    """The variant that brings each feature, which is the last word of its name: grpo_lora brings lora."""
    made = [name for name in variants(root) if VARIANT.search(paths(root)[name].read_text())[2]]
    return {name.rpartition("_")[2]: name for name in variants(root) if name not in made}


def features_of(name: str, root: Path = ROOT) -> list[str]:
    """The features that a script has."""
    marker = VARIANT.search(paths(root)[name].read_text())
    if marker and marker[2]:
        return marker[2].split(", ")
    return [feature for feature, variant in features(root).items() if variant == name]


def skeleton(source: str) -> str:
    """The source with docstring and estimator block replaced by a line each."""
    bare, count = OWN.subn("# own", source)
    if count != 2:
        raise ValueError(f"a policy script has a docstring and an estimator block; found {count} of the two")
    return bare


def merge(mine: str, before: str, after: str) -> tuple[str, bool]:
    """mine with the change from before to after, and whether they do not conflict. The text has the conflicts."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in {"mine": mine, "before": before, "after": after}.items():
            Path(folder, name).write_text(text)
        command = ["git", "merge-file", "-p", "mine", "before", "after"]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return result.stdout, result.returncode == 0


def pin(source: str, requirements: str) -> str:
    """The source with the versions of requirements.txt in its inline metadata."""
    header, end, rest = source.partition("\n# ///\n")
    for name, version in re.findall(r"^(\w+)==(\S+)", requirements, re.MULTILINE):
        header = re.sub(f'"{name}==[^"]*"', f'"{name}=={version}"', header)
    return header + end + rest


def sync(root: Path) -> int:
    sources = {name: path.read_text() for name, path in paths(root).items()}
    scripts, parents = policy_scripts(root), variants(root)
    copies = [name for name in scripts if name != "grpo" and name not in INSERTS]
    # The skeleton of the last sync is the one that most copies have.
    [(before, _)] = Counter(skeleton(sources[name]) for name in copies).most_common(1)
    after = skeleton(sources["grpo"])
    merged, conflicts = {}, []
    for name in [*scripts, *parents]:
        mine = skeleton(sources[name])
        bare, is_clean = merge(mine, before, after)
        if not is_clean or (name in copies and bare != after):  # an edit made in a copy is not overwritten
            conflicts.append(name)
            continue
        docstring, _ = OWN.findall(sources[name])
        _, block = OWN.findall(sources[parents.get(name, name)])
        merged[name] = bare.replace("# own", docstring, 1).replace("# own", block, 1)
    for name in conflicts:
        print(f"{name}.py: the edit does not merge, or one was made here only; make it by hand in both")
    if conflicts:
        print("nothing written")
        return 1
    requirements = (root / "requirements.txt").read_text()
    for name, source in sources.items():
        text = pin(merged.get(name, source), requirements)
        if text != source:
            paths(root)[name].write_text(text)
            print(f"{name}.py: updated")
    return 0


def function_of(source: str, name: str) -> str:
    return re.search(rf"^def {name}\(.*?(?=\n\n\n)", source, re.MULTILINE | re.DOTALL)[0]


def print_diff(a: str, b: str, function: str, root: Path = ROOT) -> None:
    """Print how a function differs between two scripts, as Markdown. README.md and the site show it."""
    old, new = (function_of(paths(root)[name].read_text(), function).splitlines() for name in (a, b))
    lines = difflib.unified_diff(old, new, f"{a}.py", f"{b}.py", "", "", n=99, lineterm="")
    print("\n```diff", *(line.rstrip() for line in lines if not line.startswith("@@")), "```\n", sep="\n")


def diff(a: str, b: str, root: Path = ROOT) -> int:
    """Show how two scripts differ."""
    scripts = {path.stem: path.relative_to(root) for path in paths(root).values()}
    for name in (a, b):
        if name not in scripts:
            print(f"error: there is no script {name}; use two of {', '.join(scripts)}")
            return 2
    subprocess.run(["git", "diff", "--no-index", "--", scripts[a], scripts[b]], cwd=root)
    return 0


if __name__ == "__main__":
    sys.exit(diff(*sys.argv[2:]) if sys.argv[1:] else sync(ROOT))
