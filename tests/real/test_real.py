"""A real model, SmolLM2-135M: rloo.py's result in transformers' pipeline, and the rewards of data/ (make test-real).

Needs data/smollm2, the group test-real of pyproject.toml and 6 GB of memory.
"""

import gsm8k
import pytest
import reasoning
import reversal
import torch
import transformers
from conftest import ROOT, launch, words_of, write_jsonl

import rloo

pytestmark = pytest.mark.real
MODEL = ROOT / "data" / "smollm2"


def test_pipeline_opens_the_result(tmp_path):
    """After a run of three iterations. SmolLM2's output layer is tied to its embeddings."""
    rows = reversal.make_rows(reversal.Args(held_out=8, size=24))
    test = [row for row in rows["test"] if row["group"] == "3 words"]
    flags = {"dataset": write_jsonl(tmp_path / "train.jsonl", rows["train"])}
    flags |= {"eval_dataset": write_jsonl(tmp_path / "test.jsonl", test), "eval_every": 3}
    flags |= {"batch_size": 8, "samples_per_prompt": 4, "micro_batch_size": 4, "learning_rate": 1e-5}
    flags |= {"model": MODEL, "max_response_length": 16, "num_iterations": 3, "run_dir": tmp_path / "run"}
    assert launch(ROOT / "rloo.py", *words_of(**flags), timeout=900).stderr == ""

    path = str(tmp_path / "run" / "model")
    args = rloo.Args(model=path, max_response_length=16, device="cpu")
    auto = transformers.AutoModelForCausalLM
    model, tokenizer = rloo.load_model(args, "model", auto, torch.device("cpu"))
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    chats = [row["prompt"] for row in test]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True)["input_ids"]
    generated = rloo.generate(model, tokenizer, prompts, args, greedy=True)
    expected = rloo.decode(tokenizer, generated, skip_special_tokens=True)
    generate = transformers.pipeline("text-generation", path)
    found = [generate(chat, max_new_tokens=16, do_sample=False)[0]["generated_text"] for chat in chats]
    assert [chat[-1]["content"] for chat in found] == expected


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
