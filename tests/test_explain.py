"""tools/explain.py: its numbers against those worked out by hand."""

import explain
import pytest

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
