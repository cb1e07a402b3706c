"""reinforce_pp_process.py: returns to go from a score for each token, which the reward gives, and the toy's rewards."""

import driver
import references
import steps
import torch
from resume import without_clock
from zoo import recorded, run

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
        scores = [float(len(tokenizer.decode([token]))) for token in ids[mask].tolist()]
        assert rollout["raw_scores"][i] == sum(scores)
        scores[-1] -= 0.5 * float(rollout["truncated"][i])
        expected = [min(2 * x, 9.5) for x in scores] + [0.0] * (8 - len(scores))
        assert rollout["token_scores"][i].tolist() == expected


def test_the_rewards_of_the_toy():
    """Which words have a score of 1: a useless step, an error and what follows from it, results without equations."""
    for response, right, true in (
        ("think 3 + 5 = 8 + 0 = 8 - 2 = 6 answer 6 <eos>", [5, 15], [5, 9, 13, 15]),
        ("think 3 + 5 = 9 - 2 = 7 answer 7", [], [9]),
        ("think 8 = 6 = 6 answer 6 answer 5", [5], []),
    ):
        words = response.split()
        for reward, expected in ((steps.right_steps, right), (steps.true_steps, true)):
            scores = reward(prompts=["3 + 5 - 2 ?"], tokens=[words], answer=["6"])
            assert scores == [[float(t in expected) for t in range(len(words))]]
