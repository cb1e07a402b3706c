"""Policy scripts differ in docstring and estimator block, and in nothing else; sync.py keeps it so."""

import ast
import difflib
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import sync
from conftest import POLICY_SCRIPTS, ROOT
from mutants import MUTANTS, Mutant

VARIANTS = sync.variants()
SOURCES = {name: (ROOT / f"{name}.py").read_text() for name in POLICY_SCRIPTS}
BLOCK = {"ppo": 90, "dapo": 90}  # lines of the estimator block; 50 in the others


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
def test_the_skeletons_are_the_same(name):
    """And short to read, and without the name of an algorithm."""
    if name in sync.INSERTS:
        assert len(sync.inserted(SOURCES["grpo"], SOURCES[name])) <= sync.INSERTS[name]
    else:
        assert sync.skeleton(SOURCES[name]) == sync.skeleton(SOURCES["grpo"])
    docstring, block = (own.strip("\n").splitlines() for own in sync.OWN.findall(SOURCES[name]))
    assert len(docstring) <= 22 and len(block) <= BLOCK.get(name, 50)
    assert not re.search(
        r"reinforce|rloo|grpo|remax|dapo|\bppo\b", sync.skeleton(SOURCES[name]), re.IGNORECASE
    )


@pytest.mark.parametrize(
    "old, new", [("optimizer.step()", "optimizer.step() "), ("        # 6. Advantages\n", "")]
)
def test_a_drift_is_seen(old, new):
    """In a script that may insert lines too: it may change none and drop none."""
    with pytest.raises(ValueError, match=r"replace|delete"):
        sync.inserted(SOURCES["grpo"], SOURCES["ppo"].replace(old, new, 1))


def test_an_insertion_is_counted_and_stands_between_blank_or_comment_lines():
    place, hook = "\n        # 6. Advantages\n", "\n        print('hook')\n"
    drifted = SOURCES["rloo"].replace(place, hook + place)
    assert sync.inserted(SOURCES["grpo"], drifted) == ["        print('hook')"]
    crowded = SOURCES["rloo"].replace("    optimizer.step()\n", "    optimizer.step()\n    print('hook')\n")
    with pytest.raises(ValueError, match="no blank or comment line"):
        sync.inserted(SOURCES["grpo"], crowded)


@pytest.mark.parametrize("path", sorted(ROOT.glob("*.py")), ids=lambda path: path.stem)
def test_a_script_stands_alone(path):
    """It imports nothing from here, its inline metadata pins what requirements.txt pins, its lines fit a window."""
    source = path.read_text()
    imported = re.findall(r"^\s*(?:from|import) (\.|\w+)", source, re.MULTILINE)
    assert "torch" in imported and not {".", *(path.stem for path in ROOT.iterdir())} & set(imported)
    metadata = re.search(r"\A# /// script\n(.*?)^# ///$", source, re.MULTILINE | re.DOTALL)
    pins = re.findall(r'"([\w.-]+==[^"]+)"', metadata.group(1))
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    own = {"grpo_lora": ["peft==0.21.2"], "grpo_vllm": ["vllm==0.32.0"]}.get(path.stem, [])
    shared = [line for line in lines if "==" in line and not line.startswith("#")]
    if path.stem == "grpo_vllm":  # vLLM needs an older transformers
        shared = [line for line in shared if not line.startswith("transformers")]
        assert '"transformers<' in metadata.group(1)
    assert pins == shared + own
    assert all(pin in (ROOT / "pyproject.toml").read_text() for pin in own)
    assert max(map(len, source.splitlines())) <= 110


def git(folder, *command: str) -> None:
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *command], cwd=folder, check=True, capture_output=True)


def commit(folder) -> None:
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "all")


@pytest.fixture
def repository(tmp_path):
    """A git repository of the policy scripts, the variants and their requirements, committed."""
    for name in (*(f"{name}.py" for name in (*POLICY_SCRIPTS, *VARIANTS)), "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def edit(folder, place: str) -> None:
    """A line more in grpo.py, with a blank one, before the comment of a step."""
    assert SOURCES["grpo"].count(place) == 1
    (folder / "grpo.py").write_text(SOURCES["grpo"].replace(place, f"        print('edit')\n\n{place}"))


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
    assert "ppo.py: updated" in capsys.readouterr().out


def test_sync_carries_a_version_into_every_script(repository):
    path = repository / "requirements.txt"
    path.write_text(re.sub(r"^tyro==.*$", "tyro==9.9.9", path.read_text(), flags=re.MULTILINE))
    assert sync.main([], repository) == 0
    assert all('"tyro==9.9.9"' in (repository / f"{name}.py").read_text() for name in POLICY_SCRIPTS)


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


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_has_its_parents_estimator(name):
    """To the byte; and of the skeleton only the lines of the feature differ."""
    source, parent = ((ROOT / f"{x}.py").read_text() for x in (name, VARIANTS[name]))
    assert sync.OWN.findall(source)[1] == sync.OWN.findall(parent)[1]
    lines = [sync.skeleton(text).splitlines() for text in (parent, source)]
    changed = [line for line in difflib.ndiff(*lines) if line[0] in "+-" and line[2:].strip()]
    assert (
        len(changed) <= {"grpo_lora": 55, "grpo_fsdp": 100, "grpo_vllm": 150, "reinforce_pp_tools": 90}[name]
    )


def test_an_edit_reaches_the_variants(repository, capsys):
    """Committed or not, once and no more; what stands above the imports stays."""
    edit(repository, "        # 3. Rollout: samples_per_prompt responses")
    commit(repository)
    for _ in range(2):  # the second time there is nothing left to do
        assert sync.main([], repository) == 0
        for name in VARIANTS:
            text = (repository / f"{name}.py").read_text()
            assert text.count("print('edit')") == 1
            assert text.replace("        print('edit')\n\n", "") == (ROOT / f"{name}.py").read_text()


def test_every_mutant_still_applies(tmp_path):
    """It changes its script, into valid Python. Whether a test notices it, mutants.py finds out."""
    for tests, rows in MUTANTS.items():
        assert (ROOT / "tests" / tests.split()[0]).exists(), f"there is no {tests}"
        for mutant in map(Mutant._make, rows):
            path = shutil.copy(ROOT / f"{mutant.function.split('.')[0]}.py", tmp_path)
            mutant.change(tmp_path)
            ast.parse(Path(path).read_text())
            assert mutant.old != mutant.new
