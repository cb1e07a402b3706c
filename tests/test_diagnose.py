"""tools/diagnose.py: each rule on a run that only it should notice, and none on a healthy one. tools/plot.py."""

import json

import diagnose
import plot
import pytest
from conftest import ROOT, read_jsonl, write_jsonl

FLAGS = {"dtype": "float32", "num_minibatches": 2, "update_epochs": 1}


def wave(i: int) -> float:
    """A noise between -1 and 1 that is the same in every test."""
    return (-1) ** i * (i * 7 % 5) / 4


def rows_of(change, scale=1) -> list[dict]:
    """The metrics of a run that learns, with those that change(iteration) gives instead."""
    rows = [{"iteration": 0, "eval/score/a": 3.0 * scale}]
    for i in range(1, 41):
        row = {"iteration": i, "score": 5 + i / 20 + wave(i) / 5, "truncated": 0.01, "response_length": 200.0}
        row |= {"logprob_difference": 1e-7, "equal_groups": 0.3 + i / 200, "clip_fraction": 0.01}
        row |= {"kl": 0.05 * (i - 1) + (wave(i) / 50 if i > 1 else 0)} | change(i)
        rows.append({name: x * scale if "score" in name else x for name, x in row.items()})
    return rows


CASES = {
    "log-probs": lambda i: {"logprob_difference": 0.002, "kl": 5.0 * i},  # nothing about the kl
    "first kl": lambda i: {"kl": 3 + i / 20},
    "equal groups": lambda i: {"equal_groups": 0.95 - i / 200},
    "truncated": lambda i: {"truncated": i / 60},
    "negative kl": lambda i: {"kl": -0.01 * (i - 1)},
    "kl of 0": lambda i: {"kl": 1e-6},
    "falling score": lambda i: {
        "score": 5 - abs(i - 20) / 10 + wave(i) / 5,
        "eval/score/a": 5 - abs(i - 20) / 5,
    },
    "flat score": lambda i: {"score": 5 + i / 100 + wave(i)},
    "held-out": lambda i: {"eval/score/a": 5 - abs(i - 20) / 5} if i % 10 == 0 else {},
    "large kl": lambda i: {"kl": 5.0 * (i - 1)},
    "idle clip": lambda i: {"clip_fraction": 0.0},
    "nothing": lambda i: {},
    "nothing, held-out score rises": lambda i: {"eval/score/a": 4 + i / 20} if i % 10 == 0 else {},
    "nothing, a kl that starts with noise": lambda i: {"kl": wave(i) / 100 if i > 1 else 0.0},
    "nothing, solved at the end": lambda i: {"equal_groups": min(1, i / 25)},
    "nothing, resumed": lambda i: {"iteration": i + 100, "kl": 3 + i / 20},
}


@pytest.mark.parametrize("name", CASES)
def test_a_rule_notices_what_it_is_for_and_nothing_else(name):
    for scale in (1, 1000, 0.001):
        found = [*diagnose.findings(FLAGS, rows_of(CASES[name], scale))] or ["nothing"]
        assert found == [name.partition(",")[0]]
    assert set(diagnose.REMEDIES) < set(CASES)


def test_runs_of_unchanged_scripts_have_no_finding():
    runs = read_jsonl(ROOT / "experiments" / "results" / "bugs.jsonl")
    runs = [run for run in runs if not run["bug"] and not run["flags"]]
    for run in runs:
        columns = run["metrics"] | {"iteration": range(1, 61)}
        rows = [dict(zip(columns, x)) for x in zip(*columns.values(), strict=True)]
        teacher = {"teacher": ""} if run["script"] == "distill" else {}
        assert not diagnose.findings({"dtype": "float32"} | teacher, rows), run["script"]
    assert len(runs) > 20


def test_the_command_prints_a_line_for_each_finding(tmp_path, capsys):
    """Also while the last line is being written. What needs a trend waits for 20 iterations."""
    (tmp_path / "args.json").write_text(json.dumps(FLAGS))
    bad = rows_of(lambda i: {"logprob_difference": 1.0, "truncated": 1.0, "score": 5.0 - i})
    for count, starts in ((41, ["logprob_", "100% of ", "score is "]), (12, ["logprob_", "100% of "])):
        with write_jsonl(tmp_path / "metrics.jsonl", bad[:count]).open("a") as file:
            file.write('{"iteration": 41, "sco')
        diagnose.main(tmp_path)
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == len(starts) and all(map(str.startswith, lines, starts))


def test_a_line_of_the_plot_is_the_mean_of_the_seeds(tmp_path):
    runs = []
    for seed, kl_coef, score in ((1, 0.1, 2.0), (2, 0.1, 4.0), (1, 0.5, 7.0)):
        flags = {"exp_name": "grpo", "seed": seed, "kl_coef": kl_coef}
        runs.append((flags, [{"iteration": i, "score": score * i} for i in range(3)]))
    figure = plot.draw(plot.group_runs(runs), tmp_path / "plot.png")
    assert [x.get_text() for x in figure.legends[0].texts] == ["grpo kl_coef 0.1", "grpo kl_coef 0.5"]
    assert [line.get_ydata().tolist() for line in figure.axes[0].lines] == [[0, 3, 6], [0, 7, 14]]
