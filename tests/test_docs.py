"""The docs: commands parse, links have targets, the recipe for own data runs, and the exercises of learn.md."""

import importlib
import math
import re
import shlex
import shutil
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import sync
import torch
import tyro
from conftest import ROOT, SOURCES, launch, read_jsonl
from zoo import make_model, make_tokenizer, save

import reinforce_pp
import reinforce_pp_baseline

SCRIPTS = [*sync.paths().values()]
TOOLS = [path for folder in ("data", "experiments", "tools") for path in ROOT.glob(f"{folder}/*.py")]
TOOLS.append(ROOT / "tests" / "planted.py")
FOLDERS = ".", "docs", "methods", "variants", "toy", "experiments", "conformance", "patches"
PAGES = [path for folder in FOLDERS for path in ROOT.glob(f"{folder}/*.md")]


def text_of(path: Path) -> str:
    """The text of a page, or the docstring of a module with its backslashes as written."""
    text = path.read_text()
    return text if path.suffix == ".md" else re.search(r'"""(.*?)"""', text, re.DOTALL)[1]


def commands_in(text: str) -> list[list[str]]:
    """The words of each command that starts a script, in indented blocks, fences and backticks."""
    text = re.sub(r" *\\\n +", " ", text)
    start = r"(?:\w+=\S+ )*(?:python|torchrun|uv run) "
    lines = re.findall(rf"^(?: {{4}})?({start}.*)", text, re.MULTILINE)
    inline = [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]
    lines += [code for code in inline if re.match(start, code)]
    # An explanation or a file for the output may follow the command.
    lines = [re.split(r" {2,}| > ", line)[0].removesuffix(" ...") for line in lines]
    return [shlex.split(line) for line in lines if ".py" in line]


COMMANDS = [(path, words) for path in (*PAGES, *SCRIPTS, *TOOLS) for words in commands_in(text_of(path))]


@pytest.mark.parametrize("path, words", COMMANDS, ids=[f"{p.name}: {' '.join(w)}"[:90] for p, w in COMMANDS])
def test_a_command_parses(path, words, monkeypatch, tmp_path):
    """The script has these flags and accepts the numbers and ranks, and files of this repository exist."""
    assert all((ROOT / word.partition(":")[0]).exists() for word in words if word.startswith("toy/"))
    for file, function in re.findall(r"(data/\w+\.py):(\w+)", " ".join(words)):
        assert f"\ndef {function}(" in (ROOT / file).read_text()
    name = next(word for word in words if word.endswith(".py"))
    script = ROOT / name
    by_the_reader = ("my_data.py", "methods/mine.py", "conformance/mine.py")
    made = name.startswith("runs/") or name in by_the_reader
    if name.startswith("variants/") and not script.exists():  # `make variant` makes it
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
        anchor = "" if file.endswith(".html") else anchor  # settings of web/train.html
        page = (path.parent / file).resolve() if file else path
        assert page.exists(), target
        headings = re.findall(r"^#+ (.+)", page.read_text(), re.MULTILINE) if anchor else []
        anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert not anchor or anchor in anchors, target
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {*re.findall(r"(?:`|^ {4})make ([\w-]+)", text, re.MULTILINE)} <= {*targets}


def test_each_metric_that_the_page_describes_is_logged():
    """test_metrics.py checks that the page describes each metric that is logged."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    cells = re.findall(r"^\| (?:\d* \| )?(`.+?) \|", page, re.MULTILINE)
    names = {
        re.split(r"/<|/\d|@|`", name)[0]
        for cell in cells
        for name in re.findall(r"`([a-z_]+(?:/.*?)?)`", cell)
    }
    assert len(names) > 30
    assert not [name for name in names if not any(f'"{name}' in text for text in SOURCES.values())]


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
    launch(*evaluate[1:], "--num_iterations", 1, cwd=tmp_path)  # the last of two values is used
    first, last = read_jsonl(tmp_path / "runs" / "before" / "metrics.jsonl")
    assert first.keys() == {"iteration", "eval/score/plain", "eval/score/carry"} <= last.keys()


# docs/learn.md

LEARN = (ROOT / "docs" / "learn.md").read_text()
FRAME = re.search(r"```python\n(import torch.*?)```", LEARN, re.DOTALL)[1]
FOLD = r"<summary>Lesson (\d): .*?```python\n(.*?)```(.*?)</details>"
SOLUTIONS = re.findall(FOLD, LEARN, re.DOTALL)
TABLES = [(code, re.findall(r"^\| (.+) \| (.+) \|$", rest, re.MULTILINE)) for _, code, rest in SOLUTIONS]
MISTAKES = [(code, *row) for code, rows in TABLES for row in rows if row[0] != "instead"]


def name_of(line: str) -> str:
    """The name that a line of the frame assigns, or `report`, the call in its last line."""
    return re.match(r" *(?:(\w+) =|report)", line)[1] or "report"


def with_line(program: str, *lines: str) -> str:
    """The program with these lines instead of the line that assigns the same name as the last of them."""
    name = name_of(lines[-1])
    start = re.escape(lines[-1].split("(")[0] if name == "report" else f"{name} =")
    indent = re.search(rf"^( *){start}", program, re.MULTILINE)[1]
    text = "\n".join(indent + line for line in lines)
    return re.sub(rf"^ *{start}.*$", lambda match: text, program, count=1, flags=re.MULTILINE)


def solved(code: str) -> str:
    """The frame with the lines of a solution. Other lines go before the assignment that follows them."""
    program, waiting = FRAME, []
    for line in code.splitlines():
        waiting.append(line)
        if name_of(line) in ("r", "A", "loss", "report"):
            program, waiting = with_line(program, *waiting), []
    assert not waiting
    return program


def answers(program: str, capsys) -> set[str]:
    """What check.py prints about the cases, without the numbers."""
    exec(program, {})
    return {re.split(r"; |: ", line)[-1] for line in capsys.readouterr().out.splitlines()}


def test_the_frame_runs_as_printed_and_each_lesson_has_a_solution(capsys):
    assert answers(FRAME, capsys) == {"no baseline"}
    assert [lesson for lesson, _, _ in SOLUTIONS] == [*"2345678"] and LEARN.count("**Write it.**") == 7


@pytest.mark.parametrize("lesson, code, rest", SOLUTIONS, ids=[lesson for lesson, _, _ in SOLUTIONS])
def test_a_solution_passes(lesson, code, rest, capsys):
    # check.py knows the solution of lesson 5 only as a mistake.
    expected = "a mean per response in place of a sum" if lesson == "5" else "passed"
    assert answers(solved(code), capsys) == {expected}


@pytest.mark.parametrize("code, line, answer", MISTAKES, ids=[answer for _, _, answer in MISTAKES])
def test_a_mistake_is_named_as_printed(code, line, answer, capsys):
    program = with_line(solved(code), line.split("`")[1]) if line.startswith("`") else solved(code)
    found = answers(program, capsys)
    assert answer in found and found <= {answer, "passed"}


def test_the_steps_of_main_are_those_of_reinforce():
    rows = re.findall(r"^\| (\d) \| (`.*?`) \|", LEARN, re.MULTILINE)
    main = sync.functions(SOURCES["reinforce"])["main"]
    steps = re.split(r"^        # (\d)\. ", main, flags=re.MULTILINE)[1:]
    assert [number for number, _ in rows] == steps[::2]
    for (_, calls), code in zip(rows, steps[1::2]):
        for name in set(re.findall(r"`(\w+)`", calls)) - {"policy_loss"}:  # update calls it
            assert f"{name}(" in code


@pytest.mark.parametrize(
    "script, words",
    [(reinforce_pp, "the hard prompts count"), (reinforce_pp_baseline, "the hard prompt counts")],
)
def test_the_std_of_a_small_batch_bends_the_gradient(script, words):
    """The expected update of two prompts, over all outcomes of their groups, with the script's advantages."""
    k, rates, weights = 8, torch.tensor([0.01, 0.5], dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    chances = torch.distributions.Binomial(k, rates[:, None]).log_prob(torch.arange(k + 1.0)).exp()
    mask = torch.ones(2 * k, 1, dtype=torch.bool)
    for rights in product(range(k + 1), repeat=2):
        scores = torch.stack([(torch.arange(k) < right).double() for right in rights])
        rollout = {"scores": scores.flatten(), "response_mask": mask, "kl": torch.zeros(2 * k, 1)}
        args = SimpleNamespace(samples_per_prompt=k, kl_coef=0.0)
        A = script.compute_advantages(args, rollout)["advantages"].view(2, k)
        # The gradient of log pi is on average grad p / p for a right and -grad p / (1 - p) for a wrong response.
        updates = (A * torch.where(scores == 1, 1 / rates[:, None], -1 / (1 - rates[:, None]))).sum(1)
        weights += chances[0, rights[0]] * chances[1, rights[1]] * updates
    assert f"{words} {weights[0] / weights[1]:.2f} times as much" in " ".join(LEARN.split())
