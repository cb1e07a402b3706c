"""The documentation: its commands parse, its links lead somewhere, and the recipe for one's own data runs."""

import ast
import dataclasses
import importlib
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import real
import tyro
from conftest import ROOT, read_jsonl

sys.path.insert(0, str(ROOT / "data"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "toy/README.md", *sorted(ROOT.glob("docs/**/*.md"))]
SCRIPTS = sorted(ROOT.glob("*.py"))
MODULES = [
    *SCRIPTS,
    *(path for folder in ("data", "benchmark", "tools") for path in sorted(ROOT.glob(f"{folder}/*.py"))),
]
SECTIONS = ["The idea", "Equations", "Implementation details", "Beside its sibling"]
SECTIONS += ["Healthy, and three ways it is not", "The toy", "When to use it", "Elsewhere"]


def text_of(path: Path) -> str:
    """A page, or the docstring of a module with its backslashes as they are read there."""
    text = path.read_text()
    return text if path.suffix == ".md" else re.search(r'"""(.*?)"""', text, re.DOTALL)[1]


def commands_in(text: str) -> list[list[str]]:
    """The words of each command that starts a script, in indented blocks, fences and backticks."""
    text = re.sub(r" *\\\n +", " ", text)
    lines = re.findall(r"^(?: {4})?((?:\w+=\S+ )?(?:python|torchrun|uv run) .*)", text, re.MULTILINE)
    inline = [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]
    lines += [code for code in inline if re.match(r"(\w+=\S+ )?(python|torchrun|uv run) ", code)]
    lines = [re.split(r" {2,}", line)[0].removesuffix(" ...") for line in lines]  # what it does, behind it
    return [shlex.split(line) for line in lines if ".py" in line]


COMMANDS = [(path, words) for path in (*PAGES, *MODULES) for words in commands_in(text_of(path))]

MADE = {words[-1].removeprefix("data/") for _, words in COMMANDS if "--folder" in words}  # the folders under data/
MADE |= {words[words.index("--task") + 1] for _, words in COMMANDS if "--task" in words}
MADE |= {"smollm2", "gsm8k", "reversal"}


def flags_of(module) -> set[str]:
    return {field.name for field in dataclasses.fields(module.Args)} if hasattr(module, "Args") else set()


@pytest.mark.parametrize("path, words", COMMANDS, ids=[f"{p.name}: {' '.join(w)}"[:90] for p, w in COMMANDS])
def test_a_command_parses(path, words, monkeypatch):
    """Its script is there and takes its flags, the numbers fit the ranks, and what it reads is there."""
    assert "torchrun" not in words or words[0].startswith("OMP_NUM_THREADS=")  # else it prints a warning
    name = next(word for word in words if word.endswith(".py"))
    script, flags = ROOT / name, words[words.index(name) + 1 :]
    assert script.exists() or name == "my_data.py"  # the recipe's own
    module = importlib.import_module(script.stem) if script in MODULES else None
    if not hasattr(module, "Args"):
        return
    args = tyro.cli(module.Args, args=flags, use_underscores=True)
    if script.parent != ROOT:
        return
    ranks = 1
    for option in ("--nnodes", "--nproc-per-node"):
        ranks *= int(words[words.index(option) + 1]) if option in words else 1
    monkeypatch.setattr(module, "WORLD_SIZE", ranks)
    getattr(module, "check_args", lambda args: None)(args)
    for flag in ("model", "dataset", "eval_dataset", "reward", "eval_reward"):
        file, _, function = (getattr(args, flag, None) or "").partition(":")
        assert not file.startswith("toy/") or (ROOT / file).exists()
        if file.startswith("data/") and function:
            assert hasattr(importlib.import_module(Path(file).stem), function)
        elif file.startswith("data/"):
            assert file.split("/")[1] in MADE


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_docstring_has_a_command_for_the_toy_and_a_complete_one(path):
    commands = commands_in(text_of(path))
    assert ["python", path.name] in commands
    [real] = [words for words in commands if "torchrun" in words]
    needed = {path.name, "--model", "--dataset", "--learning_rate", "--dtype", "--run_dir"}
    assert needed <= set(real)


def slug(heading: str) -> str:  # the anchor that GitHub gives it
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        if file == "../compare.html":  # of the site
            assert {*anchor.split("..")} < {script.stem for script in SCRIPTS} and path.stem in anchor.split("..")
            continue
        page = (path.parent / file).resolve() if file else path
        assert page.exists(), target
        headings = re.findall(r"^#+ (.+)", page.read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in map(slug, headings), target


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_flags_and_targets_that_a_page_names_exist(path):
    names = [module.stem for module in MODULES if "class Args" in module.read_text()]
    known = set().union(*(flags_of(importlib.import_module(name)) for name in names))
    known |= set("help max-restarts nproc-per-node nnodes rdzv-backend rdzv-endpoint rdzv-id check".split())
    known |= {"algo", "actor", "critic"}  # of OpenRLHF
    parts = re.findall(r"(?<!`)`([^`]+)`(?!`)|^ {4,}(.+)", path.read_text(), re.MULTILINE)
    code = " ".join(inline or block for inline, block in parts)
    flags = {flag.removeprefix("no_") for flag in re.findall(r"(?<![\w-])--(\w[\w-]*)", code)}
    assert flags <= known
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"\bmake (\w+)", code)) <= set(targets)


def test_the_recipe_for_own_data_runs_as_written(tmp_path):
    """Files and commands are those of the page, with 2 iterations instead of 40."""
    section = re.search(r"## Your own data and.*?\n(?=## )", (ROOT / "docs" / "recipes.md").read_text(), re.DOTALL)[0]
    for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        name = re.match(r"# (\S+\.py)\n", code)[1]
        (tmp_path / name).write_text(code)
    shutil.copy(ROOT / "grpo.py", tmp_path)
    (tmp_path / "toy").symlink_to(ROOT / "toy")
    make_data, train = commands_in(section)[:2]
    train[train.index("--num_iterations") + 1] = "2"

    def run(words):
        assert words[0] == "python"
        result = subprocess.run([sys.executable, *words[1:]], cwd=tmp_path, capture_output=True, text=True)
        assert (result.returncode, result.stderr) == (0, "")
        return result.stdout

    run(make_data)
    row = re.search(r"A row is then `(.+?)`", section)[1]
    assert json.loads(row) in read_jsonl(tmp_path / "my_prompts.jsonl")
    output = run(train)
    shown = re.search(r"```\n(dataset: .+)\n", section)[1]
    assert shown in output.splitlines()
    first, *_, last = read_jsonl(tmp_path / "runs" / "mine" / "metrics.jsonl")
    assert first == pytest.approx({"iteration": 0, "eval/score/plain": -0.04, "eval/score/carry": -0.04})
    assert last.keys() == first.keys() and "is finished after 2 iterations" in run(train)

    score = runpy.run_path(tmp_path / "my_reward.py")["score"]
    right = {row["prompt"]: row["right"] for row in read_jsonl(tmp_path / "my_heldout.jsonl")}
    samples = re.findall(r"^ +(-?\d\.\d\d)  '(.+)' -> '(.+) <eos>'$", section, re.MULTILINE)
    for shown, prompt, text in samples:
        assert score([prompt], [text], [False], [right[prompt]]) == [pytest.approx(float(shown))]
    assert len(samples) == 2


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_every_metric_is_explained(path):
    """What a script puts into its metrics, by its source, stands in docs/metrics.md."""
    source, table = path.read_text(), (ROOT / "docs" / "metrics.md").read_text()
    found = set(re.findall(r'\b(?:metrics|stats)\["([\w/]+)"\]', source))
    blocks = re.findall(r"(?:metrics|stats) \|?= \{(.*?)\n? *\}\n|return loss, \{(.*?)\}", source, re.DOTALL)
    for block in blocks:
        found |= set(re.findall(r'"([\w/]+)":', "".join(block)))
    assert {"grad_norm", "learning_rate"} < found
    assert found <= set(re.findall(r"`([\w/]+)`", table)), path.name


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_every_script_has_a_page(path):
    """With all sections of the template, a picture if its curves are measured, and a link to it in README's table."""
    page = ROOT / "docs" / "scripts" / f"{path.stem}.md"
    [row] = [line for line in (ROOT / "README.md").read_text().splitlines() if f"[`{path.name}`]({path.name})" in line]
    assert f"(docs/scripts/{page.name})" in row
    text = page.read_text()
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == SECTIONS
    sections = dict(zip(SECTIONS, re.split(r"^## .+$", text, flags=re.MULTILINE)[1:]))
    blocks = re.findall(r"^\$\$\n(.+?)\n\$\$\n", sections["Equations"], re.MULTILINE | re.DOTALL)
    assert len(blocks) > 0 and text.count("$$") == 2 * len(blocks)
    [(a, b)] = re.findall(r"\(\.\./compare\.html#(\w+)\.\.(\w+)\)", sections["Beside its sibling"])
    assert a == path.stem and f"make diff A={a} B={b}" in " ".join(text.split())
    assert len(re.findall(r"^- \*\*", sections["Healthy, and three ways it is not"], re.MULTILINE)) == 3
    assert len(re.findall(r"^- \*\*(OpenRLHF|verl|TRL)\*\*", sections["Elsewhere"], re.MULTILINE)) == 3
    results = json.loads((ROOT / "benchmark" / "results" / "toy_seeds.json").read_text())
    has_curve, picture = path.stem in {run["script"] for run in results["runs"]}, page.with_suffix(".png")
    assert (f"]({picture.name})" in sections["The toy"]) == picture.exists() == has_curve
    assert not has_curve or picture.stat().st_size < 40_000


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_the_functions_that_a_page_names_are_in_its_script(path):
    text = (ROOT / "docs" / "scripts" / f"{path.stem}.md").read_text()
    named = re.findall(r"`(\w+)\.py:(\w+)`", text)
    functions = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
    assert {script for script, _ in named} == {path.stem}
    assert len(named) > 2 and {function for _, function in named} <= functions


def test_make_diff_names_the_scripts():
    """As the last line, and with an exit code; two that exist are shown."""
    wrong = subprocess.run(["make", "diff", "A=gpro", "B=rloo"], cwd=ROOT, capture_output=True, text=True)
    last = (wrong.stdout + wrong.stderr).splitlines()[-1]
    assert wrong.returncode and all(path.stem in last for path in SCRIPTS)
    right = subprocess.run(["make", "diff", "A=grpo", "B=rloo.py"], cwd=ROOT, capture_output=True, text=True)
    assert right.returncode == 0 and "+++ b/rloo.py" in right.stdout


def test_the_recipe_has_the_command_of_make_real():
    section = (ROOT / "docs" / "recipes.md").read_text().partition("## A real model on two cores")[2]
    shown = next(words for words in commands_in(section) if words[1] == "rloo.py")
    made = real.command_of("runs/real", "rloo", 1)
    pairs = lambda words: set(zip(words[2::2], words[3::2])) - {("--seed", "1")}  # noqa: E731
    assert shown[:2] == made[:2] and pairs(shown) == pairs(made)
