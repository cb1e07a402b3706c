"""The docs: commands parse, links lead somewhere, the recipe for own data runs."""

import importlib
import math
import re
import shlex
import shutil
from pathlib import Path

import pytest
import sync
import tyro
from conftest import ROOT, launch, read_jsonl
from zoo import make_model, make_tokenizer, save

SCRIPTS = [*sync.paths().values()]
TOOLS = [path for folder in ("data", "experiments", "tools") for path in ROOT.glob(f"{folder}/*.py")]
TOOLS.append(ROOT / "tests" / "planted.py")
FOLDERS = ".", "docs", "methods", "variants", "toy", "experiments", "conformance", "patches"
PAGES = [path for folder in FOLDERS for path in ROOT.glob(f"{folder}/*.md")]


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


COMMANDS = [(path, words) for path in (*PAGES, *SCRIPTS, *TOOLS) for words in commands_in(text_of(path))]


@pytest.mark.parametrize("path, words", COMMANDS, ids=[f"{p.name}: {' '.join(w)}"[:90] for p, w in COMMANDS])
def test_a_command_parses(path, words, monkeypatch, tmp_path):
    """Its script takes its flags, the numbers fit the ranks, and the files of this repository exist."""
    assert all((ROOT / word.partition(":")[0]).exists() for word in words if word.startswith("toy/"))
    for file, function in re.findall(r"(data/\w+\.py):(\w+)", " ".join(words)):
        assert f"\ndef {function}(" in (ROOT / file).read_text()
    name = next(word for word in words if word.endswith(".py"))
    script = ROOT / name
    by_the_reader = ("my_data.py", "methods/mine.py", "conformance/mine.py")
    made = name.startswith("runs/") or name in by_the_reader
    if name.startswith("variants/") and not script.exists():  # by `make variant`
        parent, *features = script.stem.split("_")
        script = tmp_path / script.name
        script.write_text(sync.combine(parent, features))
        monkeypatch.syspath_prepend(tmp_path)
    assert script.exists() or made
    if script in (*SCRIPTS, tmp_path / script.name):
        module = importlib.import_module(script.stem)
        ranks = re.findall(r"--(?:nnodes|nproc-per-node) (\d+)", " ".join(words))
        count = math.prod(map(int, ranks))
        monkeypatch.setattr(module, "WORLD_SIZE", count)
        if hasattr(module, "SAMPLERS"):  # some of the ranks sample, and the others train
            samplers = int(dict(x.split("=") for x in words if "=" in x).get("SAMPLER_RANKS", 1))
            monkeypatch.setattr(module, "TRAINERS", range(count - samplers))
            monkeypatch.setattr(module, "SAMPLERS", range(count - samplers, count))
        module.check_args(tyro.cli(module.Args, args=words[words.index(name) + 1 :], use_underscores=True))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_targets_of_make_exist(path):
    text = path.read_text()
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        anchor = "" if file.endswith(".html") else anchor  # the settings of web/train.html
        page = (path.parent / file).resolve() if file else path
        assert page.exists(), target
        headings = re.findall(r"^#+ (.+)", page.read_text(), re.MULTILINE) if anchor else []
        anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert not anchor or anchor in anchors, target
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {*re.findall(r"(?:`|^ {4})make ([\w-]+)", text, re.MULTILINE)} <= {*targets}


def test_the_recipe_for_own_data_runs_as_written(tmp_path):
    page = (ROOT / "docs" / "recipes.md").read_text()
    section = re.search(r"^## Your own data and.*?\n(?=## )", page, re.DOTALL | re.MULTILINE)[0]
    for name, code in re.findall(r"```python\n# (\S+\.py)\n(.*?)```", section, re.DOTALL):
        (tmp_path / name).write_text(code)
    save(tmp_path / "data" / "smollm2", make_model("llama"), make_tokenizer(chat=True))
    shutil.copy(ROOT / "grpo.py", tmp_path)
    (check,) = re.findall(r"^ {4}python -c (.*)", section, re.MULTILINE)
    assert launch("-c", *shlex.split(check), cwd=tmp_path).stdout in page.replace("`", "\n")
    _, make_data, evaluate = commands_in(section)[:3]
    launch(*make_data[1:], cwd=tmp_path)
    launch(*evaluate[1:], "--num_iterations", 1, cwd=tmp_path)  # the last of two counts
    first, last = read_jsonl(tmp_path / "runs" / "before" / "metrics.jsonl")
    assert first.keys() == {"iteration", "eval/score/plain", "eval/score/carry"} <= last.keys()
