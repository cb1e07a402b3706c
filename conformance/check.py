"""Check an implementation of a policy-gradient method against test vectors. Python and NumPy only.

`report(method, function)` calls function(case) for each case of the method and compares what it returns, any of
advantages, loss and gradient, with the expected numbers. README.md has the inputs of a case and an example.
"""

import json
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).resolve().parent
PATH = FOLDER / "vectors.json"
VECTORS = json.loads(PATH.read_text()) if PATH.exists() else {}
# float32 passes the first, and a std without GRPO's 1e-4 does not. The second allows for another constant there.
TOLERANCE, MISTAKE_TOLERANCE = 2e-5, 5e-5
MISTAKE_UNIT = 1e-6  # the numbers of mistakes are integers in this unit, which makes the file half as large


def cases(method: str) -> dict[str, dict]:
    """The inputs of each case by its name: arrays and numbers."""
    found = {}
    for case in VECTORS["methods"][method]:
        inputs = VECTORS["rollouts"][case["name"]] | case["inputs"]
        if "advantages" in case["expected"]:
            inputs["advantages"] = case["expected"]["advantages"]
        found[case["name"]] = {key: np.array(x) if isinstance(x, list) else x for key, x in inputs.items()}
    return found


def difference(name: str, result, expected, mask, unit: float = 0.0) -> float:
    """The largest difference, relative to the largest expected number; for a loss below 1, the difference.

    The expected numbers may have been rounded to a unit.
    """
    result = result.detach() if hasattr(result, "detach") else result  # a tensor of torch
    result, expected = np.asarray(result, dtype=float), np.asarray(expected, dtype=float)
    if name == "advantages":  # (B, T), or one number for each response
        result, expected = (np.where(mask, x.reshape(len(mask), -1), 0.0) for x in (result, expected))
    elif expected.ndim < result.ndim:  # the gradient of a mistake, one number for all tokens of a response
        expected = expected[:, None] * mask
    scale = max(np.abs(expected).max(), 1.0 if name == "loss" else 1e-3)
    return float((np.abs(np.nan_to_num(result, nan=np.inf) - expected).max() - unit / 2) / scale)


def report(method: str, function, tolerance: float = TOLERANCE) -> list[tuple]:
    """Print each case, and return (case, what differs, by how much, names of mistakes with the same numbers)."""
    found = []
    for case, (name, inputs) in zip(VECTORS["methods"][method], cases(method).items()):
        mask, wrong, results = inputs["response_mask"].copy(), [], function(inputs)
        if not isinstance(results, dict) or not results or results.keys() - case["expected"].keys():
            remedy = f"return a dict with any of {', '.join(case['expected'])}"
            raise ValueError(f"{method}: the function returned {results!r:.80}; {remedy}")
        for key, result in results.items():
            size = difference(key, result, case["expected"][key], mask)
            if not size <= tolerance:
                units = {mistake: x[key] for mistake, x in case["mistakes"].items() if key in x}
                numbers = {mistake: MISTAKE_UNIT * np.array(x) for mistake, x in units.items()}
                near = {x: difference(key, result, y, mask, MISTAKE_UNIT) for x, y in numbers.items()}
                names = [mistake for mistake, distance in near.items() if distance <= MISTAKE_TOLERANCE]
                wrong.append((name, key, size, names))
        for _, key, size, names in wrong:
            print(f"{method}, {name}: {key} off by {size:.1g}; {' or '.join(names) or 'no listed mistake'}")
        if not wrong:
            print(f"{method}, {name}: passed")
        found += wrong
    return found
