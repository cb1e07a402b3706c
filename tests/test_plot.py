"""tools/plot.py draws the numbers of the runs it is given."""

import plot
import pytest
from conftest import ROOT, read_jsonl, write_jsonl
from zoo import run


def test_seeds_are_one_line_of_their_mean_and_other_flags_another_line(tmp_path):
    heldout = write_jsonl(tmp_path / "heldout.jsonl", read_jsonl(ROOT / "toy" / "heldout.jsonl")[::30])
    folders = [tmp_path / "1", tmp_path / "2", tmp_path / "3"]
    for folder, kl_coef in zip(folders, (0.01, 0.01, 0.5)):
        flags = {"seed": folder.name, "kl_coef": kl_coef, "eval_every": 2, "eval_dataset": heldout}
        run("grpo", run_dir=folder, **flags)
    scores = [[line["score"] for line in read_jsonl(x / "metrics.jsonl") if "score" in line] for x in folders]
    figure = plot.draw(plot.group_runs([plot.read_run(x) for x in folders]), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert [x.get_text() for x in figure.legends[0].texts] == ["grpo kl_coef 0.01", "grpo kl_coef 0.5"]
    lines = {axis.get_title(): [list(zip(*line.get_data())) for line in axis.lines] for axis in figure.axes}
    mean = [(i, pytest.approx(sum(pair) / 2)) for i, pair in enumerate(zip(*scores[:2]), 1)]
    assert lines["score"] == [mean, list(enumerate(scores[2], 1))]
    assert [x for x, _ in lines["eval/score/2-5"][0]] == [0, 2]
