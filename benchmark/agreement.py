"""The gradient of one optimizer step: our scripts against TRL, verl and OpenRLHF, by the flags that should agree.

    python benchmark/agreement.py                makes benchmark/.peers the first time (1.5 GB), measures there
    python benchmark/agreement.py --only grpo    the rows of some scripts; writes nothing
    python benchmark/agreement.py --no_run       only writes the table of the committed results again

agreement_peers.py computes the gradients and says what of each peer runs. Where they differ, a note names the lines of
the peer's source and what would stand there if it computed the same. With these lines replaced, the difference is
measured again: it is gone, or the note is wrong.
"""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "benchmark" / ".peers"
RESULTS = ROOT / "benchmark" / "results" / "agreement.json"
# script | its flags | peer | its flags | why they differ, if they do
CASES = """
grpo | --kl_coef 0.04 | TRL | GRPOTrainer loss_type=grpo beta=0.04 use_bias_correction_kl=False |
grpo | --kl_coef 0.04 | TRL | GRPOTrainer loss_type=grpo beta=0.04 | ratio
dr_grpo | | TRL | GRPOTrainer loss_type=dr_grpo scale_rewards=none max_completion_length=40 |
dapo | --overlong_buffer 30 | TRL |
    GRPOTrainer loss_type=dapo epsilon_high=0.28 reward_funcs=get_soft_overlong_punishment(40,30) |
gspo | --clip_eps_low 0.03 --clip_eps_high 0.04 | TRL |
    GRPOTrainer loss_type=grpo importance_sampling_level=sequence epsilon=0.03 epsilon_high=0.04 |
cispo | | TRL | GRPOTrainer loss_type=cispo epsilon_high=1.28 |
rloo | --kl_coef 0.05 | TRL | RLOOTrainer beta=0.05 |
reinforce_pp_baseline | --kl_coef 0 | TRL | GRPOTrainer loss_type=dapo scale_rewards=batch | scores
sft | | TRL | SFTTrainer |
dpo | --beta 0.1 | TRL | DPOTrainer beta=0.1 |
reward_model | | TRL | RewardTrainer center_rewards_coefficient=0.01 |
grpo | --kl_coef 0.04 | verl | algorithm.adv_estimator=grpo actor.loss_agg_mode=seq-mean-token-mean
    actor.clip_ratio_c=1e9 actor.use_kl_loss=True actor.kl_loss_coef=0.04 actor.kl_loss_type=low_var_kl | guard
dr_grpo | | verl | algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False
    actor.loss_agg_mode=seq-mean-token-sum-norm actor.loss_scale_factor=40 actor.clip_ratio_c=1e9 |
dapo | --overlong_buffer 0 | verl |
    algorithm.adv_estimator=grpo actor.clip_ratio_high=0.28 actor.clip_ratio_c=1e9 | guard
gspo | --clip_eps_low 0.03 --clip_eps_high 0.04 | verl | algorithm.adv_estimator=grpo actor.policy_loss.loss_mode=gspo
    actor.loss_agg_mode=seq-mean-token-mean actor.clip_ratio_low=0.03 actor.clip_ratio_high=0.04 | guard
cispo | | verl | algorithm.adv_estimator=grpo actor.policy_loss.loss_mode=cispo
    actor.clip_ratio_low=1 actor.clip_ratio_high=0.28 | guard
rloo | --kl_coef 0.05 | verl | algorithm.adv_estimator=rloo algorithm.use_kl_in_reward=True
    algorithm.kl_ctrl.kl_coef=0.05 actor.loss_agg_mode=seq-mean-token-sum |
reinforce_pp | --kl_coef 0.05 | verl | algorithm.adv_estimator=reinforce_plus_plus algorithm.use_kl_in_reward=True
    algorithm.kl_ctrl.kl_coef=0.05 actor.clip_ratio_c=1e9 | n - 1
reinforce_pp_baseline | --kl_coef 0.04 | verl | algorithm.adv_estimator=reinforce_plus_plus_baseline
    actor.use_kl_loss=True actor.kl_loss_coef=0.04 actor.kl_loss_type=k2 actor.clip_ratio_c=1e9 | tokens
ppo | --kl_coef 0.05 | verl | algorithm.adv_estimator=gae algorithm.lam=0.95 algorithm.use_kl_in_reward=True
    algorithm.kl_ctrl.kl_coef=0.05 actor.clip_ratio_c=1e9 critic.cliprange_value=0.2 | n - 1
remax | --kl_coef 0.05 | verl |
    algorithm.adv_estimator=remax algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.05 |
grpo | --kl_coef 0.04 | OpenRLHF | --algo.advantage.estimator group_norm --actor.loss_agg_mode seq-mean-token-mean
    --algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.init_coef 0.04 | KL over tokens
dr_grpo | | OpenRLHF | --algo.advantage.estimator dr_grpo --algo.kl.init_coef 0 | no constant
dapo | --overlong_buffer 30 | OpenRLHF | --algo.advantage.estimator group_norm --actor.eps_clip_low_high 0.2 0.28
    --algo.kl.init_coef 0 --reward.overlong_buffer_len 30 | guard, OpenRLHF
gspo | --clip_eps_low 0.03 --clip_eps_high 0.04 | OpenRLHF | --algo.advantage.estimator group_norm
    --actor.policy_loss_type gspo --actor.eps_clip_low_high 0.03 0.04 --algo.kl.init_coef 0 | guard, OpenRLHF
reinforce | --kl_coef 0.05 | OpenRLHF |
    --algo.advantage.estimator flash_reinforce --algo.kl.init_coef 0.05 | KL after baseline
rloo | --kl_coef 0.05 | OpenRLHF | --algo.advantage.estimator rloo --algo.kl.init_coef 0.05 | KL after baseline
reinforce_pp | --kl_coef 0.05 | OpenRLHF | --algo.advantage.estimator reinforce --algo.kl.init_coef 0.05 |
reinforce_pp_baseline | --kl_coef 0.04 | OpenRLHF | --algo.advantage.estimator reinforce_baseline
    --algo.kl.use_loss --algo.kl.estimator k2 --algo.kl.init_coef 0.04 | tokens, OpenRLHF
ppo | --kl_coef 0.05 | OpenRLHF | --algo.advantage.estimator gae --algo.advantage.lambd 0.95
    --algo.kl.init_coef 0.05 --critic.value_clip 0.2 |
"""
CASES = [[x.strip() for x in row.split("|")] for row in CASES.replace("\n    ", " ").strip().split("\n")]

# name: who differs in what, and which follows the paper; then where, the line, and what would compute the same
NOTES = """
ratio: `use_bias_correction_kl`, on by default, multiplies k3 by the ratio (after DeepSeek-V3.2). GRPO's Eq. 3 does not.
trl.trainer.grpo_trainer:GRPOTrainer._compute_loss
- per_token_kl = per_token_kl * coef_1
+ pass

scores: The std is that of the scores, with the differences between prompts, plus 1e-4. Eq. 12 takes that of what is
left after the group's mean, as here. There is no k2 either.
trl.trainer.grpo_trainer:GRPOTrainer._generate_and_score_completions
- std_rewards = nanstd(rewards).expand_as(rewards)
+ std_rewards = (rewards - mean_grouped_rewards).square().mean().sqrt().expand_as(rewards) - 1e-4

guard: 1e-6 is added to the group's std, here (and in TRL) 1e-4. The papers add nothing.
verl.trainer.ppo.core_algos:compute_grpo_outcome_advantage
- scores[i] = (scores[i] - id2mean[index[i]]) / (id2std[index[i]] + epsilon)
+ scores[i] = (scores[i] - id2mean[index[i]]) / (id2std[index[i]] + 1e-4)

n - 1: The variance over tokens divides by n - 1, here by n. The paper says std and no more.
verl.utils.torch_functional:masked_var
- variance = variance * bessel_correction
+ pass

tokens: Mean and std of the batch count a response once for each of its tokens, here once. Only so has a group of equal
scores no gradient, as the paper says.
verl.trainer.ppo.core_algos:compute_reinforce_plus_plus_baseline_outcome_advantage
- scores = verl_F.masked_whiten(scores, response_mask) * response_mask
+ scores = scores / scores[:, 0].square().mean().sqrt()

KL over tokens: The KL is a mean over tokens whatever `loss_agg_mode` is. Eq. 3 has it inside the mean over the
response, as here. And the guard of the std is 1e-9.
openrlhf.trainer.ray.ppo_actor:ActorPPOTrainer.training_step
- kl_loss = aggregate_loss(kl, experience.action_mask, **loss_batch_info)
+ kl_loss = aggregate_loss(kl, experience.action_mask, False, **loss_batch_info)
openrlhf.trainer.ppo_utils.experience_maker:RemoteExperienceMaker.compute_advantages_and_returns
- rewards = (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-9)
+ rewards = (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-4)

no constant: The sum over tokens is divided by the number of tokens, which changes from step to step. The paper divides
by a constant, as here. The direction is the same.
openrlhf.models.loss:aggregate_loss
- return (loss * loss_mask).sum() / batch_num_tokens * dp_size
+ return (loss * loss_mask).sum() / (40 * global_batch_size) * dp_size

guard, OpenRLHF: 1e-9 is added to the group's std, here (and in TRL) 1e-4. The papers add nothing.
openrlhf.trainer.ppo_utils.experience_maker:RemoteExperienceMaker.compute_advantages_and_returns
- rewards = (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-9)
+ rewards = (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-4)

KL after baseline: The KL is subtracted from each token's reward to go, after the baseline, so that the other responses'
KL is not in the baseline; and the loss is a mean over tokens, so that its size is off by the mean length. RLOO's paper
has the KL in the reward of the whole response, before the baseline, and the sum over its tokens, as here.
openrlhf.trainer.ppo_utils.experience_maker:RemoteExperienceMaker.compute_advantages_and_returns
- raw_rewards = torch.cat([experience.rewards for experience in experiences], dim=0)
+ raw_rewards = torch.cat([x.rewards - self.kl_ctl.value * (x.kl * x.action_mask).sum(1) for x in experiences])
openrlhf.trainer.ppo_utils.experience_maker:RemoteExperienceMaker.compute_advantages_and_returns
- self.kl_ctl.value,
+ 0.0,
openrlhf.models.loss:aggregate_loss
- return (loss * loss_mask).sum() / batch_num_tokens * dp_size
+ return (loss * loss_mask).sum() / global_batch_size * dp_size

tokens, OpenRLHF: As in verl: the statistics are those of tokens, here of responses, as the paper's claim needs.
openrlhf.trainer.ppo_utils.experience_maker:RemoteExperienceMaker.compute_advantages_and_returns
- mean = (all_advantages * all_action_masks).sum() / num_actions
+ mean = 0
openrlhf.trainer.ppo_utils.experience_maker:RemoteExperienceMaker.compute_advantages_and_returns
- var = ((all_advantages - mean).pow(2) * all_action_masks).sum() / num_actions
+ var = torch.cat([exp.advantages[:, 0] for exp in experiences]).square().mean()
"""
NOTES = dict(note.split(": ", 1) for note in NOTES.strip().split("\n\n"))
EDIT = re.compile(r"^(\S+:\S+)\n- (.*)\n\+ (.*)$", re.MULTILINE)


@dataclass
class Args:
    only: tuple[str, ...] = ()
    """Scripts, by name; by default all, and the results are written."""
    run: bool = True
    """Measure; without it the results that lie there are tabulated again."""


def table(results):
    lines, numbers = [results["about"]], {note: number for number, note in enumerate(NOTES, 1)}
    for peer in ("TRL", "verl", "OpenRLHF"):
        lines += [
            "",
            f"### {peer}",
            "",
            f"| script | flags | flags of {peer} | cosine | relative difference | note |",
        ]
        lines += ["|---|---|---|---|---|---|"]
        for row in results["rows"]:
            if row["peer"] == peer:
                flags = [f"`{x}`" if x else "" for x in (row["flags"], row["peer_flags"])]
                cells = [f"`{row['script']}`", *flags, f"{row['cosine']:.6f}", f"{row['difference']:.1g}"]
                lines.append(f"| {' | '.join(cells)} | {numbers.get(row['note'], '')} |")
    return "\n".join(lines) + "\n"


def notes(results):
    lines = [
        "",
        "## Notes",
        "",
        "What differs, and the lines that make the difference: with them replaced, it is gone.",
    ]
    for number, (name, note) in enumerate(NOTES.items(), 1):
        rows = [row for row in results["rows"] if row["note"] == name]
        then = ", ".join(f"`{row['script']}` {row['difference']:.1g} to {row['then']:.1g}" for row in rows)
        lines += [
            "",
            f"{number}. **{rows[0]['peer']}.** {' '.join(EDIT.sub('', note).split())} Replaced: {then}.",
        ]
        for where, line, other in EDIT.findall(note):
            module, function = where.split(":")
            lines += [
                "",
                f"   `{function}` in `{module.replace('.', '/')}.py`:",
                "",
                "   ```diff",
                f"   - {line}",
            ]
            lines += [f"   + {other}", "   ```"]
    return "\n".join(lines) + "\n"


def main(args):
    if args.run:
        if not (PEERS / "installed").exists():
            subprocess.run([sys.executable, "-m", "venv", PEERS], check=True)
            pip = [PEERS / "bin" / "pip", "install", "--quiet"]
            subprocess.run([*pip, "-r", ROOT / "benchmark" / "peers_requirements.txt"], check=True)
            subprocess.run([*pip, "--no-deps", "verl==0.9.1", "openrlhf==0.11.2"], check=True)
            (PEERS / "installed").touch()
        command = [PEERS / "bin" / "python", ROOT / "benchmark" / "agreement_peers.py", *args.only]
        results = json.loads(
            subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1]
        )
        print(table(results))
        if args.only:
            return
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    results = json.loads(RESULTS.read_text())
    RESULTS.with_suffix(".md").write_text(table(results) + notes(results))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
