"""Policy scripts differ in docstring and estimator block, and in nothing else, because sync.py keeps them alike."""

import ast
import difflib
import importlib
import random
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

VARIANTS = {name: sync.variants()[name] for name in sync.features().values()}  # without those that were made
PATHS = {name: path for name, path in sync.paths().items() if name in VARIANTS or name not in sync.variants()}
SCRIPTS = {name: path.read_text() for name, path in PATHS.items()}


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
def test_the_skeletons_are_the_same(name):
    """A script in INSERTS may have a few more lines of code, and may declare a flag differently."""
    skeletons = [sync.skeleton(SCRIPTS[script]) for script in ("grpo", name)]
    assert sync.inserting(name) or skeletons[0] == skeletons[1]
    lines = list(difflib.ndiff(*(skeleton.splitlines() for skeleton in skeletons)))
    code = [x for x in lines if x[2:].strip()[:1] not in ("", "#")]
    gone, new = ([x[2:] for x in code if x[0] == sign] for sign in "-+")
    flags = [re.match(r"    \w+: ", line) for line in gone]
    assert all(flags) and all(sum(x.startswith(flag[0]) for x in new) == 1 for flag in flags)
    assert len(new) - len(gone) <= sync.INSERTS.get(sync.inserting(name), 0)


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_every_function_is_used(path):
    """An edit of the skeleton can leave a function behind that nothing calls."""
    source = path.read_text()
    assert [x for x in sync.functions(source) if len(re.findall(rf"\b{x}\b", source)) < 2] == []


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_a_script_stands_alone(path):
    """It imports nothing of this repository, pins what requirements.txt pins, and has at most 110 columns."""
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
    for path in (*PATHS.values(), ROOT / "requirements.txt", ROOT / "pyproject.toml"):
        shutil.copy(path, folder / path.relative_to(ROOT))
    shutil.copytree(ROOT / "patches", folder / "patches")
    return folder


def commit(folder: Path) -> None:
    for words in ("init -q", "add .", "-c user.name=a -c user.email=a commit -qm a"):
        subprocess.run(["git", *words.split()], cwd=folder, check=True)


@pytest.fixture
def folder(tmp_path):
    copy_scripts(tmp_path)
    commit(tmp_path)
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def read(folder: Path) -> dict[str, str]:
    return {name: path.read_text() for name, path in sync.paths(folder).items()}


PLACE = "def choose_rows("  # a line of the skeleton that every script has


def test_sync_carries_an_edit_into_every_script(folder):
    """Once, and nothing else. A variant gets its parent's estimator, and a script of `make variant` is made again."""
    assert sync.sync(folder) == 0
    assert sync.variant("rloo", "lora", folder) == 0
    assert all(sync.paths(folder)[name].read_text() == SCRIPTS[name] for name in SCRIPTS)
    grpo = sync.functions(SCRIPTS["grpo"])
    shared = [f for f in grpo if all(sync.functions(text).get(f) == grpo[f] for text in SCRIPTS.values())]
    changes = {f"\n\n\n{PLACE}": f"\n\n\nEDIT = 1\n\n\n{PLACE}"}
    changes[grpo[shared[0]]] = f"{grpo[shared[0]]}  # edit"
    of_block = {grpo["policy_loss"]: f"{grpo['policy_loss']}  # edit"}
    requirements = (ROOT / "requirements.txt").read_text()
    pins = re.findall(r"^\w+==[\d.]+", requirements, re.MULTILINE)
    of_variants = re.search(r'^variants = \["(.*)"\]', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    pins = {pin: f"{pin[:-1]}{9 - int(pin[-1])}" for pin in [*pins, of_variants]}
    for old, new in (changes | of_block).items():
        edit(folder / "grpo.py", old, new)
    for old, new in pins.items():
        if old == of_variants:
            edit(folder / "pyproject.toml", f'variants = ["{old}"]', f'variants = ["{new}"]')
        else:
            edit(folder / "requirements.txt", old, new)
    for _ in range(2):
        assert sync.sync(folder) == 0
        for name, text in SCRIPTS.items():
            own = {} if name in sync.STAGES else {f"\n\n\n{PLACE}": changes[f"\n\n\n{PLACE}"]}
            own |= of_block if name == "grpo" or VARIANTS.get(name) == "grpo" else {}
            for old, new in (changes | own if own else {grpo[shared[0]]: changes[grpo[shared[0]]]}).items():
                text = text.replace(old, new)
            for old, new in pins.items():
                text = text.replace(f'"{old}"', f'"{new}"')
            assert sync.paths(folder)[name].read_text() == text
        assert sync.paths(folder)["rloo_lora"].read_text() == sync.combine("rloo", ["lora"], folder)
    groups, old = ((x / "pyproject.toml").read_text() for x in (folder, ROOT))
    for pin in pins:  # a group with another version keeps it
        assert f'"{pin}"' not in groups and groups.count(f'"{pins[pin]}"') == old.count(f'"{pin}"')


def test_sync_keeps_patches_up_to_date(folder, capsys):
    """So that git applies them, too. A patch that has lost its place is named."""
    path = folder / "patches" / "dual_clip.patch"
    neighbor, old = (re.findall(rf"^{x}(    .+)$", path.read_text(), re.MULTILINE)[-1] for x in (" ", "-"))
    edit(folder / "grpo.py", f"\n{neighbor}\n", f"\n{neighbor}  # edit\n")
    edit(folder / "grpo.py", "\nimport copy\n", "\nimport bisect\nimport copy\n")
    assert sync.sync(folder) == 0
    assert "patches/dual_clip.patch: updated\n" in capsys.readouterr().out
    assert path.read_text().count("# edit") == 1
    for x in folder.glob("patches/*.patch"):
        subprocess.run(["git", "apply", "--check", x], cwd=folder, check=True)
    edit(folder / "grpo.py", f"\n{old}\n", f"\n{old}  # edit\n")
    assert sync.sync(folder) == 1
    assert "dual_clip.patch no longer fits grpo.py" in capsys.readouterr().out


def test_sync_names_a_feature_of_a_stage_that_no_longer_fits(folder, capsys):
    shutil.copy(ROOT / "variants" / "sft_lora.patch", folder / "variants")
    assert sync.sync(folder) == 0
    line = "policy, tokenizer = load_model(args, args.model, transformers.AutoModelForCausalLM)\n"
    edit(folder / "sft.py", line, line.replace("policy, ", "policy , "))
    assert sync.sync(folder) == 1
    assert "Change variants/sft_lora.patch by hand." in capsys.readouterr().out


@pytest.mark.parametrize("is_committed", [False, True])
def test_sync_follows_one_edit_after_the_other(is_committed, folder):
    """Whether or not they are committed in between, and also when the edit is undone. So does a variant's block."""
    before, parent = read(folder), "reinforce_pp_baseline"
    for words in (["first"], ["second"], ["second", "third"], []):
        for name, place in {"grpo": PLACE, parent: "def policy_loss("}.items():
            lines = "".join(f"# {word}\n" for word in words)
            path = sync.paths(folder)[name]
            path.write_text(re.sub(rf"(?:# \w+\n)*{re.escape(place)}", lines + place, path.read_text()))
        if is_committed:
            commit(folder)
        assert sync.sync(folder) == 0
        for name, text in read(folder).items():
            expected = before[name] if name in sync.STAGES else before[name].replace(PLACE, lines + PLACE)
            if parent in (name, VARIANTS.get(name)):
                expected = expected.replace("def policy_loss(", f"{lines}def policy_loss(")
            assert text == expected, name


def test_sync_writes_what_merges_and_names_the_rest(folder, capsys):
    """An edit of one script alone is not overwritten, and a refused edit is accepted once it is made by hand."""
    lines = {name: sync.skeleton(SCRIPTS[name]).splitlines() for name in (*POLICY_SCRIPTS, *VARIANTS)}
    lacking = [x for x in lines["grpo"] if len(x) > 30 and [x in y for y in lines.values()].count(False) == 1]
    [line] = [x for x in lacking if x not in lines["grpo_vllm"]][:1]
    edit(folder / "grpo.py", f"\n{line}\n", f"\n{line}  # edit\n")
    edit(folder / "grpo.py", PLACE, f"# edit\n{PLACE}")
    mine = {"rloo": PLACE, "ppo": "import torch\n", "reinforce_pp_tools": "def policy_loss("}
    for name, place in mine.items():
        new = f"\n# mine\n{place}" if name != "ppo" else "\nimport torch as torch\n"
        edit(sync.paths(folder)[name], f"\n{place}", new)
    before = read(folder)
    for _ in range(2):  # a second call changes nothing
        assert sync.sync(folder) == 1
        after, said = read(folder), capsys.readouterr().out
        assert {*re.findall(r"(\w+)\.py: not written", said)} == {"grpo_vllm", *mine}
        assert f"    -{line}\n    +{line}  # edit\n" in said and "    +# mine\n" in said
        for name in SCRIPTS:
            is_written = name not in ("grpo", "grpo_vllm", *mine, *sync.STAGES)
            assert (after[name] != before[name]) == is_written
    command = ["git", "checkout", "-q", *(sync.paths(folder)[name] for name in mine)]
    subprocess.run(command, cwd=folder, check=True)
    behind = lines["grpo"][lines["grpo"].index(line) + 1 :]
    [place] = [x for x in behind if lines["grpo"].count(x) == lines["grpo_vllm"].count(x) == 1][:1]
    edit(sync.paths(folder)["grpo_vllm"], f"\n{place}\n", f"\n{line}  # edit, as vLLM needs it\n{place}\n")
    assert sync.sync(folder) == 0
    counts = {name: text.count(f"# edit\n{PLACE}") for name, text in read(folder).items()}
    assert all(count == (name not in sync.STAGES) for name, count in counts.items())


def test_an_edit_of_one_script_alone_is_an_error(folder):
    edit(folder / "rloo.py", f"\n{PLACE}", f"\n# mine\n{PLACE}")
    assert sync.sync(folder) == 1


def test_an_edit_of_any_line_is_carried_or_made_by_hand():
    """It changes that line and no other, and only once. It is refused only if the script has no such line."""
    scripts = {name: sync.skeleton(SCRIPTS[name]) for name in (*POLICY_SCRIPTS, *VARIANTS)}
    lines, carried = scripts["grpo"].splitlines(True), 0
    numbers = [i for i, line in enumerate(lines) if line.strip() not in ("", "# own")]
    for i in random.Random(1).sample(numbers, 30):
        edited = f"{lines[i][:-1]}  # edit\n"
        after = "".join([*lines[:i], edited, *lines[i + 1 :]])
        for name, text in scripts.items():
            result, lost = sync.carry(text, scripts["grpo"], after, text)
            count = text.splitlines(True).count(lines[i])
            if lost:
                assert count < lines.count(lines[i]), (name, lines[i])
            else:
                pairs = zip(text.splitlines(True), result.splitlines(True), strict=True)
                assert [x for x in pairs if x[0] != x[1]] == [(lines[i], edited)]
                assert sync.carry(result, scripts["grpo"], after, text) == (result, [])
                carried += 1
    assert carried > 29 * len(scripts) * 0.9


@pytest.mark.parametrize(
    "mine, before, after, expected",
    [
        ("a own x own b x c", "a x b x c", "a X b x c", "a own X own b x c"),  # one x between a and b
        ("a own x own c", "a x b x c", "a X b x c", None),  # x may be the first or the second
        ("a b c own x d", "a x b c d", "a X b c d", "a b c own X d"),  # moved
        ("a b c own X d", "a x b c d", "a X b c d", "a b c own X d"),  # moved, and edited by hand
        ("a own b", "a x y b", "a b", None),  # own has replaced x and y
        ("a x b", "a x y b", "a b", "a b"),
        ("a own b", "a b", "a x b", "a x own b"),
        ("a own x b", "a b", "a x b", "a own x b"),  # edited by hand
        ("a x own y b", "a b", "a x y b", "a x own y b"),  # edited by hand, around an own line
        ("a own d", "a b c d", "a b x c d", None),
        ("a x y own b", "a x y b", "a z b", "a z own b"),
        ("a x own y b", "a x y b", "a z b", None),  # own has no place beside z
    ],
)
def test_an_edit_has_one_place(mine, before, after, expected):
    mine, before, after = (text.replace(" ", "\n") + "\n" for text in (mine, before, after))
    result, lost = sync.carry(mine, before, after, mine.replace("X", "x"))
    assert (None if lost else result.split()) == (expected and expected.split())


@pytest.mark.parametrize("pair", ["reinforce rloo", "grpo grpo_lora"])
def test_make_diff_has_all_lines_with_the_method_first(pair, capsys):
    """A heading counts the lines below it, without blank lines."""
    a, b = pair.split()
    assert sync.diff(a, b) == 0
    shown = capsys.readouterr().out
    command = ["git", "diff", "--no-index", PATHS[a], PATHS[b]]
    output = subprocess.run(command, capture_output=True, text=True).stdout
    ours, expected = (re.findall(r"^[+-].*", x, re.MULTILINE)[2:] for x in (shown, output))
    assert sorted(ours) == sorted(expected) != []
    parts = re.split(r"\n(?=The )", shown)[1:]
    titles = ("The method: ", "The rest of the script: ", "The docstring: ")
    assert all(part.startswith(title) for part, title in zip(parts, titles, strict=True))
    lines = [re.findall(r"^[+-] *(\S.*)", part, re.MULTILINE) for part in parts]
    numbers = [sum(map(int, re.findall(r"\d+(?= lines? of| of)", part.splitlines()[0]))) for part in parts]
    assert sum(numbers) == sum(map(len, lines))


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
def test_an_algorithm_has_its_three_files(name):
    """The script, plain loops in references.py, a section and rows in docs/methods.md and docs/learn.md."""
    title = SCRIPTS[name].partition('"""')[2].partition("\n")[0]
    assert name == "grpo" or title not in SCRIPTS["grpo"], f"{name}.py: it needs its own docstring"
    assert f"    python {PATHS[name].relative_to(ROOT)}\n" in SCRIPTS[name], (
        f"{name}.py: it needs its launch line"
    )
    for function in (f"{name}_advantages", f"{name}_loss"):
        assert hasattr(references, function), f"tests/references.py: add {function}, as plain loops"
    methods = (ROOT / "docs" / "methods.md").read_text()
    for heading in ("Advantages", "Losses", "What a method costs"):
        section = methods.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        rows = " ".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE))
        assert f"`{name}`" in rows, f"docs/methods.md: no row of {heading} names {name}"
    command = rf"\n### {name}\n\n.*`make diff A=\w+ B={name}`"
    assert re.search(command, methods), f"docs/methods.md: add a section ### {name} with its `make diff` line"
    assert f"\n| [`{name}`](#{name}) |" in methods, "docs/methods.md: run make tables"
    learn = (ROOT / "docs" / "learn.md").read_text()
    row = re.search(rf"^\| \[`{name}`\]\(methods\.md#{name}\) \|.*", learn, re.MULTILINE)
    assert row, f"docs/learn.md: add a row for {name} to the table of methods"
    *_, k, other = (cell.strip() for cell in row[0].strip("|").split("|"))
    assert other in {*POLICY_SCRIPTS} - {name}
    assert k == str(importlib.import_module(name).Args.samples_per_prompt)


@pytest.mark.parametrize("column, function", {1: "compute_advantages", 2: "policy_loss"}.items())
def test_scripts_of_one_half_in_docs_methods_have_the_same_code(column, function):
    """Scripts with different halves have different code. Docstrings and comments do not count."""
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
        if bug.tests not in ("test_estimators.py", "test_patches.py"):  # these run the source
            ast.parse(source)
    references = (ROOT / "tests" / "references.py").read_text()
    assert all(bug.plant_in_references(references) for bug in IN_VECTORS)
