"""Run every policy script on the toy over five seeds: training curves, held-out accuracy, and pass@k on chains of 8.

    python experiments/toy_seeds.py        train, draw and print the tables: 90 minutes on two cores

pass@k is the probability that at least one of k responses is right (Chen et al., arXiv 2107.03374, equation 1). It is
estimated from 16 sampled responses to each of 100 held-out chains of 8 numbers. Writes docs/toy_seeds.png, too.
"""

import importlib
import random
import threading
from math import comb
from pathlib import Path

import common
import tyro
from common import POLICY_SCRIPTS, ROOT, curve, group_by, label, load, mean, run_all, show, table

BEFORE = {"num_iterations": 0}  # flags of the run that only evaluates the model before training
RUNS = [
    ("reinforce", BEFORE),
    *((script, {}) for script in POLICY_SCRIPTS),
    ("raft", {"num_iterations": 160}),
]
KEYS = ("score", "kl", "response_length", "entropy", "grad_norm")
GROUPS = ("2-5", "6", "8")  # held-out chains by their length
SEEDS = (1, 2, 3, 4, 5)
NUM_PROMPTS, SAMPLES = 100, 16  # of pass@k
KS = (1, 4, 16)
# transformers cannot load two models at the same time, and torch has one random state.
LOCK = threading.Lock()


def chains() -> list[tuple[str, str]]:
    """Prompts and answers of different chains of 8 numbers. None is a training prompt."""
    from toy.make_toy import make_chain, prompt, value

    trained_on = (ROOT / "toy" / "train.jsonl").read_text()
    rng = random.Random(8)
    answers = {}
    while len(answers) < NUM_PROMPTS:
        chain = make_chain(rng, 8)
        if f'"{prompt(chain)}"' not in trained_on:
            answers[prompt(chain)] = str(value(chain))
    return list(answers.items())


def count_successes(script: str, folder: Path) -> list[int]:
    """For each of the chains, the number of right responses among SAMPLES of the model in this folder."""
    # Here, since the pages import this module for its tables only.
    import torch
    import transformers

    module = importlib.import_module(script)
    args = module.Args(max_response_length=64, device="cpu")
    prompts, answers = zip(*chains())
    with LOCK:
        torch.set_num_threads(1)
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        ids = tokenizer(list(prompts))["input_ids"]
        rollout = module.generate(model, tokenizer, ids, args, SAMPLES)
    texts = module.decode(tokenizer, rollout, skip_special_tokens=True)
    repeated = [answer for answer in answers for _ in range(SAMPLES)]
    scores = module.exact_answer("answer")(texts, repeated)
    return [int(sum(scores[i : i + SAMPLES])) for i in range(0, len(scores), SAMPLES)]


def measure(run_dir: Path, script: str, seed: int, flags: dict) -> dict:
    lines, seconds = common.train(script, flags | {"seed": seed}, run_dir)
    held_out = {}
    for line in lines:
        if "eval/score/2-5" in line:
            scores = {group: round(line[f"eval/score/{group}"], 4) for group in GROUPS}
            held_out[str(line["iteration"])] = scores
    curves = {key: curve(lines, key, 6) for key in KEYS}
    successes = count_successes(script, run_dir / "model")
    return {"seconds": seconds, "held_out": held_out, "successes": successes} | curves


def name_of(run: dict) -> str:
    return "before training" if run["flags"] == BEFORE else label(run)


def summary() -> None:
    """Print a line for each script: mean, lowest and highest of the seeds."""
    lines, rows = [], load("toy_seeds")
    # Sampled by the model before training; sdpo.py starts from another one
    starts = [row["score"][:1] for row in rows if row["score"] and row["script"] != "sdpo"]
    for (name,), runs in group_by(rows, name_of).items():
        sampled = [run["score"][-10:] for run in runs] if runs[0]["score"] else starts
        *_, after = zip(*(run["held_out"].values() for run in runs))  # the last evaluation of each run
        cells = [show([held_out[group] for held_out in after]) for group in GROUPS]
        lines.append([name, show([mean(scores) for scores in sampled], 3), *cells])
    table(["script", "sampled, last 10", *(f"greedy {group}" for group in GROUPS)], lines, rows)


def pass_at(k: int, successes: list[int]) -> float:
    """pass@k, averaged over prompts with so many right responses of SAMPLES each."""
    return 1 - mean([comb(SAMPLES - right, k) / comb(SAMPLES, k) for right in successes])


def pass_at_k() -> None:
    """Print pass@k before training and of each script, for the seeds that have it."""
    lines, rows = [], [row for row in load("toy_seeds") if "successes" in row]
    for (name,), runs in group_by(rows, name_of).items():
        cells = [show([pass_at(k, run["successes"]) for run in runs]) for k in KS]
        lines.append([name, str(len(runs)), *cells])
    lines.append(["a random digit", "", *(f"{1 - 0.9**k:.2f}" for k in KS)])
    table(["script", "seeds", *(f"pass@{k}" for k in KS)], lines, rows)


def draw() -> None:
    """Draw all scripts into one picture. Of one with a teacher, kl is not the KL to the start."""
    import plot

    groups = {}
    for run in load("toy_seeds"):
        if run["flags"] == {}:
            keys = ["score", "response_length", "entropy"]
            keys += [] if "teacher" in common.defaults(run["script"]) else ["kl"]
            groups.setdefault(run["script"], []).append(common.plot_rows(run, *keys))
    plot.draw(groups, ROOT / "docs" / "toy_seeds.png")


def main() -> None:
    cells = []
    for script, flags in RUNS:
        for seed in SEEDS if flags != BEFORE else (1,):
            cells.append({"script": script, "seed": seed, "flags": flags})
    run_all("toy_seeds", cells, measure)
    draw()
    summary()
    pass_at_k()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
