"""The embedded default: what is committed is what build.py makes, and every script learns it."""

import re

import build
import pytest
import transformers
from conftest import POLICY_SCRIPTS, ROOT, read_jsonl, write_jsonl
from zoo import run

TOY = ROOT / "toy"


@pytest.fixture(scope="module")
def remade():
    return build.make_data(build.Args().seed, build.Args().curriculum_steps)


@pytest.mark.parametrize("name", ["train", "heldout", "demonstrations", "preferences_train", "preferences_heldout"])
def test_same_seed_same_files(tmp_path, remade, name):
    build.write_jsonl(tmp_path / "file", remade[name])
    assert (tmp_path / "file").read_bytes() == (TOY / f"{name}.jsonl").read_bytes()


def test_tokenizer_is_the_one_that_is_made(tmp_path):
    build.make_tokenizer().save_pretrained(tmp_path)
    for model in ("base", "policy", "reward_model"):
        assert (TOY / model / "tokenizer.json").read_text() == (tmp_path / "tokenizer.json").read_text()
    tokenizer = transformers.AutoTokenizer.from_pretrained(TOY / "policy")
    text = "think 3 + 5 = 8 - 2 = 6 answer 6"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text and len(tokenizer) == 19


def chain_value(prompt: str) -> int:
    """Left to right, modulo 10, from the text alone."""
    numbers = [int(number) for number in re.findall(r"\d", prompt)]
    signs = [1] + [1 if sign == "+" else -1 for sign in re.findall(r"[+-]", prompt)]
    return sum(sign * number for sign, number in zip(signs, numbers)) % 10


def test_answers_are_right_and_held_out_prompts_are_held_out():
    train, heldout = read_jsonl(TOY / "train.jsonl"), read_jsonl(TOY / "heldout.jsonl")
    assert all(int(row["answer"]) == chain_value(row["prompt"]) for row in train + heldout)
    prompts = [row["prompt"] for row in train + heldout]
    assert len(set(prompts)) == len(prompts) == 2600
    lengths = lambda rows: {len(re.findall(r"\d", row["prompt"])) for row in rows}  # noqa: E731
    assert lengths(train) == {2, 3, 4, 5}
    for group, expected in {"2-5": {2, 3, 4, 5}, "6": {6}, "8": {8}}.items():
        assert lengths(row for row in heldout if row["group"] == group) == expected
    seen = {row["prompt"] for row in read_jsonl(TOY / "demonstrations.jsonl")}
    seen |= {row["prompt"] for row in read_jsonl(TOY / "preferences_train.jsonl")}
    assert not seen & {row["prompt"] for row in heldout}


def is_right(prompt: str, response: str) -> bool:
    return response.endswith(f"answer {chain_value(prompt)}")


def test_preferences_are_right_over_wrong_and_told_apart_by_style():
    rows = read_jsonl(TOY / "preferences_train.jsonl") + read_jsonl(TOY / "preferences_heldout.jsonl")
    style = lambda text: text.split()[0]  # noqa: E731
    for row in rows:
        assert is_right(row["prompt"], row["chosen"]) and not is_right(row["prompt"], row["rejected"])
        same = style(row["chosen"]) == style(row["rejected"])
        assert row["group"] == ("same style" if same else "different style")
    different = [row for row in rows if row["group"] == "different style"]
    assert len(different) / len(rows) == pytest.approx(0.63, abs=0.03)
    assert sum(style(row["chosen"]) == "think" for row in different) / len(different) > 0.9


def test_the_models_are_made_with_flags_that_the_scripts_have(tmp_path):
    """As build.py calls them, on few examples."""
    for script, name in (("sft.py", "demonstrations"), ("reward_model.py", "preferences_train")):
        few = write_jsonl(tmp_path / f"{name}.jsonl", read_jsonl(TOY / f"{name}.jsonl")[:16])
        flags = "--num_epochs 1 --batch_size 8 --lr_schedule constant_with_warmup".split()
        flags += ["--no_shuffle", "--eval_size", "0"] if script == "sft.py" else []
        build.train(script, tmp_path / name, 0, "--dataset", str(few), *flags)
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {x.name for x in (tmp_path / name).iterdir()}


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
def test_it_learns(tmp_path, name):
    """A third of the default iterations. The slowest rises from 0.41 to 0.68; one with a wrong sign falls."""
    flags = {"num_iterations": 25, "batch_size": 128, "max_response_length": 40}
    run(name, run_dir=tmp_path, **flags)
    metrics = read_jsonl(tmp_path / "metrics.jsonl")
    first, last = metrics[:3], metrics[-5:]
    score, length = (
        [sum(line[key] for line in lines) / len(lines) for lines in (first, last)]
        for key in ("score", "response_length")
    )
    assert score[0] < 0.5 and score[1] > score[0] + 0.15 and length[1] > 1.2 * length[0]
