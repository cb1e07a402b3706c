"""patches/ and grpo_correction.py against plain loops. A bug that is planted in one of them is noticed."""

import pytest
import references
import sync
import test_estimators
import torch
from conftest import ROOT, SOURCES
from planted import BUGS
from references import kept_by_entropy, make_rollout, rows_of, spread
from test_estimators import EXACT
from torch.testing import assert_close
from zoo import few, record, recorded, run

CLOSE = dict(rtol=1e-4, atol=1e-6)


def one_iteration(module, folder, monkeypatch, **flags):
    """Run main once, its sampler not quite the policy. Args, rollout, advantages before the patch, gradient."""
    generate, optimizer_step, gradients = module.generate, module.optimizer_step, []

    def other_generate(*args, **options):
        rollout = generate(*args, **options)
        noise = torch.rand(rollout["entropy"].shape) * rollout["response_mask"]
        logprobs = rollout["old_logprobs"] + noise - 0.4 * rollout["response_mask"]
        return rollout | {"entropy": noise, "old_logprobs": logprobs}

    def other_step(args, model, *others):
        gradients.append(torch.cat([x.grad.flatten() for x in model.parameters()]))
        return optimizer_step(args, model, *others)

    monkeypatch.setattr(module, "generate", other_generate)
    monkeypatch.setattr(module, "optimizer_step", other_step)
    calls = recorded(monkeypatch, module, "compute_advantages")
    run(module.__name__, num_iterations=1, batch_size=32, run_dir=folder / module.__name__, **flags)
    [((args, rollout), result)] = calls
    return args, rollout, result["advantages"], gradients[0]


def start(module, name="toy/policy"):
    return module.load_model(module.Args(device="cpu"), name, module.transformers.AutoModelForCausalLM)[0]


def check_loss(patch, load, folder, monkeypatch):
    if patch == "unbiased_kl":
        monkeypatch.setattr(references, "grpo_loss", references.unbiased_kl_loss)
    scripts = sync.fits(SOURCES[patch])
    assert "grpo" in scripts
    for script in scripts:
        monkeypatch.setitem(test_estimators.MODULES, script, load(script, patch))
        test_estimators.test_loss_gradient_and_clip_fraction_equal_the_loops(script)


def check_entropy(patch, load, folder, monkeypatch):
    """The gradient is that of rloo.py, minus that of the mean entropy."""
    *_, plain = one_iteration(load("rloo"), folder, monkeypatch)
    module = load("rloo", patch)
    _, rollout, _, gradient = one_iteration(module, folder, monkeypatch, entropy_coef=0.7)
    model, mask = start(module), rollout["response_mask"]
    logits = model(**module.model_inputs(rollout["sequences"], rollout["attention_mask"])).logits
    logits = logits[:, -mask.shape[1] - 1 : -1][mask]
    torch.distributions.Categorical(logits=logits).entropy().mean().backward()
    expected = torch.cat([x.grad.flatten() for x in model.parameters()])
    assert_close(gradient - plain, -0.7 * expected, **CLOSE)


def check_advantages(patch, load, folder, monkeypatch):
    module = load("reinforce", patch)
    args, rollout, expected, _ = one_iteration(module, folder, monkeypatch)
    rows, mask = rows_of("entropy", rollout), rollout["response_mask"]
    if patch == "teacher_term":
        teacher = module.rollout_logprobs(args, start(module, "toy/teacher"), rollout)
        expected = expected + args.teacher_coef * (teacher - rollout["old_logprobs"])
    elif patch == "top_entropy_tokens":
        expected[mask] *= torch.tensor(kept_by_entropy(args.top_entropy, [x for row in rows for x in row]))
    else:
        shares = [args.negative_tokens if A < 0 else 1.0 for A in expected[:, 0]]
        kept = [kept_by_entropy(share, row) for row, share in zip(rows, shares)]
        expected = expected * spread(kept, mask).float()
    assert_close(rollout["advantages"], expected, **CLOSE)


def check_pairs(patch, load, folder, monkeypatch):
    module, dpo = load("dpo", patch), load("dpo")
    args = module.Args(device="cpu", batch_size=4, num_epochs=1, eval_every=0, run_dir=f"{folder}/run")
    power, others = int(patch != "ipo"), (args.beta, args.gamma) if patch == "simpo" else (args.beta,)
    for seed in range(5):
        batch = make_rollout(seed, k=2)
        new = (batch["old_logprobs"] / 3).requires_grad_()
        policy = torch.stack(references.sums(batch, new, power))
        reference = (1 - power) * torch.stack(references.sums(batch, batch["ref_logprobs"]))
        pairs = [*policy.view(-1, 2).T, *reference.view(-1, 2).T]
        expected, _ = getattr(references, f"{patch}_loss")(args, batch, new, 8, 0)
        losses = module.dpo_loss(*pairs, *others), expected
        assert_close(*losses, **EXACT)
        assert_close(*(torch.autograd.grad(x, new)[0] for x in losses), **EXACT)

    args.dataset = str(few("dpo", 4, folder))
    seen, given = (recorded(monkeypatch, module, name) for name in ("response_logprobs", "dpo_loss"))
    module.main(args)
    (_, batch), logprobs = seen[-1]
    lengths = batch["response_mask"].sum(1).view(2, -1) ** power
    assert_close(logprobs, dpo.response_logprobs(start(dpo), batch) / lengths, **CLOSE)
    [(pairs, _)] = given
    assert torch.equal(torch.stack(pairs[:2]), logprobs) and pairs[4:] == others
    assert torch.stack(pairs[2:4]).any() != bool(power)  # of the reference


def check_correction(name, load, folder, monkeypatch):
    module = load(name)
    for level, mode in (("token", "mask"), ("sequence", "mask"), ("geometric", "truncate")):
        flags = dict(correction_low=0.8, correction_cap=1.1, correction_level=level, correction_mode=mode)
        args, rollout, advantages, _ = one_iteration(module, folder / level, monkeypatch, **flags)
        weights = spread(references.correction_weights(args, rollout), rollout["response_mask"]).float()
        assert_close(rollout["advantages"], advantages * weights, **CLOSE)
        assert (rollout["sampler_logprobs"] - rollout["old_logprobs"]).abs().max() > 0.1
        old = module.rollout_logprobs(args, start(module), rollout)
        assert_close(rollout["old_logprobs"], old, **CLOSE)


CHECKS = {"dual_clip": check_loss, "unbiased_kl": check_loss, "entropy_bonus": check_entropy}
CHECKS |= dict.fromkeys(("top_entropy_tokens", "negative_tokens", "teacher_term"), check_advantages)
CHECKS |= dict.fromkeys(("ipo", "simpo", "orpo"), check_pairs) | {"grpo_correction": check_correction}
OF_TWO_RANKS = BUGS["top entropy of each rank"]
OURS = [bug for bug in BUGS.values() if bug.tests == "test_patches.py" and bug != OF_TWO_RANKS]


@pytest.mark.parametrize("name", [*(path.stem for path in ROOT.glob("patches/*.patch")), "grpo_correction"])
def test_it_equals_the_loops(name, load, tmp_path, monkeypatch):
    CHECKS[name](name, load, tmp_path, monkeypatch)


@pytest.mark.parametrize("bug", OURS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_noticed(bug, load, tmp_path, monkeypatch):
    monkeypatch.setitem(SOURCES, bug.script, bug.plant(SOURCES[bug.script]))
    with pytest.raises(AssertionError):
        CHECKS[bug.script](bug.script, load, tmp_path, monkeypatch)


def test_two_ranks_have_the_gradients_of_one(load, tmp_path, monkeypatch):
    """Also with small micro-batches. A threshold of each rank is noticed."""
    names = [load("rloo", "top_entropy_tokens", "entropy_bonus").__name__, "grpo_correction"]
    monkeypatch.setitem(SOURCES, OF_TWO_RANKS.script, OF_TWO_RANKS.plant(SOURCES[OF_TWO_RANKS.script]))
    names.append(load("rloo", OF_TWO_RANKS.script).__name__)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    results = []
    for ranks in (1, 2):
        flags = {"num_iterations": 1, "batch_size": 16, "max_response_length": 12, "eval_every": 0}
        flags["micro_batch_size"] = 8 // ranks
        (tmp_path / str(ranks)).mkdir()
        cases = [{"script": x, "sample": False, "flags": flags} for x in names]
        results.append(record(tmp_path / str(ranks), cases, ranks))
    for name, one, two in zip(names, *results, strict=True):
        pairs = zip(one[0]["gradients"], two[0]["gradients"], strict=True)
        is_same = all(torch.allclose(*pair, rtol=1e-9, atol=1e-11) for pair in pairs)
        assert is_same == (name != names[-1]), name


def test_make_patch_writes_a_script_or_none(tmp_path):
    folder = str(tmp_path / "new")
    assert sync.patch("dapo", "dual_clip,entropy_bonus", folder) == 0
    text = (tmp_path / "new" / "dapo_dual_clip_entropy_bonus.py").read_text()
    assert "dual_clip_c" in text and "entropy_coef" in text and f"python {folder}/dapo_dual" in text
    for x in (("dapo", "dual_clip,ipo"), ("grpo", "unbiased_kl,unbiased_kl"), ("rloo", "no"), ("no", "ipo")):
        assert sync.patch(*x, folder) == 2
    assert len([*(tmp_path / "new").iterdir()]) == 1
    # A mask is last in either order.
    assert "is_kept(args, rollout)\n\n" in sync.patched("grpo", ["teacher_term", "negative_tokens"])
