"""Seeds and draws, flags that may change on resume, files on the disk, and what else a user may rely on in a run."""

import dataclasses
import importlib
import json
import os
from itertools import product

import compare
import pytest
import torch
import transformers
import wandb
from conftest import ROOT, read_jsonl, write_jsonl
from test_safety import start
from zoo import STAGE_DATA, few, held_out, make_model, make_tokenizer, recorded, refused, run, run_stage, save

import grpo
import reward_model

POLICIES = ["grpo", "grpo_lora", "reinforce_pp_tools"]  # the last two change lines around the draws
NAMES = [*POLICIES, *STAGE_DATA]


@pytest.mark.parametrize("name", POLICIES)
def test_seeds_and_iterations_sample_anew_and_a_seed_repeats_itself(name, tmp_path):
    """All prompts are the same and the learning rate is 0, so only the draws can differ."""
    module = importlib.import_module(name)
    row = read_jsonl(ROOT / module.Args.dataset)[0]
    data = write_jsonl(tmp_path / "same.jsonl", [row] * 32)
    flags = {"dataset": data, "eval_dataset": data, "eval_samples": 1, "eval_every": 1, "learning_rate": 0.0}
    runs = []
    for seed, folder in ((1, "a"), (2, "b"), (1, "c")):
        with pytest.MonkeyPatch.context() as patch:
            calls = recorded(patch, module, "generate")
            run(name, seed=seed, run_dir=tmp_path / folder, num_iterations=3, **flags)
        draws = [str(rollout["sequences"].tolist()) for _, rollout in calls]
        training = [x for (args, _), x in zip(calls, draws) if len(args) == 5]
        runs.append((training, [x for x in draws if x not in training]))
    assert runs[0] == runs[2]
    assert len({*runs[0][0], *runs[1][0]}) == 6
    # Each evaluation of a run draws with the same seeds, so that evaluations can be compared.
    for _, evaluated in runs:
        assert evaluated[:2] * 4 == evaluated and evaluated[0] != evaluated[1]
    assert not {*runs[0][1]} & {*runs[1][1]}


def test_no_two_epochs_of_two_seeds_have_the_same_order():
    orders = set()
    for seed, epoch in product(range(4), range(4)):
        args = grpo.Args(seed=seed)
        rows = [x for i in (1, 2, 3) for x in grpo.choose_rows(args, [*range(12)], 4, 3 * epoch + i)]
        assert sorted(rows) == [*range(12)]
        orders.add(str(rows))
    assert len(orders) == 16


@pytest.mark.parametrize("name", STAGE_DATA)
def test_the_orders_of_a_stage_depend_on_seed_and_epoch(name, tmp_path, monkeypatch):
    module, data, orders = importlib.import_module(name), few(name, 16, tmp_path), []
    calls = recorded(monkeypatch, module, "choose_rows")
    flags = {"dataset": data, "batch_size": 8, "num_epochs": 2, "learning_rate": 0.0}
    flags |= held_out(name, None, 0)
    for seed, folder in ((1, "a"), (2, "b"), (1, "c")):
        calls.clear()
        run_stage(module, seed=seed, run_dir=tmp_path / folder, **flags)
        rows = [str(rows) for _, rows in calls]
        orders.append([str(rows[:2]), str(rows[2:])])
    assert orders[0] == orders[2] and len({*orders[0], *orders[1]}) == 4


def test_a_new_head_of_a_reward_model_follows_from_the_seed(tmp_path):
    folder = save(tmp_path, make_model("llama"), make_tokenizer())
    args = [reward_model.Args(model=folder, seed=seed, device="cpu") for seed in (1, 2, 1)]
    one, two, again = (reward_model.load_model(x)[0].score.weight for x in args)
    assert torch.equal(one, again) and not torch.equal(one, two)
    assert 0.5 < one.std().item() * (one.numel() + 1) < 2  # scores start near 0


def test_a_reward_model_that_is_trained_on_keeps_its_head():
    folder = ROOT / "toy" / "reward_model"
    model, _ = reward_model.load_model(reward_model.Args(model=str(folder), device="cpu"))
    saved = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert torch.equal(model.score.weight, saved.score.weight)


# The flags that a user may change in a run that has begun. With another value of any other flag, it is another run.
FREE = compare.FREE - {"seed", "ranks"} | {"num_iterations", "num_epochs"}


def other(x):
    """Another value of a flag."""
    if isinstance(x, bool):
        return not x
    return f"{x}-other" if isinstance(x, str | None) else 2 * x + 1


@pytest.mark.parametrize("name", NAMES)
def test_which_flags_a_run_that_has_begun_refuses_to_change(name, tmp_path, capsys):
    """All flags except FREE, the number of ranks, and the script."""
    module, layer = importlib.import_module(name), torch.nn.Linear(2, 2)
    state, path = {"policy": layer, "model": layer}, tmp_path / "args.json"
    flags = {"run_dir": str(tmp_path), "max_grad_norm": 1.0, "device": "cpu"}
    first = module.Args(**flags | ({"reward_clip": 9.0} if name in POLICIES else {"anneal_lr": False}))

    def begin(args):
        return module.open_run(args, state, [])

    begin(first)
    write_jsonl(tmp_path / "metrics.jsonl", [{"iteration": 1, "score": 1.0}])
    module.save_checkpoint(tmp_path, 1, state)
    may_change = set()
    for field in dataclasses.fields(first):
        changed = dataclasses.replace(first, **{field.name: other(getattr(first, field.name))})
        if field.name in FREE - {"run_dir"}:
            may_change.add(field.name)
            begin(changed)
            begin(first)
        elif field.name != "run_dir":
            assert field.name in refused(capsys, begin, changed)
    assert len(may_change) >= 5
    old = path.read_text()
    for key, value, words in (("ranks", 2, "ranks 2 (now 1)"), ("script", "other", "is not a run of")):
        path.write_text(json.dumps(json.loads(old) | {key: value}))
        assert words in refused(capsys, begin, first)


def test_a_file_of_a_run_is_on_the_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    """Otherwise a power cut could leave a checkpoint of zeros. A line of a log is written at once."""
    done = []
    for name in ("fsync", "replace"):
        function = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *x, f=function, name=name: done.append(name) or f(*x))
    grpo.save_checkpoint(tmp_path, 1, {"policy": torch.nn.Linear(2, 2)})
    assert done == ["fsync", "replace"]
    grpo.append(tmp_path / "metrics.jsonl", {"iteration": 1})
    assert done[2:] == ["fsync"] and [x.name for x in tmp_path.glob("*.tmp")] == []


@pytest.mark.parametrize("name", NAMES)
def test_the_last_iteration_is_saved_without_save_every(name, tmp_path):
    folder = tmp_path / "run"
    if name in POLICIES:
        run(name, run_dir=folder, num_iterations=1, save_every=0)
    else:
        flags = {
            "dataset": few(name, 16, tmp_path),
            "batch_size": 8,
            "num_epochs": 1,
            "eval_every": 0,
            "save_every": 0,
        }
        run_stage(
            importlib.import_module(name),
            run_dir=folder,
            **flags | ({"eval_size": 0} if name == "sft" else {}),
        )
    assert (folder / "model" / "model.safetensors").exists() and (folder / "checkpoint.pt").exists()


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_uses_a_device_of_its_machine(name, monkeypatch):
    """It is the second rank of the second machine. The functions of PyTorch are replaced, since there is no GPU."""
    module, chosen = importlib.import_module(name), []
    monkeypatch.setattr(module, "WORLD_SIZE", 16)
    monkeypatch.setattr(module, "RANK", 9)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    module.start_ranks(module.Args(device="cuda"))
    assert chosen == [1]


@pytest.mark.parametrize("name", NAMES)
def test_only_rank_0_writes(name, tmp_path, monkeypatch):
    """The second of two ranks trains and leaves no file. Sums over ranks are twice its own."""
    module = importlib.import_module(name)
    monkeypatch.setattr(module, "RANK", 1)
    monkeypatch.setattr(module, "WORLD_SIZE", 2)
    monkeypatch.setattr(module, "all_sum", lambda x: x.mul_(2))
    waits, sdps, sdp = [], [], torch.backends.cuda.enable_cudnn_sdp
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, timeout: waits.append(timeout))
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda x: sdps.append(x) or sdp(x))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    monkeypatch.setattr(wandb, "init", None)  # fails if it is called
    steps = recorded(monkeypatch, module, "optimizer_step")
    folder, data = tmp_path / "run", few(name, 16, tmp_path)
    if name in POLICIES:
        rows = write_jsonl(tmp_path / "heldout.jsonl", read_jsonl(ROOT / module.Args.dataset)[:8])
        flags = {"num_iterations": 1, "eval_every": 1, "log_every": 1, "eval_dataset": rows, "track": True}
        run(name, run_dir=folder, **flags)
    else:
        flags = held_out(name, data, 8) | {"track": True}
        run_stage(module, dataset=data, batch_size=8, num_epochs=1, run_dir=folder, **flags)
    assert steps and not folder.exists()
    # A reward may take an hour, and cuDNN's bfloat16 attention is wrong on some GPUs.
    assert waits[0].total_seconds() >= 3600 and sdps == [False]


@pytest.mark.parametrize("name", [*NAMES, "ppo"])
def test_the_optimizer_is_adamw_without_weight_decay(name, tmp_path, monkeypatch):
    module = importlib.import_module(name)
    steps = recorded(monkeypatch, module, "optimizer_step")
    usual = torch.optim.AdamW([torch.zeros(1)]).defaults
    start(name, tmp_path, **({} if name in STAGE_DATA else {"model": module.Args.model}))
    for (_, _, optimizer, _), _ in steps:
        assert optimizer.defaults == usual | {"weight_decay": 0.0, "fused": True}
    assert steps


def test_what_ranks_groups_and_minibatches_must_divide(monkeypatch, capsys):
    """Each rank needs whole groups and whole minibatches, so 2 ranks with k = 4 and 8 minibatches need 16."""
    monkeypatch.setattr(grpo, "WORLD_SIZE", 2)
    flags = {"samples_per_prompt": 4, "num_minibatches": 8}
    for size in (8, 24):
        said = refused(capsys, grpo.check_args, grpo.Args(batch_size=size, **flags))
        assert f"--batch_size {size}: " in said and "multiple of 16" in said
    grpo.check_args(grpo.Args(batch_size=16, **flags))
    for module in map(importlib.import_module, STAGE_DATA):
        monkeypatch.setattr(module, "WORLD_SIZE", 2)
        assert "multiple of 2, such as 4" in refused(capsys, module.check_args, module.Args(batch_size=3))
