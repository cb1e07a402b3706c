"""The page Playground: web/estimators.mjs against the scripts, and the page in a browser."""

import dataclasses
import importlib
import json
import math
import random
import re
import subprocess

import pytest
import sync
from test_site import DESKTOP, PHONE, ROOT, SITE, browser, playwright, visit  # noqa: F401  two fixtures

pytestmark = pytest.mark.web
SCRIPTS = sync.policy_scripts()
UNCLIPPED = ["reinforce", "rloo", "raft", "remax", "maxrl", "distill", "cispo", "sapo"]
# Reads {name: batches} and writes {name: results}; null where there is no function of that name.
PROGRAM = """
import { readFileSync } from "node:fs";
import { batchOf, ESTIMATORS, PRESETS } from "./estimators.mjs";
import { comparison } from "./sentences.mjs";
const { names, batches } = JSON.parse(readFileSync(0, "utf8"));
for (const { group } of Object.values(PRESETS)) batches.push(batchOf(group));
const all = (name) => ESTIMATORS[name] ? batches.map(ESTIMATORS[name]) : null;
const results = Object.fromEntries(names.map((name) => [name, all(name)]));
const relate = (a, b) => results[a].map(({ weights }, n) => comparison(weights, results[b][n].weights, b)).slice(-20);
const relations = names.flatMap((a) => names.map((b) => [a, b, relate(a, b)]));
process.stdout.write(JSON.stringify({ batches, results, relations }));
"""


def random_batch(seed: int) -> dict:
    """Two prompts with 2 to 8 responses each, of 1 to 40 tokens; in every fourth batch, groups of equal rewards."""
    g = random.Random(seed)
    k = g.randint(2, 8)
    rewards = [lambda: g.gauss(0, 1), lambda: g.choice([0, 1]), lambda: g.choice([-1, 1]), lambda: 0.5][
        seed % 4
    ]
    responses = []
    for _ in range(2):
        greedy = g.gauss(0, 1)
        for _ in range(k):
            length = g.randint(1, 40)
            many = lambda f, length=length: [f() for _ in range(length)]  # noqa: E731
            response = {"reward": rewards(), "greedy": greedy, "logRatios": many(lambda: g.gauss(0, 0.4))}
            response |= {key: many(lambda: -g.expovariate(1)) for key in ("old", "ref", "teacher")}
            responses.append(response | {"values": many(lambda: g.gauss(0, 1))})
    return {"k": k, "maxLength": 40, "responses": responses}


@pytest.fixture(scope="module")
def computed():
    """The batches, and what each function of web/estimators.mjs returns for them, by one call of Node."""
    request = {"names": SCRIPTS, "batches": [random_batch(seed) for seed in range(200)]}
    command = ["node", "--input-type=module", "--eval", PROGRAM]
    options = {"cwd": ROOT / "web", "capture_output": True, "text": True}
    result = subprocess.run(command, input=json.dumps(request), **options)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def padded(rows: list[list], torch):
    """(B, T) in float64, and the mask of what is not padding."""
    T = max(map(len, rows))
    mask = torch.tensor([[t < len(row) for t in range(T)] for row in rows])
    return torch.tensor([row + [0.0] * (T - len(row)) for row in rows], dtype=torch.float64), mask


@pytest.mark.parametrize("name", SCRIPTS)
def test_javascript_computes_what_the_script_does(name, computed):
    """Advantages, the gradient of the loss, and the number of clipped tokens."""
    torch = pytest.importorskip("torch")  # the environment of the site alone has none
    script = importlib.import_module(name)
    assert computed["results"][name], f"web/estimators.mjs has no function {name}"
    flags = {field.name for field in dataclasses.fields(script.Args)}
    for batch, result in zip(computed["batches"], computed["results"][name], strict=True):
        rows = batch["responses"]
        part = {
            key: padded([row[key] for row in rows], torch)[0]
            for key in rows[0]
            if key not in ("reward", "greedy")
        }
        mask = padded([row["old"] for row in rows], torch)[1]
        score = {
            key: torch.tensor([row[key] for row in rows], dtype=torch.float64) for key in ("reward", "greedy")
        }
        reference = part["teacher" if "teacher" in flags else "ref"]
        rollout = {"response_mask": mask, "scores": score["reward"], "greedy_scores": score["greedy"]}
        rollout |= {"old_logprobs": part["old"], "ref_logprobs": reference, "kl": part["old"] - reference}
        args = script.Args(samples_per_prompt=batch["k"], max_response_length=batch["maxLength"])
        rollout |= script.compute_advantages(args, rollout | {"values": part["values"]})
        logprobs = (part["old"] + part["logRatios"]).requires_grad_()
        loss, stats = script.policy_loss(args, rollout, logprobs, len(rows), int(mask.sum()))
        (gradient,) = torch.autograd.grad(loss, logprobs)
        expected = {"advantages": rollout["advantages"], "weights": -gradient}
        for key, tensor in expected.items():
            bounds = {"rtol": 1e-6, "atol": 1e-6 * float(tensor.abs().max()) + 1e-12}
            torch.testing.assert_close(padded(result[key], torch)[0], tensor, **bounds)
        # CISPO's bound keeps the gradient, so no token is stopped.
        fraction = float(stats.get("clip_fraction", 0)) if name != "cispo" else 0
        assert sum(map(sum, result["clipped"])) == pytest.approx(fraction * int(mask.sum()), abs=1e-3)


def test_a_relation_is_told_exactly_where_two_pushes_agree_up_to_a_factor(computed):
    weights = {
        name: [[x for row in result["weights"] for x in row] for result in results[-20:]]
        for name, results in computed["results"].items()
    }
    factors = set()
    for a, b, texts in computed["relations"]:
        for mine, theirs, text in zip(weights[a], weights[b], texts, strict=True):
            top = max(range(len(theirs)), key=lambda t: abs(theirs[t]))
            factor = mine[top] / theirs[top] if theirs[top] else 0
            pairs = zip(mine, theirs, strict=True)
            agree = all(math.isclose(x, factor * y, rel_tol=0.01, abs_tol=1e-9) for x, y in pairs)
            assert bool(text) == (agree and abs(factor) > 1e-6), (a, b, text)
            if text:
                pattern = r"Same p\w+ as \w+(?:, (1/)?([\d.]+)(?: times)? as large( in .*)?)?\."
                inverse, number, turned = re.fullmatch(pattern, text).groups()
                said = float(number or 1) ** (-1 if inverse else 1) * (-1 if turned else 1)
                assert said == pytest.approx(factor, rel=0.01) and number != "1"
                factors.add(said)
    assert len(factors) > 10


def card(page, name: str):
    return page.locator(f"[data-script={name}]")


def colours(page, name: str, row: int, column: str) -> list[str]:
    cells = card(page, name).locator(f"[data-i='{row}'] .{column} i")
    return cells.evaluate_all("cells => cells.map(x => `${x.className} ${getComputedStyle(x).background}`)")


def test_every_script_has_a_card_with_its_code(visit):  # noqa: F811
    page = visit("playground.html")
    names = page.locator("[data-script]").evaluate_all("cards => cards.map(x => x.dataset.script)")
    assert sorted(names) == SCRIPTS and names[:2] == ["grpo", "dr_grpo"]
    for name in names:
        card(page, name).locator(".says").click()
        source = (ROOT / f"{name}.py").read_text()
        title = re.search(r'^"""(.*)$', source, re.MULTILINE)[1]
        playwright.expect(card(page, name).locator(".title")).to_have_text(title)
        playwright.expect(card(page, name).locator(".code")).to_have_text("hide code")
        for function in ("compute_advantages", "policy_loss"):
            text = re.search(rf"^def {function}\(.*?(?=\n\n\n)", source, re.MULTILINE | re.DOTALL)[0]
            assert text in card(page, name).locator("pre").inner_text()
        card(page, name).locator(".code").click()
        playwright.expect(card(page, name).locator("pre")).to_be_hidden()
        playwright.expect(card(page, name).locator(".code")).to_have_text("code")


def test_two_pinned_cards_say_how_their_pushes_relate(visit):  # noqa: F811
    """Advantages of 7 and 1 for A1, over 16 responses. The sentences are the same."""
    page = visit("playground.html#preset=success&pin=maxrl,rloo")
    maxrl, rloo = (card(page, name).locator(".scale") for name in ("maxrl", "rloo"))
    push = "Strongest push on a token:"
    playwright.expect(maxrl).to_have_text(f"{push} 0.438. Same pattern as rloo.py, 7 times as large.")
    playwright.expect(rloo).to_have_text(f"{push} 0.063. Same pattern as maxrl.py, 1/7 as large.")
    page.get_by_label("B1: reward").fill("1")
    page.get_by_label("B2: reward").fill("1")  # MaxRL divides by the mean reward of each prompt
    playwright.expect(rloo).not_to_contain_text("Same")
    page.click("[data-preset=success]")
    playwright.expect(rloo).to_contain_text("Same pattern as maxrl.py")
    card(page, "grpo").locator(".pin").click()
    playwright.expect(rloo).to_contain_text("Same pattern as grpo.py")
    card(page, "grpo").locator(".pin").click()
    playwright.expect(rloo).to_have_text(f"{push} 0.063.")
    playwright.expect(maxrl).to_have_text(f"{push} 0.438.")


def test_a_sentence_about_the_clip_counts_what_is_hatched(visit):  # noqa: F811
    page = visit("playground.html#preset=moved&pin=gspo,sapo")
    playwright.expect(card(page, "gspo").locator(".says")).not_to_be_empty()
    why = "far enough in the wanted direction"
    for name in SCRIPTS:
        says = card(page, name).locator(".says").inner_text()
        hatched = card(page, name).locator("i.cut").count()
        assert (why in says) == (hatched > 0) == (name not in UNCLIPPED), name
        if name == "gspo":
            rows = card(page, name).locator(".row:has(.cut)").count()
            assert f"stops {rows} of the 16 responses, each as a whole: " in says and hatched == 8 * rows
        elif hatched:
            assert f"stops {hatched} of the 128 tokens: " in says
        elif name in ("sapo", "cispo"):
            assert says.startswith("No push is cut to zero; moved tokens are only scaled, by a factor of ")
        else:
            assert says == "The log-ratios change nothing."
    for name, unit in (("gspo", "response"), ("grpo", "token")):
        hatched = card(page, name).locator("i.cut").first
        hatched.hover()
        playwright.expect(hatched).to_have_attribute("title", re.compile(f"moved this {unit} {why}"))


def test_a_reward_changes_cells_and_sentences(visit):  # noqa: F811
    page = visit("playground.html#preset=equal")
    says = card(page, "grpo").locator(".says")
    playwright.expect(says).to_have_text("No token is pushed: all advantages are 0.")
    before = colours(page, "grpo", 0, "pushes")
    page.get_by_label("A1: reward").fill("0")
    playwright.expect(says).not_to_have_text("No token is pushed: all advantages are 0.")
    after = colours(page, "grpo", 0, "pushes")
    assert len(before) == len(after) == 8 and before != after
    assert all(x.startswith("down ") for x in after)
    assert all(x.startswith("up ") for x in colours(page, "grpo", 1, "advantages"))
    page.get_by_label("A1: tokens", exact=True).fill("12")
    playwright.expect(card(page, "rloo").locator("[data-i='0'] .pushes i")).to_have_count(12)


def test_the_first_screen_says_why_grpo_prefers_short_right_answers(visit):  # noqa: F811
    page = visit("playground.html")
    says = card(page, "grpo").locator(".says")
    playwright.expect(says).to_contain_text("so each token gets 1/3 of the push of a token of a short one")
    playwright.expect(says).to_contain_text(
        "A short right answer gains most per token, a long wrong one loses least"
    )
    assert says.bounding_box()["y"] < DESKTOP["height"]
    playwright.expect(card(page, "dr_grpo").locator(".says")).to_contain_text("gets the same push")


def test_the_keyboard_moves_one_token_past_the_clip(visit):  # noqa: F811
    page = visit("playground.html")
    page.locator(".response[data-i='0'] [data-t='0']").focus()
    page.keyboard.press("ArrowRight")
    for _ in range(4):
        page.keyboard.press("ArrowUp")
    hatched = card(page, "grpo").locator("[data-i='0'] .pushes i").nth(1)
    playwright.expect(hatched).to_have_class("cut")
    assert [x.split()[0] for x in colours(page, "grpo", 0, "pushes")] == ["up", "cut", *["up"] * 6]
    assert all(x.startswith("up ") for x in colours(page, "rloo", 0, "pushes"))  # takes no ratio
    page.keyboard.press("Enter")  # now the slider moves this token only
    page.locator(".response[data-i='0'] .ratio").fill("0")
    playwright.expect(hatched).to_have_class("up")


def test_a_chosen_token_is_named_and_can_be_released(visit):  # noqa: F811
    page = visit("playground.html")
    playwright.expect(
        page.get_by_text("Click a square, then move the slider or press the arrow keys.")
    ).to_be_visible()
    row = page.locator(".response[data-i='0']")
    squares, slider, everything = (row.locator(x) for x in ("[data-t]", ".ratio", ".all"))
    ways = [
        everything.click,
        lambda: page.keyboard.press("Escape"),
        page.locator("h1").click,
        page.locator(".response[data-i='1'] .ratio").click,
    ]
    for n, release in enumerate(ways):
        squares.nth(2).click()
        playwright.expect(row).to_contain_text("log-ratio of token 3: ")
        slider.click()
        slider.fill("0.4")
        playwright.expect(row).to_contain_text("log-ratio of token 3: 0.4")
        playwright.expect(squares.nth(1)).to_have_attribute("title", re.compile(f"log-ratio {n / 10:g}$"))
        release()
        playwright.expect(row).not_to_contain_text("log-ratio of token")
        playwright.expect(everything).to_be_hidden()
        slider.fill(f"{(n + 1) / 10}")
        playwright.expect(row).to_have_text(re.compile(rf"A1\s*0.{n + 1}"))
    squares.nth(2).click()
    page.locator(".response[data-i='1'] [data-t='4']").click()
    playwright.expect(page.locator(".response[data-i='1']")).to_contain_text("log-ratio of token 5: ")
    playwright.expect(row).not_to_contain_text("log-ratio of token")


def test_fewer_responses_keep_right_wrong_and_long_ones(visit):  # noqa: F811
    page = visit("playground.html")

    def shown(column: str) -> list[list[str]]:
        values = page.locator(f"#group .{column}").evaluate_all("all => all.map(x => x.value)")
        return [values[: len(values) // 2], values[len(values) // 2 :]]

    for count in range(7, 2, -1):
        page.locator("#k").fill(str(count))
        page.locator("#k").press("Enter")
        playwright.expect(page.locator("#group .reward")).to_have_count(2 * count)
        assert all(set(rewards) == {"0", "1"} for rewards in shown("reward"))
        assert all("24" in lengths for lengths in shown("length"))
        if count == 4:
            assert shown("reward") == [["1", "1", "0", "0"], ["1", "1", "0", "0"]]
            assert "gets 1/3 of the push" in card(page, "grpo").locator(".says").inner_text()


@pytest.mark.parametrize("state", ["preset=success&pin=maxrl,rloo", "preset=moved&pin=grpo,gspo", ""])
def test_a_phone_shows_a_pinned_sentence_within_about_a_screen(visit, state):  # noqa: F811
    """The editor is folded, and open on a desktop. The presets are one row that scrolls to the one shown."""
    page = visit(f"playground.html#{state}", PHONE)
    playwright.expect(page.locator(".says").first).not_to_be_empty()
    assert page.locator(".says").first.bounding_box()["y"] < 1000
    assert page.locator("#presets").bounding_box()["height"] < 50
    shown = page.locator("#presets [aria-pressed=true]").bounding_box()
    assert shown["x"] >= 0 and shown["x"] + shown["width"] <= PHONE["width"]
    playwright.expect(page.locator("#group")).to_be_hidden()
    page.get_by_text("Change the responses").click()
    playwright.expect(page.get_by_label("B2: reward")).to_be_visible()
    playwright.expect(visit(f"playground.html#{state}").locator("#group")).to_be_visible()


def test_a_link_restores_the_state(visit):  # noqa: F811
    page = visit("playground.html")
    page.click("[data-preset=outlier]")
    page.get_by_label("B2: reward").fill("-2.5")
    page.get_by_label("B2: tokens", exact=True).fill("5")
    page.locator(".response[data-i='2'] .ratio").fill("0.3")
    page.locator(".response[data-i='3'] [data-t='4']").click()
    page.locator(".response[data-i='3'] .ratio").fill("-0.4")
    page.locator("[data-p='0']").fill("0.5")
    if "distill" in SCRIPTS:
        page.locator("#teacher").fill("0.3")
    page.locator("#k").fill("6")
    page.locator("#k").press("Enter")
    page.select_option("#ask", "ratios")
    card(page, "rloo").locator(".pin").click()
    page.wait_for_url("**pin=dr_grpo,rloo")
    page.wait_for_timeout(300)
    copied = visit(page.url.rpartition("/")[2])
    values = "() => [...document.querySelectorAll('#play input, #play select')].map(x => x.value)"
    for _ in range(2):
        copied.wait_for_timeout(300)
        assert copied.url == page.url and copied.evaluate(values) == page.evaluate(values)
        for name in SCRIPTS:
            assert (
                card(copied, name).locator(".cells").inner_html()
                == card(page, name).locator(".cells").inner_html()
            )
            assert (
                card(copied, name).locator(".says").inner_text()
                == card(page, name).locator(".says").inner_text()
            )
        copied.reload()
    page.go_back()
    playwright.expect(page.get_by_label("A1: reward")).to_have_value("1")


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_page_of_a_script_leads_to_a_preset_and_a_comparison(visit, name):  # noqa: F811
    page = visit(f"scripts/{name}.html")
    page.get_by_role("link", name="Playground").last.click()
    playwright.expect(page.locator("#unknown")).to_be_empty()
    preset, pinned = re.fullmatch(r".*#preset=(\w+)&pin=(\w+,\w+)", page.url).groups()
    playwright.expect(page.locator(f"[data-preset={preset}]")).to_have_attribute("aria-pressed", "true")
    assert pinned.split(",")[0] == name and set(pinned.split(",")) <= set(SCRIPTS)


@pytest.mark.parametrize(
    "address", ["a=1_8&b=1_8", "a=2x1_8&b=3x1_8", "a=2x1_99&b=2x1_8", "preset=no", "a=x&b=y", "other=1"]
)
def test_an_address_without_a_group_shows_the_first_preset(visit, address):  # noqa: F811
    page = visit(f"playground.html#{address}")
    playwright.expect(page.locator("#unknown")).to_contain_text("describes no group")
    playwright.expect(page.locator("[data-preset=length]")).to_have_attribute("aria-pressed", "true")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_it_fits_and_can_be_read_in_both_colour_schemes(visit, size, scheme):  # noqa: F811
    """Also with the longest responses. Up, down and no push differ in colour from each other and from the page."""
    page = visit("playground.html", size, color_scheme=scheme)
    for preset in page.locator("#presets button").all():
        preset.click()
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    if size == PHONE:
        page.get_by_text("Change the responses").click()
    page.get_by_label("A1: tokens", exact=True).fill("40")
    page.locator(".response[data-i='0'] [data-t='39']").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    card(page, "grpo").locator(".code").click()
    playwright.expect(card(page, "grpo").locator("[data-i='0'] .pushes i")).to_have_count(40)
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    looks = page.locator("#legend i").evaluate_all("all => all.map(x => getComputedStyle(x).background)")
    assert len(set(looks)) == 4
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 200) == (scheme == "dark")
