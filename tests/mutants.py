"""Break the scripts in the ways that such code is known to be broken, and check that a test notices each.

    python tests/mutants.py                 all of them, one after the other, some fifteen minutes on two cores
    python tests/mutants.py --only kl       those whose name contains kl

A mutant is a copy of the repository in which one line of one script says something else. It must make the tests named
with it fail. Exit code 1 if one survives.
"""

import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
RPP, SFT, RM = "reinforce_pp.py", "sft.py", "reward_model.py"
RANKS = "tests/test_ranks.py"
INVARIANT = f"{RANKS} -k float64-1e-12-0.3-reinforce_pp"
SIBLINGS = "tests/test_siblings.py"
RM_TESTS = "tests/test_reward_model.py"
FAULTS = "tests/test_faults.py"
MODELS = "tests/test_models.py"
BRADLEY, CENTRED, PLAIN = (f"{RM_TESTS} -k {name}" for name in ("bradley", "centering", "plain_one"))

# name, script, the line as it is (a part that occurs once), what it becomes, the tests that must fail
MUTANTS = [
    ("kl sign flipped", RPP, "rewards = -args.kl_coef", "rewards = args.kl_coef", "tests/test_estimator.py"),
    (
        "kl leaks from padding",
        RPP,
        'rollout["kl"].masked_fill(~mask, 0.0)',
        'rollout["kl"].nan_to_num(1.0)',
        "tests/test_estimator.py",
    ),
    (
        "score on every token",
        RPP,
        "rewards[torch.arange(len(mask), device=mask.device), mask.sum(1) - 1] += scores",
        "rewards += scores[:, None]",
        "tests/test_estimator.py",
    ),
    (
        "return from the left",
        RPP,
        "rewards.flip(1).cumsum(1).flip(1)",
        "rewards.cumsum(1)",
        "tests/test_estimator.py",
    ),
    ("whitening unmasked", RPP, "mean = all_sum(x.sum()) / n", "mean = all_sum(x.mean())", "tests/test_estimator.py"),
    ("whitening mean per rank", RPP, "mean = all_sum(x.sum()) / n", "mean = x.sum() / mask.sum()", INVARIANT),
    (
        "whitening variance per rank",
        RPP,
        "variance = all_sum(centered.square().sum()) / n",
        "variance = centered.square().sum() / mask.sum()",
        INVARIANT,
    ),
    (
        "advantage keeps its gradient",
        RPP,
        "whiten(returns, mask).detach()",
        "whiten(returns, mask)",
        "tests/test_estimator.py",
    ),
    (
        "clip with max",
        RPP,
        "-torch.min(unclipped, clipped)",
        "-torch.max(unclipped, clipped)",
        "tests/test_estimator.py",
    ),
    (
        "loss over padding",
        RPP,
        "(unclipped, clipped).masked_fill(~mask, 0.0)",
        "(unclipped, clipped)",
        "tests/test_estimator.py",
    ),
    (
        "eos masked",
        RPP,
        "responses[rows, t] = tokens.where(running, -1)",
        "responses[rows, t] = tokens.where(running & ~torch.isin(tokens, stop_ids), -1)",
        "tests/test_rollout.py -k eos",
    ),
    (
        "mask from the pad id",
        RPP,
        "response_mask = responses >= 0",
        "response_mask = responses.where(responses >= 0, pad_id) != pad_id",
        "tests/test_rollout.py -k eos",
    ),
    (
        "one eos id of several",
        RPP,
        "{tokenizer.eos_token_id, *(ids if isinstance(ids, list) else [ids])}",
        "{tokenizer.eos_token_id}",
        "tests/test_rollout.py -k greedy",
    ),
    (
        "generation config bends sampling",
        RPP,
        "(logits / args.temperature).softmax(-1)",
        "(logits / model.generation_config.temperature).softmax(-1)",
        "tests/test_rollout.py -k softmax",
    ),
    (
        "top-k of the generation config",
        RPP,
        "(logits / args.temperature).softmax(-1)",
        "(logits.topk(18).values[:, -1:].le(logits).log() + logits / args.temperature).softmax(-1)",
        "tests/test_rollout.py -k softmax",
    ),
    ("log-probs without temperature", RPP, "torch.float32)) / temperature", "torch.float32))", "tests/test_rollout.py"),
    (
        "log-probs without position ids",
        RPP,
        'inputs = {"input_ids": sequences, "attention_mask": attention_mask, "position_ids": positions}',
        'inputs = {"input_ids": sequences, "attention_mask": attention_mask}',
        "tests/test_rollout.py -k unpadded",
    ),
    (
        "sampling without position ids",
        RPP,
        "positions = (prompt_mask.cumsum(1) - 1).clamp(min=0)",
        "positions = torch.ones_like(prompt_mask).cumsum(1) - 1",
        "tests/test_rollout.py -k greedy",
    ),
    (
        "cache keeps other rows",
        "grpo.py",
        "running.nonzero()[:, 0])",
        "torch.arange(num_running))",
        f"{MODELS} -k frequent",
    ),
    (
        "prompts swapped",
        "grpo.py",
        "cache.reorder_cache(copies)",
        "cache.reorder_cache(copies.flip(0))",
        f"{MODELS} -k greedy",
    ),
    (
        "head without its cap",
        "grpo.py",
        "return policy().logits[0]",
        "return policy.get_output_embeddings()(hidden)",
        f"{MODELS} -k pieces",
    ),
    (
        "answer as text only",
        "grpo.py",
        "as_value(found) == as_value(expected)",
        "found == expected",
        "tests/test_reward.py -k exact",
    ),
    (
        "answers in the order of the text",
        "grpo.py",
        "rest = text.rpartition(marker)",
        "rest = text.partition(marker)",
        "tests/test_reward.py -k exact",
    ),
    ("one step for all moments", "reinforce_pp.py", "step.clone()", "step", "tests/test_ranks.py -k shared_optimizer"),
    ("logits in one piece", "grpo.py", "if len(pieces) > 1:", "if False:", f"{MODELS} -k again"),
    (
        "every response reads its prompt",
        "grpo.py",
        "numbers.setdefault(tuple(ids), len(numbers))",
        "numbers.setdefault((*ids, len(numbers)), len(numbers))",
        f"{MODELS} -k once",
    ),
    (
        "cache in float32",
        "grpo.py",
        "update(keys.to(dtype), values.to(dtype), *rest, **more)",
        "update(keys, values, *rest, **more)",
        f"{MODELS} -k once",
    ),
    ("first brace closes", "grpo.py", "if depth == 0:", 'if c == "}":', "tests/test_reward.py -k exact"),
    (
        "dropout on",
        RPP,
        "    return model.to(device).eval()\n",
        "    return model.to(device).train()\n",
        "tests/test_rollout.py -k dropout",
    ),
    (
        "dropout on under checkpointing",
        RPP,
        "            module.training = on",
        "            module.train(on)",
        "tests/test_rollout.py -k dropout",
    ),
    (
        "denominator per micro-batch",
        RPP,
        "new_logprobs, num_sequences, num_tokens)",
        'new_logprobs, num_sequences, mb["response_mask"].sum())',
        INVARIANT,
    ),
    (
        "denominator per rank",
        RPP,
        "num_tokens = all_sum(response_mask[minibatch].sum())",
        "num_tokens = response_mask[minibatch].sum()",
        INVARIANT,
    ),
    ("mean over ranks, not sum", RPP, "(loss * world_size).backward()", "loss.backward()", INVARIANT),
    (
        "ranks never exchange gradients",
        RPP,
        "model.no_sync() if world_size > 1 and remaining else",
        "model.no_sync() if world_size > 1 else",
        RANKS,
    ),
    ("ranks draw the same", RPP, "* 65_537 + rank)", "* 65_537)", f"{RANKS} -k same_prompts"),
    ("ranks take the same prompts", RPP, ".chunk(world_size)[rank]", ".chunk(world_size)[0]", f"{RANKS} -k apart"),
    ("micro-batch cut too short", RPP, "x[:, :end] if", "x[:, : max(1, end - 1)] if", "tests/test_rollout.py -k micro"),
    (
        "resume without optimizer",
        RPP,
        'stateful = {"policy": policy, "optimizer": optimizer}',
        'stateful = {"policy": policy}',
        "tests/test_resume.py -k is_exact",
    ),
    (
        "resume draws from the seed again",
        RPP,
        "(torch.manual_seed if use_cuda else torch.default_generator.manual_seed)(seed)",
        "iteration == start + 1 and torch.manual_seed(args.seed * 65_537 + rank)",
        "tests/test_resume.py -k is_exact",
    ),
    (
        "resume logs twice",
        RPP,
        'if line["iteration"] <= iteration and iteration]',
        "]",
        "tests/test_resume.py -k past_the_last",
    ),
    ("no z-score", RPP, "if args.reward_zscore:", "if False:", "tests/test_reward.py"),
    (
        "reward model by transformers' own rule",
        RPP,
        "pieces.append(model.score(hidden)[:, 0].float())",
        "pieces.append(model(**inputs).logits[:, 0].float())",
        "tests/test_reward.py",
    ),
    (
        "reward model reads foreign ids",
        RPP,
        "tokenizer.get_vocab().items() <= reward_tokenizer.get_vocab().items()",
        "True",
        "tests/test_reward.py",
    ),
    (
        "no eos through another tokenizer",
        RPP,
        "result.append(ids + [eos] * (ended and eos is not None))",
        "result.append(ids)",
        "tests/test_reward.py",
    ),
    (
        "chat without what follows eos",
        RPP,
        "result.append(ids + behind_eos * (ended and not isinstance(prompt, str)))",
        "result.append(ids)",
        f"{RM_TESTS} -k chats",
    ),
    (
        "truncated chat made to look finished",
        RPP,
        "behind_eos * (ended and not isinstance(prompt, str))",
        "behind_eos * (not isinstance(prompt, str))",
        f"{RM_TESTS} -k chats",
    ),
    (
        "monitor is trained on",
        RPP,
        'raw_scores = scores[""]  # (B,)',
        "raw_scores = [*scores.values()][-1]",
        f"{RM_TESTS} -k monitor_does",
    ),
    (
        "a causal LM passes for a reward model",
        RPP,
        'if kind and "SequenceClassification" not in kind:',
        "if False:",
        f"{RM_TESTS} -k causal-reward_model.py-reinforce_pp",
    ),
    (
        "NaN weights pass",
        RPP,
        'state_dict().values()):\n        fail(f"--{flag} {name}: has weights that are NaN or infinite, and',
        'state_dict().values()) and 0:\n        fail(f"--{flag} {name}: has weights that are NaN or infinite, and',
        f"{RM_TESTS} -k refused",
    ),
    (
        "NaN scores pass",
        RPP,
        "if all_sum((~numbers.isfinite()).sum()) == 0:",
        "if True:",
        f"{RM_TESTS} -k become_nan",
    ),
    (
        "it does not learn",
        RPP,
        "                optimizer.step()\n",
        "",
        "tests/test_script.py -k 'script_learns and reinforce_pp'",
    ),
    (
        "it learns the wrong way",
        RPP,
        "(loss * world_size).backward()",
        "(-loss).backward()",
        "tests/test_script.py -k 'script_learns and reinforce_pp'",
    ),
    (
        "grpo: groups across prompts",
        "grpo.py",
        ".view(-1, args.samples_per_prompt)",
        ".view(args.samples_per_prompt, -1).T.contiguous()",
        SIBLINGS,
    ),
    ("grpo: equal scores", "grpo.py", "masked_fill(equal, 0.0)", "masked_fill(equal & False, 0.0)", SIBLINGS),
    ("grpo: k3 upside down", "grpo.py", "k3 = (-d).exp() - 1 + d", "k3 = d.exp() - 1 - d", SIBLINGS),
    (
        "grpo: token mean",
        "grpo.py",
        "(token_losses.sum(1) / mask.sum(1)).sum() / num_sequences",
        "token_losses.sum() / num_tokens",
        SIBLINGS,
    ),
    (
        "rloo: its own score in the baseline",
        "rloo.py",
        "(groups.sum(1, keepdim=True) - groups) / (k - 1)",
        "groups.mean(1, keepdim=True)",
        SIBLINGS,
    ),
    (
        "rloo: mean over tokens",
        "rloo.py",
        "logprobs[mask]).sum() / num_sequences",
        "logprobs[mask]).sum() / num_tokens",
        SIBLINGS,
    ),
    (
        "baseline: statistics over tokens",
        "reinforce_pp_baseline.py",
        "n = all_sum(torch.ones_like(centered).sum())",
        'n = all_sum(rollout["response_mask"].sum())',
        SIBLINGS,
    ),
    (
        "remax: no greedy baseline",
        "remax.py",
        'rollout["scores"] - rollout["greedy_scores"]',
        'rollout["scores"]',
        SIBLINGS,
    ),
    (
        "remax: kl of this token only",
        "remax.py",
        "returns = rewards.flip(1).cumsum(1).flip(1)",
        "returns = rewards.clone()",
        SIBLINGS,
    ),
    (
        "ppo: targets from whitened advantages",
        "ppo.py",
        '"returns": (advantages + values)',
        '"returns": (whiten(advantages, mask) + values)',
        SIBLINGS,
    ),
    ("ppo: no discount by lambda", "ppo.py", "args.gae_lambda * running", "running", SIBLINGS),
    ("ppo: the smaller value error", "ppo.py", "0.5 * torch.max(", "0.5 * torch.min(", SIBLINGS),
    (
        "ppo: critic per rank",
        "ppo.py",
        "(critic_loss * world_size).backward()",
        "critic_loss.backward()",
        f"{RANKS} -k 'float64 and ppo'",
    ),
    (
        "a skeleton drifts",
        "rloo.py",
        "        # 6. Advantages\n",
        "        # 6. The advantages\n",
        "tests/test_skeleton.py",
    ),
    (
        "loss on the prompt",
        SFT,
        "mask = completion_mask[:, 1:]",
        "mask = attention_mask[:, 1:].bool()",
        "tests/test_sft.py",
    ),
    (
        "loss on the wrong token",
        SFT,
        "mask = completion_mask[:, 1:]",
        "mask = completion_mask[:, :-1]",
        "tests/test_sft.py",
    ),
    ("no eos in the examples", SFT, "+ [tokenizer.eos_token_id]", "", "tests/test_sft.py"),
    (
        "sft: mean over ranks",
        SFT,
        "(mb_loss * world_size).backward()",
        "mb_loss.backward()",
        "tests/test_sft.py -k ranks",
    ),
    (
        "checkpoint written in place",
        "ppo.py",
        'temporary = path.with_name(path.name + ".tmp")',
        "temporary = path",
        f"{FAULTS} -k middle_of_a_checkpoint",
    ),
    (
        "digest not checked",
        RPP,
        'if path.with_name(path.name + ".sha256").read_text().split()[:1] != [digest]:',
        "if False:",
        "tests/test_refusals.py -k 'bit and reinforce_pp and not baseline'",
    ),
    (
        "changed flags pass",
        RPP,
        "    if changed:\n",
        "    if False:\n",
        "tests/test_refusals.py -k 'changed and reinforce_pp and not baseline'",
    ),
    (
        "weights touched by a gradient that is not finite",
        RPP,
        "if all_sum((~numbers.isfinite()).sum()) == 0:",
        "if True:",
        f"{FAULTS} -k 'before_the_weights and reinforce_pp'",
    ),
    ("signals ignored", RPP, "stopped = bool(all_sum(", "stopped = False and bool(all_sum(", f"{FAULTS} -k finishes"),
    (
        "a run without checkpoint logs its beginning twice",
        RPP,
        'if line["iteration"] <= iteration and iteration]',
        'if line["iteration"] <= iteration]',
        f"{FAULTS} -k starts_over",
    ),
    (
        "torchrun's restart finds no run",
        RPP,
        "return str(max(found)) if found else None",
        "return None",
        f"{FAULTS} -k starts_it_again",
    ),
    (
        "a full disk leaves rubbish",
        RPP,
        "        temporary.unlink(missing_ok=True)\n",
        "        pass\n",
        f"{FAULTS} -k 'last_good and reinforce_pp'",
    ),
    (
        "control characters reach the terminal",
        RPP,
        'if c.isprintable() or c == "\\n"',
        "if True",
        f"{FAULTS} -k 'steer and reinforce_pp'",
    ),
    ("warnings every time", RPP, "if key not in warned:", "if True:", f"{FAULTS} -k 'said_once and reinforce_pp'"),
    (
        "a reward model passes for a policy",
        RPP,
        'if "SequenceClassification" in kind:',
        "if False:",
        "tests/test_refusals.py -k 'as and policy and reinforce_pp and not baseline'",
    ),
    (
        "a body without head passes for a policy",
        "rloo.py",
        'give a causal LM that is whole")\n',
        '") if False else None\n',
        "tests/test_refusals.py -k 'without and head and rloo'",
    ),
    ("preference upside down", RM, "softplus(-(chosen_scores", "softplus((chosen_scores", BRADLEY),
    ("margin with the wrong sign", RM, "- rejected_scores - margin))", "- rejected_scores + margin))", BRADLEY),
    ("centred differences", RM, "(chosen_scores + rejected_scores).square()", "chosen_scores.square()", CENTRED),
    (
        "score at the last column",
        RM,
        "last = (torch.arange(input_ids.shape[1], device=input_ids.device) * attention_mask).argmax(1)",
        "last = torch.full((len(input_ids),), input_ids.shape[1] - 1)",
        f"{RM_TESTS} -k padding",
    ),
    (
        "score at the token before eos",
        RM,
        "scores = self.classifier.score(hidden[torch.arange(len(last), device=last.device), last])",
        "scores = self.classifier.score(hidden[torch.arange(len(last), device=last.device), last - 1])",
        f"{RM_TESTS} -k padding",
    ),
    (
        "reward model without position ids",
        RM,
        '"attention_mask": attention_mask, "position_ids": positions}',
        '"attention_mask": attention_mask}',
        f"{RM_TESTS} -k padding",
    ),
    ("pad stays eos", RM, "in (None, tokenizer.eos_token_id):", "is None:", f"{RM_TESTS} -k padding"),
    (
        "the config does not say which id is padding",
        RM,
        "classifier.config.get_text_config().pad_token_id = tokenizer.pad_token_id",
        "pass",
        f"{RM_TESTS} -k padding",
    ),
    ("centring left out", RM, "mb_loss + args.center_rewards_coefficient * centering", "mb_loss", PLAIN),
    ("margin column ignored", RM, 'args.margin if row.get("margin") is None else row["margin"]', "args.margin", PLAIN),
    (
        "pairs counted per micro-batch",
        RM,
        "margins(args, piece, device), args.batch_size)",
        "margins(args, piece, device), len(piece))",
        PLAIN,
    ),
    ("reward model: mean over ranks", RM, "(objective * world_size).backward()", "objective.backward()", PLAIN),
    ("equal pairs stay", RM, 'if row["chosen_ids"] != row["rejected_ids"]:', "if True:", f"{RM_TESTS} -k cut"),
    ("template kept for texts", RM, "tokenizer.chat_template = None", "pass", f"{RM_TESTS} -k template_is_kept"),
    (
        "the critic's head is new",
        "ppo.py",
        'if info["missing_keys"]:\n        torch.nn.init.zeros_',
        "if True:\n        torch.nn.init.zeros_",
        f"{RM_TESTS} -k critic_starts",
    ),
    (
        "the critic reads foreign ids",
        "ppo.py",
        "if not vocab.items() <= its_vocab.items():",
        "if False:",
        f"{RM_TESTS} -k critic_with",
    ),
]


@dataclass
class Args:
    only: str = ""
    """Only mutants whose name contains this."""
    skip: int = 0
    """Leave out so many at the beginning."""


def tests_pass(tests: str, script: str = "", old: str = "", new: str = "") -> bool:
    """Whether the tests pass in a copy of the repository, with the line of the script changed if one is given."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        shutil.copytree(
            ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", ".trl", "runs", "__pycache__", ".*_cache")
        )
        if script:
            source = (copy / script).read_text()
            if source.count(old) != 1:
                raise SystemExit(f"{script} has {source.count(old)} places like {old!r}: bring the mutant up to date")
            (copy / script).write_text(source.replace(old, new))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *shlex.split(tests)]
        result = subprocess.run(command, cwd=copy, capture_output=True, text=True)
        if result.returncode not in (0, 1):  # neither passed nor failed: nothing was tested
            raise SystemExit(f"{tests}: pytest ended with {result.returncode}\n{result.stdout[-2000:]}")
    return result.returncode == 0


def main(args: Args) -> None:
    chosen = [mutant for mutant in MUTANTS if args.only in mutant[0]][args.skip :]
    survivors = []
    for tests in dict.fromkeys(mutant[-1] for mutant in chosen):
        if not tests_pass(tests):
            raise SystemExit(f"{tests}: fails without any mutant, so it cannot tell")
    for name, script, old, new, tests in chosen:
        alive = tests_pass(tests, script, old, new)
        survivors += [name] * alive
        print(f"{'SURVIVED' if alive else 'noticed ':8s}  {name}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants noticed")
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
