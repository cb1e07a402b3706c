"""Fixtures: the scripts as modules, small models built on the spot, a way to run under torchrun."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two tests run at a time, see pyproject.toml
os.environ["WANDB_MODE"] = "disabled"

import sync
import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
POLICY_SCRIPTS = sync.policy_scripts()  # the folder is the registry
SKELETONS = [
    "grpo",
    *(name for name in POLICY_SCRIPTS if sync.INSERTS.get(name)),
]  # the others are grpo's to the letter


@pytest.fixture(params=SKELETONS)
def script(request):
    """A policy script of each skeleton in turn, as a module."""
    return importlib.import_module(request.param)


@pytest.fixture(autouse=True)
def undo_global_state():
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session")
def tokenizer():
    """The toy's: one token per word, <pad> is 0, <eos> is 1."""
    return transformers.AutoTokenizer.from_pretrained(ROOT / "toy" / "policy")


def make_llama(vocab_size: int = 19, seed: int = 0, **options):
    """A small Llama with random weights large enough that its distributions are far from uniform."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        initializer_range=0.3,
        eos_token_id=1,
        pad_token_id=0,
        **options,
    )
    return transformers.LlamaForCausalLM(config).eval()


def make_gpt2(vocab_size: int = 19, seed: int = 0, **options):
    """A small GPT-2: learned positions and dropout 0.1 in its config, as the original has."""
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=vocab_size,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=128,
        initializer_range=0.3,
        eos_token_id=1,
        bos_token_id=None,
        **options,
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.fixture(params=["llama", "gpt2"])
def model(request):
    return {"llama": make_llama, "gpt2": make_gpt2}[request.param]().eval()


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.open()]


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def launch(*command: str, ranks: int = 1, check: bool = True, **options) -> subprocess.CompletedProcess:
    """Run a script as a user does, under python or torchrun, and return its output."""
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command, pipe = [*start, *map(str, command)], subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, **options)
    try:
        output = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        process.terminate()  # a kill would leave the ranks that torchrun started
        output = process.communicate()
    result = subprocess.CompletedProcess(command, process.returncode, *output)
    if check and result.returncode != 0:
        raise AssertionError(f"exit code {result.returncode}\n{result.stdout}\n{result.stderr}")
    return result


def the_run(runs_dir: Path) -> Path:
    """The only run folder in runs_dir."""
    (run,) = Path(runs_dir).iterdir()
    return run
