"""Training a small policy whose accuracy is known exactly, a hundred seeds at once: section 6 of docs/exact.md.

    python experiments/exact_training.py

A policy is softmax(features of the prompt @ W) over ANSWERS; a seed draws prompts, right answers and the base policy.
The rule, fixed before the seeds that are shown were run: the learning rate of each arm is the power of 2 with the best
mean over TUNING_SEEDS, once for the accuracy at the end and once for its mean over the run; the grid grows until the
best is not at its edge. With it, SEEDS other seeds are run. Each is compared with the same seed of the first arm of its
setting. The 99 % interval of the mean difference is "within the margin" inside of +-MARGIN; else "better" above 0,
"worse" below 0, and "undecided" if it has 0 in it. There is no gradient clipping.
"""

import math

import torch
from common import run_all
from exact import WHOLE_BATCH, float64, has, make_args, make_rollout, slopes

SEEDS, TUNING_SEEDS, MARGIN = range(100), range(1000, 1024), 0.02
T_99 = 2.626  # of Student's t with 99 degrees of freedom
ITERATIONS, EVERY, BATCH, ANSWERS, RANK, TEST = 100, 5, 128, 16, 32, 128
FIRST_RATES = {"adam": (-6, -5, -4, -3), "sgd": (2, 3, 4, 5)}  # powers of 2
BETAS = (0.0, 0.1, 0.3, 1.0, 3.0)

# setting: number of prompts, chance that a score is flipped, whether a trap is scored higher than the right answer
SETTINGS = {
    "mixed": (256, 0.0, False),
    "flipped": (256, 0.2, False),
    "10 prompts": (10, 0.0, False),
    "100 prompts": (100, 0.0, False),
    "1000 prompts": (1000, 0.0, False),
    "trap": (256, 0.0, True),
}


def arm(script: str, k: int, patches=(), kl: bool = False) -> dict:
    return {"script": script, "k": k, "patches": list(patches), "kl": kl}


GRPO = arm("grpo", 8)
STDS = [arm("dr_grpo", 8), arm("reinforce_pp_baseline", 8), arm("maxrl", 8)]
ALONE = [arm("reinforce_pp", 1), arm("reinforce", 1), arm("remax", 1)]
ARMS = {
    "mixed": [GRPO, *STDS, arm("raft", 8), *(arm("grpo", k) for k in (2, 4, 16)), *ALONE],
    "flipped": [GRPO, *STDS, ALONE[0]],
    "10 prompts": [GRPO, STDS[1], ALONE[0]],
    "100 prompts": [GRPO, STDS[1], ALONE[0]],
    "1000 prompts": [GRPO, STDS[1], ALONE[0]],
    "trap": [
        arm("grpo", 8, kl=True),
        arm("grpo", 8, ["unbiased_kl"], kl=True),
        arm("reinforce_pp_baseline", 8, kl=True),
        arm("rloo", 8, kl=True),
    ],
}


def make_world(setting: str, seeds: range) -> dict:
    """Prompts for training and for the test, right answers and base policies, each seed with its own generator."""
    prompts, _, has_trap = SETTINGS[setting]
    worlds = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape, generator=generator):
            return torch.randn(*shape, generator=generator, **float64)

        features = draw(prompts + TEST, RANK)
        # Easy and hard prompts, in turn: most of what they have lies in one half of the dimensions.
        is_hard = torch.arange(prompts + TEST) % 2 == 1
        in_second = torch.arange(RANK) >= RANK // 2
        features *= torch.where(is_hard[:, None] == in_second, 1.0, 0.3) / math.sqrt(RANK / 2)
        truth = draw(RANK, ANSWERS)
        known = torch.where(in_second, -0.5, 2.0)[
            :, None
        ]  # of the hard half, the base policy knows less than nothing
        base = known * truth + draw(RANK, ANSWERS)
        trap = draw(RANK, ANSWERS)
        if has_trap:
            base -= 0.5 * trap
        logits = features @ truth
        right = logits.argmax(1)
        trapped = (features @ trap).scatter(1, right[:, None], -math.inf).argmax(1)
        worlds.append({"features": features, "base": base, "right": right, "trap": trapped})
    return {name: torch.stack([world[name] for world in worlds]) for name in worlds[0]}


def scores_of(setting: str, answers, right, trap, generator) -> torch.Tensor:
    _, flip, has_trap = SETTINGS[setting]
    scores = (answers == right).double()
    if has_trap:
        scores += 2.0 * (answers == trap)
    is_flipped = torch.rand(scores.shape, generator=generator, **float64) < flip
    return torch.where(is_flipped, 1 - scores, scores)


def evaluate(setting: str, world: dict, weights) -> torch.Tensor:
    """(4, runs), on the test prompts: accuracy, pass@16, KL from the base policy, score."""
    features, right, trap = (world[name][:, -TEST:] for name in ("features", "right", "trap"))
    logprobs = (features @ weights).log_softmax(2)
    base = (features @ world["base"]).log_softmax(2)
    accuracy = logprobs.gather(2, right[..., None])[..., 0].exp()  # (runs, TEST)
    score = accuracy + 2 * logprobs.gather(2, trap[..., None])[..., 0].exp() * SETTINGS[setting][2]
    kl = (logprobs.exp() * (logprobs - base)).sum(2)
    return torch.stack([accuracy, 1 - (1 - accuracy) ** 16, kl, score]).mean(2)


def train(setting: str, optimizer: str, arm: dict, seeds: range, choices: list[tuple]) -> torch.Tensor:
    """(evaluations, 4, choices, seeds). A choice is a power of 2 for the learning rate, and beta."""
    script, k, patches = arm["script"], arm["k"], arm["patches"]
    world = make_world(setting, seeds)
    world = {name: torch.cat([x] * len(choices)) for name, x in world.items()}
    rates = torch.tensor([2.0**power for power, _ in choices], **float64)
    rates = rates.repeat_interleave(len(seeds))[:, None, None]
    runs, groups, prompts = len(rates), BATCH // k, SETTINGS[setting][0]
    generator = torch.Generator().manual_seed(seeds[0])
    weights = world["base"].clone()
    mean, square = torch.zeros_like(weights), torch.zeros_like(weights)
    run, found = torch.arange(runs)[:, None], []
    for step in range(ITERATIONS + 1):
        if step % EVERY == 0:
            found.append(evaluate(setting, world, weights))
        # All choices see the same prompts of a seed.
        rows = torch.randint(prompts, (len(seeds), groups), generator=generator).repeat(len(choices), 1)
        features, right, trap = (world[name][run, rows] for name in ("features", "right", "trap"))
        logprobs = (features @ weights).log_softmax(2)  # (runs, groups, ANSWERS)
        chances = logprobs.exp().view(-1, ANSWERS)
        answers = torch.multinomial(chances, k, replacement=True, generator=generator).view(runs, groups, k)
        scores = scores_of(setting, answers, right[..., None], trap[..., None], generator)
        old = logprobs.gather(2, answers).view(-1, 1)
        ref = (features @ world["base"]).log_softmax(2).gather(2, answers).view(-1, 1)
        greedy = scores_of("mixed", logprobs.argmax(2), right, trap, generator)[..., None].expand(-1, -1, k)
        slope = []
        # The advantages of a run come from its own batch, and each beta has its own loss.
        size = BATCH if script in WHOLE_BATCH else BATCH * len(seeds)
        for i in range(0, runs * BATCH, size):
            part = slice(i, i + size)
            beta = choices[i // (BATCH * len(seeds))][1]
            args = make_args(script, patches, samples_per_prompt=k, kl_coef=beta, max_response_length=1)
            more = {"old_logprobs": old[part], "ref_logprobs": ref[part], "kl": old[part] - ref[part]}
            rollout = make_rollout(scores.flatten()[part], greedy_scores=greedy.flatten()[part], **more)
            slope.append(slopes(script, args, rollout, BATCH, BATCH, patches=patches))
        slope = torch.cat(slope).view(runs, groups, k)
        # The sum over responses of slope * (one-hot - probabilities), for each prompt
        push = torch.zeros_like(logprobs).scatter_add(2, answers, slope)
        push -= slope.sum(2, keepdim=True) * logprobs.exp()
        gradient = features.transpose(1, 2) @ push
        if optimizer == "adam":
            mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient.square()
            corrected = mean / (1 - 0.9 ** (step + 1))
            gradient = corrected / ((square / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8)
        weights = weights + rates * gradient
    return torch.stack(found).view(-1, 4, len(choices), len(seeds))


def tune(setting: str, optimizer: str, arm: dict) -> tuple[dict, dict]:
    """The best (power of 2, beta) for the end and for the run, and the means that were compared."""
    betas = BETAS if arm["kl"] else (0.0,)
    powers, means = list(FIRST_RATES[optimizer]), {"end": {}, "run": {}}
    todo = powers
    while todo:
        choices = [(power, beta) for power in todo for beta in betas]
        accuracy = train(setting, optimizer, arm, TUNING_SEEDS, choices)[:, 0].mean(2)
        for i, choice in enumerate(choices):
            means["end"][choice], means["run"][choice] = float(accuracy[-1, i]), float(accuracy[1:, i].mean())
        best = {outcome: max(values, key=values.get) for outcome, values in means.items()}
        powers = sorted({power for power, _ in means["end"]})
        chosen = {power for power, _ in best.values()}
        todo = [powers[0] - 1] * (powers[0] in chosen) + [powers[-1] + 1] * (powers[-1] in chosen)
    return best, means


def numbers(values) -> list[float]:
    return [round(float(x), 4) for x in values]


def measure(run_dir, setting, optimizer, **arm) -> dict:
    best, means = tune(setting, optimizer, arm)
    found = train(setting, optimizer, arm, SEEDS, [best["end"], best["run"]])  # (evaluations, 4, 2, seeds)
    result = {
        "best": best,
        "tuned": {x: [[*key, *numbers([y])] for key, y in means[x].items()] for x in means},
    }
    result |= {"end": numbers(found[-1, 0, 0]), "run": numbers(found[1:, 0, 1].mean(0))}
    result["pass@16"] = numbers(found[-1, 1, 0])
    for i, name in enumerate(("accuracy", "pass@16", "kl", "score")):
        result[f"mean {name}"] = numbers(found[:, i, 0].mean(1))
    return result


def training_cells() -> list[dict]:
    cells = []
    for setting, arms in ARMS.items():
        for optimizer in ("adam", "sgd") if setting in ("mixed", "flipped") else ("adam",):
            cells += [{"setting": setting, "optimizer": optimizer} | arm for arm in arms]
    return [cell for cell in cells if all(has(patch) for patch in cell["patches"])]


def label_of(differences: torch.Tensor) -> tuple[float, float, str]:
    """Mean difference, half of its 99 % interval, and one of four labels."""
    mean, half = float(differences.mean()), float(T_99 * differences.std() / math.sqrt(len(differences)))
    if abs(mean) + half <= MARGIN:
        return mean, half, "within the margin"
    if abs(mean) <= half:
        return mean, half, "undecided"
    return mean, half, "better" if mean > 0 else "worse"


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_all("exact_training", training_cells(), measure, workers=1)
