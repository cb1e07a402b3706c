"""The identities of docs/exact.md, over every group or response of a small policy, and what makes a row of results."""

import re

import common
import learn
import torch
from exact import RATES, Tree, float64, kl_slopes, make_args, make_rollout, moments, one_token, slopes
from test_siblings import commit

import toy


def test_raft_and_maxrl_ascend_the_same_truncated_log_of_the_pass_rate():
    for script in ("raft", "maxrl"):
        torch.testing.assert_close(moments(script, 5)[0], (1 - (1 - RATES) ** 4) / RATES)


def test_grpo_of_two_responses_is_rloo_up_to_a_factor_and_the_length():
    """sqrt 2 smaller, except for the 1e-4 at the std, and divided by the number of tokens: response by response."""
    rollout = make_rollout([1, 0, 0, 0, 0, 1], lengths := torch.tensor([2, 5, 3, 3, 4, 1]))
    grpo, rloo = (slopes(x, make_args(x, samples_per_prompt=2), rollout, 6, 18) for x in ("grpo", "rloo"))
    torch.testing.assert_close(grpo * 2**0.5 * lengths[:, None], rloo, atol=0, rtol=1e-3)


def test_the_mean_squared_advantage_is_a_variance_of_the_scores():
    """Of the group's, k / (k - 1) times that within a prompt; of the batch's, that of all scores."""
    torch.testing.assert_close(8 * moments("rloo", 8)[1], RATES * (1 - RATES) * 8 / 7)
    scores = torch.tensor([1.0, 0, 0, 1, 0], **float64)
    slope = slopes("reinforce", make_args("reinforce"), one_token(scores), 1, 5)
    torch.testing.assert_close(slope.square().mean(), scores.var(unbiased=False))


def test_k1_in_the_reward_has_the_gradient_of_the_kl_and_k2_and_k3_only_near_the_reference():
    tree, generator = Tree(3, 4), torch.Generator().manual_seed(0)
    ref, noise = tree.random(2, generator).split(1)
    for is_near in (True, False):
        leaf = (ref + noise * (1e-4 if is_near else 1.0)).requires_grad_()
        new, old = tree.logprobs(leaf)[0], tree.logprobs(ref)[0]
        (kl,) = torch.autograd.grad(tree.kl(leaf, ref).sum(), leaf)
        for term in ("k1 in the reward", "k2 in the loss", "k3 in the loss"):
            push = -kl_slopes(term, old, new.detach()) * new.detach().sum(1, keepdim=True).exp()
            (found,) = torch.autograd.grad((new * push).sum(), leaf, retain_graph=True)
            assert ((found - kl).norm() < 1e-3 * kl.norm()) == (is_near or "k1" in term), term


def test_an_experiment_measures_what_has_no_row_and_names_its_commit(tmp_path, monkeypatch):
    """The rows have the order of the cells. A commit is clean if only results differ from it."""
    monkeypatch.setattr(common, "ROOT", tmp_path)
    monkeypatch.setattr(common, "RESULTS", tmp_path / "experiments" / "results")
    monkeypatch.setattr(common, "provenance", common.provenance.__wrapped__)  # without a cache
    common.RESULTS.mkdir(parents=True)
    for path in (tmp_path / "code.py", common.RESULTS / "mine.jsonl"):
        path.write_text("")
    commit(tmp_path)
    calls = []
    for cells in ([3], [1, 3], [2, 1, 3]):
        common.run_all("mine", [{"x": x} for x in cells], lambda _, x: calls.append(x) or {"y": x * x})
    rows = common.load("mine")
    assert calls == [3, 1, 2] and [(row["x"], row["y"]) for row in rows] == [(2, 4), (1, 1), (3, 9)]
    assert re.fullmatch("[0-9a-f]{7,}", rows[2]["commit"]) and rows[0].items() >= common.provenance().items()
    (tmp_path / "code.py").write_text("2\n")
    common.run_all("mine", [{"x": 4}], lambda _, x: {"y": x * x})
    commits = [row["commit"] for row in common.load("mine")]
    assert commits == [f"{commits[1]}-dirty", *3 * [commits[1]]]


def test_the_score_after_n_tokens_is_that_of_the_iteration_that_reaches_them():
    run = {"response_length": [10] * 9, "score": [*range(9)]}
    for count, expected in ((7, 4), (7.1, 5), (2, 0.5), (100, 6)):
        assert toy.after_tokens(toy.BATCH * 10 * count, run) == expected


def test_the_first_and_the_last_third_of_a_run():
    assert learn.thirds([1, 2, 3, 4, 5, 6, 7]) == [1.5, 6.5] and learn.thirds([4, 5]) == [4, 5]
