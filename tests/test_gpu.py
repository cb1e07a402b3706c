"""What has to hold on a GPU. `make gpu-check` runs it with random models of the sizes of Qwen2.5, without a network.

`make test` runs each check on a CPU with a small model, and checks that all tensors of the training would be on the
device. Times are recorded in runs/gpu.xml, and no test depends on them.
"""

import importlib

import pytest
import torch
import transformers
from conftest import ROOT, launch, read_jsonl, write_jsonl
from torch import Tensor, device
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from zoo import STAGE_DATA, few, held_out, run

GPU = torch.cuda.is_available()
SIZES = {"1.5B": (1536, 8960, 28, 12, 2), "7B": (3584, 18944, 28, 28, 4), "tiny": (64, 128, 2, 4, 2)}
LONG = {"dtype": "bfloat16", "gradient_checkpointing": True, "learning_rate": 1e-6, "num_iterations": 2}
PEAK = 34.8  # GiB of the update of README's command, computed in docs/recipes.md
SKIP = pytest.mark.skipif(not GPU, reason="torch.cuda.is_available() is False")


def each_size(names: str = "", *values: tuple):
    """Run a test on a GPU with each of these values, and with a small model on a CPU with the first of them."""
    values = values or ((),)
    large = [pytest.param(True, *x, marks=[pytest.mark.gpu, SKIP], id=f"gpu {x}") for x in values]
    return pytest.mark.parametrize(f"is_large{names}", [*large, pytest.param(False, *values[0], id="small")])


@pytest.fixture
def train(tmp_path, monkeypatch, record_property):
    """A function that runs a script and returns its metrics. Without a size, the script trains the toy."""

    def function(script, limit, is_large, size="", **flags):
        module = importlib.import_module(script)
        if size:
            flags = LONG | files(tmp_path, size if is_large else "tiny") | flags
            for name in ("save_model", "save_checkpoint"):  # of gigabytes
                monkeypatch.setattr(module, name, lambda *args, **options: None, raising=False)
        flags = {"run_dir": tmp_path / "run", "device": "cuda" if is_large else "cpu"} | flags
        run(script, **flags)
        rows = read_jsonl(flags["run_dir"] / "metrics.jsonl")
        worst = max(row["logprob_difference"] for row in rows if row["iteration"])
        record_property("logprob_difference", worst)
        assert worst < limit
        return rows

    return function


def files(folder, size):
    """The flags of a random model of this size, which hardly ever samples an EOS, and of 128 prompts."""
    hidden, inner, layers, heads, kv_heads = SIZES[size]
    is_tiny = size == "tiny"
    shape = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    shape |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    shape["vocab_size"] = 1000 if is_tiny else 151936
    config = transformers.Qwen2Config(**shape, eos_token_id=1, tie_word_embeddings=hidden < 3584)
    with torch.device("cpu" if is_tiny else "cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype="bfloat16")
    model.save_pretrained(folder / size)
    transformers.AutoTokenizer.from_pretrained(ROOT / "toy" / "policy").save_pretrained(folder / size)
    texts = ["1 + " * ((8 if is_tiny else 256) - i % 4) for i in range(128)]
    prompts = write_jsonl(folder / f"{size}.jsonl", [{"prompt": text, "answer": "1"} for text in texts])
    return {"model": folder / size, "dataset": prompts, "eval_dataset": prompts}


@each_size(", length", (64,), (704,), (1088,), (1536,))
def test_attention_is_right_where_padding_leaves_queries_without_a_key(is_large, length):
    kernels = torch.nn.attention.SDPBackend
    device = "cuda" if is_large else "cpu"
    inputs = [torch.randn(4, 4, length, 128, device=device) for _ in range(3)]
    mask = torch.ones(4, 1, length, length, dtype=torch.bool, device=device).tril()
    mask[0, ..., : length // 3] = False
    results = []
    for dtype, kernel in (torch.float32, kernels.MATH), (torch.bfloat16, kernels.EFFICIENT_ATTENTION):
        leaves = [x.to(dtype).detach().requires_grad_() for x in inputs]
        with torch.nn.attention.sdpa_kernel(kernel if is_large else kernels.MATH):
            output = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=mask)
        output = output.where(mask.any(-1, keepdim=True), 0)  # queries without a key do not count
        output.square().sum().backward()
        results.append(torch.stack([output.detach(), *(x.grad for x in leaves)]).flatten(1).float())
    assert ((results[0] - results[1]).norm(dim=1) < 0.02 * results[0].norm(dim=1)).all()


@each_size()
def test_the_toy_learns_as_on_a_cpu(is_large, train):
    size = {"num_iterations": 80, "batch_size": 128, "max_response_length": 40} if is_large else {}
    first, *rows = train("grpo", 1e-5, is_large, eval_every=40, **size)
    assert 0.08 <= first["eval/score/2-5"] <= 0.11 and abs(rows[0]["kl"]) < 1e-4
    assert not is_large or sum(row["score"] for row in rows[-5:]) / 5 > 0.95


@each_size()
def test_the_toy_in_bfloat16(is_large, train):
    train("grpo", 0.05, is_large, dtype="bfloat16", gradient_checkpointing=True)


@each_size()
def test_readmes_command_needs_the_memory_that_the_recipes_say(is_large, train, record_property):
    size = {"batch_size": 128, "micro_batch_size": 4, "max_response_length": 1024} if is_large else {}
    if is_large:
        torch.cuda.reset_peak_memory_stats()
    row = train("grpo", 0.05, is_large, "1.5B", **size)[-1]
    record_property("tokens_per_second", row["tokens_per_second"])
    record_property("sampling_seconds", row["sampling_seconds"])
    if is_large:
        peak = torch.cuda.max_memory_allocated() / 2**30
        reserved = torch.cuda.max_memory_reserved() / 2**30
        record_property("reserved, GiB", reserved)
        assert 0.94 * PEAK < peak < 1.06 * PEAK and reserved < 1.2 * PEAK


@each_size(", size, batch_size, micro_batch_size", ("1.5B", 128, 4), ("7B", 48, 1))
def test_lora_fits_a_card_of_24_gb(is_large, size, batch_size, micro_batch_size, train):
    flags = {"eval_every": 1}
    if is_large:
        torch.cuda.set_per_process_memory_fraction(23 * 2**30 / torch.cuda.mem_get_info()[1])
        flags |= {"batch_size": batch_size, "micro_batch_size": micro_batch_size, "max_response_length": 128}
    train("grpo_lora", 0.05, is_large, size, **flags)
    if is_large:
        torch.cuda.set_per_process_memory_fraction(1.0)


@each_size()
def test_a_resumed_run_goes_on_as_it_would_have(is_large, train, tmp_path):
    """Except for the order in which attention sums on a GPU."""
    norms = []
    for name, num_iterations in (("whole", 4), ("resumed", 2), ("resumed", 4)):
        flags = {"num_iterations": num_iterations, "run_dir": tmp_path / name}
        norms.append([row["grad_norm"] for row in train("grpo", 1e-5, is_large, **flags)])
    assert len(norms[2]) == 4 and max(abs(a - b) for a, b in zip(norms[0], norms[2])) < 0.1


@each_size()
def test_fsdp_runs_on_one_rank(is_large, train):
    train("grpo_fsdp", 1e-5, is_large)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_agree(tmp_path):
    flags = f"--num_iterations 2 --batch_size 64 --eval_every 0 --run_dir {tmp_path / 'run'}"
    launch(ROOT / "grpo.py", *flags.split(), ranks=2, cwd=ROOT)
    assert max(row["logprob_difference"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")) < 1e-5


class Devices(TorchFunctionMode):
    """Find tensors on the wrong device without a GPU. torch calls this mode instead of each of its functions.

    A tensor that is made without `device=`, or by .cpu(), is marked as the host's, and so is what is computed from it.
    As with CUDA, an operation on tensors of both kinds fails, unless it copies, indexes or reads a number.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = [x for x in tree_leaves([args, kwargs]) if isinstance(x, Tensor)]
        on_host = [x for x in inputs if hasattr(x, "is_on_host")]
        may_mix = all(x.dim() == 0 for x in on_host)
        may_mix |= function in (Tensor.copy_, Tensor.__getitem__)
        # These copy a model, or move it to another device, which sets the data of its weights.
        may_mix |= function.__name__ in ("__deepcopy__", "_has_compatible_shallow_copy_type", "__set__")
        assert may_mix or len(on_host) == len(inputs), f"{function.__name__} gets tensors of both kinds"
        result = function(*args, **kwargs)
        if function is Tensor.to and any(isinstance(x, device | str) for x in [*args, *kwargs.values()]):
            return result.clone()  # without the mark
        if function is Tensor.cpu or (len(on_host) == len(inputs) and not kwargs.get("device")):
            for x in tree_leaves(result):
                if isinstance(x, Tensor):
                    x.is_on_host = True
        return result


NAMES = "ppo dapo distill gdpo sdpo flash_reinforce grpo_lora reinforce_pp_tools sft reward_model dpo".split()
FLAGS = {name: {} for name in NAMES}
FLAGS["grpo"] = {"reward_zscore": True, "dtype": "bfloat16", "gradient_checkpointing": True}
FLAGS["remax"] = {"reward": "toy/reward_model", "eval_reward": "exact_answer", "missing_eos_penalty": 0.5}


@pytest.mark.parametrize("name", FLAGS)
def test_a_run_that_evaluates_and_resumes_has_all_tensors_on_the_device(name, tmp_path, monkeypatch):
    def all_sum(x):
        assert not hasattr(x, "is_on_host"), "NCCL refuses a tensor of the host"
        return x

    script, data = importlib.import_module(name), str(few(name, 24, tmp_path))
    monkeypatch.setattr(script, "all_sum", all_sum)
    flags = FLAGS[name] | {"batch_size": 16, "eval_every": 1, "anneal_lr": False, "device": "cpu"}
    flags |= held_out(name, data, 8)
    flags |= {"dataset": data} if name in STAGE_DATA else {"max_response_length": 6}
    for length in (1, 2):
        flags["num_epochs" if name in STAGE_DATA else "num_iterations"] = length
        with Devices():
            script.main(script.Args(**flags, run_dir=f"{tmp_path}/run"))
