"""Tests of patches/ and grpo_correction.py against plain loops, which must notice each planted bug."""

import math

import pytest
import references
import sync
import test_estimators
import torch
import transformers
import zoo
from conftest import ROOT, SOURCES, read_jsonl
from planted import BUGS
from references import kept_by_entropy, make_rollout, rows_of, spread
from test_estimators import EXACT
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import few, record, recorded, run

CLOSE = dict(rtol=1e-4, atol=1e-6)


def gradient_of(model):
    return torch.cat([x.grad.flatten() for x in model.parameters()])


def one_iteration(module, folder, monkeypatch, **flags):
    """Run one iteration, in which the log-probs of sampling and of training differ.

    Return args, the rollout, the advantages that compute_advantages has returned, and the gradient.
    """
    generate, optimizer_step, gradients = module.generate, module.optimizer_step, []

    def other_generate(*args, **options):
        rollout = generate(*args, **options)
        noise = torch.rand(rollout["entropy"].shape) * rollout["response_mask"]
        logprobs = rollout["old_logprobs"] + noise - 0.4 * rollout["response_mask"]
        return rollout | {"entropy": noise, "old_logprobs": logprobs}

    def other_step(args, model, *others):
        gradients.append(gradient_of(model))
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
    scripts = sync.fits(patch)
    assert "grpo" in scripts
    for script in scripts:
        monkeypatch.setitem(test_estimators.MODULES, script, load(script, patch))
        test_estimators.test_loss_gradient_and_clip_fraction_equal_the_loops(script)


def check_entropy(patch, load, folder, monkeypatch):
    """The gradient is that of rloo.py, minus the gradient of the mean entropy."""
    *_, plain = one_iteration(load("rloo"), folder, monkeypatch)
    module = load("rloo", patch)
    _, rollout, _, gradient = one_iteration(module, folder, monkeypatch, entropy_coef=0.7)
    model, mask = start(module), rollout["response_mask"]
    logits = model(**module.model_inputs(rollout["sequences"], rollout["attention_mask"])).logits
    logits = logits[:, -mask.shape[1] - 1 : -1][mask]
    torch.distributions.Categorical(logits=logits).entropy().mean().backward()
    assert_close(gradient - plain, -0.7 * gradient_of(model), **CLOSE)


def check_sampler_kl(patch, load, folder, monkeypatch):
    """The gradient is that of rloo.py, plus the gradient of the mean of log^2(pi_theta / pi_old) over tokens."""
    *_, plain = one_iteration(load("rloo"), folder, monkeypatch)
    module = load("rloo", patch)
    args, rollout, _, gradient = one_iteration(module, folder, monkeypatch, sampler_kl_coef=0.7)
    model = start(module)
    logprobs = module.token_logprobs(args, model, rollout)
    (logprobs - rollout["old_logprobs"])[rollout["response_mask"]].square().mean().backward()
    assert_close(gradient - plain, 0.7 * gradient_of(model), **CLOSE)


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


def check_truncated(patch, load, folder, monkeypatch):
    """The gradient is the gradient of the complete responses alone. If there are none, it is 0."""
    for script in ("grpo", "dapo", "gspo"):
        flags = {"max_response_length": 16, "num_minibatches": 1, "micro_batch_size": 4}
        _, rollout, _, gradient = one_iteration(load(script, patch), folder, monkeypatch, **flags)
        complete = ~rollout["truncated"]
        assert 0 < complete.sum() < len(complete) - 4
        plain = load(script)
        policy, before = start(plain), start(plain)
        state = {"policy": policy, "optimizer": torch.optim.SGD(policy.parameters())}
        args = plain.Args(device="cpu", learning_rate=1.0, max_grad_norm=math.inf, **flags)
        plain.update(args, state, {name: x[complete] for name, x in rollout.items()}, 1.0)
        pairs = zip(before.parameters(), policy.parameters())
        assert_close(gradient, torch.cat([(x - y).detach().flatten() for x, y in pairs]), **CLOSE)
        assert gradient.abs().max() > 0.01
    for script in sync.fits(patch):
        module = load(script, patch)
        _, rollout, _, gradient = one_iteration(module, folder / "cut", monkeypatch, max_response_length=1)
        assert rollout["truncated"].all() and not gradient.any(), script


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest new tensor."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            self.numel = max(self.numel, x.numel() if isinstance(x, torch.Tensor) else 0)
        return result


def measured(script, args, model, batch):
    """Return log-probs and gradient, the size of the largest tensor, and the shapes kept for the backward pass."""
    kept, largest = [], Largest()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x)
    with largest, hooks:
        logprobs = script.token_logprobs(args, model, batch)
        (logprobs * torch.linspace(-1, 1, logprobs.shape[1])).sum().backward()
    return (logprobs.detach(), gradient_of(model)), largest.numel, kept


def check_chunks(patch, load, folder, monkeypatch):
    """Log-probs and gradients do not change. A tensor has at most 256 tokens, and none is kept for backward()."""
    V, T = 1000, 9
    module, plain = load("rloo", patch), load("rloo")
    args = module.Args(device="cpu", temperature=0.7)
    for name in ("llama", "qwen2"):
        batch = {"sequences": torch.randint(V, (64, 5 + T)), "response_mask": torch.rand(64, T) < 0.8}
        batch["response_mask"][0] = False
        batch["attention_mask"] = torch.ones(64, 5 + T, dtype=torch.long)
        results = []
        for script in (module, plain):
            model = zoo.make_model(name, vocab_size=V).double()
            result, largest, kept = measured(script, args, model, batch)
            assert (largest <= 256 * V) == (script is module)
            assert any(V in shape[-1:] for shape in kept) == (script is plain)
            results.append(result)
        assert_close(*results, rtol=1e-9, atol=1e-12)
        assert not results[0][0][~batch["response_mask"]].any()
    calls = recorded(monkeypatch, module, "chunk_logprobs")
    gradients = [one_iteration(x, folder, monkeypatch)[-1] for x in (plain, module)]
    assert_close(*gradients, **CLOSE)
    assert any(result.requires_grad for _, result in calls)  # in the update


def check_float32_head(patch, load, folder, monkeypatch):
    """This holds under autocast, in sampling and in training, for tied and untied weights."""
    module = load("grpo", patch)
    args = module.Args(device="cpu", dtype="bfloat16")
    for name in ("llama", "qwen2"):
        folder_of_model = zoo.save(folder / name, zoo.make_model(name), zoo.make_tokenizer())
        model, _ = module.load_model(args, folder_of_model, transformers.AutoModelForCausalLM)
        head, ids = model.get_output_embeddings(), torch.randint(3, 19, (4, 10))
        with module.autocast(args), torch.no_grad():
            states = model.get_decoder()(ids).last_hidden_state
            logits = model(ids).logits
        assert torch.equal(logits, states.float() @ head.weight.T.detach())
        assert (head.weight is model.get_input_embeddings().weight) == (name == "qwen2")
    flags = {"dtype": "bfloat16", "num_iterations": 1, "run_dir": folder / "run", "model": folder_of_model}
    calls = recorded(monkeypatch, module, "log_distribution")
    run(module.__name__, **flags)
    assert {logits.dtype for (logits, _), _ in calls} == {torch.float32}
    saved = transformers.AutoModelForCausalLM.from_pretrained(folder / "run" / "model")
    assert {*saved.state_dict()} == {*zoo.make_model(name).state_dict()}


def check_rollouts(patch, load, folder, monkeypatch):
    """Each logged iteration has a file with all responses. The test of two ranks tests their order."""
    module = load("rloo", patch)
    calls = recorded(monkeypatch, module, "score")
    run(module.__name__, num_iterations=4, log_every=2, run_dir=folder / "run")
    assert [x.name for x in sorted(folder.glob("run/rollout*"))] == ["rollout-2.jsonl", "rollout-4.jsonl"]
    (_, tokenizer, rows, rollout), scores = calls[1]
    lines = read_jsonl(folder / "run" / "rollout-2.jsonl")
    assert [x["score"] for x in lines] == scores.tolist()
    assert [x["response"] for x in lines] == tokenizer.batch_decode(module.response_ids(rollout))
    assert [[x["prompt"], x["answer"]] for x in lines] == [[row["prompt"], row["answer"]] for row in rows]


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
CHECKS |= {"sampler_kl": check_sampler_kl, "mask_truncated": check_truncated, "chunked_head": check_chunks}
CHECKS |= {"float32_head": check_float32_head, "log_rollouts": check_rollouts}
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
    """The micro-batches are small. With the planted bug, each rank has its own threshold."""
    names = [load("rloo", "top_entropy_tokens", "entropy_bonus").__name__, "grpo_correction"]
    names.append(load("grpo", "mask_truncated", "sampler_kl", "chunked_head", "log_rollouts").__name__)
    monkeypatch.setitem(SOURCES, OF_TWO_RANKS.script, OF_TWO_RANKS.plant(SOURCES[OF_TWO_RANKS.script]))
    names.append(load("rloo", OF_TWO_RANKS.script).__name__)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    flags = {"num_iterations": 1, "batch_size": 16, "max_response_length": 12, "eval_every": 0}
    flags |= {"log_every": 1, "reward": f"{ROOT}/tests/driver.py:reward"}
    # Each rank draws its own minibatches, so these scripts make a single step.
    own = {name: {"num_minibatches": 1} for name in names if name.startswith("grpo")}
    results = []
    for ranks in (1, 2):
        flags["micro_batch_size"] = 8 // ranks
        (tmp_path / str(ranks)).mkdir()
        cases = [{"script": x, "sample": False, "flags": flags | own.get(x, {})} for x in names]
        results.append(record(tmp_path / str(ranks), cases, ranks))
    logs = [read_jsonl(tmp_path / str(ranks) / "seen.run2" / "rollout-1.jsonl") for ranks in (1, 2)]
    assert logs[0] == logs[1] and len(logs[0]) == 16
    for name, one, two in zip(names, *results, strict=True):
        assert all(gradient.any() for gradient in one[0]["gradients"]), name
        pairs = zip(one[0]["gradients"], two[0]["gradients"], strict=True)
        is_same = all(torch.allclose(*pair, rtol=1e-9, atol=1e-11) for pair in pairs)
        assert is_same == (name != names[-1]), name


def test_make_patch_writes_a_script_or_none(tmp_path):
    folder = str(tmp_path / "new")
    assert sync.patch("dapo", "dual_clip,entropy_bonus", folder) == 0
    text = (tmp_path / "new" / "dapo_dual_clip_entropy_bonus.py").read_text()
    assert "dual_clip_c" in text and "entropy_coef" in text
    refused = "dapo dual_clip,ipo; grpo unbiased_kl,unbiased_kl; rloo chunked_head,entropy_bonus; rloo no"
    for words in [*refused.split("; "), "no ipo"]:
        assert sync.patch(*words.split(), folder) == 2
    assert len([*(tmp_path / "new").iterdir()]) == 1
    # Advantages are masked last, in either order of the patches.
    assert "is_kept(args, rollout)\n\n" in sync.patched("grpo", ["teacher_term", "negative_tokens"])


def test_chunked_head_refuses_a_model_that_caps_its_logits(load, tmp_path, capsys):
    module = load("grpo", "chunked_head")
    model = zoo.save(tmp_path / "model", zoo.make_model("gemma2"), zoo.make_tokenizer())
    args = module.Args(device="cpu", model=model)
    said = zoo.refused(capsys, module.load_model, args, model, transformers.AutoModelForCausalLM)
    assert "changes the logits after its output layer" in said
