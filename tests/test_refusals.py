"""Bad input gets one sentence that names the flag, the value and the remedy, exit code 2, no traceback; and what is
refused before training begins leaves no run folder behind."""

import importlib
import json
import math
import os
import pickle
import shutil
import sys

import pytest
import torch
import transformers
from conftest import POLICY_SCRIPTS, ROOT, SKELETONS, make_gpt2, make_llama, the_run, write_jsonl

TOY = ROOT / "toy"
GOOD = {"prompt": "3 + 5 ?", "answer": "8"}
SMALL = "--batch_size 16 --num_iterations 1 --eval_every 0 --max_response_length 8".split()


class Code:
    """What a pickle can do to who opens it."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.fixture(scope="session")
def bad(tmp_path_factory):
    """A folder of things that are wrong."""
    folder = tmp_path_factory.mktemp("bad")
    rows = {
        "empty": [],
        "noprompt": [{"question": "3 ?", "answer": "3"}],
        "emptyprompt": [GOOD, {"prompt": "", "answer": "3"}],
        "blankprompt": [GOOD, {"prompt": "  ", "answer": "3"}],
        "numbers": [{"prompt": 5, "answer": "3"}],
        "nullprompt": [GOOD, {"prompt": None, "answer": "3"}],
        "emptychat": [{"prompt": [], "answer": "3"}],
        "nochat": [{"prompt": ["3 + 5 ?"], "answer": "3"}],
        "norole": [{"prompt": [{"content": "3 ?"}], "answer": "3"}],
        "chat": [{"prompt": [{"role": "user", "content": "3 ?"}], "answer": "3"}],
        "noanswer": [{"prompt": "3 ?"}],
        "nullanswer": [GOOD, {"prompt": "3 ?", "answer": None}],
        "few": [GOOD] * 3,
        "escape": [{"\x1b[2Jprompt": "\x1b[31m", "answer": "3"}],
    }
    for name, lines in rows.items():
        write_jsonl(folder / f"{name}.jsonl", lines)
    (folder / "torn.jsonl").write_text('{"prompt": "3 + 5 ?", "answer": "8"}\n{"prompt": "3 +')
    (folder / "fake.parquet").write_bytes(b"PAR1 not really")
    (folder / "text.csv").write_text("prompt,answer\n3 ?,3\n")
    (folder / "file").write_text("a file")
    (folder / "code.py").write_text("number = 3\ndef mine(**kwargs): return [0.0]\n")
    (folder / "syntax.py").write_text("def mine(:\n")
    (folder / "imports.py").write_text("import no_such_module\ndef mine(**kwargs): return [0.0]\n")

    tokenizer = transformers.AutoTokenizer.from_pretrained(TOY / "policy")

    def copy(name, source="policy"):
        shutil.copytree(TOY / source, folder / name)
        return folder / name

    for file in copy("notokenizer").glob("tokenizer*"):
        file.unlink()
    (copy("noconfig") / "config.json").unlink()
    (copy("noweights") / "model.safetensors").unlink()
    (copy("badconfig") / "config.json").write_text("{")
    (copy("unknowntype") / "config.json").write_text('{"model_type": "no_such_model"}')
    weights = copy("torn") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    pickled = copy("pickled")
    (pickled / "model.safetensors").unlink()
    with (pickled / "pytorch_model.bin").open("wb") as file:
        pickle.dump(Code(folder / "pickle ran"), file)
    remote = copy("remote")
    (remote / "modeling.py").write_text(f"open({str(folder / 'code ran')!r}, 'w')\n")
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "modeling.C", "AutoModelForCausalLM": "modeling.M"}}
    (remote / "config.json").write_text(json.dumps(config))
    base = transformers.LlamaModel(make_llama().config)
    base.save_pretrained(folder / "bodyonly")  # no lm_head
    tokenizer.save_pretrained(folder / "bodyonly")
    make_llama(7).save_pretrained(folder / "small")
    tokenizer.save_pretrained(folder / "small")
    noeos = transformers.AutoTokenizer.from_pretrained(copy("noeos"))
    noeos.eos_token = None
    noeos.save_pretrained(folder / "noeos")
    other = copy("othervocab")
    words = (other / "tokenizer.json").read_text().replace('"think"', '"ponder"')
    (other / "tokenizer.json").write_text(words)
    strict = transformers.AutoTokenizer.from_pretrained(copy("strict"))
    strict.chat_template = "{{ raise_exception('only system messages') }}"
    strict.save_pretrained(folder / "strict")

    model = transformers.AutoModelForSequenceClassification.from_pretrained(TOY / "reward_model")
    model.score.weight.data[0, 3] = math.nan
    model.save_pretrained(copy("nan_rm", "reward_model"))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(TOY / "policy", num_labels=3)
    model.save_pretrained(copy("three_rm", "reward_model"))
    for file in copy("rm_notokenizer", "reward_model").glob("tokenizer*"):
        file.unlink()
    bert = transformers.BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    bert.num_labels = 1
    transformers.BertForSequenceClassification(bert).save_pretrained(folder / "bert")
    tokenizer.save_pretrained(folder / "bert")
    gpt2 = make_gpt2()
    gpt2.save_pretrained(folder / "positions")
    tokenizer.save_pretrained(folder / "positions")
    return folder


BEFORE = {
    "batch size zero": ("--batch_size 0", "--batch_size 0: must be more than 0"),
    "batch size negative": ("--batch_size -8", "--batch_size -8"),
    "batch size and groups": (
        "--batch_size 10 --samples_per_prompt 4",
        "--batch_size 10",
        "4 --samples_per_prompt",
        "12",
    ),
    "no samples": ("--samples_per_prompt 0", "--samples_per_prompt 0"),
    "micro batch zero": ("--micro_batch_size 0", "--micro_batch_size 0"),
    "no iterations": ("--num_iterations 0", "--num_iterations 0"),
    "log every 0": ("--log_every 0", "--log_every 0"),
    "keep no checkpoint": ("--keep_checkpoints 0", "--keep_checkpoints 0"),
    "temperature zero": ("--temperature 0", "--temperature 0"),
    "temperature negative": ("--temperature -1", "--temperature -1"),
    "temperature infinite": ("--temperature inf", "--temperature inf"),
    "learning rate NaN": ("--learning_rate nan", "--learning_rate nan: must be a number of 0 or more"),
    "learning rate zero": ("--learning_rate 0", "--learning_rate 0"),
    "beta negative": ("--kl_coef -0.1", "--kl_coef -0.1"),
    "seed negative": ("--seed -1", "--seed -1"),
    "clip negative": ("--reward_clip -1", "--reward_clip -1"),
    "gradient norm zero": ("--max_grad_norm 0", "--max_grad_norm 0"),
    "beta of Adam": ("--adam_betas 0.9 1.0", "--adam_betas 0.9 1.0", "below 1"),
    "beta of Adam NaN": ("--adam_betas nan 0.9", "--adam_betas nan 0.9"),
    "weight decay NaN": ("--weight_decay nan", "--weight_decay nan"),
    "marker empty": ("--answer_marker=", "--answer_marker ''"),
    "CUDA absent": ("--device cuda", "--device cuda", "cpu or auto"),
    "runs in a file": ("--runs_dir {bad}/file", "--runs_dir {bad}/file", "folder that is yours"),
    "runs below a file": ("--runs_dir {bad}/file/runs", "--runs_dir {bad}/file/runs", "folder that is yours"),
    "model missing": ("--model no/such-model", "--model no/such-model", "folder or a hub id"),
    "model folder missing": ("--model {bad}/nowhere", "--model {bad}/nowhere"),
    "model without config": ("--model {bad}/noconfig", "--model {bad}/noconfig"),
    "model with a broken config": ("--model {bad}/badconfig", "--model {bad}/badconfig"),
    "model of unknown type": ("--model {bad}/unknowntype", "--model {bad}/unknowntype"),
    "model without weights": ("--model {bad}/noweights", "--model {bad}/noweights"),
    "model with torn weights": ("--model {bad}/torn", "--model {bad}/torn"),
    "model in a pickle": ("--model {bad}/pickled", "--model {bad}/pickled"),
    "model with code": ("--model {bad}/remote", "--model {bad}/remote"),
    "model without tokenizer": ("--model {bad}/notokenizer", "--model {bad}/notokenizer"),
    "model without head": ("--model {bad}/bodyonly", "--model {bad}/bodyonly", "lm_head"),
    "model smaller than its tokenizer": ("--model {bad}/small", "--model {bad}/small", "7 embeddings"),
    "tokenizer without EOS": ("--model {bad}/noeos", "--model {bad}/noeos", "no EOS token"),
    "reward model as policy": ("--model {toy}/reward_model", "--model {toy}/reward_model", "cannot generate"),
    "reference missing": ("--ref_model no/such", "--ref_model no/such"),
    "reference is a reward model": ("--ref_model {toy}/reward_model", "--ref_model", "cannot generate"),
    "reference with another vocabulary": ("--ref_model {bad}/othervocab", "--ref_model {bad}/othervocab", "tokenizer"),
    "dataset missing": ("--dataset no/such.jsonl", "--dataset no/such.jsonl", "cannot be read"),
    "dataset out of reach": ("--dataset no/such-dataset", "--dataset no/such-dataset", "cannot be read"),
    "dataset empty": ("--dataset {bad}/empty.jsonl", "--dataset {bad}/empty.jsonl"),
    "dataset torn": ("--dataset {bad}/torn.jsonl", "--dataset {bad}/torn.jsonl", "cannot be read"),
    "dataset no parquet": ("--dataset {bad}/fake.parquet", "--dataset {bad}/fake.parquet", "cannot be read"),
    "dataset of another kind": ("--dataset {bad}/text.csv", "--dataset {bad}/text.csv", "give a .jsonl"),
    "dataset without prompt": ("--dataset {bad}/noprompt.jsonl", "`prompt`", "rename or add it"),
    "prompt empty": ("--dataset {bad}/emptyprompt.jsonl", "row 1 has the prompt ''"),
    "prompt blank": ("--dataset {bad}/blankprompt.jsonl", "row 1", "no token at all"),
    "prompt a number": ("--dataset {bad}/numbers.jsonl", "row 0 has the prompt 5"),
    "prompt null": ("--dataset {bad}/nullprompt.jsonl", "row 1 has no `prompt`"),
    "chat empty": ("--dataset {bad}/emptychat.jsonl", "row 0 has the prompt []"),
    "chat of texts": ("--dataset {bad}/nochat.jsonl", "row 0", "messages with role and content"),
    "chat without role": ("--dataset {bad}/norole.jsonl", "row 0", "messages with role and content"),
    "chat without template": ("--dataset {bad}/chat.jsonl", "row 0 is a chat", "no chat template"),
    "chat that the template refuses": (
        "--dataset {bad}/chat.jsonl --model {bad}/strict",
        "row 0 cannot be made tokens",
        "only system messages",
    ),
    "answer missing": ("--dataset {bad}/noanswer.jsonl", "`answer`", "exact_answer"),
    "answer null": ("--dataset {bad}/nullanswer.jsonl", "row 1 has no `answer`"),
    "answer missing for the monitor": (
        "--dataset {bad}/noanswer.jsonl --reward {bad}/code.py:mine --monitor exact_answer",
        "`answer`",
        "exact_answer",
    ),
    "held-out data missing": ("--eval_dataset no/such.jsonl", "--eval_dataset no/such.jsonl", "cannot be read"),
    "held-out data without prompt": ("--eval_dataset {bad}/noprompt.jsonl", "--eval_dataset", "`prompt`"),
    "too few prompts": ("--dataset {bad}/few.jsonl --batch_size 128", "3 prompts are fewer than the"),
    "no prompt short enough": ("--max_prompt_length 2", "--max_prompt_length 2", "no prompt"),
    "more tokens than positions": ("--max_response_length 113", "--max_response_length 113", "16 tokens", "128"),
    "reward with a slip": ("--reward exact_anwser", "--reward exact_anwser", "give exact_answer, file.py:function"),
    "reward file missing": ("--reward no_such.py:f", "--reward no_such.py:f", "path/to/file.py:function"),
    "reward without function": ("--reward {toy}/build.py", "path/to/file.py:function"),
    "reward function missing": ("--reward {bad}/code.py:other", "other", "path/to/file.py:function"),
    "reward no function": ("--reward {bad}/code.py:number", "number", "path/to/file.py:function"),
    "reward file with an error": ("--reward {bad}/syntax.py:mine", "SyntaxError", "mend it"),
    "reward file that does not run": ("--reward {bad}/imports.py:mine", "no_such_module", "mend it"),
    "monitor file missing": ("--monitor no_such.py:f", "--monitor no_such.py:f", "path/to/file.py:function"),
    "reward model missing": ("--reward no/such-rm", "--reward no/such-rm"),
    "reward model a causal LM": ("--reward {toy}/policy", "--reward {toy}/policy", "reward_model.py"),
    "reward model with three outputs": ("--reward {bad}/three_rm", "3 outputs"),
    "reward model with NaN": ("--reward {bad}/nan_rm", "NaN"),
    "reward model without tokenizer": ("--reward {bad}/rm_notokenizer", "--reward {bad}/rm_notokenizer"),
    "reward model an encoder": ("--reward {bad}/bert", "`score` head"),
    "resume nothing": ("--resume {bad}/nowhere", "--resume {bad}/nowhere", "no run folder"),
    "resume an empty folder": ("--resume {bad}/strict", "--resume {bad}/strict", "no run folder"),
    "terminal steered by a column": ("--dataset {bad}/escape.jsonl", "`prompt`"),
}


def sentence(script: str, monkeypatch, capsys, *flags) -> str:
    """What is said, exit code 2."""
    module = importlib.import_module(script)
    monkeypatch.setattr(sys, "argv", [script, *map(str, flags)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit:
        module.main(module.parse_args())
    said = capsys.readouterr().err.strip()
    assert exit.value.code == 2
    assert said.startswith("error: ") and said.isprintable(), said  # one line, no control characters
    return said


# The first 45 in every script; the rest, which take longer, in one script of each skeleton (the others are copies).
ROWS = [(row, script) for script in POLICY_SCRIPTS for row in (BEFORE if script in SKELETONS else [*BEFORE][:45])]


@pytest.mark.parametrize("row, script", ROWS)
def test_refused_before_training(script, row, bad, tmp_path, monkeypatch, capsys):
    flags, *words = (text.format(bad=bad, toy=TOY) for text in BEFORE[row])
    if "cuda" in flags:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    flags = ["--runs_dir", tmp_path / "runs", *flags.split(" ")]
    said = sentence(script, monkeypatch, capsys, *flags)
    assert all(word in said for word in words), said
    assert not (tmp_path / "runs").exists()
    assert not (bad / "pickle ran").exists() and not (bad / "code ran").exists()
    assert (bad / "file").read_text() == "a file"


@pytest.mark.parametrize("script", ["rloo", "grpo", "reinforce_pp_baseline"])
def test_a_group_of_one_is_refused(script, tmp_path, monkeypatch, capsys):
    said = sentence(script, monkeypatch, capsys, "--runs_dir", tmp_path / "runs", "--samples_per_prompt", 1)
    assert "--samples_per_prompt 1" in said and "at least 2" in said and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("script", ["reinforce_pp", "grpo", "reinforce_pp_baseline", "ppo"])
def test_minibatches_must_divide(script, tmp_path, monkeypatch, capsys):
    said = sentence(script, monkeypatch, capsys, "--runs_dir", tmp_path, "--batch_size", 40, "--num_minibatches", 3)
    assert "--num_minibatches 3" in said and "40 responses" in said


@pytest.mark.parametrize("script", POLICY_SCRIPTS)
def test_groups_must_divide_over_ranks(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "3")
    said = sentence(script, monkeypatch, capsys, "--runs_dir", tmp_path, "--batch_size", 64)
    assert "--batch_size 64" in said and "3 ranks" in said


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--gae_lambda 1.5", ["--gae_lambda 1.5"]),
        ("--critic_model no/such", ["--critic_model no/such"]),
        ("--critic_model {bad}/othervocab", ["--critic_model", "give one with its tokenizer"]),
        ("--critic_model {bad}/three_rm", ["--critic_model {bad}/three_rm"]),
        ("--critic_learning_rate nan", ["--critic_learning_rate nan"]),
    ],
)
def test_the_critic_is_refused(bad, tmp_path, monkeypatch, capsys, flags, words):
    said = sentence("ppo", monkeypatch, capsys, "--runs_dir", tmp_path / "runs", *flags.format(bad=bad).split())
    assert all(word.format(bad=bad) in said for word in words), said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("script", SKELETONS)
@pytest.mark.parametrize(
    "body, words",
    [
        ("return [1.0]", "must give 16 numbers"),
        ("return [[1.0]] * len(completions)", "must give 16 numbers"),
        ("return None", "raises"),
        ("return ['high'] * len(completions)", "raises"),
        ("raise KeyError('oh')", "raises KeyError('oh') in line 2 of"),
        ("return [float('nan')] * len(completions)", "NaN or infinite"),
        ("return [float('inf')] + [0.0] * (len(completions) - 1)", "NaN or infinite"),
    ],
)
def test_a_reward_function_that_fails(script, tmp_path, monkeypatch, capsys, body, words):
    """Known when it is first called. Nothing has been trained by then, and no weights are written."""
    (tmp_path / "mine.py").write_text(f"def mine(completions, **kwargs):\n    {body}\n")
    flags = [*SMALL, "--runs_dir", tmp_path / "runs", "--reward", f"{tmp_path}/mine.py:mine"]
    said = sentence(script, monkeypatch, capsys, *flags)
    assert words in said, said
    run = the_run(tmp_path / "runs")
    assert not list(run.glob("checkpoints/*")) and not (run / "model").exists()


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A run of each script: two iterations, a checkpoint of each."""
    folder = tmp_path_factory.mktemp("finished")
    for script in POLICY_SCRIPTS:
        module = importlib.import_module(script)
        with pytest.MonkeyPatch.context() as patch:
            flags = [*SMALL, "--num_iterations", 2, "--save_every", 1, "--runs_dir", folder / script]
            patch.setattr(sys, "argv", [script, *map(str, flags)])
            module.main(module.parse_args())
    return {script: the_run(folder / script) for script in POLICY_SCRIPTS}


def flip(path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def swap(run) -> None:
    shutil.copy(run / "checkpoints" / "000001.pt", run / "checkpoints" / "000002.pt")


DAMAGE = {
    "truncated": (
        lambda run: os.truncate(run / "checkpoints" / "000002.pt", 5000),
        "",
        ["000002.pt is damaged", "delete"],
    ),
    "empty": (lambda run: os.truncate(run / "checkpoints" / "000002.pt", 0), "", ["000002.pt is damaged"]),
    "one bit": (lambda run: flip(run / "checkpoints" / "000002.pt"), "", ["000002.pt is damaged", "SHA-256"]),
    "swapped": (swap, "", ["000002.pt is damaged"]),
    "no digest": (lambda run: (run / "checkpoints" / "000002.pt.sha256").unlink(), "", ["000002.pt is damaged"]),
    "no flags": (lambda run: (run / "args.json").unlink(), "", ["no run folder"]),
    "torn flags": (lambda run: os.truncate(run / "args.json", 20), "", ["no run folder"]),
    "two flags changed": (
        None,
        "--learning_rate 1e-3 --seed 7",
        ["--learning_rate 0.001 was 0.0002", "--seed 7 was 1"],
    ),
    "fewer iterations": (None, "--num_iterations 1", ["--num_iterations 1", "is at 2", "give more"]),
    "a cosine that would bend": (None, "--lr_schedule cosine", ["--lr_schedule cosine was constant"]),
}


@pytest.mark.parametrize("script", POLICY_SCRIPTS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_resume_refuses(script, damage, finished, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished[script], run)
    harm, flags, words = DAMAGE[damage]
    if harm:
        harm(run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    said = sentence(script, monkeypatch, capsys, *SMALL, "--num_iterations", 3, "--resume", run, *flags.split())
    assert all(word in said for word in words), said
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("script", POLICY_SCRIPTS)
def test_resume_refuses_the_run_of_another_script(script, finished, tmp_path, monkeypatch, capsys):
    other = POLICY_SCRIPTS[POLICY_SCRIPTS.index(script) - 1]
    said = sentence(script, monkeypatch, capsys, *SMALL, "--resume", finished[other])
    assert f"was not made by {script}.py" in said


@pytest.mark.parametrize("script", POLICY_SCRIPTS)
def test_resume_refuses_another_number_of_ranks(script, finished, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = sentence(script, monkeypatch, capsys, *SMALL, "--num_iterations", 2, "--resume", finished[script])
    assert "1 ranks, not 2" in said


def test_the_checkpoint_before_a_damaged_one_still_serves(finished, tmp_path, monkeypatch):
    """What the sentence advises."""
    module, run = importlib.import_module("grpo"), tmp_path / "run"
    shutil.copytree(finished["grpo"], run)
    whole = (run / "model" / "model.safetensors").read_bytes()
    (run / "checkpoints" / "000002.pt").unlink()
    flags = [*SMALL, "--num_iterations", 2, "--save_every", 1, "--resume", run]
    monkeypatch.setattr(sys, "argv", ["grpo", *map(str, flags)])
    module.main(module.parse_args())
    assert (run / "model" / "model.safetensors").read_bytes() == whole


def test_the_table_is_as_long_as_promised():
    assert len(BEFORE) + len(DAMAGE) + 4 + 5 + 7 + 2 >= 100
