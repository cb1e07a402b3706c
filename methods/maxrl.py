# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.23.0", "datasets==5.2.0", "tyro==1.0.17", "wandb==0.31.0"]
# ///
"""MaxRL: GRPO's group with the mean of the scores in place of their std; REINFORCE, no clip.

Fahim Tajwar et al., "Maximum Likelihood Reinforcement Learning", arXiv 2602.02710. To each prompt pi_old
samples k = samples_per_prompt responses with the scores r_1 ... r_k, 0 or 1; o_t is token t. pi_theta is
the same policy with gradient:

    A_i  = (r_i - mean(r)) / mean(r)                   mean of the group; 0 if it is 0
    loss = -1/N_seq sum_i A_i sum_t log pi_theta(o_t)  a response is one action: no 1/T, no clip

N_seq counts the responses of one optimizer step over all ranks; the sampled EOS is a token of its response.
REINFORCE ascends the pass rate p of a prompt, maximum likelihood ascends log p. This lies in between: the
expected gradient is sum_j 1/j grad pass@j for j = 1 ... k-1, the series of log p cut off. (The paper's sum
ends at k; leaving a group without a success at 0 costs one term.) A seldom solved prompt weighs up to k - 1
times as much as in REINFORCE. There is one step per rollout, since nothing corrects for a policy that has
moved. There is no KL.
Train a toy model on sums such as "3 + 5 - 2 ?" (half a minute, score 0.3 to 0.97), or a real one on 8 GPUs:

    python methods/maxrl.py
    OMP_NUM_THREADS=8 torchrun --nproc-per-node 8 methods/maxrl.py --model Qwen/Qwen2.5-1.5B-Instruct \
        --dataset prompts.jsonl --reward my_reward.py:score --max_response_length 1024 --batch_size 1024 \
        --micro_batch_size 4 --learning_rate 1e-6 --dtype bfloat16 --gradient_checkpointing --run_dir runs/a
"""

import atexit
import copy
import json
import math
import os
import runpy
import shutil
import sys
import time
import zlib
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

# Before torch is imported: fewer gaps in the memory of a GPU
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import datasets
import filelock  # comes with torch
import pyarrow.parquet  # comes with datasets
import torch
import torch.distributed as dist
import torch.distributed.nn  # before init_process_group; a library's later import would keep the group alive
import transformers
import tyro
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint as recompute

RANK = int(os.environ.get("RANK", 0))  # set by torchrun
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))

# A rollout is a dict of tensors with a row for each response of this rank, B = batch_size / WORLD_SIZE rows.
# P is the length of its longest prompt, T = max_response_length. A forward pass takes b of the rows.
#
#   sequences       (B, P+T)  token ids: the prompt, padded on the left; the response, padded on the right
#   attention_mask  (B, P+T)  1 on prompt and response, 0 on padding
#   response_mask   (B, T)    True on the tokens that the policy sampled, the EOS included
#   old_logprobs    (B, T)    log pi_old of each token, from the sampling loop
#   entropy         (B, T)    of the distribution that the token was sampled from
#   truncated       (B,)      True if the response has no EOS
#   raw_scores      (B,)      what the reward gives
#   scores          (B,)      the same after penalty, scale, z-score and clip
#   ref_logprobs    (B, T)    log pi_ref of each token
#   kl              (B, T)    old_logprobs - ref_logprobs
#   advantages      (B, T)    from compute_advantages
#
# Every (B, T) tensor is 0 where response_mask is False. Responses to one prompt stand side by side.


@dataclass
class Args:
    # The comment behind a flag is its --help text.
    exp_name: str = Path(__file__).stem  # name of the run
    seed: int = 1  # of the order of prompts, of sampling and of minibatches
    device: str = str(torch.accelerator.current_accelerator(check_available=True) or "cpu")  # cuda, mps, ...
    dtype: Literal["float32", "bfloat16"] = "float32"  # bfloat16 is autocast; weights and AdamW stay float32
    # Model and data
    model: str = "toy/policy"  # starting policy and frozen reference: folder or hub id of a causal LM
    dataset: str = "toy/train.jsonl"  # .jsonl, .parquet, folder or hub id; `prompt` is text or chat messages
    dataset_split: str = "train"  # split of a hub id or folder
    eval_dataset: str | None = None  # held-out prompts, by default the toy's; column `group` splits the score
    eval_split: str = "test"  # split of a hub id or folder
    # Rollout
    batch_size: int = 128  # responses per rollout, over all ranks
    max_prompt_length: int = 512  # prompts with more tokens are left out
    max_response_length: int = 40  # most tokens of a response; one without an EOS by then is truncated
    temperature: float = 1.0  # of sampling, log-probs and KL
    # Reward. A function gets the lists prompts=, completions=, truncated=, prompt_ids= and every other column
    reward: str = "exact_answer"  # exact_answer (1 or 0), file.py:function, or a reward model's folder or id
    eval_reward: str | None = None  # scores the held-out responses instead of --reward
    answer_marker: str = "answer"  # exact_answer compares the text after the last marker with column `answer`
    missing_eos_penalty: float = 0.0  # subtracted from the score of a truncated response
    reward_scale: float = 1.0  # factor of the score, after the penalty
    reward_zscore: bool = False  # normalize scores to mean 0 and std 1 over the rollout of all ranks
    reward_clip: float | None = None  # c: finally clip scores to [-c, c]
    # Optimization
    num_iterations: int = 80  # rollouts, each followed by update_epochs x num_minibatches optimizer steps
    micro_batch_size: int = 64  # responses per forward pass on a rank (sampling takes all): memory and speed
    learning_rate: float = 2e-4  # peak learning rate of AdamW
    warmup_iterations: int = 0  # the learning rate rises linearly to its peak over this many iterations
    anneal_lr: bool = False  # the learning rate falls linearly over the run, to 0 after it
    max_grad_norm: float = 1.0  # the gradient is clipped to this norm
    gradient_checkpointing: bool = False  # recompute activations: less memory, a slower update
    # Run
    run_dir: str | None = None  # resume the run in this folder, or start it; None: a new folder in runs/
    eval_every: int = 40  # iterations between evaluations, also before the first and after the last; 0: none
    log_every: int = 10  # iterations between printed samples; metrics.jsonl has every iteration
    save_every: int = 50  # iterations between checkpoints; the last is always saved; 0: only the last
    track: bool = False  # log to Weights & Biases too; WANDB_PROJECT names the project

    # The method: its flags and its functions, up to `estimator: end`. Sibling scripts share the rest.
    # --- estimator: begin --------------------------------------------------------------------------------
    samples_per_prompt: int = 8  # k: responses per prompt; their scores must not be negative
    min_samples_per_prompt: ClassVar[int] = 2  # fewer are refused; a ClassVar is not a flag
    kl_coef: ClassVar[float] = 0.0  # no KL, so no reference is loaded
    num_minibatches: ClassVar[int] = 1  # one optimizer step per rollout: no ratio corrects for a second
    update_epochs: ClassVar[int] = 1


@torch.no_grad()
def compute_advantages(args, rollout):
    """Returns {"advantages": (B, T)}: each score minus its group's mean, divided by that mean."""
    groups = rollout["scores"].view(-1, args.samples_per_prompt)  # (prompts, k)
    mean = groups.mean(1, keepdim=True)  # (prompts, 1), the pass rate
    advantages = ((groups - mean) / mean).masked_fill(mean == 0, 0.0).view(-1, 1)  # (B, 1)
    return {"advantages": advantages * rollout["response_mask"]}


def policy_loss(args, batch, logprobs, num_sequences, num_tokens):
    """REINFORCE on whole responses: the sum over a response's tokens, then the mean over responses.

    logprobs (b, T) are pi_theta's, with gradient. num_sequences and num_tokens count the whole optimizer
    step, so that the losses of its micro-batches and ranks add up.
    """
    loss = -(batch["advantages"] * logprobs).sum() / num_sequences
    return loss, {"policy_loss": loss.detach()}


# --- estimator: end -------------------------------------------------------------------------------------


def all_sum(x):
    """The sum of the tensor x over all ranks; x itself on one rank. Every rank must call it."""
    if dist.is_initialized():
        x = x.clone()  # all_reduce works in place
        dist.all_reduce(x)
    return x


def total(x):
    """The sum of all elements of x on all ranks, as a number."""
    return float(all_sum(x.sum()))


def eos_ids(model, tokenizer):
    """The token ids that end a response: the tokenizer's EOS and those of the generation config."""
    configured = model.generation_config.eos_token_id  # an id, a list of ids, or None
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({tokenizer.eos_token_id, *ids} - {None})


def left_pad(id_lists, device):
    """Token ids and attention mask (B, P) of lists of token ids, padded on the left."""
    tensors = [torch.tensor(ids) for ids in id_lists]
    masks = [torch.ones_like(ids) for ids in tensors]
    input_ids = pad_sequence(tensors, batch_first=True, padding_side="left")
    attention_mask = pad_sequence(masks, batch_first=True, padding_side="left")
    return input_ids.to(device), attention_mask.to(device)


def model_inputs(input_ids, attention_mask):
    """The arguments of a model's forward pass. Padding on the left does not count in the positions."""
    position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}


def log_distribution(logits, temperature):
    """Log-probs (..., V) of the next token, the same for sampling and for the loss."""
    dtype = torch.promote_types(logits.dtype, torch.float32)  # bfloat16 becomes float32; float64 stays
    return (logits.to(dtype) / temperature).log_softmax(-1)


def generate(model, tokenizer, prompts, args, samples_per_prompt=1, greedy=False):
    """Sample responses to prompts (lists of ids) from softmax(logits / temperature), or take the argmax.

    Returns the first six tensors of a rollout, with B = len(prompts) x samples_per_prompt rows. pi_old
    is what was sampled from, so its log-probs are taken here; a forward pass later would differ a bit.
    model.generate() would also apply the top-k, top-p and penalties of the model's generation config.
    """
    device = model.device
    eos = torch.tensor(eos_ids(model, tokenizer), device=device)
    prompt_ids, prompt_mask = left_pad(prompts, device)
    P = prompt_ids.shape[1]
    T = args.max_response_length
    prompt_index = torch.arange(len(prompts), device=device).repeat_interleave(samples_per_prompt)  # (B,)
    B = len(prompt_index)
    sequences = pad(prompt_ids[prompt_index], (0, T))  # (B, P+T), with room for the response
    attention_mask = pad(prompt_mask[prompt_index], (0, T))
    # Made outside of inference_mode, whose tensors the update could not use
    old_logprobs = torch.zeros(B, T, device=device)
    entropy = torch.zeros_like(old_logprobs)
    truncated = torch.ones(B, dtype=torch.bool, device=device)  # until an EOS is sampled
    active = torch.arange(B, device=device)  # (b,) the rows without an EOS so far

    inputs = model_inputs(prompt_ids, prompt_mask)  # each prompt is read once
    cache = Cache(config=model.config)
    # inference_mode is faster, but under autocast it would cast the weights anew for every token.
    without_gradients = torch.no_grad() if args.dtype == "bfloat16" else torch.inference_mode()
    with without_gradients, autocast(args):
        for t in range(T):
            output = model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
            logits = output.logits[:, -1].float()  # (b, V)
            if t == 0:
                # All prompts have been read. Copy the logits and the cache of each for its responses.
                logits = logits[prompt_index]
                cache.reorder_cache(prompt_index)

            logprobs = log_distribution(logits, args.temperature)  # (b, V)
            probs = logprobs.exp()
            tokens = probs.argmax(-1, keepdim=True) if greedy else torch.multinomial(probs, 1)  # (b, 1)
            is_eos = torch.isin(tokens, eos).squeeze(1)  # (b,)
            sequences[active, P + t] = tokens.squeeze(1)
            attention_mask[active, P + t] = 1
            old_logprobs[active, t] = logprobs.gather(1, tokens).squeeze(1)
            entropy[active, t] = torch.special.entr(probs).sum(1)
            truncated[active] = ~is_eos

            # Rows with an EOS leave the batch and the cache.
            unfinished = (~is_eos).nonzero().squeeze(1)  # positions in active
            if len(unfinished) == 0:
                break
            if len(unfinished) < len(active):
                active = active[unfinished]
                tokens = tokens[unfinished]
                cache.reorder_cache(unfinished)
            mask = attention_mask[active, : P + t + 1]
            position_ids = mask.sum(1, keepdim=True) - 1
            inputs = {"input_ids": tokens, "attention_mask": mask, "position_ids": position_ids}

    return {
        "sequences": sequences,
        "attention_mask": attention_mask,
        "response_mask": attention_mask[:, P:].bool(),
        "old_logprobs": old_logprobs,
        "entropy": entropy,
        "truncated": truncated,
    }


def token_logprobs(model, batch, temperature):
    """Log-probs (b, T) of the response tokens at the sampling temperature, 0 where response_mask is False."""
    T = batch["response_mask"].shape[1]
    inputs = model_inputs(batch["sequences"], batch["attention_mask"])
    # The logits at a position are those of the next token, so the last ones are not needed.
    logits = model(**inputs, use_cache=False, logits_to_keep=T + 1).logits[:, :-1]  # (b, T, V)
    tokens = batch["sequences"][:, -T:].unsqueeze(2)  # (b, T, 1)
    logprobs = log_distribution(logits, temperature).gather(2, tokens).squeeze(2)
    return logprobs.masked_fill(~batch["response_mask"], 0.0)


def micro_batches(rollout, indices, size):
    """Split the rows with these indices into parts of up to `size`. Yields each part, and its tensors.

    The rows of a part have similar lengths. Columns that are padding in all of them are cut off.
    """
    lengths = rollout["response_mask"][indices].sum(1)
    for part in indices[lengths.argsort(stable=True)].split(size):
        has_tokens = rollout["attention_mask"][part].any(0)  # (P+T,): the columns that are not all padding
        batch = {}
        for name, tensor in rollout.items():
            batch[name] = tensor[part]
            if tensor.dim() == 2:  # (b, P+T) or (b, T), which are its last T columns
                batch[name] = batch[name][:, has_tokens[-tensor.shape[1] :]]
        yield part, batch


@torch.no_grad()
def rollout_logprobs(args, model, rollout):
    """Log-probs (B, T) of the response tokens of a whole rollout."""
    result = torch.zeros_like(rollout["old_logprobs"])
    all_rows = torch.arange(len(result), device=result.device)
    for part, batch in micro_batches(rollout, all_rows, args.micro_batch_size):
        with autocast(args):
            logprobs = token_logprobs(model, batch, args.temperature)  # (b, T) with the T of the micro-batch
        result[part, : logprobs.shape[1]] = logprobs
    return result


def choose_rows(args, dataset, num_prompts, iteration):
    """This rank's rows for an iteration. Each epoch shuffles anew, and drops an incomplete last batch."""
    epoch, batch_number = divmod(iteration - 1, len(dataset) // num_prompts)
    generator = torch.Generator().manual_seed(1_000_000 * args.seed + epoch)
    shuffled = torch.randperm(len(dataset), generator=generator)
    chosen = shuffled.split(num_prompts)[batch_number]
    return [dataset[i] for i in chosen.chunk(WORLD_SIZE)[RANK]]


def process_scores(args, scores, truncated):
    """Scores (B,) after truncation penalty, scale, z-score over all ranks and clip, in this order."""
    scores = (scores - args.missing_eos_penalty * truncated) * args.reward_scale
    if args.reward_zscore:
        count = len(scores) * WORLD_SIZE
        scores = scores - total(scores) / count
        std = math.sqrt(total(scores.square()) / count)
        scores = scores / max(std, 1e-4)
    if args.reward_clip:
        scores = scores.clamp(-args.reward_clip, args.reward_clip)
    return scores


def optimizer_step(args, model, optimizer, learning_rate):
    """Sum the gradients over ranks, clip their norm, and step. Returns the norm before clipping."""
    # DistributedDataParallel would average them, but the loss is already divided by counts over all ranks.
    for parameter in model.parameters():
        if parameter.grad is not None:  # some models have weights that nothing uses
            parameter.grad = all_sum(parameter.grad)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    check(norm.isfinite(), "the loss or its gradient is not finite; use a lower learning rate")
    optimizer.param_groups[0]["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad()
    return norm


def main(args):
    # 1. Setup: run folder, ranks, models, data, rewards, optimizer
    check_args(args)
    run_dir = find_run(args)
    device = start_ranks(args)

    # Models are in eval mode: with dropout, training would see other log-probs than sampling.
    policy, tokenizer = load_model(args, "model", transformers.AutoModelForCausalLM, device)
    # The reference is the policy before training, so it is copied before a checkpoint is loaded.
    reference = copy.deepcopy(policy) if args.kl_coef else None

    num_prompts = args.batch_size // args.samples_per_prompt
    dataset = load_rows(args, "dataset", args.dataset, args.dataset_split, policy, tokenizer, num_prompts)
    eval_dataset = load_eval_rows(args, policy, tokenizer)  # None: no evaluation
    reward = load_reward(args, "reward", device)
    eval_reward = load_reward(args, "eval_reward", device) if args.eval_reward else reward
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0, fused=True)  # lr is set in step 7
    state = {"policy": policy, "optimizer": optimizer}  # what a checkpoint holds

    # Resume the run, or start it. `start` counts the finished iterations.
    start, log_sizes = load_checkpoint(run_dir, state)
    weights = [float(weight.detach().sum()) for weight in policy.parameters()]
    check_ranks_agree(args, {"weights": weights, "rows of --dataset": dataset, "checkpoint.pt": log_sizes})
    open_run(args, run_dir, log_sizes)
    say(f"{policy.num_parameters():,} parameters on {WORLD_SIZE} x {device.type}, writes to {run_dir}")

    # 2. Evaluation on held-out prompts, before the first iteration; the later evaluations are in step 9
    if eval_dataset and start == 0:
        metrics, samples = evaluate(args, policy, tokenizer, eval_reward, eval_dataset)
        log(args, run_dir, 0, metrics, samples)

    for iteration in range(start + 1, args.num_iterations + 1):
        began = time.time()
        # A seed for each iteration and rank: a resumed run draws the same numbers as an uninterrupted one.
        torch.manual_seed(1_000_000 * args.seed + iteration * WORLD_SIZE + RANK)

        # 3. Rollout: samples_per_prompt responses to each of this rank's prompts, and what the reward gives
        prompt_rows = choose_rows(args, dataset, num_prompts, iteration)
        prompt_ids = [row["prompt_ids"] for row in prompt_rows]
        rollout = generate(policy, tokenizer, prompt_ids, args, args.samples_per_prompt)
        rows = [row for row in prompt_rows for _ in range(args.samples_per_prompt)]  # of each response
        rollout["raw_scores"] = score(reward, tokenizer, rows, rollout)  # (B,)

        # 4. Scores after penalty, scale, z-score and clip
        rollout["scores"] = process_scores(args, rollout["raw_scores"], rollout["truncated"])

        # 5. Log-probs of the reference, and log(pi_old / pi_ref) as kl
        if reference:
            rollout["ref_logprobs"] = rollout_logprobs(args, reference, rollout)
        else:  # with --kl_coef 0 any would do: their weight is 0
            rollout["ref_logprobs"] = rollout["old_logprobs"]
        # Some methods subtract kl from the reward; for the others it is only a metric.
        rollout["kl"] = rollout["old_logprobs"] - rollout["ref_logprobs"]  # (B, T)

        # 6. Advantages
        rollout.update(compute_advantages(args, rollout))

        # 7. Update: each minibatch is one optimizer step, its gradient summed over micro-batches and ranks
        lr_factor = min(1.0, iteration / max(1, args.warmup_iterations))
        if args.anneal_lr:
            lr_factor = min(lr_factor, 1 - (iteration - 1) / args.num_iterations)
        stats = defaultdict(float)  # sums over this rank's micro-batches
        grad_norms = []  # one for each optimizer step
        logprob_difference = torch.zeros((), device=device)  # between sampling and training: should be near 0
        for _ in range(args.update_epochs):
            for minibatch in torch.randperm(len(rows), device=device).chunk(args.num_minibatches):
                # Counts of the whole step: the loss does not depend on micro-batches and ranks.
                num_sequences = len(minibatch) * WORLD_SIZE
                num_tokens = total(rollout["response_mask"][minibatch])
                for _, batch in micro_batches(rollout, minibatch, args.micro_batch_size):
                    with autocast(args):
                        logprobs = token_logprobs(policy, batch, args.temperature)  # (b, T), with gradient
                    if len(grad_norms) == 0:  # the first step, in which pi_theta is still pi_old
                        difference = (logprobs.detach() - batch["old_logprobs"]).abs().sum()
                        logprob_difference += difference / num_tokens
                    loss, batch_stats = policy_loss(args, batch, logprobs, num_sequences, num_tokens)
                    loss.backward()
                    for name, value in batch_stats.items():
                        stats[name] += value

                grad_norms.append(optimizer_step(args, policy, optimizer, args.learning_rate * lr_factor))

        # 8. Metrics, over all ranks
        response_tokens = total(rollout["response_mask"])
        seconds = time.time() - began
        metrics = {
            "score": total(rollout["raw_scores"]) / args.batch_size,
            "truncated": total(rollout["truncated"]) / args.batch_size,
            "response_length": response_tokens / args.batch_size,
            "entropy": total(rollout["entropy"]) / response_tokens,  # mean per token
            "logprob_difference": total(logprob_difference),  # mean per token
            "grad_norm": float(sum(grad_norms)) / len(grad_norms),
            "learning_rate": args.learning_rate * lr_factor,
            "seconds": seconds,
            "tokens_per_second": response_tokens / seconds,
        }
        if reference:
            metrics["kl"] = total(rollout["kl"]) / args.batch_size  # sum over a response
        if args.samples_per_prompt > 1:
            groups = rollout["raw_scores"].view(-1, args.samples_per_prompt)
            # The share of prompts whose responses all score the same, so that none is better than another
            metrics["equal_groups"] = total(groups.amax(1) == groups.amin(1)) / num_prompts
        for name, value in stats.items():
            metrics[name] = total(value) / len(grad_norms)  # per optimizer step

        # 9. Evaluate, log and save
        is_last = iteration == args.num_iterations
        samples = []
        if iteration % args.log_every == 0:
            samples = describe(tokenizer, rows, rollout, args.samples_per_prompt)
        if eval_dataset and (is_last or iteration % args.eval_every == 0):
            # Prints and logs the held-out samples instead of those above
            eval_metrics, samples = evaluate(args, policy, tokenizer, eval_reward, eval_dataset)
            metrics |= eval_metrics
        log(args, run_dir, iteration, metrics, samples)
        if is_last or (args.save_every and iteration % args.save_every == 0):
            save_checkpoint(run_dir, iteration, state)

    # 10. The result, a folder that from_pretrained opens
    if RANK == 0:
        save_model(run_dir, policy, tokenizer)
    if dist.is_initialized():
        dist.destroy_process_group()


# --- plumbing: models, data, rewards, evaluation, checkpoints; nothing of the algorithm stands below ---

LOGS = ("metrics.jsonl", "samples.jsonl")


def say(text):
    """Print, on rank 0."""
    if RANK == 0:
        print(text, flush=True)


def check(condition, message):
    """If the condition is false, print the message as one line and exit with code 2."""
    if not condition:
        if RANK > 0:
            time.sleep(30)  # if rank 0 fails too, it prints first; torchrun then stops the others
        print("error:", " ".join(message.split()), file=sys.stderr)
        sys.exit(2)


@contextmanager
def explain(what, remedy):
    """Turn an exception, which may not name the flag or the file, into a message that does."""
    try:
        yield
    except Exception as error:
        check(False, f"{what}: {error!r:.300}; {remedy}")


def autocast(args):
    """Computes in bfloat16 with --dtype bfloat16. The weights stay float32."""
    device_type = torch.device(args.device).type
    return torch.autocast(device_type, torch.bfloat16, enabled=args.dtype == "bfloat16")


class Cache(transformers.DynamicCache):
    """Keeps keys in the dtype of values. Under autocast they would be float32, and take twice the memory."""

    def update(self, keys, values, *others):
        return super().update(keys.to(values.dtype), values, *others)


def check_args(args):
    """Refuse numbers that cannot work before anything is loaded."""
    positive = ["batch_size", "micro_batch_size", "max_response_length", "num_minibatches", "update_epochs"]
    positive += ["temperature", "reward_scale", "reward_clip", "max_grad_norm", "log_every"]
    for name, value in vars(args).items():
        if isinstance(value, int | float):
            check(0 <= value < math.inf, f"--{name} {value}: use a finite number, 0 or more")
            check(value > 0 or name not in positive, f"--{name} {value}: use a number above 0")
    k = args.samples_per_prompt
    least = args.min_samples_per_prompt
    check(k >= least, f"--samples_per_prompt {k}: use {least} or more")
    unit = WORLD_SIZE * k
    multiple = f"use a multiple of {unit}, ranks x samples_per_prompt"
    check(args.batch_size % unit == 0, f"--batch_size {args.batch_size}: {multiple}")
    local_batch = args.batch_size // WORLD_SIZE
    divisor = f"use a divisor of {local_batch}, the responses of a rank"
    check(local_batch % args.num_minibatches == 0, f"--num_minibatches {args.num_minibatches}: {divisor}")
    toy_flags = ["learning_rate", "max_response_length"]
    if args.device != "cpu":
        toy_flags += ["dtype"]
    unchanged = [name for name in toy_flags if getattr(args, name) == getattr(Args, name)]
    if unchanged and args.model != Args.model:
        say(
            f"warning: --{', --'.join(unchanged)}: the defaults are for the toy, not for --model {args.model}"
        )


def start_ranks(args):
    """Choose the device of this rank, and connect the ranks if there are several."""
    device = torch.device(args.device)
    if device.type != "cpu":
        if torch.accelerator.device_count() > 1:  # else each rank sees its own GPU only, as under Slurm
            torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))  # set by torchrun
    # cuDNN's bfloat16 attention gave NaN and wrong results on H100 and B200 (pytorch issues 196678, 193893).
    torch.backends.cuda.enable_cudnn_sdp(False)
    if WORLD_SIZE > 1:
        backend = "gloo" if device.type == "cpu" else None  # None: the device's own, such as NCCL
        # All ranks wait while one of them computes a slow reward or saves a checkpoint.
        dist.init_process_group(backend, timeout=timedelta(hours=2))
    return device


def check_ranks_agree(args, others):
    """Refuse ranks that differ in a flag or in one of the other values, which have names."""
    if WORLD_SIZE == 1:
        return
    values = others | {f"--{name}": value for name, value in vars(args).items()}
    checksums = [zlib.crc32(repr(value).encode()) for value in values.values()]
    checksums = torch.tensor(checksums, device=args.device)
    # If all ranks have the same, the sum is WORLD_SIZE times it. If one rank ends, torchrun stops the others.
    is_same = all_sum(checksums) == checksums * WORLD_SIZE
    different = [name for name, same in zip(values, is_same.tolist()) if not same]
    check(not different, f"the ranks differ in {', '.join(different)}; start all with the same")


def load_model(args, flag, auto_class, device):
    """A model with float32 weights, in eval mode and so without dropout, and its tokenizer."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    name = getattr(args, flag)
    where = f"--{flag} {name}"
    is_hub_id = name.count("/") <= 1 and not name.startswith(("toy/", "."))
    remedy = "there is no such folder; for toy/, start the script in the repository"
    check(is_hub_id or Path(name).is_dir(), f"{where}: {remedy}")
    with explain(where, "use a folder or a hub id"):
        # Without trust_remote_code=False, transformers would ask on stdin whether to run code of the model.
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        options = {"use_safetensors": True, "trust_remote_code": False, "output_loading_info": True}
        model, info = auto_class.from_pretrained(name, dtype=torch.float32, **options)
    # transformers fills in missing weights at random, such as the head of a policy given as a reward model.
    is_reward_model = "SequenceClassification" in str(model.config.architectures)
    wants_reward_model = auto_class is transformers.AutoModelForSequenceClassification
    wanted = "reward model" if wants_reward_model else "policy"
    is_right = is_reward_model == wants_reward_model and not info["missing_keys"]
    check(is_right, f"{where}: is a {model.config.architectures}, or lacks weights; use a {wanted}")
    is_finite = all(weight.isfinite().all() for weight in model.parameters())
    check(is_finite, f"{where}: has weights that are not finite; use another model")
    check(tokenizer.eos_token, f"{where}: has no EOS token; save one in its tokenizer")
    if args.gradient_checkpointing:
        # transformers' own checkpointing works in train mode only, which would switch dropout on.
        for layer in model.modules():
            if isinstance(layer, transformers.modeling_layers.GradientCheckpointingLayer):
                layer.forward = partial(recompute, layer.forward, use_reentrant=False)
    return model.to(device).eval(), tokenizer


def read_rows(where, path, split):
    """The rows of a .jsonl, a .parquet, or a folder or hub id of `datasets`."""
    if path.endswith(".parquet"):
        return pyarrow.parquet.read_table(path).to_pylist()
    if not path.endswith(".jsonl"):
        # Local data is streamed, since the cache of `datasets` may hold an older version of it.
        return list(datasets.load_dataset(path, split=split, streaming=Path(path).exists()))

    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    rows = []
    for line in open(path, encoding="utf-8"):
        with explain(f"{where}: row {len(rows)}", "fix it"):
            rows.append(json.loads(line, parse_constant=refuse))  # NaN and Infinity
    return rows


def token_ids(tokenizer, prompt):
    """The token ids of a prompt: text as it is, chat messages through the tokenizer's template."""
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
        # Some tokenizers append an EOS, after which the model would start another text.
        return ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids
    if not tokenizer.chat_template:
        raise ValueError("chat messages need a model with a chat template")
    if not all(message.get("content") for message in prompt):
        raise ValueError("a message has no content")
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]


def load_rows(args, flag, name, split, policy, tokenizer, min_rows=1):
    """The rows of a dataset, with the token ids of each prompt as prompt_ids. Long prompts are left out."""
    where = f"--{flag} {name}"
    with explain(where, "use a .jsonl, a .parquet, a folder or a hub id"):
        rows = read_rows(where, name, split)
    num_embeddings = len(policy.get_input_embeddings().weight)
    reward_name = args.reward
    if flag == "eval_dataset" and args.eval_reward:
        reward_name = args.eval_reward
    for number, row in enumerate(rows):
        prompt = row.get("prompt")
        check(prompt, f"{where}: row {number} has an empty prompt, or none; fill in the column `prompt`")
        has_answer = reward_name != "exact_answer" or row.get("answer") is not None
        check(has_answer, f"{where}: row {number} has no `answer`; fill it in, or use another --reward")
        taken = {"prompts", "completions", "truncated", "prompt_ids"} & row.keys()
        check(not taken, f"{where}: has the columns {sorted(taken)}, which this script sets; rename them")
        with explain(f"{where}: row {number}", "fix the prompt"):
            row["prompt_ids"] = token_ids(tokenizer, prompt)
        is_known = max(row["prompt_ids"], default=0) < num_embeddings
        check(
            is_known,
            f"{where}: row {number} has a token beyond the {num_embeddings} of --model; use its tokenizer",
        )

    longest = args.max_prompt_length
    kept = [row for row in rows if 1 <= len(row["prompt_ids"]) <= longest]
    summary = f"{len(kept)} of {len(rows)} prompts have 1 to --max_prompt_length {longest} tokens"
    check(len(kept) >= min_rows, f"{where}: {summary}; give {min_rows} or more, or lower --batch_size")
    say(f"{flag}: {summary}")
    needed = max(len(row["prompt_ids"]) for row in kept) + args.max_response_length
    limit = getattr(policy.config.get_text_config(), "max_position_embeddings", None) or math.inf
    message = f"--max_response_length {args.max_response_length}: {needed} tokens with the longest prompt"
    check(needed <= limit, f"{message}, the model has {limit} positions; lower it")
    return kept


def load_eval_rows(args, policy, tokenizer):
    """The held-out rows, or None. Only the toy has some by default."""
    name = args.eval_dataset
    if args.dataset == Args.dataset and not name:
        name = "toy/heldout.jsonl"
    if not name or not args.eval_every:
        return None
    return load_rows(args, "eval_dataset", name, args.eval_split, policy, tokenizer)


def load_reward(args, flag, device):
    """A function of the lists prompts, completions, truncated and other columns: a score per completion."""
    name = getattr(args, flag)
    where = f"--{flag} {name}"
    if name == "exact_answer":
        return exact_answer(args.answer_marker)
    if is_model(name):
        return reward_model(args, flag, device)
    file, _, function = name.partition(":")
    check(Path(file).is_file(), f"{where}: there is no file {file}; use file.py:function")
    functions = runpy.run_path(file)
    check(function in functions, f"{where}: {file} has no {function!r}; use file.py:function")

    def reward(completions, **columns):
        try:
            # Copies, so that the function cannot change the dataset
            scores = functions[function](completions=completions[:], **copy.deepcopy(columns))
        except SystemExit as error:  # which would end the run without a word
            raise RuntimeError(f"{where} called sys.exit") from error
        count = len(completions)
        with explain(where, "return a number, or a list of numbers, for each completion"):
            scores = torch.tensor(scores, dtype=torch.float32)
        is_valid = scores.shape[:1] == (count,) and scores.dim() <= 2 and scores.isfinite().all()
        wanted = f"{count} finite scores, one for each completion"
        check(is_valid, f"{where}: did not return {wanted}, but {str(scores)[:40]}; fix it")
        return scores.tolist()

    return reward


def is_model(reward_name):
    """Whether a reward is a model, and not the rule or a function in a file."""
    return reward_name != "exact_answer" and not reward_name.partition(":")[0].endswith(".py")


def exact_answer(marker):
    """A reward: 1 if the text after the last marker (all of it without one) equals the column `answer`."""

    def reward(completions, answer, **columns):
        found = [text.rpartition(marker)[2].strip() for text in completions]
        return [float(text == str(expected).strip()) for text, expected in zip(found, answer)]

    return reward


def reward_model(args, flag, device):
    """A reward: the score of a model that reads texts with its own tokenizer and chat template."""
    model, tokenizer = load_model(args, flag, transformers.AutoModelForSequenceClassification, device)
    has_one_score = model.config.num_labels == 1 and hasattr(model, "score")
    check(has_one_score, f"--{flag} {getattr(args, flag)}: use a reward model, a decoder with one output")

    def text_ids(prompt, completion, is_truncated):
        completion_ids = tokenizer(completion, add_special_tokens=False)["input_ids"]
        if not tokenizer.chat_template:
            ids = token_ids(tokenizer, prompt) + completion_ids
        else:
            chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            if is_truncated:  # the turn stays open
                return token_ids(tokenizer, chat) + completion_ids
            chat = [*chat, {"role": "assistant", "content": completion}]
            ids = tokenizer.apply_chat_template(chat)["input_ids"]
        # A template may end the turn with EOS, or with EOS and a newline.
        if not is_truncated and tokenizer.eos_token_id not in ids[-2:]:
            ids = [*ids, tokenizer.eos_token_id]
        return ids

    @torch.no_grad()
    def reward(prompts, completions, truncated, **columns):
        id_lists = [text_ids(*texts) for texts in zip(prompts, completions, truncated)]
        scores = []
        for i in range(0, len(id_lists), args.micro_batch_size):
            ids, mask = left_pad(id_lists[i : i + args.micro_batch_size], device)
            with autocast(args):
                output = model.base_model(**model_inputs(ids, mask), use_cache=False)
            # model() scores the last token that is not the pad token: it would miss an EOS that is.
            last = output.last_hidden_state[:, -1].to(model.dtype)
            scores += model.score(last).squeeze(1).tolist()
        return scores

    return reward


def decode(tokenizer, rollout, skip_special_tokens):
    """The texts of the responses."""
    mask = rollout["response_mask"]
    responses = rollout["sequences"][:, -mask.shape[1] :]
    without_padding = [response[row_mask] for response, row_mask in zip(responses, mask)]
    return tokenizer.batch_decode(without_padding, skip_special_tokens=skip_special_tokens)


def score(reward, tokenizer, rows, rollout):
    """Scores (B,) of the responses in a rollout; rows has the row of the dataset behind each of them."""
    names = {name for row in rows for name in row}
    columns = {name: [row.get(name) for row in rows] for name in names}
    columns["prompts"] = columns.pop("prompt")
    columns["completions"] = decode(tokenizer, rollout, skip_special_tokens=True)
    columns["truncated"] = rollout["truncated"].tolist()
    scores = torch.tensor(reward(**columns), dtype=torch.float32, device=rollout["truncated"].device)
    scores = scores.view(len(scores), -1)  # (B, R): a reward may give a list of R numbers
    return scores.sum(1)


def describe(tokenizer, rows, rollout, samples_per_prompt=1):
    """Prompt, response with its special tokens, and score of a response to each of three prompts."""
    responses = decode(tokenizer, rollout, skip_special_tokens=False)
    parts = list(zip(rows, responses, rollout["raw_scores"].tolist()))[::samples_per_prompt][:3]
    return [{"prompt": row["prompt"], "response": text, "score": x} for row, text, x in parts]


def evaluate(args, policy, tokenizer, reward, dataset):
    """The mean score of greedy responses, over all ranks, for each value of `group`; and three samples."""
    scores = torch.zeros(len(dataset), device=policy.device)
    samples = []
    size = args.batch_size // WORLD_SIZE  # rows of a rollout, which fit into memory
    for first in range(RANK * size, len(dataset), WORLD_SIZE * size):
        rows = dataset[first : first + size]
        rollout = generate(policy, tokenizer, [row["prompt_ids"] for row in rows], args, greedy=True)
        rollout["raw_scores"] = score(reward, tokenizer, rows, rollout)
        scores[first : first + len(rows)] = rollout["raw_scores"]
        samples = samples or describe(tokenizer, rows, rollout)
    groups = defaultdict(list)
    for row, row_score in zip(dataset, all_sum(scores).tolist()):  # each rank has filled in its part
        groups[f"eval/score/{row.get('group', 'all')}"].append(row_score)
    return {name: sum(x) / len(x) for name, x in groups.items()}, samples


@contextmanager
def replacing(path):
    """Yield a temporary path, and rename it to path at the end, so that path is never half-written."""
    temporary = path.with_suffix(".tmp")
    with explain(path, "it could not be written; fix that and give the same command again"):
        yield temporary
        temporary.replace(path)


def find_run(args):
    """The run folder: a new or empty one, or one with a run of the same flags. Only rank 0 writes there."""
    new_dir = f"runs/{args.exp_name}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    run_dir = Path(args.run_dir or new_dir)
    path = run_dir / "args.json"
    if not path.exists():
        is_free = not run_dir.exists() or set(os.listdir(run_dir)) <= {"lock"}
        check(is_free, f"--run_dir {run_dir}: has files, but no args.json of a run; use a new folder")
        return run_dir
    with explain(path, "restore it, or use a new folder"):
        old_flags = json.loads(path.read_text())
    may_change = ["run_dir", "eval_every", "log_every", "save_every", "track"]
    may_change += ["micro_batch_size", "gradient_checkpointing"]  # memory and speed only
    if not args.anneal_lr:
        may_change += ["num_iterations"]  # a longer run
    new_flags = vars(args) | {"ranks": WORLD_SIZE}
    for name in old_flags | new_flags:
        old, new = old_flags.get(name), new_flags.get(name)
        is_same = old == new or name in may_change
        check(is_same, f"--run_dir {run_dir}: has --{name} {old}, not {new}; use that or a new folder")
    return run_dir


def run_lock(run_dir):
    """The lock of a run folder, one object in this process: only one process at a time may train there."""
    return filelock.FileLock(run_dir / "lock", is_singleton=True)


def load_checkpoint(run_dir, state):
    """Load the checkpoint into state, if there is one. Returns its iteration and the sizes of the logs."""
    path = run_dir / "checkpoint.pt"
    if not path.exists():
        return 0, dict.fromkeys(LOGS, 0)
    with explain(path, "restore it, or delete it to start over"):
        checkpoint = torch.load(path, "cpu", weights_only=True, mmap=True)
        for name, part in state.items():
            part.load_state_dict(checkpoint[name])
        say(f"resumes after iteration {checkpoint['iteration']}")
        return checkpoint["iteration"], checkpoint["log_sizes"]


def open_run(args, run_dir, log_sizes):
    """On rank 0, lock the run folder, write the flags and a copy of the script, and cut the logs."""
    if RANK > 0:
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    with explain(f"--run_dir {run_dir}", "another process may train there; use another folder"):
        lock = run_lock(run_dir)
        lock.acquire(blocking=False)
        atexit.register(lock.release)  # if the run ends early; it also keeps the object alive
    with replacing(run_dir / "args.json") as path:
        path.write_text(json.dumps(vars(args) | {"ranks": WORLD_SIZE}, indent=2))
    if Path(__file__).resolve().parent != run_dir.resolve():  # unless this file is that copy
        shutil.copy(__file__, run_dir)
    for name, size in log_sizes.items():
        with open(run_dir / name, "ab") as file:
            check(file.tell() >= size, f"{run_dir / name}: is shorter than at the checkpoint; restore it")
            file.truncate(size)  # what was logged after the checkpoint comes again
    if args.track:
        import wandb

        wandb.init(id=run_dir.name, resume="allow", config=vars(args))
        wandb.define_metric("*", step_metric="iteration")  # wandb's own step could not go back on a resume


def log(args, run_dir, iteration, metrics, samples):
    """On rank 0, add to the logs of the run. Print if there are samples, or after a slow iteration."""
    if RANK > 0:
        return
    for name, value in metrics.items():
        check(math.isfinite(value), f"iteration {iteration}: {name} is {value}; use a lower --learning_rate")
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"iteration": iteration} | metrics) + "\n")
    with open(run_dir / "samples.jsonl", "a") as file:
        for sample in samples:
            file.write(json.dumps({"iteration": iteration} | sample) + "\n")
    if args.track:
        import wandb

        wandb.log({"iteration": iteration} | metrics)
    if samples or metrics.get("seconds", 0) > 10:
        shown = ["score", "kl", "equal_groups", "response_length", "tokens_per_second"]
        texts = [f"{name} {x:.3f}" for name, x in metrics.items() if name in shown or "eval/" in name]
        say(f"iteration {iteration:4d}   " + "   ".join(texts))
    for sample in samples:
        prompt = sample["prompt"] if isinstance(sample["prompt"], str) else sample["prompt"][-1]["content"]
        say(f"    {sample['score']:5.2f}  {prompt[-80:]!r} -> {sample['response']!r}")


def save_checkpoint(run_dir, iteration, state):
    """Rank 0 saves all that the next iteration needs, with the sizes of the logs, which go to disk first."""
    if RANK > 0:
        return
    checkpoint = {name: part.state_dict() for name, part in state.items()}
    checkpoint |= {"iteration": iteration, "log_sizes": {}}
    for name in LOGS:
        with open(run_dir / name, "ab") as file:
            os.fsync(file)
            checkpoint["log_sizes"][name] = file.tell()
    with replacing(run_dir / "checkpoint.pt") as path, open(path, "wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file)


def save_model(run_dir, policy, tokenizer):
    """Write model/, which is complete or absent."""
    with replacing(run_dir / "model") as folder:
        shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed
        policy.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        shutil.rmtree(run_dir / "model", ignore_errors=True)  # of an earlier, shorter run
    run_lock(run_dir).release()
    say(f"finished: {run_dir / 'model'}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, use_underscores=True))
