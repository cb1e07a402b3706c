"""sdpo.py: which demonstration a response gets, and what its teacher has read."""

import torch
from zoo import make_model, make_tokenizer, refused, run

import sdpo

PROMPTS = ["3 + 5 ?", "9 - 9 + 1 ?"]
# Two groups of three; in the first, two are right. The second has none.
RESPONSES = ["answer 8", "answer 7", "think 3 + 5 = 8 answer 8", "answer 2", "think", "answer 3 answer"]
RIGHT = [1.0, 0.0, 1.0, 0.0, 0.5, 0.0]


def teach(model, tokenizer, prompts=PROMPTS, **columns):
    """What teach() returns for these responses, with the old log-probs -1, and the ids of the responses."""
    rows = [{"prompt": prompt} | columns for prompt in prompts for _ in range(3)]
    prompt_ids, prompt_mask = sdpo.left_pad([sdpo.token_ids(tokenizer, row["prompt"]) for row in rows], "cpu")
    responses = [tokenizer(text, add_special_tokens=False)["input_ids"] + [1] for text in RESPONSES]
    padded = torch.tensor([response + [0] * (9 - len(response)) for response in responses])
    mask = padded > 0
    rollout = {
        "sequences": torch.cat([prompt_ids, padded], dim=1),
        "attention_mask": torch.cat([prompt_mask, mask.long()], dim=1),
        "response_mask": mask,
        "old_logprobs": -1.0 * mask,
        "raw_scores": torch.tensor(RIGHT),
    }
    args = sdpo.Args(samples_per_prompt=3, max_response_length=9, device="cpu", micro_batch_size=2)
    return sdpo.teach(args, model, tokenizer, rows, rollout), responses


@torch.no_grad()
def check(found, model, context: list[int], response: list[int]) -> None:
    """The log-probs of a response are those after this context, from one forward pass of this text alone."""
    logits = model(torch.tensor([context + response])).logits[0, len(context) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
    torch.testing.assert_close(found[: len(response)], expected)
    assert (found[len(response) :] == 0).all()


def test_a_response_is_rated_after_another_right_one_of_its_group():
    """The first right response sees the second one and the others the first. A group without one keeps its own."""
    model, tokenizer = make_model("llama"), make_tokenizer()
    result, responses = teach(model, tokenizer)
    for i, j in enumerate((2, 0, 0)):
        context = tokenizer(f"{RESPONSES[j]} {PROMPTS[0]}")["input_ids"]
        check(result["teacher_logprobs"][i], model, context, responses[i])
    assert result["has_demonstration"].tolist() == [True] * 3 + [False] * 3
    assert result["teacher_logprobs"][3:].unique().tolist() == [-1.0, 0.0]  # the old ones


def test_the_column_comes_first():
    """In chat messages the demonstration stands in the last one."""
    model, tokenizer = make_model("llama"), make_tokenizer(chat=True)
    prompts = [[{"role": "user", "content": text}] for text in PROMPTS]
    result, responses = teach(model, tokenizer, prompts, demonstration="answer 4")
    for i, response in enumerate(responses):
        context = tokenizer(f"<bos> <user> answer 4 {PROMPTS[i // 3]} <end> <model>")["input_ids"]
        check(result["teacher_logprobs"][i], model, context, response)


def test_a_template_without_a_place_for_the_demonstration_is_refused(tmp_path, capsys):
    flags = {"template": "{prompt}", "success_score": 0.0, "run_dir": tmp_path}
    assert "--template {prompt}: add {demonstration}" in refused(capsys, run, "sdpo", **flags)
