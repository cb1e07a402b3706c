"""The identities of docs/exact.md, over every group or response of a small policy."""

import exact
import pytest
import torch
from exact import RATES, Tree, float64, kl_slopes, make_args, make_rollout, moments, slopes

CLOSE = dict(atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("k", [3, 8])
def test_raft_and_maxrl_have_the_same_expected_update(k):
    """With scores of 0 and 1, no KL, and the first of equals as the best. It ascends a truncated log of p."""
    raft, maxrl = moments("raft", k)[0], moments("maxrl", k)[0]
    torch.testing.assert_close(raft, maxrl, **CLOSE)
    torch.testing.assert_close(maxrl, (1 - (1 - RATES) ** (k - 1)) / RATES, **CLOSE)


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


def test_the_expected_gradients_of_kl_terms():
    """k1 in the reward has that of the KL, k1 in the loss none; on policy, rho * k3 has that of k2 in each sample."""
    tree, generator = Tree(3, 4), torch.Generator().manual_seed(0)
    new, ref = (tree.random(1, 1.0, generator) for _ in range(2))
    leaf = new.requires_grad_()
    logprobs, ref_logprobs = tree.logprobs(leaf)[0], tree.logprobs(ref)[0]

    def slopes_of(term):
        return kl_slopes(term, ref_logprobs, logprobs.detach(), logprobs.detach())

    def expected_gradient(term):
        weights = slopes_of(term) * logprobs.detach().sum(1, keepdim=True).exp()
        return torch.autograd.grad((logprobs * weights).sum(), leaf, retain_graph=True)[0]

    (exact_gradient,) = torch.autograd.grad(tree.kl(leaf, ref).sum(), leaf)
    torch.testing.assert_close(-expected_gradient("k1 in the reward"), exact_gradient, **CLOSE)
    torch.testing.assert_close(expected_gradient("k1 in the loss"), torch.zeros_like(leaf), **CLOSE)
    k2 = slopes_of("k2 in the loss")
    torch.testing.assert_close(slopes_of("rho * k3 in the loss"), k2, **CLOSE)
    assert not torch.allclose(slopes_of("k3 in the loss"), k2)


def test_without_knowing_that_it_is_wrong_no_script_makes_responses_longer():
    theta = torch.tensor([-1.0, -2.0], **float64)  # one logit of stopping, whether right or wrong
    for script in ("grpo", "rloo"):
        update = exact.length_update(script, theta, exact.length_advantages(script, False))
        assert update[0] > 0 and abs(update[1]) < 1e-12
    tells = torch.tensor([-1.0, -2.0, -2.0], **float64)
    update = exact.length_update("grpo", tells, exact.length_advantages("grpo", False))
    assert update[1] > 0 > update[2]  # right ones stop sooner, wrong ones later
