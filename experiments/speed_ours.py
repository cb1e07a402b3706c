"""grpo.py, or a variant of it, with a clock.

speed.py starts this with the script and its flags as JSON. Prints a JSON line for each iteration.
"""

import importlib
import json
import sys
import time

import common  # adds the folder of the scripts to sys.path

module, flags = importlib.import_module(sys.argv[1]), json.loads(sys.argv[2])
original_log = module.log
last_end = None


def timed_log(run_dir, wandb_run, iteration, metrics, *arguments, **options):
    """The last call of an iteration. The first line has no seconds: setup would be in them."""
    global last_end
    original_log(run_dir, wandb_run, iteration, metrics, *arguments, **options)
    now = time.perf_counter()
    line = {"seconds": last_end and now - last_end, "lengths": metrics["response_length"]}
    if module.RANK == 0:
        print(json.dumps(line | {"peak_gib": common.memory_gib("VmHWM")}), flush=True)
    last_end = time.perf_counter()


module.log = timed_log
module.main(module.Args(**flags))
