"""Plant each bug of tests/planted.toml in a copy of the repository, and check that its tests fail.

    python tests/mutants.py                        plants all bugs, two at a time
    python tests/mutants.py --only kl              plants the bugs whose name contains kl
    python tests/mutants.py --tests test_ranks     plants the bugs that this test file must notice

It leaves out the bugs of estimators and patches, which their tests plant in each run. If a bug is not noticed, the exit
code is 1.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tyro
from planted import BUGS, ROOT, Planted

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


def main(only: str = "", tests: str = "") -> None:
    bugs = [bug for bug in BUGS.values() if only in bug.name and tests in bug.tests]
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
    sys.exit(survivors > 0)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
