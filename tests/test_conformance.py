"""conformance/: our scripts pass its cases, and it names the mistakes that are planted in them."""

import importlib
import re
from types import SimpleNamespace

import check
import make_vectors
import pytest
import torch
from conftest import ROOT
from explain import loss_and_push
from planted import IN_VECTORS

METHODS = check.VECTORS["methods"]


def ours(script):
    """A script, as a function for check.report."""

    def function(case):
        args = SimpleNamespace(**{key: x.tolist() if hasattr(x, "tolist") else x for key, x in case.items()})
        rollout = {key: torch.as_tensor(x) for key, x in case.items() if hasattr(x, "shape")}
        rollout["kl"] = rollout["old_logprobs"] - rollout["ref_logprobs"]
        mask = rollout["response_mask"] = rollout["response_mask"].bool()
        rollout = {key: x * mask if x.shape == mask.shape else x for key, x in rollout.items()}
        rollout |= script.compute_advantages(args, rollout)
        sizes = case["num_sequences"], case["num_tokens"]
        loss, push = loss_and_push(script, args, rollout, rollout["new_logprobs"], *sizes)
        return {"advantages": rollout["advantages"], "loss": loss, "gradient": -push}

    return function


@pytest.mark.parametrize("method", METHODS)
def test_a_script_passes_and_its_planted_bugs_are_named(method):
    assert check.report(method, ours(importlib.import_module(method)), 1e-10) == []
    for bug in IN_VECTORS:
        if bug.script == method:
            listed = {case["name"] for case in METHODS[method] if bug.name in case["mistakes"]}
            found = check.report(method, ours(bug.module()))
            assert listed and {case for case, _, _, names in found if bug.name in names} == listed


def test_the_file_has_all_mistakes():
    listed = {name for cases in METHODS.values() for case in cases for name in case["mistakes"]}
    assert listed == {*make_vectors.INPUT_MISTAKES, *(bug.name for bug in IN_VECTORS)}, "make vectors"


def test_the_example_of_the_page(capsys):
    """It passes; with another denominator the mistake is named."""
    page = (ROOT / "conformance" / "README.md").read_text()
    example = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    right, wrong = (
        '(losses.sum(1) / mask.sum(1)).sum() / case["num_sequences"]',
        'losses.sum() / case["num_tokens"]',
    )
    for code, end in ((example, "passed"), (example.replace(right, wrong), "mean over tokens")):
        exec(code, {})
        assert all(line.endswith(end) for line in capsys.readouterr().out.splitlines())
