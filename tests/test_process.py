"""reinforce_pp_process.py: returns to go from a score for each token, which the reward gives, and the toy's rewards."""

import driver
import pytest
import references
import steps
import sync
import torch
import transformers
from conftest import ROOT, read_jsonl
from resume import without_clock
from zoo import recorded, refused, run

import reinforce_pp_process as script

REWARD = f"{ROOT}/toy/steps.py:right_steps"


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_advantages_equal_the_loops(beta):
    rollout = references.make_rollout(0, 8)
    rollout["token_scores"] = rollout.pop("values").round()  # some are 0; and no other score is read
    del rollout["scores"]
    args = script.Args(kl_coef=beta)
    expected = references.spread(
        references.reinforce_pp_process_advantages(args, rollout), rollout["response_mask"]
    )
    result = script.compute_advantages(args, rollout)["advantages"]
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-11)


def test_with_one_score_for_a_response_it_is_reinforce_pp(tmp_path):
    """To the last bit, also where responses are truncated."""
    flags = {"missing_eos_penalty": 0.5, "reward_scale": 2.0, "reward": f"{driver.__file__}:reward"}
    lines = []
    for name in ("reinforce_pp", "reinforce_pp_process"):
        run(name, run_dir=tmp_path / name, **flags)
        lines.append(without_clock(tmp_path / name / "metrics.jsonl"))
    assert lines[0] == lines[1] and 0 < lines[0][0]["truncated"] < 1


def test_each_token_has_its_score(tmp_path, monkeypatch):
    """After penalty, scale and clip. `score` is the sum over a response, before them."""
    calls = recorded(monkeypatch, script, "compute_advantages")
    flags = {"missing_eos_penalty": 0.5, "reward_scale": 2.0, "reward_clip": 1.5, "num_iterations": 1}
    run("reinforce_pp_process", run_dir=tmp_path, reward=REWARD, max_response_length=16, **flags)
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "toy" / "policy")
    answers = {row["prompt"]: row["answer"] for row in read_jsonl(ROOT / "toy" / "train.jsonl")}
    [((_, rollout), _)] = calls
    total = 0.0
    for i, (ids, mask) in enumerate(zip(rollout["sequences"], rollout["response_mask"])):
        words = [tokenizer.decode([token]) for token in ids[-16:][mask].tolist()]
        prompt = tokenizer.decode(ids[:-16], skip_special_tokens=True)
        [row] = steps.right_steps([prompt], [words], [answers[prompt]])
        total += sum(row)
        row[-1] -= 0.5 * (words[-1] != "<eos>")
        expected = [max(-1.5, min(2 * x, 1.5)) for x in row] + [0.0] * (16 - len(row))
        assert rollout["token_scores"][i].tolist() == expected
    assert rollout["raw_scores"].sum() == total > 0
    assert read_jsonl(tmp_path / "metrics.jsonl")[0]["score"] == pytest.approx(total / 16)


def test_scores_that_do_not_fit_are_refused(tmp_path, capsys):
    for name, body in {
        "short": "[[1.0] for _ in tokens]",
        "few": "[[1.0] * len(x) for x in tokens[1:]]",
    }.items():
        (tmp_path / f"{name}.py").write_text(f"def scores(tokens, **columns):\n    return {body}\n")
        flags = {"reward": f"{tmp_path}/{name}.py:scores", "run_dir": tmp_path / name}
        assert "--reward" in refused(capsys, run, "reinforce_pp_process", **flags)


def test_the_rewards_of_the_toy():
    """Result, answer and EOS of 3 + 5 - 2: scores of 1 at these positions."""
    for text, right, true in (
        ("think 3 + 5 = 8 - 2 = 6 answer 6 <eos>", [5, 9, 11], [5, 9, 11]),
        ("think 3 + 5 = 9 - 2 = 7 answer 7 <eos>", [], [9]),  # an error, and a result that follows from it
        ("think 3 + 5 = 8 + 0 = 8 - 2 = 6 answer 6", [5, 15], [5, 9, 13, 15]),  # a useless step
        ("think 8 = 6 = 6 answer 6 answer 5", [5], []),
        ("= 8 = 6 = 6 answer 6 <eos>", [1, 3, 7], [7]),
    ):
        for reward, ends in ((steps.right_steps, right), (steps.true_steps, true)):
            words = text.split()
            [scores] = reward(["3 + 5 - 2 ?"], [words], ["6"])
            assert [t for t, score in enumerate(scores) if score] == ends and len(scores) == len(words)


def test_it_takes_other_features_and_no_other_script_takes_it(tmp_path):
    block = sync.OWN.findall(sync.paths()["reinforce_pp_process"].read_text())[1]
    for feature in ("fsdp", "lora", "vllm"):
        assert block in sync.combine("reinforce_pp_process", [feature])
    for name, feature in (
        ("rloo", "process"),
        ("reinforce_pp", "process"),
        ("reinforce_pp_process", "tools"),
    ):
        with pytest.raises(ValueError, match="process"):
            sync.combine(name, [feature])
