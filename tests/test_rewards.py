"""Tests of the three kinds of rewards, and of what happens to a score before the advantage is computed."""

import importlib
import json
import sys
from importlib.machinery import PathFinder

import driver
import pytest
import torch
import transformers
from conftest import ROOT, write_jsonl
from zoo import CHAT, make_model, make_tokenizer, recorded, refused, run, save

import grpo
import ppo
import reward_model

PROMPTS = ["3 + 5 ?", "1 - 2 + 3 - 4 ?", "9 - 9 ?"]
RESPONSES = ["think 3 + 5 = 8 answer 8", "answer 8", "think 9 answer 1 answer"]
ENDED = [True, False, True]
DATA = [{"prompt": p, "answer": a} for p, a in zip(PROMPTS, "880")]
ROWS = [row | {"prompt_ids": [0]} for row in DATA]
UNUSUAL = "{% for m in messages %}{{ m.content }} {{ '=' if m.role == 'user' else '<eos> -' }} {% endfor %}"
# The template, and what a reward model reads, written by hand: prompt and response, and the end of a response
FORMS = {
    "text": (CHAT, "<bos> {} {}", " <eos>"),
    "chat": (CHAT, "<bos> <user> {} <end> <model> {}", " <end>"),
    "chat with an unusual end": (UNUSUAL, "{} = {}", " <eos> -"),
}


def test_exact_answer_compares_what_follows_the_last_answer():
    """Spaces and newlines around the two do not count."""
    texts = ["answer 3 answer  8 ", "answer 8 answer 3", "answer 8 or 9", " 8", "answer 8", "answer\n8"]
    assert grpo.exact_answer(texts, answer=[8, "8", "8", "8", "8\n", " 8"]) == [1, 0, 0, 1, 1, 1]
    assert grpo.exact_answer(["answer Yes", "answer 8.0"], answer=["yes", 8]) == [0, 0]


def test_a_function_is_called_by_keyword_with_copies_of_every_column(tmp_path):
    """If it changes a prompt, the next iteration does not see it. Only some rows have a hint."""
    rows = [row | {"prompt": [{"content": row["prompt"]}]} for row in ROWS]
    rows[1]["hint"] = "think"
    before, tokenizer = repr(rows), make_tokenizer()
    (tmp_path / "mine.py").write_text(
        "def length(completions, truncated, prompts, answer, **columns):\n"
        f"    assert completions == {RESPONSES} and prompts == {[row['prompt'] for row in rows]}\n"
        "    assert answer == ['8', '8', '0'] and truncated == [False, True, False]\n"
        "    assert columns['hint'] == [None, 'think', None]\n"
        "    prompts[0].append('more')\n"
        "    return [len(text.split()) / 2 for text in completions]\n"
    )
    ids, mask = grpo.left_pad(
        [tokenizer(x)["input_ids"] + [1] * end for x, end in zip(RESPONSES, ENDED)], "cpu"
    )
    rollout = {"sequences": ids, "response_mask": mask.bool(), "truncated": ~torch.tensor(ENDED)}
    reward = grpo.load_reward(grpo.Args(), f"{tmp_path}/mine.py:length")
    found = grpo.score(reward, tokenizer, rows, rollout | {"old_logprobs": torch.zeros(3)})
    assert found.tolist() == [4.0, 1.0, 2.5] and repr(rows) == before


def test_scores_are_normalized_and_then_clipped():
    raw, truncated = torch.tensor([1.0, -1.0, 3.0]), torch.tensor([False, True, False])
    args = grpo.Args(missing_eos_penalty=0.5, reward_zscore=True, reward_clip=1.0)
    penalized = torch.tensor([1.0, -1.5, 3.0])
    expected = (penalized - penalized.mean()) / penalized.std(correction=0)
    torch.testing.assert_close(grpo.process_scores(args, raw, truncated), expected.clamp(-1, 1))
    assert grpo.process_scores(args, torch.ones(3), truncated & False).tolist() == [0.0, 0.0, 0.0]


def save_reward_model(folder, tokenizer, pad_token_id=0):
    torch.manual_seed(0)
    config = make_model("llama").config
    config.update({"num_labels": 1, "pad_token_id": pad_token_id})
    save(folder, transformers.LlamaForSequenceClassification(config), tokenizer)


@torch.no_grad()
@pytest.mark.parametrize("pad_token_id", [0, 1, None])  # a separate token, EOS, none
@pytest.mark.parametrize("form", FORMS)
def test_a_reward_model_reads_prompt_response_and_end(form, pad_token_id, tmp_path):
    """A truncated response stays open, and a response that contains its end has no second one.

    reward_model.py trains on the same ids. The score of a text does not depend on the texts beside it.
    """
    template, text, end = FORMS[form]
    own = make_tokenizer(bos=True, pad="<eos>")
    own.chat_template = template
    save_reward_model(tmp_path, own, pad_token_id)
    prompts = PROMPTS if form == "text" else [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    responses = [RESPONSES[0] + end, *RESPONSES[1:]]
    reward = grpo.load_reward(grpo.Args(device="cpu", micro_batch_size=2), str(tmp_path))
    found = reward(prompts=prompts, completions=responses, truncated=[not x for x in ENDED])
    texts = [text.format(*pair) + end * has_end for *pair, has_end in zip(PROMPTS, RESPONSES, ENDED)]
    id_lists = [own(x, add_special_tokens=False)["input_ids"] for x in texts]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    hidden = [model.model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in id_lists]
    assert found == pytest.approx([float(model.score(x)) for x in hidden], rel=0, abs=1e-5)
    assert reward_model.encode(own, prompts[2], responses[2]) == id_lists[2]


@torch.no_grad()
def test_a_reward_model_reads_the_tools_and_options_of_a_row(tmp_path):
    own = make_tokenizer()
    own.chat_template = "{{ tools[0].name if tools }} {{ '+' if think }} " + CHAT
    save_reward_model(tmp_path, own)
    reward = grpo.load_reward(grpo.Args(device="cpu", chat_template_kwargs={"think": True}), str(tmp_path))
    chat = [{"role": "user", "content": "3 ?"}]
    rows = {"tools": [[{"name": "7"}], None, None], "chat_template_kwargs": [None, None, {"think": False}]}
    found = reward(prompts=[chat] * 3, completions=["8"] * 3, truncated=[False] * 3, **rows)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    for begin, x in zip(("7 + ", "+ ", ""), found, strict=True):
        ids = own(f"{begin}<bos> <user> 3 ? <end> <model> 8 <end>")["input_ids"]
        assert x == pytest.approx(
            float(model.score(model.model(torch.tensor([ids])).last_hidden_state[0, -1])), abs=1e-5
        )


def test_the_critic_starts_from_the_reward_model_or_else_from_the_policy(tmp_path, tokenizer):
    """The reward model may have more tokens than the policy, but not fewer or others."""
    save_reward_model(tmp_path / "other", make_tokenizer())  # with other ids for the digits
    toy, more = ROOT / "toy", transformers.AutoTokenizer.from_pretrained(ROOT / "toy" / "policy")
    more.add_tokens(["another"])
    model = transformers.AutoModelForSequenceClassification.from_pretrained(toy / "reward_model")
    save(tmp_path / "more", model, more)
    judge = model.state_dict()
    model = transformers.AutoModelForCausalLM.from_pretrained(toy / "policy")
    no_head = torch.zeros_like(judge["score.weight"])
    heads = toy / "reward_model", tmp_path / "more"
    cases = [(name, tokenizer, judge, judge["score.weight"]) for name in heads]
    others = [(name, tokenizer) for name in (tmp_path / "other", "exact_answer", "mine.py:f")]
    cases += [(*x, model.state_dict(), no_head) for x in (*others, (toy / "reward_model", more))]
    for name, known, start, head in cases:
        critic = ppo.load_critic(ppo.Args(reward=str(name), device="cpu"), model, known)
        assert not {*map(id, critic.parameters())} & {*map(id, model.parameters())}
        critic = critic.state_dict()
        assert torch.equal(critic.pop("head.weight"), head)
        assert all(torch.equal(x, start[key.replace("decoder.", "model.", 1)]) for key, x in critic.items())


@pytest.mark.parametrize("script", ["grpo", "remax", "gdpo"])
def test_a_run_trains_on_processed_scores(script, tmp_path, monkeypatch):
    """In remax.py the greedy response has a penalty of its own, and in gdpo.py each reward has one."""
    module = importlib.import_module(script)
    scored, generated = recorded(monkeypatch, module, "score"), recorded(monkeypatch, module, "generate")
    advantages = recorded(monkeypatch, module, "compute_advantages")
    reward = "two_rewards" if script == "gdpo" else "reward"
    flags = {"reward": f"{driver.__file__}:{reward}", "reward_scale": 2.0, "reward_clip": 1.0}
    flags |= {"missing_eos_penalty": 0.5, "samples_per_prompt": 2}
    run(script, run_dir=tmp_path / "run", num_iterations=1, max_response_length=4, **flags)
    (_, rollout), _ = advantages[0]
    assert 0 < rollout["truncated"].sum() < 16
    names = ["scores", "greedy_scores"] if script == "remax" else ["scores"]
    for name, (_, raw), (_, sampled) in zip(names, scored, generated, strict=True):
        raw = rollout.get("all_scores", raw)
        penalized = raw.view(len(raw), -1) - 0.5 * sampled["truncated"][:, None]
        expected = (2 * penalized).clamp(-1, 1).view_as(raw)
        torch.testing.assert_close(rollout[name], expected.repeat_interleave(16 // len(raw), 0))


def test_an_eval_reward_needs_its_columns_in_the_held_out_rows_only(tmp_path):
    (tmp_path / "mine.py").write_text("def same(completions, **_): return [1.0] * len(completions)\n")
    data = write_jsonl(tmp_path / "data.jsonl", [{"prompt": "3 ?"}] * 4)
    flags = {"eval_dataset": write_jsonl(tmp_path / "heldout.jsonl", DATA), "eval_reward": "exact_answer"}
    flags |= {"eval_every": 1, "num_iterations": 1, "run_dir": tmp_path / "run"}
    run("grpo", dataset=data, reward=f"{tmp_path}/mine.py:same", **flags)


JUDGE = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import {neighbor}

def length(text):
    return {neighbor}.factor * len(text)

def in_a_pool(completions, start):
    with ProcessPoolExecutor(1, multiprocessing.get_context(start)) as pool:
        return list(pool.map(length, completions))

def alone(completions, **columns): return list(map(length, completions))
def fork(completions, **columns): return in_a_pool(completions, "fork")
def spawn(completions, **columns): return in_a_pool(completions, "spawn")
"""


def save_judge(folder, name: str, factor: int) -> str:
    """Save a reward file and a neighbor that it imports. It scores a text with its length times the factor."""
    neighbor = f"{folder.name}_{factor}"
    (folder / neighbor).mkdir()
    (folder / neighbor / f"{name}.py").write_text(JUDGE.format(neighbor=neighbor))
    (folder / neighbor / f"{neighbor}.py").write_text(f"factor = {factor}\n")
    return f"{folder}/{neighbor}/{name}.py"


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_reward_file_may_import_its_neighbor_and_use_processes(start, tmp_path, monkeypatch):
    """A second function of the same file, such as --eval_reward, may do so too."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = save_judge(tmp_path, f"judge_{start}", 2)
    for function in ("alone", start):
        reward = grpo.load_reward(grpo.Args(), f"{file}:{function}")
        assert reward(completions=["9", "9 +"]) == [2, 6]


def test_reward_files_with_the_name_of_another_module_or_of_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    files = [save_judge(tmp_path, *x) for x in (("json", 1), ("mine", 2), ("mine", 3))]
    rewards = [grpo.load_reward(grpo.Args(), f"{file}:alone") for file in files]
    assert [reward(completions=["9 +"]) for reward in rewards] == [[3], [6], [9]]
    assert importlib.import_module("json").loads("[1]") == [1]
    assert PathFinder.find_spec("json").origin == json.__file__  # not the file of the reward


def test_two_functions_of_a_file_are_of_one_module(tmp_path, monkeypatch):
    """Also with a relative path. Otherwise a judge that the file loads would be in memory twice."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two_of_one.py").write_text("def f(): pass\ndef g(): pass\n")
    f, g = (grpo.load_function(f"two_of_one.py:{name}") for name in "fg")
    assert f.__globals__ is g.__globals__


@pytest.mark.parametrize("case", [{"reward": "minus"}, {"reward_zscore": True}, {"missing_eos_penalty": 0.5}])
def test_maxrl_refuses_what_is_not_0_or_1(case, tmp_path, capsys):
    """With other scores, its advantages could have the wrong sign. The corrected command runs in the same folder."""
    (tmp_path / "mine.py").write_text(
        "def half(completions, **_): return [float(i % 2) for i in range(len(completions))]\n"
        "def minus(completions, **_): return [x - 1 for x in half(completions)]\n"
    )
    flags = {"dataset": write_jsonl(tmp_path / "data.jsonl", DATA), "run_dir": tmp_path / "run"}
    flags |= {"max_response_length": 2, "num_iterations": 1}
    wrong = {"reward": "half"} | case
    wrong["reward"] = f"{tmp_path}/mine.py:{wrong['reward']}"
    assert "scores of 0 and 1" in refused(capsys, run, "maxrl", **flags | wrong)
    assert not (tmp_path / "run" / "metrics.jsonl").read_text()
    run("maxrl", **flags, reward=f"{tmp_path}/mine.py:half")


def test_a_column_that_only_some_rows_have_is_none_in_the_others(tmp_path):
    """A reward that needs the column is called with it in each of four iterations, whatever the rows are."""
    rows = [{"prompt": f"{i} + 5 ?"} for i in range(8)]
    rows[0]["hint"] = "x"
    (tmp_path / "mine.py").write_text("def f(hint, **columns): return [float(x is None) for x in hint]")
    flags = {"dataset": write_jsonl(tmp_path / "rows.jsonl", rows), "reward": f"{tmp_path}/mine.py:f"}
    run("grpo", **flags, batch_size=16, num_iterations=4, run_dir=tmp_path / "run")


def test_a_reward_model_keeps_no_activations(monkeypatch):
    reward, seen, left_pad = grpo.load_reward(grpo.Args(device="cpu"), "toy/reward_model"), [], grpo.left_pad
    monkeypatch.setattr(grpo, "left_pad", lambda *x: seen.append(torch.is_grad_enabled()) or left_pad(*x))
    reward(["3 + 5 ?"], ["answer 8"], [False])
    assert seen == [False]
