# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.23.0", "datasets==5.2.0", "tyro==1.0.17", "wandb==0.31.0"]
# ///
# variant of reinforce_pp.py
"""REINFORCE++ with process rewards: every token can have a score, so that a right step counts where it ends.

Jian Hu et al., "REINFORCE++", arXiv 2501.03262v8, Appendix D, and with a normalization within groups Zhihong
Shao et al., "DeepSeekMath", arXiv 2402.03300, section 4.1.3. The symbols are those of reinforce_pp.py. Here
the reward gives a score r_t to each token, 0 where no step ends, and the return to go is

    A_t = sum_{s>=t} (r_s - beta k1_s)                                           then normalized as there

A token is credited with the steps that end at it or later, and not with those before it. The function of
--reward also gets `tokens`, for each response a list of its tokens as texts, and returns for each response a
list of as many numbers. A number in place of a list is the score of the last token: with such a reward this
is reinforce_pp.py. `score` is the sum over a response, and --reward_clip limits the score of a token.
Train a toy model on sums such as "3 + 5 - 2 ?" (half a minute, score 0.7 to 2), or a real one on 8 GPUs:

    python variants/reinforce_pp_process.py --reward toy/steps.py:right_steps --eval_reward exact_answer
    OMP_NUM_THREADS=8 torchrun --nproc-per-node 8 variants/reinforce_pp_process.py \
        --model Qwen/Qwen2.5-1.5B-Instruct --dataset prompts.jsonl --reward my_steps.py:scores \
        --max_response_length 1024 --batch_size 1024 --micro_batch_size 4 --learning_rate 1e-6 \
        --dtype bfloat16 --gradient_checkpointing --run_dir runs/a
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
from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

import datasets
import filelock  # comes with torch
import torch
import torch.distributed as dist
import transformers
import tyro
from torch.nn.functional import pad

RANK = int(os.environ.get("RANK", 0))  # set by torchrun
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))

# A rollout is a dict of tensors with a row for each response of this rank, B = batch_size / WORLD_SIZE rows.
# P is the length of its longest prompt, T = max_response_length. A forward pass takes b of the rows.
#   sequences       (B, P+T)  token ids: the prompt, padded on the left; the response, padded on the right
#   attention_mask  (B, P+T)  1 on prompt and response, 0 on padding
#   response_mask   (B, T)    True on the tokens that the policy sampled, the EOS included
#   old_logprobs    (B, T)    log pi_old of each token, from the sampling loop
#   entropy         (B, T)    of the distribution that the token was sampled from
#   truncated       (B,)      True if the response has no EOS
#   raw_scores      (B,)      what the reward gives
#   token_scores    (B, T)    the score of each token, after penalty, scale and clip
#   scores          (B,)      the same after penalty, scale, z-score and clip
#   ref_logprobs    (B, T)    log pi_ref of each token
#   kl              (B, T)    old_logprobs - ref_logprobs
#   advantages      (B, T)    from compute_advantages
# Every (B, T) tensor is 0 where response_mask is False. Responses to one prompt are consecutive rows.


@dataclass
class Args:  # the comment behind a flag is its --help text
    exp_name: str = Path(__file__).stem  # names the folder in runs/, without --run_dir
    seed: int = 1  # of the order of prompts, of sampling and of minibatches
    device: str = str(torch.accelerator.current_accelerator(check_available=True) or "cpu")  # cuda, mps, ...
    dtype: Literal["float32", "bfloat16"] = "float32"  # bfloat16 is autocast; weights and AdamW stay float32
    # Model and data
    model: str = "toy/policy"  # starting policy and frozen reference: folder or hub id of a causal LM
    dataset: str = "toy/train.jsonl"  # .jsonl, or folder or hub id (split train); `prompt` is text or a chat
    eval_dataset: str | None = None  # held-out prompts (split test); a column `group` splits their score
    # Rollout
    batch_size: int = 128  # responses per rollout, over all ranks
    max_prompt_length: int = 512  # prompts with more tokens are left out
    max_response_length: int = 40  # most tokens of a response, 40 for the toy; then it is truncated
    temperature: float = 1.0  # of sampling, log-probs and KL
    # Reward. A function gets the lists prompts, completions, truncated, **columns; returns a list of scores
    # It also gets tokens, and may return a list of scores, one for each token, in place of a score.
    reward: str = "exact_answer"  # exact_answer (1 or 0), file.py:function, or a reward model's folder or id
    eval_reward: str | None = None  # scores the held-out responses; by default --reward
    missing_eos_penalty: float = 0.0  # subtracted from the score of a truncated response
    reward_scale: float = 1.0  # factor of the score, after the penalty; a std of the scores cancels it
    reward_zscore: bool = False  # normalize scores to mean 0 and std 1 over the rollout of all ranks
    reward_clip: float = math.inf  # c > 0: finally clip scores to [-c, c]; inf: not clipped
    # Optimization
    num_iterations: int = 80  # rollouts, each followed by update_epochs x num_minibatches optimizer steps
    micro_batch_size: int = 64  # responses per forward pass on a rank (sampling takes all): memory and speed
    learning_rate: float = 2e-4  # AdamW's at most; 2e-4 is for the toy, a real model needs about 1e-6
    warmup_iterations: int = 0  # the learning rate first rises linearly over so many
    anneal_lr: bool = False  # the learning rate falls linearly over the run, to 0 after it
    max_grad_norm: float = 1.0  # the gradient is clipped to this norm; inf: not clipped
    gradient_checkpointing: bool = False  # recompute activations: less memory, but slower
    # Run
    run_dir: str | None = None  # resume the run in this folder, or start it; None: a new folder in runs/
    eval_samples: int = 0  # sampled responses to each held-out prompt, for pass@n too; 0: one greedy response
    eval_every: int = 40  # iterations between evaluations, also before the first and after the last; 0: none
    log_every: int = 10  # iterations between samples, which are printed and logged; 0: none
    save_every: int = 50  # iterations between checkpoints; the last is always saved; 0: only the last
    track: bool = False  # log to Weights & Biases too; WANDB_PROJECT names the project

    # The method: its flags and its functions, up to `estimator: end`. Sibling scripts share the rest.
    # --- estimator: begin --------------------------------------------------------------------------------
    samples_per_prompt: int = 1  # responses per prompt; they are not compared with each other
    min_samples_per_prompt: ClassVar[int] = 1  # fewer are refused; a ClassVar is not a flag
    reward_zscore: ClassVar[bool] = False  # would give a score to tokens that end no step
    kl_coef: float = 0.01  # beta: weight of the KL penalty in the reward of every token
    clip_eps: float = 0.2  # eps: no gain from rho > 1 + eps where A > 0, or from rho < 1 - eps where A < 0
    num_minibatches: int = 2  # optimizer steps per pass over the rollout
    update_epochs: int = 1  # passes over the rollout


def whiten(x, mask):
    """x (B, T) with mean 0 and std 1 over the True entries of mask on all ranks, 0 elsewhere (Eq. 10)."""
    count = total(mask)
    centered = (x - total(x * mask) / count) * mask
    variance = total(centered.square()) / count  # E[x^2] - E[x]^2 would cancel in float32
    return centered / math.sqrt(max(variance, 1e-8))


@torch.no_grad()
def compute_advantages(args, rollout):
    """Returns {"advantages": (B, T)}: the whitened return to go of every response token (Eq. 8-10)."""
    kl_to_go = rollout["kl"].flip(1).cumsum(1).flip(1)  # (B, T): the sum over s >= t
    returns = rollout["token_scores"].flip(1).cumsum(1).flip(1) - args.kl_coef * kl_to_go
    return {"advantages": whiten(returns, rollout["response_mask"])}


def policy_loss(args, batch, logprobs, num_sequences, num_tokens):
    """Clipped objective (Eq. 1): the mean over tokens.

    logprobs (b, T) are pi_theta's, with gradient. num_sequences and num_tokens count the whole optimizer
    step, so that the losses of its micro-batches and ranks add up.
    """
    advantages = batch["advantages"]
    ratio = (logprobs - batch["old_logprobs"]).exp()  # rho, (b, T)
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - args.clip_eps, 1 + args.clip_eps) * advantages
    loss = -torch.min(unclipped, clipped).sum() / num_tokens

    clip_fraction = (clipped < unclipped).sum() / num_tokens
    return loss, {"policy_loss": loss.detach(), "clip_fraction": clip_fraction}


# --- estimator: end -------------------------------------------------------------------------------------


def all_sum(x):
    """Sum the tensor x over all ranks, in place, and return it. Every rank must call it."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def total(x):
    """The sum of all elements of x on all ranks, as a number."""
    return float(all_sum(x.sum()))


def mean(x):
    """The mean over the rows of x (B, ...) on all ranks; a row of several elements counts with its sum."""
    return total(x) / (len(x) * WORLD_SIZE)


def eos_ids(model, tokenizer):
    """The token ids that end a response: the tokenizer's EOS and those of the generation config."""
    configured = model.generation_config.eos_token_id  # an id, a list of ids, or None
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({tokenizer.eos_token_id, *ids} - {None})


def left_pad(id_lists, device):
    """Token ids and attention mask (B, P) of lists of token ids, padded on the left."""
    padded = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(ids) for ids in id_lists], batch_first=True, padding_value=-1, padding_side="left"
    ).to(device)
    return padded.clamp(min=0), (padded >= 0).long()


def model_inputs(input_ids, attention_mask):
    """The arguments of a forward pass over input_ids (b, n), the last n tokens of the attention mask."""
    # Padding on the left does not count in the positions.
    position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
    return {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}


def log_distribution(logits, temperature):
    """Log-probs (..., V) of the next token, the same for sampling and for the loss."""
    # In float32 or more. One expression, so that no float32 copy of the logits stays in memory.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return logits.log_softmax(-1)


class Cache(transformers.DynamicCache):
    """Keeps keys in the dtype of values. Under autocast they would be float32, and take twice the memory."""

    def update(self, keys, values, *others):
        return super().update(keys.to(values.dtype), values, *others)


@torch.no_grad()
def generate(args, model, tokenizer, prompts, samples_per_prompt=1, greedy=False):
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
    B = len(prompts) * samples_per_prompt
    all_rows = torch.arange(B, device=device)
    prompt_index = all_rows // samples_per_prompt  # (B,) the prompt of each row
    sequences = pad(prompt_ids[prompt_index], (0, T))  # (B, P+T), with room for the response
    attention_mask = pad(prompt_mask[prompt_index], (0, T))
    old_logprobs = torch.zeros(B, T, device=device)
    entropy = torch.zeros_like(old_logprobs)
    active = all_rows  # (b,) the rows without an EOS so far
    inputs = model_inputs(prompt_ids, prompt_mask)
    cache = Cache(config=model.config)
    with autocast(args):  # around the loop, so that the weights are cast once
        for t in range(T):
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
                cache.reorder_cache(unfinished)
            if len(active) == 0:
                break
            inputs = model_inputs(tokens, attention_mask[active, : P + t + 1])

    return {
        "sequences": sequences,
        "attention_mask": attention_mask,
        "response_mask": attention_mask[:, P:].bool(),
        "old_logprobs": old_logprobs,
        "entropy": entropy,
        "truncated": torch.isin(all_rows, active),  # still without an EOS
    }


def token_logprobs(args, model, batch):
    """Log-probs (b, T) of the response tokens at the sampling temperature, 0 where response_mask is False."""
    T = batch["response_mask"].shape[1]
    inputs = model_inputs(batch["sequences"], batch["attention_mask"])
    # The logits at a position are those of the next token, so the last ones are not needed.
    logits = model(**inputs, use_cache=False, logits_to_keep=T + 1).logits[:, :-1]  # (b, T, V)
    tokens = batch["sequences"][:, -T:].unsqueeze(2)  # (b, T, 1)
    logprobs = log_distribution(logits, args.temperature).gather(2, tokens).squeeze(2)
    return logprobs.masked_fill(~batch["response_mask"], 0.0)


def micro_batches(rollout, indices, size):
    """Yield parts of up to `size` rows of similar lengths, and their tensors, cut to the longest of them."""
    lengths = rollout["response_mask"][indices].sum(1)
    for part in indices[lengths.argsort(stable=True)].split(size):
        batch = {name: tensor[part] for name, tensor in rollout.items()}
        is_used = batch["attention_mask"].any(0)  # (P+T,) the columns that are not all padding
        for name, tensor in batch.items():
            if tensor.dim() == 2:  # a (b, T) tensor matches the last T of the P+T columns
                batch[name] = tensor[:, is_used[-tensor.shape[1] :]]
        yield part, batch


@torch.no_grad()
def rollout_logprobs(args, model, rollout):
    """Log-probs (B, T) of the response tokens of a whole rollout."""
    result = torch.zeros_like(rollout["old_logprobs"])
    all_rows = torch.arange(len(result), device=result.device)
    for part, batch in micro_batches(rollout, all_rows, args.micro_batch_size):
        with autocast(args):
            logprobs = token_logprobs(args, model, batch)  # (b, T) with the T of the micro-batch
        result[part, : logprobs.shape[1]] = logprobs
    return result


def process_scores(args, scores, truncated):
    """Scores (B,) after truncation penalty, scale, z-score over all ranks and clip, in this order."""
    scores = (scores - args.missing_eos_penalty * truncated) * args.reward_scale
    if args.reward_zscore:
        scores -= mean(scores)
        scores /= max(math.sqrt(mean(scores.square())), 1e-4)  # their std
    return scores.clamp(-args.reward_clip, args.reward_clip)


def optimizer_step(args, model, optimizer, learning_rate):
    """Sum the gradients over ranks, clip their norm, and step. Returns the norm before clipping."""
    # DistributedDataParallel would average them, but the loss is already divided by counts over all ranks.
    for parameter in model.parameters():
        if parameter.grad is not None:  # None on every rank: a weight that nothing uses
            all_sum(parameter.grad)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    check(norm.isfinite(), "the loss or its gradient is not finite; use a lower learning rate")
    optimizer.param_groups[0]["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad()
    return norm


def main(args):
    # 1. Setup: ranks, models, data, rewards, optimizer, run folder
    check_args(args)
    start_ranks(args)
    # Models are in eval mode: with dropout, training would see other log-probs than sampling.
    policy, tokenizer = load_model(args, args.model, transformers.AutoModelForCausalLM)
    reference = copy.deepcopy(policy) if args.kl_coef else None  # before a checkpoint is loaded

    k = args.samples_per_prompt
    num_prompts = args.batch_size // k
    dataset = load_rows(args, args.dataset, "train", policy, tokenizer, num_prompts)
    eval_dataset = []
    if args.eval_dataset and args.eval_every:
        eval_dataset = load_rows(args, args.eval_dataset, "test", policy, tokenizer)
    reward = load_reward(args, args.reward)
    eval_reward = load_reward(args, args.eval_reward) if args.eval_reward else reward
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0, fused=True)  # lr is set in step 7
    state = {"policy": policy, "optimizer": optimizer}  # what a checkpoint holds
    run_dir, start = open_run(args, state, dataset)  # `start` counts the finished iterations
    say(f"{policy.num_parameters():,} parameters on {WORLD_SIZE} x {args.device}, writes to {run_dir}")

    # 2. Evaluation on held-out prompts, before the first iteration; the later evaluations are in step 9
    if eval_dataset and start == 0:
        log(args, run_dir, 0, evaluate(args, policy, tokenizer, eval_reward, eval_dataset))

    for iteration in range(start + 1, args.num_iterations + 1):
        began = time.perf_counter()
        # A seed for each iteration and rank: a resumed run draws the same numbers as an uninterrupted one.
        torch.manual_seed(1_000_000 * args.seed + iteration * WORLD_SIZE + RANK)

        # 3. Rollout: k responses to each of this rank's prompts, and what the reward gives
        prompt_rows = choose_rows(args, dataset, num_prompts, iteration)
        rollout = generate(args, policy, tokenizer, [row["prompt_ids"] for row in prompt_rows], k)
        sampling_seconds = time.perf_counter() - began
        rows = [row for row in prompt_rows for _ in range(k)]  # of each response
        rollout["raw_scores"] = score(reward, tokenizer, rows, rollout)  # (B,)

        # 4. Scores after penalty, scale, z-score and clip
        rollout["scores"] = process_scores(args, rollout["raw_scores"], rollout["truncated"])

        # The same for each token. A truncated response has T tokens; the penalty is at the last.
        is_penalized = pad(rollout["truncated"][:, None], (args.max_response_length - 1, 0))  # (B, T)
        rollout["token_scores"] = process_scores(args, rollout["token_scores"], is_penalized)

        # 5. Log-probs of the reference, and log(pi_old / pi_ref) as kl
        rollout["ref_logprobs"] = rollout["old_logprobs"]  # a placeholder: --kl_coef 0 multiplies it by 0
        if reference:
            rollout["ref_logprobs"] = rollout_logprobs(args, reference, rollout)
        rollout["kl"] = rollout["old_logprobs"] - rollout["ref_logprobs"]  # (B, T); some only log it

        # 6. Advantages
        rollout |= compute_advantages(args, rollout)

        # 7. Update: each minibatch is one optimizer step, its gradient summed over micro-batches and ranks
        rise = iteration / max(1, args.warmup_iterations)
        fall = 1 - args.anneal_lr * (iteration - 1) / args.num_iterations
        learning_rate = args.learning_rate * min(rise, fall)
        stats = Counter()  # sums over this rank's micro-batches
        grad_norms = []  # one for each optimizer step
        difference = 0.0  # between the log-probs of sampling and of training: should be near 0
        for _ in range(args.update_epochs):
            for minibatch in torch.randperm(len(rows)).to(args.device).chunk(args.num_minibatches):
                # Counts of the whole step: the loss does not depend on micro-batches and ranks.
                num_sequences = len(minibatch) * WORLD_SIZE
                num_tokens = total(rollout["response_mask"][minibatch])
                for _, batch in micro_batches(rollout, minibatch, args.micro_batch_size):
                    with autocast(args):
                        logprobs = token_logprobs(args, policy, batch)  # (b, T), with gradient
                    if not grad_norms:  # the first step, in which pi_theta is still pi_old
                        difference += (logprobs.detach() - batch["old_logprobs"]).abs().sum() / num_tokens
                    loss, batch_stats = policy_loss(args, batch, logprobs, num_sequences, num_tokens)
                    loss.backward()
                    stats.update(batch_stats)  # adds them
                grad_norms.append(optimizer_step(args, policy, optimizer, learning_rate))

        # 8. Metrics, over all ranks
        response_tokens = total(rollout["response_mask"])
        metrics = {
            "score": mean(rollout["raw_scores"]),
            "truncated": mean(rollout["truncated"]),
            "response_length": response_tokens / args.batch_size,
            "entropy": total(rollout["entropy"]) / response_tokens,  # mean per token
            "logprob_difference": total(difference),  # mean per token
            "grad_norm": float(sum(grad_norms)) / len(grad_norms),
            "learning_rate": learning_rate,
            "tokens_per_second": response_tokens / (time.perf_counter() - began),
            "sampling_seconds": sampling_seconds,
        }
        if reference:
            metrics["kl"] = mean(rollout["kl"])  # sum over a response
        if k > 1:
            groups = rollout["raw_scores"].view(-1, k)
            metrics["equal_groups"] = mean(groups.amax(1) == groups.amin(1))  # groups of one score
        for name, value in stats.items():
            metrics[name] = total(value) / len(grad_norms)  # per optimizer step

        # 9. Evaluate, log and save
        is_last = iteration == args.num_iterations
        if eval_dataset and (is_last or iteration % args.eval_every == 0):
            metrics |= evaluate(args, policy, tokenizer, eval_reward, eval_dataset)
        log(args, run_dir, iteration, metrics)
        if args.log_every and iteration % args.log_every == 0:
            log_samples(run_dir, iteration, tokenizer, rows, rollout)
        if is_last or (args.save_every and iteration % args.save_every == 0):
            save_checkpoint(run_dir, iteration, state)

    # 10. The result, a folder that from_pretrained opens
    if RANK == 0:
        policy.save_pretrained(f"{run_dir}/model")
        tokenizer.save_pretrained(f"{run_dir}/model")
    if dist.is_initialized():
        dist.destroy_process_group()


# --- plumbing: models, data, rewards, evaluation, checkpoints; nothing of the algorithm stands below ---


def say(text):
    """Print, on rank 0."""
    if RANK == 0:
        print(text, flush=True)


def check(condition, message):
    """If the condition is false, print the message and exit with code 2."""
    if not condition:
        time.sleep(10 * RANK)  # rank 0 prints first; torchrun then stops the others
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)


def check_args(args):
    """Refuse what cannot work before anything is loaded, and give the toy its held-out prompts."""
    k = args.samples_per_prompt
    check(k >= args.min_samples_per_prompt, f"--samples_per_prompt {k}: use >= {args.min_samples_per_prompt}")
    unit = WORLD_SIZE * math.lcm(k, args.num_minibatches)  # ranks, groups and minibatches divide it
    check(args.batch_size % unit == 0, f"--batch_size {args.batch_size}: use a multiple of {unit}")
    check(args.temperature > 0, f"--temperature {args.temperature}: use more than 0; evaluation is greedy")
    check(args.max_grad_norm > 0, f"--max_grad_norm {args.max_grad_norm}: use inf for no clipping")
    if args.dataset == Args.dataset:
        args.eval_dataset = args.eval_dataset or "toy/heldout.jsonl"


def start_ranks(args):
    """Choose the device of this rank, and connect the ranks if there are several."""
    # In bfloat16, attention on mps sees later tokens (pytorch issue 195910).
    check(f"{torch.device(args.device).type} {args.dtype}" != "mps bfloat16", "on mps use --dtype float32")
    # cuDNN's bfloat16 attention gave NaN and wrong results on H100 and B200 (pytorch issues 196678, 193893).
    torch.backends.cuda.enable_cudnn_sdp(False)
    if WORLD_SIZE > 1:
        backend = "gloo"
        if args.device != "cpu":
            backend = None  # the device's own, such as NCCL
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))  # set by torchrun
        dist.init_process_group(backend, timeout=timedelta(hours=2))  # all wait for the slowest reward


def autocast(args):
    """Computes in bfloat16 with --dtype bfloat16. The weights stay float32."""
    return torch.autocast(torch.device(args.device).type, torch.bfloat16, enabled=args.dtype == "bfloat16")


def load_model(args, name, auto_class):
    """A model with float32 weights, in eval mode as all that transformers loads, and its tokenizer."""
    try:
        # Without trust_remote_code=False, transformers would ask on stdin whether to run code of the model.
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        model, info = auto_class.from_pretrained(
            name, trust_remote_code=False, use_safetensors=True, dtype=torch.float32, output_loading_info=True
        )
    except OSError as error:
        check(False, f"model {name}: use a folder (toy/ is in the repository) or a hub id; {error!r:.200}")
    # transformers makes up missing weights, such as the head (score) of a policy given as a reward model.
    check(
        not info["missing_keys"] and "score.weight" not in info["unexpected_keys"],
        f"{name}: use a policy as --model, a reward model as --reward; {info!r:.200}",
    )
    check(tokenizer.eos_token, f"{name}: has no EOS token; save one in its tokenizer")
    if args.gradient_checkpointing:
        # transformers' own checkpointing works in train mode only, which would switch dropout on.
        checkpoint = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False, preserve_rng_state=False)
        for layer in model.modules():
            if isinstance(layer, transformers.modeling_layers.GradientCheckpointingLayer):
                layer.forward = partial(checkpoint, layer.forward)
    return model.to(args.device), tokenizer


def token_ids(tokenizer, prompt):
    """The token ids of a prompt: text as it is, chat messages through the tokenizer's template."""
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
        if ids[-1:] == [tokenizer.eos_token_id]:  # some tokenizers append it; the model would start anew
            ids.pop()
        return ids
    check(
        tokenizer.chat_template and all(isinstance(x.get("content"), str) for x in prompt),
        f"chat {prompt}: needs a --model with a chat template, and content in each message",
    )
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]


def load_rows(args, name, split, policy, tokenizer, min_rows=1):
    """The rows of a dataset, with the token ids of each prompt as prompt_ids. Long prompts are left out."""
    if name.endswith(".jsonl"):
        rows = json.loads(f"[{','.join(open(name))}]")  # as one list, so that an error names the line
    else:
        # Local data is streamed, since the cache of `datasets` may hold an older version of it.
        rows = list(datasets.load_dataset(name, split=split, streaming=Path(name).exists()))
    flag = f"--{'dataset' if split == 'train' else 'eval_dataset'} {name}"
    for number, row in enumerate(rows):
        check(row.get("prompt"), f"{flag}: row {number} has no `prompt`, or an empty one; fill it in")
        row["prompt_ids"] = token_ids(tokenizer, row["prompt"])
    kept = [row for row in rows if 1 <= len(row["prompt_ids"]) <= args.max_prompt_length]
    summary = f"{flag}: {len(kept)} of {len(rows)} prompts have 1 to {args.max_prompt_length} tokens"
    check(len(kept) >= min_rows, f"{summary}; give {min_rows} or more, or lower --batch_size")
    say(summary)
    needed = max(len(row["prompt_ids"]) for row in kept) + args.max_response_length
    limit = getattr(policy.config, "max_position_embeddings", needed)
    check(needed <= limit, f"--max_response_length: {needed} tokens with a prompt, the model takes {limit}")
    return kept


def choose_rows(args, dataset, num_prompts, iteration):
    """This rank's rows for an iteration. Each epoch shuffles anew, and drops an incomplete last batch."""
    epoch, batch_number = divmod(iteration - 1, len(dataset) // num_prompts)
    generator = torch.Generator().manual_seed(1_000_000 * args.seed + epoch)
    chosen = torch.randperm(len(dataset), generator=generator).split(num_prompts)[batch_number]
    return [dataset[i] for i in chosen.chunk(WORLD_SIZE)[RANK]]


def exact_answer(completions, answer, **columns):
    """A reward: 1 if the text after the last "answer" (all of it without one) equals the column `answer`."""
    return [
        float(text.rpartition("answer")[2].strip() == str(right)) for text, right in zip(completions, answer)
    ]


def load_reward(args, name):
    """A function of the lists prompts, completions, truncated and other columns: a score per completion."""
    if name == "exact_answer":
        return exact_answer
    if ".py:" in name:
        file, function = name.split(":")
        return runpy.run_path(file)[function]
    model, tokenizer = load_model(args, name, transformers.AutoModelForSequenceClassification)

    def text_ids(prompt, completion, is_truncated):
        """What the model reads. The turn of a truncated response stays open, others end with EOS."""
        if isinstance(prompt, str) or is_truncated:
            ids = token_ids(tokenizer, prompt) + tokenizer(completion, add_special_tokens=False)["input_ids"]
        else:
            chat = [*prompt, {"role": "assistant", "content": completion}]
            ids = tokenizer.apply_chat_template(chat)["input_ids"]  # may end with EOS, or EOS and a newline
        if not is_truncated and tokenizer.eos_token_id not in ids[-2:]:
            ids += [tokenizer.eos_token_id]
        return ids

    @torch.no_grad()
    def reward(prompts, completions, truncated, **columns):
        id_lists = list(map(text_ids, prompts, completions, truncated))
        scores = []
        for i in range(0, len(id_lists), args.micro_batch_size):
            inputs = model_inputs(*left_pad(id_lists[i : i + args.micro_batch_size], args.device))
            with autocast(args):
                hidden_states = model.base_model(**inputs, use_cache=False).last_hidden_state
            # model() scores the last token that is not padding, and takes an EOS that equals pad for it.
            scores += model.score(hidden_states[:, -1].float()).squeeze(1).tolist()
        return scores

    return reward


def response_ids(rollout):
    """The token ids of each response, without padding."""
    return [ids[-len(mask) :][mask] for ids, mask in zip(rollout["sequences"], rollout["response_mask"])]


def score(reward, tokenizer, rows, rollout):
    """Scores (B,) of the responses in a rollout; rows has the row of the dataset behind each of them."""
    check(
        reward is not exact_answer or all(isinstance(x.get("answer"), str | int) for x in rows),
        "--reward exact_answer: each row needs an `answer`, a text or an integer",
    )
    # Copies, so that a reward cannot change the dataset
    columns = {name: copy.deepcopy([row.get(name) for row in rows]) for name in set().union(*rows)}
    scores = reward(
        prompts=columns.pop("prompt"),
        completions=tokenizer.batch_decode(response_ids(rollout), skip_special_tokens=True),
        tokens=[tokenizer.batch_decode(ids[:, None]) for ids in response_ids(rollout)],
        truncated=rollout["truncated"].tolist(),
        **columns,
    )

    # The reward gives for each response a number, or a list with one for each token.
    rollout["token_scores"] = torch.zeros_like(rollout["old_logprobs"])
    for row, ids, x in zip(rollout["token_scores"], response_ids(rollout), scores):
        row_scores = x if isinstance(x, list) else [0.0] * (len(ids) - 1) + [x]
        check(len(row_scores) == len(ids), "--reward: give a score for each token, or one for the response")
        row[: len(ids)] = row.new_tensor(row_scores)
    scores = [sum(x) if isinstance(x, list) else x for x in scores]

    scores = rollout["old_logprobs"].new_tensor(scores)  # of this dtype, on this device
    is_valid = scores.shape == rollout["truncated"].shape and scores.isfinite().all()
    check(is_valid, f"--reward or --eval_reward: return {len(rows)} finite scores, one for each completion")
    return scores


def evaluate(args, policy, tokenizer, reward, dataset):
    """The mean score over all ranks, for each `group`; of n samples also pass@n, the mean of the best."""
    n = args.eval_samples or 1
    all_rows = dataset * n  # of each response
    scores = torch.zeros(len(all_rows), device=args.device)
    size = args.batch_size // WORLD_SIZE  # as many rows as in a rollout, each with another prompt
    for first in range(RANK * size, len(all_rows), WORLD_SIZE * size):
        rows = all_rows[first : first + size]
        torch.manual_seed(args.seed + first)  # main seeds each iteration, so training does not depend on it
        rollout = generate(
            args, policy, tokenizer, [row["prompt_ids"] for row in rows], greedy=not args.eval_samples
        )
        scores[first : first + size] = score(reward, tokenizer, rows, rollout)
    groups = defaultdict(list)
    for row, row_scores in zip(dataset, all_sum(scores).view(n, -1).T.tolist()):
        groups[f"eval/score/{row.get('group', 'all')}"] += row_scores
        if n > 1:
            groups[f"eval/pass@{n}/{row.get('group', 'all')}"].append(max(row_scores))
    return {name: sum(x) / len(x) for name, x in groups.items()}


def open_run(args, state, dataset):
    """Start a run in its folder, or resume it. Returns the folder, and how many iterations are finished."""
    run_dir = Path(args.run_dir or f"runs/{args.exp_name}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}")
    flags = vars(args) | {"ranks": WORLD_SIZE, "script": Args.exp_name}
    path = run_dir / "args.json"
    if path.exists():
        old = json.loads(path.read_text())
        may_change = {"run_dir", "eval_every", "log_every", "save_every", "track"}
        may_change |= {"micro_batch_size", "gradient_checkpointing"}  # memory and speed only
        if not args.anneal_lr:
            may_change.add("num_iterations")
        changed = {name for name in flags if flags[name] != old.get(name)} - may_change
        check(not changed, f"--run_dir {run_dir}: is a run of other {', '.join(changed)}; use a new folder")
    else:
        check(not any(run_dir.glob("*")), f"--run_dir {run_dir}: has files, but no args.json; use a new one")
    start = 0
    if Path(f"{run_dir}/checkpoint.pt").exists():
        checkpoint = torch.load(f"{run_dir}/checkpoint.pt", "cpu", weights_only=True, mmap=True)
        for name, part in state.items():
            part.load_state_dict(checkpoint[name])
        start = checkpoint["iteration"]
    weights = [weight.sum().item() for weight in state["policy"].parameters()]
    checksum = zlib.crc32(repr((args, dataset, start, weights)).encode())
    check(
        total(torch.tensor(checksum, device=args.device)) == checksum * WORLD_SIZE,
        "the ranks differ in flags, rows, checkpoint or weights; start all with the same",
    )

    if RANK == 0:
        lock = filelock.FileLock(f"{run_dir}/lock", is_singleton=True)
        lock.acquire(blocking=False)  # makes the folder; fails if another process trains there
        atexit.register(lock.release)  # keeps the object, and so the lock, until the end
        if start == 0:
            shutil.copy(__file__, run_dir)
            path.write_text(json.dumps(flags))
        for name in ("metrics", "samples"):
            with open(f"{run_dir}/{name}.jsonl", "ab+") as file:
                file.seek(0)
                # Later iterations will be logged again, so cut them off, and a line torn by a kill.
                kept = [x for x in file if start and b"\n" in x and json.loads(x)["iteration"] <= start]
                file.truncate(len(b"".join(kept)))
    return run_dir, start


def append(path, record):
    """On rank 0, add a line to a log, and wait until it is on the disk."""
    if RANK == 0:
        with open(path, "a") as file:
            print(json.dumps(record), file=file, flush=True)
            os.fsync(file)


def log(args, run_dir, iteration, metrics):
    """Print the main metrics. Rank 0 adds all to metrics.jsonl and Weights & Biases."""
    shown = [x for x in metrics if x.startswith(("score", "eval", "kl", "equal", "logprob", "tokens"))]
    say(f"iteration {iteration:4}{''.join(f'   {name} {metrics[name]:.3f}' for name in shown)}")
    append(f"{run_dir}/metrics.jsonl", {"iteration": iteration} | metrics)
    if args.track and RANK == 0:
        import wandb

        if not wandb.run:
            wandb.init(name=run_dir.name, config=vars(args))
        wandb.log(metrics, step=iteration)


def log_samples(run_dir, iteration, tokenizer, rows, rollout):
    """Print and log the first three responses, with their scores."""
    responses = tokenizer.batch_decode(response_ids(rollout)[:3])
    for row, response, raw_score in zip(rows, responses, rollout["raw_scores"].tolist()):
        say(f"    {raw_score:5.2f}  {str(row['prompt'])[-80:]!r} -> {response!r}")
        sample = {"iteration": iteration, "prompt": row["prompt"], "response": response, "score": raw_score}
        append(f"{run_dir}/samples.jsonl", sample)


def save_checkpoint(run_dir, iteration, state):
    """Rank 0 saves all that the next iteration needs. The old file stays until the new one is complete."""
    if RANK == 0:
        checkpoint = {name: part.state_dict() for name, part in state.items()}
        with open(f"{run_dir}/checkpoint.tmp", "wb") as file:
            torch.save(checkpoint | {"iteration": iteration}, file)
            file.flush()
            os.fsync(file)
        os.replace(f"{run_dir}/checkpoint.tmp", f"{run_dir}/checkpoint.pt")


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__, use_underscores=True)
    try:
        main(args)
    except SystemExit as end:
        sys.exit(end.code or "error: a file of yours called sys.exit; let its functions return, or raise")
