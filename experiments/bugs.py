"""Train with known bugs: which of them does the score hide, and what shows them?

    python experiments/bugs.py        train, draw and print the table: 45 minutes on two cores

A bug is a mutant of tests/mutants.py, a change of one line. Each is trained on the toy beside the unchanged script with
the same flags. A row has the metrics of every iteration, so tools/diagnose.py can read it like a run folder. Writes
docs/bugs.png and docs/metrics.png, too.
"""

import json
import multiprocessing
import os
import runpy
import shutil
import sys
from pathlib import Path

import common
import tyro
from common import POLICY_SCRIPTS, ROOT, run_all

sys.path.append(str(ROOT / "tests"))
from mutants import MUTANTS, Mutant

COMMON = {"num_iterations": 60, "eval_every": 30}
# The flags at which a bug matters. The unchanged script runs with them, too.
COOL = {"temperature": 0.7}
REWARD_MODEL = {"reward": "toy/reward_model", "eval_reward": "exact_answer", "kl_coef": 1.0}
# These change no result of the unchanged script. The model is toy/policy with a dropout of 0.1 in its config.
DROPOUT = {"model": "dropout"}
SMALL = {"micro_batch_size": 16}

BUGS = {
    "eos masked": {}, "log-probs one column off": {}, "padding counts in positions": {}, "attention to the padding": {},
    "cache of other rows": {}, "micro-batch cut too short": {}, "scores of another prompt": {},
    "groups along the wrong axis": {}, "a group spans two prompts": {}, "token mean in grpo": {}, "clip with max": {},
    "k3 upside down": {}, "old log-probs of the reference": {}, "ratio always 1": {}, "kl the other way round": {},
    "a reference that moves": {}, "reference log-probs of other rows": {}, "no zero_grad": {},
    "no gradient clipping": {}, "it learns the wrong way": {}, "no baseline": {}, "kl with the wrong sign": {},
    "whitened with the padding": {}, "returns from the left": {}, "k2 of the old policy": {},
    "ppo: critic one token off": {}, "sampling without temperature": COOL, "log-probs without temperature": COOL,
    "reference at temperature 1": COOL, "a reward model reads padding": REWARD_MODEL,
    "responses of a micro-batch": SMALL, "dropout on": DROPOUT,
}  # fmt: skip
MUTANT = {row[0]: Mutant(*row) for rows in MUTANTS.values() for row in rows}
# Not bugs of the code, but of the flags: for docs/metrics.md
MISTAKES = [("grpo", {"learning_rate": 5e-3}), ("grpo", {"answer_marker": "Answer"})]
LEFT_OUT = ("seconds", "tokens_per_second", "learning_rate", "policy_loss")


def parent(bug: str) -> tuple[str, dict]:
    """Script and flags of the unchanged run that a bug is compared with."""
    flags = BUGS[bug]
    return MUTANT[bug].function.split(".")[0], {} if flags in (SMALL, DROPOUT) else flags


def measure(run_dir: Path, bug: str, change: list[str], script: str, flags: dict, seed: int) -> dict:
    """Train in a fork of this process, which has imported the packages already."""
    if bug:
        file = Path(shutil.copy(ROOT / f"{script}.py", run_dir.parent))
        MUTANT[bug].change(run_dir.parent)
    else:
        file = ROOT / f"{script}.py"
    if flags == DROPOUT:
        model = shutil.copytree(ROOT / "toy" / "policy", run_dir.parent / "dropout")
        config = json.loads((model / "config.json").read_text()) | {"attention_dropout": 0.1}
        (model / "config.json").write_text(json.dumps(config))
        flags = {"model": str(model)}
    sys.argv = [str(file), *common.flags_of(script, COMMON | flags | {"seed": seed, "run_dir": str(run_dir)})]
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=runpy.run_path, args=[str(file)], kwargs={"run_name": "__main__"})
    process.start()
    process.join()
    metrics, held_out = {}, {}
    for line in (run_dir / "metrics.jsonl").open():
        row = json.loads(line)
        for name, value in row.items():
            if name.startswith("eval/"):
                held_out.setdefault(name, {})[str(row["iteration"])] = round(value, 4)
            elif name not in LEFT_OUT and name != "iteration":
                metrics.setdefault(name, []).append(float(f"{value:.3g}"))
    return {"exit_code": process.exitcode, "held_out": held_out, "metrics": metrics}


def cells_of() -> list[dict]:
    """Seed 1 of everything, then the other seeds."""
    bugs = [(bug, MUTANT[bug].function.split(".")[0], flags) for bug, flags in BUGS.items()]
    healthy = [("", *pair) for pair in map(parent, BUGS)]
    others = [("", script, {}) for script in POLICY_SCRIPTS]
    mistakes = [("", *pair) for pair in MISTAKES]
    cells = []
    parts = [([*healthy, *bugs, *mistakes], 1), (healthy, 2), (healthy, 3), (others, 1), (bugs, 2), (bugs, 3)]
    for runs, seed in parts:
        for bug, script, flags in runs:
            change = [MUTANT[bug].old, MUTANT[bug].new] if bug else []
            cell = {"bug": bug, "change": change, "script": script, "flags": flags, "seed": seed}
            cells += [cell] * (cell not in cells)
    return cells


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.chdir(ROOT)
    import transformers.models.llama.modeling_llama  # noqa: F401

    import grpo  # noqa: F401  so that the forks have what the scripts import

    run_all("bugs", cells_of(), measure, workers=1)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
