"""Runs that die, are told to stop, run out of disk, or meet numbers that are not finite: nothing lost, nothing wrong.

benchmark/soak.py kills many more; the two kills here are the ones that hurt most.
"""

import importlib
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from conftest import POLICY_SCRIPTS, ROOT, SKELETONS, launch, read_jsonl, the_run, write_jsonl
from soak import FLAGS, differences, pid_of_rank, start, timeless, wait_for_lines

FLAGS = [*FLAGS.split(), "--eval_every", "0"]  # the soak evaluates too
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Undisturbed runs by script and ranks."""
    runs = {}

    def run(script: str, ranks: int):
        if (script, ranks) not in runs:
            folder = tmp_path_factory.mktemp("whole")
            launch(ROOT / f"{script}.py", *FLAGS, "--runs_dir", folder, ranks=ranks, env=os.environ | ONE_THREAD)
            runs[script, ranks] = the_run(folder)
        return runs[script, ranks]

    return run


def test_killed_in_the_middle_of_a_checkpoint(tmp_path, whole):
    process = start("ppo", 1, *FLAGS, "--runs_dir", tmp_path / "runs", kill="torn checkpoint:2", folder=tmp_path)
    assert process.wait(timeout=300) == -signal.SIGKILL
    run = the_run(tmp_path / "runs")
    assert (run / "checkpoints" / "000004.pt.tmp").stat().st_size > 1000  # torn, and not under its name
    assert [path.name for path in run.glob("checkpoints/*.pt")] == ["000002.pt"]
    assert start("ppo", 1, *FLAGS, "--resume", run, folder=tmp_path).wait(timeout=300) == 0
    assert differences(whole("ppo", 1), run) == []


def test_one_of_two_ranks_killed(tmp_path, whole):
    """The other one is taken down with it, soon enough not to reach the timeout, and both go on together."""
    process = start("reinforce_pp", 2, *FLAGS, "--runs_dir", tmp_path / "runs", folder=tmp_path)
    wait_for_lines(tmp_path / "runs", 4, process)
    pid = pid_of_rank(process, 1)
    assert pid != process.pid
    os.kill(pid, signal.SIGKILL)
    assert process.wait(timeout=120) != 0
    run = the_run(tmp_path / "runs")
    assert (run / "metrics.jsonl").read_bytes().count(b"\n") < 9  # it was running
    assert start("reinforce_pp", 2, *FLAGS, "--resume", run, folder=tmp_path).wait(timeout=300) == 0
    assert differences(whole("reinforce_pp", 2), run) == []


def test_torchrun_starts_it_again_and_it_goes_on(tmp_path, whole):
    flags = [*FLAGS, "--runs_dir", tmp_path / "runs"]
    more = ("--max-restarts", "1")
    process = start("reinforce_pp", 2, *flags, kill="before rename:2", folder=tmp_path, more=more)
    assert process.wait(timeout=300) == 0
    assert "goes on after iteration 2" in (tmp_path / "log").read_text()
    assert differences(whole("reinforce_pp", 2), the_run(tmp_path / "runs")) == []


@pytest.mark.parametrize("number, ranks", [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_a_signal_finishes_the_iteration_and_says_how_to_go_on(tmp_path, whole, number, ranks):
    flags = [*FLAGS, "--save_every", "0"]  # so that the checkpoint is the signal's
    process = start("reinforce_pp", ranks, *flags, "--runs_dir", tmp_path / "runs", folder=tmp_path)
    wait_for_lines(tmp_path / "runs", 3, process)
    process.send_signal(number)  # under torchrun to its agent, which hands it on
    code = process.wait(timeout=300)
    run, said = the_run(tmp_path / "runs"), (tmp_path / "log").read_text()
    assert code == 128 + number if ranks == 1 else code != 0
    iteration = read_jsonl(run / "metrics.jsonl")[-1]["iteration"]
    assert iteration < 8 and f"stopped by a signal after iteration {iteration}" in said and f"--resume {run}" in said
    assert [path.name for path in run.glob("checkpoints/*.pt")] == [f"{iteration:06d}.pt"]
    assert "Traceback" not in said.split("stopped by")[0] and not (run / "model").exists()
    assert start("reinforce_pp", ranks, *FLAGS, "--resume", run, folder=tmp_path).wait(timeout=300) == 0
    assert differences(whole("reinforce_pp", ranks), run) == []


def test_a_second_signal_ends_it_at_once(tmp_path):
    """A rollout may take minutes, and who presses Ctrl-C twice means it."""
    (tmp_path / "slow.py").write_text(
        "import os, signal, time\n"
        "def slow(completions, **kwargs):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n    os.kill(os.getpid(), signal.SIGINT)\n"  # as one: within seconds
        "    open(__file__ + '.alive', 'w').close()\n    time.sleep(3.5)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(60)\n    return [0.0] * len(completions)\n"
    )
    flags = [*FLAGS, "--eval_every", "0", "--runs_dir", tmp_path / "runs", "--reward", f"{tmp_path}/slow.py:slow"]
    assert launch(ROOT / "grpo.py", *flags, check=False).returncode == -signal.SIGINT
    assert (tmp_path / "slow.py.alive").exists()
    assert not list(the_run(tmp_path / "runs").glob("checkpoints/*"))


def run_main(script: str, monkeypatch, *flags) -> None:
    module = importlib.import_module(script)
    monkeypatch.setattr(sys, "argv", [script, *map(str, flags)])
    module.main(module.parse_args())


def test_a_run_that_died_before_its_first_checkpoint_starts_over(tmp_path, monkeypatch, whole):
    shutil.copytree(whole("reinforce_pp", 1), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    run_main("reinforce_pp", monkeypatch, *FLAGS, "--resume", tmp_path / "run")
    assert timeless(tmp_path / "run" / "metrics.jsonl") == timeless(whole("reinforce_pp", 1) / "metrics.jsonl")


@pytest.mark.parametrize("script", ["reinforce_pp", "ppo"])
def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path, monkeypatch, whole, script):
    """A limit on the size of files stands for it: the write fails in the middle, as it does there."""
    run_main(script, monkeypatch, *FLAGS, "--num_iterations", 2, "--runs_dir", tmp_path / "runs")
    run = the_run(tmp_path / "runs")
    good = (run / "checkpoints" / "000002.pt").read_bytes()

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))

    command = [sys.executable, str(ROOT / f"{script}.py"), *FLAGS, "--resume", str(run)]
    full = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, timeout=300)
    assert full.returncode == 2 and "Traceback" not in full.stderr
    said = full.stderr.strip().splitlines()[-1]
    assert said.startswith("error: cannot write") and "000004.pt (" in said and "make room" in said
    assert (run / "checkpoints" / "000002.pt").read_bytes() == good
    assert not list(run.rglob("*.tmp"))
    run_main(script, monkeypatch, *FLAGS, "--resume", run)
    if script == "reinforce_pp":
        assert timeless(run / "metrics.jsonl") == timeless(whole(script, 1) / "metrics.jsonl")


def test_a_full_disk_leaves_no_half_model(tmp_path, monkeypatch, capsys):
    import safetensors.torch

    def full(tensors, filename, *args, **kwargs):
        with open(filename, "wb") as file:
            file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
    assert safetensors.torch.save_file is not full
    with pytest.raises(SystemExit) as exit:
        run_main("rloo", monkeypatch, *FLAGS, "--num_iterations", 1, "--runs_dir", tmp_path)
    assert exit.value.code == 2 and "No space left" in capsys.readouterr().err
    assert not [path.name for path in the_run(tmp_path).iterdir() if path.name.startswith("model")]
    monkeypatch.undo()
    run_main("rloo", monkeypatch, *FLAGS, "--num_iterations", 1, "--resume", the_run(tmp_path))
    assert (the_run(tmp_path) / "model" / "model.safetensors").exists()


NOT_FINITE = [(script, what) for script in SKELETONS for what in ("loss", "gradient")] + [("ppo", "value loss")]


@pytest.mark.parametrize("script, what", NOT_FINITE)
def test_a_number_that_is_not_finite_stops_before_the_weights(tmp_path, monkeypatch, capsys, script, what):
    module = importlib.import_module(script)
    name = "value_loss" if what == "value loss" else "policy_loss"
    function, calls, stepped = getattr(module, name), [], []

    def third_call_fails(args, mb, differentiated, *counts):
        loss, stats = function(args, mb, differentiated, *counts)
        calls.append(1)
        if len(calls) < 3:
            return loss, stats
        if what == "gradient":
            differentiated.register_hook(lambda gradient: gradient * math.inf)
            return loss, stats
        return loss * math.nan, {key: value * math.nan for key, value in stats.items()}

    step = torch.optim.AdamW.step
    monkeypatch.setattr(module, name, third_call_fails)
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *a, **k: (stepped.append(1), step(*a, **k))[1])
    with pytest.raises(SystemExit) as exit:
        run_main(script, monkeypatch, *FLAGS, "--save_every", 0, "--runs_dir", tmp_path)
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert exit.value.code == 2 and "NaN or infinite" in said and "not_finite.0.pt has the batch" in said
    assert len(stepped) == (2 if script != "ppo" else 4)  # two steps before it, and none with it
    batch = torch.load(the_run(tmp_path) / "not_finite.0.pt", weights_only=True)
    assert {"sequences", "response_mask", "scores", "logprobs", "advantages", "iteration"} <= batch.keys()
    assert not list(the_run(tmp_path).glob("checkpoints/*.pt"))


def test_nan_on_one_rank_ends_both_with_one_sentence(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os\ncalls = []\n"
        "def mine(completions, **kwargs):\n"
        "    calls.append(1)\n"
        "    bad = os.environ['RANK'] == '1' and len(calls) == 3\n"
        "    return [float('nan') if bad else float(len(text)) for text in completions]\n"
    )
    flags = [*FLAGS, "--eval_every", "0", "--reward", f"{tmp_path}/mine.py:mine", "--runs_dir", tmp_path / "runs"]
    result = launch(ROOT / "reinforce_pp.py", *flags, ranks=2, check=False)
    assert result.returncode != 0
    said = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and "iteration 3: a score is NaN or infinite" in said[0]
    run = the_run(tmp_path / "runs")
    assert sorted(path.name for path in run.glob("not_finite*")) == ["not_finite.0.pt", "not_finite.1.pt"]
    scores = [torch.load(run / f"not_finite.{rank}.pt", weights_only=True)["scores"] for rank in range(2)]
    assert scores[0].isfinite().all() and not scores[1].isfinite().any()
    assert [path.name for path in run.glob("checkpoints/*.pt")] == ["000002.pt"]


@pytest.mark.parametrize("script", ["reinforce_pp"])
@pytest.mark.parametrize(
    "flags, words",
    [
        ("--reward {here}/same.py:same", "equal scores"),
        ("--reward {here}/same.py:same --samples_per_prompt 2", "equal scores"),
        ("--max_response_length 1", "% of the responses are cut"),
        ("--learning_rate 0.1", "nats a token"),
        ("", None),
    ],
)
def test_what_usually_means_a_mistake_is_said_once(tmp_path, monkeypatch, capsys, script, flags, words):
    (tmp_path / "same.py").write_text("def same(completions, **kwargs): return [0.1] * len(completions)\n")
    flags = flags.format(here=tmp_path).split()
    run_main(
        script,
        monkeypatch,
        *FLAGS,
        "--max_response_length",
        40,
        "--num_iterations",
        3,
        "--eval_every",
        0,
        *flags,
        "--runs_dir",
        tmp_path / "runs",
    )
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    if words is None:
        assert said == []
    else:
        assert len([line for line in said if words in line]) == 1, said


def test_a_first_step_ratio_that_is_not_1_is_said(tmp_path, monkeypatch, capsys):
    """As dropout would make it: log-probs that come out otherwise the second time."""
    module = importlib.import_module("grpo")
    token_logprobs = module.token_logprobs

    def noisy(*inputs, **options):
        logprobs, entropy = token_logprobs(*inputs, **options)
        return logprobs + 0.01 * torch.is_grad_enabled(), entropy

    monkeypatch.setattr(module, "token_logprobs", noisy)
    run_main("grpo", monkeypatch, *FLAGS, "--num_iterations", 2, "--eval_every", 0, "--runs_dir", tmp_path)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert len([line for line in said if "first-step ratio is off 1 by 0.01" in line]) == 1


@pytest.mark.parametrize("script", SKELETONS)
def test_text_from_data_cannot_steer_the_terminal(tmp_path, monkeypatch, capsys, script):
    """Escape sequences in prompts, answers and groups; and a group is no path."""
    rows = [
        {"prompt": "3 + 5 \x1b[31m?\x07", "answer": "8\x1b[2J", "group": f"../../\x1b]0;{i}\x07\u202e"}
        for i in range(8)
    ]
    data = write_jsonl(tmp_path / "data.jsonl", rows * 4)
    flags = ["--batch_size", 16, "--num_iterations", 1, "--dataset", data, "--eval_dataset", data, "--log_every", 1]
    run_main(script, monkeypatch, *flags, "--runs_dir", tmp_path / "runs")
    said = capsys.readouterr()
    for text in (said.out, said.err, (the_run(tmp_path / "runs") / "samples.jsonl").read_text()):
        assert all(c.isprintable() or c in "\n\r" for c in text)
    assert "\\x1b[31m" in said.out
    run = the_run(tmp_path / "runs")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl", "runs"]
    names = {"args.json", "checkpoints", "metrics.jsonl", "model", "samples.jsonl", f"{script}.py"}
    assert {path.name for path in run.iterdir()} == names
    assert json.loads((run / "samples.jsonl").read_text().splitlines()[0])["prompt"] == rows[0]["prompt"]


def test_no_script_opens_a_pickle_or_evaluates_text():
    """Nothing that runs what it reads, but the reward function that the user names."""
    for name in [*POLICY_SCRIPTS, "sft", "reward_model"]:
        source = (ROOT / f"{name}.py").read_text()
        assert "eval(" not in source.replace(".eval(", "") and "exec(" not in source and "import pickle" not in source
        assert "trust_remote_code=True" not in source and source.count("trust_remote_code=False") == 1
        loads = source.count("torch.load(")
        assert loads == source.count("weights_only=True") >= 1
        assert "use_safetensors" in source
        assert source.count("runpy") == (2 if name in POLICY_SCRIPTS else 0)
