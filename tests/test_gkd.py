"""gkd.py: its divergence over probabilities, and what its main gives to it."""

from types import SimpleNamespace

import pytest
import references
import torch
import transformers
from conftest import ROOT
from zoo import recorded, run

import distill
import gkd

EXACT = dict(rtol=1e-10, atol=1e-12)


def distributions(*shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of a student, which are differentiable, and of a teacher."""
    student, teacher = (3 * torch.randn(2, *shape, dtype=torch.float64)).log_softmax(-1)
    return student.requires_grad_(), teacher


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 3, 6, 7])
def test_the_divergence_and_its_gradient_are_those_of_probabilities(beta, top_k):
    """Over 7 tokens. The k likeliest of the teacher and the rest are k + 1 outcomes, with 6 or 7 of them all tokens."""
    torch.manual_seed(0)
    student, teacher = distributions(4, 5, 7)
    mask = torch.rand(4, 5) < 0.7
    batch = {"response_mask": mask, "all_logprobs": student, "teacher_all_logprobs": teacher}
    args = gkd.Args(beta=beta, top_k=top_k)
    loss, stats = gkd.policy_loss(args, batch, None, 4, 13)
    expected, _ = references.gkd_loss(
        SimpleNamespace(beta=beta, top_k=top_k if top_k < 6 else 0), batch, None, 4, 13
    )
    torch.testing.assert_close(loss, expected, **EXACT)
    gradients = [torch.autograd.grad(x, student)[0] for x in (loss, expected)]
    torch.testing.assert_close(*gradients, **EXACT)
    assert not stats["policy_loss"].requires_grad
    if not top_k:
        at_tokens = gkd.divergence(args, student, teacher)
        assert (at_tokens >= 0).all() and (gkd.divergence(args, teacher, teacher).abs() < 1e-15).all()
        torch.testing.assert_close(at_tokens[mask].sum() / 13, loss, **EXACT)


@pytest.mark.parametrize("beta", [1e-8, 1 - 1e-8])
def test_the_ends_are_limits(beta):
    """Of D / beta, and of D / (1 - beta)."""
    torch.manual_seed(0)
    student, teacher = distributions(100, 7)
    near, end = (gkd.divergence(gkd.Args(beta=x), student, teacher) for x in (beta, round(beta)))
    torch.testing.assert_close(near / min(beta, 1 - beta), end, rtol=0.01, atol=1e-4)


def test_at_beta_1_the_gradient_is_what_distill_estimates():
    """The mean of distill.py's loss over all tokens that could be sampled has the same gradient."""
    torch.manual_seed(0)
    logits, teacher = torch.randn(2, 7, dtype=torch.float64)
    logits.requires_grad_()
    student, teacher = logits.log_softmax(0), teacher.log_softmax(0)
    rollout = {"ref_logprobs": teacher, "old_logprobs": student.detach()}
    batch = distill.compute_advantages(None, rollout)
    batch["advantages"] = batch["advantages"] * student.exp().detach()  # the chance of each token
    mean_loss, _ = distill.policy_loss(None, batch, student, 1, 1)
    divergence = gkd.divergence(gkd.Args(beta=1.0), student, teacher)
    gradients = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (mean_loss, divergence)]
    torch.testing.assert_close(*gradients, **EXACT)


def test_an_update_compares_both_models_at_the_temperature(tmp_path, monkeypatch):
    """In main, in micro-batches of padded rows. Each response is read once more, alone."""
    calls = recorded(monkeypatch, gkd, "policy_loss")
    flags = {"temperature": 0.7, "beta": 0.3, "num_iterations": 1, "micro_batch_size": 5}
    run("gkd", run_dir=tmp_path, **flags)
    paths = [ROOT / "toy" / name for name in ("policy", "teacher")]
    models = [transformers.AutoModelForCausalLM.from_pretrained(path) for path in paths]
    assert len(calls) == 4
    for (_, batch, _, _, num_tokens), (loss, _) in calls:
        expected = 0.0
        for ids, attended, mask in zip(*(batch[x] for x in ("sequences", "attention_mask", "response_mask"))):
            ids, n = ids[attended.bool()][None], int(mask.sum())
            logits = [model(ids).logits[0, -n - 1 : -1] / 0.7 for model in models]
            q, p = (x.softmax(-1) for x in logits)
            expected += sum(references.gkd_divergence(0.3, *pair) for pair in zip(p, q)) / num_tokens
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-7)
