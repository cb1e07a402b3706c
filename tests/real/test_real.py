"""A real model, SmolLM2-135M, in rloo.py, and the result in other tools: make test-real.

Needs data/smollm2, the group test-real of pyproject.toml and 6 GB of memory. All tests share one small run.
"""

import gsm8k
import pytest
import reasoning
import reversal
import torch
import transformers
from conftest import ROOT, launch, read_jsonl, words_of, write_jsonl

import rloo

pytestmark = pytest.mark.real
MODEL = ROOT / "data" / "smollm2"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Paths for training and evaluation."""
    folder = tmp_path_factory.mktemp("data")
    rows = reversal.make_rows(reversal.Args(held_out=8, size=24))
    test = [row for row in rows["test"] if row["group"] == "3 words"]
    return write_jsonl(folder / "train.jsonl", rows["train"]), write_jsonl(folder / "test.jsonl", test)


@pytest.fixture(scope="module")
def rows(data):
    return read_jsonl(data[1])


@pytest.fixture(scope="module")
def result(data, tmp_path_factory):
    """The folder of a run of three iterations."""
    flags = {"model": MODEL, "dataset": data[0], "eval_dataset": data[1], "max_response_length": 16}
    flags |= {"batch_size": 8, "samples_per_prompt": 4, "micro_batch_size": 4, "learning_rate": 1e-5}
    flags |= {"num_iterations": 3, "eval_every": 3, "run_dir": tmp_path_factory.mktemp("run") / "run"}
    assert launch(ROOT / "rloo.py", *words_of(**flags), timeout=900).stderr == ""
    return flags["run_dir"]


def test_tied_embeddings_stay_tied_and_are_trained(result):
    before, after = (transformers.AutoModelForCausalLM.from_pretrained(x) for x in (MODEL, result / "model"))
    assert after.lm_head.weight.data_ptr() == after.model.embed_tokens.weight.data_ptr()
    weights = dict(before.named_parameters())
    assert all(not torch.equal(weights[name], x) for name, x in after.named_parameters())


def test_pipeline_opens_the_result(result, rows):
    path = str(result / "model")
    args = rloo.Args(model=path, max_response_length=16, device="cpu")
    auto = transformers.AutoModelForCausalLM
    model, tokenizer = rloo.load_model(args, "model", auto, torch.device("cpu"))
    chats = [row["prompt"] for row in rows]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True)["input_ids"]
    generated = rloo.generate(model, tokenizer, prompts, args, greedy=True)
    expected = rloo.decode(tokenizer, generated, skip_special_tokens=True)
    generate = transformers.pipeline("text-generation", path)
    found = [generate(chat, max_new_tokens=16, do_sample=False)[0]["generated_text"] for chat in chats]
    assert [chat[-1]["content"] for chat in found] == expected


def test_lm_eval_opens_the_result_and_finds_the_same_accuracy(result, rows, tmp_path):
    import lm_eval

    tokenizer = transformers.AutoTokenizer.from_pretrained(result / "model")
    texts = []
    for row in rows:
        text = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        texts.append({"text": text, "answer": row["answer"]})
    task = {"task": "reversal", "dataset_path": "json", "output_type": "generate_until", "test_split": "test"}
    task["dataset_kwargs"] = {"data_files": {"test": str(write_jsonl(tmp_path / "test.jsonl", texts))}}
    task |= {"doc_to_text": "{{text}}", "doc_to_target": "{{answer}}"}
    task["metric_list"] = [{"metric": "exact_match"}]
    task["generation_kwargs"] = {"until": ["<|im_end|>"], "max_gen_toks": 16, "do_sample": False}
    options = {"model": "hf", "model_args": {"pretrained": str(result / "model"), "dtype": "float32"}}
    found = lm_eval.simple_evaluate(tasks=[task], bootstrap_iters=0, device="cpu", **options)
    last = [line for line in read_jsonl(result / "metrics.jsonl") if "eval/score/3 words" in line][-1]
    assert found["results"]["reversal"]["exact_match,none"] == last["eval/score/3 words"]


def test_gsm8k_compares_numbers():
    said = ["Think. #### 1,000", "so #### $1000.0", "1000", "#### 100"]
    assert gsm8k.reward(said, ["1000"] * 4) == [1, 1, 0, 0]


def test_an_answer_that_is_half_right_counts_nothing():
    """A puzzle of reasoning-gym, scored by its own function, with and without tags."""
    args = reasoning.Args("knights_knaves", ("n_people=3",), ("n_people=2",), size=20, held_out=3)
    row = next(row for row in reasoning.make_rows(args)["train"] if "knight" in row["answer"])
    half = row["answer"].replace("knight", "knave", 1)
    assert half != row["answer"]
    said = [row["answer"], f"<think> {half} </think>\n<answer>{row['answer']}</answer>", half, "no idea"]
    columns = {name: [row[name]] * 4 for name in ("task", "entry")}
    assert reasoning.score(said, **columns) == [1, 1, 0, 0]
