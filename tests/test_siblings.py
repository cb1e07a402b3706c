"""Policy scripts differ in docstring and estimator block, and in nothing else; sync.py keeps it so."""

import ast
import difflib
import re
import shutil
from pathlib import Path

import new
import pytest
import sync
from conftest import POLICY_SCRIPTS, ROOT
from mutants import MUTANTS, Mutant

VARIANTS = sync.variants()
PATHS = sync.paths()
SCRIPTS = {name: PATHS[name].read_text() for name in (*POLICY_SCRIPTS, *VARIANTS)}
BLOCK = {"ppo": 105, "dapo": 90}  # lines of the estimator block; 50 in the others


def changed(a: str, b: str) -> list[str]:
    """The lines of two skeletons that differ, with + or - in front."""
    lines = [sync.skeleton(SCRIPTS[name]).splitlines() for name in (a, b)]
    return [line for line in difflib.ndiff(*lines) if line[0] in "+-" and line[2:].strip()]


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
def test_the_skeletons_are_the_same(name):
    """And short to read, and without the name of an algorithm."""
    if name in sync.INSERTS:
        lines = changed("grpo", name)
        assert len(lines) <= sync.INSERTS[name] and all(line.startswith("+") for line in lines)
    else:
        assert sync.skeleton(SCRIPTS[name]) == sync.skeleton(SCRIPTS["grpo"])
    docstring, block = (own.strip("\n").splitlines() for own in sync.OWN.findall(SCRIPTS[name]))
    assert len(docstring) <= 22 and len(block) <= BLOCK.get(name, 50)
    above = SCRIPTS[name].index("\n# --- plumbing")
    assert 0.45 < above / len(SCRIPTS[name]) < 0.6  # "about half" in README.md
    algorithms = r"reinforce|rloo|grpo|remax|dapo|\bppo\b"
    assert not re.search(algorithms, sync.skeleton(SCRIPTS[name]), re.IGNORECASE)


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_a_script_stands_alone(path):
    """It imports nothing from here, its inline metadata pins what requirements.txt pins, its lines fit a window."""
    source = path.read_text()
    imported = re.findall(r"^\s*(?:from|import) (\.|\w+)", source, re.MULTILINE)
    assert "torch" in imported and not {".", *PATHS, *(path.stem for path in ROOT.iterdir())} & set(imported)
    metadata = re.search(r"\A# /// script\n(.*?)^# ///$", source, re.MULTILINE | re.DOTALL)[1]
    pins = dict(re.findall(r'"([\w.-]+)==([^"]+)"', metadata))
    shared = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    if '"vllm==' in metadata:  # it needs an older transformers
        del shared["transformers"]
    assert shared.items() <= pins.items()
    groups = (ROOT / "pyproject.toml").read_text()
    assert all(name in shared or f"{name}=={pins[name]}" in groups for name in pins)
    assert max(map(len, source.splitlines())) <= 110


def copy_scripts(folder: Path) -> Path:
    for name in (*sync.FOLDERS, "toy"):
        (folder / name).mkdir(exist_ok=True)
    for path in (*PATHS.values(), ROOT / "requirements.txt"):
        shutil.copy(path, folder / path.relative_to(ROOT))
    return folder


@pytest.fixture
def folder(tmp_path):
    """A copy of the scripts and their requirements."""
    return copy_scripts(tmp_path)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_sync_carries_an_edit_into_every_script(folder):
    """Once and no more, and nothing else changes. A variant gets an edit of its parent's estimator, too."""
    assert sync.sync(folder) == 0
    assert all(sync.paths(folder)[name].read_text() == SCRIPTS[name] for name in SCRIPTS)
    place = "        # 3. Rollout: samples_per_prompt responses"
    edit(folder / "grpo.py", place, f"        print('edit')\n\n{place}")
    edit(folder / "grpo.py", "log_ref_ratio.exp() - 1 -", "log_ref_ratio.expm1() -")
    edit(folder / "requirements.txt", "tyro==1.0.17", "tyro==9.9.9")
    for _ in range(2):
        assert sync.sync(folder) == 0
        for name, before in SCRIPTS.items():
            after = sync.paths(folder)[name].read_text()
            expected = before.replace(place, f"        print('edit')\n\n{place}").replace("1.0.17", "9.9.9")
            if name == "grpo" or VARIANTS.get(name) == "grpo":
                expected = expected.replace("log_ref_ratio.exp() - 1 -", "log_ref_ratio.expm1() -")
            assert after == expected


def test_sync_names_a_conflict_and_writes_nothing(folder, capsys):
    """ppo.py has its critic's step where grpo.py gets a line. Nor is a line of rloo.py alone overwritten."""
    place = "        # 9. Evaluate, log and save\n"
    edit(folder / "grpo.py", place, f"        print('edit')\n\n{place}")
    edit(folder / "rloo.py", "    optimizer.step()\n", "    optimizer.step()\n    print('mine')\n")
    before = {path: path.read_text() for path in folder.rglob("*.*")}
    assert sync.sync(folder) == 1
    said = capsys.readouterr().out
    assert "ppo.py: the edit does not merge" in said and "rloo.py: the edit does not merge" in said
    assert before == {path: path.read_text() for path in folder.rglob("*.*")}


def test_a_new_algorithm_is_told_its_five_files(tmp_path):
    """In the order of CONTRIBUTING.md. No script here lacks one."""
    assert [new.missing(name) for name in POLICY_SCRIPTS if new.missing(name)] == []
    shutil.copy(ROOT / "grpo.py", tmp_path)
    (tmp_path / "methods").mkdir()
    new.create("mine", tmp_path)
    assert sync.skeleton((tmp_path / "methods" / "mine.py").read_text()) == sync.skeleton(SCRIPTS["grpo"])
    files = [
        "methods/mine.py",
        "tests/references.py",
        "README.md",
        "docs/estimators.md",
        "docs/scripts/mine.md",
    ]
    assert list(dict.fromkeys(x.partition(":")[0] for x in new.missing("mine", tmp_path))) == files


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_has_its_parents_estimator(name):
    """To the byte; and of the skeleton only the lines of the feature differ."""
    source, parent = SCRIPTS[name], SCRIPTS[VARIANTS[name]]
    assert sync.OWN.findall(source)[1] == sync.OWN.findall(parent)[1]
    limits = {"fsdp": 110, "lora": 60, "vllm": 145, "tools": 90, "async": 120}
    assert len(changed(VARIANTS[name], name)) <= sum(limits[feature] for feature in sync.features_of(name))


def test_every_mutant_still_applies(tmp_path):
    """It changes its script, into valid Python. Whether a test notices it, mutants.py finds out."""
    for tests, rows in MUTANTS.items():
        assert (ROOT / "tests" / tests.split()[0]).exists(), f"there is no {tests}"
        for mutant in map(Mutant._make, rows):
            path = shutil.copy(PATHS[mutant.function.split(".")[0]], tmp_path)
            mutant.change(tmp_path)
            ast.parse(Path(path).read_text())
            assert mutant.old != mutant.new
