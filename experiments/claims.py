"""Claims of the papers, each tried over seeds: docs/evidence.md.

    python experiments/claims.py                    all of them: 5 hours on two cores; an interrupted call resumes
    python experiments/claims.py --claims 4 5       some of them
    python experiments/claims.py --no_run           only draw and print the committed results

A claim is a list of comparisons of A with B. Its interval is the mean difference over the seeds, plus and minus its
bootstrap standard error times a quantile of Student's t distribution, at such a level that with probability 95 % none
of the intervals of a claim is wrong (Bonferroni). For plain means this is the paired t interval: with ten seeds, the
quantiles of the bootstrap itself would give intervals that are too narrow. `outcomes` has the rules for a verdict.

The learning rate of each script is the best of RATES by the sampled score over the second half of training, with seeds
that are not used again. Everything else is the script's default, or a flag of the claim.
"""

import json
import math
import random
import subprocess
import textwrap
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise, product
from pathlib import Path

import common
import numpy as np
import real
import tyro
from common import ROOT, curve, group_by, label, load, mean, run_all, table, train
from held_out import evaluate, held_out_chains, pass_at

SEEDS = tuple(range(1, 11))
RATE_SEEDS = (101, 102, 103)
RATES = (2e-4, 4e-4, 8e-4)
# Differences below the margin do not matter. It is 0.05 for all other measures.
MARGINS = {"train": 0.01, "late": 0.01, "4-5 people": 0.02}


@dataclass
class Args:
    claims: tuple[int, ...] = ()
    """Which claims, by number; none means all."""
    run: bool = True
    """Train what the result file lacks."""


# --- what is compared ---


def arm(script: str, *patches: str, data: str = "toy", **flags) -> dict:
    """Runs of a script with these changes (files in patches/), data and flags: a run for each seed."""
    return {"script": script, "patches": list(patches), "data": data, "flags": flags}


@dataclass
class Comparison:
    """A > B, or A ≥ B, in a measure. Each is an arm, or several that differ in beta, compared at equal KL."""

    first: dict | list[dict]
    relation: str
    second: dict | list[dict]
    measure: str


@dataclass
class Claim:
    text: str
    source: str
    comparisons: list[Comparison]
    measures: list[str]  # the columns of its table
    also: list[dict] = field(default_factory=list)  # arms that only the table shows

    def arms(self) -> list[dict]:
        """All arms, each once."""
        sides = [side for x in self.comparisons for side in (x.first, x.second)]
        arms = [arm for side in sides for arm in (side if isinstance(side, list) else [side])]
        return [arm for i, arm in enumerate(arms + self.also) if arm not in (arms + self.also)[:i]]


RPP, BASELINE, GRPO, RLOO = map(arm, ("reinforce_pp", "reinforce_pp_baseline", "grpo", "rloo"))
PPO, REMAX, DAPO, MAXRL = map(arm, ("ppo", "remax", "dapo", "maxrl"))
SIGNED = "experiments/claim_rewards.py:signed"


def beta(value: float, *patches: str) -> dict:
    return arm("reinforce_pp_baseline", *patches, kl_coef=value)


def puzzles(script: str) -> dict:
    """Knights and Knaves."""
    return arm(script, data="puzzles", model="toy/kk/policy", max_response_length=160, num_iterations=60)


def smollm2(script: str, *patches: str, **flags) -> dict:
    """SmolLM2-135M learns to reverse lists of three words, with the flags of real.py but fewer iterations."""
    return arm(script, *patches, data="SmolLM2", num_iterations=12, **flags)


def hacked(script: str) -> dict:
    """Training on the score of the reward model, with the KL in the metrics but not in the objective."""
    flags = {"reward": "toy/reward_model", "eval_reward": "exact_answer", "eval_every": 2}
    flags["eval_dataset"] = "toy/heldout.jsonl"
    return arm(script, data="reward model", num_iterations=60, kl_coef=1e-9, **flags)


def mixed(script: str, *patches: str, **flags) -> dict:
    """Chains of 2 and of 10 numbers."""
    return arm(script, *patches, data="2 and 10", max_response_length=48, **flags)


def prompts(number: int, script: str) -> dict:
    return arm(script, data=f"{number} prompts")


def batch(size: int) -> dict:
    """The number of responses of all runs is equal."""
    return arm("reinforce_pp", batch_size=size, num_iterations=80 * 128 // size)


def noisy(percent: int, script: str) -> dict:
    return arm(script, reward=f"experiments/claim_rewards.py:flip_{percent}")


def signed(script: str, *patches: str) -> dict:
    return arm(script, *patches, reward=SIGNED)


CLAIMS = {
    1: Claim(
        "REINFORCE++ generalizes further than other methods to longer chains",
        "2501.03262, Figure 4",
        [Comparison(RPP, ">", other, "6-8") for other in (GRPO, RLOO, PPO, REMAX, DAPO, MAXRL)],
        ["2-5", "6", "8", "10", "6-8"],
        [BASELINE],
    ),
    2: Claim(
        "On 30 prompts GRPO overfits: more accurate on them, less on held-out ones",
        "2501.03262, Table 3",
        [
            Comparison(prompts(30, "grpo"), ">", prompts(30, "reinforce_pp"), "late"),
            Comparison(prompts(30, "reinforce_pp"), ">", prompts(30, "grpo"), "pass@1"),
            Comparison(prompts(30, "reinforce_pp"), ">", prompts(30, "grpo"), "pass@16"),
        ],
        ["train", "late", "pass@1", "pass@16", "6-8"],
        [
            prompts(30, "reinforce_pp_baseline"),
            arm("reinforce_pp_baseline", "group_std", data="30 prompts"),
            *(prompts(n, script) for n in (10, 100, 300, 1000) for script in ("grpo", "reinforce_pp")),
            GRPO,
            RPP,
        ],
    ),
    3: Claim(
        "At the same KL, REINFORCE++ exploits a reward model less than other methods",
        "2501.03262, Figure 2",
        [
            Comparison(hacked("reinforce_pp"), ">", hacked(script), "2-5 at KL 5")
            for script in ("grpo", "rloo", "ppo", "remax", "reinforce_pp_baseline")
        ],
        [f"{name} at KL {kl}" for name in ("2-5", "score") for kl in (2, 5, 10)],
    ),
    4: Claim(
        "Rewards of -1 and 1 are as good as 0 and 1 with global normalization, and better without it",
        "our question; 2501.03262 uses both",
        [
            Comparison(signed("reinforce_pp"), "≥", RPP, "train"),
            Comparison(
                signed("reinforce_pp", "no_whitening"), ">", arm("reinforce_pp", "no_whitening"), "train"
            ),
        ],
        ["train", "2-5", "6-8"],
    ),
    5: Claim(
        "The std of the batch is better than that of the group, and k2 is better than k3",
        "2501.03262, REINFORCE++-Baseline",
        [
            Comparison(first, ">", second, measure)
            for measure in ("train", "6-8")
            for first, second in (
                (beta(0.1), beta(0.1, "group_std")),
                (beta(0.1, "k3_for_k2"), beta(0.1, "group_std", "k3_for_k2")),
                (beta(0.1), beta(0.1, "k3_for_k2")),
                (beta(0.1, "group_std"), beta(0.1, "group_std", "k3_for_k2")),
            )
        ],
        ["train", "2-5", "6-8", "kl"],
    ),
    6: Claim(
        "Global normalization needs large batches, since its bias vanishes only as they grow",
        "implied by 2501.03262",
        [
            *(Comparison(RPP, ">", arm("reinforce_pp", f"whiten_{size}"), "train") for size in (8, 32)),
            *(Comparison(RPP, ">", batch(size), "2-5") for size in (8, 16, 32)),
        ],
        ["train", "2-5", "6-8"],
        [batch(64), batch(512)],
    ),
    7: Claim(
        "With equally many responses in all, GRPO with 2 per prompt is as good as with 16",
        "variant of 2510.00977",
        [
            Comparison(arm("grpo", samples_per_prompt=2), "≥", arm("grpo", samples_per_prompt=16), measure)
            for measure in ("train", "6-8")
        ],
        ["train", "2-5", "6-8"],
        [arm("grpo", samples_per_prompt=4), GRPO],
    ),
    8: Claim(
        "Where easy and hard prompts are mixed, the std of the batch is better than that of the group, and than none",
        "2508.08221",
        [
            Comparison(mixed("reinforce_pp_baseline"), ">", mixed("reinforce_pp_baseline", patch), "train")
            for patch in ("group_std", "no_std")
        ],
        ["train", "late", "6", "8", "10"],
        [mixed(script) for script in ("grpo", "dr_grpo", "rloo")],
    ),
    9: Claim(
        "Normalization over the batch is more stable than in the group if some rewards are wrong",
        "our question",
        [
            Comparison(noisy(30, "reinforce_pp"), ">", noisy(30, "grpo"), "train"),
            Comparison(noisy(30, "reinforce_pp_baseline"), ">", noisy(30, "grpo"), "train"),
        ],
        ["train", "2-5", "6-8"],
        [
            noisy(percent, script)
            for percent in (10, 20)
            for script in ("reinforce_pp", "reinforce_pp_baseline", "grpo")
        ],
    ),
    10: Claim(
        "PPO is better the closer lambda is to 1, and with a critic that starts from the reward model",
        "our question; 2501.03262 uses 1",
        [
            Comparison(arm("ppo", gae_lambda=1), ">", PPO, "train"),
            Comparison(PPO, ">", arm("ppo", gae_lambda=0.9), "train"),
            Comparison(arm("ppo", gae_lambda=0.9), ">", arm("ppo", gae_lambda=0.5), "train"),
            Comparison(arm("ppo", gae_lambda=0.5), ">", arm("ppo", gae_lambda=0), "train"),
            Comparison(arm("ppo", "critic_from_reward_model"), ">", PPO, "train"),
        ],
        ["train", "2-5", "6-8"],
    ),
    11: Claim(
        "GRPO gains over REINFORCE mostly by dropping all-wrong groups; training on right responses only is as good",
        "2504.11343",
        [
            Comparison(mixed("grpo"), ">", mixed("grpo", "reinforce", reward=SIGNED), "train"),
            Comparison(mixed("grpo", "drop_all_wrong", reward=SIGNED), "≥", mixed("grpo"), "train"),
            Comparison(mixed("grpo", "reinforce"), "≥", mixed("grpo"), "train"),
        ],
        ["train", "late", "6", "8", "10"],
        [mixed("grpo", "drop_equal", reward=SIGNED), mixed("raft"), mixed("maxrl")],
    ),
    12: Claim(
        "At equal KL, k1 in the reward generalizes further than k3 in the loss",
        "2512.21852",
        [
            Comparison(
                [arm("rloo", kl_coef=value) for value in (0.02, 0.1, 0.2, 0.3, 0.5)],
                ">",
                [arm("rloo", "k3_in_loss", kl_coef=value) for value in (0.02, 0.1, 0.5)],
                "6-8",
            )
        ],
        ["kl", "train", "2-5", "6-8"],
    ),
    13: Claim(
        "REINFORCE++ generalizes further than other methods to Knights and Knaves with more people",
        "2501.03262, Table 2",
        [
            Comparison(puzzles("reinforce_pp"), ">", puzzles(other), "4-5 people")
            for other in ("grpo", "rloo", "ppo", "remax", "dapo", "maxrl")
        ],
        ["2", "3", "4", "5", "6", "4-5 people"],
        [puzzles("reinforce_pp_baseline")],
    ),
    14: Claim(
        "On SmolLM2-135M, training on right responses only is as good as GRPO",
        "2504.11343",
        [
            Comparison(smollm2("grpo", "reinforce"), "≥", smollm2("grpo"), measure)
            for measure in ("train", "4 words")
        ],
        ["train", "3 words", "3 new words", "4 words"],
    ),
    15: Claim(
        "On SmolLM2-135M, at equal KL, k1 in the reward generalizes further than k3 in the loss",
        "2512.21852",
        [
            Comparison(
                [smollm2("rloo", kl_coef=value) for value in (0.1, 0.5)],
                ">",
                [smollm2("rloo", "k3_in_loss", kl_coef=value) for value in (0.1, 0.5)],
                "4 words",
            )
        ],
        ["kl", "train", "3 words", "3 new words", "4 words"],
    ),
}


# --- runs ---


def dataset(folder: Path, data: str, seed: int) -> Path:
    """The training prompts: those of the toy or of Knights and Knaves, some of them, or chains of 2 and 10."""
    if data == "puzzles":
        return ROOT / "toy" / "kk" / "train.jsonl"
    path = ROOT / "toy" / "train.jsonl"
    lines = path.read_text().splitlines()
    if data in ("toy", "reward model"):
        return path
    if data == "2 and 10":
        from toy.make_toy import make_chain, prompt, value

        rng = random.Random(1)
        chains = [make_chain(rng, numbers) for _ in range(1000) for numbers in (2, 10)]
        lines = [json.dumps({"prompt": prompt(chain), "answer": str(value(chain))}) for chain in chains]
    else:
        number = int(data.removesuffix(" prompts"))
        lines = random.Random(seed).sample(lines, number)
        lines *= math.ceil(128 / number)  # a batch has up to 128 prompts
    path = folder / "train.jsonl"
    path.write_text("\n".join(lines))
    return path


@cache
def held_out_prompts(folder: str) -> dict[str, list[tuple[str, str]]]:
    """Prompts and answers by group: those of the toy and chains of 10, or those of Knights and Knaves."""
    groups = {}
    for line in (ROOT / folder / "heldout.jsonl").open():
        row = json.loads(line)
        groups.setdefault(row["group"], []).append((row["prompt"], row["answer"]))
    return groups if folder == "toy/kk" else groups | {"10": held_out_chains(10)}


def in_parts(values: list[float]) -> list[float]:
    """The means of ten equal parts."""
    bounds = [round(i * len(values) / 10) for i in range(11)]
    return [round(mean(values[i:j]), 4) for i, j in pairwise(bounds)]


def measure(
    run_dir: Path, script: str, patches: list, data: str, flags: dict, learning_rate: float, seed: int
) -> dict:
    """Train and evaluate. A run whose loss is no longer finite counts, with an accuracy of 0."""
    if data == "SmolLM2":
        options = real.all_flags(script, seed, flags) | {"learning_rate": learning_rate}
        lines, _ = train(script, options, run_dir, patches=patches)
        last = {name.removeprefix("eval/score/"): x for name, x in lines[-1].items() if "eval/" in name}
        return {"greedy": last} | curves_of(lines)
    options = {"dataset": dataset(run_dir.parent, data, seed), "eval_every": 0, "save_every": 0, "seed": seed}
    options |= flags | {"learning_rate": learning_rate}
    groups = held_out_prompts("toy/kk" if data == "puzzles" else "toy")
    try:
        lines, _ = train(script, options, run_dir, patches=patches)
    except subprocess.CalledProcessError as error:
        if error.returncode != 2 or not (run_dir / "metrics.jsonl").exists():
            raise  # something else went wrong
        greedy = {group: 0.0 for group in groups}
        return {"diverged": True, "greedy": greedy, "pass@1": 0.0, "pass@16": 0.0, "score": [0.0] * 10}
    if data == "puzzles":
        result = evaluate(run_dir / "model", groups, [], max_response_length=160)
        passed = {}
    else:
        result = evaluate(run_dir / "model", groups, ["2-5"])
        passed = {f"pass@{k}": round(pass_at(k, result["successes"]["2-5"]), 4) for k in (1, 16)}
    path = {"path": path_of(lines)} if data == "reward model" else {}
    return {"greedy": result["greedy"]} | passed | curves_of(lines) | path


def curves_of(lines: list[dict]) -> dict[str, list[float]]:
    """Score and, if it was logged, KL, as means of ten equal parts of the run."""
    curves = {key: curve(lines, key) for key in ("score", "kl")}
    return {key: in_parts(values) for key, values in curves.items() if values}


def path_of(lines: list[dict]) -> list[list[float]]:
    """KL, score and accuracy at each evaluation. KL and score are means over the five iterations around it."""
    sampled = {line["iteration"]: line for line in lines if "kl" in line}
    path = []
    for line in lines:
        if "eval/score/2-5" in line:
            around = [sampled[i] for i in range(line["iteration"] - 2, line["iteration"] + 3) if i in sampled]
            means = [round(mean([x[key] for x in around]), 4) for key in ("kl", "score")]
            path.append([*means, line["eval/score/2-5"]])
    return path


@cache
def best_rate(script: str) -> float:
    """The learning rate with the highest score over the second half of training."""
    runs = [run for run in load("rates")["runs"] if run["script"] == script]
    scores = {}
    for (rate,), same_rate in group_by(runs, "learning_rate").items():
        scores[rate] = mean([value(run, "late") for run in same_rate])
    return max(scores, key=scores.get)


def rate_of(one: dict) -> float:
    """The learning rate of an arm."""
    fixed = {"puzzles": RATES[0], "SmolLM2": real.FLAGS["learning_rate"]}
    return fixed.get(one["data"]) or best_rate(one["script"])


def seeds_of(one: dict) -> tuple[int, ...]:
    """The seeds of an arm, fewer where a run takes long."""
    return SEEDS[: {"puzzles": 5, "SmolLM2": 3}.get(one["data"], 10)]


# --- statistics ---


def value(run: dict, measure: str) -> float:
    """A measure of one run: sampled accuracy, KL, pass@k on 2-5, accuracy of greedy responses by length. Else NaN."""
    if run.get("diverged"):
        return math.nan if measure == "kl" else 0.0
    if measure in ("train", "late"):
        score = mean(run["score"] if measure == "train" else run["score"][5:])
        reward = run["flags"].get("reward", "")
        if reward == SIGNED:
            return (score + 1) / 2
        noise = int(reward.rpartition("flip_")[2]) / 100 if "flip_" in reward else 0
        return (score - noise) / (1 - 2 * noise)  # the accuracy before the flips
    if " at KL " in measure:
        return at_first(run.get("path", []), *measure.split(" at KL "))
    if measure == "kl":
        return run.get("kl", [math.nan])[-1]
    if measure.startswith("pass@"):
        return run.get(measure, math.nan)
    parts = {"6-8": ("6", "8"), "4-5 people": ("4", "5")}
    return mean([run["greedy"].get(group, math.nan) for group in parts.get(measure, (measure,))])


def at_first(path: list[list[float]], name: str, kl: float) -> float:
    """Score or accuracy where the KL first reaches this value. NaN if it never does."""
    kls, scores, accuracies = zip(*path) if path else ([0.0], [], [])
    highest = np.maximum.accumulate(kls)
    if highest[-1] < float(kl):
        return math.nan
    return float(np.interp(float(kl), highest, scores if name == "score" else accuracies))


@cache
def committed() -> list[dict]:
    return load("claims")["runs"]


def values(one: dict, measure: str) -> np.ndarray:
    """A measure of an arm (seeds,); shorter while runs are missing."""
    one = one | {"learning_rate": rate_of(one)}
    runs = [run for run in committed() if all(run[key] == one[key] for key in one)]
    return np.array([value(run, measure) for run in sorted(runs, key=lambda run: run["seed"])])


def resample(num_seeds: int) -> np.ndarray:
    """Indices of seeds (1 + 10,000, num_seeds): the seeds themselves, then the samples of the bootstrap."""
    samples = np.random.default_rng(0).integers(num_seeds, size=(10_000, num_seeds))
    return np.vstack([np.arange(num_seeds), samples])


def interval(estimates: np.ndarray, num_seeds: int, error: float = 0.05) -> tuple[float, float, float]:
    """The first estimate, and its interval by the standard error of the others, wrong with this probability."""
    standard_error = estimates[1:].std() * math.sqrt(num_seeds / (num_seeds - 1))
    quantile = np.quantile(np.random.default_rng(0).standard_t(num_seeds - 1, 1_000_000), 1 - error / 2)
    return estimates[0], estimates[0] - quantile * standard_error, estimates[0] + quantile * standard_error


def at_kl(kl: float, kls: list[np.ndarray], means: list[np.ndarray]) -> np.ndarray:
    """The means of one arm (samples,), or of several arms those at this KL, interpolated between the arms."""
    if len(means) == 1:
        return means[0]
    results = []
    for points in zip(np.transpose(kls), np.transpose(means)):  # the KLs and the means of a sample
        order = np.argsort(points[0])
        results.append(np.interp(kl, points[0][order], points[1][order]))
    return np.array(results)


def shared_kls(comparison: Comparison) -> np.ndarray:
    """Five KLs (5,) from the lowest to the highest that both sides have; NaN if there is none."""
    sides = (comparison.first, comparison.second)
    ranges = [[values(one, "kl").mean() for one in side] for side in sides]
    low, high = np.max([np.min(x) for x in ranges]), np.min([np.max(x) for x in ranges])  # NaN stays NaN
    return np.linspace(low, high, 5) if low <= high else np.full(5, math.nan)


def difference(comparison: Comparison, error: float, kl: float = 0) -> tuple[float, float, float] | None:
    """First minus second: the mean over the seeds, and its interval. None while runs are missing.

    Sides with several betas are compared at this KL.
    """
    sides = [side if isinstance(side, list) else [side] for side in (comparison.first, comparison.second)]
    num_seeds = len(seeds_of(sides[0][0]))
    if any(len(values(one, comparison.measure)) < num_seeds for side in sides for one in side):
        return None
    samples, results = resample(num_seeds), []
    for side in sides:
        kls, means = (
            [values(one, measure)[samples].mean(1) for one in side] for measure in ("kl", comparison.measure)
        )
        results.append(at_kl(kl, kls, means))
    return interval(results[0] - results[1], num_seeds, error)


HOLDS, FAILS, UNKNOWN, MISSING = "holds here", "does not hold here", "cannot tell", "not run yet"


def judge(relation: str, low: float, high: float, margin: float) -> str:
    """The verdict on A > B (better) or A ≥ B (as good), if A - B is between low and high.

    A > B holds if A - B is above 0, and does not hold if an advantage of the margin is excluded.
    A ≥ B holds if a deficit of the margin is excluded, and does not hold if the deficit is larger.
    """
    if relation == ">":
        return HOLDS if low > 0 else FAILS if high < margin else UNKNOWN
    return HOLDS if low > -margin else FAILS if high < -margin else UNKNOWN


@cache
def outcomes(number: int) -> list[tuple]:
    """For each comparison of a claim its verdict, and the difference with its interval, or None."""
    results = []
    comparisons = CLAIMS[number].comparisons
    for comparison in comparisons:
        kl = shared_kls(comparison)[2] if isinstance(comparison.first, list) else 0
        found = difference(comparison, 0.05 / len(comparisons), kl)
        name = MISSING
        if found:
            name = judge(comparison.relation, *found[1:], MARGINS.get(comparison.measure, 0.05))
        results.append((name, found))
    return results


def verdict(number: int) -> str:
    """A claim holds if all of its comparisons hold, and does not hold if one does not."""
    verdicts = [name for name, _ in outcomes(number)]
    return next((name for name in (FAILS, MISSING, UNKNOWN) if name in verdicts), HOLDS)


# --- the page ---


def name_of(one: dict | list[dict]) -> str:
    """Script, flags, patches and data of an arm, without the flags that all arms with these data have."""
    if isinstance(one, list):  # in several beta
        return label(one[0] | {"flags": {}})
    makers = {"puzzles": puzzles, "reward model": hacked, "2 and 10": mixed, "SmolLM2": smollm2}
    everywhere = makers.get(one["data"], arm)("")["flags"]
    flags = {name: value for name, value in one["flags"].items() if name not in everywhere}
    data = {"toy": "", "2 and 10": ", chains of 2 and 10"}.get(one["data"], f", {one['data']}")
    return label(one | {"flags": flags}) + data


def measure_of(comparison: Comparison) -> str:
    """The measure of a comparison, and the KL at which several arms are compared."""
    if isinstance(comparison.first, list):
        return f"{comparison.measure} at KL {shared_kls(comparison)[2]:.2f}"
    return comparison.measure


def show_interval(found: tuple[float, float, float]) -> str:
    return "{:+.3f} [{:+.3f}, {:+.3f}]".format(*found)


def summary() -> None:
    """Print the claims, each with its verdict and a comparison that decides it."""
    rows = []
    for number, claim in CLAIMS.items():
        decisive = [name for name, _ in outcomes(number)].index(verdict(number))
        comparison, (_, found) = claim.comparisons[decisive], outcomes(number)[decisive]
        names = [name_of(side) for side in (comparison.first, comparison.second)]
        text = f"{show_interval(found)} in {measure_of(comparison)}: {names[0]} - {names[1]}" if found else ""
        counts = Counter(name for name, _ in outcomes(number))
        parts = ", ".join(f"{count} x {name.removesuffix(' here')}" for name, count in counts.items())
        shown = f"**{verdict(number)}**" + (f" ({parts})" if len(claim.comparisons) > 1 else "")
        rows.append([f"[{number}](#claim-{number})", claim.text, claim.source, shown, text])
    table(["", "claim", "source", "verdict (of its comparisons)", "first A - B with this verdict"], rows)
    for kind, is_ours in (("Claims of papers", False), ("Our questions", True)):
        verdicts = [verdict(n) for n, claim in CLAIMS.items() if claim.source.startswith("our") == is_ours]
        counts = ", ".join(f"{name} {count}" for name, count in Counter(verdicts).most_common())
        print(f"- {kind}: {counts}.")
    diverged = sum(run.get("diverged", False) for run in committed())
    print(f"- Stopped because the loss was not finite: {diverged} of {len(committed())} runs.\n")


def statement(number: int) -> None:
    """Print a claim and its verdict."""
    claim = CLAIMS[number]
    print("\n" + textwrap.fill(f"**{claim.text}** ({claim.source}): *{verdict(number)}*.", 120) + "\n")


def details(number: int) -> None:
    """Print the comparisons of a claim, and the means of its arms."""
    claim = CLAIMS[number]
    rows = []
    for comparison, (name, found) in zip(claim.comparisons, outcomes(number)):
        names = [name_of(side) for side in (comparison.first, comparison.second)]
        shown = show_interval(found) if found else ""
        rows.append([names[0], comparison.relation, names[1], measure_of(comparison), shown, name])
    table(["A", "", "B", "measure", "A - B [interval]", "verdict"], rows)
    for comparison, (_, found) in zip(claim.comparisons, outcomes(number)):
        if found and isinstance(comparison.first, list):
            kls = shared_kls(comparison)
            cells = [show_interval(difference(comparison, 0.05 / len(claim.comparisons), kl)) for kl in kls]
            table(["at KL", *(f"{kl:.2f}" for kl in kls)], [["A - B", *cells]])
    rows = []
    for one in claim.arms():
        cells = []
        for measure in claim.measures:
            numbers = values(one, measure)
            is_known = len(numbers) == len(seeds_of(one)) and np.isfinite(numbers).all()
            cells.append(f"{numbers.mean():.3f} ± {numbers.std(ddof=1):.3f}" if is_known else "")
        rows.append([name_of(one), *cells])
    table(["mean ± std of the seeds", *claim.measures], rows)
    for patch in dict.fromkeys(patch for one in claim.arms() for patch in one["patches"]):
        print(f"`{patch}.patch`:")
        common.print_patch(patch)
    common.print_commands(["python", "experiments/claims.py", "--claims", str(number)])


def rates() -> None:
    """Print the scores of each script for each learning rate."""
    rows = []
    for script in dict.fromkeys(run["script"] for run in load("rates")["runs"]):
        runs = [run for run in load("rates")["runs"] if run["script"] == script]
        cells = [
            f"{mean([value(run, measure) for run in runs if run['learning_rate'] == rate]):.3f}"
            for measure in ("late", "6-8")
            for rate in RATES
        ]
        rows.append([f"`{script}.py`", *cells, f"{best_rate(script):g}"])
    heads = [f"{measure}, {rate:g}" for measure in ("late", "6-8") for rate in RATES]
    table(["script", *heads, "best"], rows)


def draw(number: int) -> None:
    """Draw the measures of a claim's arms: each seed, the mean, and its 95 % interval."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    claim = CLAIMS[number]
    arms = [one for one in claim.arms() if len(values(one, "train")) == len(seeds_of(one))]
    measures = [x for x in claim.measures if any(np.isfinite(values(one, x)).all() for one in arms)]
    if not measures:
        return
    size = (1.6 * len(measures) + 3, 0.28 * len(arms) + 0.9)
    figure, axes = plt.subplots(1, len(measures), figsize=size, dpi=110, layout="constrained", sharey=True)
    for axis, measure in zip(axes, measures):
        for row, one in enumerate(arms):
            numbers = values(one, measure)
            axis.plot(numbers, [row] * len(numbers), ".", color="tab:gray", alpha=0.4)
            _, low, high = interval(numbers[resample(len(numbers))].mean(1), len(numbers))
            axis.plot([low, high], [row, row], color="tab:blue", lw=2)
            axis.plot(numbers.mean(), row, "o", color="tab:blue", ms=4)
        axis.set_title(measure, fontsize=10)
        axis.grid(alpha=0.25)
    axes[0].set_yticks(range(len(arms)), [name_of(one).replace("`", "") for one in arms], fontsize=8)
    axes[0].invert_yaxis()
    figure.savefig(ROOT / "docs" / f"claim_{number}.png")
    plt.close(figure)


def main(args: Args) -> None:
    numbers = args.claims or tuple(CLAIMS)
    if args.run:
        scripts = dict.fromkeys(one["script"] for number in numbers for one in CLAIMS[number].arms())
        each = product(scripts, RATES, RATE_SEEDS)
        cells = [arm(script) | {"learning_rate": rate, "seed": seed} for script, rate, seed in each]
        run_all("rates", cells, measure)
        for number in numbers:
            cells = [
                one | {"learning_rate": rate_of(one), "seed": seed}
                for one in CLAIMS[number].arms()
                for seed in seeds_of(one)
            ]
            run_all("claims", cells, measure)
    summary()
    for number in numbers:
        details(number)
        draw(number)
    rates()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, use_underscores=True))
