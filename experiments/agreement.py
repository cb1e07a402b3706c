"""The gradient of one optimizer step: our scripts against TRL, verl and OpenRLHF, with the flags that should agree.

    python experiments/agreement.py                the first call makes experiments/.peers, 1.5 GB
    python experiments/agreement.py --only grpo    some scripts only; prints and writes nothing

Measures the runs of results/agreement.json again, where a new one is a line with script, flags, peer, peer_flags and
note. The note is empty, or a key of NOTES, which has the lines of the framework that make a difference and lines that
compute the same as the script. The difference is then measured with these lines, too.
"""

import json
import subprocess
from dataclasses import dataclass

import tyro
from common import ROOT, environment, load, made, save, table

# fmt: off
TRL = "trl.trainer.grpo_trainer:GRPOTrainer."
VERL = "verl.trainer.ppo.core_algos:"
OPENRLHF = "openrlhf.trainer.ppo_utils.experience_maker:RemoteExperienceMaker.compute_advantages_and_returns"
GROUP_STD = (OPENRLHF,
    "rewards = (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-9)",
    "rewards = (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-4)")
TOKEN_MEAN = "openrlhf.models.loss:aggregate_loss", "return (loss * loss_mask).sum() / batch_num_tokens * dp_size"
# Function, line, and the line that computes the same as the script
NOTES = {
    # use_bias_correction_kl, on by default, after DeepSeek-V3.2. GRPO's Eq. 3 does not have it.
    ("TRL", "KL times ratio"): [(TRL + "_compute_loss", "per_token_kl = per_token_kl * coef_1", "pass")],
    # The std has the differences between prompts in it. In Eq. 12 the group's mean is subtracted first.
    ("TRL", "std of scores"): [(TRL + "_generate_and_score_completions",
        "std_rewards = nanstd(rewards).expand_as(rewards)",
        "std_rewards = (rewards - mean_grouped_rewards).square().mean().sqrt().expand_as(rewards) - 1e-4")],
    # Added to the std of the group, where the scripts and TRL add 1e-4, and the papers nothing.
    ("verl", "std + 1e-6"): [(VERL + "compute_grpo_outcome_advantage",
        "scores[i] = (scores[i] - id2mean[index[i]]) / (id2std[index[i]] + epsilon)",
        "scores[i] = (scores[i] - id2mean[index[i]]) / (id2std[index[i]] + 1e-4)")],
    ("OpenRLHF", "std + 1e-9"): [GROUP_STD],
    # MaxRL divides by the mean of the group's scores, and no framework does. The std comes closest.
    ("TRL", "std for mean"): [(TRL + "_generate_and_score_completions",
        "advantages = advantages / (std_rewards + 1e-4)", "advantages = advantages / mean_grouped_rewards")],
    ("verl", "std for mean"): [(VERL + "compute_grpo_outcome_advantage",
        "scores[i] = (scores[i] - id2mean[index[i]]) / (id2std[index[i]] + epsilon)",
        "scores[i] = (scores[i] - id2mean[index[i]]) / id2mean[index[i]]")],
    # The variance over tokens divides by n - 1, in the scripts by n. The paper does not say.
    ("verl", "n - 1"): [
        ("verl.utils.torch_functional:masked_var", "variance = variance * bessel_correction", "pass")],
    # The statistics count a response once for each token. Only with one count for each response has a group of
    # equal scores no gradient, as the paper says.
    ("verl", "std over tokens"): [(VERL + "compute_reinforce_plus_plus_baseline_outcome_advantage",
        "scores = verl_F.masked_whiten(scores, response_mask) * response_mask",
        "scores = scores / scores[:, 0].square().mean().sqrt()")],
    ("OpenRLHF", "std over tokens"): [
        (OPENRLHF, "mean = (all_advantages * all_action_masks).sum() / num_actions", "mean = 0"),
        (OPENRLHF, "var = ((all_advantages - mean).pow(2) * all_action_masks).sum() / num_actions",
         "var = torch.cat([exp.advantages[:, 0] for exp in experiences]).square().mean()")],
    # The KL is a mean over tokens with every loss_agg_mode. Eq. 3 has it inside the mean over the response.
    ("OpenRLHF", "KL over tokens, std + 1e-9"): [GROUP_STD,
        ("openrlhf.trainer.ray.ppo_actor:ActorPPOTrainer.training_step",
         "kl_loss = aggregate_loss(kl, experience.action_mask, **loss_batch_info)",
         "kl_loss = aggregate_loss(kl, experience.action_mask, False, **loss_batch_info)")],
    # The sum over tokens is divided by their number, in the paper by a constant. The direction is the same.
    ("OpenRLHF", "mean over tokens"): [
        (*TOKEN_MEAN, "return (loss * loss_mask).sum() / (40 * global_batch_size) * dp_size")],
    # RLOO's paper has the KL in the reward of the response, before the baseline, and sums over its tokens.
    ("OpenRLHF", "KL after baseline, mean over tokens"): [
        (OPENRLHF, "raw_rewards = torch.cat([experience.rewards for experience in experiences], dim=0)",
         "raw_rewards = torch.cat("
         "[x.rewards - self.kl_ctl.value * (x.kl * x.action_mask).sum(1) for x in experiences])"),
        (OPENRLHF, "self.kl_ctl.value,", "0.0,"),
        (*TOKEN_MEAN, "return (loss * loss_mask).sum() / global_batch_size * dp_size")],
}
# fmt: on


@dataclass
class Args:
    only: tuple[str, ...] = ()
    """Scripts, by name; by default all, and the results are written."""


def rows(runs: list[dict]) -> None:
    """The relative difference of both gradients by flags alone, and what makes it."""
    lines = []
    for run in runs:
        script = f"`{run['script']} {run['flags']}".strip() + "`"
        lines.append([script, run["peer"], f"`{run['peer_flags']}`", f"{run['difference']:.1g}", run["note"]])
    table(["script", "framework", "closest flags", "difference", "caused by"], lines)


def comparison() -> None:
    results = load("agreement")
    rows(results["runs"])
    rest = max(run["then"] for run in results["runs"] if run["note"])
    print(f"With these lines replaced, their largest difference is {rest:.0e}.")
    print(f"Versions: {results['made']['versions']}.\n")


def main(args: Args) -> None:
    python = environment("peers", "verl==0.9.1", "openrlhf==0.11.2")
    runs = [run for run in load("agreement")["runs"] if not args.only or run["script"] in args.only]
    command = [python, ROOT / "experiments" / "agreement_peers.py", json.dumps(runs)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    results = json.loads(output.splitlines()[-1])
    rows(results["runs"])
    if not args.only:
        save("agreement", {"made": made() | results["made"], "runs": results["runs"]})


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, use_underscores=True))
