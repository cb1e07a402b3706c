"""grpo.py with a clock, and with the system "bare" also the model calls in it with nothing around them.

speed.py starts this with a system, a script (grpo or a variant of it) and its flags as JSON. Prints a JSON line for
each iteration.

The bare calls follow each iteration and have the shapes of its calls: sampling with a cache whose rows leave at the
same steps, the reference's forward pass and log-softmax, and forward and backward pass of the update. No text, score,
advantage, clipping, optimizer or file.
"""

import importlib
import json
import sys
import time

import common  # adds the folder of the scripts to sys.path
import torch
import transformers

system, script, flags = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
grpo = importlib.import_module(script)
args = grpo.Args(**flags)
models, calls, rollout = [], [], {}  # of the iteration that runs now
original_load, original_generate, original_log = grpo.load, grpo.generate, grpo.log
last_end = None


def noted_load(*arguments):
    """Keep the policy and the reference."""
    model, tokenizer = original_load(*arguments)
    models.append(model)
    return model, tokenizer


def noted_generate(model, *arguments):
    """Keep the calls of the model: the shape of the new tokens, or the index of the rows that stay."""
    calls.clear()
    forward, reorder = model.forward, transformers.DynamicCache.reorder_cache

    def noted_forward(*positional, **inputs):
        calls.append(tuple(inputs["input_ids"].shape))
        return forward(*positional, **inputs)

    def noted_reorder(cache, index):
        calls.append(index)
        return reorder(cache, index)

    model.forward, transformers.DynamicCache.reorder_cache = noted_forward, noted_reorder
    rollout.update(original_generate(model, *arguments))
    model.forward, transformers.DynamicCache.reorder_cache = forward, reorder
    return dict(rollout)


def bare_generate(policy):
    """The same calls with a meaningless token, which changes no shape, and a token sampled from each."""
    count, length = calls[0]
    mask = rollout["attention_mask"][:count, :length].clone()
    mask[:, -1] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    eos = torch.tensor([policy.config.eos_token_id])
    with grpo.sampling_cache(args, policy) as cache:
        for call in calls:
            if isinstance(call, torch.Tensor):
                cache.reorder_cache(call)
                mask, positions = mask[call], positions[call]
                continue
            if call[1] == 1:
                mask = torch.cat([mask, mask.new_ones(call[0], 1)], dim=1)
                positions = positions[:, -1:] + 1
            inputs = {"input_ids": torch.full(call, 5), "attention_mask": mask, "position_ids": positions}
            logits = policy(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            probs = logits.float().softmax(-1)
            tokens = (probs / torch.empty_like(probs).exponential_()).argmax(-1)
            int(torch.isin(tokens, eos).sum())  # the least that shows when to stop


def bare_logprobs(model, batch):
    T = batch["response_mask"].shape[1]
    inputs = grpo.model_inputs(batch["sequences"], batch["attention_mask"])
    logits = model(**inputs, use_cache=False, logits_to_keep=T + 1).logits[:, :-1]
    return logits.float().log_softmax(-1).gather(-1, batch["sequences"][:, -T:, None])[:, :, 0]


def bare_calls():
    """The seconds of each phase."""
    policy, reference = models
    tensors = {name: rollout[name] for name in ("sequences", "attention_mask", "response_mask")}
    start = time.perf_counter()
    bare_generate(policy)
    after_rollout = time.perf_counter()
    with torch.no_grad():
        for _, batch in grpo.micro_batches(tensors, torch.arange(args.batch_size), args.micro_batch_size):
            bare_logprobs(reference, batch)
    after_reference = time.perf_counter()
    for minibatch in torch.randperm(args.batch_size).chunk(args.num_minibatches):
        for _, batch in grpo.micro_batches(tensors, minibatch, args.micro_batch_size):
            bare_logprobs(policy, batch).masked_fill(~batch["response_mask"], 0.0).sum().backward()
        policy.zero_grad()
    end = time.perf_counter()
    return {
        "rollout": after_rollout - start,
        "reference": after_reference - after_rollout,
        "update": end - after_reference,
    }


def timed_log(run_dir, wandb_run, iteration, metrics, *arguments, **options):
    """The last call of an iteration. The first line has no seconds: setup would be in them."""
    global last_end
    original_log(run_dir, wandb_run, iteration, metrics, *arguments, **options)
    seconds = last_end and time.perf_counter() - last_end
    line = {"seconds": seconds, "lengths": metrics["response_length"]}
    if system == "bare":
        line |= bare_calls()
    line["peak_gib"] = common.memory_gib("VmHWM")
    if grpo.RANK == 0:
        print(json.dumps(line), flush=True)
    last_end = time.perf_counter()


grpo.log = timed_log
if system == "bare":
    grpo.load, grpo.generate = noted_load, noted_generate
grpo.main(args)
