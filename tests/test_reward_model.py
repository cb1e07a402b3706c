"""reward_model.py: the Bradley-Terry loss, scores at the right token, and policies that read the same scores."""

import importlib
import math
import sys

import pytest
import torch
import transformers
from conftest import POLICY_SCRIPTS, ROOT, launch, make_gpt2, make_llama, read_jsonl, the_run, write_jsonl

import reward_model as rm

TOY = ROOT / "toy"
PAIRS = [
    {"prompt": "3 + 5 ?", "chosen": "think 3 + 5 = 8 answer 8", "rejected": "answer 7"},
    {"prompt": "1 - 2 + 3 - 4 ?", "chosen": "answer 8", "rejected": "think 1 - 2 = 9 answer 9", "margin": 0.5},
    {"prompt": "9 ?", "chosen": "answer 9", "rejected": "answer 1"},
]


def test_preference_loss_is_bradley_terry():
    chosen, rejected = torch.tensor([1.0, -2.0, 0.3]).double(), torch.tensor([0.5, 1.0, 0.3]).double()
    by_hand = [-math.log(1 / (1 + math.exp(-float(d)))) for d in chosen - rejected]
    assert float(rm.preference_loss(chosen, rejected)) == pytest.approx(sum(by_hand) / 3, rel=1e-12)
    assert float(rm.preference_loss(chosen, rejected, num_pairs=12)) == pytest.approx(sum(by_hand) / 12, rel=1e-12)
    margin = torch.tensor([0.0, 0.5, 2.0]).double()
    shifted = rm.preference_loss(chosen - margin, rejected)
    assert float(rm.preference_loss(chosen, rejected, margin)) == pytest.approx(float(shifted), rel=1e-12)
    far = torch.tensor([1000.0, -1000.0], requires_grad=True)
    loss = rm.preference_loss(far, torch.zeros(2))
    assert loss.item() == 500.0  # log(1 + exp(1000)) without overflow
    loss.backward()
    assert far.grad.tolist() == [0.0, -0.5]


def test_centering_loss_holds_the_level_and_not_the_difference():
    chosen, rejected = torch.tensor([2.0, 1.0], requires_grad=True), torch.tensor([-2.0, 0.0], requires_grad=True)
    loss = rm.centering_loss(chosen, rejected)
    loss.backward()
    assert loss.item() == 0.5 and chosen.grad.tolist() == [0.0, 1.0] == rejected.grad.tolist()


def make_qwen2(vocab_size: int = 19):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Qwen2Config(
        vocab_size=vocab_size, **sizes, num_key_value_heads=2, initializer_range=0.3, eos_token_id=1, pad_token_id=0
    )
    return transformers.Qwen2ForCausalLM(config)


def save_start(folder, tokenizer, make=make_llama, pad: str | None = "<pad>"):
    """A causal LM with its tokenizer, which has this pad token; the config knows as much."""
    tokenizer.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = pad
    tokenizer.save_pretrained(folder)
    model = make()
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    return folder


def run(monkeypatch, *flags) -> None:
    monkeypatch.setattr(sys, "argv", ["reward_model", *map(str, flags)])
    rm.main(rm.parse_args())


@pytest.mark.parametrize("pad", ["<pad>", "<eos>", None])
@pytest.mark.parametrize("make", [make_llama, make_qwen2, make_gpt2])
def test_scores_do_not_depend_on_padding_and_the_saved_folder_gives_the_same(
    tmp_path, monkeypatch, tokenizer, make, pad
):
    start = save_start(tmp_path / "start", tokenizer, make, pad)
    data = write_jsonl(tmp_path / "pairs.jsonl", PAIRS)
    flags = ["--model", start, "--dataset", data, "--eval_dataset", "None", "--batch_size", 3, "--num_epochs", 2]
    run(monkeypatch, *flags, "--runs_dir", tmp_path / "runs")
    folder = the_run(tmp_path / "runs") / "model"
    saved = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    reread = transformers.AutoTokenizer.from_pretrained(folder)
    assert saved.config.num_labels == 1 and saved.config.pad_token_id == reread.pad_token_id
    assert saved.config.pad_token_id not in (None, reread.eos_token_id)

    model = rm.RewardModel(saved)
    lists = [rm.encode(reread, row["prompt"], row[name]) for row in PAIRS for name in ("chosen", "rejected")]
    assert all(ids[-1] == reread.eos_token_id for ids in lists)
    width, pad_id = max(map(len, lists)) + 3, reread.pad_token_id
    right = torch.tensor([ids + [pad_id] * (width - len(ids)) for ids in lists])
    right_mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in lists])
    left = torch.tensor([[pad_id] * (width - len(ids)) + ids for ids in lists])
    left_mask = right_mask.flip(1)
    with torch.no_grad():
        alone = torch.stack([saved(torch.tensor([ids])).logits[0, 0] for ids in lists])
        assert alone.std() > 1e-3
        together = saved(right, attention_mask=right_mask).logits[:, 0]
        as_eos = [ids.masked_fill(mask == 0, 1) for ids, mask in ((right, right_mask), (left, left_mask))]
        for scores in (
            together,
            model(right, right_mask),
            model(left, left_mask),
            model(as_eos[0], right_mask),  # whatever the padding is made of
            model(as_eos[1], left_mask),
            torch.cat([model(torch.tensor([ids]), torch.ones(1, len(ids)).long()) for ids in lists]),
        ):
            torch.testing.assert_close(scores, alone, rtol=0, atol=1e-5)


def plain_gradient(args, start, rows, tokenizer) -> torch.Tensor:
    """Of the whole objective, from one unpadded response at a time through transformers' own head."""
    model = rm.load_reward_model(args, tokenizer, torch.device("cpu"))
    total = 0.0
    for row in rows:
        ids = [rm.encode(tokenizer, row["prompt"], row[name]) for name in ("chosen", "rejected")]
        chosen, rejected = (model.classifier(torch.tensor([x])).logits[0, 0] for x in ids)
        margin = args.margin if row["margin"] is None else row["margin"]
        total = total + (1 + torch.exp(-(chosen - rejected - margin))).log()
        total = total + args.center_rewards_coefficient * (chosen + rejected) ** 2
    return torch.cat([g.flatten() for g in torch.autograd.grad(total / len(rows), list(model.parameters()))])


def test_gradient_is_the_plain_one_for_any_micro_batch_and_number_of_ranks(tmp_path, monkeypatch, tokenizer):
    rows = [row | {"margin": 0.3 * (i % 3)} for i, row in enumerate(read_jsonl(TOY / "preferences_train.jsonl")[:16])]
    rows[5]["margin"] = None  # takes the flag's
    data = write_jsonl(tmp_path / "few.jsonl", rows)
    start = save_start(tmp_path / "start", tokenizer)
    flags = ["--model", start, "--dataset", data, "--eval_dataset", "None", "--batch_size", 16, "--num_epochs", 1]
    flags += ["--max_grad_norm", "1e9", "--center_rewards_coefficient", 0.3, "--margin", 0.7]
    moments = []
    for size in (16, 5, 1):
        run(monkeypatch, *flags, "--micro_batch_size", size, "--runs_dir", tmp_path / str(size))
        moments.append(tmp_path / str(size))
    launch(ROOT / "reward_model.py", *flags, "--micro_batch_size", 3, "--runs_dir", tmp_path / "ranks", ranks=2)
    moments.append(tmp_path / "ranks")
    monkeypatch.setattr(sys, "argv", ["reward_model", *map(str, flags)])
    expected = plain_gradient(rm.parse_args(), start, rows, tokenizer)
    assert expected.norm() > 0.01
    for runs in moments:
        state = torch.load(next(the_run(runs).glob("checkpoints/*.pt")), weights_only=True)["optimizer"]["state"]
        gradient = torch.cat([entry["exp_avg"].flatten() for entry in state.values()]) * 10  # a tenth after one step
        assert float((gradient - expected).norm() / expected.norm()) < 1e-5
    metrics = [read_jsonl(the_run(runs) / "metrics.jsonl")[-1] for runs in moments]
    for name in ("loss", "accuracy", "margin", "score_mean", "score_std", "grad_norm"):
        assert [line[name] for line in metrics] == pytest.approx([metrics[0][name]] * 4, rel=1e-4, abs=1e-6), name


def test_pairs_that_are_equal_after_the_cut_are_left_out_and_counted(tmp_path, capsys, tokenizer):
    rows = [*PAIRS, {"prompt": "3 ?", "chosen": "answer 3", "rejected": "answer 3"}]
    rows.append({"prompt": "1 + 2 ?", "chosen": "think 1 + 2 = 3 answer 3", "rejected": "think 1 + 2 = 3 answer 4"})
    data = write_jsonl(tmp_path / "pairs.jsonl", rows)
    kept = rm.load_rows(rm.Args(max_length=11), str(data), "train", "dataset", tokenizer)
    assert [row["prompt"] for row in kept] == [row["prompt"] for row in PAIRS]
    said = capsys.readouterr().out
    assert "3 pairs, 2 left out as both responses are equal" in said and "4 responses cut to 11 tokens" in said
    assert max(rm.pair_length(row) for row in kept) == 11
    assert kept[0]["chosen_ids"] == tokenizer("3 + 5 ? think 3 + 5 = 8 answer")["input_ids"]


def test_gradient_checkpointing_and_bfloat16_run(tmp_path, monkeypatch):
    few = write_jsonl(tmp_path / "few.jsonl", read_jsonl(TOY / "preferences_train.jsonl")[:64])
    flags = ["--dataset", few, "--eval_dataset", few, "--batch_size", 32, "--num_epochs", 1]
    losses = {}
    for name, more in {
        "plain": [],
        "checkpointing": ["--gradient_checkpointing"],
        "half": ["--dtype", "bfloat16"],
    }.items():
        run(monkeypatch, *flags, *more, "--runs_dir", tmp_path / name)
        losses[name] = [line["loss"] for line in read_jsonl(the_run(tmp_path / name) / "metrics.jsonl")[1:]]
    assert losses["checkpointing"] == pytest.approx(losses["plain"], rel=1e-5)
    assert losses["half"] != losses["plain"] and losses["half"] == pytest.approx(losses["plain"], rel=0.05)
    state = torch.load(next(the_run(tmp_path / "half").glob("checkpoints/*.pt")), weights_only=True)
    assert {x.dtype for x in state["reward_model"].values()} == {torch.float32}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_learns_styles_and_not_sums(tmp_path, monkeypatch, seed):
    """One of the two default epochs. Pairs of different style are told apart; those of the same style are a coin toss,
    which is what makes it a judge that can be fooled."""
    run(monkeypatch, "--seed", seed, "--num_epochs", 1, "--runs_dir", tmp_path)
    metrics = read_jsonl(the_run(tmp_path) / "metrics.jsonl")
    first, last = metrics[0], metrics[-1]
    assert first["eval/loss"] == pytest.approx(math.log(2), abs=0.05)  # the new head is small
    assert last["eval/accuracy"] >= 0.73
    assert last["eval/accuracy/different style"] >= 0.9
    assert abs(last["eval/accuracy/same style"] - 0.5) < 0.1
    assert abs(last["score_mean"]) < 0.3
    card = (the_run(tmp_path) / "model" / "README.md").read_text()
    mean, std = (float(line.split("|")[2]) for line in card.splitlines() if line.startswith(("| scores", "| standard")))
    assert abs(mean) < 0.2 and 0.8 < std < 2


def test_it_learns_pairs_that_the_text_does_tell_apart(tmp_path, monkeypatch):
    """Guesses preferred to worked-out answers, the other way round than on the toy: above 0.99 on held-out pairs."""
    rows = [row for row in read_jsonl(TOY / "preferences_train.jsonl") if row["group"] == "different style"]
    rows = [
        dict(zip(("prompt", "chosen", "rejected"), (r["prompt"], *sorted((r["chosen"], r["rejected"]))))) for r in rows
    ]
    assert all(row["chosen"].startswith("answer") and row["rejected"].startswith("think") for row in rows)
    train, held_out = (
        write_jsonl(tmp_path / "train.jsonl", rows[:1280]),
        write_jsonl(tmp_path / "test.jsonl", rows[-300:]),
    )
    run(monkeypatch, "--dataset", train, "--eval_dataset", held_out, "--num_epochs", 1, "--runs_dir", tmp_path / "runs")
    last = read_jsonl(the_run(tmp_path / "runs") / "metrics.jsonl")[-1]
    assert last["eval/accuracy"] > 0.99 and "eval/accuracy/all" not in last


def test_the_committed_model_is_what_this_script_makes():
    """Same data, same start, same judgement as a new one has: see its card and test_it_learns_styles_and_not_sums."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(TOY / "reward_model")
    saved = transformers.AutoModelForSequenceClassification.from_pretrained(TOY / "reward_model").eval()
    args = rm.Args()
    rows = rm.load_rows(args, args.eval_dataset, "test", "eval_dataset", tokenizer)
    results, _ = rm.evaluate(args, rm.RewardModel(saved), rows, tokenizer.pad_token_id, 0, 1)
    card = (TOY / "reward_model" / "README.md").read_text()
    for name, value in results.items():
        assert f"| held out, {name.removeprefix('eval/')} | {value:.4f} |" in card
    assert results["eval/accuracy"] >= 0.73


def test_resume_is_exact(tmp_path, monkeypatch):
    few = write_jsonl(tmp_path / "few.jsonl", read_jsonl(TOY / "preferences_train.jsonl")[:64])
    flags = ["--dataset", few, "--eval_dataset", few, "--batch_size", 16, "--lr_schedule", "constant"]
    flags += ["--eval_every", 2, "--num_samples", 1]
    run(monkeypatch, *flags, "--num_epochs", 2, "--runs_dir", tmp_path / "whole")
    run(monkeypatch, *flags, "--num_epochs", 1, "--runs_dir", tmp_path / "parts")
    run(monkeypatch, *flags, "--num_epochs", 2, "--resume", the_run(tmp_path / "parts"))
    one, other = the_run(tmp_path / "whole"), the_run(tmp_path / "parts")
    clock = ("pairs_per_second", "seconds/update")
    lines = [
        [{k: v for k, v in x.items() if k not in clock} for x in read_jsonl(r / "metrics.jsonl")] for r in (one, other)
    ]
    assert lines[0] == lines[1] and [line["iteration"] for line in lines[0]] == list(range(9))
    assert (one / "samples.jsonl").read_bytes() == (other / "samples.jsonl").read_bytes()
    for name in ("model.safetensors", "README.md"):
        assert (one / "model" / name).read_bytes() == (other / "model" / name).read_bytes()


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_chat_tokenizer(letters: str):
    """One token per character, and ChatML as Qwen writes it: a newline follows EOS."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<|im_end|>", "<|im_start|>", "<unk>", *letters]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    names = {"pad_token": "<pad>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **names,
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHATML
    return tokenizer


LETTERS = "abcdefghijklmnopqrstuvwxyz\n "
CHATS = [
    {"prompt": [{"role": "user", "content": "name a fruit"}], "chosen": "a ripe pear", "rejected": "stone"},
    {"prompt": [{"role": "user", "content": "say hi"}], "chosen": "hi", "rejected": "no"},
]


@pytest.mark.parametrize("same", [True, False])
def test_a_policy_reads_chats_as_the_reward_model_learned_them(tmp_path, monkeypatch, same):
    """To the token: template, EOS and what the template writes behind it, directly and through another tokenizer."""
    script = importlib.import_module("reinforce_pp")
    policy_tokenizer = make_chat_tokenizer(LETTERS)
    reward_tokenizer = policy_tokenizer if same else make_chat_tokenizer(LETTERS[::-1])
    rows, texts, ids = [], [], []
    for chat in CHATS:
        prompt_ids = policy_tokenizer.apply_chat_template(chat["prompt"], add_generation_prompt=True, return_dict=True)
        rows.append({"prompt": chat["prompt"], "prompt_ids": prompt_ids["input_ids"]})
        texts.append(chat["chosen"])
        response = policy_tokenizer(chat["chosen"], add_special_tokens=False)["input_ids"]
        ids.append(prompt_ids["input_ids"] + response + [policy_tokenizer.eos_token_id])
    sequences, mask = script.left_pad(ids, policy_tokenizer.pad_token_id, torch.device("cpu"))
    read = script.read_again(reward_tokenizer, policy_tokenizer, rows, texts, sequences, mask)
    learned = [rm.encode(reward_tokenizer, chat["prompt"], chat["chosen"]) for chat in CHATS]
    assert read == learned
    assert all(reward_tokenizer.convert_ids_to_tokens(x)[-2:] == ["<|im_end|>", "\n"] for x in read)
    whole = [{"role": "user", "content": "say hi"}, {"role": "assistant", "content": "hi"}]
    assert rm.encode(reward_tokenizer, None, whole) == learned[1]  # a whole chat, without a prompt
    assert rm.encode(reward_tokenizer, "say hi", whole) == learned[1]  # as UltraFeedback has it, with the prompt twice
    assert rm.encode(reward_tokenizer, CHATS[1]["prompt"], whole[1:]) == learned[1]

    cut = [x[:-2] for x in ids]  # without EOS: a truncated response is not made to look finished
    sequences, mask = script.left_pad(cut, policy_tokenizer.pad_token_id, torch.device("cpu"))
    if same:
        assert script.read_again(reward_tokenizer, policy_tokenizer, rows, texts, sequences, mask) == cut


def test_the_template_is_kept_for_chats_and_dropped_for_texts(tmp_path, monkeypatch):
    """A policy with another tokenizer goes by it: text that was learned without a template must be read without."""
    tokenizer = make_chat_tokenizer(LETTERS)
    make_llama(len(tokenizer)).save_pretrained(tmp_path / "start")
    tokenizer.save_pretrained(tmp_path / "start")
    for name, rows in {
        "chats": CHATS,
        "texts": [row | {"prompt": row["prompt"][0]["content"]} for row in CHATS],
    }.items():
        data = write_jsonl(tmp_path / f"{name}.jsonl", rows)
        flags = ["--model", tmp_path / "start", "--dataset", data, "--eval_dataset", "None", "--batch_size", 2]
        run(monkeypatch, *flags, "--num_epochs", 1, "--runs_dir", tmp_path / name)
        saved = transformers.AutoTokenizer.from_pretrained(the_run(tmp_path / name) / "model")
        assert bool(saved.chat_template) == (name == "chats")


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
def test_a_policy_computes_the_score_of_the_saved_folder(tokenizer, name):
    """Of responses that it has sampled: tokenized again from their text, one by one, through transformers' own head."""
    script = importlib.import_module(name)
    args = script.Args(reward=str(TOY / "reward_model"), max_response_length=20)
    policy = script.load_policy(args.model, "model", torch.device("cpu"))
    rows = script.load_rows(args, args.dataset, "train", "dataset", tokenizer)[:24]
    generated = script.generate(policy, tokenizer, [row["prompt_ids"] for row in rows], args)
    scores = script.score(args, script.load_reward(args, torch.device("cpu")), tokenizer, rows, *generated)
    saved = transformers.AutoModelForSequenceClassification.from_pretrained(TOY / "reward_model").eval()
    for row, sample in zip(rows, script.describe(tokenizer, rows, {"": scores}, *generated)):
        ids = tokenizer(f"{row['prompt']} {sample['response']}", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            assert sample["score"] == pytest.approx(float(saved(ids).logits[0, 0]), abs=1e-5)


def train(monkeypatch, tmp_path, name: str, *flags) -> list[dict]:
    script = importlib.import_module(name)
    start = ["--reward", TOY / "reward_model", "--monitor", "exact_answer", "--runs_dir", tmp_path, *flags]
    monkeypatch.setattr(sys, "argv", [name, *map(str, start)])
    script.main(script.parse_args())
    return read_jsonl(the_run(tmp_path) / "metrics.jsonl")


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
def test_every_script_improves_its_score_against_the_reward_model(tmp_path, monkeypatch, name):
    metrics = train(monkeypatch, tmp_path, name, "--num_iterations", 14, "--eval_every", 0, "--learning_rate", 4e-4)[1:]
    first, last = (sum(line["score"] for line in lines) / 3 for lines in (metrics[:3], metrics[-3:]))
    assert last > first + 0.4  # it starts at about 0, with a standard deviation of 1.2
    for line in metrics:
        assert -1 <= line["monitor_score"] == pytest.approx(2 * line["monitor_pass_rate"] - 1, abs=1e-6)


def test_without_kl_the_score_rises_and_the_truth_falls(tmp_path, monkeypatch):
    """What a monitor is for: against the reward model alone the policy ends worse than it began."""
    flags = ["--kl_coef", 0, "--num_iterations", 45, "--eval_every", 45]
    metrics = train(monkeypatch, tmp_path, "reinforce_pp", *flags)
    mean = lambda lines, name: sum(line[name] for line in lines) / len(lines)  # noqa: E731
    first, last = metrics[1:4], metrics[-5:]
    assert mean(last, "score") > mean(first, "score") + 1
    assert mean(last, "monitor_pass_rate") < mean(first, "monitor_pass_rate") - 0.05
    assert mean(last, "kl") > 0.8
    assert metrics[-1]["eval/score/2-5"] > 1 > metrics[-1]["eval/monitor_score/2-5"]
    sample = next(line for line in read_jsonl(the_run(tmp_path) / "samples.jsonl") if line.get("split") == "held out")
    assert sample["monitor_score"] in (-1.0, 1.0) and sample["score"] not in (-1.0, 1.0)


def test_monitor_does_not_train(tmp_path, monkeypatch):
    """The same run with and without it, to the last bit."""
    weights = []
    for monitor in ("None", "exact_answer"):
        flags = ["--num_iterations", 2, "--batch_size", 16, "--eval_every", 0, "--monitor", monitor]
        metrics = train(monkeypatch, tmp_path / monitor, "reinforce_pp", *flags)
        assert ("monitor_score" in metrics[-1]) == (monitor != "None")
        weights.append((the_run(tmp_path / monitor) / "model" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_the_critic_starts_from_the_reward_model(tokenizer):
    """With its head: before the first update the value behind a prefix is the reward model's score of that prefix."""
    ppo = importlib.import_module("ppo")
    critic = ppo.load_critic(ppo.Args(reward=str(TOY / "reward_model")), torch.device("cpu"))
    saved = transformers.AutoModelForSequenceClassification.from_pretrained(TOY / "reward_model").eval()
    ids = tokenizer("3 + 5 ? think 3 + 5 = 8 answer 8 <eos>", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        values = critic(ids, torch.ones_like(ids), response_length=9)[0]
        prefixes = torch.stack([saved(ids[:, :t]).logits[0, 0] for t in range(4, 13)])
    torch.testing.assert_close(values, prefixes, rtol=0, atol=1e-5)


def refused(name: str, tmp_path, monkeypatch, capsys, *flags) -> str:
    """The one sentence said; exit code 2, and no run folder."""
    script = importlib.import_module(name)
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", [name, "--runs_dir", str(tmp_path / "runs"), *map(str, flags)])
    with pytest.raises(SystemExit) as exit:
        script.main(script.parse_args())
    said = capsys.readouterr().err.strip()
    assert exit.value.code == 2 and said.startswith("error: ") and "\n" not in said, said
    assert not (tmp_path / "runs").exists()
    return said


def broken_reward_model(folder, kind: str) -> None:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(TOY / "reward_model")
    transformers.AutoTokenizer.from_pretrained(TOY / "reward_model").save_pretrained(folder)
    if kind == "NaN":
        model.score.weight.data[0, 3] = math.nan
    if kind == "infinite":
        model.base_model.embed_tokens.weight.data[5] = math.inf
    if kind == "outputs":
        torch.manual_seed(0)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(TOY / "policy", num_labels=3)
    model.save_pretrained(folder)


@pytest.mark.parametrize("name", POLICY_SCRIPTS)
@pytest.mark.parametrize(
    "kind, words",
    [
        ("NaN", "NaN or infinite"),
        ("infinite", "NaN or infinite"),
        ("outputs", "3 outputs"),
        ("causal", "reward_model.py"),
    ],
)
def test_what_is_no_reward_model_is_refused(tmp_path, monkeypatch, capsys, name, kind, words):
    folder = TOY / "policy"
    if kind != "causal":
        folder = tmp_path / "broken"
        broken_reward_model(folder, kind)
    flag = "--monitor" if kind == "infinite" else "--reward"
    said = refused(name, tmp_path, monkeypatch, capsys, flag, folder)
    assert f"{flag} {folder}" in said and words in said


def test_scores_that_become_nan_stop_the_run(tmp_path, monkeypatch, capsys):
    """Finite weights that overflow: nothing to see at the start, and nothing to train on."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(TOY / "reward_model")
    model.score.weight.data = 3e38 * model.score.weight.data.sign()
    model.save_pretrained(tmp_path / "rm")
    transformers.AutoTokenizer.from_pretrained(TOY / "reward_model").save_pretrained(tmp_path / "rm")
    script = importlib.import_module("reinforce_pp")
    flags = ["--reward", tmp_path / "rm", "--batch_size", 16, "--eval_every", 0, "--runs_dir", tmp_path / "runs"]
    monkeypatch.setattr(sys, "argv", ["reinforce_pp", *map(str, flags)])
    with pytest.raises(SystemExit) as exit:
        script.main(script.parse_args())
    assert exit.value.code == 2 and "a score is NaN or infinite" in capsys.readouterr().err
    assert not list(the_run(tmp_path / "runs").glob("checkpoints/*"))


def test_a_critic_with_another_tokenizer_is_refused(tmp_path, monkeypatch, capsys):
    tokenizer = make_chat_tokenizer(LETTERS)
    config = make_llama(len(tokenizer)).config
    config.num_labels = 1
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path / "rm")
    tokenizer.save_pretrained(tmp_path / "rm")
    said = refused("ppo", tmp_path, monkeypatch, capsys, "--reward", tmp_path / "rm")
    assert f"--critic_model {tmp_path / 'rm'}" in said and "give one with its tokenizer" in said


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--batch_size", "100000"], ["--batch_size 100000", "4500 pairs"]),
        (["--batch_size", "0"], ["--batch_size 0", "more than 0"]),
        (["--margin", "nan"], ["--margin nan"]),
        (["--dataset", "no/such.jsonl"], ["--dataset no/such.jsonl", "cannot be read"]),
        (["--dataset", str(TOY / "train.jsonl")], ["`chosen`"]),
        (["--eval_dataset", str(TOY / "train.jsonl")], ["--eval_dataset", "`chosen`"]),
        (["--dataset", "{tmp}/equal.jsonl"], ["two different responses"]),
        (["--dataset", "{tmp}/long.jsonl"], ["--max_length 1024", "204 tokens", "128"]),
        (["--model", "no/such"], ["--model no/such"]),
        (["--model", "{tmp}/outputs"], ["3 outputs"]),
        (["--resume", "{tmp}"], ["--resume", "no run folder"]),
        (["--dataset", "{tmp}/null.jsonl"], ["row 1 cannot be made tokens"]),
        (["--dataset", "{tmp}/chat.jsonl"], ["row 0 cannot be made tokens", "chat_template"]),
    ],
)
def test_bad_input_gets_one_sentence(tmp_path, monkeypatch, capsys, flags, words):
    write_jsonl(tmp_path / "equal.jsonl", [{"prompt": "3 ?", "chosen": "answer 3", "rejected": "answer 3"}])
    write_jsonl(tmp_path / "long.jsonl", [{"prompt": "3 + " * 100 + "?", "chosen": "answer 3", "rejected": "1"}] * 64)
    write_jsonl(tmp_path / "null.jsonl", [PAIRS[0], {"prompt": "3 ?", "chosen": "answer 3", "rejected": None}])
    write_jsonl(tmp_path / "chat.jsonl", CHATS)
    if "outputs" in flags[1]:
        broken_reward_model(tmp_path / "outputs", "outputs")
    said = refused("reward_model", tmp_path, monkeypatch, capsys, *(flag.format(tmp=tmp_path) for flag in flags))
    assert all(word in said for word in words), said
