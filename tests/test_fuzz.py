"""A small helping of benchmark/fuzz.py, and that it would notice."""

import io
import pickle
import zipfile

import fuzz
import pytest
import torch

import grpo


def test_answers():
    seen = fuzz.fuzz_answers(2000)
    assert seen["cases"] >= 1500 and seen["right"] > 100
    assert seen["times_as_long_for_ten_times_the_text"] < 50


def test_checkpoints(tmp_path):
    seen = fuzz.fuzz_checkpoints(1500, tmp_path)
    assert seen["cases"] >= 1000
    assert seen["digest_as_written"]["refused"] > 100 and seen["digest_as_written"]["the same"] > 0
    assert seen["digest_made_to_fit"]["refused"] > 100


def test_a_wrong_rule_is_noticed(monkeypatch):
    monkeypatch.setattr(grpo, "exact_answer", lambda texts, answers, answer_marker: [1.0])
    with pytest.raises(AssertionError):
        fuzz.fuzz_answers(200)


class Code:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_a_checkpoint_does_not_run_code(tmp_path):
    """A pickle that would open a file, on its own and inside an archive as torch writes it, with a digest that fits."""
    run = fuzz.Run(tmp_path)
    hostile = pickle.dumps({"iteration": 3, "world_size": 1, "optimizer": Code(tmp_path / "ran")})
    assert run.read(hostile, digest_fits=True) == "refused"
    with zipfile.ZipFile(io.BytesIO(run.whole)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(tmp_path / "archive", "w") as archive:
        for name, content in files.items():
            archive.writestr(name, hostile if name.endswith("data.pkl") else content)
    assert run.read((tmp_path / "archive").read_bytes(), digest_fits=True) == "refused"
    assert not (tmp_path / "ran").exists()
    torch.save({"nothing": 1}, tmp_path / "empty.pt")
    assert run.read((tmp_path / "empty.pt").read_bytes(), digest_fits=True) == "refused"
    torch.save([1, 2], tmp_path / "list.pt")
    assert run.read((tmp_path / "list.pt").read_bytes(), digest_fits=True) == "refused"
