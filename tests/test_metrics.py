"""Tests of the metrics in docs/metrics.md: plain loops compute each of them again, on one rank and on two.

For policy scripts and variants, driver.py records rollouts, the batches of their losses, and gradients.
"""

import copy
import importlib
import math
import statistics
from collections import Counter
from itertools import chain
from statistics import fmean as mean

import driver
import pytest
import references
import sync
import torch
import transformers
from conftest import POLICY_SCRIPTS, ROOT, read_jsonl, write_jsonl
from zoo import STAGE_DATA, few, held_out, record, recorded, run, run_stage

import grpo
import grpo_correction

VARIANTS = sync.variants()  # with their parents
TWO_RANKS = ("grpo_fsdp", "flash_reinforce_async")  # they need two ranks
PAGE = (ROOT / "docs" / "metrics.md").read_text()


def flags_of(name: str, folder) -> dict:
    """Return flags with which the policy moves far, and each gradient is clipped. A rollout has two steps."""
    script = importlib.import_module(name)
    flags = {"micro_batch_size": 3, "learning_rate": 4e-3, "warmup_iterations": 4}
    flags |= {"max_grad_norm": 0.05, "eval_every": 2, "eval_dataset": folder / f"{name}_heldout.jsonl"}
    rewards = "two_rewards" if name == "gdpo" else "right_or_wrong"
    flags |= {"reward": f"{driver.__file__}:{rewards}", "eval_reward": f"{driver.__file__}:reward"}
    if name not in references.FOR_0_AND_1:
        flags |= {"reward_scale": 2.0, "missing_eos_penalty": 0.5}
    k = max(4, least) if (least := script.Args.min_samples_per_prompt) > 1 else 1
    flags |= {"samples_per_prompt": k, "batch_size": 4 * max(4, k)}
    return flags | {"max_response_length": 16, "num_iterations": 2}


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def runs(request, tmp_path_factory):
    """The folder of the runs, and what each rank has recorded of each script that is tested. It is one launch."""
    folder, cases = tmp_path_factory.mktemp("metrics"), {}
    items = [item for item in request.session.items if "runs" in item.fixturenames]
    wanted = {item.callspec.params["name"] for item in items if item.path == request.path}
    for name in sorted(wanted.difference(TWO_RANKS if request.param == 1 else ())):
        heldout = (ROOT / importlib.import_module(name).Args.dataset).with_name("heldout.jsonl")
        write_jsonl(folder / f"{name}_heldout.jsonl", read_jsonl(heldout)[::91])
        flags = flags_of(name, folder) | {"run_dir": folder / name}
        cases[name] = {"script": name, "sample": True, "flags": flags}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "tests" / "stand_in"))  # for grpo_vllm.py
        return folder, dict(zip(cases, record(folder, [*cases.values()], request.param)))


def assert_on_page(line: dict) -> None:
    missing = [key for key in line if key != "iteration" and f"`{'/'.join(key.split('/')[:2])}" not in PAGE]
    assert not missing, f"docs/metrics.md does not describe {missing}"


def last_iteration(folder, seen: list[dict]):
    """Return the line of metrics.jsonl, the events of each rank, and the norms of the gradients."""
    line, ranks = read_jsonl(folder / "metrics.jsonl")[-1], []
    assert_on_page(line)
    for events in (rank["events"] for rank in seen):
        ends = [i for i, (name, _) in enumerate(events) if name == "log"]
        if ends:  # a rank that only samples logs nothing
            ranks.append(events[ends[-2] : ends[-1] + 1])
    steps = sum(name == "step" for name, _ in ranks[0])
    return line, ranks, [float(x.double().norm()) for x in seen[0]["gradients"][-steps:]]


def steps_of(ranks, kind: str) -> list[list[dict]]:
    """Return the tensors of one kind of event on all ranks, for each step. Events after the last step are one more."""
    steps = {}
    for events in ranks:
        step = 0
        for name, tensors in events:
            step += name == "step"
            if name == kind:
                steps.setdefault(step, []).append(tensors)
    return [*steps.values()]


def rows_of(key: str, rollouts: list[dict]) -> list[list[float]]:
    return [row for rollout in rollouts for row in references.rows_of(key, rollout)]


def texts_of(tokenizer, rollouts: list[dict]) -> list[list[str]]:
    """Return the texts of prompt and response of each row. A response contains the results of tools."""
    texts = []
    for rollout in rollouts:
        T = rollout["response_mask"].shape[1]
        for ids, mask in zip(rollout["sequences"], rollout["attention_mask"].bool()):
            parts = ids[:-T][mask[:-T]], ids[-T:][mask[-T:]]
            texts.append([tokenizer.decode(part, skip_special_tokens=True) for part in parts])
    return texts


def of_evaluation(args, tokenizer, ranks) -> dict[str, float]:
    scores, groups = {}, {row["prompt"]: row["group"] for row in read_jsonl(args.eval_dataset)}
    for prompt, text in texts_of(tokenizer, steps_of(ranks, "greedy")[-1]):
        scores.setdefault(f"eval/score/{groups[prompt]}", []).extend(driver.reward([text], [prompt]))
    return {key: mean(its_scores) for key, its_scores in scores.items()}


def of_rollout(name: str, args, tokenizer, ranks) -> dict[str, float]:
    [rollouts] = steps_of(ranks, "compute_advantages")
    # In dapo.py, the scores include the responses that are not trained on.
    sampled = chain(*steps_of(ranks, "generate")) if name == "dapo" else rollouts
    prompts, texts = zip(*texts_of(tokenizer, sampled))
    scores, line = driver.right_or_wrong(texts), {}
    if name == "gdpo":
        parts = driver.two_rewards(texts, prompts)
        scores = torch.tensor(parts).sum(1).tolist()  # in float32, as in the script
        line |= {"score/0": mean(x for x, _ in parts), "score/1": mean(y for _, y in parts)}
    line["score"] = mean(scores)
    k = args.samples_per_prompt
    if k > 1:
        line["equal_groups"] = mean(len({*scores[i : i + k]}) == 1 for i in range(0, len(scores), k))
    entropy = rows_of("entropy", rollouts)
    line |= {"response_length": mean(map(len, entropy)), "entropy": mean(chain(*entropy))}
    scores = [x for rollout in rollouts for x in rollout["raw_scores"].tolist()]  # of responses to train on
    line["score_std"] = statistics.pstdev(scores)
    for part, is_in in {"above": float.__gt__, "below": float.__lt__}.items():
        lengths = [len(row) for row, x in zip(entropy, scores) if is_in(x, mean(scores))]
        line[f"response_length/{part}"] = mean(lengths)
    if name == "ppo":
        scores = chain(*(rollout["scores"].tolist() for rollout in rollouts))
        to_come = []  # the return of each token, without values of the critic
        for kl, x in zip(rows_of("kl", rollouts), scores, strict=True):
            to_come += [x - args.kl_coef * sum(kl[t:]) for t in range(len(kl))]
        values = chain(*rows_of("values", rollouts))
        errors = [x - y for x, y in zip(to_come, values, strict=True)]
        line["explained_variance"] = 1 - statistics.pvariance(errors) / statistics.pvariance(to_come)
    last = [ids[mask.bool()][-1] for x in rollouts for ids, mask in zip(x["sequences"], x["attention_mask"])]
    line["truncated"] = mean(token != tokenizer.eos_token_id for token in last)
    if args.kl_coef > 0 or name == "distill":
        pairs = zip(rows_of("old_logprobs", rollouts), rows_of("ref_logprobs", rollouts))
        line["kl"] = mean(sum(old) - sum(ref) for old, ref in pairs)
    if name == "dapo":
        line["rollouts"] = len(texts) / args.batch_size
    if name == "sdpo":
        line["demonstrations"] = mean(chain(*(x["has_demonstration"].tolist() for x in rollouts)))
    if name == "grpo_correction":
        weights = chain(*(references.correction_weights(args, rollout) for rollout in rollouts))
        line["correction_weight"] = mean(chain(*weights))
    if name == "reinforce_pp_tools":
        line["calls"] = mean(chain(*(x["num_calls"].tolist() for x in rollouts)))
    return line


def num_tokens(batches: list[dict]) -> int:
    return sum(int(batch["response_mask"].sum()) for batch in batches)


@torch.no_grad()
def of_steps(name: str, args, ranks, norms: list[float]) -> dict[str, float]:
    """Return means over the optimizer steps. references.py computes the losses of a step."""
    method, steps, sums = VARIANTS.get(name, name), steps_of(ranks, "policy_loss"), Counter()
    loss_of, without_kl = getattr(references, f"{method}_loss"), copy.copy(args)
    without_kl.kl_coef = 0.0
    for batches in steps:
        counts = sum(len(batch["logprobs"]) for batch in batches), num_tokens(batches)
        for batch in batches:
            new = batch["logprobs"].double()
            loss, share = loss_of(args, batch, new, *counts)
            policy_loss, _ = loss_of(without_kl, batch, new, *counts)
            sums["policy_loss"] += float(policy_loss)
            if float(loss - policy_loss):  # a KL term
                sums["kl_loss"] += float(loss - policy_loss)
            if share is not None:
                sums["rejected" if method == "flash_reinforce" else "clip_fraction"] += share
    for batches in steps_of(ranks, "value_loss"):
        for batch in batches:
            loss = references.ppo_value_loss(args, batch, batch["new_values"], num_tokens(batches))
            sums["value_loss"] += float(loss)
    line = {key: x / len(steps) for key, x in sums.items()}
    if name == "ppo":
        line["critic_grad_norm"], norms = mean(norms[1::2]), norms[::2]
    new, old = (chain(*rows_of(key, steps[0])) for key in ("logprobs", "old_logprobs"))
    line["logprob_difference"] = mean(abs(x - y) for x, y in zip(new, old, strict=True))
    return line | {"grad_norm": mean(norms)}


@pytest.mark.parametrize("name", [*POLICY_SCRIPTS, *VARIANTS])
def test_policy_scripts(runs, name):
    folder, seen = runs
    if name not in seen:
        pytest.skip("fsdp and async need two ranks")
    args = importlib.import_module(name).Args(**flags_of(name, folder))
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    line, ranks, norms = last_iteration(folder / name, seen[name])
    expected = {"iteration": 2, "learning_rate": args.learning_rate / 2}
    expected |= of_evaluation(args, tokenizer, ranks)
    expected |= of_rollout(name, args, tokenizer, ranks) | of_steps(name, args, ranks, norms)
    if name == "flash_reinforce_async":
        expected["staleness"] = 1
        assert line.pop("trainer_waited") >= 0 and line.pop("sampler_waited") >= 0
    for key in ("tokens_per_second", "sampling_seconds", "reward_seconds", "update_seconds"):
        assert line.pop(key) > 0
    assert line == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("score", [0.0, 0.9, -3e4 / 7])
def test_equal_scores_are_neither_above_nor_below_their_mean(score):
    """In float32, the mean of equal scores can differ from them by rounding."""
    rollout = {"raw_scores": torch.full((24,), score), "response_mask": torch.ones(24, 3, dtype=torch.bool)}
    rollout |= {"truncated": torch.zeros(24), "entropy": torch.zeros(24, 3), "kl": torch.zeros(24, 3)}
    args = grpo.Args(batch_size=24, device="cpu")
    assert not any("response_length/" in name for name in grpo.measure(args, rollout, 0.0, 1.0, 2.0))
    rollout["raw_scores"][0] += 0.5
    metrics = grpo.measure(args, rollout, 0.0, 1.0, 2.0)
    assert metrics["response_length/above"] == metrics["response_length/below"] == 3


def test_the_difference_of_a_corrected_run_is_to_the_sampler(tmp_path, monkeypatch):
    generate = grpo_correction.generate

    def engine(*args, **options):
        rollout = generate(*args, **options)
        return rollout | {"old_logprobs": rollout["old_logprobs"] - 0.25 * rollout["response_mask"]}

    monkeypatch.setattr(grpo_correction, "generate", engine)
    run("grpo_correction", num_iterations=1, run_dir=tmp_path)
    [line] = read_jsonl(tmp_path / "metrics.jsonl")
    assert line["logprob_difference"] == pytest.approx(0.25, abs=1e-4)


@pytest.mark.parametrize("name", STAGE_DATA)
def test_stages(name, tmp_path, monkeypatch):
    """The loops use the outputs of the models in the last of two steps. test_ranks.py tests micro-batches and ranks."""
    script, rows = importlib.import_module(name), read_jsonl(few(name, 48, tmp_path))
    for i, row in enumerate(rows):
        row |= {"margin": i % 3 / 2, "group": i % 3 / 2}
    flags = {"dataset": write_jsonl(tmp_path / "data.jsonl", rows if name == "sft" else rows[:32])}
    flags |= {"batch_size": 16, "micro_batch_size": 16, "num_epochs": 1, "learning_rate": 4e-3}
    flags |= held_out(name, write_jsonl(tmp_path / "heldout.jsonl", rows[32:]), 16)
    function = {"sft": "completion_loss", "reward_model": "pair_scores", "dpo": "dpo_loss"}[name]
    calls = recorded(monkeypatch, script, function)
    run_stage(script, **flags, run_dir=tmp_path / "run")
    line, expected = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1], {}
    for prefix, (inputs, output) in zip(("", "eval/"), calls[-2:]):
        if name == "sft":  # the loss of a token
            expected[f"{prefix}loss"] = output.item()
            assert inputs[2] == inputs[1]["completion_mask"].sum()
            continue
        margins, of_loss = [row["margin"] for row in rows[32:]], [0.0] * 16
        if name == "dpo":
            chosen, rejected = (inputs[4] * (x - ref) for x, ref in zip(inputs[:2], inputs[2:4]))
        else:
            chosen, rejected = output
            margins = of_loss = inputs[2]["margins"].tolist()
        chosen, rejected = chosen.tolist(), rejected.tolist()
        pairs = list(zip(chosen, rejected))
        losses = [math.log1p(math.exp(r + m - c)) for (c, r), m in zip(pairs, of_loss)]
        expected[f"{prefix}loss"] = mean(losses)
        expected[f"{prefix}margin"] = mean(c - r for c, r in pairs)
        expected[f"{prefix}accuracy"] = mean(c > r for c, r in pairs)
        if prefix:
            for group in set(margins):
                right = [c > r for (c, r), margin in zip(pairs, margins) if margin == group]
                expected[f"eval/accuracy/{group}"] = mean(right)
        elif name == "dpo":
            expected |= {"chosen_reward": mean(chosen), "rejected_reward": mean(rejected)}
        else:
            expected["loss"] += script.Args.center_rewards_coefficient * mean((c + r) ** 2 for c, r in pairs)
            scores = chosen + rejected
            expected |= {"score_mean": mean(scores), "score_std": statistics.pstdev(scores)}
    found = {key: x for key, x in line.items() if key in expected}
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert_on_page(line)
