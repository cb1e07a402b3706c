"""reinforce_pp_process.py: returns to go from a score for each token, which the reward gives, and the toy's rewards."""

from itertools import pairwise

import driver
import pytest
import references
import steps
import tokenizers
import torch
import transformers
from resume import without_clock
from zoo import recorded, refused, run

import reinforce_pp_process as script


def word_lengths(tokens, **columns):
    return [[float(len(word)) for word in words] for words in tokens]


def test_advantages_equal_the_loops():
    rollout = references.make_rollout(0, 8)
    rollout["token_scores"] = rollout.pop("values").round()  # some are 0
    del rollout["scores"]  # not read
    args, mask = script.Args(kl_coef=0.3), rollout["response_mask"]
    expected = references.spread(references.reinforce_pp_process_advantages(args, rollout), mask)
    result = script.compute_advantages(args, rollout)["advantages"]
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-11)


def test_with_one_score_for_a_response_it_is_reinforce_pp(tmp_path):
    """To the last bit, also where responses are truncated."""
    flags = {"missing_eos_penalty": 0.5, "reward_scale": 2.0, "reward": f"{driver.__file__}:reward"}
    for name in ("reinforce_pp", "reinforce_pp_process"):
        run(name, run_dir=tmp_path / name, **flags)
    lines, expected = (without_clock(folder / "metrics.jsonl") for folder in sorted(tmp_path.iterdir()))
    assert lines == expected and 0 < lines[0]["truncated"] < 1


def test_each_token_has_its_score(tmp_path, monkeypatch, tokenizer):
    """After penalty, scale and clip. The raw score is the sum over a response."""
    calls = recorded(monkeypatch, script, "compute_advantages")
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


def llama2_tokenizer():
    """Decoded alone, a token loses the space before it."""
    words = ["<unk>", "<eos>", *("▁" + word for word in "think 3 + 5 = 8 answer".split())]
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, "<unk>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    parts = tokenizers.decoders
    core.decoder = parts.Sequence([parts.Replace("▁", " "), parts.Fuse(), parts.Strip(" ", 1, 0)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


def byte_tokenizer():
    """A token for each byte, so that most characters of other alphabets are several tokens."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    core = tokenizers.Tokenizer(tokenizers.models.BPE({x: i for i, x in enumerate(sorted(alphabet))}, []))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core)


def test_the_texts_of_the_tokens_join_to_the_response(tokenizer):
    """A space belongs to the token after it, and a character to its last token. The last one here is incomplete."""
    text = "think 3 + 5 = 8 answer 8"
    for its_tokenizer in (tokenizer, llama2_tokenizer()):
        texts = script.token_texts(its_tokenizer, torch.tensor(its_tokenizer(text)["input_ids"]))
        assert texts == ["think", " 3", " +", " 5", " =", " 8", " answer", " 8"]
    ids = torch.tensor(byte_tokenizer()("aé = 3€ 数")["input_ids"])
    for end in range(1, len(ids) + 1):
        assert "".join(script.token_texts(byte_tokenizer(), ids[:end])) == byte_tokenizer().decode(ids[:end])
    assert script.token_texts(byte_tokenizer(), ids)[:4] == ["a", "", "é", " "]


@pytest.mark.parametrize("too_many", [-1, 1])
def test_a_list_of_another_length_is_refused(too_many, tmp_path, capsys):
    """Also if the lists together have as many numbers as the rollout has tokens."""
    (tmp_path / "wrong.py").write_text(
        "def lists(tokens, **columns):\n"
        "    lists = [[0.0] * len(texts) for texts in tokens]\n"
        f"    lists[0] = [0.0] * (len(tokens[0]) + {too_many})\n"
        f"    lists[1] = [0.0] * (len(tokens[1]) - {too_many})\n"
        "    return lists\n"
    )
    flags = {"reward": f"{tmp_path}/wrong.py:lists", "run_dir": tmp_path / "run"}
    said = refused(capsys, run, "reinforce_pp_process", **flags)
    assert "lists of other lengths than `tokens`" in said


def test_the_rewards_of_the_toy():
    """Which words have a score of 1: a useless step, an error and what follows from it, results without equations."""
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
