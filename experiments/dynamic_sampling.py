"""dapo.py's dynamic sampling and grpo.py on prompts of which most teach nothing, per step and per generated token.

    python experiments/dynamic_sampling.py        train and print the table: 10 minutes on two cores

The toy's prompts with another reward, mixed_reward.py: 35 % of them score 1 whatever the response, 35 % score 0, and
30 % by the rule. So 70 % of the groups have equal scores from the start. Compared is the sampled accuracy on the
prompts of the rule, after 30 steps and after equally many generated tokens (BUDGETS). The runs differ in length.
"""

import json
from pathlib import Path

import tyro
from common import ROOT, curve, group_by, label, load, mean, run_all, show, table, train

RUNS = [  # iterations such that all generate more tokens than the largest of BUDGETS
    ("grpo", {"num_iterations": 160}),
    ("dapo", {"num_iterations": 45, "overlong_buffer": 0}),
    ("dapo", {"num_iterations": 160, "overlong_buffer": 0, "max_rollouts": 1}),
]
SEEDS = (1, 2, 3)
BUDGETS = (50_000, 100_000, 150_000, 200_000)  # generated tokens at which accuracies are compared


def measure(run_dir: Path, script: str, seed: int, flags: dict) -> dict:
    data, log = run_dir.parent / "data.jsonl", run_dir.parent / "rollouts.jsonl"
    rows = [json.loads(line) for line in (ROOT / "toy" / "train.jsonl").open()]
    kinds = (["given"] * 7 + ["out of reach"] * 7 + ["rule"] * 6) * (len(rows) // 20)
    data.write_text("".join(json.dumps(row | {"kind": kind}) + "\n" for row, kind in zip(rows, kinds)))
    options = {"dataset": data, "reward": "experiments/mixed_reward.py:score", "log_every": 10**6}
    lines, _ = train(script, flags | options | {"seed": seed}, run_dir, env={"ROLLOUTS": str(log)})

    rollouts = [json.loads(line) for line in log.open()]
    outcome, tokens = {"tokens": [], "right": [], "rows": []}, 0
    lines = [line for line in lines if "score" in line]
    for line in lines:
        line.setdefault("rollouts", 1)  # grpo.py has one
        count = round(line["rollouts"])
        now, rollouts = rollouts[:count], rollouts[count:]
        tokens += sum(rollout["tokens"] for rollout in now)
        outcome["tokens"].append(tokens)
        outcome["right"].append(sum(rollout["right"] for rollout in now))
        outcome["rows"].append(sum(rollout["rows"] for rollout in now))
    return outcome | {key: curve(lines, key) for key in ("rollouts", "equal_groups", "response_length")}


def accuracy(run: dict, step: int) -> float:
    """The accuracy after a step: that of the 200 or more responses to prompts of the rule sampled last."""
    right = rows = 0
    for i in reversed(range(step)):
        right, rows = right + run["right"][i], rows + run["rows"][i]
        if rows >= 200:
            break
    return right / rows


def step_at(run: dict, tokens: int) -> int:
    """The number of steps that generated so many tokens. ValueError if the whole run generated fewer."""
    if run["tokens"][-1] < tokens:
        raise ValueError(f"{label(run)}, seed {run['seed']}: {tokens} tokens take more iterations")
    return sum(count <= tokens for count in run["tokens"])


def name_of(run: dict) -> str:
    """The script, and --max_rollouts if the run has it: the other flags only set the length of a run."""
    return label(run | {"flags": {"max_rollouts": 1} if "max_rollouts" in run["flags"] else {}})


def summary() -> None:
    """Print a row for each method: mean, lowest and highest of the seeds."""
    rows = []
    for (name,), runs in group_by(load("dynamic_sampling"), name_of).items():
        cells = [name]
        for key in ("rollouts", "equal_groups"):
            cells.append(f"{mean([x for run in runs for x in run[key][:30]]):.2f}")
        cells.append(show([accuracy(run, 30) for run in runs]))
        cells += [show([accuracy(run, step_at(run, budget)) for run in runs]) for budget in BUDGETS]
        rows.append(cells)
    heads = ["", "rollouts per step", "groups of equal scores", "accuracy after 30 steps"]
    heads += [f"{budget:,} tokens" for budget in BUDGETS]
    table(heads, rows, load("dynamic_sampling"))


def main() -> None:
    cells = [{"script": script, "flags": flags, "seed": seed} for script, flags in RUNS for seed in SEEDS]
    run_all("dynamic_sampling", cells, measure)
    summary()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
