"""reinforce_pp_tools.py: sampling continues behind a tool's results, and nothing is learned from them."""

import pytest
import tokenizers
import torch
import transformers
from zoo import make_model, make_tokenizer, recorded, refused, run

import reinforce_pp_tools as script

PROMPTS = ["3 + 5 ?", "1 - 2 + 3 - 4 + 5 - 6 ?", "9 ?", "4 + 4 - 4 ?", "3 + 5 ?", "2 ?", "2 - 1 + 8 ?"]
EOS_IDS = [1, 6, 14]
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


def generate(model, tool, greedy=False, prompts=IDS, k=1, call_end="", tokenizer=TOKENIZER, **flags):
    torch.manual_seed(0)
    args = script.Args(tool=tool, call_end=call_end, **flags)
    script.load_tool(args, tokenizer)
    return script.generate(args, model, tokenizer, prompts, k, greedy)


def test_the_calculator_adds_and_answers_nothing_else():
    calculate = script.load_function("toy/tools/calculator.py:calculate")
    calls = {"call 4 8 + 7 1 5 =": "7 6 3", "call 5 =": "5", "call 4 + =": None, "call =": None, "5 =": None}
    assert {text: calculate(text) for text in calls} == calls


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
    """Token by token, with what is attended to and what is learned. A finished row asks nothing.

    EOS asks the tool whatever call_end is, and an answer may contain an EOS.
    """
    calls = recorded(monkeypatch, script, "call_tool")
    flags = {"max_calls": max_calls, "call_end": call_end, "max_response_length": 16}
    rollout = generate(model, tool, greedy=True, **flags)
    responses = []
    for i, prompt in enumerate(IDS):
        ids, sampled, ended = plain_greedy(model, prompt, 16, max_calls, call_end)
        responses.append(ids)
        assert rollout["sequences"][i][rollout["attention_mask"][i].bool()].tolist() == prompt + ids
        assert rollout["response_mask"][i].tolist() == sampled + [False] * (16 - len(sampled))
        assert rollout["attention_mask"][i, -16:].tolist() == [1] * len(ids) + [0] * (16 - len(ids))
        assert bool(rollout["truncated"][i]) != ended
    for (_, _, callers), _ in calls:
        for ids in callers.tolist():
            assert any(ids == response[: len(ids)] for response in responses)


def test_logprobs_of_sampling_are_those_of_the_update(model, tool):
    rollout = generate(model, tool, prompts=IDS * 2, k=2, max_response_length=24, temperature=0.8)
    mask = rollout["response_mask"]
    in_answer = rollout["attention_mask"][:, -24:].bool() & ~mask
    assert (in_answer[:, :-1] & mask[:, 1:]).any()  # some rows go on after an answer
    again = script.rollout_logprobs(script.Args(temperature=0.8), model, rollout)
    torch.testing.assert_close(again, rollout["old_logprobs"], rtol=1e-4, atol=1e-4)
    assert (rollout["old_logprobs"][~mask] == 0).all() and (rollout["entropy"][~mask] == 0).all()


def test_a_call_end_is_a_part_of_a_token_or_refused(tmp_path, capsys):
    """As `)` is in a vocabulary with tokens such as `=)`."""
    run("reinforce_pp_tools", call_end="al", num_iterations=1, run_dir=tmp_path / "run")
    assert "--call_end §: " in refused(capsys, run, "reinforce_pp_tools", call_end="§", run_dir=tmp_path)


def test_answers_become_ids_in_order_and_without_a_bos():
    tokenizer, ids = make_tokenizer(bos=True), [[9], [8]]
    assert script.call_tool(lambda text: None, tokenizer, ids) == [[], []]
    assert script.call_tool(lambda text: int(text), tokenizer, ids) == [[9], [8]]


def test_ids_stay_as_they_were_sampled(tool):
    """A tokenizer that would read the text of two ids as one: the ids stay two."""
    words = {"<pad>": 0, "<eos>": 1, "a": 2, "b": 3, "ab": 4, "+": 5}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(words, [("a", "b")]))
    core.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    assert tokenizer("ab")["input_ids"] == [4]
    model = make_model("llama", vocab_size=6)
    flags = {"tokenizer": tokenizer, "call_end": "+", "max_response_length": 30}
    rollout = generate(model, tool, prompts=[[2, 3]] * 400, **flags)
    before, after = rollout["sequences"][:, 2:-1], rollout["sequences"][:, 3:]
    assert ((before == 2) & (after == 3)).any()
