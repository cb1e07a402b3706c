"""A small part of tests/fuzz.py."""

import fuzz


def test_data_files(tmp_path):
    seen = fuzz.fuzz_data(60, tmp_path)
    assert seen["read"] > 5 and seen["refused"] > 20
