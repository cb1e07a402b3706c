"""Run every policy script on the toy over five seeds: training curves and held-out accuracy.

    python experiments/toy_seeds.py        train, draw and print the table: 90 minutes on two cores

Writes the result file, docs/toy_seeds.png and a picture for each script in docs/scripts.
"""

import common
import tyro
from common import POLICY_SCRIPTS, ROOT, curve, group_by, label, load, mean, run_all, show, table

RUNS = [*((script, {}) for script in POLICY_SCRIPTS), ("raft", {"num_iterations": 160})]
KEYS = ("score", "kl", "response_length", "entropy", "grad_norm")
GROUPS = ("2-5", "6", "8")  # held-out chains by their length
SEEDS = (1, 2, 3, 4, 5)


def measure(run_dir, script: str, seed: int, flags: dict) -> dict:
    lines, seconds = common.train(script, flags | {"seed": seed}, run_dir)
    held_out = {}
    for line in lines:
        if "eval/score/2-5" in line:
            scores = {group: round(line[f"eval/score/{group}"], 4) for group in GROUPS}
            held_out[str(line["iteration"])] = scores
    return {"seconds": seconds, "held_out": held_out} | {key: curve(lines, key, 6) for key in KEYS}


def summary(*scripts: str) -> None:
    """Print a row for each script, or for these: mean, lowest and highest of the seeds."""
    rows = []
    for (head,), runs in group_by(load("toy_seeds")["runs"], label).items():
        if scripts and runs[0]["script"] not in scripts:
            continue
        *_, after = zip(*(run["held_out"].values() for run in runs))  # the last evaluation of each run
        cells = [show([mean(run["score"][-10:]) for run in runs], 3)]
        cells += [show([held_out[group] for held_out in after]) for group in GROUPS]
        rows.append([head, *cells])
    table(["script", "sampled, last 10", *(f"greedy {group}" for group in GROUPS)], rows)


def before() -> None:
    """Print the accuracy of the model before training."""
    runs = load("toy_seeds")["runs"]
    first, *_ = runs[0]["held_out"].values()
    greedy = ", ".join(f"{first[group]:.2f} on {group}" for group in GROUPS)
    sampled = show([run["score"][0] for run in runs])
    print(f"Before training, over all runs: sampled {sampled}, greedy {greedy}.\n")


def iterations_to_learn(*scripts: str) -> None:
    """Print how soon the sampled accuracy, averaged over five iterations, exceeds 0.95."""
    rows = []
    for script in scripts:
        found = []
        for run in load("toy_seeds")["runs"]:
            if run["script"] == script:
                ends = range(5, len(run["score"]) + 1)
                found.append(next(end for end in ends if mean(run["score"][end - 5 : end]) > 0.95))
        rows.append([f"`{script}.py`", show(found, 0)])
    table(["script", "iterations"], rows)


def draw() -> None:
    """Draw all scripts into one picture, and each script into its own."""
    import plot

    groups = {}
    for run in load("toy_seeds")["runs"]:
        if run["flags"] == {}:
            rows = common.plot_rows(run, "score", "kl", "response_length", "entropy")
            groups.setdefault(run["script"], []).append(rows)
    plot.draw(groups, ROOT / "docs" / "toy_seeds.png")
    for script, seeds in groups.items():
        plot.draw({script: seeds}, ROOT / "docs" / "scripts" / f"{script}.png", columns=4)


def main() -> None:
    cells = [{"script": script, "flags": flags, "seed": seed} for script, flags in RUNS for seed in SEEDS]
    run_all("toy_seeds", cells, measure)
    draw()
    summary()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
