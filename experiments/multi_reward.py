"""gdpo.py and grpo.py with two rewards that pull apart: a right answer, and a short response.

    python experiments/multi_reward.py        train and print the table: 8 minutes on two cores

two_rewards.py gives the length in words or as a share of 40 words. Held-out responses are scored by the rule.
"""

import tyro
from common import curve, group_by, label, load, mean, run_all, show, table, train

RUNS = [("grpo", "words", {}), ("grpo", "share", {}), ("gdpo", "words", {}), ("gdpo", "share", {})]
RUNS += [("gdpo", "words", {"reward_weights": [1, 0.25]})]
SEEDS = (1, 2)


def measure(run_dir, script: str, length: str, flags: dict, seed: int) -> dict:
    options = {"reward": f"experiments/two_rewards.py:{length}", "eval_reward": "exact_answer", "seed": seed}
    lines = train(script, flags | options, run_dir)
    lengths = curve(lines, "response_length")
    return {"accuracy": lines[-1]["eval/score/2-5"], "response_length": lengths}


def summary() -> None:
    """Print a line for each setting: mean, lowest and highest of the seeds."""
    lines, rows = [], load("multi_reward")
    for (name, length), runs in group_by(rows, label, "length").items():
        accuracy = show([run["accuracy"] for run in runs])
        first = show([run["response_length"][0] for run in runs], 1)
        last = show([mean(run["response_length"][-10:]) for run in runs], 1)
        lines.append([name, length, accuracy, first, last])
    table(["", "length in", "greedy accuracy 2-5", "tokens, first iteration", "tokens, last 10"], lines, rows)


def main() -> None:
    cells = []
    for script, length, flags in RUNS:
        cells += [{"script": script, "length": length, "flags": flags, "seed": seed} for seed in SEEDS]
    run_all("multi_reward", cells, measure)
    summary()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
