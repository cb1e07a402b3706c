"""Micro-batches and ranks change memory and time, never a gradient: every script's main on a fixed rollout.

All cases of a number of ranks run in one launch of driver.py, as many as the selected tests need.
"""

import dataclasses
import importlib
import json
from itertools import chain

import pytest
import torch
from conftest import POLICY_SCRIPTS, ROOT, SKELETONS, launch, read_jsonl, write_jsonl
from driver import fixed_response, reward

DRIVER = ROOT / "tests" / "driver.py"
COMMON = {"batch_size": 48, "max_response_length": 12, "reward": f"{DRIVER}:reward"}
# micro-batch sizes with so many ranks
SIZES = {"float64": {1: (48, 7, 1), 2: (24, 5), 3: (16, 3)}, "float32": {1: (48, 7), 2: (5,), 3: (3,)}}
DTYPES = {"float64": (1e-12, 0.3), "float32": (1e-6, 0.01)}  # how equal gradients are, and at which kl_coef


def cases_of(name: str, ranks: int, folder) -> list[dict]:
    """The runs of a script with so many ranks: fixed rollouts and, of each skeleton, sampled ones."""
    common, found = COMMON | {"dataset": folder / "prompts.jsonl"}, []
    for dtype, (_, beta) in DTYPES.items():
        for size in SIZES[dtype][ranks]:
            flags = common | {"num_iterations": 1, "max_grad_norm": 1e9, "kl_coef": beta}
            # rank by rank, minibatches are others, so that there is one
            flags |= {"micro_batch_size": size, "num_minibatches": 1, "eval_dataset": folder / "heldout.jsonl"}
            found.append({"key": (name, dtype, size), "dtype": dtype, "sample": False, "flags": flags})
    if name in SKELETONS and ranks < 3:
        flags = common | {"num_iterations": 3, "micro_batch_size": 9, "temperature": 0.7}
        found.append({"key": (name, "sampled"), "dtype": "float32", "sample": True, "flags": flags})
        flags = COMMON | {"dataset": folder / "same.jsonl", "num_iterations": 2, "learning_rate": 0.0}
        found.append({"key": (name, "same"), "dtype": "float32", "sample": True, "flags": flags})
    if name == "grpo" and ranks == 2:
        flags = {"batch_size": 48, "num_iterations": 2, "max_response_length": 12}
        found.append({"key": (name, "groups"), "dtype": "float32", "sample": True, "flags": flags})
    known = {field.name for field in dataclasses.fields(importlib.import_module(name).Args)}
    for case in found:
        pairs = [(f"--{flag}", str(value)) for flag, value in case["flags"].items() if flag in known]
        case |= {"script": name, "flags": [*chain(*pairs)]}
    return found


@pytest.fixture(scope="module")
def records(request, tmp_path_factory):
    """records(ranks)[key] is what each rank saw in that case."""
    folder = tmp_path_factory.mktemp("ranks")
    items = [item for item in request.session.items if item.fspath == request.fspath]
    names = sorted({item.callspec.params["name"] for item in items})
    rows = {row["prompt"]: row for row in read_jsonl(ROOT / "toy" / "train.jsonl")}
    write_jsonl(folder / "prompts.jsonl", [*rows.values()][:200])
    write_jsonl(folder / "heldout.jsonl", read_jsonl(ROOT / "toy" / "heldout.jsonl")[::8])
    write_jsonl(folder / "same.jsonl", [{"prompt": "3 + 5 - 2 + 4 ?", "answer": "0"}] * 96)
    made = {}

    def run(ranks: int) -> dict:
        if ranks not in made:
            cases = [case for name in names for case in cases_of(name, ranks, folder)]
            out = tmp_path_factory.mktemp("launch")  # one that died must not look finished to the next
            (out / "cases.json").write_text(json.dumps(cases))
            launch(DRIVER, out / "seen", out / "cases.json", ranks=ranks)
            files = [out / f"seen.{rank}.pt" for rank in range(ranks)]
            cases = zip(*(torch.load(file, weights_only=True) for file in files))
            made[ranks] = {tuple(seen[0]["key"]): seen for seen in cases}
        return made[ranks]

    return run


def distance(one: dict, other: dict) -> float:
    """The largest relative difference of two runs' gradients, over the whole vector."""
    pairs = zip(one["gradients"], other["gradients"], strict=True)
    return max(float((x - y).norm() / x.norm()) for x, y in pairs)


def check_denominators(seen: list[dict]) -> None:
    """policy_loss is told the responses and tokens of all micro-batches of all ranks in a step."""
    steps = {}
    for step, counts, _ in [call for rank in seen for call in rank["calls"]]:
        steps.setdefault(step, []).append(counts)
    for counts in steps.values():
        sequences, tokens = (sum(numbers) for numbers in [*zip(*counts)][:2])
        assert {numbers[2:] for numbers in counts} == {(sequences, tokens)}


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", (1, 2, 3))
def test_gradients_do_not_depend_on_micro_batches_or_ranks(records, name, dtype, ranks):
    (whole,) = records(1)[name, dtype, 48]
    assert all(float(gradient.norm()) > 1e-3 for gradient in whole["gradients"])
    tolerance = DTYPES[dtype][0]
    for size in SIZES[dtype][ranks]:
        seen = records(ranks)[name, dtype, size]
        assert distance(whole, seen[0]) < tolerance
        assert len({rank["digest"] for rank in seen}) == 1 and len({str(rank["parameters"]) for rank in seen}) == 1

        # every rank has a share, in order; a group never spans two
        prompts, advantages = ([x for rank in seen for x in rank[key]] for key in ("prompts", "advantages"))
        assert prompts == whole["prompts"]
        groups = [{tuple(ids) for ids in rank["prompts"]} for rank in seen]
        assert sum(map(len, groups)) == len(set.union(*groups))
        numbers = [torch.tensor([*chain(*rows)]) for rows in (whole["advantages"], advantages)]
        torch.testing.assert_close(*numbers, rtol=10 * tolerance, atol=10 * tolerance)

        assert all(max(rank["kl"]) == 0 for rank in seen)  # log(pi_old / pi_ref), not its negative

        check_denominators(seen)
        per_rank = [sum(counts[1] for _, counts, _ in rank["calls"]) for rank in seen]
        assert len(set(per_rank)) == ranks  # were they equal, a count per rank would pass

        # what is logged is that of all ranks; the first and the last line are evaluations
        assert len(whole["metrics"]) == 3 and "eval/score/2-5" in whole["metrics"][0]
        for line, expected in zip(seen[0]["metrics"], whole["metrics"], strict=True):
            expected = {key: value for key, value in expected.items() if key != "tokens_per_second"}
            assert {key: line[key] for key in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", SKELETONS)
def test_every_response_has_its_own_score(records, tokenizer, name):
    (seen,) = records(1)[name, "float64", 48]
    k = len(seen["prompts"]) // len({tuple(ids) for ids in seen["prompts"]})
    for i, (ids, scores) in enumerate(zip(seen["prompts"], seen["scores"], strict=True)):
        for score, number in zip(scores, (1 + i % k, 0)):  # of the response, and in remax.py of the greedy one
            response = tokenizer.decode(fixed_response(tokenizer, ids, number), skip_special_tokens=True)
            assert [score] == pytest.approx(reward([response], [tokenizer.decode(ids)]))
    assert len({scores[0] for scores in seen["scores"]}) > 10


@pytest.mark.parametrize("name", SKELETONS)
def test_ranks_sample_apart_and_stay_equal(records, name):
    """Three iterations: the same parameters to the last bit, a ratio of 1 at first, each prompt once."""
    (alone,), pair = records(1)[name, "sampled"], records(2)[name, "sampled"]
    assert pair[0]["parameters"] == pair[1]["parameters"] != alone["parameters"]
    prompts = [tuple(ids) for rank in pair for ids in rank["prompts"]]
    assert sorted(prompts) == sorted(map(tuple, alone["prompts"]))
    per_iteration = len(set(map(tuple, alone["prompts"][:48])))
    assert len(set(prompts)) == 3 * per_iteration
    check_denominators([alone])
    check_denominators(pair)
    for seen in (alone, *pair):
        steps = [step for step, *_ in seen["calls"]]
        first = [deviation for step, _, deviation in seen["calls"] if step == 0]
        assert max(first) < 5e-5 and max(steps) > 1
    kl = [line["kl"] for line in alone["metrics"] if "kl" in line]  # the reference is the policy's start
    assert not kl or abs(kl[0]) < 1e-4 < abs(kl[2])


@pytest.mark.parametrize("name", SKELETONS)
def test_draws_differ_between_ranks_and_iterations(records, name):
    """One prompt again and again, a learning rate of 0: what differs can only be the draw."""
    draws = [str(x) for rank in records(2)[name, "same"] for x in rank["responses"]]
    assert len(draws) == 4 == len(set(draws))


@pytest.mark.parametrize("name", SKELETONS)
def test_a_run_on_two_ranks_ends_without_a_word(tmp_path, name):
    """The script itself, as a user starts it: exit code 0, and no warning."""
    flags = [
        "--device",
        "cpu",
        "--batch_size",
        48,
        "--num_iterations",
        2,
        "--eval_every",
        1,
        "--run_dir",
        tmp_path / "run",
    ]
    result = launch(ROOT / f"{name}.py", *flags, ranks=2)
    assert result.stderr == "" and (tmp_path / "run" / "model" / "config.json").exists()


@pytest.mark.parametrize("name", ["grpo"])
def test_equal_groups_are_counted_on_all_ranks(records, name):
    pair = records(2)[name, "groups"]
    scores = [[x[0] for x in rank["scores"]] for rank in pair]
    for i, line in enumerate(line for line in pair[0]["metrics"] if "score" in line):
        rows = [rank[i * 24 + j : i * 24 + j + 8] for rank in scores for j in (0, 8, 16)]
        assert line["equal_groups"] == pytest.approx(sum(len(set(row)) == 1 for row in rows) / 6)
