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
SAMPLER = "tokens = (probs / torch.empty_like(probs).exponential_()).argmax(-1)"
VARIANTS = {  # label: (phase that it changes, the line as it is, what it becomes)
    "as it is": ("", "", ""),
    "rows never leave": ("rollout", "num_running <= 0.75 * len(rows)", "False"),
    "rows leave when half have finished": (
        "rollout",
        "num_running <= 0.75 * len(rows)",
        "num_running <= 0.5 * len(rows)",
    ),
    "rows leave one by one": ("rollout", "num_running <= 0.75 * len(rows)", "num_running < len(rows)"),
    "batch stepped down in powers of two": (
        "rollout",
        "num_running <= 0.75 * len(rows)",
        "num_running <= 2 ** (len(rows) - 1).bit_length() // 2",
    ),
    "each response reads its prompt": ("rollout", "left_pad([[*ids] for ids in numbers]", "left_pad(prompts"),
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
    if new == "left_pad(prompts":
        once = "copies = [numbers.setdefault(tuple(ids), len(numbers)) for ids in prompts]"
        assert once in source
        source = source.replace(once, "copies = [*range(len(prompts))]")
    # The same lengths for all: with rows leaving at other times, the same seed would draw others.
    stop = "running & ~torch.isin(tokens, stop_ids)"
    assert stop in source
    source = source.replace(stop, "running & (t + 1 < LENGTHS[rows]) & ~torch.isin(tokens, stop_ids - 10**9)")
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

    with tempfile.TemporaryDirectory() as folder:
        (make_gpu if args.device == "cuda" else make_tail)(Path(folder))
        tokenizer = transformers.AutoTokenizer.from_pretrained(f"{folder}/model")
        policy = grpo.load_policy(f"{folder}/model", "model", device)
        prompts = [json.loads(line)["prompt"] for line in Path(folder, "prompts.jsonl").open()]
    flags = {name: work[name] for name in ("batch_size", "micro_batch_size", "max_response_length")}
    flags = grpo.Args(**flags, dtype="bfloat16" if args.device == "cuda" else "float32")
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
            with script.autocast(flags, device):
                generated = script.generate(policy, tokenizer, mine, flags)
            if repeat:
                seconds[label]["rollout"].append(now() - start)
            if label == "as it is":
                lengths.append(generated[2].sum(1).float())
            if VARIANTS[label][0] == "rollout":
                continue
            rollout = dict(zip(("sequences", "attention_mask", "response_mask"), generated, strict=True))
            start = now()
            everything = torch.arange(len(mine), device=device)
            for _, mb in script.micro_batches(rollout, everything, flags.micro_batch_size):
                inputs = mb["sequences"], mb["attention_mask"], mb["response_mask"].shape[1], 1.0
                with script.autocast(flags, device):
                    logprobs, _ = script.token_logprobs(policy, *inputs)
                logprobs.sum().backward()
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
        with script.autocast(flags, device), torch.no_grad():
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
