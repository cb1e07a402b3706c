"""Peak memory of a process, as speed.py and memory.py report it."""

import re
from pathlib import Path

import torch


def peak_gib(use_cuda: bool) -> float:
    """Of torch on the GPU, else of this process: getrusage would begin with what its parent held."""
    if use_cuda:
        return torch.cuda.max_memory_allocated() / 2**30
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 2**20
