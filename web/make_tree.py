"""Write web/tree.js, the choices of toy/policy for the page Train it: python web/make_tree.py

The file lists the probability of each token of a right response, and how the policy goes on after the likeliest wrong
token.
"""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
RIGHT = [
    "3 + 5 - 2 ? think 3 + 5 = 8 - 2 = 6 answer 6 <eos>",
    "2 - 1 ? think 2 - 1 = 1 answer 1 <eos>",
    "7 + 8 - 4 + 1 ? think 7 + 8 = 5 - 4 = 1 + 1 = 2 answer 2 <eos>",
    "9 + 6 + 4 + 5 + 1 ? think 9 + 6 = 5 + 4 = 9 + 5 = 4 + 1 = 5 answer 5 <eos>",
]


@torch.no_grad()
def tree_js() -> str:
    model = AutoModelForCausalLM.from_pretrained(ROOT / "toy" / "policy", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy" / "policy")

    def after(ids: list[int]) -> torch.Tensor:
        """The probabilities of the token after each one: (T, V)."""
        return model(torch.tensor([ids])).logits[0].double().softmax(-1)

    def choice(probs: torch.Tensor, *words: str) -> list[float]:
        return [round(p, 7) for p in probs[tokenizer.convert_tokens_to_ids(words)].tolist()]

    lines = []
    for text in RIGHT:
        words, ids = text.split(), tokenizer(text).input_ids
        probs, start, steps = after(ids), words.index("think"), []
        for t in range(start + 1, len(words)):
            other = next(i for i in probs[t - 1].argsort(descending=True) if i != ids[t])
            prefix = torch.tensor([[*ids[:t], other]])
            rest = model.generate(prefix, max_new_tokens=40, do_sample=False)[0, t:]
            slip = tokenizer.decode(rest).partition("<eos>")[0] + "<eos>"
            steps.append([words[t], *choice(probs[t - 1], words[t]), slip, int(slip.endswith(text[-14:]))])
        tree = {"prompt": " ".join(words[:start]), "answer": int(words[-2]), "steps": steps}
        tree["first"] = choice(probs[start - 1], "think", "answer")
        tree["digits"] = choice(after(ids[:start] + tokenizer("answer").input_ids)[-1], *"0123456789")
        lines.append(json.dumps(tree))
    return "// Made by make_tree.py from toy/policy.\nconst TREES = [\n" + ",\n".join(lines) + ",\n];\n"


if __name__ == "__main__":
    (ROOT / "web" / "tree.js").write_text(tree_js())
