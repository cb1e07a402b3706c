"""The promise of the repository: policy scripts differ in docstring and estimator block, and in nothing else."""

import ast
import difflib
import re

import pytest
import sync
from conftest import POLICY_SCRIPTS, ROOT
from mutants import MUTANTS
from sync import MOTHER, SIBLINGS, merge, skeleton

INSERTS = {"remax": 5, "ppo": 30}  # scripts that may insert lines, and how many
SOURCES = {name: (ROOT / f"{name}.py").read_text() for name in POLICY_SCRIPTS}


def inserted_lines(mother: str, sibling: str) -> list[str]:
    """Lines that sibling's skeleton has beyond mother's. Raises if it changes or drops one, or inserts one other than
    between blank or comment lines, where a three-way merge could not carry a neighbouring edit past it."""
    a, b = skeleton(mother).splitlines(), skeleton(sibling).splitlines()
    inserted = []
    for tag, i, k, j, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        if tag != "insert":
            raise AssertionError(f"{tag}: {a[i:k]} -> {b[j:m]}")
        edges = [line for line in (b[j - 1], b[j], b[m - 1], b[m]) if not line.strip() or line.strip().startswith("#")]
        assert len(edges) >= 2, f"no room around {b[j:m]}"
        inserted += b[j:m]
    return [line for line in inserted if line.strip()]


@pytest.mark.parametrize("name", SIBLINGS)
def test_skeletons_are_the_same(name):
    lines = inserted_lines(SOURCES[MOTHER], SOURCES[name])
    assert len(lines) <= INSERTS.get(name, 0), lines


@pytest.mark.parametrize(
    "old, new", [("optimizer.step()", "optimizer.step() "), ("        times.append(clock())\n", "")]
)
def test_a_drift_is_seen(old, new):
    assert old in SOURCES["rloo"]
    with pytest.raises(AssertionError):
        inserted_lines(SOURCES[MOTHER], SOURCES["rloo"].replace(old, new, 1))


def test_an_insertion_is_counted():
    drifted = SOURCES["rloo"].replace(
        "\n        # 6. Advantages\n", "\n        print('hook')\n\n        # 6. Advantages\n"
    )
    assert inserted_lines(SOURCES[MOTHER], drifted) == ["        print('hook')"]


def imports_of_siblings(source: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." if node.level else node.module.split(".")[0])
    here = {path.stem for path in ROOT.glob("*.py")} | {path.name for path in ROOT.iterdir() if path.is_dir()} | {"."}
    return names & here


@pytest.mark.parametrize("path", sorted(ROOT.glob("*.py")), ids=lambda path: path.name)
def test_no_script_imports_from_the_repository(path):
    assert not imports_of_siblings(path.read_text())


def test_an_import_is_seen():
    assert imports_of_siblings("import torch\nfrom grpo import generate\n") == {"grpo"}
    assert imports_of_siblings("def f():\n    from . import rloo\n") == {"."}


def test_the_skeleton_names_no_algorithm():
    """Metric names are common and exp_name comes from the file's name, so nothing has to."""
    for name, source in SOURCES.items():
        assert not re.search(r"reinforce|rloo|grpo|remax|\bppo\b", skeleton(source), re.IGNORECASE), name


def test_sync_carries_an_edit_into_every_sibling_and_refuses_a_conflict():
    before = SOURCES[MOTHER]
    after = before.replace("    bar.close()\n", "    bar.close()\n    say('done')\n")
    assert after != before
    for name in SIBLINGS:
        merged = merge(SOURCES[name], before, after)
        inserted_lines(after, merged)
        assert "say('done')" in merged and sync.OWN.findall(merged) == sync.OWN.findall(SOURCES[name])
    clashing = SOURCES["rloo"].replace("    bar.close()\n", "    bar.close()  # mine\n")
    assert merge(clashing, before, before.replace("    bar.close()\n", "    bar.close()  # yours\n")) is None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant[0])
def test_mutants_are_up_to_date(mutant):
    """A mutant changes a line that is there, once. Whether a test notices it, mutants.py finds out."""
    _, script, old, new, _ = mutant
    assert (ROOT / script).read_text().count(old) == 1 and old != new
