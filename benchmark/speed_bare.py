"""A script's iterations against the same model calls with nothing around them, in turn: the bound of speed.py.

Arguments: one JSON object, see speed.py. Runs the script's own main, notes the shape of every call that its sampling
makes of the model, and after each iteration makes calls of the same shapes again: prefill and decoding with a cache
whose rows leave at the same steps, the forward pass of the reference with the log-softmax of all columns, forward and
backward pass of the update. No text, no score, no advantage, no clipping, no optimizer, no metrics, no file.
Prints one JSON line per iteration: seconds of the iteration, of the bare calls, and of these if they sample in
inference mode.
"""

import importlib
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers

work = json.loads(sys.argv[1])
script = importlib.import_module(work["script"])
args = script.Args(**work["flags"])
device = torch.device(args.device)
models, seen, marks = [], {}, []


def now() -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def noted_load(*arguments, load=script.load):
    model, tokenizer = load(*arguments)
    models.append(model)
    return model, tokenizer


def noted_generate(model, *rest, generate=script.generate, **options):
    """Notes the calls: (rows, new columns), or the index of the rows that stay."""
    seen["calls"], forward, reorder = [], model.forward, transformers.DynamicCache.reorder_cache

    def noted_forward(*positional, **inputs):
        seen["calls"].append(tuple(inputs["input_ids"].shape))
        return forward(*positional, **inputs)

    def noted_reorder(cache, index):
        seen["calls"].append(index)
        return reorder(cache, index)

    model.forward, transformers.DynamicCache.reorder_cache = noted_forward, noted_reorder
    seen["generated"] = generate(model, *rest, **options)
    model.forward, transformers.DynamicCache.reorder_cache = forward, reorder
    return seen["generated"]


def bare_generate(policy) -> None:
    """The same calls on ids of no meaning, which change no shape, and a token sampled from each."""
    attention_mask = seen["generated"]["attention_mask"]
    count, columns = seen["calls"][0]
    mask = attention_mask[:count, :columns].clone()
    mask[:, -1] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = transformers.DynamicCache(config=policy.config)
    stop_ids = torch.tensor([policy.config.eos_token_id], device=device)
    for call in seen["calls"]:
        if isinstance(call, torch.Tensor):
            cache.reorder_cache(call)
            mask, positions = mask[call], positions[call]
            continue
        if call[1] == 1:
            mask = torch.cat([mask, mask.new_ones(call[0], 1)], dim=1)
            positions = positions[:, -1:] + 1
        inputs = {
            "input_ids": torch.full(call, 5, device=device),
            "attention_mask": mask,
            "position_ids": positions,
        }
        logits = policy(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        probs = logits.float().softmax(-1)
        tokens = (probs / torch.empty_like(probs).exponential_()).argmax(-1)
        int(
            torch.isin(tokens, stop_ids).sum()
        )  # as much as anybody must do to sample, and to know when to stop


def logprobs_of(model, mb) -> torch.Tensor:
    sequences, attention_mask, T = mb["sequences"], mb["attention_mask"], mb["response_mask"].shape[1]
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": sequences, "attention_mask": attention_mask, "position_ids": positions}
    logits = model(**inputs, use_cache=False, logits_to_keep=T + 1).logits[:, :-1]
    return logits.float().log_softmax(-1).gather(-1, sequences[:, -T:, None])[:, :, 0]


def bare_calls() -> dict:
    """Seconds of each phase."""
    policy, reference = models
    rollout = {name: seen["generated"][name] for name in ("sequences", "attention_mask", "response_mask")}
    everything = torch.arange(args.batch_size, device=device)
    times = [now()]
    for mode in (torch.inference_mode, torch.no_grad):
        with mode(), torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16"):
            bare_generate(policy)
        times.append(now())
    with torch.no_grad():
        for _, mb in script.micro_batches(rollout, everything, args.micro_batch_size):
            logprobs_of(reference, mb)
    times.append(now())
    for minibatch in torch.randperm(args.batch_size, device=device).chunk(args.num_minibatches):
        for _, mb in script.micro_batches(rollout, minibatch, args.micro_batch_size):
            logprobs_of(policy, mb).masked_fill(~mb["response_mask"], 0.0).sum().backward()
        policy.zero_grad()
    times.append(now())
    names = "inference", "rollout", "logprobs", "update"
    return {name: b - a for name, a, b in zip(names, times, times[1:])}


def noted_log(*arguments, log=script.log, **options):
    """The last thing that an iteration does."""
    log(*arguments, **options)
    if marks:
        line = {"seconds": now() - marks[-1], "phases": bare_calls()}
        inference = line["phases"].pop("inference")
        line["bare"] = sum(line["phases"].values())  # under no_grad, as transformers' generate is
        line["inference"] = line["bare"] - line["phases"]["rollout"] + inference
        print(json.dumps(line), flush=True)
    marks.append(now())


script.load, script.generate, script.log = noted_load, noted_generate, noted_log
script.main(args)
