# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.23.0", "datasets==5.2.0", "tyro==1.0.17", "wandb==0.31.0"]
# ///
"""GRPO: several responses per prompt, compared within their group; no critic.

Zhihong Shao et al., "DeepSeekMath", arXiv 2402.03300, section 4.1. For each prompt the policy, then called
pi_old, samples k = samples_per_prompt responses with the scores r_1 ... r_k; pi_ref is --model, frozen. With
beta = kl_coef and eps = clip_eps:

    A_i   = (r_i - mean(r)) / (std(r) + 1e-4)        std divides by k - 1; 0 where all scores are equal
    rho_t = pi_theta(o_t) / pi_old(o_t)
    k3_t  = pi_ref(o_t) / pi_theta(o_t) - 1 - log(pi_ref(o_t) / pi_theta(o_t))                       (Eq. 4)
    loss  = 1/N_seq sum_i 1/T_i sum_t [beta k3_t - min(rho_t A_i, clip(rho_t, 1 - eps, 1 + eps) A_i)]    (3)

N_seq is the number of responses in one optimizer step over all ranks, T_i the length of response i with EOS.
1/T_i favours the tokens of short responses, 1/std the prompts with nearly equal scores. rloo.py subtracts the
mean of the others and divides by nothing; reinforce_pp_baseline.py divides by the std of the batch.
Left out: LoRA, sharded models, tools. The toy takes half a minute; a real model on 8 GPUs:

    python grpo.py
    OMP_NUM_THREADS=8 torchrun --nproc-per-node 8 grpo.py --model Qwen/Qwen2.5-1.5B-Instruct \
        --dataset prompts.jsonl --reward my_reward.py:score --max_response_length 1024 --batch_size 256 \
        --micro_batch_size 4 --learning_rate 1e-6 --dtype bfloat16 --gradient_checkpointing --run_dir runs/a
"""

import functools
import json
import math
import os
import runpy
import shutil
import sys
import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal
from unittest import mock

import datasets
import torch
import torch.distributed as dist
import transformers
import tyro
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint as recompute

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun
LOGS = "metrics.jsonl", "samples.jsonl"
MAX_LOGITS = 2**26  # computed at a time by token_logprobs: 256 MiB in float32


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of the run
    seed: int = 1  # for the order of the prompts, sampling and minibatches
    # cpu, cuda, mps, ...; by default the accelerator that torch finds
    device: str = str(torch.accelerator.current_accelerator(True) or "cpu")
    dtype: Literal["float32", "bfloat16"] = "float32"  # bfloat16 is autocast; weights and AdamW stay float32
    # Model and data
    model: str = "toy/policy"  # policy to start from, and frozen reference: folder or hub id of a causal LM
    dataset: str = "toy/train.jsonl"  # hub id, folder, .jsonl, .parquet with `prompt`: text or chat messages
    dataset_split: str = "train"  # split of a hub id or folder
    eval_dataset: str | None = None  # held-out prompts; column `group` splits the result; the toy has its own
    eval_split: str = "test"  # split of a hub id or folder
    # Rollout
    batch_size: int = 128  # responses per rollout, over all ranks
    max_prompt_length: int = 512  # longer prompts (in tokens) are left out
    max_response_length: int = 40  # tokens sampled at most; without EOS by then a response is truncated
    temperature: float = 1.0  # of sampling, log-probs and KL
    # Reward
    reward: str = "exact_answer"  # exact_answer (1 or 0), file.py:function, or a reward model's folder or id
    eval_reward: str | None = None  # scores the held-out responses instead of --reward
    answer_marker: str = "answer"  # exact_answer compares the text after its last occurrence with `answer`
    missing_eos_penalty: float = 0.0  # subtracted from the score of a truncated response
    reward_scale: float = 1.0  # factor of the score, after the penalty
    reward_zscore: bool = False  # normalize scores to mean 0, std 1 over the rollout of all ranks
    reward_clip: float | None = None  # c: finally clip scores to [-c, c]
    # Optimization
    num_iterations: int = 80  # rollouts, each followed by update_epochs x num_minibatches optimizer steps
    micro_batch_size: int = 64  # responses per forward pass of scoring and update, on each rank: memory only
    learning_rate: float = 2e-4  # peak learning rate of AdamW
    lr_schedule: str = "constant_with_warmup"  # or linear, cosine: transformers.get_scheduler's names
    warmup_iterations: int = 0  # the learning rate rises linearly over these
    max_grad_norm: float = 1.0  # the gradient is clipped to this norm
    gradient_checkpointing: bool = False  # recompute activations: less memory, a slower update
    # Run
    run_dir: str | None = None  # goes on with the run in it; None: a new runs/<name>__<seed>__<time>-<pid>
    eval_every: int = 40  # iterations between evaluations; also before the first and after the last; 0: none
    log_every: int = 10  # iterations between printed lines with samples; metrics.jsonl has every iteration
    save_every: int = 50  # iterations between checkpoints; the last is always saved; 0: only that
    track: bool = False  # log to Weights & Biases too; WANDB_PROJECT names the project

    # --- estimator: begin --------------------------------------------------------------------------------
    samples_per_prompt: int = 8  # k: responses per prompt, the group that a score is compared with
    min_samples_per_prompt: ClassVar[int] = 2  # a group of one has no spread
    kl_coef: float = 0.01  # beta: weight of the KL term in the loss
    clip_eps: float = 0.2  # eps: no gradient where rho > 1 + eps and A > 0, or rho < 1 - eps and A < 0
    num_minibatches: int = 2  # optimizer steps per pass over the rollout
    update_epochs: int = 1  # passes over the rollout


def compute_advantages(args, rollout):
    """{"advantages": (B, T)}: scores in units of their group's std, the same on all tokens of a response.

    Rows are prompt-major: p*k to p*k+k-1 belong to prompt p.
    """
    groups = rollout["scores"].view(-1, args.samples_per_prompt)  # (B/k, k)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    # The float32 mean of equal scores can be off by a rounding, which the small std would blow up.
    equal = groups.amax(1, keepdim=True) == groups.amin(1, keepdim=True)
    advantages = advantages.masked_fill(equal, 0.0).view(-1, 1)  # (B, 1)
    return {"advantages": (advantages * rollout["response_mask"]).detach()}


def policy_loss(args, mb, logprobs, num_sequences, num_tokens):
    """Clipped objective with a k3 penalty (Eq. 3, 4): the mean over a response's tokens, then over responses.

    logprobs (B, T) are pi_theta's, with gradient; mb has those of pi_old, ref_logprobs, advantages and masks.
    num_sequences and num_tokens count the whole optimizer step: losses of micro-batches and ranks add up.
    """
    mask, advantages = mb["response_mask"], mb["advantages"]
    ratio = (logprobs - mb["logprobs"]).masked_fill(~mask, 0.0).exp()  # (B, T)
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - args.clip_eps, 1 + args.clip_eps) * advantages
    d = (logprobs - mb["ref_logprobs"]).masked_fill(~mask, 0.0)
    k3 = (-d).exp() - 1 + d  # never negative
    token_losses = (args.kl_coef * k3 - torch.min(unclipped, clipped)).masked_fill(~mask, 0.0)
    loss = (token_losses.sum(1) / mask.sum(1)).sum() / num_sequences
    clip_fraction = (clipped < unclipped).to(ratio.dtype).sum() / num_tokens  # equal on padding
    return loss, {"policy_loss": loss.detach(), "clip_fraction": clip_fraction}


# --- estimator: end -------------------------------------------------------------------------------------


def all_sum(x):
    """The sum of x over all ranks; x itself on one rank. Every rank must call it."""
    if dist.is_initialized():
        x = x.clone()  # all_reduce works in place and returns nothing
        dist.all_reduce(x)
    return x


def generate(model, tokenizer, prompts, args, greedy=False):
    """Sample a response to each prompt, a list of ids, from softmax(logits / temperature), or greedily.

    Returns sequences and attention_mask (B, P+T), left-padded, T = max_response_length; response_mask (B, T)
    bool, true up to the first EOS and on it; logprobs, entropy (B, T), 0 on padding; truncated (B,) bool.
    Our own loop, so that no generation config can change the distribution. Each distinct prompt is read once.
    Finished rows are dropped once a quarter of the batch has finished, so that a long tail stays cheap.
    """
    device, stop_ids = model.device, torch.tensor(eos_ids(model, tokenizer), device=model.device)
    unique = list(dict.fromkeys(map(tuple, prompts)))
    copies = torch.tensor([unique.index(tuple(ids)) for ids in prompts], device=device)  # (B,) rows of unique
    cache = transformers.DynamicCache(config=model.config)
    bf16 = args.dtype == "bfloat16"
    if bf16:  # rotary embeddings are float32 and would make the cache so
        update = cache.update
        cache.update = lambda keys, values, *rest: update(keys.bfloat16(), values.bfloat16(), *rest)
    forward = functools.partial(model, past_key_values=cache, use_cache=True, logits_to_keep=1)
    # In one context autocast casts the weights once, and not for every token as in inference mode.
    no_grad = torch.no_grad() if bf16 else torch.inference_mode()
    with no_grad, torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        inputs = left_pad(unique, device)
        logits = forward(**inputs).logits[copies]  # (B, 1, V)
        cache.reorder_cache(copies)
        prompt_ids, prompt_mask, positions = (x[copies] for x in inputs.values())  # (B, P)
        mask, position = prompt_mask, positions[:, -1:]  # (b, P + t) and (b, 1)
        rows = torch.arange(len(prompts), device=device)  # (b,) those still in the batch, b <= B
        running = rows >= 0  # (b,) those of them without EOS so far, at first all
        responses = torch.zeros(len(rows), args.max_response_length, dtype=torch.long, device=device)
        logprobs, entropy = torch.zeros(2, *responses.shape, device=device)  # (B, T) each
        for t in range(args.max_response_length):
            all_logprobs = (logits[:, -1].float() / args.temperature).log_softmax(-1)  # (b, V)
            probs = all_logprobs.exp()
            # The argmax of p / Exp(1) is a draw from p: torch.multinomial without its checks.
            tokens = (probs if greedy else probs / torch.empty_like(probs).exponential_()).argmax(-1)
            responses[rows, t] = tokens  # (b,)
            logprobs[rows, t] = all_logprobs.gather(1, tokens[:, None])[:, 0]
            entropy[rows, t] = torch.special.entr(probs).sum(-1)
            running &= ~torch.isin(tokens, stop_ids)
            left = running.nonzero()[:, 0]
            if len(left) == 0 or t + 1 == args.max_response_length:
                break
            if len(left) <= 0.75 * len(rows):
                cache.reorder_cache(left)
                rows, tokens, mask, position = (x[left] for x in (rows, tokens, mask, position))
                running = running[left]
            position, mask = position + 1, torch.cat([mask, torch.ones_like(position)], dim=1)
            logits = forward(input_ids=tokens[:, None], attention_mask=mask, position_ids=position).logits

    ends = torch.isin(responses, stop_ids)
    response_mask = ends.cumsum(1) - ends.long() == 0  # up to the first EOS and on it
    sequences = torch.cat([prompt_ids, responses * response_mask], dim=1)
    attention_mask = torch.cat([prompt_mask, response_mask.long()], dim=1)
    logprobs, entropy = logprobs * response_mask, entropy * response_mask
    return sequences, attention_mask, response_mask, logprobs, entropy, ~ends.any(1)


def token_logprobs(model, sequences, attention_mask, response_length, temperature):
    """Log-probs (B, T) of the last T = response_length tokens of sequences (B, P+T), 0 on padding.

    Logits (B, T, V) would be the largest tensor of all: beyond MAX_LOGITS they are computed in pieces, and
    again in the backward pass.
    """
    decoder = model.get_decoder()
    output = decoder(**with_positions(sequences, attention_mask), use_cache=False)
    mask = attention_mask[:, -response_length:].bool()  # (B, T)
    hidden = output.last_hidden_state[:, -response_length - 1 : -1][mask]  # (N, H), before each token
    targets = sequences[:, -response_length:][mask]  # (N,)

    def head(hidden, targets):
        # The model with its decoder stubbed out: lm_head alone would miss the scaling or cap that some have.
        done = type(output)(last_hidden_state=hidden[None])
        with mock.patch.object(decoder, "forward", lambda *args, **kwargs: done):
            logits = model(input_ids=targets[None]).logits[0]  # (n, V)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]

    size = max(1, MAX_LOGITS // model.config.get_text_config().vocab_size)
    piecewise = functools.partial(recompute, head, use_reentrant=False) if len(targets) > size else head
    logprobs = torch.cat([*map(piecewise, hidden.split(size), targets.split(size))])
    return logprobs.new_zeros(mask.shape).masked_scatter(mask, logprobs)


def micro_batches(rollout, rows, size):
    """Yield (index, that part of the rollout, (sequences, attention_mask, response length)), size rows each.

    Tensors of the rollout are (B,), (B, T) or (B, P+T). Rows go by length, parts are cut to their longest.
    """
    T = rollout["response_mask"].shape[1]
    P = rollout["sequences"].shape[1] - T
    by_length = rollout["response_mask"][rows].sum(1).argsort(stable=True)
    for index in rows[by_length].split(size):
        start = int(rollout["attention_mask"][index].any(0).nonzero()[0])
        end = int(rollout["response_mask"][index].any(0).nonzero()[-1]) + 1
        cut = {T: slice(end), P + T: slice(start, P + end)}
        mb = {key: x[index] if x.dim() == 1 else x[index, cut[x.shape[1]]] for key, x in rollout.items()}
        yield index, mb, (mb["sequences"], mb["attention_mask"], end)


def optimizer_step(args, model, optimizer, loss):
    """Sum the gradients over ranks, clip, step: the same on every rank, so that their weights stay equal.

    Stops before a weight changes if loss or norm is not finite. Returns norm / WORLD_SIZE, which main sums.
    """
    if dist.is_initialized():
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        total = parameters_to_vector(gradients)  # one collective, since one for each tensor is slow
        dist.all_reduce(total)
        vector_to_parameters(total, gradients)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    check((norm + loss).isfinite(), "the loss or its gradient is not finite; use a lower --learning_rate")
    optimizer.step()
    optimizer.zero_grad()
    return norm / WORLD_SIZE


def main(args):
    # 1. Setup: the run folder, models, data, rewards, optimizer, ranks
    check_args(args)
    run_dir, flags, checkpoint = find_run(args)
    start = checkpoint["iteration"] if checkpoint else 0
    if start >= args.num_iterations and (run_dir / "model").exists():
        return say(f"{run_dir} is finished after {start} iterations: nothing to do")
    device = torch.device(args.device)
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
    policy, tokenizer = load(args, transformers.AutoModelForCausalLM, "model", args.model, device)
    check(eos_ids(policy, tokenizer), f"--model {args.model}: has no EOS token; save one in its tokenizer")
    reference = load(args, type(policy), "model", args.model, device)[0] if args.kl_coef else None
    num_prompts, local_batch = args.batch_size // args.samples_per_prompt, args.batch_size // WORLD_SIZE
    rows = load_rows(args, "dataset", args.dataset, args.dataset_split, policy, tokenizer, num_prompts)
    name = args.eval_dataset or ("toy/heldout.jsonl" if args.dataset == Args.dataset else None)
    eval_rows = load_rows(args, "eval_dataset", name, args.eval_split, policy, tokenizer) if name else []
    reward = load_reward(args, "reward", args.reward, device)
    eval_reward = load_reward(args, "eval_reward", args.eval_reward, device) if args.eval_reward else reward
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0, fused=True)
    schedule = args.lr_schedule, optimizer, args.warmup_iterations, args.num_iterations + 1
    lr_factor = transformers.get_scheduler(*schedule).lr_lambdas[0]  # a function of the iteration: no state
    state = {"policy": policy, "optimizer": optimizer}

    for name, part in state.items() if checkpoint else ():
        part.load_state_dict(checkpoint[name])
    track = start_run(args, run_dir, flags, checkpoint) if RANK == 0 else None
    checkpoint = None  # frees its memory
    if WORLD_SIZE > 1:
        dist.init_process_group()
    say(f"{policy.num_parameters():,} parameters on {WORLD_SIZE} x {device.type}, writes to {run_dir}")

    for done in range(start, args.num_iterations + 1):
        # 2. Evaluation on held-out prompts, before the first iteration and after the last too
        if eval_rows and args.eval_every and (done % args.eval_every == 0 or done == args.num_iterations):
            log(run_dir, track, done, *evaluate(args, policy, tokenizer, eval_reward, eval_rows))
        if done == args.num_iterations:
            break
        iteration, began = done + 1, time.time()
        torch.manual_seed(hash((args.seed, iteration, RANK)))  # of integers: the same in every process

        # 3. Rollout: this rank's prompts, samples_per_prompt times each, and the scores of their responses
        epoch, step = divmod(done, len(rows) // num_prompts)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(hash((args.seed, epoch))))
        order = order[step * num_prompts : (step + 1) * num_prompts].chunk(WORLD_SIZE)[RANK]
        batch = [rows[i] for i in order for _ in range(args.samples_per_prompt)]
        generated = generate(policy, tokenizer, [row["prompt_ids"] for row in batch], args)
        raw_scores = score(args, reward, tokenizer, batch, generated)  # (B,)

        # 4. Scores after penalty, scale, z-score and clip
        sequences, attention_mask, response_mask, logprobs, entropy, truncated = generated
        rollout = {"sequences": sequences, "attention_mask": attention_mask, "response_mask": response_mask}
        rollout["scores"] = process_scores(args, raw_scores, truncated)

        # 5. Log-probs of the reference; pi_old's come from sampling. kl is their difference, the k1 estimate
        ref_logprobs, all_rows = logprobs.clone(), torch.arange(local_batch, device=device)  # (B, T), (B,)
        for index, _, inputs in micro_batches(rollout, all_rows, args.micro_batch_size) if reference else ():
            with torch.no_grad():
                ref_logprobs[index, : inputs[2]] = token_logprobs(reference, *inputs, args.temperature)
        kl = logprobs - ref_logprobs  # (B, T), 0 on padding
        rollout |= {"logprobs": logprobs, "ref_logprobs": ref_logprobs, "kl": kl}

        # 6. Advantages
        rollout |= compute_advantages(args, rollout)

        # 7. Update: each minibatch is one optimizer step, its gradient summed over micro-batches and ranks
        optimizer.param_groups[0]["lr"] = args.learning_rate * lr_factor(iteration)
        stats, num_steps = defaultdict(float), args.update_epochs * args.num_minibatches

        for _ in range(args.update_epochs):
            for minibatch in torch.randperm(local_batch, device=device).chunk(args.num_minibatches):
                # Counts of the whole step: neither micro-batches nor ranks change a weight in the loss.
                num_sequences = len(minibatch) * WORLD_SIZE
                num_tokens = all_sum(response_mask[minibatch].sum())
                for _, mb, inputs in micro_batches(rollout, minibatch, args.micro_batch_size):
                    new_logprobs = token_logprobs(policy, *inputs, args.temperature)  # (b, t)
                    loss, mb_stats = policy_loss(args, mb, new_logprobs, num_sequences, num_tokens)
                    loss.backward()
                    for name, value in mb_stats.items():
                        stats[name] += value / num_steps

                norm = optimizer_step(args, policy, optimizer, stats["policy_loss"])
                stats["grad_norm"] += norm / num_steps

        # 8. Log and save
        sums = {"score": raw_scores, "truncated": truncated, "response_length": response_mask}
        sums["entropy"] = entropy
        if reference:
            sums["kl"] = kl
        metrics = {name: float(all_sum(x.sum())) / args.batch_size for name, x in sums.items()}
        metrics["entropy"] /= metrics["response_length"]  # per token; the KL is per response
        metrics |= {name: float(all_sum(x)) for name, x in stats.items()}
        metrics["learning_rate"] = optimizer.param_groups[0]["lr"]
        metrics["tokens_per_second"] = metrics["response_length"] * args.batch_size / (time.time() - began)
        due, late = iteration % args.log_every == 0, began // 60 < time.time() // 60  # a line a minute
        samples = describe(tokenizer, batch, generated, raw_scores) if due else []
        log(run_dir, track, iteration, metrics, samples[:: args.samples_per_prompt][:3], late)
        due = args.save_every and iteration % args.save_every == 0
        if RANK == 0 and (due or iteration == args.num_iterations):
            save_checkpoint(run_dir, iteration, state)

    # 9. The result, a folder that from_pretrained opens
    if RANK == 0:
        with replacing(run_dir / "model") as path:
            policy.save_pretrained(path)
            tokenizer.save_pretrained(path)
    if WORLD_SIZE > 1:
        dist.destroy_process_group()


# --- plumbing: data, rewards, evaluation, checkpoints; nothing of the algorithm stands below ---


def check(condition, message):
    """One sentence and exit code 2 if the condition is false; while a rank waits, a lower one may say it."""
    if not condition:
        time.sleep(5 * RANK)
        print("error:", " ".join(message.split()), file=sys.stderr)
        sys.exit(2)


def say(text):
    """Print, on rank 0."""
    if RANK == 0:
        print(text, flush=True)


def check_args(args):
    """Refuse numbers and sizes that do not work out, before anything is loaded."""
    positive = "batch_size max_response_length temperature reward_scale reward_clip micro_batch_size "
    positive += "max_grad_norm num_minibatches update_epochs log_every"
    for name, value in vars(args).items():
        if isinstance(value, int | float):
            fits = 0 <= value < math.inf and (value or name not in positive)
            check(fits, f"--{name} {value}: use a finite number above 0, or 0 where that turns something off")
    k, size, steps = args.samples_per_prompt, args.batch_size, args.num_minibatches
    unit, local, least = WORLD_SIZE * k, size // WORLD_SIZE, args.min_samples_per_prompt
    check(k >= least, f"--samples_per_prompt {k}: use {least} or more")
    check(size % unit == 0, f"--batch_size {size}: use a multiple of {unit}, ranks x samples_per_prompt")
    check(local % steps == 0, f"--num_minibatches {steps}: use a divisor of {local}, the responses of a rank")


def locate(name):
    """The absolute path of a file or folder here or beside the script, keeping a :function; else the name."""
    path, colon, function = name.partition(":")
    for folder in (Path("."), Path(__file__).parent):
        if (folder / path).exists():
            return f"{(folder / path).resolve()}{colon}{function}"
    check(not name.startswith("toy/"), f"no {name} beside this script; give --model, --dataset and --reward")
    return name


def load(args, auto_class, flag, name, device):
    """A model in eval mode, so without dropout, and its tokenizer. Weights are float32."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    path, where = locate(name), f"--{flag} {name}"
    with explain(where, "use a folder or a hub id of a model"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        model, info = auto_class.from_pretrained(
            path, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
    # transformers does not refuse missing weights, or a reward model as policy: it makes random weights
    kind, missing, head = str(model.config.architectures), len(info["missing_keys"]), "SequenceClassification"
    right = not missing and (head in kind) == (head in auto_class.__name__)
    check(right, f"{where}: is {kind}, {missing} weights missing; use a whole model of the right kind")
    # transformers' own checkpointing works in training mode only
    for layer in model.modules() if args.gradient_checkpointing else ():
        if isinstance(layer, transformers.modeling_layers.GradientCheckpointingLayer):
            layer.forward = functools.partial(recompute, layer.forward, use_reentrant=False)
    for part in {model, model.get_decoder()} if args.dtype == "bfloat16" else ():
        part.forward = torch.autocast(device.type, torch.bfloat16)(part.forward)
    return model.to(device).eval(), tokenizer


def eos_ids(model, tokenizer):
    """The ids that end a response: the tokenizer's EOS and those of the generation config."""
    ids = model.generation_config.eos_token_id
    return sorted({tokenizer.eos_token_id, *(ids if isinstance(ids, list) else [ids])} - {None})


def left_pad(lists, device):
    """The model's inputs (B, L) for B lists of ids, padded on the left."""
    ids = pad_sequence([torch.tensor(x) for x in lists], True, -1, "left").to(device)  # -1 on padding
    return with_positions(ids.clamp(min=0), (ids >= 0).long())


def with_positions(input_ids, attention_mask):
    """The model's inputs (B, L), with positions for which left padding does not count."""
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": positions}


def load_rows(args, flag, name, split, model, tokenizer, least=1):
    """The rows of a dataset with the token ids of their prompts as prompt_ids; too long ones are left out."""
    path, where, longest = locate(name), f"--{flag} {name}", args.max_prompt_length
    kind = {".jsonl": "json", ".parquet": "parquet"}.get(Path(path).suffix)
    source = {"path": kind, "data_files": path, "split": "train"} if kind else {"path": path, "split": split}
    with explain(where, "use a .jsonl, a .parquet, a folder or a hub id"):
        # what is local is streamed, since the cache may hold an older folder of that name
        rows = list(datasets.load_dataset(**source, streaming=Path(path).exists()))
        for number, row in enumerate(rows):
            prompt = row.get("prompt")
            is_text = isinstance(prompt, str)
            check(prompt, f"{where}: row {number} has an empty prompt, or none; fill in the column `prompt`")
            check(is_text or tokenizer.chat_template, f"{where}: has chats, --model no chat template")
            template = functools.partial(tokenizer.apply_chat_template, add_generation_prompt=True)
            row["prompt_ids"] = (tokenizer if is_text else template)(prompt)["input_ids"]
    kept = [row for row in rows if 0 < len(row["prompt_ids"]) <= longest]
    text = f"{len(kept)} of {len(rows)} prompts have 1 to --max_prompt_length {longest} tokens"
    check(len(kept) >= least, f"{where}: {text}; give {least} or more")
    say(f"{flag}: {text}")
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    total = max(len(row["prompt_ids"]) for row in kept) + args.max_response_length
    text = f"--max_response_length {args.max_response_length}: makes {total} tokens with the longest prompt"
    check(total <= limit, f"{text}, the model has {limit} positions; lower it, or --max_prompt_length")
    return kept


def exact_answer(marker, /, completions, answer=(None,), **columns):
    """1 if the text after the last marker (all of it without a marker) equals the answer, else 0."""
    check(None not in answer, "--reward exact_answer: fill in the column `answer` in all rows of the dataset")
    return [
        float(text.rpartition(marker)[2].strip() == str(right).strip())
        for text, right in zip(completions, answer)
    ]


def load_reward(args, flag, name, device):
    """The flag for error messages, and a function (prompts, completions, truncated, **columns) -> scores."""
    where, (path, _, function) = f"--{flag} {name}", locate(name).partition(":")
    if name == "exact_answer":
        return where, functools.partial(exact_answer, args.answer_marker)
    if path.endswith(".py"):
        with explain(where, "use file.py:function"):
            return where, runpy.run_path(path)[function]
    model, tokenizer = load(args, transformers.AutoModelForSequenceClassification, flag, name, device)
    outputs = model.config.num_labels
    check(outputs == 1, f"{where}: has {outputs} outputs; use a reward model, which has 1")
    model.config.get_text_config().pad_token_id = -1  # its forward then takes the last column, left-padded
    return where, functools.partial(model_scores, model, tokenizer, args.micro_batch_size)


def model_scores(model, tokenizer, size, /, prompts, completions, truncated, **columns):
    """Score text by the reward model's own template and tokenizer, with its EOS where the response ended."""
    template, eos, texts = tokenizer.apply_chat_template, tokenizer.eos_token_id, []
    for prompt, completion, cut in zip(prompts, completions, truncated):
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        ids = tokenizer(completion, add_special_tokens=False)["input_ids"]
        if not tokenizer.chat_template:
            ids = tokenizer(prompt)["input_ids"] + ids
        elif cut:
            ids = template(chat, add_generation_prompt=True)["input_ids"] + ids
        else:
            ids = template([*chat, {"role": "assistant", "content": completion}])["input_ids"]
        texts.append(ids if cut or eos in ids[-2:] else [*ids, eos])
    batches = [left_pad(texts[i : i + size], model.device) for i in range(0, len(texts), size)]
    return torch.cat([model(**batch, use_cache=False).logits[:, 0] for batch in batches]).tolist()


def decode(tokenizer, generated, **options):
    """The texts of generated responses."""
    sequences, _, mask, *_ = generated
    responses = sequences[:, -mask.shape[1] :][mask].split(mask.sum(1).tolist())
    return tokenizer.batch_decode(responses, **options)


@torch.no_grad()
def score(args, reward, tokenizer, rows, generated):
    """Scores (B,) of generated responses to the prompts of rows."""
    (where, function), truncated = reward, generated[-1]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    columns |= {"prompts": columns.pop("prompt"), "truncated": truncated.tolist()}
    columns["completions"] = decode(tokenizer, generated, skip_special_tokens=True)
    with explain(where, "fix it"):
        scores = torch.tensor(function(**columns), dtype=torch.float32, device=truncated.device)
    wrong = f"{where}: gave {list(scores.shape)} scores, not {len(rows)}, or one that is not finite; fix it"
    check(scores.shape == truncated.shape and scores.isfinite().all(), wrong)
    return scores


def process_scores(args, scores, truncated):
    """Scores (B,) after truncation penalty, scale, z-score over all ranks and clip, in this order."""
    scores = (scores - args.missing_eos_penalty * truncated) * args.reward_scale
    if args.reward_zscore:  # every rank has the same number
        scores = scores - all_sum(scores.mean()) / WORLD_SIZE
        scores = scores / (all_sum(scores.square().mean()) / WORLD_SIZE).sqrt().clamp(min=1e-4)
    return scores if args.reward_clip is None else scores.clamp(-args.reward_clip, args.reward_clip)


def describe(tokenizer, rows, generated, scores):
    """Prompts, responses with their special tokens, and scores, for samples.jsonl."""
    parts = zip(rows, decode(tokenizer, generated), scores.tolist())
    return [{"prompt": row["prompt"], "response": text, "score": score} for row, text, score in parts]


def evaluate(args, policy, tokenizer, reward, rows):
    """The mean score of each group of rows over all ranks, from greedy responses, and three samples."""
    scores, samples, groups = torch.zeros(len(rows), device=policy.device), [], defaultdict(list)
    size = args.batch_size // WORLD_SIZE
    for start in range(RANK * size, len(rows), args.batch_size):
        mine = slice(start, start + size)
        generated = generate(policy, tokenizer, [row["prompt_ids"] for row in rows[mine]], args, greedy=True)
        scores[mine] = score(args, reward, tokenizer, rows[mine], generated)
        samples += describe(tokenizer, rows[mine], generated, scores[mine])
    for row, x in zip(rows, all_sum(scores).tolist()):
        groups[f"eval/score/{row.get('group', 'all')}"].append(x)
    return {name: sum(x) / len(x) for name, x in groups.items()}, samples[:: len(samples) // 3 + 1]


@contextmanager
def explain(what, remedy):
    """Turn a library's exception, which may not name the thing, into one sentence that does."""
    try:
        yield
    except Exception as error:
        check(False, f"{what}: {error!r:.300}; {remedy}")


@contextmanager
def replacing(path):
    """Yield a temporary path that then replaces path, so that path is always whole, old or new."""
    temporary = path.with_suffix(".tmp")
    with explain(path, "make room and give the same command again"):
        yield temporary
        temporary.replace(path)


def find_run(args):
    """The run folder, its flags, and its checkpoint or None. Refuses flags that would make it another run."""
    name = f"{args.exp_name}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    run_dir = Path(args.run_dir or f"runs/{name}")
    file, path = run_dir / "args.json", run_dir / "checkpoint.pt"
    paths = "model dataset eval_dataset reward eval_reward".split()
    flags = {k: locate(v) if v and k in paths else v for k, v in vars(args).items()} | {"ranks": WORLD_SIZE}
    old = json.loads(file.read_text()) if file.exists() else flags
    free = "run_dir eval_every log_every save_every track micro_batch_size gradient_checkpointing".split()
    free += ["num_iterations"] * (args.lr_schedule == "constant_with_warmup")  # others depend on it
    changed = [f"--{k} {v}, was {old.get(k)}" for k, v in flags.items() if v != old.get(k) and k not in free]
    check(not changed, f"--run_dir {run_dir}: is another run ({changed}); use its flags or a new folder")
    with explain(path, "restore it, or delete it to start over"):
        return run_dir, flags, torch.load(path, "cpu", weights_only=True) if path.exists() else None


def start_run(args, run_dir, flags, checkpoint):
    """Make the run folder, or cut its logs back to what the checkpoint has seen."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with replacing(run_dir / "args.json") as path:
        path.write_text(json.dumps(flags, indent=2))
    shutil.copy(__file__, run_dir)
    shutil.rmtree(run_dir / "model", ignore_errors=True)  # that of fewer iterations
    for name in LOGS:
        with open(run_dir / name, "ab") as file:
            file.truncate(checkpoint["log_sizes"][name] if checkpoint else 0)
    if args.track:
        import wandb

        return wandb.init(id=run_dir.name, resume="allow", config=flags)


def log(run_dir, track, iteration, metrics, samples, late=False):
    """Add to metrics.jsonl and samples.jsonl on rank 0, and print if there are samples or it is late."""
    for path, lines in zip([run_dir / name for name in LOGS], ([metrics], samples)) if RANK == 0 else ():
        with explain(path, "make room and give the same command again"), open(path, "a") as file:
            file.writelines(json.dumps({"iteration": iteration} | line) + "\n" for line in lines)
    if track:
        track.log(metrics, step=iteration)
    if samples or late:
        few = "score kl response_length tokens_per_second".split()
        shown = [name for name in metrics if name in few or "eval/" in name]
        say(f"iteration {iteration:4d}   " + "   ".join(f"{name} {metrics[name]:.3f}" for name in shown))
    for x in samples:
        say(f"    {x['score']:5.2f}  {str(x['prompt'])[-80:]!r} -> {x['response']!r}")


def save_checkpoint(run_dir, iteration, state):
    """All that the next iteration needs; the logs, whose sizes it holds, are put on the disk first."""
    state, sizes = {name: part.state_dict() for name, part in state.items()}, {}
    for name in LOGS:
        with open(run_dir / name, "ab") as file:
            os.fsync(file)
            sizes[name] = file.tell()
    with replacing(run_dir / "checkpoint.pt") as path, open(path, "wb") as file:
        torch.save(state | {"iteration": iteration, "log_sizes": sizes}, file)
        file.flush()
        os.fsync(file)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, use_underscores=True))
