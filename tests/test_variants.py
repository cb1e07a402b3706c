"""Tests of make variant, make patch and make mix: what they write, and that a variant computes what its script does."""

import importlib
import re
import shutil
import subprocess
import sys
from collections import Counter

import mix
import pytest
import sync
import torch
import transformers
from conftest import POLICY_SCRIPTS, ROOT, SOURCES, read_jsonl, write_jsonl
from driver import without_clock
from test_siblings import copy_scripts, edit
from zoo import record, run

FEATURES = (
    "correction",
    "fsdp",
    "lora",
    "tools",
    "vllm",
)  # they merge into all scripts; async merges into few
PAIRS = (("lora", "vllm"), ("tools", "fsdp"), ("vllm", "correction"), ("async", "correction"))
COMMANDS = {
    "variant": (sync.variant, ("rloo", "lora"), "variants/rloo_lora.py"),
    "patch": (sync.patch, ("rloo", "entropy_bonus"), "runs/rloo_entropy_bonus.py"),
    "mix": (mix.mix, ("rloo", "gspo"), "runs/rloo_gspo.py"),
}


def make(folder, name: str, *chosen: str) -> str:
    """Write a script with the chosen features to a folder. Return its name."""
    made = "_".join([name, *chosen])
    (folder / f"{made}.py").write_text(sync.combine(name, [*chosen]))
    return made


def assert_ruff_is_content(folder):
    options = ["--ignore=E501", "--config", ROOT / "pyproject.toml", folder]
    result = subprocess.run([sys.executable, "-m", "ruff", "check", *options], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_is_written_once_and_not_overwritten(command, tmp_path, capsys):
    """The user may have edited it. If it is deleted, the command writes it again."""
    function, words, path = COMMANDS[command]
    folder = copy_scripts(tmp_path)
    assert function(*words, root=folder) == 0
    made = (folder / path).read_text()
    assert f"    python {path}\n" in made and path in capsys.readouterr().out
    (folder / path).write_text("# mine\n")
    assert function(*words, root=folder) == 2
    assert capsys.readouterr().out.startswith(f"error: {path} exists")
    assert (folder / path).read_text() == "# mine\n"
    (folder / path).unlink()
    assert function(*words, root=folder) == 0 and (folder / path).read_text() == made


def test_files_of_the_user_beside_the_scripts_are_ignored(tmp_path):
    (copy_scripts(tmp_path) / "my_reward.py").write_text("def score(completions, **_): return [1.0]\n")
    assert "my_reward" not in sync.paths(tmp_path)


def test_a_hunk_of_a_patch_has_one_place():
    """If two places have the changed lines, the context decides. Only whole lines match."""
    source = "a\nx\nb\nx\nbx\n"
    assert sync.apply(source, "@@ @@\n a\n-x\n+y\n") == "a\ny\nb\nx\nbx\n"
    assert sync.apply(source, "@@ @@\n-x\n+y\n bx\n") == "a\nx\nb\ny\nbx\n"
    assert sync.apply("ax\nx\n", "@@ @@\n-x\n+y\n") == "ax\ny\n"
    for hunk in ("-x\n+y\n", "-z\n+y\n"):
        with pytest.raises(ValueError, match="mine: it has no single place"):
            sync.apply(source, f"@@ @@\n{hunk}", "mine")


# The number of lines of grpo.py's skeleton that a variant changes or leaves out
CHANGED = {"grpo_correction": 1, "grpo_fsdp": 3, "grpo_lora": 19, "grpo_vllm": 41}
CHANGED |= {"flash_reinforce_async": 14, "reinforce_pp_process": 13, "reinforce_pp_tools": 13}


@pytest.mark.parametrize("name", sync.features().values())
def test_a_variant_changes_no_other_line_of_the_skeleton(name):
    """`make sync` compares with an earlier commit, so it cannot notice a line that was edited in a variant alone."""
    lines = [Counter(sync.skeleton(SOURCES[x]).splitlines()) for x in ("grpo", name)]
    lacking = (lines[0] - lines[1]).total()
    assert lacking == CHANGED[name], f"{name}.py lacks {lacking} lines of grpo.py. Are they all meant?"


@pytest.mark.parametrize("name", [*POLICY_SCRIPTS, "reinforce_pp_process"])
def test_each_feature_merges_into_a_script(name, tmp_path):
    """The exceptions are in sync.REFUSED."""
    for chosen in (*([feature] for feature in FEATURES), *PAIRS):
        parts = (name, name.rpartition("_")[2])
        if not any((part, feature) in sync.REFUSED for part in parts for feature in chosen):
            make(tmp_path, name, *chosen)
    assert_ruff_is_content(tmp_path)


def test_a_made_variant_needs_the_packages_of_its_features():
    """vLLM also needs another version of transformers."""
    for feature in ("lora", "vllm"):
        made = sync.packages(sync.combine("rloo", [feature]))
        assert made == sync.packages(SOURCES[f"grpo_{feature}"]) != sync.packages(SOURCES["rloo"])


def test_what_cannot_be_merged_is_refused(tmp_path, capsys):
    """A pair of features is refused in any order."""
    copies = copy_scripts(tmp_path)
    edit(copies / "rloo.py", "(args, policy) if args.kl_coef", "(args, policy) if args.kl_coef > 1")
    cases = "distill tools, sdpo correction, rloo process, rloo lora, sft fsdp, rloo nothing, no lora"
    for case in cases.split(", "):
        assert sync.variant(*case.split(), copies) == 2
        assert capsys.readouterr().out.startswith("error: ")
    assert not (copies / "variants" / "rloo_lora.py").exists()
    for pair in (["async", "vllm"], ["vllm", "async"]):
        with pytest.raises(ValueError, match="every rank would start an engine"):
            sync.combine("flash_reinforce", pair)


@pytest.mark.parametrize("name", sync.STAGES)
def test_a_stage_with_lora_is_written_to_runs(name, tmp_path):
    """It is not in variants/, whose scripts follow the skeleton. The learning rates that it names are LoRA's."""
    copies = copy_scripts(tmp_path)
    shutil.copytree(ROOT / "variants", copies / "variants", dirs_exist_ok=True)
    assert sync.variant(name, "lora", copies) == 0
    text = (copies / "runs" / f"{name}_lora.py").read_text()
    assert f"    python runs/{name}_lora.py\n" in text and '"peft==' in text and "LoRA," not in text
    rate = {"dpo": "5e-6"}.get(name, "1e-4")
    for words in ("--learning_rate ", "a real model needs ", "a real model needs about "):
        assert re.findall(rf"{words}(\de-\d)", text) == [rate], words
    assert_ruff_is_content(copies / "runs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder for variants, from which they are imported, with the stand-in for vLLM."""
    folder = tmp_path_factory.mktemp("variants")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tests" / "stand_in")
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", str(folder))
        yield folder


def metrics_of(name, folder, **flags):
    run(name, **{"max_response_length": 40, "run_dir": folder / name} | flags)
    return without_clock(folder / name / "metrics.jsonl")


def test_lora_begins_as_the_script(folder, tmp_path):
    """At first, B is 0, so the metrics of the first iteration are equal. Later, the KL shows that they differ."""
    flags = {"num_iterations": 2, "num_minibatches": 1}
    plain, lora = (metrics_of(x, tmp_path, **flags) for x in ("ppo", make(folder, "ppo", "lora")))
    for key in plain[0].keys() - {"grad_norm", "critic_grad_norm", "learning_rate"}:
        assert lora[0][key] == pytest.approx(plain[0][key], abs=1e-6), key
    assert abs(lora[1]["kl"] - lora[0]["kl"]) > 1e-5


@pytest.mark.parametrize("name", ["gdpo", "ppo"])
def test_tools_without_a_call_are_the_script(name, folder, tmp_path):
    """test_estimators.py tests what holes in the mask do to advantages and losses."""
    toy = {"model": "toy/policy", "dataset": "toy/train.jsonl"}
    plain, tools = (metrics_of(x, tmp_path, **toy) for x in (name, make(folder, name, "tools")))
    assert tools == [line | {"calls": 0} for line in plain]


@pytest.mark.parametrize("parts", [["dapo"], ["remax"], ["rloo", "lora"], ["rloo", "fsdp"]])
def test_vllm_samples_with_the_weights_of_now(parts, folder, tmp_path, monkeypatch):
    """The stand-in samples the responses that the script samples, as long as their weights are equal."""
    from vllm import with_a_seed

    lines = []
    parent = make(folder, *parts) if "lora" in parts else parts[0]
    for x in (parent, make(folder, *parts, "vllm")):
        script = importlib.import_module(x)
        monkeypatch.setattr(script, "generate", with_a_seed(script.generate))
        lines.append(metrics_of(x, tmp_path, num_iterations=3))
    for ours, expected in zip(*lines, strict=True):
        assert ours | {"entropy": 0} == pytest.approx(expected | {"entropy": 0}, rel=1e-3, abs=1e-5)


@pytest.fixture(scope="module")
def fsdp(folder):
    """What two ranks saw in runs with and without FSDP, by name, and the folder of each run.

    Gradients are clipped, and ranks finish responses at different times. One rank has more of five held-out prompts.
    """
    heldout = write_jsonl(folder / "heldout.jsonl", read_jsonl(ROOT / "toy" / "heldout.jsonl")[:5])
    common = {"batch_size": 48, "num_iterations": 3, "max_response_length": 12, "eval_every": 0}
    flags = common | {"max_grad_norm": 0.1, "eval_dataset": heldout, "eval_every": 2}
    half = common | {"dtype": "bfloat16", "gradient_checkpointing": True}
    resumed = half | {"run_dir": folder / "resumed"}
    once = common | {"batch_size": 32, "num_iterations": 1, "max_response_length": 16}
    runs = [("grpo", "grpo", flags), ("grpo_fsdp", "grpo_fsdp", flags), ("whole", "grpo_fsdp", half)]
    runs += [("stopped", "grpo_fsdp", resumed | {"num_iterations": 2}), ("resumed", "grpo_fsdp", resumed)]
    for script in ("dapo", "ppo"):
        runs += [(x, x, once) for x in (script, make(folder, script, "fsdp"))]
    cases = [
        {"script": script, "sample": True, "flags": {"run_dir": folder / name} | its_flags}
        for name, script, its_flags in runs
    ]
    return dict(zip([name for name, *_ in runs], record(folder, cases, ranks=2), strict=True))


@pytest.mark.parametrize("name", ["grpo", "dapo", "ppo"])
def test_fsdp_has_the_gradients_of_the_script(name, fsdp):
    """ppo.py also has a critic, and in dapo.py the ranks sample different numbers of times.

    The gradients are sums over ranks. With means, AdamW would make nearly the same steps.
    """
    whole, sharded = fsdp[name], fsdp[f"{name}_fsdp"]
    for ours, expected in zip(sharded[0]["gradients"], whole[0]["gradients"], strict=True):
        assert (ours - expected).norm() <= 1e-4 * expected.norm() and expected.norm() > 0
    for seen in sharded:
        assert seen["digests"] == sharded[0]["digests"]
        assert max(seen["unsharded"]) == 0  # a whole weight would take memory until the backward pass


def test_fsdp_clips_and_saves_as_the_script(fsdp, folder):
    ours, expected = (
        [x["grad_norm"] for x in fsdp[n][0]["metrics"] if "grad_norm" in x] for n in ("grpo_fsdp", "grpo")
    )
    assert ours == pytest.approx(expected, rel=1e-4) and min(expected) > 0.1
    load = transformers.AutoModelForCausalLM.from_pretrained
    one, other = (load(folder / name / "model").state_dict() for name in ("grpo", "grpo_fsdp"))
    assert one.keys() == other.keys()
    assert all(torch.allclose(x, other[name], rtol=0, atol=1e-6) for name, x in one.items())


def test_fsdp_resumes_on_all_ranks(fsdp, folder):
    """The checkpoint has whole weights, so it opens without FSDP. The resumed run ends with the same bits."""
    one, other = (torch.load(folder / x / "checkpoint.pt", weights_only=True) for x in ("whole", "resumed"))
    assert all(torch.equal(x, other["policy"][name]) for name, x in one["policy"].items())
    assert all(x.dtype == torch.float32 for x in one["policy"].values())
    lines = [without_clock(folder / name / "metrics.jsonl") for name in ("whole", "resumed")]
    assert lines[0] == lines[1] and len(lines[0]) == 3
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "whole" / "model")
    assert torch.equal(model.get_input_embeddings().weight, one["policy"]["model.embed_tokens.weight"])
