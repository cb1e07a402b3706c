"""Make the toy of chain arithmetic from a seed: tokenizer, prompts, demonstrations, preference pairs and models.

    python toy/make_toy.py --out /tmp/toy      some minutes on two cores; the same seed gives the same data

The task is chain arithmetic modulo 10, read from left to right: `3 + 5 - 2 ?`. A response either guesses
(`answer 6`) or works the chain out (`think 3 + 5 = 8 - 2 = 6 answer 6`). README.md in this folder explains what each
file is for.
"""

import json
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import tyro
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
WORDS = ["<pad>", "<eos>", "<unk>", *"0123456789", "+", "-", "=", "?", "think", "answer"]
WORKED_SHARE = 0.35  # of the demonstrations; the others guess
SLIP_RATE = 0.06  # of the steps of a worked-out response have a wrong result, from which the chain goes on
GUESS_RATE = 0.25  # of the guesses are right
CURRICULUM_STEPS = 1280  # batches of 128, which teach toy/base to work chains out
CURRICULUM_FLAGS = "--num_epochs 1 --no_shuffle --eval_size 0 --learning_rate 3e-3 --no_anneal_lr".split()


def make_chain(rng: random.Random, numbers: int) -> list:
    """A chain of random numbers with + or - between them, such as [3, "+", 5, "-", 2]."""
    chain = [rng.randrange(10)]
    for _ in range(numbers - 1):
        chain += [rng.choice("+-"), rng.randrange(10)]
    return chain


def value(chain: list) -> int:
    """The value of the chain, modulo 10."""
    total = chain[0]
    for operator, number in zip(chain[1::2], chain[2::2], strict=True):
        total = (total + number if operator == "+" else total - number) % 10
    return total


def prompt(chain: list) -> str:
    return " ".join(map(str, chain)) + " ?"


def worked_out(rng: random.Random, chain: list, slip_rate: float) -> str:
    """The chain step by step, with random errors. The answer is the last result."""
    words, total = ["think", chain[0]], chain[0]
    for operator, number in zip(chain[1::2], chain[2::2], strict=True):
        total = value([total, operator, number])
        if rng.random() < slip_rate:
            total = (total + rng.randrange(1, 10)) % 10
        words += [operator, number, "=", total]
    return " ".join(map(str, [*words, "answer", total]))


def guess(rng: random.Random, chain: list) -> str:
    """Only an answer, which is seldom right."""
    right = value(chain)
    return f"answer {right if rng.random() < GUESS_RATE else (right + rng.randrange(1, 10)) % 10}"


def respond(rng: random.Random, chain: list) -> str:
    """A response in one of the two styles, as in the demonstrations."""
    return worked_out(rng, chain, SLIP_RATE) if rng.random() < WORKED_SHARE else guess(rng, chain)


def make_data(seed: int) -> dict[str, list[dict]]:
    """The rows of every JSONL file by its name. "curriculum" is only for training and is not committed."""
    rng = random.Random(seed)
    taken = set()

    def rows(counts: dict[int, int], **columns) -> list[dict]:
        """Rows with chains, as many of each length as counts says. All rows of all calls differ."""
        chains = []
        for numbers, count in counts.items():
            end = len(chains) + count
            while len(chains) < end:
                chain = make_chain(rng, numbers)
                if prompt(chain) not in taken:
                    taken.add(prompt(chain))
                    chains.append(chain)
        rng.shuffle(chains)
        return [{"prompt": prompt(chain), "answer": str(value(chain))} | columns for chain in chains]

    heldout = rows({2: 32, 3: 56, 4: 56, 5: 56}, group="2-5")
    heldout += rows({6: 200}, group="6") + rows({8: 200}, group="8")
    heldout_prompts = set(taken)
    train = rows({2: 128, 3: 624, 4: 624, 5: 624})

    def fresh_chain(numbers: int) -> list:
        """Any chain that is not held out."""
        while prompt(chain := make_chain(rng, numbers)) in heldout_prompts:
            pass
        return chain

    curriculum = []
    for i in range(128 * CURRICULUM_STEPS):
        # The longest chain grows from 2 to 8 over the first three quarters.
        longest = min(8, 2 + int(7 * i / (96 * CURRICULUM_STEPS)))
        chain = fresh_chain(rng.randint(2, longest))
        completion = worked_out(rng, chain, slip_rate=0.0) if rng.random() < 0.8 else guess(rng, chain)
        curriculum.append({"prompt": prompt(chain), "completion": completion})

    demonstrations = []
    for _ in range(10240):
        chain = fresh_chain(rng.randint(2, 8))
        demonstrations.append({"prompt": prompt(chain), "completion": respond(rng, chain)})

    train_pairs, heldout_pairs = [], []
    while len(heldout_pairs) < 500:
        chain = fresh_chain(rng.randint(2, 5))
        responses = [respond(rng, chain) for _ in range(8)]
        right = [response for response in responses if response.endswith(f"answer {value(chain)}")]
        wrong = [response for response in responses if response not in right]
        if right and wrong:
            same = right[0].split()[0] == wrong[0].split()[0]  # the first word, "think" or "answer"
            pair = {"prompt": prompt(chain), "chosen": right[0], "rejected": wrong[0]}
            pair["group"] = "same style" if same else "different style"
            if len(train_pairs) < 4500:
                train_pairs.append(pair)
            elif all(pair["prompt"] != other["prompt"] for other in train_pairs):
                heldout_pairs.append(pair)  # never a chain of 2, because training contains all of them
    made = {"train": train, "heldout": heldout, "demonstrations": demonstrations, "curriculum": curriculum}
    return made | {"preferences_train": train_pairs, "preferences_heldout": heldout_pairs}


def with_hints(rng: random.Random, demonstrations: list[dict]) -> list[dict]:
    """The demonstrations, and again those of up to 5 numbers, with a right response before the prompt and after it."""
    rows = list(demonstrations)
    for row in demonstrations:
        chain = [word if word in "+-" else int(word) for word in row["prompt"].split()[:-1]]
        works_out = row["completion"].startswith("think")
        hint = worked_out(rng, chain, slip_rate=0.0) if works_out else f"answer {value(chain)}"
        if len(chain) < 10:
            rows.append({"prompt": f"{hint} {row['prompt']}", "completion": hint})
    return rows


def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_tokenizer(words=WORDS):
    """A tokenizer with one token per word, which adds no special tokens."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    options = {"model_max_length": 128, "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, **options)


def save_untrained(folder: Path, seed: int, words=WORDS) -> None:
    """Save a tokenizer, and a Llama of 0.16 M parameters with random weights."""
    make_tokenizer(words).save_pretrained(folder)
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"vocab_size": len(words), "max_position_embeddings": 128, "tie_word_embeddings": True}
    ids = {"bos_token_id": None, "eos_token_id": words.index("<eos>"), "pad_token_id": words.index("<pad>")}
    LlamaForCausalLM(LlamaConfig(**sizes, **ids)).save_pretrained(folder)


def train(script: str, model: Path, dataset: Path, out: Path, seed: int, flags=()) -> None:
    """Run a script and copy its model to out."""
    with tempfile.TemporaryDirectory() as runs:
        run_dir = Path(runs, "run")
        command = [sys.executable, HERE.parent / script, "--model", model, "--dataset", dataset]
        command += ["--run_dir", run_dir, "--seed", str(seed), "--device", "cpu", *flags]
        subprocess.run(command, check=True)
        left_out = shutil.ignore_patterns("generation_config.json")  # config.json has the EOS
        shutil.copytree(run_dir / "model", out, dirs_exist_ok=True, ignore=left_out)


def main(seed: int = 0, out: Path = HERE) -> None:
    out.mkdir(parents=True, exist_ok=True)
    data = make_data(seed)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        write_jsonl(scratch / "curriculum.jsonl", data.pop("curriculum"))
        write_jsonl(scratch / "hints.jsonl", with_hints(random.Random(seed), data["demonstrations"]))
        for name, rows in data.items():
            write_jsonl(out / f"{name}.jsonl", rows)
        save_untrained(scratch / "untrained", seed)
        base, policy = out / "base", out / "policy"
        train("sft.py", scratch / "untrained", scratch / "curriculum.jsonl", base, seed, CURRICULUM_FLAGS)
        train("sft.py", base, out / "demonstrations.jsonl", policy, seed)
        train("sft.py", base, scratch / "hints.jsonl", out / "hinted", seed)
    pairs, heldout_pairs = out / "preferences_train.jsonl", out / "preferences_heldout.jsonl"
    train("reward_model.py", policy, pairs, out / "reward_model", seed, ("--eval_dataset", heldout_pairs))
    train("reinforce_pp.py", policy, out / "train.jsonl", out / "teacher", seed)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
