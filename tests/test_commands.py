"""What tools/sync.py, tools/mix.py and data/ write when a user calls them, and that they overwrite nothing."""

import json
import subprocess
import sys
from collections import Counter

import datasets
import gsm8k
import mix
import pytest
import reversal
import sync
from conftest import ROOT, SOURCES, read_jsonl
from test_siblings import commit, copy_scripts, edit

COMMANDS = {
    "variant": (sync.variant, ("rloo", "lora"), "variants/rloo_lora.py"),
    "patch": (sync.patch, ("rloo", "entropy_bonus"), "runs/rloo_entropy_bonus.py"),
    "mix": (mix.mix, ("rloo", "gspo"), "runs/rloo_gspo.py"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_there_is_not_overwritten(command, tmp_path, capsys):
    """It may be edited. Deleted, it is made anew, in the default folder, and starts from there."""
    function, words, path = COMMANDS[command]
    folder = copy_scripts(tmp_path)
    assert function(*words, root=folder) == 0
    made = (folder / path).read_text()
    assert f"    python {path}\n" in made
    assert capsys.readouterr().out == f"{path}: start it from the top folder, python {path}\n"
    (folder / path).write_text("# mine\n")
    assert function(*words, root=folder) == 2
    assert capsys.readouterr().out == f"error: {path} exists; delete it to make it anew\n"
    assert (folder / path).read_text() == "# mine\n"
    (folder / path).unlink()
    assert function(*words, root=folder) == 0 and (folder / path).read_text() == made


def test_the_command_line_has_the_exit_code_of_its_command(tmp_path):
    """As make needs it. A folder can be named."""
    for tool, words in (("sync", "patch rloo no"), ("mix", "rloo no"), ("sync", "variant no lora")):
        command = [sys.executable, ROOT / "tools" / f"{tool}.py", *words.split()]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 2 and result.stdout.startswith("error: ") and not result.stderr
    command = [sys.executable, ROOT / "tools" / "mix.py", "rloo", "gspo", tmp_path / "new"]
    assert subprocess.run(command, cwd=tmp_path).returncode == 0
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["rloo_gspo.py"]


def test_an_edit_of_one_script_alone_is_exit_code_1(tmp_path, capsys):
    """A file of the user beside the scripts is none of them, and two of one name are refused."""
    folder = copy_scripts(tmp_path)
    (folder / "my_reward.py").write_text("def score(completions, **_): return [*map(len, completions)]\n")
    commit(folder)
    assert sync.sync(folder) == 0
    edit(folder / "rloo.py", "\ndef choose_rows(", "\n# mine\ndef choose_rows(")
    assert sync.sync(folder) == 1 and "rloo.py: not written" in capsys.readouterr().out
    (folder / "methods" / "sft.py").write_text((folder / "sft.py").read_text())
    with pytest.raises(SystemExit, match=r"methods/sft\.py"):
        sync.paths(folder)


def test_a_hunk_of_a_patch_has_one_place():
    """Context decides between two places; without it there is none. A line is a whole line."""
    source = "a\nx\nb\nx\nbx\n"
    assert sync.apply(source, "@@ @@\n a\n-x\n+y\n") == "a\ny\nb\nx\nbx\n"
    assert sync.apply(source, "@@ @@\n-x\n+y\n bx\n") == "a\nx\nb\ny\nbx\n"
    assert sync.apply("ax\nx\n", "@@ @@\n-x\n+y\n") == "ax\ny\n"
    for hunk in ("-x\n+y\n", "-z\n+y\n"):
        with pytest.raises(ValueError, match="mine: it has no single place"):
            sync.apply(source, f"@@ @@\n{hunk}", "mine")


def test_a_made_variant_needs_the_packages_of_its_features():
    """Of vLLM, a version of transformers too."""
    for feature in ("lora", "vllm"):
        made = sync.packages(sync.combine("rloo", [feature]))
        assert made == sync.packages(SOURCES[f"grpo_{feature}"]) != sync.packages(SOURCES["rloo"])


def test_what_is_refused_is_refused_in_any_order():
    for pair in (["async", "vllm"], ["vllm", "async"]):
        with pytest.raises(ValueError, match=r"^\w+ with \w+: every rank would start an engine"):
            sync.combine("flash_reinforce", pair)


# The lines of grpo.py's skeleton that a variant changes or leaves out
CHANGED = {"grpo_correction": 1, "grpo_fsdp": 3, "grpo_lora": 20, "grpo_vllm": 41}
CHANGED |= {"flash_reinforce_async": 15, "reinforce_pp_process": 17, "reinforce_pp_tools": 13}


@pytest.mark.parametrize("name", sync.features().values())
def test_a_variant_changes_no_other_line_of_the_skeleton(name):
    """`make sync` compares with an earlier commit, so it cannot know a line that changed in a variant alone."""
    lines = [Counter(sync.skeleton(SOURCES[x]).splitlines()) for x in ("grpo", name)]
    lacking = (lines[0] - lines[1]).total()
    assert lacking == CHANGED[name], f"{name}.py lacks {lacking} lines of grpo.py. Are they all meant?"


# data/


def test_the_files_of_the_lists(tmp_path, monkeypatch, capsys):
    """Each level has its held-out prompts, and only the first level is trained on."""
    monkeypatch.setattr(reversal, "FOLDER", tmp_path / "reversal")
    reversal.main()
    train, test = (read_jsonl(tmp_path / "reversal" / f"{x}.jsonl") for x in ("train", "test"))
    assert Counter(row["group"] for row in train) == {"3 words": 1000}
    levels = {level: 32 for level in ("3 words", "3 new words", "4 words")}
    assert Counter(row["group"] for row in test) == levels | {"plain questions": len(reversal.QUESTIONS)}
    for row in train + test:
        *head, question = row["prompt"]
        words = {*question["content"].removeprefix("Reverse the order: ").split(", ")}
        if row["group"] != "plain questions":
            assert len(words) == int(row["group"][0]) and len(head) == 3
            assert words <= {*(reversal.NEW_WORDS if "new" in row["group"] else reversal.WORDS)}
    assert not {*reversal.WORDS} & {*reversal.NEW_WORDS}
    assert reversal.make_rows() == {"train": train, "test": test}
    assert capsys.readouterr().out.count("prompts") == 2


def test_the_files_of_gsm8k(tmp_path, monkeypatch):
    """Each split in its own file, with the number at the very end as the answer."""

    def load_dataset(name, config, split):
        assert (name, config) == ("openai/gsm8k", "main")
        return [{"question": f" {split}? ", "answer": f"<<1+1=2>> #### 2 is half of\n#### {len(split)},000"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(gsm8k, "FOLDER", tmp_path / "gsm8k")
    gsm8k.main()
    for split in ("train", "test"):
        [row] = map(json.loads, (tmp_path / "gsm8k" / f"{split}.jsonl").open())
        assert row["answer"] == f"{len(split)},000"
        [question] = row["prompt"]
        assert question == {"role": "user", "content": f"{split}?\n\n{gsm8k.TASK}"}
