"""The identities of docs/exact.md, over every group or response of a small policy."""

import exact
import pytest
import torch
from exact import RATES, Tree, float64, kl_slopes, make_args, make_rollout, moments, slopes, two_answers


@pytest.mark.parametrize("k", [2, 3, 8])
def test_raft_and_maxrl_have_the_same_expected_update(k):
    """With scores of 0 and 1, no KL, and the first of equals as the best. It ascends a truncated log of p."""
    raft, maxrl = moments("raft", k)[0], moments("maxrl", k)[0]
    torch.testing.assert_close(raft, maxrl, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(maxrl, (1 - (1 - RATES) ** (k - 1)) / RATES, atol=1e-12, rtol=1e-12)


def test_grpo_of_two_responses_is_rloo_up_to_a_factor_and_the_length():
    """sqrt 2 smaller, except for the 1e-4 at the std, and divided by the number of tokens: response by response."""
    scores = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 1.0], **float64)
    lengths = torch.tensor([2, 5, 3, 3, 4, 1])
    found = {}
    for script in ("grpo", "rloo"):
        args = make_args(script, samples_per_prompt=2)
        found[script] = slopes(script, args, make_rollout(scores, lengths), 6, int(lengths.sum()))
    torch.testing.assert_close(found["grpo"] * 2**0.5 * lengths[:, None], found["rloo"], atol=0, rtol=1e-3)


def test_the_std_of_one_group_is_grpo_and_that_of_many_groups_hardly_bends():
    grpo = moments("grpo", 8)[0]
    one, four, sixteen = (moments("reinforce_pp_baseline", 8, groups)[0] for groups in (1, 4, 16))
    torch.testing.assert_close(one / one.max(), grpo / grpo.max(), atol=0, rtol=1e-3)
    bends = [float(w.max() / w.min()) for w in (one, four, sixteen)]
    assert bends[0] > 1.4 > bends[1] > 1.1 > bends[2] > 1.02


def test_every_right_response_has_the_weight_of_reinforce():
    """RAFT of arXiv 2504.11343, and rloo, which is unbiased at every pass rate."""
    for w in (moments("reinforce", 8, all_right=True)[0], moments("rloo", 8)[0]):
        torch.testing.assert_close(w, torch.ones_like(w), atol=0, rtol=1e-12)


def test_with_two_answers_the_order_of_noise_is_reversed_on_easy_prompts():
    """As docs/exact.md says: the tokens of right responses have a small gradient there, against section 5's model."""
    ratio = {p: two_answers("raft", p) / two_answers("rloo", p) for p in (0.01, 0.5, 0.99)}
    assert ratio[0.01] > 1 > ratio[0.5] > ratio[0.99]


def policies():
    generator = torch.Generator().manual_seed(0)
    tree = Tree(3, 4)
    new, ref = tree.random(1, 1.0, generator), tree.random(1, 1.0, generator)
    return tree, new, ref, tree.logprobs(new)[0], tree.logprobs(ref)[0]


def expected_gradient(tree, new, penalty_slopes, logprobs):
    leaf = new.clone().requires_grad_()
    weights = penalty_slopes * logprobs.sum(1, keepdim=True).exp()
    return torch.autograd.grad((tree.logprobs(leaf)[0] * weights).sum(), leaf)[0]


def test_k1_in_the_reward_is_the_gradient_of_the_kl():
    tree, new, ref, logprobs, ref_logprobs = policies()
    slope = kl_slopes("k1 in the reward", ref_logprobs, logprobs, logprobs)
    found = -expected_gradient(tree, new, slope, logprobs)
    leaf = new.clone().requires_grad_()
    (exact_gradient,) = torch.autograd.grad(tree.kl(leaf, ref).sum(), leaf)
    torch.testing.assert_close(found, exact_gradient, atol=1e-12, rtol=1e-12)


def test_rho_times_k3_has_the_gradient_of_k2_sample_by_sample_on_policy():
    *_, logprobs, ref_logprobs = policies()
    terms = ("rho * k3 in the loss", "k2 in the loss", "k3 in the loss")
    rho_k3, k2, k3 = (kl_slopes(term, ref_logprobs, logprobs, logprobs) for term in terms)
    torch.testing.assert_close(rho_k3, k2, atol=1e-12, rtol=1e-12)
    assert not torch.allclose(k2, k3)


def test_k1_in_the_loss_has_no_expected_gradient():
    tree, new, _, logprobs, ref_logprobs = policies()
    slope = kl_slopes("k1 in the loss", ref_logprobs, logprobs, logprobs)
    found = expected_gradient(tree, new, slope, logprobs)
    torch.testing.assert_close(found, torch.zeros_like(found), atol=1e-12, rtol=0)


def test_without_knowing_that_it_is_wrong_no_script_makes_responses_longer():
    theta = torch.tensor([-1.0, -2.0], **float64)  # one logit of stopping, whether right or wrong
    for script in ("grpo", "rloo"):
        update = exact.length_update(script, theta, exact.length_advantages(script, False))
        assert update[0] > 0 and abs(update[1]) < 1e-12
    tells = torch.tensor([-1.0, -2.0, -2.0], **float64)
    update = exact.length_update("grpo", tells, exact.length_advantages("grpo", False))
    assert update[1] > 0 > update[2]  # right ones stop sooner, wrong ones later
