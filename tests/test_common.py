"""experiments/common.py: which edits make a row stale, and flags that a script does not have. memory_table.py."""

from itertools import product

import common
import memory_table as memory
import pytest


def test_an_edit_of_a_patch_makes_its_rows_stale(folder):
    row = {"script": "grpo", "patches": ["mine"]} | common.provenance("grpo", ["mine"])
    assert not common.is_stale(row)
    edit(folder / "mine.patch", "+b", "+c")
    assert common.is_stale(row)


def test_a_flag_that_the_script_does_not_have_is_an_error():
    words = common.flags_of("grpo", {"learning_rate": 1e-5, "track": True})
    assert words == ["--learning_rate", "1e-5", "--track"]
    with pytest.raises(ValueError, match=r"dr_grpo\.py has no flag --kl_coef, --learning_rat;"):
        common.flags_of("dr_grpo", {"kl_coef": 0.1, "seed": 1, "learning_rat": 1e-5})


def test_the_arithmetic_of_memory_agrees_with_measured_peaks():
    """And with the numbers of parameters on the model cards of Qwen2.5."""
    rows = common.load("memory")
    assert {(row["script"], row["model"]) for row in rows} == set(product(memory.SCRIPTS, memory.SMALL))
    for row in rows:
        computed = memory.gib(row["script"], *memory.SMALL[row["model"]])["peak"]
        assert computed == pytest.approx(row["peak"], rel=0.15)
    for name, count in (("0.5B", 494_032_768), ("1.5B", 1_543_714_304), ("7B", 7_615_616_512)):
        weights = memory.gib("grpo", *memory.QWEN[name])["weights"] * 2**30
        assert weights == pytest.approx(6 * count, rel=1e-3)
