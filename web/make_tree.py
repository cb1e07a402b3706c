"""Write web/tree.js, the choices of toy/policy for the page Train it: python web/make_tree.py

For each token of the worked-out right response: its probability, and how the policy goes on after the likeliest other
token (a slip). For a guess: the probabilities of the ten digits.
"""

import json
import random
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "toy"))
import make_toy  # noqa: E402

CHAINS = ["3 + 5 - 2", "2 - 1", "7 + 8 - 4 + 1", "9 + 6 + 4 + 5 + 1"]


@torch.no_grad()
def tree_js() -> str:
    model = AutoModelForCausalLM.from_pretrained(ROOT / "toy" / "policy", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy" / "policy")

    def after(ids: list[int]) -> torch.Tensor:
        """The probabilities of the token after each one: (T, V)."""
        return model(torch.tensor([ids])).logits[0].double().softmax(-1)

    def choice(probs: torch.Tensor, *words: str) -> list[float]:
        return [round(p, 7) for p in probs[tokenizer.convert_tokens_to_ids(words)].tolist()]

    trees = []
    for text in CHAINS:
        chain = [int(word) if word.isdecimal() else word for word in text.split()]
        prompt, right = make_toy.prompt(chain), f"answer {make_toy.value(chain)} <eos>"
        path = [*make_toy.worked_out(random.Random(0), chain, 0).split(), "<eos>"]
        ids, start = tokenizer(" ".join([prompt, *path])).input_ids, len(prompt.split())
        probs, steps = after(ids)[start - 1 :], []
        for t, word in enumerate(path[1:], 1):
            other = [p if i != ids[start + t] else 0 for i, p in enumerate(probs[t])]
            prefix = torch.tensor([[*ids[: start + t], other.index(max(other))]])
            slip = tokenizer.decode(
                model.generate(prefix, max_new_tokens=40, do_sample=False)[0, start + t :]
            )
            slip = slip.partition("<eos>")[0] + "<eos>"
            steps.append([word, *choice(probs[t], word), slip, int(slip.endswith(right))])
        digits = choice(after(tokenizer(f"{prompt} answer").input_ids)[-1], *"0123456789")
        first = choice(probs[0], "think", "answer")
        trees.append(
            {"prompt": prompt, "answer": int(right[7]), "first": first, "digits": digits, "steps": steps}
        )
    lines = ",\n".join(json.dumps(tree) for tree in trees)
    return f"// Made by make_tree.py from toy/policy.\nconst TREES = [\n{lines},\n];\n"


if __name__ == "__main__":
    (ROOT / "web" / "tree.js").write_text(tree_js())
