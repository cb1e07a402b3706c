"""Accuracy of the trained toy models on held-out chains: by length, and pass@k.

    python experiments/held_out.py        train, evaluate and print: an hour on two cores

Every policy script is trained with its defaults over three seeds. pass@k is the probability that at least one of k
responses is right (Chen et al., arXiv 2107.03374, equation 1). It is estimated from 16 sampled responses to each of 100
held-out prompts, greedy accuracy from one response to each. "start" is the model before training.
"""

import random
import threading
from collections.abc import Iterable
from math import comb
from pathlib import Path
from types import SimpleNamespace

import tyro
from common import POLICY_SCRIPTS, ROOT, curve, group_by, load, mean, run_all, show, table, train

SAMPLES = 16  # responses to each prompt
KS = (1, 2, 4, 8, 16)
LENGTHS = (4, 6, 8, 10)  # numbers of a chain; training has 2 to 5
NUM_PROMPTS = 100  # of each length
SEEDS = (1, 2, 3)
# transformers cannot load two models at the same time, and torch has one random state.
LOCK = threading.Lock()


def held_out_chains(length: int) -> list[tuple[str, str]]:
    """Prompt and answer of different chains of this length. No training prompt is among them."""
    from toy.make_toy import make_chain, prompt, value

    trained_on = (ROOT / "toy" / "train.jsonl").read_text()
    rng = random.Random(length)
    answers = {}
    while len(answers) < NUM_PROMPTS:
        chain = make_chain(rng, length)
        if f'"{prompt(chain)}"' not in trained_on:
            answers[prompt(chain)] = str(value(chain))
    return list(answers.items())


def evaluate(folder: Path, groups: dict, sampled: Iterable[str], max_response_length: int = 64) -> dict:
    """Greedy accuracy on each group of prompts and answers; of those in `sampled`, the right samples of each prompt."""
    # Here, since the pages import this module for its tables only.
    import torch
    import transformers

    import grpo

    args = SimpleNamespace(max_response_length=max_response_length, temperature=1.0, dtype="float32")

    def right(group: str, samples_per_prompt: int = 1, greedy: bool = False):
        """1 or 0 for each response (prompts, responses per prompt)."""
        prompts, answers = zip(*groups[group])
        ids = tokenizer(list(prompts))["input_ids"]
        rollout = grpo.generate(model, tokenizer, ids, args, samples_per_prompt, greedy)
        texts = grpo.decode(tokenizer, rollout, skip_special_tokens=True)
        repeated = [answer for answer in answers for _ in range(samples_per_prompt)]
        return torch.tensor(grpo.exact_answer("answer", texts, repeated)).view(len(prompts), -1)

    with LOCK:
        torch.set_num_threads(1)
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        greedy = {group: round(right(group, greedy=True).mean().item(), 4) for group in groups}
        successes = {group: right(group, SAMPLES).sum(1).int().tolist() for group in sampled}
    return {"greedy": greedy, "successes": successes}


def measure(run_dir: Path, script: str, seed: int) -> dict:
    groups = {str(length): held_out_chains(length) for length in LENGTHS}
    if script == "start":
        return evaluate(ROOT / "toy" / "policy", groups, groups)
    lines, _ = train(script, {"seed": seed, "eval_every": 0}, run_dir)
    return evaluate(run_dir / "model", groups, groups) | {key: curve(lines, key) for key in ("score", "kl")}


def pass_at(k: int, successes: list[int]) -> float:
    """pass@k, averaged over prompts with so many right responses of SAMPLES each."""
    return 1 - mean([comb(SAMPLES - right, k) / comb(SAMPLES, k) for right in successes])


def pass_at_k(length: int = 8) -> None:
    """Print pass@k of each script on chains of this length, mean over the seeds."""
    rows = []
    for (script,), runs in group_by(load("held_out")["runs"], "script").items():
        each = [[pass_at(k, run["successes"][str(length)]) for k in KS] for run in runs]
        rows.append([name_of(script), *(show(list(values)) for values in zip(*each))])
    rows.append(["a random digit", *(f"{1 - 0.9**k:.2f}" for k in KS)])
    table(["script", *(f"pass@{k}" for k in KS)], rows)


def by_length() -> None:
    """Print greedy accuracy by the length of the chain, mean over the seeds."""
    rows = []
    for (script,), runs in group_by(load("held_out")["runs"], "script").items():
        cells = [show([run["greedy"][str(length)] for run in runs]) for length in LENGTHS]
        rows.append([name_of(script), *cells])
    table(["script", *(f"{length} numbers" for length in LENGTHS)], rows)


def name_of(script: str) -> str:
    return "before training" if script == "start" else f"`{script}.py`"


def main() -> None:
    cells = [{"script": "start", "seed": 1}]
    cells += [{"script": script, "seed": seed} for seed in SEEDS for script in POLICY_SCRIPTS]
    run_all("held_out", cells, measure)
    by_length()
    pass_at_k()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
