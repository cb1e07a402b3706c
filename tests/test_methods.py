"""Tests of what some scripts compute outside their estimator block: dapo, gkd, sdpo and reinforce_pp_process."""

from itertools import pairwise, product

import driver
import pytest
import references
import steps
import tokenizers
import torch
import transformers
from conftest import ROOT, read_jsonl, write_jsonl
from zoo import make_model, make_tokenizer, recorded, refused, run, save

import dapo
import gkd
import reinforce_pp_process as process
import sdpo

# dapo.py: which groups are trained on. test_ranks.py tests two ranks.

ENDS = ["- 9 + 8 - 4 ?", "- 9 + 8 - 5 ?", *(f"+ {i} ?" for i in range(10))]  # prompts of different widths
PROMPTS = [
    f"{first} {last}" for first, last in product("3124", ENDS)
]  # scores differ after those 12 with a 3


@pytest.fixture
def run_dapo(monkeypatch, tmp_path):
    """Run dapo.py with 4 groups of 8 in a batch. Return what compute_advantages gets, and the metrics."""

    def run_with(prompts, **flags):
        flags["dataset"] = write_jsonl(tmp_path / "data.jsonl", [{"prompt": prompt} for prompt in prompts])
        flags["reward"] = f"{driver.__file__}:reward_of_threes"
        calls = recorded(monkeypatch, dapo, "compute_advantages")
        flags = {"batch_size": 32, "max_response_length": 12} | flags
        run("dapo", **flags, run_dir=tmp_path / "run")
        return [rollout for (_, rollout), _ in calls], read_jsonl(tmp_path / "run" / "metrics.jsonl")

    return run_with


def mixed(rollout) -> list[bool]:
    """For each group, whether its scores differ."""
    groups = rollout["raw_scores"].view(-1, 8)
    return (groups.amax(1) > groups.amin(1)).tolist()


def test_dapo_trains_on_groups_whose_raw_scores_differ(run_dapo, tokenizer, tmp_path):
    """The two penalties make the scores of every group differ, but not the raw scores."""
    penalties = {"overlong_buffer": 12, "missing_eos_penalty": 0.5}
    rollouts, lines = run_dapo(PROMPTS, num_iterations=3, max_rollouts=50, log_every=1, **penalties)
    for rollout, line in zip(rollouts, lines, strict=True):
        assert len(rollout["scores"]) == 32 and all(mixed(rollout))
        # Each response keeps its own score when the rollouts are joined.
        texts = tokenizer.batch_decode(dapo.response_ids(rollout), skip_special_tokens=True)
        assert rollout["raw_scores"].tolist() == [len(text) % 3 for text in texts]
        # Before the last rollout, there were fewer than 4 such groups.
        found = round(line["rollouts"] * 4 * (1 - line["equal_groups"]), 3)
        assert line["rollouts"] > 1 and found in (4, 5, 6, 7)
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert samples and all(sample["prompt"].startswith("3 ") for sample in samples)


def test_dapo_draws_further_prompts_at_random(run_dapo, monkeypatch):
    calls = recorded(monkeypatch, dapo, "generate")
    run_dapo([f"1 + {i} ?" for i in range(40)], num_iterations=1, max_rollouts=3)
    prompts = [ids for args, _ in calls[1:] for ids in args[3]]
    assert len(prompts) == 8 and prompts != sorted(prompts, key=lambda ids: (len(ids), ids))


def test_dapo_draws_no_prompt_twice_for_a_batch(run_dapo, monkeypatch):
    """Of 5 prompts, the first rollout uses 4 and the second one the last. Then there is nothing left to draw."""
    calls = recorded(monkeypatch, dapo, "generate")
    _, (line,) = run_dapo([f"1 + {i} ?" for i in range(5)], num_iterations=1, max_rollouts=30)
    prompts = [tuple(ids) for args, _ in calls for ids in args[3]]
    assert len(prompts) == len(set(prompts)) == 5 and line["rollouts"] == 5 / 4


def test_dapo_fills_a_batch_with_other_groups_after_max_rollouts(run_dapo):
    """The responses to a prompt stay together. Among so many responses, a sort that is not stable mixes them."""
    ((rollout,), (line,)) = run_dapo(PROMPTS, num_iterations=1, max_rollouts=2, batch_size=128)
    assert len(rollout["scores"]) == 128 and line["rollouts"] == 2
    assert mixed(rollout) == sorted(mixed(rollout), reverse=True) and 0 < sum(mixed(rollout)) < 16
    prompts = rollout["sequences"][:, :-12].view(16, 8, -1)  # (groups, k, P)
    assert (prompts == prompts[:, :1]).all() and len(prompts[:, 0].unique(dim=0)) == 16


# gkd.py: its loss is a sum over probabilities, and main compares two models.


@pytest.mark.parametrize("beta", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 3, 9])
def test_loss_and_gradient_of_gkd_equal_the_loops(beta, top_k):
    """Of 7 tokens, the k likeliest of the teacher and the rest are k + 1 outcomes. A larger k means all 7."""
    torch.manual_seed(0)
    student, teacher = (3 * torch.randn(2, 4, 5, 7, dtype=torch.float64)).log_softmax(-1).requires_grad_()
    batch = {"all_logprobs": student, "teacher_all_logprobs": teacher}
    batch["response_mask"] = torch.rand(4, 5) < 0.7
    args = gkd.Args(beta=beta, top_k=top_k)
    loss, _ = gkd.policy_loss(args, batch, None, 4, 13)
    expected, _ = references.gkd_loss(args, batch, None, 4, 13)
    gradients = [torch.autograd.grad(x, student, retain_graph=True)[0] for x in (loss, expected)]
    torch.testing.assert_close([loss, gradients[0]], [expected, gradients[1]], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_teacher_of_gkd_keeps_no_activations_and_computes_in_dtype(dtype, tmp_path, monkeypatch):
    seen, response_distribution = [], gkd.response_distribution

    def stand_in(*args):
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return response_distribution(*args)

    monkeypatch.setattr(gkd, "response_distribution", stand_in)
    run("gkd", run_dir=tmp_path / "run", num_iterations=1, dtype=dtype)
    assert {*seen} == {(is_student, dtype == "bfloat16") for is_student in (True, False)}


def test_an_update_of_gkd_compares_both_models_at_the_temperature(tmp_path, monkeypatch):
    """Micro-batches have padded rows. For the comparison, each model reads each response alone."""
    calls = recorded(monkeypatch, gkd, "policy_loss")
    run("gkd", run_dir=tmp_path, temperature=0.7, beta=0.3, num_iterations=1, micro_batch_size=5)
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert {*checkpoint} == {"policy", "optimizer", "iteration"}  # and not the teacher, which is frozen
    paths = [ROOT / "toy" / name for name in ("teacher", "policy")]
    models = [transformers.AutoModelForCausalLM.from_pretrained(path) for path in paths]
    for (_, batch, _, _, num_tokens), (loss, _) in calls:
        expected = 0.0
        for ids, attended, mask in zip(*(batch[x] for x in ("sequences", "attention_mask", "response_mask"))):
            ids, n = ids[attended.bool()][None], int(mask.sum())
            distributions = [(model(ids).logits[0, -n - 1 : -1] / 0.7).softmax(-1) for model in models]
            expected += sum(references.gkd_divergence(0.3, p, q) for p, q in zip(*distributions)) / num_tokens
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-7)


# sdpo.py: the teacher of a response is the policy, which has read a demonstration before the prompt.

SDPO_PROMPTS = ["3 + 5 ?", "9 - 9 + 1 ?"]
# Two groups of three responses. Two responses of the first group are right, and none of the second group.
RESPONSES = ["answer 8", "answer 7", "think 3 + 5 = 8 answer 8", "answer 2", "think", "answer 3 answer"]
SCORES = [1.0, 0.0, 1.0, 0.0, 0.5, 0.0]


def teach(model, tokenizer, prompts=SDPO_PROMPTS, **columns):
    """Return the result of sdpo.teach for RESPONSES, whose old log-probs are -1, and their ids."""
    rows = [{"prompt": prompt} | columns for prompt in prompts for _ in range(3)]
    prompt_ids, prompt_mask = sdpo.left_pad([sdpo.token_ids(tokenizer, row["prompt"]) for row in rows], "cpu")
    responses = [tokenizer(text, add_special_tokens=False)["input_ids"] + [1] for text in RESPONSES]
    padded = torch.tensor([response + [0] * (9 - len(response)) for response in responses])
    mask = padded > 0
    rollout = {"sequences": torch.cat([prompt_ids, padded], dim=1), "response_mask": mask}
    rollout["attention_mask"] = torch.cat([prompt_mask, mask.long()], dim=1)
    rollout |= {"old_logprobs": -1.0 * mask, "raw_scores": torch.tensor(SCORES)}
    args = sdpo.Args(samples_per_prompt=3, max_response_length=9, device="cpu", micro_batch_size=2)
    args.chat_template_kwargs = {"think": True}
    return sdpo.teach(args, model, tokenizer, rows, rollout), responses


@torch.no_grad()
def assert_logprobs(found, model, context: list[int], response: list[int]) -> None:
    """Compare the log-probs of a response with a forward pass over the context and this response alone."""
    logits = model(torch.tensor([context + response])).logits[0, len(context) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
    torch.testing.assert_close(found[: len(response)], expected)
    assert (found[len(response) :] == 0).all()


def test_sdpo_demonstrates_with_another_right_response_of_the_group():
    """The first right response is the demonstration for the others, and the second one for the first.

    In a group without a right response, the teacher's log-probs are the old ones.
    """
    model, tokenizer = make_model("llama"), make_tokenizer()
    result, responses = teach(model, tokenizer)
    for i, j in enumerate((2, 0, 0)):
        context = tokenizer(f"{RESPONSES[j]} {SDPO_PROMPTS[0]}")["input_ids"]
        assert_logprobs(result["teacher_logprobs"][i], model, context, responses[i])
    assert result["has_demonstration"].tolist() == [True] * 3 + [False] * 3
    assert result["teacher_logprobs"][3:].unique().tolist() == [-1.0, 0.0]


def test_sdpo_prefers_the_demonstration_of_the_dataset():
    """In a chat, the demonstration is in the last message. The template gets the options of flag and row."""
    model, tokenizer = make_model("llama"), make_tokenizer(chat=True)
    tokenizer.chat_template = "{{ '+' if think }} {{ '-' if mine }} " + tokenizer.chat_template
    prompts = [[{"role": "user", "content": text}] for text in SDPO_PROMPTS]
    columns = {"demonstration": "answer 4", "chat_template_kwargs": {"mine": True}}
    result, responses = teach(model, tokenizer, prompts, **columns)
    for i, response in enumerate(responses):
        context = tokenizer(f"+ - <bos> <user> answer 4 {SDPO_PROMPTS[i // 3]} <end> <model>")["input_ids"]
        assert_logprobs(result["teacher_logprobs"][i], model, context, response)


def test_sdpo_refuses_a_template_without_a_place_for_the_demonstration(tmp_path, capsys):
    flags = {"template": "{prompt}", "success_score": 0.0, "run_dir": tmp_path}
    assert "--template {prompt}: add {demonstration}" in refused(capsys, run, "sdpo", **flags)


def save_teacher(folder, vocab_size=None, tokens=(), **changes) -> str:
    """Save the toy's teacher with another number of outputs, more tokens, or changes of its config."""
    teacher = transformers.AutoModelForCausalLM.from_pretrained(ROOT / "toy" / "teacher")
    teacher.resize_token_embeddings(vocab_size, mean_resizing=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "toy" / "teacher")
    tokenizer.add_tokens([*tokens])
    teacher.config.update(changes)
    return save(folder, teacher, tokenizer)


SHORT = {"max_position_embeddings": 6}
TEACHERS = {
    "gkd": (SHORT, "--teacher", "tokens, but the model has 6 positions"),
    "distill": (SHORT, "--teacher", "tokens, but the model has 6 positions"),
    "sdpo": (None, "--template", "249 tokens, but the model has 128 positions"),
    "gkd, outputs": ({"vocab_size": 24}, "--teacher has 24", "--model 19"),
    "gkd, tokens": ({"vocab_size": 19, "tokens": ["more"]}, "--teacher", "with the tokens of --model"),
    "distill, tokens": ({"vocab_size": 19, "tokens": ["more"]}, "--teacher", "with the tokens of --model"),
}


@pytest.mark.parametrize("case", TEACHERS)
def test_a_teacher_that_cannot_read_the_texts_is_refused(case, tmp_path, capsys):
    """It has too few positions for a prompt and its response, or other outputs or tokens than the policy."""
    rows = [{"prompt": "3 + 5 ?", "answer": "8", "demonstration": "3 + " * 120}] * 16
    flags = {"dataset": write_jsonl(tmp_path / "data.jsonl", rows), "run_dir": tmp_path / "run"}
    changes, *expected = TEACHERS[case]
    if changes:
        flags["teacher"] = save_teacher(tmp_path / "teacher", **changes)
    said = refused(capsys, run, case.partition(",")[0], **flags, max_response_length=5)
    assert all(words in said for words in expected), said
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


# reinforce_pp_process.py: the reward returns a score for each token.


def word_lengths(tokens, **columns):
    return [[float(len(word)) for word in words] for words in tokens]


def test_advantages_of_process_rewards_equal_the_loops():
    rollout = references.make_rollout(0, 8)
    rollout["token_scores"] = rollout.pop("values").round()  # some are 0
    del rollout["scores"]  # which the script does not read
    args, mask = process.Args(kl_coef=0.3), rollout["response_mask"]
    expected = references.spread(references.reinforce_pp_process_advantages(args, rollout), mask)
    result = process.compute_advantages(args, rollout)["advantages"]
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-11)


def test_each_token_has_its_score(tmp_path, monkeypatch, tokenizer):
    """Penalty, scale and clip come later. The raw score is the sum of a response."""
    calls = recorded(monkeypatch, process, "compute_advantages")
    flags = {"missing_eos_penalty": 0.5, "reward_scale": 2.0, "reward_clip": 9.5, "num_iterations": 1}
    run("reinforce_pp_process", run_dir=tmp_path, reward=f"{__file__}:word_lengths", **flags)
    [((_, rollout), _)] = calls
    for i, (ids, mask) in enumerate(zip(rollout["sequences"][:, -8:], rollout["response_mask"])):
        ends = [len(tokenizer.decode(ids[mask][:t])) for t in range(1 + int(mask.sum()))]
        scores = [float(end - start) for start, end in pairwise(ends)]
        assert rollout["raw_scores"][i] == sum(scores)
        scores[-1] -= 0.5 * float(rollout["truncated"][i])
        expected = [min(2 * x, 9.5) for x in scores] + [0.0] * (8 - len(scores))
        assert rollout["token_scores"][i].tolist() == expected


def byte_tokenizer():
    """Return a tokenizer with a token for each byte, so that most characters of other alphabets are several."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    core = tokenizers.Tokenizer(tokenizers.models.BPE({x: i for i, x in enumerate(sorted(alphabet))}, []))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core)


def test_the_texts_of_the_tokens_join_to_the_response(tokenizer):
    """A space belongs to the token after it, and a character to its last token. The last one may be incomplete."""
    texts = process.token_texts(tokenizer, torch.tensor(tokenizer("think 3 + 5 = 8 answer 8")["input_ids"]))
    assert texts == ["think", " 3", " +", " 5", " =", " 8", " answer", " 8"]
    ids = torch.tensor(byte_tokenizer()("aé = 3€ 数")["input_ids"])
    for end in range(1, len(ids) + 1):
        assert "".join(process.token_texts(byte_tokenizer(), ids[:end])) == byte_tokenizer().decode(ids[:end])
    assert process.token_texts(byte_tokenizer(), ids)[:4] == ["a", "", "é", " "]


def test_a_list_of_another_length_is_refused(tmp_path, capsys):
    """Here the lists together have as many numbers as the rollout has tokens."""
    (tmp_path / "wrong.py").write_text(
        "def lists(tokens, **columns):\n"
        "    first, second, *others = ([0.0] * len(texts) for texts in tokens)\n"
        "    return [first + [0.0], second[1:], *others]\n"
    )
    flags = {"reward": f"{tmp_path}/wrong.py:lists", "run_dir": tmp_path / "run"}
    said = refused(capsys, run, "reinforce_pp_process", **flags)
    assert "lists of other lengths than `tokens`" in said


def test_the_process_rewards_of_the_toy():
    """The numbers are the places of the words that score 1. right_steps also wants the steps of the prompt."""
    for response, right, true in (
        ("think 3 + 5 = 8 + 0 = 8 - 2 = 6 answer 6 <eos>", [5, 15], [5, 9, 13, 15]),
        ("think 3 + 5 = 9 - 2 = 7 answer 7", [], [9]),
        ("think 8 = 6 = 6 answer 6 answer 5", [5], []),
    ):
        words = response.split()
        for reward, expected in ((steps.right_steps, right), (steps.true_steps, true)):
            for tokens in (words, [words[0], *(f" {word}" for word in words[1:])]):
                scores = reward(prompts=["3 + 5 - 2 ?"], tokens=[tokens], answer=["6"])
                assert scores == [[float(t in expected) for t in range(len(words))]]
