"""Tests of make variant, make patch and make mix: what they write, and that a variant computes what its script does."""

import copy
import importlib
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter

import mix
import peft
import pytest
import sync
import torch
import transformers
import zoo
from conftest import POLICY_SCRIPTS, ROOT, SOURCES, read_jsonl, write_jsonl
from driver import without_clock
from test_siblings import copy_scripts, edit
from torch.testing import assert_close
from zoo import few, record, recorded, refused, run, run_stage

import flash_reinforce
import flash_reinforce_async as flash_async
import grpo_fsdp
import grpo_lora

# These merge into all scripts, and async into few.
FEATURES = ("correction", "fsdp", "lora", "tools", "vllm")
PAIRS = (("lora", "vllm"), ("tools", "fsdp"), ("vllm", "correction"), ("async", "correction"))
COMMANDS = {
    "variant": (sync.variant, ("rloo", "lora"), "variants/rloo_lora.py"),
    "patch": (sync.patch, ("rloo", "entropy_bonus"), "runs/rloo_entropy_bonus.py"),
    "mix": (mix.mix, ("rloo", "gspo"), "runs/rloo_gspo.py"),
}


def make(folder, name: str, *chosen: str) -> str:
    """Write a script with the chosen features to a folder. Return its name."""
    made = "_".join([name, *chosen])
    (folder / f"{made}.py").write_text(sync.combine(name, [*chosen]))
    return made


def assert_ruff_is_content(folder):
    options = ["--ignore=E501", "--config", ROOT / "pyproject.toml", folder]
    result = subprocess.run([sys.executable, "-m", "ruff", "check", *options], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_is_written_once_and_not_overwritten(command, tmp_path, capsys):
    """The user may have edited it. If it is deleted, the command writes it again."""
    function, words, path = COMMANDS[command]
    folder = copy_scripts(tmp_path)
    assert function(*words, root=folder) == 0
    made = (folder / path).read_text()
    assert f"    python {path}\n" in made and path in capsys.readouterr().out
    (folder / path).write_text("# mine\n")
    assert function(*words, root=folder) == 2
    assert capsys.readouterr().err.startswith(f"error: {path} exists")
    assert (folder / path).read_text() == "# mine\n"
    (folder / path).unlink()
    assert function(*words, root=folder) == 0 and (folder / path).read_text() == made


def test_files_of_the_user_beside_the_scripts_are_ignored(tmp_path):
    (copy_scripts(tmp_path) / "my_reward.py").write_text("def score(completions, **_): return [1.0]\n")
    assert "my_reward" not in sync.paths(tmp_path)


def test_a_hunk_of_a_patch_has_one_place():
    """If two places have the changed lines, the context decides. Only whole lines match."""
    source = "a\nx\nb\nx\nbx\n"
    assert sync.apply(source, "@@ @@\n a\n-x\n+y\n") == "a\ny\nb\nx\nbx\n"
    assert sync.apply(source, "@@ @@\n-x\n+y\n bx\n") == "a\nx\nb\ny\nbx\n"
    assert sync.apply("ax\nx\n", "@@ @@\n-x\n+y\n") == "ax\ny\n"
    for hunk in ("-x\n+y\n", "-z\n+y\n"):
        with pytest.raises(ValueError, match="mine: the script has no single place"):
            sync.apply(source, f"@@ @@\n{hunk}", "mine")


# The number of lines of grpo.py's skeleton that a variant changes or leaves out
CHANGED = {"grpo_correction": 1, "grpo_fsdp": 3, "grpo_lora": 19, "grpo_vllm": 41}
CHANGED |= {"flash_reinforce_async": 14, "reinforce_pp_process": 16, "reinforce_pp_tools": 13}


@pytest.mark.parametrize("name", sync.features().values())
def test_a_variant_changes_no_other_line_of_the_skeleton(name):
    """`make sync` compares with an earlier commit, so it cannot notice a line that was edited in a variant alone."""
    lines = [Counter(sync.skeleton(SOURCES[x]).splitlines()) for x in ("grpo", name)]
    lacking = (lines[0] - lines[1]).total()
    assert lacking == CHANGED[name], f"{name}.py lacks {lacking} lines of grpo.py. Are they all meant?"


@pytest.mark.parametrize("name", [*POLICY_SCRIPTS, "reinforce_pp_process"])
def test_each_feature_merges_into_a_script(name, tmp_path):
    """The exceptions are in sync.REFUSED."""
    for chosen in (*([feature] for feature in FEATURES), *PAIRS):
        parts = (name, name.rpartition("_")[2])
        if not any((part, feature) in sync.REFUSED for part in parts for feature in chosen):
            make(tmp_path, name, *chosen)
    assert_ruff_is_content(tmp_path)


def test_a_made_variant_needs_the_packages_of_its_features():
    """vLLM also needs another version of transformers."""
    for feature in ("lora", "vllm"):
        made = sync.packages(sync.combine("rloo", [feature]))
        assert made == sync.packages(SOURCES[f"grpo_{feature}"]) != sync.packages(SOURCES["rloo"])


def test_what_cannot_be_merged_is_refused(tmp_path, capsys):
    """A pair of features is refused in any order."""
    copies = copy_scripts(tmp_path)
    edit(copies / "rloo.py", "(args, policy) if args.kl_coef", "(args, policy) if args.kl_coef > 1")
    cases = "distill tools, sdpo correction, rloo process, rloo lora, sft fsdp, rloo nothing, no lora"
    for case in cases.split(", "):
        assert sync.variant(*case.split(), copies) == 2
        assert capsys.readouterr().err.startswith("error: ")
    assert not (copies / "variants" / "rloo_lora.py").exists()
    for pair in (["async", "vllm"], ["vllm", "async"]):
        with pytest.raises(ValueError, match="every rank would start an engine"):
            sync.combine("flash_reinforce", pair)


@pytest.mark.parametrize("name", sync.STAGES)
def test_a_stage_with_lora_is_written_to_runs(name, tmp_path):
    """It is not in variants/, whose scripts follow the skeleton. The learning rates that it names are LoRA's."""
    copies = copy_scripts(tmp_path)
    shutil.copytree(ROOT / "variants", copies / "variants", dirs_exist_ok=True)
    assert sync.variant(name, "lora", copies) == 0
    text = (copies / "runs" / f"{name}_lora.py").read_text()
    assert f"    python runs/{name}_lora.py\n" in text and '"peft==' in text and "LoRA," not in text
    assert {*re.findall(r"(?:python|node \d+) (\S+\.py)", sync.OWN.search(text)[0])} == {
        f"runs/{name}_lora.py"
    }
    rate = {"dpo": "5e-6"}.get(name, "1e-4")
    for words in ("--learning_rate ", "a real model needs ", "a real model needs about "):
        assert re.findall(rf"{words}(\de-\d)", text) == [rate], words
    assert_ruff_is_content(copies / "runs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder for variants, from which they are imported, with the stand-in for vLLM."""
    folder = tmp_path_factory.mktemp("variants")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tests" / "stand_in")
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", str(folder))
        yield folder


def metrics_of(name, folder, **flags):
    run(name, **{"max_response_length": 40, "run_dir": folder / name} | flags)
    return without_clock(folder / name / "metrics.jsonl")


def test_lora_begins_as_the_script(folder, tmp_path):
    """At first, B is 0, so the metrics of the first iteration are equal. Later, the KL shows that they differ."""
    flags = {"num_iterations": 2, "num_minibatches": 1}
    plain, lora = (metrics_of(x, tmp_path, **flags) for x in ("ppo", make(folder, "ppo", "lora")))
    for key in plain[0].keys() - {"grad_norm", "critic_grad_norm", "learning_rate"}:
        assert lora[0][key] == pytest.approx(plain[0][key], abs=1e-6), key
    assert abs(lora[1]["kl"] - lora[0]["kl"]) > 1e-5


@pytest.mark.parametrize("name", ["gdpo", "ppo"])
def test_tools_without_a_call_are_the_script(name, folder, tmp_path):
    """test_estimators.py tests what holes in the mask do to advantages and losses."""
    toy = {"model": "toy/policy", "dataset": "toy/train.jsonl"}
    plain, tools = (metrics_of(x, tmp_path, **toy) for x in (name, make(folder, name, "tools")))
    assert tools == [line | {"calls": 0} for line in plain]


@pytest.mark.parametrize("parts", [["dapo"], ["remax"], ["rloo", "lora"], ["rloo", "fsdp"]])
def test_vllm_samples_with_the_weights_of_now(parts, folder, tmp_path, monkeypatch):
    """The stand-in samples the responses that the script samples, as long as their weights are equal."""
    from vllm import with_a_seed

    lines = []
    parent = make(folder, *parts) if "lora" in parts else parts[0]
    for x in (parent, make(folder, *parts, "vllm")):
        script = importlib.import_module(x)
        monkeypatch.setattr(script, "generate", with_a_seed(script.generate))
        lines.append(metrics_of(x, tmp_path, num_iterations=3))
    for ours, expected in zip(*lines, strict=True):
        assert ours | {"entropy": 0} == pytest.approx(expected | {"entropy": 0}, rel=1e-3, abs=1e-5)


@pytest.fixture(scope="module")
def fsdp(folder):
    """What two ranks saw in runs with and without FSDP, by name, and the folder of each run.

    Gradients are clipped, and ranks finish responses at different times. One rank has more of five held-out prompts.
    """
    heldout = write_jsonl(folder / "heldout.jsonl", read_jsonl(ROOT / "toy" / "heldout.jsonl")[:5])
    common = {"batch_size": 48, "num_iterations": 3, "max_response_length": 12, "eval_every": 0}
    flags = common | {"max_grad_norm": 0.1, "eval_dataset": heldout, "eval_every": 2}
    half = common | {"dtype": "bfloat16", "gradient_checkpointing": True}
    resumed = half | {"run_dir": folder / "resumed"}
    once = common | {"batch_size": 32, "num_iterations": 1, "max_response_length": 16}
    runs = [("grpo", "grpo", flags), ("grpo_fsdp", "grpo_fsdp", flags), ("whole", "grpo_fsdp", half)]
    runs += [("stopped", "grpo_fsdp", resumed | {"num_iterations": 2}), ("resumed", "grpo_fsdp", resumed)]
    for script in ("dapo", "ppo"):
        runs += [(x, x, once) for x in (script, make(folder, script, "fsdp"))]
    cases = [
        {"script": script, "sample": True, "flags": {"run_dir": folder / name} | its_flags}
        for name, script, its_flags in runs
    ]
    return dict(zip([name for name, *_ in runs], record(folder, cases, ranks=2), strict=True))


@pytest.mark.parametrize("name", ["grpo", "dapo", "ppo"])
def test_fsdp_has_the_gradients_of_the_script(name, fsdp):
    """ppo.py also has a critic, and in dapo.py the ranks sample different numbers of times.

    The gradients are sums over ranks. With means, AdamW would make nearly the same steps.
    """
    whole, sharded = fsdp[name], fsdp[f"{name}_fsdp"]
    for ours, expected in zip(sharded[0]["gradients"], whole[0]["gradients"], strict=True):
        assert (ours - expected).norm() <= 1e-4 * expected.norm() and expected.norm() > 0
    for seen in sharded:
        assert seen["digests"] == sharded[0]["digests"]
        assert max(seen["unsharded"]) == 0  # a whole weight would take memory until the backward pass


def test_fsdp_clips_and_saves_as_the_script(fsdp, folder):
    ours, expected = (
        [x["grad_norm"] for x in fsdp[n][0]["metrics"] if "grad_norm" in x] for n in ("grpo_fsdp", "grpo")
    )
    assert ours == pytest.approx(expected, rel=1e-4) and min(expected) > 0.1
    load = transformers.AutoModelForCausalLM.from_pretrained
    one, other = (load(folder / name / "model").state_dict() for name in ("grpo", "grpo_fsdp"))
    assert one.keys() == other.keys()
    assert all(torch.allclose(x, other[name], rtol=0, atol=1e-6) for name, x in one.items())


def test_fsdp_sums_gradients_in_float32(monkeypatch):
    """In bfloat16, a sum over many ranks would lose digits."""
    seen, layer = [], torch.nn.Linear(2, 2)
    layer.set_gradient_divide_factor = layer.set_force_sum_reduction_for_comms = lambda _: None
    monkeypatch.setattr(grpo_fsdp, "fully_shard", lambda _, mp_policy, **options: seen.append(mp_policy))
    monkeypatch.setattr(grpo_fsdp.dist, "init_device_mesh", lambda *_: None)
    grpo_fsdp.shard(grpo_fsdp.Args(dtype="bfloat16", device="cpu"), layer)
    assert [(x.param_dtype, x.reduce_dtype) for x in seen] == [(torch.bfloat16, torch.float32)]


def test_fsdp_resumes_on_all_ranks(fsdp, folder):
    """The checkpoint has whole weights, so it opens without FSDP. The resumed run ends with the same bits."""
    one, other = (torch.load(folder / x / "checkpoint.pt", weights_only=True) for x in ("whole", "resumed"))
    assert all(torch.equal(x, other["policy"][name]) for name, x in one["policy"].items())
    assert all(x.dtype == torch.float32 for x in one["policy"].values())
    lines = [without_clock(folder / name / "metrics.jsonl") for name in ("whole", "resumed")]
    assert lines[0] == lines[1] and len(lines[0]) == 3
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "whole" / "model")
    assert torch.equal(model.get_input_embeddings().weight, one["policy"]["model.embed_tokens.weight"])


# LoRA: only the adapter is trained, the frozen model is the reference, and the saved model is merged.

OUTPUTS = {"sft": "completion_loss", "dpo": "response_logprobs", "reward_model": "pair_scores"}
TOY = ROOT / "toy" / "policy"
load_lm = transformers.AutoModelForCausalLM.from_pretrained


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["grpo", *sync.STAGES])
def test_only_the_adapter_is_trained_and_the_saved_model_is_merged(
    name, dtype, tmp_path, monkeypatch, load, capfd
):
    """In a reward model, the head is trained too. What is trained is what is saved, in float32."""
    monkeypatch.setitem(SOURCES, f"{name}_lora", sync.combine(name, ["lora"]))
    made = load(f"{name}_lora")
    calls = recorded(monkeypatch, made, "add_adapter")
    outputs = recorded(monkeypatch, made, OUTPUTS.get(name, "log_distribution"))
    flags = {"run_dir": tmp_path / "run", "learning_rate": 0.01, "dtype": dtype, "eval_every": 0}
    if name == "grpo":
        run(made.__name__, **flags, max_response_length=12, num_iterations=3, kl_coef=0.1)
        kl = [line["kl"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
        assert abs(kl[0]) < (1e-5 if dtype == "float32" else 0.2) and abs(kl[-1]) > 1e-4
    else:
        flags |= {"model": TOY, "dataset": few(name, 24, tmp_path), "batch_size": 8, "num_epochs": 1}
        run_stage(made, **flags, **({"eval_size": 0} if name == "sft" else {}))
    assert capfd.readouterr().err == "" and {x.dtype for _, x in outputs} == {torch.float32}
    [((_, base, *_), model)] = calls
    trained = {part: x for part, x in model.named_parameters() if x.requires_grad}
    heads = [part for part in trained if "lora_" not in part]
    assert len(trained) == 2 * 21 + len(heads) and len(heads) == (name == "reward_model")
    checkpoint = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    saved = next(iter(checkpoint.values()))
    assert {*saved} == {*trained} and len(checkpoint["optimizer"]["state"]) == len(trained)
    for part, x in saved.items():
        assert x.dtype == torch.float32 and torch.equal(x, trained[part]) and x.any(), part
    frozen = load_lm(TOY, dtype=dtype).state_dict()
    for part, x in model.named_parameters():
        original = part.removeprefix("base_model.model.").replace(".base_layer", "")
        assert part in trained or "score" in part or torch.equal(x, frozen[original]), part

    # model/ contains the merged model, and model/adapter the adapter for --model.
    auto_class = getattr(transformers, type(base).__name__)
    merged = auto_class.from_pretrained(tmp_path / "run" / "model", dtype=torch.float32)
    ids = torch.randint(3, 19, (4, 10))
    assert_close(merged(ids).logits, model.float()(ids).logits, rtol=1e-4, atol=1e-4)
    new = made.load_model(made.Args(device="cpu", model=str(TOY)))[0] if heads else load_lm(TOY, dtype=dtype)
    with_adapter = peft.PeftModel.from_pretrained(new, tmp_path / "run" / "model" / "adapter").float()
    # In `new`, weights of a reward model are not rounded.
    atol = 0.1 if heads and dtype == "bfloat16" else 1e-4
    assert_close(with_adapter(ids).logits, merged(ids).logits, rtol=0.0, atol=atol)
    with with_adapter.disable_adapter():
        assert (merged(ids).logits - with_adapter(ids).logits).abs().max() > 1e-3


def test_an_adapter_is_multiplied_by_alpha_over_rank():
    policy = grpo_lora.add_adapter(grpo_lora.Args(lora_rank=4, lora_alpha=2.0), load_lm(TOY))
    layers = [x for x in policy.modules() if isinstance(x, peft.tuners.lora.LoraLayer)]
    assert len(layers) == 21 and {x.scaling["default"] for x in layers} == {0.5}


def test_a_run_can_continue_an_earlier_adapter(tmp_path):
    """It keeps its A, B, rank and alpha. The reference is still --model, so the first KL is not 0."""
    flags = {"max_response_length": 12, "num_iterations": 2, "learning_rate": 0.01}
    run("grpo_lora", **flags, lora_rank=4, lora_alpha=2.0, run_dir=tmp_path / "a")
    adapter = str(tmp_path / "a" / "model" / "adapter")
    policy = grpo_lora.add_adapter(grpo_lora.Args(adapter=adapter), load_lm(TOY))
    ids = torch.randint(3, 19, (4, 10))
    assert_close(policy(ids).logits, load_lm(tmp_path / "a" / "model")(ids).logits, rtol=1e-4, atol=1e-4)
    assert not any(layer.training for layer in policy.modules())
    trained = {name: x for name, x in policy.named_parameters() if x.requires_grad}
    assert len(trained) == 2 * 21 and all("lora_" in name and 4 in x.shape for name, x in trained.items())

    run("grpo_lora", **flags, adapter=adapter, run_dir=tmp_path / "b")
    assert abs(read_jsonl(tmp_path / "b" / "metrics.jsonl")[0]["kl"]) > 1e-3


def test_a_run_keeps_what_else_an_earlier_adapter_trains(tmp_path, capsys):
    """An adapter of peft can have dropout, and train whole layers. A resumed run has their weights again."""
    config = peft.LoraConfig(target_modules="all-linear", modules_to_save=["norm"], lora_dropout=0.5)
    peft.get_peft_model(load_lm(TOY), config).save_pretrained(tmp_path / "adapter")
    flags = {
        "adapter": tmp_path / "adapter",
        "max_response_length": 8,
        "learning_rate": 0.01,
        "save_every": 1,
    }
    run("grpo_lora", **flags, num_iterations=3, run_dir=tmp_path / "whole")
    assert f"was trained for {TOY}, and not for toy/policy" in capsys.readouterr().out
    run("grpo_lora", **flags, num_iterations=2, run_dir=tmp_path / "parts")
    run("grpo_lora", **flags, num_iterations=3, run_dir=tmp_path / "parts")
    zoo.assert_same_run(tmp_path / "whole", tmp_path / "parts")
    assert all(line["logprob_difference"] < 1e-5 for line in read_jsonl(tmp_path / "whole" / "metrics.jsonl"))


def test_the_reference_of_dpo_is_the_model_without_its_adapter(tmp_path, monkeypatch, load):
    """This also holds after a resume, when B is no longer 0."""
    monkeypatch.setitem(SOURCES, "dpo_lora", sync.combine("dpo", ["lora"]))
    made, plain = load("dpo_lora"), load("dpo")
    flags = {"batch_size": 8, "eval_every": 0, "learning_rate": 0.01, "dataset": few("dpo", 16, tmp_path)}
    for epochs in (1, 2):
        calls = recorded(monkeypatch, made, "all_logprobs")
        run_stage(made, num_epochs=epochs, **flags, run_dir=tmp_path / "run")
        (args, _, dataset), ref_logprobs = calls[0]
        assert torch.equal(ref_logprobs, plain.all_logprobs(args, load_lm(TOY), dataset))
        assert ref_logprobs.any()


# flash_reinforce_async.py: which weights sample, and how a run ends.

FLAGS = {"num_iterations": 5, "micro_batch_size": 4, "learning_rate": 1e-3, "eval_every": 3}


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    """The folder of a run of flash_reinforce.py on one rank. Datasets are small, because every rank reads them."""
    folder = tmp_path_factory.mktemp("async")
    for flag, name, rows in (("dataset", "train", 96), ("eval_dataset", "heldout", 9)):
        FLAGS[flag] = write_jsonl(folder / f"{name}.jsonl", read_jsonl(ROOT / "toy" / f"{name}.jsonl")[:rows])
    run("flash_reinforce", **FLAGS, run_dir=folder / "run")
    return folder / "run"


def train(module, ranks: int, run_dir, kill=(None, ""), samplers=1, **flags) -> list[int]:
    """Run a script on several ranks, which are forks of this process, so that they need not import torch.

    kill names a rank and the function in whose third call it is killed. Return the exit code of each rank.
    """
    with socket.create_server(("localhost", 0)) as server:
        port = str(server.getsockname()[1])

    def start(rank: int):
        os.environ |= dict(RANK=f"{rank}", WORLD_SIZE=f"{ranks}", SAMPLER_RANKS=f"{samplers}")
        os.environ |= dict(MASTER_ADDR="localhost", MASTER_PORT=port)
        importlib.reload(module)  # it reads these variables
        if rank == kill[0]:
            zoo.stop_in_call(pytest.MonkeyPatch(), module, kill[1], 3, zoo.kill)
        run(module.__name__, **FLAGS | flags, run_dir=run_dir)

    Process = multiprocessing.get_context("fork").Process
    processes = [Process(target=start, args=[rank], daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
    return [process.exitcode for process in processes]


def assert_same_policy(one, other):
    """Compare all bits of metrics and policies, except times and the metrics that only the variant has."""
    own = {"tokens_per_second", "sampling_seconds", "reward_seconds", "update_seconds"}
    own |= {"staleness", "trainer_waited", "sampler_waited"}
    for line, expected in zip(*(read_jsonl(path / "metrics.jsonl") for path in (one, other)), strict=True):
        assert {key for key in line.keys() | expected if line.get(key) != expected.get(key)} <= own
    policies = [torch.load(path / "checkpoint.pt")["policy"] for path in (one, other)]
    torch.testing.assert_close(*policies, rtol=0, atol=0)


def test_without_staleness_it_is_the_parent(parent, tmp_path):
    """This also holds for two samplers and two trainers, and two ranks of the parent."""
    assert train(flash_async, 2, tmp_path / "run", staleness=0) == [0, 0]
    assert_same_policy(tmp_path / "run", parent)
    assert train(flash_reinforce, 2, tmp_path / "two") == [0, 0]
    assert train(flash_async, 4, tmp_path / "four", staleness=0, samplers=2) == [0] * 4
    assert_same_policy(tmp_path / "four", tmp_path / "two")


def test_a_rollout_has_the_weights_of_n_updates_ago(parent, tmp_path, monkeypatch):
    """The run equals a run of the parent that samples with a copy of its old weights."""
    generate, policies = flash_reinforce.generate, []

    def delayed(args, policy, *others, greedy=False):
        if not greedy:
            policies.append(copy.deepcopy(policy))
            policy = policies[max(0, len(policies) - 3)]
        return generate(args, policy, *others, greedy=greedy)

    monkeypatch.setattr(flash_reinforce, "generate", delayed)
    run("flash_reinforce", **FLAGS, run_dir=tmp_path / "delayed")
    assert train(flash_async, 2, tmp_path / "run", staleness=2) == [0, 0]
    assert_same_policy(tmp_path / "run", tmp_path / "delayed")
    assert train(flash_async, 3, tmp_path / "run", staleness=2, samplers=2) == [2] * 3  # they draw otherwise
    _, *metrics = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [line["staleness"] for line in metrics] == [0, 1, 2, 2, 2]
    assert 0 < max(line["rejected"] for line in metrics) < 1
    assert train(flash_async, 2, tmp_path / "run", staleness=2, num_iterations=7) == [0, 0]  # resumed
    assert [line["staleness"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")[6:]] == [0, 1]


@pytest.mark.parametrize("rank, function", [(0, "optimizer_step"), (1, "generate")])
def test_if_a_rank_is_killed_the_other_ends_and_the_run_resumes(rank, function, parent, tmp_path):
    codes = train(flash_async, 2, tmp_path / "run", (rank, function), staleness=0, save_every=1)
    assert codes[rank] == -9 and codes[1 - rank] == 1  # it ends with the traceback of gloo
    assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) == 3
    assert train(flash_async, 2, tmp_path / "run", staleness=0) == [0, 0]
    assert_same_policy(tmp_path / "run", parent)


def test_rollouts_of_samplers_with_other_longest_prompts_are_padded_on_the_left(monkeypatch):
    state, seconds = torch.get_rng_state(), (0.0, 0.0)

    def receive(rank):
        rollout = {"sequences": torch.full((1, 4 + rank), rank), "raw_scores": torch.ones(1)}
        return {"rollout": rollout, "seconds": seconds, "random_state": state}

    monkeypatch.setattr(flash_async, "SAMPLERS", range(1, 3))
    monkeypatch.setattr(flash_async, "receive", receive)
    rollout, *_ = flash_async.receive_rollout(flash_async.Args(device="cpu"))
    assert rollout["sequences"].tolist() == [[0, 1, 1, 1, 1, 1], [2] * 6]


def test_ranks_and_flags_that_do_not_go_together(monkeypatch, capsys):
    parts = "--batch_size 128: cannot be divided evenly (samples per prompt: 1, minibatches: 1, "
    for trainers, samplers, reason in (
        (0, 1, "SAMPLER_RANKS=1: Start these and one or more to train with torchrun"),
        (3, 1, f"{parts}ranks: 3 + 1)"),
        (1, 3, f"{parts}ranks: 1 + 3)"),
    ):
        monkeypatch.setattr(flash_async, "TRAINERS", range(trainers))
        monkeypatch.setattr(flash_async, "SAMPLERS", range(trainers, trainers + samplers))
        assert reason in refused(capsys, flash_async.check_args, flash_async.Args(batch_size=128))


def test_both_sides_of_the_asynchronous_script_wait_for_the_slowest_reward(monkeypatch):
    waits = []
    monkeypatch.setattr(flash_async.all_sum, "group", None, raising=False)
    monkeypatch.setattr(flash_async, "NUM_RANKS", 2)
    monkeypatch.setattr(flash_async.dist, "init_process_group", lambda *_, timeout: waits.append(timeout))
    monkeypatch.setattr(flash_async.dist, "new_group", lambda side, timeout, *_, **__: waits.append(timeout))
    flash_async.start_ranks(flash_async.Args(device="cpu"))
    assert [x.total_seconds() >= 3600 for x in waits] == [True, True]


def test_the_seconds_of_a_sampler_do_not_include_its_wait(monkeypatch):
    """On a stand-in for the clock, weights take 100 seconds to arrive, and sampling takes 7."""
    clock, sent, policy = [0.0], [], torch.nn.Linear(1, 1)
    tick = lambda seconds, x=None: clock.append(clock[-1] + seconds) or x  # noqa: E731
    stand_ins = {"RANK": flash_async.SIDE[0], "TRAINERS": range(1), "generate": lambda *_: tick(7, {})}
    stand_ins |= {"score": lambda *_: tick(1000), "receive": lambda _: tick(100, policy.state_dict())}
    stand_ins["send"] = lambda message, _: sent.append(message["seconds"]) or []
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(flash_async, name, stand_in)
    monkeypatch.setattr(flash_async.time, "perf_counter", lambda: clock[-1])
    args = flash_async.Args(device="cpu", staleness=0, num_iterations=2, batch_size=8)
    flash_async.sample(args, policy, None, None, [{"prompt_ids": [1]}] * 8, 0)
    assert sent == [(0, 7), (100, 7)]  # waited, sampled
