"""gkd.py: its loss from probabilities, and the two models in its main."""

import pytest
import references
import torch
import transformers
from conftest import ROOT
from zoo import recorded, run

import gkd


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.9, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 3, 9])
def test_loss_and_gradient_are_those_of_probabilities(beta, top_k):
    """Over 7 tokens. The teacher's k likeliest and the rest are k + 1 outcomes, or all 7 if k is larger."""
    torch.manual_seed(0)
    student, teacher = (3 * torch.randn(2, 4, 5, 7, dtype=torch.float64)).log_softmax(-1).requires_grad_()
    batch = {
        "all_logprobs": student,
        "teacher_all_logprobs": teacher,
        "response_mask": torch.rand(4, 5) < 0.7,
    }
    args = gkd.Args(beta=beta, top_k=top_k)
    loss, _ = gkd.policy_loss(args, batch, None, 4, 13)
    expected, _ = references.gkd_loss(args, batch, None, 4, 13)
    gradients = [torch.autograd.grad(x, student, retain_graph=True)[0] for x in (loss, expected)]
    torch.testing.assert_close([loss, gradients[0]], [expected, gradients[1]], rtol=1e-10, atol=1e-12)


def test_an_update_compares_both_models_at_the_temperature(tmp_path, monkeypatch):
    """In micro-batches of padded rows. Each response is read once more, alone."""
    calls = recorded(monkeypatch, gkd, "policy_loss")
    run("gkd", run_dir=tmp_path, temperature=0.7, beta=0.3, num_iterations=1, micro_batch_size=5)
    paths = [ROOT / "toy" / name for name in ("teacher", "policy")]
    models = [transformers.AutoModelForCausalLM.from_pretrained(path) for path in paths]
    for (_, batch, _, _, num_tokens), (loss, _) in calls:
        expected = 0.0
        for ids, attended, mask in zip(*(batch[x] for x in ("sequences", "attention_mask", "response_mask"))):
            ids, n = ids[attended.bool()][None], int(mask.sum())
            distributions = [(model(ids).logits[0, -n - 1 : -1] / 0.7).softmax(-1) for model in models]
            expected += sum(references.gkd_divergence(0.3, p, q) for p, q in zip(*distributions)) / num_tokens
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-7)
