"""The same command resumes a run after any interruption, and the folder of the run contains its result."""

import importlib
import json
import math
import os
import runpy
import shutil
import signal
import sys
import time
from itertools import combinations
from pathlib import Path
from statistics import fmean

import pytest
import sync
import torch
import transformers
import zoo
from conftest import ROOT, SKELETONS, launch, read_jsonl, words_of, write_jsonl
from driver import without_clock
from zoo import few, make_model, make_tokenizer, recorded, refused, run

import grpo
import ppo

FLAGS = {"num_iterations": 5, "save_every": 2, "eval_every": 2, "log_every": 1, "max_response_length": 12}


@pytest.fixture
def flags(tmp_path):
    """The flags of a run of five iterations, which saves a checkpoint and evaluates after iterations 2 and 4."""
    rows = read_jsonl(ROOT / "toy" / "heldout.jsonl")[::30]
    return FLAGS | {"eval_dataset": write_jsonl(tmp_path / "heldout.jsonl", rows)}


def files_of(folder) -> dict:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_that_is_killed_again_and_again_resumes_to_the_last_bit(flags, tmp_path):
    """The kills come while the folder is made, and while the model and a checkpoint are written."""
    flags["keep_models"] = True
    run("grpo", run_dir=tmp_path / "whole", **flags)
    killed = tmp_path / "killed"
    places = [(grpo.filelock.FileLock, "acquire"), (grpo, "replacing"), (os, "fsync"), (os, "replace")]
    places += [(Path, "write_bytes"), (transformers.PreTrainedTokenizerFast, "save_pretrained")]
    places += [(grpo, "save_checkpoint"), (torch, "save")]
    for module, name in places:
        call = 2 if name == "save" else 1  # the second checkpoint takes the place of the first
        assert zoo.run_and_kill(module, name, call, run, "grpo", run_dir=killed, **flags) == -signal.SIGKILL
    run("grpo", run_dir=killed, **flags)
    zoo.assert_same_run(tmp_path / "whole", killed)


@pytest.mark.parametrize("script", [*SKELETONS, "grpo_lora"])
def test_a_run_resumes_after_its_checkpoint(script, flags, tmp_path):
    """It stops in iteration 4, in the middle of a line of the metrics. No line since iteration 2 is logged twice."""
    flags |= {"anneal_lr": True, "warmup_iterations": 3}
    run(script, run_dir=tmp_path / "whole", **flags)
    with zoo.interrupted(importlib.import_module(script), "compute_advantages", call=4):
        run(script, run_dir=tmp_path / "parts", **flags)
    metrics = tmp_path / "parts" / "metrics.jsonl"
    assert len([line for line in read_jsonl(metrics) if "score" in line]) == 3
    with metrics.open("a") as file:
        file.write('{"iteration": 4, "sco')
    run(script, run_dir=tmp_path / "parts", **flags)
    zoo.assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_run_without_a_checkpoint_starts_again(flags, tmp_path):
    """No line is logged twice, and a file of the user in the folder of the run is left alone."""
    flags |= {"save_every": 0, "run_dir": tmp_path / "run"}
    with zoo.interrupted(grpo, "compute_advantages", call=3):
        run("grpo", **flags)
    mine = write_jsonl(tmp_path / "run" / "mine.jsonl", [{"iteration": 9}])
    (tmp_path / "run" / "grpo.py").write_text("# as it was\n")
    run("grpo", **flags)
    assert (tmp_path / "run" / "grpo.py").read_bytes() == (ROOT / "grpo.py").read_bytes()
    for name, numbers in (("metrics", [0, 1, 2, 3, 4, 5]), ("samples", sorted([1, 2, 3, 4, 5] * 3))):
        assert [line["iteration"] for line in read_jsonl(tmp_path / "run" / f"{name}.jsonl")] == numbers
    assert read_jsonl(mine) == [{"iteration": 9}]


def test_a_run_given_more_iterations_becomes_the_longer_run(flags, tmp_path):
    """It stops between its last model and its last checkpoint, and then repeats the iteration of both."""
    flags["warmup_iterations"] = 4
    run("grpo", run_dir=tmp_path / "whole", **flags)
    run("grpo", run_dir=tmp_path / "parts", **flags | {"num_iterations": 4})
    assert (tmp_path / "parts" / "model").exists()
    with zoo.interrupted(grpo, "save_checkpoint", call=1):
        run("grpo", run_dir=tmp_path / "parts", **flags)
    assert torch.load(tmp_path / "parts" / "checkpoint.pt", weights_only=True)["iteration"] == 4
    run("grpo", run_dir=tmp_path / "parts", **flags)
    zoo.assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("script", ["grpo", "ppo"])
def test_a_finished_run_has_its_result_and_keeps_it(script, tmp_path):
    """model/ is the latest model. With --keep_models, each saved model is kept."""
    run(script, run_dir=tmp_path, keep_models=True, **FLAGS)
    names = {"args.json", "checkpoint.pt", "lock", "metrics.jsonl", "samples.jsonl", f"{script}.py"}
    names |= {"model", "model-2", "model-4", "model-5"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert (tmp_path / f"{script}.py").read_bytes() == sync.paths()[script].read_bytes()

    auto = transformers.AutoModelForCausalLM
    start, earlier, kept, result = (
        auto.from_pretrained(folder).state_dict()
        for folder in (ROOT / "toy" / "policy", *(tmp_path / x for x in ("model-4", "model-5", "model")))
    )
    trained = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["policy"]
    for name, x in result.items():
        assert torch.equal(x, trained[name]) and torch.equal(x, kept[name])
        assert not torch.equal(x, earlier[name]) and not torch.equal(x, start[name])
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "model-2").eos_token == "<eos>"

    lines = read_jsonl(tmp_path / "metrics.jsonl")
    assert [line["iteration"] for line in lines if "eval/score/2-5" in line] == [0, 2, 4, 5]

    before = files_of(tmp_path)
    run(script, run_dir=tmp_path, keep_models=True, **FLAGS)
    assert before == files_of(tmp_path)


def test_n_sampled_responses_to_each_held_out_prompt(monkeypatch):
    """Evaluation reports their mean and pass@k. Two ranks share the rows, and report the numbers of one rank."""
    prompts, tokenizer = [f"{i} + 5 ?" for i in range(7)], make_tokenizer()
    rows = [{"prompt": x, "prompt_ids": tokenizer(x)["input_ids"], "group": x < "4"} for x in prompts]
    reward = lambda completions, **_: [float("8" in x or "6" in x) for x in completions]  # noqa: E731
    found = []
    for ranks in (1, 2):
        scored, parts = recorded(monkeypatch, grpo, "score"), []
        args = grpo.Args(eval_samples=3, batch_size=8 * ranks, max_response_length=4)
        monkeypatch.setattr(grpo, "WORLD_SIZE", ranks)
        monkeypatch.setattr(grpo, "all_sum", lambda x, parts=parts: parts.append(x) or sum(parts))
        for rank in range(ranks):
            monkeypatch.setattr(grpo, "RANK", rank)
            metrics = grpo.evaluate(args, make_model("llama"), tokenizer, reward, rows)
        found.append(metrics)
    assert found[0] == found[1]

    scores = {}  # of the two ranks
    for (_, _, its_rows, _), its_scores in scored:
        assert len(its_rows) <= 8
        for row, x in zip(its_rows, its_scores.tolist()):
            scores.setdefault((row["group"], row["prompt"]), []).append(x)
    assert {len(x) for x in scores.values()} == {3} and any(0 < sum(x) < 3 for x in scores.values())
    for group in (True, False):
        of_group = [x for key, x in scores.items() if key[0] == group]
        assert metrics.pop(f"eval/score/{group}") == pytest.approx(fmean(map(fmean, of_group)))
        for k in (2, 3):
            best = fmean(fmean(map(max, combinations(x, k))) for x in of_group)
            assert metrics.pop(f"eval/pass@{k}/{group}") == pytest.approx(best)
    assert not metrics


def test_the_best_of_more_scores_than_fit_into_a_float():
    """There are 1e615 sets of 1024 of them. One right score is in half of the sets."""
    assert grpo.best_of(1024, [1.0] + [0.0] * 2047) == pytest.approx(0.5)


def test_an_evaluation_of_few_rows_uses_all_ranks(monkeypatch):
    rows, lengths = [{"prompt": "9 ?", "prompt_ids": [15, 20]}] * 5, []
    monkeypatch.setattr(grpo, "WORLD_SIZE", 3)
    monkeypatch.setattr(grpo, "score", lambda *args: torch.zeros(lengths.append(len(args[2])) or lengths[-1]))
    for rank in range(3):
        monkeypatch.setattr(grpo, "RANK", rank)
        args = grpo.Args(device="cpu", batch_size=96, max_response_length=2)
        grpo.evaluate(args, make_model("llama"), make_tokenizer(), None, rows)
    assert lengths == [2, 2, 1]


def test_sampled_evaluations_leave_training_alone(flags, tmp_path):
    training = []
    for n, every in ((0, 0), (2, 1)):
        run("grpo", run_dir=tmp_path / f"{n}", **flags | {"eval_samples": n, "eval_every": every})
        lines = without_clock(tmp_path / f"{n}" / "metrics.jsonl")
        lines = [{key: x for key, x in line.items() if "eval" not in key} for line in lines]
        training.append([line for line in lines if line["iteration"]])
    assert training[0] == training[1]


MOVES = {"num_iterations": 3, "learning_rate": 4e-3, "reward": f"{ROOT}/tests/driver.py:reward"}


def test_a_kl_that_is_only_logged_needs_the_reference_and_leaves_training_alone(tmp_path, monkeypatch):
    """If the KL is neither in the loss nor logged, no reference is loaded."""
    weights = []
    for script, flags, has_kl in (
        ("grpo", {"kl_coef": 0.01}, True),
        ("grpo", {"kl_coef": 0.0, "log_kl": True}, True),
        ("grpo", {"kl_coef": 0.0}, False),
        ("dr_grpo", {"log_kl": True}, True),
        ("dr_grpo", {}, False),
    ):
        folder = tmp_path / f"{len(weights)}"
        copies = recorded(monkeypatch, importlib.import_module(script).copy, "deepcopy")
        run(script, run_dir=folder, **MOVES, **flags)
        assert sum(isinstance(args[0], torch.nn.Module) for args, _ in copies) == has_kl
        lines = [line for line in read_jsonl(folder / "metrics.jsonl") if "score" in line]
        assert all(("kl" in line) == has_kl for line in lines)
        assert not has_kl or abs(lines[2]["kl"]) > 1e-4
        weights.append((folder / "model" / "model.safetensors").read_bytes())
    assert weights[0] != weights[1] == weights[2] and weights[3] == weights[4]


def test_a_loss_that_is_not_finite_stops_before_the_weights(tmp_path, monkeypatch, capsys):
    steps, function = recorded(monkeypatch, torch.optim.AdamW, "step"), grpo.policy_loss

    def third_is_nan(*args):
        loss, stats = function(*args)
        return loss * (math.nan if len(steps) == 2 else 1.0), stats

    monkeypatch.setattr(grpo, "policy_loss", third_is_nan)
    assert "finite" in refused(capsys, run, "grpo", run_dir=tmp_path, num_iterations=4, save_every=0)
    assert len(steps) == 2
    assert not (tmp_path / "checkpoint.pt").exists() and not (tmp_path / "model").exists()


def test_tracking_logs_the_same_metrics(flags, tmp_path, monkeypatch):
    import wandb

    logged, options = [], {}
    monkeypatch.setattr(wandb, "init", lambda **x: options.update(x))
    monkeypatch.setattr(wandb, "log", lambda metrics, step: logged.append({"iteration": step} | metrics))
    run("grpo", track=True, run_dir=tmp_path / "mine", **flags)
    assert logged == read_jsonl(tmp_path / "mine" / "metrics.jsonl") and len(logged) == 6
    # With an id, a folder of the same name would continue the Weights & Biases run of somebody else.
    assert options.keys() == {"name", "config"} and options["name"] == "mine"
    assert options["config"]["batch_size"] == 16


def test_learning_rates_rise_from_the_first_step_and_fall(tmp_path, monkeypatch):
    """This holds for the policy and the critic. test_metrics.py tests runs without --anneal_lr."""
    steps = recorded(monkeypatch, ppo, "optimizer_step")
    flags = {"warmup_iterations": 3, "num_iterations": 5, "learning_rate": 3e-4, "critic_learning_rate": 3e-2}
    run("ppo", **flags, anneal_lr=True, num_minibatches=1, run_dir=tmp_path)
    for number, factor in ((0, 1e-4), (1, 1e-2)):
        rates = [args[3] for args, _ in steps[number::2]]
        assert rates == pytest.approx([factor * x for x in (1, 2, 1.8, 1.2, 0.6)])


def test_a_folder_that_is_no_run_is_left_alone(tmp_path, capsys):
    """As with --run_dir . in a folder that contains a model, or in the folder of the dataset."""
    shutil.copytree(ROOT / "toy" / "policy", tmp_path / "model")
    data = write_jsonl(tmp_path / "samples.jsonl", read_jsonl(ROOT / "toy" / "train.jsonl")[:50])
    flags = {"run_dir": tmp_path, "model": tmp_path / "model", "dataset": data}
    for foreign, words in (
        (None, "the folder is not empty and is not a run"),
        ('{"foo": 1}', "is not a run of grpo.py"),
    ):
        if foreign:
            (tmp_path / "args.json").write_text(foreign)
        before = files_of(tmp_path)
        said = refused(capsys, run, "grpo", **flags)
        assert f"--run_dir {tmp_path}" in said and f"{words}. Use a new folder." in said
        assert before == files_of(tmp_path)


def test_a_model_that_is_replaced_is_never_deleted_where_it_stands(tmp_path, monkeypatch):
    """Deleting takes time, in which a kill would leave half a model."""
    deleted = recorded(monkeypatch, grpo.shutil, "rmtree")
    run("grpo", **SHORT, run_dir=tmp_path)
    assert {args[0] for args, _ in deleted} == {f"{tmp_path}/model.old"}
    shutil.copytree(tmp_path / "model", tmp_path / "model.old")  # by a kill
    run("grpo", **SHORT | {"num_iterations": 3}, run_dir=tmp_path)
    assert {path.name for path in tmp_path.glob("model*")} == {"model"}


def test_a_resumed_run_is_the_same_if_the_reward_draws_random_numbers(flags, tmp_path):
    """A judge that is made in the first call draws its weights once in each process."""
    (tmp_path / "mine.py").write_text(
        "import torch\njudge = None\n"
        "def score(completions, **_):\n"
        "    global judge\n"
        "    judge = judge or torch.nn.Linear(4, 1)\n"
        "    return [len(text) % 3 for text in completions]\n"
    )
    flags |= {"reward": f"{tmp_path}/mine.py:score", "eval_every": 0}
    run("grpo", run_dir=tmp_path / "whole", **flags)
    run("grpo", run_dir=tmp_path / "parts", **flags | {"num_iterations": 4})
    sys.modules.pop("mine")
    run("grpo", run_dir=tmp_path / "parts", **flags)
    zoo.assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_reward_may_change_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "moves.py").write_text(
        "import os\n\ndef f(completions, **_): return [os.chdir('/') or 1.0 for _ in completions]\n"
    )
    monkeypatch.chdir(tmp_path)
    flags = {"model": ROOT / "toy" / "policy", "dataset": ROOT / "toy" / "train.jsonl", "run_dir": "run"}
    run("grpo", reward="moves.py:f", **flags)
    assert (tmp_path / "run" / "model").exists()


def test_a_broken_file_of_a_run_stays_as_it_is(tmp_path):
    """A run does not overwrite a broken checkpoint or broken flags."""
    run("grpo", run_dir=tmp_path)
    for name, content in (("checkpoint.pt", b"PK"), ("args.json", b'{"seed"')):
        path = tmp_path / name
        before = path.read_bytes()
        path.write_bytes(content)
        with pytest.raises((RuntimeError, ValueError)):
            run("grpo", run_dir=tmp_path, num_iterations=3)
        assert path.read_bytes() == content
        path.write_bytes(before)


def test_a_copy_of_grpo_runs_alone_and_evaluates_nothing_that_was_not_named(tmp_path, monkeypatch, capfd):
    shutil.copy(ROOT / "grpo.py", tmp_path)
    shutil.copytree(ROOT / "toy" / "policy", tmp_path / "model")
    (tmp_path / "data.jsonl").write_text('{"prompt": "3 + 5 ?"}\n' * 16)
    (tmp_path / "mine.py").write_text("def f(completions, **_): return [len(x) for x in completions]\n")
    flags = {"model": "model", "dataset": "data.jsonl", "reward": "mine.py:f", "num_iterations": 1}
    flags |= {"batch_size": 16, "max_response_length": 8, "device": "cpu"}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["grpo.py", *words_of(**flags)])
    runpy.run_path("grpo.py", run_name="__main__")
    said, errors = capfd.readouterr()
    assert errors == "" and "eval" not in said and "held out" not in said
    [metrics] = tmp_path.glob("runs/grpo__1__*/metrics.jsonl")
    assert [path.name for path in metrics.parent.glob("model*")] == ["model"]
    assert [line["iteration"] for line in read_jsonl(metrics)] == [1]


SHORT = {"num_iterations": 2, "batch_size": 16, "max_response_length": 2, "save_every": 1}


def test_a_refused_reward_can_be_corrected_until_the_first_iteration_is_done(tmp_path, capsys):
    wrong, right = (f"{tmp_path}/mine.py:{name}" for name in ("none", "works"))
    (tmp_path / "mine.py").write_text(
        "def none(completions, **_): return [None] * len(completions)\n"
        "def works(completions, **_): return [len(x) for x in completions]\n"
    )
    flags = SHORT | {"run_dir": tmp_path / "run", "num_iterations": 1}
    for _ in range(2):
        assert "returned [None" in refused(capsys, run, "grpo", **flags, reward=wrong)
    run("grpo", **flags, reward=right)
    before = files_of(tmp_path / "run")
    said = refused(capsys, run, "grpo", **flags, reward=wrong)
    assert f"contains a run with reward {right} (now {wrong}). " in said
    assert before == files_of(tmp_path / "run")


def test_a_resumed_run_names_what_has_changed(tmp_path, capsys):
    """It names the script, and each flag with both values. The copy of the old script stays, to compare with."""
    flags = SHORT | {"run_dir": tmp_path, "anneal_lr": True}
    run("grpo", **flags)
    capsys.readouterr()
    run("grpo", **flags)
    said = capsys.readouterr().out
    assert "(now" not in said and "warning" not in said
    with (tmp_path / "grpo.py").open("a") as file:
        file.write("# as it was\n")
    run("grpo", **flags | {"num_iterations": 3}, micro_batch_size=4)
    said = capsys.readouterr().out
    assert f"{ROOT / 'grpo.py'} has changed" in said and str(tmp_path / "grpo.py") in said
    assert (
        "num_iterations 2 (now 3); the learning rate jumps" in said
        and "micro_batch_size 64 (now 4)\n" in said
    )
    assert json.loads((tmp_path / "args.json").read_text())["num_iterations"] == 3
    assert (tmp_path / "grpo.py").read_text().endswith("# as it was\n")


def test_a_resumed_run_names_edited_rows(tmp_path, capsys):
    rows = read_jsonl(few("grpo", 16, tmp_path))
    for number, answer in ((2, rows[5]["answer"]), (3, "changed")):
        rows[5]["answer"] = answer
        data = write_jsonl(tmp_path / "rows.jsonl", rows)
        run("grpo", **SHORT | {"num_iterations": number}, dataset=data, run_dir=tmp_path / "run")
    assert "changed     dataset_checksum" in capsys.readouterr().out


def test_a_checkpoint_counts_as_a_run_without_its_log_and_with_flags_of_another_script(tmp_path, capsys):
    run("grpo", **SHORT, run_dir=tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    assert "learning_rate" in refused(capsys, run, "grpo", **SHORT, learning_rate=1.0, run_dir=tmp_path)
    assert "is not a run of rloo.py" in refused(capsys, run, "rloo", **SHORT, run_dir=tmp_path)
    args = json.loads((tmp_path / "args.json").read_text())
    (tmp_path / "args.json").write_text(json.dumps(args | {"dual_clip_c": 3.0}))
    assert "dual_clip_c 3.0 (now None)" in refused(capsys, run, "grpo", **SHORT, run_dir=tmp_path)


def test_other_flags_do_not_delete_the_log_of_a_run_without_a_checkpoint(tmp_path, capsys):
    flags = SHORT | {"save_every": 0, "run_dir": tmp_path}
    with zoo.interrupted(grpo, "compute_advantages", call=2):
        run("grpo", **flags)
    before = files_of(tmp_path)
    assert "learning_rate" in refused(capsys, run, "grpo", **flags, learning_rate=1.0)
    assert before == files_of(tmp_path)


def test_a_second_process_is_refused(tmp_path, capsys):
    """It writes nothing while another process trains in the folder."""
    run("grpo", **SHORT, run_dir=tmp_path)
    lock = tmp_path / "lock"
    second = f"import filelock; filelock.FileLock({str(lock)!r}).acquire(blocking=False)"
    assert "Timeout" in launch("-c", second, check=False).stderr
    before = files_of(tmp_path)
    grpo.open_run.lock.release()
    with grpo.filelock.FileLock(lock):
        said = refused(capsys, run, "grpo", **SHORT | {"num_iterations": 3}, run_dir=tmp_path)
    assert f"--run_dir {tmp_path}: another process is training in it" in said
    assert before == files_of(tmp_path)


def test_two_runs_of_a_minute_have_two_folders(tmp_path, monkeypatch):
    clock, strftime = iter(range(100)), time.strftime
    monkeypatch.setattr(grpo.time, "strftime", lambda form: strftime(form, time.gmtime(next(clock))))
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        run("grpo", model=ROOT / "toy" / "policy", dataset=ROOT / "toy" / "train.jsonl", num_iterations=1)
    assert len([*tmp_path.glob("runs/grpo__1__*")]) == 2
