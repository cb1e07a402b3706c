"""make mix: a script with the loss of another computes what the two compute, or the pair is refused."""

import ast
import importlib
import math
import re
import subprocess
import sys
from functools import cache

import mix
import pytest
import sync
import torch
from conftest import POLICY_SCRIPTS, ROOT, SOURCES, read_jsonl
from references import FOR_0_AND_1, make_rollout
from test_estimators import MODULES, make_args
from test_siblings import commit, copy_scripts
from zoo import run

FLAGS = {"samples_per_prompt": 3, "max_response_length": 9, "overlong_buffer": 4}
FLAGS |= {"delta": 0.1, "max_ratio": 1.5}
# Each script's advantage with the losses of two others, so that each loss is in two pairs, too
PAIRS = [(x, POLICY_SCRIPTS[i - n]) for i, x in enumerate(POLICY_SCRIPTS) for n in (1, 8)]


@cache
def rollout_of(name: str) -> dict:
    """A rollout with scores that the method accepts, and log-probs of a policy that has moved."""
    rollout = make_rollout(0, FLAGS["samples_per_prompt"])
    if name in FOR_0_AND_1:
        rollout["scores"] = (rollout["scores"] > 0).double()
    if name == "gdpo":
        rollout["scores"] = torch.stack([rollout["scores"], 9 * rollout["greedy_scores"]], dim=1)
    noise = 0.5 * torch.randn(rollout["response_mask"].shape, dtype=torch.float64)
    return rollout | {"new_logprobs": rollout["old_logprobs"] + noise * rollout["response_mask"]}


def advantages_of(module, args, name: str, sign: int = 1) -> torch.Tensor:
    """The advantages of a module on the rollout of a method, or with another reference."""
    rollout = rollout_of(name)
    reference = {key: sign * rollout[key] for key in ("kl", "ref_logprobs")}
    return module.compute_advantages(args, rollout | reference)["advantages"]


def loss_of(module, args, sign: int = 1) -> tuple:
    """Loss, gradient and share of clipped tokens of a module, or with another reference."""
    batch = rollout_of("grpo")
    logprobs = batch["new_logprobs"].clone().requires_grad_()
    batch = batch | {"ref_logprobs": sign * batch["ref_logprobs"]}
    loss, stats = module.policy_loss(args, batch, logprobs, 13, 57)
    return loss, torch.autograd.grad(loss, logprobs)[0], stats.get("clip_fraction", stats.get("rejected"))


@cache
def has_kl(name: str, part: str) -> bool:
    """Whether another reference changes the advantages or the loss of a script."""
    module, args = MODULES[name], make_args(name, **FLAGS)
    args.kl_coef *= 9  # large enough to change the best response, which raft.py chooses
    if part == "advantages":
        return not torch.equal(*(advantages_of(module, args, name, sign) for sign in (1, -1)))
    return not torch.equal(*(loss_of(module, args, sign)[1] for sign in (1, -1)))


def test_each_pair_equals_its_two_scripts_or_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    assert {loss for _, loss in PAIRS} == {*POLICY_SCRIPTS}
    for name, loss in PAIRS:
        reason = "its loss does not contain an advantage" if "gkd" in (name, loss) else ""
        if not reason and has_kl(name, "advantages") and has_kl(loss, "loss"):
            reason = "both have a KL"
        if reason:
            with pytest.raises(ValueError, match=reason):
                mix.mixed(name, [loss])
            continue
        text = mix.mixed(name, [loss])
        mine, other, ours = map(sync.functions, (SOURCES[name], SOURCES[loss], text))
        assert sync.skeleton(text) == sync.skeleton(SOURCES[name])
        assert ours == mine | {"Args": ours["Args"], "policy_loss": other["policy_loss"]}
        lines = [ast.get_docstring(ast.parse(x)).splitlines() for x in (text, SOURCES[name], SOURCES[loss])]
        formulas = [x for x in lines[1] if re.match(r"    ([AG]\w*|critic) ", x)]
        assert {*formulas, *(x for x in lines[2] if x.startswith("    loss "))} <= {*lines[0]} and formulas
        own = {name: "advantages", loss: "loss"}
        of_kl = [SOURCES[x] for x, part in own.items() if has_kl(x, part)] or [mix.NO_KL]
        assert re.search(r"^    kl_coef: .* = [\d.]+", of_kl[0], re.MULTILINE)[0] in text
        [place] = [
            y for x, part, y in ((name, "advantages", "reward"), (loss, "loss", "loss")) if has_kl(x, part)
        ] or [""]
        has_penalty = place and "kl_coef: ClassVar" not in text  # distill.py compares with a teacher
        said = f"The KL penalty is in the {place}." if has_penalty else "There is no KL penalty."
        assert said in text
        for flag in ("num_minibatches", "update_epochs"):
            assert (f"{flag}: ClassVar" in text) == (f"{flag}: ClassVar" in SOURCES[loss])
        (tmp_path / f"{name}_{loss}.py").write_text(text)
        module = importlib.import_module(f"{name}_{loss}")
        args = module.Args(**{x: y for x, y in FLAGS.items() if x in module.Args.__annotations__})
        kl = {"kl_coef": args.kl_coef}
        found = advantages_of(module, args, name), *loss_of(module, args)
        expected = advantages_of(MODULES[name], make_args(name, **FLAGS | kl), name)
        expected = expected, *loss_of(MODULES[loss], make_args(loss, **FLAGS | kl))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for words in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *words, "--config", ROOT / "pyproject.toml", tmp_path]
        assert subprocess.run(command, capture_output=True).returncode == 0


RUNS = "ppo sapo", "dapo raft", "sdpo grpo"


@pytest.mark.parametrize("pair", RUNS)
def test_a_mix_runs_with_the_lines_that_its_advantage_inserts(pair, tmp_path, monkeypatch):
    name, loss = pair.split()
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"{name}_{loss}.py").write_text(mix.mixed(name, [loss]))
    run(f"{name}_{loss}", run_dir=tmp_path / "run", num_iterations=1, batch_size=32, max_response_length=40)
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert math.isfinite(lines[-1]["policy_loss"]) and lines[-1]["grad_norm"] > 0


def test_a_mix_of_methods_is_a_script_like_the_others(tmp_path):
    """It is refused what one of its halves is refused, and no file is written over."""
    folder = copy_scripts(tmp_path)
    commit(folder)
    for pair in (("remax", "gspo"), ("rloo", "flash_reinforce")):
        assert mix.mix(*pair, "methods", folder) == 0
    assert sync.variant("remax_gspo", "lora", folder) == 0 == sync.sync(folder)
    assert {"remax_gspo", "remax_gspo_lora", "rloo_flash_reinforce"} <= {*sync.paths(folder)}
    text = (folder / "variants" / "remax_gspo_lora.py").read_text()
    assert "    python variants/remax_gspo_lora.py\n" in text
    assert "# variant of remax_gspo.py with lora\n" in text
    patch = next(x for x in sync.patches() if {"remax", "gspo"} <= {*sync.fits(x)})
    assert sync.patch("remax_gspo", patch, str(folder / "runs"), folder) == 0
    for made in (("remax_gspo", "async"), ("rloo_flash_reinforce", "correction")):
        assert sync.variant(*made, folder) == 2
    for words in (("rloo", "rloo"), ("rloo", "no"), ("rloo", "gspo,opo"), ("remax", "gspo")):
        assert mix.mix(*words, "methods", folder) == 2


def test_a_loss_whose_patch_has_lines_outside_its_block_is_refused(tmp_path):
    """They would be lost, because a mix has the lines of its advantage."""
    folder = copy_scripts(tmp_path)
    for name, patch in (("grpo", "dual_clip"), ("grpo", "mask_truncated"), ("ppo", "mask_truncated")):
        assert sync.patch(name, patch, "methods", folder) == 0
    assert "args.dual_clip_c" in mix.mixed("dr_grpo", ["grpo_dual_clip"], folder)
    for loss in ("grpo_mask_truncated", "ppo_mask_truncated"):
        with pytest.raises(ValueError, match="make patch SCRIPT="):
            mix.mixed("dr_grpo", [loss], folder)


def test_a_loss_of_responses_is_explained_for_advantages_of_tokens():
    for name, is_for_tokens in (("ppo", True), ("rloo", False)):
        assert ("A_i becomes A_t" in mix.mixed(name, ["gspo"])) == is_for_tokens


FLAG = "    gate: float = 3.0  # a flag\n"


def method(function: str, line: str, flag: str = "", helper: str = "") -> str:
    """grpo.py with a line before the end of a function, and with a flag and a helper function before it."""
    text = SOURCES["grpo"]
    old = sync.functions(text)[function]
    head, _, end = old.rpartition("\n    return ")
    text = text.replace(old, f"{helper}{head}\n    {line}\n    return {end}")
    return text.replace("    num_minibatches", f"{flag}    num_minibatches", 1)


WITH_FLAG = method("policy_loss", "logprobs.clamp(max=args.gate)", FLAG)


def test_a_flag_of_a_loss_comes_and_goes_with_it(tmp_path):
    """And a docstring without formulas is no obstacle."""
    folder = copy_scripts(tmp_path)
    docstring = sync.OWN.search(WITH_FLAG)[0]
    text = WITH_FLAG.replace(docstring, '"""Mine: it has no formula.\n\n    Nor here\n"""')
    (folder / "mine.py").write_text(text)
    made, without = mix.mixed("dr_grpo", ["mine"], folder), mix.mixed("mine", ["dr_grpo"], folder)
    assert FLAG in made and "gate" not in without
    assert "see their docstrings" in ast.get_docstring(ast.parse(made))


def test_a_loss_that_needs_what_a_mix_cannot_have_is_refused(tmp_path):
    folder = copy_scripts(tmp_path)
    advantage = method("compute_advantages", "args.gate", FLAG)
    helper = "def gated(x):\n    return x\n\n\n"
    for reason, one, two in (
        ("both have a flag gate", advantage, WITH_FLAG.replace("= 3.0", "= 4.0")),
        ("the loss reads batch", WITH_FLAG, method("policy_loss", 'batch["gates"]')),
        ("its loss calls gated", advantage, method("policy_loss", "gated(logprobs)", "", helper)),
    ):
        for name, text in {"one": one, "two": two}.items():
            (folder / f"{name}.py").write_text(text)
        with pytest.raises(ValueError, match=f"two: {reason}"):
            mix.mixed("one", ["two"], folder)
    (folder / "two.py").write_text(WITH_FLAG)
    assert mix.mixed("one", ["two"], folder).count(FLAG) == 1
