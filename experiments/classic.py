"""Demonstrations, a reward model and reinforcement against it, on SmolLM2-135M: the three stages of RLHF.

    python experiments/classic.py        run the commands of docs/recipes.md: 12 minutes on one core

A command that is finished says so and changes nothing, so an interrupted experiment resumes.
"""

import json
import shlex
import subprocess
import sys

import tyro
from common import ROOT, load, provenance, save, table, words_of

DATA = ["--train", "4 words", "--test", "4 words", "3 words", "--demonstrations", "200", "--pairs", "200"]
DATA += ["--folder", "data/four"]
SHARED = {"micro_batch_size": 16, "learning_rate": 1e-5, "warmup_iterations": 2, "dtype": "bfloat16"}
SFT = {"model": "data/smollm2", "dataset": "data/four/demonstrations.jsonl", "run_dir": "runs/four_sft"}
SFT |= {"eval_size": 0, "num_epochs": 1, "batch_size": 16} | SHARED
PAIRS = {"model": "runs/four_sft/model", "dataset": "data/four/pairs.jsonl", "run_dir": "runs/four_rm"}
PAIRS |= {"num_epochs": 1, "batch_size": 16} | SHARED | {"micro_batch_size": 8, "learning_rate": 5e-5}
RLOO = {"model": "runs/four_sft/model", "dataset": "data/four/train.jsonl", "run_dir": "runs/four"}
RLOO |= {"reward": "runs/four_rm/model", "eval_reward": "data/reversal.py:score", "reward_zscore": True}
RLOO |= {"eval_dataset": "data/four/test.jsonl", "batch_size": 32} | SHARED
RLOO |= {"max_response_length": 24, "kl_coef": 0.05, "num_iterations": 15, "eval_every": 5}
GROUPS = ("4 words", "3 words")  # held-out lists
STAGES = {"sft": SFT, "reward_model": PAIRS, "rloo": RLOO}
COMMANDS = [["python", "data/smollm2.py"], ["python", "data/reversal.py", *DATA]]
COMMANDS += [["python", f"{script}.py", *words_of(flags)] for script, flags in STAGES.items()]


def summary() -> None:
    """Print the score of the reward model and the true accuracy at each evaluation of the last stage."""
    rows = load("classic")
    lines, score = [], ""
    for metrics in rows[-1]["metrics"]:
        score = f"{metrics['score']:.2f}" if "score" in metrics else score
        if "eval/score/4 words" in metrics:
            truth = [f"{metrics[f'eval/score/{group}']:.2f}" for group in GROUPS]
            lines.append([str(metrics["iteration"]), score, *truth])
    table(["iteration", "score in training", *GROUPS], lines, rows)


def main() -> None:
    for command in COMMANDS:
        print(shlex.join(command), flush=True)
        subprocess.run([sys.executable, *command[1:]], cwd=ROOT, check=True)
    rows = []
    for script, flags in STAGES.items():
        lines = (ROOT / flags["run_dir"] / "metrics.jsonl").read_text().splitlines()
        metrics = {"metrics": [json.loads(line) for line in lines]}
        rows.append({"script": script} | provenance(script) | metrics)
    save("classic", rows)
    summary()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
