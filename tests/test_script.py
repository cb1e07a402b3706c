"""The scripts as their users meet them: help, refusals, learning, and nothing written where it should not be."""

import dataclasses
import importlib
import json
import math
import os
import re
import sys

import pytest
import torch
import transformers
from conftest import POLICY_SCRIPTS, ROOT, SKELETONS, launch, read_jsonl, the_run, write_jsonl

SCRIPTS = [*SKELETONS, "sft", "reward_model"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_explains_every_flag_in_groups(name):
    env = os.environ | {"COLUMNS": "100"}
    text = launch("-X", "importtime", ROOT / f"{name}.py", "--help", env=env)
    script = importlib.import_module(name)
    lines = text.stdout.splitlines()
    for field in dataclasses.fields(script.Args):
        (line,) = [i for i, line in enumerate(lines) if re.match(rf"│ --{field.name}\b", line)]
        explained = " ".join(lines[line : line + 2])
        assert len(explained.split("(default")[0].split()) > 5, f"{field.name} is not explained"
    assert len([line for line in lines if " options " in line]) >= 5
    assert script.__doc__.splitlines()[0] in text.stdout
    imported = {line.rpartition("|")[2].strip() for line in text.stderr.splitlines()}
    slow = {"datasets", "wandb", "transformers.modeling_utils", "transformers.models.auto.modeling_auto"}
    assert not imported & slow  # seconds that --help need not take


def test_default_paths_do_not_depend_on_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in SCRIPTS:
        args = importlib.import_module(name).Args()
        for path in (args.model, args.dataset, getattr(args, "eval_dataset", args.dataset)):
            assert os.path.isabs(path) and os.path.exists(path)


@pytest.mark.parametrize("script", ["rloo", "ppo", "remax"])  # the rest: the demonstration below, test_reward_model.py
def test_every_script_learns(tmp_path, monkeypatch, script):
    """Half of the default iterations: five seeds of each script end at 0.83 or more. An untrained policy stays at 0.38,
    one with the sign flipped falls to 0."""
    module = importlib.import_module(script)
    monkeypatch.setattr(
        sys, "argv", [script, "--runs_dir", str(tmp_path), *"--num_iterations 40 --eval_every 0".split()]
    )
    module.main(module.parse_args())
    metrics = read_jsonl(the_run(tmp_path) / "metrics.jsonl")
    rates, lengths = ([line[key] for line in metrics[1:]] for key in ("pass_rate", "response_length"))
    assert sum(rates[:3]) / 3 <= 0.46 and sum(rates[-5:]) / 5 >= 0.75
    assert sum(lengths[-5:]) / 5 >= 1.5 * sum(lengths[:3]) / 3
    assert all(line["ratio_deviation"] < 1e-4 for line in metrics[1:])


def test_the_demonstration_learns_the_toy(tmp_path):
    """The README's first command, as it says."""
    output = launch(ROOT / "reinforce_pp.py", "--runs_dir", tmp_path).stdout
    metrics = read_jsonl(the_run(tmp_path) / "metrics.jsonl")
    first, last = metrics[1:4], metrics[-10:]
    mean = lambda lines, key: sum(line[key] for line in lines) / len(lines)  # noqa: E731
    assert mean(first, "pass_rate") <= 0.45
    assert mean(last, "pass_rate") >= 0.95
    assert mean(last, "response_length") >= 1.5 * mean(first, "response_length")
    for group in ("2-5", "6", "8"):
        before, after = metrics[0][f"eval/pass_rate/{group}"], metrics[-1][f"eval/pass_rate/{group}"]
        assert after > before + 0.3
        assert f"{group}: {before:.3f}" in output and f"{group}: {after:.3f}" in output
    assert metrics[1]["kl"] == pytest.approx(0, abs=1e-5) and metrics[-1]["kl"] > 0.1


@pytest.mark.parametrize("script", SKELETONS)
def test_bfloat16_and_gradient_checkpointing_run(tmp_path, monkeypatch, script):
    """Autocast only: the forward passes are in bfloat16, weights and optimizer state stay float32."""
    module = importlib.import_module(script)
    token_logprobs, generate, seen = module.token_logprobs, module.generate, []

    def watching(function):
        def call(*args, **kwargs):
            seen.append((function.__name__, torch.is_autocast_enabled("cpu")))
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(module, "token_logprobs", watching(token_logprobs))
    monkeypatch.setattr(module, "generate", watching(generate))
    flags = "--num_iterations 2 --batch_size 16 --eval_every 2 --dtype bfloat16 --gradient_checkpointing".split()
    monkeypatch.setattr(sys, "argv", [script, "--runs_dir", str(tmp_path), *flags])
    module.main(module.parse_args())
    assert set(seen) == {("token_logprobs", True), ("generate", True)}
    state = torch.load(next(the_run(tmp_path).glob("checkpoints/*.pt")), weights_only=True)
    tensors = [*state["policy"].values()]
    tensors += [x for entry in state["optimizer"]["state"].values() for x in entry.values()]
    assert {x.dtype for x in tensors} == {torch.float32}
    assert all(line["ratio_deviation"] < 0.2 for line in read_jsonl(the_run(tmp_path) / "metrics.jsonl")[1:])


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_metric_is_explained(tmp_path, monkeypatch, script):
    module = importlib.import_module(script)
    flags = "--num_iterations 1 --batch_size 16 --eval_every 1 --monitor exact_answer".split()
    if script not in POLICY_SCRIPTS:
        data = {"sft": "demonstrations", "reward_model": "preferences_train"}[script]
        lines = (ROOT / "toy" / f"{data}.jsonl").open().readlines()
        (tmp_path / "few.jsonl").write_text("".join(lines[:48]))
        flags = f"--num_epochs 1 --batch_size 16 --dataset {tmp_path / 'few.jsonl'}".split()
        flags += ["--eval_size", "16"] if script == "sft" else []
    monkeypatch.setattr(sys, "argv", [script, "--runs_dir", str(tmp_path / "runs"), *flags])
    module.main(module.parse_args())
    page = (ROOT / "docs" / "metrics.md").read_text()
    for line in read_jsonl(the_run(tmp_path / "runs") / "metrics.jsonl"):
        for name, value in line.items():
            assert math.isfinite(value)
            name = "/".join([*name.split("/")[:-1], "<group>"]) if name.count("/") == 2 else name
            assert f"`{name}`" in page, name


@pytest.mark.parametrize("script", SKELETONS)
def test_chats_go_through_the_template(tmp_path, tokenizer, script):
    module = importlib.import_module(script)
    tokenizer.save_pretrained(tmp_path / "chat")
    chatty = transformers.AutoTokenizer.from_pretrained(tmp_path / "chat")
    chatty.chat_template = (
        "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}think{% endif %}"
    )
    chats = [{"prompt": [{"role": "user", "content": "3 + 5 ?"}], "answer": "8"}]
    data = write_jsonl(tmp_path / "chats.jsonl", chats)
    (row,) = module.load_rows(module.Args(), str(data), "train", "dataset", chatty)
    assert row["prompt_ids"] == tokenizer("3 + 5 ? think")["input_ids"]


WATCH = """
import os, sys
log = open(os.environ["AUDIT_LOG"], "a", buffering=1)
def watch(event, args):
    if event == "open" and isinstance(args[0], (str, bytes)) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        log.write("write " + os.path.abspath(os.fsdecode(args[0])) + "\\n")
    if event in ("os.mkdir", "os.rename"):
        log.write("write " + os.path.abspath(os.fsdecode(args[0])) + "\\n")
    if event == "socket.connect" or event == "socket.getaddrinfo":
        log.write(f"network {event} {args[-1] if event == 'socket.connect' else args[0]}\\n")
        raise OSError("no route")
sys.addaudithook(watch)
"""


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("track", [False, True])
def test_a_run_writes_into_its_folder_and_asks_nobody(tmp_path, name, track):
    """Files and connections watched by an audit hook in the process; the folders around compared before and after."""
    home, work, watch, temp = tmp_path / "home", tmp_path / "work", tmp_path / "watch", tmp_path / "temp"
    for folder in (home, work, watch, temp):
        folder.mkdir()
    (watch / "sitecustomize.py").write_text(WATCH)
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(watch), "AUDIT_LOG": str(tmp_path / "log")}
    env |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(temp)}
    flags = ["--num_iterations", "2", "--eval_every", "2", "--batch_size", "16"]
    if name not in POLICY_SCRIPTS:
        data, *more = {"sft": ["demonstrations", "--eval_size", "16"], "reward_model": ["preferences_train"]}[name]
        few = (ROOT / "toy" / f"{data}.jsonl").open().readlines()[:64]
        (tmp_path / "few.jsonl").write_text("".join(few))
        flags = ["--num_epochs", "1", "--batch_size", "16", "--dataset", tmp_path / "few.jsonl", *more]
    in_repo = sorted(path for path in ROOT.glob("*") if path.name != ".pytest_cache")
    launch(ROOT / f"{name}.py", *flags, *["--track"] * track, cwd=work, env=env)
    assert sorted(path for path in ROOT.glob("*") if path.name != ".pytest_cache") == in_repo
    assert [path.name for path in work.iterdir()] == ["runs"]
    assert not [path for path in temp.rglob("*") if path.is_file()]  # used and left clean
    allowed = (str(work / "runs"), str(home / ".cache"), str(temp), "/dev/")
    lines = (tmp_path / "log").read_text().splitlines()
    assert any(str(work / "runs") in line for line in lines)  # the watch did watch
    strays = [line for line in lines if not line.split(" ", 1)[1].startswith(allowed)]
    assert not strays, strays
    cache = {path.relative_to(home).parts[:2] for path in home.rglob("*") if path.is_file()}
    assert cache <= {(".cache", "huggingface")}, cache


def test_runs_copied_out_of_the_repository(tmp_path):
    """One file, a model and a dataset named by flags: nothing else is needed."""
    for name in SCRIPTS:
        copy = tmp_path / f"{name}.py"
        copy.write_bytes((ROOT / f"{name}.py").read_bytes())
        flags = ["--model", ROOT / "toy" / "policy", "--runs_dir", tmp_path / name, "--batch_size", "8"]
        if name not in POLICY_SCRIPTS:
            data, *more = {
                "sft": ["demonstrations", "--eval_size", "0"],
                "reward_model": ["preferences_train", "--eval_dataset", "None"],
            }[name]
            few = (ROOT / "toy" / f"{data}.jsonl").open().readlines()[:16]
            (tmp_path / "few.jsonl").write_text("".join(few))
            flags += ["--dataset", tmp_path / "few.jsonl", "--num_epochs", "1", *more]
        else:
            flags += ["--dataset", ROOT / "toy" / "train.jsonl", "--eval_dataset", "None", "--num_iterations", "1"]
        launch(copy, *flags, cwd=tmp_path)
        assert json.loads((the_run(tmp_path / name) / "args.json").read_text())["batch_size"] == 8
