"""Every metric of docs/metrics.md once more, as plain loops over what a run had at that moment, on one rank and on two.

Of policy scripts and variants driver.py records rollouts, the batches of their losses, and gradients. The model between
two steps of sft.py, reward_model.py and dpo.py is the result of a shorter run.
"""

import copy
import importlib
import math
from collections import Counter
from itertools import chain

import driver
import pytest
import references
import sync
import torch
import transformers
from conftest import POLICY_SCRIPTS, ROOT, read_jsonl, write_jsonl
from zoo import STAGE_DATA, record

VARIANTS = sync.variants()  # with their parents
TWO_RANKS = ("grpo_fsdp", "flash_reinforce_async")  # one has nothing to shard, and cannot sample and train
PAGE = (ROOT / "docs" / "metrics.md").read_text()
# The policy moves far, and each gradient is clipped. Micro-batches are uneven. In stages all rows are a step.
COMMON = {"learning_rate": 4e-3, "warmup_iterations": 4, "max_grad_norm": 0.05, "batch_size": 16}
COMMON |= {"micro_batch_size": 3, "eval_every": 1}


def flags_of(name: str, folder) -> dict:
    data = "tools" if name == "reinforce_pp_tools" else name if name in STAGE_DATA else "sums"
    flags = COMMON | {"dataset": folder / f"{data}.jsonl"}
    if name == "sft":
        return flags | {"eval_size": 8}
    flags |= {"eval_dataset": folder / f"{data}_heldout.jsonl"}
    if name in STAGE_DATA:
        return flags
    rewards = "two_rewards" if name == "gdpo" else "right_or_wrong"
    flags |= {"reward": f"{driver.__file__}:{rewards}", "eval_reward": f"{driver.__file__}:reward"}
    k = 4 if importlib.import_module(name).Args.min_samples_per_prompt > 1 else 1
    flags |= {"samples_per_prompt": k, "reward_scale": 2.0, "max_response_length": 16}
    return flags | {"num_iterations": 2, "eval_every": 2}


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def runs(request, tmp_path_factory):
    """The folder, and what each rank saw of the scripts to test, in one launch. A stage runs for 1 and 2 epochs."""
    folder = tmp_path_factory.mktemp("metrics")
    for data, source in (("sums", ROOT / "toy"), ("tools", ROOT / "toy" / "tools")):
        write_jsonl(folder / f"{data}.jsonl", read_jsonl(source / "train.jsonl")[:80])
        write_jsonl(folder / f"{data}_heldout.jsonl", read_jsonl(source / "heldout.jsonl")[::91])
    for name, data in STAGE_DATA.items():
        rows = enumerate(read_jsonl(ROOT / "toy" / f"{data}.jsonl")[:33])
        rows = [row | {"margin": i % 3 / 2} for i, row in rows]
        write_jsonl(folder / f"{name}.jsonl", rows[: 24 if name == "sft" else 16])
        write_jsonl(folder / f"{name}_heldout.jsonl", rows[16:])
    wanted = {item.callspec.params["name"] for item in request.session.items if item.path == request.path}
    cases = {}
    for name in sorted(wanted.difference(TWO_RANKS if request.param == 1 else ())):
        case = {"script": name, "sample": name not in STAGE_DATA}
        for n in (1, 2) if name in STAGE_DATA else ("",):
            flags = (
                flags_of(name, folder) | {"run_dir": folder / f"{name}{n}"} | ({"num_epochs": n} if n else {})
            )
            cases[f"{name}{n}"] = case | {"flags": flags}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "tests" / "stand_in"))  # it has a vllm
        return folder, dict(zip(cases, record(folder, [*cases.values()], request.param)))


def read_run(folder, seen: list[dict], unit: str):
    """Each line of metrics.jsonl, how many tokens or pairs it counts, and its events on each rank and gradient norms.

    Its times must lie between what happened inside of it and what happened around it.
    """
    ranks = []
    for rank in seen:
        parts = [[]]
        for event in rank["events"]:
            parts[-1].append(event)
            if event[0] == "log":
                parts.append([])
        ranks.append(parts[:-1])
    norms = [float(x.double().norm()) for x in seen[0]["gradients"]]
    before = 0.0
    ranks = zip(*filter(None, ranks))  # a rank that only samples has no line
    for line, events in zip(read_jsonl(folder / "metrics.jsonl"), ranks, strict=True):
        steps = [when for kind, when, _ in events[0] if kind == "step"]
        after, count = events[0][-1][1], 0.0
        for key in line:
            assert f"`{'/'.join(key.split('/')[:2])}" in PAGE or key == "iteration", key
        if steps:
            seconds = line.pop("seconds")
            assert steps[-1] - events[0][0][1] <= seconds <= after - before
            count = line.pop(f"{unit}_per_second") * seconds
        for key in ("trainer_waited", "sampler_waited"):
            assert 0 <= line.pop(key, 0.0) < after - before
        yield line, count, events, [norms.pop(0) for _ in steps]
        before = after
    assert not norms


def named(ranks, kind: str) -> list[dict]:
    """The tensors of one kind of event on all ranks."""
    return [tensors for events in ranks for name, _, tensors in events if name == kind]


def steps_of(ranks, kind: str) -> list[list[dict]]:
    """The same for each optimizer step."""
    steps = []
    for events in ranks:
        ends = [i for i, event in enumerate(events) if event[0] == "step"]
        parts = [named([events[start:end]], kind) for start, end in zip([0, *ends], ends)]
        steps.append(filter(None, parts))  # ppo.py has a second step, of its critic
    return [list(chain(*parts)) for parts in zip(*steps, strict=True)]


def rows_of(key: str, rollouts: list[dict]) -> list[list[float]]:
    """The numbers on the tokens of each response."""
    return [row for rollout in rollouts for row in references.rows_of(key, rollout)]


def mean(numbers) -> float:
    numbers = list(numbers)
    return math.fsum(numbers) / len(numbers)


def texts_of(tokenizer, rollouts: list[dict]) -> list[list[str]]:
    """Prompt and response of each row; a response has the results of a tool."""
    texts = []
    for rollout in rollouts:
        T = rollout["response_mask"].shape[1]
        for ids, mask in zip(rollout["sequences"], rollout["attention_mask"].bool()):
            parts = ids[:-T][mask[:-T]], ids[-T:][mask[-T:]]
            texts.append([tokenizer.decode(part, skip_special_tokens=True) for part in parts])
    return texts


def held_out_scores(args, tokenizer, ranks) -> dict[str, float]:
    """Of the greedy responses after the last step."""
    scores, rows = {}, read_jsonl(args.eval_dataset)
    for events in ranks:
        start = max([i for i, event in enumerate(events) if event[0] == "step"], default=0)
        for prompt, text in texts_of(tokenizer, named([events[start:]], "greedy")):
            [group] = [row["group"] for row in rows if row["prompt"] == prompt]
            scores.setdefault(f"eval/score/{group}", []).extend(driver.reward([text], [prompt]))
    assert sum(map(len, scores.values())) in (0, len(rows))
    return {key: mean(its_scores) for key, its_scores in scores.items()}


def of_rollout(name: str, args, tokenizer, ranks) -> dict[str, float]:
    rollouts = named(ranks, "compute_advantages")
    sampled = named(ranks, "generate") if name == "dapo" else rollouts  # also what is not trained on
    prompts, texts = zip(*texts_of(tokenizer, sampled))
    scores = driver.right_or_wrong(texts)
    line = {}
    if name == "gdpo":
        parts = driver.two_rewards(texts, prompts)
        scores = [x + y for x, y in parts]
        line |= {"score/0": mean(x for x, _ in parts), "score/1": mean(y for _, y in parts)}
    line["score"] = mean(scores)
    k = args.samples_per_prompt
    if k > 1:
        line["equal_groups"] = mean(len({*scores[i : i + k]}) == 1 for i in range(0, len(scores), k))
    entropy = rows_of("entropy", rollouts)
    line |= {"response_length": mean(map(len, entropy)), "entropy": mean(chain(*entropy))}
    last = [ids[mask.bool()][-1] for x in rollouts for ids, mask in zip(x["sequences"], x["attention_mask"])]
    line["truncated"] = mean(token != tokenizer.eos_token_id for token in last)
    if args.kl_coef > 0 or name == "distill":
        pairs = zip(rows_of("old_logprobs", rollouts), rows_of("ref_logprobs", rollouts))
        line["kl"] = mean(sum(old) - sum(ref) for old, ref in pairs)
    if name == "dapo":
        line["rollouts"] = len(scores) / args.batch_size
    if name == "sdpo":
        line["demonstrations"] = mean(chain(*(x["has_demonstration"].tolist() for x in rollouts)))
    if name == "reinforce_pp_tools":
        line["calls"] = mean(chain(*(x["num_calls"].tolist() for x in rollouts)))
    return line


def of_steps(name: str, args, ranks, norms: list[float]) -> dict[str, float]:
    """Means over the optimizer steps. The losses of a step are those of references.py."""
    method = VARIANTS.get(name, name)
    loss_of, without_kl = getattr(references, f"{method}_loss"), copy.copy(args)
    without_kl.kl_coef = 0.0
    steps, sums = steps_of(ranks, "policy_loss"), Counter()
    value_steps = steps_of(ranks, "value_loss") or [[]] * len(steps)
    for batches, value_batches in zip(steps, value_steps, strict=True):
        lengths = [len(row) for row in rows_of("logprobs", batches)]
        for batch in batches:
            pair = batch, batch["logprobs"].double()
            loss, share = loss_of(args, *pair, len(lengths), sum(lengths))
            policy_loss, _ = loss_of(without_kl, *pair, len(lengths), sum(lengths))
            sums["policy_loss"] += float(policy_loss)
            if method in ("grpo", "reinforce_pp_baseline"):
                sums["kl_loss"] += float(loss - policy_loss)
            if share is not None:
                sums["rejected" if method == "flash_reinforce" else "clip_fraction"] += share
        for batch in value_batches:
            sums["value_loss"] += float(
                references.ppo_value_loss(args, batch, batch["new_values"], sum(lengths))
            )
    line = {key: x / len(steps) for key, x in sums.items()}
    line["grad_norm"] = mean(norms[:: 2 if name == "ppo" else 1])
    if name == "ppo":
        line["critic_grad_norm"] = mean(norms[1::2])
    new, old = (chain(*rows_of(key, steps[0])) for key in ("logprobs", "old_logprobs"))
    return line | {"logprob_difference": mean(abs(x - y) for x, y in zip(new, old, strict=True))}


@pytest.mark.parametrize("name", [*POLICY_SCRIPTS, *VARIANTS])
def test_policy_scripts(runs, name):
    folder, seen = runs
    if name not in seen:
        pytest.skip("needs two ranks")
    args = importlib.import_module(name).Args(**flags_of(name, folder))
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    for i, (line, tokens, ranks, norms) in enumerate(read_run(folder / name, seen[name], "tokens")):
        expected = {"iteration": i} | held_out_scores(args, tokenizer, ranks)
        assert len(expected) == (1 if i == 1 else 4)
        if i > 0:
            expected |= of_rollout(name, args, tokenizer, ranks) | of_steps(name, args, ranks, norms)
            expected["learning_rate"] = i / 4 * args.learning_rate
            if name == "flash_reinforce_async":
                expected["staleness"] = i - 1
            assert tokens == pytest.approx(expected["response_length"] * args.batch_size)
        assert line == pytest.approx(expected, rel=1e-4, abs=1e-5)


def logprob(model, prompt: list[int], response: list[int]) -> float:
    """Of a response, token by token."""
    logits = model(torch.tensor([prompt + response])).logits[0].tolist()
    pairs = zip(logits[len(prompt) - 1 :], response)
    return math.fsum(before[token] - math.log(sum(map(math.exp, before))) for before, token in pairs)


@torch.no_grad()
def outputs(name: str, args, path, rows: list[dict]) -> list[list[float]]:
    """What a model gives to each of a row's texts: a score, a reward, or minus the log-prob."""
    auto = "SequenceClassification" if name == "reward_model" else "CausalLM"
    load = getattr(transformers, f"AutoModelFor{auto}").from_pretrained
    tokenizer, model = transformers.AutoTokenizer.from_pretrained(path), load(path, dtype=torch.float64)
    reference = load(args.model, dtype=torch.float64) if name == "dpo" else None

    def output(prompt, ids):
        if name == "sft":
            return -logprob(model, prompt, ids)
        if name == "dpo":
            return args.beta * (logprob(model, prompt, ids) - logprob(reference, prompt, ids))
        hidden = model.base_model(torch.tensor([prompt + ids])).last_hidden_state[0, -1]
        return float(hidden @ model.score.weight[0])

    results = []
    for row in rows:
        texts = [row[key] for key in ("prompt", "completion", "chosen", "rejected") if key in row]
        prompt, *others = tokenizer(texts)["input_ids"]
        results.append([output(prompt, [*ids, tokenizer.eos_token_id]) for ids in others])
    return results


def of_outputs(name: str, rows: list[dict], found: list[list[float]]) -> dict[str, float]:
    """What training and evaluation have in common."""
    if name == "sft":
        return {"loss": math.fsum(chain(*found)) / num_tokens(rows)}
    margins = [row["margin"] if name == "reward_model" else 0.0 for row in rows]
    losses = [math.log1p(math.exp(r + m - c)) for (c, r), m in zip(found, margins)]
    line = {"loss": mean(losses), "margin": mean(c - r for c, r in found)}
    return line | {"accuracy": mean(c > r for c, r in found)}


def num_tokens(rows: list[dict]) -> int:
    return sum(len(row["completion"].split()) + 1 for row in rows)  # in the toy a word is one


@pytest.mark.parametrize("name", STAGE_DATA)
def test_stages(runs, name):
    folder, seen = runs
    args = importlib.import_module(name).Args(**flags_of(name, folder))
    rows = read_jsonl(args.dataset)
    rows, held_out = rows[:16], rows[16:] or read_jsonl(args.eval_dataset)
    models = [folder / f"{name}{n}" / "model" for n in (1, 2)]
    before = outputs(name, args, models[0], rows)
    of_step = of_outputs(name, rows, before)
    if name == "dpo":
        of_step |= {f"{key}_reward": mean(x) for key, x in zip(("chosen", "rejected"), zip(*before))}
    if name == "reward_model":
        scores = list(chain(*before))
        of_step["loss"] += args.center_rewards_coefficient * mean((c + r) ** 2 for c, r in before)
        of_step["score_mean"] = mean(scores)
        of_step["score_std"] = mean((x - mean(scores)) ** 2 for x in scores) ** 0.5
    unit, expected_count = ("tokens", num_tokens(rows)) if name == "sft" else ("pairs", 16)
    _, *lines = read_run(folder / f"{name}2", seen[f"{name}2"], unit)
    for i, (line, count, _, norms) in enumerate(lines, 1):
        if i == 1:  # only the model after this step is known
            line |= of_step
        after = outputs(name, args, models[i - 1], held_out)
        expected = of_step | {f"eval/{key}": x for key, x in of_outputs(name, held_out, after).items()}
        for row in held_out if name != "sft" else []:
            right = [c > r for other, (c, r) in zip(held_out, after) if other["group"] == row["group"]]
            expected[f"eval/accuracy/{row['group']}"] = mean(right)
        expected |= {"iteration": i, "learning_rate": i / 4 * args.learning_rate, "grad_norm": norms[0]}
        assert line == pytest.approx(expected, rel=1e-9) and count == pytest.approx(expected_count)
