"""Every metric of docs/metrics.md, computed once more by plain loops from what a run had at that moment.

Policy scripts and variants: from their rollouts, the batches of their losses and their gradients, which driver.py
records. sft.py, reward_model.py and dpo.py: from the model that they save after each step. On one rank and on two.
"""

import copy
import importlib
import itertools
import math

import pytest
import references
import sync
import torch
import transformers
from conftest import POLICY_SCRIPTS, ROOT, read_jsonl, write_jsonl
from driver import reward, right_or_wrong, two_rewards
from zoo import STAGE_DATA, record

VARIANTS = sync.variants()  # with their parents
PAGE = (ROOT / "docs" / "metrics.md").read_text()
RATE, NORM, WARMUP = (
    4e-3,
    0.05,
    4,
)  # a learning rate that changes the policy, a norm that clips every gradient


def flags_of(name: str, folder) -> dict:
    """Two iterations, if possible of two steps each, whose micro-batches are uneven."""
    Args = importlib.import_module(name).Args
    data = "tools" if name == "reinforce_pp_tools" else "sums"
    flags = {"dataset": folder / f"{data}.jsonl", "eval_dataset": folder / f"{data}_heldout.jsonl"}
    flags |= {"batch_size": 16, "micro_batch_size": 3, "num_iterations": 2, "max_response_length": 20}
    flags |= {"learning_rate": RATE, "warmup_iterations": WARMUP, "max_grad_norm": NORM, "eval_every": 2}
    rewards = "two_rewards" if name == "gdpo" else "right_or_wrong"
    flags |= {"reward": f"{ROOT}/tests/driver.py:{rewards}", "eval_reward": f"{ROOT}/tests/driver.py:reward"}
    return flags | {"samples_per_prompt": 4 if Args.min_samples_per_prompt > 1 else 1, "reward_scale": 2.0}


def stage_flags(name: str, folder) -> dict:
    """All examples are one step, so that an epoch is an iteration."""
    flags = {"dataset": folder / f"{name}.jsonl", "batch_size": 16, "micro_batch_size": 3, "eval_every": 1}
    flags |= {
        "learning_rate": RATE,
        "warmup_iterations": WARMUP,
        "max_grad_norm": NORM,
        "run_dir": folder / name,
    }
    return flags | ({"eval_size": 8} if name == "sft" else {"eval_dataset": folder / f"{name}_heldout.jsonl"})


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def runs(request, tmp_path_factory):
    """The folder, the number of ranks, and what each rank saw of each script, all in one launch."""
    folder = tmp_path_factory.mktemp("metrics")
    for data, source in (("sums", ROOT / "toy"), ("tools", ROOT / "toy" / "tools")):
        rows = {row["prompt"]: row for row in read_jsonl(source / "train.jsonl")}
        write_jsonl(folder / f"{data}.jsonl", [*rows.values()][:80])
        write_jsonl(folder / f"{data}_heldout.jsonl", read_jsonl(source / "heldout.jsonl")[::46])
    for name, data in STAGE_DATA.items():
        rows = read_jsonl(ROOT / "toy" / f"{data}.jsonl")
        rows = [row | {"margin": i % 3 / 2} for i, row in enumerate(rows[:33])]
        write_jsonl(folder / f"{name}.jsonl", rows[: 24 if name == "sft" else 16])
        write_jsonl(folder / f"{name}_heldout.jsonl", rows[16:])
    # One rank cannot sample and train, and has nothing to shard.
    names = [*POLICY_SCRIPTS, *VARIANTS]
    if request.param == 1:
        names = [name for name in names if name not in ("grpo_fsdp", "flash_reinforce_async")]
    cases = [{"script": name, "sample": True, "flags": flags_of(name, folder)} for name in names]
    for name, epochs in itertools.product(STAGE_DATA, (1, 2)):
        flags = stage_flags(name, folder) | {"num_epochs": epochs, "run_dir": folder / f"{name}{epochs}"}
        cases.append({"script": name, "sample": False, "flags": flags})
        names.append(f"{name}{epochs}")
    for name, case in zip(names, cases):
        case["flags"] = {"run_dir": folder / name} | case["flags"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "tests" / "stand_in"))  # has a vllm
        return folder, request.param, dict(zip(names, record(folder, cases, request.param)))


def lines_of(seen: dict) -> list[list[tuple]]:
    """What happened before each line of metrics.jsonl, and that it was written."""
    lines = [[]]
    for event in seen["events"]:
        lines[-1].append(event)
        if event[0] == "log":
            lines.append([])
    return lines[:-1]


def named(ranks: list[list[tuple]], name: str) -> list[dict]:
    return [tensors for events in ranks for other, _, tensors in events if other == name]


def steps_of(ranks: list[list[tuple]], name: str) -> list[list[dict]]:
    """For each optimizer step the micro-batches of all ranks."""
    steps = []
    for events in ranks:
        parts = [[]]
        for other, _, tensors in events:
            if other == name:
                parts[-1].append(tensors)
            elif other == "step" and parts[-1]:
                parts.append([])
        steps.append(parts[:-1])
    return [list(itertools.chain(*parts)) for parts in zip(*steps, strict=True)]


def tokens(name: str, rollouts: list[dict]) -> list[list[float]]:
    """The numbers on the tokens of each response."""
    return [row for rollout in rollouts for row in references.rows_of(name, rollout)]


def mean(numbers) -> float:
    numbers = list(numbers)
    return math.fsum(numbers) / len(numbers)


def texts_of(tokenizer, rollouts: list[dict]) -> list[tuple[str, str]]:
    """Prompt and response of each row, a tool's results included."""
    pairs = []
    for rollout in rollouts:
        T = rollout["response_mask"].shape[1]
        for ids, mask in zip(rollout["sequences"], rollout["attention_mask"].bool()):
            pairs.append(
                [
                    tokenizer.decode(x, skip_special_tokens=True)
                    for x in (ids[:-T][mask[:-T]], ids[-T:][mask[-T:]])
                ]
            )
    return pairs


def held_out_scores(tokenizer, ranks, rows) -> dict[str, float]:
    """Of the greedy responses after the last step."""
    scores = {}
    for events in ranks:
        last = max([i for i, event in enumerate(events) if event[0] == "step"], default=0)
        for prompt, text in texts_of(tokenizer, named([events[last:]], "greedy")):
            group = next(row["group"] for row in rows if row["prompt"] == prompt)
            scores.setdefault(f"eval/score/{group}", []).extend(reward([text], [prompt]))
    assert sum(map(len, scores.values())) in (0, len(rows))
    return {name: mean(values) for name, values in scores.items()}


def expected_line(name, args, iteration, ranks, gradients, tokenizer) -> dict:
    """The metrics of an iteration, except for times and the evaluation."""
    method = VARIANTS.get(name, name)
    rollouts = named(ranks, "compute_advantages")  # one for each rank
    sampled = named(ranks, "generate") if name == "dapo" else rollouts
    k, has_reference = args.samples_per_prompt, args.kl_coef > 0 or name == "distill"
    prompts, completions = zip(*texts_of(tokenizer, sampled))
    rewards = two_rewards if name == "gdpo" else right_or_wrong
    scores = rewards(completions=completions, prompts=prompts)
    entropy, B = tokens("entropy", rollouts), args.batch_size
    last = [ids[mask.bool()][-1] for x in rollouts for ids, mask in zip(x["sequences"], x["attention_mask"])]
    line = {
        "truncated": mean(token != tokenizer.eos_token_id for token in last),
        "response_length": mean(map(len, entropy)),
        "entropy": mean(itertools.chain(*entropy)),
        "learning_rate": RATE * iteration / WARMUP,
    }
    if name == "gdpo":
        line |= {f"score/{i}": mean(numbers) for i, numbers in enumerate(zip(*scores))}
        scores = [x + y for x, y in scores]
    line["score"] = mean(scores)
    if k > 1:
        line["equal_groups"] = mean(len(set(scores[i : i + k])) == 1 for i in range(0, len(scores), k))
    if has_reference:
        pairs = zip(tokens("old_logprobs", rollouts), tokens("ref_logprobs", rollouts), strict=True)
        line["kl"] = mean(math.fsum(old) - math.fsum(ref) for old, ref in pairs)
    if name == "dapo":
        line["rollouts"] = len(scores) / B
    if name == "sdpo":
        line["demonstrations"] = sum(int(x["has_demonstration"].sum()) for x in rollouts) / B
    if name == "reinforce_pp_tools":
        line["calls"] = sum(int(x["num_calls"].sum()) for x in rollouts) / B
    if name == "flash_reinforce_async":
        line["staleness"] = min(args.staleness, iteration - 1)

    # The rest is of optimizer steps
    steps = steps_of(ranks, "policy_loss")
    new, old = tokens("logprobs", steps[0]), tokens("old_logprobs", steps[0])
    line["logprob_difference"] = mean(
        abs(x - y) for x, y in zip(itertools.chain(*new), itertools.chain(*old))
    )
    without_kl = copy.copy(args)
    without_kl.kl_coef = 0.0
    sums = {}

    def add(name, value):
        sums[name] = sums.get(name, 0.0) + float(value)

    value_steps = steps_of(ranks, "value_loss") if name == "ppo" else [[] for _ in steps]
    for batches, value_batches in zip(steps, value_steps, strict=True):
        counts = (
            sum(len(x["response_mask"]) for x in batches),
            sum(int(x["response_mask"].sum()) for x in batches),
        )
        for batch in batches:
            loss_of = getattr(references, f"{method}_loss")
            loss, limited = loss_of(args, batch, batch["logprobs"].double(), *counts)
            policy_loss, _ = loss_of(without_kl, batch, batch["logprobs"].double(), *counts)
            add("policy_loss", policy_loss)
            if method in ("grpo", "reinforce_pp_baseline"):
                add("kl_loss", loss - policy_loss)
            if limited is not None:
                add("rejected" if method == "flash_reinforce" else "clip_fraction", limited)
        for batch in value_batches:
            add("value_loss", references.ppo_value_loss(args, batch, batch["new_values"], counts[1]))
    norms = [float(x.double().norm()) for x in gradients]
    if name == "ppo":
        line["critic_grad_norm"] = mean(norms[1::2])
        norms = norms[::2]
    return line | {"grad_norm": mean(norms)} | {name: x / len(steps) for name, x in sums.items()}


def check_speed(line: dict, unit: str, count: float, events: list[tuple], before: float) -> None:
    """The time of an iteration spans its first call and its last step, and lies between two lines of the log."""
    seconds = count / line.pop(f"{unit}_per_second")
    steps = [when for name, when, _ in events if name == "step"]
    assert steps[-1] - events[0][1] <= seconds <= events[-1][1] - before
    assert line.pop("seconds") == pytest.approx(seconds)
    for name in ("trainer_waited", "sampler_waited"):
        assert 0 <= line.pop(name, 0) < events[-1][1] - before


def check_names(lines: list[dict]) -> None:
    """docs/metrics.md has all of them."""
    for name in set().union(*lines) - {"iteration"}:
        known = "eval/score/<group>" if name.startswith("eval/score/") else name
        assert f"`{known}`" in PAGE or name.startswith("eval/accuracy/"), name


@pytest.mark.parametrize("name", [*POLICY_SCRIPTS, *VARIANTS])
def test_policy_scripts(runs, name):
    folder, _, seen = runs
    if name not in seen:
        pytest.skip("needs two ranks")
    args = importlib.import_module(name).Args(**flags_of(name, folder))
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    held_out = read_jsonl(args.eval_dataset)
    lines = read_jsonl(folder / name / "metrics.jsonl")
    check_names(lines)
    gradients = seen[name][0]["gradients"]
    ranks_of = zip(*[lines_of(rank) for rank in seen[name] if lines_of(rank)])  # a sampler writes no line
    before = 0.0
    for iteration, (line, ranks) in enumerate(zip(lines, ranks_of, strict=True)):
        assert line.pop("iteration") == iteration
        expected = held_out_scores(tokenizer, ranks, held_out)
        assert len(expected) == 3 * (iteration != 1)
        if iteration > 0:
            count = sum(event == "step" for event, _, _ in ranks[0])
            its_gradients, gradients = gradients[:count], gradients[count:]
            expected |= expected_line(name, args, iteration, ranks, its_gradients, tokenizer)
            check_speed(line, "tokens", expected["response_length"] * args.batch_size, ranks[0], before)
        before = ranks[0][-1][1]
        assert line == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert not gradients


def logprobs_of(model, prompt: list[int], response: list[int]) -> float:
    """Of a response, token by token."""
    logits = model(torch.tensor([prompt + response])).logits[0].double().tolist()
    total = 0.0
    for t, token in enumerate(response, len(prompt)):
        row = logits[t - 1]
        total += row[token] - math.log(math.fsum(map(math.exp, row)))
    return total


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


@torch.no_grad()
def stage_metrics(name, args, path, rows) -> tuple[dict, dict]:
    """What is logged of a step with these rows by a model before it, and of an evaluation on them after it."""
    auto = "SequenceClassification" if name == "reward_model" else "CausalLM"
    load = getattr(transformers, f"AutoModelFor{auto}").from_pretrained
    tokenizer, model = transformers.AutoTokenizer.from_pretrained(path), load(path, dtype=torch.float64)
    reference = load(args.model, dtype=torch.float64) if name == "dpo" else None
    results = []
    for row in rows:
        prompt, *texts = (
            tokenizer(row[key])["input_ids"]
            for key in ("prompt", "chosen", "rejected", "completion")
            if key in row
        )
        for ids in texts:
            ids = [*ids, tokenizer.eos_token_id]
            if name == "sft":
                results.append((-logprobs_of(model, prompt, ids), len(ids)))
            elif name == "dpo":
                results.append(
                    args.beta * (logprobs_of(model, prompt, ids) - logprobs_of(reference, prompt, ids))
                )
            else:
                hidden = model.base_model(torch.tensor([prompt + ids])).last_hidden_state[0, -1]
                results.append(float(hidden @ model.score.weight[0]))
    if name == "sft":
        losses, lengths = zip(*results)
        return {"loss": math.fsum(losses) / sum(lengths)}, {"eval/loss": math.fsum(losses) / sum(lengths)}
    chosen, rejected = results[::2], results[1::2]
    margins = [row["margin"] if name == "reward_model" else 0.0 for row in rows]
    loss = mean(softplus(r + m - c) for c, r, m in zip(chosen, rejected, margins))
    right = [c > r for c, r in zip(chosen, rejected)]
    both = {"margin": mean(chosen) - mean(rejected), "accuracy": mean(right)}
    evaluation = {f"eval/{key}": x for key, x in (both | {"loss": loss}).items()}
    for group in {row["group"] for row in rows}:
        evaluation[f"eval/accuracy/{group}"] = mean(x for x, row in zip(right, rows) if row["group"] == group)
    if name == "dpo":
        return both | {
            "loss": loss,
            "chosen_reward": mean(chosen),
            "rejected_reward": mean(rejected),
        }, evaluation
    loss += args.center_rewards_coefficient * mean((c + r) ** 2 for c, r in zip(chosen, rejected))
    variance = mean((x - mean(results)) ** 2 for x in results)
    return both | {"loss": loss, "score_mean": mean(results), "score_std": variance**0.5}, evaluation


@pytest.mark.parametrize("name", STAGE_DATA)
def test_stages(runs, name):
    """The model after the first step is the result of the run of one epoch."""
    folder, _, seen = runs
    args = importlib.import_module(name).Args(**stage_flags(name, folder))
    lines = read_jsonl(folder / f"{name}2" / "metrics.jsonl")
    check_names(lines)
    rows = read_jsonl(folder / f"{name}.jsonl")
    held_out = rows[16:] if name == "sft" else read_jsonl(folder / f"{name}_heldout.jsonl")
    models = [folder / f"{name}{epochs}" / "model" for epochs in (1, 2)]
    events = lines_of(seen[f"{name}2"][0])
    for i, (line, gradient) in enumerate(zip(lines[1:], seen[f"{name}2"][0]["gradients"], strict=True), 1):
        unit, count = "pairs", 16
        if name == "sft":
            unit, count = "tokens", sum(len(row["completion"].split()) + 1 for row in rows[:16])
        check_speed(line, unit, count, events[i], events[i - 1][-1][1])
        expected = {"iteration": i, "learning_rate": RATE * i / WARMUP, "grad_norm": float(gradient.norm())}
        expected |= stage_metrics(name, args, models[i - 1], held_out)[1]
        if i == 2:
            expected |= stage_metrics(name, args, models[0], rows[:16])[0]
        assert {key: line[key] for key in expected} == pytest.approx(expected, rel=1e-9)
    assert expected.keys() == line.keys()
