"""make variant: features merge into scripts, and a script with a feature computes what it does without."""

import importlib
import re
import shutil
import subprocess
import sys

import pytest
import sync
from conftest import POLICY_SCRIPTS, ROOT
from resume import without_clock
from test_siblings import copy_scripts, edit
from zoo import record, run

FEATURES = ("correction", "fsdp", "lora", "tools", "vllm")  # these merge into all scripts, async into few
PAIRS = (("lora", "vllm"), ("tools", "fsdp"), ("vllm", "correction"), ("async", "correction"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An importable folder beside a stand-in for vLLM."""
    folder = tmp_path_factory.mktemp("variants")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tests" / "stand_in")
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", str(folder))
        yield folder


def make(folder, name: str, *chosen: str) -> str:
    made = "_".join([name, *chosen])
    (folder / f"{made}.py").write_text(sync.combine(name, [*chosen]))
    return made


@pytest.mark.parametrize("name", [*POLICY_SCRIPTS, "reinforce_pp_process"])
def test_each_feature_merges_into_a_script(name, tmp_path):
    """Pairs that do not go together stand in sync.REFUSED."""
    for chosen in (*([feature] for feature in FEATURES), *PAIRS):
        parts = (name, name.rpartition("_")[2])
        if not any((part, feature) in sync.REFUSED for part in parts for feature in chosen):
            make(tmp_path, name, *chosen)
    options = ["--ignore=E501", "--config", ROOT / "pyproject.toml", tmp_path]
    result = subprocess.run([sys.executable, "-m", "ruff", "check", *options], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_what_does_not_go_together_is_named(tmp_path, capsys):
    copies = copy_scripts(tmp_path)
    edit(copies / "rloo.py", "(args, policy) if args.kl_coef", "(args, policy) if args.kl_coef > 1")
    cases = [
        ("distill", "tools"),
        ("sdpo", "correction"),
        ("rloo", "process"),
        ("rloo", "lora"),
        ("sft", "fsdp"),
    ]
    for script, feature in [*cases, ("rloo", "nothing")]:
        assert sync.variant(script, feature, copies) == 2
        assert capsys.readouterr().out.startswith("error: ")
    assert not (copies / "variants" / "rloo_lora.py").exists()


@pytest.mark.parametrize("name", sync.STAGES)
def test_a_stage_with_lora_is_written_to_runs(name, tmp_path):
    """Scripts in variants/ follow the skeleton. A real model needs ten times the rate, wherever the script says it."""
    copies = copy_scripts(tmp_path)
    shutil.copytree(ROOT / "variants", copies / "variants", dirs_exist_ok=True)
    assert sync.variant(name, "lora", copies) == 0
    text = (copies / "runs" / f"{name}_lora.py").read_text()
    assert f"    python runs/{name}_lora.py\n" in text and '"peft==' in text and "LoRA," not in text
    rate = {"dpo": "5e-6"}.get(name, "1e-4")
    for words in ("--learning_rate ", "a real model needs ", "a real model needs about "):
        assert re.findall(rf"{words}(\de-\d)", text) == [rate], words
    result = subprocess.run([sys.executable, "-m", "ruff", "check", copies], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def metrics_of(name, folder, **flags):
    run(name, **{"max_response_length": 40, "run_dir": folder / name} | flags)
    return without_clock(folder / name / "metrics.jsonl")


def test_lora_begins_as_the_script(folder, tmp_path):
    """B is 0 at first, and so the metrics of the first iteration are the script's. Later, the reference stays."""
    flags = {"num_iterations": 2, "num_minibatches": 1}
    plain, lora = (metrics_of(x, tmp_path, **flags) for x in ("ppo", make(folder, "ppo", "lora")))
    for key in plain[0].keys() - {"grad_norm", "critic_grad_norm", "learning_rate"}:
        assert lora[0][key] == pytest.approx(plain[0][key], abs=1e-6), key
    assert abs(lora[1]["kl"] - lora[0]["kl"]) > 1e-5


@pytest.mark.parametrize("name", ["gdpo", "ppo"])
def test_tools_without_a_call_are_the_script(name, folder, tmp_path):
    """What holes in the mask do to advantages and losses, test_estimators.py tests."""
    toy = {"model": "toy/policy", "dataset": "toy/train.jsonl"}
    plain, tools = (metrics_of(x, tmp_path, **toy) for x in (name, make(folder, name, "tools")))
    assert tools == [line | {"calls": 0} for line in plain]


@pytest.mark.parametrize("parts", [["dapo"], ["remax"], ["rloo", "lora"], ["rloo", "fsdp"]])
def test_vllm_samples_with_the_weights_of_now(parts, folder, tmp_path, monkeypatch):
    """By a stand-in, with responses that do not depend on who samples: all metrics are the script's, to the end."""
    from vllm import with_a_seed

    lines = []
    parent = make(folder, *parts) if "lora" in parts else parts[0]
    for x in (parent, make(folder, *parts, "vllm")):
        script = importlib.import_module(x)
        monkeypatch.setattr(script, "generate", with_a_seed(script.generate))
        lines.append(metrics_of(x, tmp_path, num_iterations=3))
    for ours, expected in zip(*lines, strict=True):
        assert ours | {"entropy": 0} == pytest.approx(expected | {"entropy": 0}, rel=1e-3, abs=1e-5)


def test_fsdp_has_the_gradients_of_the_script(folder, tmp_path):
    """Also of a critic, and where the ranks sample different numbers of times."""
    flags = {"batch_size": 32, "max_response_length": 16, "num_iterations": 1, "eval_every": 0}
    names = [x for name in ("dapo", "ppo") for x in (name, make(folder, name, "fsdp"))]
    results = record(tmp_path, [{"script": x, "sample": True, "flags": flags} for x in names], ranks=2)
    for whole, sharded in zip(results[::2], results[1::2], strict=True):
        for ours, expected in zip(sharded[0]["gradients"], whole[0]["gradients"], strict=True):
            assert (ours - expected).norm() <= 1e-4 * expected.norm() and expected.norm() > 0
        for seen in sharded:
            assert seen["digests"] == sharded[0]["digests"]
            assert max(seen["unsharded"]) == 0
