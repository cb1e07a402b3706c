"""The same preference pairs in two ways: dpo.py on the pairs, and reinforce_pp.py on a reward model trained on them.

    python experiments/preferences.py        train and print the table: 8 minutes on two cores

Afterwards grpo.py --num_iterations 0 evaluates each model on the toy's held-out prompts: with the rule, which nothing
was trained on, and with the reward model.
"""

import tyro
from common import group_by, label, load, run_all, show, table, train

RUNS = [("dpo", {"learning_rate": rate}) for rate in (2e-5, 5e-5, 1e-4, 2e-4)]
RUNS += [
    ("reinforce_pp", {"num_iterations": 20, "kl_coef": 0.05}),
    ("reinforce_pp", {"num_iterations": 80, "kl_coef": 0.05}),
    ("reinforce_pp", {"num_iterations": 80, "kl_coef": 0}),
]
SEEDS = (1, 2, 3)
GROUPS = ("2-5", "6", "8")  # held-out chains by their length


def measure(run_dir, script: str, seed: int, flags: dict) -> dict:
    reward = {"reward": "toy/reward_model", "eval_every": 0} if script == "reinforce_pp" else {}
    train(script, reward | flags | {"seed": seed}, run_dir)
    outcome = {}
    for name, reward in (("accuracy", "exact_answer"), ("score", "toy/reward_model")):
        judge = {"model": run_dir / "model", "num_iterations": 0, "reward": reward}
        [line, *_] = train("grpo", judge, run_dir.parent / name)
        outcome[name] = {group: line[f"eval/score/{group}"] for group in GROUPS}
    return outcome


def summary() -> None:
    """Print a row for each method and setting: mean, lowest and highest of the seeds."""
    rows = []
    for (name,), runs in group_by(load("preferences"), label).items():
        cells = [show([run["accuracy"][group] for run in runs]) for group in GROUPS]
        rows.append([name, *cells, show([run["score"]["2-5"] for run in runs])])
    table(["", "accuracy on 2-5", "6", "8", "score of the reward model, 2-5"], rows, load("preferences"))


def main() -> None:
    cells = [{"script": script, "flags": flags, "seed": seed} for script, flags in RUNS for seed in SEEDS]
    run_all("preferences", cells, measure)
    summary()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
