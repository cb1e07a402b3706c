"""A run resumes after anything with the same command, and its folder holds the result."""

import importlib
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import soak
import torch
import transformers
import tyro
from conftest import ROOT, SKELETONS, launch, read_jsonl, words_of, write_jsonl
from zoo import run

FLAGS = {"num_iterations": 5, "save_every": 2, "eval_every": 2, "log_every": 1}
FLAGS |= {"batch_size": 16, "max_response_length": 12}
ENV = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def flags(tmp_path):
    """Of a run of five iterations with a checkpoint and an evaluation after 2 and 4."""
    rows = read_jsonl(ROOT / "toy" / "heldout.jsonl")[::30]
    return FLAGS | {"eval_dataset": write_jsonl(tmp_path / "heldout.jsonl", rows)}


def interrupt(monkeypatch, script: str, name: str, call: int, run_dir, **flags) -> None:
    """Run a script until it calls a function for the n-th time."""
    module, calls = importlib.import_module(script), []
    function = getattr(module, name)

    def stop(*args):
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return function(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, name, stop)
        run(script, run_dir=run_dir, **flags)


@pytest.mark.parametrize(
    "script, ranks, moment",
    [
        ("grpo", 1, "torn checkpoint:2"),
        ("ppo", 2, "half a model:1"),
        pytest.param("ppo", 1, "torn line:3", marks=pytest.mark.long),
        pytest.param("grpo", 2, "before rename:2", marks=pytest.mark.long),
    ],
)
def test_a_killed_run_resumes_to_the_last_bit(script, ranks, moment, flags, tmp_path):
    """Also, an uninterrupted run prints nothing to stderr."""
    command = [ROOT / f"{script}.py", *words_of(device="cpu", **flags), "--run_dir"]
    whole = launch(*command, tmp_path / "whole", ranks=ranks, env=ENV)
    assert whole.stderr == ""
    killed = soak.start(script, ranks, tmp_path / "killed", *command[1:-1], kill=moment)
    assert soak.wait(killed, tmp_path / "killed") == (-signal.SIGKILL if ranks == 1 else 1)
    assert not (tmp_path / "killed" / "model").exists()
    again = launch(*command, tmp_path / "killed", ranks=ranks, env=ENV)
    assert again.stderr == ""
    assert soak.differences(tmp_path / "whole", tmp_path / "killed") == []
    lines = read_jsonl(tmp_path / "killed" / "metrics.jsonl")
    assert [line["iteration"] for line in lines if "score" in line] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("script", [*SKELETONS, "grpo_lora"])
def test_a_run_resumes_after_its_checkpoint(script, flags, tmp_path, monkeypatch):
    """It stops in iteration 4 and resumes after 2. Lines that it had logged since are not there twice."""
    flags |= {"lr_schedule": "cosine", "warmup_iterations": 3}
    run(script, run_dir=tmp_path / "whole", **flags)
    interrupt(monkeypatch, script, "compute_advantages", 4, tmp_path / "parts", **flags)
    lines = read_jsonl(tmp_path / "parts" / "metrics.jsonl")
    assert len([line for line in lines if "score" in line]) == 3
    run(script, run_dir=tmp_path / "parts", **flags)
    assert soak.differences(tmp_path / "whole", tmp_path / "parts") == []


@pytest.mark.parametrize("script", ["grpo", "ppo"])
def test_a_run_given_more_iterations_becomes_the_longer_run(script, flags, tmp_path):
    """The short run evaluates after its last iteration, 3; the long one does not."""
    flags |= {"warmup_iterations": 4}
    run(script, run_dir=tmp_path / "whole", **flags)
    run(script, run_dir=tmp_path / "parts", **flags | {"num_iterations": 3})
    assert (tmp_path / "parts" / "model").exists()
    run(script, run_dir=tmp_path / "parts", **flags)
    assert soak.differences(tmp_path / "whole", tmp_path / "parts") == []


def test_a_longer_run_that_ends_early_is_not_finished(flags, tmp_path, monkeypatch):
    """It stops after its last checkpoint, before its model. The shorter run's model does not count."""
    run("grpo", run_dir=tmp_path / "whole", **flags)
    run("grpo", run_dir=tmp_path / "parts", **flags | {"num_iterations": 2})
    interrupt(monkeypatch, "grpo", "evaluate", 3, tmp_path / "parts", **flags)  # after 2, 4 and 5
    assert torch.load(tmp_path / "parts" / "checkpoint.pt", weights_only=True)["iteration"] == 5
    run("grpo", run_dir=tmp_path / "parts", **flags)
    assert soak.differences(tmp_path / "whole", tmp_path / "parts") == []


@pytest.mark.parametrize("script", SKELETONS)
def test_a_finished_run_has_its_result_and_does_nothing_more(script, tmp_path, capsys):
    run(script, run_dir=tmp_path, **FLAGS)
    names = {"args.json", "checkpoint.pt", "metrics.jsonl", "model", "samples.jsonl", f"{script}.py"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert (tmp_path / f"{script}.py").read_bytes() == (ROOT / f"{script}.py").read_bytes()
    assert json.loads((tmp_path / "args.json").read_text())["batch_size"] == 16

    model, start = (
        transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (tmp_path / "model", ROOT / "toy" / "policy")
    )
    trained = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["policy"]
    assert all(torch.equal(x, trained[name]) for name, x in model.items())
    assert not any(torch.equal(x, start[name]) for name, x in model.items())  # every parameter moved
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "model").eos_token == "<eos>"

    lines, samples = read_jsonl(tmp_path / "metrics.jsonl"), read_jsonl(tmp_path / "samples.jsonl")
    evaluations = [line for line in lines if "score" not in line]
    assert [line["iteration"] for line in evaluations] == [0, 2, 4, 5]
    groups = {f"eval/score/{group}" for group in ("2-5", "6", "8")}
    assert all(set(line) == {"iteration", *groups} for line in evaluations)
    assert all(math.isfinite(x) for line in lines for x in line.values())
    assert all(set(line) == {"iteration", "prompt", "response", "score"} for line in samples)
    assert {line["iteration"] for line in samples} == set(range(6))

    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    capsys.readouterr()
    run(script, run_dir=tmp_path, **FLAGS | {"log_every": 7})
    said = capsys.readouterr()
    assert said.out.count("is finished after 5 iterations") == said.out.count("\n") == 1
    assert said.err == ""
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}


@pytest.mark.parametrize("script", ["grpo", "ppo", "dr_grpo"])
def test_no_reference_is_loaded_without_a_kl(script, tmp_path, monkeypatch):
    module = importlib.import_module(script)
    load, has_kl, loads = module.load, "kl_coef" in vars(module.Args()), []
    for kl_coef in (0.01, 0.0) if has_kl else (0.0,):
        loads.append([])
        monkeypatch.setattr(module, "load", lambda *x: loads[-1].append(x) or load(*x))
        flags = {"kl_coef": kl_coef} if has_kl else {}
        run(script, run_dir=tmp_path / str(kl_coef), **flags)
        metrics = read_jsonl(tmp_path / str(kl_coef) / "metrics.jsonl")
        assert all(("kl" in line) == (kl_coef > 0) for line in metrics)
    assert len(loads[-1]) == (len(loads[0]) - 1 if has_kl else 1)


@pytest.mark.parametrize("size", [0, 1000, -100])
def test_a_torn_checkpoint_is_refused_by_name(size, tmp_path, capsys):
    run("grpo", run_dir=tmp_path)
    path = tmp_path / "checkpoint.pt"
    whole = path.read_bytes()
    path.write_bytes(whole[:size])
    with pytest.raises(SystemExit, match="2"):
        run("grpo", run_dir=tmp_path, num_iterations=3)
    said = capsys.readouterr().err
    assert said.startswith(f"error: {path}: ") and said.count("\n") == 1
    assert path.read_bytes() == whole[:size]
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 2
    path.write_bytes(whole)
    run("grpo", run_dir=tmp_path, num_iterations=3)
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 3


@pytest.mark.parametrize("limit, name", [(1_000_000, "checkpoint.pt"), (400_000, "model")])
def test_after_a_full_disk_the_same_command_resumes(limit, name, flags, tmp_path):
    """A limit on the size of files stands for it: a write fails in the middle."""
    run("grpo", run_dir=tmp_path / "whole", **flags)
    full = tmp_path / "full"
    if name == "model":
        shutil.copytree(tmp_path / "whole", full)
        shutil.rmtree(full / "model")
    else:
        run("grpo", run_dir=full, **flags | {"num_iterations": 2})
    before = (full / "checkpoint.pt").read_bytes()
    result = subprocess.run(
        [sys.executable, ROOT / "grpo.py", *words_of(device="cpu", run_dir=full, **flags)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        env=ENV,
        capture_output=True,
        text=True,
        timeout=300,
    )
    said = result.stderr.strip().splitlines()[-1]
    assert result.returncode == 2 and f"error: {full / name}:" in said and "make room" in said
    assert (full / "checkpoint.pt").read_bytes() == before
    run("grpo", run_dir=full, **flags)
    assert soak.differences(tmp_path / "whole", full) == []


@pytest.mark.parametrize(
    "script, name, steps",  # the function whose third result is NaN, and how many steps come before
    [
        ("grpo", "policy_loss", 2),
        ("grpo", "gradient", 2),
        ("grpo", "exact_answer", 4),  # of the third iteration, after two with two steps each
        ("ppo", "policy_loss", 4),  # a step of the critic follows each of the policy
        ("ppo", "value_loss", 5),  # the policy's third step is made, but not saved
    ],
)
def test_a_number_that_is_not_finite_stops_before_the_weights(
    script, name, steps, tmp_path, monkeypatch, capsys
):
    module, calls, stepped = importlib.import_module(script), [], []
    step, target = torch.optim.AdamW.step, "policy_loss" if name == "gradient" else name
    function = getattr(module, target)

    def third_call_fails(*args, **columns):
        calls.append(1)
        result = function(*args, **columns)
        if len(calls) < 3:
            return result
        if name == "exact_answer":
            return [math.nan] * len(result)
        if name == "gradient":
            args[2].register_hook(lambda gradient: gradient * math.inf)
            return result
        return result[0] * math.nan, {key: x * math.nan for key, x in result[1].items()}

    monkeypatch.setattr(module, target, third_call_fails)
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *a, **k: stepped.append(1) or step(*a, **k))
    with pytest.raises(SystemExit, match="2"):
        run(script, run_dir=tmp_path, num_iterations=4, save_every=0)
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and "finite" in said
    assert len(stepped) == steps
    assert not (tmp_path / "checkpoint.pt").exists() and not (tmp_path / "model").exists()


def test_a_copy_of_grpo_needs_flags_and_evaluates_nothing_that_the_user_did_not_name(tmp_path):
    shutil.copy(ROOT / "grpo.py", tmp_path)
    bare = launch("grpo.py", check=False, cwd=tmp_path, env=ENV)
    assert bare.returncode == 2 and bare.stderr.count("\n") == 1
    assert bare.stderr.startswith("error: no toy/policy beside this script; give")
    assert [path.name for path in tmp_path.iterdir()] == ["grpo.py"]
    (tmp_path / "data.jsonl").write_text('{"prompt": "3 + 5 ?"}\n' * 16)
    (tmp_path / "mine.py").write_text("def f(completions, **_): return [len(x) for x in completions]\n")
    flags = {"model": ROOT / "toy" / "policy", "dataset": "data.jsonl", "reward": "mine.py:f"}
    flags |= {"num_iterations": 1, "batch_size": 16, "max_response_length": 8, "device": "cpu"}
    ran = launch("grpo.py", *words_of(**flags), cwd=tmp_path, env=ENV)
    assert ran.stderr == "" and "eval" not in ran.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("grpo__1__")
    assert [line["iteration"] for line in read_jsonl(folder / "metrics.jsonl")] == [1]


@pytest.mark.parametrize("path", sorted(ROOT.glob("*.py")), ids=lambda path: path.stem)
def test_help_explains_every_flag_and_names_no_folder_of_this_machine(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    module = importlib.import_module(path.stem)
    with pytest.raises(SystemExit):
        tyro.cli(module.Args, args=["--help"], description=module.__doc__, use_underscores=True)
    text = capsys.readouterr().out
    assert "toy/" in text and str(ROOT) not in text and module.__doc__.splitlines()[0] in text
    flat = " ".join(text.replace("│", " ").split()).partition(" options ")[2]
    for name in vars(module.Args()):
        parts = [part.split("(default")[0] for part in re.split(rf"--{name}[ ,]", flat)[1:]]
        assert any(len(part.split()) > 3 for part in parts), f"{name} is not explained"


def test_tracking_logs_the_same_metrics(flags, tmp_path, monkeypatch):
    import wandb

    logged, options = [], {}
    stub = SimpleNamespace(log=lambda metrics, step: logged.append({"iteration": step} | metrics))
    monkeypatch.setattr(wandb, "init", lambda **x: options.update(x) or stub)
    run("grpo", track=True, run_dir=tmp_path / "mine", **flags)
    assert logged == read_jsonl(tmp_path / "mine" / "metrics.jsonl") and len(logged) == 9
    assert options["id"] == "mine" and options["resume"] == "allow" and options["config"]["batch_size"] == 16


def test_learning_rates_follow_the_schedule(tmp_path):
    run("ppo", warmup_iterations=3, num_iterations=5, learning_rate=3e-4, run_dir=tmp_path)
    rates = [line["learning_rate"] for line in read_jsonl(tmp_path / "metrics.jsonl")]
    assert rates == pytest.approx([0, 1e-4, 2e-4, 3e-4, 3e-4])
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert checkpoint["scheduler"]["last_epoch"] == checkpoint["critic_scheduler"]["last_epoch"] == 5


def test_another_seed_is_another_run(tmp_path):
    data = write_jsonl(tmp_path / "same.jsonl", [{"prompt": "3 + 5 - 2 + 4 ?", "answer": "0"}] * 16)
    for seed in (1, 2):
        run("grpo", seed=seed, run_dir=tmp_path / str(seed), dataset=data, log_every=1)
    first, second = (read_jsonl(tmp_path / seed / "samples.jsonl") for seed in "12")
    assert [x["response"] for x in first] != [x["response"] for x in second]
