"""Read the metrics of a run, and say what looks wrong and what to do, the most important first.

    python tools/diagnose.py runs/a

RUN is the folder of a policy script, even while it trains, or TRL's trainer_state.json, or the .jsonl of verl's logger
"file". docs/metrics.md explains the metrics.
"""

import json
from itertools import pairwise
from pathlib import Path
from statistics import mean, variance
from typing import Annotated

import plot
import tyro

REMEDIES = {
    "not finite": "Look at grad_norm and the samples of earlier iterations, and use a lower --learning_rate.",
    "log-probs": "Sampling and training disagree. Compare temperature, positions, padding, dropout and weights.",
    "first kl": "Check the temperature and the weights with which the log-probs of the reference are computed.",
    "equal groups": "If all responses to a prompt are the same, sampling is greedy. Otherwise check the reward, "
    "and use prompts that the policy solves sometimes.",
    "truncated": "Use a larger --max_response_length, or --missing_eos_penalty 1 if responses never end.",
    "negative kl": "A KL cannot be negative, so check its sign, and that both log-probs are of the same tokens.",
    "kl of 0": "If the score rises, the reference is trained too, so make it a copy of the policy. "
    "If it does not, use a higher --learning_rate.",
    "falling score": "If it falls from the start, check the signs, and which response gets which score. "
    "If it falls later, use a lower --learning_rate.",
    "flat score": "If the scores of a group differ, check which response gets which score, and use a higher "
    "--learning_rate. If they do not differ, use easier or harder prompts.",
    "held-out": "The policy exploits the reward or memorizes the prompts. Use a higher --kl_coef, a better "
    "reward, or more prompts.",
}
# Our names of the metrics that TRL and verl log. Their KL is a mean over tokens, and ours is a sum over a response.
NAMES = {
    "reward": "score", "critic/score/mean": "score",
    "completions/mean_length": "response_length", "response_length/mean": "response_length",
    "completions/clipped_ratio": "truncated", "response_length/clip_ratio": "truncated",
    "frac_reward_zero_std": "equal_groups", "sampling/sampling_logp_difference/mean": "logprob_difference",
    "kl": "kl", "actor/kl_loss": "kl", "eval_reward": "eval/score/all",
}  # fmt: skip
# The metric that a rule reads
NEEDS = {"log-probs": "logprob_difference", "equal groups": "equal_groups", "truncated": "truncated"}
NEEDS |= {"held-out": "eval/score"} | dict.fromkeys(("first kl", "negative kl", "kl of 0"), "kl")


def read(path: Path) -> tuple[dict, list[dict]]:
    """The flags and rows of a run, with our names of the metrics. The logs of TRL and verl contain no flags."""
    if path.is_dir():
        return plot.read_run(path)
    rows = []
    try:
        if path.suffix == ".json":
            logged = json.loads(path.read_text())["log_history"]
        else:
            logged = [{"step": x["step"]} | x["data"] for x in plot.read_jsonl(path)]
        for line in logged:
            row = {NAMES[name]: x for name, x in line.items() if name in NAMES and x is not None}
            row |= {f"eval/score/{x}": line[x] for x in line if "val-core/" in x and "/mean@" in x}
            if "response_length" not in row:  # the KL of a response is not known
                row.pop("kl", None)
            elif "kl" in row:
                row["kl"] *= row["response_length"]
            rows.append({"iteration": line["step"]} | row)
    except (OSError, ValueError, KeyError, TypeError) as error:
        kinds = "a run folder, TRL's trainer_state.json, or verl's .jsonl log"
        raise ValueError(f"no log at {path}. Give {kinds}.") from error
    return {}, rows


def findings(flags: dict, rows: list[dict]):
    """Yield the name of each finding, and what shows it."""
    held_out = [([row[x] for x in row if x.startswith("eval/score/")], row["iteration"]) for row in rows]
    held_out = [(mean(scores), iteration) for scores, iteration in held_out if scores]
    rows = [row for row in rows if "score" in row]  # without the evaluation before training

    # A comparison with NaN is False. Below, squares of numbers above 1e100 could overflow.
    for row in rows:
        for name, x in row.items():
            if not abs(x) < 1e100:
                yield "not finite", f"{name} is {x} in iteration {row['iteration']}"
                return

    def values(name: str) -> list[float]:
        return [row[name] for row in rows if name in row] or [0.0]

    part, scores = max(5, len(rows) // 4), values("score")
    early, late = mean(scores[:part]), mean(scores[-part:])
    # Three standard errors of the difference of two means. The difference of two scores has twice their variance.
    noise = 3 * (variance(b - a for a, b in pairwise(scores)) / part) ** 0.5
    rise = late - early

    # Rules for a few iterations
    tolerance = 1e-3 if flags.get("dtype") == "float32" else 0.05  # of the log-prob of a token
    far = [x for x in values("logprob_difference") if x > tolerance]
    if is_wrong := len(far) > len(rows) / 10:  # then the KL is wrong, too
        often = f"in {len(far)} of {len(rows)} iterations"
        yield "log-probs", f"logprob_difference is above {tolerance:g} {often}, at most {max(far):.2g}"
    kl = 0 if is_wrong or rows[0]["iteration"] > 1 or "teacher" in flags else rows[0].get("kl", 0)
    if abs(kl) > tolerance * rows[0].get("response_length", 0):
        yield "first kl", f"kl is {kl:.2g} at iteration 1, where it must be 0"
    equal = values("equal_groups")
    equal = max(mean(equal[:part]), 0 if rise > noise else mean(equal[-part:]))
    if equal > 0.9:
        yield "equal groups", f"equal_groups is {equal:.2g} at a score of {late:.3g}"
    if (truncated := mean(values("truncated")[-part:])) > 0.2:
        yield "truncated", f"truncated is {truncated:.2g} on average in the last {part} iterations"
    if len(rows) < 20:  # the other rules would only see noise
        return

    kl = values("kl")[len(rows) // 2 :]
    if kl and mean(kl) < -3 * (variance(kl) / len(kl)) ** 0.5 - 1e-3:
        yield "negative kl", f"kl is {mean(kl):.2g} on average in the last {len(kl)} iterations"
    rounding = tolerance / 1000 if flags else 1e-7  # the log-probs of TRL and verl come from the same code
    if kl and max(map(abs, kl)) < rounding * mean(values("response_length")[-part:]):
        yield "kl of 0", f"kl is 0 up to rounding, while score goes from {scores[0]:.3g} to {scores[-1]:.3g}"
    means = [mean(scores[i : i + part]) for i in range(len(scores) - part + 1)]
    top = max(means)
    if top - means[-1] > max(noise, (top - min(means)) / 2):
        iteration = rows[means.index(top)]["iteration"]
        until = f"over {part} iterations from iteration {iteration} on"
        yield (
            "falling score",
            f"the mean score {until} is {top:.3g}, and over the last {part} it is {means[-1]:.3g}",
        )
    elif abs(rise) <= noise and equal <= 0.9:  # equal groups would say why
        yield "flat score", f"score is {early:.3g} at first and {late:.3g} in the end"
    best, iteration = max(held_out, default=(0.0, 0))
    since = [row["score"] for row in rows if row["iteration"] > iteration]
    if len(held_out) > 2 and len(since) > 4 and abs(rise) > noise:
        last, half = held_out[-1][0], len(since) // 2
        is_fall = best - last > max((best - held_out[0][0]) / 2, abs(best) / 10)
        if is_fall and mean(since[half:]) >= mean(since[:half]):
            fall = f"from {best:.3g} in iteration {iteration} to {last:.3g}"
            yield "held-out", f"the held-out score has fallen {fall}, while score has not fallen"


Run = Annotated[Path, tyro.conf.arg(help="run folder, trainer_state.json, or .jsonl", metavar="RUN")]


def main(run: tyro.conf.Positional[Run]) -> None:
    flags, rows = read(run)
    if (count := sum("score" in row for row in rows)) < 5:
        raise ValueError(
            f"{run} contains {count} iterations of a policy script. It needs 5, so train longer."
        )
    found = [f"{text}. {REMEDIES[name]}" for name, text in findings(flags, rows)]
    nothing = f"No problem found. Metrics do not show everything, so also read the samples of {run}."
    print(*found or [nothing], sep="\n")
    if count < 20:
        print("Not checked yet: the other rules need 20 iterations.")
    logged = {"/".join(name.split("/")[:2]) for row in rows for name in row}
    if missing := [f"{rule} (needs {name})" for rule, name in NEEDS.items() if name not in logged]:
        print(f"Not checked, because the log lacks the metric: {', '.join(missing)}.")


if __name__ == "__main__":
    plot.command(main, __doc__)
