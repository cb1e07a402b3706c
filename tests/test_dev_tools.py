"""tools/diagnose.py, plot.py, explain.py and tests/planted.py: what they find, what they refuse, how they say it."""

import json

import diagnose
import explain
import planted
import plot
import pytest
from conftest import ROOT, launch, write_jsonl
from pictures import NO_REWARD, QUESTIONS, curves, load
from test_siblings import commit

FLAGS = {"dtype": "float32"}
HEALTHY = {"response_length": 200.0, "logprob_difference": 1e-7, "equal_groups": 0.3}
CASES = {
    "not finite": lambda i: {"grad_norm": float("nan" if i == 30 else 1)},
    "not finite, but large": lambda i: {"score": (-1) ** i * 1e300},
    "log-probs": lambda i: {"logprob_difference": 0.002, "kl": 5.0 * i},  # nothing about the kl
    "first kl": lambda i: {"kl": 3 + i / 20},
    "equal groups": lambda i: {"equal_groups": 0.95 - i / 200},
    "negative kl": lambda i: {"kl": -0.01 * (i - 1)},
    "kl of 0": lambda i: {"kl": 1e-6},
    "falling score": lambda i: {"score": 5 - abs(i - 20) / 10, "eval/score/a": 5 - abs(i - 20) / 5},
    "flat score": lambda i: {"score": 5 + i / 100 + (-1) ** i},
    "held-out": lambda i: {"eval/score/a": 5 - abs(i - 20) / 5} if i % 10 == 0 else {},
    "nothing": lambda i: {},
    "nothing, resumed": lambda i: {"iteration": i + 100, "kl": 3 + i / 20},
}


def rows_of(change) -> list[dict]:
    """The metrics of a run that learns, with those that change(iteration) gives instead."""
    rows = [{"iteration": 0, "eval/score/a": 3.0}]
    for i in range(1, 41):
        row = {"iteration": i, "score": 5 + i / 20, "kl": 0.05 * (i - 1)}
        rows.append(HEALTHY | row | change(i))
    return rows


@pytest.mark.parametrize("name", CASES)
def test_a_rule_notices_what_it_is_for_and_nothing_else(name):
    found = [found for found, _ in diagnose.findings(FLAGS, rows_of(CASES[name]))] or ["nothing"]
    assert found == [name.partition(",")[0]]


@pytest.mark.parametrize(
    "flags, change, count, expected",
    [
        ({"dtype": "bfloat16"}, {"logprob_difference": 0.04}, 40, []),
        ({"dtype": "bfloat16"}, {"logprob_difference": 0.06}, 40, ["log-probs"]),
        ({"dtype": "float32"}, {"logprob_difference": 0.04}, 40, ["log-probs"]),
        ({"dtype": "float32"}, {"kl": 9.0}, 40, ["first kl"]),
        ({"dtype": "float32", "teacher": "toy/teacher"}, {"kl": 9.0}, 40, []),
        ({"dtype": "float32"}, {"kl": 1e-6}, 20, ["kl of 0"]),
        ({"dtype": "float32"}, {"kl": 1e-6}, 19, []),  # too few
    ],
)
def test_what_a_rule_makes_of_dtype_teacher_and_length(flags, change, count, expected):
    rows = rows_of(lambda i: change)[: count + 1]
    assert [name for name, _ in diagnose.findings(flags, rows)] == expected


def of_curves(row: dict) -> list[str]:
    """What diagnose finds in a row of experiments/results/."""
    others = ("versions", "greedy 2-5 curve")
    lists = {key: x for key, x in row.items() if isinstance(x, list) and key not in others}
    names = ["iteration", "response_length", *(key.removesuffix(" curve") for key in lists)]
    rows = [dict(zip(names, (i, 15.0, *x))) for i, x in enumerate(zip(*lists.values()), 1)]
    for i, score in enumerate(row.get("greedy 2-5 curve", [])[1:], 1):
        rows[5 * i - 1]["eval/score/2-5"] = score
    return [name for name, _ in diagnose.findings(FLAGS, rows)]


def test_what_it_finds_in_real_runs():
    """Nothing in unchanged ones. docs/bugs.md and docs/metrics.md show these runs."""
    found = {number: [of_curves(row) for row in curves(*QUESTIONS[number][:3])] for number in QUESTIONS}
    expected = {2: [], 5: [], 7: [], 1: ["falling score"], 3: ["log-probs"], 4: ["kl of 0"]}
    for number, names in expected.items():
        assert found[number] == 3 * [names]
    for script, flags in (("grpo", {}), ("grpo", {"temperature": 0.7}), ("reinforce_pp", {})):
        assert [of_curves(row) for row in curves("", script, flags)] == [[], [], []]
    assert "equal groups" in of_curves(*curves("", "grpo", NO_REWARD))
    assert [of_curves(row) for row in load("hacking") if "kl curve" in row] == [["held-out"], [], []]


TRL = {"reward": 0.2, "completions/mean_length": 100.0, "frac_reward_zero_std": 0.95, "kl": -0.7}
TRL |= {"eval_reward": 0.3}
VERL = {"critic/score/mean": 0.2, "response_length/mean": 100.0, "actor/kl_loss": -0.7}
VERL |= {"val-core/gsm8k/reward/mean@1": 0.3}


def test_logs_of_trl_and_verl_are_read_by_a_table_of_names(tmp_path, capsys):
    state, lines = tmp_path / "trainer_state.json", tmp_path / "verl.jsonl"
    state.write_text(json.dumps({"log_history": [{"step": i} | TRL for i in range(2, 30)]}))
    write_jsonl(lines, [{"step": i, "data": VERL} for i in range(2, 30)])
    for path, first in ((state, "equal_groups is 0.95"), (lines, "kl is -70 on average")):
        diagnose.main(path)
        *found, missing = capsys.readouterr().out.splitlines()
        assert found[0].startswith(first) and any("kl is -70" in text for text in found)
        assert "log-probs (needs logprob_difference)" in missing and "held-out" not in missing
    assert not [*diagnose.findings({}, rows_of(lambda i: {"kl": 4e-5 * 200}))]  # small, and not 0


GRPO = 0.75 / 0.5001  # the std of 1, 0, 0, 0 with k - 1 is 0.5


@pytest.mark.parametrize(
    "script, flags, expected, push",
    [
        ("rloo", {}, [1, -1 / 3, -1 / 3, -1 / 3], [1 / 4, -1 / 12, -1 / 12, -1 / 12]),
        ("grpo", {}, [GRPO, *[-GRPO / 3] * 3], [GRPO / 12, -GRPO / 60, -GRPO / 24, -GRPO / 48]),
        # Above the clip, only what is pushed down keeps its gradient: advantage x ratio / 4 responses / 40 tokens.
        ("dr_grpo", {"ratio": 1.5}, [0.75, -0.25, -0.25, -0.25], [0, *[-0.25 * 1.5 / 160] * 3]),
    ],
)
def test_the_first_tokens_of_a_group_by_hand(script, flags, expected, push):
    advantages, pushes = explain.explain(explain.Args(**flags), script)
    assert advantages[:, 0].tolist() == pytest.approx(expected)
    assert pushes[:, 0].tolist() == pytest.approx(push)


def test_a_long_group_gets_no_penalty_for_its_length():
    """The toy's 40 tokens are no limit for a group that the user describes."""
    for scores, expected in (([1, 0, 0, 0], 0.75 / 0.5001), ([0, 1, 0, 0], -0.25 / 0.5001)):
        advantages, _ = explain.explain(explain.Args(scores=scores, lengths=(100, 3, 100, 5)), "dapo")
        assert advantages[0, 0].item() == pytest.approx(expected)


def test_a_plot_has_a_panel_for_each_metric_and_its_iterations_in_order(tmp_path):
    """A resumed run has its later lines in a second place."""
    rows = [{"iteration": i, "score": 10.0 * i, "eval/score/a": 1.0, "grad_norm": 1.0} for i in (3, 4, 1, 2)]
    figure = plot.draw({"a": rows}, tmp_path / "plot.png")
    assert [axis.get_title() for axis in figure.axes] == ["score", "eval/score/a"]
    assert figure.axes[0].lines[0].get_xdata().tolist() == [1, 2, 3, 4]
    assert figure.axes[0].lines[0].get_ydata().tolist() == [10, 20, 30, 40]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a"]


HALF = '{"iteration": 1, "score": 0.5}\n{"iteration": 2, "sc'
REFUSED = {
    "plot.py": "give at least one run folder",
    "plot.py nosuch": "nosuch: not a run folder, because it contains no metrics.jsonl",
    "plot.py empty": "no metrics to draw yet",
    "plot.py broken": "broken: metrics.jsonl or args.json is damaged",
    "plot.py short --out a.xyz": "--out a.xyz: use a name that ends in .png",
    "diagnose.py nosuch": "no log at nosuch. Give a run folder, TRL's trainer_state.json, or verl's .jsonl log.",
    "diagnose.py short": "short has 1 iterations of a policy script, which is too few to tell",
    "diagnose.py texts": "a metric is no number",
    "explain.py --scores 1 0 --lengths 3": "2 --scores, 1 --lengths: give two or more of each",
    "explain.py --lengths 3 5 2 0": "--lengths must be 1 or more",
    "explain.py --ratio 0": "--ratio 0 above 0",
    "explain.py --samples_per_prompt 3": "--samples_per_prompt 3: it must divide the 4 responses",
    "explain.py --scripts nosuch": "--scripts nosuch: use some of cispo",
    "explain.py --model nosuch": "--model nosuch: not a folder of a model",
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_tool_refuses_in_a_sentence(line, tmp_path, monkeypatch, capsys):
    metrics = {"empty": "", "broken": "{}\n", "short": HALF, "texts": '{"iteration": 1, "score": null}\n'}
    for name, text in metrics.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(text)
        (tmp_path / name / "args.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    tool, *words = line.split()
    monkeypatch.setattr("sys.argv", [tool, *words])
    main = {"plot.py": plot.main, "diagnose.py": diagnose.main, "explain.py": explain.main}[tool]
    with pytest.raises(SystemExit) as end:
        plot.command(main, "")
    said = capsys.readouterr().err
    assert end.value.code == 2 and REFUSED[line] in said
    assert said.startswith("error: ") and said.count("\n") == 1


@pytest.mark.parametrize("tool", ["plot", "diagnose", "explain"])
def test_help_says_what_a_tool_takes(tool, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    said = launch(ROOT / "tools" / f"{tool}.py", "--help").stdout
    assert f"python tools/{tool}.py" in said and "{None}" not in said and "(default: )" not in said
    assert "_per_prompt" in said or tool != "explain"


def test_planted_changes_no_file_that_git_cannot_restore(tmp_path, capsys, monkeypatch):
    names = planted.of_the_pages()
    assert {"no baseline", "k1 for k2", "eos masked"} <= {*names} and len(names) < 25
    assert planted.main([]) == 2 and planted.main(["--help"]) == 0
    usage = capsys.readouterr().out
    assert all(name in usage for name in names) and "lengths not in the baseline" not in usage
    assert planted.main(["--all"]) == 0 and len(capsys.readouterr().out.splitlines()) == len(planted.BUGS)
    assert planted.main(["no", "such", "bug"]) == 2
    assert "no bug is named 'no such bug'" in capsys.readouterr().err
    (tmp_path / "reinforce.py").write_text((ROOT / "reinforce.py").read_text())
    monkeypatch.setattr(planted, "ROOT", tmp_path)
    monkeypatch.setattr(planted.Planted, "path", lambda *args: tmp_path / "reinforce.py")
    assert planted.main(["no baseline"]) == 2 and "no git repository" in capsys.readouterr().err
    commit(tmp_path)
    assert planted.main(["no baseline"]) == 0
    assert "advantages = rewards.view" in (tmp_path / "reinforce.py").read_text()
    assert planted.main(["no baseline"]) == 2 and "Commit them first" in capsys.readouterr().err
