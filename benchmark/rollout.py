"""What each part of the rollout and of the padding rules gives, on the long tail of speed.py, against doing without it.

    python benchmark/rollout.py

One rollout of 64 responses (8 prompts x 8, a Llama of 10 M parameters, mean length about 40, longest 150 to 250), its
log-probs, forward and backward pass. Each variant is grpo.py with one line changed, and EOS replaced by lengths drawn
beforehand, so that all do the same work; they run in turn, repeated; the result is the median. Writes
results/rollout.json and .md.
"""

import json
import math
import statistics
import sys
import tempfile
import time
import types
from dataclasses import dataclass
from pathlib import Path

import tyro
from speed import WORKS, make_gpu, make_tail
from toy_seeds import processor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SAMPLER = "tokens = (probs if greedy else probs / torch.empty_like(probs).exponential_()).argmax(-1)"
ONCE = """    unique = list(dict.fromkeys(map(tuple, prompts)))
    copies = torch.tensor([unique.index(tuple(ids)) for ids in prompts], device=device)"""
LEAVE = "len(left) <= 0.75 * len(rows)"
VARIANTS = {  # label: (phase that it changes, the lines as they are, what they become)
    "as it is": ("", "", ""),
    "rows never leave": ("rollout", LEAVE, "False"),
    "rows leave one by one": ("rollout", LEAVE, "len(left) < len(rows)"),
    "each response reads its prompt": (
        "rollout",
        ONCE,
        "    unique, copies = prompts, torch.arange(len(prompts), device=device)",
    ),
    "torch.multinomial": ("rollout", SAMPLER, "tokens = torch.multinomial(probs, 1)[:, 0]"),
    "rows in random order": (
        "update",
        "rows[lengths.argsort(stable=True)]",
        "rows[torch.randperm(len(rows))]",
    ),
    "micro-batches not cut": ("update", "end = int(rollout", "end = T if True else int(rollout"),
}


@dataclass
class Args:
    repeats: int = 5
    """Repetitions of everything."""
    device: str = "cpu"
    """cuda takes Qwen2.5-0.5B's shape in bfloat16, 512 responses of 512 tokens."""
    name: str = "rollout"
    """Name of the result files."""


def variant(old: str, new: str):
    """grpo.py with one line changed, as a module."""
    source = (ROOT / "grpo.py").read_text()
    assert not old or source.count(old) == 1, old
    source = source.replace(old, new) if old else source
    # The same lengths for all: with rows leaving at other times, the same seed would draw others.
    changes = {
        "running &= ~torch.isin(tokens, stop_ids)": "running &= t + 1 < LENGTHS[rows]",
        "ends = torch.isin(responses, stop_ids)": "ends = torch.arange(t + 1, device=device) + 1 == LENGTHS[:, None]",
    }
    for line, changed in changes.items():
        assert source.count(line) == 1, line
        source = source.replace(line, changed)
    module = types.ModuleType("variant")
    module.__file__ = str(ROOT / "grpo.py")
    sys.modules["variant"] = module
    exec(compile(source, "grpo.py", "exec"), module.__dict__)
    return module


def main(args: Args) -> None:
    import torch
    import transformers

    import grpo

    device, work = torch.device(args.device), WORKS["gpu" if args.device == "cuda" else "tail"]

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    flags = {name: work[name] for name in ("batch_size", "micro_batch_size", "max_response_length")}
    flags = grpo.Args(**flags, dtype="bfloat16" if args.device == "cuda" else "float32")
    with tempfile.TemporaryDirectory() as folder:
        (make_gpu if args.device == "cuda" else make_tail)(Path(folder))
        tokenizer = transformers.AutoTokenizer.from_pretrained(f"{folder}/model")
        policy, _ = grpo.load(flags, transformers.AutoModelForCausalLM, "model", f"{folder}/model", device)
        prompts = [json.loads(line)["prompt"] for line in Path(folder, "prompts.jsonl").open()]
    modules = {label: variant(old, new) for label, (_, old, new) in VARIANTS.items()}
    seconds = {label: {"rollout": [], "update": []} for label in [*VARIANTS, "transformers' generate"]}
    lengths = []
    for repeat in range(args.repeats + 1):  # the first is to warm up
        mine = [prompt for prompt in prompts[repeat * 8 :][: work["batch_size"] // 8] for _ in range(8)]
        torch.manual_seed(repeat)
        drawn = torch.rand(len(mine), device=device).log() / math.log(1 - 1 / 40)  # geometric, mean 40
        drawn = drawn.long().clamp(1, flags.max_response_length)
        for label, script in modules.items():
            script.LENGTHS = drawn
            torch.manual_seed(repeat)
            start = now()
            generated = script.generate(policy, tokenizer, [tokenizer(x)["input_ids"] for x in mine], flags)
            if repeat:
                seconds[label]["rollout"].append(now() - start)
            if label == "as it is":
                lengths.append(generated[2].sum(1).float())
            if VARIANTS[label][0] == "rollout":
                continue
            rollout = dict(zip(("sequences", "attention_mask", "response_mask"), generated))
            start = now()
            everything = torch.arange(len(mine), device=device)
            for _, _, inputs in script.micro_batches(rollout, everything, flags.micro_batch_size):
                script.token_logprobs(policy, *inputs, 1.0).sum().backward()
            policy.zero_grad()
            if repeat:
                seconds[label]["update"].append(now() - start)
        torch.manual_seed(repeat)
        ids = tokenizer(mine, return_tensors="pt", padding=True, padding_side="left").to(device)
        ids.pop("token_type_ids", None)
        width = ids["input_ids"].shape[1]

        class Drawn(transformers.StoppingCriteria):
            def __call__(self, input_ids, scores, drawn=drawn, width=width, **more):
                return input_ids.shape[1] - width >= drawn

        options = {
            "do_sample": True,
            "top_k": 0,
            "max_new_tokens": flags.max_response_length,
            "eos_token_id": -1,
        }
        options |= {"stopping_criteria": [Drawn()], "pad_token_id": 0}
        start = now()
        with torch.autocast(device.type, torch.bfloat16, enabled=args.device == "cuda"), torch.no_grad():
            policy.generate(**ids, **options)
        if repeat:
            seconds["transformers' generate"]["rollout"].append(now() - start)
        print(f"repetition {repeat} of {args.repeats}", flush=True)

    base = {phase: statistics.median(values) for phase, values in seconds["as it is"].items()}
    lines = [
        f"`python benchmark/rollout.py` on {processor()}, {args.device}, torch {torch.__version__}, transformers"
    ]
    all_lengths = torch.cat(lengths[1:])
    lines[0] += (
        f" {transformers.__version__}. {args.repeats} rollouts of {work['batch_size']} responses, mean length"
    )
    lines[0] += f" {all_lengths.mean():.0f}, longest {all_lengths.max():.0f}."
    lines += [
        "",
        "| variant | rollout, s | times | forward and backward, s | times |",
        "|---|---|---|---|---|",
    ]
    for label, phases in seconds.items():
        cells = []
        for phase in ("rollout", "update"):
            changed = label in ("as it is", "transformers' generate") or VARIANTS[label][0] == phase
            median = statistics.median(phases[phase]) if changed and phases[phase] else None
            cells += [f"{median:.2f}", f"{median / base[phase]:.2f}"] if median else ["", ""]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    path = ROOT / "benchmark" / "results" / args.name
    path.with_suffix(".json").write_text(json.dumps({"seconds": seconds}, indent=1) + "\n")
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
