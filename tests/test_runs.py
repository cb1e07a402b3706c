"""What a run promises: the same command goes on after anything, and the folder holds the result."""

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
from conftest import POLICY_SCRIPTS, ROOT, SKELETONS, launch, read_jsonl, write_jsonl
from zoo import run

FLAGS = {"num_iterations": 5, "save_every": 2, "eval_every": 2, "log_every": 1, "max_response_length": 12}
FLAGS |= {"batch_size": 16}
ENV = os.environ | {"OMP_NUM_THREADS": "1"}


def words(**flags) -> list[str]:
    return [str(word) for name, value in ({"device": "cpu"} | flags).items() for word in (f"--{name}", value)]


def small_eval(tmp_path) -> dict:
    rows = read_jsonl(ROOT / "toy" / "heldout.jsonl")[::30]
    return {"eval_dataset": write_jsonl(tmp_path / "heldout.jsonl", rows)}


def times(folder) -> dict:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize(
    "script, ranks, moment",
    [
        ("grpo", 1, "torn checkpoint:2"),
        ("ppo", 1, "torn line:3"),
        ("grpo", 2, "before rename:2"),
        ("ppo", 2, "half a model:1"),
    ],
)
def test_a_killed_run_goes_on_to_the_last_bit(script, ranks, moment, tmp_path):
    """And nothing is printed to stderr by a run left alone: no warning of torch, transformers or torchrun."""
    flags = words(**FLAGS | small_eval(tmp_path))
    whole = launch(ROOT / f"{script}.py", *flags, "--run_dir", tmp_path / "whole", ranks=ranks, env=ENV)
    assert whole.stderr == ""
    killed = soak.start(script, ranks, tmp_path / "killed", *flags, kill=moment)
    assert soak.end(killed, tmp_path / "killed") == (-signal.SIGKILL if ranks == 1 else 1)
    assert not (tmp_path / "killed" / "model").exists()
    again = launch(ROOT / f"{script}.py", *flags, "--run_dir", tmp_path / "killed", ranks=ranks, env=ENV)
    assert again.stderr == "" and soak.differences(tmp_path / "whole", tmp_path / "killed") == []
    steps = [line["iteration"] for line in read_jsonl(tmp_path / "killed" / "metrics.jsonl") if "score" in line]
    assert steps == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("script", POLICY_SCRIPTS)
@pytest.mark.parametrize("schedule", ["cosine", "constant_with_warmup"])
def test_a_run_goes_on_after_its_checkpoint(script, schedule, tmp_path, monkeypatch):
    """It stops in iteration 4, with a checkpoint of 2; what it logged since then is not there twice."""
    flags = FLAGS | small_eval(tmp_path) | {"lr_schedule": schedule, "warmup_iterations": 3}
    run(script, run_dir=tmp_path / "whole", **flags)
    module = importlib.import_module(script)
    compute_advantages, calls = module.compute_advantages, []

    def stops(*args):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return compute_advantages(*args)

    monkeypatch.setattr(module, "compute_advantages", stops)
    with pytest.raises(KeyboardInterrupt):
        run(script, run_dir=tmp_path / "parts", **flags)
    monkeypatch.undo()
    assert len([x for x in read_jsonl(tmp_path / "parts" / "metrics.jsonl") if "score" in x]) == 3
    run(script, run_dir=tmp_path / "parts", **flags)
    assert soak.differences(tmp_path / "whole", tmp_path / "parts") == []


@pytest.mark.parametrize("script", SKELETONS)
@pytest.mark.parametrize("stop", [2, 3])  # after 3 the short run evaluates, and the long one does not
def test_more_iterations_are_the_longer_run(script, stop, tmp_path):
    flags = FLAGS | small_eval(tmp_path) | {"warmup_iterations": 4}
    run(script, run_dir=tmp_path / "whole", **flags)
    run(script, run_dir=tmp_path / "parts", **flags | {"num_iterations": stop})
    assert (tmp_path / "parts" / "model").exists()
    run(script, run_dir=tmp_path / "parts", **flags)
    assert soak.differences(tmp_path / "whole", tmp_path / "parts") == []


def test_a_longer_run_that_ends_early_is_not_finished(tmp_path, monkeypatch):
    """The model of the shorter run is there, the last checkpoint of the longer one too; its model is not."""
    flags = FLAGS | small_eval(tmp_path)
    run("grpo", run_dir=tmp_path / "whole", **flags)
    run("grpo", run_dir=tmp_path / "parts", **flags | {"num_iterations": 2})
    module = importlib.import_module("grpo")
    evaluate = module.evaluate

    def stops(*args):
        if json.loads((tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()[-1])["iteration"] == 5:
            raise KeyboardInterrupt
        return evaluate(*args)

    monkeypatch.setattr(module, "evaluate", stops)
    with pytest.raises(KeyboardInterrupt):
        run("grpo", run_dir=tmp_path / "parts", **flags)
    monkeypatch.undo()
    run("grpo", run_dir=tmp_path / "parts", **flags)
    assert soak.differences(tmp_path / "whole", tmp_path / "parts") == []


@pytest.mark.parametrize("script", SKELETONS)
def test_a_finished_run_says_so_and_changes_nothing(script, tmp_path, capsys):
    run(script, run_dir=tmp_path / "run")
    before = times(tmp_path / "run")
    capsys.readouterr()
    run(script, run_dir=tmp_path / "run", log_every=7)
    said = capsys.readouterr()
    assert said.out.count("is finished after 2 iterations") == 1 == said.out.count("\n") and said.err == ""
    assert times(tmp_path / "run") == before


@pytest.mark.parametrize("script", SKELETONS)
def test_what_a_run_folder_holds(script, tmp_path):
    run(script, run_dir=tmp_path, **FLAGS)
    names = {"args.json", "checkpoint.pt", "metrics.jsonl", "model", "samples.jsonl", f"{script}.py"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert (tmp_path / f"{script}.py").read_bytes() == (ROOT / f"{script}.py").read_bytes()
    assert json.loads((tmp_path / "args.json").read_text())["batch_size"] == 16
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    trained = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["policy"]
    start = transformers.AutoModelForCausalLM.from_pretrained(ROOT / "toy" / "policy").state_dict()
    assert all(torch.equal(x, trained[name]) for name, x in model.items())
    assert not any(torch.equal(x, start[name]) for name, x in model.items())  # every parameter moved
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "model").eos_token == "<eos>"
    lines, samples = read_jsonl(tmp_path / "metrics.jsonl"), read_jsonl(tmp_path / "samples.jsonl")
    evaluated = [line for line in lines if "score" not in line]
    assert [line["iteration"] for line in evaluated] == [0, 2, 4, 5]
    assert all(set(line) == {"iteration", *(f"eval/score/{n}" for n in ("2-5", "6", "8"))} for line in evaluated)
    assert all(math.isfinite(x) for line in lines for x in line.values())
    assert all(set(line) == {"iteration", "prompt", "response", "score"} for line in samples)
    assert {line["iteration"] for line in samples} == set(range(6))


@pytest.mark.parametrize("script", POLICY_SCRIPTS)
def test_no_reference_is_loaded_at_kl_coef_0(script, tmp_path, monkeypatch):
    module, loads = importlib.import_module(script), {}
    load, has_kl = module.load, "kl_coef" in vars(module.Args())
    for kl_coef in (0.01, 0.0) if has_kl else (0.0,):
        made = loads[kl_coef] = []
        monkeypatch.setattr(module, "load", lambda *x, made=made: made.append(x) or load(*x))
        run(script, **{"kl_coef": kl_coef} if has_kl else {}, run_dir=tmp_path / str(kl_coef))
        metrics = read_jsonl(tmp_path / str(kl_coef) / "metrics.jsonl")
        assert all(("kl" in line) == (kl_coef > 0) for line in metrics)
    assert len(loads[0.0]) == (len(loads[0.01]) - 1 if has_kl else 1) >= 1


@pytest.mark.parametrize("torn", [0, 1000, -100])
def test_a_torn_checkpoint_is_named(torn, tmp_path, capsys):
    run("grpo", run_dir=tmp_path)
    path = tmp_path / "checkpoint.pt"
    whole = path.read_bytes()
    path.write_bytes(whole[:torn])
    with pytest.raises(SystemExit) as exit:
        run("grpo", run_dir=tmp_path, num_iterations=3)
    said = capsys.readouterr().err
    assert exit.value.code == 2 and said.count("\n") == 1 and f"error: {path}: " in said
    assert path.read_bytes() == whole[:torn] and len(read_jsonl(tmp_path / "metrics.jsonl")) == 2
    path.write_bytes(whole)
    run("grpo", run_dir=tmp_path, num_iterations=3)
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 3


@pytest.mark.parametrize("limit, name", [(1_000_000, "checkpoint.pt"), (400_000, "model")])
def test_after_a_full_disk_the_same_command_goes_on(limit, name, tmp_path):
    """A limit on the size of files stands for it: the write fails in the middle, as it does there."""
    flags = FLAGS | small_eval(tmp_path)
    run("grpo", run_dir=tmp_path / "whole", **flags)
    if name == "model":
        shutil.copytree(tmp_path / "whole", tmp_path / "full")
        shutil.rmtree(tmp_path / "full" / "model")
    else:
        run("grpo", run_dir=tmp_path / "full", **flags | {"num_iterations": 2})
    before = (tmp_path / "full" / "checkpoint.pt").read_bytes()
    command = [sys.executable, ROOT / "grpo.py", *words(**flags), "--run_dir", tmp_path / "full"]
    full = subprocess.run(
        list(map(str, command)),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        env=ENV,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    said = full.stderr.strip().splitlines()[-1]
    assert full.returncode == 2 and f"error: {tmp_path / 'full' / name}:" in said and "make room" in said
    assert (tmp_path / "full" / "checkpoint.pt").read_bytes() == before
    run("grpo", run_dir=tmp_path / "full", **flags)
    assert soak.differences(tmp_path / "whole", tmp_path / "full") == []


STOPS = [(script, what) for script in SKELETONS for what in ("loss", "gradient", "score")] + [("ppo", "value")]


@pytest.mark.parametrize("script, what", STOPS)
def test_a_number_that_is_not_finite_stops_before_the_weights(script, what, tmp_path, monkeypatch, capsys):
    module, calls, stepped = importlib.import_module(script), [], []
    name = {"value": "value_loss", "score": "exact_answer"}.get(what, "policy_loss")
    function, step = getattr(module, name), torch.optim.AdamW.step

    def third_call_fails(*args, **columns):
        calls.append(1)
        result = function(*args, **columns)
        if len(calls) < 3:
            return result
        if what == "score":
            return [math.nan] * len(result)
        if what == "gradient":
            args[2].register_hook(lambda gradient: gradient * math.inf)
            return result
        return result[0] * math.nan, {key: x * math.nan for key, x in result[1].items()}

    monkeypatch.setattr(module, name, third_call_fails)
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *a, **k: stepped.append(1) or step(*a, **k))
    with pytest.raises(SystemExit) as exit:
        run(script, run_dir=tmp_path, num_iterations=4, save_every=0)
    said = capsys.readouterr().err
    assert exit.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1 and "finite" in said
    assert not (tmp_path / "checkpoint.pt").exists() and not (tmp_path / "model").exists()
    per_iteration = 1 if not hasattr(module.Args, "num_minibatches") else module.Args.num_minibatches
    if what in ("loss", "gradient"):  # one micro-batch each, so two steps are behind it
        assert len(stepped) == 2 * (1 + (script == "ppo"))
    elif what == "value":  # the policy's third step is made, in a process that ends with it
        assert len(stepped) == 5
    else:
        assert 0 < len(stepped) <= 4 * per_iteration


@pytest.mark.parametrize("script", ["grpo"])  # the rest: test_bad_input.py
def test_a_copied_script_needs_model_dataset_and_reward_and_evaluates_nothing(script, tmp_path):
    shutil.copy(ROOT / f"{script}.py", tmp_path)
    bare = launch(f"{script}.py", check=False, cwd=tmp_path, env=ENV)
    assert bare.returncode == 2 and bare.stderr.startswith("error: no toy/policy beside this script; give")
    assert bare.stderr.count("\n") == 1 and [path.name for path in tmp_path.iterdir()] == [f"{script}.py"]
    (tmp_path / "data.jsonl").write_text('{"prompt": "3 + 5 ?"}\n' * 16)
    (tmp_path / "mine.py").write_text("def f(completions, **_): return [len(x) for x in completions]\n")
    flags = ["--model", ROOT / "toy" / "policy", "--dataset", "data.jsonl", "--reward", "mine.py:f"]
    flags += words(num_iterations=1, batch_size=16, max_response_length=8)
    ran = launch(f"{script}.py", *flags, cwd=tmp_path, env=ENV)
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith(f"{script}__1__") and ran.stderr == "" and "eval" not in ran.stdout
    assert [line["iteration"] for line in read_jsonl(folder / "metrics.jsonl")] == [1]


@pytest.mark.parametrize("script", POLICY_SCRIPTS)
def test_nothing_is_evaluated_that_the_user_did_not_name(script, tmp_path):
    """The toy's held-out prompts go with the toy, and with no other dataset, its own copy included."""
    shutil.copy(ROOT / "toy" / "train.jsonl", tmp_path)
    run(script, dataset=tmp_path / "train.jsonl", run_dir=tmp_path / "run", eval_every=1, num_iterations=1)
    assert [line["iteration"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1]


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


def test_tracking_logs_the_same_metrics(tmp_path, monkeypatch):
    import wandb

    logged, options = [], {}
    stub = SimpleNamespace(log=lambda metrics, step: logged.append({"iteration": step} | metrics))
    monkeypatch.setattr(wandb, "init", lambda **x: options.update(x) or stub)
    run("grpo", track=True, run_dir=tmp_path / "mine", **small_eval(tmp_path) | {"eval_every": 1})
    assert logged == read_jsonl(tmp_path / "mine" / "metrics.jsonl") and len(logged) == 5
    assert options["id"] == "mine" and options["resume"] == "allow" and options["config"]["batch_size"] == 16


def test_a_run_with_wandb_offline(tmp_path):
    env = ENV | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    flags = words(num_iterations=1, batch_size=16, max_response_length=8, eval_every=0)
    launch(ROOT / "grpo.py", "--track", "--run_dir", tmp_path / "run", *flags, cwd=tmp_path, env=env)
    assert (tmp_path / "run" / "model").exists() and (tmp_path / "wandb").exists()


def test_learning_rates_follow_the_schedule(tmp_path):
    flags = {"warmup_iterations": 3, "num_iterations": 5, "run_dir": tmp_path, "learning_rate": 3e-4}
    run("ppo", **flags)
    rates = [line["learning_rate"] for line in read_jsonl(tmp_path / "metrics.jsonl")]
    assert rates == pytest.approx([0, 1e-4, 2e-4, 3e-4, 3e-4])
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert checkpoint["scheduler"]["last_epoch"] == checkpoint["critic_scheduler"]["last_epoch"] == 5


def test_another_seed_is_another_run(tmp_path):
    for seed in (1, 2):
        run("grpo", seed=seed, run_dir=tmp_path / str(seed), dataset=same_prompts(tmp_path), log_every=1)
    first, second = (read_jsonl(tmp_path / seed / "samples.jsonl") for seed in "12")
    assert [x["response"] for x in first] != [x["response"] for x in second]


def same_prompts(folder):
    return write_jsonl(folder / "same.jsonl", [{"prompt": "3 + 5 - 2 + 4 ?", "answer": "0"}] * 16)
