"""Run every policy script on the toy over five seeds: training curves and held-out accuracy.

    python experiments/toy_seeds.py               train, draw and print the table: an hour on two cores
    python experiments/toy_seeds.py --no_run      only draw and print the committed results
    python experiments/toy_seeds.py --scripts grpo --seeds 1 2 --flags kl_coef 0 --name no_kl

Writes results/<name>.json and docs/<name>.png, and without --name the pictures in docs/scripts.
"""

from dataclasses import dataclass, field

import tyro
from common import (
    POLICY_SCRIPTS,
    ROOT,
    curve,
    group_by,
    label,
    load,
    mean,
    plot_rows,
    run_all,
    show,
    table,
    train,
)

RUNS = [*((script, {}) for script in POLICY_SCRIPTS), ("raft", {"num_iterations": 160})]
KEYS = ("score", "kl", "response_length", "entropy", "grad_norm")
GROUPS = ("2-5", "6", "8")  # held-out chains by their length


@dataclass
class Args:
    scripts: tuple[str, ...] = POLICY_SCRIPTS
    """Which scripts, by name."""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Which seeds."""
    flags: dict[str, str] = field(default_factory=dict)
    """Further flags of the scripts, as name value name value."""
    name: str = "toy_seeds"
    """Name of the result file."""
    run: bool = True
    """Train what the result file lacks."""


def measure(run_dir, script: str, seed: int, flags: dict) -> dict:
    lines, seconds = train(script, flags | {"seed": seed}, run_dir)
    held_out = {}
    for line in lines:
        if "eval/score/2-5" in line:
            scores = {group: round(line[f"eval/score/{group}"], 4) for group in GROUPS}
            held_out[str(line["iteration"])] = scores
    return {"seconds": seconds, "held_out": held_out} | {key: curve(lines, key, 6) for key in KEYS}


def summary(*scripts: str, name: str = "toy_seeds") -> None:
    """Print a row for each script, or for these: mean, lowest and highest of the seeds."""
    rows = []
    for (head,), runs in group_by(load(name)["runs"], label).items():
        if scripts and runs[0]["script"] not in scripts:
            continue
        *_, after = zip(*(run["held_out"].values() for run in runs))  # the last evaluation of each run
        cells = [show([mean(run["score"][-10:]) for run in runs], 3)]
        cells += [show([held_out[group] for held_out in after]) for group in GROUPS]
        rows.append([head, *cells])
    table(["script", "sampled, last 10", *(f"greedy {group}" for group in GROUPS)], rows)


def before(name: str = "toy_seeds") -> None:
    """Print the accuracy of the model before training."""
    runs = load(name)["runs"]
    first, *_ = runs[0]["held_out"].values()
    greedy = ", ".join(f"{first[group]:.2f} on {group}" for group in GROUPS)
    sampled = show([run["score"][0] for run in runs])
    print(f"Before training, over all runs: sampled {sampled}, greedy {greedy}.\n")


def iterations_to_learn(*scripts: str) -> None:
    """Print how soon the sampled accuracy, averaged over five iterations, exceeds 0.95."""
    rows = []
    for script in scripts:
        runs = [run for run in load("toy_seeds")["runs"] if run["script"] == script]
        starts = [range(len(run["score"]) - 4) for run in runs]
        found = [
            next(i for i in x if mean(run["score"][i : i + 5]) > 0.95) + 5 for x, run in zip(starts, runs)
        ]
        rows.append([f"`{script}.py`", show(found, 0)])
    table(["script", "iterations"], rows)


def draw(name: str) -> None:
    """Draw all scripts into one picture; of toy_seeds also a picture for each script."""
    import plot

    runs = [run for run in load(name)["runs"] if run["flags"] == {} or name != "toy_seeds"]
    groups = {}
    for run in runs:
        rows = plot_rows(run, "score", "kl", "response_length", "entropy")
        groups.setdefault(run["script"], []).append(rows)
    plot.draw(groups, ROOT / "docs" / f"{name}.png")
    for script in groups if name == "toy_seeds" else ():
        plot.draw({script: groups[script]}, ROOT / "docs" / "scripts" / f"{script}.png", columns=4)


def main(args: Args) -> None:
    if args.run:
        runs = [(script, flags | args.flags) for script, flags in RUNS if script in args.scripts]
        cells = [
            {"script": script, "seed": seed, "flags": flags} for script, flags in runs for seed in args.seeds
        ]
        run_all(args.name, cells, measure)
    draw(args.name)
    summary(name=args.name)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, use_underscores=True))
