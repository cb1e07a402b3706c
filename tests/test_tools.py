"""reinforce_pp_tools.py: sampling continues behind a tool's answers, and nothing is learned from them."""

import re
import subprocess
import sys

import pytest
import torch
import transformers
from conftest import ROOT, launch, read_jsonl
from zoo import make_model, make_tokenizer, run

import reinforce_pp_tools as script

PROMPTS = ["3 + 5 ?", "1 - 2 + 3 - 4 + 5 - 6 ?", "9 ?", "4 + 4 - 4 ?", "3 + 5 ?", "2 ?", "2 - 1 + 8 ?"]
EOS_IDS = [1, 6, 14]
NO_FLOAT64 = {"gemma2", "qwen3_next"}
TOKENIZER = make_tokenizer()
IDS = [TOKENIZER(prompt)["input_ids"] for prompt in PROMPTS]

# Asked after every token. Answers have 0 to 3 ids, one of them an EOS.
TOOL = """
def tool(text):
    return [None, "7", "7 <eos> =", "8 - 9", "", None, None][sum(map(ord, text)) % 7]
"""


@pytest.fixture
def tool(tmp_path):
    (tmp_path / "tool.py").write_text(TOOL)
    return f"{tmp_path / 'tool.py'}:tool"


@pytest.fixture(params=["llama", "gpt2", "gemma2", "mistral", "lfm2", "qwen3_next"])
def model(request):
    model = make_model(request.param)
    model.generation_config.eos_token_id = EOS_IDS
    return model


def make_llama():
    model = make_model("llama")
    model.generation_config.eos_token_id = EOS_IDS
    return model


def generate(model, tool, greedy=False, prompts=IDS, k=1, call_end="", tokenizer=TOKENIZER, **flags):
    torch.manual_seed(0)
    args = script.Args(tool=tool, call_end=call_end, **flags)
    return script.generate(model, tokenizer, prompts, args, samples_per_prompt=k, greedy=greedy)


def in_answer(rollout):
    T = rollout["response_mask"].shape[1]
    return rollout["attention_mask"][:, -T:].bool() & ~rollout["response_mask"]


def plain_greedy(model, prompt, length, max_calls, call_end):
    """One response by the definition: no cache, no batch, a list of ids and who wrote each."""
    names = {}
    exec(TOOL, names)
    ids, sampled, ended, calls = [], [], False, 0
    while len(ids) < length and not ended:
        with torch.no_grad():
            token = int(model(torch.tensor([prompt + ids])).logits[0, -1].argmax())
        ids, sampled = [*ids, token], [*sampled, True]
        answer = None
        if calls < max_calls and (token in EOS_IDS or call_end in TOKENIZER.decode([token])):
            answer = names["tool"](TOKENIZER.decode(ids))
        answer_ids = TOKENIZER(answer or "", add_special_tokens=False)["input_ids"][: length - len(ids)]
        calls += len(answer_ids) > 0
        ended = token in EOS_IDS and not answer_ids
        ids, sampled = ids + answer_ids, sampled + [False] * len(answer_ids)
    return ids, sampled, ended


@pytest.mark.parametrize("max_calls, call_end", [(0, ""), (1, ""), (4, ""), (4, "+")])
def test_greedy_equals_the_plain_loop(model, tool, max_calls, call_end, monkeypatch):
    """Token by token, with what is attended to and what is learned. A finished row asks nothing."""
    asked, ask = [], script.ask
    monkeypatch.setattr(
        script, "ask", lambda f, tokenizer, ids: asked.append(ids.tolist()) or ask(f, tokenizer, ids)
    )
    flags = {"max_calls": max_calls, "call_end": call_end, "max_response_length": 16}
    rollout = generate(model, tool, greedy=True, **flags)
    responses = []
    for i, prompt in enumerate(IDS):
        ids, sampled, ended = plain_greedy(model, prompt, 16, max_calls, call_end)
        responses.append(ids)
        attended = rollout["attention_mask"][i].bool()
        assert rollout["sequences"][i][attended].tolist() == prompt + ids
        assert (rollout["sequences"][i][~attended] == 0).all()
        assert rollout["response_mask"][i].tolist() == sampled + [False] * (16 - len(sampled))
        assert rollout["attention_mask"][i, -16:].tolist() == [1] * len(ids) + [0] * (16 - len(ids))
        assert bool(rollout["truncated"][i]) != ended
    assert in_answer(rollout).any() or not max_calls or call_end
    assert all(any(ids == response[: len(ids)] for response in responses) for ids in asked)


def test_eos_asks_the_tool_whatever_call_end_is(tmp_path):
    """The turn of a chat ends with an EOS. The answer contains another, and the next EOS ends the response."""
    (tmp_path / "tool.py").write_text(
        "def f(text):\n    return '<end> <eos> 3' if text.endswith('<eos>') else None"
    )
    model = make_model("llama", seed=5)
    model.generation_config.eos_token_id = [1]
    flags = {"call_end": "think", "max_response_length": 20, "max_calls": 1}
    rollout = generate(model, f"{tmp_path / 'tool.py'}:f", prompts=IDS * 10, **flags)
    responses, mask = rollout["sequences"][:, -20:].tolist(), rollout["response_mask"]
    answered = [i for i, ids in enumerate(responses) if ids.count(1) == 3]
    assert answered and not rollout["truncated"][answered].any()
    for i in answered:
        first = responses[i].index(1)
        assert responses[i][first : first + 4] == [1, 3, 1, 9]
        assert mask[i, first : first + 5].tolist() == [1, 0, 0, 0, 1]


def test_logprobs_of_sampling_are_those_of_the_update(model, tool):
    rollout = generate(model, tool, prompts=IDS * 2, k=2, max_response_length=24, temperature=0.8)
    mask, holes = rollout["response_mask"], in_answer(rollout)
    assert (
        (holes[:, :-1] & mask[:, 1:]).any() and rollout["truncated"].any() and not rollout["truncated"].all()
    )
    assert not any(x.requires_grad or x.is_inference() for x in rollout.values())
    with torch.no_grad():
        again = script.token_logprobs(model, rollout, 0.8)
    torch.testing.assert_close(again, rollout["old_logprobs"], rtol=1e-4, atol=1e-4)
    assert (again[~mask] == 0).all() and (rollout["entropy"][~mask] == 0).all()


def with_advantages(rollout, args, dtype):
    """The rollout with all that policy_loss reads; ratios and KL are not 1 and 0."""
    torch.manual_seed(1)
    mask = rollout["response_mask"]
    old_logprobs = rollout["old_logprobs"].to(dtype)
    noise = 0.3 * torch.randn(mask.shape, dtype=dtype)
    rollout = rollout | {
        "scores": torch.randn(len(mask), dtype=dtype),
        "old_logprobs": old_logprobs + noise * mask,
    }
    rollout["ref_logprobs"] = (old_logprobs - 0.1) * mask
    return rollout | script.compute_advantages(args, rollout)


def gradient(model, args, rollout, size):
    model.zero_grad()
    rows = torch.arange(len(rollout["scores"]))
    for _, batch in script.micro_batches(rollout, rows, size):
        logprobs = script.token_logprobs(model, batch, args.temperature)
        loss, _ = script.policy_loss(args, batch, logprobs, len(rows), rollout["response_mask"].sum())
        loss.backward()
    return torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])


def test_the_gradient_depends_neither_on_micro_batches_nor_on_padding(model, tool):
    if model.config.model_type not in NO_FLOAT64:
        model = model.double()
    args = script.Args(samples_per_prompt=2, kl_coef=0.3)
    generated = generate(model, tool, prompts=IDS * 2, k=2, max_response_length=20)
    rollout = with_advantages(generated, args, model.dtype)
    whole = gradient(model, args, rollout, 100)
    wider = dict(rollout)
    for name, x in rollout.items():
        if x.dim() == 2:  # five columns of padding on the right, and three on the left of prompts
            left = 3 if name in ("sequences", "attention_mask") else 0
            wider[name] = torch.nn.functional.pad(x, (left, 5), value=0)
    tolerance = 3e-4 if model.config.model_type in NO_FLOAT64 else 1e-12
    scale = float(whole.abs().max())
    assert scale > 0
    for case, size in ((rollout, 1), (rollout, 3), (wider, 100), (wider, 5)):
        assert float((gradient(model, args, case, size) - whole).abs().max()) < tolerance * scale


def test_no_gradient_reaches_the_logits_of_an_answer(tool):
    """It is exactly 0 there, whatever the tensors of the rollout hold, and not 0 elsewhere."""
    model = make_llama().double()
    args = script.Args(samples_per_prompt=2, kl_coef=0.3)
    generated = generate(model, tool, prompts=IDS, k=2, max_response_length=20)
    rollout = with_advantages(generated, args, torch.float64)
    whole, holes = gradient(model, args, rollout, 14), in_answer(rollout)
    for name in ("old_logprobs", "ref_logprobs", "advantages"):
        rollout[name] = rollout[name].masked_fill(holes, torch.nan)
    seen = []
    hook = lambda _, __, logits: logits.retain_grad() or seen.append(logits)  # noqa: E731
    model.get_output_embeddings().register_forward_hook(hook)
    assert torch.equal(gradient(model, args, rollout, 14), whole)
    ((_, batch),) = script.micro_batches(rollout, torch.arange(14), 14)
    touched = seen[0].grad[:, :-1].abs().amax(-1)  # (B, T)
    assert (touched[in_answer(batch)] == 0).all() and in_answer(batch).any()
    assert (touched[batch["response_mask"]] > 0).float().mean() > 0.3


def test_without_a_call_it_is_its_parent(tmp_path):
    """To the last bit: weights, metrics, samples. The calculator is asked at each `=` and answers nothing."""
    common = ["--model", "toy/policy", "--dataset", "toy/train.jsonl", "--device", "cpu", "--eval_every", 0]
    common += ["--max_response_length", 40, "--num_iterations", 4, "--log_every", 2]
    names = ["reinforce_pp_baseline", "reinforce_pp_tools"]
    for name in names:
        launch(f"{name}.py", *common, "--run_dir", tmp_path / name, cwd=ROOT)
    metrics = [read_jsonl(tmp_path / name / "metrics.jsonl") for name in names]
    for one, other in zip(*metrics, strict=True):
        assert other.pop("calls", 0) == 0
        assert (one | {"tokens_per_second": 0}) == (other | {"tokens_per_second": 0})
    samples = [(tmp_path / name / "samples.jsonl").read_text() for name in names]
    assert samples[0] == samples[1]
    weights = [torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["policy"] for name in names]
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())


def test_metrics_count_sampled_tokens(tmp_path, monkeypatch):
    """KL, lengths and calls, against what generate gave and the tool answered."""
    answers, rollouts, ask, original = [], [], script.ask, script.generate
    monkeypatch.setattr(script, "ask", lambda *args: answers.append(ask(*args)) or answers[-1])
    monkeypatch.setattr(script, "generate", lambda *args: rollouts.append(original(*args)) or rollouts[-1])
    flags = {"num_iterations": 2, "batch_size": 64, "log_every": 1, "max_response_length": 48}
    run("reinforce_pp_tools", **flags, run_dir=tmp_path / "run")
    metrics = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert abs(metrics[0]["kl"]) < 1e-5 < metrics[1]["kl"]
    called = sum(len(ids) > 0 for ids in answers)
    assert called > 10 and sum(x["calls"] for x in metrics) * 64 == pytest.approx(called)
    sampled = sum(int(rollout["response_mask"].sum()) for rollout in rollouts)
    assert sum(x["response_length"] for x in metrics) * 64 == pytest.approx(sampled)
    attended = sum(int(rollout["attention_mask"][:, -48:].sum()) for rollout in rollouts)
    assert attended == sampled + sum(map(len, answers))
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    pattern = r"(call [\d ]+ \+ [\d ]+ = [\d ]+ )*answer [\d ]+ <eos>"
    assert all(re.fullmatch(pattern, x["response"]) for x in samples)


@pytest.mark.parametrize("flags", [{"tool": "none.py:f"}, {"tool": "toy/make_tools.py:f"}, {"call_end": "§"}])
def test_a_wrong_tool_is_refused_before_training(flags, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        run("reinforce_pp_tools", **flags, run_dir=tmp_path / "run")
    [(name, value)] = flags.items()
    said = capsys.readouterr().err
    assert f"--{name} {value}" in said and said.count("\n") == 1 and not (tmp_path / "run").exists()


def test_an_exception_is_an_answer():
    def tool(text):
        raise ValueError(f"3 + {text}")

    ids = script.ask(tool, TOKENIZER, TOKENIZER("4 =")["input_ids"])
    assert "+" in TOKENIZER.decode(ids) and script.ask(lambda text: None, TOKENIZER, [3]) == []
    assert script.ask(lambda text: 3, TOKENIZER, [9]) == TOKENIZER("3")["input_ids"]  # a number, not a text
    assert script.ask(lambda text: "3 +", make_tokenizer(bos=True), [9]) == TOKENIZER("3 +")["input_ids"]


def test_ids_stay_as_they_were_sampled(tool):
    """A tokenizer that would read the text of two ids as one: the ids stay two."""
    import tokenizers

    words = {"<pad>": 0, "<eos>": 1, "a": 2, "b": 3, "ab": 4, "+": 5}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(words, [("a", "b")]))
    core.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", pad_token="<pad>"
    )
    assert tokenizer("ab")["input_ids"] == [4]
    model = make_model("llama", vocab_size=6)
    flags = {"prompts": [[2, 3]] * 40, "tokenizer": tokenizer, "call_end": "+", "max_response_length": 30}
    rollout = generate(model, tool, **flags)
    assert any(",2,3," in f",{','.join(map(str, ids))}," for ids in rollout["sequences"][:, 2:].tolist())


PROGRAMS = {  # code, what the answer contains
    "output": ("print(6 * 7)", "42"),
    "error": ("1 / 0", "ZeroDivisionError"),
    "syntax": ("def", "SyntaxError"),
    "silence": ("x = 1", "nothing printed"),
    "endless loop": ("while True: pass", "killed|TimeoutError"),
    "sleep": ("import time; time.sleep(60)", "TimeoutError"),
    "flood": ("while True: print('x' * 10**6)", r"xxx \.\.\. "),
    "memory": ("x = bytearray(2**34)", "MemoryError"),
    "environment": ("import os; print(os.environ)", r"environ\(\{(?!.*SECRET)"),
    "empty folder": ("import os; print(os.listdir())", r"\[\]"),
    "children": (
        "import os\nfor _ in range(5): os.fork()\nimport time; time.sleep(60)",
        "TimeoutError|Error",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_python_tool_survives(name, monkeypatch):
    import python_tool

    monkeypatch.setattr(python_tool, "SECONDS", 2)
    monkeypatch.setattr(python_tool, "RUNNER", python_tool.RUNNER.replace('"CPU": 5', '"CPU": 2'))
    monkeypatch.setenv("SECRET", "1")
    code, pattern = PROGRAMS[name]
    answer = python_tool.fenced(f"I compute:\n```python\n{code}\n```")
    assert re.search(pattern, answer, re.DOTALL) and len(answer) < 1200
    assert answer.startswith("\n```output\n") and answer.endswith("\n```\n")
    if name == "children":
        processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
        assert f"{sys.executable} -sPc" not in processes


def test_the_python_tool_answers_the_end_of_a_call_only():
    import python_tool

    assert python_tool.fenced("```python\nprint(1)\n") is None and python_tool.fenced("no code") is None
    call = '<tool_call>\n{"name": "python", "arguments": {"code": "print(3)"}}\n</tool_call>'
    turn = f"<|im_start|>assistant\n{call}<|im_end|>"
    assert "<tool_response>\n3\n</tool_response>" in python_tool.chat(turn)
    assert "no call" in python_tool.chat(turn.replace('"code"', '"text"'))
    assert python_tool.chat(turn.removesuffix("<|im_end|>")) is None
