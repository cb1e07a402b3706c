"""The docs: commands parse, links lead somewhere, the recipe for own data runs."""

import dataclasses
import importlib
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import sync
import tyro
from conftest import ROOT, launch, read_jsonl
from zoo import make_model, make_tokenizer, save

SCRIPTS = list(sync.paths().values())
TOOLS = sorted([*ROOT.glob("data/*.py"), *ROOT.glob("experiments/*.py"), *ROOT.glob("tools/*.py")])
MODULES = [*SCRIPTS, *TOOLS]
FOLDERS = ".", "docs", "docs/scripts", "toy", "experiments", "conformance"
PAGES = [path for name in FOLDERS for path in sorted(ROOT.glob(f"{name}/*.md"))]

each_page = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def text_of(path: Path) -> str:
    """A page, or the docstring of a module with its backslashes as they are read there."""
    text = path.read_text()
    return text if path.suffix == ".md" else re.search(r'"""(.*?)"""', text, re.DOTALL)[1]


def commands_in(text: str) -> list[list[str]]:
    """The words of each command that starts a script, in indented blocks, fences and backticks."""
    text = re.sub(r" *\\\n +", " ", text)
    start = r"(?:\w+=\S+ )*(?:python|torchrun|uv run) "
    lines = re.findall(rf"^(?: {{4}})?({start}.*)", text, re.MULTILINE)
    inline = [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]
    lines += [code for code in inline if re.match(start, code)]
    # An explanation or a file for the output may follow.
    lines = [re.split(r" {2,}| > ", line)[0].removesuffix(" ...") for line in lines]
    return [shlex.split(line) for line in lines if ".py" in line]


COMMANDS = [(path, words) for path in (*PAGES, *MODULES) for words in commands_in(text_of(path))]


@pytest.mark.parametrize("path, words", COMMANDS, ids=[f"{p.name}: {' '.join(w)}"[:90] for p, w in COMMANDS])
def test_a_command_parses(path, words, monkeypatch):
    """Its script takes its flags, the numbers fit the ranks, and the files of this repository exist."""
    has_threads = any(word.startswith("OMP_NUM_THREADS=") for word in words)
    assert "torchrun" not in words or has_threads  # else it prints a warning
    name = next(word for word in words if word.endswith(".py"))
    script, flags = ROOT / name, words[words.index(name) + 1 :]
    assert script.exists() or name in ("my_data.py", "runs/mine.py")  # made by the reader
    module = importlib.import_module(script.stem) if script in MODULES else None
    if not hasattr(module, "Args"):
        return
    args = tyro.cli(module.Args, args=flags, use_underscores=True)
    if script not in SCRIPTS:
        return
    ranks = 1
    for option in ("--nnodes", "--nproc-per-node"):
        ranks *= int(words[words.index(option) + 1]) if option in words else 1
    monkeypatch.setattr(module, "WORLD_SIZE", ranks)
    module.check_args(args)
    for flag in ("model", "dataset", "eval_dataset", "reward", "eval_reward"):
        file, _, function = (getattr(args, flag, None) or "").partition(":")
        assert not file.startswith("toy/") or (ROOT / file).exists()
        if file.startswith("data/") and function:
            assert hasattr(importlib.import_module(Path(file).stem), function)


def anchors(page: Path) -> list[str]:
    """Those that GitHub gives to the headings."""
    headings = re.findall(r"^#+ (.+)", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@each_page
def test_links_lead_somewhere_on_github_too(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        page = (path.parent / file).resolve() if file else path
        assert page.exists() and not page.is_relative_to(ROOT / "site"), target
        assert not anchor or anchor in anchors(page), target


@each_page
def test_flags_and_make_targets_of_a_page_exist(path):
    known = {"help", "check", "group"}
    known |= {"max-restarts", "nproc-per-node", "nnodes", "rdzv-backend", "rdzv-endpoint", "rdzv-id"}
    known |= {"algo", "actor", "critic"}  # of OpenRLHF
    known |= {"lr_schedule"}  # gone: CHANGELOG.md
    for module in MODULES:
        if "\nclass Args" in module.read_text():
            known |= {field.name for field in dataclasses.fields(importlib.import_module(module.stem).Args)}
    parts = re.findall(r"(?<!`)`([^`]+)`(?!`)|^ {4,}(.+)", path.read_text(), re.MULTILINE)
    code = " ".join(inline or block for inline, block in parts)
    assert {flag.removeprefix("no_") for flag in re.findall(r"(?<![\w-])--(\w[\w-]*)", code)} <= known
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"\bmake ([\w-]+)", code)) <= set(targets)


def test_the_recipe_for_own_data_runs_as_written(tmp_path):
    """With 2 iterations instead of 4, and a tiny model with a chat template. The reward is README's, too."""
    page, readme = ((ROOT / name).read_text() for name in ("docs/recipes.md", "README.md"))
    section = re.search(r"^## Your own data and.*?\n(?=## )", page, re.DOTALL | re.MULTILINE)[0]
    for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        name = re.match(r"# (\S+\.py)\n", code)[1]
        (tmp_path / name).write_text(code)
    reward = re.search(r"^ {4}import re\n.*?\n(?=\w)", readme, re.DOTALL | re.MULTILINE)[0]
    assert reward.split() == (tmp_path / "my_reward.py").read_text().split()[2:]  # without its name
    save(tmp_path / "data" / "smollm2", make_model("llama"), make_tokenizer(chat=True))
    shutil.copy(ROOT / "grpo.py", tmp_path)
    for text in (section, readme):
        (check,) = re.findall(r"^ {4}python -c (.*)", text, re.MULTILINE)
        assert launch("-c", *shlex.split(check), cwd=tmp_path).stdout == "[1.0, 0.0]\n"
    _, make_data, evaluate, train = commands_in(section)[:4]
    train[train.index("--num_iterations") + 1] = "2"
    _, *said = [launch(*words[1:], cwd=tmp_path) for words in (make_data, evaluate, train)]
    expected = re.search(r"```\n(dataset: .+)\n", section)[1]
    assert all(expected in result.stdout and result.stderr == "" for result in said)
    first, *_, last = read_jsonl(tmp_path / "runs" / "mine" / "metrics.jsonl")
    assert first.keys() == {"iteration", "eval/score/plain", "eval/score/carry"} <= last.keys()


def test_the_patches_of_experiments_apply():
    subprocess.run(["git", "apply", "--check", *ROOT.glob("experiments/patches/*")], cwd=ROOT, check=True)
