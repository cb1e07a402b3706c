# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.23.0", "datasets==5.2.0", "tyro==1.0.17", "wandb==0.31.0"]
# ///
"""DAPO: GRPO with a wider upper clip, a mean over tokens, dynamic sampling and a penalty on length.

Qiying Yu et al., "DAPO", arXiv 2503.14476, section 3. It has no KL term. For each prompt, the policy samples
k = samples_per_prompt responses with scores r_1 ... r_k. Dynamic sampling replaces groups of equal scores.

    r_i  <- r_i - max(0, T_i - (L_max - L_cache)) / L_cache                    penalty near L_max  (Eq. 13)
    A_i   = (r_i - mean(r)) / (std(r) + 1e-4)                                   mean and std of the group
    rho_t = pi_theta(o_t) / pi_old(o_t)
    loss  = -1/N_tok sum_i sum_t min(rho_t A_i, clip(rho_t, 1 - eps_low, 1 + eps_high) A_i)         (Eq. 8)

    o_t    token t of a response                           pi_theta  the policy being trained
    T_i    tokens of response i, including its EOS         pi_old    the policy that sampled the responses
    N_tok  tokens of an optimizer step, on all ranks       eps_*     clip_eps_low, clip_eps_high
    L_max  max_response_length                             L_cache   overlong_buffer

Train a toy model on sums modulo 10 such as "8 + 5 ?" (a minute, score 0.3 to 0.99), or a real model:

    python methods/dapo.py
    OMP_NUM_THREADS=8 torchrun --nproc-per-node 8 methods/dapo.py --batch_size 1024 --gradient_checkpointing \
    --dataset prompts.jsonl --micro_batch_size 4 --learning_rate 1e-6 --run_dir runs/a --overlong_buffer 205 \
    --model Qwen/Qwen2.5-1.5B-Instruct --reward my_reward.py:score --max_response_length 1024 --dtype bfloat16
"""

import copy
import importlib.util
import inspect
import json
import math
import os
import re
import shlex
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
from textwrap import fill
from typing import ClassVar, Literal

import datasets
import filelock
import torch
import torch.distributed as dist
import transformers
import tyro
from torch.nn.functional import pad

RANK = int(os.environ.get("RANK", 0))  # set by torchrun
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))

# A rollout is a dict of tensors. Each has B = batch_size / WORLD_SIZE rows, one per response of this rank.
# P is the length of the longest prompt, T = max_response_length. A micro-batch has b rows and is trimmed.
#   name            shape     written by          meaning
#   sequences       (B, P+T)  generate            token ids: the prompt, padded on the left, and the response
#   attention_mask  (B, P+T)  generate            1 on prompt and response, 0 on padding
#   response_mask   (B, T)    generate            True on the sampled tokens, including the EOS
#   old_logprobs    (B, T)    generate            log pi_old of each token
#   entropy         (B, T)    generate            of the distribution that the token was sampled from
#   truncated       (B,)      generate            True if the response has no EOS
#   raw_scores      (B,)      score               the output of the reward
#   scores          (B,)      process_scores      raw_scores after penalty, scale, z-score and clip
#   ref_logprobs    (B, T)    main, step 3        log pi_ref of each token; without a reference log pi_old
#   kl              (B, T)    main, step 3        old_logprobs - ref_logprobs
#   advantages      (B, T)    compute_advantages  how much more likely each token should become
# Every (B, T) tensor is 0 where response_mask is False. Responses to one prompt are consecutive rows.


@dataclass
class Args:  # the comment after a flag becomes its --help text
    # General
    seed: int = 1  # random seed for the order of prompts, sampling and minibatches
    device: str = str(torch.accelerator.current_accelerator(check_available=True) or "cpu")  # cpu, cuda, mps
    dtype: Literal["float32", "bfloat16"] = "float32"  # bfloat16: autocast; weights and AdamW stay float32
    # Model and data
    model: str = "toy/policy"  # starting policy, and reference of a KL: local folder or Hub id of a causal LM
    dataset: str = "toy/train.jsonl"  # .jsonl, folder or Hub id:config:split; `prompt`: a string or a chat
    eval_dataset: str | None = None  # held-out prompts (split test); a column `group` gives a score per group
    chat_template_kwargs: dict[str, bool | str] | None = None  # chat template options: enable_thinking False
    # Rollout
    batch_size: int = 128  # responses per rollout, over all ranks
    max_prompt_length: int = 512  # prompts with more tokens are left out
    max_response_length: int = 40  # responses with more tokens are truncated; 40 is for the toy
    temperature: float = 1.0  # used for sampling and for all log-probs
    # Reward: a function of the lists prompts, completions, truncated and **columns, which returns scores
    reward: str = "exact_answer"  # exact_answer (1 or 0), file.py:function, or a reward model's folder or id
    eval_reward: str | None = None  # scores the held-out responses; by default --reward
    missing_eos_penalty: float = 0.0  # subtracted from the score of a truncated response
    reward_scale: float = 1.0  # multiplies the score, after the penalty
    reward_zscore: bool = False  # normalize scores to mean 0 and std 1 over the rollout of all ranks
    reward_clip: float = math.inf  # finally clip scores to [-c, c]; inf: no clipping
    # Optimization
    num_iterations: int = 80  # rollouts, each followed by update_epochs x num_minibatches optimizer steps
    micro_batch_size: int = 64  # responses per pass of log-probs and updates; only memory and speed differ
    learning_rate: float = 2e-4  # peak learning rate of AdamW; 2e-4 is for the toy, a real model needs 1e-6
    warmup_iterations: int = 0  # iterations of linear warmup
    anneal_lr: bool = False  # decay the learning rate linearly to 0 over the run
    max_grad_norm: float = 1.0  # clip the gradient to this norm; inf: no clipping
    gradient_checkpointing: bool = False  # recompute activations, which saves memory and takes longer
    # Run
    run_dir: str | None = None  # folder of the run, resumed if it holds one; by default a new one in runs/
    eval_samples: int = 0  # sampled responses per held-out prompt, which also give pass@k; 0: a greedy one
    eval_every: int = 40  # evaluate every n iterations, before the first and after the last; 0: never
    log_every: int = 10  # print and log three sampled responses every n iterations; 0: never
    log_kl: bool = False  # load the reference also with kl_coef 0, to log the KL of each iteration
    save_every: int = 50  # save model and checkpoint every n iterations and after the last; 0: only then
    keep_models: bool = False  # keep each saved model in model-<iteration>/; model/ is always the latest
    track: bool = False  # log to Weights & Biases too; WANDB_PROJECT names the project

    # The method: its flags and functions, up to `estimator: end`. Sibling scripts share the rest.
    # --- estimator: begin --------------------------------------------------------------------------------
    samples_per_prompt: int = 8  # k: responses per prompt, the group that a score is compared with
    min_samples_per_prompt: ClassVar[int] = 2  # not a flag: smaller groups are refused
    kl_coef: ClassVar[float] = 0.0  # no KL term, so no reference is loaded
    clip_eps_low: float = 0.2  # eps_low: stop pushing a token down once its ratio is below 1 - eps_low
    clip_eps_high: float = 0.28  # eps_high: stop pushing a token up once its ratio is above 1 + eps_high
    overlong_buffer: int = 8  # L_cache: subtract up to 1 from the score over the last L_cache tokens; 0: off
    max_rollouts: int = 10  # sample at most this many rollouts for one batch, on each rank
    num_minibatches: int = 2  # optimizer steps per pass over the rollout
    update_epochs: int = 1  # passes over the rollout


@torch.no_grad()
def compute_advantages(args, rollout):
    """Return {"advantages": (B, T)}: each score less its overlong penalty, normalized in its group."""
    excess = rollout["response_mask"].sum(1) - args.max_response_length + args.overlong_buffer  # (B,)
    penalty = excess.clamp(min=0).to(rollout["scores"]) / max(1, args.overlong_buffer)
    groups = (rollout["scores"] - penalty).view(-1, args.samples_per_prompt)  # (prompts, k)
    # The std divides by k - 1, which the paper leaves open. The 1e-4 is ours: equal scores have a std of 0.
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    return {"advantages": advantages.view(-1, 1) * rollout["response_mask"]}


def policy_loss(args, batch, logprobs, num_sequences, num_tokens):
    """Return the clipped objective (Eq. 8): the mean over tokens. Padding adds 0, because A is 0 there."""
    advantages = batch["advantages"]
    ratio = (logprobs - batch["old_logprobs"]).exp()  # rho, (b, T)
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - args.clip_eps_low, 1 + args.clip_eps_high) * advantages
    loss = -torch.min(unclipped, clipped).sum() / num_tokens
    clip_fraction = (clipped < unclipped).sum() / num_tokens
    return loss, {"policy_loss": loss.detach(), "clip_fraction": clip_fraction}


def is_useful(args, rollout):
    """Return (B,) whether the scores of a response's group differ, so that it has an advantage."""
    groups = rollout["raw_scores"].view(-1, args.samples_per_prompt)  # (prompts, k)
    return (groups.amax(1) > groups.amin(1)).repeat_interleave(args.samples_per_prompt)


def dynamic_sampling(args, policy, tokenizer, reward, dataset, rollout, rows):
    """Replace groups of equal raw scores by groups of other prompts, up to max_rollouts rollouts (Eq. 11)."""
    k = args.samples_per_prompt
    local_batch = len(rows)
    for _ in range(args.max_rollouts - 1):
        drawn = {id(row) for row in rows}
        unused = [row for row in dataset if id(row) not in drawn]
        if is_useful(args, rollout).sum() >= local_batch or not unused:
            break
        prompt_rows = [unused[i] for i in torch.randperm(len(unused))[: local_batch // k]]
        new = generate(args, policy, tokenizer, [row["prompt_ids"] for row in prompt_rows], k)
        new_rows = [row for row in prompt_rows for _ in range(k)]
        new["raw_scores"] = score(reward, tokenizer, new_rows, new)
        rows = rows + new_rows
        for name, tensor in rollout.items():
            responses = [*tensor, *new[name]]
            if tensor.dim() == 1:  # (B,)
                rollout[name] = torch.stack(responses)
            else:  # (B, P+T) or (B, T); only P may differ, so only prompts are padded, on the left
                rollout[name] = torch.nn.utils.rnn.pad_sequence(
                    responses, batch_first=True, padding_side="left"
                )
    useful = is_useful(args, rollout)
    count = total(torch.ones_like(rollout["raw_scores"]))
    metrics = {
        "score": total(rollout["raw_scores"]) / count,
        "equal_groups": total(~useful) / count,
        "rollouts": count / args.batch_size,
    }
    chosen = useful.int().argsort(descending=True, stable=True)[:local_batch]  # stable keeps groups together
    return {name: tensor[chosen] for name, tensor in rollout.items()}, [rows[i] for i in chosen], metrics


# --- estimator: end -------------------------------------------------------------------------------------


def main(args):
    check_args(args)
    start_ranks(args)
    policy, tokenizer = load_model(args, args.model, transformers.AutoModelForCausalLM)
    reference = make_reference(args, policy) if args.kl_coef or args.log_kl else None
    k = args.samples_per_prompt
    num_prompts = args.batch_size // k  # of a rollout, over all ranks
    dataset = load_rows(args, args.dataset, "train", policy, tokenizer, num_prompts)
    eval_dataset = load_rows(args, args.eval_dataset if args.eval_every else None, "test", policy, tokenizer)
    reward = load_reward(args, args.reward, dataset)
    eval_reward = load_reward(args, args.eval_reward, eval_dataset) if args.eval_reward else reward
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0, fused=True)  # `update` sets the lr
    state = {"policy": policy, "optimizer": optimizer}  # what `update` changes and a checkpoint holds
    run_dir, start = open_run(args, state, dataset)  # loads the last checkpoint; start is its iteration, or 0
    if eval_dataset and start == 0:
        log(args, run_dir, 0, evaluate(args, policy, tokenizer, eval_reward, eval_dataset))

    for iteration in range(start + 1, args.num_iterations + 1):
        began = time.perf_counter()
        # A seed for each iteration and rank: a resumed run draws the same numbers as an uninterrupted one.
        torch.manual_seed(1_000_000 * args.seed + iteration * WORLD_SIZE + RANK)

        # 1. Choose this rank's prompts, and sample k responses to each of them
        prompt_rows = choose_rows(args, dataset, num_prompts, iteration)
        rollout = generate(args, policy, tokenizer, [row["prompt_ids"] for row in prompt_rows], k)
        sampled = time.perf_counter()

        # 2. Score them
        rows = [row for row in prompt_rows for _ in range(k)]  # of each response
        rollout["raw_scores"] = score(reward, tokenizer, rows, rollout)  # (B,)
        # Groups of equal scores have no gradient, so groups of other prompts take their place.
        rollout, rows, totals = dynamic_sampling(args, policy, tokenizer, reward, dataset, rollout, rows)
        rollout["scores"] = process_scores(args, rollout["raw_scores"], rollout["truncated"])
        scored = time.perf_counter()

        # 3. Compare with the reference: kl, summed over a response, estimates KL(pi_old || pi_ref)
        rollout["ref_logprobs"] = rollout["old_logprobs"]  # without a reference, so that kl is 0
        if reference is not None:
            rollout["ref_logprobs"] = rollout_logprobs(args, reference, rollout)  # (B, T)
        rollout["kl"] = rollout["old_logprobs"] - rollout["ref_logprobs"]

        # 4. Compute advantages: which tokens to make more or less likely, and by how much
        rollout |= compute_advantages(args, rollout)

        # 5. Update the policy, with one optimizer step per minibatch
        metrics = update(args, state, rollout, lr_schedule(args, iteration, args.num_iterations))

        # 6. Measure, evaluate and log
        metrics |= measure(args, rollout, began, sampled, scored)
        metrics |= totals  # score and equal_groups of all responses that were sampled, not of the batch
        left = (time.perf_counter() - began) * (args.num_iterations - iteration)  # seconds, at this pace
        is_last = iteration == args.num_iterations
        if eval_dataset and (is_last or iteration % args.eval_every == 0):
            metrics |= evaluate(args, policy, tokenizer, eval_reward, eval_dataset)
        log(args, run_dir, iteration, metrics, left)
        if args.log_every and iteration % args.log_every == 0:
            log_samples(run_dir, iteration, tokenizer, rows, rollout)

        # 7. Save the model, a folder that from_pretrained opens, and a checkpoint, from which a run resumes
        if is_last or (args.save_every and iteration % args.save_every == 0):
            save_model(args, run_dir, iteration, policy, tokenizer)
            save_checkpoint(run_dir, iteration, state)  # last: after a kill, both are saved again

    say_result(run_dir, "score", longer=f"--num_iterations {2 * max(start, args.num_iterations)}")
    if dist.is_initialized():
        dist.destroy_process_group()


def update(args, state, rollout, lr_factor):
    """Make update_epochs x num_minibatches optimizer steps (step 5 of an iteration). Return their metrics."""
    began = time.perf_counter()
    policy, optimizer = state["policy"], state["optimizer"]
    learning_rate = args.learning_rate * lr_factor
    stats = defaultdict(float)  # sums over this rank's micro-batches
    grad_norms = []  # one for each optimizer step
    difference = 0.0  # mean |log-prob in training - log-prob while sampling|, which should be near 0
    for _ in range(args.update_epochs):
        order = torch.randperm(len(rollout["scores"])).to(args.device)
        for minibatch in order.chunk(args.num_minibatches):  # the indices of its rows
            is_first_step = not grad_norms  # in which pi_theta is still pi_old
            # Counts of the whole step: the loss does not depend on micro-batches and ranks.
            num_sequences = len(minibatch) * WORLD_SIZE
            num_tokens = total(rollout["response_mask"][minibatch])
            for _, batch in micro_batches(rollout, minibatch, args.micro_batch_size):
                with autocast(args):
                    all_logprobs = response_distribution(args, policy, batch)  # (b, T, V), with gradient
                logprobs = sampled_logprobs(all_logprobs, batch)  # (b, T)
                loss, batch_stats = policy_loss(args, batch, logprobs, num_sequences, num_tokens)
                loss.backward()  # adds to the gradient of the earlier micro-batches
                del all_logprobs  # the largest tensor, which would stay beside that of the next forward pass
                for name, value in batch_stats.items():
                    stats[name] += value
                if is_first_step:
                    difference += (logprobs.detach() - batch["old_logprobs"]).abs().sum() / num_tokens
            grad_norms.append(optimizer_step(args, policy, optimizer, learning_rate))
    return {
        "update_seconds": time.perf_counter() - began,
        "logprob_difference": total(difference),
        "grad_norm": float(sum(grad_norms)) / len(grad_norms),
        "learning_rate": learning_rate,
    } | {name: total(value) / len(grad_norms) for name, value in stats.items()}


@torch.no_grad()
def generate(args, model, tokenizer, prompts, samples_per_prompt=1, greedy=False):
    """Sample responses to prompts (lists of ids) from softmax(logits / temperature), or take the argmax.

    Return a rollout, from sequences to truncated, with B = len(prompts) x samples_per_prompt rows. The
    log-probs of pi_old are recorded here, because a later forward pass would give slightly different numbers.
    model.generate() would also apply the top-k, top-p and penalties of the model's generation config.
    """
    device = model.device
    eos = torch.tensor(eos_ids(model, tokenizer), device=device)
    prompt_ids, prompt_mask = left_pad(prompts, device)
    P = prompt_ids.shape[1]
    T = args.max_response_length
    all_rows = torch.arange(len(prompts) * samples_per_prompt, device=device)  # (B,)
    prompt_index = all_rows // samples_per_prompt  # (B,) the prompt of each row
    sequences = pad(prompt_ids[prompt_index], (0, T))  # (B, P+T), with room for the response
    attention_mask = pad(prompt_mask[prompt_index], (0, T))
    old_logprobs = torch.zeros(len(all_rows), T, device=device)
    entropy = torch.zeros_like(old_logprobs)
    active = all_rows  # (b,) the rows without an EOS so far
    inputs = model_inputs(prompt_ids, prompt_mask)
    cache = Cache(config=model.config)
    with autocast(args):  # around the loop, so that the weights are cast once
        for t in range(T):
            show(f"sampling token {t + 1} of at most {T}, {len(active)} responses")
            logits = model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            if t == 0:
                # Each prompt has been read once. Copy its logits and its cache for its responses.
                logits = logits[prompt_index]
                cache.reorder_cache(prompt_index)
            logprobs = log_distribution(logits, args.temperature)  # (b, V)
            probs = logprobs.exp()
            tokens = probs.argmax(-1, keepdim=True) if greedy else torch.multinomial(probs, 1)  # (b, 1)
            sequences[active, P + t] = tokens.squeeze(1)
            attention_mask[active, P + t] = 1
            old_logprobs[active, t] = logprobs.gather(1, tokens).squeeze(1)
            entropy[active, t] = torch.special.entr(probs).sum(1)

            # Rows with an EOS leave the batch and the cache.
            unfinished = (~torch.isin(tokens, eos)).nonzero()[:, 0]  # positions in active
            if len(unfinished) < len(active):
                active = active[unfinished]
                tokens = tokens[unfinished]
                cache.reorder_cache(unfinished)  # keeps these rows
            if len(active) == 0:
                break
            inputs = model_inputs(tokens, attention_mask[active, : P + t + 1])
    show("")

    return {
        "sequences": sequences,
        "attention_mask": attention_mask,
        "response_mask": attention_mask[:, P:].bool(),
        "old_logprobs": old_logprobs,
        "entropy": entropy,
        "truncated": torch.isin(all_rows, active),  # still without an EOS
    }


def eos_ids(model, tokenizer):
    """Return the ids that end a response: EOS, those of the generation config, the end of a chat's turn."""
    configured = model.generation_config.eos_token_id  # an id, a list of ids, or None
    ids = configured if isinstance(configured, list) else [configured]
    if tokenizer.chat_template:
        # Only special tokens, and not a newline after them. They decode to nothing.
        ids = ids + [x for x in turn_end(tokenizer) if not tokenizer.decode([x], skip_special_tokens=True)]
    return sorted({tokenizer.eos_token_id, *ids} - {None})


def left_pad(id_lists, device):
    """Pad lists of token ids on the left. Return the ids and the attention mask, both (B, P)."""
    P = max(map(len, id_lists))
    padded = torch.tensor([[-1] * (P - len(ids)) + ids for ids in id_lists], device=device)
    return padded.clamp(min=0), (padded >= 0).long()  # -1 marks padding


def model_inputs(input_ids, attention_mask):
    """Return arguments of a forward pass over input_ids (b, n). The mask (b, m) covers the cache, too."""
    # Positions count from the first real token, not from the padding.
    position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
    return {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}


class Cache(transformers.DynamicCache):
    """Keeps keys in the dtype of values. Under autocast they would be float32, and take twice the memory."""

    def update(self, keys, values, *others):
        return super().update(keys.to(values.dtype), values, *others)


def autocast(args):
    """Compute in bfloat16 with --dtype bfloat16. The weights stay float32."""
    is_on = args.dtype == "bfloat16"
    # Sampling casts each weight once for all tokens. In training, a cache would only keep the copies longer.
    is_cached = not torch.is_grad_enabled()
    return torch.autocast(torch.device(args.device).type, torch.bfloat16, is_on, cache_enabled=is_cached)


def log_distribution(logits, temperature):
    """Return the log-probs (..., V) of the next token, the same for sampling and for the loss."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # in float32 at least
    return (logits / temperature).log_softmax(-1)


def process_scores(args, scores, truncated):
    """Return scores (B,) after truncation penalty, scale, z-score over all ranks and clip, in this order."""
    scores = (scores - args.missing_eos_penalty * truncated) * args.reward_scale
    if args.reward_zscore:
        scores -= mean(scores)
        scores /= max(math.sqrt(mean(scores.square())), 1e-4)  # their std
    return scores.clamp(-args.reward_clip, args.reward_clip)


@torch.no_grad()
def rollout_logprobs(args, model, rollout):
    """Return the log-probs (B, T) of the response tokens of a whole rollout."""
    result = torch.zeros_like(rollout["old_logprobs"])
    all_rows = torch.arange(len(result), device=result.device)
    for part, batch in micro_batches(rollout, all_rows, args.micro_batch_size):
        with autocast(args):
            logprobs = token_logprobs(args, model, batch)  # (b, T) with the T of the micro-batch
        result[part, : logprobs.shape[1]] = logprobs
    return result


def micro_batches(rollout, indices, size):
    """Yield groups of up to `size` rows of similar length, with their tensors trimmed to the longest row."""
    lengths = rollout["response_mask"][indices].sum(1)
    for part in indices[lengths.argsort(stable=True)].split(size):
        batch = {name: tensor[part] for name, tensor in rollout.items()}
        is_used = batch["attention_mask"].any(0)  # (P+T,) the columns that are not all padding
        for name, tensor in batch.items():
            if tensor.dim() == 2:  # a (b, T) tensor has the last T of the P+T columns
                batch[name] = tensor[:, is_used[-tensor.shape[1] :]]
        yield part, batch


def token_logprobs(args, model, batch):
    """Return the log-probs (b, T) of the response tokens, 0 where response_mask is False."""
    return sampled_logprobs(response_distribution(args, model, batch), batch)


def response_distribution(args, model, batch):
    """Return the log-probs (b, T, V) of every possible token at each position of the response."""
    T = batch["response_mask"].shape[1]
    inputs = model_inputs(batch["sequences"], batch["attention_mask"])
    # The logits at a position are those of the next token, so the last ones are not needed.
    logits = model(**inputs, use_cache=False, logits_to_keep=T + 1).logits[:, :-1]  # (b, T, V)
    return log_distribution(logits, args.temperature)


def sampled_logprobs(all_logprobs, batch):
    """Pick the sampled tokens from log-probs (b, T, V). Return (b, T), 0 where response_mask is False."""
    tokens = batch["sequences"][:, -all_logprobs.shape[1] :].unsqueeze(2)  # (b, T, 1)
    return all_logprobs.gather(2, tokens).squeeze(2).masked_fill(~batch["response_mask"], 0.0)


def lr_schedule(args, iteration, num_iterations):
    """Return the factor of the peak learning rate: linear warmup, and with --anneal_lr linear decay."""
    rise = iteration / max(1, args.warmup_iterations)
    fall = 1 - (iteration - 1) / num_iterations if args.anneal_lr else 1.0
    return min(rise, fall)


def optimizer_step(args, model, optimizer, learning_rate):
    """Sum the gradients over ranks, clip their norm, and step. Return the norm before clipping."""
    # DistributedDataParallel would average them, but the loss is already divided by counts over all ranks.
    for parameter in model.parameters():
        if parameter.grad is not None:  # None (on every rank) if no loss uses this weight
            all_sum(parameter.grad)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    remedy = f"Use a learning rate below {learning_rate:g}. If it is low, look for huge weights or scores."
    check(norm.isfinite(), f"the gradient is not finite (norm {norm}). {remedy}")
    optimizer.param_groups[0]["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad()
    return norm


def measure(args, rollout, began, sampled, scored):
    """Return metrics of a rollout, over all ranks. began, sampled and scored are times, in seconds."""
    num_tokens = total(rollout["response_mask"])
    raw_scores = rollout["raw_scores"]
    average = mean(raw_scores)
    metrics = {
        "score": average,
        "score_std": math.sqrt(mean((raw_scores - average).square())),
        "truncated": mean(rollout["truncated"]),
        "response_length": num_tokens / args.batch_size,
        "entropy": total(rollout["entropy"]) / num_tokens,  # mean per token
        "sampling_seconds": sampled - began,
        "reward_seconds": scored - sampled,
        "tokens_per_second": num_tokens / (time.perf_counter() - began),
    }
    if args.kl_coef or args.log_kl:
        metrics["kl"] = total(rollout["kl"]) / args.batch_size  # sum over a response
    lengths = rollout["response_mask"].sum(1)  # (B,)
    # If all scores are equal, rounding can still put their mean beside them.
    is_above, is_below = raw_scores > average, raw_scores < average
    if total(is_above) and total(is_below):
        metrics["response_length/above"] = total(lengths * is_above) / total(is_above)
        metrics["response_length/below"] = total(lengths * is_below) / total(is_below)
    if args.samples_per_prompt > 1:
        groups = raw_scores.view(-1, args.samples_per_prompt)
        metrics["equal_groups"] = mean(groups.amax(1) == groups.amin(1))  # groups of one score
    return metrics


def mean(x):
    """Return the mean of x (n,) over the n rows of every rank, as a number. Every rank must call it."""
    return total(x) / (len(x) * WORLD_SIZE)


def total(x):
    """Return the sum of all elements of x on all ranks, as a number. Every rank must call it."""
    return float(all_sum(x.sum()))


def all_sum(x):
    """Sum the tensor x over all ranks, in place, and return it. Every rank must call it."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


# --- plumbing: models, data, rewards, evaluation, logs, checkpoints. The algorithm ends above this line ---


def say(text):
    """Print, on rank 0."""
    if RANK == 0:
        print(text, flush=True)


def show(text):
    """Show text on a line of the terminal that the next line replaces. In a file, print nothing."""
    if RANK == 0 and sys.stdout.isatty():
        print(f"{text:60}", end="\r", flush=True)


def check(condition, message):
    """If the condition is false, print the message and exit with code 2."""
    if not condition:
        time.sleep(min(RANK, 5))  # meanwhile torchrun stops this rank, if an earlier one has failed
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)


def start_ranks(args):
    """Choose the device of this rank, and connect the ranks if there are several."""
    is_usable = args.device == "cpu" or torch.accelerator.is_available()
    remedy = "Install the build for your GPU (cuda, mps) and its driver, or use --device cpu."
    check(is_usable, f"--device {args.device}: this PyTorch ({torch.__version__}) cannot use it. {remedy}")
    # In bfloat16, attention on mps sees later tokens (pytorch issue 195910).
    is_right = args.dtype == "float32" or "mps" not in args.device
    check(is_right, "--dtype bfloat16: on mps use --dtype float32.")
    # Memory of CUDA that can grow leaves fewer gaps between tensors. It is read when the first one is made.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # cuDNN's bfloat16 attention gave NaN and wrong results on H100 and B200 (pytorch issues 196678, 193893).
    torch.backends.cuda.enable_cudnn_sdp(False)
    # No bars and reports about weights; load_model checks what the reports say.
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    if WORLD_SIZE > 1:
        if args.device != "cpu":
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))  # set by torchrun
        # The backend is the device's own, such as NCCL. The timeout is long: all wait for the slowest reward.
        dist.init_process_group(timeout=timedelta(hours=2))
    ranks = f"{WORLD_SIZE} process{'es' if WORLD_SIZE > 1 else ''}"
    say(f"{Path(__file__).name}: {ranks} on {args.device}, {args.dtype}")


def check_args(args):
    """Refuse flags that cannot work, and warn of those that only suit the toy. Name its held-out prompts."""
    k = args.samples_per_prompt
    least = args.min_samples_per_prompt
    reason = ", because it compares the responses to one prompt; reinforce.py does not" if least > 1 else ""
    check(k >= least, f"--samples_per_prompt {k}: this method needs {least} or more{reason}.")
    positive = ["batch_size", "num_minibatches", "update_epochs", "micro_batch_size", "max_response_length"]
    positive += ["temperature", "max_grad_norm", "reward_clip"]
    for name, value in vars(args).items():
        if name in positive:
            check(value > 0, f"--{name} {value}: must be above 0.")
        elif isinstance(value, int | float) and "reward" not in name and "score" not in name:
            check(value >= 0, f"--{name} {value}: must be 0 or more.")
    unit = WORLD_SIZE * math.lcm(k, args.num_minibatches)  # ranks, groups and minibatches divide it
    size = args.batch_size
    parts = f"samples per prompt: {k}, minibatches: {args.num_minibatches}, ranks: {WORLD_SIZE}"
    remedy = f"Use a multiple of {unit}, such as {-(-size // unit) * unit}."
    check(size % unit == 0, f"--batch_size {size}: cannot be divided evenly ({parts}). {remedy}")
    if args.dataset == Args.dataset:  # the toy has held-out prompts
        args.eval_dataset = args.eval_dataset or f"{Path(args.dataset).parent}/heldout.jsonl"
    for name, value in (args.chat_template_kwargs or {}).items():
        check(value not in ("true", "false"), f"--chat_template_kwargs {name} {value}: write True or False.")
    for name, value in vars(args).items():
        is_toys = name.endswith(("learning_rate", "response_length")) and value == getattr(Args, name)
        if is_toys and args.model != Args.model:
            advice = "about a hundredth of it" if "rate" in name else "some 1024 tokens"
            say(f"warning: --{name} {value} is the default for the toy; a real model needs {advice}")


def load_model(args, name, auto_class):
    """Load a model in float32, and its tokenizer. from_pretrained sets eval mode, and no script leaves it."""
    # With dropout, training and sampling would compute different log-probs.
    is_judge = auto_class is transformers.AutoModelForSequenceClassification
    flags = [flag for flag, value in vars(args).items() if value == name] or ["model"]
    flag = f"--{flags[-1] if is_judge else flags[0]} {name}"
    is_adapter = Path(name, "adapter_config.json").exists()
    check(not is_adapter, f"{flag} is an adapter. Merge it into its model, and save that.")
    check(not Path(name, "checkpoint.pt").exists(), f"{flag} is a run. Use its model, {name}/model.")
    try:
        # Without trust_remote_code=False, transformers would ask on stdin whether to run code of the model.
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        model, info = auto_class.from_pretrained(
            name, trust_remote_code=False, use_safetensors=True, dtype=torch.float32, output_loading_info=True
        )
    except (OSError, ValueError) as error:
        place = f"neither loaded from a folder in {os.getcwd()} nor from the Hugging Face Hub"
        hint = "Use a folder with config.json and weights, or the id of a model."
        if is_judge:
            hint = "A reward is exact_answer, file.py:function or a reward model."
        reason = " ".join(str(error).split()).partition(". ")[0]
        check(False, f"{flag}: {place} ({reason:.150}). {hint}")
    # transformers fills in missing weights at random, such as the score head of a policy used as --reward.
    lacking = ", ".join(info["missing_keys"])
    hint = "Train a reward model with reward_model.py." if is_judge else "Save the whole model."
    check(not lacking, f"{flag}: its files lack {lacking:.200}. {hint}")
    check("score.weight" not in info["unexpected_keys"], f"{flag} is a reward model. Use it as --reward.")
    check(tokenizer.eos_token, f"{flag}: its tokenizer has no EOS token. Set one, and save the tokenizer.")
    if args.gradient_checkpointing:
        # transformers' own checkpointing works in train mode only, which would switch dropout on.
        for layer in model.modules():
            if isinstance(layer, transformers.modeling_layers.GradientCheckpointingLayer):
                layer.forward = partial(checkpointed, layer.forward)
    model.to(args.device)
    if auto_class is transformers.AutoModelForCausalLM:
        check_sampling(args, flag, model)
    say(f"  model       {name}: {model.num_parameters():,} parameters")
    return model, tokenizer


def make_reference(args, policy):
    """Return a copy of the policy, before a checkpoint is loaded, with the same log-probs."""
    reference = copy.deepcopy(policy)
    if args.dtype == "bfloat16":
        embeddings = reference.get_input_embeddings().weight
        for layer in reference.modules():
            if isinstance(layer, torch.nn.Linear) and layer.weight is not embeddings:
                layer.bfloat16()  # autocast would cast it so in each pass, from twice the memory
    return reference


def checkpointed(forward, *args, **kwargs):
    """Run a layer, and with gradients forget its activations, which backward() then computes again."""
    if not torch.is_grad_enabled():  # around each layer, checkpoint() slows sampling by a quarter
        return forward(*args, **kwargs)
    checkpoint = torch.utils.checkpoint.checkpoint
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


@torch.no_grad()
def check_sampling(args, flag, model):
    """Refuse a model that gives a token other log-probs in sampling, with padding and a cache, than alone."""
    ids, mask = left_pad([[0, 1, 2, 3, 4, 5], [0, 1, 2]], model.device)
    cache = Cache(config=model.config)
    with autocast(args):
        model(**model_inputs(ids[:, :-1], mask[:, :-1]), past_key_values=cache, use_cache=True)
        inputs = model_inputs(ids[:, -1:], mask)
        sampled = model(**inputs, past_key_values=cache, use_cache=True).logits[1, -1]
        alone = model(ids[1:, 3:], use_cache=False).logits[0, -1]
    difference = (log_distribution(sampled, 1.0) - log_distribution(alone, 1.0)).abs().mean()
    limit = 0.05 if args.dtype == "float32" else 0.1
    reason = f"sampling and training differ by {difference:.2g} nats a token (limit {limit} in {args.dtype})"
    check(difference < limit, f"{flag}: {reason}. Use a causal decoder with a key-value cache.")
    has_state = model.config.model_type == "recurrent_gemma"
    check(not has_state, f"{flag}: keeps a state outside its cache. Use a decoder that does not.")


def token_ids(tokenizer, prompt, **options):
    """Return the ids of a prompt: of text with the tokenizer's BOS, of a chat as the template writes it."""
    if isinstance(prompt, str):
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        bos = [tokenizer.bos_token_id]
        adds_bos = tokenizer("")["input_ids"][:1] == bos
        return bos + ids if adds_bos and ids[:1] != bos else ids
    is_open = prompt[-1]["role"] == "assistant"  # the model continues this message
    options |= {"add_generation_prompt": not is_open, "continue_final_message": is_open}
    return tokenizer.apply_chat_template(prompt, **options)["input_ids"]


def template_options(args, row):
    """Return what the chat template of a row gets besides the messages."""
    options = {"tools": row.get("tools")} | (args.chat_template_kwargs or {})
    own = row.get("chat_template_kwargs") or {}  # parquet fills in None
    return options | {name: value for name, value in own.items() if value is not None}


def turn_end(tokenizer):
    """Return the token ids that a chat template writes after an assistant's message."""
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "1"}]
    # token_ids leaves the last message open.
    return tokenizer.apply_chat_template(chat)["input_ids"][len(token_ids(tokenizer, chat)) :]


def read_rows(flag, name, split):
    """Return the rows of a .jsonl file, or of a folder or a dataset of the Hub, name:configuration:split."""
    if not name.endswith(".jsonl"):
        check(not Path(name).is_file(), f"{flag}: must end in .jsonl, and have a JSON object in each line.")
        name, _, rest = name.partition(":")
        configuration, _, own_split = rest.partition(":")
        # Local data is streamed, because the cache of `datasets` may hold an older version of it.
        options = {"split": own_split or split, "streaming": Path(name).exists()}
        try:
            return list(datasets.load_dataset(name, configuration or None, **options))
        except (OSError, ValueError) as error:
            remedy = "Give a .jsonl file, a folder, or a dataset of the Hub such as openai/gsm8k:main:train."
            check(False, f"{flag}: not loaded ({error}). {remedy}")
    check(Path(name).exists(), f"{flag}: no such file in {os.getcwd()}. Give its full path.")
    rows = []
    for number, line in enumerate(open(name, "rb"), 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            check(False, f"{flag}, line {number}: not valid JSON in UTF-8 ({error}): {line[:80]!r}")
    return rows


def load_rows(args, name, split, policy, tokenizer, min_rows=1):
    """Return the rows of a dataset, with the token ids of each prompt as prompt_ids, without long prompts."""
    if not name:  # no evaluation
        return []
    flag = f"--{'dataset' if split == 'train' else 'eval_dataset'} {name}"
    rows = read_rows(flag, name, split)
    for number, row in enumerate(rows):
        where = f"{flag}, row {number}"
        has_prompt = isinstance(row, dict) and isinstance(row.get("prompt"), str | list) and row["prompt"]
        check(has_prompt, f'{where}: has no column "prompt", or an empty one. The row is {row!s:.100}')
        check_chat(where, tokenizer, row["prompt"])
        row["prompt_ids"] = token_ids(tokenizer, row["prompt"], **template_options(args, row))
    names = dict.fromkeys(sorted(set().union(*rows)))
    rows = [names | row for row in rows]  # so that each rollout has all columns
    kept = [row for row in rows if 1 <= len(row["prompt_ids"]) <= args.max_prompt_length]
    fit = f"{len(kept):,} of {len(rows):,} prompts have 1 to {args.max_prompt_length} tokens"
    say(f"  {'prompts' if split == 'train' else 'held out':12}{name}: {fit}")
    remedy = "Raise --max_prompt_length, add prompts, or lower --batch_size."
    check(len(kept) >= min_rows, f"{flag}: {fit}, but {min_rows} are needed. {remedy}")
    longest = max(len(row["prompt_ids"]) for row in kept)
    what = f"--max_response_length {args.max_response_length}: with the longest prompt ({longest} tokens)"
    check_positions(what, policy, longest + args.max_response_length)
    return kept


def check_chat(where, tokenizer, prompt):
    """Refuse a chat if the tokenizer has no template for it."""
    remedy = "Use an Instruct model, its template (docs/stages.md), or strings as prompts."
    is_writable = isinstance(prompt, str) or tokenizer.chat_template
    check(is_writable, f"{where}: is a chat, but the tokenizer has no chat template. {remedy}")


def check_positions(what, model, num_tokens):
    """Refuse a text of more tokens than the model has positions."""
    limit = getattr(model.config, "max_position_embeddings", math.inf)
    excess = f"{num_tokens:,} tokens, but the model has {limit:,} positions. Use {num_tokens - limit} fewer."
    check(num_tokens <= limit, f"{what} there are {excess}")


def choose_rows(args, dataset, num_prompts, iteration):
    """Return this rank's rows. Each epoch shuffles anew, and drops an incomplete last batch."""
    epoch, batch_number = divmod(iteration - 1, len(dataset) // num_prompts)
    generator = torch.Generator().manual_seed(1_000_000 * args.seed + epoch)
    chosen = torch.randperm(len(dataset), generator=generator).split(num_prompts)[batch_number]
    return [dataset[i] for i in chosen.chunk(WORLD_SIZE)[RANK]]


def exact_answer(completions, answer=(None,), **columns):
    """Score 1 if the text after the last "answer", or all of it, equals the column `answer`, and else 0."""
    for right in answer:
        reason = f"a string or an integer in each row, and not {right!r}. Or write your own reward."
        check(isinstance(right, str | int), f'--reward exact_answer needs a column "answer", {reason}')
    texts = [text.rpartition("answer")[2].strip() for text in completions]
    return [float(text == str(right).strip()) for text, right in zip(texts, answer)]


def load_reward(args, name, rows=()):
    """Return a function of the lists prompts, completions, truncated and other columns of rows, to scores."""
    say(f"  reward      {name}")
    if name == "exact_answer":
        exact_answer([], [row.get("answer") for row in rows])  # refuses a row without an answer
        return exact_answer
    check(not name.endswith(".py"), f"--reward {name}: name a function of the file, as in {name}:score.")
    if ".py:" in name:
        function = load_function(name)
        names = {"prompts", "completions", "truncated", *set().union(*rows)} - {"prompt"}
        try:
            if rows:
                inspect.signature(function).bind(**dict.fromkeys(names))
        except TypeError as error:
            check(False, f"--reward {name}: {error}. A reward is called with {', '.join(sorted(names))}.")
        return function
    model, tokenizer = load_model(args, name, transformers.AutoModelForSequenceClassification)
    is_right = hasattr(model, "score") and model.config.num_labels == 1
    check(is_right, f"--reward {name}: is no decoder with a head for one score, as reward_model.py makes it.")

    def text_ids(prompt, completion, is_truncated, row):
        """Return what the model reads. A text ends with EOS, a chat as in its template, if not truncated."""
        check_chat(f"--reward {name}: a prompt", tokenizer, prompt)
        ids = token_ids(tokenizer, prompt, **template_options(args, row))
        ids += tokenizer(completion, add_special_tokens=False)["input_ids"]
        end = [tokenizer.eos_token_id] if isinstance(prompt, str) else turn_end(tokenizer)
        return ids if is_truncated or ids[-len(end) :] == end else ids + end

    @torch.no_grad()
    def reward_model(prompts, completions, truncated, **columns):
        rows = [{name: column[i] for name, column in columns.items()} for i in range(len(prompts))]
        id_lists = list(map(text_ids, prompts, completions, truncated, rows))
        check_positions(f"--reward {name}: in a text", model, max(map(len, id_lists)))
        scores = []
        for i in range(0, len(id_lists), args.micro_batch_size):
            inputs = model_inputs(*left_pad(id_lists[i : i + args.micro_batch_size], args.device))
            with autocast(args):
                hidden_states = model.base_model(**inputs, use_cache=False).last_hidden_state
            # model() scores the last token that is not padding, and takes an EOS that equals pad for it.
            scores += model.score(hidden_states[:, -1].float()).squeeze(1).tolist()
        return scores

    return reward_model


def load_function(name):
    """Return the function of file.py:function. Its file becomes a module, as process pools need it."""
    file, _, function = name.rpartition(":")
    path = Path(file).resolve()
    check(path.exists(), f"--reward {name}: no file {file} in {os.getcwd()}.")
    sys.path.append(str(path.parent))  # for its neighbors
    module = sys.modules.get(path.stem)
    if getattr(module, "__file__", None) != str(path):  # not yet loaded, or another module has this name
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)
        spec.loader.exec_module(module)
    check(hasattr(module, function), f"--reward {name}: the file has no function {function}.")
    return getattr(module, function)


def response_ids(rollout):
    """Return the token ids of each response, without padding."""
    return [ids[-len(mask) :][mask] for ids, mask in zip(rollout["sequences"], rollout["response_mask"])]


def score(reward, tokenizer, rows, rollout):
    """Return the scores (B,) of the responses in a rollout. rows has the row of the dataset behind each."""
    # Copies, so that a reward cannot change the dataset
    columns = {name: copy.deepcopy([row.get(name) for row in rows]) for name in set().union(*rows)}
    columns["prompts"] = columns.pop("prompt")
    columns["completions"] = tokenizer.batch_decode(response_ids(rollout), skip_special_tokens=True)
    columns["truncated"] = rollout["truncated"].tolist()
    with torch.random.fork_rng(devices=[]):  # `update` draws the same numbers, whatever the reward draws
        result = reward(**columns)
    what = f"--reward (or --eval_reward): {getattr(reward, '__name__', reward)} returned"
    remedy = f"Return one finite number for each of the {len(rows)} completions."
    try:
        scores = rollout["old_logprobs"].new_tensor(result)  # of this dtype, on this device
    except (TypeError, ValueError, RuntimeError):
        check(False, f"{what} {result!r:.100}. {remedy}")
    is_right = scores.shape == rollout["truncated"].shape
    check(is_right, f"{what} scores of shape {[*scores.shape]}. {remedy}")
    first = scores.isfinite().int().argmin()
    check(scores.isfinite().all(), f"{what} {scores[first]} for completion {first}. {remedy}")
    return scores


def evaluate(args, policy, tokenizer, reward, dataset):
    """Return the mean score for each `group`; with n samples also pass@k, the expected best score of k."""
    n = args.eval_samples or 1
    all_rows = dataset * n  # of each response
    scores = torch.zeros(len(all_rows), device=args.device)
    # At most as many rows as in a rollout, each with another prompt, and an equal share for each rank
    size = min(args.batch_size, len(all_rows) + WORLD_SIZE - 1) // WORLD_SIZE
    for first in range(RANK * size, len(all_rows), WORLD_SIZE * size):
        rows = all_rows[first : first + size]
        torch.manual_seed(args.seed + first)  # main seeds each iteration, so training does not depend on it
        prompts = [row["prompt_ids"] for row in rows]
        rollout = generate(args, policy, tokenizer, prompts, greedy=not args.eval_samples)
        scores[first : first + size] = score(reward, tokenizer, rows, rollout)
    groups = defaultdict(list)
    for row, row_scores in zip(dataset, all_sum(scores).view(n, -1).T.tolist()):
        group = "all" if row.get("group") is None else row["group"]
        groups[f"eval/score/{group}"] += row_scores
        powers = {2**i for i in range(1, n.bit_length())}
        for k in sorted(powers | {n} if n > 1 else powers):  # 2, 4, 8, ... and n
            groups[f"eval/pass@{k}/{group}"].append(best_of(k, row_scores))
    return {name: sum(x) / len(x) for name, x in groups.items()}


def best_of(k, scores):
    """Return the expected maximum of k of these n scores, drawn without replacement (arXiv 2107.03374)."""
    # Of all sets of k scores, comb(i, k - 1) have the i-th smallest as their maximum, counted from 0.
    sets = math.comb(len(scores), k)
    return sum(math.comb(i, k - 1) / sets * x for i, x in enumerate(sorted(scores)))


def open_run(args, state, dataset):
    """Start a run, or resume one and load its checkpoint into state. Return its folder and last iteration."""
    name = Path(__file__).stem
    run_dir = Path(args.run_dir or f"runs/{name}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    dataset_checksum = zlib.crc32(repr([zlib.crc32(repr(row).encode()) for row in dataset]).encode())
    flags = vars(args) | {"ranks": WORLD_SIZE, "script": name, "dataset_checksum": dataset_checksum}
    check_folder(run_dir, flags)
    start = 0
    if Path(f"{run_dir}/checkpoint.pt").exists():
        checkpoint = torch.load(f"{run_dir}/checkpoint.pt", "cpu", weights_only=True, mmap=True)
        for part in state:
            state[part].load_state_dict(checkpoint[part])
        start = checkpoint["iteration"]
    model = next(iter(state.values()))  # the policy, or what reward_model.py trains
    weights = [weight.sum().item() for weight in model.parameters()]
    checksum = zlib.crc32(repr((flags, start, weights)).encode())
    is_same = total(torch.tensor(checksum, device=args.device)) == checksum * WORLD_SIZE
    check(is_same, "the ranks differ in flags, rows, checkpoint or weights. Start all with the same.")
    if RANK == 0:
        open_run.lock = filelock.FileLock(f"{run_dir}/lock")  # an attribute, so that it lasts until the end
        try:
            open_run.lock.acquire(blocking=False)  # makes the folder
        except filelock.Timeout:
            check(False, f"--run_dir {run_dir}: another process is training in it. Use a new folder.")
        with replacing(f"{run_dir}/args.json") as file:
            file.write(json.dumps(flags).encode())
        script = run_dir / f"{name}.py"
        if not start:
            script.write_bytes(Path(__file__).read_bytes())
        elif script.read_bytes() != Path(__file__).read_bytes():
            say(f"warning: {__file__} has changed since this run began; {script} is what it was")
        for log_name in ("metrics", "samples"):
            with open(f"{run_dir}/{log_name}.jsonl", "ab+") as file:
                file.seek(0)
                # Drop lines after the checkpoint, which will be logged again, and a line cut short by a kill.
                kept = [x for x in file if start and b"\n" in x and json.loads(x)["iteration"] <= start]
                file.truncate(len(b"".join(kept)))
    status = f"resumed after iteration {start}" if start else "new"
    say(f"  run folder  {os.path.relpath(run_dir)} ({status})\n\n{HEADER}")
    return run_dir, start


def check_folder(run_dir, flags):
    """Refuse a folder that is no run, or a run of other flags. Print the flags that may change and did."""
    path, metrics = run_dir / "args.json", run_dir / "metrics.jsonl"
    if not path.exists():
        found = {x.name for x in run_dir.glob("*")} - {"lock", "args.json.tmp"}  # which a kill can leave
        check(not found, f"--run_dir {run_dir}: the folder is not empty and is not a run. Use a new folder.")
        return
    old = json.loads(path.read_text())
    is_ours = old.get("script") == flags["script"]
    check(is_ours, f"--run_dir {run_dir} is not a run of {flags['script']}.py. Use a new folder.")
    has_trained = metrics.exists() and '"iteration": 1,' in metrics.read_text()
    if not has_trained and not Path(f"{run_dir}/checkpoint.pt").exists():
        return  # any flag may change
    lengths = {"num_iterations", "num_epochs"}
    free = {"run_dir", "eval_every", "log_every", "log_kl", "save_every", "keep_models", "track"} | lengths
    free |= {"micro_batch_size", "gradient_checkpointing", "dataset_checksum"}
    pairs = {x: (old.get(x), flags.get(x)) for x in old | flags}
    changed = {x: f"{x} {before} (now {now})" for x, (before, now) in pairs.items() if before != now}
    others = ", ".join(text for name, text in changed.items() if name not in free)
    remedy = "Use the same flags to resume it, or a new folder."
    check(not others, f"--run_dir {run_dir} contains a run with {others}. {remedy}")
    for name, text in changed.items():
        is_rate = name in lengths and flags["anneal_lr"]
        say(f"  changed     {text}{'; the learning rate jumps to its new decay' if is_rate else ''}")


@contextmanager
def replacing(path):
    """Open a file that takes the place of `path` when it is complete and on the disk."""
    with open(f"{path}.tmp", "wb") as file:
        yield file
        file.flush()
        os.fsync(file)
    os.replace(f"{path}.tmp", path)


def save_model(args, run_dir, iteration, policy, tokenizer):
    """On rank 0, save the policy as model/, and with --keep_models also as model-<iteration>/."""
    if RANK == 0:
        names = ["model", f"model-{iteration}"] if args.keep_models else ["model"]
        for folder in [f"{run_dir}/{name}" for name in names]:
            policy.save_pretrained(f"{folder}.tmp")
            tokenizer.save_pretrained(f"{folder}.tmp")
            shutil.rmtree(f"{folder}.old", ignore_errors=True)
            if os.path.exists(folder):
                os.replace(folder, f"{folder}.old")  # at once, while deleting takes time
            os.replace(f"{folder}.tmp", folder)
            shutil.rmtree(f"{folder}.old", ignore_errors=True)


def save_checkpoint(run_dir, iteration, state):
    """On rank 0, save all that the next iteration needs."""
    checkpoint = {name: part.state_dict() for name, part in state.items()}
    if RANK == 0:
        with replacing(f"{run_dir}/checkpoint.pt") as file:
            torch.save(checkpoint | {"iteration": iteration}, file)


def append(path, record):
    """On rank 0, add a line to a log, and wait until it is on the disk."""
    if RANK == 0:
        with open(path, "a") as file:
            print(json.dumps(record, default=str), file=file, flush=True)
            os.fsync(file)


COLUMNS = ["score", "kl", "entropy", "response_length", "truncated"]
COLUMNS += ["logprob_difference", "tokens_per_second"]
HEADER = " iter     score        kl   entropy    length truncated logp diff  tokens/s      left"


def log(args, run_dir, iteration, metrics, left=0.0):
    """Print the columns of HEADER and the evaluations. Rank 0 adds all metrics to metrics.jsonl (and W&B)."""
    text = {name: f"{float(f'{x:.3g}'):g}" for name, x in metrics.items()}  # 1230 and not 1.23e+03
    if iteration:
        values = "".join(text.get(name, "-").rjust(10) for name in COLUMNS)
        say(f"{iteration:5}{values} {timedelta(seconds=round(left))!s:>9}")
    evals = [f"{name.removeprefix('eval/')} {text[name]}" for name in text if "eval/" in name]
    if evals:
        say(fill(f"held out, iteration {iteration}:   {'   '.join(evals)}", 100, subsequent_indent=" " * 6))
    append(f"{run_dir}/metrics.jsonl", {"iteration": iteration} | metrics)
    if args.track and RANK == 0:
        import wandb

        if not wandb.run:
            wandb.init(name=run_dir.name, config=vars(args))
        wandb.log(metrics, step=iteration)


def log_samples(run_dir, iteration, tokenizer, rows, rollout):
    """Print and log three responses with their scores."""
    step = max(1, len(rows) // 3)  # of three prompts, if there are so many
    responses = tokenizer.batch_decode(response_ids(rollout)[::step][:3])
    for row, response, raw_score in zip(rows[::step], responses, rollout["raw_scores"][::step].tolist()):
        prompt = row["prompt"]
        text = " ".join((prompt if isinstance(prompt, str) else prompt[-1]["content"]).split())
        say(f"{raw_score:>9.6}   {text[-24:]:24}  ->  {' '.join(response.split())[-58:]}")
        sample = row | {"iteration": iteration, "response": response, "score": raw_score}
        del sample["prompt_ids"]
        append(f"{run_dir}/samples.jsonl", sample)


def say_result(run_dir, metric, longer):
    """Print what a run has reached, and what to do next."""
    if RANK == 0:
        folder = shlex.quote(os.path.relpath(run_dir))
        x = [row[metric] for row in map(json.loads, open(f"{run_dir}/metrics.jsonl")) if metric in row]
        if not x:  # only evaluated
            return
        tool = "diagnose" if metric == "score" and len(x) >= 5 else "plot"
        first, last = (sum(part) / max(1, len(part)) for part in (x[:10], x[-10:]))
        began = f"of the first 10: {first:.3g}, of the last 10: " if len(x) > 10 else ""
        say(f"""
Complete: {len(x)} iterations. Mean {metric} {began}{last:.3g}.
  model       {folder}/model, which from_pretrained opens
  check       python tools/{tool}.py {folder}
  longer      the same command with --run_dir {folder} {longer}""")


def print_help():
    """Print the flags that Args declares: first those of the method, then the others under their comments."""
    others, _, method = inspect.getsource(Args).partition("    # The method:")
    print(f"usage: python {sys.argv[0]} [--flag value] [--switch] [--no_switch] ...\n")
    print(__doc__.splitlines()[0])
    print(f"Paper, equations and example commands: the first lines of {Path(__file__).name}.")
    if method:
        print("\nThe method")
    for line in (method + others).splitlines():
        if flag := re.match(r"    (\w+): (?!ClassVar).* = .*?  # (.*)", line):
            text = f"  --{flag[1]:23} {flag[2]} [{getattr(Args, flag[1])}]"
            print(fill(text, 100, subsequent_indent=" " * 28))
        elif line.startswith("    # ") and "---" not in line:
            print(f"\n{line[6:]}")


if __name__ == "__main__":
    if {"-h", "--help"} & {*sys.argv}:
        sys.exit(print_help())
    args = tyro.cli(Args, use_underscores=True)
    try:
        main(args)
    except RuntimeError as error:
        if "by peer" not in str(error):
            raise
        sys.exit(1)  # the connection to a rank that has said why it ends
