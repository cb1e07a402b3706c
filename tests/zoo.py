"""Small random models of many architectures, tokenizers, and functions that run a script in this process.

Some of them kill or interrupt a run at a bad moment, and compare the folders of two runs."""

import importlib
import json
import multiprocessing
import os
import signal
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
import tyro
from conftest import ROOT, launch, read_jsonl, write_jsonl
from driver import without_clock

WORDS = "<pad> <eos> <bos> <end> <user> <model> 0 1 2 3 4 5 6 7 8 9 + - = ? answer think".split()
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 8, "eos_token_id": 1, "bos_token_id": 2, "pad_token_id": None}
SIZES["tie_word_embeddings"] = False  # tied random weights repeat one token for ever
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_chunk_size": 8}
DELTA = {"layer_types": ["linear_attention", "linear_attention", "full_attention"], "linear_num_key_heads": 2}
DELTA |= {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
GEMMA = {"sliding_window": 4, "query_pre_attn_scalar": 8}
# The class of the config, and its options besides SIZES. Attention windows are shorter than prompts.
ARCHITECTURES = {
    "llama": ("Llama", {"num_key_value_heads": 4}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {**GEMMA, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3Text", {**GEMMA, "sliding_window_pattern": 2}),
    "gpt2": ("GPT2", {}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
    "bloom": ("Bloom", {}),
    "mistral": ("Mistral", {"sliding_window": 4}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    "falcon_h1": ("FalconH1", MAMBA),
    "qwen3_next": ("Qwen3Next", {**EXPERTS, **DELTA}),
}


def make_model(name: str, vocab_size: int = len(WORDS)):
    """A model in eval mode. Its weights are so large that its distributions are far from uniform. <eos> is 1."""
    torch.manual_seed(0)
    family, options = ARCHITECTURES[name]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, "vocab_size": vocab_size, **options})
    config.initializer_range = 0.3
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # norms and biases start at 1 and 0, where some bugs would not show
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


CHAT = "{{bos_token}} {% for m in messages %}<{{'model' if m.role == 'assistant' else 'user'}}> {{m.content}}"
CHAT += " <end> {% endfor %}{% if add_generation_prompt %}<model> {% endif %}"


def make_tokenizer(bos: bool = False, pad: str | None = "<pad>", chat: bool = False):
    """A tokenizer with one token per word.

    `bos` puts <bos> before every text, as Llama and Gemma do. `chat` adds a template whose turns end in <end>.
    """
    words = {word: i for i, word in enumerate(WORDS)}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    if bos:
        template = tokenizers.processors.TemplateProcessing
        core.post_processor = template("<bos> $A", special_tokens=[("<bos>", 2)])
    special = {"eos_token": "<eos>", "bos_token": "<bos>", "pad_token": pad}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, **special)
    tokenizer.chat_template = CHAT if chat else None
    return tokenizer


def save(folder: Path, model, tokenizer, stop_ids=None) -> str:
    """Save a model as on the hub, with sampling settings in the generation config, which scripts must ignore."""
    if model.can_generate():
        sampling = {"top_k": 2, "top_p": 0.5, "temperature": 0.2, "repetition_penalty": 1.5}
        sampling |= {"do_sample": True, "eos_token_id": stop_ids or 1, "pad_token_id": 0}
        model.generation_config = transformers.GenerationConfig(**sampling)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def refused(capsys, start, *args, **flags) -> str:
    """The one line on stderr of a call that exits with code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        start(*args, **flags)
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1, said
    return said


def record(folder: Path, cases: list[dict], ranks: int) -> list[list[dict]]:
    """Run the cases in one launch of driver.py. Returns what every rank recorded in each case.

    The run of case i is in folder/seen.run<i>.
    """
    (folder / "cases.json").write_text(json.dumps(cases, default=str))
    result = launch(ROOT / "tests" / "driver.py", folder / "seen", folder / "cases.json", ranks=ranks)
    assert result.stderr == ""
    of_ranks = [torch.load(folder / f"seen.{rank}.pt", weights_only=True) for rank in range(ranks)]
    return [list(seen) for seen in zip(*of_ranks)]


def recorded(monkeypatch, module, name: str) -> list:
    """The arguments and the result of each call of a function of a script."""
    calls, function = [], getattr(module, name)

    def stand_in(*args, **options):
        result = function(*args, **options)
        calls.append((args, result))
        return result

    monkeypatch.setattr(module, name, stand_in)
    return calls


def run(script: str, **flags) -> None:
    """Run a policy script in this process. The run is small unless the flags say otherwise."""
    module = importlib.import_module(script)
    small = dict(num_iterations=2, batch_size=16, max_response_length=8, eval_every=0, device="cpu")
    words = []
    for name, x in (small | flags).items():
        words.append(f"--{'' if x else 'no_'}{name}" if isinstance(x, bool) else f"--{name}={x}")
    module.main(tyro.cli(module.Args, args=words, description=module.__doc__, use_underscores=True))


# The data in toy/ of sft.py, reward_model.py and dpo.py
STAGE_DATA = {"sft": "demonstrations", "reward_model": "preferences_train", "dpo": "preferences_train"}
PAIRS = [
    {"prompt": "3 + 5 ?", "chosen": "think 3 + 5 = 8 answer 8", "rejected": "answer 7", "margin": 0.0},
    {"prompt": "1 - 2 + 3 - 4 ?", "chosen": "answer 8", "rejected": "think 9 answer 9", "margin": 0.5},
    {"prompt": "9 ?", "chosen": "answer 9", "rejected": "answer 1"},
]
STAGE_MODELS = ["llama", "gpt2", "qwen2", "mistral", "lfm2"]  # all in float64 after .double()


def few(name: str, count: int, folder: Path) -> Path:
    """A file with the first rows of the data that a script trains on, or of the toy's held-out prompts."""
    rows = read_jsonl(ROOT / "toy" / f"{STAGE_DATA.get(name, 'heldout')}.jsonl")
    return write_jsonl(folder / f"{name}.jsonl", rows[:count])


def held_out(name: str, data: Path | None, size: int) -> dict:
    """The flags of a stage with which sft.py evaluates its last `size` examples, and other stages a file."""
    return {"eval_size": size} if name == "sft" else {"eval_dataset": data}


def run_stage(script, **flags) -> None:
    flags = {name: str(x) if isinstance(x, Path) else x for name, x in flags.items()}
    script.main(script.Args(device="cpu", **flags))


def stop_in_call(patch, module, name: str, number: int, stop) -> None:
    """Call stop() before the n-th call of a function of a module or class."""
    calls, function = count(1), getattr(module, name)

    def stand_in(*args, **options):
        if next(calls) == number:
            stop()
        return function(*args, **options)

    patch.setattr(module, name, stand_in)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_and_kill(module, name: str, number: int, run, *args, **flags) -> int:
    """Run in a fork that kills itself before the n-th call of a function. Return its exit code."""

    def start():
        stop_in_call(pytest.MonkeyPatch(), module, name, number, kill)
        run(*args, **flags)

    process = multiprocessing.get_context("fork").Process(target=start)
    process.start()
    process.join(100)
    return process.exitcode


@contextmanager
def interrupted(module, name: str, call: int):
    """In this block, raise KeyboardInterrupt, as Ctrl-C does, before the n-th call of a function."""

    def interrupt():
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_in_call(patch, module, name, call, interrupt)
        yield


def assert_same_run(one: Path, other: Path) -> None:
    """Check that two folders have the same files, and the same bits in logs, models and checkpoints, except times."""
    names = [sorted(str(path.relative_to(run)) for path in run.rglob("*")) for run in (one, other)]
    assert names[0] == names[1]
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert without_clock(one / name) == without_clock(other / name)
    models = [(run / "model" / "model.safetensors").read_bytes() for run in (one, other)]
    assert models[0] == models[1]
    states = [torch.load(run / "checkpoint.pt", weights_only=True) for run in (one, other)]
    torch.testing.assert_close(*states, rtol=0, atol=0)
