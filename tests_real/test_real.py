"""A real model in the scripts, and the scripts' result in other tools: SmolLM2-135M, by `make test-real`.

Needs data/smollm2, what requirements-test-real.txt lists, and 6 GB of memory. A small run of rloo.py is shared by all.
"""

import os
import signal
import sys
from types import SimpleNamespace

import pytest
import soak
import torch
import transformers
from conftest import ROOT, launch, read_jsonl, write_jsonl

import rloo

sys.path.insert(0, str(ROOT / "data"))
import gsm8k
import reasoning

MODEL = ROOT / "data" / "smollm2"
CPU = torch.device("cpu")
ENV = os.environ | {"OMP_NUM_THREADS": "1"}
ARGS = rloo.Args(model=str(MODEL), max_response_length=16)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    made = reasoning.make_rows(reasoning.Args(held_out=8, size=24))
    rows = [row for row in made["test"] if row["group"] == "3 words"]
    return SimpleNamespace(
        train=write_jsonl(folder / "train.jsonl", made["train"]),
        test=write_jsonl(folder / "test.jsonl", rows),
        rows=rows,
    )


@pytest.fixture(scope="module")
def flags(data):
    words = f"--model {MODEL} --dataset {data.train} --eval_dataset {data.test} --max_response_length 16 --batch_size 8"
    words += " --samples_per_prompt 4 --micro_batch_size 4 --num_iterations 3 --learning_rate 1e-5 --save_every 1"
    return [*words.split(), "--eval_every", "3"]


@pytest.fixture(scope="module")
def result(flags, tmp_path_factory):
    """The folder of a run of three iterations."""
    folder = tmp_path_factory.mktemp("run") / "run"
    assert launch(ROOT / "rloo.py", *flags, "--run_dir", folder, env=ENV, timeout=900).stderr == ""
    return folder


@pytest.fixture(scope="module")
def loaded():
    return rloo.load(ARGS, transformers.AutoModelForCausalLM, "model", ARGS.model, CPU)


def greedy(model, tokenizer, rows) -> list[str]:
    prompts = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"] for row in rows]
    generated = rloo.generate(model, tokenizer, prompts, ARGS, greedy=True)
    return rloo.decode(tokenizer, generated, skip_special_tokens=True)


def test_a_killed_run_goes_on_to_the_last_bit(flags, result, tmp_path):
    killed = soak.start("rloo", 1, tmp_path / "killed", *flags, kill="torn checkpoint:2")
    assert soak.end(killed, tmp_path / "killed") == -signal.SIGKILL
    launch(ROOT / "rloo.py", *flags, "--run_dir", tmp_path / "killed", env=ENV, timeout=900)
    assert soak.differences(result, tmp_path / "killed") == []


def test_the_template_writes_a_system_prompt_where_there_is_none(loaded, tmp_path):
    model, tokenizer = loaded
    turn = {"role": "user", "content": "2 + 2 ="}
    own = [{"role": "system", "content": "Be short."}, turn]
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": [turn]}, {"prompt": own}])
    rows = rloo.load_rows(ARGS, "dataset", str(path), "train", model, tokenizer)
    texts = [tokenizer.decode(row["prompt_ids"]) for row in rows]
    assert ["named SmolLM" in text for text in texts] == [True, False]
    assert all(text.count("system\n") == 1 and text.endswith("<|im_start|>assistant\n") for text in texts)


def test_a_response_ends_at_either_of_two_eos(loaded, data, monkeypatch):
    model, tokenizer = loaded
    comma = tokenizer(",")["input_ids"][0]
    monkeypatch.setattr(model.generation_config, "eos_token_id", [tokenizer.eos_token_id, comma])
    short = greedy(model, tokenizer, data.rows)
    monkeypatch.undo()
    assert short == [text.partition(",")[0] + "," for text in greedy(model, tokenizer, data.rows)]


def test_tied_embeddings_stay_tied_and_are_trained(result):
    before, after = (transformers.AutoModelForCausalLM.from_pretrained(x) for x in (MODEL, result / "model"))
    assert after.lm_head.weight.data_ptr() == after.model.embed_tokens.weight.data_ptr()
    weights = dict(before.named_parameters())
    assert all(not torch.equal(weights[name], x) for name, x in after.named_parameters())


def test_log_probs_are_those_of_a_plain_forward(loaded, data):
    model, tokenizer = loaded
    text = tokenizer.apply_chat_template(data.rows[0]["prompt"], add_generation_prompt=True)["input_ids"]
    ids = torch.tensor([text + tokenizer(data.rows[0]["answer"])["input_ids"] + [tokenizer.eos_token_id]])
    T = ids.shape[1] - len(text)
    with torch.no_grad():
        expected = (model(ids).logits[0, -T - 1 : -1] / 0.7).log_softmax(-1).gather(1, ids[0, -T:, None]).T
        batch = {"sequences": ids, "attention_mask": torch.ones_like(ids)}
        batch["response_mask"] = torch.ones(1, T, dtype=torch.bool)
        found = rloo.token_logprobs(model, batch, 0.7)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_the_first_ratio_is_one_in_float32(loaded, data):
    model, tokenizer = loaded
    prompts = [tokenizer.apply_chat_template(r["prompt"], add_generation_prompt=True)["input_ids"] for r in data.rows]
    torch.manual_seed(1)
    rollout = rloo.generate(model, tokenizer, prompts, ARGS)
    with torch.no_grad():
        again = rloo.token_logprobs(model, rollout, 1.0)
    assert 0 < float((again - rollout["old_logprobs"]).abs().max()) < 1e-4


def test_pipeline_opens_the_result(result, data):
    model, tokenizer = rloo.load(ARGS, transformers.AutoModelForCausalLM, "model", str(result / "model"), CPU)
    generate = transformers.pipeline("text-generation", str(result / "model"))
    said = [generate(row["prompt"], max_new_tokens=16, do_sample=False)[0]["generated_text"] for row in data.rows]
    assert [chat[-1]["content"] for chat in said] == greedy(model, tokenizer, data.rows)


def test_lm_eval_opens_the_result_and_finds_the_same_accuracy(result, data, tmp_path):
    lm_eval = pytest.importorskip("lm_eval")
    tokenizer = transformers.AutoTokenizer.from_pretrained(result / "model")
    template = {"add_generation_prompt": True, "tokenize": False}
    rows = [{"text": tokenizer.apply_chat_template(r["prompt"], **template), "answer": r["answer"]} for r in data.rows]
    task = {"task": "reversal", "dataset_path": "json", "output_type": "generate_until", "test_split": "test"}
    task["dataset_kwargs"] = {"data_files": {"test": str(write_jsonl(tmp_path / "test.jsonl", rows))}}
    task |= {"doc_to_text": "{{text}}", "doc_to_target": "{{answer}}", "metric_list": [{"metric": "exact_match"}]}
    task["generation_kwargs"] = {"until": ["<|im_end|>"], "max_gen_toks": 16, "do_sample": False}
    options = {"model": "hf", "model_args": {"pretrained": str(result / "model"), "dtype": "float32"}, "device": "cpu"}
    found = lm_eval.simple_evaluate(tasks=[task], bootstrap_iters=0, **options)["results"]["reversal"]
    last = [line for line in read_jsonl(result / "metrics.jsonl") if "eval/score/3 words" in line][-1]
    assert found["exact_match,none"] == last["eval/score/3 words"]


def test_trl_opens_the_result_and_goes_on(result, data, tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    options = {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 4, "max_steps": 1}
    options |= {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "learning_rate": 1e-5}
    trainer = trl.GRPOTrainer(
        str(result / "model"),
        reward_funcs=lambda completions, **_: [float(i) for i, _ in enumerate(completions)],
        args=trl.GRPOConfig(str(tmp_path), **options),
        train_dataset=datasets.Dataset.from_list([{"prompt": row["prompt"]} for row in data.rows]),
    )
    start = transformers.AutoModelForCausalLM.from_pretrained(result / "model").state_dict()
    assert all(torch.equal(x, start[name]) for name, x in trainer.model.named_parameters())
    trainer.train()
    assert any(not torch.equal(x, start[name]) for name, x in trainer.model.named_parameters())


@pytest.mark.parametrize("said, right", [("#### 1,000", 1), ("so #### $1000.0", 1), ("1000", 0), ("#### 100", 0)])
def test_gsm8k_compares_numbers(said, right):
    assert gsm8k.reward(["Think. " + said], ["1000"]) == [right]


def test_an_answer_that_is_half_right_counts_nothing():
    """The puzzles of reasoning-gym, by their own scorer, with and without tags."""
    args = reasoning.Args(
        "knights_knaves", ("n_people=3",), ("n_people=2", "n_people=3"), size=3, held_out=3, think=True
    )
    rows = reasoning.make_rows(args)
    row = rows["train"][0]
    first, *rest = row["answer"].split(", ")
    name, role = first.split(" is a ")
    other = next(
        x.split(" is a ")[1] for r in rows["train"] for x in r["answer"].strip(".").split(", ") if role not in x
    )
    half = ", ".join([f"{name} is a {other}", *rest])
    said = [row["answer"], f"<think> {half} </think>\n<answer>{row['answer']}</answer>", half, "no idea"]
    columns = {name: [row[name]] * 4 for name in ("answer", "task", "entry")}
    assert reasoning.score(said, **columns) == [1, 1, 0, 0]
    assert {r["group"] for r in rows["test"]} == {"n_people=2", "n_people=3", "plain questions"}
