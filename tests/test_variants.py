"""tools/variant.py: features merge into scripts, and a script with a feature computes what it does without."""

import importlib
import shutil
import subprocess
import sys

import pytest
import sync
import tyro
import variant
from conftest import POLICY_SCRIPTS, ROOT
from soak import without_clock
from test_docs import commands_in, text_of
from zoo import record, run

FEATURES = ("fsdp", "lora", "tools", "vllm")  # a newer one may conflict with some scripts: docs/variants.md
PAIRS = (["lora", "vllm"], ["fsdp", "vllm"], ["tools", "lora"], ["tools", "fsdp"])
RUN = ["rloo", *sync.INSERTS]
CHOSEN = [(name, [feature]) for name in POLICY_SCRIPTS for feature in FEATURES]
CHOSEN += [(name, pair) for name in RUN for pair in PAIRS]
CHOSEN = [(name, them) for name, them in CHOSEN if name != "distill" or "tools" not in them]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All that merges, importable, beside a stand-in for vLLM."""
    folder = tmp_path_factory.mktemp("variants")
    for name, chosen in CHOSEN:
        (folder / f"{name}_{'_'.join(chosen)}.py").write_text(variant.combine(name, chosen))
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


@pytest.mark.parametrize("name", RUN)
def test_the_commands_of_a_docstring_parse(name, folder):
    """The script takes its flags, and those of the feature are among them."""
    for feature in FEATURES:
        path = folder / f"{name}_{feature}.py"
        if not path.exists():
            continue
        module = importlib.import_module(path.stem)
        *toy, real = commands_in(text_of(path))
        assert toy == ([] if feature == "vllm" else [["python", path.name]])
        assert max(map(len, path.read_text().splitlines())) <= 110
        args = tyro.cli(module.Args, args=real[real.index(path.name) + 1 :], use_underscores=True)
        assert args.run_dir == "runs/a" and args.learning_rate == (1e-5 if feature == "lora" else 1e-6)
        assert feature != "tools" or args.call_end == "```"
        assert feature != "vllm" or args.kv_cache_gib == 8
        assert f"SCRIPT={name} FEATURE={feature}" in module.__doc__ and "half a minute" not in module.__doc__


@pytest.mark.parametrize("script, chosen", [("distill", ["tools"]), ("rloo", ["lora", "fsdp"])])
def test_what_would_be_wrong_is_refused(script, chosen):
    with pytest.raises(ValueError, match=" with "):
        variant.combine(script, chosen)


def test_a_conflict_is_shown(tmp_path):
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    text = (tmp_path / "rloo.py").read_text()
    (tmp_path / "rloo.py").write_text(
        text.replace("if args.kl_coef else None", "if args.kl_coef > 1 else None")
    )
    with pytest.raises(ValueError) as error:
        variant.combine("rloo", ["lora"], tmp_path)
    first, *lines = str(error.value).splitlines()
    assert "rloo with lora" in first and any("args.kl_coef > 1" in line for line in lines)


def test_one_that_stays_in_the_folder_gets_later_edits(tmp_path):
    """make sync makes of it what make variant would make now. It is neither a policy script nor a feature."""
    for path in [*ROOT.glob("*.py"), ROOT / "requirements.txt"]:
        shutil.copy(path, tmp_path)
    kept = {"rloo_lora": ("rloo", ["lora"]), "rloo_lora_vllm": ("rloo_lora", ["vllm"])}
    for name, (script, chosen) in kept.items():
        (tmp_path / f"{name}.py").write_text(variant.combine(script, chosen, tmp_path))
    for name, old in (("grpo", "    optimizer.zero_grad()\n"), ("rloo", "    others = ")):
        text = (tmp_path / f"{name}.py").read_text()
        assert text.count(old) == 1
        (tmp_path / f"{name}.py").write_text(text.replace(old, f"    print('edit')\n{old}"))
    assert sync.sync(tmp_path) == 0
    for name, (script, chosen) in kept.items():
        text = (tmp_path / f"{name}.py").read_text()
        assert text.count("print('edit')") == 2 and text == variant.combine(script, chosen, tmp_path)
    assert sync.policy_scripts(tmp_path) == POLICY_SCRIPTS and sync.features(tmp_path) == sync.features()
    assert sync.features_of("rloo_lora_vllm", tmp_path) == ["lora", "vllm"]


def metrics_of(name, folder, **flags):
    run(name, **{"max_response_length": 40, "run_dir": folder / name} | flags)
    return without_clock(folder / name / "metrics.jsonl")


@pytest.mark.parametrize("name", RUN)
def test_lora_begins_as_the_script(name, folder, tmp_path):
    """B is 0 at first: all metrics of the first iteration are the script's. Later the policy leaves its reference."""
    has_flag = "num_minibatches" in importlib.import_module(name).Args.__dataclass_fields__
    flags = {"num_iterations": 3} | ({"num_minibatches": 1} if has_flag else {})
    plain, lora = (metrics_of(x, tmp_path, **flags) for x in (name, f"{name}_lora"))
    differ = {"grad_norm", "critic_grad_norm", "learning_rate"}
    expected = {key: x for key, x in plain[0].items() if key not in differ}
    assert {key: x for key, x in lora[0].items() if key not in differ} == pytest.approx(expected, abs=1e-6)
    assert lora[0]["grad_norm"] > 0 and abs(lora[2]["kl"] - lora[0]["kl"]) > 1e-5


@pytest.mark.parametrize("name", [name for name in RUN if name != "distill"])
def test_tools_without_a_call_are_the_script(name, folder, tmp_path):
    toy = {"model": "toy/policy", "dataset": "toy/train.jsonl"}
    plain, tools = (metrics_of(x, tmp_path, **toy) for x in (name, f"{name}_tools"))
    assert tools == [line | {"calls": 0} for line in plain]
    called = metrics_of(f"{name}_tools", tmp_path / "called", batch_size=32, max_response_length=48)
    assert called[0]["calls"] > 0 and called[0]["logprob_difference"] < 1e-5


@pytest.mark.parametrize(
    "parent, feature", [*((name, "vllm") for name in RUN), ("rloo_lora", "vllm"), ("rloo", "fsdp_vllm")]
)
def test_vllm_samples_with_the_weights_of_now(parent, feature, folder, tmp_path, monkeypatch):
    """With responses that do not depend on who samples them, all metrics are the parent's: also after updates."""
    from vllm import with_a_seed

    lines = []
    for name in (parent, f"{parent}_{feature}"):
        script = importlib.import_module(name)
        monkeypatch.setattr(script, "generate", with_a_seed(script.generate))
        lines.append(metrics_of(name, tmp_path, num_iterations=3))
    for ours, expected in zip(*lines, strict=True):
        assert ours | {"entropy": 0} == pytest.approx(expected | {"entropy": 0}, rel=1e-3, abs=1e-5)


def test_fsdp_has_the_gradients_of_the_script(folder, tmp_path):
    """Statistics are those of all ranks, and dapo.py's ranks sample different numbers of times."""
    names = [*RUN, "reinforce_pp"]
    flags = {"batch_size": 32, "num_iterations": 1, "eval_every": 0}
    cases = [{"script": x, "sample": True, "flags": flags} for name in names for x in (name, f"{name}_fsdp")]
    results = record(tmp_path, cases, ranks=2)
    for whole, sharded in zip(results[::2], results[1::2], strict=True):
        for ours, expected in zip(sharded[0]["gradients"], whole[0]["gradients"], strict=True):
            assert 0 < (ours - expected).norm() + expected.norm() < (1 + 1e-4) * expected.norm()
        for seen in sharded:
            assert seen["digests"] == sharded[0]["digests"]
            assert max(seen["kept"]) <= 1.1 / 2 and max(seen["unsharded"]) == 0


def test_fsdp_resumes_with_the_critic(folder, tmp_path):
    flags = {"save_every": 1, "max_response_length": 8}
    whole = metrics_of("ppo_fsdp", tmp_path / "whole", num_iterations=3, **flags)
    metrics_of("ppo_fsdp", tmp_path, num_iterations=1, **flags)
    assert metrics_of("ppo_fsdp", tmp_path, num_iterations=3, **flags) == whole
