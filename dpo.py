# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.23.0", "datasets==5.2.0", "tyro==1.0.17", "wandb==0.31.0"]
# ///
"""DPO: from preference pairs to a policy, without a reward model and without sampling.

Rafael Rafailov et al., "Direct Preference Optimization: Your Language Model is Secretly a Reward Model",
arXiv 2305.18290. The policy that is best for a reward under a KL penalty is pi_ref exp(reward / beta), up to
a factor of the prompt; so the reward is beta log(pi / pi_ref), up to a term that a pair shares. With it the
Bradley-Terry loss of reward_model.py is one of the policy, over pairs of a chosen c and a rejected r:

    h(o) = beta sum_t log(pi_theta(o_t) / pi_ref(o_t))          the implicit reward      (section 4)
    loss = -1/N sum_i log sigmoid(h(c_i) - h(r_i))                                       (Eq. 7)

N counts the pairs of one optimizer step over all ranks. EOS is a token of its response, and nothing is
divided by the length. pi_ref is --model: its log-probs are computed once, at the start, so that one model is
in memory. Nothing is sampled; the policy scripts, with a reward model of the same pairs, let a policy learn
from its own mistakes. Left out: dropout, LoRA, sharded models. Train a toy model (half a minute, held-out
loss 0.69 to 0.66, accuracy 0.83), or a real one on 8 GPUs:

    python dpo.py
    OMP_NUM_THREADS=8 torchrun --nproc-per-node 8 dpo.py --model Qwen/Qwen2.5-1.5B-Instruct \
        --dataset trl-lib/ultrafeedback_binarized --eval_dataset trl-lib/ultrafeedback_binarized \
        --max_length 2048 --num_epochs 1 --micro_batch_size 2 --learning_rate 5e-7 --dtype bfloat16 \
        --gradient_checkpointing --run_dir runs/dpo
"""

import atexit
import copy
import json
import os
import shutil
import sys
import time
import zlib
from collections import defaultdict
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal

import datasets
import filelock  # comes with torch
import torch
import torch.distributed as dist
import transformers
import tyro
from torch.nn.utils.rnn import pad_sequence

RANK = int(os.environ.get("RANK", 0))  # set by torchrun
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


@dataclass
class Args:  # the comment behind a flag is its --help text
    exp_name: str = Path(__file__).stem  # name of the run
    seed: int = 1  # of the order of pairs
    device: str = str(torch.accelerator.current_accelerator(check_available=True) or "cpu")  # cuda, mps, ...
    dtype: Literal["float32", "bfloat16"] = "float32"  # bfloat16 is autocast; weights and AdamW stay float32
    # Model and data
    model: str = "toy/policy"  # starting policy and reference: folder or hub id of a causal LM
    # .jsonl, folder or hub id (split train); `chosen` and `rejected`, text or chat, after `prompt` or with it
    dataset: str = "toy/preferences_train.jsonl"
    eval_dataset: str | None = None  # held-out pairs (split test), by default the toy's for the toy
    max_length: int = 1024  # longer texts (in tokens) are cut at their end
    # Optimization
    num_epochs: int = 2  # passes over the pairs
    batch_size: int = 64  # pairs per optimizer step, over all ranks
    micro_batch_size: int = 64  # pairs per forward pass on a rank: memory only
    beta: float = 0.1  # weight of the KL penalty; a smaller one lets the policy move farther from pi_ref
    learning_rate: float = 5e-5  # peak of AdamW's; 5e-5 is for the toy, a real model needs about 5e-7
    warmup_iterations: int = 20  # the learning rate first rises linearly over so many
    anneal_lr: bool = True  # the learning rate falls linearly over the run, to 0 after it
    max_grad_norm: float = 1.0  # the gradient is clipped to this norm; inf: not clipped
    gradient_checkpointing: bool = False  # recompute activations: less memory, but slower
    # Run
    run_dir: str | None = None  # resume the run in this folder, or start it; None: a new folder in runs/
    eval_every: int = 70  # iterations between evaluations, also before the first and after the last; 0: none
    save_every: int = 200  # iterations between checkpoints; the last is always saved; 0: only the last
    track: bool = False  # log to Weights & Biases too; WANDB_PROJECT names the project


def dpo_loss(chosen_logprobs, rejected_logprobs, ref_chosen_logprobs, ref_rejected_logprobs, beta):
    """Eq. 7: the mean of -log sigmoid(h(c) - h(r)) over pairs. The log-probs (b,) are those of responses."""
    chosen_rewards = beta * (chosen_logprobs - ref_chosen_logprobs)  # h(c), (b,)
    rejected_rewards = beta * (rejected_logprobs - ref_rejected_logprobs)  # h(r)
    return torch.nn.functional.softplus(rejected_rewards - chosen_rewards).mean()


def encode(tokenizer, prompt, response):
    """The token ids of a prompt, its response and EOS."""
    response_ids = tokenizer(response, add_special_tokens=False)["input_ids"]
    return token_ids(tokenizer, prompt) + response_ids + [tokenizer.eos_token_id]


def choose_rows(args, dataset, iteration):
    """The indices of an iteration's pairs, over all ranks. Each epoch drops an incomplete last batch."""
    epoch, batch_number = divmod(iteration - 1, len(dataset) // args.batch_size)
    generator = torch.Generator().manual_seed(1_000_000 * args.seed + epoch)
    return torch.randperm(len(dataset), generator=generator).split(args.batch_size)[batch_number].tolist()


def micro_batches(args, dataset, indices):
    """Yield parts of this rank's indices, and input_ids and response_mask (2b, L): chosen, then rejected."""
    share = sorted(indices[RANK::WORLD_SIZE], key=lambda i: dataset[i]["length"])
    for first in range(0, len(share), args.micro_batch_size):
        part = share[first : first + args.micro_batch_size]
        rows = [dataset[i] for i in part]
        texts = [torch.tensor(row[name]) for name in ("chosen_ids", "rejected_ids") for row in rows]
        prompt_lengths = 2 * [row["prompt_length"] for row in rows]
        masks = [torch.arange(len(text)) >= length for text, length in zip(texts, prompt_lengths)]
        batch = {
            "input_ids": pad_sequence(texts, batch_first=True),
            "response_mask": pad_sequence(masks, batch_first=True),
        }
        yield part, {name: tensor.to(args.device) for name, tensor in batch.items()}


def response_logprobs(model, batch):
    """Log-probs (2, b) of chosen and rejected responses, summed over their tokens."""
    # Logits take the most memory, so they are computed only where some row has a token of a response.
    columns = batch["response_mask"].any(0).nonzero()[:, 0]  # (T,)
    tokens = batch["input_ids"][:, columns]  # (2b, T)
    mask = batch["response_mask"][:, columns]
    # A token's logits are one position earlier. No attention mask: padding on the right is not attended to.
    output = model(input_ids=batch["input_ids"], use_cache=False, logits_to_keep=columns - 1)
    logits = output.logits.to(model.dtype)  # (2b, T, V); under autocast they may be bfloat16
    logprobs = logits.log_softmax(-1).gather(2, tokens.unsqueeze(2)).squeeze(2)
    return logprobs.masked_fill(~mask, 0.0).sum(1).view(2, -1)


@torch.no_grad()
def all_logprobs(args, policy, dataset):
    """Log-probs (2, N) of the chosen and rejected responses of a dataset, computed on all ranks."""
    result = torch.zeros(2, len(dataset), device=args.device)
    for part, batch in micro_batches(args, dataset, range(len(dataset))):
        with autocast(args):
            result[:, part] = response_logprobs(policy, batch)
    return all_sum(result)  # each rank has filled in its part


def all_sum(x):
    """Sum the tensor x over all ranks, in place, and return it. Every rank must call it."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def total(x):
    """The sum of all elements of x on all ranks, as a number."""
    return float(all_sum(x.sum()))


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
    # 1. Setup: ranks, model, data, optimizer, run folder
    check_args(args)
    start_ranks(args)
    policy, tokenizer = load_model(args, args.model, transformers.AutoModelForCausalLM)
    reference = copy.deepcopy(policy)  # before a checkpoint is loaded
    dataset = load_rows(args, args.dataset, "train", policy, tokenizer, args.batch_size)
    eval_dataset = []
    if args.eval_dataset and args.eval_every:
        eval_dataset = load_rows(args, args.eval_dataset, "test", policy, tokenizer)
    num_iterations = args.num_epochs * (len(dataset) // args.batch_size)
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0, fused=True)  # lr is set in step 4
    state = {"policy": policy, "optimizer": optimizer}  # what a checkpoint holds
    run_dir, start = open_run(args, state, dataset + eval_dataset)  # `start` counts the finished iterations
    say(f"{policy.num_parameters():,} parameters on {WORLD_SIZE} x {args.device}, writes to {run_dir}")
    ref_logprobs = all_logprobs(args, reference, dataset)  # (2, N), of chosen and rejected responses
    eval_ref_logprobs = all_logprobs(args, reference, eval_dataset)
    del reference  # one model stays in memory

    # 2. Evaluation on held-out pairs, before the first iteration; the later evaluations are in step 6
    if eval_dataset and start == 0:
        log_samples(args, run_dir, 0, policy, tokenizer, eval_dataset)
        log(args, run_dir, 0, evaluate(args, policy, eval_dataset, eval_ref_logprobs))

    for iteration in range(start + 1, num_iterations + 1):
        began = time.perf_counter()

        # 3. Batch: the pairs of this optimizer step, over all ranks
        indices = choose_rows(args, dataset, iteration)

        # 4. Update: one optimizer step, its gradient summed over micro-batches and ranks
        lr_factor = min(1.0, iteration / max(1, args.warmup_iterations))
        if args.anneal_lr:
            lr_factor = min(lr_factor, 1 - (iteration - 1) / num_iterations)
        learning_rate = args.learning_rate * lr_factor
        step_loss = torch.zeros((), device=args.device)  # of this rank's micro-batches
        step_rewards = []  # the implicit ones
        for part, batch in micro_batches(args, dataset, indices):
            with autocast(args):
                logprobs = response_logprobs(policy, batch)  # (2, b)
            chosen, rejected = logprobs
            ref_chosen, ref_rejected = ref_logprobs[:, part]
            part_loss = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, args.beta)
            loss = part_loss * len(part) / args.batch_size  # the part's share in the mean over the step
            loss.backward()
            step_loss += loss.detach()
            step_rewards.append(args.beta * (logprobs.detach() - ref_logprobs[:, part]))
        grad_norm = optimizer_step(args, policy, optimizer, learning_rate)

        # 5. Metrics, over all ranks
        chosen_rewards, rejected_rewards = torch.cat(step_rewards, 1)  # (pairs of this rank,) each
        metrics = {
            "loss": total(step_loss),
            "accuracy": total(chosen_rewards > rejected_rewards) / args.batch_size,
            "margin": total(chosen_rewards - rejected_rewards) / args.batch_size,
            "chosen_reward": total(chosen_rewards) / args.batch_size,
            "rejected_reward": total(rejected_rewards) / args.batch_size,
            "grad_norm": float(grad_norm),
            "learning_rate": learning_rate,
            "pairs_per_second": args.batch_size / (time.perf_counter() - began),
        }

        # 6. Evaluate, log and save
        is_last = iteration == num_iterations
        if eval_dataset and (is_last or iteration % args.eval_every == 0):
            log_samples(args, run_dir, iteration, policy, tokenizer, eval_dataset)
            metrics |= evaluate(args, policy, eval_dataset, eval_ref_logprobs)
        log(args, run_dir, iteration, metrics)
        if is_last or (args.save_every and iteration % args.save_every == 0):
            save_checkpoint(run_dir, iteration, state)

    # 7. The result, a folder that from_pretrained opens
    if RANK == 0:
        policy.save_pretrained(f"{run_dir}/model")
        tokenizer.save_pretrained(f"{run_dir}/model")
    if WORLD_SIZE > 1:
        dist.destroy_process_group()


# --- plumbing: models, data, evaluation, checkpoints; nothing of the algorithm stands below ---


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
    """Refuse what cannot work before anything is loaded. The toy has held-out pairs by default."""
    remedy = f"use a multiple of {WORLD_SIZE}, the number of ranks"
    check(args.batch_size % WORLD_SIZE == 0, f"--batch_size {args.batch_size}: {remedy}")
    check(args.max_grad_norm > 0, f"--max_grad_norm {args.max_grad_norm}: use inf for no clipping")
    if args.model != Args.model and args.learning_rate == Args.learning_rate:
        say(f"warning: --learning_rate {args.learning_rate} is for the toy; a real model needs about 5e-7")
    if args.dataset == Args.dataset:
        args.eval_dataset = args.eval_dataset or "toy/preferences_heldout.jsonl"


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


def split_response(prompt, response):
    """The prompt, and the text of a response, which may be messages that follow the prompt or contain it."""
    if isinstance(response, list):
        if response[0]["role"] == "assistant":  # without the prompt
            response = prompt + response
        *prompt, answer = response
        check(answer["role"] == "assistant", f"chat {response}: the last message must be the assistant's")
        response = answer["content"]
    return prompt, response


def load_rows(args, name, split, policy, tokenizer, min_rows=1):
    """The encoded pairs of a dataset. Those equal after the cut, such as without a response, are left out."""
    if name.endswith(".jsonl"):
        rows = json.loads(f"[{','.join(open(name))}]")  # as one list, so that an error names the line
    else:
        # Local data is streamed, since the cache of `datasets` may hold an older version of it.
        rows = list(datasets.load_dataset(name, split=split, streaming=Path(name).exists()))
    flag = f"--{'dataset' if split == 'train' else 'eval_dataset'} {name}"
    for number, row in enumerate(rows):
        prompt, chosen = split_response(row.get("prompt"), row.get("chosen"))
        other_prompt, rejected = split_response(row.get("prompt"), row.get("rejected"))
        is_pair = prompt and prompt == other_prompt and None not in (chosen, rejected)
        check(is_pair, f"{flag}: row {number} needs `chosen` and `rejected`, responses to one `prompt`")
        row |= {"prompt": prompt, "prompt_length": len(token_ids(tokenizer, prompt))}
        row["chosen_ids"] = encode(tokenizer, prompt, chosen)[: args.max_length]
        row["rejected_ids"] = encode(tokenizer, prompt, rejected)[: args.max_length]
        row["length"] = max(len(row["chosen_ids"]), len(row["rejected_ids"]))
    kept = [row for row in rows if row["chosen_ids"] != row["rejected_ids"]]
    summary = f"{flag}: {len(kept)} of {len(rows)} pairs differ in their first {args.max_length} tokens"
    check(len(kept) >= min_rows, f"{summary}; give {min_rows} or more, or lower --batch_size")
    say(summary)
    longest = max(row["length"] for row in kept)
    limit = getattr(policy.config, "max_position_embeddings", longest)
    check(longest <= limit, f"--max_length: lower it; a text has {longest} tokens, the model takes {limit}")
    return kept


def evaluate(args, policy, dataset, ref_logprobs):
    """Loss, margin and accuracy on held-out pairs, over all ranks, and accuracy for each value of `group`."""
    logprobs = all_logprobs(args, policy, dataset)  # (2, N)
    chosen, rejected = logprobs
    ref_chosen, ref_rejected = ref_logprobs
    loss = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, args.beta)
    chosen_rewards, rejected_rewards = args.beta * (logprobs - ref_logprobs)
    metrics = {"eval/loss": float(loss), "eval/margin": float((chosen_rewards - rejected_rewards).mean())}
    groups = defaultdict(list)
    for row, is_right in zip(dataset, (chosen_rewards > rejected_rewards).tolist()):
        groups["eval/accuracy"].append(is_right)
        if "group" in row:
            groups[f"eval/accuracy/{row['group']}"].append(is_right)
    return metrics | {name: sum(x) / len(x) for name, x in groups.items()}


def log_samples(args, run_dir, iteration, policy, tokenizer, dataset):
    """Print and log greedy responses to three prompts."""
    longest = max(row["length"] for row in dataset)  # the model has positions for it
    for row in dataset[:3]:
        prompt_ids = torch.tensor([token_ids(tokenizer, row["prompt"])], device=args.device)
        P = prompt_ids.shape[1]
        options = {"max_new_tokens": min(256, longest - P), "eos_token_id": tokenizer.eos_token_id}
        with autocast(args):
            output = policy.generate(prompt_ids, do_sample=False, repetition_penalty=1.0, **options)
        response = tokenizer.decode(output[0, P:])
        say(f"    {str(row['prompt'])[-80:]!r} -> {response!r}")
        sample = {"iteration": iteration, "prompt": row["prompt"], "response": response}
        append(f"{run_dir}/samples.jsonl", sample)


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
            may_change.add("num_epochs")
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
    """Print the metrics. Rank 0 adds them to metrics.jsonl and Weights & Biases."""
    texts = [f"   {name} {value:.4g}" for name, value in metrics.items()]
    say(f"iteration {iteration:4}" + "".join(texts))
    append(f"{run_dir}/metrics.jsonl", {"iteration": iteration} | metrics)
    if args.track and RANK == 0:
        import wandb

        if not wandb.run:
            wandb.init(name=run_dir.name, config=vars(args))
        wandb.log(metrics, step=iteration)


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
    main(tyro.cli(Args, description=__doc__, use_underscores=True))
