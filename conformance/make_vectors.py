"""Make vectors.json as vectors.toml says, from tests/references.py: python conformance/make_vectors.py

A mistake is a change of a case's inputs or of a line of references.py. Each case lists those that change its numbers.
"""

import json
import random
import tomllib
from types import SimpleNamespace

import torch
from check import FOLDER, PATH, difference

PLAN = tomllib.loads((FOLDER / "vectors.toml").read_text())
REFERENCES = (FOLDER.parent / "tests" / "references.py").read_text()
# fmt: off
INPUT_MISTAKES = {
    "compared across prompts": lambda x: {"order": torch.arange(6).view(x["samples_per_prompt"], -1).T.flatten()},
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
}
# fmt: on


def up_to_last(mask, shift=0):
    """True up to the last token, or to the one before it."""
    return mask.flip(1).cumsum(1).flip(1) > shift


def make_rollout(name: str, k: int, spread: float, beta: float, has_holes: bool, parts: int) -> dict:
    """6 responses of 2 to 5 tokens. Numbers outside the mask mean nothing."""
    draw, lengths = random.Random(name).uniform, [5, 2, 3, 4, 5, 3]

    def rows(low, high, width=5):
        return [[round(draw(low, high), 3) for _ in range(width)] for _ in lengths]

    mask = [[int(t < length) for t in range(5)] for length in lengths]
    if has_holes:
        mask[0][0] = mask[3][2] = mask[4][1] = mask[4][2] = 0
    rollout = {"samples_per_prompt": k, "kl_coef": beta, "num_sequences": parts * 6}
    rollout |= {"num_tokens": parts * sum(map(sum, mask)) + parts - 1, "response_mask": mask}
    rollout["scores"], rollout["greedy_scores"] = map(list, zip(*rows(0, 1, 2)))
    if name == "groups of equal scores":
        rollout["scores"] = [1 / 3, 1 / 3, 1.0, 0.25, 0.0, 0.0]
    rollout["several_scores"] = rows(0, 1, 2)
    old = rollout["old_logprobs"] = rows(-2.5, -0.2)
    pairs = zip(old, rows(-spread, spread))
    rollout["new_logprobs"] = [[round(x + d, 3) for x, d in zip(*pair)] for pair in pairs]
    rollout |= {key: rows(-2.5, -0.2) for key in ("ref_logprobs", "teacher_logprobs", "values")}
    return rollout


def compute(functions: dict, method: str, case: dict) -> dict:
    """Advantages, loss and its gradient, as lists and a number."""
    args = SimpleNamespace(**case)
    rollout = {key: x for key, x in case.items() if torch.is_tensor(x) and key != "order"}
    rollout["kl"] = rollout["old_logprobs"] - rollout["ref_logprobs"]
    order = case.get("order", torch.arange(6))
    ordered = {key: x[order] for key, x in rollout.items()}
    values = functions[f"{method}_advantages"](args, ordered)
    rollout["advantages"] = functions["spread"](values, ordered["response_mask"])[order.argsort()]
    new = case["new_logprobs"].clone().requires_grad_()
    loss, _ = functions[f"{method}_loss"](args, rollout, new, case["num_sequences"], case["num_tokens"])
    loss = loss + 0 * new.sum()  # if no token counts, it is the number 0
    (gradient,) = torch.autograd.grad(loss, new)
    return {"advantages": rollout["advantages"].tolist(), "loss": loss.item(), "gradient": gradient.tolist()}


def load_references(before: str = "", after: str = "") -> dict:
    """The functions of references.py, with a change."""
    if before not in REFERENCES:
        raise ValueError(f"tests/references.py has no {before!r}; change vectors.toml")
    functions = {"__name__": "references"}
    exec(REFERENCES.replace(before, after), functions)
    return functions


def short(x, digits: int):
    """Numbers with so many decimals; 0 as an integer, which is shorter."""
    if isinstance(x, dict):
        return {key: short(y, digits) for key, y in x.items()}
    return [short(y, digits) for y in x] if isinstance(x, list) else round(x, digits) or 0


def make_case(method: str, name: str, rollout: dict, references: dict[str, dict]) -> dict:
    """A case with the right numbers and those of the mistakes that change them."""
    inputs, mask = dict(PLAN["methods"][method]), rollout["response_mask"]
    if inputs.pop("on_policy", False):
        inputs["new_logprobs"] = rollout["old_logprobs"]
    if "reward_weights" in inputs:
        inputs["scores"] = rollout["several_scores"]
    case = rollout | inputs
    for key in rollout:
        if isinstance(case[key], list):
            case[key] = torch.tensor(case[key], dtype=torch.float64)
    case["response_mask"] = case["response_mask"].bool()
    right, mistakes = references[""], {}
    expected = compute(right, method, case)
    for what in [*INPUT_MISTAKES, *PLAN["mistakes"]]:
        change = INPUT_MISTAKES.get(what, lambda case: {})
        result = compute(references.get(what, right), method, case | change(case))
        sizes = {key: difference(key, x, expected[key], mask) for key, x in result.items()}
        peaks = [max(row, key=abs) for row in result["advantages"]]
        if result["advantages"] == [[x * m for m in row] for x, row in zip(peaks, mask)]:
            result["advantages"] = peaks  # one for each response is shorter
        if max(sizes.values()) > 1e-4:
            mistakes[what] = {key: short(x, 6) for key, x in result.items() if sizes[key] > 1e-9}
    return {"name": name, "inputs": inputs, "expected": short(expected, 13), "mistakes": mistakes}


def make_vectors() -> dict:
    rollouts = {name: make_rollout(name, *settings) for name, settings in PLAN["cases"].items()}
    references = {mistake: load_references(*change[:2]) for mistake, change in PLAN["mistakes"].items()}
    references[""] = load_references()
    methods = [method for method in PLAN["methods"] if f"{method}_loss" in references[""]]
    made = {}
    for method in methods:
        made[method] = [make_case(method, name, rollout, references) for name, rollout in rollouts.items()]
    return {"version": PLAN["version"], "rollouts": rollouts, "methods": made}


if __name__ == "__main__":
    text = json.dumps(make_vectors(), separators=(",", ":"))
    PATH.write_text(text.replace('{"name":', '\n{"name":') + "\n")
