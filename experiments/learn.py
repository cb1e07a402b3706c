"""The runs and tables of docs/learn.md. experiments/pictures.py draws its pictures.

    python experiments/learn.py        trains the runs that have no row yet

A row contains means of metrics over the first and the last third of the run, and the choices of the trained policy.
"""

import importlib
import math
import re
from pathlib import Path

import common
import explain
import sync
import torch
import transformers
import tyro
from common import ROOT, load, mean, words_of
from planted import BUGS

import ppo

SHORT, LONG = {"num_iterations": 30}, {"num_iterations": 60}
EPOCHS = {"num_iterations": 8, "update_epochs": 8, "learning_rate": 5e-4}
# Script, flags and a bug of tests/planted.toml, by the name that the page uses
RUNS = {
    "at the start": ("reinforce", {"num_iterations": 1, "batch_size": 1024, "learning_rate": 0}, ""),
    "score - mean": ("reinforce", SHORT, ""),
    "1 for all": ("reinforce", SHORT, "weight 1 for all"),
    "score": ("reinforce", SHORT, "no baseline"),
    "score + 10": ("reinforce", SHORT, "baseline too low"),
    "score + 1": ("reinforce", SHORT, "scores 1 and 2, no baseline"),
    "sum": ("reinforce", SHORT | {"kl_coef": 0}, ""),
    "1/T": ("flash_reinforce", SHORT, ""),
    "clip": ("dr_grpo", EPOCHS, ""),
    "no clip": ("dr_grpo", EPOCHS | {"clip_eps": 1000}, ""),
    "β = 1": ("reinforce", LONG | {"kl_coef": 1}, ""),
    "β = 0.3": ("reinforce", LONG | {"kl_coef": 0.3}, ""),
    "β = 0.1": ("reinforce", LONG | {"kl_coef": 0.1}, ""),
    "no KL": ("reinforce_pp_baseline", LONG | {"kl_coef": 0, "log_kl": True}, ""),
    "k1 in the loss": ("reinforce_pp_baseline", LONG | {"kl_coef": 1}, "k1 for k2"),
    "k2 in the loss": ("reinforce_pp_baseline", LONG | {"kl_coef": 1}, ""),
    "k3 in the loss": ("reinforce_pp_baseline", LONG | {"kl_coef": 1}, "k3 for k2"),
    "reinforce_pp.py": ("reinforce_pp", SHORT, ""),
    "ppo.py": ("ppo", SHORT, ""),
    "ppo.py, λ = 1, V = 0": ("ppo", SHORT | {"gae_lambda": 1, "critic_learning_rate": 0}, ""),
    "ppo.py, λ = 0": ("ppo", SHORT | {"gae_lambda": 0}, ""),
}
SHOWN = RUNS["score - mean"]  # the page prints the tree of its policy
# Metrics of which the page prints some iterations
COURSES = {"score - mean": ("score", "policy_loss"), "clip": ("score",), "no clip": ("score",)}
COURSES |= {"no KL": ("kl",), "k1 in the loss": ("kl",)}
KEYS = ("score", "response_length", "kl")
# A KL term, a script that contains it, and a bug of tests/planted.toml
KL_TERMS = [("k1 in the reward", "reinforce", ""), ("k2 in the loss", "reinforce_pp_baseline", "")]
KL_TERMS += [("k3 in the loss", "grpo", ""), ("k1 in the loss", "reinforce_pp_baseline", "k1 for k2")]


def measure(run_dir: Path, script: str, flags: dict, bug: str, seed: int) -> dict:
    given = flags | {"seed": seed, "eval_every": 0}  # evaluations do not change the training
    lines = common.train(script, given, run_dir, BUGS[bug].plant if bug else None)
    curves = {key: common.curve(lines, key, 6) for key in KEYS}
    row = {key: thirds(x) for key, x in curves.items() if x}
    choices = explain.choices(run_dir / "model")
    row |= {"think": choices[0][0], "thinks": thinks(run_dir / "model")}
    if (script, flags, bug) == SHOWN:
        row["choices"] = choices
    for name, keys in COURSES.items():
        if (script, flags, bug) == RUNS[name]:
            row["course"] = {key: common.curve(lines, key, 3) for key in keys}
    return row


def thirds(values: list[float]) -> list[float]:
    """The means of the first and of the last third."""
    n = max(1, len(values) // 3)
    return [round(mean(part), 4) for part in (values[:n], values[-n:])]


def thinks(folder: Path) -> list[float]:
    """The mean of P(think) over held-out sums of 2, 3, 4 and 5 numbers."""
    prompts = [row["prompt"] for row in common.read_jsonl(ROOT / "toy" / "heldout.jsonl")]
    think = transformers.AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("think")
    groups = [[prompt for prompt in prompts if len(prompt.split()) == 2 * n] for n in (2, 3, 4, 5)]
    return [round(mean(p[-1, think].item() for p in explain.next_probs(folder, x)), 3) for x in groups]


def rows_of(name: str) -> list[dict]:
    return [row for row in load("learn") if (row["script"], row["flags"], row["bug"]) == RUNS[name]]


# --- what the page prints ---


def push(script: str, scores, lengths, bug: str = "", tensors=None, **flags) -> torch.Tensor:
    """The push of a script's loss on each token (B, T) of a rollout."""
    module = BUGS[bug].module() if bug else importlib.import_module(script)
    rollout = explain.make_rollout(scores, lengths, **(tensors or {}))
    return explain.pushes(module, module.Args(**flags), rollout)[1]


def runs(*names: str, **columns: tuple) -> None:
    """Print P(think) at the end of each run, and means of metrics over a third of the run."""
    lines = []
    for name in names:
        rows = rows_of(name)
        cells = [[f"{row['think']:.2f}" for row in rows]]
        cells += [[f"{row[key][i] + 0:.2f}" for row in rows if key in row] for key, i in columns.values()]
        lines.append([name, *map("; ".join, cells)])
    common.table(["seeds 1; 2", "P(think)", *(x.replace("_", " ") for x in columns)], lines)


def course(iterations, *names: str) -> None:
    """Print metrics of the first seed at these iterations. If there are several runs, name them."""
    lines = []
    for name in names:
        for key, values in rows_of(name)[0]["course"].items():
            label = f"`{key}`, {name}" if len(names) > 1 else f"`{key}`"
            lines.append([label, *(f"{values[i - 1]:.2f}" for i in iterations)])
    common.table(["iteration", *map(str, iterations)], lines)


def ranges(key: str, *names: str) -> None:
    """Print the lowest and the highest value of a metric in the last third of each run."""
    lines = []
    for name in names:
        ends = [row["course"][key][-len(row["course"][key]) // 3 :] for row in rows_of(name)]
        lines.append([name, *("; ".join(f"{of(x):.2f}" for x in ends) for of in (min, max))])
    common.table(["seeds 1; 2", f"lowest `{key}`", f"highest `{key}`"], lines)


def advantages(*scripts: str, scores=(1.0, 0.0, 0.0, 0.0)) -> None:
    """Print the advantages of the responses of one group."""
    args, lines = explain.Args(scores=scores, lengths=(1,) * len(scores)), []
    for script in scripts:
        numbers = explain.explain(args, script)[0][:, 0].tolist()
        lines.append([f"`{script}`", *(f"{x:.2f}" for x in numbers)])
    common.table(["advantage", *(f"score {x:g}" for x in scores)], lines)


def commands(*names: str) -> None:
    """Print the commands of these runs, including those that plant and remove a bug."""
    lines = []
    for script, flags, bug in map(RUNS.get, names):
        file = str(sync.paths()[script].relative_to(ROOT))
        command = " ".join(["python", file, *words_of(flags)])
        lines += [f"python tests/planted.py '{bug}'", command, f"git restore {file}"] if bug else [command]
    print("\n```", *lines, "```\n", sep="\n")


def code(name: str) -> str:
    """The estimator block of a script, or the whole script if it has none, without docstrings."""
    source = re.sub(r'""".*?"""\n', "", sync.paths()[name].read_text(), flags=re.DOTALL)
    block = re.search(sync.BLOCK, source, re.MULTILINE | re.DOTALL)
    return block[0] if block else source


def line(script: str, pattern: str) -> None:
    """Print the lines of a script that match a pattern."""
    print("\n```python", *matches(script, pattern), "```\n", sep="\n")


def matches(script: str, pattern: str) -> list[str]:
    """The lines of a script that match a pattern, without indentation and comment."""
    return re.findall(rf"^ +(.*?(?:{pattern}).*?)(?:  #.*)?$", code(script), re.MULTILINE)


def change(a: str, old: str, b: str, new: str) -> None:
    """Print matching lines of script a as removed, and matching lines of script b as added."""
    print("\n```diff")
    for sign, name, pattern in (("-", a, old), ("+", b, new)):
        print(*(f"{sign} {found}" for found in matches(name, pattern)), sep="\n")
    print("```\n")


def kl() -> None:
    """Print the pull of each KL term on the logit of `think`, if P(think) was 0.357 at the start and is 0.7 now."""
    now, ref = (torch.tensor([[p], [1 - p]], dtype=torch.float64) for p in (0.7, 0.357))
    tensors = {"kl": (now / ref).log(), "old_logprobs": now.log(), "ref_logprobs": ref.log()}
    steps = now * torch.tensor([[0.3], [-0.7]])  # probability times the derivative of the log-prob
    pulls = {"the KL itself": (steps * tensors["kl"]).sum().item()}
    for name, script, bug in KL_TERMS:
        pushes = push(script, [0, 0], [1, 1], bug, tensors, kl_coef=1, samples_per_prompt=2)
        pulls[name] = (-len(now) * steps * pushes).sum().item()
    lines = (f"{name:18}{x:5.2f} {'█' * round(60 * x)}".rstrip() for name, x in pulls.items())
    print("\n```", *lines, "```\n", sep="\n")


def critic() -> None:
    """Print values and advantages of the response that thinks, for a critic that knows the policy."""
    (think, *path), *_, (answer, six, _) = explain.choices(ROOT / "toy" / "policy")
    values = [think * math.prod(path) + answer * six, *(math.prod(path[t:]) for t in range(len(path)))]
    rollout = explain.make_rollout([1], [13], values=torch.tensor([values], dtype=torch.float64))
    lines = [["value before it", *(f"{x:.2f}" for x in values)]]
    for x in (0, 0.95):
        returns = ppo.compute_advantages(ppo.Args(gae_lambda=x), rollout)["returns"][0]
        lines.append([f"advantage, λ = {x:g}", *(f"{r - v:.2f}" for r, v in zip(returns.tolist(), values))])
    common.table(["", *next(iter(explain.GROUP)).split()], lines)


def main() -> None:
    names = ("script", "flags", "bug", "seed")
    cells = [dict(zip(names, (*run, seed))) for run in RUNS.values() for seed in (1, 2)]
    common.run_all("learn", cells, measure, workers=1)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
