"""Micro-batches and ranks change memory and time, but no gradient. All tests run the main function of a script.

All cases for a number of ranks run in one launch of driver.py. The parameter `name` of each test is its script.
"""

import dataclasses
import importlib

import driver
import pytest
from conftest import POLICY_SCRIPTS, ROOT, SKELETONS, read_jsonl, write_jsonl
from references import FOR_0_AND_1
from zoo import STAGE_DATA, few, held_out, make_model, make_tokenizer, record, save

DRAWN = [name for name in SKELETONS if name not in ("dapo", "distill")]  # dapo has its own test below


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    rows = read_jsonl(ROOT / "toy" / "train.jsonl")
    write_jsonl(folder / "train.jsonl", rows[:200])
    write_jsonl(folder / "heldout.jsonl", read_jsonl(ROOT / "toy" / "heldout.jsonl")[::8])
    write_jsonl(folder / "same.jsonl", [{"prompt": "3 + 5 - 2 + 4 ?", "answer": "0"}] * 96)
    threes = [row for row in rows if row["prompt"][0] == "3"]
    others = [row for row in rows if row["prompt"][0] != "3"]
    write_jsonl(folder / "threes.jsonl", [*threes[:12], *others[:36]])
    save(folder / "start", make_model("llama"), make_tokenizer())
    for name in STAGE_DATA:
        few(name, 24 if name == "sft" else 16, folder)
    return folder


def stage_cases(name: str, ranks: int, folder) -> dict[str, dict]:
    """The flags of the runs of sft.py, reward_model.py or dpo.py on some ranks, with one step each."""
    data = folder / f"{name}.jsonl"
    flags = {"model": folder / "start", "dataset": data, "num_epochs": 1, "batch_size": 16}
    flags |= {"max_grad_norm": 1e9, "warmup_iterations": 0}
    flags |= held_out(name, data, 8)
    return {"fixed": flags | {"micro_batch_size": 3}, "whole": flags | {"micro_batch_size": 16}}


def policy_cases(name: str, ranks: int, folder) -> dict[str, dict]:
    common = {"dataset": folder / "train.jsonl", "batch_size": 48, "max_response_length": 12}
    reward = "right_or_wrong" if name in FOR_0_AND_1 else "reward"
    fixed = common | {"reward": f"{driver.__file__}:{reward}", "num_iterations": 1, "max_grad_norm": 1e9}
    if name == "gdpo":
        fixed["reward"] = f"{driver.__file__}:two_rewards"
    fields = [field.name for field in dataclasses.fields(importlib.import_module(name).Args)]
    if "kl_coef" in fields:
        fixed["kl_coef"] = 0.3
    if "num_minibatches" in fields:
        fixed["num_minibatches"] = 1  # each rank draws its own, so two would depend on the number of ranks
    if name == "rloo":
        fixed["reward_zscore"] = True
    if name == "grpo":  # evaluation is the same code in all
        fixed["eval_dataset"] = folder / "heldout.jsonl"
    cases = {"fixed": fixed | {"micro_batch_size": 9 - 2 * ranks}, "whole": fixed | {"micro_batch_size": 48}}
    sampled = common | {"num_iterations": 3, "micro_batch_size": 9, "temperature": 0.7}
    if name in DRAWN:
        cases["sampled"] = sampled
    if name == "grpo":
        same = folder / "same.jsonl"
        cases["same"] = sampled | {"dataset": same, "num_iterations": 2, "learning_rate": 0.0}
    if name == "ppo":
        resumed = sampled | {"run_dir": folder / f"resumed{ranks}"}
        cases |= {"stopped": resumed | {"num_iterations": 2}, "resumed": resumed}
    if name == "dapo":
        threes = {"dataset": folder / "threes.jsonl", "reward": f"{driver.__file__}:reward_of_threes"}
        cases["threes"] = sampled | threes | {"batch_size": 32}
    return cases


@pytest.fixture(scope="module")
def runs(folder, tmp_path_factory, request):
    """What each rank saw, by number of ranks, script and case. Scripts whose tests are not selected do not run."""
    names = [item.callspec.params["name"] for item in request.session.items if item.path == request.path]
    result = {}
    for ranks in (1, 2):
        keys, cases = [], []
        for name in dict.fromkeys(names):
            cases_of = stage_cases if name in STAGE_DATA else policy_cases
            for case, flags in cases_of(name, ranks, folder).items():
                keys.append((ranks, name, case))
                cases.append({"script": name, "sample": case not in ("fixed", "whole"), "flags": flags})
        result |= zip(keys, record(tmp_path_factory.mktemp("ranks"), cases, ranks))
    return result


def joined(seen: list[dict], key: str) -> list:
    return [x for rank in seen for x in rank[key]]


def check_gradients(whole: dict, seen: list[dict]) -> None:
    """They equal the gradients of one rank with a single micro-batch, and all ranks have the same to the last bit."""
    for expected, gradient in zip(whole["gradients"], seen[0]["gradients"], strict=True):
        assert expected.norm() > 1e-3 and (gradient - expected).norm() < 1e-12 * expected.norm()
    assert all(rank["digests"] == seen[0]["digests"] for rank in seen)


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
def test_gradients_depend_on_neither_micro_batches_nor_ranks(runs, name):
    (whole,) = runs[1, name, "whole"]
    assert name != "grpo" or "eval/score/2-5" in whole["metrics"][0]
    for seen in (runs[1, name, "fixed"], runs[2, name, "fixed"]):
        check_gradients(whole, seen)
        assert joined(seen, "prompts") == whole["prompts"]  # every rank has a share, in order
        groups = [{tuple(ids) for ids in rank["prompts"]} for rank in seen]
        assert sum(map(len, groups)) == len(set.union(*groups))  # none spans two ranks
        for found, expected in zip(joined(seen, "advantages"), whole["advantages"], strict=True):
            assert found == pytest.approx(expected, rel=1e-11, abs=1e-11)
        tokens = [sum(map(len, rank["advantages"])) for rank in seen]
        assert len(set(tokens)) == len(seen)  # if they were equal, counts per rank would pass
        for line, expected in zip(seen[0]["metrics"], whole["metrics"], strict=True):
            assert line == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", STAGE_DATA)
def test_stages_depend_on_neither_micro_batches_nor_ranks(runs, name):
    (whole,) = runs[1, name, "whole"]
    for seen in (runs[1, name, "fixed"], runs[2, name, "fixed"]):
        check_gradients(whole, seen)
        for line, expected in zip(seen[0]["metrics"], whole["metrics"], strict=True):
            if name == "dpo" and "accuracy" in line:  # the margins are 0, except for rounding
                line = line | {"accuracy": expected["accuracy"]}
            assert line == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", SKELETONS)
def test_every_response_has_its_own_score(runs, tokenizer, name):
    """In remax.py, so does the greedy response, which is number 0."""
    (seen,) = runs[1, name, "whole"]
    k = len(seen["prompts"]) // len({tuple(ids) for ids in seen["prompts"]})
    for i, (ids, scores) in enumerate(zip(seen["prompts"], seen["scores"], strict=True)):
        for score, number in zip(scores, (1 + i % k, 0)):
            response = tokenizer.decode(driver.fixed_response(ids, number), skip_special_tokens=True)
            assert [score] == pytest.approx(driver.reward([response], [tokenizer.decode(ids)]))
    assert len({scores[0] for scores in seen["scores"]}) > 8


@pytest.mark.parametrize("name", DRAWN)
def test_ranks_sample_different_prompts_and_stay_equal(runs, name):
    """After three iterations, the weights are the same to the last bit, and no prompt came twice."""
    (one,), two = runs[1, name, "sampled"], runs[2, name, "sampled"]
    assert two[0]["digests"] == two[1]["digests"] != one["digests"]
    assert sorted(joined(two, "prompts")) == sorted(one["prompts"])
    prompts = [tuple(ids) for ids in one["prompts"]]
    assert len(set(prompts)) == 3 * len(set(prompts[:48]))
    for line in one["metrics"] + two[0]["metrics"]:
        assert line.get("logprob_difference", 0.0) < 1e-5
    kl = [line["kl"] for line in one["metrics"] if "kl" in line]  # the reference is the policy's start
    assert not kl or abs(kl[0]) < 1e-4 < abs(kl[2])


@pytest.mark.parametrize("name", ["grpo"])
def test_draws_differ_between_ranks_and_iterations(runs, name):
    """All prompts are the same and the learning rate is 0, so only the draws can differ."""
    draws = [str(responses) for responses in joined(runs[2, name, "same"], "responses")]
    assert len(draws) == 4 == len(set(draws))


@pytest.mark.parametrize("name", ["ppo"])
def test_two_ranks_resume_to_the_last_bit(runs, name):
    """The checkpoint of ppo.py contains the most. test_runs.py kills runs on one rank."""
    whole, resumed = runs[2, name, "sampled"], runs[2, name, "resumed"]
    assert resumed[0]["metrics"] == whole[0]["metrics"] and len(whole[0]["metrics"]) == 3
    for one, other in zip(whole, resumed):
        assert one["digests"][1:] == other["digests"][1:]  # of the weights


@pytest.mark.parametrize("name", ["dapo"])
def test_each_of_two_ranks_samples_until_it_has_enough_groups(runs, name):
    seen = runs[2, name, "threes"]
    rollouts = [len(rank["responses"]) for rank in seen]
    assert rollouts[0] != rollouts[1] and min(rollouts) >= 3
    assert seen[0]["digests"] == seen[1]["digests"]
    assert sum(line["rollouts"] for line in seen[0]["metrics"]) == pytest.approx(sum(rollouts) / 2)
