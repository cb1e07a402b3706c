"""The three kinds of reward, and what happens to a score before it becomes a reward."""

import pytest
import torch
import transformers
from conftest import make_llama

PROMPTS = ["3 + 5 ?", "1 - 2 + 3 - 4 ?", "9 - 9 ?"]
RESPONSES = ["think 3 + 5 = 8 answer 8", "answer 8", "think 9 answer 1 answer 0"]


def as_rollout(tokenizer, prompts=PROMPTS, responses=RESPONSES):
    """rows, sequences, attention_mask, response_mask as generate gives them."""
    rows = [
        {"prompt": p, "prompt_ids": tokenizer(p)["input_ids"], "answer": a} for p, a in zip(prompts, "8 8 0".split())
    ]
    ids = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in responses]
    P, T = max(len(row["prompt_ids"]) for row in rows), max(map(len, ids))
    sequences, mask = torch.full((len(rows), P + T), tokenizer.pad_token_id), torch.zeros(len(rows), P + T).long()
    for i, (row, response) in enumerate(zip(rows, ids)):
        place = slice(P - len(row["prompt_ids"]), P + len(response))
        sequences[i, place] = torch.tensor(row["prompt_ids"] + response)
        mask[i, place] = 1
    return rows, sequences, mask, mask[:, P:].bool()


def test_exact_answer_is_what_comes_after_the_last_marker(script):
    completions = ["answer 8", "think answer 3 answer  8 ", "answer 8 or 9", "8", "answer", "answer a8", "Answer 8", ""]
    scores = script.exact_answer(completions, ["8"] * 8, answer_marker="answer")
    assert scores == [1, 1, -1, -1, -1, -1, -1, -1]
    assert script.exact_answer(["so #### 42"], [42], answer_marker="####") == [1]


MARKED = [  # marker, completion, answer, whether it is right
    ("####", "6 * 7 = <<6*7=42>>42\n#### 42", "Six times seven ...\n#### 42", True),  # GSM8K's own column
    ("####", "#### 41\n#### 42", "#### 42", True),
    ("####", "#### 42 apples", "42", False),
    ("####", "42", "42", False),
    (r"\boxed{", r"so \boxed{42}.", "42", True),
    (r"\boxed{", r"\boxed{\frac{1}{2}} is it", r"\frac{1}{2}", True),
    (r"\boxed{", r"\boxed{\frac{1}{2}} is it", r"\frac{1", False),
    (r"\boxed{", r"not \boxed{1} but \boxed{2}", "2", True),
    (r"\boxed{", r"not \boxed{1} but \boxed{2", "2", False),  # cut off before it closed
    ("<answer>", "<think>x</think> <answer> 42 </answer> ", "42", True),
    ("<answer>", "<answer>42", "42", False),
    ("<answer>", "<answer>Ann is a knight,\n Bob a knave</answer>", "Ann is a knight, Bob a knave", True),
    ("####", "#### 1,000", "1000.0", True),
    ("####", "#### $1,000.", 1000, True),
    ("####", "#### $12$", 12.0, True),
    (r"\boxed{", r"\boxed{\$18}", "18", True),
    ("####", "#### -$5", "-5", True),
    ("####", "#### 4$2", "42", False),
    ("####", "#### -.5", "-0.50", True),
    ("####", "#### +3", "3", True),
    ("####", "#### 1,2", "12", False),  # no thousands: a pair
    ("####", "#### 12", "1,2", False),
    ("####", "#### 10000000000000000000001", "10000000000000000000002", False),  # one float
    ("####", "#### 1e3", "1000", False),  # nobody writes an answer so, and 1e999999999 would be a trap
    ("####", "#### nan", "nan", True),  # as text
    ("####", "#### ٣", "3", False),
    ("####", "#### 5", "", False),
    ("####", "####", "####", False),
]


@pytest.mark.parametrize("marker, completion, answer, right", MARKED)
def test_exact_answer_knows_marks_braces_tags_and_numbers(marker, completion, answer, right):
    import grpo

    assert grpo.exact_answer([completion], [answer], answer_marker=marker) == [1.0 if right else -1.0]


def test_rule_scores_the_sampled_text(script, tokenizer):
    args = script.Args()
    reward = script.load_reward(args, torch.device("cpu"))
    scores = script.score(args, reward, tokenizer, *as_rollout(tokenizer))
    assert scores.tolist() == [1.0, 1.0, 1.0] and scores.dtype == torch.float32
    rows, *tensors = as_rollout(tokenizer)
    for row in rows:
        row["answer"] = "7"
    assert script.score(args, reward, tokenizer, rows, *tensors).tolist() == [-1.0, -1.0, -1.0]


def test_function_gets_prompts_completions_and_columns(script, tokenizer, tmp_path):
    """TRL's signature, so that a function written for it works here."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import math\n"
        "def length(prompts, completions, answer, **kwargs):\n"
        "    assert prompts[0] == '3 + 5 ?' and answer == ['8', '8', '0'] and not kwargs\n"
        "    return [math.sqrt(len(text.split())) for text in completions]\n"
    )
    args = script.Args(reward=f"{file}:length")
    reward = script.load_reward(args, torch.device("cpu"))
    scores = script.score(args, reward, tokenizer, *as_rollout(tokenizer))
    assert scores.tolist() == pytest.approx([8**0.5, 2**0.5, 6**0.5])
    assert not list(tmp_path.glob("__pycache__"))


@pytest.mark.parametrize("body", ["[1.0]", "[[1.0]] * 3"])
def test_function_that_returns_nonsense_is_refused(script, tokenizer, tmp_path, capsys, body):
    (tmp_path / "bad.py").write_text(f"def f(**kwargs):\n    return {body}\n")
    args = script.Args(reward=f"{tmp_path}/bad.py:f")
    reward = script.load_reward(args, torch.device("cpu"))
    with pytest.raises(SystemExit) as exit:
        script.score(args, reward, tokenizer, *as_rollout(tokenizer))
    assert exit.value.code == 2 and "3 numbers" in capsys.readouterr().err


def make_reward_model(folder, tokenizer, pad_token_id=0, **options):
    torch.manual_seed(0)
    config = make_llama(len(tokenizer)).config
    config.update({"num_labels": 1, "pad_token_id": pad_token_id, **options})
    transformers.LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def unpadded_scores(folder, lists_of_ids) -> list[float]:
    """Each sequence by itself through the saved model. Its pad id is set to one that does not occur: by transformers'
    rule the score stands at the last token that is not padding, which would skip an EOS that is the pad id too."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    model.config.pad_token_id = 0
    with torch.no_grad():
        return [float(model(torch.tensor([ids])).logits[0, 0]) for ids in lists_of_ids]


@pytest.mark.parametrize("pad_token_id", [0, 1, None])  # its own, the EOS, none at all
@pytest.mark.parametrize("micro_batch_size", [1, 64])
def test_reward_model_with_the_same_tokenizer(script, tokenizer, tmp_path, pad_token_id, micro_batch_size):
    make_reward_model(tmp_path, tokenizer, pad_token_id)
    args = script.Args(reward=str(tmp_path), micro_batch_size=micro_batch_size)
    rows, sequences, attention_mask, response_mask = as_rollout(tokenizer)
    reward = script.load_reward(args, torch.device("cpu"))
    scores = script.score(args, reward, tokenizer, rows, sequences, attention_mask, response_mask)
    plain = [ids[mask.bool()].tolist() for ids, mask in zip(sequences, attention_mask)]
    torch.testing.assert_close(scores, torch.tensor(unpadded_scores(tmp_path, plain)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("template", [None, "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"])
def test_reward_model_with_another_tokenizer_reads_the_text(script, tokenizer, tmp_path, template):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", "<unk>", "user", "assistant", "answer", "think", *"9876543210", "?", "+", "-", "="]
    other = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    other.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    other = transformers.PreTrainedTokenizerFast(tokenizer_object=other, pad_token="<pad>", eos_token="<eos>")
    other.chat_template = template
    make_reward_model(tmp_path, other)
    args = script.Args(reward=str(tmp_path))
    reward = script.load_reward(args, torch.device("cpu"))
    scores = script.score(args, reward, tokenizer, *as_rollout(tokenizer))
    texts = [f"{p} {r}" for p, r in zip(PROMPTS, RESPONSES)]
    if template:
        texts = [f"user {p} assistant {r}" for p, r in zip(PROMPTS, RESPONSES)]
    expected = unpadded_scores(tmp_path, [[*other(text)["input_ids"], other.eos_token_id] for text in texts])
    torch.testing.assert_close(scores, torch.tensor(expected), rtol=0, atol=1e-5)


def test_scores_are_processed_in_order(script):
    scores, truncated = torch.tensor([1.0, -1.0, 3.0]), torch.tensor([False, True, False])
    process = lambda **flags: script.process_scores(script.Args(**flags), scores, truncated)  # noqa: E731
    assert torch.equal(process(), scores)
    assert process(missing_eos_penalty=0.5).tolist() == [1.0, -1.5, 3.0]
    assert process(missing_eos_penalty=0.5, reward_scale=2.0).tolist() == [2.0, -3.0, 6.0]
    assert process(missing_eos_penalty=0.5, reward_scale=2.0, reward_clip=2.5).tolist() == [2.0, -2.5, 2.5]
    z = process(missing_eos_penalty=0.5, reward_scale=2.0, reward_zscore=True)
    assert z.mean().item() == pytest.approx(0, abs=1e-6) and z.std(correction=0).item() == pytest.approx(1, abs=1e-6)
    clipped = process(reward_zscore=True, reward_clip=1.0)
    assert clipped.max() == 1.0 and clipped.min() == -1.0  # clipped after the z-score, or nothing would be


@pytest.mark.parametrize("schedule, last", [("constant", 1.0), ("linear", 0.1), ("cosine", 0.0245)])
def test_learning_rate(script, schedule, last):
    args = script.Args(learning_rate=2.0, num_iterations=10, lr_schedule=schedule, warmup_iterations=0)
    assert script.learning_rate_at(args, 1) == 2.0
    assert script.learning_rate_at(args, 10) == pytest.approx(2 * last, rel=0.01)
    args = script.Args(learning_rate=2.0, num_iterations=10, warmup_iterations=3)
    assert [script.learning_rate_at(args, i) for i in (1, 2, 3, 4, 5)] == [0.5, 1.0, 1.5, 2.0, 2.0]
