"""A run of grpo.py, observed from outside: which functions it calls when, with which rows, and what it logs.

The flags of the run differ from the defaults. Further tests cover what shows only in bfloat16.
"""

import importlib
from itertools import chain, pairwise
from types import SimpleNamespace

import datasets
import pytest
import torch
import transformers
from conftest import ROOT, read_jsonl, write_jsonl
from zoo import STAGE_DATA, few, held_out, make_model, make_tokenizer, recorded, refused, run, run_stage, save

import grpo
import ppo

REWARDS = """
def longer(completions, **_): return [float(len(x)) for x in completions]
def held_out(completions, **_): return [7.0] * len(completions)
"""
SECONDS = {"generate": 1, "score": 10, "policy_loss": 100, "evaluate": 1000, "log_samples": 10_000}
WATCHED = [*SECONDS, "choose_rows", "measure", "log", "save_checkpoint", "save_model", "optimizer_step"]
FLAGS = {"num_iterations": 5, "batch_size": 24, "samples_per_prompt": 2, "num_minibatches": 4}
FLAGS |= {"update_epochs": 3, "log_every": 2, "save_every": 3, "eval_every": 2, "reward_scale": 3.0}
FLAGS |= {"missing_eos_penalty": 0.5, "max_prompt_length": 6, "max_response_length": 9}
SAVES = ["save_model", "save_checkpoint"]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """The calls of a run, in order, as (name, arguments, result), and its folder.

    The clock only moves by the seconds that SECONDS assigns to a call. Dataset and eval_dataset are two splits of one
    folder. Its prompts have up to 8 tokens, and one is empty.
    """
    folder, calls, clock = tmp_path_factory.mktemp("one"), [], [0.0]
    (folder / "data").mkdir()
    (folder / "mine.py").write_text(REWARDS)
    for split, first in (("train", "3"), ("test", "5")):
        numbers = [str(i) for i in (*range(10), *range(10, 20), *range(100, 105))]
        texts = [f"{' + '.join([first, *digits])} ?" for digits in numbers]  # of 4, 6 and 8 tokens
        rows = [{"prompt": x, "answer": "1", "group": x[4:5]} for x in [*texts, " "]]
        write_jsonl(folder / "data" / f"{split}.jsonl", rows)

    def watched(name, function):
        def stand_in(*args, **options):
            result = function(*args, **options)
            if name == "generate":
                result["row"] = torch.arange(len(result["truncated"]))
            clock[0] += SECONDS.get(name, 0)
            calls.append(SimpleNamespace(name=name, args=args, result=result))
            return result

        return stand_in

    rewards = {x: f"{folder}/mine.py:{y}" for x, y in (("reward", "longer"), ("eval_reward", "held_out"))}
    with pytest.MonkeyPatch.context() as patch:
        for name in WATCHED:
            patch.setattr(grpo, name, watched(name, getattr(grpo, name)))
        patch.setattr(grpo, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
        data = {"dataset": f"{folder}/data", "eval_dataset": f"{folder}/data"}
        run("grpo", run_dir=folder / "run", **FLAGS | rewards | data)
    return calls, folder / "run"


def named(calls, *names):
    return [call for call in calls if call.name in names]


def iterations(calls) -> list:
    """The calls of each iteration."""
    starts = [i for i, call in enumerate(calls) if call.name == "choose_rows"]
    return [calls[first:end] for first, end in pairwise([*starts, len(calls)])]


def test_each_pass_has_every_response_once_in_a_new_order(seen):
    """There are update_epochs passes of num_minibatches steps each."""
    for calls in iterations(seen[0]):
        steps = [call.args[1]["row"].tolist() for call in named(calls, "policy_loss")]
        assert len(steps) == len(named(calls, "optimizer_step")) == 12
        passes = [steps[i : i + 4] for i in (0, 4, 8)]
        assert all(sorted(chain(*x)) == [*range(24)] for x in passes)
        parts = {str(sorted(map(sorted, x))) for x in [*passes, [[*range(i, i + 6)] for i in (0, 6, 12, 18)]]}
        assert len(parts) == 4


def test_prompts_of_the_right_length_come_from_their_split(seen):
    """They have from one to max_prompt_length tokens. Each evaluation uses all of them."""
    trained = [row for call in named(seen[0], "choose_rows") for row in call.result]
    evaluated = [call.args[4] for call in named(seen[0], "evaluate")]
    for rows, first in ((trained, "3"), (evaluated[0], "5")):
        prompts = {row["prompt"] for row in rows}
        assert len(prompts) == 20 and {x[0] for x in prompts} == {first}
        assert {len(x.split()) for x in prompts} == {4, 6}
    assert len(evaluated[0]) == 20 and evaluated == evaluated[:1] * 4


def test_each_evaluation_uses_the_held_out_reward(seen):
    lines = read_jsonl(seen[1] / "metrics.jsonl")
    scores = {line["iteration"]: [x for key, x in line.items() if "eval/score" in key] for line in lines}
    assert scores == {0: [7.0] * 10, 1: [], 2: [7.0] * 10, 3: [], 4: [7.0] * 10, 5: [7.0] * 10}
    assert all(line["score"] != 7.0 for line in lines[1:])


def test_times_are_those_of_what_they_name(seen):
    """sampling_seconds leaves the reward out. Tokens per second and the time left include reward and update."""
    for calls, line in zip(iterations(seen[0]), read_jsonl(seen[1] / "metrics.jsonl")[1:], strict=True):
        tokens = named(calls, "measure")[0].args[1]["response_mask"].sum().item()
        assert line["sampling_seconds"] == 1
        assert line["tokens_per_second"] == pytest.approx(tokens / 1211)
        [log] = named(calls, "log")
        assert log.args[4] == 1211 * (5 - line["iteration"])


def test_a_sample_is_a_response_to_its_prompt_with_its_raw_score(seen, tokenizer):
    samples = read_jsonl(seen[1] / "samples.jsonl")
    assert [sample["iteration"] for sample in samples] == [2, 2, 2, 4, 4, 4]
    for i in (2, 4):
        calls = iterations(seen[0])[i - 1]
        rollout, scored = named(calls, "generate")[0], named(calls, "score")[0]
        masks = rollout.result["response_mask"]
        ids = [x[-9:][mask] for x, mask in zip(rollout.result["sequences"], masks)]
        prompts = tokenizer.batch_decode([x for x in rollout.args[3] for _ in range(2)])
        all_rows = [*zip(prompts, tokenizer.batch_decode(ids), scored.result.tolist())]
        found = [(x["prompt"], x["response"], x["score"]) for x in samples if x["iteration"] == i]
        assert {*found} <= {*all_rows} and len({x[0] for x in found}) == 3


def test_a_checkpoint_comes_after_the_lines_and_the_model_of_its_iteration(seen):
    """Otherwise a resumed run would lack what a kill in between has prevented."""
    order = [[x.name for x in named(calls, "log", "log_samples", *SAVES)] for calls in iterations(seen[0])]
    sampled, saved = ["log", "log_samples"], ["log", *SAVES]
    assert order == [["log"], sampled, saved, sampled, saved]
    assert [call.args[1] for call in named(seen[0], "save_checkpoint")] == [3, 5]


def test_local_data_is_not_cached(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "train.jsonl", [{"prompt": "3 ?"}])
    assert grpo.read_rows("", str(tmp_path / "data"), "train") == [{"prompt": "3 ?"}]
    assert not [path for path in tmp_path.rglob("*.arrow")]


def test_a_dataset_can_have_a_configuration_and_a_split_of_its_own(tmp_path, capsys):
    files = "\n".join(f"  - {{split: {x}, path: {x}.jsonl}}" for x in ("train", "train_prefs"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}\n---\n")
    for name in ("train", "train_prefs"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": name}])
    names = {":main": "train", ":main:train_prefs": "train_prefs", "::train_prefs": "train_prefs"}
    for name, split in names.items():
        assert grpo.read_rows("", f"{tmp_path}{name}", "train") == [{"prompt": split}]
    for name in (":other", ":main:other"):
        error = refused(capsys, grpo.read_rows, "--dataset d", f"{tmp_path}{name}", "train")
        assert "--dataset d" in error and "main" in error and "openai/gsm8k:main:train" in error


def test_as_many_prompts_as_a_rollout_needs_are_enough(tmp_path):
    """A prompt that is too long for the model does not matter if it is not used."""
    rows = [{"prompt": "3 ?"}, {"prompt": "4 ?"}, {"prompt": "3 + " * 2000}]
    data = str(write_jsonl(tmp_path / "data.jsonl", rows))
    assert len(grpo.load_rows(grpo.Args(), data, "train", make_model("llama"), make_tokenizer(), 2)) == 2


# bfloat16


def half(folder, name, source):
    """A copy of a model, saved in bfloat16 as most models of the hub are."""
    auto = getattr(transformers, f"AutoModelFor{name}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    return save(folder, auto.from_pretrained(source).bfloat16(), tokenizer)


def watched_passes(monkeypatch, module) -> list:
    """For each forward pass of a model that a script loads: whether autocast is on, and the dtype of its weights."""
    passes, load_model = [], module.load_model

    def watch(*args):
        model, tokenizer = load_model(*args)
        is_on, of_weights = torch.is_autocast_enabled, lambda part: next(part.parameters()).dtype
        model.base_model.register_forward_pre_hook(lambda x, _: passes.append((is_on("cpu"), of_weights(x))))
        return model, tokenizer

    monkeypatch.setattr(module, "load_model", watch)
    return passes


@pytest.mark.parametrize("script", [grpo, ppo], ids=["grpo", "ppo"])
def test_a_run_in_bfloat16_has_float32_weights_and_passes_under_autocast(script, tmp_path, monkeypatch):
    """Policy, reference, critic and reward model are saved in bfloat16. Scores keep their digits."""
    policy = half(tmp_path / "policy", "CausalLM", ROOT / "toy" / "policy")
    judge = half(tmp_path / "judge", "SequenceClassification", ROOT / "toy" / "reward_model")
    passes = watched_passes(monkeypatch, script)
    scored = recorded(monkeypatch, script, "score")
    flags = {"model": policy, "reward": judge, "dtype": "bfloat16", "num_iterations": 1}
    run(script.__name__, run_dir=tmp_path / "run", **flags)
    assert len(passes) > 10 and {*passes} == {(True, torch.float32)}
    [(_, scores)] = scored
    assert not torch.equal(scores, scores.bfloat16().float())
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", dtype="auto")
    assert saved.dtype == torch.float32


@pytest.mark.parametrize("name", STAGE_DATA)
def test_a_stage_in_bfloat16_has_float32_weights_and_passes_under_autocast(name, tmp_path, monkeypatch):
    module = importlib.import_module(name)
    policy = half(tmp_path / "policy", "CausalLM", ROOT / "toy" / "policy")
    passes = watched_passes(monkeypatch, module)
    scores = recorded(monkeypatch, module, "pair_scores") if name == "reward_model" else []
    data = few(name, 16, tmp_path)
    flags = held_out(name, data, 8) | {"dataset": data, "batch_size": 8, "num_epochs": 1}
    run_stage(module, model=policy, dtype="bfloat16", run_dir=tmp_path / "run", **flags)
    assert len(passes) >= 3 and {*passes} == {(True, torch.float32)}
    for _, both in scores:
        x = torch.cat([*both])
        assert not torch.equal(x, x.bfloat16().float())


def test_a_temperature_divides_logits_of_bfloat16_in_float32():
    logits = torch.randn(50, 30).bfloat16()
    expected = (logits.float() / 0.7).log_softmax(-1)
    with grpo.autocast(grpo.Args(dtype="bfloat16", device="cpu")):
        torch.testing.assert_close(grpo.log_distribution(logits, 0.7), expected, rtol=0, atol=1e-6)
