"""What the tests share: names of scripts, JSON lines, a way to start a script."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # so that stderr is empty
os.environ["OMP_NUM_THREADS"] = "1"  # two tests run at a time
os.environ["WANDB_MODE"] = "disabled"

import sync

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / name) for name in ("data", "experiments")]
POLICY_SCRIPTS = sync.policy_scripts()
SKELETONS = ["grpo", *(name for name in POLICY_SCRIPTS if name in sync.INSERTS)]  # the others have grpo's


def is_for_0_and_1(name: str) -> bool:
    """Whether a policy script is for scores of 0 and 1 only."""
    import references  # needs torch, which is not installed for the tests of the site

    return name in references.FOR_0_AND_1


@pytest.fixture(scope="session")
def tokenizer():
    """The toy's: one token per word, <pad> is 0, <eos> is 1."""
    import transformers  # not installed for the tests of the site

    return transformers.AutoTokenizer.from_pretrained(ROOT / "toy" / "policy")


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.open()]


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def words_of(**flags) -> list[str]:
    """The flags as words of a command line."""
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def launch(*command, ranks=1, check=True, timeout=300, **options) -> subprocess.CompletedProcess:
    """Run a script as a user does, under python or torchrun, and return its output."""
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    options |= {"capture_output": True, "text": True, "timeout": timeout}
    result = subprocess.run([*start, *map(str, command)], **options)
    assert not check or result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result
