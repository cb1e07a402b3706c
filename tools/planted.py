"""Known bugs by name, each a string of one function and what it becomes. To plant one in a script:

    python tools/planted.py "no baseline"        git restore reinforce.py undoes it

tests/mutants.py checks that a test notices each. experiments/bugs.py and experiments/learn.py train with some. Those
that are planted in tests/references.py, too, have their numbers in conformance/vectors.json, which names them.
"""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import sync
from sync import ROOT

# fmt: off

# The tests that notice them, and for each bug: its name, script.function, what is there once, what it becomes;
# and what is in tests/references.py, one or several times, and becomes there. "references": in this file only.
PLANTED = {
    "test_estimators.py": [
        # Advantages
        ("no baseline", "reinforce.compute_advantages", "(rewards - mean)", "rewards",
         "x - math.fsum(R) / len(R)", "x"),
        ("baseline too low", "reinforce.compute_advantages", "(rewards - mean)", "(rewards + 10.0)"),
        ("own reward in the baseline", "rloo.compute_advantages",
         "(groups - others)", "(groups - groups.mean(1, keepdim=True))",
         "math.fsum(others) / len(others)", "math.fsum(group) / len(group)"),
        ("groups across prompts", "rloo.compute_advantages",
         "rewards.view(-1, args.samples_per_prompt)  # (prompts, k)\n    others = (groups.sum(1,",
         "rewards.view(args.samples_per_prompt, -1)  # (prompts, k)\n    others = (groups.sum(0,"),
        ("opo: over k", "opo.compute_advantages", "lengths.sum(1, keepdim=True)", "lengths.size(1)"),
        ("lengths not in the baseline", "opo.compute_advantages",
         "(lengths * groups).sum(1, keepdim=True) / lengths.sum(1, keepdim=True)", "groups.mean(1, keepdim=True)",
         "math.fsum(t * r for t, r in zip(T, scores)) / sum(T)", "math.fsum(scores) / len(scores)"),
        ("weight 1 for k", "raft.compute_advantages", "best, args.samples_per_prompt", "best, 1.0",
         "len(group) if i == best", "1.0 if i == best"),
        ("no greedy baseline", "remax.compute_advantages", ' - rollout["greedy_scores"]', "",
         "[x - greedy for", "[x for"),
        ("no division by the mean", "maxrl.compute_advantages", "(groups - mean) / mean", "groups - mean",
         "(x - mean) / mean for", "x - mean for"),
        ("failures for successes", "maxrl.compute_advantages", "- mean) / mean)", "- mean) / (1 - mean))",
         "(x - mean) / mean for", "(x - mean) / (1 - mean) for"),
        ("std for mean", "maxrl.compute_advantages",
         "(groups - mean) / mean", "(groups - mean) / (groups.std(1, keepdim=True) + 1e-4)",
         "(x - mean) / mean for", "(x - mean) / (torch.tensor(group).std().item() + 1e-4) for"),
        ("std for mean, 1e-6 added", "maxrl.compute_advantages",
         "(groups - mean) / mean", "(groups - mean) / (groups.std(1, keepdim=True) + 1e-6)",
         "(x - mean) / mean for", "(x - mean) / (torch.tensor(group).std().item() + 1e-6) for"),
        ("own score not in the baseline", "dr_grpo.compute_advantages",
         "keepdim=True)).view(-1, 1)", "keepdim=True)).view(-1, 1) / (1 - 1 / args.samples_per_prompt)",
         'return minus_group_means(rollout["scores"].tolist(), args)',
         'return [x / (1 - 1 / args.samples_per_prompt) for x in minus_group_means(rollout["scores"].tolist(), args)]'),
        ("equal scores count", "grpo.compute_advantages", "groups - groups[:, :1]", "groups - 0.0"),
        ("groups along the wrong axis", "grpo.compute_advantages",
         "(-1, args.samples_per_prompt)", "(args.samples_per_prompt, -1).T.contiguous()"),
        ("a group spans two prompts", "grpo.compute_advantages",
         "(-1, args.samples_per_prompt)", "(-1, 2 * args.samples_per_prompt)"),
        ("std with k", "grpo.compute_advantages", "shifted.std(1,", "shifted.std(1, correction=0,",
         "(len(group) - 1))", "len(group))"),
        ("1e-6 or less added to the std", "grpo.compute_advantages", "+ 1e-4", "+ 1e-9",
         "(std + 1e-4)", "(std or 1.0)"),
        ("no std", "grpo.compute_advantages", "/ (shifted.std(1, keepdim=True) + 1e-4)", "",
         "[x / (std + 1e-4) for x in group]", "group"),
        ("dapo: long responses are paid", "dapo.compute_advantages", "- penalty", "+ penalty"),
        ("gdpo: std of all rewards", "gdpo.compute_advantages", "shifted.std(1, ", "shifted.std((1, 2), "),
        ("gdpo: no weights", "gdpo.compute_advantages", "normalized @ weights", "normalized.sum(2)"),
        ("gdpo: no std of the batch", "gdpo.compute_advantages", "max(variance, 1e-8)", "1.0"),
        ("std with n - 1", "reinforce_pp_baseline.compute_advantages",
         "(centered.numel() * WORLD_SIZE)", "(centered.numel() - 1)",
         "for x in centered) / len(centered)", "for x in centered) / (len(centered) - 1)"),
        ("std of the group", "reinforce_pp_baseline.compute_advantages",
         "math.sqrt(max(variance, 1e-8))", "(groups.std(1, keepdim=True) + 1e-4)",
         "[x / std for x in centered]", "normalized(rollout['scores'].tolist(), args)"),
        ("variance with n - 1", "reinforce_pp.whiten",
         "total(centered.square()) / count", "total(centered.square()) / (count - 1)",
         "for x in numbers) / len(numbers)", "for x in numbers) / (len(numbers) - 1)"),
        ("not whitened", "reinforce_pp.whiten", "return centered / math.sqrt(max(variance, 1e-8))", "return x * mask",
         "[[(x - mean) / std for x in row] for row in rows]", "rows"),
        ("mean not subtracted", "reinforce_pp.whiten", "return centered / ", "return x * mask / ",
         "[(x - mean) / std for x in row]", "[x / std for x in row]"),
        ("whitened with the padding", "reinforce_pp.whiten", "total(mask)", "mask.numel()"),
        ("kl with the wrong sign", "reinforce_pp.compute_advantages", "- args.kl_coef", "+ args.kl_coef"),
        ("returns from the left", "reinforce_pp.compute_advantages", ".flip(1).cumsum(1).flip(1)", ".cumsum(1)",
         "math.fsum(kl[t:])", "math.fsum(kl[: t + 1])"),
        ("only the KL of the token", "reinforce_pp.compute_advantages", ".flip(1).cumsum(1).flip(1)", "",
         "math.fsum(kl[t:])", "kl[t]"),
        ("advantages with a gradient", "reinforce_pp.compute_advantages", "@torch.no_grad()", ""),
        ("lambda 1", "ppo.compute_advantages", "args.gae_lambda * advantage", "advantage",
         "args.gae_lambda ** (s - t)", "1.0"),
        ("next value left out", "ppo.compute_advantages", "+ next_value - values", "- values",
         "reward[t] + V[t + 1]", "reward[t]"),
        ("score on every token", "ppo.compute_advantages",
         'rewards.scatter_add(1, last, rollout["scores"].view(-1, 1))',
         'rewards + rollout["scores"].view(-1, 1) * mask',
         "reward[-1] += score", "reward = [x + score for x in reward]"),
        ("away from the teacher", "distill.compute_advantages",
         'rollout["ref_logprobs"] - rollout["old_logprobs"]', 'rollout["old_logprobs"] - rollout["ref_logprobs"]',
         "[teacher - old for", "[old - teacher for"),
        ("sdpo: away from the demonstration", "sdpo.compute_advantages",
         'rollout["teacher_logprobs"] -', '-rollout["teacher_logprobs"] +'),
        # Losses
        ("mean over tokens, not responses", "reinforce.policy_loss",
         "* logprobs).sum() / num_sequences", "* logprobs).sum() / num_tokens",
         "for token in tokens(batch, new)) / num_sequences", "for token in tokens(batch, new)) / num_tokens"),
        ("mean over responses, not tokens", "remax.policy_loss",
         "* logprobs).sum() / num_tokens", "* logprobs).sum() / num_sequences",
         "for token in tokens(batch, new)) / num_tokens, None",
         "for token in tokens(batch, new)) / num_sequences, None"),
        ("sum over tokens, mean over responses", "reinforce_pp.policy_loss",
         "torch.min(unclipped, clipped).sum() / num_tokens", "torch.min(unclipped, clipped).sum() / num_sequences",
         "new, num_tokens, num_tokens)", "new, num_sequences, num_tokens)"),
        ("mean over tokens", "gdpo.policy_loss",
         "(1) / lengths).sum() / num_sequences", "(1)).sum() / num_tokens",
         "/ token.length / num_sequences", "/ num_tokens"),
        ("token mean in grpo", "grpo.policy_loss", "clip_losses.sum(1) / lengths", "clip_losses.mean(1)"),
        ("dr_grpo: divided by the length", "dr_grpo.policy_loss", ".sum() / args.max_response_length",
         '.sum(1).div(batch["response_mask"].sum(1)).sum()'),
        ("mean over tokens, not L_max", "dr_grpo.policy_loss",
         "/ args.max_response_length / num_sequences", "/ num_tokens",
         "num_sequences * args.max_response_length", "num_tokens"),
        ("padded length, not L_max", "dr_grpo.policy_loss", "/ args.max_response_length", "/ logprobs.shape[1]",
         "num_sequences * args.max_response_length", "num_sequences * new.shape[1]"),
        ("ratio always 1", "grpo.policy_loss", '- batch["old_logprobs"]', "- logprobs.detach()"),
        ("no ratio", "dr_grpo.policy_loss", '- batch["old_logprobs"]', "- logprobs.detach()"),
        ("ratio upside down", "grpo.policy_loss",
         '(logprobs - batch["old_logprobs"]).exp()', '(batch["old_logprobs"] - logprobs).exp()',
         "(new[i, t] - old).exp()", "(old - new[i, t]).exp()"),
        ("old log-probs of the reference", "grpo.policy_loss", '- batch["old_logprobs"]', '- batch["ref_logprobs"]'),
        ("clip with max", "grpo.policy_loss", "torch.min(", "torch.max(",
         "> 0 and ratio > 1 + high:\n        return (1 + high) * advantage, True\n    if advantage < 0 and",
         "< 0 and ratio > 1 + high:\n        return (1 + high) * advantage, True\n    if advantage > 0 and"),
        ("dapo: lower clip above", "dapo.policy_loss", "1 + args.clip_eps_high", "1 + args.clip_eps_low"),
        ("k1 for k3", "grpo.policy_loss", "log_ref_ratio.exp() - 1 - log_ref_ratio", "-log_ref_ratio",
         "k3 = (-d).exp() - 1 + d", "k3 = d"),
        ("k2 for k3", "grpo.policy_loss", "log_ref_ratio.exp() - 1 - log_ref_ratio", "log_ref_ratio.square() / 2",
         "k3 = (-d).exp() - 1 + d", "k3 = d**2 / 2"),
        ("k3 upside down", "grpo.policy_loss", "log_ref_ratio.exp() - 1 -", "(-log_ref_ratio).exp() - 1 +",
         "k3 = (-d).exp() - 1 + d", "k3 = d.exp() - 1 - d"),
        ("a constant in the loss", "grpo.policy_loss", "- 1 - log_ref_ratio", "- log_ref_ratio"),
        ("KL times ratio", "grpo.policy_loss", "k3.sum(1)", "(ratio * k3).sum(1)",
         "k3 = (-d).exp() - 1 + d", "k3 = token.ratio * ((-d).exp() - 1 + d)"),
        ("KL over all tokens", "grpo.policy_loss",
         "(k3.sum(1) / lengths).sum() / num_sequences", "k3.sum() / num_tokens",
         "(args.kl_coef * k3 - objective) / token.length / num_sequences",
         "args.kl_coef * k3 / num_tokens - objective / token.length / num_sequences"),
        ("KL of the old policy", "grpo.policy_loss",
         '["ref_logprobs"] - logprobs', '["ref_logprobs"] - batch["old_logprobs"]',
         "d = token.new - token.ref", "d = torch.tensor(token.old - token.ref)"),
        ("k1 for k2", "reinforce_pp_baseline.policy_loss", "log_ref_ratio.square() / 2", "-log_ref_ratio",
         "(token.new - token.ref) ** 2 / 2", "(token.new - token.ref)"),
        ("k3 for k2", "reinforce_pp_baseline.policy_loss",
         "log_ref_ratio.square() / 2", "log_ref_ratio.exp() - 1 - log_ref_ratio",
         "(token.new - token.ref) ** 2 / 2", "(token.ref - token.new).expm1() + token.new - token.ref"),
        ("k2 of the old policy", "reinforce_pp_baseline.policy_loss", "] - logprobs", '] - batch["old_logprobs"]'),
        ("sum of log-ratios", "gspo.policy_loss", "log_ratio.sum(1) / lengths", "log_ratio.sum(1)",
         "(token.new - token.old) / token.length", "token.new - token.old"),
        ("a ratio for each token", "gspo.policy_loss", "mean_log_ratio.exp().view(-1, 1)", "log_ratio.exp()",
         "log_ratios[token.row].exp()", "token.ratio"),
        ("weight not clipped", "cispo.policy_loss",
         "ratio.clamp(1 - args.clip_eps_low, 1 + args.clip_eps_high).detach()", "ratio.detach()",
         "min(max(ratio, 1 - args.clip_eps_low), 1 + args.clip_eps_high)", "ratio"),
        ("cispo: weight with a gradient", "cispo.policy_loss", "clip_eps_high).detach()", "clip_eps_high)"),
        ("tau of the other sign", "sapo.policy_loss", "advantages > 0", "advantages < 0",
         "args.tau_pos if token.advantage > 0", "args.tau_pos if token.advantage < 0"),
        ("no factor 4 / tau", "sapo.policy_loss", "4 / tau *", "1.0 *", "gate = 4 / tau /", "gate = 1.0 /"),
        ("ratios, not probabilities", "dppo.policy_loss",
         "(logprobs.exp() - old_logprobs.exp())", "((logprobs - old_logprobs).exp() - 1)",
         "math.exp(token.new.item()) - math.exp(token.old)", "token.ratio.item() - 1"),
        ("limit for either sign of A", "dppo.policy_loss",
         "torch.where(advantages > 0, change > args.delta, change < -args.delta)", "change.abs() > args.delta",
         "change > args.delta if token.advantage > 0 else change < -args.delta", "abs(change) > args.delta"),
        ("weight without a limit", "dppo.policy_loss", ".clamp(max=args.max_ratio)", "",
         "min(token.ratio.item(), args.max_ratio)", "token.ratio.item()"),
        ("dppo: against the advantage", "dppo.policy_loss", "change < -args.delta", "change > args.delta"),
        ("dppo: weight with a gradient", "dppo.policy_loss", "old_logprobs).exp().detach()", "old_logprobs).exp()"),
        ("no gate", "flash_reinforce.policy_loss", "mean_divergence > args.delta", "mean_divergence < -1",
         "divergence[token.row] <= args.delta:", "True:"),
        ("ratios in the gate", "flash_reinforce.policy_loss",
         "p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()", "(q / p - 1).abs()",
         "d = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))", "d = abs(q / p - 1)"),
        ("no ratio in the weight", "flash_reinforce.policy_loss",
         "weight = ratio.masked_fill(", "weight = torch.ones_like(ratio).masked_fill(",
         "weight = token.ratio.item() * token.advantage", "weight = token.advantage"),
        ("sum over a response's tokens", "flash_reinforce.policy_loss",
         "((weight * logprobs).sum(1) / lengths).sum()", "(weight * logprobs).sum()",
         "weight = token.ratio.item() * token.advantage / token.length",
         "weight = token.ratio.item() * token.advantage"),
        ("flash: ratio with a gradient", "flash_reinforce.policy_loss", "logprobs.detach()", "logprobs"),
        ("flash: the gate keeps the far ones", "flash_reinforce.policy_loss", "> args.delta", "<= args.delta"),
        ("flash: over the accepted", "flash_reinforce.policy_loss", "lengths).sum() / num_sequences",
         "lengths).sum() / (~rejected).sum()"),
        ("ppo: the smaller value error", "ppo.value_loss", "torch.max(", "torch.min("),
        # Only in the loops, since no script has one line for it
        ("the batch as one group", "references", "[values[i : i + k] for i in range(0, len(values), k)]", "[values]"),
        ("std over tokens", "references", "[x / std for x in centered]",
         "whitened([[x] * n for x, n in zip(centered, rollout['response_mask'].sum(1).tolist())])"),
        ("std over tokens, with n - 1", "references", "[x / std for x in centered]",
         "[[y * math.sqrt(1 - 1 / int(rollout['response_mask'].sum())) for y in row] for row in "
         "whitened([[x] * n for x, n in zip(centered, rollout['response_mask'].sum(1).tolist())])]"),
        ("std before the group means", "references", "[x / std for x in centered]",
         "[x / (rollout['scores'].std().item() + 1e-4) for x in centered]"),
        ("no clip", "references", "return (1 + high) * advantage, True", "return ratio * advantage, True"),
        ("clip for either sign of A", "references", "if advantage > 0 and ratio > 1 + high", "if ratio > 1 + high"),
    ],
    "test_tools.py": [
        ("tools: results are learned", "reinforce_pp_tools.generate", " & ~from_tool", ""),
    ],
    "test_lora.py": [
        ("lora: the adapter in the reference", "grpo_lora.main", "with policy.disable_adapter():", "if True:"),
    ],
    "test_fsdp.py": [
        ("fsdp: a mean", "grpo_fsdp.shard", "divide_factor(1.0)", "divide_factor(float(WORLD_SIZE))"),
    ],
    "test_async.py": [
        ("async: the first weights stay", "flash_reinforce_async.sample", "policy.load_state_dict(", "len("),
    ],
    "test_vllm.py -m vllm": [
        ("vllm: the first weights stay", "grpo_vllm.generate", "sync_weights(model)", "pass"),
    ],
    "test_ranks.py -k [grpo]": [
        ("responses of a micro-batch", "grpo.main", "logprobs, num_sequences,", "logprobs, len(logprobs),"),
        ("gradients are averaged", "grpo.optimizer_step",
         "all_sum(parameter.grad)", "all_sum(parameter.grad.div_(WORLD_SIZE))"),
        ("gradients stay on their rank", "grpo.optimizer_step", "all_sum(parameter.grad)", "parameter.grad"),
        ("metrics of a rank", "grpo.total", "all_sum(x.sum())", "x.sum()"),
        ("held-out scores of a rank", "grpo.evaluate", "all_sum(scores)", "scores"),
        ("ranks draw the same", "grpo.main", "iteration * WORLD_SIZE + RANK", "iteration"),
        ("ranks take the same prompts", "grpo.choose_rows", "[RANK]", "[0]"),
        ("scores of another prompt", "grpo.main", "row in prompt_rows for", "row in prompt_rows[::-1] for"),
        ("kl the other way round", "grpo.main", '= rollout["old_logprobs"] - rollout["ref_logprobs"]',
         '= rollout["ref_logprobs"] - rollout["old_logprobs"]'),
        ("reference log-probs of other rows", "grpo.main", "rollout_logprobs(args, reference, rollout)",
         "rollout_logprobs(args, reference, rollout).flip(0)"),
        ("a reference that moves", "grpo.main", "copy.deepcopy(policy)", "policy"),
        ("reference at temperature 1", "grpo.rollout_logprobs",
         "token_logprobs(args,", 'token_logprobs(type(args)(**vars(args) | {"temperature": 1.0}),'),
    ],
    "test_metrics.py -k rank-grpo]": [
        ("entropy of a response", "grpo.main", '["entropy"]) / response_tokens', '["entropy"]) / args.batch_size'),
        ("truncated is its complement", "grpo.main", 'total(rollout["truncated"])', '1 - total(rollout["truncated"])'),
        ("grad_norm is a sum", "grpo.main", "float(sum(grad_norms)) / len(grad_norms)", "float(sum(grad_norms))"),
        ("kl of a token", "grpo.main",
         'total(rollout["kl"]) / args.batch_size', 'total(rollout["kl"]) / response_tokens'),
        ("loss statistics are sums", "grpo.main", "total(value) / len(grad_norms)", "total(value)"),
    ],
    "test_ranks.py -k [reinforce]": [
        ("mean of a rank", "reinforce.compute_advantages", "= total(rewards) / ", "= WORLD_SIZE * rewards.sum() / "),
    ],
    "test_ranks.py -k [flash_reinforce]": [
        ("flash: mean of a rank", "flash_reinforce.compute_advantages",
         "= total(scores)", "= WORLD_SIZE * scores.sum()"),
    ],
    "test_ranks.py -k [reinforce_pp]": [
        ("tokens divided by ranks", "reinforce_pp.main", "[minibatch])", "[minibatch]) / WORLD_SIZE"),
    ],
    "test_ranks.py -k [gdpo]": [
        ("gdpo: std of a rank", "gdpo.compute_advantages",
         "total(sums.square()) / (", "sums.square().sum().item() / (1 / WORLD_SIZE * "),
    ],
    "test_ranks.py -k [ppo]": [
        ("ppo: value loss of a micro-batch", "ppo.main",
         "values, num_tokens)", 'values, batch["response_mask"].sum())'),
    ],
    "test_ranks.py -k [remax]": [
        ("remax: the baseline is sampled", "remax.main",
         "prompt_rows], greedy=True)", "prompt_rows])"),
    ],
    "test_ranks.py -k [sft]": [
        ("sft: tokens of a micro-batch", "sft.main", "batch, num_tokens)", 'batch, batch["completion_mask"].sum())'),
    ],
    "test_dapo.py": [
        ("dapo: no dynamic sampling", "dapo.dynamic_sampling", "is_full = is_useful", "is_full = True or is_useful"),
    ],
    "test_sdpo.py": [
        ("sdpo: a response demonstrates to itself", "sdpo.teach", " and j != i", ""),
    ],
    "test_rollout.py": [
        ("eos masked", "grpo.generate", ":].bool()", ":].bool() & ~torch.isin(sequences[:, P:], eos)"),
        ("one eos id of several", "grpo.eos_ids", ", *ids}", "}"),
        ("sampling without temperature", "grpo.generate", "logits, args.temperature", "logits, 1.0"),
        ("log-probs without temperature", "grpo.token_logprobs",
         "logits, args.temperature", "logits, 1.0"),
        ("log-probs one column off", "grpo.token_logprobs", ".logits[:, :-1]", ".logits[:, 1:]"),
        ("entropy is a mean", "grpo.generate", "entr(probs).sum(1)", "entr(probs).mean(1)"),
        ("attention to the padding", "grpo.left_pad",
         "(padded >= 0).long()", "torch.ones_like(padded)"),
        ("padding counts in positions", "grpo.model_inputs", "attention_mask.c", "torch.ones_like(attention_mask).c"),
        ("cache of other rows", "grpo.generate", "cache(unfinished)", "cache(torch.arange(len(unfinished)))"),
        ("micro-batch cut too short", "grpo.micro_batches", ".any(0)", ".all(0)"),
        ("gradients in bfloat16 sampling", "grpo.generate", "torch.no_grad()", "torch.enable_grad()"),
        ("an appended EOS stays", "grpo.token_ids",
         "ids.pop()", "pass"),
        ("no zero_grad", "grpo.optimizer_step", "optimizer.zero_grad()", "pass"),
        ("no gradient clipping", "grpo.optimizer_step", "args.max_grad_norm)", "math.inf)"),
        ("dropout on", "grpo.load_model",
         "model.to(args.device)", "model.to(args.device).train()"),
        ("ppo: critic one token off", "ppo.Critic", "[:, -T - 1 : -1]", "[:, -T:]"),
    ],
    "test_rewards.py": [
        ("penalty after the scale", "grpo.process_scores", "* truncated)", "* truncated / args.reward_scale)"),
        ("a reward model reads padding", "grpo.load_reward",
         "model.base_model(**inputs,", 'model.base_model(**inputs | {"attention_mask": torch.ones_like(inputs["attention_mask"])},'),
    ],
    "test_runs.py": [
        ("resume without optimizer", "grpo.main", ', "optimizer": optimizer', ""),
        ("a folder without a run is taken", "grpo.open_run",
         'not any(run_dir.glob("*"))', "True"),
    ],
    "test_bad_input.py": [
        ("ranks that differ", "grpo.open_run",
         "== checksum * WORLD_SIZE", "!= -1"),
    ],
    "test_sft.py": [
        ("sft: loss on the prompt", "sft.encode", "[False] * len(prompt_ids)", "[True] * len(prompt_ids)"),
    ],
    "test_reward_model.py": [
        ("preference upside down", "reward_model.preference_loss", "-(chosen_scores", "(chosen_scores"),
    ],
    "test_dpo.py": [
        ("dpo: no reference", "dpo.dpo_loss", " - ref_chosen_logprobs", ""),
    ],
    "test_toy.py -k grpo": [
        ("it learns the wrong way", "grpo.main", "loss.backward()", "(-loss).backward()"),
    ],
}
# fmt: on


class Planted(NamedTuple):
    tests: str  # file and options of pytest
    name: str
    where: str
    old: str
    new: str
    old_in_references: str = ""
    new_in_references: str = ""

    @property
    def script(self) -> str:
        return self.where.partition(".")[0]

    def plant(self, source: str) -> str:
        """The source with the bug. ValueError if there is not exactly one place for it."""
        if self.where == "references":
            return self.plant_in_references(source)
        function = sync.functions(source).get(self.where.partition(".")[2], "")
        if function.count(self.old) != 1:
            raise ValueError(f"{self.name!r}: {self.where} has {function.count(self.old)} times {self.old!r}")
        return source.replace(function, function.replace(self.old, self.new))

    def plant_in_references(self, source: str) -> str:
        """The source of tests/references.py with the bug, wherever it fits. ValueError if it fits nowhere."""
        pair = (self.old, self.new) if self.where == "references" else self[5:]
        if not pair[0] or pair[0] not in source:
            raise ValueError(f"{self.name!r}: tests/references.py has no {pair[0]!r}")
        return source.replace(*pair)

    def path(self, folder: Path = ROOT) -> Path:
        return (sync.paths(folder) | {"references": folder / "tests" / "references.py"})[self.script]

    def plant_in(self, folder: Path) -> None:
        """Change the script in this folder."""
        self.path(folder).write_text(self.plant(self.path(folder).read_text()))

    def module(self) -> SimpleNamespace:
        """What the script with the bug defines."""
        namespace = dict(vars(importlib.import_module(self.script)))
        exec(self.plant(self.path().read_text()), namespace)
        return SimpleNamespace(**namespace)


ROWS = [(tests, *row) for tests, rows in PLANTED.items() for row in rows]
BUGS = {row[1]: Planted(*row) for row in ROWS}
# Those whose numbers are in conformance/vectors.json
IN_VECTORS = [bug for bug in BUGS.values() if bug.old_in_references or bug.where == "references"]

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in BUGS:
        sys.exit("error: give one of these names:\n" + "\n".join(BUGS))
    BUGS[sys.argv[1]].plant_in(ROOT)
