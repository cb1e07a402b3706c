"""Compute vectors.json again, from its rollouts and tests/references.py: python conformance/make_vectors.py

The rollouts are the inputs. They are random numbers that are written in vectors.json alone, and stay as they are.
A mistake is a change of a case's inputs, or a bug that tests/planted.py plants in references.py. Each case lists the
mistakes that change its numbers. Of four rollouts, each method uses the fewest that show all mistakes, at least two. A
method that is grpo with one addition does not list the mistakes of grpo again.
"""

import json
import math
import sys
from itertools import chain, combinations
from types import SimpleNamespace

import torch
from check import FOLDER, MISTAKE_UNIT, PATH, VECTORS, difference

sys.path.append(str(FOLDER.parent / "tests"))
from planted import IN_VECTORS

REFERENCES = (FOLDER.parent / "tests" / "references.py").read_text()


def correction(level: str, mode: str, low: float, cap: float) -> dict:
    flags = {"correction_level": level, "correction_mode": mode, "correction_low": low, "correction_cap": cap}
    return CLIP | flags


# fmt: off
# The coefficients of each method. A method has the beta of the case (kl_coef), unless it has its own here. With
# ON_POLICY there is one step per rollout, so that the new policy is the one that sampled.
ON_POLICY, CLIP, NO_KL = {"on_policy": True}, {"clip_eps": 0.2}, {"kl_coef": 0.0}
PLAN = {
    "reinforce": ON_POLICY,
    "rloo": ON_POLICY,
    "raft": ON_POLICY,
    "remax": ON_POLICY,
    "maxrl": ON_POLICY | NO_KL | {"scores": [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]},
    "distill": ON_POLICY | NO_KL,
    "reinforce_pp": CLIP,
    "reinforce_pp_baseline": CLIP,
    "ppo": CLIP | {"gae_lambda": 0.95},
    "grpo": CLIP,
    "dr_grpo": CLIP | {"max_response_length": 8} | NO_KL,
    "dapo": {"clip_eps_low": 0.2, "clip_eps_high": 0.28, "max_response_length": 8, "overlong_buffer": 5} | NO_KL,
    "gspo": {"clip_eps_low": 0.03, "clip_eps_high": 0.04} | NO_KL,
    "cispo": {"clip_eps_low": 1.0, "clip_eps_high": 0.28} | NO_KL,
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05} | NO_KL,
    "dppo": {"delta": 0.15, "max_ratio": 1.2} | NO_KL,
    "flash_reinforce": {"delta": 0.02} | NO_KL,
    "opo": ON_POLICY | NO_KL,
    "gdpo": CLIP | {"reward_weights": [1.0, 0.5]} | NO_KL,
    "sdpo": ON_POLICY | NO_KL,
}
ADDITIONS = {  # patches and features of grpo.py
    "dual_clip": CLIP | {"dual_clip_c": 1.5},
    "entropy_bonus": CLIP | {"entropy_coef": 0.1},
    "correction_token": correction("token", "truncate", 0.0, 1.1),
    "correction_sequence": correction("sequence", "mask", 0.0, 1.2),
    "correction_geometric": correction("geometric", "mask", 0.95, 1.12),
}
# Preferences: rows 2i and 2i + 1 are the chosen and the rejected response of a pair
PLAN |= ADDITIONS | {"dpo": {"beta": 0.1}, "ipo": {"beta": 0.1}, "reward_model": {}}

INPUT_MISTAKES = {
    "compared across prompts": lambda x: {"order": torch.arange(6).view(x["samples_per_prompt"], -1).T.flatten()},
    "advantage with the wrong sign": lambda x: {"sign": -1},
    "counts of the micro-batch": lambda x: {"num_sequences": 6, "num_tokens": int(x["response_mask"].sum())},
    "holes count": lambda x: {"response_mask": up_to_last(x["response_mask"])},
    "padding counts": lambda x: {"response_mask": x["response_mask"] | ~up_to_last(x["response_mask"])},
    "last token left out": lambda x: {"response_mask": x["response_mask"] & up_to_last(x["response_mask"], 1)},
    "KL with the wrong sign": lambda x: {"kl_coef": -x["kl_coef"]},
    "no KL": lambda x: {"kl_coef": 0.0},
    "no ratio": lambda x: {"old_logprobs": x["new_logprobs"]},
    "no length penalty": lambda x: {"overlong_buffer": 0},
    "the lower clip on both sides": lambda x: {"clip_eps_high": x.get("clip_eps_low")},
    "rewards without weights": lambda x: {"reward_weights": [1.0, 1.0]},
    "no dual clip": lambda x: {"dual_clip_c": math.inf},
    "entropy with the wrong sign": lambda x: {"entropy_coef": -x.get("entropy_coef", 0.0)},
    "no correction": lambda x: {"sampler_logprobs": x["old_logprobs"]},
    "correction upside down": lambda x: {"sampler_logprobs": 2 * x["old_logprobs"] - x["sampler_logprobs"]},
    "weights per token": lambda x: {"correction_level": "token"},
    "a product in place of a geometric mean": lambda x: {"correction_level": "sequence"},
    "masked in place of truncated": lambda x: {"correction_mode": "mask"},
    "truncated in place of masked": lambda x: {"correction_mode": "truncate"},
    "no lower bound": lambda x: {"correction_low": 0.0},
    "no reference": lambda x: {"ref_logprobs": 0 * x["ref_logprobs"]},
}
# fmt: on


def up_to_last(mask, shift=0):
    """True up to the last token, or to the one before it."""
    return mask.flip(1).cumsum(1).flip(1) > shift


def compute(functions: dict, method: str, case: dict) -> dict:
    """Advantages (if the method has them), loss and gradient, as lists and a number."""
    method = method.partition("correction")[1] or method  # correction has three levels
    args = SimpleNamespace(**case)
    rollout = {key: x for key, x in case.items() if torch.is_tensor(x) and key != "order"}
    rollout["kl"] = rollout["old_logprobs"] - rollout["ref_logprobs"]
    result = {}
    if f"{method}_advantages" in functions:
        order = case.get("order", torch.arange(6))
        ordered = {key: x[order] for key, x in rollout.items()}
        values = functions[f"{method}_advantages"](args, ordered)
        advantages = functions["spread"](values, ordered["response_mask"])[order.argsort()]
        rollout["advantages"] = case.get("sign", 1) * advantages
        result["advantages"] = rollout["advantages"].tolist()
    new = case["scores" if method == "reward_model" else "new_logprobs"].clone().requires_grad_()
    loss, _ = functions[f"{method}_loss"](args, rollout, new, case["num_sequences"], case["num_tokens"])
    loss = loss + 0 * new.sum()  # if no token counts, it is the number 0
    (gradient,) = torch.autograd.grad(loss, new)
    return result | {"loss": loss.item(), "gradient": gradient.tolist()}


def run(source: str) -> dict:
    functions = {"__name__": "references"}
    exec(source, functions)
    return functions


def rounded(x, digits: int, unit: float = 1.0):
    """Numbers in a unit, rounded to some decimals. Whole numbers become integers, which are shorter."""
    if isinstance(x, list):
        return [rounded(y, digits, unit) for y in x]
    x = round(x / unit, digits)
    return int(x) if x == int(x) else x


def make_case(method: str, name: str, right: dict, wrong: dict[str, dict]) -> dict:
    """A case with the right numbers, and the numbers of the mistakes that change them."""
    rollout, inputs = VECTORS["rollouts"][name], dict(PLAN[method])
    if inputs.pop("on_policy", False):
        inputs["new_logprobs"] = rollout["old_logprobs"]
    if "reward_weights" in inputs:
        inputs["scores"] = rollout["several_scores"]
    case, mask = rollout | inputs, rollout["response_mask"]
    lists = [key for key, x in rollout.items() if isinstance(x, list)]
    tensors = {key: torch.tensor(case[key], dtype=torch.float64) for key in lists}
    case |= tensors | {"response_mask": tensors["response_mask"].bool()}
    expected, mistakes = compute(right, method, case), {}
    results = {mistake: compute(right, method, case | f(case)) for mistake, f in INPUT_MISTAKES.items()}
    results |= {mistake: compute(functions, method, case) for mistake, functions in wrong.items()}
    for mistake, result in results.items():
        sizes = {key: difference(key, x, expected[key], mask) for key, x in result.items()}
        for key in result.keys() - {"loss"}:
            rows = [row for row in result[key] if isinstance(row, list)]  # reward_model has none
            peaks = [max(row, key=abs) for row in rows]
            if rows and rows == [[x * m for m in row] for x, row in zip(peaks, mask)]:
                result[key] = peaks  # one number for each response is shorter
        if max(sizes.values()) > 1e-4:
            differ = {key: x for key, x in result.items() if sizes[key] > 1e-9}
            mistakes[mistake] = {key: rounded(x, 0, MISTAKE_UNIT) for key, x in differ.items()}
    expected = {key: rounded(x, 10) for key, x in expected.items()}
    return {"name": name, "inputs": inputs, "expected": expected, "mistakes": mistakes}


def fewest(cases: list[dict]) -> list[dict]:
    """The fewest cases, but at least two, that list every mistake that a case lists."""
    known = {mistake for case in cases for mistake in case["mistakes"]}
    for count in range(2, len(cases) + 1):
        for chosen in map(list, combinations(cases, count)):
            if known == {mistake for case in chosen for mistake in case["mistakes"]}:
                return chosen


if __name__ == "__main__":
    right, wrong = run(REFERENCES), {bug.name: run(bug.plant_in_references(REFERENCES)) for bug in IN_VECTORS}
    methods = {x: fewest([make_case(x, name, right, wrong) for name in VECTORS["rollouts"]]) for x in PLAN}
    of_grpo = {mistake for case in methods["grpo"] for mistake in case["mistakes"]}
    for case in chain(*(methods[x] for x in ADDITIONS)):
        case["mistakes"] = {x: numbers for x, numbers in case["mistakes"].items() if x not in of_grpo}
    text = json.dumps(VECTORS | {"methods": methods}, separators=(",", ":"))
    PATH.write_text(text.replace('{"name":', '\n{"name":') + "\n")
