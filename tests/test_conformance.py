"""Our scripts pass the cases of conformance/, and check.py names the mistakes that are planted in them."""

import math
import re
from functools import partial
from types import SimpleNamespace

import check
import make_vectors
import numpy as np
import pytest
import sync
import torch
from conftest import ROOT, SOURCES
from explain import loss_and_push
from planted import IN_VECTORS

METHODS = check.VECTORS["methods"]
# The script and the patches of each method. The lines of entropy_bonus are in main, so it is left out.
SCRIPTS = {method: [method] for method in METHODS if method in sync.paths()}
SCRIPTS |= {"dual_clip": ["grpo", "dual_clip"], "ipo": ["dpo", "ipo"]}
SCRIPTS |= {method: ["grpo_correction"] for method in METHODS if method.startswith("correction")}


def of_pairs(script, case):
    tensors = {key: torch.as_tensor(x) for key, x in case.items() if hasattr(x, "shape")}
    new = tensors["new_logprobs" if hasattr(script, "dpo_loss") else "scores"].requires_grad_()
    if hasattr(script, "dpo_loss"):
        pairs = [(x * tensors["response_mask"]).sum(1).view(-1, 2).T for x in (new, tensors["ref_logprobs"])]
        loss = script.dpo_loss(*pairs[0], *pairs[1], case["beta"])
    else:
        loss = script.preference_loss(*new.view(-1, 2).T)
    return {"loss": loss.item(), "gradient": torch.autograd.grad(loss, new)[0]}


def ours(script):
    """A script as a function for check.report."""
    if not hasattr(script, "policy_loss"):
        return partial(of_pairs, script)

    def function(case):
        args = SimpleNamespace(**{key: x.tolist() if hasattr(x, "tolist") else x for key, x in case.items()})
        rollout = {key: torch.as_tensor(x) for key, x in case.items() if hasattr(x, "shape")}
        rollout["kl"] = rollout["old_logprobs"] - rollout["ref_logprobs"]
        mask = rollout["response_mask"] = rollout["response_mask"].bool()
        rollout = {key: x * mask if x.shape == mask.shape else x for key, x in rollout.items()}
        advantages = script.compute_advantages(args, rollout)["advantages"]
        weights = script.correction_weights(args, rollout) if hasattr(script, "correction_weights") else 1.0
        rollout["advantages"] = advantages * weights
        sizes = case["num_sequences"], case["num_tokens"]
        loss, push = loss_and_push(script, args, rollout, rollout["new_logprobs"], *sizes)
        return {"advantages": advantages, "loss": loss, "gradient": -push}

    return function


@pytest.mark.parametrize("method", SCRIPTS)
def test_a_script_passes_and_its_planted_bugs_are_named(method, load, monkeypatch):
    assert check.report(method, ours(load(*SCRIPTS[method])), 1e-7) == []
    for bug in IN_VECTORS:
        if bug.script in SCRIPTS[method]:
            listed = {case["name"] for case in METHODS[method] if bug.name in case["mistakes"]}
            with monkeypatch.context() as patch:
                patch.setitem(SOURCES, bug.script, bug.plant(SOURCES[bug.script]))
                found = check.report(method, ours(load(*SCRIPTS[method])))
            assert {case for case, _, _, names in found if bug.name in names} == listed
            assert listed or bug.script != method


SIDES = [
    ("0", r"\g<0>", "no lower clip"),
    (r"\g<0>", "math.inf", "no upper clip"),
    ("0", "math.inf", "no clip"),
]
# Scripts with a clip. cispo has no lower one, because its clip_eps_low is 1.
CLIPPED = [x for x in SCRIPTS if [x] == SCRIPTS[x] != ["cispo"] and "ratio.clamp(1 - " in SOURCES[x]]


@pytest.mark.parametrize("method", CLIPPED)
@pytest.mark.parametrize("low, high, name", SIDES)
def test_a_script_without_a_side_of_its_clip_is_named(method, low, high, name, load, monkeypatch):
    source = re.sub(r"1 - args\.clip_eps\w*", low, SOURCES[method])
    monkeypatch.setitem(SOURCES, method, re.sub(r"1 \+ args\.clip_eps\w*", high, source))
    found = check.report(method, ours(load(method)))
    assert any(name in names for *_, names in found)


def test_no_mistake_passes():
    for method, cases in METHODS.items():
        for case in cases:
            mask = np.array(check.VECTORS["rollouts"][case["name"]]["response_mask"])
            for name, units in case["mistakes"].items():
                numbers = {key: check.MISTAKE_UNIT * np.array(x) for key, x in units.items()}
                pairs = [(key, case["expected"][key], x) for key, x in numbers.items()]
                sizes = [check.difference(*pair, mask, check.MISTAKE_UNIT) for pair in pairs]
                assert max(sizes) > 4 * check.TOLERANCE, (method, name)


def test_the_file_has_all_mistakes():
    listed = {name for cases in METHODS.values() for case in cases for name in case["mistakes"]}
    assert listed == {*make_vectors.INPUT_MISTAKES, *(bug.name for bug in IN_VECTORS)}, "make vectors"


def test_the_example_of_the_page(capsys):
    """It passes, and with another denominator the mistake is named."""
    page = (ROOT / "conformance" / "README.md").read_text()
    example = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    right = '(losses.sum(1) / mask.sum(1)).sum() / case["num_sequences"]'
    wrong = example.replace(right, 'losses.sum() / case["num_tokens"]')
    for code, end in ((example, "passed"), (wrong, "mean over tokens")):
        exec(code, {})
        assert all(line.endswith(end) for line in capsys.readouterr().out.splitlines())


def test_a_mistake_is_named_only_if_all_numbers_agree():
    """One of several numbers is not enough, and neither is a number that the mistake does not change."""
    case = next(case for case in METHODS["grpo"] if "no KL" in case["mistakes"])
    loss = check.MISTAKE_UNIT * case["mistakes"]["no KL"]["loss"]
    slightly_wrong = np.array(case["expected"]["advantages"]) * (1 + 3e-5)

    def names(**result):
        found = check.report("grpo", lambda _: result)
        return next(names for name, *_, names in found if name == case["name"])

    assert names(loss=loss) == ["no KL"] and names(**case["expected"] | {"loss": loss}) == []
    assert names(advantages=slightly_wrong) == []


def test_nan_is_wrong_also_where_zero_is_right(load):
    """For example, if a group of equal scores is divided by its std of 0."""
    function = ours(load("grpo"))

    def without_epsilon(case):
        advantages = function(case)["advantages"]
        is_equal = (advantages == 0).all(1, keepdim=True)
        return {"advantages": advantages.masked_fill(is_equal, math.nan)}

    assert check.report("grpo", function, 1e-8) == []
    assert [name for _, name, _, _ in check.report("grpo", without_epsilon)] == ["advantages"]


def test_a_function_that_changes_its_mask_is_compared_with_the_mask_of_the_file():
    def changes(inputs):
        inputs["response_mask"][:] = False
        return {"advantages": 7.0 * np.ones(inputs["response_mask"].shape)}

    assert len(check.report("grpo", changes)) == len(check.cases("grpo"))
