"""The toy: make_toy.py makes the committed files, and scripts learn the task."""

import re

import make_tools
import make_toy
import pytest
from conftest import ROOT, read_jsonl
from zoo import run

TOY = ROOT / "toy"


@pytest.mark.parametrize("module, folder", [(make_toy, TOY), (make_tools, TOY / "tools")])
def test_same_seed_same_files(module, folder, tmp_path):
    data = module.make_data(seed=0)
    for path in folder.glob("*.jsonl"):
        make_toy.write_jsonl(tmp_path / "file", data[path.stem])
        assert (tmp_path / "file").read_bytes() == path.read_bytes(), path.name


def chain_value(prompt: str) -> int:
    """The value of a chain, computed from the text."""
    signs = ["+", *re.findall(r"[+-]", prompt)]
    return sum(int(sign + number) for sign, number in zip(signs, re.findall(r"\d", prompt))) % 10


def test_answers_are_right_and_held_out_prompts_are_held_out():
    train, heldout = read_jsonl(TOY / "train.jsonl"), read_jsonl(TOY / "heldout.jsonl")
    assert all(int(row["answer"]) == chain_value(row["prompt"]) for row in train + heldout)
    assert len({row["prompt"] for row in train + heldout}) == len(train + heldout) == 2600
    seen = read_jsonl(TOY / "demonstrations.jsonl") + read_jsonl(TOY / "preferences_train.jsonl")
    assert not {row["prompt"] for row in seen} & {row["prompt"] for row in heldout}
    pairs = read_jsonl(TOY / "preferences_train.jsonl"), read_jsonl(TOY / "preferences_heldout.jsonl")
    assert not {row["prompt"] for row in pairs[0]} & {row["prompt"] for row in pairs[1]}
    for row in pairs[0] + pairs[1]:
        ends = [row[side].endswith(f"answer {chain_value(row['prompt'])}") for side in ("chosen", "rejected")]
        assert ends == [True, False]


@pytest.mark.parametrize("name", ["grpo", "ppo", "gkd"])
def test_the_score_rises_within_a_few_iterations(tmp_path, name):
    """With a wrong sign, it would fall. experiments/toy.py trains all scripts."""
    run(name, run_dir=tmp_path, num_iterations=15, batch_size=128, max_response_length=40, learning_rate=4e-4)
    lines = read_jsonl(tmp_path / "metrics.jsonl")
    score, length = ([line[key] for line in lines] for key in ("score", "response_length"))
    assert sum(score[:3]) / 3 < 0.5 and sum(score[-5:]) / 5 > sum(score[:3]) / 3 + 0.15
    assert sum(length[-5:]) / 5 > 1.2 * sum(length[:3]) / 3
