"""Datasets in the hub's own formats, and the scripts in data/ that make more of them."""

import importlib
import itertools
import json
import re
import shlex
import subprocess
import sys

import datasets
import pytest
from conftest import POLICY_SCRIPTS, ROOT, read_jsonl, write_jsonl
from zoo import make_tokenizer

import grpo

sys.path.insert(0, str(ROOT / "data"))
import gsm8k
import knights_and_knaves

TEXTS = [{"prompt": f"{i} + {i + 1} ?", "answer": str(2 * i + 1), "group": "sum"} for i in range(8)]
CHATS = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in TEXTS]


def as_hub_repository(folder, splits: dict) -> str:
    """A folder as the hub stores a dataset: data/<split>-00000-of-00001.parquet and a card that says so."""
    (folder / "data").mkdir(parents=True)
    for split, rows in splits.items():
        datasets.Dataset.from_list(rows).to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")
    files = "".join(f"  - split: {split}\n    path: data/{split}-*\n" for split in splits)
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n# a dataset\n")
    return str(folder)


@pytest.mark.parametrize("rows", [TEXTS, CHATS], ids=["texts", "chats"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hub"])
def test_the_same_rows_from_every_source(rows, kind, tmp_path):
    """Also where a folder of that name was read before: datasets' cache would give its rows for those of this one."""
    if kind == "hub":
        source = as_hub_repository(tmp_path / "someone" / "sums", {"train": rows[:2], "test": rows})
    elif kind == "parquet":
        source = str(tmp_path / "sums.parquet")
        datasets.Dataset.from_list(rows).to_parquet(source)
    else:
        source = str(write_jsonl(tmp_path / "sums.jsonl", rows))
    tokenizer = make_tokenizer(chat=True)
    read = grpo.load_rows(grpo.Args(), source, "test", "dataset", tokenizer)
    assert [{k: v for k, v in row.items() if k != "prompt_ids"} for row in read] == rows
    ids = tokenizer("3 + 4 ?")["input_ids"]
    assert read[3]["prompt_ids"] == ([2, 4, *ids, 3, 5] if rows is CHATS else ids)


CALLED = {"knight": True, "knave": False}


def means(text: str, way: dict[str, bool]) -> bool:
    """The truth of a sentence of a puzzle, read from the English and not from the script's own structure."""
    if match := re.fullmatch(r"(\w+) is a (knight|knave)", text):
        return way[match[1]] == CALLED[match[2]]
    if match := re.fullmatch(r"if (.+) then (.+)", text):
        return means(match[2], way) or not means(match[1], way)
    for word, join in ((" if and only if ", bool.__eq__), (" and ", min), (" or ", max)):
        if word in text:
            return bool(join(*(means(part, way) for part in text.split(word))))
    raise AssertionError(text)


def test_every_puzzle_has_the_one_solution_that_it_says(tmp_path, capsys):
    options = {"train_puzzles": 30, "test_puzzles": 10}
    knights_and_knaves.main(knights_and_knaves.Args(folder=tmp_path / "one", **options))
    knights_and_knaves.main(knights_and_knaves.Args(folder=tmp_path / "again", **options))
    knights_and_knaves.main(knights_and_knaves.Args(folder=tmp_path / "other", seed=2, **options))
    files = {name: [tmp_path / x / f"{name}.jsonl" for x in ("one", "again", "other")] for name in ("train", "test")}
    for one, again, other in files.values():
        assert one.read_text() == again.read_text() != other.read_text()
    train, test = (read_jsonl(files[name][0]) for name in ("train", "test"))
    assert {row["group"] for row in train} == {f"{n} people" for n in range(3, 8)}
    assert {row["group"] for row in test} == {f"{n} people" for n in range(2, 9)}
    puzzles = [row["prompt"][1]["content"] for row in train + test]
    assert len(set(puzzles)) == len(puzzles)
    for row, puzzle in zip(train + test, puzzles):
        said = dict(re.findall(r'(\w+) says: "(.+?)\."', puzzle))
        assert (
            f"{len(said)} people" == row["group"]
            and f"meet {len(said)} inhabitants: {', '.join([*said][:-1])}" in puzzle
        )
        ways = [dict(zip(said, way)) for way in itertools.product((True, False), repeat=len(said))]
        possible = [way for way in ways if all(means(text, way) == way[name] for name, text in said.items())]
        answers = [
            ", ".join(f"{name} is a {'knight' if x else 'knave'}" for name, x in way.items()) for way in possible
        ]
        assert answers == [row["answer"]]
    kinds = {"if ", " and ", " or ", " if and only if "}
    assert all(any(kind in puzzle for puzzle in puzzles) for kind in kinds)


SOLUTION = "Ann is a knight, Bob is a knave"
JUDGED = [
    ("<think>hm</think> <answer>Ann is a knight, Bob is a knave</answer>", 1),
    ("<answer>(1) Bob is a Knave\n(2) Ann is a Knight.</answer>", 1),
    ("<answer>Ann is a knave, Bob is a knave</answer> no: <answer>Ann is a knight, Bob is a knave</answer>", 1),
    ("Ann is a knight, Bob is a knave", -1),
    ("<answer>Ann is a knight, Bob is a knave", -1),
    ("<answer>Ann is a knight</answer>", -1),
    ("<answer>Ann is a knight, Bob is a knave, Bob is a knight</answer>", -1),
    ("<answer>Ann is a knight, Bob is a knave, Carol is a knight</answer>", -1),
    ("<answer>Ann is a knave, Bob is a knight</answer>", -1),
    ("<answer></answer>", -1),
    ("", -1),
]


def test_the_puzzles_reward_reads_statements(tmp_path):
    completions, expected = zip(*JUDGED)
    answers = [SOLUTION] * len(completions)
    assert knights_and_knaves.reward(list(completions), answers, group=["2 people"]) == list(expected)
    args = grpo.Args(reward=str(ROOT / "data" / "knights_and_knaves.py") + ":reward")
    assert grpo.load_reward(args, "cpu")(completions=completions, answer=answers) == list(expected)
    rule = grpo.exact_answer(completions[:2], answers[:2], answer_marker="<answer>")
    assert rule == [1.0, -1.0]  # the rule takes the answer to the letter


def test_wrong_numbers_of_people_are_refused(tmp_path):
    command = [sys.executable, ROOT / "data" / "knights_and_knaves.py", "--folder", tmp_path / "x"]
    result = subprocess.run([*command, "--train_people", "1"], capture_output=True, text=True)
    assert result.returncode != 0 and "must be from 2 to 20" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "marker, shown", [("####", "#### 42"), ("\\boxed{", "\\boxed{42}"), ("<answer>", "<answer>42</answer>")]
)
def test_gsm8k_in_its_own_format(marker, shown, tmp_path, capsys):
    rows = [{"question": " 2 + 3 ? ", "answer": "It is <<2+3=5>>5.\n#### 5"}, {"question": "x", "answer": "#### 1,000"}]
    source = as_hub_repository(tmp_path / "hub", {"train": rows, "test": rows[:1]})
    gsm8k.main(gsm8k.Args(source=source, folder=tmp_path / "made", marker=marker))
    made = read_jsonl(tmp_path / "made" / "train.jsonl")
    assert [row["answer"] for row in made] == ["5", "1,000"]
    assert made[0]["prompt"][0]["content"].startswith("2 + 3 ?\n\n") and shown in made[0]["prompt"][0]["content"]
    assert len(read_jsonl(tmp_path / "made" / "test.jsonl")) == 1
    right = shown.replace("42", "1000.0")
    assert grpo.exact_answer([right], [made[1]["answer"]], answer_marker=marker) == [1.0]


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
def test_every_script_takes_the_puzzles(name, tmp_path, capsys):
    """Through their own loading code, with a chat template; what a model makes of them takes a GPU."""
    script = importlib.import_module(name)
    knights_and_knaves.main(knights_and_knaves.Args(folder=tmp_path, train_puzzles=2, test_puzzles=1))
    args = script.Args(reward="file.py:reward", max_prompt_length=2000)
    rows = script.load_rows(args, str(tmp_path / "train.jsonl"), "train", "dataset", make_tokenizer(chat=True))
    assert len(rows) == 10 and rows[0]["group"] == "3 people" and json.dumps(rows[0]["prompt"])


def commands(text: str) -> list[list[str]]:
    """The commands of indented code that start a script of ours, as words."""
    lines = re.findall(r"^    (.*)$", text, re.MULTILINE)
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in joined if re.search(r"\w\.py\b", line) and "<the same" not in line]


@pytest.mark.parametrize("page", ["README.md", "docs/recipes.md"])
def test_the_commands_in_the_docs_have_flags_that_exist_and_sizes_that_work_out(page, monkeypatch):
    found = commands((ROOT / page).read_text())
    assert len(found) >= 2
    for command in found:
        place = next(i for i, word in enumerate(command) if word.endswith(".py"))
        ranks = int(command[command.index("--nproc-per-node") + 1]) if "--nproc-per-node" in command else 1
        path = ROOT / command[place]
        assert path.exists(), path
        if path.parent != ROOT:
            continue  # of data/ or benchmark/, without flags
        script = importlib.import_module(path.stem)
        monkeypatch.setattr(sys, "argv", command[place:])
        args = script.parse_args()
        script.check_args(args, ranks)


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
def test_the_gsm8k_recipe_serves_every_script_less_the_flags_that_it_names(name, monkeypatch):
    found = commands((ROOT / "docs" / "recipes.md").read_text())
    flags = next(command[2:] for command in found if "data/gsm8k/train.jsonl" in command)
    without = {"rloo": "--num_minibatches", "remax": "--num_minibatches"}
    without |= {"reinforce_pp": "--samples_per_prompt", "ppo": "--samples_per_prompt"}
    if name in without:
        place = flags.index(without[name])
        flags = flags[:place] + flags[place + 2 :]
    script = importlib.import_module(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *flags])
    args = script.parse_args()
    script.check_args(args, 1)
    assert args.batch_size == 256 and args.answer_marker == "####"
