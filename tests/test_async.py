"""Tests of flash_reinforce_async.py: which weights sample, and how a run ends.

Ranks are forks of the process of the test, so that they need not import torch.
"""

import copy
import importlib
import multiprocessing
import os
import socket

import pytest
import torch
import zoo
from conftest import ROOT, read_jsonl, write_jsonl
from zoo import refused, run

import flash_reinforce
import flash_reinforce_async as script

FLAGS = {"num_iterations": 5, "micro_batch_size": 4, "learning_rate": 1e-3, "eval_every": 3}


@pytest.fixture(scope="module", autouse=True)
def parent(tmp_path_factory):
    """The folder of a run of flash_reinforce.py on one rank. Datasets are small, because every rank reads them."""
    folder = tmp_path_factory.mktemp("async")
    for flag, name, rows in (("dataset", "train", 96), ("eval_dataset", "heldout", 9)):
        FLAGS[flag] = write_jsonl(folder / f"{name}.jsonl", read_jsonl(ROOT / "toy" / f"{name}.jsonl")[:rows])
    run("flash_reinforce", **FLAGS, run_dir=folder / "run")
    return folder / "run"


def train(module, ranks: int, run_dir, kill=(None, ""), samplers=1, **flags) -> list[int]:
    """Run a script on several ranks. kill names a rank and the function in whose third call it is killed.

    Return the exit code of each rank.
    """
    with socket.create_server(("localhost", 0)) as server:
        port = str(server.getsockname()[1])

    def start(rank: int):
        os.environ |= dict(RANK=f"{rank}", WORLD_SIZE=f"{ranks}", SAMPLER_RANKS=f"{samplers}")
        os.environ |= dict(MASTER_ADDR="localhost", MASTER_PORT=port)
        importlib.reload(module)  # it reads these variables
        if rank == kill[0]:
            zoo.stop_in_call(pytest.MonkeyPatch(), module, kill[1], 3, zoo.kill)
        run(module.__name__, **FLAGS | flags, run_dir=run_dir)

    Process = multiprocessing.get_context("fork").Process
    processes = [Process(target=start, args=[rank], daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
    return [process.exitcode for process in processes]


def assert_same_run(one, other):
    """Compare all bits of metrics and policies, except times and the metrics that only the variant has."""
    own = {"tokens_per_second", "sampling_seconds", "reward_seconds", "update_seconds"}
    own |= {"staleness", "trainer_waited", "sampler_waited"}
    for line, expected in zip(*(read_jsonl(path / "metrics.jsonl") for path in (one, other)), strict=True):
        assert {key for key in line.keys() | expected if line.get(key) != expected.get(key)} <= own
    policies = [torch.load(path / "checkpoint.pt")["policy"] for path in (one, other)]
    torch.testing.assert_close(*policies, rtol=0, atol=0)


def test_without_staleness_it_is_the_parent(parent, tmp_path):
    """This also holds for two samplers and two trainers, and two ranks of the parent."""
    assert train(script, 2, tmp_path / "run", staleness=0) == [0, 0]
    assert_same_run(tmp_path / "run", parent)
    assert train(flash_reinforce, 2, tmp_path / "two") == [0, 0]
    assert train(script, 4, tmp_path / "four", staleness=0, samplers=2) == [0] * 4
    assert_same_run(tmp_path / "four", tmp_path / "two")


def test_a_rollout_has_the_weights_of_n_updates_ago(tmp_path, monkeypatch):
    """The run equals a run of the parent that samples with a copy of its old weights."""
    generate, policies = flash_reinforce.generate, []

    def delayed(args, policy, *others, greedy=False):
        if not greedy:
            policies.append(copy.deepcopy(policy))
            policy = policies[max(0, len(policies) - 3)]
        return generate(args, policy, *others, greedy=greedy)

    monkeypatch.setattr(flash_reinforce, "generate", delayed)
    run("flash_reinforce", **FLAGS, run_dir=tmp_path / "delayed")
    assert train(script, 2, tmp_path / "run", staleness=2) == [0, 0]
    assert_same_run(tmp_path / "run", tmp_path / "delayed")
    _, *metrics = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [line["staleness"] for line in metrics] == [0, 1, 2, 2, 2]
    assert 0 < max(line["rejected"] for line in metrics) < 1
    assert train(script, 2, tmp_path / "run", staleness=2, num_iterations=7) == [0, 0]  # resumed
    assert [line["staleness"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")[6:]] == [0, 1]


@pytest.mark.parametrize("rank, function", [(0, "optimizer_step"), (1, "generate")])
def test_if_a_rank_is_killed_the_other_ends_and_the_run_resumes(rank, function, parent, tmp_path):
    codes = train(script, 2, tmp_path / "run", (rank, function), staleness=0, save_every=1)
    assert codes[rank] == -9 and codes[1 - rank] == 1  # it ends with the traceback of gloo
    assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) == 3
    assert train(script, 2, tmp_path / "run", staleness=0) == [0, 0]
    assert_same_run(tmp_path / "run", parent)


def test_ranks_and_flags_that_do_not_go_together(monkeypatch, capsys):
    parts = "--batch_size 128: cannot be divided evenly (samples per prompt: 1, minibatches: 1, "
    for trainers, samplers, reason in (
        (0, 1, "SAMPLER_RANKS=1: Start these and one or more to train with torchrun"),
        (3, 1, f"{parts}ranks: 3 + 1)"),
        (1, 3, f"{parts}ranks: 1 + 3)"),
    ):
        monkeypatch.setattr(script, "TRAINERS", range(trainers))
        monkeypatch.setattr(script, "SAMPLERS", range(trainers, trainers + samplers))
        assert reason in refused(capsys, script.check_args, script.Args(batch_size=128))
