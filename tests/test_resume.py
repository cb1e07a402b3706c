"""2N iterations are N, a stop, and N more: weights, optimizer and metrics to the last bit; and what a run writes."""

import importlib
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SKELETONS, read_jsonl, the_run

SMALL = ["--batch_size", "16", "--log_every", "1", "--num_samples", "2"]
SMALL += ["--eval_every", "2", "--max_response_length", "12"]
SFT = ["--batch_size", "16", "--eval_size", "8", "--num_samples", "1", "--log_every", "1", "--eval_every", "2"]


def timeless(lines: list[dict]) -> list[dict]:
    """Without what a clock says."""
    return [{k: v for k, v in line.items() if "seconds" not in k and k != "tokens_per_second"} for line in lines]


def assert_same_run(one: Path, other: Path) -> None:
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert timeless(read_jsonl(one / name)) == timeless(read_jsonl(other / name)), name
    checkpoints = [sorted((run / "checkpoints").glob("*.pt"))[-1] for run in (one, other)]
    assert checkpoints[0].name == checkpoints[1].name
    states = [torch.load(path, weights_only=True) for path in checkpoints]
    for name in [name for name in states[0] if name.endswith("optimizer")]:
        assert states[0][name]["state"]  # there is a second moment to compare
    compare(states[0], states[1])
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in (one, other)]
    assert weights[0] == weights[1]


def compare(one, other) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            compare(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other):
            compare(a, b)
    else:
        assert one == other


def run_main(name: str, monkeypatch, *flags) -> None:
    """In this process, which saves the imports."""
    script = importlib.import_module(name)
    monkeypatch.setattr(sys, "argv", [name, *map(str, flags)])
    script.main(script.parse_args())


@pytest.mark.parametrize("script", SKELETONS)
@pytest.mark.parametrize("stop", [2, 3])  # at 3 the stopped run evaluates at its end, and the longer one does not
def test_resume_is_exact(tmp_path, monkeypatch, script, stop):
    run_main(script, monkeypatch, *SMALL, "--runs_dir", tmp_path / "whole", "--num_iterations", 6)
    run_main(script, monkeypatch, *SMALL, "--runs_dir", tmp_path / "parts", "--num_iterations", stop)
    parts = the_run(tmp_path / "parts")
    assert [line["iteration"] for line in read_jsonl(parts / "metrics.jsonl")] == list(range(stop + 1))
    run_main(script, monkeypatch, *SMALL, "--resume", parts, "--num_iterations", 6)
    assert_same_run(the_run(tmp_path / "whole"), parts)
    assert [line["iteration"] for line in read_jsonl(parts / "metrics.jsonl")] == list(range(7))


@pytest.mark.parametrize("script", SKELETONS)
def test_resume_under_a_decaying_learning_rate_and_past_the_last_checkpoint(tmp_path, monkeypatch, script):
    """A run that died at iteration 5 goes on from the checkpoint at 4; what it had logged since is not there twice."""
    flags = [*SMALL, "--num_iterations", 6, "--lr_schedule", "cosine", "--warmup_iterations", 2, "--save_every", 4]
    run_main(script, monkeypatch, *flags, "--runs_dir", tmp_path / "whole")
    whole = the_run(tmp_path / "whole")
    died = tmp_path / "died"
    shutil.copytree(whole, died)
    (died / "checkpoints" / "000006.pt").unlink()
    shutil.rmtree(died / "model")
    lines = (died / "metrics.jsonl").read_text().splitlines(keepends=True)
    (died / "metrics.jsonl").write_text("".join(lines[:6]) + lines[6][:40])  # cut while it was written
    run_main(script, monkeypatch, *flags, "--resume", died)
    assert_same_run(whole, died)


def test_resume_of_sft_is_exact(tmp_path, monkeypatch):
    data = tmp_path / "few.jsonl"
    data.write_text("".join((ROOT / "toy" / "demonstrations.jsonl").open().readlines()[:56]))
    flags = [*SFT, "--dataset", data, "--lr_schedule", "constant"]
    run_main("sft", monkeypatch, *flags, "--runs_dir", tmp_path / "whole", "--num_epochs", 2)
    run_main("sft", monkeypatch, *flags, "--runs_dir", tmp_path / "parts", "--num_epochs", 1)
    parts = the_run(tmp_path / "parts")
    run_main("sft", monkeypatch, *flags, "--resume", parts, "--num_epochs", 2)
    assert_same_run(the_run(tmp_path / "whole"), parts)


@pytest.mark.parametrize("script", SKELETONS)
def test_run_folder_holds_what_it_should(tmp_path, monkeypatch, script):
    import transformers

    flags = [*SMALL, "--runs_dir", tmp_path, "--num_iterations", 5, "--save_every", 1, "--keep_checkpoints", 2]
    run_main(script, monkeypatch, *flags)
    run = the_run(tmp_path)
    assert run.name.startswith(f"{script}__1__")
    assert sorted(path.name for path in run.iterdir()) == sorted(
        ["args.json", "checkpoints", "metrics.jsonl", "model", "samples.jsonl", f"{script}.py"]
    )
    assert sorted(path.name for path in run.glob("checkpoints/*.pt")) == ["000004.pt", "000005.pt"]
    assert (run / f"{script}.py").read_bytes() == (ROOT / f"{script}.py").read_bytes()
    assert json.loads((run / "args.json").read_text())["batch_size"] == 16
    model = transformers.AutoModelForCausalLM.from_pretrained(run / "model")
    trained = torch.load(run / "checkpoints" / "000005.pt", weights_only=True)["policy"]
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())
    start = transformers.AutoModelForCausalLM.from_pretrained(ROOT / "toy" / "policy").state_dict()
    assert all(not torch.equal(value, start[name]) for name, value in trained.items())  # every parameter moved
    assert transformers.AutoTokenizer.from_pretrained(run / "model").eos_token == "<eos>"
    samples = read_jsonl(run / "samples.jsonl")
    assert {"iteration", "prompt", "response", "score"} <= samples[0].keys()
    assert {line.get("split") for line in samples} == {None, "held out"}
