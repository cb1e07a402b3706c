"""conformance/: its file is what its generator makes, our scripts pass it, and it names mistakes planted in them."""

import importlib
import inspect
import json
import re
from types import SimpleNamespace

import check
import make_vectors
import numpy as np
import pytest
import torch
from adapters import ours
from conftest import ROOT

MODULES = {name: importlib.import_module(name) for name in check.VECTORS["methods"]}
NUMBER = r"-?\d+(?:\.\d+)?(?:e-\d+)?"


def test_the_file_is_what_the_generator_makes():
    texts = [json.dumps(vectors) for vectors in (check.VECTORS, make_vectors.make_vectors())]
    committed, made = ([float(x) for x in re.findall(NUMBER, text)] for text in texts)
    assert committed == pytest.approx(made, rel=0, abs=1e-12), "make vectors"
    assert len({re.sub(NUMBER, "", text) for text in texts}) == 1, "make vectors"
    assert check.PATH.stat().st_size <= 400_000


@pytest.mark.parametrize("method", MODULES)
def test_a_script_passes(method, capsys):
    assert check.report(method, ours(MODULES[method]), 1e-10) == []
    assert capsys.readouterr().out.count("passed") == len(make_vectors.PLAN["cases"])


def planted(method: str):
    """Functions for report with a mistake in the script's code, or in the inputs."""
    module, names = MODULES[method], ("whiten", "compute_advantages", "policy_loss")
    source = "\n".join(inspect.getsource(getattr(module, name)) for name in names if hasattr(module, name))
    for mistake, (_, _, *change) in make_vectors.PLAN["mistakes"].items():
        if change and change[0] in source:
            namespace = dict(vars(module))
            exec(source.replace(*change), namespace)
            yield mistake, ours(SimpleNamespace(**namespace))
    for mistake, change in make_vectors.INPUT_MISTAKES.items():
        if mistake != "compared across prompts":  # which is in the order, and not in an input

            def function(case, change=change):
                changes = change(case | {"response_mask": torch.tensor(case["response_mask"]).bool()})
                return ours(module)(case | changes)

            yield mistake, function


def test_planted_mistakes_are_named(capsys):
    named = set()
    for method, cases in check.VECTORS["methods"].items():
        for mistake, function in planted(method):
            listed = {case["name"] for case in cases if mistake in case["mistakes"]}
            if not listed:  # the line is that of another estimator
                continue
            found = check.report(method, function)
            assert {case for case, _, _, names in found if mistake in names} == listed, (method, mistake)
            named.add(mistake)
    assert len(named) >= 50
    assert "grpo, ratios beyond the clip: gradient off by" in capsys.readouterr().out


def test_nothing_is_no_pass():
    with pytest.raises(ValueError, match="returned nothing"):
        check.report("grpo", lambda case: {})


def test_the_example_of_the_page_passes(capsys):
    page = (ROOT / "conformance" / "README.md").read_text()
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], {})
    assert capsys.readouterr().out.count("passed") == len(make_vectors.PLAN["cases"])


def test_nan_passes_outside_the_mask_of_advantages_only():
    def function(case):
        results = ours(MODULES["grpo"])(case)
        names = ("advantages", "gradient")
        return {name: np.where(case["response_mask"], results[name], np.nan) for name in names}

    wrong = [key for _, key, _, _ in check.report("grpo", function)]
    assert wrong == ["gradient"] * len(make_vectors.PLAN["cases"])
