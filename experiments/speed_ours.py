"""grpo.py with a clock. speed.py starts this with its flags as JSON. Prints a JSON line for each iteration."""

import json
import sys
import time

import common  # adds the folder of the scripts to sys.path

import grpo

original_log = grpo.log
last_end = None


def timed_log(args, run_dir, iteration, metrics, samples):
    """The last call of an iteration. The first line has no seconds: setup would be in them."""
    global last_end
    original_log(args, run_dir, iteration, metrics, samples)
    now = time.perf_counter()
    line = {"seconds": last_end and now - last_end, "lengths": metrics["response_length"]}
    if grpo.RANK == 0:
        print(json.dumps(line | {"peak_gib": common.memory_gib("VmHWM")}), flush=True)
    last_end = time.perf_counter()


grpo.log = timed_log
grpo.main(grpo.Args(**json.loads(sys.argv[1])))
