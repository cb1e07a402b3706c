"""Training a small policy whose accuracy is known exactly, a hundred seeds at once: section 6 of docs/exact.md.

    python experiments/exact_training.py

A policy is softmax(features of the prompt @ W) over ANSWERS; a seed draws prompts, right answers and the base policy.
Each arm has the learning rate, a power of 2, with the best mean over TUNING_SEEDS: one for the accuracy at the end, one
for its mean over the run. The grid grows until its edge is not the best. Then SEEDS are run, which tune nothing.
"""

import math
from functools import partial

import torch
from common import run_all
from exact import WHOLE_BATCH, float64, make_args, one_token, short, slopes

SEEDS, TUNING_SEEDS, MARGIN = range(100), range(1000, 1024), 0.02
T_99 = 2.626  # of Student's t with 99 degrees of freedom
ITERATIONS, EVERY, BATCH, ANSWERS, RANK, TEST = 100, 5, 128, 16, 32, 128
OPTIMIZERS = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
FIRST_RATES = {"adam": (-6, -5, -4, -3), "sgd": (2, 3, 4, 5)}  # powers of 2
BETAS = (0.0, 0.1, 0.3, 1.0, 3.0)

# setting: number of prompts, chance that a score is flipped, whether a trap is scored higher than the right answer
SETTINGS = {"mixed": (256, 0.0, False), "flipped": (256, 0.2, False), "trap": (256, 0.0, True)}
SETTINGS |= {f"{count} prompts": (count, 0.0, False) for count in (10, 100, 1000)}


def arm(script: str, k: int = 8, patches=(), kl: bool = False) -> dict:
    return {"script": script, "k": k, "patches": list(patches), "kl": kl}


STDS = [arm("grpo"), arm("dr_grpo"), arm("reinforce_pp_baseline"), arm("maxrl")]
SIZES = [*(arm("grpo", k) for k in (2, 4, 16)), *(arm(x, 1) for x in ("reinforce_pp", "reinforce", "remax"))]
FEW = [arm("grpo"), arm("reinforce_pp_baseline"), arm("reinforce_pp", 1)]
TRAP = [arm("grpo", kl=True), arm("grpo", patches=["unbiased_kl"], kl=True)]
TRAP += [arm("reinforce_pp_baseline", kl=True), arm("rloo", kl=True)]
ARMS = {"mixed": [*STDS, arm("raft"), *SIZES], "flipped": [*STDS, arm("reinforce_pp", 1)]}
ARMS |= {"10 prompts": FEW, "100 prompts": FEW, "1000 prompts": FEW, "trap": TRAP}


def make_world(setting: str, seeds: range) -> dict:
    """Prompts for training and for the test, right answers and base policies, each seed with its own generator."""
    prompts, _, has_trap = SETTINGS[setting]
    # Easy and hard prompts, in turn: most of what they have lies in one half of the dimensions.
    is_hard = torch.arange(prompts + TEST) % 2 == 1
    in_second = torch.arange(RANK) >= RANK // 2
    size = torch.where(is_hard[:, None] == in_second, 1.0, 0.3) / math.sqrt(RANK / 2)
    known = torch.where(in_second, -0.5, 2.0)[:, None]  # of the hard half, the base knows less than nothing
    worlds = []
    for seed in seeds:
        draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed), **float64)
        features = size * draw(prompts + TEST, RANK)
        truth = draw(RANK, ANSWERS)
        base = known * truth + draw(RANK, ANSWERS)
        trap = draw(RANK, ANSWERS)
        base -= 0.5 * trap * has_trap
        right = (features @ truth).argmax(1)
        trapped = (features @ trap).scatter(1, right[:, None], -math.inf).argmax(1)
        worlds.append({"features": features, "base": base, "right": right, "trap": trapped})
    return {name: torch.stack([world[name] for world in worlds]) for name in worlds[0]}


def scores_of(setting: str, answers, right, trap, generator) -> torch.Tensor:
    _, flip, has_trap = SETTINGS[setting]
    scores = (answers == right) + 2.0 * has_trap * (answers == trap)
    is_flipped = torch.rand(scores.shape, generator=generator, **float64) < flip
    return torch.where(is_flipped, 1 - scores, scores)


def evaluate(setting: str, world: dict, weights) -> torch.Tensor:
    """(4, runs), on the test prompts: accuracy, pass@16, KL from the base policy, score."""
    features, right, trap = (world[name][:, -TEST:] for name in ("features", "right", "trap"))
    logprobs = (features @ weights).log_softmax(2)
    accuracy = logprobs.gather(2, right[..., None])[..., 0].exp()  # (runs, TEST)
    score = accuracy + 2 * logprobs.gather(2, trap[..., None])[..., 0].exp() * SETTINGS[setting][2]
    kl = (logprobs.exp() * (logprobs - (features @ world["base"]).log_softmax(2))).sum(2)
    return torch.stack([accuracy, 1 - (1 - accuracy) ** 16, kl, score]).mean(2)


def train(setting: str, optimizer: str, arm: dict, seeds: range, choices: list[tuple]) -> torch.Tensor:
    """(evaluations, 4, choices, seeds). A choice is a power of 2 for the learning rate, and beta."""
    script, k, patches = arm["script"], arm["k"], arm["patches"]
    world = make_world(setting, seeds)
    world = {name: torch.cat([x] * len(choices)) for name, x in world.items()}
    rates = torch.tensor([2.0**power for power, _ in choices for _ in seeds], **float64)[:, None, None]
    runs, groups, prompts = len(rates), BATCH // k, SETTINGS[setting][0]
    generator = torch.Generator().manual_seed(seeds[0])
    moved = torch.zeros_like(world["base"])  # with a learning rate of 1, which each run scales
    stepper = OPTIMIZERS[optimizer]([moved], lr=1.0)
    run, found = torch.arange(runs)[:, None], []
    for step in range(ITERATIONS + 1):
        weights = world["base"] + rates * moved
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
            rollout = one_token(scores.flatten()[part], greedy_scores=greedy.flatten()[part], **more)
            slope.append(slopes(script, args, rollout, BATCH, BATCH, patches=patches))
        slope = torch.cat(slope).view(runs, groups, k)
        # The sum over responses of slope * (one-hot - probabilities), for each prompt
        push = torch.zeros_like(logprobs).scatter_add(2, answers, slope)
        push -= slope.sum(2, keepdim=True) * logprobs.exp()
        moved.grad = -features.transpose(1, 2) @ push
        stepper.step()
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


def measure(run_dir, setting, optimizer, **arm) -> dict:
    best, means = tune(setting, optimizer, arm)
    found = train(setting, optimizer, arm, SEEDS, [best["end"], best["run"]])  # (evaluations, 4, 2, seeds)
    result = {"best": best, "tuned": {x: [[*key, *short([y])] for key, y in means[x].items()] for x in means}}
    result |= {"end": short(found[-1, 0, 0]), "run": short(found[1:, 0, 1].mean(0))}
    result |= {"pass@16": short(found[-1, 1, 0]), "mean accuracy": short(found[:, 0, 0].mean(1))}
    return result | {"mean kl": short(found[:, 2, 0].mean(1)), "mean score": short(found[:, 3, 0].mean(1))}


def label_of(values: list[float], base: list[float]) -> tuple[float, float, str]:
    """Mean difference, half of its 99 % interval, and a label: "same" and "a little" lie within the margin."""
    differences = torch.tensor(values) - torch.tensor(base)
    mean, half = float(differences.mean()), float(T_99 * differences.std() / math.sqrt(len(differences)))
    is_within = abs(mean) + half <= MARGIN
    if abs(mean) <= half:
        return mean, half, "same" if is_within else "undecided"
    return mean, half, "a little " * is_within + ("better" if mean > 0 else "worse")


if __name__ == "__main__":
    torch.set_num_threads(1)
    cells = []
    for setting, arms in ARMS.items():
        for optimizer in ("adam", "sgd") if setting in ("mixed", "flipped") else ("adam",):
            cells += [{"setting": setting, "optimizer": optimizer} | arm for arm in arms]
    run_all("exact_training", cells, measure, workers=1)
