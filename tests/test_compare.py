"""tools/compare.py: groups of runs, means, intervals and paired differences by hand, and what it refuses."""

import json
import math
from itertools import product
from pathlib import Path

import compare
import plot
import pytest
import seeds
from conftest import ROOT, SOURCES, launch, write_jsonl

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


def table(capsys, *runs, **flags) -> tuple[dict, str]:
    """The cells of each line by its name, and what stands below the table."""
    compare.main(runs, **flags)
    said, lines = capsys.readouterr().out, {}
    for line in said.splitlines():
        if line.startswith("| "):
            name, *cells = line[2:-2].split(" | ")
            lines[name.strip("`")] = cells
    return lines, said


@pytest.mark.parametrize("n", [*range(1, 16), 30, 120])
def test_quantiles_of_student(n):
    """95 % of the density, added up in small steps, lie within them."""
    factor = math.exp(math.lgamma((n + 1) / 2) - math.lgamma(n / 2)) / math.sqrt(n * math.pi)
    step = 2 * compare.t95(n) / 20_000
    places = ((i - 9_999.5) * step for i in range(20_000))
    share = sum(factor * (1 + x * x / n) ** (-(n + 1) / 2) * step for x in places)
    assert share == pytest.approx(0.95, abs=3e-4)


def test_how_many_seeds_a_difference_takes(tmp_path, capsys):
    """7.84 (0.01 / 0.02)² + 1.92 = 3.9, where 0.01 is the std of the differences."""
    runs = [make_run(tmp_path / f"a{seed}", seed, constant(0.6)) for seed in range(5)]
    for seed, x in enumerate((0.49, 0.49, 0.5, 0.51, 0.51)):
        runs.append(make_run(tmp_path / f"b{seed}", seed, constant(x), script="grpo"))
    assert "takes about 4 seeds in `score, all 20` and 4" in table(capsys, *runs)[1]


def test_means_intervals_and_differences_by_hand(tmp_path, capsys):
    """Runs are paired by seed, not by their order. 4.303 is the quantile for three seeds, 12.706 for two."""
    of_a, of_b = {1: 0.5, 2: 0.6, 3: 0.7}, {3: 0.6, 1: 0.41, 2: 0.49}
    runs = [make_run(tmp_path / f"a{seed}", seed, constant(x)) for seed, x in of_a.items()]
    runs += [make_run(tmp_path / f"b{seed}", seed, constant(x), script="grpo") for seed, x in of_b.items()]
    lines, said = table(capsys, *runs)
    assert lines[""] == ["seeds", "score, all 20", "score, last 10"]
    half = [4.303 * std / math.sqrt(3) for std in (0.1, 0.01)]
    assert lines["rloo.py"] == ["3", *[f"0.600 ± {half[0]:.3f}"] * 2]
    assert lines["minus `rloo.py"] == ["3", *[f"-0.100 ± {half[1]:.3f}"] * 2]
    assert "a1, " in said and "b2 logged no kl" in said and "from five seeds on" in said
    lines, said = table(capsys, *runs[:3], *runs[4:])  # seed 3 of b is missing
    assert lines["minus `rloo.py"] == ["2", *[f"-0.100 ± {12.706 * 0.02 / 2:.3f}"] * 2]
    lines, said = table(capsys, runs[0], runs[3])  # no seed in common
    assert lines["minus `rloo.py"] == ["0", "", ""] and "an interval needs two seeds that both have" in said


def test_equal_iterations_and_equal_kl(tmp_path, capsys):
    """b needs half of the KL for the same score, so it is level in a comparison by iterations and ahead by KL."""
    runs = [make_run(tmp_path / f"a{x}", x, lambda i: i / 100, lambda i: 0.2 * i) for x in (1, 2)]
    runs += [
        make_run(tmp_path / f"b{x}", x, lambda i: i / 100, lambda i: 0.1 * i, end=30, kl_coef=0.1)
        for x in (1, 2)
    ]
    lines, _ = table(capsys, *runs, iterations=20, last=5)
    assert lines[""] == ["seeds", "score, all 20", "score, last 5", "kl, last 5", "score at kl 1.8"]
    assert [x[:5] for x in lines["rloo.py --kl_coef 0.01"]] == ["2", "0.105", "0.180", "3.600", "0.090"]
    assert [x[:5] for x in lines["rloo.py --kl_coef 0.1"]] == ["2", "0.105", "0.180", "1.800", "0.180"]
    assert lines["minus `rloo.py --kl_coef 0.01"][-1] == "0.090 ± 0.000"


def test_an_evaluation_counts_where_it_was_logged_last(tmp_path, capsys):
    runs = [make_run(tmp_path / f"{x}", x, constant(0), script=x % 2 * "p" + "po") for x in (1, 2)]
    lines, _ = table(capsys, *runs, metric="eval/score/all", iterations=15, last=3)
    assert lines["ppo.py"] == ["1", "1.080", "1.080"]  # of iteration 8, not 0 or 16


def test_runs_of_one_script_and_one_set_of_flags_are_a_group(tmp_path):
    """Seeds, folders, logging and memory do not part them. Another flag does, and so does an edit of the script."""
    changes = [
        {},
        {"log_every": 0, "log_kl": True, "micro_batch_size": 8},
        {"learning_rate": 1e-3},
        {"source": "x"},
    ]
    changes += [{"script": "grpo", "clip_eps": 0.2}, {"script": "grpo", "clip_eps": 0.3}]
    runs = [make_run(tmp_path / f"{i}", i, constant(0), **change) for i, change in enumerate(changes)]
    groups = compare.group([compare.read(run) for run in runs])
    assert {name: [run.flags["seed"] for run in found] for name, found in groups.items()} == {
        f"rloo.py --learning_rate 0.0002 ({runs[0]})": [0, 1],
        "rloo.py --learning_rate 0.001": [2],
        f"rloo.py --learning_rate 0.0002 ({runs[3]})": [3],
        "grpo.py --learning_rate 0.0002 --clip_eps 0.2": [4],
        "grpo.py --learning_rate 0.0002 --clip_eps 0.3": [5],
    }


def test_the_picture_shows_means_and_intervals(tmp_path):
    runs = [make_run(tmp_path / f"{x}", x, lambda i, x=x: x + i, lambda i, x=x: x * i) for x in (1, 2)]
    runs += [make_run(tmp_path / "other", 1, constant(5), lambda i: i, script="grpo")]
    groups = compare.group([compare.read(run) for run in runs])
    figure = compare.draw(groups, "score", 20, 10, tmp_path / "a.png")
    by_iteration, by_kl = figure.axes
    one, two = by_iteration.lines
    assert one.get_ydata()[0] == pytest.approx(1.5 + 5.5) and one.get_ydata()[-1] == pytest.approx(1.5 + 15.5)
    assert set(two.get_ydata()) == {5} and [x.get_text() for x in figure.legends[0].texts] == [
        "rloo.py",
        "grpo.py",
    ]
    [band] = by_iteration.collections  # of two seeds, and none of one
    assert band.get_datalim(by_iteration.transData).y1 == pytest.approx(17 + 12.706 / 2, abs=0.01)
    assert (
        by_kl.lines[0].get_xdata()[-1] == pytest.approx(15.5) and (tmp_path / "a.png").stat().st_size > 9000
    )


def test_seeds_for_a_difference():
    """As G*Power says for a paired t test with power 0.8: 10 pairs for a difference of one std, 34 for half of it."""
    assert [compare.seeds_needed(std, 0.02) for std in (0.02, 0.04, 0.0)] == [10, 34, 2]


REFUSED = {
    "": "give the folders of runs",
    "a1 nosuch": "nosuch: not a run folder, because it contains no metrics.jsonl",
    "a1 a2": "the runs are one group, rloo.py. Give runs of another script or with other flags.",
    "a1 b1 short": "short has 12 iterations, and a1 has 20. To compare them at the same iteration, use --iterations",
    "a1 b1 --iterations 40": "a1 has 20 iterations. Use 1 <= last <= iterations <= 20.",
    "a1 b1 --last 0": "Use 1 <= last",
    "a1 again b1": "rloo.py: 2 runs have seed 1. Give each seed once.",
    "a1 b1 --metric loss": "--metric loss: a1 does not log it. It logs iteration, eval/score/all, score.",
    "a1 b1 --out b.pdf": "--out b.pdf: use a name that ends in .png",
    "a1 foreign": "foreign: args.json has no seed or no script",
    "a1 texts": "texts: score is None in iteration 1, which is no number.",
}


@pytest.mark.parametrize("line", REFUSED)
def test_bad_input_gets_a_sentence(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, seed, flags in (("a1", 1, {}), ("a2", 2, {}), ("again", 1, {}), ("b1", 1, {"script": "grpo"})):
        make_run(Path(name), seed, constant(0), **flags)
    make_run(Path("short"), 3, constant(0), end=12)
    make_run(Path("texts"), 3, constant(None))
    make_run(Path("foreign"), 3, constant(0))
    Path("foreign/args.json").write_text('{"seed": 1}')
    monkeypatch.setattr("sys.argv", ["compare.py", *line.split()])
    with pytest.raises(SystemExit) as end:
        plot.command(compare.main, "")
    said = capsys.readouterr().err
    assert (
        end.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1 and REFUSED[line] in said
    )


def test_help_and_a_command(tmp_path):
    runs = [make_run(tmp_path / f"{x}", x, constant(0.5), script=x % 2 * "p" + "po") for x in (1, 2)]
    said = launch(ROOT / "tools" / "compare.py", "--help").stdout
    assert "python tools/compare.py runs/" in said and "{None}" not in said
    said = launch(ROOT / "tools" / "compare.py", *runs, "--out", tmp_path / "a.png").stdout
    assert "| `ppo.py` | 1 | 0.500 | 0.500 |" in said and (tmp_path / "a.png").exists()


def test_the_study_has_its_rows_and_its_line_of_rloo():
    """Its rows are those of whole seeds, and the expression that it changes stands once in the script."""
    cells = product(range(1, seeds.SEEDS + 1), seeds.METHODS)
    assert [(row["seed"], row["method"]) for row in seeds.load("seeds")] == [*cells]
    assert SOURCES["rloo"].count(seeds.GROUP) == 1
