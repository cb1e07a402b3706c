"""tools/explain.py: its numbers against those worked out by hand."""

import explain
import learn
import pytest
import torch
from conftest import ROOT

GRPO = 0.75 / 0.5001  # the std of 1, 0, 0, 0 with k - 1 is 0.5


@pytest.mark.parametrize(
    "script, flags, expected, push",
    [
        ("rloo", {}, [1, -1 / 3, -1 / 3, -1 / 3], [1 / 4, -1 / 12, -1 / 12, -1 / 12]),
        ("grpo", {}, [GRPO, *[-GRPO / 3] * 3], [GRPO / 12, -GRPO / 60, -GRPO / 24, -GRPO / 48]),
        # Above the clip, only what is pushed down keeps its gradient: advantage x ratio / 4 responses / 40 tokens.
        ("dr_grpo", {"ratio": 1.5}, [0.75, -0.25, -0.25, -0.25], [0, *[-0.25 * 1.5 / 160] * 3]),
    ],
)
def test_the_first_tokens_of_a_group_by_hand(script, flags, expected, push):
    advantages, pushes = explain.explain(explain.Args(**flags), script)
    assert advantages[:, 0].tolist() == pytest.approx(expected)
    assert pushes[:, 0].tolist() == pytest.approx(push)


def test_what_docs_learn_says_of_the_toy_policy_and_of_the_kl(capsys):
    """P(think), what is right after each choice, and the pulls of the KL terms by hand."""
    (think, *path), *_, (answer, six, _) = explain.choices(ROOT / "toy" / "policy")
    right = torch.tensor(path).prod().item()
    assert (think, answer, right, six) == pytest.approx((0.357, 0.643, 0.805, 0.097), abs=5e-4)
    learn.kl()
    pulls = [float(line[17:23]) for line in capsys.readouterr().out.splitlines() if " in the " in line]
    # k1 in the reward, k2, k3, k1 in the loss
    assert pulls == pytest.approx([0.301, 0.301, 0.343, 0], abs=0.005)
