"""Micro-batches and ranks change memory and time, never a gradient: every script's main on a fixed rollout.

All cases of a number of ranks run in one launch of driver.py, as many as the selected tests need.
"""

import dataclasses
import importlib
import json

import pytest
import torch
from conftest import POLICY_SCRIPTS, ROOT, SKELETONS, launch, read_jsonl, words_of, write_jsonl
from driver import fixed_response, reward

DRIVER = ROOT / "tests" / "driver.py"
COMMON = {"batch_size": 48, "max_response_length": 12}
FIXED = COMMON | {"reward": f"{DRIVER}:reward", "num_iterations": 1, "max_grad_norm": 1e9, "kl_coef": 0.3}
FIXED |= {"num_minibatches": 1}  # minibatches are drawn rank by rank: two would be others on other ranks
SAMPLED = COMMON | {"num_iterations": 3, "micro_batch_size": 9, "temperature": 0.7}
DRAWN = [name for name in SKELETONS if name not in ("dapo", "distill")]  # dapo is in test_dapo.py
MICRO_BATCH = {1: 7, 2: 5, 3: 3}  # its size on so many ranks


def cases_of(name: str, ranks: int, folder) -> list[dict]:
    """The runs of a script on so many ranks."""
    fixed = FIXED | {"dataset": folder / "train.jsonl"}
    sampled = SAMPLED | {"dataset": folder / "train.jsonl"}
    if name == "grpo":  # evaluation is the same code in all
        fixed["eval_dataset"] = folder / "heldout.jsonl"
    runs = {"fixed": fixed | {"micro_batch_size": MICRO_BATCH[ranks]}}
    if ranks == 1:
        runs["whole"] = fixed | {"micro_batch_size": 48}
    if name in DRAWN and ranks < 3:
        runs["sampled"] = sampled
    if name == "grpo" and ranks == 2:
        runs["same"] = sampled | {"dataset": folder / "same.jsonl", "num_iterations": 2, "learning_rate": 0.0}
    known = {field.name for field in dataclasses.fields(importlib.import_module(name).Args)}
    cases = []
    for case, flags in runs.items():
        words = words_of(**{flag: value for flag, value in flags.items() if flag in known})
        cases.append({"script": name, "case": case, "sample": case in ("sampled", "same"), "flags": words})
    return cases


@pytest.fixture(scope="module")
def records(request, tmp_path_factory):
    """records(ranks)[script, case] is what each rank saw."""
    folder = tmp_path_factory.mktemp("ranks")
    items = [item for item in request.session.items if item.fspath == request.fspath]
    names = sorted({item.callspec.params["name"] for item in items})
    rows = {row["prompt"]: row for row in read_jsonl(ROOT / "toy" / "train.jsonl")}
    write_jsonl(folder / "train.jsonl", [*rows.values()][:200])
    write_jsonl(folder / "heldout.jsonl", read_jsonl(ROOT / "toy" / "heldout.jsonl")[::8])
    write_jsonl(folder / "same.jsonl", [{"prompt": "3 + 5 - 2 + 4 ?", "answer": "0"}] * 96)
    made = {}

    def run(ranks: int) -> dict:
        if ranks not in made:
            out = tmp_path_factory.mktemp("launch")  # one that died must not look finished to the next
            cases = [case for name in names for case in cases_of(name, ranks, folder)]
            (out / "cases.json").write_text(json.dumps(cases))
            launch(DRIVER, out / "seen", out / "cases.json", ranks=ranks)
            of_ranks = [torch.load(out / f"seen.{rank}.pt", weights_only=True) for rank in range(ranks)]
            made[ranks] = {(case["script"], case["case"]): seen for case, *seen in zip(cases, *of_ranks)}
        return made[ranks]

    return run


def joined(seen: list[dict], key: str) -> list:
    """The records of all ranks in one list."""
    return [x for rank in seen for x in rank[key]]


def check_denominators(seen: list[dict]) -> None:
    """policy_loss is told the responses and tokens of all micro-batches of all ranks in a step."""
    steps = {}
    for step, counts, _ in joined(seen, "calls"):
        steps.setdefault(step, []).append(counts)
    for counts in steps.values():
        sequences, tokens, *_ = (sum(numbers) for numbers in zip(*counts))
        assert {numbers[2:] for numbers in counts} == {(sequences, tokens)}


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_gradients_do_not_depend_on_micro_batches_or_ranks(records, name, ranks):
    (whole,), seen = records(1)[name, "whole"], records(ranks)[name, "fixed"]
    for expected, gradient in zip(whole["gradients"], seen[0]["gradients"], strict=True):
        assert expected.norm() > 1e-3 and (gradient - expected).norm() < 1e-12 * expected.norm()
    assert all(rank["digests"] == seen[0]["digests"] for rank in seen)

    # every rank has a share, in order; a group never spans two
    assert joined(seen, "prompts") == whole["prompts"]
    groups = [{tuple(ids) for ids in rank["prompts"]} for rank in seen]
    assert sum(map(len, groups)) == len(set.union(*groups))
    for found, expected in zip(joined(seen, "advantages"), whole["advantages"], strict=True):
        assert found == pytest.approx(expected, rel=1e-11, abs=1e-11)
    assert max(joined(seen, "kl_errors")) == 0  # log(pi_old / pi_ref), not its negative

    check_denominators(seen)
    tokens = [sum(counts[1] for _, counts, _ in rank["calls"]) for rank in seen]
    assert len(set(tokens)) == ranks  # were they equal, a count per rank would pass

    # what is logged is that of all ranks
    assert name != "grpo" or "eval/score/2-5" in whole["metrics"][0]
    for line, expected in zip(seen[0]["metrics"], whole["metrics"], strict=True):
        line["tokens_per_second"] = expected["tokens_per_second"] = 0
        assert line == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", SKELETONS)
def test_every_response_has_its_own_score(records, tokenizer, name):
    """In remax.py the greedy response, which is number 0, has one too."""
    (seen,) = records(1)[name, "whole"]
    k = len(seen["prompts"]) // len({tuple(ids) for ids in seen["prompts"]})
    for i, (ids, scores) in enumerate(zip(seen["prompts"], seen["scores"], strict=True)):
        for score, number in zip(scores, (1 + i % k, 0)):
            response = tokenizer.decode(fixed_response(ids, number), skip_special_tokens=True)
            assert [score] == pytest.approx(reward([response], [tokenizer.decode(ids)]))
    assert len({scores[0] for scores in seen["scores"]}) > 8


@pytest.mark.parametrize("name", DRAWN)
def test_ranks_sample_different_prompts_and_stay_equal(records, name):
    """Three iterations: the same weights to the last bit, a ratio of 1 at first, each prompt once."""
    (alone,), pair = records(1)[name, "sampled"], records(2)[name, "sampled"]
    assert pair[0]["digests"] == pair[1]["digests"] != alone["digests"]
    assert sorted(joined(pair, "prompts")) == sorted(alone["prompts"])
    prompts = [tuple(ids) for ids in alone["prompts"]]
    assert len(set(prompts)) == 3 * len(set(prompts[:48]))
    for seen in ([alone], pair):
        check_denominators(seen)
        for step, _, deviation in joined(seen, "calls"):
            assert step > 0 or deviation < 5e-5
    kl = [line["kl"] for line in alone["metrics"] if "kl" in line]  # the reference is the policy's start
    assert abs(kl[0]) < 1e-4 < abs(kl[2])


@pytest.mark.parametrize("name", ["grpo"])
def test_draws_differ_between_ranks_and_iterations(records, name):
    """One prompt again and again, a learning rate of 0: what differs can only be the draw."""
    draws = [str(responses) for responses in joined(records(2)[name, "same"], "responses")]
    assert len(draws) == 4 == len(set(draws))
