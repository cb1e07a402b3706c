"""The site, opened from disk in a browser without a network, and its JavaScript, compared with the scripts."""

import html
import importlib
import json
import re
import runpy
import shutil
import subprocess

import pytest
import sync
from conftest import ROOT
from explain import loss_and_push
from references import make_rollout

# make test collects the tests of the site, too, and has no playwright.
playwright = pytest.importorskip("playwright.sync_api", reason="make test-docs installs playwright")
playwright.expect.set_options(timeout=30_000)
pytestmark = pytest.mark.web
SITE = ROOT / "site"
PATHS = sync.paths()
# A port to JavaScript is optional.
PORTS = re.findall(r"^function (\w+)\(batch\)", (ROOT / "web" / "train.js").read_text(), re.MULTILINE)
BETA = 0.3
NUMBER = re.compile(r"\d+(?:\.\d+)?")


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
    """A function that opens a page. An error in the console, or a request to a network, fails the test."""
    wrong, context = [], browser.new_context(viewport={"width": 1440, "height": 900})
    context.on("console", lambda said: said.type in ("error", "warning") and wrong.append(said.text))
    context.on("weberror", lambda error: wrong.append(str(error.error)))
    context.on("request", lambda r: r.url.startswith(("file:", "data:", "blob:")) or wrong.append(r.url))

    def open_page(address, width=1440):
        page = context.new_page()
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(f"{SITE.as_uri()}/{address}")
        return page

    yield open_page
    context.close()
    assert wrong == []


RAW = """() => { // Markdown in the text of a page, without its code
    const page = document.querySelector(".md-content").cloneNode(true);
    page.querySelectorAll("pre, code, script, style").forEach((code) => code.remove());
    return page.textContent.match(/.*(\\]\\(|!\\[|\\*\\*).*/g) ?? []; }"""
WRAPPED = """() => { // cells whose number is broken into lines
    const range = document.createRange();
    const isBroken = ({ firstChild }) => (range.selectNodeContents(firstChild), range.getClientRects().length > 1);
    const cells = [...document.querySelectorAll("td:not(:has(*)):not(:empty)")];
    const numbers = cells.filter((cell) => /^[-+\u2212]?[0-9][0-9.,;:%±() +\u2212-]*$/.test(cell.textContent));
    return numbers.filter(isBroken).map((cell) => cell.textContent); }"""


def test_every_page_fits_a_phone_and_its_links_lead_somewhere(visit):
    page, targets, links, pictures = visit("index.html", width=375), set(), {}, set()
    for path in sorted(SITE.rglob("*.html")):
        page.goto(path.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
        assert page.locator(".arithmatex").count() == 0, f"{path} has TeX"
        assert "<mi>K</mi>" not in path.read_text(), f"{path} has KL as a product"
        assert page.evaluate(RAW) == [], f"{path} has Markdown"
        assert page.evaluate(WRAPPED) == [], f"{path} has numbers of several lines"
        pictures |= {*page.evaluate("[...document.images].map(image => image.src)")}
        ids = page.evaluate("[...document.querySelectorAll('[id]')].map(element => element.id)")
        targets |= {path.as_uri(), *(f"{path.as_uri()}#{name}" for name in ids)}
        links |= dict.fromkeys(page.evaluate("[...document.links].map(link => link.href)"), path.name)
    for link, name in links.items():
        file, _, anchor = link.partition("#")
        is_page = file.endswith(("compare.html", "train.html"))  # they read the part after #
        target = file if is_page or not anchor else link
        assert not link.startswith("file:") or target in targets, (name, link)
    docs = ROOT / "docs"
    assert pictures == {(SITE / path.relative_to(docs)).as_uri() for path in docs.glob("**/*.png")}


def test_the_page_of_a_script_leads_to_its_section_its_comparison_and_its_neighbors(visit):
    for name, expected in {
        "grpo.py": ["methods.html#grpo", "compare.html#rloo..grpo", "rloo.py.html", "ppo.py.html"],
        "variants/grpo_lora.py": ["variants.html#lora", "compare.html#grpo..grpo_lora"],
        "dpo.py": ["stages.html#dpo", "compare.html#grpo..dpo", "reward_model.py.html"],
    }.items():
        page = visit(f"{name}.html")
        links = page.locator("h1 + p a").evaluate_all("all => all.map(link => link.href)")
        assert {f"{SITE.as_uri()}/{link}" for link in expected} <= {*links}
        numbers = page.evaluate("[...document.querySelectorAll('.linenos')].map((x) => +x.dataset.linenos)")
        assert numbers == [*range(1, (ROOT / name).read_text().count("\n") + 1)]


def count(name: str, lines: list[str]) -> int:
    """How many of the lines are code of the method. No line that differs is also elsewhere in the script."""
    source = PATHS[name].read_text()
    kinds = zip(source.splitlines(), sync.kinds(source), strict=True)
    code = {line for line, kind in kinds if kind == ("method", "code") and line.strip()}
    return sum(line in code for line in lines)


@pytest.mark.parametrize(("a", "b"), [("sft", "grpo"), ("grpo", "rloo"), ("grpo_fsdp", "grpo")])
def test_compare_shows_exactly_the_lines_of_diff(a, b, visit):
    """And it opens with the docstring folded. The table of all pairs counts the code of the methods."""
    command = ["git", "diff", "--no-index", "--no-ext-diff", "--no-color", PATHS[a], PATHS[b]]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.partition("\n@@")[2].splitlines()
    gone, new = ([line[1:] for line in lines if line[:1] == sign] for sign in "-+")
    page, scripts = visit("compare.html"), sync.policy_scripts()
    assert page.locator("#matrix a").count() == len(scripts) * (len(scripts) - 1)
    if {a, b} <= {*scripts}:
        cell = page.locator(f"#matrix a[href$='#{a}..{b}']")
        assert int(cell.inner_text()) == count(a, gone) + count(b, new)
        cell.click()
    else:
        page.select_option("#a", a)
        page.select_option("#b", b)
    page.locator("#count:not(:empty)").wait_for()  # until the page has compared
    for side, name, changed in (("a", a, gone), ("b", b, new)):
        for selector, lines in ((".hunk ", changed), ("", PATHS[name].read_text().splitlines())):
            found = page.locator(f"{selector}.{side} .line")
            assert found.evaluate_all("all => all.map(line => line.textContent)") == lines
        folded = page.locator(f"#diff > .head:not([open]) .{side} .line").all_text_contents()
        assert folded[-1] == '"""' and [*folded].count('"""') == 1
    number = page.evaluate("hunks().length")
    assert 0 < number < page.locator(".hunk").count()
    for key, place in (("p", number), ("n", 1)):
        page.keyboard.press(key)
        assert page.inner_text("#at").startswith(f"{place} of {number}")
        playwright.expect(page.locator(".hunk.here")).to_be_in_viewport()


def test_the_search_works_from_disk(visit):
    page = visit("index.html")
    page.click(".md-search__button")
    box, options = page.get_by_role("combobox"), page.get_by_role("option")
    parts = [("dynamic", "dynamic"), (" sampling", "dynamic sampling")]
    for typed, text in parts:  # the search answers after each
        box.press_sequentially(typed)
        options.filter(has_text=re.compile(text, re.IGNORECASE)).first.wait_for()
    playwright.expect(box).to_have_value("dynamic sampling")


def random_rollout(seed: int) -> dict:
    """Groups of two to four responses. Every fourth rollout has equal scores."""
    rollout = make_rollout(seed, 2 + seed % 3)
    rollout["response_mask"][:2] = True  # without holes
    rollout["new_logprobs"] = rollout["old_logprobs"] + (0.02, 0.4)[seed % 2] * rollout["values"]
    if seed % 4 == 3:
        rollout["scores"][:] = 0.5
    return rollout


def batch_of(rollout: dict) -> dict:
    """The rollout as an estimator of train.js reads it."""
    tensors = {"old": rollout["old_logprobs"], "ref": rollout["ref_logprobs"], "values": rollout["values"]}
    tensors["logRatios"] = rollout["new_logprobs"] - rollout["old_logprobs"]
    scores, greedy_scores = rollout["scores"].tolist(), rollout["greedy_scores"].tolist()
    responses = []
    for i, mask in enumerate(rollout["response_mask"]):
        tokens = {name: x[i][mask].tolist() for name, x in tensors.items()}
        responses.append({"reward": scores[i], "greedy": greedy_scores[i]} | tokens)
    return {"k": len(scores) // 4, "beta": BETA, "maxLength": 12, "responses": responses}


@pytest.mark.parametrize("name", PORTS)
def test_javascript_computes_what_the_script_does(name, visit):
    """Advantages and the gradient of the loss."""
    script, rollouts = importlib.import_module(name), [random_rollout(seed) for seed in range(60)]
    if name == "maxrl":  # it accepts no other scores
        for rollout in rollouts:
            rollout["scores"] = (rollout["scores"] > 0).to(rollout["scores"])
    text = json.dumps([batch_of(rollout) for rollout in rollouts])  # playwright is slow with lists
    compute = f"text => JSON.stringify(JSON.parse(text).map({name}))"
    results = json.loads(visit("train.html").evaluate(compute, text))
    for seed, (rollout, result) in enumerate(zip(rollouts, results, strict=True)):
        args, mask = script.Args(samples_per_prompt=2 + seed % 3), rollout["response_mask"]
        args.max_response_length = 12
        args.kl_coef = BETA if args.kl_coef else 0.0
        rollout |= script.compute_advantages(args, rollout)
        _, push = loss_and_push(script, args, rollout, rollout["new_logprobs"], len(mask), mask.sum().item())
        for key, expected in (("advantages", rollout["advantages"]), ("weights", push)):
            found = [x for row in result[key] for x in row]
            assert found == pytest.approx(expected[mask].tolist(), rel=1e-6, abs=1e-9)


def test_the_tree_is_computed_from_the_toy():
    measured = runpy.run_path(ROOT / "web" / "make_tree.py")["tree_js"]()
    written, number = (ROOT / "web" / "tree.js").read_text(), re.compile(r"0\.\d+")
    assert number.sub("", written) == number.sub("", measured)
    expected = [float(x) for x in number.findall(measured)]
    assert [float(x) for x in number.findall(written)] == pytest.approx(expected, abs=1e-6)


def test_the_numbers_of_the_lessons(visit):
    """For each link of a question, the answer quotes what the button `20 seeds` says at its address."""
    page = visit("train.html")
    for lesson in page.locator("#lessons > li").all():
        links = [link.get_attribute("href") for link in lesson.locator("a[href^='#']").all()]
        answers = lesson.locator("q").all_text_contents()
        assert len(answers) in (0, len(links))
        for link, answer in zip(links, answers):
            page.goto(f"{SITE.as_uri()}/train.html{link}")
            page.evaluate("(load(), trySeeds())")
            said = page.inner_text("#said")
            assert page.is_visible("#apart")
            assert NUMBER.sub("", said) == NUMBER.sub("", answer), link
            expected = [float(x) for x in NUMBER.findall(said)]
            assert [float(x) for x in NUMBER.findall(answer)] == pytest.approx(expected, abs=0.011), link


def test_learn_links_to_addresses_that_have_a_lesson():
    links = re.findall(r'href="(#[^"]*)"', html.unescape((ROOT / "web" / "train.html").read_text()))
    addresses = re.findall(r"train\.html(#[^)]*)\)", (ROOT / "docs" / "learn.md").read_text())
    assert addresses and {*addresses} <= {*links}


def test_buttons_keys_and_the_links_of_lessons(visit):
    page = visit("../web/train.html")  # it also opens without the site
    assert page.locator(".blank").count() == 8 and page.is_hidden("#apart")
    page.click("#step")
    assert page.evaluate("run.policy[0] > START[0] && run.policy[1] < START[1]")
    page.focus("#rows")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#said").startswith("think: probability")
    assert page.get_attribute("#settings", "open") is None
    for link in page.locator("#lessons a[href^='#']").all():
        link.click()
        playwright.expect(page.locator("#lesson")).to_contain_text(link.inner_text())
        for part in filter(None, link.get_attribute("href")[1:].split("&")):
            name, value = part.split("=")
            if name != "run":  # the page reads its address a moment after the click
                playwright.expect(page.locator(f"[name={name}]")).to_have_value(value)
        text = page.inner_text("#lesson")
        page.evaluate("(both(iterate), draw())")
        assert page.locator(".blank").count() == 0
        page.reload()
        assert page.inner_text("#lesson") == text


GRADIENTS = """() => { // of score - 0.3 KL, on a policy that has moved: by differences, and by rloo on all pairs
    const run = newRun({ method: "rloo", prompts: 1, k: 2, beta: 0.3, right: 1, seed: 1 });
    const [prompt, policy, found] = [run.prompts[0], START.map((x, n) => x + Math.sin(n)), START.map(() => 0)];
    const goal = ({ accuracy, distance }) => accuracy - 0.3 * distance;
    const at = (n, d) => goal(exact([prompt], policy.map((x, m) => (m == n ? x + d : x))));
    const chance = ({ tokens }) => Math.exp(logProbOf(tokens, policy));
    for (const a of prompt.responses) for (const b of prompt.responses) {
        const rollout = [a, b].map((response) => ({ prompt, greedy: 0, ...response }));
        const { weights } = pushes({ ...run, policy, old: policy, rollout });
        gradient(rollout, weights, policy).forEach((x, n) => (found[n] += chance(a) * chance(b) * x));
    }
    return [found, policy.map((_, n) => (at(n, 1e-5) - at(n, -1e-5)) / 2e-5)]; }"""


def test_rloo_has_the_exact_gradient_on_the_page(visit):
    found, expected = visit("train.html").evaluate(GRADIENTS)
    assert found == pytest.approx(expected, abs=1e-8)


PUSHES = """() => { // on the tokens of the response that thinks and is wrong
    const i = run.rollout.findIndex(({ isGuess, score }) => !isGuess && !score);
    return run.rollout[i].tokens.map(({ text }, t) => [text, pushes(run).weights[i][t]]); }"""


def test_the_critic_blames_what_the_lesson_says(visit):
    """The pushes on a wrong response after 30 rollouts, with ppo and with reinforce_pp."""
    page = visit("train.html#method=ppo&run=30")
    assert page.url.endswith("run=30")
    answer = page.locator("#lesson details").text_content().replace("\N{MINUS SIGN}", "-")
    pushes = page.evaluate(PUSHES)
    slip = [token for token, _ in pushes].index("9")
    assert pushes[slip][1] == min(push for _, push in pushes)
    numbers = {round(pushes[place][1], 3) for place in (slip, 0, slip + 1, -1)}
    page.goto(f"{SITE.as_uri()}/train.html#method=reinforce_pp&seed=2&run=30")
    page.evaluate("load()")
    numbers |= {round(push, 2) for _, push in page.evaluate(PUSHES)}
    assert {float(x) for x in re.findall(r"-?0\.\d+", answer)} == numbers


CONTRASTS = """() => [...document.querySelectorAll("#rows i")].map((token) => {
    const { color, backgroundColor } = getComputedStyle(token);
    const [high, low] = [color, backgroundColor].map((text) => {
        const parts = text.match(/[\\d.]+/g).slice(0, 3).map((x) => (text.startsWith("color") ? Number(x) : x / 255));
        const [r, g, b] = parts.map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
    }).sort((a, b) => b - a);
    return high / low; })"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_tokens_can_be_read_on_their_colors(scheme, visit):
    """The contrast that WCAG asks for, 4.5."""
    for address in ("train.html", "../web/train.html"):
        page = visit(address)
        page.emulate_media(color_scheme=scheme)
        assert min(page.evaluate(CONTRASTS)) > 4.5
