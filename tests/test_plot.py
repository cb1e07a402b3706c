"""tools/plot.py draws the numbers of the runs it is given, and refuses what is no run."""

import json

import plot
import pytest
from conftest import ROOT, launch, read_jsonl, write_jsonl
from zoo import run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two seeds of grpo.py with evaluations."""
    folder = tmp_path_factory.mktemp("runs")
    heldout = write_jsonl(folder / "heldout.jsonl", read_jsonl(ROOT / "toy" / "heldout.jsonl")[::30])
    for seed in (1, 2):
        run("grpo", run_dir=folder / f"seed{seed}", seed=seed, eval_every=2, eval_dataset=heldout)
    return folder


def lines_of(path, *folders) -> tuple[list[str], dict]:
    """The labels, and for each panel the points of each line."""
    figure = plot.draw(plot.group_runs([plot.read_run(folder) for folder in folders]), path)
    lines = {axis.get_title(): [list(zip(*line.get_data())) for line in axis.lines] for axis in figure.axes}
    return [text.get_text() for text in figure.legends[0].texts], lines


def test_seeds_are_one_line_of_their_mean(runs, tmp_path):
    folders = [runs / "seed1", runs / "seed2"]
    scores = [[line["score"] for line in read_jsonl(x / "metrics.jsonl") if "score" in line] for x in folders]
    labels, lines = lines_of(tmp_path / "plot.png", *folders)
    assert labels == ["grpo"] and (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert lines["score"] == [[(i, pytest.approx(sum(pair) / 2)) for i, pair in enumerate(zip(*scores), 1)]]
    assert [x for x, _ in lines["eval/score/2-5"][0]] == [0, 2]


def test_other_flags_are_another_line_and_odd_lines_are_left_out(runs, tmp_path):
    flags = json.loads((runs / "seed2" / "args.json").read_text()) | {"kl_coef": 0.5}
    (tmp_path / "args.json").write_text(json.dumps(flags))
    text = (runs / "seed2" / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(text + '[1]\n7\n{"score": 1}\nnull\n{"iteration": 3, "sco')
    labels, lines = lines_of(tmp_path / "plot.png", runs / "seed2", tmp_path)
    assert labels == ["grpo kl_coef 0.01", "grpo kl_coef 0.5"]
    assert lines["score"][0] == lines["score"][1]


def test_what_is_no_run_gets_one_line(runs, tmp_path):
    result = launch(ROOT / "tools" / "plot.py", runs / "seed1", tmp_path / "nothing", check=False)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"error: {tmp_path / 'nothing'} is no run: ")
