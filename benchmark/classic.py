"""SFT, a reward model and reinforcement against it on a real model: the commands of docs/recipes.md, as written there.

    python benchmark/classic.py                  writes results/classic.json and classic.md, 12 minutes with a thread

Runs that are finished say so and change nothing, so that an interrupted benchmark goes on.
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results" / "classic.json"
HEADING = "## The classic path on a real model"


def commands() -> list[list[str]]:
    section = (ROOT / "docs" / "recipes.md").read_text().partition(HEADING)[2].partition("\n## ")[0]
    lines = re.findall(r"^    (python .*)", re.sub(r" *\\\n +", " ", section), re.MULTILINE)
    return [shlex.split(line) for line in lines]


def table(runs: dict) -> str:
    """Score by the reward model, truth by the task, at each evaluation of the last stage."""
    last, stage_2 = list(runs.values())[-1], list(runs.values())[-2]
    groups = [key for key in last[0] if key.startswith("eval/score/")]
    heads = [
        "iteration",
        "score of the reward model",
        "KL",
        *(key.removeprefix("eval/score/") for key in groups),
    ]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    seen = {"score": None, "kl": None}
    for line in last:
        seen |= {key: line[key] for key in seen if key in line}
        if groups[0] in line:
            cells = [
                f"{x:.2f}" if x is not None else "" for x in (*seen.values(), *(line[key] for key in groups))
            ]
            lines.append(f"| {line['iteration']} | " + " | ".join(cells) + " |")
    accuracy = [line["accuracy"] for line in stage_2 if "accuracy" in line]
    part = sum(accuracy[-5:]) / len(accuracy[-5:])
    return (
        "\n".join(lines)
        + f"\n\nAccuracy of the reward model on its last 5 batches, before each step: {part:.2f}.\n"
    )


def main() -> None:
    runs = {}
    for command in commands():
        print(shlex.join(command), flush=True)
        subprocess.run([sys.executable, *command[1:]], cwd=ROOT, check=True)
        if "--run_dir" in command:
            folder = command[command.index("--run_dir") + 1]
            runs[folder] = [json.loads(line) for line in (ROOT / folder / "metrics.jsonl").open()]
    RESULTS.write_text(json.dumps(runs, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(table(runs))
    print(table(runs))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
