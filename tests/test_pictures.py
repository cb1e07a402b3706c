"""experiments/pictures.py: each picture of the pages is drawn, small, and the same rows give the same bytes."""

import re

import exact
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
        image = image.convert("RGBA")
        assert image.getpixel((0, 0))[3] == 0 and len(image.getcolors()) > 8  # transparent, and not empty


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


def test_cells_that_are_trained_are_those_that_are_drawn():
    rows = [(row["bug"], row["script"], str(row["flags"]), row["seed"]) for row in pictures.load("curves")]
    runs = [
        (bug, script, str(flags), n + 1)
        for bug, script, flags, seeds, _ in pictures.RUNS
        for n in range(seeds)
    ]
    assert sorted(rows) == sorted(runs)
