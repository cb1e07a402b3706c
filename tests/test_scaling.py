"""docs/scaling.md says what the result files say, and the computation behind it counts right."""

import contextlib
import importlib
import json

import agreement
import fits
import transformers
import tyro
from conftest import ROOT

PAGE = (ROOT / "docs" / "scaling.md").read_text()


def test_the_page_has_the_tables_of_the_results():
    results = json.loads(agreement.RESULTS.read_text())
    assert agreement.RESULTS.with_suffix(".md").read_text() == agreement.table(results) + agreement.notes(results)
    tables = agreement.table(results).splitlines() + fits.RESULTS.with_suffix(".md").read_text().splitlines()
    assert [line for line in tables if line.startswith("|")] and not [
        line for line in tables if line.startswith("|") and line not in PAGE.splitlines()
    ]
    keys = "script", "flags", "peer", "peer_flags", "note"
    assert [[row[key] for key in keys] for row in results["rows"]] == agreement.CASES


def test_each_row_is_equal_or_explained():
    """By flags alone, or by the peer's lines that its note quotes."""
    for row in json.loads(agreement.RESULTS.read_text())["rows"]:
        assert row["then" if row["note"] else "difference"] < 1e-5, row
        assert not row["note"] or agreement.EDIT.search(agreement.NOTES[row["note"]])


def test_the_flags_of_the_scripts_are_theirs():
    for script, flags, *_ in agreement.CASES:
        tyro.cli(importlib.import_module(script).Args, args=flags.split(), use_underscores=True)
    policy_scripts = [path.stem for path in ROOT.glob("*.py") if "estimator: begin" in path.read_text()]
    missing = set(policy_scripts) - {case[0] for case in agreement.CASES}
    assert missing == {"raft"} and "`raft.py` has no row" in PAGE


def test_what_the_layers_keep_is_counted_as_with_real_tensors(monkeypatch):
    config = transformers.AutoConfig.from_pretrained(ROOT / "toy" / "policy")
    count, size = fits.kept(config, 4, 20)
    monkeypatch.setattr(fits, "FakeTensorMode", contextlib.nullcontext)
    assert (count, size) == fits.kept(config, 4, 20) and count == 161_408
    assert 1.9 < fits.kept(config, 8, 20)[1] / size < 2.1  # of the rows, and nothing of the weights
