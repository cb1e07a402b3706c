"""Bad input gets one line that names the flag, its value and the remedy, and exit code 2."""

import json
import logging
import math
import shlex
import shutil
import sys

import datasets
import pytest
import torch
import transformers
from conftest import ROOT, launch, words_of, write_jsonl
from zoo import make_model, make_tokenizer, refused, run, save

import grpo

datasets.logging.set_verbosity(logging.CRITICAL)  # it prints about broken files
TOY = ROOT / "toy"
GOOD = {"prompt": "3 + 5 ?", "answer": "8"}
DATA = {
    "good": [GOOD] * 16,
    "empty_prompt": [GOOD, GOOD | {"prompt": ""}],
    "chat": [{"prompt": [{"role": "user", "content": "3 ?"}], "answer": "3"}] * 16,
    "no_answer": [{"prompt": "3 ?"}] * 16,
    "few": [GOOD],
    "no_content": [{"prompt": [{"role": "user"}], "answer": "3"}] * 16,
    "new_word": [{"prompt": "3 new", "answer": "3"}] * 16,
    "taken": [GOOD | {"completions": "3"}] * 16,
}
REWARDS = """
def wrong_number(completions, **columns): return [1.0]
def leaves(completions, **columns): raise SystemExit
def nan(completions, **columns): return [float("nan")] * len(completions)
def raises(completions, **columns): raise KeyError("the judge is asleep")
"""


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    """A folder of broken models, datasets and rewards."""
    folder = tmp_path_factory.mktemp("bad")
    for name, rows in DATA.items():
        write_jsonl(folder / f"{name}.jsonl", rows)
    (folder / "torn.jsonl").write_text('{"prompt": "3 + 5 ?", "answer": "8"}\n{"prompt": "3 +')
    (folder / "nan.jsonl").write_text('{"prompt": "3 ?", "answer": 3}\n{"prompt": "3 ?", "answer": NaN}\n')
    (folder / "reward.py").write_text(REWARDS)

    for name in ("no_tokenizer", "pickled", "remote"):
        shutil.copytree(TOY / "policy", folder / name)
    for file in (folder / "no_tokenizer").glob("tokenizer*"):
        file.unlink()
    (folder / "pickled" / "model.safetensors").unlink()
    toy = transformers.AutoModelForCausalLM.from_pretrained(TOY / "policy")
    torch.save(toy.state_dict(), folder / "pickled" / "pytorch_model.bin")
    config = {"model_type": "mine"}
    config["auto_map"] = {"AutoConfig": "modeling.C", "AutoModelForCausalLM": "modeling.M"}
    (folder / "remote" / "config.json").write_text(json.dumps(config))
    (folder / "remote" / "modeling.py").write_text(f"open({str(folder / 'code ran')!r}, 'w')\n")

    model, tokenizer = make_model("llama"), make_tokenizer(chat=True)
    save(folder / "body_only", model.model, tokenizer)
    tokenizer.add_tokens(["new"])
    save(folder / "chat", model, tokenizer)
    tokenizer.eos_token = model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.save_pretrained(folder / "no_eos")
    tokenizer.save_pretrained(folder / "no_eos")
    with torch.no_grad():
        toy.model.norm.weight[3] = math.nan
    save(folder / "nan", toy, transformers.AutoTokenizer.from_pretrained(TOY / "policy"))
    shutil.copytree(TOY / "reward_model", folder / "three")
    auto = transformers.AutoModelForSequenceClassification
    auto.from_pretrained(TOY / "policy", num_labels=3).save_pretrained(folder / "three")
    return folder


# The flags, of which the last must be in the message with its value, and what else must be in it.
CASES = {
    "batch and groups": ("--samples_per_prompt 4 --batch_size 10", ": use a multiple of 4"),
    "minibatches": ("--num_minibatches 3", ": use a divisor of 16"),
    "model not on the hub": ("--model no/such-model", "use a folder or a hub id"),
    "model in a pickle": ("--model {bad}/pickled",),
    "model with code": ("--model {bad}/remote",),
    "model without tokenizer": ("--model {bad}/no_tokenizer",),
    "weights missing": ("--model {bad}/body_only", "use a policy"),
    "model without EOS": ("--model {bad}/no_eos", "no EOS"),
    "reward model as policy": ("--model {toy}/reward_model", "use a policy"),
    "weights not finite": ("--model {bad}/nan", "not finite"),
    "ids beyond the model": ("--model {bad}/chat --dataset {bad}/new_word.jsonl", "row 0", "beyond the 22"),
    "NaN in a .jsonl": ("--dataset {bad}/nan.jsonl", "row 1", "NaN"),
    "columns of the script": ("--dataset {bad}/taken.jsonl", "completions", "rename"),
    "message without content": ("--model {bad}/chat --dataset {bad}/no_content.jsonl", "row 0", "no content"),
    "dataset missing": ("--dataset no/such.jsonl", "use a .jsonl"),
    "dataset torn": ("--dataset {bad}/torn.jsonl",),
    "prompt empty": ("--dataset {bad}/empty_prompt.jsonl", "row 1", "`prompt`"),
    "chat without template": ("--dataset {bad}/chat.jsonl", "row 0", "chat template"),
    "answer missing": ("--reward exact_answer --dataset {bad}/no_answer.jsonl", "row 0", "`answer`"),
    "too few prompts": ("--batch_size 64 --dataset {bad}/few.jsonl", "1 of 1", "or more"),
    "prompts too long": ("--max_prompt_length 2", "0 of 16", "or more"),
    "beyond the positions": ("--max_response_length 125", "129", "128"),
    "reward misspelled": ("--reward exact_anwser",),
    "wrong number of scores": ("--reward {bad}/reward.py:wrong_number", "did not return 16 finite scores"),
    "scores not finite": ("--reward {bad}/reward.py:nan", "finite"),
    "reward model a causal LM": ("--reward {toy}/policy", "use a reward model"),
    "reward model of 3 outputs": ("--reward {bad}/three", "one output"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused(case, bad, tmp_path, capsys):
    text, *expected = (part.format(bad=bad, toy=TOY) for part in CASES[case])
    pairs = text.removeprefix("--").split(" --")
    flags = {"dataset": bad / "good.jsonl", "run_dir": tmp_path / "run"}
    said = refused(capsys, run, "grpo", **flags | dict(pair.split() for pair in pairs))
    assert f"--{pairs[-1]}" in said and all(words in said for words in expected), said
    assert not (tmp_path / "run" / "checkpoint.pt").exists()
    assert not (bad / "code ran").exists()


@pytest.mark.parametrize(
    "flag",
    ["batch_size -1", "kl_coef -0.5", "learning_rate nan", "reward_clip inf", "temperature 0", "log_every 0"],
)
def test_numbers_out_of_range(flag, capsys):
    assert f"--{flag}" in refused(capsys, run, "grpo", **dict([flag.split()]))


@pytest.mark.parametrize("script", ["grpo", "rloo", "reinforce_pp_baseline"])
def test_a_group_needs_two_where_it_is_compared_with_itself(script, capsys):
    assert "--samples_per_prompt 1: use 2" in refused(capsys, run, script, samples_per_prompt=1)


def test_a_run_folder_of_other_flags_or_another_script(bad, tmp_path, capsys):
    flags = {"dataset": bad / "good.jsonl", "run_dir": tmp_path / "run", "num_iterations": 1}
    run("grpo", **flags)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    for name, value in {"seed": 2, "dataset": bad / "no_answer.jsonl", "reward_clip": 3.0}.items():
        said = refused(capsys, run, "grpo", **flags | {name: value})
        assert f"--run_dir {tmp_path / 'run'}: has --{name} " in said and f"not {value}" in said
    assert "--exp_name grpo, not ppo" in refused(capsys, run, "ppo", **flags)
    said = refused(capsys, run, "grpo", **flags | {"anneal_lr": True, "num_iterations": 2})
    assert "has --num_iterations 1, not 2" in said or "has --anneal_lr False, not True" in said
    assert before == {path: path.read_bytes() for path in before}


def test_an_exception_of_a_reward_keeps_its_traceback(bad, tmp_path):
    """And sys.exit() does not end the run as if it had succeeded."""
    with pytest.raises(KeyError, match="asleep") as caught:
        run("grpo", dataset=bad / "good.jsonl", run_dir=tmp_path / "one", reward=f"{bad}/reward.py:raises")
    assert caught.traceback[-1].name == "raises"
    with pytest.raises(RuntimeError, match="called sys"):
        run("grpo", dataset=bad / "good.jsonl", run_dir=tmp_path / "two", reward=f"{bad}/reward.py:leaves")


def test_a_real_model_with_the_toys_defaults_is_warned_of(bad, tmp_path, capsys):
    run("grpo", model=bad / "chat", dataset=bad / "good.jsonl", run_dir=tmp_path, num_iterations=1)
    assert "warning: --learning_rate: " in capsys.readouterr().out
    grpo.check_args(grpo.Args(model="x", device="cuda"))
    assert "warning: --learning_rate, --max_response_length, --dtype: " in capsys.readouterr().out


def test_ranks_must_divide_the_batch(bad, monkeypatch, capsys):
    monkeypatch.setattr(grpo, "WORLD_SIZE", 2)
    said = refused(capsys, run, "grpo", dataset=bad / "good.jsonl", batch_size=12)
    assert "--batch_size 12: use a multiple of 16" in said


def test_ranks_that_differ_get_one_line(tmp_path):
    """Their flags, rows and weights differ, and rank 0 alone finds a checkpoint, as without a common file system."""
    for rank, answer in (("0", "8"), ("1", "9")):
        write_jsonl(tmp_path / f"data{rank}.jsonl", [GOOD | {"answer": answer}] * 16)
        save(tmp_path / f"model{rank}", make_model("llama", seed=int(rank)), make_tokenizer())
    flags = {"seed": "RANK", "dataset": tmp_path / "dataRANK.jsonl", "model": tmp_path / "modelRANK"}
    flags |= {"run_dir": tmp_path / "runRANK", "num_iterations": 1, "batch_size": 16, "eval_every": 0}
    flags |= {"max_response_length": 8, "device": "cpu"}
    run("grpo", **{name: str(value).replace("RANK", "0") for name, value in flags.items()})
    args = tmp_path / "run0" / "args.json"
    args.write_text(args.read_text().replace('"ranks": 1', '"ranks": 2'))
    before = {path: path.read_bytes() for path in (tmp_path / "run0").rglob("*") if path.is_file()}

    command = shlex.join([sys.executable, f"{ROOT}/grpo.py", *words_of(**flags)]).replace("RANK", "$RANK")
    result = launch("--no-python", "bash", "-c", command, ranks=2, check=False)
    (said,) = (line for line in result.stderr.splitlines() if line.startswith("error: "))
    assert result.returncode != 0 and "the ranks differ in" in said
    parts = ["weights", "rows of --dataset", "checkpoint.pt", "--seed", "--dataset", "--model", "--run_dir"]
    assert all(f" {part}" in said for part in parts)
    assert before == {path: path.read_bytes() for path in before} and not (tmp_path / "run1").exists()
