"""Read the metrics of a run and say what looks wrong, and what to do.

    python tools/diagnose.py runs/a        a line for each finding, the most important first

Reads the run folder of a policy script, also while it trains; or TRL's trainer_state.json; or the file of verl's logger
"file", a .jsonl. docs/metrics.md explains the metrics.
"""

import json
import sys
from itertools import pairwise
from math import isfinite
from pathlib import Path
from statistics import mean, variance

import plot
import tyro

REMEDIES = {
    "not finite": "Read the samples and grad_norm before it; check divisions and logs, lower --learning_rate.",
    "log-probs": "Sampling and training disagree: compare temperature, positions, padding, dropout and weights.",
    "first kl": "Check the temperature and the weights of the reference's log-probs.",
    "equal groups": "If responses to one prompt are identical, sampling is greedy; else check reward and prompts.",
    "truncated": "Raise --max_response_length, or use --missing_eos_penalty; check that the loss includes the EOS.",
    "negative kl": "A KL is not negative: check its sign, and that both log-probs are of the same tokens.",
    "kl of 0": "If score rises, the reference trains with the policy: copy it first. Else raise --learning_rate.",
    "falling score": "From the start: check signs and which response gets which score. Else lower --learning_rate.",
    "flat score": "If scores differ, check which response gets which, raise --learning_rate; else take other prompts.",
    "held-out": "The policy exploits the reward, or learns prompts by heart: raise --kl_coef, improve the reward.",
    "large kl": "Read samples, score held-out prompts by --eval_reward; raise --kl_coef, lower --learning_rate.",
    "idle clip": "Check that the old log-probs come from sampling; else the steps are small.",
}
# What TRL and verl log, by its name here. Their KL is a mean over tokens, ours a sum over a response.
NAMES = {
    "reward": "score", "critic/score/mean": "score",
    "completions/mean_length": "response_length", "response_length/mean": "response_length",
    "completions/clipped_ratio": "truncated", "response_length/clip_ratio": "truncated",
    "frac_reward_zero_std": "equal_groups", "sampling/sampling_logp_difference/mean": "logprob_difference",
    "kl": "kl", "actor/kl_loss": "kl",
    "clip_ratio/region_mean": "clip_fraction", "actor/pg_clipfrac": "clip_fraction",
    "eval_reward": "eval/score/all",
}  # fmt: skip
# The metric or flag without which a rule finds nothing
NEEDS = {
    "log-probs": "logprob_difference", "equal groups": "equal_groups", "truncated": "truncated",
    "first kl": "kl", "negative kl": "kl", "kl of 0": "kl", "large kl": "kl", "held-out": "eval/score",
    "idle clip": "num_minibatches",
}  # fmt: skip


def read(path: Path) -> tuple[dict, list[dict]]:
    """Flags and rows of a run, with the names that metrics have here. Those of TRL and verl have no flags."""
    if path.is_dir():
        return plot.read_run(path)
    text, rows = path.read_text(), []
    if path.suffix == ".json":
        logged = json.loads(text)["log_history"]
    else:
        logged = [{"step": x["step"]} | x["data"] for x in map(json.loads, text.splitlines())]
    for line in logged:
        row = {NAMES[name]: x for name, x in line.items() if name in NAMES and x is not None}
        row |= {f"eval/score/{x}": line[x] for x in line if "val-core/" in x and "/mean@" in x}
        if "kl" in row:
            row["kl"] *= row["response_length"]
        rows.append({"iteration": line["step"]} | row)
    return {}, rows


def findings(flags: dict, rows: list[dict]):
    """Yields the name of each finding and what shows it."""
    held_out = [([row[x] for x in row if x.startswith("eval/score/")], row["iteration"]) for row in rows]
    held_out = [(mean(scores), iteration) for scores, iteration in held_out if scores]
    rows = [row for row in rows if "score" in row]  # without the evaluation before training

    def values(name: str) -> list[float]:
        return [row[name] for row in rows if name in row] or [0.0]

    part = max(5, len(rows) // 4)
    early = {name: mean(values(name)[:part]) for name in ("score", "equal_groups")}
    late = {name: mean(values(name)[-part:]) for name in ("kl", "response_length", "truncated", *early)}
    scores = values("score")
    # Three standard errors of the difference of two means. From a score to the next, the variance is twice its own.
    noise = 3 * (variance(b - a for a, b in pairwise(scores)) / part) ** 0.5
    rise = late["score"] - early["score"]

    # What a few iterations show
    if wrong := [(name, row["iteration"]) for row in rows for name, x in row.items() if not isfinite(x)]:
        yield "not finite", "{} is not finite in iteration {}".format(*wrong[0])
        return
    tolerance = 1e-3 if flags.get("dtype") == "float32" else 0.05  # of the log-prob of a token
    far = [x for x in values("logprob_difference") if x > tolerance]
    if is_wrong := len(far) > len(rows) / 10:  # then the KL is, too
        yield "log-probs", f"logprob_difference is up to {max(far):.2g}, above {tolerance:g} {len(far)} times"
    kl = 0 if is_wrong or rows[0]["iteration"] > 1 or "teacher" in flags else rows[0].get("kl", 0)
    if abs(kl) > tolerance * rows[0].get("response_length", 0):
        yield "first kl", f"kl is {kl:.2g} at iteration 1, where it must be 0"
    equal = max(early["equal_groups"], 0 if rise > noise else late["equal_groups"])
    if equal > 0.9:
        yield "equal groups", f"equal_groups is {equal:.2g} at a score of {late['score']:.3g}"
    if late["truncated"] > 0.2:
        yield "truncated", f"{late['truncated']:.0%} of the responses have no EOS"
    if len(rows) < 20:  # the rest would be noise
        return

    kl = values("kl")[len(rows) // 2 :]
    if kl and mean(kl) < -3 * (variance(kl) / len(kl)) ** 0.5 - 1e-3:
        yield "negative kl", f"kl is {mean(kl):.2g} on average in the last {len(kl)} iterations"
    rounding = tolerance / 1000 if flags else 1e-7  # theirs come from the same code
    if kl and max(map(abs, kl)) < rounding * late["response_length"]:
        yield "kl of 0", f"kl is 0 up to rounding, while score goes from {scores[0]:.3g} to {scores[-1]:.3g}"
    is_far = late["kl"] > late["response_length"] / 2
    means = [mean(scores[i : i + part]) for i in range(len(scores) - part + 1)]
    top = max(means)
    if top - means[-1] > max(noise, (top - min(means)) / 2):
        iteration = rows[means.index(top)]["iteration"]
        yield "falling score", f"score is {top:.3g} from iteration {iteration} on, then {means[-1]:.3g}"
    elif abs(rise) <= noise and equal <= 0.9 and not is_far:  # those two would say why
        yield "flat score", f"score is {early['score']:.3g} at first and {late['score']:.3g} at last"
    best, iteration = max(held_out, default=(0.0, 0))
    since = [row["score"] for row in rows if row["iteration"] > iteration]
    if len(held_out) > 2 and len(since) > 4 and abs(rise) > noise:
        last, half = held_out[-1][0], len(since) // 2
        is_fall = best - last > max((best - held_out[0][0]) / 2, abs(best) / 10)
        if is_fall and mean(since[half:]) >= mean(since[:half]):
            yield "held-out", f"held-out score falls to {last:.3g} from iteration {iteration} on, not score"
    if is_far and not is_wrong:
        yield "large kl", f"kl is {late['kl']:.3g}, more than half a nat per token"
    steps = flags.get("num_minibatches", 1) * flags.get("update_epochs", 1)  # per rollout
    if steps > 1 and rise > noise and "clip_fraction" in rows[0] and not any(values("clip_fraction")):
        yield "idle clip", f"clip_fraction is 0 in every iteration, with {steps} steps per rollout"


def main(run: tyro.conf.Positional[Path]) -> None:
    try:
        flags, rows = read(run)
    except (OSError, ValueError, KeyError, TypeError):
        sys.exit(f"{run}: not a log of a policy script (give its folder), of TRL or of verl's logger file")
    if (count := sum("score" in row for row in rows)) < 5:
        sys.exit(f"{run} has fewer than 5 iterations of a policy script, too few to tell")
    found = [f"{text}. {REMEDIES[name]}" for name, text in findings(flags, rows)]
    print(*found or ["nothing stands out; read samples.jsonl, too"], sep="\n")
    if count < 20:
        print("the other rules need 20 iterations")
    logged = {"/".join(name.split("/")[:2]) for row in rows for name in row} | flags.keys()
    missing = [rule for rule, name in NEEDS.items() if name not in logged]
    if missing:
        print(f"not checked, for want of a metric: {', '.join(missing)}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
