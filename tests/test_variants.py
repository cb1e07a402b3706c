"""tools/variant.py: features merge into scripts, and a script with a feature computes what it does without."""

import dataclasses
import importlib
import subprocess
import sys

import pytest
import sync
import variant
from conftest import POLICY_SCRIPTS, ROOT
from resume import without_clock
from test_siblings import copy_scripts, edit
from zoo import record, run

FEATURES = ("fsdp", "lora", "tools", "vllm")  # these merge into all scripts; docs/variants.md says which do
PAIRS = (["lora", "vllm"], ["fsdp", "vllm"], ["tools", "lora"], ["tools", "fsdp"])
INSERTS = list(sync.INSERTS)
CHOSEN = [(name, [feature]) for name in POLICY_SCRIPTS for feature in FEATURES]
CHOSEN += [(name, pair) for name in ("rloo", *INSERTS) for pair in PAIRS]
ALL = {
    "_".join([name, *them]): (name, them) for name, them in CHOSEN if name != "distill" or "tools" not in them
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All that merges, importable, beside a stand-in for vLLM."""
    folder = tmp_path_factory.mktemp("variants")
    for name, (script, chosen) in ALL.items():
        (folder / f"{name}.py").write_text(variant.combine(script, chosen))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tests" / "stand_in")
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", str(folder))
        yield folder


def test_all_are_valid_and_formatted(folder):
    for command in (["format", "--check"], ["check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--config", ROOT / "pyproject.toml", folder]
        result = subprocess.run(ruff, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout


@pytest.fixture
def copies(tmp_path):
    return copy_scripts(tmp_path)


def test_what_does_not_go_together_is_named(copies):
    for script, chosen in (("distill", ["tools"]), ("remax", ["async"]), ("rloo", ["lora", "fsdp"])):
        with pytest.raises(ValueError, match=" with "):
            variant.combine(script, chosen)
    edit(copies / "rloo.py", "if args.kl_coef else None", "if args.kl_coef > 1 else None")
    with pytest.raises(ValueError, match=r"(?s)rloo with lora: both .*kl_coef > 1 else None.*= policy if"):
        variant.combine("rloo", ["lora"], copies)


def test_one_that_stays_in_the_folder_gets_later_edits(copies):
    """make sync makes of it what make variant would make now. It is neither a policy script nor a feature."""
    kept = {"rloo_lora": ("rloo", ["lora"]), "rloo_lora_vllm": ("rloo_lora", ["vllm"])}
    for name, how in kept.items():
        (copies / "variants" / f"{name}.py").write_text(variant.combine(*how, copies))
    edit(copies / "grpo.py", "    optimizer.zero_grad()\n", "    optimizer.zero_grad()  # edit\n")
    edit(copies / "rloo.py", "    others = ", "    # edit\n    others = ")
    assert sync.sync(copies) == 0
    for name, how in kept.items():
        text = sync.paths(copies)[name].read_text()
        assert text.count("# edit\n") == 2 and text == variant.combine(*how, copies)
    assert sync.policy_scripts(copies) == sync.policy_scripts() and sync.features(copies) == sync.features()


def metrics_of(name, folder, **flags):
    run(name, **{"max_response_length": 40, "run_dir": folder / name} | flags)
    return without_clock(folder / name / "metrics.jsonl")


@pytest.mark.parametrize("name", ["rloo", *INSERTS])
def test_lora_begins_as_the_script(name, folder, tmp_path):
    """B is 0 at first, and so the metrics of the first iteration are the script's. Later, the reference stays."""
    flags = {"num_iterations": 2, "num_minibatches": 1}
    has = {field.name for field in dataclasses.fields(importlib.import_module(name).Args)}
    flags = {flag: value for flag, value in flags.items() if flag in has}
    plain, lora = (metrics_of(x, tmp_path, **flags) for x in (name, f"{name}_lora"))
    for key in plain[0].keys() - {"grad_norm", "critic_grad_norm", "learning_rate"}:
        assert lora[0][key] == pytest.approx(plain[0][key], abs=1e-6), key
    assert "kl" not in lora[0] or abs(lora[1]["kl"] - lora[0]["kl"]) > 1e-5


@pytest.mark.parametrize("name", [name for name in INSERTS if f"{name}_tools" in ALL])
def test_tools_without_a_call_are_the_script(name, folder, tmp_path):
    """What holes in the mask do to advantages and losses, test_estimators.py tests."""
    toy = {"model": "toy/policy", "dataset": "toy/train.jsonl"}
    plain, tools = (metrics_of(x, tmp_path, **toy) for x in (name, f"{name}_tools"))
    assert tools == [line | {"calls": 0} for line in plain]
    toy = {"model": "toy/tools/policy", "dataset": "toy/tools/train.jsonl", "max_response_length": 48}
    called = metrics_of(f"{name}_tools", tmp_path / "called", num_iterations=1, **toy)
    assert called[0]["calls"] > 0 and called[0]["logprob_difference"] < 1e-5


@pytest.mark.parametrize("name", [*(f"{name}_vllm" for name in INSERTS), "rloo_lora_vllm", "rloo_fsdp_vllm"])
def test_vllm_samples_with_the_weights_of_now(name, folder, tmp_path, monkeypatch):
    """By a stand-in, with responses that do not depend on who samples: all metrics are the script's, to the end."""
    from vllm import with_a_seed

    lines = []
    for x in (name.replace("_fsdp_vllm", "").replace("_vllm", ""), name):
        script = importlib.import_module(x)
        monkeypatch.setattr(script, "generate", with_a_seed(script.generate))
        lines.append(metrics_of(x, tmp_path, num_iterations=3))
    for ours, expected in zip(*lines, strict=True):
        assert ours | {"entropy": 0} == pytest.approx(expected | {"entropy": 0}, rel=1e-3, abs=1e-5)


def test_fsdp_has_the_gradients_of_the_script(folder, tmp_path):
    """Statistics are those of all ranks, and the ranks of dapo.py sample different numbers of times."""
    flags = {"batch_size": 32, "max_response_length": 16, "num_iterations": 1, "eval_every": 0}
    names = [x for name in INSERTS for x in (name, f"{name}_fsdp")]
    results = record(tmp_path, [{"script": x, "sample": True, "flags": flags} for x in names], ranks=2)
    for whole, sharded in zip(results[::2], results[1::2], strict=True):
        for ours, expected in zip(sharded[0]["gradients"], whole[0]["gradients"], strict=True):
            assert (ours - expected).norm() <= 1e-4 * expected.norm() and expected.norm() > 0
        for seen in sharded:
            assert seen["digests"] == sharded[0]["digests"]
            assert max(seen["kept"]) <= 1.1 / 2 and max(seen["unsharded"]) == 0


def test_fsdp_resumes_with_the_critic(folder, tmp_path):
    whole = metrics_of("ppo_fsdp", tmp_path / "whole")
    metrics_of("ppo_fsdp", tmp_path, num_iterations=1)
    assert metrics_of("ppo_fsdp", tmp_path) == whole
