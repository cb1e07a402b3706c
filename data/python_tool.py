"""Python as a tool of reinforce_pp_tools.py: run the code with which a response ends, and answer with its output.

    --tool data/python_tool.py:fenced --call_end '```'     answers a ```python block with an ```output block

Each call runs in a new process and session, with an empty environment and an empty folder. Its time, CPU time, memory,
file size and output are limited, and the process is killed together with its children. This is no sandbox: the code
runs as your user, can read your files (the environment of the training process too, in /proc), can use the network, and
can start processes that outlive the call. Train in a container without secrets and without a network. Linux and macOS.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile

SECONDS = 5
CHARACTERS = 1000  # of an answer; a longer one loses its middle
RUNNER = f"""
import resource, sys
limits = {{"CPU": {SECONDS}, "AS": 2**32, "FSIZE": 2**20, "CORE": 0}}
for name, limit in limits.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
try:
    exec(compile(sys.stdin.read(), "<call>", "exec"), {{"__name__": "__main__"}})
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""


def run(code: str) -> str:
    """What the code prints, and why it was stopped, if it was."""
    command = [sys.executable, "-sPc", RUNNER]
    # The output goes to a file. A pipe would block on a flood of output, or while a child keeps it open.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryDirectory() as folder:
        options = {"cwd": folder, "env": {"PYTHONHASHSEED": "0"}, "start_new_session": True}
        options |= {"stdin": subprocess.PIPE, "stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, **options)
        try:
            process.communicate(code.encode(errors="replace"), timeout=SECONDS)
            reason = f"killed by signal {-process.returncode}" if process.returncode < 0 else ""
        except subprocess.TimeoutExpired:
            reason = f"TimeoutError: not finished after {SECONDS} seconds"
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # no process of the session is left
            process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace").strip()
    if len(text) > CHARACTERS:
        text = f"{text[: CHARACTERS // 2]} ... {text[-CHARACTERS // 2 :]}"
    lines = [line for line in (text, reason) if line]
    return "\n".join(lines) or "nothing printed"


def fenced(text: str) -> str | None:
    """The answer to a response that ends in a closed block of Python."""
    block = re.search(r"```python\n((?:(?!```).)*)```\s*\Z", text, re.DOTALL)
    return f"\n```output\n{run(block[1])}\n```\n" if block else None
