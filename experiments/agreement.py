"""What TRL and verl compute of the cases in conformance/: python experiments/agreement.py

conformance/frameworks.toml has the methods and the flags. The first call makes experiments/.trl and experiments/.verl.
"""

import contextlib
import functools
import json
import subprocess
import sys
import tomllib

from common import ROOT, environment, load, run_all, table, versions

sys.path.append(str(ROOT / "conformance"))

import check

FRAMEWORKS = tomllib.loads((ROOT / "conformance" / "frameworks.toml").read_text())


def print_results(framework: str) -> None:
    """In the framework's environment: what report finds for each method with its flags."""
    import adapters

    made, found = versions(framework.lower()), {}
    with contextlib.redirect_stdout(sys.stderr):
        for method, flags in FRAMEWORKS[framework]:
            wrong = check.report(method, getattr(adapters, framework.lower())(flags))
            found[f"{method} {flags}"] = {"cases": len(check.cases(method)), "wrong": wrong, "versions": made}
    print(json.dumps(found))


@functools.cache
def results_of(framework: str) -> dict:
    command = [environment(framework.lower()), __file__, framework]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def measure(run_dir, framework: str, method: str, flags: str, vectors: str) -> dict:
    return results_of(framework)[f"{method} {flags}"]


def comparison(framework: str) -> None:
    """Print a line for each method: the cases that pass, the difference of the gradient, the mistakes that fit."""
    lines, rows = [], [row for row in load("agreement") if row["framework"] == framework]
    for row in rows:
        passed = row["cases"] - len({case for case, *_ in row["wrong"]})
        differences = [size for _, key, size, _ in row["wrong"] if key == "gradient"]
        names = [", ".join(names) or "other" for _, key, _, names in row["wrong"] if key != "loss"]
        size = f"{max(differences):.1g}" if differences else ""
        cells = [f"`{row['method']}`", f"`{row['flags']}`", f"{passed} of {row['cases']}"]
        lines.append([*cells, size, "; ".join(dict.fromkeys(names))])
    table(["method", "closest flags", "cases passed", "gradient off by", "computes instead"], lines, rows)


def main() -> None:
    cells, vectors = [], check.VECTORS["version"]
    for framework, rows in FRAMEWORKS.items():
        for method, flags in rows:
            cells.append({"framework": framework, "method": method, "flags": flags, "vectors": vectors})
    run_all("agreement", cells, measure, workers=1)


if __name__ == "__main__":
    print_results(sys.argv[1]) if sys.argv[1:] else main()
