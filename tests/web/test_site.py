"""The site, opened from disk in a browser without a network. make test-docs builds it."""
# ruff: noqa: F811  a test's argument has the name of an imported fixture

import re
import subprocess
from urllib.parse import unquote

import pytest
from browser import ROOT, SITE, browser, playwright, visit  # noqa: F401  two fixtures

pytestmark = pytest.mark.web
PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
NAMES = sorted(path.stem for path in ROOT.glob("*.py"))
PHONE = {"width": 390, "height": 844}


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


@pytest.mark.parametrize("a, b", [("grpo", "rloo"), ("sft", "grpo")])
def test_two_scripts_show_exactly_the_lines_of_diff(visit, a, b):
    """Equal lines are folded. The key o shows both files whole."""
    page = visit(f"compare.html#{a}..{b}", {"width": 1440, "height": 30000})
    page.wait_for_selector(".cm-merge-b .cm-line")
    gone, new = diff(a, b)
    assert_lines(page, ".cm-merge-a .cm-changedLine", gone)
    assert_lines(page, ".cm-merge-b .cm-changedLine", new)
    assert page.inner_text("#count") == f"{len(gone + new)} lines differ"
    assert page.locator(".cm-merge-a .cm-collapsedLines").count() >= 2
    page.keyboard.press("o")
    for side, name in (("a", a), ("b", b)):
        source = (ROOT / f"{name}.py").read_text().splitlines()
        assert_lines(page, f".cm-merge-{side} .cm-line", source)
    assert page.locator(".cm-collapsedLines").count() == 0


def test_the_address_carries_the_choice(visit):
    page = visit("compare.html#grpo..rloo")
    a, b = page.locator("#a"), page.locator("#b")
    playwright.expect(a).to_have_value("grpo")
    b.select_option("ppo")
    playwright.expect(page).to_have_title("grpo..ppo")
    page.wait_for_url("**/compare.html#grpo..ppo")
    page.click("#swap")
    page.wait_for_url("**/compare.html#ppo..grpo")
    playwright.expect(a).to_have_value("ppo")
    page.go_back()
    playwright.expect(page).to_have_title("grpo..ppo")
    playwright.expect(b).to_have_value("ppo")


@pytest.mark.parametrize("pair", ["grpo..gpro", "grpo..%E0%A4%A", "toString..grpo", "grpo..rloo..ppo"])
def test_an_address_without_two_scripts_shows_all_pairs(visit, pair):
    page = visit(f"compare.html#{pair}")
    playwright.expect(page.locator("#unknown")).to_contain_text(pair)
    playwright.expect(page.locator("#matrix")).to_be_visible()


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


@pytest.mark.parametrize("size", [{}, PHONE], ids=["desktop", "phone"])
def test_the_keyboard_moves_from_change_to_change(visit, size):
    """Each is scrolled to 70 pixels below the bar, or as far as the page goes. The first follows the last."""
    page = visit("compare.html#sft..ppo", size)
    total = int(page.inner_text("#at").split()[0])
    is_in_place = """() => {
        const line = document.querySelector(".cm-merge-b .here");
        const before = line?.previousElementSibling;
        const top = (before?.matches(".cm-deletedChunk, .cm-mergeSpacer") ? before : line)
            ?.getBoundingClientRect().top;
        const below = top - document.querySelector("#moves").getBoundingClientRect().bottom;
        const atEnd = scrollY + innerHeight > document.documentElement.scrollHeight - 1;
        return Math.abs(below - 70) < 2 || (atEnd && below > 70 && top <= innerHeight);
    }"""

    def press(key, number):
        page.keyboard.press(key)
        playwright.expect(page.locator("#at")).to_have_text(f"{number} of {total}")
        for _ in range(5):  # compare.js scrolls for four frames
            page.evaluate("new Promise(requestAnimationFrame)")
        page.wait_for_function(is_in_place)
        return page.evaluate("scrollY")

    press("p", total)  # far away, past lines whose height is not known yet
    places = [press("n", number) for number in range(1, total + 1)]
    assert places == sorted(places) and len(set(places)) > total / 2
    press("n", 1)
    page.focus("#a")
    page.keyboard.press("n")  # in a choice, a letter chooses
    playwright.expect(page.locator("#at")).to_have_text(f"1 of {total}")


def test_pages_fit_a_phone_and_show_no_tex(visit):
    page = visit("index.html", PHONE)
    prose = """() => {
        const copy = document.querySelector(".md-content").cloneNode(true);
        copy.querySelectorAll("code, pre, .katex-mathml, #diff, script").forEach(x => x.remove());
        return copy.textContent;
    }"""
    long_responses = "playground.html#a=1_40,0_40&b=1_40,0_40"
    for address in [*PAGES, "compare.html#sft..ppo", long_responses]:
        page.goto(f"{SITE.as_uri()}/{address}")
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], address
        assert not re.search(r"\$\$|\\[a-z]+|\\\(|\\\[", page.evaluate(prose)), address


def test_links_lead_somewhere():
    """Links, pictures, scripts and anchors of every page, without the browser."""
    texts = {path: (SITE / path).read_text() for path in PAGES}
    ids = {path: set(re.findall(r'\bid="?([^"\s>]+)', text)) for path, text in texts.items()}
    ids["compare.html"] |= {f"{a}..{b}" for a in NAMES for b in NAMES}
    wrong = []
    for path, text in texts.items():
        text = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
        for link in re.findall(r'\b(?:href|src)="?([^"\s>]*)', text):
            if re.match(r"https?:|mailto:|data:|#?$", link):
                continue
            file, _, anchor = unquote(link).partition("#")
            if anchor.startswith("preset="):  # test_playground.py opens these addresses
                anchor = ""
            target = ((SITE / path).parent / file).resolve() if file else SITE / path
            name = target.relative_to(SITE).as_posix()
            if not target.is_file() or (anchor and anchor not in ids.get(name, ())):
                wrong.append(f"{path}: {link}")
    assert wrong == []


def test_the_search_works_from_disk(visit):
    page = visit("index.html")
    page.click(".md-search__button")
    page.get_by_role("combobox").fill("dynamic sampling")
    page.get_by_role("option").filter(has_text=re.compile("dynamic sampling", re.IGNORECASE)).first.wait_for()
    assert "\\\\frac" not in (SITE / "search.js").read_text()
