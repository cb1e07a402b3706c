"""Every script's estimator against loops in float64 (references.py), the relations between them, and their
expected gradients by enumerating all responses of a small policy."""

import dataclasses
import importlib
import math
from itertools import product

import pytest
import references
import torch
from conftest import POLICY_SCRIPTS, ROOT

MODULES = {name: importlib.import_module(name) for name in POLICY_SCRIPTS}
EXACT = dict(rtol=1e-10, atol=1e-11)


def make_args(name: str, **flags):
    """The script's flags with those of flags that it has."""
    known = {field.name for field in dataclasses.fields(MODULES[name].Args)}
    return MODULES[name].Args(**{flag: value for flag, value in flags.items() if flag in known})


def make_rollout(seed: int, k: int = 1, prompts: int = 3, dtype=torch.float64, garbage: float = math.nan) -> dict:
    """k responses to each prompt, of 1 to 9 tokens, two of them with holes in their mask; garbage where it is
    false."""
    g = torch.Generator().manual_seed(seed)
    B, T = prompts * k, 9
    lengths = torch.randint(1, T + 1, (B,), generator=g)
    lengths[:2] = T
    mask = torch.arange(T) < lengths[:, None]
    mask[0, [0, 4]] = mask[1, 3:8] = False  # the first token, one and several in the middle
    draw = lambda: torch.randn(B, T, generator=g, dtype=dtype).masked_fill(~mask, garbage)  # noqa: E731
    rollout = {"response_mask": mask, "scores": torch.randn(B, generator=g, dtype=dtype)}
    rollout |= {"old_logprobs": -draw().abs(), "ref_logprobs": -draw().abs(), "values": draw()}
    rollout |= {"kl": rollout["old_logprobs"] - rollout["ref_logprobs"], "advantages": draw().nan_to_num(5.0)}
    return rollout | {"greedy_scores": torch.randn(B, generator=g, dtype=dtype)}


def advantages_of(name: str, rollout: dict, **flags) -> torch.Tensor:
    return MODULES[name].compute_advantages(make_args(name, **flags), rollout)["advantages"]


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
def test_every_script_has_a_reference_and_a_row(name):
    missing = references.missing(name, (ROOT / "README.md").read_text())
    assert not missing, "; ".join(missing)


def test_a_new_script_is_told_what_it_lacks():
    missing = references.missing("new", "| [`rloo.py`](rloo.py) | RLOO |\nsee [`new.py`](new.py)")
    assert [text.split(" in its")[0] for text in missing] == [
        "tests/references.py has no new_advantages",
        "tests/references.py has no new_loss",
        "README.md has no row [`new.py`](new.py)",
    ]
    assert references.missing("rloo", "| [`rloo.py`](rloo.py) | RLOO |") == []


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_advantages_equal_the_loops(name, beta):
    for seed, k in product(range(4), (2, 3, 8)):
        args = make_args(name, kl_coef=beta, samples_per_prompt=k, max_response_length=9, overlong_buffer=4)
        rollout = make_rollout(seed, k)
        rollout["scores"][-k:] = 1 / 3  # one group whose scores are all equal
        result = MODULES[name].compute_advantages(args, rollout)
        for key, values in result.items():
            expected = getattr(references, f"{name}_{key}")(args, rollout)
            torch.testing.assert_close(values, expected, **EXACT)
            assert (values[~rollout["response_mask"]] == 0).all()


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
def test_nothing_is_attached_and_the_dtype_stays(name):
    for dtype in (torch.float32, torch.float64):
        rollout = make_rollout(0, k=4, dtype=dtype, garbage=0.0)
        for key in ("kl", "old_logprobs", "ref_logprobs", "values", "scores", "greedy_scores"):
            rollout[key].requires_grad_()
        result = MODULES[name].compute_advantages(make_args(name, samples_per_prompt=4), rollout)
        assert all(x.dtype == dtype for x in result.values()) and not result["advantages"].requires_grad
        rollout |= result
        logprobs = rollout["old_logprobs"].detach() + 0.1
        loss, stats = MODULES[name].policy_loss(make_args(name), rollout, logprobs.requires_grad_(), 5, 7)
        assert loss.dtype == stats["policy_loss"].dtype == dtype and loss.requires_grad
        assert not any(value.requires_grad for value in stats.values())


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
@pytest.mark.parametrize("seed", range(5))
def test_loss_gradient_and_clip_fraction_equal_the_loops(name, seed):
    """num_sequences and num_tokens are those of a whole step, and not those of this micro-batch."""
    batch, args = make_rollout(seed, k=3), make_args(name, kl_coef=0.2)
    mask = batch["response_mask"]
    noise = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logprobs = (batch["old_logprobs"] + 0.5 * noise).requires_grad_()  # ratios from 0.3 to 3
    loss, stats = MODULES[name].policy_loss(args, batch, logprobs, num_sequences=13, num_tokens=57)
    expected, share = getattr(references, f"{name}_loss")(args, batch, logprobs, 13, 57)
    torch.testing.assert_close(loss, expected, **EXACT)
    without_kl, _ = getattr(references, f"{name}_loss")(make_args(name, kl_coef=0.0), batch, logprobs, 13, 57)
    torch.testing.assert_close(stats["policy_loss"], without_kl.detach(), **EXACT)
    assert ("kl_loss" in stats) == (name in ("grpo", "reinforce_pp_baseline"))
    kl_loss = (expected - without_kl).detach()
    torch.testing.assert_close(stats.get("kl_loss", torch.zeros_like(kl_loss)), kl_loss, **EXACT)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradient[mask], torch.autograd.grad(expected, logprobs)[0][mask], **EXACT)
    assert (gradient[~mask] == 0).all()
    assert ("clip_fraction" in stats) == (share is not None)
    if share is not None:
        assert float(stats["clip_fraction"]) == pytest.approx(share, rel=1e-6) and 0 < share < 1


@pytest.mark.parametrize("seed", range(5))
def test_value_loss_and_its_gradient_equal_the_loops(seed):
    batch, ppo = make_rollout(seed, k=3, garbage=5.0), MODULES["ppo"]
    mask, args = batch["response_mask"], ppo.Args(value_clip_eps=0.2)
    g = torch.Generator().manual_seed(seed)
    batch["returns"] = torch.randn(mask.shape, generator=g, dtype=torch.float64)
    values = batch["values"] + 0.3 * torch.randn(mask.shape, generator=g, dtype=torch.float64)
    loss, stats = ppo.value_loss(args, batch, values.requires_grad_(), num_tokens=41)
    expected = references.ppo_value_loss(args, batch, values, 41)
    torch.testing.assert_close(loss, expected, **EXACT)
    torch.testing.assert_close(stats["value_loss"], expected.detach(), **EXACT)
    (gradient,) = torch.autograd.grad(loss, values)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, values)[0], **EXACT)


GROUPED = [name for name in POLICY_SCRIPTS if MODULES[name].Args.min_samples_per_prompt > 1]


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("score", [0.1, 1 / 3, -0.7])
@pytest.mark.parametrize("k", range(2, 9))
def test_equal_scores_in_float32(name, score, k):
    """The mean of k equal floats may be off by a rounding; over a std of that size it would be |A| = 0.95.
    Lengths differ, since statistics over tokens would give such a group something."""
    rollout = make_rollout(k, k, prompts=2, dtype=torch.float32)
    rollout["scores"] = torch.cat([torch.full((k,), score), torch.linspace(-1, 1, k)])
    advantages = advantages_of(name, rollout, samples_per_prompt=k, kl_coef=0.0)
    args = make_args(name, samples_per_prompt=k, kl_coef=0.0)
    expected = getattr(references, f"{name}_advantages")(args, rollout)
    torch.testing.assert_close(advantages.double(), expected, rtol=1e-5, atol=1e-6)
    if name in ("grpo", "reinforce_pp_baseline"):  # they divide by a std
        assert (advantages[:k] == 0).all()


def test_whitening_survives_float32():
    """Mean 1e4, std 0.1: E[x^2] - E[x]^2 in float32 gives a variance of any sign."""
    x = 1e4 + 0.1 * torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    for name in ("reinforce_pp", "ppo"):
        white = MODULES[name].whiten(x, torch.ones_like(x, dtype=torch.bool))
        assert abs(float(white.mean())) < 1e-2 and abs(float(white.std(correction=0)) - 1) < 1e-2


# A policy small enough to write down every response. Its probabilities are multiples of 1/4, so that a batch
# of 64 rows holds each response exactly as often as it is probable: averages over it are expectations.
EOS, T, ROWS = 2, 3, 64
PROBS = {(): [2, 1, 1], (0,): [1, 1, 2], (1,): [1, 2, 1]}  # quarters for the tokens 0, 1, EOS after each prefix
PROBS |= {(0, 0): [1, 2, 1], (0, 1): [2, 1, 1], (1, 0): [1, 1, 2], (1, 1): [1, 1, 2]}
PREFIXES = list(PROBS)
ENDED = (row[: row.index(EOS) + 1] if EOS in row else row for row in product(range(3), repeat=T))
RESPONSES = sorted(set(ENDED))


class SmallPolicy:
    """Its logits, those of a reference, and the exact gradient of E[score] - beta KL over whole responses."""

    def __init__(self):
        probs = torch.tensor([PROBS[prefix] for prefix in PREFIXES], dtype=torch.float64) / 4
        self.logits = probs.log().requires_grad_()
        generator = torch.Generator().manual_seed(0)
        self.logprob = self.logits.log_softmax(-1)
        self.ref_logprob = torch.randn(probs.shape, generator=generator, dtype=torch.float64).log_softmax(-1)

    def score(self, response) -> float:
        return math.sin(7.0 * sum((t + 1) * (token + 1) for t, token in enumerate(response)))

    def rollout(self, rows) -> tuple[dict, torch.Tensor]:
        """The rollout of these responses, and their differentiable log-probs."""
        mask = torch.tensor([[t < len(row) for t in range(T)] for row in rows])
        state = torch.tensor([[PREFIXES.index(row[:t]) if t < len(row) else 0 for t in range(T)] for row in rows])
        token = torch.tensor([[row[t] if t < len(row) else 0 for t in range(T)] for row in rows])
        new, ref = self.logprob[state, token], self.ref_logprob[state, token]
        greedy = ()
        while len(greedy) < T and EOS not in greedy:
            greedy += (int(self.logits[PREFIXES.index(greedy)].argmax()),)
        rollout = {"response_mask": mask, "old_logprobs": new.detach(), "ref_logprobs": ref}
        rollout["kl"] = (new.detach() - ref).masked_fill(~mask, 0.0)
        rollout["scores"] = torch.tensor([self.score(row) for row in rows], dtype=torch.float64)
        rollout["greedy_scores"] = torch.full((len(rows),), self.score(greedy), dtype=torch.float64)
        return rollout, new

    def gradient(self, name: str, rows, args, num_sequences, num_tokens) -> torch.Tensor:
        """Of the script's loss on these responses, with respect to the logits."""
        rollout, new = self.rollout(rows)
        rollout |= MODULES[name].compute_advantages(args, rollout)
        loss, _ = MODULES[name].policy_loss(args, rollout, new, num_sequences, num_tokens)
        return torch.autograd.grad(loss, self.logits, retain_graph=True)[0]

    def exact_gradient(self, beta: float) -> torch.Tensor:
        rollout, new = self.rollout(RESPONSES)
        new, ref = (x.masked_fill(~rollout["response_mask"], 0.0).sum(1) for x in (new, rollout["ref_logprobs"]))
        objective = (new.exp() * (rollout["scores"] - beta * (new - ref))).sum()
        return torch.autograd.grad(objective, self.logits, retain_graph=True)[0]


def expected_gradient(name: str, k: int, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The expectation over all groups of k responses, and the exact one. A token mean has a random denominator: it is
    taken with 1, and is the sum then."""
    flags = {"kl_coef": beta, "samples_per_prompt": k, "max_response_length": T, "overlong_buffer": 0}
    policy, args = SmallPolicy(), make_args(name, **flags)
    rollout, new = policy.rollout(RESPONSES)
    probability = dict(zip(RESPONSES, new.masked_fill(~rollout["response_mask"], 0.0).sum(1).exp().tolist()))
    expected = sum(
        math.prod(probability[row] for row in group) * policy.gradient(name, group, args, k, k)
        for group in product(RESPONSES, repeat=k)
    )
    return -expected, policy.exact_gradient(beta)


UNBIASED = {"rloo": (2, 1), "remax": (1, 1), "reinforce": (2, 1 / 2), "dr_grpo": (2, 1 / 2 / T)}


@pytest.mark.parametrize("name", UNBIASED)
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_these_are_unbiased(name, beta):
    """Up to a constant factor: (k - 1)/k where a response is part of its baseline, and 1/L_max."""
    k, factor = UNBIASED[name]
    if beta == 0 or "kl_coef" in vars(make_args(name)):
        expected, exact = expected_gradient(name, k, beta)
        torch.testing.assert_close(expected, factor * exact, rtol=0, atol=1e-10)


BIASED = {"grpo": 0.971, "gspo": 0.971, "cispo": 0.983, "dapo": 0.983, "raft": 0.983}


@pytest.mark.parametrize("name", BIASED)
def test_these_are_biased(name):
    """Cosine with the exact gradient at k = 2, as docs/estimators.md says."""
    expected, exact = expected_gradient(name, 2, 0.0)
    cosine = torch.cosine_similarity(expected.flatten(), exact.flatten(), dim=0)
    assert float(cosine) == pytest.approx(BIASED[name], abs=6e-4)


@pytest.mark.parametrize("beta", [0.0, 0.05, 0.5])
def test_reinforce_pp_ascends_reward_minus_beta_kl(beta):
    """Over the whole population its whitened token mean is -ROWS / (N_tok std) times the exact gradient."""
    policy, args = SmallPolicy(), make_args("reinforce_pp", kl_coef=beta)
    rows = []
    for response in RESPONSES:
        quarters = math.prod(PROBS[response[:t]][token] for t, token in enumerate(response))
        rows += [response] * (ROWS * quarters // 4 ** len(response))
    assert len(rows) == ROWS
    rollout, _ = policy.rollout(rows)
    mask = rollout["response_mask"]
    gradient = policy.gradient("reinforce_pp", rows, args, ROWS, int(mask.sum()))
    returns = rollout["kl"].flip(1).cumsum(1).flip(1).mul(-beta) + rollout["scores"][:, None]
    factor = -ROWS / (mask.sum() * returns[mask].std(correction=0))
    torch.testing.assert_close(gradient, factor * policy.exact_gradient(beta), rtol=1e-9, atol=1e-10)


def facts(name: str) -> list[str]:
    """What sets a script apart, found out from its flags and functions: a row of docs/estimators.md."""
    args = make_args(name, samples_per_prompt=4, kl_coef=0.5, overlong_buffer=0, max_response_length=9)
    base = make_rollout(0, 4, garbage=0.0)
    base["response_mask"][:2] = True  # without holes
    mask, lengths = base["response_mask"], base["response_mask"].sum(1)
    moved = lambda one, other: not torch.allclose(one, other, rtol=1e-3)  # noqa: E731

    def advantages(**changes):
        return MODULES[name].compute_advantages(args, base | changes)["advantages"]

    def loss(new=base["old_logprobs"] + 0.1, sequences=5, tokens=7, args=args, **changes):
        return MODULES[name].policy_loss(args, base | changes, new, sequences, tokens)[0]

    def slopes(new, **changes):
        new = new.clone().requires_grad_()
        none = make_args(name, kl_coef=0.0, max_response_length=9)
        return torch.autograd.grad(loss(new, args=none, **changes), new)[0]

    order = torch.arange(12)
    order[[1, 4]] = order[[4, 1]]  # two responses change places, and with it their groups
    other = base["scores"] + 7 * (torch.arange(12) == 4)  # one in another group
    compared = {
        "the group": moved(advantages(**{key: x[order] for key, x in base.items()})[order], advantages()),
        "the batch": moved(advantages(scores=other)[:4], advantages()[:4]),
        "the greedy response": moved(advantages(greedy_scores=base["greedy_scores"] + 7), advantages()),
        "the critic": moved(advantages(values=base["values"] + torch.eye(12, 9)), advantages()),
    }
    zero = {"kl": 0 * base["kl"]}
    times = {key: 9 * base[key] for key in ("scores", "greedy_scores", "values")}
    kl = "reward" if moved(advantages(kl=base["kl"] * -50), advantages()) else "none"
    kl = "loss" if moved(loss(ref_logprobs=base["ref_logprobs"] * 2), loss()) else kl

    one = {"advantages": mask.double()}
    low, high = (getattr(args, f"clip_eps{side}", getattr(args, "clip_eps", None)) for side in ("_low", "_high"))
    beyond = (slopes(base["old_logprobs"] + 3, **one)[mask] == 0).all()  # a good response, far beyond any clip
    clip = "none" if low is None else f"{'objective' if beyond else 'weight'}, -{low:g} +{high:g}"
    over = "tokens" if moved(loss(tokens=14), loss()) else "responses"
    first = slopes(base["old_logprobs"], **one)[:, 0].abs()
    over += ", each over its length" if moved(first[lengths == 9].max(), first.max()) else ""
    over += ", each over L_max" if moved(loss(args=dataclasses.replace(args, max_response_length=18)), loss()) else ""
    steps, fixed = args.num_minibatches * args.update_epochs, "num_minibatches" not in vars(args)
    return [
        f"[`{name}`](../{name}.py)",
        str(MODULES[name].Args().samples_per_prompt),
        " and ".join(source for source, does in compared.items() if does),
        "no" if moved(advantages(**zero, **times), advantages(**zero)) else "yes",
        kl,
        clip,
        over,
        f"{steps}, fixed" if fixed else str(steps),
    ]


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
def test_the_table_of_differences_says_what_the_scripts_do(name):
    row = "| " + " | ".join(facts(name)) + " |"
    assert row in (ROOT / "docs" / "estimators.md").read_text(), f"docs/estimators.md lacks this row:\n{row}"
