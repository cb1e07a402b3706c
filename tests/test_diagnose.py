"""tools/diagnose.py: each rule on a run that only it should notice, and none on a healthy one."""

import json

import bugs
import common
import diagnose
import pytest
from conftest import ROOT, launch, write_jsonl

FLAGS = {"model": "mine", "dtype": "float32", "max_response_length": 512, "learning_rate": 1e-6}
FLAGS |= {"max_grad_norm": 1.0, "num_minibatches": 2, "update_epochs": 1, "clip_eps": 0.2}
N = 40  # iterations


def wave(i: int) -> float:
    """A noise between -1 and 1 that is the same in every test."""
    return (-1) ** i * (i * 7 % 5) / 4


def healthy(i: int) -> dict:
    """The metrics of iteration i of a run that learns."""
    metrics = {"score": 5 + i / 20 + wave(i) / 5, "truncated": 0.01, "response_length": 200.0, "entropy": 0.5}
    metrics |= {"logprob_difference": 1e-7, "grad_norm": 0.8 + wave(i) / 2, "equal_groups": 0.3 + i / 200}
    return metrics | {"kl": 0.05 * (i - 1) + (wave(i) / 50 if i > 1 else 0), "clip_fraction": 0.01}


def rising(i: int) -> dict:
    return {"eval/score/a": 4 + i / 20} if i % 10 == 0 else {}


# The rule, the flags, and the metrics that differ from the healthy run's
CASES = {
    "log-probs": ({}, lambda i: {"logprob_difference": 0.002, "kl": 5.0 * i}),  # nothing about the kl
    "log-probs ": ({"dtype": "bfloat16"}, lambda i: {"logprob_difference": 0.06}),
    "first kl": ({}, lambda i: {"kl": 3 + i / 20}),
    "negative kl": ({}, lambda i: {"kl": -0.01 * (i - 1)}),
    "kl of 0": ({}, lambda i: {"kl": 1e-6}),
    "equal groups": ({}, lambda i: {"equal_groups": 0.95 - i / 200}),
    "falling score": ({}, lambda i: {"score": 5 - abs(i - 20) / 10 + wave(i) / 5}),
    "falling score ": ({}, lambda i: {"score": 5 - abs(i - 20) / 10, "eval/score/a": 5 - abs(i - 20) / 5}),
    "held-out": ({}, lambda i: {"eval/score/a": 5 - abs(i - 20) / 5} if i % 10 == 0 else {}),
    "large kl": ({}, lambda i: {"kl": 5.0 * (i - 1)}),
    "truncated": ({}, lambda i: {"truncated": i / 60}),
    "entropy": ({}, lambda i: {"entropy": 0.5 / i**2, "score": 5 - i / 10}),
    "busy clip": ({}, lambda i: {"clip_fraction": 0.3}),
    "clipped gradient": ({}, lambda i: {"grad_norm": 1.5 + wave(i) / 4}),
    "flat score ": ({}, lambda i: {"score": 5 + i / 100 + wave(i)}),
    "flat score": ({}, lambda i: {"score": 5 + wave(i)}),
    "idle clip": ({}, lambda i: {"clip_fraction": 0.0}),
    "toy flags": ({"learning_rate": 2e-4}, lambda i: {}),
}
ALSO = {"entropy": {"falling score"}}
# What would be wrong elsewhere is right here.
FINE = {
    "a held-out score that rises": ({}, rising),
    "rounding in bfloat16": ({"dtype": "bfloat16"}, lambda i: {"logprob_difference": 0.01}),
    "a kl that starts with noise": ({}, lambda i: {"kl": wave(i) / 100 if i > 1 else 0.0}),
    "the clip of gspo.py": ({"clip_eps_low": 3e-4}, lambda i: {"clip_fraction": 0.6}),
    "a teacher": ({"teacher": "t"}, lambda i: {"kl": 90 - 2 * i}),
    "a resumed run": ({}, lambda i: {"iteration": i + 100, "kl": 3 + i / 20}),
    "solved at the end": ({}, lambda i: {"equal_groups": min(1, i / 25), "entropy": 0.5 / i}),
    "a dip that is small": ({}, lambda i: {"score": 5 + i / 5 - (3 if i > 30 else 0)}),
    "the toy": ({"model": "toy/policy", "learning_rate": 2e-4}, lambda i: {}),
    "LoRA": ({"learning_rate": 2e-4, "lora_rank": 16}, lambda i: {}),
}


def rows_of(change) -> list[dict]:
    rows = [{"iteration": i} | healthy(i) | change(i) for i in range(1, N + 1)]
    return [{"iteration": 0, "eval/score/a": 3.0}, *rows]


@pytest.mark.parametrize("scale", [1, 1000, 0.001], ids=lambda scale: f"scores times {scale}")
@pytest.mark.parametrize("name", [*CASES, *FINE])
def test_a_rule_notices_what_it_is_for_and_nothing_else(name, scale):
    flags, change = (CASES | FINE)[name]
    rows = rows_of(change)
    for row in rows:
        row |= {key: value * scale for key, value in row.items() if "score" in key}
    expected = {name.strip()} | ALSO.get(name, set()) if name in CASES else set()
    assert set(diagnose.findings(FLAGS | flags, rows)) == expected


def test_every_rule_has_a_case():
    assert {name.strip() for name in CASES} == set(diagnose.REMEDIES)


def printed(folder, rows, ending="", **flags) -> tuple[int, list[str]]:
    """Exit code and lines of the command."""
    (folder / "args.json").write_text(json.dumps(FLAGS | flags))
    with write_jsonl(folder / "metrics.jsonl", rows).open("a") as file:
        file.write(ending)
    result = launch(ROOT / "tools" / "diagnose.py", folder, check=False)
    return result.returncode, (result.stdout + result.stderr).splitlines()


def test_the_command_prints_a_line_for_each_finding(tmp_path):
    """At most eight, the most important first, also while the last line is being written."""
    everything = {"logprob_difference": 1.0, "kl": -900.0, "equal_groups": 1.0, "truncated": 1.0}
    everything["clip_fraction"] = 0.9
    bad = rows_of(lambda i: everything | {"score": 1.0 - i, "entropy": 1 / i**3, "grad_norm": 2.0**i})
    code, lines = printed(tmp_path, bad, '{"iteration": 41, "sco', learning_rate=2e-4)
    assert code == 0 and len(lines) == 8 and lines[0].startswith("logprob_difference is up to 1, ")
    code, [line] = printed(tmp_path, rows_of(rising))
    assert code == 0 and line.startswith("nothing stands out")
    code, lines = printed(tmp_path, bad[:12])  # too early for what needs a trend
    assert code == 0 and [line.split()[0] for line in lines] == ["logprob_difference", "equal_groups", "100%"]
    code, [line] = printed(tmp_path, bad[:5])
    assert code == 1 and "fewer than 5 iterations" in line


def test_it_finds_nothing_in_unchanged_scripts_and_something_in_half_of_the_bugs():
    """In the runs of experiments/bugs.py, which the pages show."""
    runs = [run for run in common.load("bugs") if (run["script"], run["flags"]) not in bugs.MISTAKES]
    healthy = [bool(bugs.diagnosed(run)) for run in runs if not run["bug"]]
    broken = [bool(bugs.diagnosed(run)) for run in runs if run["bug"]]
    assert len(healthy) > 20 and sum(healthy) <= 0.02 * len(healthy)
    assert sum(broken) > 0.5 * len(broken)
