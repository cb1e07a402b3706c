"""What the tests share: the names of the scripts, small models, files of JSON lines, a way to run torchrun."""

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
SKELETONS = ["grpo", *(name for name in POLICY_SCRIPTS if name in sync.INSERTS)]  # the others have grpo's


@pytest.fixture(scope="session")
def tokenizer():
    """The toy's: one token per word, <pad> is 0, <eos> is 1."""
    return transformers.AutoTokenizer.from_pretrained(ROOT / "toy" / "policy")


COMMON = {"initializer_range": 0.3, "eos_token_id": 1}  # random weights, distributions far from uniform


def make_llama(vocab_size: int = 19, seed: int = 0, **options):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"max_position_embeddings": 128, "pad_token_id": 0}
    config = transformers.LlamaConfig(vocab_size=vocab_size, **COMMON, **sizes, **options)
    return transformers.LlamaForCausalLM(config).eval()


def make_gpt2(vocab_size: int = 19, seed: int = 0, **options):
    """Learned positions and dropout 0.1 in its config, as the original has."""
    torch.manual_seed(seed)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "bos_token_id": None}
    config = transformers.GPT2Config(vocab_size=vocab_size, **COMMON, **sizes, **options)
    return transformers.GPT2LMHeadModel(config)


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.open()]


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def launch(
    *command: str, ranks: int = 1, check: bool = True, timeout: int = 300, **options
) -> subprocess.CompletedProcess:
    """Run a script as a user does, under python or torchrun, and return its output."""
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command, pipe = [*start, *map(str, command)], subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, **options)
    try:
        output = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # a kill would leave the ranks that torchrun started
        output = process.communicate()
    result = subprocess.CompletedProcess(command, process.returncode, *output)
    if check and result.returncode != 0:
        raise AssertionError(f"exit code {result.returncode}\n{result.stdout}\n{result.stderr}")
    return result
