"""Check an implementation of a policy-gradient method against test vectors. Python and NumPy only.

`report(method, function)` calls function(case) for each case of the method, and compares the advantages, loss and
gradient that it returns, or some of them, with the expected numbers. README.md lists the inputs and shows an example.
"""

import json
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).resolve().parent
PATH = FOLDER / "vectors.json"
VECTORS = json.loads(PATH.read_text())
# float32 passes the first tolerance, and a std without GRPO's 1e-4 does not. The second allows another constant.
TOLERANCE, MISTAKE_TOLERANCE = 2e-5, 5e-5
MISTAKE_UNIT = 1e-5  # in the file, numbers of mistakes are integers in this unit, which take half the space


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
    """The largest difference, relative to the largest expected number or, for a loss, at least to 1.

    The numbers of a mistake are rounded to a unit. They are compared at tokens only, because a KL without a mask also
    has a gradient on padding.
    """
    result = result.detach() if hasattr(result, "detach") else result  # a tensor of torch
    result, expected = np.asarray(result, dtype=float), np.asarray(expected, dtype=float)
    if name == "advantages" or (unit and name == "gradient"):  # (B, T), or one number for each response
        result, expected = (np.where(mask, x.reshape(len(mask), -1), 0.0) for x in (result, expected))
    scale = max(np.abs(expected).max(), 1.0 if name == "loss" else 1e-3)
    return float((np.abs(np.where(np.isnan(result), np.inf, result) - expected).max() - unit / 2) / scale)


def mistakes_of(method: str, case: dict) -> dict[str, dict]:
    """The numbers that each mistake changes, and the numbers of other methods with the same inputs, by name."""
    units = case["mistakes"].items()
    found = {name: {key: MISTAKE_UNIT * np.array(x) for key, x in values.items()} for name, values in units}
    wrong_sign = {key: -np.array(case["expected"][key]) for key in ("loss", "gradient")}
    found["loss with the wrong sign"] = wrong_sign
    for other in sorted(VECTORS["methods"].keys() - {method}):
        for x in VECTORS["methods"][other]:
            if (x["name"], x["inputs"]) == (case["name"], case["inputs"]):
                found[f"the numbers of {other}"] = x["expected"]
    return found


def report(method: str, function, tolerance: float = TOLERANCE) -> list[tuple]:
    """Print each case, and return (case, what differs, by how much, names of mistakes with the same numbers).

    A mistake is named only if everything that the function returned agrees with it.
    """
    if method not in VECTORS["methods"]:
        raise ValueError(f"there is no method {method!r}. Use one of {', '.join(VECTORS['methods'])}")
    found = []
    for case, (name, inputs) in zip(VECTORS["methods"][method], cases(method).items()):
        mask, results = inputs["response_mask"].copy(), function(inputs)
        if not isinstance(results, dict) or not results or results.keys() - case["expected"].keys():
            remedy = f"return a dict with any of {', '.join(case['expected'])}"
            raise ValueError(f"{method}: the function returned {results!r:.80}; {remedy}")
        sizes = {}
        for key, x in results.items():
            try:
                sizes[key] = difference(key, x, case["expected"][key], mask)
            except (TypeError, ValueError, RuntimeError) as error:  # None, bfloat16, or another shape
                raise ValueError(
                    f"{method}, {name}: {key} is no array or number like the expected one"
                ) from error
        wrong = {key: size for key, size in sizes.items() if not size <= tolerance}
        names = []
        for mistake, numbers in mistakes_of(method, case).items():
            all_numbers = case["expected"] | numbers
            pairs = [(key, x, all_numbers[key]) for key, x in results.items()]
            distance = max(difference(*pair, mask, MISTAKE_UNIT) for pair in pairs)
            if wrong.keys() <= numbers.keys() and distance <= MISTAKE_TOLERANCE:
                names.append(mistake)
        for key, size in wrong.items():
            print(f"{method}, {name}: {key} off by {size:.1g}; {' or '.join(names) or 'no listed mistake'}")
            found.append((name, key, size, names))
        if not wrong:
            print(f"{method}, {name}: passed")
    return found
