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


def flags_of(name: str, folder, epochs: int = 0) -> dict:
    """The policy moves far, and each gradient is clipped. In stages an epoch is one step, else a rollout is two."""
    flags = {"batch_size": 16, "micro_batch_size": 3, "learning_rate": 4e-3, "warmup_iterations": 4}
    flags |= {"max_grad_norm": 0.05, "dataset": folder / f"{name}.jsonl", "eval_every": 1}
    flags |= {"eval_size": 8} if name == "sft" else {"eval_dataset": folder / f"{name}_heldout.jsonl"}
    if name in STAGE_DATA:
        return flags | {"num_epochs": epochs}
    rewards = "two_rewards" if name == "gdpo" else "right_or_wrong"
    flags |= {"reward": f"{driver.__file__}:{rewards}", "eval_reward": f"{driver.__file__}:reward"}
    k = 4 if importlib.import_module(name).Args.min_samples_per_prompt > 1 else 1
    flags |= {"samples_per_prompt": k, "reward_scale": 2.0, "max_response_length": 16}
    return flags | {"num_iterations": 2, "eval_every": 2}


def write_data(name: str, folder) -> None:
    if name in STAGE_DATA:
        rows = enumerate(read_jsonl(ROOT / "toy" / f"{STAGE_DATA[name]}.jsonl")[:33])
        rows = [row | {"margin": i % 3 / 2} for i, row in rows]
        train, held_out = rows[: 24 if name == "sft" else 16], rows[16:]
    else:
        toy = ROOT / "toy" / ("tools" if name == "reinforce_pp_tools" else "")
        train, held_out = read_jsonl(toy / "train.jsonl")[:80], read_jsonl(toy / "heldout.jsonl")[::91]
    write_jsonl(folder / f"{name}.jsonl", train)
    write_jsonl(folder / f"{name}_heldout.jsonl", held_out)


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def runs(request, tmp_path_factory):
    """The folder, and what each rank saw of the scripts to test, in one launch. A stage runs for 1 and 2 epochs."""
    folder, cases = tmp_path_factory.mktemp("metrics"), {}
    wanted = {item.callspec.params["name"] for item in request.session.items if item.path == request.path}
    for name in sorted(wanted.difference(TWO_RANKS if request.param == 1 else ())):
        write_data(name, folder)
        for n in (1, 2) if name in STAGE_DATA else (0,):
            flags = flags_of(name, folder, n) | {"run_dir": folder / f"{name}{n}"}
            cases[f"{name}{n}"] = {"script": name, "sample": n == 0, "flags": flags}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "tests" / "stand_in"))  # it has a vllm
        return folder, dict(zip(cases, record(folder, [*cases.values()], request.param)))


def read_run(folder, seen: list[dict], unit: str):
    """Each line of metrics.jsonl, least and most of its tokens or pairs, the events of each rank, norms of gradients.

    Its time lies between what happened inside of it and what happened around it.
    """
    ranks, norms, before = [], [float(x.double().norm()) for x in seen[0]["gradients"]], 0.0
    for events in (rank["events"] for rank in seen):
        ends = [i + 1 for i, event in enumerate(events) if event[0] == "log"]
        if ends:  # else it only samples
            ranks.append([events[start:end] for start, end in zip([0, *ends], ends)])
    for line, *of_ranks in zip(read_jsonl(folder / "metrics.jsonl"), *ranks, strict=True):
        assert all(f"`{'/'.join(key.split('/')[:2])}" in PAGE for key in line if key != "iteration")
        steps = [when for name, when, _ in of_ranks[0] if name == "step"]
        after, counts = of_ranks[0][-1][1], ()
        if steps:
            shortest, longest = steps[-1] - of_ranks[0][0][1], after - before
            assert shortest <= line.pop("seconds", shortest) <= longest
            rate = line.pop(f"{unit}_per_second")
            counts = rate * shortest, rate * longest
        assert all(0 <= line.pop(f"{who}_waited", 0.0) < after - before for who in ("trainer", "sampler"))
        yield line, counts, of_ranks, [norms.pop(0) for _ in steps]
        before = after
    assert not norms


def steps_of(ranks, kind: str) -> list[list[dict]]:
    """The tensors of one kind of event on all ranks, for each optimizer step; what comes after the last is one more."""
    steps = {}
    for events in ranks:
        step = 0
        for name, _, tensors in events:
            step += name == "step"
            if name == kind:
                steps.setdefault(step, []).append(tensors)
    return [*steps.values()]


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


def of_evaluation(args, tokenizer, ranks) -> dict[str, float]:
    scores, rows = {}, read_jsonl(args.eval_dataset)
    for prompt, text in texts_of(tokenizer, chain(*steps_of(ranks, "greedy")[-1:])):
        for row in rows:
            if row["prompt"] == prompt:  # in remax.py there are others
                scores.setdefault(f"eval/score/{row['group']}", []).extend(driver.reward([text], [prompt]))
    return {key: mean(its_scores) for key, its_scores in scores.items()}


def of_rollout(name: str, args, tokenizer, ranks) -> dict[str, float]:
    [rollouts] = steps_of(ranks, "compute_advantages")
    sampled = (
        chain(*steps_of(ranks, "generate")) if name == "dapo" else rollouts
    )  # also what is not trained on
    prompts, texts = zip(*texts_of(tokenizer, sampled))
    scores, line = driver.right_or_wrong(texts), {}
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
    method, steps, sums = VARIANTS.get(name, name), steps_of(ranks, "policy_loss"), Counter()
    loss_of, without_kl = getattr(references, f"{method}_loss"), copy.copy(args)
    without_kl.kl_coef = 0.0
    value_steps = steps_of(ranks, "value_loss") or [[]] * len(steps)
    for batches, value_batches in zip(steps, value_steps, strict=True):
        lengths = [len(row) for row in rows_of("logprobs", batches)]
        for batch in batches:
            new = batch["logprobs"].double()
            loss, share = loss_of(args, batch, new, len(lengths), sum(lengths))
            policy_loss, _ = loss_of(without_kl, batch, new, len(lengths), sum(lengths))
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
    if name == "ppo":
        line["critic_grad_norm"], norms = mean(norms[1::2]), norms[::2]
    new, old = (chain(*rows_of(key, steps[0])) for key in ("logprobs", "old_logprobs"))
    line["logprob_difference"] = mean(abs(x - y) for x, y in zip(new, old, strict=True))
    return line | {"grad_norm": mean(norms)}


@pytest.mark.parametrize("name", [*POLICY_SCRIPTS, *VARIANTS])
def test_policy_scripts(runs, name):
    folder, seen = runs
    if f"{name}0" not in seen:
        pytest.skip("needs two ranks")
    args = importlib.import_module(name).Args(**flags_of(name, folder))
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    for i, (line, counts, ranks, norms) in enumerate(
        read_run(folder / f"{name}0", seen[f"{name}0"], "tokens")
    ):
        expected = {"iteration": i} | of_evaluation(args, tokenizer, ranks)
        assert len(expected) == (1 if i == 1 else 4)
        if i > 0:
            expected |= of_rollout(name, args, tokenizer, ranks) | of_steps(name, args, ranks, norms)
            expected["learning_rate"] = i / 4 * args.learning_rate
            if name == "flash_reinforce_async":
                expected["staleness"] = i - 1
            assert counts[0] <= expected["response_length"] * args.batch_size <= counts[1]
        assert line == pytest.approx(expected, rel=1e-4, abs=1e-5)


def logprob(model, prompt: list[int], response: list[int]) -> float:
    """Of a response, token by token."""
    logits = model(torch.tensor([prompt + response])).logits[0].tolist()
    pairs = zip(logits[len(prompt) - 1 :], response)
    return math.fsum(before[token] - math.log(sum(map(math.exp, before))) for before, token in pairs)


@torch.no_grad()
def outputs(name: str, args, path, rows: list[dict]) -> list[list[float]]:
    """What a model gives to each of a row's texts: minus the log-prob, a reward, or a score."""
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
    unit, number = ("tokens", num_tokens(rows)) if name == "sft" else ("pairs", 16)
    _, *lines = read_run(folder / f"{name}2", seen[f"{name}2"], unit)
    for i, (line, counts, _, norms) in enumerate(lines, 1):
        if i == 1:  # the model before this step is not known
            line |= of_step
        after = outputs(name, args, models[i - 1], held_out)
        expected = of_step | {f"eval/{key}": x for key, x in of_outputs(name, held_out, after).items()}
        for group in {row["group"] for row in held_out if "group" in row}:
            right = [c > r for row, (c, r) in zip(held_out, after) if row["group"] == group]
            expected[f"eval/accuracy/{group}"] = mean(right)
        expected |= {"iteration": i, "learning_rate": i / 4 * args.learning_rate, "grad_norm": norms[0]}
        assert line == pytest.approx(expected, rel=1e-9) and counts[0] <= number <= counts[1]
