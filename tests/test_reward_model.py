"""reward_model.py: the Bradley-Terry loss, scores at the right token, and others that read the same scores."""

import math
import signal
import subprocess
import sys
import time

import pytest
import torch
import transformers
from conftest import ROOT, launch, make_gpt2, make_llama, read_jsonl, write_jsonl

import grpo
import reward_model as rm

TOY = ROOT / "toy"
PAIRS = [
    {"prompt": "3 + 5 ?", "chosen": "think 3 + 5 = 8 answer 8", "rejected": "answer 7"},
    {
        "prompt": "1 - 2 + 3 - 4 ?",
        "chosen": "answer 8",
        "rejected": "think 1 - 2 = 9 answer 9",
        "margin": 0.5,
    },
    {"prompt": "9 ?", "chosen": "answer 9", "rejected": "answer 1"},
]
CHATS = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in PAIRS]
TEMPLATE = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }} = {% else %}{{ m.content }} <eos> -{% endif %}{% endfor %}"  # noqa: E501


def run(**flags) -> None:
    rm.main(rm.Args(**{name: x if isinstance(x, int | float) else str(x) for name, x in flags.items()}))


def as_flags(**flags) -> list[str]:
    return [x for name, value in flags.items() for x in (f"--{name}", str(value))]


def save_start(folder, tokenizer, make=make_llama, pad="<pad>", chat_template=None):
    """A causal LM with the toy's words in its tokenizer; config and tokenizer have this pad token."""
    tokenizer.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token, tokenizer.chat_template = pad, chat_template
    tokenizer.save_pretrained(folder)
    model = make()
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    return folder


def make_qwen2():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Qwen2Config(vocab_size=19, **sizes, num_key_value_heads=2, initializer_range=0.3)
    return transformers.Qwen2ForCausalLM(config)


def test_preference_loss_and_its_gradient_are_the_plain_ones():
    chosen = torch.tensor([1.0, -2.0, 0.3], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([0.5, 1.0, 0.3], dtype=torch.float64, requires_grad=True)
    margin, center = torch.tensor([0.0, 0.5, 2.0]).double(), 0.3
    plain = [-math.log(1 / (1 + math.exp(d))) for d in (rejected - chosen).tolist()]
    assert float(rm.preference_loss(chosen, rejected)) == pytest.approx(sum(plain) / 3, rel=1e-12)
    loss = rm.preference_loss(chosen, rejected, margin, center, 12)
    loss.backward()
    total = 0.0
    for i, (c, r, m) in enumerate(zip(chosen.tolist(), rejected.tolist(), margin.tolist())):
        total += (math.log(1 + math.exp(r + m - c)) + center * (c + r) ** 2) / 12
        slope, level = -1 / (1 + math.exp(c - r - m)), 2 * center * (c + r)
        assert float(chosen.grad[i]) == pytest.approx((slope + level) / 12, rel=1e-12)
        assert float(rejected.grad[i]) == pytest.approx((level - slope) / 12, rel=1e-12)
    assert float(loss) == pytest.approx(total, rel=1e-12) and loss.dtype == torch.float64
    assert rm.preference_loss(torch.tensor([1000.0, -1000.0]), torch.zeros(2)) == 500.0  # without overflow


@pytest.mark.parametrize("pad", ["<pad>", "<eos>", None])
@pytest.mark.parametrize("make", [make_llama, make_qwen2, make_gpt2])
def test_a_score_is_the_last_attended_tokens_and_the_saved_folder_gives_it(tmp_path, tokenizer, make, pad):
    """Under either padding, whatever it is made of; transformers itself looks for a pad id that ends nothing."""
    start = save_start(tmp_path / "start", tokenizer, make, pad)
    data, folder = write_jsonl(tmp_path / "pairs.jsonl", PAIRS), tmp_path / "run" / "model"
    run(model=start, dataset=data, batch_size=3, num_epochs=2, run_dir=tmp_path / "run")
    assert not any("eval/loss" in x for x in read_jsonl(tmp_path / "run" / "metrics.jsonl"))  # not the toy's
    saved = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    reread = transformers.AutoTokenizer.from_pretrained(folder)
    assert saved.config.num_labels == 1
    assert saved.config.pad_token_id == reread.pad_token_id not in (None, reread.eos_token_id)

    lists = [rm.encode(reread, row["prompt"], row[name]) for row in PAIRS for name in ("chosen", "rejected")]
    assert all(ids[-1] == reread.eos_token_id for ids in lists)
    width, pad_id = max(map(len, lists)) + 3, reread.pad_token_id
    right = torch.tensor([ids + [pad_id] * (width - len(ids)) for ids in lists])
    right_mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in lists])
    left = torch.tensor([[pad_id] * (width - len(ids)) + ids for ids in lists])
    with torch.no_grad():
        alone = torch.stack([saved(torch.tensor([ids])).logits[0, 0] for ids in lists])
        assert alone.std() > 1e-3
        found = [saved(right, attention_mask=right_mask).logits[:, 0]]
        for ids, mask in ((right, right_mask), (left, right_mask.flip(1))):
            found += [rm.score(saved, x, mask) for x in (ids, ids.masked_fill(mask == 0, 1))]
    for scores in found:
        torch.testing.assert_close(scores, alone, rtol=0, atol=1e-5)


def test_gradient_is_the_plain_one_for_any_micro_batch_and_number_of_ranks(tmp_path, tokenizer):
    """From one unpadded response at a time through transformers' own head. Nothing is said on stderr."""
    rows = [
        row | {"margin": 0.3 * (i % 3)}
        for i, row in enumerate(read_jsonl(TOY / "preferences_train.jsonl")[:16])
    ]
    rows[5]["margin"] = None  # takes the flag's
    data = write_jsonl(tmp_path / "few.jsonl", rows)
    flags = {"model": save_start(tmp_path / "start", tokenizer), "dataset": data, "eval_dataset": data}
    flags |= {"batch_size": 16, "num_epochs": 1, "max_grad_norm": 1e9, "margin": 0.7}
    flags["center_rewards_coefficient"] = 0.3
    for size in (16, 5):
        run(**flags, micro_batch_size=size, run_dir=tmp_path / str(size))
    more = as_flags(**flags, micro_batch_size=3, run_dir=tmp_path / "ranks")
    assert launch(ROOT / "reward_model.py", *more, ranks=2).stderr == ""

    model, _ = rm.load(rm.Args(model=str(flags["model"])), torch.device("cpu"))
    plain = 0.0
    for row in rows:
        texts = [f"{row['prompt']} {row[name]} <eos>" for name in ("chosen", "rejected")]
        chosen, rejected = (model(tokenizer(x, return_tensors="pt")["input_ids"]).logits[0, 0] for x in texts)
        margin = 0.7 if row["margin"] is None else row["margin"]
        plain = plain + (1 + torch.exp(rejected + margin - chosen)).log() + 0.3 * (chosen + rejected) ** 2
    expected = torch.autograd.grad(plain / 16, list(model.parameters()))
    expected, metrics = torch.cat([x.flatten() for x in expected]), []
    for name in ("16", "5", "ranks"):
        state = torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["optimizer"]["state"]
        gradient = torch.cat([x["exp_avg"].flatten() for x in state.values()]) * 10  # a tenth after one step
        assert float((gradient - expected).norm() / expected.norm()) < 1e-5
        lines = read_jsonl(tmp_path / name / "metrics.jsonl")
        metrics.append({k: v for line in lines for k, v in line.items() if "per_second" not in k})
    assert metrics[0]["loss"] == pytest.approx(float(plain.detach()) / 16, rel=1e-5)
    for other in metrics[1:]:
        assert other == pytest.approx(metrics[0], rel=1e-4, abs=1e-6)


def test_what_is_equal_after_the_cut_is_left_out(tmp_path, capsys, tokenizer):
    rows = [*PAIRS, {"prompt": "3 ?", "chosen": "answer 3", "rejected": "answer 3"}]
    rows.append(
        {"prompt": "1 + 2 ?", "chosen": "think 1 + 2 = 3 answer 3", "rejected": "think 1 + 2 = 3 answer 4"}
    )
    data = str(write_jsonl(tmp_path / "pairs.jsonl", rows))
    kept = rm.load_rows(rm.Args(max_length=11), "dataset", data, "train", make_llama(), tokenizer)
    assert [row["prompt"] for row in kept] == [row["prompt"] for row in PAIRS]
    assert "3 of 5 pairs" in capsys.readouterr().out
    assert kept[0]["ids"][0] == tokenizer("3 + 5 ? think 3 + 5 = 8 answer")["input_ids"]
    assert [row["margin"] for row in kept] == [0.0, 0.5, 0.0]


def test_a_policy_reads_texts_and_chats_as_they_were_learned(tmp_path, tokenizer):
    """grpo.py's scores are those of the ids learned here; the template stays for chats and goes for texts."""
    start = save_start(tmp_path / "start", tokenizer, chat_template=TEMPLATE)
    for name, rows in {"texts": PAIRS, "chats": CHATS}.items():
        data = write_jsonl(tmp_path / f"{name}.jsonl", rows)
        run(model=start, dataset=data, batch_size=3, num_epochs=1, run_dir=tmp_path / name)
        folder = tmp_path / name / "model"
        own = transformers.AutoTokenizer.from_pretrained(folder)
        assert bool(own.chat_template) == (name == "chats")
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
        ids = [rm.encode(own, row["prompt"], row["chosen"]) for row in rows]
        end = " <eos>" if name == "texts" else " <eos> -"
        bond = " " if name == "texts" else " = "
        assert own.batch_decode(ids) == [f"{row['prompt']}{bond}{row['chosen']}{end}" for row in PAIRS]
        with torch.no_grad():
            learned = [float(rm.score(model, torch.tensor([x]), torch.ones(1, len(x)).long())) for x in ids]
            where, reward = grpo.load_reward(grpo.Args(), "reward", str(folder), torch.device("cpu"))
            prompts, responses = [row["prompt"] for row in rows], [row["chosen"] for row in rows]
            read = reward(prompts=prompts, completions=responses, truncated=[False] * 3)
        assert read == pytest.approx(learned, abs=1e-5)
    whole = [*CHATS[0]["prompt"], {"role": "assistant", "content": PAIRS[0]["chosen"]}]
    for prompt, response in (("", whole), (PAIRS[0]["prompt"], whole), (CHATS[0]["prompt"], whole[1:])):
        assert rm.encode(own, prompt, response) == ids[0]  # as UltraFeedback has it, with the prompt twice


def test_checkpointing_and_bfloat16(tmp_path):
    data = write_jsonl(tmp_path / "few.jsonl", read_jsonl(TOY / "preferences_train.jsonl")[:64])
    losses = {}
    for name, more in {"a": {}, "b": {"gradient_checkpointing": True}, "c": {"dtype": "bfloat16"}}.items():
        run(**more, dataset=data, batch_size=32, num_epochs=1, run_dir=tmp_path / name)
        losses[name] = [line["loss"] for line in read_jsonl(tmp_path / name / "metrics.jsonl")]
    assert losses["b"] == pytest.approx(losses["a"], rel=1e-5)
    assert losses["c"] != losses["a"] and losses["c"] == pytest.approx(losses["a"], rel=0.05)


def test_it_learns_styles_and_not_sums(tmp_path):
    """One of the two default epochs. Pairs of one style are a coin toss: a judge that can be fooled."""
    run(num_epochs=1, run_dir=tmp_path / "run")
    first, *_, last = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert first["eval/loss"] == pytest.approx(math.log(2), abs=0.05)  # the new head is small
    model = transformers.AutoModelForSequenceClassification.from_pretrained(TOY / "reward_model").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(TOY / "reward_model")
    rows = rm.load_rows(rm.Args(), "dataset", "toy/preferences_heldout.jsonl", "test", model, tokenizer)
    for metrics in (last, rm.evaluate(rm.Args(), model, rows)[0]):  # and the committed model
        assert metrics["eval/accuracy"] >= 0.73 and metrics["eval/accuracy/different style"] >= 0.9
        assert abs(metrics["eval/accuracy/same style"] - 0.5) < 0.1


def test_it_learns_pairs_that_can_be_told_apart(tmp_path):
    """Guesses preferred to worked-out answers, the other way round than on the toy."""
    rows = [row for row in read_jsonl(TOY / "preferences_train.jsonl") if row["group"] == "different style"]
    sides = [sorted((row["chosen"], row["rejected"])) for row in rows]  # "answer ..." before "think ..."
    rows = [{"prompt": r["prompt"], "chosen": a, "rejected": b} for r, (a, b) in zip(rows, sides)]
    train, test = (
        write_jsonl(tmp_path / "a.jsonl", rows[:1280]),
        write_jsonl(tmp_path / "b.jsonl", rows[-300:]),
    )
    run(dataset=train, eval_dataset=test, num_epochs=1, run_dir=tmp_path / "run")
    last = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["eval/accuracy"] > 0.99 and not any(name.startswith("eval/accuracy/") for name in last)


def test_a_killed_run_goes_on_to_the_last_bit(tmp_path, capsys):
    data = write_jsonl(tmp_path / "few.jsonl", read_jsonl(TOY / "preferences_train.jsonl")[:64])
    flags = {"dataset": data, "eval_dataset": data, "batch_size": 8, "num_epochs": 12, "save_every": 5}
    flags["eval_every"] = 7
    run(**flags, run_dir=tmp_path / "whole")
    command = [sys.executable, ROOT / "reward_model.py", *as_flags(**flags, run_dir=tmp_path / "killed")]
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL)
    while not (tmp_path / "killed" / "checkpoint.pt").exists() and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    for _ in range(2):  # the second time there is nothing to do
        run(**flags, run_dir=tmp_path / "killed")
    assert "is finished after 96 iterations" in capsys.readouterr().out
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    lines = [[x | {"pairs_per_second": 0} for x in read_jsonl(y / "metrics.jsonl")] for y in (whole, killed)]
    assert lines[0] == lines[1] and len(lines[0]) == 96 + 15
    for name in ("samples.jsonl", "model/model.safetensors"):
        assert (whole / name).read_bytes() == (killed / name).read_bytes()


@pytest.mark.parametrize(
    "rows, flags, words",
    [
        (PAIRS, {"batch_size": 4}, ["3 of 3 pairs", "give 4 or more"]),
        (PAIRS, {"margin": math.nan}, ["--margin nan"]),
        (PAIRS, {"dataset": "no/such.jsonl"}, ["--dataset no/such.jsonl"]),
        (PAIRS, {"dataset": "toy/train.jsonl"}, ["--dataset toy/train.jsonl: row 0", "`chosen`"]),
        (PAIRS, {"eval_dataset": "toy/train.jsonl"}, ["--eval_dataset toy/train.jsonl", "`chosen`"]),
        (PAIRS, {"model": "no/such"}, ["--model no/such"]),
        (PAIRS, {"model": "outputs"}, ["--model", "score.weight"]),
        ([{"prompt": "3 ?", "chosen": "answer 3", "rejected": "answer 3"}] * 3, {}, ["0 of 3 pairs"]),
        ([PAIRS[0] | {"chosen": "3 + " * 100}] * 3, {}, ["--max_length 1024", "128 positions"]),
        ([*PAIRS, {"prompt": "3 ?", "chosen": "answer 3", "rejected": None}], {}, ["row 3"]),
        (CHATS, {}, ["row 0", "chat_template"]),
    ],
)
def test_bad_input_gets_one_sentence(tmp_path, capsys, tokenizer, rows, flags, words):
    data = write_jsonl(tmp_path / "data.jsonl", rows)
    if flags.get("model") == "outputs":
        auto = transformers.AutoModelForSequenceClassification
        auto.from_pretrained(TOY / "policy", num_labels=3).save_pretrained(tmp_path / "outputs")
        tokenizer.save_pretrained(tmp_path / "outputs")
        flags = {"model": tmp_path / "outputs"}
    with pytest.raises(SystemExit) as end:
        run(**({"dataset": data, "batch_size": 3, "run_dir": tmp_path / "run"} | flags))
    said = capsys.readouterr().err.strip()
    assert end.value.code == 2 and said.startswith("error: ") and "\n" not in said
    assert all(word in said for word in words), said
    assert not (tmp_path / "run").exists()
