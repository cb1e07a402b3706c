"""Policy scripts differ in docstring and estimator block, and in nothing else; sync.py keeps it so."""

import ast
import difflib
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import references
import sync
import tables
from conftest import POLICY_SCRIPTS, ROOT
from planted import BUGS, IN_VECTORS

VARIANTS = {name: sync.variants()[name] for name in sync.features().values()}  # not those made from others
PATHS = {name: path for name, path in sync.paths().items() if name in VARIANTS or name not in sync.variants()}
SCRIPTS = {name: path.read_text() for name, path in PATHS.items()}


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
def test_the_skeletons_are_the_same(name):
    skeletons = [sync.skeleton(SCRIPTS[script]) for script in ("grpo", name)]
    lines = difflib.ndiff(*(skeleton.splitlines() for skeleton in skeletons))
    changed = [line for line in lines if line[0] in "+-" and line[2:].strip()]
    assert name in sync.INSERTS or skeletons[0] == skeletons[1]
    assert len(changed) <= sync.INSERTS.get(name, 0) and all(line[0] == "+" for line in changed)


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_a_script_stands_alone(path):
    """It imports nothing from here, its inline metadata pins what requirements.txt pins, its lines end at 110."""
    source = path.read_text()
    assert max(map(len, source.splitlines())) <= 110
    imported = re.findall(r"^\s*(?:from|import) (\.|\w+)", source, re.MULTILINE)
    assert "torch" in imported and not {".", *PATHS, *(path.stem for path in ROOT.iterdir())} & set(imported)
    metadata = re.search(r"\A# /// script\n(.*?)^# ///$", source, re.MULTILINE | re.DOTALL)[1]
    pins = dict(re.findall(r'"([\w.-]+)==([^"]+)"', metadata))
    shared = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    if '"vllm==' in metadata:  # it needs an older transformers
        del shared["transformers"]
    assert shared.items() <= pins.items()


def copy_scripts(folder: Path) -> Path:
    for name in (*sync.FOLDERS, "toy"):
        (folder / name).mkdir(exist_ok=True)
    for path in (*PATHS.values(), ROOT / "requirements.txt"):
        shutil.copy(path, folder / path.relative_to(ROOT))
    return folder


@pytest.fixture
def folder(tmp_path):
    copy_scripts(tmp_path)
    for words in ("init -q", "add .", "-c user.name=a -c user.email=a commit -qm a"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_sync_carries_an_edit_into_every_script(folder):
    """Once, and nothing else. A variant gets its parent's estimator; a made one is what make variant makes now."""
    assert sync.sync(folder) == 0
    assert sync.variant("rloo", "lora", folder) == 0
    assert all(sync.paths(folder)[name].read_text() == SCRIPTS[name] for name in SCRIPTS)
    place = "        # 7. Update: each minibatch"
    edit(folder / "grpo.py", place, f"        print('edit')\n\n{place}")
    edit(folder / "grpo.py", "log_ref_ratio.exp() - 1 -", "log_ref_ratio.expm1() -")
    edit(folder / "grpo.py", "    return float(all_sum(x.sum()))", "    return all_sum(x.sum()).item()")
    edit(folder / "requirements.txt", "tyro==1.0.17", "tyro==9.9.9")
    for _ in range(2):
        assert sync.sync(folder) == 0
        for name, before in SCRIPTS.items():
            after = sync.paths(folder)[name].read_text()
            expected = before.replace(place, f"        print('edit')\n\n{place}").replace("1.0.17", "9.9.9")
            expected = expected.replace("float(all_sum(x.sum()))", "all_sum(x.sum()).item()")
            if name == "grpo" or VARIANTS.get(name) == "grpo":
                expected = expected.replace("log_ref_ratio.exp() - 1 -", "log_ref_ratio.expm1() -")
            assert after == expected
        assert sync.paths(folder)["rloo_lora"].read_text() == sync.combine("rloo", ["lora"], folder)


def test_sync_names_a_conflict_and_writes_nothing(folder, capsys):
    """ppo.py has its critic's step where grpo.py gets a line. Nor is a line of one script alone overwritten."""
    place = "                grad_norms.append(optimizer_step(args, policy, optimizer, learning_rate))\n"
    edit(folder / "grpo.py", place, f"{place}                print('edit')\n")
    edit(folder / "rloo.py", "    optimizer.step()\n", "    optimizer.step()\n    print('mine')\n")
    edit(folder / "variants" / "reinforce_pp_tools.py", "    kl_coef: ", "    # mine\n    kl_coef: ")
    before = {path: path.read_text() for path in folder.rglob("*.py")}
    assert sync.sync(folder) == 1
    said = capsys.readouterr().out.splitlines()
    assert [line.split(".py: the edit")[0] for line in said[:-1]] == ["ppo", "rloo", "reinforce_pp_tools"]
    assert before == {path: path.read_text() for path in folder.rglob("*.py")}


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
def test_an_algorithm_has_its_three_files(name):
    """The script, plain loops in references.py, a row and a section in docs/methods.md."""
    title = SCRIPTS[name].partition('"""')[2].partition("\n")[0]
    assert name == "grpo" or title not in SCRIPTS["grpo"], f"{name}.py: it needs its own docstring"
    for function in (f"{name}_advantages", f"{name}_loss"):
        assert hasattr(references, function), f"tests/references.py: add {function}, as plain loops"
    methods = (ROOT / "docs" / "methods.md").read_text()
    assert f"\n| [`{name}`](#{name}) |" in methods, f"docs/methods.md: add a row | [`{name}`](#{name}) | ..."
    command = rf"\n### {name}\n\n.*`make diff A=\w+ B={name}`"
    assert re.search(command, methods), f"docs/methods.md: add a section ### {name} with its `make diff` line"


@pytest.mark.parametrize("column, function", {1: "compute_advantages", 2: "policy_loss"}.items())
def test_scripts_of_one_half_in_docs_methods_have_the_same_code(column, function):
    """And scripts of different halves different code, docstrings and comments aside."""
    page = (ROOT / "docs" / "methods.md").read_text()
    rows = re.findall(r"^\| \[`(\w+)`\]\(#\w+\) \| `?(\w+)`? \| `?(\w+)`? \|", page, re.MULTILINE)
    assert sorted(row[0] for row in rows) == POLICY_SCRIPTS
    halves = {(row[column], tables.code_of(row[0], function)) for row in rows}
    assert len(halves) == len({half for half, _ in halves}) == len({code for _, code in halves})


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_has_its_parents_estimator(name):
    """The block is identical, or differs by the number of lines in ESTIMATOR_LINES."""
    blocks = [sync.OWN.findall(SCRIPTS[script])[1].splitlines() for script in (name, VARIANTS[name])]
    changed = [line for line in difflib.ndiff(*blocks) if line[0] in "+-"]
    assert len(changed) == sum(sync.ESTIMATOR_LINES.get(feature, 0) for feature in sync.features_of(name))


def test_every_planted_bug_still_applies():
    for bug in BUGS.values():
        assert (ROOT / "tests" / bug.tests.split()[0]).exists(), f"there is no {bug.tests}"
        source = bug.plant(bug.path().read_text())
        if bug.tests not in ("test_estimators.py", "test_patches.py"):  # which run them
            ast.parse(source)
    references = (ROOT / "tests" / "references.py").read_text()
    assert all(bug.plant_in_references(references) for bug in IN_VECTORS)
