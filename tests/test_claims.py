"""experiments/claims.py: what makes a verdict, and patches that apply."""

import shutil
import subprocess

import claims
import numpy as np
import pytest
from claims import FAILS, HOLDS, MISSING, UNKNOWN, Claim, Comparison, arm
from conftest import ROOT

A, B = arm("grpo"), arm("rloo")


def runs(one: dict, accuracies: list[float], kls: list[float] | None = None) -> list[dict]:
    """A run for each seed, in another order than that of the seeds."""
    kls = kls or [1.0] * len(accuracies)
    rows = [
        one | {"learning_rate": 1e-4, "seed": seed, "greedy": {"8": accuracy}, "kl": [kl]}
        for seed, accuracy, kl in zip(claims.SEEDS, accuracies, kls)
    ]
    return rows[::-1]


@pytest.fixture
def verdict_of(monkeypatch):
    def verdict(rows: list[dict], *comparisons: Comparison) -> str:
        monkeypatch.setattr(claims, "CLAIMS", {1: Claim("", "", list(comparisons), [])})
        monkeypatch.setattr(claims, "committed", lambda: rows)
        monkeypatch.setattr(claims, "best_rate", lambda script: 1e-4)
        claims.outcomes.cache_clear()
        return claims.verdict(1)

    yield verdict
    claims.outcomes.cache_clear()


def test_paired_differences_decide(verdict_of):
    """Seeds differ far more than A and B do, but A is above B with each seed."""
    base, noise = np.linspace(0.1, 0.8, 10), np.array([0.01, -0.01] * 5)
    rows = runs(A, [*(base + 0.1 + noise)]) + runs(B, [*base])
    assert verdict_of(rows, Comparison(A, ">", B, "8")) == HOLDS
    assert verdict_of(rows, Comparison(B, ">", A, "8")) == FAILS
    assert verdict_of(rows, Comparison(A, "≥", B, "8")) == HOLDS
    assert verdict_of(rows, Comparison(B, "≥", A, "8")) == FAILS
    assert verdict_of(rows, Comparison(A, ">", B, "8"), Comparison(B, ">", A, "8")) == FAILS
    assert verdict_of(rows[1:], Comparison(A, ">", B, "8")) == MISSING
    not_run = Comparison(A, ">", arm("ppo"), "8")
    assert verdict_of(rows, Comparison(A, ">", B, "8"), not_run) == MISSING
    assert verdict_of(rows, Comparison(B, ">", A, "8"), not_run) == FAILS  # whatever the other says


def test_a_difference_below_the_margin(verdict_of):
    """If it is certain, A is better, and B as good. If it may be 0, A is not better."""
    base, noise = np.linspace(0.1, 0.8, 10), np.array([0.03, -0.01] * 5)
    rows = runs(A, [*(base + 0.02)]) + runs(B, [*base])
    assert verdict_of(rows, Comparison(B, "≥", A, "8")) == HOLDS
    assert verdict_of(rows, Comparison(A, ">", B, "8")) == HOLDS
    rows = runs(A, [*(base + noise)]) + runs(B, [*base])
    assert verdict_of(rows, Comparison(A, ">", B, "8")) == FAILS


def test_a_wide_interval_says_nothing(verdict_of):
    rows = runs(A, [0.5, 0.9] * 5) + runs(B, [0.7] * 10)  # equal means
    assert verdict_of(rows, Comparison(A, "≥", B, "8")) == UNKNOWN
    assert verdict_of(rows, Comparison(A, ">", B, "8")) == UNKNOWN


def test_an_interval_of_means_is_that_of_the_t_distribution():
    numbers = np.random.default_rng(1).normal(size=10)
    estimates = numbers[claims.resample(10)].mean(1)
    middle, low, high = claims.interval(estimates, 10)
    assert middle == pytest.approx(numbers.mean())
    half = 2.262 * numbers.std(ddof=1) / np.sqrt(10)
    assert [middle - low, high - middle] == pytest.approx([half, half], rel=0.02)


def test_several_betas_are_compared_at_equal_kl(verdict_of):
    """Accuracy falls with the KL, on the same line for A and B, but B has the larger KLs."""
    sides, rows = {}, []
    for name, kls in (("grpo", (1.0, 2.0, 3.0)), ("rloo", (4.0, 3.0, 2.0)), ("ppo", (5.0, 6.0, 7.0))):
        sides[name] = [arm(name, kl_coef=kl) for kl in kls]
        for one, kl in zip(sides[name], kls):
            rows += runs(one, [1 - kl / 10 + x for x in [0.01, -0.01] * 5], [kl] * 10)
    assert verdict_of(rows, Comparison(sides["grpo"], "≥", sides["rloo"], "8")) == HOLDS
    assert verdict_of(rows, Comparison(sides["grpo"], ">", sides["rloo"], "8")) == FAILS
    assert verdict_of(rows, Comparison(sides["grpo"], "≥", sides["ppo"], "8")) == UNKNOWN  # no KL in common


def test_a_diverged_run_has_an_accuracy_of_0():
    run = runs(A, [0.5])[0] | {"diverged": True, "score": [0.0] * 10, "flags": {"reward": claims.SIGNED}}
    assert [claims.value(run, measure) for measure in ("8", "train", "late", "pass@1")] == [0.0] * 4


def test_train_is_the_accuracy_before_the_flips():
    run = runs(A, [0.5])[0] | {"score": [0.66] * 10, "flags": {"reward": "claim_rewards.py:flip_30"}}
    assert claims.value(run, "train") == pytest.approx(0.9)  # 0.9 x 0.7 + 0.1 x 0.3


def test_accuracy_is_read_where_the_kl_first_reaches_a_value():
    path = [[0, 0, 1.0], [4, 1, 0.8], [2, 1, 0.7], [6, 2, 0.4]]  # KL, score, accuracy
    found = [claims.value({"path": path}, f"{name} at KL 5") for name in ("2-5", "score")]
    assert found == pytest.approx([0.55, 1.5])
    assert claims.value({"path": path}, "2-5 at KL 2") == pytest.approx(0.9)
    assert np.isnan(claims.value({"path": path}, "2-5 at KL 10"))


@pytest.mark.parametrize(
    "patch", sorted((ROOT / "experiments" / "patches").glob("*.patch")), ids=lambda x: x.stem
)
def test_patches_apply(patch, tmp_path):
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    subprocess.run(["git", "apply", patch], cwd=tmp_path, check=True)
    [changed] = [
        path for path in ROOT.glob("*.py") if path.read_bytes() != (tmp_path / path.name).read_bytes()
    ]
    compile((tmp_path / changed.name).read_text(), changed.name, "exec")
