"""Bad input gets one sentence that names the flag, the value and the remedy, and exit code 2."""

import dataclasses
import importlib
import json
import logging
import shutil

import datasets
import pytest
import torch
import transformers
from conftest import POLICY_SCRIPTS, ROOT, launch, make_llama, write_jsonl
from zoo import make_model, make_tokenizer, run, save

datasets.logging.set_verbosity(logging.CRITICAL)  # it has lines of its own about files that are torn
TOY = ROOT / "toy"
GOOD = {"prompt": "3 + 5 ?", "answer": "8"}
CHAT = {"prompt": [{"role": "user", "content": "3 ?"}], "answer": "3"}
FUNCTIONS = """
def wrong_number(completions, **columns): return [1.0]
def nested(completions, **columns): return [[1.0]] * len(completions)
def text(completions, **columns): return ["good"] * len(completions)
def none(completions, **columns): return [None] * len(completions)
def nan(completions, **columns): return [float("nan")] * len(completions)
def raises(completions, **columns): raise RuntimeError("the judge is asleep")
def strict(completions): return [1.0] * len(completions)
def good(completions, **columns): return [1.0] * len(completions)
"""


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    """A folder of things that are wrong."""
    folder = tmp_path_factory.mktemp("bad")
    rows = {
        "good": [GOOD] * 16,
        "empty": [],
        "no_prompt": [{"question": "3 ?", "answer": "3"}] * 16,
        "empty_prompt": [GOOD, GOOD | {"prompt": ""}],
        "null_prompt": [GOOD, GOOD | {"prompt": None}],
        "empty_chat": [CHAT | {"prompt": []}],
        "chat": [CHAT] * 16,
        "no_answer": [{"prompt": "3 ?"}] * 16,
        "null_answer": [GOOD | {"answer": None}] * 16,
        "few": [GOOD],
        "two_kinds": [GOOD, CHAT],
    }
    for name, lines in rows.items():
        write_jsonl(folder / f"{name}.jsonl", lines)
    (folder / "torn.jsonl").write_text('{"prompt": "3 + 5 ?", "answer": "8"}\n{"prompt": "3 +')
    (folder / "fake.parquet").write_bytes(b"PAR1 not really")
    (folder / "reward.py").write_text(FUNCTIONS)
    (folder / "syntax.py").write_text("def good(:\n")

    def copy(name, source="policy"):
        return shutil.copytree(TOY / source, folder / name)

    for file in copy("no_tokenizer").glob("tokenizer*"):
        file.unlink()
    (copy("no_config") / "config.json").unlink()
    (copy("no_weights") / "model.safetensors").unlink()
    (copy("broken_config") / "config.json").write_text("{")
    weights = copy("torn") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    (copy("pickled") / "model.safetensors").unlink()
    weights = transformers.AutoModelForCausalLM.from_pretrained(TOY / "policy").state_dict()
    torch.save(weights, folder / "pickled" / "pytorch_model.bin")
    config = {"auto_map": {"AutoConfig": "modeling.C", "AutoModelForCausalLM": "modeling.M"}}
    (copy("remote") / "modeling.py").write_text(f"open({str(folder / 'code ran')!r}, 'w')\n")
    (folder / "remote" / "config.json").write_text(json.dumps(config | {"model_type": "mine"}))
    save(folder / "body_only", transformers.LlamaModel(make_llama().config), make_tokenizer())
    model, tokenizer = make_model("llama"), make_tokenizer()
    tokenizer.eos_token = model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.save_pretrained(folder / "no_eos")
    tokenizer.save_pretrained(folder / "no_eos")
    auto = transformers.AutoModelForSequenceClassification
    auto.from_pretrained(TOY / "policy", num_labels=3).save_pretrained(copy("three", "reward_model"))
    return folder


ROWS = {
    "batch and groups": ("--batch_size 10 --samples_per_prompt 4", "--batch_size 10: use a multiple of 4"),
    "no samples": ("--samples_per_prompt 0", "--samples_per_prompt 0: use"),
    "minibatches": ("--num_minibatches 3", "--num_minibatches 3: use a divisor of 16"),
    "temperature": ("--temperature 0", "--temperature 0"),
    "no batch": ("--batch_size 0", "--batch_size 0"),
    "no minibatches": ("--num_minibatches 0", "--num_minibatches 0"),
    "no epochs": ("--update_epochs 0", "--update_epochs 0"),
    "no micro-batch": ("--micro_batch_size 0", "--micro_batch_size 0"),
    "no response": ("--max_response_length 0", "--max_response_length 0"),
    "no scale": ("--reward_scale 0", "--reward_scale 0"),
    "scores clipped to 0": ("--reward_clip 0", "--reward_clip 0"),
    "no line ever": ("--log_every 0", "--log_every 0"),
    "model out of reach": ("--model no/such-model", "--model no/such-model", "use a folder or a hub id"),
    "model folder missing": ("--model {bad}/nowhere", "--model {bad}/nowhere"),
    "model without config": ("--model {bad}/no_config", "--model {bad}/no_config"),
    "model with a broken config": ("--model {bad}/broken_config", "--model {bad}/broken_config"),
    "model without weights": ("--model {bad}/no_weights", "--model {bad}/no_weights"),
    "model with torn weights": ("--model {bad}/torn", "--model {bad}/torn"),
    "model in a pickle": ("--model {bad}/pickled", "--model {bad}/pickled"),
    "model with code": ("--model {bad}/remote", "--model {bad}/remote"),
    "model without tokenizer": ("--model {bad}/no_tokenizer", "--model {bad}/no_tokenizer"),
    "model without head": ("--model {bad}/body_only", "--model {bad}/body_only", "1 weights missing"),
    "model without EOS": ("--model {bad}/no_eos", "--model {bad}/no_eos", "no EOS"),
    "reward model as policy": ("--model {toy}/reward_model", "--model {toy}/reward_model", "use another"),
    "dataset missing": ("--dataset no/such.jsonl", "--dataset no/such.jsonl", "use a .jsonl"),
    "dataset out of reach": ("--dataset no/such-dataset", "--dataset no/such-dataset", "a hub id"),
    "dataset empty": ("--dataset {bad}/empty.jsonl", "--dataset {bad}/empty.jsonl"),
    "dataset torn": ("--dataset {bad}/torn.jsonl", "--dataset {bad}/torn.jsonl"),
    "dataset of two kinds": ("--dataset {bad}/two_kinds.jsonl", "--dataset {bad}/two_kinds.jsonl"),
    "dataset no parquet": ("--dataset {bad}/fake.parquet", "--dataset {bad}/fake.parquet"),
    "no column prompt": ("--dataset {bad}/no_prompt.jsonl", "--dataset {bad}/no_prompt.jsonl", "`prompt`"),
    "prompt empty": ("--dataset {bad}/empty_prompt.jsonl", "row 1", "`prompt`"),
    "prompt null": ("--dataset {bad}/null_prompt.jsonl", "row 1", "`prompt`"),
    "chat empty": ("--dataset {bad}/empty_chat.jsonl", "row 0", "`prompt`"),
    "chat without template": ("--dataset {bad}/chat.jsonl", "chat.jsonl", "need a --model with a template"),
    "answer missing": ("--dataset {bad}/no_answer.jsonl", "--reward exact_answer", "`answer`"),
    "answer null": ("--dataset {bad}/null_answer.jsonl", "--reward exact_answer", "`answer`"),
    "held-out data missing": ("--eval_dataset no/such.jsonl", "--eval_dataset no/such.jsonl"),
    "held-out without prompt": ("--eval_dataset {bad}/no_prompt.jsonl", "--eval_dataset", "`prompt`"),
    "too few prompts": ("--dataset {bad}/few.jsonl --batch_size 64", "few.jsonl", "1 of 1", "or more"),
    "prompts too long": ("--max_prompt_length 2", "0 of 16", "--max_prompt_length 2", "or more"),
    "beyond the positions": ("--max_response_length 125", "--max_response_length 125", "129", "128"),
    "reward with a slip": ("--reward exact_anwser", "--reward exact_anwser"),
    "reward raises": ("--reward {bad}/reward.py:raises", "--reward {bad}/reward.py:raises", "is asleep"),
    "reward of other arguments": ("--reward {bad}/reward.py:strict", "--reward {bad}/reward.py", "unexpected"),
    "wrong number of scores": ("--reward {bad}/reward.py:wrong_number", "did not give 16 finite scores"),
    "nested scores": ("--reward {bad}/reward.py:nested", "did not give 16 finite scores"),
    "scores that are text": ("--reward {bad}/reward.py:text", "--reward {bad}/reward.py:text"),
    "scores that are None": ("--reward {bad}/reward.py:none", "--reward {bad}/reward.py:none"),
    "scores not finite": ("--reward {bad}/reward.py:nan", "--reward {bad}/reward.py:nan", "finite scores"),
    "reward model missing": ("--reward no/such-rm", "--reward no/such-rm"),
    "reward model a causal LM": ("--reward {toy}/policy", "--reward {toy}/policy", "1 weights missing"),
    "reward model of 3 outputs": ("--reward {bad}/three", "--reward {bad}/three", "several outputs"),
    "eval_reward missing": ("--eval_reward no/such-rm", "--eval_reward no/such-rm"),
}


def refused(script: str, capsys, **flags) -> str:
    """What is said, in one line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit:
        run(script, **flags)
    said = capsys.readouterr().err
    assert exit.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1, said
    return said


def has(script: str, name: str) -> bool:
    return name in {field.name for field in dataclasses.fields(importlib.import_module(script).Args)}


def has_flags_of(script: str, row: str) -> bool:
    return all(has(script, word[2:]) for word in ROWS[row][0].split() if word.startswith("--"))


@pytest.mark.parametrize("script, row", [(s, row) for s in POLICY_SCRIPTS for row in ROWS if has_flags_of(s, row)])
def test_refused(script, row, bad, tmp_path, capsys):
    words, *expected = ROWS[row]
    pairs = words.format(bad=bad, toy=TOY).split()
    flags = {name.removeprefix("--"): value for name, value in zip(pairs[::2], pairs[1::2])}
    said = refused(script, capsys, **{"dataset": bad / "good.jsonl", "run_dir": tmp_path / "run"} | flags)
    assert all(word.format(bad=bad, toy=TOY) in said for word in expected), said
    assert not (tmp_path / "run" / "checkpoint.pt").exists()
    assert not (bad / "code ran").exists()


@pytest.mark.parametrize("script", POLICY_SCRIPTS)
def test_numbers_below_zero_or_not_finite(script, tmp_path, capsys):
    module, tried = importlib.import_module(script), 0
    for name, value in vars(module.Args()).items():
        if name == "reward_clip" or type(value) in (int, float):
            for wrong in ["-1"] if isinstance(value, int) else ["-0.5", "nan", "inf"]:
                said = refused(script, capsys, run_dir=tmp_path / "run", **{name: wrong})
                assert f"--{name} {float(wrong) if '.' in wrong else wrong}: use" in said
                tried += 1
    assert tried > 25 and not (tmp_path / "run").exists()


def test_a_group_needs_two_where_it_is_compared_with_itself(tmp_path, capsys):
    grouped = [name for name in POLICY_SCRIPTS if importlib.import_module(name).Args.min_samples_per_prompt > 1]
    assert {"grpo", "rloo", "reinforce_pp_baseline"} <= set(grouped)
    for script in grouped:
        assert "--samples_per_prompt 1: use 2" in refused(script, capsys, samples_per_prompt=1)


@pytest.mark.parametrize("script", POLICY_SCRIPTS)
def test_ranks_must_divide_the_batch(script, monkeypatch, capsys):
    monkeypatch.setattr(importlib.import_module(script), "WORLD_SIZE", 3)
    assert "--batch_size 16: use a multiple of" in refused(script, capsys)


@pytest.mark.parametrize("script", POLICY_SCRIPTS)
def test_a_run_folder_of_other_flags_or_another_script(script, bad, tmp_path, capsys):
    flags = {"dataset": bad / "good.jsonl", "run_dir": tmp_path / "run", "num_iterations": 1}
    run(script, **flags)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    changes = {"seed": 2, "temperature": 0.5, "dataset": bad / "no_answer.jsonl", "reward_clip": 3.0}
    for name, value in changes.items():
        said = refused(script, capsys, **flags | {name: value})
        assert f"--run_dir {tmp_path / 'run'}: is another run" in said and f"--{name} {value}, was" in said
        assert said.count(", was") == 1
    other = "ppo" if script == "grpo" else "grpo"
    assert f"--exp_name {other}, was {script}" in refused(other, capsys, **flags)
    said = refused(script, capsys, **flags | {"lr_schedule": "linear", "num_iterations": 2})
    assert "--lr_schedule linear" in said and "--num_iterations 2, was 1" in said
    assert before == {path: path.read_bytes() for path in before}


@pytest.mark.parametrize("script", POLICY_SCRIPTS)
def test_a_script_without_its_toy_says_what_to_give(script, tmp_path, monkeypatch, capsys):
    module = importlib.import_module(script)
    monkeypatch.setattr(module, "__file__", str(tmp_path / f"{script}.py"))
    monkeypatch.chdir(tmp_path)
    assert "give --model, --dataset and --reward" in refused(script, capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flags", [{"batch_size": 12}, {"batch_size": 16, "reward": "reward.py:nan"}])
def test_one_sentence_for_all_ranks(flags, bad, tmp_path):
    """Before and after the ranks know of each other."""
    flags = {"dataset": bad / "good.jsonl", "run_dir": tmp_path / "run"} | flags
    words = [str(x) for name, value in flags.items() for x in (f"--{name}", value)]
    words = [word.replace("reward.py", f"{bad}/reward.py") for word in words]
    result = launch(ROOT / "grpo.py", "--device", "cpu", *words, ranks=2, check=False)
    said = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.returncode != 0 and len(said) == 1, result.stderr
    assert ("finite scores" if "reward" in flags else "--batch_size 12: use a multiple of 16") in said[0]
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


OWN_FOLDER = """
import os, runpy, sys

script, folder, *flags = sys.argv[1:]
sys.argv = [script, "--run_dir", f"{folder}/{os.environ['RANK']}", *flags]
runpy.run_path(script, run_name="__main__")
"""


def test_a_run_folder_that_not_all_ranks_see(bad, tmp_path):
    """Rank 0 finds a checkpoint and rank 1 none, as on two machines without a common file system."""
    (tmp_path / "own_folder.py").write_text(OWN_FOLDER)
    flags = {"dataset": bad / "good.jsonl", "batch_size": 16, "max_response_length": 8, "device": "cpu"}
    words = [str(x) for name, value in flags.items() for x in (f"--{name}", value)]
    launch(ROOT / "grpo.py", "--run_dir", tmp_path / "0", "--num_iterations", 1, *words, ranks=2)
    before = (tmp_path / "0" / "metrics.jsonl").read_bytes()
    command = [tmp_path / "own_folder.py", ROOT / "grpo.py", tmp_path, "--num_iterations", 2, *words]
    result = launch(*command, ranks=2, check=False)
    said = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.returncode != 0 and len(said) == 1, result.stderr
    assert "--run_dir" in said[0] and "use a shared folder" in said[0]
    assert (tmp_path / "0" / "metrics.jsonl").read_bytes() == before and not (tmp_path / "1").exists()
