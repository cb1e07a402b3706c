"""experiments/pictures.py: each picture of the pages is drawn, small, and the same rows give the same bytes."""

import re

import exact
import grid
import pictures
import pytest
from conftest import ROOT
from PIL import Image

SMALLER = {"learn_baseline": {"count": 5}, "exact_length": {"pace": 1.0}}


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_drawn_twice_alike(name, tmp_path):
    one, two = (pictures.save(name, tmp_path / x, **SMALLER.get(name, {})) for x in "ab")
    assert one.read_bytes() == two.read_bytes()
    with Image.open(one) as image:
        assert image.width == 920 and not {"Software", "date:create"} & image.info.keys()
        assert image.getpixel((0, 0))[3] == 0 and image.getcolors(256) is None  # transparent, and not empty


def test_every_picture_of_the_pages_has_its_code():
    drawn = {ROOT / "docs" / f"{name}.png" for name in pictures.PICTURES}
    assert drawn == {*ROOT.glob("docs/**/*.png")}
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    shown = {
        (x.parent / file).resolve()
        for x in pages
        for file in re.findall(r"\]\(([^)\s]+\.png)\)", x.read_text())
    }
    assert shown == drawn


def test_the_rows_of_a_new_kl_are_those_of_the_page():
    """A row of results/exact_kl.jsonl, computed again."""
    [row] = [
        row
        for row in exact.load("exact_kl")
        if row["depth"] == 4 and (row["way"], row["term"][:2]) == ("rare", "k3")
    ]
    assert (
        exact.measure_kl(None, *(row[x] for x in ("vocabulary", "depth", "way", "term"))).items()
        <= row.items()
    )


def test_the_rows_of_the_curves_are_those_that_are_drawn():
    cells = [str({name: row[name] for name in pictures.CELLS[0]}) for row in pictures.load("curves")]
    assert sorted(cells) == sorted(map(str, pictures.CELLS))


def test_the_tables_and_the_picture_of_the_grid(capsys, tmp_path):
    """Standard errors over two seeds, from made-up rows. Differences are between runs of the same seed."""
    scores = {("rloo", 1): 0.5, ("rloo", 2): 0.7, ("grpo", 2): 0.9, ("grpo", 1): 0.6}
    made = {"date": "2026-01-01", "machine": "1 core", "versions": ["torch 1"], "commit": "abc"}
    rows = [
        made
        | {"learning_rate": rate, "loss": loss, "advantage": advantage, "seed": seed}
        | {"score": score + bonus, "score, last 10": 1.0, "norm clipped": 0.25, "ratio clipped": 0.0}
        for (advantage, seed), score in scores.items()
        for rate, loss, bonus in ((2e-4, "gdpo", 0.04), (2e-4, "gspo", 0.0), (5e-4, "gspo", 0.3))
    ]
    grid.table(rows)
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    of_grpo = next(line for line in lines if line[0] == "| `grpo`")
    assert of_grpo[3:] == ["0.790 ± 0.150", "0.750 ± 0.150", "0.770 ± 0.150", "0.150 ± 0.050 |"]
    assert ["25.0 % (25.0-25.0)"] in (line[4:5] for line in lines)
    higher = [row | {"score": row["score"] + 0.1} for row in rows]  # the colors stay, the numbers change
    one, two = (pictures.save("learn_grid", tmp_path / x, rows=y) for x, y in (("a", rows), ("b", higher)))
    assert one.read_bytes() != two.read_bytes()


def test_the_rows_of_the_grid_are_those_of_whole_seeds():
    names = ("seed", "learning_rate", "advantage", "loss")
    assert [{x: row[x] for x in names} for row in pictures.load("grid")] == grid.CELLS
