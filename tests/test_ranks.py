"""Micro-batches and ranks change memory and time, never a gradient: every script's main, in policy scripts on a fixed
rollout.

All cases of a number of ranks run in one launch of driver.py. The parameter `name` of each test is its script.
"""

import dataclasses
import importlib

import pytest
from conftest import POLICY_SCRIPTS, ROOT, SKELETONS, is_for_0_and_1, read_jsonl, write_jsonl
from driver import fixed_response, reward
from zoo import STAGE_DATA, few, make_model, make_tokenizer, record, save

DRAWN = [name for name in SKELETONS if name not in ("dapo", "distill")]  # dapo has its own test below


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The data of all cases."""
    folder = tmp_path_factory.mktemp("ranks")
    rows = {row["prompt"]: row for row in read_jsonl(ROOT / "toy" / "train.jsonl")}
    write_jsonl(folder / "train.jsonl", [*rows.values()][:200])
    write_jsonl(folder / "heldout.jsonl", read_jsonl(ROOT / "toy" / "heldout.jsonl")[::8])
    write_jsonl(folder / "same.jsonl", [{"prompt": "3 + 5 - 2 + 4 ?", "answer": "0"}] * 96)
    threes = [row for prompt, row in rows.items() if prompt.startswith("3")]
    others = [row for prompt, row in rows.items() if not prompt.startswith("3")]
    write_jsonl(folder / "threes.jsonl", [*threes[:12], *others[:36]])
    save(folder / "start", make_model("llama"), make_tokenizer())
    for name in STAGE_DATA:
        few(name, 24 if name == "sft" else 16, folder)
    return folder


def stage_cases(name: str, ranks: int, folder) -> dict[str, dict]:
    """The flags of the runs of sft.py, reward_model.py or dpo.py on so many ranks: one step each."""
    data = folder / f"{name}.jsonl"
    flags = {"model": folder / "start", "dataset": data, "num_epochs": 1, "batch_size": 16}
    flags |= {"max_grad_norm": 1e9, "warmup_iterations": 0}
    flags |= {"eval_size": 8} if name == "sft" else {"eval_dataset": data}
    sizes = {"fixed": 3} | ({"whole": 16} if ranks == 1 else {})
    return {case: flags | {"micro_batch_size": size} for case, size in sizes.items()}


def cases_of(name: str, ranks: int, folder, out) -> dict[str, dict]:
    """The flags of a policy script's runs on so many ranks."""
    common = {"dataset": folder / "train.jsonl", "batch_size": 48, "max_response_length": 12}
    reward = f"{ROOT}/tests/driver.py:{'right_or_wrong' if is_for_0_and_1(name) else 'reward'}"
    fixed = {**common, "reward": reward, "num_iterations": 1, "max_grad_norm": 1e9}
    fields = [field.name for field in dataclasses.fields(importlib.import_module(name).Args)]
    if "kl_coef" in fields:
        fixed["kl_coef"] = 0.3
    if "num_minibatches" in fields:
        fixed["num_minibatches"] = 1  # they are drawn rank by rank: two would be others on other ranks
    if name == "gdpo":
        fixed["reward"] = f"{ROOT}/tests/driver.py:two_rewards"
    if name == "rloo":
        fixed["reward_zscore"] = True
    if name == "grpo":  # evaluation is the same code in all
        fixed["eval_dataset"] = folder / "heldout.jsonl"
    sampled = {**common, "num_iterations": 3, "micro_batch_size": 9, "temperature": 0.7}
    same = {**sampled, "dataset": folder / "same.jsonl", "num_iterations": 2, "learning_rate": 0.0}

    cases = {"fixed": {**fixed, "micro_batch_size": 9 - 2 * ranks}}
    if ranks == 1:
        cases["whole"] = {**fixed, "micro_batch_size": 48}
    if name in DRAWN:
        cases["sampled"] = sampled
    if name == "grpo" and ranks == 2:
        cases["same"] = same
    if name == "ppo" and ranks == 2:
        resumed = sampled | {"run_dir": out / "resumed"}
        cases |= {"stopped": resumed | {"num_iterations": 2}, "resumed": resumed}
    if name == "dapo" and ranks == 2:
        threes = f"{ROOT}/tests/driver.py:reward_of_threes"
        cases["threes"] = sampled | {"dataset": folder / "threes.jsonl", "reward": threes, "batch_size": 32}
    return cases


def record_all(ranks: int, folder, out, request) -> dict[tuple, list[dict]]:
    """By script and case, what each rank saw; only of scripts whose tests are selected."""
    keys, cases = [], []
    for name in {
        item.callspec.params["name"]: 0 for item in request.session.items if item.path == request.path
    }:
        its_cases = (
            stage_cases(name, ranks, folder) if name in STAGE_DATA else cases_of(name, ranks, folder, out)
        )
        for case, flags in its_cases.items():
            keys.append((name, case))
            cases.append({"script": name, "sample": case not in ("fixed", "whole"), "flags": flags})
    return dict(zip(keys, record(out, cases, ranks)))


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory, request):
    return record_all(1, folder, tmp_path_factory.mktemp("alone"), request)


@pytest.fixture(scope="module")
def pair(folder, tmp_path_factory, request):
    return record_all(2, folder, tmp_path_factory.mktemp("pair"), request)


def joined(seen: list[dict], key: str) -> list:
    """The records of all ranks in one list."""
    return [x for rank in seen for x in rank[key]]


def check_denominators(seen: list[dict]) -> None:
    """policy_loss is told the responses and tokens of all micro-batches of all ranks in a step."""
    steps = {}
    for step, counts, _ in joined(seen, "calls"):
        steps.setdefault(step, []).append(counts)
    for counts in steps.values():
        sequences = sum(numbers[0] for numbers in counts)
        tokens = sum(numbers[1] for numbers in counts)
        assert all(numbers[2:] == (sequences, tokens) for numbers in counts)


def check_gradients(whole: dict, seen: list[dict]) -> None:
    """Those of one rank and a single micro-batch, and the same on all ranks to the last bit."""
    for expected, gradient in zip(whole["gradients"], seen[0]["gradients"], strict=True):
        assert expected.norm() > 1e-3 and (gradient - expected).norm() < 1e-12 * expected.norm()
    assert all(rank["digests"] == seen[0]["digests"] for rank in seen)


def check_same(name: str, whole: dict, seen: list[dict]) -> None:
    """The ranks together saw what one saw in a single micro-batch."""
    check_gradients(whole, seen)

    # every rank has a share, in order; a group never spans two
    assert joined(seen, "prompts") == whole["prompts"]
    groups = [{tuple(ids) for ids in rank["prompts"]} for rank in seen]
    assert sum(map(len, groups)) == len(set.union(*groups))
    for found, expected in zip(joined(seen, "advantages"), whole["advantages"], strict=True):
        assert found == pytest.approx(expected, rel=1e-11, abs=1e-11)
    assert max(joined(seen, "kl_errors")) == 0  # log(pi_old / pi_ref), not its negative

    check_denominators(seen)
    tokens = [sum(counts[1] for _, counts, _ in rank["calls"]) for rank in seen]
    assert len(set(tokens)) == len(seen)  # were they equal, a count per rank would pass

    # what is logged is that of all ranks
    assert name != "grpo" or "eval/score/2-5" in whole["metrics"][0]
    for line, expected in zip(seen[0]["metrics"], whole["metrics"], strict=True):
        assert line == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
def test_gradients_do_not_depend_on_micro_batches(alone, name):
    check_same(name, alone[name, "whole"][0], alone[name, "fixed"])


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
def test_gradients_do_not_depend_on_ranks(alone, pair, name):
    check_same(name, alone[name, "whole"][0], pair[name, "fixed"])


@pytest.mark.parametrize("name", STAGE_DATA)
def test_stages_depend_on_neither_micro_batches_nor_ranks(alone, pair, name):
    """Gradients and metrics of sft.py, reward_model.py and dpo.py."""
    (whole,) = alone[name, "whole"]
    for seen in (alone[name, "fixed"], pair[name, "fixed"]):
        check_gradients(whole, seen)
        for line, expected in zip(seen[0]["metrics"], whole["metrics"], strict=True):
            if name == "dpo" and "accuracy" in line:  # of margins that are 0, except for rounding
                line = line | {"accuracy": expected["accuracy"]}
            assert line == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", SKELETONS)
def test_every_response_has_its_own_score(alone, tokenizer, name):
    """In remax.py the greedy response, which is number 0, has one too."""
    (seen,) = alone[name, "whole"]
    k = len(seen["prompts"]) // len({tuple(ids) for ids in seen["prompts"]})
    for i, (ids, scores) in enumerate(zip(seen["prompts"], seen["scores"], strict=True)):
        for score, number in zip(scores, (1 + i % k, 0)):
            response = tokenizer.decode(fixed_response(ids, number), skip_special_tokens=True)
            assert [score] == pytest.approx(reward([response], [tokenizer.decode(ids)]))
    assert len({scores[0] for scores in seen["scores"]}) > 8


@pytest.mark.parametrize("name", DRAWN)
def test_ranks_sample_different_prompts_and_stay_equal(alone, pair, name):
    """Three iterations: the same weights to the last bit, a ratio of 1 at first, each prompt once."""
    (one,), two = alone[name, "sampled"], pair[name, "sampled"]
    assert two[0]["digests"] == two[1]["digests"] != one["digests"]
    assert sorted(joined(two, "prompts")) == sorted(one["prompts"])
    prompts = [tuple(ids) for ids in one["prompts"]]
    assert len(set(prompts)) == 3 * len(set(prompts[:48]))
    for seen in ([one], two):
        check_denominators(seen)
        for step, _, deviation in joined(seen, "calls"):
            assert step > 0 or deviation < 5e-5
    kl = [line["kl"] for line in one["metrics"] if "kl" in line]  # the reference is the policy's start
    assert not kl or abs(kl[0]) < 1e-4 < abs(kl[2])


@pytest.mark.parametrize("name", ["grpo"])
def test_draws_differ_between_ranks_and_iterations(pair, name):
    """One prompt again and again, a learning rate of 0: what differs can only be the draw."""
    draws = [str(responses) for responses in joined(pair[name, "same"], "responses")]
    assert len(draws) == 4 == len(set(draws))


@pytest.mark.parametrize("name", ["ppo"])
def test_two_ranks_resume_to_the_last_bit(pair, name):
    """Of all scripts, ppo.py has the most in its checkpoint. test_runs.py has kills on one rank."""
    whole, resumed = pair[name, "sampled"], pair[name, "resumed"]
    assert resumed[0]["metrics"] == whole[0]["metrics"] and len(whole[0]["metrics"]) == 3
    for one, other in zip(whole, resumed):
        assert one["digests"][1:] == other["digests"][1:]  # of the weights


@pytest.mark.parametrize("name", ["dapo"])
def test_two_ranks_sample_as_often_as_each_needs(pair, name):
    """One has enough while the other goes on; the weights stay equal and the denominators are those of all."""
    seen = pair[name, "threes"]
    rollouts = [len(rank["responses"]) for rank in seen]
    assert rollouts[0] != rollouts[1] and min(rollouts) >= 3
    assert seen[0]["digests"] == seen[1]["digests"]
    check_denominators(seen)
    assert sum(line["rollouts"] for line in seen[0]["metrics"]) == pytest.approx(sum(rollouts) / 2)
