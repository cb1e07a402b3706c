"""Special tokens and chat templates: what a policy reads, and with which token its response ends.

The right ids are written by hand, as a template of zoo.py writes a chat, and tokenized without anything added.
"""

import pytest
import tokenizers
from conftest import write_jsonl
from zoo import CHAT, make_model, make_tokenizer, refused

import grpo

PROMPT = "3 + 5 ?"
USER = {"role": "user", "content": PROMPT}


def ids_of(text: str) -> list[int]:
    """Of these words and nothing else."""
    return make_tokenizer()(text)["input_ids"]


def adding(template: str, **special):
    """A tokenizer that adds to each text what the template names."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(special)
    tokens = [(word, number) for word, number in (("<eos>", 1), ("<bos>", 2)) if word in template]
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        template, special_tokens=tokens
    )
    return tokenizer


@pytest.mark.parametrize("text", [PROMPT, f"<bos> {PROMPT}", f"{PROMPT} <eos>", f"<bos> {PROMPT} <eos>"])
def test_a_text_has_one_bos_and_its_own_eos(text):
    """A BOS is added where the tokenizer adds one and the text has none, and no EOS where the text has none."""
    without = ids_of(text)
    with_bos = ids_of(f"<bos> {text.removeprefix('<bos> ')}")
    for template, right in (
        ("$A", without),
        ("<bos> $A", with_bos),
        ("$A <eos>", without),
        ("<bos> $A <eos>", with_bos),
    ):
        assert grpo.token_ids(adding(template), text) == right


def test_a_token_that_is_bos_and_eos_stays_at_both_ends():
    """As <|endoftext|> of GPT-2, and </s> of OPT, whose tokenizer puts it before a text."""
    for template, begin in (("$A", ""), ("<eos> $A", "<eos> ")):
        tokenizer = adding(template, bos_token="<eos>")
        for text in (PROMPT, f"{PROMPT} <eos>"):
            assert grpo.token_ids(tokenizer, text) == ids_of(begin + text)
        assert grpo.token_ids(tokenizer, f"<eos> {PROMPT}") == ids_of(f"<eos> {PROMPT}")


@pytest.mark.parametrize("bos", [False, True])  # written by the template in any case
def test_the_policy_continues_the_words_of_the_assistant(bos):
    tokenizer = make_tokenizer(bos=bos, chat=True)
    answer = {"role": "assistant", "content": "think 3 +"}
    opened = f"<bos> <user> {PROMPT} <end> <model>"
    for chat, right in (
        ([USER], opened),
        ([USER, answer], f"{opened} think 3 +"),
        ([USER, answer, USER], f"{opened} think 3 + <end> <user> {PROMPT} <end> <model>"),
    ):
        assert grpo.token_ids(tokenizer, chat) == ids_of(right)


def test_the_template_gets_tools_and_its_own_options(tmp_path):
    """Of each row, if it has them, before those of the flag."""
    tokenizer = make_tokenizer(chat=True)
    tools = "{% for tool in tools or [] %}= {{tool.function.name}} {% endfor %}"
    tokenizer.chat_template = tools + "{% if enable_thinking is false %}- {% endif %}" + CHAT
    tool = {"type": "function", "function": {"name": "think", "parameters": {}}}
    quiet = {"chat_template_kwargs": {"enable_thinking": False}}
    cases = [({}, ""), ({"tools": [tool, tool]}, "= think = think ")]
    cases += [(quiet, "- "), ({"tools": None} | quiet, "- ")]
    data = write_jsonl(tmp_path / "data.jsonl", [{"prompt": [USER]} | columns for columns, _ in cases])
    rows = grpo.load_rows(grpo.Args(), str(data), "train", make_model("llama"), tokenizer)
    for row, (_, begin) in zip(rows, cases, strict=True):
        assert row["prompt_ids"] == ids_of(f"{begin}<bos> <user> {PROMPT} <end> <model>")
    loud = write_jsonl(tmp_path / "loud.jsonl", [{"prompt": [USER]} | quiet, {"prompt": [USER]}])
    for value, begins in ((True, ["- ", ""]), (False, ["- ", "- "])):
        args = grpo.Args(chat_template_kwargs={"enable_thinking": value})
        rows = grpo.load_rows(args, str(loud), "train", make_model("llama"), tokenizer)
        for row, begin in zip(rows, begins, strict=True):
            assert row["prompt_ids"] == ids_of(f"{begin}<bos> <user> {PROMPT} <end> <model>")


@pytest.mark.parametrize(
    "end, right", [("<end>", [1, 3]), ("<end>\n", [1, 3]), ("= 9", [1]), ("<eos>\n", [1]), ("", [1])]
)
@pytest.mark.parametrize("configured", [None, 1, [1, 7]])
def test_the_special_token_that_ends_a_turn_ends_a_response(end, right, configured):
    """A newline behind it, and an end in plain words, are no end: the policy would stop in the middle of a text."""
    tokenizer, model = make_tokenizer(), make_model("llama")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>", "<user>", "<model>"]})
    tokenizer.add_tokens("\n")
    assert tokenizer("9\n")["input_ids"] == [15, len(tokenizer) - 1]
    tokenizer.chat_template = CHAT.replace(" <end> ", f" {end}")
    model.generation_config.eos_token_id = configured
    if isinstance(configured, list):
        right = sorted({*right, *configured})
    assert grpo.eos_ids(model, tokenizer) == right
    tokenizer.chat_template = None
    assert grpo.eos_ids(model, tokenizer) == ([1, 7] if isinstance(configured, list) else [1])


def test_an_option_that_parquet_has_filled_in_is_not_given_to_the_template(tmp_path):
    """A row without enable_thinking, beside one with it, is not a row that sets it."""
    tokenizer = make_tokenizer(chat=True)
    tokenizer.chat_template = "{% if enable_thinking is defined %}- {% endif %}" + CHAT
    rows = [{"prompt": [USER], "answer": "8", "chat_template_kwargs": {"enable_thinking": None}}]
    data = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    (row,) = grpo.load_rows(grpo.Args(), data, "train", make_model("llama"), tokenizer)
    assert row["prompt_ids"] == ids_of(f"<bos> <user> {PROMPT} <end> <model>")


def test_a_text_beyond_the_first_positions_of_longrope_is_refused(capsys):
    """There the factors of all positions change, so a short text beside a long one has other log-probs."""
    model = make_model("llama")
    model.config.rope_parameters = {"rope_type": "longrope", "original_max_position_embeddings": 8}
    grpo.check_positions("a text:", model, 8)
    assert "the model has 8 positions" in refused(capsys, grpo.check_positions, "a text:", model, 9)
