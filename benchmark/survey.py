"""What a model of 135 M parameters can do before any training: pass@1 and pass@8 of tasks of data/reasoning.py.

    python benchmark/survey.py                      writes results/survey.json and survey.md, 10 minutes
    python benchmark/survey.py --tasks sum largest  these only; the others in the file stay

Reinforcement has something to work with where some of k responses are right and some are not: pass@8 well above 0, and
pass@1 below 1. Needs data/smollm2, and reasoning-gym for all but the first three tasks.
"""

import importlib.metadata
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
import tyro
from toy_seeds import processor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "data"))
import reasoning  # noqa: E402

RESULTS = ROOT / "benchmark" / "results" / "survey.json"
LEVELS = {  # the easiest that the task has, where it has levels
    "reversal": "3 words",
    "largest": "3 numbers",
    "sum": "2 digits",
    "word_sequence_reversal": "min_words=3,max_words=3",
    "spell_backward": "min_word_len=3,max_word_len=3",
    "chain_sum": "min_terms=2,max_terms=2,min_digits=1,max_digits=1",
    "basic_arithmetic": "min_terms=2,max_terms=2,min_digits=1,max_digits=1",
    "gcd": "max_value=20",
    "count_bits": "max_n=100",
    "simple_equations": "min_terms=2,max_terms=2,max_value=10",
    "letter_counting": "min_words=3,max_words=3",
    "word_sorting": "min_words=3,max_words=3",
    "leg_counting": "min_animals=1,max_animals=1,max_instances=3",
    "family_relationships": "",
    "isomorphic_strings": "",
    "knights_knaves": "",
    "gsm_symbolic": "",
}


@dataclass
class Args:
    model: str = "data/smollm2"
    """Folder of the model."""
    tasks: tuple[str, ...] = tuple(LEVELS)
    """Tasks of data/reasoning.py."""
    prompts: int = 24
    """Of each task, with 8 responses to each."""


@torch.no_grad()
def responses(model, tokenizer, prompts: list[list[dict]]) -> list[list[str]]:
    """Eight to each prompt, sampled at temperature 1."""
    template = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True, "padding": True}
    inputs = tokenizer.apply_chat_template(prompts, **template)
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "num_return_sequences": 8}
    ids = model.generate(**inputs, **options, max_new_tokens=32, pad_token_id=tokenizer.eos_token_id)
    texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [texts[i : i + 8] for i in range(0, len(texts), 8)]


def table(results: dict) -> str:
    lines = [
        "| task | level | prompts | pass@1 | pass@8 | a prompt | two responses |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, cell in sorted(results["tasks"].items(), key=lambda item: -item[1]["pass@1"]):
        shown = [
            " ".join(text.replace("|", "\\|").split())[-60:]
            for text in (cell["prompt"], *cell["responses"][:2])
        ]
        rates = f"{cell['pass@1']:.2f} | {cell['pass@8']:.2f}"
        lines.append(
            f"| {name} | {cell['level']} | {cell['prompts']} | {rates} | {shown[0]} | {shown[1]} / {shown[2]} |"
        )
    return "\n".join([*lines, "", f"{results['settings']}."]) + "\n"


def main(args: Args) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"tasks": {}}
    for task in args.tasks:
        torch.manual_seed(1)
        began = time.perf_counter()
        level = LEVELS.get(task, "")
        options = reasoning.Args(task, (level,), (level,), size=0, held_out=args.prompts)
        rows = reasoning.make_rows(options)["test"]
        rows = [row for row in rows if row["task"] == task]
        said, scores = responses(model, tokenizer, [row["prompt"] for row in rows]), []
        for row, texts in zip(rows, said):
            columns = {name: [row[name]] * len(texts) for name in ("answer", "task", "entry")}
            scores.append(reasoning.score(texts, **columns))
        scores = torch.tensor(scores)  # (prompts, 8)
        cell = {
            "level": level,
            "prompts": len(rows),
            "pass@1": float(scores.mean()),
            "pass@8": float(scores.amax(1).mean()),
        }
        cell |= {"prompt": row["prompt"][-1]["content"], "responses": texts}
        results["tasks"][task] = cell | {"seconds": round(time.perf_counter() - began)}
        versions = f"torch {torch.__version__}, transformers {importlib.metadata.version('transformers')}"
        settings = f"8 responses to each prompt at temperature 1, at most 32 tokens; {args.model} in float32"
        results["settings"] = f"{settings}; {os.cpu_count()} cores, {processor()}, {versions}"
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(task, level, cell["pass@1"], cell["pass@8"], flush=True)
    RESULTS.with_suffix(".md").write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
