"""What a user sees: the console of a run, and --help."""

import ast
import dataclasses
import datetime
import importlib
import json
import os
import pty
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
import resume
import torch
import transformers
from conftest import POLICY_SCRIPTS, ROOT, SOURCES, launch, read_jsonl, words_of, write_jsonl
from safetensors.torch import load_file, save_file
from zoo import STAGE_DATA, make_tokenizer, run

import grpo

FLAGS = {"num_iterations": 4, "batch_size": 16, "max_response_length": 8, "save_every": 2, "device": "cpu"}
FLAGS |= {"dataset": "train.jsonl", "eval_dataset": "heldout.jsonl", "eval_every": 2, "log_every": 3}
FLAGS |= {"model": "policy", "learning_rate": 1e-3}
COLUMNS = ["iteration", "score", "kl", "entropy", "response_length", "truncated", "logprob_difference"]
COLUMNS += ["tokens_per_second"]


def on_terminal(*command, cwd) -> subprocess.CompletedProcess:
    """Start a script whose stdout is a terminal, and return its output."""
    ours, its = pty.openpty()
    with open(cwd / "stderr", "w+") as stderr:
        process = subprocess.Popen([sys.executable, *command], stdout=its, stderr=stderr, cwd=cwd)
        os.close(its)
        said = b""
        with suppress(OSError):  # on Linux, when the process has ended
            while part := os.read(ours, 9999):
                said += part
        os.close(ours)
        stderr.seek(0)
        return subprocess.CompletedProcess(command, process.wait(), said.decode(), stderr.read())


def on_screen(said: str) -> list[str]:
    """The lines that stay on a terminal, on which a carriage return goes back to the first column."""
    screen = []
    for line in said.replace("\r\n", "\n").split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        screen.append(shown.rstrip())
    return screen


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a run of four iterations on a terminal, and of one that is killed in iteration 3 and resumed."""
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
        code = resume.run_and_kill(grpo, "append", 5, run, "grpo", run_dir="killed", **FLAGS)
    assert code == -signal.SIGKILL
    return folder


@pytest.fixture(scope="module")
def said(folder):
    """What each of the two runs prints, all of it to stdout."""
    command = str(ROOT / "grpo.py"), *words_of(**FLAGS), "--run_dir"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HF_HUB_DISABLE_PROGRESS_BARS")
        new = on_terminal(*command, "new", cwd=folder)
        killed = launch(*command, "killed", cwd=folder)
    assert new.returncode == killed.returncode == 0 and new.stderr == killed.stderr == ""
    return {"new": new.stdout, "killed": killed.stdout}


def test_a_counter_moves_on_a_terminal_and_leaves_nothing(said):
    assert "sampling token 8 of at most 8, " in said["new"]
    assert "sampling" not in said["killed"] and "\r" not in said["killed"]
    assert not [line for line in on_screen(said["new"]) if "sampling" in line]


@pytest.fixture(params=["new", "killed"])
def parts(request, said):
    """The name of a run, whether it is new, and the header, table and end of what it prints."""
    lines = on_screen(said[request.param])
    assert max(map(len, lines)) <= 100
    return request.param, request.param == "new", *"\n".join(lines).split("\n\n")


def test_the_header_says_what_the_run_is(parts):
    name, is_new, header, *_ = parts
    size = transformers.AutoModelForCausalLM.from_pretrained(ROOT / "toy" / "policy").num_parameters()
    facts = [
        r"grpo\.py: 1 process on cpu, float32",
        rf"  model +policy: {size:,} parameters",
        r"  prompts +train\.jsonl: 20 of 20 prompts .*",
        r"  held out +heldout\.jsonl: 20 of 20 prompts .*",
        r"  reward +exact_answer",
        rf"  run folder +{name} \({'new' if is_new else 'resumed after iteration 2'}\)",
    ]
    assert re.fullmatch("\n".join(facts), header)


def test_the_table_has_the_numbers_of_the_logs(parts, folder):
    """One title, one row for each iteration, and evaluations and samples on lines of their own."""
    name, is_new, _, table, _ = parts
    title, *rows = table.split("\n")
    assert " ".join(title.split()) == "iter score kl entropy length truncated logp diff tokens/s left"
    rows, samples = iter(rows), read_jsonl(folder / name / "samples.jsonl")
    assert [x["iteration"] for x in samples] == [3, 3, 3]
    for line in read_jsonl(folder / name / "metrics.jsonl"):
        if not is_new and line["iteration"] <= 2:
            continue  # printed before the kill
        digits = {key: float(f"{x:.2e}") for key, x in line.items()}  # three
        if line["iteration"]:
            *numbers, left = next(rows).split()
            assert [*map(float, numbers)] == [digits[key] for key in COLUMNS]
            assert not [x for x in numbers if "e+" in x] and re.fullmatch(r"\d+:\d\d:\d\d", left)
        if "eval/score/all" in line:
            text = f"held out, iteration {line['iteration']}: score/all {digits['eval/score/all']:g}"
            assert " ".join(next(rows).split()) == text
        for x in samples if line["iteration"] == 3 else []:
            row = next(rows)
            assert row.startswith("   ")
            assert " ".join(row.split()) == f"{x['score']} {x['prompt']} -> {x['response']}"
    assert not [*rows]


def test_the_end_says_what_the_run_has_reached(parts, folder):
    name, *_, end = parts
    scores = [line["score"] for line in read_jsonl(folder / name / "metrics.jsonl") if "score" in line]
    assert len(scores) == 4 and f"4 iterations. Mean score {sum(scores) / 4:.3g}." in end
    assert f"python tools/diagnose.py {name}" in end and (ROOT / "tools" / "diagnose.py").exists()


def test_means_are_those_of_the_first_and_last_ten_iterations(tmp_path, capsys, monkeypatch):
    """Evaluations alone have no score."""
    monkeypatch.chdir(tmp_path)
    lines = [{"iteration": 0, "eval/score/all": 9}, *({"iteration": i, "score": i * i} for i in range(1, 26))]
    write_jsonl(tmp_path / "metrics.jsonl", lines)
    grpo.say_result(tmp_path, "score", "--num_iterations 50")
    first, last = (sum(i * i for i in part) / 10 for part in (range(1, 11), range(16, 26)))
    assert f"first 10: {first:.3g}, of the last 10: {last:.3g}." in capsys.readouterr().out


def test_a_finished_run_stays_as_it_is_and_its_last_lines_are_true(said, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    paths = [path for path in (folder / "killed").rglob("*") if path.is_file() and path.name != "args.json"]
    before = {path: path.read_bytes() for path in paths}
    run("grpo", run_dir="killed", **FLAGS)
    again = capsys.readouterr().out
    assert "(resumed after iteration 4)" in again and "Complete: 4 iterations." in again
    assert again.partition("Complete")[2] == said["killed"].partition("Complete")[2]
    assert before == {path: path.read_bytes() for path in (folder / "killed").rglob("*") if path in before}
    assert len([*(folder / "killed").rglob("*")]) == len(paths) + 2  # args.json and the folder model/

    model = re.search(r"model +(\S+), which from_pretrained opens", again)[1]
    transformers.AutoModelForCausalLM.from_pretrained(model)
    transformers.AutoTokenizer.from_pretrained(model)
    longer = shlex.split(re.search(r"longer +the same command with --(.*)", again)[1].replace("--", ""))
    run("grpo", **FLAGS | dict(zip(longer[::2], longer[1::2])))
    assert [line["iteration"] for line in read_jsonl(folder / "killed" / "metrics.jsonl")] == [*range(9)]
    assert json.loads((folder / "killed" / "args.json").read_text())["num_iterations"] == 8
    capsys.readouterr()
    run("grpo", run_dir="killed", **FLAGS)  # with its 4 iterations
    assert "--num_iterations 16\n" in capsys.readouterr().out


def test_a_chat_is_shown_as_its_last_message(tmp_path, capsys):
    """The end of it, and the end of a response that is longer than its place."""
    asked = ["1 + 1 +\n" * 9 + f"{i} + 5 ?" for i in range(3)]
    rows = [{"prompt": [{"role": "system", "content": "9 ?"}, {"role": "user", "content": x}]} for x in asked]
    for i, row in enumerate(rows):  # other columns are logged, also of types that JSON does not know
        row |= {"prompt_ids": [1], "answer": i, "score": "a column", "when": datetime.date(2026, 11, 27)}
    rollout = {"sequences": torch.full((3, 70), 20), "response_mask": torch.ones(3, 60, dtype=torch.bool)}
    rollout["raw_scores"] = torch.tensor([-1e3 / 7] * 3)
    grpo.log_samples(tmp_path, 1, make_tokenizer(), rows, rollout)
    for i, line in enumerate(capsys.readouterr().out.split("\n")[:-1]):
        score, _, texts = line.strip().partition("   ")
        prompt, _, response = texts.partition("  ->  ")
        assert score == "-142.8571" and len(line) == 100
        assert len(prompt) == 24 and f"1 + 1 + 1 + 1 + {i} + 5 ?".endswith(prompt.strip())
        assert len(response) == 58 and set(response.split()[1:]) == {"answer"}
    sample = read_jsonl(tmp_path / "samples.jsonl")[2]
    assert i == 2 and sample["prompt"] == rows[2]["prompt"] and "prompt_ids" not in sample
    assert (
        sample["answer"] == 2
        and sample["when"] == "2026-11-27"
        and sample["score"] == pytest.approx(-1e3 / 7)
    )


def test_one_rank_says_what_is_wrong(folder):
    """Here rank 1, of whose error rank 0 does not know. All other lines of stderr are those of torchrun."""
    reward = "def f(completions, **_): return [1.0 if os.environ['RANK'] == '0' else None] * len(completions)"
    (folder / "of_rank.py").write_text(f"import os\n\n{reward}\n")
    flags = words_of(**FLAGS | {"reward": "of_rank.py:f", "eval_every": 0})
    result = launch(ROOT / "grpo.py", *flags, ranks=2, check=False, cwd=folder)
    assert result.stdout.startswith("grpo.py: 2 processes on cpu, float32\n")
    assert result.stderr.startswith("error: --reward ") and result.stderr.count("error: --") == 1
    assert "[rank" not in result.stderr and "Error: [" not in result.stderr


def test_of_ranks_that_fail_together_the_first_speaks_at_once(monkeypatch):
    """The others wait for torchrun to stop them, whichever rank is the first."""
    waits, store = [], torch.distributed.HashStore()
    monkeypatch.setattr(grpo.time, "sleep", waits.append)
    monkeypatch.setattr(grpo.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(grpo.dist.distributed_c10d, "_get_default_store", lambda: store)
    for rank in (2, 0, 1):
        monkeypatch.setattr(grpo, "RANK", rank)
        with pytest.raises(SystemExit):
            grpo.check(False, "the same")
    assert waits[0] == 0 and min(waits[1:]) >= 10


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
        assert said.count("\n") == len(expected) and all(len(line) <= 100 for line in said.split("\n"))


@pytest.mark.parametrize("script", POLICY_SCRIPTS)
def test_help_has_each_flag_once_with_its_default_and_its_text(script, monkeypatch, capsys):
    module, source = importlib.import_module(script), SOURCES[script]
    path = os.path.relpath(module.__file__, ROOT)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [path, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(path, run_name="__main__")
    said = capsys.readouterr()
    assert not end.value.code and not said.err
    assert module.__doc__.split("\n")[0] in said.out and f"python {path} " in said.out
    assert max(map(len, said.out.split("\n"))) <= 100

    (args,) = (x for x in ast.parse(source).body if isinstance(x, ast.ClassDef) and x.name == "Args")
    fields = [x for x in args.body if isinstance(x, ast.AnnAssign)]
    names = [x.target.id for x in fields]
    assert len(names) == len({*names})
    lines = source.split("\n")
    flags = {x.target.id: x for x in fields if not ast.unparse(x.annotation).startswith("ClassVar")}
    assert [*flags] == [x.name for x in dataclasses.fields(module.Args)]
    assert sorted(re.findall(r"^ *--(\w+)", said.out, re.MULTILINE)) == sorted(flags)
    words = " ".join(said.out.split())
    for name, field in flags.items():
        text = lines[field.end_lineno - 1][field.end_col_offset :].strip().removeprefix("# ")
        assert text and f" --{name} {text} [{getattr(module.Args, name)}]" in words
    begin = next(i for i, line in enumerate(lines, 1) if "# --- estimator: begin" in line)
    of_method = [name for name, field in flags.items() if field.lineno > begin]
    section = said.out.partition("\n\nThe method\n")[2].partition("\n\n")[0]
    assert re.findall(r"--(\w+) ", section) == of_method
