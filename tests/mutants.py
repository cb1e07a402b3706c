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
SKIPPED = shutil.ignore_patterns(
    ".git", ".venv*", ".trl*", ".peers", "smollm2", "runs", "results", "__pycache__", ".*_cache", "*.png"
)
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
RESUMED = f"{RUNS} -k 'after_its_checkpoint and grpo'"
TO_GO = "kl.flip(1).cumsum(1).flip(1)"
STEP = "= policy_loss(args, batch, logprobs, num_sequences, num_tokens)"
IN_RESPONSE = 'batch["response_mask"]'

# name, script, what is there (once), what it becomes, the tests that must fail
MUTANTS = [
    # the estimators, trap by trap
    ("kl sign flipped", RPP, ".view(-1, 1) - args.kl_coef", ".view(-1, 1) + args.kl_coef", ESTIMATORS),
    (
        "k3 upside down",
        GRPO,
        "log_ref_ratio.exp() - 1 - log_ref_ratio",
        "(-log_ref_ratio).exp() - 1 + log_ref_ratio",
        ESTIMATORS,
    ),
    (
        "k2 of the old policy",
        BASE,
        '["ref_logprobs"] - logprobs',
        '["ref_logprobs"] - batch["old_logprobs"]',
        ESTIMATORS,
    ),
    ("kl not in the loss", GRPO, "return clip_loss + kl_loss, stats", "return clip_loss, stats", ESTIMATORS),
    (
        "kl_loss logged as policy_loss",
        GRPO,
        '"policy_loss": clip_loss.detach(), "kl_loss": kl_loss.detach()',
        '"policy_loss": kl_loss.detach(), "kl_loss": clip_loss.detach()',
        ESTIMATORS,
    ),
    (
        "kl leaks from padding",
        RPP,
        'rollout["kl"].masked_fill(~mask, 0.0)',
        'rollout["kl"].nan_to_num(1.0)',
        ESTIMATORS,
    ),
    ("padding in the loss", GRPO, "(unclipped, clipped).masked_fill(~mask, 0.0)", "(unclipped, clipped)", ESTIMATORS),
    ("returns from the left", RPP, TO_GO, "kl.cumsum(1)", ESTIMATORS),
    ("unmasked mean", RPP, "total(x.masked_fill(~mask, 0.0)) / count", "total(x) / count", ESTIMATORS),
    (
        "unbiased variance",
        PPO,
        "total(centered.square()) / count",
        "total(centered.square()) / (count - 1)",
        ESTIMATORS,
    ),
    (
        "variance in one pass",
        RPP,
        "total(centered.square()) / count",
        "total(x.masked_fill(~mask, 0.0).square()) / count - mean**2",
        ESTIMATORS,
    ),
    (
        "whitened again in each minibatch",
        RPP,
        'advantages = batch["advantages"]',
        f'advantages = whiten(batch["advantages"], {IN_RESPONSE})',
        ESTIMATORS,
    ),
    (
        "a mean of a rank",
        RPP,
        "total(x.masked_fill(~mask, 0.0)) / count",
        "float(x[mask].mean())",
        on(2, "reinforce_pp"),
    ),
    ("advantage not detached", RPP, "@torch.no_grad()\ndef compute", "def compute", ESTIMATORS),
    (
        "groups across prompts",
        GRPO,
        'rollout["scores"].view(-1, args.samples_per_prompt)',
        'rollout["scores"].view(args.samples_per_prompt, -1).T.contiguous()',
        ESTIMATORS,
    ),
    ("equal scores count in grpo", GRPO, "advantages.masked_fill(all_equal, 0.0)", "advantages", ESTIMATORS),
    ("std with k", GRPO, "groups.std(1, keepdim", "groups.std(1, correction=0, keepdim", ESTIMATORS),
    ("statistics over tokens", BASE, "total(torch.ones_like(centered))", 'total(rollout["response_mask"])', ESTIMATORS),
    ("token mean in grpo", GRPO, "(token_losses.sum(1) / mask.sum(1))", "token_losses.mean(1)", ESTIMATORS),
    ("mean over tokens in rloo", RLOO, ".sum() / num_sequences", ".sum() / num_tokens", ESTIMATORS),
    (
        "rloo: its own score in the baseline",
        RLOO,
        "(groups.sum(1, keepdim=True) - groups) / (args.samples_per_prompt - 1)",
        "groups.mean(1, keepdim=True)",
        ESTIMATORS,
    ),
    ("clip with max in grpo", GRPO, "torch.min(unclipped", "torch.max(unclipped", ESTIMATORS),
    (
        "clip fraction of the micro-batch",
        BASE,
        "((clipped < unclipped) & mask).sum() / num_tokens",
        "((clipped < unclipped) & mask).sum() / mask.sum()",
        ESTIMATORS,
    ),
    (
        "reinforce: the mean of a rank",
        REINFORCE,
        "total(rewards) / total(torch.ones_like(rewards))",
        "float(rewards.mean())",
        on(2, "reinforce"),
    ),
    (
        "raft: the last of equals",
        RAFT,
        "groups.argmax(1, keepdim=True)",
        "args.samples_per_prompt - 1 - groups.flip(1).argmax(1, keepdim=True)",
        ESTIMATORS,
    ),
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
        "(token_losses.sum(1) / args.max_response_length)",
        "(token_losses.sum(1) / mask.sum(1))",
        ESTIMATORS,
    ),
    (
        "gspo: no 1/T",
        GSPO,
        "log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True)",
        "log_ratio.sum(1, keepdim=True)",
        ESTIMATORS,
    ),
    (
        "cispo: the weight is not detached",
        CISPO,
        "1 + args.clip_eps_high).detach()",
        "1 + args.clip_eps_high)",
        ESTIMATORS,
    ),
    (
        "cispo: a clip that drops the gradient",
        CISPO,
        "-(weight * advantages * logprobs)",
        "-torch.min(ratio * advantages, weight * advantages)",
        ESTIMATORS,
    ),
    ("dapo: the lower clip above too", DAPO, "1 + args.clip_eps_high)", "1 + args.clip_eps_low)", ESTIMATORS),
    ("dapo: long responses are paid", DAPO, '["scores"] - penalty', '["scores"] + penalty', ESTIMATORS),
    ("dapo: no dynamic sampling", DAPO, "if is_useful.sum() * k >= local_batch or", "if True or", DAPO_TESTS),
    ("dapo: samples for ever", DAPO, "len(rows) == local_batch * args.max_rollouts", "False", DAPO_TESTS),
    (
        "dapo: its length decides",
        DAPO,
        'rollout["raw_scores"].view(-1, k)',
        '(rollout["raw_scores"] + rollout["response_mask"].sum(1)).view(-1, k)',
        DAPO_TESTS,
    ),
    ("dapo: equal scores first", DAPO, ".argsort(descending=True, stable=True)", ".argsort(stable=True)", DAPO_TESTS),
    (
        "dapo: scores of other rows",
        DAPO,
        "{name: tensor[chosen] for name, tensor in rollout.items()},",
        '{n: x[chosen] for n, x in rollout.items()} | {"raw_scores": rollout["raw_scores"][:local_batch]},',
        DAPO_TESTS,
    ),
    (
        "dapo: joined on the wrong side",
        DAPO,
        'pad_sequence(responses, batch_first=True, padding_side="left")',
        'pad_sequence(responses, batch_first=True, padding_side="right")',
        DAPO_TESTS,
    ),
    (
        "dapo: other prompts after a resume",
        DAPO,
        "torch.randperm(len(dataset))[",
        "torch.randperm(len(dataset), generator=torch.Generator().manual_seed(time.time_ns()))[",
        f"{RUNS} -k 'after_its_checkpoint and dapo'",
    ),
    (
        "dapo: scores of the batch that was chosen",
        DAPO,
        "metrics |= sampling_metrics",
        'metrics["rollouts"] = sampling_metrics["rollouts"]',
        DAPO_TESTS,
    ),
    ("dapo: rollouts of a rank", DAPO, 'total(torch.ones_like(rollout["raw_scores"]))', "len(rows)", DAPO_TESTS),
    ("remax: no greedy baseline", REMAX, ' - rollout["greedy_scores"]', "", ESTIMATORS),
    (
        "remax: the baseline is sampled",
        REMAX,
        "args, greedy=True)\n        greedy_scores",
        "args)\n        greedy_scores",
        "tests/test_ranks.py -k 'own_score and remax'",
    ),
    (
        "ppo: score on a wrong token",
        PPO,
        "(mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1, keepdim=True)",
        "mask.sum(1, keepdim=True) - 1",
        ESTIMATORS,
    ),
    (
        "ppo: targets from whitened",
        PPO,
        '"returns": (advantages + values)',
        '"returns": (whiten(advantages, mask) + values)',
        ESTIMATORS,
    ),
    ("ppo: no lambda", PPO, "args.gae_lambda * advantage", "advantage", ESTIMATORS),
    ("ppo: a value in a hole", PPO, "torch.where(is_response, values[:, t], next_value)", "values[:, t]", ESTIMATORS),
    ("ppo: the smaller value error", PPO, "errors = torch.max(", "errors = torch.min(", ESTIMATORS),
    (
        "ppo: value loss per micro-batch",
        PPO,
        "= value_loss(args, batch, values, num_tokens)",
        f"= value_loss(args, batch, values, {IN_RESPONSE}.sum())",
        on(1, "ppo"),
    ),
    (
        "ppo: critic without positions",
        PPO,
        'critic["decoder"](**inputs,',
        'critic["decoder"](batch["sequences"], batch["attention_mask"],',
        f"{ROLLOUT} -k critic",
    ),
    (
        "ppo: critic reads the token",
        PPO,
        "hidden_states[:, -T - 1 : -1]",
        "hidden_states[:, -T:]",
        f"{ROLLOUT} -k critic",
    ),
    (
        "ppo: critic reads foreign ids",
        PPO,
        "tokenizer.get_vocab().items() <= its",
        "{}.items() <= its",
        f"{REWARDS} -k critic",
    ),
    (
        "ppo: the critic never steps",
        PPO,
        "optimizer_step(args, critic, critic_optimizer)",
        "torch.zeros(())",
        f"{RUNS} -k 'not_finite and ppo'",
    ),
    # the loop: denominators, ranks, seeds
    ("denominator of the micro-batch", GRPO, STEP, STEP.replace("num_sequences", "len(logprobs)"), on(1)),
    ("tokens of the micro-batch", RPP, STEP, STEP.replace("num_tokens", f"{IN_RESPONSE}.sum()"), on(1, "reinforce_pp")),
    ("denominator of the rollout", GRPO, "len(minibatch) * WORLD_SIZE", "args.batch_size", SAMPLED),
    ("sequences of a rank", GRPO, "len(minibatch) * WORLD_SIZE", "len(minibatch)", on(2)),
    (
        "tokens of a rank",
        RPP,
        'total(rollout["response_mask"][minibatch])',
        'float(rollout["response_mask"][minibatch].sum())',
        on(2, "reinforce_pp"),
    ),
    ("mean over ranks", GRPO, "= all_sum(parameter.grad)", "= all_sum(parameter.grad) / WORLD_SIZE", on(2)),
    ("gradients stay on their rank", GRPO, "= all_sum(parameter.grad)", "= parameter.grad", on(3)),
    ("metrics of a rank", GRPO, "float(all_sum(x.sum()))", "float(x.sum())", on(2)),
    ("norm counted once a rank", GRPO, "policy, optimizer) / WORLD_SIZE", "policy, optimizer)", on(2)),
    ("ranks draw the same", GRPO, "iteration, RANK)", "iteration, 0)", DRAWS),
    ("iterations draw the same", GRPO, "hash((args.seed, iteration, RANK))", "hash((args.seed, 0, RANK))", DRAWS),
    ("no seed", GRPO, "torch.manual_seed(hash((args.seed, iteration, RANK)))", "torch.seed()", RESUMED),
    ("ranks take the same prompts", GRPO, ".chunk(WORLD_SIZE)[RANK]", ".chunk(WORLD_SIZE)[0]", on(2)),
    ("prompts come again", GRPO, "split(num_prompts)[batch_number]", "split(num_prompts)[0]", SAMPLED),
    (
        "responses scored with another prompt",
        GRPO,
        "[row for row in prompts for _ in range(args.samples_per_prompt)]",
        "[row for _ in range(args.samples_per_prompt) for row in prompts]",
        SCORES,
    ),
    (
        "reference of other rows",
        GRPO,
        'rollout["ref_logprobs"][index, :',
        'rollout["ref_logprobs"][all_rows[: len(index)], :',
        on(1),
    ),
    ("groups of the held-out set per rank", GRPO, "all_sum(scores).tolist()", "scores.tolist()", on(2)),
    ("held-out responses are sampled", GRPO, "args, greedy=True)", "args)", RESUMED),
    ("gradient not reset", GRPO, "    optimizer.zero_grad()\n", "", RESUMED),
    (
        "it learns the wrong way",
        GRPO,
        "                    loss.backward()\n",
        "                    (-loss).backward()\n",
        f"{TOY} -k 'learns and grpo'",
    ),
    # sampling and log-probs
    (
        "eos masked",
        GRPO,
        "attention_mask[:, P + t] = ~finished",
        "attention_mask[active, P + t] = (~finished[active] & ~torch.isin(tokens, eos).squeeze(1)).long()",
        f"{ROLLOUT} -k first_eos",
    ),
    (
        "mask from the pad id",
        GRPO,
        "attention_mask[:, P:].bool()",
        "sequences[:, P:] != tokenizer.pad_token_id",
        f"{ROLLOUT} -k first_eos",
    ),
    ("one eos id of several", GRPO, "_token_id, *configured}", "_token_id}", f"{ROLLOUT} -k first_eos"),
    ("reward on the truncated", GRPO, '"truncated": ~finished', '"truncated": finished', f"{ROLLOUT} -k first_eos"),
    ("tokens after the eos", GRPO, "sequences * attention_mask,", "sequences,", f"{ROLLOUT} -k softmax"),
    (
        "temperature of the generation config",
        GRPO,
        ".float() / args.temperature)",
        ".float() / model.generation_config.temperature)",
        f"{ROLLOUT} -k softmax",
    ),
    (
        "log-probs without temperature",
        GRPO,
        "logits.to(model.dtype) / temperature",
        "logits.to(model.dtype)",
        f"{ROLLOUT} -k plain_forward",
    ),
    ("greedy is sampled", GRPO, "True) if greedy else", "True) if False else", f"{ROLLOUT} -k greedy"),
    (
        "entropy is a mean",
        GRPO,
        "torch.special.entr(probs).sum(1)",
        "torch.special.entr(probs).mean(1)",
        f"{ROLLOUT} -k plain_forward",
    ),
    ("reference at temperature 1", GRPO, "reference, batch, args.temperature", "reference, batch, 1.0", SAMPLED),
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
        "mask.sum(1, keepdim=True) - 1",
        "mask[:, :P].sum(1, keepdim=True)",
        f"{ROLLOUT} -k greedy",
    ),
    (
        "cache keeps other rows",
        GRPO,
        "cache.reorder_cache(unfinished)",
        "cache.reorder_cache(torch.arange(len(unfinished)))",
        f"{ROLLOUT} -k plain_forward",
    ),
    ("rows never leave", GRPO, "if len(unfinished) <= 0.75 * len(active):", "if False:", f"{ROLLOUT} -k read_once"),
    (
        "every response reads its prompt",
        GRPO,
        "prompt_mask)).logits[prompt_index]  # (B, 1, V)\n        cache.reorder_cache(prompt_index)",
        "prompt_mask)[prompt_index]).logits",
        f"{ROLLOUT} -k read_once",
    ),
    (
        "responses of a prompt apart",
        GRPO,
        ".repeat_interleave(samples_per_prompt)",
        ".repeat(samples_per_prompt)",
        f"{ROLLOUT} -k plain_forward",
    ),
    ("log-probs one column off", GRPO, ".logits[:, :-1]", ".logits[:, 1:]", f"{ROLLOUT} -k plain_forward"),
    (
        "log-probs of padding",
        GRPO,
        f"logprobs.masked_fill(~{IN_RESPONSE}, 0.0)",
        "logprobs",
        f"{ROLLOUT} -k plain_forward",
    ),
    ("log-probs in bfloat16", GRPO, "logits.to(model.dtype) /", "logits /", f"{ROLLOUT} -k under_autocast"),
    (
        "sampling with a gradient",
        GRPO,
        "with torch.inference_mode():",
        "with torch.enable_grad():",
        f"{ROLLOUT} -k plain_forward",
    ),
    (
        "weights cast for every token",
        GRPO,
        "with torch.no_grad(), torch.autocast",
        "with torch.inference_mode(), torch.autocast",
        f"{ROLLOUT} -k bfloat16",
    ),
    ("plain cache", GRPO, "yield BFloat16Cache", "yield transformers.DynamicCache", f"{ROLLOUT} -k bfloat16"),
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
        "nothing is recomputed",
        GRPO,
        "functools.partial(recomputed, layer.forward)",
        "layer.forward",
        f"{ROLLOUT} -k checkpointing_recomputes",
    ),
    ("checkpointing while sampling", GRPO, "if torch.is_grad_enabled():", "if True:", f"{ROLLOUT} -k random_states"),
    (
        "micro-batch cut too short",
        GRPO,
        'batch["attention_mask"].any(0)',
        'batch["attention_mask"].all(0)',
        f"{ROLLOUT} -k micro_batches",
    ),
    (
        "micro-batch cut at holes",
        GRPO,
        'batch["attention_mask"].any(0)',
        f'torch.cat([batch["attention_mask"][:, :-T], {IN_RESPONSE}], dim=1).any(0)',
        f"{ROLLOUT} -k cut_micro",
    ),
    (
        "micro-batch not cut",
        GRPO,
        'batch["attention_mask"].any(0)',
        'batch["attention_mask"].any(0) | True',
        f"{ROLLOUT} -k micro_batches",
    ),
    ("rows without order", GRPO, "indices[by_length]", "indices", f"{ROLLOUT} -k micro_batches"),
    (
        "two BOS in a chat",
        GRPO,
        "encoded = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)",
        "encoded = tokenizer(tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))",
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
    (
        "variance of a rank in the z-score",
        GRPO,
        "total(scores.square()) / count",
        "float(scores.square().mean())",
        f"{REWARDS} -k zscore",
    ),
    ("reward model reads the pad", GRPO, "pad_token_id = -1", "pad_token_id = 1", f"{REWARDS} -k reads_prompt"),
    ("no eos for the reward model", GRPO, "ids += [tokenizer.eos_token_id]", "pass", f"{REWARDS} -k reads_prompt"),
    ("a truncated text gets an eos", GRPO, "not is_truncated and ", "", f"{REWARDS} -k reads_prompt"),
    ("bos taken for eos", GRPO, "not in ids[-2:]", "not in ids", f"{REWARDS} -k bos_that"),
    (
        "reward model without its template",
        GRPO,
        "if not tokenizer.chat_template:",
        "if True:",
        f"{REWARDS} -k template",
    ),
    ("a truncated turn is closed", GRPO, "elif is_truncated:", "elif False:", f"{REWARDS} -k template"),
    (
        "eval_reward is trained on",
        GRPO,
        "score(reward, tokenizer, rows, rollout)  # (B,)",
        "score(eval_reward, tokenizer, rows, rollout)  # (B,)",
        f"{REWARDS} -k 'held_out and grpo'",
    ),
    (
        "equal groups of processed scores",
        GRPO,
        'rollout["raw_scores"].view(-1, args.samples_per_prompt)',
        'rollout["scores"].view(-1, args.samples_per_prompt)',
        f"{REWARDS} -k equal_groups",
    ),
    (
        "groups that differ are counted",
        GRPO,
        "amax(1) == groups.amin",
        "amax(1) != groups.amin",
        f"{REWARDS} -k equal_groups",
    ),
    # runs
    ("resume without optimizer", GRPO, '"optimizer": optimizer, "scheduler"', '"scheduler"', RESUMED),
    ("resume without scheduler", GRPO, ', "scheduler": scheduler}', "}", RESUMED),
    (
        "resume without critic",
        PPO,
        'state |= {"critic": critic, ',
        "state |= {",
        f"{RUNS} -k 'after_its_checkpoint and ppo'",
    ),
    (
        "resume without the critic's scheduler",
        PPO,
        ', "critic_scheduler": critic_scheduler}',
        "}",
        f"{RUNS} -k 'after_its_checkpoint and ppo'",
    ),
    ("resume logs twice", GRPO, 'file.truncate(checkpoint["log_sizes"][name] if checkpoint else 0)', "pass", RESUMED),
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
    ("finished without its model", GRPO, ' and (run_dir / "model").exists()', "", f"{RUNS} -k ends_early"),
    (
        "the model of a shorter run stays",
        GRPO,
        'shutil.rmtree(run_dir / "model", ignore_errors=True)',
        "pass",
        f"{RUNS} -k ends_early",
    ),
    ("reference loaded for nothing", GRPO, "if args.kl_coef:", "if True:", f"{RUNS} -k 'no_reference and grpo'"),
    (
        "toy evaluated on other data",
        GRPO,
        "if args.eval_dataset or args.dataset == Args.dataset:",
        "if True:",
        f"{RUNS} -k 'did_not_name and grpo'",
    ),
    ("what is not finite goes on", GRPO, "check(norm.isfinite(),", "check(True,", f"{RUNS} -k not_finite"),
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
        "min_samples_per_prompt: ClassVar[int] = 2",
        "min_samples_per_prompt: ClassVar[int] = 1",
        f"{BAD} -k group_needs_two",
    ),
    (
        "ranks need not divide",
        GRPO,
        "check(args.batch_size % unit == 0,",
        "check(True,",
        f"{BAD} -k 'refused and grpo and groups'",
    ),
    ("missing weights pass", GRPO, "_model and not missing,", "_model,", f"{BAD} -k 'refused and grpo and head'"),
    (
        "a reward model passes for a policy",
        GRPO,
        "is_reward_model == wants_reward_model and not missing",
        "not missing",
        f"{BAD} -k 'refused and grpo and policy'",
    ),
    ("pickled weights are opened", GRPO, "use_safetensors=True, ", "", f"{BAD} -k 'refused and grpo and pickle'"),
    (
        "beyond the positions",
        GRPO,
        "check(needed <= limit,",
        "check(True,",
        f"{BAD} -k 'refused and grpo and positions'",
    ),
    ("other flags go on", GRPO, "check(not changed,", "check(True,", f"{BAD} -k 'other_flags and grpo'"),
    (
        "a longer schedule goes on",
        GRPO,
        'if args.lr_schedule == "constant_with_warmup":',
        "if True:",
        f"{BAD} -k 'other_flags and grpo'",
    ),
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
        "[False] * len(prompt_ids)",
        "[False] + [True] * (len(prompt_ids) - 1)",
        f"{SFT_TESTS} -k plain",
    ),
    (
        "sft: loss on the wrong token",
        SFT,
        "logits_to_keep=columns - 1",
        "logits_to_keep=columns",
        f"{SFT_TESTS} -k plain",
    ),
    ("sft: no eos", SFT, " + [tokenizer.eos_token_id]", "", f"{SFT_TESTS} -k one_eos"),
    ("sft: two BOS", SFT, "(completion, add_special_tokens=False)", "(completion)", f"{SFT_TESTS} -k one_bos"),
    (
        "sft: tokens of the micro-batch",
        SFT,
        "loss = completion_loss(policy, batch, num_tokens)",
        'loss = completion_loss(policy, batch, batch["completion_mask"].sum())',
        f"{SFT_TESTS} -k nor_ranks",
    ),
    ("sft: gradients stay", SFT, "= all_sum(parameter.grad)", "= parameter.grad", f"{SFT_TESTS} -k nor_ranks"),
    ("sft: epochs of one order", SFT, "hash((args.seed, epoch))", "hash((args.seed, 0))", f"{SFT_TESTS} -k epoch"),
    ("sft: resume without scheduler", SFT, ', "scheduler": scheduler}', "}", f"{SFT_TESTS} -k killed"),
    (
        "preference upside down",
        RM,
        "-(chosen_scores - rejected_scores - margins)",
        "(chosen_scores - rejected_scores - margins)",
        f"{RM_TESTS} -k preference",
    ),
    (
        "margin with the wrong sign",
        RM,
        "rejected_scores - margins)",
        "rejected_scores + margins)",
        f"{RM_TESTS} -k preference",
    ),
    ("pairs of the micro-batch", RM, "center, args.batch_size)", "center)", f"{RM_TESTS} -k gradient"),
    (
        "margin column ignored",
        RM,
        'args.margin if row.get("margin") is None else row["margin"]',
        "args.margin",
        f"{RM_TESTS} -k gradient",
    ),
    ("score at a padded token", RM, "padding_value=pad_id)", "padding_value=0)", f"{RM_TESTS} -k last_attended"),
    ("pad stays eos", RM, "in (None, tokenizer.eos_token_id):", "is None:", f"{RM_TESTS} -k last_attended"),
    ("equal pairs stay", RM, 'if row["chosen_ids"] != row["rejected_ids"]]', "if True]", f"{RM_TESTS} -k cut"),
    ("template kept for texts", RM, "tokenizer.chat_template = None", "pass", f"{RM_TESTS} -k as_they_were_learned"),
    (
        "dpo: upside down",
        DPO,
        "rejected_rewards - chosen_rewards",
        "chosen_rewards - rejected_rewards",
        f"{DPO_TESTS} -k plain",
    ),
    ("dpo: no reference", DPO, "(chosen_logprobs - ref_chosen_logprobs)", "chosen_logprobs", f"{DPO_TESTS} -k plain"),
    (
        "dpo: the mean of a response",
        DPO,
        "logprobs.masked_fill(~mask, 0.0).sum(1)",
        "logprobs.masked_fill(~mask, 0.0).mean(1)",
        f"{DPO_TESTS} -k log_probs",
    ),
    (
        "dpo: the prompt counts",
        DPO,
        "[False] * len(prompt_ids)",
        "[False] + [True] * (len(prompt_ids) - 1)",
        f"{DPO_TESTS} -k log_probs",
    ),
    (
        "dpo: references of other pairs",
        DPO,
        'step_ref[:, batch["index"]]',
        'step_ref[:, : len(batch["index"])]',
        f"{DPO_TESTS} -k gradient",
    ),
    ("dpo: references stay", DPO, "return all_sum(logprobs)", "return logprobs", f"{DPO_TESTS} -k gradient"),
    (
        "dpo: after a resume the checkpoint is the reference",
        DPO,
        "    ref_logprobs = all_logprobs(args, policy, dataset)",
        '    policy.load_state_dict((checkpoint or {"policy": policy.state_dict()})["policy"])\n'
        "    ref_logprobs = all_logprobs(args, policy, dataset)",
        f"{SFT_TESTS} -k 'killed and dpo'",
    ),
    # what main does around the functions
    (
        "kl the other way round",
        GRPO,
        'kl = rollout["old_logprobs"] - rollout["ref_logprobs"]',
        'kl = rollout["ref_logprobs"] - rollout["old_logprobs"]',
        on(1),
    ),
    ("the schedule stands still", PPO, "\n        scheduler.step()\n", "\n", f"{RUNS} -k follow_the"),
    ("the critic's schedule stands still", PPO, "        critic_scheduler.step()\n", "", f"{RUNS} -k follow_the"),
    (
        "scores are not processed",
        GRPO,
        'process_scores(args, rollout["raw_scores"], rollout["truncated"])',
        'rollout["raw_scores"]',
        f"{REWARDS} -k processed_scores",
    ),
    (
        "the logged score is the processed one",
        GRPO,
        'total(rollout["raw_scores"]) / args',
        'total(rollout["scores"]) / args',
        f"{REWARDS} -k processed_scores",
    ),
    (
        "remax: the greedy response is penalized for the sampled one",
        REMAX,
        'torch.cat([rollout["truncated"], greedy["truncated"]])',
        'torch.cat([rollout["truncated"]] * 2)',
        f"{REWARDS} -k processed_scores",
    ),
    ("all seeds alike", GRPO, "(args.seed, iteration, RANK)", "(1, iteration, RANK)", f"{RUNS} -k another_seed"),
    ("every epoch in one order", GRPO, "(args.seed, epoch)", "(args.seed, 0)", f"{ROLLOUT} -k each_epoch"),
    (
        "the gradient is not clipped",
        GRPO,
        "clip_grad_norm_(model.parameters(), args.max_grad_norm)",
        "clip_grad_norm_(model.parameters(), math.inf)",
        f"{ROLLOUT} -k max_grad_norm",
    ),
    (
        "equal groups of a rank",
        GRPO,
        "total(groups.amax(1) == groups.amin(1)) / num_prompts",
        "float((groups.amax(1) == groups.amin(1)).float().mean())",
        "tests/test_ranks.py -k counted_on_all",
    ),
    (
        "rows ordered by the mask",
        GRPO,
        'rollout["attention_mask"][:, -T:].sum(1)',
        'rollout["response_mask"].sum(1)',
        f"{ROLLOUT} -k micro_batches_hold",
    ),
    (
        "dapo: rows of other groups",
        DAPO,
        "[rows[i] for i in chosen]",
        "rows[:local_batch]",
        f"{DAPO_TESTS} -k different",
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
