"""The site, opened from disk in a browser without a network. make test-docs builds it."""

import re
import shutil
import subprocess

import pytest
from conftest import ROOT
from test_playground import PORTS

# make test collects the tests of the site, too, and has no playwright.
playwright = pytest.importorskip("playwright.sync_api", reason="make test-docs installs playwright")
playwright.expect.set_options(timeout=30_000)
pytestmark = pytest.mark.web
SITE = ROOT / "site"
NAMES = sorted(path.stem for path in ROOT.glob("*.py"))


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert path, "install Chromium, on Debian with apt-get install chromium"
    assert (SITE / "index.html").exists(), "build the site: make docs"
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser):
    """A function that opens a page. It may cause no error in the console and no request to a network."""
    wrong, context = [], browser.new_context(viewport={"width": 1440, "height": 30000})
    context.on("console", lambda said: said.type in ("error", "warning") and wrong.append(said.text))
    context.on("weberror", lambda error: wrong.append(str(error.error)))
    context.on("request", lambda r: r.url.startswith(("file:", "data:", "blob:")) or wrong.append(r.url))

    def open_page(address):
        page = context.new_page()
        page.goto(f"{SITE.as_uri()}/{address}")
        return page

    yield open_page
    context.close()
    assert wrong == []


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
    page = visit("compare.html#sft..grpo")
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


# From here on: the Playground.


def card(page, name: str):
    return page.locator(f"[data-script={name}]")


def test_every_port_has_a_card_with_the_code_of_its_script(visit):
    page = visit("playground.html")
    names = page.locator("[data-script]").evaluate_all("cards => cards.map(x => x.dataset.script)")
    assert sorted(names) == sorted(PORTS)
    for name in names:
        card(page, name).locator(".code").click()
        source = (ROOT / f"{name}.py").read_text()
        for function in ("compute_advantages", "policy_loss"):
            text = re.search(rf"^def {function}\(.*?(?=\n\n\n)", source, re.MULTILINE | re.DOTALL)[0]
            assert text in card(page, name).locator("pre").inner_text()


def test_two_pinned_cards_show_their_numbers_and_how_these_relate(visit):
    """A1 has the advantage 7 in maxrl.py and 1 in rloo.py, and 8 tokens; the push is the mean over 16 responses."""
    page = visit("playground.html#preset=success&pin=maxrl,rloo")
    maxrl, rloo = card(page, "maxrl"), card(page, "rloo")
    playwright.expect(maxrl.locator("[data-i='0'] .number")).to_have_text(["7", "3.5"])
    playwright.expect(rloo.locator("[data-i='0'] .number")).to_have_text(["1", "0.5"])
    playwright.expect(maxrl.locator(".scale")).to_contain_text("0.438. Same pattern as rloo.py, 7 times")
    playwright.expect(rloo.locator(".scale")).to_contain_text("0.063. Same pattern as maxrl.py, 1/7")


def test_an_edit_changes_the_cards_and_its_link_restores_them(visit):
    page = visit("playground.html#preset=equal")
    cells = card(page, "grpo").locator("[data-i='0'] .pushes i")  # one for each token of A1
    playwright.expect(cells).to_have_class([""] * 8)
    page.get_by_label("A1: reward").fill("0")
    playwright.expect(cells).to_have_class(["down"] * 8)
    page.locator(".response[data-i='0'] .ratio").fill("-0.4")
    playwright.expect(cells).to_have_class(["cut"] * 8)
    page.wait_for_url(re.compile(r"#a=\S*-0\.4"))
    copied = card(visit(page.url.rpartition("/")[2]), "grpo").locator("[data-i='0'] .pushes i")
    playwright.expect(copied).to_have_class(["cut"] * 8)
