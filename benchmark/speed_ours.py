"""A policy script on the work of speed.py, with a clock around its iterations and rollouts.

Arguments: one JSON object, see speed.py. Prints one JSON line at the end of each iteration: seconds since the epoch,
seconds of the rollout, responses' mean length, peak memory in GiB.
"""

import importlib
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from peak import peak_gib

work = json.loads(sys.argv[1])
script = importlib.import_module(work["script"])
use_cuda = work["device"] == "cuda"
rollout = []


def now() -> float:
    if use_cuda:
        torch.cuda.synchronize()
    return time.time()


def timed_generate(*args, generate=script.generate, **options):
    start = now()
    result = generate(*args, **options)
    rollout.append(now() - start)
    return result


def timed_log(*arguments, log=script.log, **options):
    log(*arguments, **options)
    line = {"time": now(), "rollout": rollout[-1], "length": arguments[3]["response_length"]}
    line["peak"] = peak_gib(use_cuda)
    if script.RANK == 0:
        print(json.dumps(line), flush=True)


script.generate, script.log = timed_generate, timed_log
script.main(script.Args(**work["flags"]))
