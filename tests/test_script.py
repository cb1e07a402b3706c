"""Every script learns the toy by its defaults, writes into its run folder alone and asks nobody."""

import os

import pytest
from conftest import POLICY_SCRIPTS, ROOT, SKELETONS, launch, read_jsonl
from zoo import run


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
def test_it_learns(tmp_path, name):
    """A third of the default iterations. The slowest rises from 0.41 to 0.68; one with a wrong sign falls."""
    flags = {"num_iterations": 25, "batch_size": 128, "max_response_length": 40}
    run(name, run_dir=tmp_path, **flags)
    metrics = read_jsonl(tmp_path / "metrics.jsonl")
    first, last = metrics[:3], metrics[-5:]
    score, length = (
        [sum(line[key] for line in lines) / len(lines) for lines in (first, last)]
        for key in ("score", "response_length")
    )
    assert score[0] < 0.5 and score[1] > score[0] + 0.15 and length[1] > 1.2 * length[0]


WATCH = """
import os, sys
log = open(os.environ["AUDIT_LOG"], "a", buffering=1)
def watch(event, args):
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT
    if event == "open" and isinstance(args[0], (str, bytes)) and args[2] & writes:
        log.write("write " + os.path.abspath(os.fsdecode(args[0])) + "\\n")
    if event in ("os.mkdir", "os.rename"):
        log.write("write " + os.path.abspath(os.fsdecode(args[0])) + "\\n")
    if event in ("socket.connect", "socket.getaddrinfo"):
        log.write(f"network {args[-1] if event == 'socket.connect' else args[0]}\\n")
        raise OSError("no route")
sys.addaudithook(watch)
"""


@pytest.mark.parametrize("name", SKELETONS)
def test_a_run_writes_into_its_folder_and_asks_nobody(tmp_path, name):
    """Files and connections watched by an audit hook in the process."""
    home, work, watch, temp = folders = [tmp_path / x for x in ("home", "work", "watch", "temp")]
    for folder in folders:
        folder.mkdir()
    (watch / "sitecustomize.py").write_text(WATCH)
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(temp), "HF_HUB_OFFLINE": "1"}
    env |= {"PYTHONPATH": str(watch), "PYTHONDONTWRITEBYTECODE": "1", "AUDIT_LOG": str(tmp_path / "log")}
    flags = ["--num_iterations", "2", "--eval_every", "2", "--batch_size", "16"]
    launch(ROOT / f"{name}.py", *flags, cwd=work, env=env)
    assert [path.name for path in work.iterdir()] == ["runs"]
    assert not [path for path in temp.rglob("*") if path.is_file()]  # used and left clean
    allowed = str(work / "runs"), str(home / ".cache"), str(temp), "/dev/"
    lines = (tmp_path / "log").read_text().splitlines()
    assert any(str(work / "runs") in line for line in lines)  # the watch did watch
    strays = [line for line in lines if not line.split(" ", 1)[1].startswith(allowed)]
    assert not strays, strays
    cached = {path.relative_to(home).parts[:2] for path in home.rglob("*") if path.is_file()}
    assert cached <= {(".cache", "huggingface")}, cached
