"""Break the scripts in the ways that such code is known to be broken, and check that a test notices each.

    python tests/mutants.py        all mutants, two at a time; --only kl: those whose name contains kl

A mutant is a copy of the repository in which one function of one script is changed in one place. It must make its tests
fail. Exit code 1 if one survives.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import sync
import tyro

ROOT = Path(__file__).resolve().parent.parent
VLLM = ROOT / ".venv-vllm" / "bin" / "python"  # made by make test-vllm
# fmt: off
SKIPPED = [".git", ".venv*", ".trl", ".verl", ".site", "site", "node_modules", "smollm2", "runs",
           "__pycache__", ".*_cache", "*.png"]

# The tests that must fail: what is wrong, in which function of which script, what is there once, what it becomes
MUTANTS = {
    "test_estimators.py": [
        ("kl with the wrong sign", "reinforce_pp.compute_advantages", "- args.kl_coef", "+ args.kl_coef"),
        ("whitened with the padding", "reinforce_pp.whiten", "total(mask)", "mask.numel()"),
        ("returns from the left", "reinforce_pp.compute_advantages", ".flip(1).cumsum(1).flip(1)", ".cumsum(1)"),
        ("advantages with a gradient", "reinforce_pp.compute_advantages", "@torch.no_grad()", ""),
        ("k3 upside down", "grpo.policy_loss", "log_ref_ratio.exp() - 1 -", "(-log_ref_ratio).exp() - 1 +"),
        ("k2 of the old policy", "reinforce_pp_baseline.policy_loss", "] - logprobs", '] - batch["old_logprobs"]'),
        ("a constant in the loss", "grpo.policy_loss", "- 1 - log_ref_ratio", "- log_ref_ratio"),
        ("equal scores count", "grpo.compute_advantages", "groups - groups[:, :1]", "groups - 0.0"),
        ("std with k", "grpo.compute_advantages", "shifted.std(1,", "shifted.std(1, correction=0,"),
        ("token mean in grpo", "grpo.policy_loss", "clip_losses.sum(1) / lengths", "clip_losses.mean(1)"),
        ("clip with max", "grpo.policy_loss", "torch.min(", "torch.max("),
        ("old log-probs of the reference", "grpo.policy_loss", '- batch["old_logprobs"]', '- batch["ref_logprobs"]'),
        ("ratio always 1", "grpo.policy_loss", '- batch["old_logprobs"]', "- logprobs.detach()"),
        ("groups along the wrong axis", "grpo.compute_advantages",
         "(-1, args.samples_per_prompt)", "(args.samples_per_prompt, -1).T.contiguous()"),
        ("a group spans two prompts", "grpo.compute_advantages",
         "(-1, args.samples_per_prompt)", "(-1, 2 * args.samples_per_prompt)"),
        ("no baseline", "reinforce.compute_advantages", "(rewards - mean)", "rewards"),
        ("rloo: own score", "rloo.compute_advantages", "(groups - others)", "(groups - groups.mean(1)[:, None])"),
        ("opo: all lengths alike", "opo.compute_advantages", ".sum(1).view_as(groups)", ".any(1).view_as(groups)"),
        ("opo: over k", "opo.compute_advantages", "lengths.sum(1, keepdim=True)", "lengths.size(1)"),
        ("dr_grpo: divided by the length", "dr_grpo.policy_loss", "/ args.max_response_length", "/ mask.sum(1)"),
        ("gspo: no mean", "gspo.policy_loss", "log_ratio.sum(1) / lengths", "log_ratio.sum(1)"),
        ("cispo: weight with a gradient", "cispo.policy_loss", "clip_eps_high).detach()", "clip_eps_high)"),
        ("sapo: the other tau", "sapo.policy_loss", "advantages > 0", "advantages < 0"),
        ("sapo: slope 1/4", "sapo.policy_loss", "4 / tau", "1 / tau"),
        ("dppo: against the advantage", "dppo.policy_loss", "change < -args.delta", "change > args.delta"),
        ("dppo: weight with a gradient", "dppo.policy_loss", "old_logprobs).exp().detach()", "old_logprobs).exp()"),
        ("flash: ratio with a gradient", "flash_reinforce.policy_loss", "logprobs.detach()", "logprobs"),
        ("flash: the gate keeps the far ones", "flash_reinforce.policy_loss", "> args.delta", "<= args.delta"),
        ("flash: over the accepted", "flash_reinforce.policy_loss", "lengths).sum() / num_sequences",
         "lengths).sum() / (~rejected).sum()"),
        ("gdpo: std of all rewards", "gdpo.compute_advantages", "shifted.std(1, ", "shifted.std((1, 2), "),
        ("gdpo: no weights", "gdpo.compute_advantages", "normalized @ weights", "normalized.sum(2)"),
        ("gdpo: no std of the batch", "gdpo.compute_advantages", "max(variance, 1e-8)", "1.0"),
        ("maxrl: over the failures", "maxrl.compute_advantages", "/ mean)", "/ (1 - mean))"),
        ("distill: away from the teacher", "distill.compute_advantages",
         'rollout["ref_logprobs"] - rollout["old_logprobs"]', 'rollout["old_logprobs"] - rollout["ref_logprobs"]'),
        ("sdpo: away from the demonstration", "sdpo.compute_advantages",
         'rollout["teacher_logprobs"] -', '-rollout["teacher_logprobs"] +'),
        ("dapo: lower clip above", "dapo.policy_loss", "1 + args.clip_eps_high", "1 + args.clip_eps_low"),
        ("dapo: long responses are paid", "dapo.compute_advantages", "- penalty", "+ penalty"),
        ("remax: no greedy baseline", "remax.compute_advantages", ' - rollout["greedy_scores"]', ""),
        ("ppo: no lambda", "ppo.compute_advantages", "args.gae_lambda * advantage", "advantage"),
        ("ppo: the smaller value error", "ppo.value_loss", "torch.max(", "torch.min("),
    ],
    "test_tools.py": [("tools: results are learned", "reinforce_pp_tools.generate", " & ~from_tool", "")],
    "test_lora.py": [
        ("lora: the adapter in the reference", "grpo_lora.main", "with policy.disable_adapter():", "if True:"),
    ],
    "test_fsdp.py": [("fsdp: a mean", "grpo_fsdp.shard", "divide_factor(1.0)", "divide_factor(float(WORLD_SIZE))")],
    "test_async.py": [
        ("async: the first weights stay", "flash_reinforce_async.sample", "policy.load_state_dict(", "len("),
    ],
    "test_vllm.py -m vllm": [("vllm: the first weights stay", "grpo_vllm.generate", "sync_weights(model)", "pass")],
    "test_ranks.py -k grpo": [
        ("responses of a micro-batch", "grpo.main", "logprobs, num_sequences,", "logprobs, len(logprobs),"),
        ("gradients are averaged", "grpo.optimizer_step", "= all_sum(", "= 1 / WORLD_SIZE * all_sum("),
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
        ("reference at temperature 1", "grpo.rollout_logprobs", "args.temperature", "1.0"),
    ],
    "test_ranks.py -k reinforce": [
        ("mean of a rank", "reinforce.compute_advantages", "= total(rewards) / ", "= WORLD_SIZE * rewards.sum() / "),
        ("flash: mean of a rank", "flash_reinforce.compute_advantages",
         "= total(scores)", "= WORLD_SIZE * scores.sum()"),
        ("tokens divided by ranks", "reinforce_pp.main", "[minibatch])", "[minibatch]) / WORLD_SIZE"),
    ],
    "test_ranks.py -k gdpo": [
        ("gdpo: std of a rank", "gdpo.compute_advantages",
         "total(sums.square()) / (", "sums.square().sum().item() / (1 / WORLD_SIZE * "),
    ],
    "test_ranks.py -k ppo": [
        ("ppo: value loss of a micro-batch", "ppo.main",
         "values, num_tokens)", 'values, batch["response_mask"].sum())'),
    ],
    "test_ranks.py -k remax": [
        ("remax: the baseline is sampled", "remax.main", "args, greedy=True)", "args)"),
    ],
    "test_ranks.py -k sft": [
        ("sft: tokens of a micro-batch", "sft.main", "batch, num_tokens)", 'batch, batch["completion_mask"].sum())'),
    ],
    "test_dapo.py": [
        ("dapo: no dynamic sampling", "dapo.dynamic_sampling", "is_full = is_useful", "is_full = True or is_useful"),
    ],
    "test_sdpo.py": [("sdpo: a response demonstrates to itself", "sdpo.teach", " and j != i", "")],
    "test_rollout.py": [
        ("eos masked", "grpo.generate", ":].bool()", ":].bool() & ~torch.isin(sequences[:, P:], eos)"),
        ("one eos id of several", "grpo.eos_ids", ", *ids}", "}"),
        ("sampling without temperature", "grpo.generate", "logits, args.temperature", "logits, 1.0"),
        ("log-probs without temperature", "grpo.token_logprobs", "(logits, temperature)", "(logits, 1.0)"),
        ("log-probs one column off", "grpo.token_logprobs", ".logits[:, :-1]", ".logits[:, 1:]"),
        ("entropy is a mean", "grpo.generate", "entr(probs).sum(1)", "entr(probs).mean(1)"),
        ("attention to the padding", "grpo.left_pad", "pad_sequence(masks, ", "pad_sequence(masks, padding_value=1, "),
        ("padding counts in positions", "grpo.model_inputs", "attention_mask.c", "torch.ones_like(attention_mask).c"),
        ("cache of other rows", "grpo.generate", "cache(unfinished)", "cache(torch.arange(len(unfinished)))"),
        ("micro-batch cut too short", "grpo.micro_batches", ".any(0)", ".all(0)"),
        ("gradients in bfloat16 sampling", "grpo.generate", "torch.no_grad()", "torch.enable_grad()"),
        ("an appended EOS stays", "grpo.token_ids", "ids[:-1] if", "ids if"),
        ("no zero_grad", "grpo.optimizer_step", "optimizer.zero_grad()", "pass"),
        ("no gradient clipping", "grpo.optimizer_step", "args.max_grad_norm)", "math.inf)"),
        ("dropout on", "grpo.load_model", ".eval()", ".train()"),
        ("ppo: critic one token off", "ppo.Critic", "[:, -T - 1 : -1]", "[:, -T:]"),
    ],
    "test_rewards.py": [
        ("penalty after the scale", "grpo.process_scores", "* truncated)", "* truncated / args.reward_scale)"),
        ("a reward model reads padding", "grpo.reward_model",
         "model_inputs(ids, mask)", "model_inputs(ids, torch.ones_like(mask))"),
    ],
    "test_runs.py": [
        ("resume without optimizer", "grpo.main", ', "optimizer": optimizer', ""),
        ("a folder without a run is taken", "grpo.find_run", '<= {"lock"}', "is not None"),
    ],
    "test_bad_input.py": [("ranks that differ", "grpo.check_ranks_agree", "not different", "True")],
    "test_sft.py": [("sft: loss on the prompt", "sft.encode", "[False] * len(prompt_ids)", "[True] * len(prompt_ids)")],
    "test_reward_model.py": [
        ("preference upside down", "reward_model.preference_loss", "-(chosen_scores", "(chosen_scores"),
    ],
    "test_dpo.py": [("dpo: no reference", "dpo.dpo_loss", " - ref_chosen_logprobs", "")],
    "test_toy.py -k grpo": [("it learns the wrong way", "grpo.main", "loss.backward()", "(-loss).backward()")],
}
# fmt: on


class Mutant(NamedTuple):
    name: str
    function: str
    old: str
    new: str

    def change(self, root: Path) -> None:
        """Change the script in this folder. ValueError if there is not exactly one place to change."""
        script, name = self.function.split(".")
        path = sync.paths(root)[script]
        # A definition, with its decorators, ends before two empty lines.
        definition = rf"^((?:@.*\n)*(?:def|class) {name}\b(?s:.*?)\n)(?=\n\n|\Z)"
        before, text, after = re.split(definition, path.read_text(), flags=re.MULTILINE)
        if text.count(self.old) != 1:
            raise ValueError(f"mutant {self.name!r}: {text.count(self.old)} places {self.old!r}")
        path.write_text(before + text.replace(self.old, self.new) + after)


def tests_pass(tests: str, mutant: Mutant | None = None) -> bool:
    """Whether the tests pass in a copy of the repository, with a mutant if given."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*SKIPPED))
        if mutant:
            mutant.change(copy)
        python = VLLM if "-m vllm" in tests else sys.executable
        command = [python, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
        options = dict(cwd=copy, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        result = subprocess.run([*command, *shlex.split(f"tests/{tests}")], **options)
    if result.returncode not in (0, 1):  # neither passed nor failed: nothing was tested
        raise SystemExit(f"{tests}: pytest ended with {result.returncode}\n{result.stdout[-2000:]}")
    return result.returncode == 0


@dataclass
class Args:
    only: str = ""  # only mutants whose name contains this
    tests: str = ""  # only mutants whose tests contain this


def main(args: Args) -> None:
    pairs = [(tests, Mutant(*row)) for tests, rows in MUTANTS.items() for row in rows]
    pairs = [(tests, mutant) for tests, mutant in pairs if args.only in mutant.name and args.tests in tests]
    if not VLLM.exists():
        pairs = [(tests, mutant) for tests, mutant in pairs if "-m vllm" not in tests]
    all_tests = list(dict.fromkeys(tests for tests, _ in pairs))
    survivors = 0
    with ThreadPoolExecutor(2) as pool:
        for tests, passed in zip(all_tests, pool.map(tests_pass, all_tests)):
            print(f"{'pass' if passed else 'FAIL':8}  {tests}, without a mutant", flush=True)
            if not passed:
                raise SystemExit("tests that fail anyway cannot notice a mutant")
        for (tests, mutant), survived in zip(pairs, pool.map(tests_pass, *zip(*pairs))):
            print(f"{'SURVIVED' if survived else 'noticed':8}  {mutant.name}  ({tests})", flush=True)
            survivors += survived
    print(f"{len(pairs) - survivors} of {len(pairs)} mutants noticed")
    sys.exit(survivors > 0)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
