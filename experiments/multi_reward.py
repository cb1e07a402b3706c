"""gdpo.py and grpo.py with two rewards that pull apart: a right answer, and a short response.

    python experiments/multi_reward.py        train and print the table: 8 minutes on two cores

two_rewards.py gives the length in words or as a share of 40 words. Held-out responses are scored by the rule.
"""

import tyro
from common import group_by, load, mean, run_all, show, table, train, words_of

RUNS = [
    ("grpo", "words", {}),
    ("grpo", "share", {}),
    ("gdpo", "words", {}),
    ("gdpo", "share", {}),
    ("gdpo", "words", {"reward_weights": [1, 0.25]}),
]
CELLS = [
    {"script": script, "length": length, "flags": flags, "seed": seed}
    for script, length, flags in RUNS
    for seed in (1, 2)
]
KEYS = ("score", "score/0", "score/1", "response_length", "equal_groups")


def measure(run_dir, script: str, length: str, flags: dict, seed: int) -> dict:
    options = {"reward": f"experiments/two_rewards.py:{length}", "eval_reward": "exact_answer", "seed": seed}
    lines, seconds = train(script, flags | options, run_dir)
    curves = {key: [round(line[key], 4) for line in lines if key in line] for key in KEYS}
    return {"seconds": seconds, "accuracy": lines[-1]["eval/score/2-5"]} | curves


def summary() -> None:
    """Print a line for each setting: mean, lowest and highest of the seeds."""
    lines, rows = [], load("multi_reward")
    for _, runs in group_by(rows, "script", "length", lambda run: str(run["flags"])).items():
        run = runs[0]
        command = " ".join([f"{run['script']}.py", *words_of(run["flags"])])
        accuracy = show([run["accuracy"] for run in runs])
        lengths = [
            show([mean(run["response_length"][span]) for run in runs], 1)
            for span in (slice(1), slice(-10, None))
        ]
        lines.append([f"`{command}`", run["length"], accuracy, *lengths])
    table(["", "length in", "greedy accuracy 2-5", "tokens, first iteration", "tokens, last 10"], lines, rows)


def main() -> None:
    run_all("multi_reward", CELLS, measure)
    summary()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
