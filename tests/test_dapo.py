"""dapo.py's dynamic sampling: which groups are trained on, what is counted, on one rank and on two."""

import itertools
import json

import pytest
import torch
from conftest import launch, read_jsonl, write_jsonl
from test_ranks import DRIVER, check_denominators
from zoo import run

import dapo

REWARD = """
def f(prompts, completions, **columns):  # by the response where the prompt begins with 3, else the same for all
    return [float(len(text) % 3) if prompt[0] == "3" else 1.0 for prompt, text in zip(prompts, completions)]
"""


@pytest.fixture
def flags(tmp_path):
    """16 prompts, of which 4 have groups of different scores; 4 groups of 8 make a batch."""
    ends = ("+ 5 ?", "+ 6 ?", "+ 7 ?", "- 9 + 8 - 4 ?")  # rollouts are of different widths
    rows = [{"prompt": f"{first} {last}"} for first, last in itertools.product("3124", ends)]
    (tmp_path / "mine.py").write_text(REWARD)
    data = write_jsonl(tmp_path / "data.jsonl", rows)
    return {"dataset": data, "reward": f"{tmp_path}/mine.py:f", "batch_size": 32, "max_response_length": 12}


@pytest.fixture
def seen(monkeypatch):
    """What compute_advantages gets, and the prompts and the full responses of each iteration's batch."""
    rollouts, compute_advantages = [], dapo.compute_advantages
    watched = lambda args, rollout: rollouts.append(rollout) or compute_advantages(args, rollout)  # noqa: E731
    monkeypatch.setattr(dapo, "compute_advantages", watched)
    return rollouts


def mixed(rollout) -> list[bool]:
    groups = rollout["scores"].view(-1, 8)
    return (groups.amax(1) > groups.amin(1)).tolist()


def test_a_batch_has_groups_of_different_scores_only(flags, seen, tokenizer, tmp_path):
    run("dapo", **flags, num_iterations=3, max_rollouts=50, log_every=1, run_dir=tmp_path / "run")
    for rollout in seen:
        assert len(rollout["scores"]) == 32 and all(mixed(rollout))
        sequences, mask = rollout["sequences"], rollout["response_mask"]
        T = mask.shape[1]
        prompts = zip(sequences[:, :-T], rollout["attention_mask"][:, :-T].bool())
        assert all(tokenizer.decode(ids[kept]).startswith("3 ") for ids, kept in prompts)
        assert torch.equal(rollout["attention_mask"][:, -T:].bool(), mask)
        texts = [tokenizer.decode(ids[kept], skip_special_tokens=True) for ids, kept in zip(sequences[:, -T:], mask)]
        scores = [len(text) % 3 for text in texts]
        assert rollout["scores"].tolist() == scores  # each response with its own, after the parts were joined
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert samples and all(sample["prompt"].startswith("3 ") for sample in samples)
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    for line in lines:
        found = round(line["rollouts"] * 4 * (1 - line["equal_groups"]), 3)
        assert line["rollouts"] > 1 and found in (4, 5, 6, 7)  # before the last rollout there were fewer than 4
    for rollout, line in zip(seen, lines):
        assert line["score"] != pytest.approx(float(rollout["scores"].mean()), abs=1e-3)  # it is of all sampled


def test_what_is_missing_after_max_rollouts_is_filled_with_the_others(flags, seen, tmp_path):
    """And a first rollout that is enough is the whole of it."""
    run("dapo", **flags, num_iterations=4, max_rollouts=2, run_dir=tmp_path / "run")
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert {line["rollouts"] for line in lines} == {2.0}
    counts = [sum(mixed(rollout)) for rollout in seen]
    assert [len(rollout["scores"]) for rollout in seen] == [32] * 4 and min(counts) < 4
    for rollout, line in zip(seen, lines):
        assert mixed(rollout) == sorted(mixed(rollout), reverse=True)
        assert line["equal_groups"] == pytest.approx(1 - sum(mixed(rollout)) / 8)
    write_jsonl(flags["dataset"], [{"prompt": f"3 + {last} ?"} for last in "5678"])
    run("dapo", **flags, num_iterations=1, run_dir=tmp_path / "enough")
    (line,) = read_jsonl(tmp_path / "enough" / "metrics.jsonl")
    assert line["rollouts"] == 1 and line["equal_groups"] == 0
    assert line["score"] == pytest.approx(float(seen[-1]["scores"].mean()))


def test_the_filter_reads_raw_scores(flags, seen, tmp_path):
    """The penalty on length makes the scores of every group differ, and the truncation penalty too."""
    more = {"overlong_buffer": 12, "missing_eos_penalty": 0.5, "max_rollouts": 30}
    run("dapo", **flags, **more, num_iterations=2, run_dir=tmp_path / "run")
    assert all(line["rollouts"] > 1 for line in read_jsonl(tmp_path / "run" / "metrics.jsonl"))


def test_two_ranks_sample_as_often_as_each_needs(flags, tmp_path):
    """One has enough while the other goes on; the weights stay equal and the denominators are those of all."""
    words = [str(x) for name, value in flags.items() for x in (f"--{name}", value)]
    words += ["--num_iterations", "3", "--micro_batch_size", "5"]
    case = {"key": ["dapo"], "script": "dapo", "dtype": "float32", "sample": True, "flags": words}
    (tmp_path / "cases.json").write_text(json.dumps([case]))
    launch(DRIVER, tmp_path / "seen", tmp_path / "cases.json", ranks=2)
    pair = [torch.load(tmp_path / f"seen.{rank}.pt", weights_only=True)[0] for rank in (0, 1)]
    rollouts = [len(seen["responses"]) for seen in pair]
    assert rollouts[0] != rollouts[1] and min(rollouts) >= 3
    assert pair[0]["parameters"] == pair[1]["parameters"]
    check_denominators(pair)
    lines = pair[0]["metrics"]
    assert sum(line["rollouts"] for line in lines) == pytest.approx(sum(rollouts) / 2)
