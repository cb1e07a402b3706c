"""Read the metrics of a run and say what looks wrong, and what to do.

    python tools/diagnose.py runs/a        at most eight lines, the most important first

Reads args.json and metrics.jsonl of a policy script, also while it trains. docs/metrics.md explains the metrics.
"""

import sys
from itertools import pairwise
from pathlib import Path
from statistics import mean, variance

import plot
import tyro

MIN_ITERATIONS = 20  # before that, most of what a metric does is noise
EARLY = ("log-probs", "first kl", "equal groups", "truncated", "toy flags")  # what 5 iterations show
# What to do about each finding; those further up are more important.
REMEDIES = {
    "log-probs": "Sampling and training disagree: compare temperature, positions, padding, dropout and weights.",
    "first kl": "Check the temperature and the weights of the reference's log-probs.",
    "negative kl": "A KL is not negative: check its sign, and that both log-probs are of the same tokens.",
    "kl of 0": "If score rises, the reference trains with the policy: copy it first. Else raise --learning_rate.",
    "equal groups": "If responses to one prompt are identical, sampling is greedy; else check reward and prompts.",
    "falling score": "From the start: check signs and which response gets which score. Else lower --learning_rate.",
    "held-out": "The policy exploits the reward, or learns prompts by heart: raise --kl_coef, improve the reward.",
    "large kl": "Read samples, score held-out prompts by --eval_reward; raise --kl_coef, lower --learning_rate.",
    "truncated": "Raise --max_response_length, or use --missing_eos_penalty; check that the loss includes the EOS.",
    "entropy": "The policy repeats itself: lower --learning_rate, raise --kl_coef, or use more prompts.",
    "busy clip": "Many tokens get no gradient: lower --learning_rate, --update_epochs or --num_minibatches.",
    "clipped gradient": "Check zero_grad and what the loss is divided by; else lower --learning_rate.",
    "flat score": "If scores differ, check which response gets which, raise --learning_rate; else easier prompts.",
    "idle clip": "Check that the old log-probs come from sampling; else the steps are small.",
    "toy flags": "A default of 2e-4 or 40 is for the toy: set what fits the model.",
}


class Run:
    """The metrics of a run. Early and late are its first and last quarter."""

    def __init__(self, flags: dict, rows: list[dict]):
        self.flags = flags
        self.rows = [row for row in rows if "score" in row]  # without the evaluation before training
        self.window = max(5, len(self.rows) // 4)
        held_out = [(row["iteration"], [row[x] for x in row if x.startswith("eval/score/")]) for row in rows]
        self.held_out = [(mean(scores), iteration) for iteration, scores in held_out if scores]

    def values(self, name: str) -> list[float]:
        return [row[name] for row in self.rows if name in row] or [0.0]

    def early(self, name: str) -> float:
        return mean(self.values(name)[: self.window])

    def late(self, name: str) -> float:
        return mean(self.values(name)[-self.window :])


def evidence(run: Run):
    """Yields the name and the text of each finding."""
    flags, first = run.flags, run.rows[0]
    when = f"iterations {run.rows[-run.window]['iteration']} to {run.rows[-1]['iteration']}"
    # How far apart two computations of the log-prob of a token may be
    tolerance = 1e-3 if flags.get("dtype") == "float32" else 0.05
    # Rounding alone may move the ratio of gspo.py beyond its clip.
    has_clip = "clip_fraction" in first and flags.get("clip_eps_low", 1) > 0.01
    scores = run.values("score")
    # Three standard errors of the difference of two windows. From a score to the next, the variance is twice its own.
    noise = 3 * (variance(b - a for a, b in pairwise(scores)) / run.window) ** 0.5
    early, late = run.early("score"), run.late("score")
    learns = late > early + noise
    is_far = run.late("kl") > run.late("response_length") / 2

    # What must hold in every run
    bad = [x for x in run.values("logprob_difference") if x > tolerance]
    agrees = len(bad) <= len(run.rows) / 10  # else the KL is wrong, too
    if not agrees:
        yield "log-probs", f"logprob_difference is up to {max(bad):.2g}, {len(bad)} times above {tolerance:g}"
    is_start = first["iteration"] == 1 and "teacher" not in flags  # policy and reference are the same model
    if agrees and is_start and abs(first.get("kl", 0)) > tolerance * first["response_length"]:
        yield "first kl", f"kl is {first['kl']:.2g} at iteration 1, where it must be 0"
    steps = flags.get("num_minibatches", 1) * flags.get("update_epochs", 1)  # per rollout
    kl = run.values("kl")[len(run.rows) // 2 :]
    if len(kl) > 5 and mean(kl) < -3 * (variance(kl) / len(kl)) ** 0.5 - 1e-3:
        yield "negative kl", f"kl is {mean(kl):.2g} on average in the last {len(kl)} iterations"
    if kl and max(map(abs, kl)) < tolerance / 1000 * run.late("response_length"):
        yield "kl of 0", f"kl is 0 up to rounding, while score goes from {early:.3g} to {late:.3g}"
    if steps > 1 and has_clip and not any(run.values("clip_fraction")) and learns:
        yield "idle clip", f"clip_fraction is 0 in every iteration, with {steps} steps per rollout"

    # Score and data
    equal = max(run.early("equal_groups"), 0 if learns else run.late("equal_groups"))
    if equal > 0.9:
        yield "equal groups", f"equal_groups is {equal:.2g} at a score of {late:.3g}"
    means = [mean(scores[i : i + run.window]) for i in range(len(scores) - run.window + 1)]
    drop = max(means) - late
    if drop > noise and drop > (max(means) - min(means)) / 2:
        top = run.rows[means.index(max(means))]["iteration"]
        yield "falling score", f"score is {max(means):.3g} from iteration {top} on, then {late:.3g} ({when})"
    elif abs(late - early) <= noise and equal <= 0.9 and not is_far:  # those two say why
        yield "flat score", f"score is {early:.3g} at first and {late:.3g} at last, a noise of {noise:.2g}"
    if len(run.held_out) > 2:
        peak, iteration = max(run.held_out)
        last, gain = run.held_out[-1][0], peak - run.held_out[0][0]
        since = [row["score"] for row in run.rows if row["iteration"] > iteration]
        rises = len(since) > 4 and mean(since[len(since) // 2 :]) >= mean(since[: len(since) // 2])
        if rises and peak - last > max(gain / 2, abs(peak) / 10):
            yield "held-out", f"held-out score falls to {last:.3g} from iteration {iteration} on, not score"
    if run.late("entropy") < run.early("entropy") / 10 and not learns:
        yield "entropy", f"entropy falls to {run.late('entropy'):.2g} ({when}), and score does not rise"

    # Size of the steps, length of responses
    if agrees and is_far:
        yield "large kl", f"kl is {run.late('kl'):.3g}, more than half a nat per token ({when})"
    if run.late("truncated") > 0.2:
        yield "truncated", f"{run.late('truncated'):.0%} of the responses have no EOS ({when})"
    if has_clip and run.late("clip_fraction") > 0.2:
        yield "busy clip", f"clip_fraction is {run.late('clip_fraction'):.2g} ({when})"
    # Where nothing clips the ratio, the loss is often a sum over tokens, whose gradient is always large.
    share = mean(norm > flags.get("max_grad_norm", 1) for norm in run.values("grad_norm"))
    if "clip_fraction" in first and share >= 0.95:
        yield "clipped gradient", f"grad_norm is above --max_grad_norm in {share:.0%} of the iterations"
    rate, length = flags.get("learning_rate"), flags.get("max_response_length")
    is_kept = length == 40 or (rate == 2e-4 and "lora_rank" not in flags)
    if is_kept and not flags.get("model", "toy/").startswith("toy/"):
        yield "toy flags", f"--learning_rate is {rate}, --max_response_length is {length}"


def findings(flags: dict, rows: list[dict]) -> dict[str, str]:
    """Lines by the name of their rule, the most important first. Empty before 5 iterations."""
    run = Run(flags, rows)
    found = dict(evidence(run)) if len(run.rows) >= 5 else {}
    names = REMEDIES if len(run.rows) >= MIN_ITERATIONS else EARLY
    return {name: f"{found[name]}. {REMEDIES[name]}" for name in [x for x in names if x in found][:8]}


def main(run: tyro.conf.Positional[Path]) -> None:
    flags, rows = plot.read_run(run)
    if len(Run(flags, rows).rows) < 5:
        sys.exit(f"{run} has fewer than 5 iterations of a policy script, too few to tell")
    found = findings(flags, rows).values()
    print(*(found or ["nothing stands out; read samples.jsonl, too"]), sep="\n")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
