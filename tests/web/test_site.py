"""The site, opened from disk in a browser without a network, and web/estimators.mjs against the scripts."""

import importlib
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
import sync
import torch
from conftest import ROOT
from references import make_rollout
from test_conformance import ours

# make test collects the tests of the site, too, and has no playwright.
playwright = pytest.importorskip("playwright.sync_api", reason="make test-docs installs playwright")
playwright.expect.set_options(timeout=30_000)
pytestmark = pytest.mark.web
SITE = ROOT / "site"
NAMES = sorted(sync.paths())
# A port to JavaScript is optional.
PORTS = re.findall(r"^function (\w+)\(batch\)", (ROOT / "web" / "estimators.mjs").read_text(), re.MULTILINE)


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
    output = subprocess.run(
        ["diff", sync.paths()[a], sync.paths()[b]], cwd=ROOT, capture_output=True, text=True
    ).stdout
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
        source = sync.paths()[name].read_text().splitlines()
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


def card(page, name: str):
    return page.locator(f"[data-script={name}]")


def test_every_port_has_a_card_with_the_code_of_its_script(visit):
    page = visit("playground.html")
    names = page.locator("[data-script]").evaluate_all("cards => cards.map(x => x.dataset.script)")
    assert sorted(names) == sorted(PORTS)
    for name in names:
        card(page, name).locator(".code").click()
        source = sync.paths()[name].read_text()
        for function in ("compute_advantages", "policy_loss"):
            text = re.search(rf"^def {function}\(.*?(?=\n\n\n)", source, re.MULTILINE | re.DOTALL)[0]
            assert text in card(page, name).locator("pre").inner_text()


def test_an_edit_changes_the_cards_and_its_link_restores_them(visit):
    page = visit("playground.html#preset=equal")
    cells = card(page, "grpo").locator("[data-i='0'] .pushes i")  # one for each token of A1
    playwright.expect(card(page, "raft").locator("[data-i='0'] .number")).to_have_text(["8", "4"])
    playwright.expect(cells).to_have_class([""] * 8)
    page.get_by_label("A1: reward").fill("0")
    playwright.expect(cells).to_have_class(["down"] * 8)
    page.locator(".response[data-i='0'] .ratio").fill("-0.4")
    playwright.expect(cells).to_have_class(["cut"] * 8)
    page.wait_for_url(re.compile(r"#a=\S*-0\.4"))
    copied = card(visit(page.url.rpartition("/")[2]), "grpo").locator("[data-i='0'] .pushes i")
    playwright.expect(copied).to_have_class(["cut"] * 8)


def random_rollout(seed: int) -> dict:
    """Groups of two to four responses; every fourth time with equal scores."""
    k = 2 + seed % 3
    rollout = make_rollout(seed, k)
    rollout["response_mask"][:2] = True  # without holes
    rollout["new_logprobs"] = rollout["old_logprobs"] + (0.02, 0.4)[seed % 2] * rollout["values"]
    if seed % 4 == 3:
        rollout["scores"] = torch.full((4 * k,), 0.5)
    rollout = {key: x.tolist() for key, x in rollout.items()}
    sizes = {"num_sequences": 4 * k, "num_tokens": sum(map(sum, rollout["response_mask"]))}
    return (
        rollout | sizes | {"samples_per_prompt": k, "max_response_length": 12}
    )  # so that dapo's penalty acts


ROLLOUTS = {str(seed): random_rollout(seed) for seed in range(60)}


@pytest.fixture(scope="module")
def computed():
    """What each function of estimators.mjs returns. The program also checks the ratios that a preset names."""
    command = ["node", ROOT / "tests" / "web" / "compute.mjs"]
    return json.loads(subprocess.check_output(command, input=json.dumps(ROLLOUTS), text=True))


@pytest.mark.parametrize("name", PORTS)
def test_javascript_computes_what_the_script_does(name, computed):
    """Advantages and the gradient of the loss."""
    script = importlib.import_module(name)
    for seed, rollout in ROLLOUTS.items():
        case = {key: np.array(x) if isinstance(x, list) else x for key, x in rollout.items()}
        sizes = {key: rollout[key] for key in ("samples_per_prompt", "max_response_length")}
        expected = ours(script)({**case, **vars(script.Args(**sizes))})
        result, mask = computed[name][seed], case["response_mask"].astype(bool)
        for key, sign in (("advantages", 1), ("gradient", -1)):
            found = np.concatenate(result["weights" if key == "gradient" else key])
            assert found == pytest.approx(sign * expected[key][mask].numpy(), rel=1e-6, abs=1e-9)
