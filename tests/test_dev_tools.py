"""The tools that read runs (diagnose.py, compare.py, plot.py), explain.py, planted.py, and what sync.py refuses."""

import json
import math
import subprocess
from pathlib import Path

import compare
import diagnose
import explain
import planted
import plot
import pytest
import sync
from conftest import ROOT, write_jsonl
from pictures import NO_REWARD, QUESTIONS, curves, load
from test_siblings import PLACE, commit, copy_scripts

# diagnose.py

FLOAT32 = {"dtype": "float32"}
HEALTHY = {"response_length": 200.0, "logprob_difference": 1e-7, "equal_groups": 0.3}
CASES = {
    "not finite": lambda i: {"grad_norm": float("nan" if i == 30 else 1)},
    "not finite, but large": lambda i: {"score": (-1) ** i * 1e300},
    "log-probs": lambda i: {"logprob_difference": 0.002, "kl": 5.0 * i},  # which also make the kl wrong
    "log-probs, in some iterations": lambda i: {"logprob_difference": 0.002} if i % 5 == 0 else {},
    "nothing, except in some iterations": lambda i: {"logprob_difference": 0.002} if i % 10 == 0 else {},
    "first kl": lambda i: {"kl": 3 + i / 20},
    "equal groups": lambda i: {"equal_groups": 0.95 - i / 200},
    "truncated": lambda i: {"truncated": 0.5 if i > 35 else 0.0},
    "negative kl": lambda i: {"kl": -0.01 * (i - 1)},
    "kl of 0": lambda i: {"kl": 1e-6},
    "falling score": lambda i: {"score": 5 - abs(i - 20) / 10, "eval/score/a": 5 - abs(i - 20) / 5},
    "flat score": lambda i: {"score": 5 + i / 100 + (-1) ** i},
    "held-out": lambda i: {"eval/score/a": 5 - abs(i - 20) / 5} if i % 10 == 0 else {},
    "nothing": lambda i: {},
    "nothing, resumed": lambda i: {"iteration": i + 100, "kl": 3 + i / 20},
}


def rows_of(change) -> list[dict]:
    """The metrics of a run that learns, except for those that change(iteration) returns."""
    rows = [{"iteration": 0, "eval/score/a": 3.0}]
    for i in range(1, 41):
        row = {"iteration": i, "score": 5 + i / 20, "kl": 0.05 * (i - 1)}
        rows.append(HEALTHY | row | change(i))
    return rows


@pytest.mark.parametrize("name", CASES)
def test_each_rule_finds_its_problem_and_no_other(name):
    found = [found for found, _ in diagnose.findings(FLOAT32, rows_of(CASES[name]))] or ["nothing"]
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
def test_rules_depend_on_dtype_teacher_and_length(flags, change, count, expected):
    rows = rows_of(lambda i: change)[: count + 1]
    assert [name for name, _ in diagnose.findings(flags, rows)] == expected


def of_curves(row: dict) -> list[str]:
    """What diagnose.py finds in a row of experiments/results/."""
    others = ("versions", "greedy 2-5 curve")
    lists = {key: x for key, x in row.items() if isinstance(x, list) and key not in others}
    names = ["iteration", "response_length", *(key.removesuffix(" curve") for key in lists)]
    rows = [dict(zip(names, (i, 15.0, *x))) for i, x in enumerate(zip(*lists.values()), 1)]
    for i, score in enumerate(row.get("greedy 2-5 curve", [])[1:], 1):
        rows[5 * i - 1]["eval/score/2-5"] = score
    return [name for name, _ in diagnose.findings(FLOAT32, rows)]


def test_what_it_finds_in_real_runs():
    """It finds nothing in runs without a bug. docs/bugs.md and docs/metrics.md show these runs."""
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
VERL |= {"val-core/gsm8k/reward/mean@4": 0.3, "val-core/gsm8k/reward/best@4/mean": 0.9, "actor/ppo_kl": 0.0}


def test_logs_of_trl_and_verl_are_read_by_a_table_of_names(tmp_path, capsys):
    state, lines = tmp_path / "trainer_state.json", tmp_path / "verl.jsonl"
    state.write_text(json.dumps({"log_history": [{"step": i} | TRL for i in range(2, 30)]}))
    write_jsonl(lines, [{"step": i, "data": VERL} for i in range(2, 30)])
    for path, first in ((state, "equal_groups is 0.95"), (lines, "kl is -70 on average")):
        diagnose.main(path)
        *found, missing = capsys.readouterr().out.splitlines()
        assert found[0].startswith(first) and any("kl is -70" in text for text in found)
        assert "log-probs (needs logprob_difference)" in missing and "held-out" not in missing
    assert [x for name, x in diagnose.read(lines)[1][0].items() if "eval/score" in name] == [0.3]
    assert not [*diagnose.findings({}, rows_of(lambda i: {"kl": 4e-5 * 200}))]  # small, but not 0


def test_a_log_with_half_a_line_or_without_lengths_is_read(tmp_path, capsys):
    """verl may be writing the line, and TRL logs the lengths only with some settings."""
    state, lines = tmp_path / "trainer_state.json", tmp_path / "verl.jsonl"
    rows = [{"step": i} | TRL for i in range(2, 30)]
    state.write_text(json.dumps({"log_history": [row | {"completions/mean_length": None} for row in rows]}))
    diagnose.main(state)
    said = capsys.readouterr().out
    assert said.startswith("equal_groups is 0.95") and "first kl (needs kl)" in said
    write_jsonl(lines, [{"step": i, "data": VERL} for i in range(2, 30)])
    whole = lines.read_text()
    for end in (len(whole) - 3, len(whole) - 2):  # the second half ends in }
        lines.write_text(whole[:end])
        assert [row["iteration"] for row in diagnose.read(lines)[1]] == [*range(2, 29)]


# explain.py

GRPO = 0.75 / 0.5001  # 0.5 is the std of 1, 0, 0, 0 with a divisor of k - 1


@pytest.mark.parametrize(
    "script, expected, push",
    [
        ("rloo", [1, -1 / 3, -1 / 3, -1 / 3], [1 / 4, -1 / 12, -1 / 12, -1 / 12]),
        ("grpo", [GRPO, *[-GRPO / 3] * 3], [GRPO / 12, -GRPO / 60, -GRPO / 24, -GRPO / 48]),
    ],
)
def test_the_first_tokens_of_a_group_by_hand(script, expected, push):
    advantages, pushes = explain.explain(explain.Args(), script)
    assert advantages[:, 0].tolist() == pytest.approx(expected)
    assert pushes[:, 0].tolist() == pytest.approx(push)


def test_a_long_group_gets_no_penalty_for_its_length():
    """The toy's limit of 40 tokens does not hold for a group that the user describes."""
    for scores, expected in (([1, 0, 0, 0], 0.75 / 0.5001), ([0, 1, 0, 0], -0.25 / 0.5001)):
        advantages, _ = explain.explain(explain.Args(scores=scores, lengths=(100, 3, 100, 5)), "dapo")
        assert advantages[0, 0].item() == pytest.approx(expected)


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"samples_per_prompt": 3}, "--samples_per_prompt 3: it must divide the 4 responses"),
        ({"samples_per_prompt": 0}, "--samples_per_prompt 0: it must divide"),
        ({"lengths": (3, 5)}, "4 --scores, 2 --lengths: give two or more of each"),
        ({"lengths": (3, 5, 2, 0)}, "--lengths must be 1 or more"),
    ],
)
def test_groups_that_explain_refuses(flags, words):
    with pytest.raises(ValueError, match=words):
        explain.main(explain.Args(**flags))


def test_only_a_policy_has_a_tree_of_probabilities(tmp_path):
    """Loaded as a policy, a reward model would have a random output layer."""
    with pytest.raises(ValueError, match="LlamaForSequenceClassification"):
        explain.main(explain.Args(model=str(ROOT / "toy" / "reward_model")))


# compare.py

FLAGS = {"script": "rloo", "kl_coef": 0.01, "learning_rate": 2e-4, "log_every": 10, "micro_batch_size": 64}


def make_run(folder: Path, seed: int, score, kl=None, end=20, source="", **flags) -> Path:
    """A run folder whose metrics are functions of the iteration, with an evaluation every 8 iterations."""
    folder.mkdir()
    flags = FLAGS | {"seed": seed, "run_dir": str(folder)} | flags
    (folder / "args.json").write_text(json.dumps(flags))
    (folder / f"{flags['script']}.py").write_text(source)
    rows = [{"iteration": 0, "eval/score/all": 0.0}]
    for i in range(1, end + 1):
        evaluation = {"eval/score/all": seed + i / 100} if i % 8 == 0 else {}
        rows.append({"iteration": i, "score": score(i)} | ({"kl": kl(i)} if kl else {}) | evaluation)
    write_jsonl(folder / "metrics.jsonl", rows)
    return folder


def constant(score: float):
    return lambda i: score


@pytest.fixture
def run_folders(tmp_path, monkeypatch):
    """Run folders a1 and a2 of rloo.py, and b1 and b2 of grpo.py, in the current folder."""
    monkeypatch.chdir(tmp_path)
    for name, script in (("a", "rloo"), ("b", "grpo")):
        for seed in (1, 2):
            make_run(Path(f"{name}{seed}"), seed, constant(0.5), script=script)


def table(capsys, *runs, **flags) -> tuple[dict, str]:
    """The cells of each line by its name, and all that is printed."""
    compare.main(runs, **flags)
    said, lines = capsys.readouterr().out, {}
    for line in said.splitlines():
        if line.startswith("| "):
            name, *cells = line[2:-2].split(" | ")
            lines[name.strip("`")] = cells
    return lines, said


@pytest.mark.parametrize("n", (1, 4, 30))
def test_quantiles_of_student(n):
    """95 % of the density, summed in small steps, lies between the quantiles."""
    factor = math.exp(math.lgamma((n + 1) / 2) - math.lgamma(n / 2)) / math.sqrt(n * math.pi)
    step = 2 * compare.t95(n) / 20_000
    places = ((i - 9_999.5) * step for i in range(20_000))
    share = sum(factor * (1 + x * x / n) ** (-(n + 1) / 2) * step for x in places)
    assert share == pytest.approx(0.95, abs=3e-4)


def test_means_intervals_and_differences_by_hand(tmp_path, capsys):
    """Runs are paired by seed and not by order. The quantile is 4.303 for three seeds and 12.706 for two."""
    of_a, of_b = {1: 0.5, 2: 0.6, 3: 0.7}, {3: 0.6, 1: 0.41, 2: 0.49}
    runs = [make_run(tmp_path / f"a{seed}", seed, constant(x)) for seed, x in of_a.items()]
    runs += [make_run(tmp_path / f"b{seed}", seed, constant(x), script="grpo") for seed, x in of_b.items()]
    lines, said = table(capsys, *runs)
    assert lines[""] == ["seeds", "score, all 20", "score, last 10"]
    half = [4.303 * std / math.sqrt(3) for std in (0.1, 0.01)]
    assert lines["rloo.py"] == ["3", *[f"0.600 ± {half[0]:.3f}"] * 2]
    assert lines["minus `rloo.py"] == ["3", *[f"-0.100 ± {half[1]:.3f}"] * 2]
    assert "a1, " in said and "b2 logged no kl in" in said
    lines, said = table(capsys, *runs[:3], *runs[4:])  # seed 3 of b is missing
    assert lines["minus `rloo.py"] == ["2", *[f"-0.100 ± {12.706 * 0.02 / 2:.3f}"] * 2]
    lines, said = table(capsys, runs[0], runs[3])  # no seed in common
    assert (
        lines["minus `rloo.py"] == ["0", "", ""]
        and "need two seeds in common for an interval, but have 0" in said
    )


def test_equal_iterations_and_equal_kl(tmp_path, capsys):
    """b needs half of the KL for the same score, so it is equal at the same iteration and ahead at the same KL."""
    runs = [make_run(tmp_path / f"a{x}", x, lambda i: i / 100, lambda i: 0.2 * i) for x in (1, 2)]
    for x in (1, 2):
        folder = tmp_path / f"b{x}"
        runs.append(make_run(folder, x, lambda i: i / 100, lambda i: 0.1 * i, end=30, kl_coef=0.1))
    lines, said = table(capsys, *runs)
    assert "compared up to iteration 20, and the longest has 30" in said
    assert lines[""] == ["seeds", "score, all 20", "score, last 10", "kl, last 10", "score at kl 1.55"]
    assert [x[:5] for x in lines["rloo.py --kl_coef 0.01"]] == ["2", "0.105", "0.155", "3.100", "0.085"]
    assert [x[:5] for x in lines["rloo.py --kl_coef 0.1"]] == ["2", "0.105", "0.155", "1.550", "0.155"]
    assert lines["minus `rloo.py --kl_coef 0.01"][-1] == "0.070 ± 0.000"


def test_a_kl_of_only_some_iterations_is_not_compared(tmp_path, capsys):
    """When a run is resumed, --log_kl may change."""
    runs = [make_run(tmp_path / f"a{x}", x, constant(0.5), lambda i: 0.1 * i) for x in (1, 2)]
    runs += [make_run(tmp_path / f"b{x}", x, constant(0.5), lambda i: 0.1 * i, script="grpo") for x in (1, 2)]
    for is_kept in (lambda i: i < 15, lambda i: i > 5):
        rows = [{"iteration": i, "score": 0.5} | ({"kl": 1.0} if is_kept(i) else {}) for i in range(1, 21)]
        write_jsonl(runs[3] / "metrics.jsonl", rows)
        lines, said = table(capsys, *runs)
        assert lines[""] == ["seeds", "score, all 20", "score, last 10"]
        assert f"because {runs[3]} logged no kl in\nsome iterations" in said


def test_an_evaluation_counts_where_it_was_logged_last(tmp_path):
    run = compare.read(make_run(tmp_path / "a", 1, constant(0)))
    assert run.at("eval/score/all", 15, 3) == 1.08  # of iteration 8, not 0 or 16


def test_runs_of_one_script_and_one_set_of_flags_are_a_group(tmp_path):
    """They may differ in seed, folder, logging and memory, but not in another flag or in the text of the script."""
    changes = [{}, {"log_every": 0, "log_kl": True, "micro_batch_size": 8}, {"learning_rate": 1e-3}]
    changes += [{"source": "x"}, {"script": "grpo", "clip_eps": 0.2}, {"script": "grpo", "clip_eps": 0.3}]
    runs = [make_run(tmp_path / f"{i}", i, constant(0), **change) for i, change in enumerate(changes)]
    groups = compare.group([compare.read(run) for run in runs])
    assert {name: [run.flags["seed"] for run in found] for name, found in groups.items()} == {
        f"rloo.py --learning_rate 0.0002 ({runs[0]})": [0, 1],
        "rloo.py --learning_rate 0.001": [2],
        f"rloo.py --learning_rate 0.0002 ({runs[3]})": [3],
        "grpo.py --learning_rate 0.0002 --clip_eps 0.2": [4],
        "grpo.py --learning_rate 0.0002 --clip_eps 0.3": [5],
    }


@pytest.mark.parametrize(
    "line, reason",
    {
        "a1 a2": "two or more groups",
        "a1 again b1": "2 runs have seed 1",
        "a1 b1 none": "none: it has no iteration",
        "a1 b1 --metric loss": "a1 does not log it",
        "a1 nosuch": "nosuch: not a run folder",
    }.items(),
)
def test_runs_that_cannot_be_compared_are_refused(line, reason, run_folders, monkeypatch, capsys):
    make_run(Path("again"), 1, constant(0))
    make_run(Path("none"), 3, constant(0), end=0)
    monkeypatch.setattr("sys.argv", ["compare.py", *line.split()])
    with pytest.raises(SystemExit) as end:
        plot.command(compare.main, "")
    assert end.value.code == 2 and reason in capsys.readouterr().err


# plot.py, all tools, planted.py


def test_a_plot_has_a_panel_for_each_metric_and_its_iterations_in_order(tmp_path):
    """The lines of a run need not be in order."""
    rows = [{"iteration": i, "score": 10.0 * i, "eval/score/a": 1.0, "grad_norm": 1.0} for i in (3, 4, 1, 2)]
    figure = plot.draw({"a": rows}, tmp_path / "plot.png")
    assert [axis.get_title() for axis in figure.axes] == ["score", "eval/score/a"]
    assert figure.axes[0].lines[0].get_xdata().tolist() == [1, 2, 3, 4]
    assert figure.axes[0].lines[0].get_ydata().tolist() == [10, 20, 30, 40]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a"]


@pytest.mark.parametrize(
    "tool, line, words",
    [
        (compare, "a1 a2 b1 b2", "| `grpo.py` | 2 | 0.500 ± 0.000 | 0.500 ± 0.000 |"),
        (plot, "a1 b1 --out c.png", "Wrote c.png"),
        (diagnose, "a1", "score is 0.5 at first and 0.5 in the end"),
        (explain, "--scripts rloo grpo --scores 1 0 --lengths 3 4", "| `rloo` | 1.000 → 0.5000 |"),
    ],
)
def test_a_tool_takes_its_command_line(tool, line, words, run_folders, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [tool.__name__, *line.split()])
    plot.command(tool.main, tool.__doc__)
    assert words in capsys.readouterr().out
    assert Path("c.png").exists() == ("c.png" in line)


def test_planted_changes_no_file_that_has_changes(tmp_path, capsys, monkeypatch):
    assert planted.main(["no", "such", "bug"]) == 2
    (tmp_path / "reinforce.py").write_text((ROOT / "reinforce.py").read_text())
    monkeypatch.setattr(planted, "ROOT", tmp_path)
    monkeypatch.setattr(planted.Planted, "path", lambda *args: tmp_path / "reinforce.py")
    commit(tmp_path)
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path / "docs")
    assert planted.main(["no baseline"]) == 0
    assert "advantages = rewards.view" in (tmp_path / "reinforce.py").read_text()
    undo = "git restore ../reinforce.py"
    assert f"To undo it: {undo}\n" in capsys.readouterr().out
    assert (
        planted.main(["baseline too low"]) == 2 and f"planted bug, undo it: {undo}" in capsys.readouterr().err
    )
    subprocess.run(undo.split(), check=True)
    assert planted.main(["baseline too low"]) == 0


# sync.py


@pytest.mark.parametrize(
    "name, change, reason",
    [
        ("grpo", lambda text: text.replace(PLACE, f"<<<<<<< HEAD\n{PLACE}"), "grpo.py: invalid syntax"),
        ("grpo", lambda text: f"\ufeff{text}", "grpo.py begins with a byte order mark"),
        ("rloo", lambda text: f"\ufeff{text}", "rloo.py begins with a byte order mark"),
        ("grpo", lambda text: text.replace("estimator: begin", "estimator"), "grpo.py: a policy script has"),
        ("rloo", lambda text: text.replace("estimator: end", "estimator"), "rloo.py: a policy script has"),
        (
            "grpo_lora",
            lambda text: text.replace("variant of grpo.", "variant of no."),
            "grpo_lora.py: there is no no.py",
        ),
    ],
)
def test_sync_writes_nothing_if_a_script_is_damaged(name, change, reason, tmp_path):
    folder = copy_scripts(tmp_path)
    commit(folder)
    path = sync.paths(folder)[name]
    path.write_text(change(path.read_text()))
    before = {path: path.read_bytes() for path in folder.rglob("*.py")}
    with pytest.raises(SystemExit, match=reason):
        sync.sync(folder)
    assert before == {path: path.read_bytes() for path in folder.rglob("*.py")}


def test_a_short_run_is_told_that_rules_are_missing(tmp_path, capsys):
    diagnose.main(make_run(tmp_path / "a", 1, lambda i: 0.1 * i, end=7))
    assert "Not checked yet: the other rules need 20 iterations" in capsys.readouterr().out


def test_two_folders_of_one_name_are_two_lines(tmp_path, monkeypatch):
    drawn, runs = [], []
    for name in "ab":
        (tmp_path / name).mkdir()
        runs.append(make_run(tmp_path / name / "run", 1, constant(0.5)))
    monkeypatch.setattr(plot, "draw", lambda found, path: drawn.append(found))
    plot.main(tuple(runs))
    assert len(drawn[0]) == 2


def test_runs_of_other_lengths_are_other_groups(tmp_path):
    flags = [{"seed": 1, "script": "grpo", "anneal_lr": True, "num_iterations": n} for n in (80, 160)]
    groups = compare.group([compare.Run(tmp_path, x, "", {}, 80) for x in flags])
    assert [*groups] == ["grpo.py --num_iterations 80", "grpo.py --num_iterations 160"]
