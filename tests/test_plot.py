"""tools/plot.py draws the numbers of the runs it is given, and refuses what is no run."""

import json
import shutil

import plot
import pytest
import tyro
from conftest import ROOT, launch, read_jsonl, write_jsonl
from PIL import Image
from zoo import run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two seeds of grpo.py with evaluations, and copies: another beta without a KL, one broken off, one resumed."""
    folder = tmp_path_factory.mktemp("runs")
    heldout = write_jsonl(folder / "heldout.jsonl", read_jsonl(ROOT / "toy" / "heldout.jsonl")[::30])
    for seed in (1, 2):
        run("grpo", run_dir=folder / f"seed{seed}", seed=seed, eval_every=2, eval_dataset=heldout)

    def copy(name: str, change, **flags):
        shutil.copytree(folder / "seed2", folder / name)
        old = json.loads((folder / name / "args.json").read_text())
        (folder / name / "args.json").write_text(json.dumps(old | {"run_dir": name} | flags))
        lines = (folder / name / "metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / name / "metrics.jsonl").write_text("".join(change(lines)))

    copy("no_kl", lambda lines: [line.replace('"kl"', '"other"') for line in lines], kl_coef=0.0)
    copy("broken_off", lambda lines: [*lines[:2], lines[2][:40]], seed=3)
    copy("resumed", lambda lines: [*lines[:3], *lines[2:]], seed=4)
    copy("empty", lambda lines: [])
    return folder


def curves(figure) -> dict:
    """{panel: [(x, y) of each line]}, and what each is shaded from and to."""
    lines, shades = {}, {}
    for axis in figure.axes:
        lines[axis.get_title()] = [list(zip(*line.get_data())) for line in axis.lines]
        shades[axis.get_title()] = [path.get_paths()[0].get_extents().get_points() for path in axis.collections]
    return lines, shades


def draw(runs, tmp_path, *names: str, x: str = "iteration"):
    groups = plot.group_runs([plot.read_run(runs / name) for name in names])
    figure = plot.draw(groups, tmp_path / "plot.png", x)
    return [text.get_text() for text in figure.legends[0].texts], *curves(figure)


def test_seeds_are_one_line_of_their_mean_shaded_over_their_range(runs, tmp_path):
    metrics = [read_jsonl(runs / name / "metrics.jsonl") for name in ("seed1", "seed2")]
    labels, lines, shades = draw(runs, tmp_path, "seed1", "seed2")
    assert labels == ["grpo"]
    for name in ("score", "kl", "response_length", "entropy"):
        values = [[row[name] for row in rows if name in row] for rows in metrics]
        title, pairs = plot.TITLES.get(name, name), list(zip(*values))
        assert lines[title] == [[(i, pytest.approx(sum(pair) / 2)) for i, pair in enumerate(pairs, 1)]]
        [((_, low), (_, high))] = shades[title]
        assert (low, high) == pytest.approx((min(map(min, pairs)), max(map(max, pairs))))
    evaluations = {name: [row[name] for row in metrics[0] if name in row] for name in metrics[0][0]}
    assert {name for name in lines if "eval" in name} == {name for name in evaluations if "eval" in name}
    assert [x for x, _ in lines["eval/score/2-5"][0]] == [0, 2]
    with Image.open(tmp_path / "plot.png") as picture:
        assert picture.format == "PNG" and len(picture.convert("RGB").getcolors(10**6)) > 2


def test_other_flags_are_another_line_and_a_run_may_lack_the_kl(runs, tmp_path):
    labels, lines, _ = draw(runs, tmp_path, "seed1", "no_kl", "seed2")
    assert labels == ["grpo kl_coef 0.01", "grpo kl_coef 0.0"]
    assert len(lines["score"]) == 2 and len(lines[plot.TITLES["kl"]]) == 1


def test_a_broken_off_run_and_a_resumed_one(runs, tmp_path):
    """A torn line is left out, the others go on alone; an iteration that stands there twice counts once."""
    whole, resumed = (draw(runs, tmp_path, name, x="tokens")[1] for name in ("seed2", "resumed"))
    assert whole == resumed
    scores = [row["score"] for row in read_jsonl(runs / "seed2" / "metrics.jsonl") if "score" in row]
    _, lines, _ = draw(runs, tmp_path, "seed1", "broken_off")
    first, second = [row["score"] for row in read_jsonl(runs / "seed1" / "metrics.jsonl") if "score" in row]
    assert lines["score"] == [[(1, pytest.approx((first + scores[0]) / 2)), (2, pytest.approx(second))]]


def test_tokens_are_those_generated_so_far(runs, tmp_path):
    metrics = read_jsonl(runs / "seed1" / "metrics.jsonl")
    lengths = [row["response_length"] * 16 for row in metrics if "score" in row]
    _, lines, _ = draw(runs, tmp_path, "seed1", x="tokens")
    assert [x for x, _ in lines["score"][0]] == pytest.approx([lengths[0], sum(lengths)])
    assert [x for x, _ in lines["eval/score/2-5"][0]] == pytest.approx([0, sum(lengths)])


def test_dapo_generates_as_often_as_it_samples(runs, tmp_path):
    rows = [{"iteration": i, "score": 0.5, "response_length": 3.0, "rollouts": 2.5} for i in (1, 2)]
    (tmp_path / "args.json").write_text(json.dumps({"exp_name": "dapo", "batch_size": 16}))
    write_jsonl(tmp_path / "metrics.jsonl", rows)
    assert [row["tokens"] for row in plot.read_run(tmp_path)[1]] == [120, 240]


def test_twelve_lines_differ_for_the_color_blind_and_are_not_hidden_by_shades(tmp_path):
    groups = {f"run{i}": [[{"iteration": 1, "score": i}, {"iteration": 2, "score": i}]] for i in range(21)}
    [axis] = plot.draw(groups, tmp_path / "plot.png").axes
    assert len({(line.get_color(), str(line._dash_pattern)) for line in axis.lines}) == 21
    assert not axis.collections


def test_what_is_no_run_gets_one_sentence(runs, tmp_path):
    tool = ROOT / "tools" / "plot.py"
    result = launch(tool, runs / "seed1", tmp_path / "nothing", check=False)
    assert result.returncode == 2 and result.stderr.startswith(f"error: {tmp_path / 'nothing'} is no run: ")
    assert result.stderr.count("\n") == 1 and not result.stdout
    with pytest.raises(SystemExit, match="2"):
        plot.read_run(runs / "empty")
    result = launch(tool, check=False)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    result = launch(tool, runs / "seed1", "--tokens", "--out", tmp_path / "plot.png", check=False)
    assert (result.returncode, result.stderr) == (0, "") and (tmp_path / "plot.png").exists()
    (runs / "sft").mkdir()
    (runs / "sft" / "args.json").write_text('{"exp_name": "sft", "batch_size": 16}')
    write_jsonl(runs / "sft" / "metrics.jsonl", [{"iteration": 1, "loss": 0.5}])
    assert draw(runs, tmp_path, "sft")[1]["loss"] == [[(1, 0.5)]]
    with pytest.raises(SystemExit, match="2"):
        plot.main(tyro.cli(plot.Args, args=[str(runs / "sft"), "--tokens"], use_underscores=True))
