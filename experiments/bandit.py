"""Bias and variance of the gradient of each estimator on a bandit whose true gradient is known.

    python experiments/bandit.py            two minutes on one core

Each prompt has its own softmax over actions. An action is a response of one token, and the gradient of the expected
score with respect to all logits is exact. compute_advantages and policy_loss are those of the scripts. ppo gets a
perfect critic, the expected score of the prompt. The KL is left out (kl_coef 0). Measured over many batches:

    cosine      of the mean gradient and the true one
    noise       E|g - E g|^2 / |E g|^2, the noise-to-signal ratio of one batch
"""

import importlib
import math

import tyro
from common import POLICY_SCRIPTS, group_by, load, run_all, table

PROMPTS, ACTIONS = 16, 8
DRAWS, SEED = 2000, 0  # batches of each cell
SCRIPTS = [x for x in POLICY_SCRIPTS if x not in ("distill", "sdpo", "maxrl")]  # no scores; 0 and 1 only
SETTINGS = {
    "alike": "prompts alike",  # scores from N(0, 1)
    "means": "different mean",  # the same, plus N(0, 3) for each prompt
    "rates": "scores 0 and 1",  # pass rates from 0.02 to 0.98
    "scales": "different scale",  # scores from N(0, 1), times 0.1 to 10
}
# Setting, k, responses in a batch
POINTS = [(setting, 4, 128) for setting in SETTINGS]
POINTS += [("scales", 16, 128), ("scales", 4, 16)]


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


def measure(run_dir, script: str, setting: str, k: int, size: int) -> dict:
    """Cosine and noise of one estimator, with size responses in a batch, k of them for each prompt."""
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
    return {"cosine": round(min(along / math.sqrt(signal), 1.0), 4), "noise": round(noise / signal, 3)}


def summary() -> None:
    """Print a line for each script: cosine and noise. Scripts with the same numbers share a line."""
    lines, rows = {}, load("bandit")
    for (script,), runs in group_by(rows, "script").items():
        cells = tuple(f"{run['cosine']:.3f} / {run['noise']:.2f}" for run in runs)
        lines.setdefault(cells, []).append(f"`{script}`")
    heads = []
    for setting, k, size in POINTS:
        others = (f", k = {k}" if k != 4 else "") + (f", {size} responses" if size != 128 else "")
        heads.append(SETTINGS[setting] + others)
    table(["", *heads], [[", ".join(same), *cells] for cells, same in lines.items()], rows)


def main() -> None:
    cells = []
    for script in SCRIPTS:
        for setting, k, size in POINTS:
            cells.append({"script": script, "setting": setting, "k": k, "size": size})
    run_all("bandit", cells, measure, workers=1)
    summary()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
