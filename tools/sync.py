"""Carry an edit of grpo.py's skeleton into the other policy scripts, or show how two scripts differ.

    python tools/sync.py                      make sync: what changed in grpo.py since the last commit
    python tools/sync.py --diff grpo rloo     make diff A=grpo B=rloo

The skeleton is everything but the docstring and the estimator block. If the edit does not merge into one of them, that
one is named, nothing is written to any, and the exit code is 1.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOTHER = "grpo"
SIBLINGS = ["rloo", "reinforce_pp", "reinforce_pp_baseline", "remax", "ppo"]
OWN = re.compile(r'\A""".*?^"""$|^# --- estimator: begin.*?^# --- estimator: end[^\n]*$', re.MULTILINE | re.DOTALL)


def skeleton(source: str) -> str:
    """The source with docstring and estimator block replaced by a mark each."""
    stripped, count = OWN.subn("# own", source)
    if count != 2:
        raise ValueError(
            f"a policy script has one docstring and one estimator block, this one {count} of both together"
        )
    return stripped


def dress(bare: str, source: str) -> str:
    """A skeleton with the docstring and the block of source."""
    own = iter(match.group() for match in OWN.finditer(source))
    return re.sub(r"^# own$", lambda _: next(own), bare, flags=re.MULTILINE)


def merge(mine: str, before: str, after: str) -> str | None:
    """The script mine with the change of the mother's skeleton from before to after, or None where they conflict."""
    with tempfile.TemporaryDirectory() as folder:
        texts = {"mine": mine, "before": dress(skeleton(before), mine), "after": dress(skeleton(after), mine)}
        for name, text in texts.items():
            Path(folder, name).write_text(text)
        result = subprocess.run(["git", "merge-file", "-p", *texts], cwd=folder, capture_output=True, text=True)
    return result.stdout if result.returncode == 0 else None


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--diff"] and len(arguments) == 3:
        one, other = (f"{name.removesuffix('.py')}.py" for name in arguments[1:])
        subprocess.run(["git", "diff", "--no-index", "--", one, other], cwd=ROOT)
        return 0
    if arguments:
        print(__doc__)
        return 2
    show = ["git", "show", f"HEAD:{MOTHER}.py"]
    before = subprocess.run(show, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    after = (ROOT / f"{MOTHER}.py").read_text()
    merged = {name: merge((ROOT / f"{name}.py").read_text(), before, after) for name in SIBLINGS}
    conflicts = [name for name, text in merged.items() if text is None]
    for name in conflicts:
        print(f"{name}.py: the edit does not merge; make it there by hand")
    if conflicts:
        print("nothing written")
        return 1
    for name, text in merged.items():
        path = ROOT / f"{name}.py"
        if text != path.read_text():
            path.write_text(text)
            print(f"{name}.py: merged")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
