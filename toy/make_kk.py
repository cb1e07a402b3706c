"""Make toy/kk from a seed: Knights and Knaves, puzzles about people who always tell the truth or always lie.

    python toy/make_kk.py                  some minutes on two cores; the same seed gives the same data
    python toy/make_kk.py --out /tmp/kk    into another folder

A knight's statement is true, a knave's is false. Each person makes one statement, and one answer fits them all:

    C : A same C . A : C knave ?        C says that A and C are of the same kind, A says that C is a knave

A statement names one person (`knight`, `knave`) or two: `same`, or `excludes`, which says: if the first is a knight,
then the second is a knave. A response guesses (`answer C knave A knight`) or works the puzzle out. It supposes that
the first person is a knight and judges the statements of those whose kind is known, in the order in which they became
known. A step copies a statement, says whether it is true, writes down the known kinds of those it names and what
follows: a new kind after `so`, nothing new (`ok`), or a contradiction (`no`). Then the first person is a knave:

    suppose C knight . C : A same C true C knight so A knight . A : C knave true C knight no .
    then C knave . C : A same C false C knave so A knight . A : C knave true C knave ok . answer C knave A knight

Puzzles that need a second supposition are left out. README.md beside this file says who learns from what.
"""

import random
import tempfile
import zlib
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import tyro
from make_toy import HERE, make_tokenizer, train, write_jsonl

NAMES = "ABCDEFGH"
TRUTH = {  # of a statement, from the kinds of those it names; True is a knight
    "knight": lambda kind: kind,
    "knave": lambda kind: not kind,
    "same": lambda first, second: first == second,
    "excludes": lambda first, second: not (first and second),
}
WORDS = ["<pad>", "<eos>", "<unk>", *NAMES, *TRUTH, ":", ".", "?", "suppose", "then", "true", "false"]
WORDS += ["so", "ok", "no", "answer"]
KIND = {True: "knight", False: "knave"}
WORKED_SHARE = 0.25  # of the demonstrations; the others guess
MAX_RESPONSE = 159  # words at most, so that 160 tokens hold a response and its EOS
POSITIONS = 256  # of the model; a puzzle of 6 people has at most 36 words
HELDOUT = 100  # puzzles per number of people
CURRICULUM_STEPS = 600  # batches of 128, which teach the model to work puzzles out


@dataclass(frozen=True)
class Statement:
    speaker: str
    word: str  # a key of TRUTH
    names: tuple[str, ...]  # those it is about

    def __str__(self) -> str:
        return " ".join([self.speaker, ":", self.names[0], self.word, *self.names[1:]])

    def is_true(self, kinds: dict) -> bool:
        return TRUTH[self.word](*(kinds[name] for name in self.names))


def prompt(puzzle: list[Statement]) -> str:
    return " . ".join(map(str, puzzle)) + " ?"


def describe(kinds: dict) -> str:
    return " ".join(f"{name} {KIND[kind]}" for name, kind in kinds.items())


def all_kinds(names):
    """Every way in which these people can be knights and knaves."""
    return (dict(zip(names, kinds)) for kinds in product([True, False], repeat=len(names)))


def solutions(puzzle: list[Statement]) -> list[dict]:
    """Every answer that makes a knight's statement true and a knave's false."""
    every = all_kinds([statement.speaker for statement in puzzle])
    return [kinds for kinds in every if all(s.is_true(kinds) == kinds[s.speaker] for s in puzzle)]


def judge(statement: Statement, kinds: dict) -> tuple[str | None, dict]:
    """What follows when the speaker is known: so, ok or no, and the new kinds; None: not clear yet."""
    unknown = [name for name in statement.names if name not in kinds]
    cases = list(all_kinds(unknown))
    possible = [case for case in cases if statement.is_true(kinds | case) == kinds[statement.speaker]]
    if not possible:
        return "no", {}
    if len(possible) == len(cases):
        return "ok", {}
    return ("so", possible[0]) if len(possible) == 1 else (None, {})


def work_out(puzzle: list[Statement]) -> str | None:
    """The reasoning and the answer; None if it takes more than one supposition."""
    said_by = {statement.speaker: statement for statement in puzzle}
    first, parts = puzzle[0].speaker, []
    for kinds, start in [({first: True}, "suppose"), ({first: False}, "then")]:
        parts.append(f"{start} {describe(kinds)}")
        speakers = [first]  # grows
        for speaker in speakers:
            statement = said_by[speaker]
            known = {name: kinds[name] for name in statement.names if name in kinds}
            verdict, new = judge(statement, kinds)
            if verdict is None:
                return None
            truth = "true" if kinds[speaker] else "false"
            parts.append(" ".join(f"{statement} {truth} {describe(known)} {verdict} {describe(new)}".split()))
            kinds.update(new)
            speakers += new
            if verdict == "no":
                break
        else:
            answer = {name: kinds[name] for name in said_by if name in kinds}
            return " . ".join([*parts, f"answer {describe(answer)}"]) if len(answer) == len(puzzle) else None


def is_held_out(puzzle: list[Statement]) -> bool:
    """A fifth of all puzzles. Those that differ only in the names, or in the order of a pair, go together."""
    numbers = {statement.speaker: i for i, statement in enumerate(puzzle)}
    form = [(statement.word, sorted(numbers[name] for name in statement.names)) for statement in puzzle]
    return zlib.crc32(str(form).encode()) % 5 == 0


def make_puzzle(rng: random.Random, people: int, held_out: bool = False) -> tuple[list[Statement], str]:
    """A puzzle with one solution, and its reasoning."""
    while True:
        speakers = rng.sample(NAMES, people)
        puzzle = []
        for speaker in speakers:
            if rng.random() < 0.5:
                names = [rng.choice([name for name in speakers if name != speaker])]
                puzzle.append(Statement(speaker, rng.choice(["knight", "knave"]), tuple(names)))
            else:
                names = rng.sample(speakers, 2)
                puzzle.append(Statement(speaker, rng.choice(["same", "excludes"]), tuple(names)))
        if is_held_out(puzzle) == held_out and (worked := work_out(puzzle)):
            if len(worked.split()) <= MAX_RESPONSE and len(solutions(puzzle)) == 1:
                return puzzle, worked


def prompts(rng: random.Random, counts: dict[int, int], held_out: bool) -> list[dict]:
    """Rows with so many different prompts of each number of people."""
    rows = {}
    for people, count in counts.items():
        goal = len(rows) + count
        while len(rows) < goal:
            puzzle, worked = make_puzzle(rng, people, held_out)
            answer = worked.rpartition("answer ")[2]
            rows[prompt(puzzle)] = {"prompt": prompt(puzzle), "answer": answer, "group": str(people)}
    return list(rows.values())


def make_prompts(seed: int) -> dict[str, list[dict]]:
    """The rows of the two committed files."""
    rng = random.Random(seed)
    train = prompts(rng, {2: 200, 3: 1800}, held_out=False)
    rng.shuffle(train)
    return {"train": train, "heldout": prompts(rng, dict.fromkeys(range(2, 7), HELDOUT), held_out=True)}


def make_demonstrations(seed: int, count: int, worked_share: float, longest: int | None = None) -> list[dict]:
    """Puzzles of 2 to 5 people, most of 3; without longest, the number grows from 3 to 5."""
    rng = random.Random(f"demonstrations {seed} {worked_share}")
    rows = []
    for i in range(count):
        most = longest or min(5, 3 + 5 * i // count)
        puzzle, worked = make_puzzle(rng, rng.choice([2, 3, 3, *range(3, most + 1)]))
        # A guess is a coin toss for each person.
        guess = f"answer {describe({statement.speaker: rng.random() < 0.5 for statement in puzzle})}"
        completion = worked if rng.random() < worked_share else guess
        rows.append({"prompt": prompt(puzzle), "completion": completion})
    return rows


def make_kk_tokenizer():
    """One token per word, with room for the longest puzzle and its reasoning."""
    tokenizer = make_tokenizer(WORDS)
    tokenizer.model_max_length = POSITIONS
    return tokenizer


def make_untrained_model(seed: int):
    """A Llama of 0.2 M parameters with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=POSITIONS,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=WORDS.index("<eos>"),
            pad_token_id=WORDS.index("<pad>"),
        )
    )


def main(seed: int = 0, out: Path = HERE / "kk") -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in make_prompts(seed).items():
        write_jsonl(out / f"{name}.jsonl", rows)
    with tempfile.TemporaryDirectory() as folder:
        untrained, base = Path(folder) / "untrained", Path(folder) / "base"
        make_untrained_model(seed).save_pretrained(untrained)
        make_kk_tokenizer().save_pretrained(untrained)
        curriculum, demonstrations = Path(folder) / "curriculum.jsonl", Path(folder) / "demonstrations.jsonl"
        write_jsonl(curriculum, make_demonstrations(seed, 128 * CURRICULUM_STEPS, 1.0))
        write_jsonl(demonstrations, make_demonstrations(seed, 10240, WORKED_SHARE, longest=5))
        flags = ["--num_epochs", "1", "--no_shuffle", "--eval_size", "0", "--learning_rate", "3e-3"]
        flags += ["--lr_schedule", "constant_with_warmup", "--micro_batch_size", "32"]
        train("sft.py", base, seed, *flags, "--model", str(untrained), "--dataset", str(curriculum))
        flags = ["--num_epochs", "1", "--model", str(base), "--dataset", str(demonstrations)]
        train("sft.py", out / "policy", seed, *flags)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
