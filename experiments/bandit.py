"""Bias and variance of the gradient of each estimator on a bandit whose true gradient is known.

    python experiments/bandit.py            about six minutes on one core; then draws docs/bandit.png

Each prompt has its own softmax over actions. An action is a response of one token, and the gradient of the expected
score with respect to all logits is exact. compute_advantages and policy_loss are those of the scripts. ppo gets a
perfect critic, the expected score of the prompt. The KL is left out (kl_coef 0). Measured over many batches:

    cosine      of the mean gradient and the true one
    norm        of the mean gradient, divided by that of the true one
    noise       E|g - E g|^2 / |E g|^2, the noise-to-signal ratio of one batch
"""

import importlib
import itertools
import math
from pathlib import Path

from common import POLICY_SCRIPTS, ROOT, load, run_all, table

PROMPTS, ACTIONS = 16, 8
DRAWS, SEED = 2000, 0  # batches of each cell
SCRIPTS = [x for x in POLICY_SCRIPTS if x not in ("distill", "maxrl")]  # without scores, and for 0 and 1 only
SETTINGS = {
    "alike": "prompts alike",  # scores from N(0, 1)
    "means": "different mean",  # the same, plus N(0, 3) for each prompt
    "rates": "scores 0 and 1",  # pass rates from 0.02 to 0.98
    "scales": "different scale",  # scores from N(0, 1), times 0.1 to 10
}
BY_K = [{"k": k, "size": 128} for k in (2, 4, 8, 16)]  # size: responses in a batch
BY_SIZE = [{"k": 4, "size": size} for size in (4, 16, 64, 512)]
SUMMARY = [{"setting": setting, "k": 4, "size": 128} for setting in SETTINGS]
SUMMARY += [{"setting": "scales", "k": 16, "size": 128}]


def make_bandit(setting: str):
    """Logits and scores, each (PROMPTS, ACTIONS), float64."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    options = {"generator": generator, "dtype": torch.float64}
    logits = torch.randn(PROMPTS, ACTIONS, **options)
    scores = torch.randn(PROMPTS, ACTIONS, **options)
    if setting == "means":
        scores = scores + 3 * torch.randn(PROMPTS, 1, **options)
    if setting == "scales":
        scores = scores * torch.logspace(-1, 1, PROMPTS, dtype=torch.float64)[:, None]
    if setting == "rates":  # one right action, whose probability is the pass rate
        rate = torch.linspace(0.02, 0.98, PROMPTS, dtype=torch.float64)
        rest = logits[:, 1:].softmax(1) * (1 - rate)[:, None]
        logits = torch.cat([rate[:, None], rest], dim=1).log()
        scores = torch.eye(ACTIONS, dtype=torch.float64)[:1].repeat(PROMPTS, 1)
    return logits, scores


def measure(run_dir: Path, setting: str, script: str, k: int, size: int) -> dict:
    """Cosine, norm and noise of one estimator, with size responses in a batch, k of them for each prompt."""
    import torch

    torch.set_num_threads(1)
    logits, scores = make_bandit(setting)
    module = importlib.import_module(script)
    args = module.Args(samples_per_prompt=k)
    args.kl_coef = 0.0
    probs = logits.softmax(1)
    values = (probs * scores).sum(1)  # (PROMPTS,), the expected scores
    truth = probs * (scores - values[:, None]) / PROMPTS
    greedy = scores.gather(1, logits.argmax(1, keepdim=True))[:, 0]
    generator = torch.Generator().manual_seed(SEED + 1)
    mask, zero = torch.ones(size, 1, dtype=torch.bool), torch.zeros(size, 1, dtype=torch.float64)
    total, squares = torch.zeros_like(truth), 0.0
    for _ in range(DRAWS):
        prompt = torch.randint(PROMPTS, (size // k,), generator=generator).repeat_interleave(k)  # (B,)
        action = torch.multinomial(probs[prompt], 1, generator=generator)  # (B, 1)
        logprobs = logits[prompt].log_softmax(1).gather(1, action)  # (B, 1)
        rollout = {"scores": scores[prompt].gather(1, action)[:, 0], "response_mask": mask, "kl": zero}
        rollout |= {"old_logprobs": logprobs, "ref_logprobs": logprobs, "greedy_scores": greedy[prompt]}
        rollout["values"] = values[prompt][:, None]
        rollout |= module.compute_advantages(args, rollout)
        leaf = logprobs.clone().requires_grad_()
        loss, _ = module.policy_loss(args, rollout, leaf, size, size)
        (weight,) = torch.autograd.grad(loss, leaf)  # (B, 1)
        rows = torch.zeros(size, ACTIONS, dtype=torch.float64).scatter(1, action, 1.0) - probs[prompt]
        gradient = torch.zeros_like(truth).index_add_(0, prompt, -weight * rows)
        total += gradient
        squares += float(gradient.square().sum())
    mean = total / DRAWS
    noise = squares / DRAWS - float(mean.square().sum())
    # The mean of a finite number of draws is too long by noise / DRAWS.
    signal = max(float(mean.square().sum()) - noise / DRAWS, 1e-12)
    along = float((mean * truth).sum()) / float(truth.norm())
    return {
        "cosine": round(min(along / math.sqrt(signal), 1.0), 4),
        "norm": round(math.sqrt(signal) / float(truth.norm()), 4),
        "noise": round(noise / signal, 3),
    }


def find(**cell) -> dict:
    [run] = [run for run in load("bandit")["runs"] if cell.items() <= run.items()]
    return run


def summary() -> None:
    """Cosine and noise at 128 responses. Scripts with the same numbers share a row."""
    names = {}
    for script in SCRIPTS:
        runs = [find(script=script, **point) for point in SUMMARY]
        cells = tuple(f"{run['cosine']:.3f} / {run['noise']:.2f}" for run in runs)
        names.setdefault(cells, []).append(f"`{script}`")
    heads = [f"{SETTINGS[point['setting']]}, k = {point['k']}" for point in SUMMARY]
    table(["", *heads], [[", ".join(same), *cells] for cells, same in names.items()])


def draw(path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(4, 4, figsize=(13, 11), constrained_layout=True)
    labels = {"cosine": "cosine with the true gradient", "noise": "noise-to-signal"}
    for column, (setting, title) in enumerate(SETTINGS.items()):
        axes[0, column].set_title(title, fontsize=11)
        for axis, (x, key) in zip(axes[:, column], itertools.product(("k", "size"), labels)):
            points = BY_K if x == "k" else BY_SIZE
            xs = [point[x] for point in points]
            for script in ("reinforce_pp", "reinforce_pp_baseline", "rloo", "grpo", "ppo", "remax"):
                ys = [find(setting=setting, script=script, **point)[key] for point in points]
                axis.plot(xs, ys, marker="o", markersize=4, linewidth=1.3, label=script)
            axis.set_xscale("log", base=2)
            axis.set_xticks(xs, list(map(str, xs)))
            axis.set_xlabel("k, of 128 responses" if x == "k" else "responses, k = 4")
            axis.set_ylabel("" if column else labels[key])
            axis.grid(alpha=0.25)
            if key == "noise" and x == "size":
                axis.set_yscale("log")
            else:
                axis.set_ylim(*{"cosine": (0.4, 1.03), "noise": (0, 6)}[key])
    axes[0, 0].legend(frameon=False, fontsize=8, loc="lower left")
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    names = itertools.product(SETTINGS, SCRIPTS, [*BY_K, *BY_SIZE])
    cells = [{"setting": setting, "script": script, **point} for setting, script, point in names]
    run_all("bandit", cells, measure, workers=1)
    draw(ROOT / "docs" / "bandit.png")
