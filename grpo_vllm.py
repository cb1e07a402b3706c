# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers<5.20", "datasets==5.2.0", "tyro==1.0.17", "wandb==0.31.0",
#                 "vllm==0.32.0"]  # needs transformers < 5.20
# ///
# variant of grpo.py
"""GRPO with vLLM: its engine samples in the same process, and receives the new weights after each update.

Woosuk Kwon et al., "PagedAttention", arXiv 2309.06180. vLLM has its own kernels, so its probabilities are not
exactly pi_theta's. The responses come from vLLM, so pi_old is its distribution, and the ratio corrects for
the difference, except where it is clipped:

    pi_old(o_t) = softmax(z_t / temperature)[o_t]         z_t: the logits that vLLM computes
    rho_t       = pi_theta(o_t) / pi_old(o_t)             near 1 before the update

The rest is grpo.py: the equations are there, and `diff grpo.py grpo_vllm.py` shows vLLM. In the first
iteration pi_theta is pi_ref, so kl shows how far vLLM's log-probs are from the training model's (if --kl_coef
is above 0). vLLM does not return the entropy: the metric is its estimate from the sampled tokens.

Each rank has an engine with all weights. On a CPU vLLM needs a head_dim of at least 32; the toy's is 16. Left
out: an engine over several GPUs, and freeing its memory during the update. A small model on a CPU, made by
data/smollm2.py and data/reversal.py, and a larger one on 8 GPUs; no GPU was tried yet:

    python grpo_vllm.py --model data/smollm2 --dataset data/reversal/train.jsonl --batch_size 32 \
        --reward data/reversal.py:score --max_response_length 16 --learning_rate 1e-5
    OMP_NUM_THREADS=8 torchrun --nproc-per-node 8 grpo_vllm.py --model Qwen/Qwen2.5-1.5B-Instruct \
        --dataset prompts.jsonl --reward my_reward.py:score --max_response_length 1024 --batch_size 256 \
        --micro_batch_size 4 --learning_rate 1e-6 --dtype bfloat16 --gradient_checkpointing \
        --kv_cache_gib 8 --run_dir runs/a
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
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import datasets
import torch
import torch.distributed as dist
import torch.distributed.nn  # imported after init_process_group, it would keep the process group alive
import transformers
import tyro
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint as checkpoint_activations

RANK = int(os.environ.get("RANK", 0))  # set by torchrun
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
LOGS = ("metrics.jsonl", "samples.jsonl")
# Shapes: B responses on this rank, b of them in a forward pass, P tokens of the longest prompt,
# T = max_response_length (or less, once a micro-batch is cut), V tokens in the vocabulary.


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of the run
    seed: int = 1  # of the order of prompts, of sampling and of minibatches
    device: str = str(torch.accelerator.current_accelerator(check_available=True) or "cpu")  # cuda, mps, ...
    dtype: Literal["float32", "bfloat16"] = "float32"  # of vLLM and autocast; the trained weights are float32
    # Model and data
    model: str = "toy/policy"  # starting policy and frozen reference: folder or hub id of a causal LM
    dataset: str = "toy/train.jsonl"  # .jsonl, .parquet, folder or hub id; `prompt` is text or chat messages
    dataset_split: str = "train"  # split of a hub id or folder
    eval_dataset: str | None = None  # held-out prompts, logged by their column `group`; the toy has its own
    eval_split: str = "test"  # split of a hub id or folder
    # Rollout
    batch_size: int = 128  # responses per rollout, over all ranks
    max_prompt_length: int = 512  # prompts with more tokens are left out
    max_response_length: int = 40  # tokens of a response at most; one without EOS by then is truncated
    temperature: float = 1.0  # of sampling, log-probs and KL
    kv_cache_gib: float = 1.0  # vLLM's keys and values on each rank; sequences that do not fit wait
    # Reward. A function is called with the lists prompts=, completions=, truncated= and one of each column
    reward: str = "exact_answer"  # exact_answer (1 or 0), file.py:function, or a reward model's folder or id
    eval_reward: str | None = None  # scores the held-out responses instead of --reward
    answer_marker: str = "answer"  # exact_answer compares the text after the last marker with column `answer`
    missing_eos_penalty: float = 0.0  # subtracted from the score of a truncated response
    reward_scale: float = 1.0  # factor of the score, after the penalty
    reward_zscore: bool = False  # normalize scores to mean 0 and std 1 over the rollout of all ranks
    reward_clip: float | None = None  # c: finally clip scores to [-c, c]
    # Optimization
    num_iterations: int = 80  # rollouts, each followed by update_epochs x num_minibatches optimizer steps
    micro_batch_size: int = 64  # responses per forward pass of scoring and update, on each rank: memory only
    learning_rate: float = 2e-4  # peak learning rate of AdamW
    lr_schedule: str = "constant_with_warmup"  # or linear, cosine, ...: names of transformers.get_scheduler
    warmup_iterations: int = 0  # the learning rate rises linearly from 0 over these
    max_grad_norm: float = 1.0  # the gradient is clipped to this norm
    gradient_checkpointing: bool = False  # recompute activations: less memory, a slower update
    # Run
    run_dir: str | None = None  # resume the run in this folder, or start it; None: a new folder in runs/
    eval_every: int = 40  # iterations between evaluations, also before the first and after the last; 0: none
    log_every: int = 10  # iterations between printed samples; metrics.jsonl has every iteration
    save_every: int = 50  # iterations between checkpoints; the last is always saved; 0: only the last
    track: bool = False  # log to Weights & Biases too; WANDB_PROJECT names the project

    # --- estimator: begin --------------------------------------------------------------------------------
    samples_per_prompt: int = 8  # k: responses per prompt, the group that a score is compared with
    min_samples_per_prompt: ClassVar[int] = 2  # not a flag: fewer are refused
    kl_coef: float = 0.01  # beta: weight of the KL term in the loss
    clip_eps: float = 0.2  # eps: no gradient where rho > 1 + eps and A > 0, or rho < 1 - eps and A < 0
    num_minibatches: int = 2  # optimizer steps per pass over the rollout
    update_epochs: int = 1  # passes over the rollout


@torch.no_grad()
def compute_advantages(args, rollout):
    """Returns {"advantages": (B, T)}: each score minus its group's mean, divided by the group's std."""
    groups = rollout["scores"].view(-1, args.samples_per_prompt)  # (prompts, k)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    # The mean of equal scores can be off by a rounding error, which the division would blow up.
    all_equal = (groups == groups[:, :1]).all(1, keepdim=True)  # (prompts, 1)
    advantages = advantages.masked_fill(all_equal, 0.0).view(-1, 1)  # (B, 1)
    return {"advantages": advantages * rollout["response_mask"]}


def policy_loss(args, batch, logprobs, num_sequences, num_tokens):
    """Clipped objective with a k3 penalty (Eq. 3, 4): the mean over a response's tokens, then over responses.

    logprobs (B, T) are pi_theta's, with gradient. num_sequences and num_tokens count the whole optimizer
    step, so that the losses of its micro-batches and ranks add up.
    """
    mask = batch["response_mask"]  # padding is masked below, whatever the tensors hold there
    advantages = batch["advantages"]

    ratio = (logprobs - batch["old_logprobs"]).masked_fill(~mask, 0.0).exp()  # rho, (B, T)
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - args.clip_eps, 1 + args.clip_eps) * advantages
    token_losses = -torch.min(unclipped, clipped).masked_fill(~mask, 0.0)
    clip_loss = (token_losses.sum(1) / mask.sum(1)).sum() / num_sequences

    log_ref_ratio = (batch["ref_logprobs"] - logprobs).masked_fill(~mask, 0.0)
    k3 = log_ref_ratio.exp() - 1 - log_ref_ratio  # never negative, 0 on padding
    kl_loss = args.kl_coef * (k3.sum(1) / mask.sum(1)).sum() / num_sequences

    clip_fraction = ((clipped < unclipped) & mask).sum() / num_tokens
    stats = {"policy_loss": clip_loss.detach(), "kl_loss": kl_loss.detach(), "clip_fraction": clip_fraction}
    return clip_loss + kl_loss, stats


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
    if not isinstance(configured, list):
        configured = [configured]
    return sorted({tokenizer.eos_token_id, *configured} - {None})


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


def start_engine(args, policy, max_length):
    """vLLM in this process, with the policy's weights, for sequences of up to max_length tokens."""
    has_experts = any(".experts." in name for name in policy.state_dict())
    check(
        not has_experts,
        f"--model {args.model}: has experts, whose sync into vLLM failed in tests; use a dense model",
    )
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process: sync_weights passes tensors
    os.environ["VLLM_NO_USAGE_STATS"] = "1"  # no usage report
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with explain(f"vLLM with --model {args.model}", "install vllm, or change --model or --kv_cache_gib"):
        import vllm  # after its variables are set

        engine = vllm.LLM(
            locate(args.model),
            load_format="dummy",  # random weights, until sync_weights
            skip_tokenizer_init=True,  # token ids go in and come out
            dtype=args.dtype,
            max_model_len=max_length,
            kv_cache_memory_bytes=int(args.kv_cache_gib * 2**30),
            gpu_memory_utilization=0.01,  # only checked at the start; kv_cache_memory_bytes sets the size
            logprobs_mode="processed_logprobs",  # divided by the temperature
            # Untied: on some CPUs vLLM has a packed copy of tied weights, which a sync would leave old.
            hf_overrides={"tie_word_embeddings": False},
            enforce_eager=policy.device.type == "cpu",  # no compilation on a CPU
            distributed_executor_backend="external_launcher" if WORLD_SIZE > 1 else None,  # torchrun
        )
        sync_weights(engine, policy)
    return engine


def sync_weights(engine, policy):
    """Copy the policy's weights into vLLM, and drop what it has cached with the old ones."""
    engine.collective_rpc("reload_weights", kwargs={"weights_iterator": policy.state_dict().items()})
    check(engine.reset_prefix_cache(), "vLLM could not drop prompts cached with the old weights")


def generate(engine, model, tokenizer, prompts, args, samples_per_prompt=1, greedy=False):
    """Sample responses to prompts (lists of ids) from softmax(logits / temperature), or take the argmax.

    Returns a dict of tensors with B = len(prompts) x samples_per_prompt rows, those of a prompt side by side:
        sequences, attention_mask (B, P+T): the prompt, padded on the left, then the response, padded to T
        response_mask (B, T): True on the tokens that were sampled, the EOS included
        old_logprobs (B, T): of the distribution that was sampled from, as vLLM computes it, 0 on padding
        entropy (B, T): its estimate from the sampled token, -old_logprobs
        truncated (B,): True if the response has no EOS
    """
    import vllm  # start_engine has set its variables

    device = model.device
    prompt_ids, prompt_mask = left_pad(prompts, device)
    P = prompt_ids.shape[1]
    T = args.max_response_length
    prompt_index = torch.arange(len(prompts), device=device).repeat_interleave(samples_per_prompt)  # (B,)
    sequences = pad(prompt_ids[prompt_index], (0, T))  # (B, P+T), room for the response
    attention_mask = pad(prompt_mask[prompt_index], (0, T))
    old_logprobs = torch.zeros(len(sequences), T, device=device)
    truncated = torch.zeros_like(prompt_index, dtype=torch.bool)  # (B,)

    # One per prompt, drawn after main has seeded torch; response j of a prompt gets seed + j.
    seeds = torch.randint(2**62, (len(prompts),)).tolist()
    settings = [
        vllm.SamplingParams(
            n=samples_per_prompt,
            seed=seed,
            temperature=0.0 if greedy else args.temperature,
            max_tokens=T,
            stop_token_ids=eos_ids(model, tokenizer),
            logprobs=0,  # of the sampled token only
            detokenize=False,
        )
        for seed in seeds
    ]
    requests = [{"prompt_token_ids": ids} for ids in prompts]
    with explain(f"vLLM with --model {args.model}", "change --model or --kv_cache_gib"):
        results = engine.generate(requests, settings, use_tqdm=False)
    responses = [response for result in results for response in result.outputs]  # B of them

    for row, response in enumerate(responses):
        tokens = response.token_ids
        logprobs = [step[token].logprob for step, token in zip(response.logprobs, tokens)]
        sequences[row, P : P + len(tokens)] = torch.tensor(tokens)
        attention_mask[row, P : P + len(tokens)] = 1
        old_logprobs[row, : len(tokens)] = torch.tensor(logprobs)
        truncated[row] = response.finish_reason != "stop"

    return {
        "sequences": sequences,
        "attention_mask": attention_mask,
        "response_mask": attention_mask[:, P:].bool(),
        "old_logprobs": old_logprobs,
        "entropy": -old_logprobs,
        "truncated": truncated,
    }


def token_logprobs(model, batch, temperature):
    """Log-probs (B, T) of the response tokens at the sampling temperature, 0 where response_mask is False."""
    T = batch["response_mask"].shape[1]
    inputs = model_inputs(batch["sequences"], batch["attention_mask"])
    # The logits at a position are those of the next token, so the last ones are not needed.
    logits = model(**inputs, use_cache=False, logits_to_keep=T + 1).logits[:, :-1]  # (B, T, V)
    logits = logits.to(model.dtype) / temperature  # to float32, as the weights: autocast gives bfloat16
    tokens = batch["sequences"][:, -T:].unsqueeze(2)  # (B, T, 1)
    logprobs = logits.log_softmax(-1).gather(2, tokens).squeeze(2)
    return logprobs.masked_fill(~batch["response_mask"], 0.0)


def micro_batches(rollout, indices, size):
    """Yield (index, batch): the indices of up to `size` responses, and their tensors, less padding."""
    T = rollout["response_mask"].shape[1]
    response_lengths = rollout["attention_mask"][:, -T:].sum(1)  # (B,); would count a tool's answers too
    by_length = response_lengths[indices].argsort(stable=True)  # similar lengths go together
    for index in indices[by_length].split(size):
        batch = {name: tensor[index] for name, tensor in rollout.items()}
        columns = batch["attention_mask"].any(0)  # (P+T,), False at both ends, where all rows have padding
        for name, tensor in batch.items():
            if name in ("sequences", "attention_mask"):  # (b, P+T)
                batch[name] = tensor[:, columns]
            elif tensor.dim() == 2:  # (b, T)
                batch[name] = tensor[:, columns[-T:]]
        yield index, batch


def choose_prompts(args, dataset, num_prompts, completed):
    """This rank's rows of the dataset after so many completed iterations. Each epoch has a new order."""
    epoch, batch_number = divmod(completed, len(dataset) // num_prompts)
    generator = torch.Generator().manual_seed(hash((args.seed, epoch)))  # hash() of integers is never random
    shuffled = torch.randperm(len(dataset), generator=generator)
    chosen = shuffled.split(num_prompts)[batch_number]
    return [dataset[i] for i in chosen.chunk(WORLD_SIZE)[RANK]]


def process_scores(args, scores, truncated):
    """Scores (B,) after truncation penalty, scale, z-score over all ranks and clip, in this order."""
    scores = (scores - args.missing_eos_penalty * truncated) * args.reward_scale
    if args.reward_zscore:
        count = len(scores) * WORLD_SIZE
        scores -= total(scores) / count
        variance = total(scores.square()) / count
        scores /= max(math.sqrt(variance), 1e-4)
    if args.reward_clip:
        scores = scores.clamp(-args.reward_clip, args.reward_clip)
    return scores


def make_optimizer(args, model, learning_rate):
    """AdamW without weight decay, and the schedule of its learning rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0, fused=True)
    scheduler = transformers.get_scheduler(
        args.lr_schedule, optimizer, args.warmup_iterations, args.num_iterations
    )
    return optimizer, scheduler


def optimizer_step(args, model, optimizer):
    """Sum the gradients over ranks, clip their norm, and step. Returns the norm before clipping."""
    # DistributedDataParallel would average them, but the loss is already divided by counts over all ranks.
    for parameter in model.parameters():
        if parameter.grad is not None:  # some models have weights that nothing uses
            parameter.grad = all_sum(parameter.grad)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    check(norm.isfinite(), "the loss or its gradient is not finite; use a lower --learning_rate")
    optimizer.step()
    optimizer.zero_grad()
    return norm


def main(args):
    # 1. Setup: ranks, run folder, models, data, rewards, optimizer
    check_args(args)
    device = choose_device(args)
    run_dir, saved_args, checkpoint = find_run(args)
    start = checkpoint["iteration"] if checkpoint else 0
    connect_ranks(device, run_dir, start)
    if start >= args.num_iterations and (run_dir / "model").exists():
        return say(f"{run_dir} is finished after {start} iterations: nothing to do")

    # Both models are in eval mode: with dropout, the first ratio of a rollout would not be 1.
    policy, tokenizer = load(args, transformers.AutoModelForCausalLM, "model", args.model, device)
    check(eos_ids(policy, tokenizer), f"--model {args.model}: has no EOS token; save one in its tokenizer")
    reference = None
    if args.kl_coef:
        reference, _ = load(args, transformers.AutoModelForCausalLM, "model", args.model, device)
    num_prompts = args.batch_size // args.samples_per_prompt
    dataset = load_rows(args, "dataset", args.dataset, args.dataset_split, policy, tokenizer, num_prompts)
    eval_dataset = None
    if args.eval_dataset or args.dataset == Args.dataset:  # the toy has its own held-out prompts
        eval_name = args.eval_dataset or "toy/heldout.jsonl"
        eval_dataset = load_rows(args, "eval_dataset", eval_name, args.eval_split, policy, tokenizer)
    reward = load_reward(args, "reward", args.reward, device)
    eval_reward = load_reward(args, "eval_reward", args.eval_reward, device) if args.eval_reward else reward
    optimizer, scheduler = make_optimizer(args, policy, args.learning_rate)
    state = {"policy": policy, "optimizer": optimizer, "scheduler": scheduler}

    if checkpoint:
        for name, part in state.items():
            part.load_state_dict(checkpoint[name])
    longest_prompt = max(len(row["prompt_ids"]) for row in dataset + (eval_dataset or []))
    engine = start_engine(args, policy, longest_prompt + args.max_response_length)
    wandb_run = start_run(args, run_dir, saved_args, checkpoint) if RANK == 0 else None
    say(f"{policy.num_parameters():,} parameters on {WORLD_SIZE} x {device.type}, writes to {run_dir}")

    for completed in range(start, args.num_iterations + 1):  # the last turn only evaluates
        # 2. Evaluation on held-out prompts, also before the first iteration and after the last
        is_last = completed == args.num_iterations
        if eval_dataset and args.eval_every and (completed % args.eval_every == 0 or is_last):
            metrics, samples = evaluate(args, engine, policy, tokenizer, eval_reward, eval_dataset)
            log(run_dir, wandb_run, completed, metrics, samples)
        if is_last:
            break
        iteration = completed + 1
        began = time.time()
        # One seed per iteration and rank: a resumed run draws the same numbers as an uninterrupted one.
        torch.manual_seed(hash((args.seed, iteration, RANK)))

        # 3. Rollout: samples_per_prompt responses to each of this rank's prompts, and what the reward gives
        prompts = choose_prompts(args, dataset, num_prompts, completed)
        prompt_ids = [row["prompt_ids"] for row in prompts]
        rollout = generate(engine, policy, tokenizer, prompt_ids, args, args.samples_per_prompt)
        rows = [row for row in prompts for _ in range(args.samples_per_prompt)]  # the row of each response
        rollout["raw_scores"] = score(reward, tokenizer, rows, rollout)  # (B,)

        # 4. Scores after penalty, scale, z-score and clip
        rollout["scores"] = process_scores(args, rollout["raw_scores"], rollout["truncated"])

        # 5. Log-probs of the reference, and log(pi_old / pi_ref) as kl; pi_old's come from sampling
        all_rows = torch.arange(len(rows), device=device)
        # Without a reference they are those of the policy, and the KL is 0.
        rollout["ref_logprobs"] = rollout["old_logprobs"].clone()
        if reference:
            for index, batch in micro_batches(rollout, all_rows, args.micro_batch_size):
                with torch.no_grad():
                    ref_logprobs = token_logprobs(reference, batch, args.temperature)  # (b, T)
                # The batch lacks columns at the end of the responses only.
                rollout["ref_logprobs"][index, : ref_logprobs.shape[1]] = ref_logprobs
        kl = rollout["old_logprobs"] - rollout["ref_logprobs"]  # (B, T)
        rollout["kl"] = kl.masked_fill(~rollout["response_mask"], 0.0)

        # 6. Advantages
        rollout.update(compute_advantages(args, rollout))

        # 7. Update: each minibatch is one optimizer step, its gradient summed over micro-batches and ranks
        stats = defaultdict(float)
        for _ in range(args.update_epochs):
            for minibatch in torch.randperm(len(rows), device=device).chunk(args.num_minibatches):
                # Counted over the whole step: the loss does not depend on micro-batches and ranks.
                num_sequences = len(minibatch) * WORLD_SIZE
                num_tokens = total(rollout["response_mask"][minibatch])
                for _, batch in micro_batches(rollout, minibatch, args.micro_batch_size):
                    logprobs = token_logprobs(policy, batch, args.temperature)  # (b, T), with gradient
                    loss, batch_stats = policy_loss(args, batch, logprobs, num_sequences, num_tokens)
                    loss.backward()
                    for name, value in batch_stats.items():
                        stats[name] += value

                # Divided, since step 8 sums stats over ranks, and all ranks have the same norm.
                stats["grad_norm"] += optimizer_step(args, policy, optimizer) / WORLD_SIZE
        sync_weights(engine, policy)

        # 8. Log and save
        num_steps = args.update_epochs * args.num_minibatches
        num_tokens = total(rollout["response_mask"])
        metrics = {
            "score": total(rollout["raw_scores"]) / args.batch_size,
            "truncated": total(rollout["truncated"]) / args.batch_size,
            "response_length": num_tokens / args.batch_size,
            "entropy": total(rollout["entropy"]) / num_tokens,  # per token
        }
        if reference:
            metrics["kl"] = total(rollout["kl"]) / args.batch_size  # per response
        if args.samples_per_prompt > 1:
            groups = rollout["raw_scores"].view(-1, args.samples_per_prompt)
            metrics["equal_groups"] = total(groups.amax(1) == groups.amin(1)) / num_prompts
        for name, value in stats.items():
            metrics[name] = total(value) / num_steps
        metrics["learning_rate"] = scheduler.get_last_lr()[0]
        seconds = time.time() - began
        metrics["tokens_per_second"] = num_tokens / seconds
        scheduler.step()

        samples = []
        if iteration % args.log_every == 0:
            samples = describe(tokenizer, rows, rollout)[:: args.samples_per_prompt]  # one for each prompt
        # A slow run prints every iteration.
        log(run_dir, wandb_run, iteration, metrics, samples[:3], show=samples or seconds > 10)
        save_due = args.save_every and iteration % args.save_every == 0
        if save_due or iteration == args.num_iterations:
            save_checkpoint(run_dir, iteration, state)

    # 9. The result, a folder that from_pretrained opens
    if RANK == 0:
        with replacing(run_dir / "model") as folder:
            policy.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    engine.llm_engine.engine_core.shutdown()  # ends the process group, too
    if dist.is_initialized():
        dist.destroy_process_group()


# --- plumbing: models, data, rewards, evaluation, checkpoints; nothing of the algorithm stands below ---


def check(condition, message):
    """If the condition is false, print the message as one line and exit with code 2."""
    if not condition:
        time.sleep(5 * RANK)  # rank 0 prints and exits first; torchrun then stops the others
        print("error:", " ".join(message.split()), file=sys.stderr)
        sys.exit(2)


@contextmanager
def explain(what, remedy):
    """Turn an exception, which may not name the flag or the file, into a message that does."""
    try:
        yield
    except Exception as error:  # not SystemExit, which a check inside raises
        check(False, f"{what}: {error!r:.300}; {remedy}")


def say(text):
    """Print, on rank 0."""
    if RANK == 0:
        print(text, flush=True)


def check_args(args):
    """Refuse numbers that cannot work before anything is loaded."""
    positive = ["batch_size", "micro_batch_size", "max_response_length", "num_minibatches", "update_epochs"]
    positive += ["temperature", "reward_scale", "reward_clip", "max_grad_norm", "log_every"]
    positive += ["kv_cache_gib"]
    check(0.01 <= args.temperature <= 2, f"--temperature {args.temperature}: vLLM takes 0.01 to 2")
    for name, value in vars(args).items():
        if isinstance(value, int | float):
            is_enough = value > 0 if name in positive else value >= 0
            check(
                is_enough and math.isfinite(value), f"--{name} {value}: use a number above 0 (some may be 0)"
            )
    k = args.samples_per_prompt
    least = args.min_samples_per_prompt
    check(k >= least, f"--samples_per_prompt {k}: use {least} or more")
    unit = WORLD_SIZE * k
    multiple = f"use a multiple of {unit}, ranks x samples_per_prompt"
    check(args.batch_size % unit == 0, f"--batch_size {args.batch_size}: {multiple}")
    local_batch = args.batch_size // WORLD_SIZE
    divisor = f"use a divisor of {local_batch}, the responses of a rank"
    check(local_batch % args.num_minibatches == 0, f"--num_minibatches {args.num_minibatches}: {divisor}")


def choose_device(args):
    """The device of this rank."""
    device = torch.device(args.device)
    if device.type != "cpu":
        local_rank = int(os.environ.get("LOCAL_RANK", 0))  # set by torchrun
        # Where each rank sees its own GPU only, as under Slurm, that GPU has index 0.
        torch.accelerator.set_device_index(min(local_rank, torch.accelerator.device_count() - 1))
    return device


def connect_ranks(device, run_dir, start):
    """Start the communication of the ranks, and check that all resume from the same iteration."""
    if WORLD_SIZE > 1:
        dist.init_process_group("gloo" if device.type == "cpu" else None)
        # A rank whose start is not the mean of all starts exits, and torchrun then stops the others.
        is_shared = all_sum(torch.tensor(start, device=device)) == start * WORLD_SIZE
        check(is_shared, f"--run_dir {run_dir}: has other checkpoints on other ranks; use a shared folder")


def locate(name):
    """The path of a file or folder, here or beside the script; the name itself if it is neither."""
    for folder in (Path("."), Path(__file__).parent):
        if (folder / name).exists():
            return str(folder / name)
    check(not name.startswith("toy/"), f"no {name} beside this script; give --model, --dataset and --reward")
    return name


def load(args, auto_class, flag, name, device):
    """A model with float32 weights, in eval mode and so without dropout, and its tokenizer."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    where = f"--{flag} {name}"
    path = locate(name)
    with explain(where, "use a folder or a hub id of a model"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        model, info = auto_class.from_pretrained(
            path, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
    # transformers fills in missing weights at random, such as the head of a policy given as a reward model.
    kind = str(model.config.architectures)
    is_reward_model = "SequenceClassification" in kind
    wants_reward_model = auto_class is transformers.AutoModelForSequenceClassification
    missing = info["missing_keys"]
    message = f"{where}: is {kind}, {len(missing)} weights missing; use another model"
    check(is_reward_model == wants_reward_model and not missing, message)
    # cuDNN's bfloat16 attention gave NaN and wrong results on H100 and B200 (pytorch issues 196678, 193893).
    torch.backends.cuda.enable_cudnn_sdp(False)
    if args.gradient_checkpointing:
        # transformers' own checkpointing works in train mode only, which would switch dropout on.
        for layer in model.modules():
            if isinstance(layer, transformers.modeling_layers.GradientCheckpointingLayer):
                layer.forward = functools.partial(recomputed, layer.forward)
    if args.dtype == "bfloat16":
        model.forward = torch.autocast(device.type, torch.bfloat16)(model.forward)
    return model.to(device).eval(), tokenizer


def recomputed(forward, *args, **kwargs):
    """Call forward. Its activations are computed again in the backward pass instead of being kept."""
    if torch.is_grad_enabled():
        return checkpoint_activations(forward, *args, use_reentrant=False, **kwargs)
    return forward(*args, **kwargs)


def load_rows(args, flag, name, split, model, tokenizer, min_rows=1):
    """The rows of a dataset, with the token ids of each prompt as prompt_ids. Long prompts are left out."""
    where = f"--{flag} {name}"
    path = locate(name)
    with explain(where, "use a .jsonl, a .parquet, a folder or a hub id"):
        # Local data is streamed, since the cache of `datasets` may hold an older version of it.
        file_type = {".jsonl": "json", ".parquet": "parquet"}.get(Path(path).suffix)
        if file_type:
            rows = list(datasets.load_dataset(file_type, data_files=path, split="train", streaming=True))
        else:
            rows = list(datasets.load_dataset(path, split=split, streaming=Path(path).exists()))
        for number, row in enumerate(rows):
            prompt = row.get("prompt")
            check(prompt, f"{where}: row {number} has an empty prompt, or none; fill in the column `prompt`")
            if isinstance(prompt, str):
                encoded = tokenizer(prompt)
            else:
                check(tokenizer.chat_template, f"{where}: has chats, which need a --model with a template")
                encoded = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)
            row["prompt_ids"] = encoded["input_ids"]

    longest = args.max_prompt_length
    kept = [row for row in rows if 1 <= len(row["prompt_ids"]) <= longest]
    summary = f"{len(kept)} of {len(rows)} prompts have 1 to --max_prompt_length {longest} tokens"
    check(len(kept) >= min_rows, f"{where}: {summary}; give {min_rows} or more")
    say(f"{flag}: {summary}")
    needed = max(len(row["prompt_ids"]) for row in kept) + args.max_response_length
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    message = f"--max_response_length {args.max_response_length}: {needed} tokens with the longest prompt"
    check(needed <= limit, f"{message}, the model has {limit} positions; lower it")
    return kept


@dataclass
class Reward:
    where: str  # the flag and its value, for error messages
    function: Callable  # (prompts, completions, truncated, **other columns) -> one score per completion


def load_reward(args, flag, name, device):
    """The rule exact_answer, a function in a file, or a reward model."""
    where = f"--{flag} {name}"
    if name == "exact_answer":
        return Reward(where, functools.partial(exact_answer, args.answer_marker))
    file, _, function = name.partition(":")
    if file.endswith(".py"):
        with explain(where, "use file.py:function"):
            return Reward(where, runpy.run_path(locate(file))[function])
    model, tokenizer = load(args, transformers.AutoModelForSequenceClassification, flag, name, device)
    check(model.config.num_labels == 1, f"{where}: has several outputs; use a reward model, which has 1")
    # transformers scores the last token that is not pad_token_id. No token is -1: that is the last column.
    model.config.get_text_config().pad_token_id = -1
    return Reward(where, functools.partial(model_scores, model, tokenizer, args.micro_batch_size))


# Arguments before a / are positional only: a column of the dataset may be called `marker` or `model`.
def exact_answer(marker, /, completions, answer=None, **columns):
    """1 if the text after the last marker (all of it without a marker) equals the answer, else 0."""
    is_complete = answer is not None and None not in answer
    check(is_complete, "--reward exact_answer: fill in the column `answer` of the dataset in all rows")
    pairs = zip(completions, answer)
    return [float(text.rpartition(marker)[2].strip() == str(expected).strip()) for text, expected in pairs]


def model_scores(model, tokenizer, batch_size, /, prompts, completions, truncated, **columns):
    """The scores of a reward model, which reads texts with its own tokenizer and chat template."""
    id_lists = []
    for prompt, completion, is_truncated in zip(prompts, completions, truncated):
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        ids = tokenizer(completion, add_special_tokens=False)["input_ids"]
        if not tokenizer.chat_template:
            ids = tokenizer(prompt)["input_ids"] + ids
        elif is_truncated:  # the turn stays open
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] + ids
        else:
            chat = [*chat, {"role": "assistant", "content": completion}]
            ids = tokenizer.apply_chat_template(chat)["input_ids"]
        # A template may have added the EOS, and a newline behind it.
        if not is_truncated and tokenizer.eos_token_id not in ids[-2:]:
            ids += [tokenizer.eos_token_id]
        id_lists.append(ids)
    scores = []
    for i in range(0, len(id_lists), batch_size):
        ids, mask = left_pad(id_lists[i : i + batch_size], model.device)
        scores += model(**model_inputs(ids, mask), use_cache=False).logits[:, 0].tolist()
    return scores


def decode(tokenizer, rollout, skip_special_tokens):
    """The texts of the responses."""
    mask = rollout["response_mask"]
    responses = rollout["sequences"][:, -mask.shape[1] :]
    without_padding = [response[row_mask] for response, row_mask in zip(responses, mask)]
    return tokenizer.batch_decode(without_padding, skip_special_tokens=skip_special_tokens)


@torch.no_grad()
def score(reward, tokenizer, rows, rollout):
    """Scores (B,) of the responses in a rollout; rows has the row of the dataset behind each of them."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    columns["prompts"] = columns.pop("prompt")
    columns["completions"] = decode(tokenizer, rollout, skip_special_tokens=True)
    columns["truncated"] = rollout["truncated"].tolist()
    with explain(reward.where, "fix the reward"):
        scores = torch.tensor(reward.function(**columns), dtype=torch.float32)
    is_valid = scores.shape == (len(rows),) and scores.isfinite().all()
    check(is_valid, f"{reward.where}: did not give {len(rows)} finite scores; fix it")
    return scores.to(rollout["truncated"].device)


def describe(tokenizer, rows, rollout):
    """Prompts, responses with their special tokens, and scores, for samples.jsonl."""
    responses = decode(tokenizer, rollout, skip_special_tokens=False)
    parts = zip(rows, responses, rollout["raw_scores"].tolist())
    return [{"prompt": row["prompt"], "response": text, "score": x} for row, text, x in parts]


def evaluate(args, engine, policy, tokenizer, reward, dataset):
    """The mean score of greedy responses for each value of the column `group`, over all ranks; samples."""
    scores = torch.zeros(len(dataset), device=policy.device)
    samples = []
    local_batch = args.batch_size // WORLD_SIZE
    for first in range(RANK * local_batch, len(dataset), args.batch_size):
        rows = dataset[first : first + local_batch]
        prompt_ids = [row["prompt_ids"] for row in rows]
        rollout = generate(engine, policy, tokenizer, prompt_ids, args, greedy=True)
        rollout["raw_scores"] = score(reward, tokenizer, rows, rollout)
        scores[first : first + len(rows)] = rollout["raw_scores"]
        samples += describe(tokenizer, rows, rollout)
    groups = defaultdict(list)
    for row, row_score in zip(dataset, all_sum(scores).tolist()):  # each rank has filled in its part
        groups[f"eval/score/{row.get('group', 'all')}"].append(row_score)
    return {name: sum(x) / len(x) for name, x in groups.items()}, samples[:3]


@contextmanager
def replacing(path):
    """Yield a temporary path, and rename it to path at the end: path is always complete, old or new."""
    temporary = path.with_suffix(".tmp")
    with explain(path, "make room on the disk and give the same command again"):
        yield temporary
        temporary.replace(path)


def find_run(args):
    """The run folder, the args to save in it, its checkpoint or None. Refuses a folder of another run."""
    new_dir = f"runs/{args.exp_name}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    run_dir = Path(args.run_dir or new_dir)  # only rank 0 writes there
    saved_args = vars(args) | {"ranks": WORLD_SIZE}
    if (run_dir / "args.json").exists():
        old_flags = json.loads((run_dir / "args.json").read_text())
        may_change = ["run_dir", "eval_every", "log_every", "save_every", "track"]
        may_change += ["micro_batch_size", "gradient_checkpointing"]  # memory and speed only
        may_change += ["kv_cache_gib"]
        if args.lr_schedule == "constant_with_warmup":  # others depend on num_iterations
            may_change += ["num_iterations"]
        changed = [
            f"--{flag} {value}, was {old_flags.get(flag)}"
            for flag, value in saved_args.items()
            if value != old_flags.get(flag) and flag not in may_change
        ]
        check(not changed, f"--run_dir {run_dir}: is another run ({changed}); use its flags or a new folder")
    path = run_dir / "checkpoint.pt"
    with explain(path, "restore it, or delete it to start over"):
        checkpoint = torch.load(path, "cpu", weights_only=True, mmap=True) if path.exists() else None
    return run_dir, saved_args, checkpoint


def start_run(args, run_dir, saved_args, checkpoint):
    """Make the run folder, or cut its logs back to the checkpoint. Returns wandb's run with --track."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with replacing(run_dir / "args.json") as path:
        path.write_text(json.dumps(saved_args, indent=2))
    shutil.copy(__file__, run_dir)
    shutil.rmtree(run_dir / "model", ignore_errors=True)  # the result of a shorter run
    for name in LOGS:
        with open(run_dir / name, "ab") as file:
            file.truncate(checkpoint["log_sizes"][name] if checkpoint else 0)
    if args.track:
        import wandb

        return wandb.init(id=run_dir.name, resume="allow", config=saved_args)


def log(run_dir, wandb_run, iteration, metrics, samples, show=True):
    """On rank 0, add to the logs of the run, and print the main metrics and the samples if show is true."""
    if RANK > 0:
        return
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"iteration": iteration} | metrics) + "\n")
    with open(run_dir / "samples.jsonl", "a") as file:
        for sample in samples:
            file.write(json.dumps({"iteration": iteration} | sample) + "\n")
    if wandb_run:
        wandb_run.log(metrics, step=iteration)
    if show:
        shown = ["score", "kl", "response_length", "tokens_per_second"]
        texts = [f"{name} {x:.3f}" for name, x in metrics.items() if name in shown or "eval/" in name]
        say(f"iteration {iteration:4d}   " + "   ".join(texts))
        for sample in samples:
            say(f"    {sample['score']:5.2f}  {str(sample['prompt'])[-80:]!r} -> {sample['response']!r}")


def save_checkpoint(run_dir, iteration, state):
    """Rank 0 saves all that the next iteration needs. Logs go to the disk first: it has their sizes."""
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


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, use_underscores=True))
