"""Bad input gets one line that names the flag or the file and the remedy, and exit code 2."""

import json

import peft
import pytest
import torch
import transformers
from conftest import ROOT, launch, words_of, write_jsonl
from zoo import make_model, make_tokenizer, refused, run, save

import grpo
import sdpo

TOY = ROOT / "toy"
GOOD = {"prompt": "3 + 5 ?", "answer": "8"}
DATA = {
    "good": [GOOD] * 16,
    "float_answer": [GOOD | {"answer": 8.0}] * 16,
    "empty_prompt": [GOOD, GOOD | {"prompt": ""}],
    "chat": [{"prompt": [{"role": "user", "content": "3 ?"}], "answer": "3"}] * 16,
    "no_answer": [GOOD, *[{"prompt": "3 ?"}] * 15],
    "few": [GOOD],
}
REWARDS = """
def wrong_number(completions, **columns): return [1.0]
def none(completions, **columns): return [None] * len(completions)
def ends_in_inf(completions, **columns): return [1.0] * 15 + [-float("inf")]
def ends_in_nan(completions, **columns): return [1.0] * 15 + [float("nan")]
def needs(solution, **columns): return [1.0] * len(solution)
def one_argument(completions): return [1.0] * len(completions)
def raises(completions, **columns): raise RuntimeError("the judge is asleep")
"""


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    """A folder with data, rewards and models that a run must refuse."""
    folder = tmp_path_factory.mktemp("bad")
    for name, rows in DATA.items():
        write_jsonl(folder / f"{name}.jsonl", rows)
    good = json.dumps(GOOD)
    (folder / "broken.jsonl").write_text(f'{good}\n\n{{"prompt": "3 +\n')
    (folder / "latin.jsonl").write_bytes(f'{good}\n{{"prompt": "caf\u00e9 ?"}}\n'.encode("latin-1"))
    (folder / "reward.py").write_text(REWARDS)
    (folder / "rows.json").write_text("[]")
    (folder / "run").mkdir()
    (folder / "run" / "checkpoint.pt").touch()
    model, tokenizer = make_model("llama"), make_tokenizer(chat=True)
    save(folder / "body_only", model.model, tokenizer)
    save(folder / "chat", model, tokenizer)
    for name, changes in {
        "tied_judge": {"num_labels": 1, "tie_word_embeddings": True},
        "short_judge": {"num_labels": 1, "max_position_embeddings": 2},
        "two_labels": {"num_labels": 2},
    }.items():
        config = make_model("llama").config
        config.update(changes)
        save(folder / name, transformers.LlamaForSequenceClassification(config), tokenizer)
    small = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": len(tokenizer), "eos_token_id": 1}
    save(folder / "mamba", transformers.MambaForCausalLM(transformers.MambaConfig(**small)), tokenizer)
    small |= {"num_attention_heads": 4, "intermediate_size": 64, "initializer_range": 0.3}
    encoder = transformers.BertConfig(**small, num_labels=1)
    save(folder / "encoder", transformers.BertForSequenceClassification(encoder), tokenizer)
    save(folder / "bert", transformers.BertLMHeadModel(encoder), tokenizer)
    adapter = peft.get_peft_model(make_model("llama"), peft.LoraConfig(target_modules="all-linear"))
    adapter.peft_config["default"].base_model_name_or_path = str(folder / "chat")
    adapter.save_pretrained(folder / "adapter")
    tokenizer.eos_token = model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.save_pretrained(folder / "no_eos")
    tokenizer.save_pretrained(folder / "no_eos")
    return folder


# The flags, and parts of the message
CASES = {
    "minibatches": ("--num_minibatches 3 --batch_size 16", "--batch_size 16: ", "multiple of 24, such as 24"),
    "bfloat16 on mps": ("--device mps:0 --dtype bfloat16", "--device"),
    "no such device": ("--device cuda", "--device cuda: ", "cannot use it", "--device cpu"),
    "temperature": ("--temperature 0", "--temperature 0.0: must be above 0"),
    "a negative gradient norm": ("--max_grad_norm -1", "--max_grad_norm -1.0: must be above 0"),
    "no advantage": ("--reward_clip 0", "--reward_clip 0.0: must be above 0"),
    "a negative learning rate": ("--learning_rate -1", "--learning_rate -1.0: must be 0 or more"),
    "a negative clip": ("--clip_eps -0.5", "--clip_eps -0.5: must be 0 or more"),
    "a run folder": ("--model {bad}/run", "--model ", "is a run. Use its model, ", "/run/model"),
    "a reward without its function": ("--reward {bad}/reward.py", "name a function of the file"),
    "a column that the reward needs": (
        "--reward {bad}/reward.py:needs",
        "'solution'. A reward is",
        "answer,",
    ),
    "columns that the reward refuses": (
        "--reward {bad}/reward.py:one_argument",
        "unexpected keyword argument",
    ),
    "another ending": ("--dataset {bad}/rows.json", "rows.json: must end in .jsonl"),
    "a learning rate of NaN": ("--learning_rate nan", "--learning_rate nan: must be 0 or more"),
    "no rollout": ("--batch_size 0", "--batch_size 0: must be above 0"),
    "no pass": ("--update_epochs 0", "--update_epochs 0: must be above 0"),
    "no micro-batch": ("--micro_batch_size 0", "--micro_batch_size 0: must be above 0"),
    "no response": ("--max_response_length -1", "--max_response_length -1: must be above 0"),
    "samples below 0": ("--eval_samples -1", "--eval_samples -1: must be 0 or more"),
    "model not there": ("--model no/such-model", "no/such-model: neither loaded from a folder in", "Hub"),
    "weights missing": ("--model {bad}/body_only", "--model ", "lack lm_head.weight"),
    "model without EOS": ("--model {bad}/no_eos", "/no_eos", "no EOS"),
    "adapter": ("--model {bad}/adapter", "/adapter is an adapter", "Merge"),
    "no cache": ("--model {bad}/mamba", "/mamba: sampling and training differ by", "limit 0.05 in float32"),
    "looks both ways": ("--model {bad}/bert", "/bert: sampling and training differ by", "causal decoder"),
    "reward model as policy": ("--model {bad}/tied_judge", "is a reward model. Use it as --reward"),
    "file not there": ("--dataset no.jsonl", "--dataset no.jsonl: no such file"),
    "broken line": ("--dataset {bad}/broken.jsonl", "broken.jsonl, line 3: not valid JSON"),
    "not UTF-8": ("--dataset {bad}/latin.jsonl", "latin.jsonl, line 2: not valid JSON in UTF-8"),
    "prompt empty": ("--dataset {bad}/empty_prompt.jsonl", "--dataset", "row 1", '"prompt"'),
    "chat without template": ("--dataset {bad}/chat.jsonl", "row 0: is a chat", "no chat template"),
    "answer read as a number": ("--dataset {bad}/float_answer.jsonl", "--reward", '"answer"', "not 8.0"),
    "a group of one": ("--samples_per_prompt 1", "--samples_per_prompt 1: ", "2 or more"),
    "answer missing": ("--dataset {bad}/no_answer.jsonl", "--reward", '"answer"', "not None"),
    "too few prompts": ("--batch_size 64 --dataset {bad}/few.jsonl", "1 of 1", "8 are", "--batch_size"),
    "prompts too long": ("--max_prompt_length 2", "0 of 16", "Raise --max_prompt_length"),
    "beyond the positions": ("--max_response_length 125", "--max_response_length 125: ", "129", "128"),
    "number of scores": ("--reward {bad}/reward.py:wrong_number", "--reward", "shape [1]", "16 completions"),
    "no scores": ("--reward {bad}/reward.py:none", "--reward", "returned [None", "one finite number"),
    "infinity at the end": ("--reward {bad}/reward.py:ends_in_inf", "returned -inf for completion 15"),
    "NaN at the end": ("--reward {bad}/reward.py:ends_in_nan", "returned nan for completion 15"),
    "no such function": ("--reward {bad}/reward.py:scor", "reward.py:scor: the file has no function scor"),
    "no such file": ("--reward no.py:f", "--reward no.py:f: no file no.py"),
    "policy as its own reward model": ("--model {toy}/policy --reward {toy}/policy", "error: --reward {toy}"),
    "policy as reward model": ("--reward {toy}/policy", "its files lack score.weight", "reward_model.py"),
    "an encoder as reward model": ("--reward {bad}/encoder", "--reward", "no decoder with a head"),
    "several outputs": ("--reward {bad}/two_labels", "--reward", "a head for one score"),
    "reward model too short": ("--reward {bad}/short_judge", "--reward", "but the model has 2 positions"),
}
AT_THE_FIRST_ROLLOUT = ("number of scores", "no scores", "reward model too short")
AT_THE_FIRST_ROLLOUT += ("infinity at the end", "NaN at the end")


@pytest.mark.parametrize("case", CASES)
def test_refused(case, bad, tmp_path, capsys):
    text, *expected = (part.format(bad=bad, toy=TOY) for part in CASES[case])
    pairs = dict(pair.split(maxsplit=1) for pair in text.removeprefix("--").split(" --"))
    flags = {"dataset": bad / "good.jsonl", "run_dir": tmp_path / "run"}
    said = refused(capsys, run, "grpo", **flags | pairs)
    assert all(words in said for words in expected), said
    assert (tmp_path / "run").exists() == (case in AT_THE_FIRST_ROLLOUT)


def test_a_scale_and_a_limit_of_scores_may_be_negative():
    grpo.check_args(grpo.Args(reward_scale=-1.0))
    sdpo.check_args(sdpo.Args(success_score=-0.5))


def test_a_later_rank_waits_before_it_says_what_is_wrong(monkeypatch, capsys):
    """If a flag is wrong on all ranks, torchrun ends the others before they repeat the line."""
    waits = []
    monkeypatch.setattr(grpo.time, "sleep", waits.append)
    for rank in (0, 1, 7):
        monkeypatch.setattr(grpo, "RANK", rank)
        refused(capsys, grpo.check, False, "wrong")
    assert waits == [0, 1, 5]


def test_an_exception_of_a_reward_keeps_its_traceback(bad, tmp_path):
    flags = {"dataset": bad / "good.jsonl", "run_dir": tmp_path / "run", "reward": f"{bad}/reward.py:raises"}
    words = words_of(**flags, batch_size=16, num_iterations=1, max_response_length=8, device="cpu")
    result = launch("grpo.py", *words, check=False, cwd=ROOT)
    assert result.returncode == 1 and result.stderr.endswith("\nRuntimeError: the judge is asleep\n")
    assert ", in raises\n" in result.stderr


def test_a_model_with_a_state_outside_its_cache_is_refused(capsys):
    model = make_model("llama")
    model.config.model_type = "recurrent_gemma"
    assert "keeps a state outside its cache" in refused(
        capsys, grpo.check_sampling, grpo.Args(), "--model x", model
    )


def test_ranks_that_differ(tmp_path, monkeypatch, capsys):
    """Rows, weights, flags or checkpoints may differ. The stand-in for total() sees the first checksum everywhere."""
    seen, layers = [], [torch.nn.Linear(2, 2) for _ in range(2)]
    monkeypatch.setattr(grpo, "total", lambda x: seen.append(int(x)) or seen[0])

    def open_run(layer=layers[0], rows=DATA["few"], **flags):
        return grpo.open_run(grpo.Args(run_dir=str(tmp_path), **flags), {"policy": layer}, rows)

    open_run()
    for change in ({"rows": DATA["chat"]}, {"layer": layers[1]}, {"track": True}):  # a flag that may change
        assert "the ranks differ" in refused(capsys, open_run, **change)
    grpo.save_checkpoint(tmp_path, 1, {"policy": layers[0]})
    assert "the ranks differ" in refused(capsys, open_run)
