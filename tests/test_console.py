"""Tests of what a user sees: the console of a run, warnings, errors, and --help."""

import dataclasses
import datetime
import importlib
import json
import re
import shlex
import shutil
import signal
import sys

import pytest
import torch
import transformers
import zoo
from conftest import POLICY_SCRIPTS, ROOT, launch, read_jsonl, words_of, write_jsonl
from safetensors.torch import load_file, save_file
from zoo import STAGE_DATA, make_tokenizer, run

import grpo

FLAGS = {"num_iterations": 4, "batch_size": 16, "max_response_length": 8, "save_every": 2, "device": "cpu"}
FLAGS |= {"dataset": "train.jsonl", "eval_dataset": "heldout.jsonl", "eval_every": 2, "log_every": 3}
FLAGS |= {"model": "policy", "learning_rate": 1e-3}
COLUMNS = ["iteration", "score", "kl", "entropy", "response_length", "truncated", "logprob_difference"]
COLUMNS += ["tokens_per_second"]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """The folder of a run that is killed in its iteration 3 of 4 and resumed, and what the resumed run prints."""
    folder = tmp_path_factory.mktemp("console")
    for name in ("train", "heldout"):
        rows = read_jsonl(ROOT / "toy" / f"{name}.jsonl")[:20]
        rows = [{key: row[key] for key in ("prompt", "answer")} for row in rows]
        write_jsonl(folder / f"{name}.jsonl", rows)
    shutil.copytree(ROOT / "toy" / "policy", folder / "policy")
    weights = load_file(folder / "policy" / "model.safetensors")
    weights["unused"] = torch.zeros(1)  # transformers would print a report about it
    save_file(weights, folder / "policy" / "model.safetensors", {"format": "pt"})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        code = zoo.run_and_kill(grpo, "append", 5, run, "grpo", run_dir="run", **FLAGS)
        patch.delenv("HF_HUB_DISABLE_PROGRESS_BARS")
        result = launch(ROOT / "grpo.py", *words_of(**FLAGS, run_dir="run"), cwd=folder)
    assert code == -signal.SIGKILL
    assert result.stderr == "" and "\r" not in result.stdout  # counters are for terminals only
    return folder, result.stdout


def test_the_table_has_the_numbers_of_the_logs(resumed):
    """An iteration is one row. Evaluations and samples follow it on lines of their own."""
    folder, said = resumed
    assert max(map(len, said.splitlines())) <= 100
    header, table, end = said.split("\n\n")
    assert header.startswith("grpo.py: 1 process on cpu, float32\n")
    assert header.endswith("run folder  run (resumed after iteration 2)")
    title, *rows = table.split("\n")
    assert " ".join(title.split()) == "iter score kl entropy length truncated logp diff tokens/s left"
    rows, lines = iter(rows), read_jsonl(folder / "run" / "metrics.jsonl")
    samples = read_jsonl(folder / "run" / "samples.jsonl")
    assert [x["iteration"] for x in samples] == [3, 3, 3]
    for line in lines[-2:]:  # the iterations since the kill
        digits = {key: float(f"{x:.2e}") for key, x in line.items()}  # three significant digits
        *numbers, left = next(rows).split()
        assert [*map(float, numbers)] == [digits[key] for key in COLUMNS]
        assert "e+" not in "".join(numbers) and re.fullmatch(r"\d+:\d\d:\d\d", left)
        if line["iteration"] == 3:
            for x in samples:
                assert " ".join(next(rows).split()) == f"{x['score']} {x['prompt']} -> {x['response']}"
    assert next(rows).split()[-2:] == ["score/all", f"{digits['eval/score/all']:g}"] and not [*rows]
    scores = [line["score"] for line in lines if "score" in line]
    assert len(scores) == 4 and f"4 iterations. Mean score {sum(scores) / 4:.3g}." in end
    assert "python tools/plot.py run\n" in end  # diagnose.py needs five iterations


def test_the_last_lines_of_a_finished_run_are_true(resumed, monkeypatch, capsys):
    """The same command prints them again. They name the model, and the command for a longer run."""
    folder, said = resumed
    monkeypatch.chdir(folder)
    run("grpo", run_dir="run", **FLAGS)
    again = capsys.readouterr().out
    assert "(resumed after iteration 4)" in again
    assert again.partition("Complete")[2] == said.partition("Complete")[2] != ""
    model = re.search(r"model +(\S+), which from_pretrained opens", again)[1]
    transformers.AutoModelForCausalLM.from_pretrained(model)
    transformers.AutoTokenizer.from_pretrained(model)
    longer = shlex.split(re.search(r"longer +the same command with --(.*)", again)[1].replace("--", ""))
    run("grpo", **FLAGS | dict(zip(longer[::2], longer[1::2])))
    assert [line["iteration"] for line in read_jsonl(folder / "run" / "metrics.jsonl")] == [*range(9)]
    assert json.loads((folder / "run" / "args.json").read_text())["num_iterations"] == 8
    capsys.readouterr()
    run("grpo", run_dir="run", **FLAGS)  # with the 4 iterations of the first command
    assert "--num_iterations 16\n" in capsys.readouterr().out


def test_a_chat_is_shown_as_its_last_message(tmp_path, capsys):
    """Of a prompt or a response that is too long for its column, the end is shown. All columns are logged."""
    asked = ["1 + 1 +\n" * 9 + f"{i} + 5 ?" for i in range(3)]
    rows = [{"prompt": [{"role": "system", "content": "9 ?"}, {"role": "user", "content": x}]} for x in asked]
    for row in rows:
        row |= {"prompt_ids": [1], "answer": 8, "score": "a column", "when": datetime.date(2026, 11, 27)}
    rollout = {"sequences": torch.full((3, 70), 20), "response_mask": torch.ones(3, 60, dtype=torch.bool)}
    rollout["raw_scores"] = torch.tensor([-1e3 / 7] * 3)
    grpo.log_samples(tmp_path, 1, make_tokenizer(), rows, rollout)
    for i, line in enumerate(capsys.readouterr().out.splitlines()):
        assert len(line) == 100 and f" + {i} + 5 ?  ->  " in line and line.endswith(" answer answer")
    sample = read_jsonl(tmp_path / "samples.jsonl")[2]
    assert i == 2 and sample["prompt"] == rows[2]["prompt"] and "prompt_ids" not in sample
    assert sample["answer"] == 8 and sample["when"] == "2026-11-27"
    assert sample["score"] == pytest.approx(-1e3 / 7)


def test_one_rank_says_what_is_wrong(resumed):
    """Only rank 1 fails here, and rank 0 does not know why. The other lines of stderr come from torchrun."""
    folder, _ = resumed
    reward = "def f(completions, **_): return [1.0 if os.environ['RANK'] == '0' else None] * len(completions)"
    (folder / "of_rank.py").write_text(f"import os\n\n{reward}\n")
    flags = words_of(**FLAGS | {"reward": "of_rank.py:f", "eval_every": 0})
    result = launch(ROOT / "grpo.py", *flags, ranks=2, check=False, cwd=folder)
    assert result.stdout.startswith("grpo.py: 2 processes on cpu, float32\n")
    assert result.stderr.startswith("error: --reward ") and result.stderr.count("error: --") == 1
    assert "[rank" not in result.stderr and "Error: [" not in result.stderr


def test_only_the_toy_has_held_out_prompts_that_were_not_named():
    for flags, expected in (
        ({}, "toy/heldout.jsonl"),
        ({"eval_dataset": "mine.jsonl"}, "mine.jsonl"),
        ({"dataset": "mine.jsonl"}, None),
    ):
        args = grpo.Args(**flags)
        grpo.check_args(args)
        assert args.eval_dataset == expected


@pytest.mark.parametrize("script", ["grpo", "ppo", *STAGE_DATA])
def test_settings_of_the_toy_are_named_with_another_model(script, capsys):
    module = importlib.import_module(script)
    names = ["learning_rate", "max_response_length", "critic_learning_rate"]
    names = [name for name in names if hasattr(module.Args, name)]
    for flags, expected in (
        ({}, []),
        ({"model": "other"}, names),
        ({"model": "other", "learning_rate": 1e-6}, names[1:]),
        ({"model": "other"} | dict.fromkeys(names, 7), []),
    ):
        module.check_args(module.Args(**flags))
        said = capsys.readouterr().out
        found = re.findall(r"warning: --(\w+) \S+ is (?:the default )?for the toy", said)
        assert sorted(found) == sorted(expected)
        assert said.count("\n") == len(expected) and all(len(line) <= 110 for line in said.split("\n"))


@pytest.mark.parametrize("script", [*POLICY_SCRIPTS, *STAGE_DATA])
def test_help_has_each_flag_once(script, monkeypatch, capsys):
    """A flag without a comment in its line would be missing."""
    module = importlib.import_module(script)
    monkeypatch.setattr(sys, "argv", [f"{script}.py"])
    module.print_help()
    said = capsys.readouterr().out
    assert module.__doc__.split("\n")[0] in said and max(map(len, said.split("\n"))) <= 100
    flags = re.findall(r"^  --(\w+)", said, re.MULTILINE)
    assert sorted(flags) == sorted(x.name for x in dataclasses.fields(module.Args))
    if script in POLICY_SCRIPTS:
        section = said.partition("\n\nThe method\n")[2].partition("\n\n")[0]
        assert "--samples_per_prompt " in section and "--seed " not in section
