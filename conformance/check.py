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

    The numbers of a mistake have been rounded to a unit. Only tokens are compared with them, because a KL without a
    mask has a gradient on padding, too.
    """
    result = result.detach() if hasattr(result, "detach") else result  # a tensor of torch
    result, expected = np.asarray(result, dtype=float), np.asarray(expected, dtype=float)
    if name == "advantages" or (unit and name == "gradient"):  # (B, T), or one number for each response
        result, expected = (np.where(mask, x.reshape(len(mask), -1), 0.0) for x in (result, expected))
    scale = max(np.abs(expected).max(), 1.0 if name == "loss" else 1e-3)
    return float((np.abs(np.nan_to_num(result, nan=np.inf) - expected).max() - unit / 2) / scale)


def mistakes_of(method: str, case: dict) -> dict[str, dict]:
    """The numbers that a mistake changes by its name, and those of other methods with the same inputs."""
    units = case["mistakes"].items()
    found = {name: {key: MISTAKE_UNIT * np.array(x) for key, x in values.items()} for name, values in units}
    found["loss with the wrong sign"] = {
        key: -np.array(case["expected"][key]) for key in ("loss", "gradient")
    }
    for other in sorted(VECTORS["methods"].keys() - {method}):
        for x in VECTORS["methods"][other]:
            if (x["name"], x["inputs"]) == (case["name"], case["inputs"]):
                found[f"the numbers of {other}"] = x["expected"]
    return found


def report(method: str, function, tolerance: float = TOLERANCE) -> list[tuple]:
    """Print each case, and return (case, what differs, by how much, names of mistakes with the same numbers).

    A mistake is named only if all that the function returned agrees with it.
    """
    found = []
    for case, (name, inputs) in zip(VECTORS["methods"][method], cases(method).items()):
        mask, results = inputs["response_mask"].copy(), function(inputs)
        if not isinstance(results, dict) or not results or results.keys() - case["expected"].keys():
            remedy = f"return a dict with any of {', '.join(case['expected'])}"
            raise ValueError(f"{method}: the function returned {results!r:.80}; {remedy}")
        sizes = {key: difference(key, x, case["expected"][key], mask) for key, x in results.items()}
        wrong = {key: size for key, size in sizes.items() if not size <= tolerance}
        names = []
        for mistake, numbers in mistakes_of(method, case).items():
            all_numbers = case["expected"] | numbers
            distances = [
                difference(key, x, all_numbers[key], mask, MISTAKE_UNIT) for key, x in results.items()
            ]
            if wrong.keys() <= numbers.keys() and max(distances) <= MISTAKE_TOLERANCE:
                names.append(mistake)
        for key, size in wrong.items():
            print(f"{method}, {name}: {key} off by {size:.1g}; {' or '.join(names) or 'no listed mistake'}")
            found.append((name, key, size, names))
        if not wrong:
            print(f"{method}, {name}: passed")
    return found
