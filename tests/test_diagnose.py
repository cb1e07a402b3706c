"""tools/diagnose.py: each rule on a run that only it should notice, and none on a healthy one. tools/plot.py.

On real runs, docs/bugs_table.md has its findings.
"""

import json

import diagnose
import plot
import pytest
from conftest import write_jsonl

FLAGS = {"dtype": "float32", "num_minibatches": 2, "update_epochs": 1}
HEALTHY = {"truncated": 0.01, "response_length": 200.0, "logprob_difference": 1e-7, "equal_groups": 0.3}
CASES = {
    "not finite": lambda i: {"grad_norm": float("nan" if i == 30 else 1)},
    "log-probs": lambda i: {"logprob_difference": 0.002, "kl": 5.0 * i},  # nothing about the kl
    "first kl": lambda i: {"kl": 3 + i / 20},
    "equal groups": lambda i: {"equal_groups": 0.95 - i / 200},
    "truncated": lambda i: {"truncated": i / 60},
    "negative kl": lambda i: {"kl": -0.01 * (i - 1)},
    "kl of 0": lambda i: {"kl": 1e-6},
    "falling score": lambda i: {"score": 5 - abs(i - 20) / 10, "eval/score/a": 5 - abs(i - 20) / 5},
    "flat score": lambda i: {"score": 5 + i / 100 + (-1) ** i},
    "held-out": lambda i: {"eval/score/a": 5 - abs(i - 20) / 5} if i % 10 == 0 else {},
    "large kl": lambda i: {"kl": 5.0 * (i - 1)},
    "idle clip": lambda i: {"clip_fraction": 0.0},
    "nothing": lambda i: {},
    "nothing, resumed": lambda i: {"iteration": i + 100, "kl": 3 + i / 20},
}


def rows_of(change) -> list[dict]:
    """The metrics of a run that learns, with those that change(iteration) gives instead."""
    rows = [{"iteration": 0, "eval/score/a": 3.0}]
    for i in range(1, 41):
        row = {"iteration": i, "score": 5 + i / 20, "kl": 0.05 * (i - 1), "clip_fraction": 0.01}
        rows.append(HEALTHY | row | change(i))
    return rows


@pytest.mark.parametrize("name", CASES)
def test_a_rule_notices_what_it_is_for_and_nothing_else(name):
    found = [found for found, _ in diagnose.findings(FLAGS, rows_of(CASES[name]))] or ["nothing"]
    assert found == [name.partition(",")[0]]


TRL = {"reward": 0.2, "completions/mean_length": 100.0, "completions/clipped_ratio": 0.5, "kl": 0.7}
VERL = {"critic/score/mean": 0.2, "response_length/mean": 100.0, "response_length/clip_ratio": 0.5}
VERL |= {"actor/kl_loss": 0.7}


def test_logs_of_trl_and_verl_are_read_by_a_table_of_names(tmp_path, capsys):
    state, lines = tmp_path / "trainer_state.json", tmp_path / "verl.jsonl"
    state.write_text(json.dumps({"log_history": [{"step": i} | TRL for i in range(2, 30)]}))
    for path in (state, write_jsonl(lines, [{"step": i, "data": VERL} for i in range(2, 30)])):
        diagnose.main(path)
        *found, missing = capsys.readouterr().out.splitlines()
        assert [text.split()[:3] for text in found] == [["50%", "of", "the"], ["kl", "is", "70,"]]
        assert "log-probs, equal groups" in missing
    assert not [*diagnose.findings({}, rows_of(lambda i: {"kl": 4e-5 * 200}))]  # small, and not 0


def test_a_line_of_the_plot_is_the_mean_of_the_seeds(tmp_path):
    one, two, other = ([{"iteration": i, "score": x * i} for i in range(3)] for x in (2.0, 4.0, 7.0))
    figure = plot.draw({"a": [one, two], "b": [other]}, tmp_path / "plot.png")
    assert [line.get_ydata().tolist() for line in figure.axes[0].lines] == [[0, 3, 6], [0, 7, 14]]
