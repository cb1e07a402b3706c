"""tools/explain.py: its numbers against those worked out by hand, and scripts that a group is not enough for."""

import sys
from types import SimpleNamespace

import explain
import pytest
from conftest import POLICY_SCRIPTS

GRPO = 0.75 / 0.5001  # the std of 1, 0, 0, 0 with k - 1 is 0.5
R = [0.775, -0.325, -0.175, -0.275]  # the score less 0.1 x 0.5 x length, less its mean of 0.075
PAIRS = {"scores": (1, 0, 1, 1), "samples_per_prompt": 2}


def numbers(script, **flags):
    """Advantage and push of the first token of each response."""
    advantages, push = explain.explain(explain.Args(**flags), script)
    return advantages[:, 0].tolist(), push[:, 0].tolist()


@pytest.mark.parametrize(
    "script, flags, advantages, push",
    [
        ("rloo", {}, [1, -1 / 3, -1 / 3, -1 / 3], [1 / 4, -1 / 12, -1 / 12, -1 / 12]),
        ("grpo", {}, [GRPO, *[-GRPO / 3] * 3], [GRPO / 12, -GRPO / 60, -GRPO / 24, -GRPO / 48]),
        # Above the clip, only what is pushed down keeps its gradient: advantage x ratio / 4 responses / 40 tokens.
        ("dr_grpo", {"ratio": 1.5}, [0.75, -0.25, -0.25, -0.25], [0, *[-0.25 * 1.5 / 160] * 3]),
        ("reinforce", {"kl": 0.5, "kl_coef": 0.1}, R, [x / 4 for x in R]),
        # Groups of two: the advantages 0.5, -0.5, 0, 0 have the std 0.125 ** 0.5, and the batch 14 tokens.
        ("reinforce_pp_baseline", PAIRS, [2**0.5, -(2**0.5), 0, 0], [2**0.5 / 14, -(2**0.5) / 14, 0, 0]),
    ],
)
def test_a_group_by_hand(script, flags, advantages, push):
    assert numbers(script, **flags) == (pytest.approx(advantages), pytest.approx(push))


def test_gae_and_kl_by_hand(capsys):
    explain.print_gae()
    explain.print_kl()
    cells = [[cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines()]
    # delta is 0.1, 0.3, 0.1; 0.3 + 0.95 x 0.1 is 0.395, and 0.1 + 0.95 x 0.395 is 0.475
    assert ["", "0", "0.100", "0.300", "0.100", ""] in cells
    assert ["", "0.95", "0.475", "0.395", "0.100", ""] in cells
    assert ["", "1", "0.500", "0.400", "0.100", ""] in cells
    # log 2, (log 2)^2 / 2, 1/2 - 1 + log 2; the pushes are -log 2 and 1/2 - 1. KL = (log 2 - log 3/2) / 2
    assert ["", "token 1", "0.5", "0.25", "0.693", "0.240", "0.193", "-0.693", "-0.500", ""] in cells
    assert ["", "mean under π", "", "", "0.144", "0.161", "0.144", "", "", ""] in cells


def test_every_script_is_shown_or_named_with_what_it_needs(capsys, monkeypatch):
    def advantages(args, rollout):
        return {"advantages": rollout["times"]}

    new = SimpleNamespace(Args=lambda **flags: SimpleNamespace(kl_coef=0.0), compute_advantages=advantages)
    monkeypatch.setitem(sys.modules, "new", new)
    explain.print_group(explain.Args(scripts=(*POLICY_SCRIPTS, "new")))
    table, left_out = capsys.readouterr().out.split("Left out: ")
    assert "`ppo` needs a critic" in left_out and "`distill` needs a teacher" in left_out
    assert "`remax` needs a greedy response" in left_out and "`new` needs times" in left_out
    for script in POLICY_SCRIPTS:
        assert (f"`{script}`" in table) != (f"`{script}` needs" in left_out)
