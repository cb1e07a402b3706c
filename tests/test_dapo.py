"""dapo.py's dynamic sampling: which groups are trained on, and what is counted. Two ranks: test_ranks.py."""

from itertools import product

import pytest
from conftest import ROOT, read_jsonl, write_jsonl
from zoo import recorded, run

import dapo

ENDS = ["- 9 + 8 - 4 ?", "- 9 + 8 - 5 ?", *(f"+ {i} ?" for i in range(10))]  # of different widths
PROMPTS = [f"{first} {last}" for first, last in product("3124", ENDS)]  # the 12 with 3 get different scores


@pytest.fixture
def run_dapo(monkeypatch, tmp_path):
    """Runs dapo.py with 4 groups of 8 in a batch; returns what compute_advantages gets, and the metrics."""

    def run_with(prompts, **flags):
        flags["dataset"] = write_jsonl(tmp_path / "data.jsonl", [{"prompt": prompt} for prompt in prompts])
        flags["reward"] = f"{ROOT}/tests/driver.py:reward_of_threes"
        calls = recorded(monkeypatch, dapo, "compute_advantages")
        flags = {"batch_size": 32, "max_response_length": 12} | flags
        run("dapo", **flags, run_dir=tmp_path / "run")
        return [rollout for (_, rollout), _ in calls], read_jsonl(tmp_path / "run" / "metrics.jsonl")

    return run_with


def mixed(rollout) -> list[bool]:
    groups = rollout["raw_scores"].view(-1, 8)
    return (groups.amax(1) > groups.amin(1)).tolist()


def test_a_batch_has_groups_of_different_scores_only(run_dapo, tokenizer, tmp_path):
    """Of different raw scores: the two penalties make the scores of every group differ."""
    penalties = {"overlong_buffer": 12, "missing_eos_penalty": 0.5}
    rollouts, lines = run_dapo(PROMPTS, num_iterations=3, max_rollouts=50, log_every=1, **penalties)
    for rollout, line in zip(rollouts, lines, strict=True):
        assert len(rollout["scores"]) == 32 and all(mixed(rollout))
        # Each response has its own score after the parts were joined.
        texts = tokenizer.batch_decode(dapo.response_ids(rollout), skip_special_tokens=True)
        assert rollout["raw_scores"].tolist() == [len(text) % 3 for text in texts]
        # Before the last rollout there were fewer than 4.
        found = round(line["rollouts"] * 4 * (1 - line["equal_groups"]), 3)
        assert line["rollouts"] > 1 and found in (4, 5, 6, 7)
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert samples and all(sample["prompt"].startswith("3 ") for sample in samples)


def test_the_responses_to_a_prompt_stay_together(run_dapo):
    """Among 128 rows, a sort that is not stable would mix the groups."""
    ((rollout,), _) = run_dapo(PROMPTS, num_iterations=1, max_rollouts=1, batch_size=128)
    prompts = rollout["sequences"][:, :-12].view(16, 8, -1)  # (groups, k, P)
    assert (prompts == prompts[:, :1]).all() and len(prompts[:, 0].unique(dim=0)) == 16
    assert 0 < sum(mixed(rollout)) < 16


def test_no_prompt_is_in_a_batch_twice(run_dapo, monkeypatch):
    """With 5 prompts the second rollout has what the first one left, and then there is nothing to draw."""
    calls = recorded(monkeypatch, dapo, "generate")
    _, (line,) = run_dapo([f"1 + {i} ?" for i in range(5)], num_iterations=1, max_rollouts=30)
    prompts = [tuple(ids) for args, _ in calls for ids in args[3]]
    assert len(prompts) == len(set(prompts)) == 5 and line["rollouts"] == 5 / 4


def test_what_is_missing_after_max_rollouts_is_filled_with_the_others(run_dapo):
    rollouts, lines = run_dapo(PROMPTS, num_iterations=4, max_rollouts=2)
    assert min(sum(mixed(rollout)) for rollout in rollouts) < 4
    for rollout, line in zip(rollouts, lines, strict=True):
        assert len(rollout["scores"]) == 32 and line["rollouts"] == 2
        assert mixed(rollout) == sorted(mixed(rollout), reverse=True)
