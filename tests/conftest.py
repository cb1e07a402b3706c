"""What the tests share: the names and sources of the scripts, and functions that write JSON lines and start scripts."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # so that stderr is empty
os.environ["OMP_NUM_THREADS"] = "1"  # because two tests run at a time
os.environ["WANDB_MODE"] = "disabled"

import sync
from plot import read_jsonl  # noqa: F401 - for the tests

ROOT = sync.ROOT
POLICY_SCRIPTS = sync.policy_scripts()
SOURCES = {name: path.read_text() for name, path in (sync.paths() | sync.patches()).items()}
# One script with grpo.py's skeleton, and all scripts with more lines
SKELETONS = ["grpo", *(name for name in POLICY_SCRIPTS if name in sync.INSERTS)]


@pytest.fixture
def load(tmp_path, monkeypatch):
    """A function that imports a script of SOURCES with patches."""
    monkeypatch.syspath_prepend(tmp_path)

    def function(script: str, *patches: str):
        name, source = "_".join([script, *patches, "here"]), SOURCES[script]
        for patch in patches:
            source = sync.apply(source, SOURCES[patch])
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return function


@pytest.fixture(scope="session")
def tokenizer():
    """The tokenizer of the toy, with one token per word. <pad> is 0, and <eos> is 1."""
    import transformers  # the tests of the site run without it

    return transformers.AutoTokenizer.from_pretrained(ROOT / "toy" / "policy")


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def words_of(**flags) -> list[str]:
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def launch(*command, ranks=1, check=True, timeout=300, **options) -> subprocess.CompletedProcess:
    """Run a script with python or torchrun, as a user does, and return its output."""
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    options |= {"capture_output": True, "text": True, "timeout": timeout}
    result = subprocess.run([*start, *map(str, command)], **options)
    assert not check or result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result
