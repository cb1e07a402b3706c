"""Break the scripts in the ways that such code is known to be broken, and check that a test notices each.

    python tests/mutants.py                           all of them, two at a time
    python tests/mutants.py --only kl                 those whose name contains kl
    python tests/mutants.py --tests test_estimators   those that a test file of this name must notice
    python tests/mutants.py --results FILE            write the outcomes as JSON

A mutant is a copy of the repository in which one place of one script says something else. It must make the
tests named with it fail. Exit code 1 if one survives.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = shutil.ignore_patterns(".git", ".venv*", ".trl*", "runs", "results", "__pycache__", ".*_cache", "*.png")
GRPO, RLOO, REMAX, PPO = "grpo.py", "rloo.py", "remax.py", "ppo.py"
REINFORCE, RAFT, DR_GRPO = "reinforce.py", "raft.py", "dr_grpo.py"
DAPO, GSPO, CISPO, DPO = "dapo.py", "gspo.py", "cispo.py", "dpo.py"
RPP, BASE, SFT, RM = "reinforce_pp.py", "reinforce_pp_baseline.py", "sft.py", "reward_model.py"
ESTIMATORS, SIBLINGS, TOY = (f"tests/test_{name}.py" for name in ("estimators", "siblings", "toy"))
ROLLOUT, REWARDS, RUNS = "tests/test_rollout.py", "tests/test_rewards.py", "tests/test_runs.py"
BAD, SFT_TESTS, RM_TESTS = "tests/test_bad_input.py", "tests/test_sft.py", "tests/test_reward_model.py"
DAPO_TESTS, DPO_TESTS = "tests/test_dapo.py", "tests/test_dpo.py"


def on(ranks: int, name: str = "grpo") -> str:
    """The test that a gradient on so many ranks is that of the whole batch."""
    return f"tests/test_ranks.py -k {ranks}-float64-{name}"


SAMPLED, SCORES, DRAWS = (f"tests/test_ranks.py -k '{x} and grpo'" for x in ("apart", "own_score", "draws"))
FLIP = "rewards.flip(1).cumsum(1).flip(1)"
LAST = "(mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1, keepdim=True)"
CLIPPED = "(clipped < unclipped).to(ratio.dtype).sum() / num_tokens"
EQUAL = "groups.amax(1, keepdim=True) == groups.amin(1, keepdim=True)"

# name, script, what is there (once), what it becomes, the tests that must fail
MUTANTS = [
    # the estimators, trap by trap
    ("kl sign flipped", RPP, "-args.kl_coef * rollout", "args.kl_coef * rollout", ESTIMATORS),
    ("kl sign flipped in rloo", RLOO, '["scores"] - args.kl_coef', '["scores"] + args.kl_coef', ESTIMATORS),
    ("kl sign flipped in ppo", PPO, "-args.kl_coef * rollout", "args.kl_coef * rollout", ESTIMATORS),
    ("k3 upside down", GRPO, "(-d).exp() - 1 + d", "d.exp() - 1 - d", ESTIMATORS),
    ("k2 of the old policy", BASE, '(logprobs - mb["ref', '(mb["logprobs"] - mb["ref', ESTIMATORS),
    ("kl leaks from padding", RPP, '"kl"].masked_fill(~mask, 0.0)', '"kl"].nan_to_num(1.0)', ESTIMATORS),
    ("kl leaks in remax", REMAX, '"kl"].masked_fill(~mask, 0.0)', '"kl"].nan_to_num(1.0)', ESTIMATORS),
    (
        "score on every token",
        RPP,
        'rewards.scatter_add(1, last, rollout["scores"][:, None])',
        'rewards + rollout["scores"][:, None]',
        ESTIMATORS,
    ),
    ("score on a wrong token", RPP, LAST, "mask.sum(1, keepdim=True) - 1", ESTIMATORS),
    ("score on a wrong token in remax", REMAX, LAST, "mask.sum(1, keepdim=True) - 1", ESTIMATORS),
    ("score on a wrong token in ppo", PPO, LAST, "mask.sum(1, keepdim=True) - 1", ESTIMATORS),
    ("returns from the left", RPP, FLIP, "rewards.cumsum(1)", ESTIMATORS),
    ("whitened before the sum", RPP, FLIP, "whiten(rewards, mask).flip(1).cumsum(1).flip(1)", ESTIMATORS),
    ("unmasked mean", RPP, "all_sum(x.sum()) / n", "all_sum(x.mean())", ESTIMATORS),
    ("unmasked variance", RPP, "n).masked_fill(~mask, 0.0)\n    variance", "n)\n    variance", ESTIMATORS),
    ("unbiased variance", PPO, "square().sum()) / n", "square().sum()) / (n - 1)", ESTIMATORS),
    (
        "variance in one pass",
        RPP,
        "all_sum(centered.square().sum()) / n",
        "all_sum(x.square().sum()) / n - (all_sum(x.sum()) / n) ** 2",
        ESTIMATORS,
    ),
    (
        "whitened again in each minibatch",
        RPP,
        'mb["response_mask"], mb["advantages"]',
        'mb["response_mask"], whiten(mb["advantages"], mb["response_mask"])',
        ESTIMATORS,
    ),
    ("a mean of rank means", RPP, "all_sum(x.sum()) / n", "x.sum() / mask.sum()", on(2, "reinforce_pp")),
    ("a variance per rank", PPO, "all_sum(centered.square().sum()) / n", "x.var()", on(2, "ppo")),
    ("advantage not detached", RPP, "whiten(returns, mask).detach()", "whiten(returns, mask)", ESTIMATORS),
    ("kl not detached in rloo", RLOO, "* mask).detach()", "* mask)", ESTIMATORS),
    (
        "groups across prompts",
        GRPO,
        ".view(-1, args.samples_per_prompt)",
        ".view(args.samples_per_prompt, -1).T.contiguous()",
        ESTIMATORS,
    ),
    ("equal scores count in grpo", GRPO, f"equal = {EQUAL}", f"equal = ({EQUAL}) & False", ESTIMATORS),
    ("equal scores count in -baseline", BASE, f"({EQUAL}, 0.0)", f"(({EQUAL}) & False, 0.0)", ESTIMATORS),
    ("std with k", GRPO, "groups.std(1, keepdim", "groups.std(1, correction=0, keepdim", ESTIMATORS),
    (
        "statistics over tokens",
        BASE,
        "all_sum(torch.ones_like(centered).sum())",
        'all_sum(rollout["response_mask"].sum())',
        ESTIMATORS,
    ),
    ("std of a rank", BASE, "all_sum(centered", "WORLD_SIZE * (centered", on(2, "reinforce_pp_baseline")),
    ("token mean in grpo", GRPO, "(token_losses.sum(1) / mask.sum(1))", "token_losses.mean(1)", ESTIMATORS),
    ("padding in the loss", GRPO, "(unclipped, clipped)).masked_fill(~mask, 0.0)", "(unclipped, clipped))", ESTIMATORS),
    ("mean over tokens in rloo", RLOO, ".sum() / num_sequences", ".sum() / num_tokens", ESTIMATORS),
    (
        "rloo: its own score in the baseline",
        RLOO,
        "(groups.sum(1, keepdim=True) - groups) / (k - 1)",
        "groups.mean(1, keepdim=True)",
        ESTIMATORS,
    ),
    ("clip with max in grpo", GRPO, "torch.min(unclipped", "torch.max(unclipped", ESTIMATORS),
    ("clip with max in ppo", PPO, "torch.min(unclipped", "torch.max(unclipped", ESTIMATORS),
    ("clip with max in reinforce_pp", RPP, "torch.min(unclipped", "torch.max(unclipped", ESTIMATORS),
    ("clip fraction the other way", GRPO, "clipped < unclipped", "clipped > unclipped", ESTIMATORS),
    ("clip fraction of both sides", PPO, "clipped < unclipped", "clipped != unclipped", ESTIMATORS),
    ("clip fraction of the micro-batch", BASE, CLIPPED, CLIPPED.replace("num_tokens", "mask.sum()"), ESTIMATORS),
    ("kl sign flipped in reinforce", REINFORCE, '["scores"] - args.kl_coef', '["scores"] + args.kl_coef', ESTIMATORS),
    (
        "reinforce: the mean of a rank",
        REINFORCE,
        "all_sum(rewards.sum()) / all_sum(torch.ones_like(rewards).sum())",
        "rewards.mean()",
        on(2, "reinforce"),
    ),
    ("reinforce: the mean of the tokens", REINFORCE, "torch.ones_like(rewards).sum()", "mask.sum()", ESTIMATORS),
    (
        "raft: the last of equals",
        RAFT,
        "groups.argmax(1, keepdim=True)",
        "k - 1 - groups.flip(1).argmax(1, keepdim=True)",
        ESTIMATORS,
    ),
    ("raft: all of equals", RAFT, "torch.zeros_like(groups)", "k * (groups == groups.amax(1)[:, None])", ESTIMATORS),
    ("raft: weight 1", RAFT, "keepdim=True), k)", "keepdim=True), 1)", ESTIMATORS),
    (
        "dr_grpo: divided by the std",
        DR_GRPO,
        "(groups - groups.mean(1, keepdim=True)).view",
        "((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view",
        ESTIMATORS,
    ),
    (
        "dr_grpo: divided by the length",
        DR_GRPO,
        "args.max_response_length).sum() / num",
        "mask.sum(1)).sum() / num",
        ESTIMATORS,
    ),
    ("gspo: no 1/T", GSPO, "(log_ratios.sum(1) / mask.sum(1))", "log_ratios.sum(1)", ESTIMATORS),
    ("gspo: 1/T of the padded length", GSPO, "(log_ratios.sum(1) / mask.sum(1))", "log_ratios.mean(1)", ESTIMATORS),
    ("gspo: clip with max", GSPO, "torch.min(unclipped", "torch.max(unclipped", ESTIMATORS),
    ("cispo: the ratio is not detached", CISPO, "clipped.detach() * advantages", "clipped * advantages", ESTIMATORS),
    (
        "cispo: a clip that drops the gradient",
        CISPO,
        "clipped.detach() * advantages * logprobs",
        "torch.min(ratio * advantages, clipped * advantages)",
        ESTIMATORS,
    ),
    ("cispo: a lower bound", CISPO, "1 - args.clip_eps_low,", "1 - args.clip_eps_high,", ESTIMATORS),
    ("dapo: the lower clip above too", DAPO, "1 + args.clip_eps_high)", "1 + args.clip_eps_low)", ESTIMATORS),
    (
        "dapo: the mean of responses",
        DAPO,
        "token_losses.sum() / num_tokens",
        "(token_losses.sum(1) / mask.sum(1)).sum() / num_sequences",
        ESTIMATORS,
    ),
    ("dapo: long responses are paid", DAPO, '["scores"] - excess', '["scores"] + excess', ESTIMATORS),
    ("dapo: no dynamic sampling", DAPO, "if mixed.sum() >= local_batch or", "if True or", DAPO_TESTS),
    (
        "dapo: its length decides",
        DAPO,
        "groups = raw_scores.view",
        "groups = (raw_scores + generated[2].sum(1)).view",
        DAPO_TESTS,
    ),
    ("dapo: equal scores first", DAPO, "index = (~mixed).long()", "index = mixed.long()", DAPO_TESTS),
    ("dapo: scores of other rows", DAPO, "raw_scores[index]", "raw_scores[:local_batch]", DAPO_TESTS),
    (
        "dapo: joined on the wrong side",
        DAPO,
        '0, "left") for x, y in pairs',
        '0, "right") for x, y in pairs',
        DAPO_TESTS,
    ),
    (
        "dapo: other prompts after a resume",
        DAPO,
        "torch.randperm(len(rows))[",
        "torch.randperm(len(rows), generator=torch.Generator().manual_seed(time.time_ns()))[",
        f"{RUNS} -k 'after_its_checkpoint and dapo'",
    ),
    ("remax: no greedy baseline", REMAX, ' - rollout["greedy_scores"]', "", ESTIMATORS),
    ("remax: kl of this token only", REMAX, FLIP, "rewards.clone()", ESTIMATORS),
    (
        "remax: greedy response trained on",
        REMAX,
        'rollout["scores"], rollout["greedy_scores"] =',
        'rollout["greedy_scores"], rollout["scores"] =',
        "tests/test_ranks.py -k 'own_score and remax'",
    ),
    (
        "ppo: targets from whitened",
        PPO,
        '"returns": (advantages +',
        '"returns": (whiten(advantages, mask) +',
        ESTIMATORS,
    ),
    ("ppo: no lambda", PPO, "args.gae_lambda * advantage", "advantage", ESTIMATORS),
    ("ppo: a value in a hole", PPO, "torch.where(mask[:, t], values[:, t], next_value)", "values[:, t]", ESTIMATORS),
    ("ppo: the smaller value error", PPO, "0.5 * torch.max(", "0.5 * torch.min(", ESTIMATORS),
    ("ppo: value clip around 0", PPO, "near = old + (values - old)", "near = values", ESTIMATORS),
    (
        "ppo: value loss per micro-batch",
        PPO,
        "critic_values(critic, *inputs), num_tokens)",
        'critic_values(critic, *inputs), mb["response_mask"].sum())',
        on(1, "ppo"),
    ),
    (
        "ppo: critic without positions",
        PPO,
        "decoder(**with_positions(sequences, attention_mask), use_cache=False).last",
        "decoder(sequences, attention_mask, use_cache=False).last",
        f"{ROLLOUT} -k critic",
    ),
    (
        "ppo: critic always from the policy",
        PPO,
        '".py:" not in args.reward',
        '".py:" in args.reward',
        f"{REWARDS} -k critic",
    ),
    ("ppo: critic reads foreign ids", PPO, "tokenizer.get_vocab().items() <= its", "{} <= its", f"{REWARDS} -k critic"),
    # the loop: denominators, ranks, seeds
    (
        "denominator of the micro-batch",
        GRPO,
        "num_sequences, num_tokens)\n                    loss.backward()",
        'len(mb["scores"]), num_tokens)\n                    loss.backward()',
        on(1),
    ),
    (
        "tokens of the micro-batch",
        RPP,
        "num_sequences, num_tokens)\n                    loss.backward()",
        'num_sequences, mb["response_mask"].sum())\n                    loss.backward()',
        on(1, "reinforce_pp"),
    ),
    ("denominator of the rollout", GRPO, "len(minibatch) * WORLD_SIZE", "args.batch_size", SAMPLED),
    ("sequences of a rank", GRPO, "len(minibatch) * WORLD_SIZE", "len(minibatch)", on(2)),
    (
        "tokens of a rank",
        RPP,
        "all_sum(response_mask[minibatch].sum())",
        "response_mask[minibatch].sum()",
        on(2, "reinforce_pp"),
    ),
    (
        "mean over ranks",
        GRPO,
        "dist.all_reduce(total)\n",
        "dist.all_reduce(total)\n        total /= WORLD_SIZE\n",
        on(2),
    ),
    ("gradients stay on their rank", GRPO, "dist.all_reduce(total)\n", "pass\n", on(2)),
    ("gradients are summed and not kept", GRPO, "vector_to_parameters(total, gradients)", "pass", on(3)),
    ("all_reduce gives None", GRPO, "        dist.all_reduce(x)\n", "        x = dist.all_reduce(x)\n", on(2)),
    (
        "a rank skips the collective",
        GRPO,
        "if dist.is_initialized():\n        x = x",
        "if dist.is_initialized() and RANK == 0:\n        x = x",
        on(2),
    ),
    ("metrics of a rank", GRPO, "float(all_sum(x.sum()))", "float(x.sum())", on(2)),
    ("norm counted once a rank", GRPO, "return norm / WORLD_SIZE", "return norm", on(2)),
    ("ranks draw the same", GRPO, "iteration, RANK)", "iteration, 0)", DRAWS),
    ("iterations draw the same", GRPO, "hash((args.seed, iteration, RANK))", "hash((args.seed, 0, RANK))", DRAWS),
    ("ranks take the same prompts", GRPO, ".chunk(WORLD_SIZE)[RANK]", ".chunk(WORLD_SIZE)[0]", on(2)),
    (
        "a group spans ranks",
        GRPO,
        "for i in order for _ in range(args.samples_per_prompt)]",
        "for _ in range(args.samples_per_prompt) for i in order]",
        on(2),
    ),
    (
        "prompts come again",
        GRPO,
        "order[step * num_prompts : (step + 1) * num_prompts]",
        "order[:num_prompts]",
        SAMPLED,
    ),
    ("groups of the held-out set per rank", GRPO, "all_sum(scores).tolist()", "scores.tolist()", on(2)),
    ("held-out set of rank 0 only", GRPO, "range(RANK * size, len(rows)", "range(0, len(rows)", on(2)),
    ("gradient not reset", GRPO, "    optimizer.zero_grad()\n", "", f"{RUNS} -k 'after_its_checkpoint and grpo'"),
    ("it never steps", GRPO, "    optimizer.step()\n", "", f"{TOY} -k 'learns and grpo'"),
    (
        "it learns the wrong way",
        GRPO,
        "                    loss.backward()\n",
        "                    (-loss).backward()\n",
        f"{TOY} -k 'learns and grpo'",
    ),
    # sampling and log-probs
    ("eos masked", GRPO, "ends.cumsum(1) - ends.long() == 0", "ends.cumsum(1) == 0", f"{ROLLOUT} -k first_eos"),
    (
        "mask from the pad id",
        GRPO,
        "ends.cumsum(1) - ends.long() == 0",
        "responses != tokenizer.pad_token_id",
        f"{ROLLOUT} -k first_eos",
    ),
    ("one eos id of several", GRPO, "*(ids if isinstance(ids, list) else [ids])", "*[]", f"{ROLLOUT} -k first_eos"),
    ("reward on the truncated", GRPO, "entropy, ~ends.any(1)", "entropy, ends.any(1)", f"{ROLLOUT} -k first_eos"),
    (
        "temperature of the generation config",
        GRPO,
        ".float() / args.temperature)",
        ".float() / model.generation_config.temperature)",
        f"{ROLLOUT} -k softmax",
    ),
    ("sampling without temperature", GRPO, ".float() / args.temperature)", ".float())", f"{ROLLOUT} -k softmax"),
    (
        "log-probs without temperature",
        GRPO,
        "torch.float32)) / temperature",
        "torch.float32))",
        f"{ROLLOUT} -k plain_forward",
    ),
    (
        "reference at temperature 1",
        GRPO,
        "token_logprobs(reference, *inputs, args.temperature)",
        "token_logprobs(reference, *inputs, 1.0)",
        SAMPLED,
    ),
    (
        "policy at temperature 1",
        GRPO,
        "token_logprobs(policy, *inputs, args.temperature)",
        "token_logprobs(policy, *inputs, 1.0)",
        SAMPLED,
    ),
    (
        "no position ids",
        GRPO,
        "(attention_mask.cumsum(1) - 1)",
        "(torch.ones_like(attention_mask).cumsum(1) - 1)",
        f"{ROLLOUT} -k plain_forward",
    ),
    (
        "positions stand still while sampling",
        GRPO,
        "position, mask = position + 1,",
        "position, mask = position,",
        f"{ROLLOUT} -k greedy",
    ),
    (
        "cache keeps other rows",
        GRPO,
        "cache.reorder_cache(left)",
        "cache.reorder_cache(torch.arange(len(left)))",
        f"{ROLLOUT} -k plain_forward",
    ),
    ("rows never leave", GRPO, "if len(left) <= 0.75 * len(rows):", "if False:", f"{ROLLOUT} -k read_once"),
    (
        "every response reads its prompt",
        GRPO,
        "list(dict.fromkeys(map(tuple, prompts)))",
        "list(map(tuple, prompts))",
        f"{ROLLOUT} -k read_once",
    ),
    (
        "prompts swapped in the cache",
        GRPO,
        "cache.reorder_cache(copies)",
        "cache.reorder_cache(copies.flip(0))",
        f"{ROLLOUT} -k plain_forward",
    ),
    (
        "log-probs one column off",
        GRPO,
        "[:, -response_length - 1 : -1][mask]",
        "[:, -response_length:][mask]",
        f"{ROLLOUT} -k plain_forward",
    ),
    (
        "log-probs in bfloat16",
        GRPO,
        "torch.promote_types(logits.dtype, torch.float32)",
        "logits.dtype",
        f"{ROLLOUT} -k at_least",
    ),
    (
        "head without its cap",
        GRPO,
        "model(input_ids=targets[None]).logits[0]",
        "model.get_output_embeddings()(hidden)",
        f"{ROLLOUT} -k plain_forward",
    ),
    (
        "logits in one piece",
        GRPO,
        "size = max(1, MAX_LOGITS //",
        "size = 10**9 + max(1, MAX_LOGITS //",
        f"{ROLLOUT} -k made_in_pieces",
    ),
    (
        "logits kept for the backward pass",
        GRPO,
        "if len(targets) > size else head",
        "if False else head",
        f"{ROLLOUT} -k made_in_pieces",
    ),
    (
        "log-probs of sampling with a gradient",
        GRPO,
        "with no_grad, torch.autocast",
        "with torch.autocast",
        f"{ROLLOUT} -k 'bfloat16 or plain_forward'",
    ),
    (
        "weights cast for every token",
        GRPO,
        "torch.no_grad() if bf16 else torch.inference_mode()",
        "torch.inference_mode()",
        f"{ROLLOUT} -k bfloat16",
    ),
    ("cache in float32", GRPO, "if bf16:  # rotary", "if False:  # rotary", f"{ROLLOUT} -k bfloat16"),
    (
        "weights in bfloat16",
        GRPO,
        "dtype=torch.float32, use_safetensors",
        "dtype=torch.bfloat16, use_safetensors",
        f"{ROLLOUT} -k bfloat16",
    ),
    (
        "dropout on",
        GRPO,
        "model.to(device).eval(), tokenizer",
        "model.to(device).train(), tokenizer",
        f"{ROLLOUT} -k dropout",
    ),
    (
        "micro-batch cut too short",
        GRPO,
        ".any(0).nonzero()[-1]) + 1",
        ".any(0).nonzero()[-1])",
        f"{ROLLOUT} -k micro_batches",
    ),
    ("rows without order", GRPO, "rows[by_length]", "rows", f"{ROLLOUT} -k micro_batches"),
    (
        "two BOS in a chat",
        GRPO,
        "(tokenizer if is_text else template)(prompt)",
        "tokenizer(prompt if is_text else template(prompt, tokenize=False))",
        f"{ROLLOUT} -k one_bos",
    ),
    # rewards
    (
        "answer behind the first marker",
        GRPO,
        "text.rpartition(marker)",
        "text.partition(marker)",
        f"{REWARDS} -k exact",
    ),
    (
        "penalty after the scale",
        GRPO,
        "(scores - args.missing_eos_penalty * truncated) * args.reward_scale",
        "scores * args.reward_scale - args.missing_eos_penalty * truncated",
        f"{REWARDS} -k in_order",
    ),
    ("z-score of a rank", GRPO, "all_sum(scores.mean()) / WORLD_SIZE", "scores.mean()", f"{REWARDS} -k zscore"),
    ("reward model reads the pad", GRPO, "pad_token_id = -1", "pad_token_id = 1", f"{REWARDS} -k reads_prompt"),
    (
        "no eos for the reward model",
        GRPO,
        "ids if cut or eos in ids[-2:] else [*ids, eos]",
        "ids",
        f"{REWARDS} -k reads_prompt",
    ),
    (
        "a truncated text gets an eos",
        GRPO,
        "ids if cut or eos in ids[-2:] else",
        "ids if eos in ids[-2:] else",
        f"{REWARDS} -k reads_prompt",
    ),
    ("bos taken for eos", GRPO, "eos in ids[-2:]", "eos in ids", f"{REWARDS} -k bos_that"),
    ("bos learned as eos", RM, "eos_token_id in ids[-2:]", "eos_token_id in ids", f"{REWARDS} -k bos_that"),
    (
        "reward model without its template",
        GRPO,
        "if not tokenizer.chat_template:\n            ids",
        "if True:\n            ids",
        f"{REWARDS} -k template",
    ),
    ("a truncated turn is closed", GRPO, "elif cut:", "elif False:", f"{REWARDS} -k template"),
    (
        "eval_reward is trained on",
        GRPO,
        "raw_scores = score(args, reward,",
        "raw_scores = score(args, eval_reward,",
        f"{REWARDS} -k 'held_out and grpo'",
    ),
    (
        "a prompt's score goes to another",
        GRPO,
        "torch.tensor(function(**columns),",
        "torch.tensor(function(**columns)[::-1],",
        SCORES,
    ),
    # runs
    (
        "resume without optimizer",
        GRPO,
        '"policy": policy, "optimizer": optimizer}',
        '"policy": policy}',
        f"{RUNS} -k 'after_its_checkpoint and grpo'",
    ),
    (
        "resume without critic",
        PPO,
        'state |= {"critic": critic, "critic_optimizer"',
        'state |= {"critic_optimizer"',
        f"{RUNS} -k 'after_its_checkpoint and ppo'",
    ),
    (
        "resume logs twice",
        GRPO,
        'file.truncate(checkpoint["log_sizes"][name] if checkpoint else 0)',
        "pass",
        f"{RUNS} -k 'after_its_checkpoint and grpo'",
    ),
    (
        "resume begins at 0",
        GRPO,
        'start = checkpoint["iteration"] if',
        "start = 0 if",
        f"{RUNS} -k 'after_its_checkpoint and grpo'",
    ),
    (
        "checkpoint written in place",
        GRPO,
        'with replacing(run_dir / "checkpoint.pt") as path, open(path, "wb")',
        'with open(run_dir / "checkpoint.pt", "wb")',
        f"{RUNS} -k torn",
    ),
    (
        "a finished run runs again",
        GRPO,
        "start >= args.num_iterations and",
        "False and",
        f"{RUNS} -k 'finished_run and grpo'",
    ),
    (
        "reference loaded for nothing",
        GRPO,
        "if args.kl_coef else None",
        "if True else None",
        f"{RUNS} -k 'no_reference and grpo'",
    ),
    (
        "toy evaluated on other data",
        GRPO,
        "if args.dataset == Args.dataset else None",
        "if True else None",
        f"{RUNS} -k 'did_not_name and grpo'",
    ),
    ("what is not finite goes on", GRPO, "check((norm + loss).isfinite(),", "check(True,", f"{RUNS} -k not_finite"),
    # refusals
    (
        "scores that are not finite pass",
        GRPO,
        " and scores.isfinite().all()",
        "",
        f"{BAD} -k 'refused and grpo and finite'",
    ),
    (
        "a group of one passes",
        GRPO,
        "ClassVar[int] = 2  # a group of one",
        "ClassVar[int] = 1  # a group of one",
        f"{BAD} -k group_needs_two",
    ),
    (
        "ranks need not divide",
        GRPO,
        "check(size % unit == 0,",
        "check(True,",
        f"{BAD} -k 'refused and grpo and groups'",
    ),
    (
        "minibatches need not divide",
        GRPO,
        "check(local % steps == 0,",
        "check(True,",
        f"{BAD} -k 'refused and grpo and minibatches'",
    ),
    ("missing weights pass", GRPO, "right = not missing and (", "right = (", f"{BAD} -k 'refused and grpo and head'"),
    (
        "a reward model passes for a policy",
        GRPO,
        "(head in kind) == (head in auto_class.__name__)",
        "True",
        f"{BAD} -k 'refused and grpo and policy'",
    ),
    ("pickled weights are opened", GRPO, "use_safetensors=True, ", "", f"{BAD} -k 'refused and grpo and pickle'"),
    ("three outputs pass", GRPO, "check(outputs == 1,", "check(True,", f"{BAD} -k 'refused and grpo and outputs'"),
    (
        "beyond the positions",
        GRPO,
        "check(total <= limit,",
        "check(True,",
        f"{BAD} -k 'refused and grpo and positions'",
    ),
    ("an empty prompt passes", GRPO, "check(prompt, f", "check(True, f", f"{BAD} -k 'refused and grpo and empty'"),
    ("too few prompts pass", GRPO, "check(len(kept) >= least,", "check(True,", f"{BAD} -k 'refused and grpo and few'"),
    ("no epochs", GRPO, "num_minibatches update_epochs", "num_minibatches", f"{BAD} -k 'refused and grpo and epochs'"),
    ("a clip of 0", GRPO, "reward_scale reward_clip", "reward_scale", f"{BAD} -k 'refused and grpo and clipped'"),
    ("a scale of 0", GRPO, "reward_scale reward_clip", "reward_clip", f"{BAD} -k 'refused and grpo and scale'"),
    ("other flags go on", GRPO, "check(not changed,", "check(True,", f"{BAD} -k 'other_flags and grpo'"),
    # siblings
    (
        "a skeleton drifts",
        RLOO,
        "        # 6. Advantages\n",
        "        # 6. The advantages\n",
        f"{SIBLINGS} -k skeletons",
    ),
    ("a pin drifts", PPO, '"tyro==', '"tyro>=', f"{SIBLINGS} -k metadata"),
    # stages 1 and 2
    (
        "sft: loss on the prompt",
        SFT,
        "mask = completion_mask[:, 1:]",
        "mask = attention_mask[:, 1:].bool()",
        f"{SFT_TESTS} -k plain",
    ),
    (
        "sft: loss on the wrong token",
        SFT,
        "mask = completion_mask[:, 1:]",
        "mask = completion_mask[:, :-1]",
        f"{SFT_TESTS} -k plain",
    ),
    ("sft: no eos", SFT, " + [tokenizer.eos_token_id]", "", f"{SFT_TESTS} -k one_eos"),
    ("sft: two BOS", SFT, "(completion, add_special_tokens=False)", "(completion)", f"{SFT_TESTS} -k one_bos"),
    (
        "sft: gradients stay on their rank",
        SFT,
        "all_sum(parameter.grad)",
        "parameter.grad",
        f"{SFT_TESTS} -k nor_ranks",
    ),
    ("sft: order of the file", SFT, "hash((args.seed, epoch))", "hash((args.seed, 0))", f"{SFT_TESTS} -k epoch"),
    (
        "sft: resume logs twice",
        SFT,
        'file.truncate(checkpoint["log_sizes"][name] if checkpoint else 0)',
        "pass",
        f"{SFT_TESTS} -k killed",
    ),
    (
        "preference upside down",
        RM,
        "-(chosen_scores - rejected_scores - margin)",
        "(chosen_scores - rejected_scores - margin)",
        f"{RM_TESTS} -k preference",
    ),
    (
        "margin with the wrong sign",
        RM,
        "rejected_scores - margin))",
        "rejected_scores + margin))",
        f"{RM_TESTS} -k preference",
    ),
    (
        "centered differences",
        RM,
        "(chosen_scores + rejected_scores).square()",
        "(chosen_scores - rejected_scores).square()",
        f"{RM_TESTS} -k preference",
    ),
    (
        "pairs of the micro-batch",
        RM,
        "margins, center, args.batch_size)",
        "margins, center)",
        f"{RM_TESTS} -k gradient",
    ),
    ("reward model: gradients stay", RM, "all_sum(parameter.grad)", "parameter.grad", f"{RM_TESTS} -k gradient"),
    (
        "margin column ignored",
        RM,
        'args.margin if row.get("margin") is None else row["margin"]',
        "args.margin",
        f"{RM_TESTS} -k gradient",
    ),
    (
        "score at the last column",
        RM,
        "last_hidden_state[torch.arange(len(last)), last]",
        "last_hidden_state[:, -1]",
        f"{RM_TESTS} -k last_attended",
    ),
    (
        "score before the last token",
        RM,
        "[torch.arange(len(last)), last]",
        "[torch.arange(len(last)), last - 1]",
        f"{RM_TESTS} -k last_attended",
    ),
    (
        "reward model without positions",
        RM,
        "(attention_mask.cumsum(1) - 1)",
        "(torch.ones_like(attention_mask).cumsum(1) - 1)",
        f"{RM_TESTS} -k last_attended",
    ),
    ("pad stays eos", RM, "in (None, tokenizer.eos_token_id):", "is None:", f"{RM_TESTS} -k last_attended"),
    (
        "the config lacks the pad id",
        RM,
        "pad_token_id = tokenizer.pad_token_id",
        "use_cache = False",
        f"{RM_TESTS} -k last_attended",
    ),
    ("equal pairs stay", RM, 'if row["ids"][0] != row["ids"][1]]', "if True]", f"{RM_TESTS} -k cut"),
    ("dpo: upside down", DPO, "softplus(-beta * margins)", "softplus(beta * margins)", f"{DPO_TESTS} -k plain"),
    (
        "dpo: no reference",
        DPO,
        "(chosen_logprobs - ref_chosen_logprobs) -",
        "chosen_logprobs -",
        f"{DPO_TESTS} -k plain",
    ),
    ("dpo: the mean of a response", DPO, "logprobs).sum(1)", "logprobs).mean(1)", f"{DPO_TESTS} -k log_probs"),
    ("dpo: the prompt counts", DPO, ">= starts)", ">= starts - 1)", f"{DPO_TESTS} -k log_probs"),
    ("dpo: pairs of the micro-batch", DPO, "args.beta, args.batch_size)", "args.beta)", f"{DPO_TESTS} -k gradient"),
    ("dpo: gradients stay", DPO, "all_sum(parameter.grad)", "parameter.grad", f"{DPO_TESTS} -k gradient"),
    ("dpo: references stay", DPO, "return all_sum(ratios)", "return ratios", f"{DPO_TESTS} -k gradient"),
    (
        "dpo: after a resume the checkpoint is the reference",
        DPO,
        "    # The policy is still the reference",
        '    policy.load_state_dict((checkpoint or {"policy": policy.state_dict()})["policy"])\n    # The',
        f"{SFT_TESTS} -k 'killed and dpo'",
    ),
    (
        "template kept for texts",
        RM,
        "tokenizer.chat_template = None  # it",
        "pass  # it",
        f"{RM_TESTS} -k as_they_were_learned",
    ),
]


@dataclass
class Args:
    only: str = ""  # only mutants whose name contains this
    tests: str = ""  # only mutants that a test file whose name contains this must notice
    jobs: int = 2  # how many at a time
    check_tests: bool = True  # first see the tests pass without any mutant
    results: Path | None = None  # a file for the outcomes, as JSON


def tests_pass(tests: list[str], script: str = "", old: str = "", new: str = "") -> bool:
    """Whether the tests pass in a copy of the repository, with one place of a script changed if given."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        shutil.copytree(ROOT, copy, ignore=SKIPPED)
        if script:
            source = (copy / script).read_text()
            if source.count(old) != 1:
                raise SystemExit(f"{script} has {source.count(old)} places like {old!r}: update the mutant")
            (copy / script).write_text(source.replace(old, new))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *tests]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        result = subprocess.run(command, cwd=copy, capture_output=True, text=True, env=environment)
    if result.returncode not in (0, 1):  # neither passed nor failed: nothing was tested
        raise SystemExit(f"{tests}: pytest ended with {result.returncode}\n{result.stdout[-2000:]}")
    return result.returncode == 0


def without_mutants(chosen: list[tuple]) -> list[list[str]]:
    """The tests of all chosen mutants, file by file."""
    files = {}
    for words in (shlex.split(mutant[-1]) for mutant in chosen):
        files.setdefault(words[0], {})["".join(f"({word})" for word in words[2:])] = None
    return [[file] if "" in k else [file, "-k", " or ".join(k)] for file, k in files.items()]


def outcome_of(mutant: tuple) -> dict:
    name, script, old, new, tests = mutant
    began, survived = time.time(), tests_pass(shlex.split(tests), script, old, new)
    print(f"{'SURVIVED' if survived else 'noticed ':8s}  {name}", flush=True)
    seconds = round(time.time() - began, 1)
    return {"name": name, "script": script, "tests": tests, "noticed": not survived, "seconds": seconds}


def main(args: Args) -> None:
    chosen = [mutant for mutant in MUTANTS if args.only in mutant[0] and args.tests in mutant[-1].split()[0]]
    with ThreadPoolExecutor(args.jobs) as pool:
        wanted = without_mutants(chosen)
        for tests, passed in zip(wanted, pool.map(tests_pass, wanted)) if args.check_tests else ():
            if not passed:
                raise SystemExit(f"{shlex.join(tests)}: fails without any mutant, so it cannot tell")
        outcomes = [*pool.map(outcome_of, chosen)]
    noticed = sum(outcome["noticed"] for outcome in outcomes)
    print(f"{noticed} of {len(outcomes)} mutants noticed")
    if args.results:
        args.results.write_text(json.dumps(outcomes, indent=1) + "\n")
    sys.exit(noticed < len(outcomes))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
