"""The gradient of one optimizer step: our scripts against TRL, with the flags that should agree.

    python experiments/agreement.py        the first call makes experiments/.trl: 3 minutes on two cores

agreement_trl.py measures. The result file also has rows of verl and OpenRLHF, which a run keeps. They were measured
once, by importing their functions with stand-ins for their engines: see this file at commit 9ec1a0e.
"""

import json
import subprocess

import tyro
from common import ROOT, environment, load, run_all, table

# Script, its flags, TRL's trainer and its flags, and what makes a difference, in the words of docs/scaling.md
# fmt: off
CASES = [
    ("grpo", "--kl_coef 0.04", "GRPOTrainer loss_type=grpo beta=0.04 use_bias_correction_kl=False", ""),
    # use_bias_correction_kl, on by default, is from DeepSeek-V3.2. GRPO's Eq. 3 does not have it.
    ("grpo", "--kl_coef 0.04", "GRPOTrainer loss_type=grpo beta=0.04", "KL times ratio"),
    ("dr_grpo", "", "GRPOTrainer loss_type=dr_grpo scale_rewards=none max_completion_length=40", ""),
    ("dapo", "--overlong_buffer 30",
     "GRPOTrainer loss_type=dapo epsilon_high=0.28 reward_funcs=get_soft_overlong_punishment(40,30)", ""),
    ("gspo", "--clip_eps_low 0.03 --clip_eps_high 0.04",
     "GRPOTrainer loss_type=grpo importance_sampling_level=sequence epsilon=0.03 epsilon_high=0.04", ""),
    ("cispo", "", "GRPOTrainer loss_type=cispo epsilon_high=1.28", ""),
    ("sapo", "--tau_pos 1 --tau_neg 1.05",
     "GRPOTrainer loss_type=sapo sapo_temperature_pos=1 sapo_temperature_neg=1.05", ""),
    # MaxRL divides by the mean of the group's scores, and no framework does. The std comes closest.
    ("maxrl", "", "GRPOTrainer loss_type=luspo importance_sampling_level=sequence", "std for mean"),
    ("rloo", "--kl_coef 0.05", "RLOOTrainer beta=0.05", ""),
    # TRL's std has the differences between prompts in it. In Eq. 12 the group's mean is subtracted first.
    ("reinforce_pp_baseline", "--kl_coef 0", "GRPOTrainer loss_type=dapo scale_rewards=batch", "std of scores"),
    ("sft", "", "SFTTrainer", ""),
    ("dpo", "--beta 0.1", "DPOTrainer beta=0.1", ""),
    ("reward_model", "", "RewardTrainer center_rewards_coefficient=0.01", ""),
]
# fmt: on


def measure(run_dir, script: str, flags: str, peer: str, peer_flags: str, note: str) -> dict:
    """Cosine and relative difference of both gradients, and the versions of the packages that computed them."""
    command = [environment("trl"), ROOT / "experiments" / "agreement_trl.py", script, flags]
    command += peer_flags.split()
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def comparison(*peers: str) -> None:
    """Print a line for each case of these frameworks: the relative difference of the gradients, and its cause."""
    lines, rows = [], [row for row in load("agreement") if row["peer"] in peers]
    for row in rows:
        script = f"`{row['script']} {row['flags']}".strip() + "`"
        lines.append([script, row["peer"], f"`{row['peer_flags']}`", f"{row['difference']:.1g}", row["note"]])
    table(["script", "framework", "closest flags", "difference", "caused by"], lines, rows)


def main() -> None:
    keys = ("script", "flags", "peer_flags", "note")
    cells = [{"peer": "TRL"} | dict(zip(keys, case)) for case in CASES]
    run_all("agreement", cells, measure, workers=1)
    comparison("TRL")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
