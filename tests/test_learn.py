"""docs/learn.md: the exercises pass as printed, mistakes get the printed answer, and a number that no table prints."""

import re
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, SOURCES
from sync import functions

import reinforce_pp
import reinforce_pp_baseline

PAGE = (ROOT / "docs" / "learn.md").read_text()
FRAME = re.search(r"```python\n(import torch.*?)```", PAGE, re.DOTALL)[1]
FOLD = r"<summary>Lesson (\d): .*?```python\n(.*?)```(.*?)</details>"
SOLUTIONS = re.findall(FOLD, PAGE, re.DOTALL)
ROWS = [
    (code, *row)
    for _, code, rest in SOLUTIONS
    for row in re.findall(r"^\| (.+) \| (.+) \|$", rest, re.MULTILINE)
]
MISTAKES = [row for row in ROWS if row[1] != "instead"]


def name_of(line: str) -> str:
    """What a line of the frame assigns, or the call that ends it."""
    return re.match(r" *(?:(\w+) =|report)", line)[1] or "report"


def with_line(program: str, *lines: str) -> str:
    """The program with these lines in the place of the line that assigns what the last of them does."""
    start = re.escape(
        lines[-1].split("(")[0] if name_of(lines[-1]) == "report" else f"{name_of(lines[-1])} ="
    )
    indent = re.search(rf"^( *){start}", program, re.MULTILINE)[1]
    text = "\n".join(indent + line for line in lines)
    return re.sub(rf"^ *{start}.*$", lambda match: text, program, count=1, flags=re.MULTILINE)


def solved(code: str) -> str:
    """The frame with the lines of a solution: helpers stand before what they help to assign."""
    program, waiting = FRAME, []
    for line in code.splitlines():
        waiting.append(line)
        if name_of(line) in ("r", "A", "loss", "report"):
            program, waiting = with_line(program, *waiting), []
    assert not waiting
    return program


def answers(program: str, capsys) -> set[str]:
    """What check.py says about the cases, without the numbers."""
    exec(program, {})
    return {re.split(r"; |: ", line)[-1] for line in capsys.readouterr().out.splitlines()}


def test_the_frame_runs_as_printed(capsys):
    assert answers(FRAME, capsys) == {"no baseline"}


def test_each_lesson_has_a_solution():
    assert [lesson for lesson, _, _ in SOLUTIONS] == [*"2345678"] and PAGE.count("**Write it.**") == 7


@pytest.mark.parametrize("lesson, code, rest", SOLUTIONS, ids=[lesson for lesson, _, _ in SOLUTIONS])
def test_a_solution_passes(lesson, code, rest, capsys):
    right = (
        {"a mean per response in place of a sum"} if lesson == "5" else {"passed"}
    )  # 5 has no method of its own
    assert answers(solved(code), capsys) == right


@pytest.mark.parametrize("code, line, answer", MISTAKES, ids=[answer for _, _, answer in MISTAKES])
def test_a_mistake_is_named_as_printed(code, line, answer, capsys):
    program = with_line(solved(code), line.split("`")[1]) if line.startswith("`") else solved(code)
    found = answers(program, capsys)
    assert answer in found and found <= {answer, "passed"}


def test_the_steps_of_main_are_those_of_reinforce():
    rows = re.findall(r"^\| (\d) \| (`.*?`) \|", PAGE, re.MULTILINE)
    steps = re.split(r"^        # (\d)\. ", functions(SOURCES["reinforce"])["main"], flags=re.MULTILINE)[1:]
    assert [number for number, _ in rows] == steps[::2]
    for (_, calls), code in zip(rows, steps[1::2]):
        for name in set(re.findall(r"`(\w+)`", calls)) - {"policy_loss"}:  # which update calls
            assert f"{name}(" in code


@pytest.mark.parametrize(
    "script, words",
    [(reinforce_pp, "the hard prompts count"), (reinforce_pp_baseline, "the hard prompt counts")],
)
def test_the_std_of_a_small_batch_bends_the_gradient(script, words):
    """Expected update of two prompts, from all outcomes of their groups, by the advantages of the script."""
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
    assert f"{words} {weights[0] / weights[1]:.2f} times as much" in " ".join(PAGE.split())
