"""The site, opened from disk in a browser without a network. make test-docs builds it."""
# ruff: noqa: F811  a test's argument has the name of an imported fixture

import re
import subprocess

import pytest
from browser import ROOT, browser, playwright, visit  # noqa: F401  two fixtures

pytestmark = pytest.mark.web
NAMES = sorted(path.stem for path in ROOT.glob("*.py"))


def diff(a, b):
    """The lines that `diff` takes out of a, and those that it puts into b."""
    output = subprocess.run(["diff", f"{a}.py", f"{b}.py"], cwd=ROOT, capture_output=True, text=True).stdout
    gone = [line[2:] for line in output.splitlines() if line.startswith("< ")]
    new = [line[2:] for line in output.splitlines() if line.startswith("> ")]
    return gone, new


def assert_lines(page, selector, lines):
    """Whole lines. CodeMirror draws only what is visible, so the page must be tall."""
    playwright.expect(page.locator(selector)).to_have_count(len(lines))
    assert page.locator(selector).evaluate_all("all => all.map(line => line.textContent)") == lines


def test_two_scripts_show_exactly_the_lines_of_diff(visit):
    """The key o shows both files whole. Another choice changes the address."""
    page = visit("compare.html#sft..grpo", {"width": 1440, "height": 30000})
    page.wait_for_selector(".cm-merge-b .cm-line")
    gone, new = diff("sft", "grpo")
    assert_lines(page, ".cm-merge-a .cm-changedLine", gone)
    assert_lines(page, ".cm-merge-b .cm-changedLine", new)
    assert page.inner_text("#count") == f"{len(gone + new)} lines differ"
    page.keyboard.press("o")
    for side, name in (("a", "sft"), ("b", "grpo")):
        source = (ROOT / f"{name}.py").read_text().splitlines()
        assert_lines(page, f".cm-merge-{side} .cm-line", source)
    page.locator("#b").select_option("ppo")
    page.wait_for_url("**/compare.html#sft..ppo")


def test_the_matrix_counts_as_diff_does_and_opens_a_pair(visit):
    page = visit("index.html")
    cells = page.locator("#matrix a")
    shown = cells.evaluate_all("cells => cells.map(c => [c.getAttribute('href'), c.textContent])")
    assert len(shown) == len(NAMES) * (len(NAMES) - 1)
    for address, count in shown:
        gone, new = diff(*address.partition("#")[2].split(".."))
        assert int(count) == len(gone + new), address
    page.click("#matrix a[href$='#cispo..gspo']")
    playwright.expect(page.locator("#formulas-a h2")).to_have_text("cispo.py")
    playwright.expect(page.locator("#formulas-b .katex-display").first).to_be_visible()


def test_the_search_works_from_disk(visit):
    page = visit("index.html")
    page.click(".md-search__button")
    page.get_by_role("combobox").fill("dynamic sampling")
    page.get_by_role("option").filter(has_text=re.compile("dynamic sampling", re.IGNORECASE)).first.wait_for()
