"""Policy scripts differ in docstring and estimator block, and in nothing else; sync.py keeps it so."""

import ast
import re
import shutil
import subprocess

import pytest
import sync
from conftest import POLICY_SCRIPTS, ROOT
from mutants import MUTANTS

SOURCES = {name: (ROOT / f"{name}.py").read_text() for name in POLICY_SCRIPTS}
BLOCK = {"ppo": 90, "dapo": 90}  # lines of the estimator block; 50 in the others
SCRIPTS = sorted(ROOT.glob("*.py"))


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
def test_the_skeletons_are_the_same(name):
    if name in sync.INSERTS:
        assert len(sync.inserted(SOURCES["grpo"], SOURCES[name])) <= sync.INSERTS[name]
    else:
        assert sync.skeleton(SOURCES[name]) == sync.skeleton(SOURCES["grpo"])


@pytest.mark.parametrize("old, new", [("optimizer.step()", "optimizer.step() "), ("        # 6. Advantages\n", "")])
def test_a_drift_is_seen(old, new):
    """In a script that may insert lines too: it may change none and drop none."""
    assert SOURCES["ppo"].count(f"    {old.strip()}\n") >= 1
    with pytest.raises(ValueError, match=r"replace|delete"):
        sync.inserted(SOURCES["grpo"], SOURCES["ppo"].replace(old, new, 1))


def test_an_insertion_is_counted_and_stands_between_blank_or_comment_lines():
    place, hook = "\n        # 6. Advantages\n", "\n        print('hook')\n"
    drifted = SOURCES["rloo"].replace(place, hook + place)
    assert sync.inserted(SOURCES["grpo"], drifted) == ["        print('hook')"]
    crowded = SOURCES["rloo"].replace("    optimizer.step()\n", "    optimizer.step()\n    print('hook')\n")
    with pytest.raises(ValueError, match="no blank or comment line"):
        sync.inserted(SOURCES["grpo"], crowded)


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
def test_docstring_and_block_are_within_a_readers_budget(name):
    docstring, block = (own.strip("\n").splitlines() for own in sync.OWN.findall(SOURCES[name]))
    assert len(docstring) <= 22 and len(block) <= BLOCK.get(name, 50)


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
def test_the_skeleton_names_no_algorithm(name):
    """Metric names are common, and exp_name comes from the file's name."""
    found = re.search(r"reinforce|rloo|grpo|remax|dapo|\bppo\b", sync.skeleton(SOURCES[name]), re.IGNORECASE)
    assert not found, found


def imports_from(source: str) -> set[str]:
    """What a script imports of this repository."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." if node.level else node.module.split(".")[0])
    return names & ({path.stem for path in SCRIPTS} | {path.name for path in ROOT.iterdir() if path.is_dir()} | {"."})


@pytest.mark.parametrize("path", sorted(ROOT.glob("*.py")), ids=lambda path: path.name)
def test_lines_of_scripts_end_at_column_110(path):
    assert max(map(len, path.read_text().splitlines())) <= 110


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_no_script_imports_from_the_repository(path):
    assert not imports_from(path.read_text())
    assert imports_from("def f():\n    from grpo import generate\n    from . import rloo\n") == {"grpo", "."}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_inline_metadata_pins_what_requirements_txt_pins(path):
    metadata = re.search(r"\A# /// script\n(.*?)^# ///$", path.read_text(), re.MULTILINE | re.DOTALL)
    pins = re.findall(r'"([\w.-]+==[^"]+)"', metadata.group(1))
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    assert pins == [line for line in lines if "==" in line and not line.startswith("#")]


@pytest.fixture
def repository(tmp_path):
    """A git repository of the policy scripts, committed."""
    for name in POLICY_SCRIPTS:
        shutil.copy(ROOT / f"{name}.py", tmp_path)
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def git(folder, *command: str) -> None:
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *command], cwd=folder, check=True, capture_output=True)


def commit(folder) -> None:
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "all")


def edit(folder, place: str) -> None:
    """A line more in grpo.py, with a blank one, before the comment of a step."""
    path = folder / "grpo.py"
    assert path.read_text().count(place) == 1
    path.write_text(path.read_text().replace(place, f"        print('edit')\n\n{place}"))


@pytest.mark.parametrize("committed", [False, True])
def test_sync_carries_an_edit_into_every_sibling(repository, committed, capsys):
    assert sync.main([], repository) == 0 and capsys.readouterr().out == ""
    edit(repository, "        # 3. Rollout: samples_per_prompt responses")
    if committed:
        commit(repository)
    assert sync.main([], repository) == 0
    mother = (repository / "grpo.py").read_text()
    for name, before in SOURCES.items():
        source = (repository / f"{name}.py").read_text()
        assert source.count("print('edit')") == 1 and sync.OWN.findall(source) == sync.OWN.findall(before)
        assert sync.inserted(mother, source) == sync.inserted(SOURCES["grpo"], before)
    assert "ppo.py: merged" in capsys.readouterr().out


def test_sync_names_a_conflict_and_writes_nothing(repository, capsys):
    """ppo.py has its critic's step where grpo.py gets a line. Nor is a line of rloo.py alone overwritten."""
    edit(repository, "        # 8. Log and save\n")
    assert sync.main([], repository) == 1
    assert "ppo.py: the edit does not merge" in capsys.readouterr().out
    assert all((repository / f"{name}.py").read_text() == SOURCES[name] for name in SOURCES if name != "grpo")
    edited = SOURCES["rloo"].replace("    optimizer.step()\n", "    optimizer.step()\n    print('mine')\n")
    for name, text in (SOURCES | {"rloo": edited}).items():
        (repository / f"{name}.py").write_text(text)
    assert sync.main([], repository) == 1 and "rloo.py: the edit does not merge" in capsys.readouterr().out
    assert (repository / "rloo.py").read_text() == edited


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant[0])
def test_mutants_are_up_to_date(mutant):
    """A mutant changes what is there, once. Whether a test notices it, mutants.py finds out."""
    _, script, old, new, tests = mutant
    assert (ROOT / script).read_text().count(old) == 1 and old != new
    assert (ROOT / tests.split()[0]).exists()
