"""sdpo.py: which demonstration a response gets, and what its teacher has read."""

import pytest
import torch
from zoo import make_model, make_tokenizer, refused, run

import sdpo

PROMPTS = ["3 + 5 ?", "9 - 9 + 1 ?"]
# Two groups of three; in the first, two are right. The second has none, and then a demonstration in its row.
RESPONSES = ["answer 8", "answer 7", "think 3 + 5 = 8 answer 8", "answer 2", "think", "answer 3 answer"]
RIGHT = [1.0, 0.0, 1.0, 0.0, 0.5, 0.0]
T = 9


def taught(tokenizer, model, prompts=PROMPTS, **columns):
    """What teach() returns for these responses, with the old log-probs -1."""
    args = sdpo.Args(samples_per_prompt=3, max_response_length=T, device="cpu", micro_batch_size=2)
    rows = [{"prompt": prompt} | columns for prompt in prompts for _ in range(3)]
    ids = [sdpo.token_ids(tokenizer, row["prompt"]) for row in rows]
    responses = [tokenizer(text, add_special_tokens=False)["input_ids"] + [1] for text in RESPONSES]
    sequences, attention_mask = sdpo.left_pad(ids, "cpu")
    padded = torch.tensor([response + [0] * (T - len(response)) for response in responses])
    mask = torch.tensor([[t < len(response) for t in range(T)] for response in responses])
    rollout = {
        "sequences": torch.cat([sequences, padded], dim=1),
        "attention_mask": torch.cat([attention_mask, mask.long()], dim=1),
        "response_mask": mask,
        "old_logprobs": -1.0 * mask,
        "raw_scores": torch.tensor(RIGHT),
    }
    return sdpo.teach(args, model, tokenizer, rows, rollout), responses, mask


def expected(model, context: list[int], response: list[int]) -> torch.Tensor:
    """The log-probs of the response after a context, from one forward pass of this text alone."""
    with torch.no_grad():
        logits = model(torch.tensor([context + response])).logits[0]
    return logits.log_softmax(-1)[len(context) - 1 : -1].gather(1, torch.tensor(response)[:, None])[:, 0]


def check_row(found, i, model, context, response):
    torch.testing.assert_close(found[i, : len(response)], expected(model, context, response))
    assert (found[i, len(response) :] == 0).all()


def test_a_response_is_rated_after_another_right_one_of_its_group():
    """The first right response sees the second one and the others the first. A group without one has advantage 0."""
    model, tokenizer = make_model("llama"), make_tokenizer()
    result, responses, mask = taught(tokenizer, model)
    for i, j in enumerate((2, 0, 0)):
        context = tokenizer(f"{RESPONSES[j]} {PROMPTS[0]}")["input_ids"]
        check_row(result["teacher_logprobs"], i, model, context, responses[i])
    assert result["has_demonstration"].tolist() == [True] * 3 + [False] * 3
    rollout = result | {"old_logprobs": -1.0 * mask}
    advantages = sdpo.compute_advantages(None, rollout)["advantages"]
    assert (advantages[3:] == 0).all() and (advantages[:3][mask[:3]] != 0).all()


@pytest.mark.parametrize("chats", [False, True])
def test_the_column_comes_first(chats):
    """In chat messages the demonstration stands in the last one."""
    model, tokenizer = make_model("llama"), make_tokenizer(chat=True)
    prompts = [[{"role": "user", "content": text}] for text in PROMPTS] if chats else PROMPTS
    result, responses, _ = taught(tokenizer, model, prompts, demonstration="answer 4")
    assert result["has_demonstration"].all()
    for i, response in enumerate(responses):
        text = f"answer 4 {PROMPTS[i // 3]}"
        text = f"<bos> <user> {text} <end> <model>" if chats else text
        context = tokenizer(text, add_special_tokens=False)["input_ids"]
        check_row(result["teacher_logprobs"], i, model, context, response)


def test_a_template_without_a_place_for_the_demonstration_is_refused(tmp_path, capsys):
    flags = {"template": "{prompt}", "success_score": 0.0, "run_dir": tmp_path}
    assert "--template {prompt}: add {demonstration}" in refused(capsys, run, "sdpo", **flags)
