"""Bad input gets one line that names the flag or the file and the remedy, and exit code 2."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from conftest import ROOT, write_jsonl
from zoo import make_model, make_tokenizer, refused, run, save

import grpo

TOY = ROOT / "toy"
GOOD = {"prompt": "3 + 5 ?", "answer": "8"}
DATA = {
    "good": [GOOD] * 16,
    "float_answer": [GOOD | {"answer": 8.0}] * 16,
    "empty_prompt": [GOOD, GOOD | {"prompt": ""}],
    "chat": [{"prompt": [{"role": "user", "content": "3 ?"}], "answer": "3"}] * 16,
    "no_answer": [GOOD, *[{"prompt": "3 ?"}] * 15],
    "few": [GOOD],
    "no_content": [{"prompt": [{"role": "user"}], "answer": "3"}] * 16,
}
REWARDS = """
def wrong_number(completions, **columns): return [1.0]
def leaves(completions, **columns): raise SystemExit
def nan(completions, **columns): return [float("nan")] * len(completions)
def raises(completions, **columns): raise KeyError("the judge is asleep")
"""


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    for name, rows in DATA.items():
        write_jsonl(folder / f"{name}.jsonl", rows)
    (folder / "reward.py").write_text(REWARDS)
    model, tokenizer = make_model("llama"), make_tokenizer(chat=True)
    save(folder / "body_only", model.model, tokenizer)
    save(folder / "chat", model, tokenizer)
    tied = transformers.LlamaForSequenceClassification(make_model("llama").config)
    tied.config.update({"num_labels": 1, "tie_word_embeddings": True})
    save(folder / "tied_judge", tied, tokenizer)
    tokenizer.eos_token = model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.save_pretrained(folder / "no_eos")
    tokenizer.save_pretrained(folder / "no_eos")
    return folder


# The flags, and what must be in the message besides the value of the last flag.
CASES = {
    "minibatches": ("--num_minibatches 3 --batch_size 16", "--batch_size 16: use a multiple of 24"),
    "bfloat16 on mps": ("--device mps:0 --dtype bfloat16", "on mps use --dtype float32"),
    "temperature": ("--temperature 0", "--temperature 0.0: use more than 0"),
    "gradient turned around": ("--max_grad_norm -1", "--max_grad_norm -1.0: use inf"),
    "model not there": ("--model no/such-model", "model no/such-model: use a folder"),
    "weights missing": ("--model {bad}/body_only", "lm_head.weight", "policy as --model"),
    "model without EOS": ("--model {bad}/no_eos", "/no_eos", "no EOS"),
    "reward model as policy": ("--model {bad}/tied_judge", "score.weight", "policy as --model"),
    "message without content": ("--model {bad}/chat --dataset {bad}/no_content.jsonl", "content", "'user'"),
    "prompt empty": ("--dataset {bad}/empty_prompt.jsonl", "--dataset", "row 1", "`prompt`"),
    "chat without template": ("--dataset {bad}/chat.jsonl", "--model with a chat template", "'3 ?'"),
    "answer read as a number": ("--dataset {bad}/float_answer.jsonl", "--reward", "`answer`", "integer"),
    "a group of one": ("--samples_per_prompt 1", "--samples_per_prompt 1: use >= 2"),
    "answer missing": ("--dataset {bad}/no_answer.jsonl --reward exact_answer", "--reward", "`answer`"),
    "too few prompts": ("--batch_size 64 --dataset {bad}/few.jsonl", "--dataset", "1 of 1", "or more"),
    "beyond the positions": ("--max_response_length 125", "--max_response_length: 129 tokens", "128"),
    "number of scores": ("--reward {bad}/reward.py:wrong_number", "--reward", "return 16 finite scores"),
    "scores not finite": ("--reward {bad}/reward.py:nan", "finite"),
    "policy as reward model": ("--reward {toy}/policy", "reward model as --reward"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused(case, bad, tmp_path, capsys):
    text, *expected = (part.format(bad=bad, toy=TOY) for part in CASES[case])
    pairs = dict(pair.split() for pair in text.removeprefix("--").split(" --"))
    flags = {"dataset": bad / "good.jsonl", "run_dir": tmp_path / "run"}
    said = refused(capsys, run, "grpo", **flags | pairs)
    assert all(words in said for words in expected), said
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


def test_no_code_of_a_model_runs(tmp_path):
    shutil.copytree(TOY / "policy", tmp_path / "model")
    config = {"model_type": "mine"}
    config["auto_map"] = {"AutoConfig": "modeling.C", "AutoModelForCausalLM": "modeling.M"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "model" / "modeling.py").write_text(f"open({str(tmp_path / 'code ran')!r}, 'w')\n")
    with pytest.raises(ValueError, match="trust_remote_code"):
        run("grpo", model=tmp_path / "model", run_dir=tmp_path / "run")
    assert not (tmp_path / "code ran").exists()


def test_sys_exit_in_a_file_of_the_user_is_no_success(bad, tmp_path):
    command = f"{sys.executable} grpo.py --run_dir {tmp_path}/run --reward {bad}/reward.py:leaves".split()
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 1 and "called sys.exit" in ended.stderr.splitlines()[-1]


def test_a_run_folder_of_other_flags_or_another_script(bad, tmp_path, capsys):
    flags = {"dataset": bad / "good.jsonl", "run_dir": tmp_path / "run", "num_iterations": 1}
    run("grpo", **flags)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    other = write_jsonl(tmp_path / "other.jsonl", DATA["good"])
    for name, value in {"seed": 2, "dataset": other, "reward_clip": 3.0, "anneal_lr": True}.items():
        said = refused(capsys, run, "grpo", **flags | {name: value})
        assert f"--run_dir {tmp_path / 'run'}: is a run of other {name};" in said
    assert "exp_name" in refused(capsys, run, "ppo", **flags)
    assert "other script;" in refused(capsys, run, "rloo", **flags, exp_name="grpo")
    longer = flags | {"anneal_lr": True, "num_iterations": 2}
    assert "num_iterations" in refused(capsys, run, "grpo", **longer)
    assert before == {path: path.read_bytes() for path in before}


def test_an_exception_of_a_reward_keeps_its_traceback(bad, tmp_path):
    with pytest.raises(KeyError, match="asleep") as caught:
        run("grpo", dataset=bad / "good.jsonl", run_dir=tmp_path / "one", reward=f"{bad}/reward.py:raises")
    assert caught.traceback[-1].name == "raises"


def test_ranks_must_divide_the_batch(bad, monkeypatch, capsys):
    monkeypatch.setattr(grpo, "WORLD_SIZE", 2)
    said = refused(capsys, run, "grpo", dataset=bad / "good.jsonl", batch_size=12)
    assert "--batch_size 12: use a multiple of 16" in said


def test_ranks_that_differ(tmp_path, monkeypatch, capsys):
    """In rows, weights, flags or checkpoint. total() stands in for ranks that all have the first checksum."""
    seen, layers = [], [torch.nn.Linear(2, 2) for _ in range(2)]
    monkeypatch.setattr(grpo, "total", lambda x: seen.append(int(x)) or seen[0])

    def open_run(layer=layers[0], rows=DATA["few"], **flags):
        return grpo.open_run(grpo.Args(run_dir=str(tmp_path), **flags), {"policy": layer}, rows)

    open_run()
    for change in ({"rows": DATA["chat"]}, {"layer": layers[1]}, {"track": True}):  # a flag that may change
        assert "the ranks differ" in refused(capsys, open_run, **change)
    grpo.save_checkpoint(tmp_path, 1, {"policy": layers[0]})
    assert "the ranks differ" in refused(capsys, open_run)
