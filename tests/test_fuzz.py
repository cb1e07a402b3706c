"""A small part of tests/fuzz.py, and that it notices a mistake."""

import fuzz
import pytest

import grpo


def test_data_files(tmp_path):
    seen = fuzz.fuzz_data(60, tmp_path)
    assert seen["read"] > 5 and seen["refused"] > 20


def test_scores():
    seen = fuzz.fuzz_scores(100)
    assert seen["right"] > 20 and seen["wrong"] > 20 and seen["scored by the model"] > 20


def test_a_wrong_rule_is_noticed(monkeypatch):
    monkeypatch.setattr(grpo, "exact_answer", lambda marker, texts, answers: [1.0])
    with pytest.raises(AssertionError):
        fuzz.fuzz_scores(50)
