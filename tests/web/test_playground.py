"""The page Playground: web/estimators.mjs against the scripts, and the page in a browser."""
# ruff: noqa: F811  a test's argument has the name of an imported fixture

import dataclasses
import importlib
import json
import random
import re
import subprocess

import pytest
import torch
from browser import ROOT, browser, playwright, visit  # noqa: F401  two fixtures

pytestmark = pytest.mark.web
# A port to JavaScript is optional.
PORTS = re.findall(r"^function (\w+)\(batch\)", (ROOT / "web" / "estimators.mjs").read_text(), re.MULTILINE)
# Reads a list of batches, adds those of the presets, and writes {batches, results, presets}: results has a list for
# each script, and presets has what a preset says and the number of its batch.
PROGRAM = """
import { readFileSync } from "node:fs";
import { batchOf, ESTIMATORS, PRESETS } from "./estimators.mjs";
const batches = JSON.parse(readFileSync(0, "utf8"));
const presets = {};
for (const [name, { says, group }] of Object.entries(PRESETS)) {
  presets[name] = { says, number: batches.length };
  batches.push(batchOf(group));
}
const results = {};
for (const [name, estimate] of Object.entries(ESTIMATORS)) results[name] = batches.map(estimate);
process.stdout.write(JSON.stringify({ batches, results, presets }));
"""


def random_batch(seed: int) -> dict:
    """Two prompts with 2 to 8 responses each, of 1 to 40 tokens; in every fourth batch, groups of equal rewards."""
    g = random.Random(seed)
    k = g.randint(2, 8)
    kinds = [lambda: g.gauss(0, 1), lambda: g.choice([0, 1]), lambda: g.choice([-1, 1]), lambda: 0.5]
    reward = kinds[seed % 4]
    responses = []
    for _ in range(2):
        greedy = g.gauss(0, 1)
        for _ in range(k):
            tokens = range(g.randint(1, 40))
            response = {"reward": reward(), "greedy": greedy}
            response["logRatios"] = [g.gauss(0, 0.4 if seed % 3 else 0.05) for _ in tokens]
            response["values"] = [g.gauss(0, 1) for _ in tokens]
            for key in ("old", "ref", "teacher"):
                response[key] = [-g.expovariate(1) for _ in tokens]
            responses.append(response)
    return {"k": k, "maxLength": 40, "responses": responses}


@pytest.fixture(scope="module")
def computed():
    """The batches, and what each function of web/estimators.mjs returns for them, by one call of Node."""
    batches = [random_batch(seed) for seed in range(200)]
    command = ["node", "--input-type=module", "--eval", PROGRAM]
    options = {"cwd": ROOT / "web", "capture_output": True, "text": True}
    result = subprocess.run(command, input=json.dumps(batches), **options)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def padded(rows: list[list]):
    """(B, T) in float64, and the mask of what is not padding."""
    T = max(map(len, rows))
    mask = torch.tensor([[t < len(row) for t in range(T)] for row in rows])
    return torch.tensor([row + [0.0] * (T - len(row)) for row in rows], dtype=torch.float64), mask


@pytest.mark.parametrize("name", PORTS)
def test_javascript_computes_what_the_script_does(name, computed):
    """Advantages, the gradient of the loss, and the number of clipped tokens."""
    script = importlib.import_module(name)
    has_teacher = "teacher" in {field.name for field in dataclasses.fields(script.Args)}
    for batch, result in zip(computed["batches"], computed["results"][name], strict=True):
        rows = batch["responses"]
        part = {}
        for key in ("old", "ref", "teacher", "values", "logRatios"):
            part[key], mask = padded([row[key] for row in rows])
        rollout = {"response_mask": mask, "old_logprobs": part["old"], "values": part["values"]}
        rollout["ref_logprobs"] = part["teacher" if has_teacher else "ref"]
        rollout["kl"] = part["old"] - rollout["ref_logprobs"]
        rollout["scores"] = torch.tensor([row["reward"] for row in rows], dtype=torch.float64)
        rollout["greedy_scores"] = torch.tensor([row["greedy"] for row in rows], dtype=torch.float64)
        args = script.Args(samples_per_prompt=batch["k"], max_response_length=batch["maxLength"])
        rollout |= script.compute_advantages(args, rollout)
        logprobs = (part["old"] + part["logRatios"]).requires_grad_()
        loss, stats = script.policy_loss(args, rollout, logprobs, len(rows), int(mask.sum()))
        (gradient,) = torch.autograd.grad(loss, logprobs)
        expected = {"advantages": rollout["advantages"], "weights": -gradient}
        for key, tensor in expected.items():
            bounds = {"rtol": 1e-6, "atol": 1e-6 * float(tensor.abs().max()) + 1e-12}
            torch.testing.assert_close(padded(result[key])[0], tensor, **bounds)
        if "rejected" in stats:
            assert sum(map(all, result["clipped"])) == round(float(stats["rejected"]) * len(rows))
            continue
        # CISPO's bound keeps the gradient, so no token is stopped.
        fraction = float(stats.get("clip_fraction", 0)) if name != "cispo" else 0
        assert sum(map(sum, result["clipped"])) == pytest.approx(fraction * int(mask.sum()), abs=1e-3)


def test_the_ratios_that_a_preset_names(computed):
    def pushes(preset, script):
        """On A1 to A8 and B1 to B8, each as a whole."""
        number = computed["presets"][preset]["number"]
        return [sum(weights) for weights in computed["results"][script][number]["weights"]]

    says = {name: preset["says"] for name, preset in computed["presets"].items()}
    for script in ("grpo", "gspo", "sapo"):  # A8 and B1 have 3 times the tokens of the others
        A7, A8, B1, B2 = pushes("length", script)[6:10]
        assert (A8, B1) == pytest.approx((A7, B2)) and "1/3 of the push" in says["length"]
    A1, *others = pushes("success", "grpo")
    assert others == pytest.approx([-A1 / 7] * 7 + [0] * 8) and "7 times" in says["success"]
    sizes = [abs(push) for push in pushes("prompts", "maxrl")]
    assert f"{sum(sizes[8:]) / sum(sizes[:8]):.3g} times" in says["prompts"]


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
