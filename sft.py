# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.23.0", "datasets==5.2.0", "tyro==1.0.17", "wandb==0.31.0"]
# ///
"""SFT: supervised fine-tuning on demonstrations. Stage 1, which makes the policy that RL starts from.

Long Ouyang et al., "InstructGPT", arXiv 2203.02155, section 3.5. With a prompt x and its completion y,

    loss = -1/N_tok sum_t log pi_theta(y_t | x, y_<t)

over the tokens of completions and the EOS that ends each, not over prompts and padding. N_tok counts them in
one optimizer step over all ranks. Prompt and completion are tokenized apart, since a policy is later given a
prompt's tokens alone; of a chat the last message is learned. Left out: dropout, packing, LoRA, sharded
models, tools. Train a toy model (a minute, held-out loss 0.40 to 0.29), or a real one on 8 GPUs:

    python sft.py
    OMP_NUM_THREADS=8 torchrun --nproc-per-node 8 sft.py --model Qwen/Qwen2.5-1.5B \
        --dataset trl-lib/Capybara --max_length 4096 --num_epochs 2 --micro_batch_size 2 \
        --learning_rate 1e-5 --dtype bfloat16 --gradient_checkpointing --run_dir runs/sft
"""

import atexit
import json
import os
import shutil
import sys
import time
import zlib
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
    seed: int = 1  # of the order of examples
    device: str = str(torch.accelerator.current_accelerator(check_available=True) or "cpu")  # cuda, mps, ...
    dtype: Literal["float32", "bfloat16"] = "float32"  # bfloat16 is autocast; weights and AdamW stay float32
    # Model and data
    model: str = "toy/base"  # starting policy: folder or hub id of a causal LM
    # .jsonl, folder or hub id (split train); columns `prompt` and `completion`, or `messages` of a chat
    dataset: str = "toy/demonstrations.jsonl"
    eval_size: int = 256  # examples at the end of the dataset that are held out for evaluation; 0: none
    max_length: int = 1024  # examples with more tokens, prompt and EOS included, are left out
    # Optimization
    num_epochs: int = 4  # passes over the examples
    shuffle: bool = True  # a new order in each epoch; --no_shuffle keeps that of the file, for a curriculum
    batch_size: int = 128  # examples per optimizer step, over all ranks
    micro_batch_size: int = 128  # examples per forward pass on a rank: memory only
    learning_rate: float = 1e-3  # peak of AdamW's; 1e-3 is for the toy, a real model needs about 1e-5
    warmup_iterations: int = 20  # the learning rate first rises linearly over so many
    anneal_lr: bool = True  # the learning rate falls linearly over the run, to 0 after it
    max_grad_norm: float = 1.0  # the gradient is clipped to this norm; inf: not clipped
    gradient_checkpointing: bool = False  # recompute activations: less memory, but slower
    # Run
    run_dir: str | None = None  # resume the run in this folder, or start it; None: a new folder in runs/
    eval_every: int = 100  # iterations between evaluations, also before the first and after the last; 0: none
    save_every: int = 200  # iterations between checkpoints; the last is always saved; 0: only the last
    track: bool = False  # log to Weights & Biases too; WANDB_PROJECT names the project


def encode(tokenizer, prompt, completion):
    """The token ids of a prompt, its completion and EOS, and a mask that is True on the last two."""
    prompt_ids = token_ids(tokenizer, prompt)
    completion_ids = tokenizer(completion, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    mask = [False] * len(prompt_ids) + [True] * len(completion_ids)
    return {"input_ids": prompt_ids + completion_ids, "completion_mask": mask}


def choose_rows(args, dataset, iteration):
    """The rows of an iteration, over all ranks. Each epoch drops an incomplete last batch."""
    epoch, batch_number = divmod(iteration - 1, len(dataset) // args.batch_size)
    order = torch.arange(len(dataset))
    if args.shuffle:
        generator = torch.Generator().manual_seed(1_000_000 * args.seed + epoch)
        order = torch.randperm(len(dataset), generator=generator)
    return [dataset[i] for i in order.split(args.batch_size)[batch_number]]


def micro_batches(args, rows):
    """Yield this rank's share of the rows, in tensors (b, L) of similar lengths, padded on the right."""
    share = sorted(rows[RANK::WORLD_SIZE], key=lambda row: row["length"])
    for first in range(0, len(share), args.micro_batch_size):
        part = share[first : first + args.micro_batch_size]
        batch = {}
        for name in ["input_ids", "completion_mask"]:
            tensors = [torch.tensor(row[name]) for row in part]
            batch[name] = pad_sequence(tensors, batch_first=True).to(args.device)
        yield batch


def completion_loss(model, batch, num_tokens):
    """-log pi_theta of the completion tokens, summed, and divided by num_tokens of the optimizer step."""
    # Logits take the most memory, so they are computed only where a token of some row is learned.
    columns = batch["completion_mask"].any(0).nonzero()[:, 0]  # (T,)
    tokens = batch["input_ids"][:, columns]  # (b, T)
    mask = batch["completion_mask"][:, columns]
    # A token's logits are one position earlier. No attention mask: padding on the right is not attended to.
    output = model(input_ids=batch["input_ids"], use_cache=False, logits_to_keep=columns - 1)
    logits = output.logits[mask].to(model.dtype)  # (tokens to learn, V); under autocast they may be bfloat16
    return torch.nn.functional.cross_entropy(logits, tokens[mask], reduction="sum") / num_tokens


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
    examples = load_rows(args, policy, tokenizer)
    dataset = examples[: len(examples) - args.eval_size]
    eval_dataset = examples[len(dataset) :] if args.eval_every else []
    num_iterations = args.num_epochs * (len(dataset) // args.batch_size)
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0, fused=True)  # lr is set in step 4
    state = {"policy": policy, "optimizer": optimizer}  # what a checkpoint holds
    run_dir, start = open_run(args, state, examples)  # `start` counts the finished iterations
    say(f"{policy.num_parameters():,} parameters on {WORLD_SIZE} x {args.device}, writes to {run_dir}")

    # 2. Evaluation on held-out examples, before the first iteration; the later evaluations are in step 6
    if eval_dataset and start == 0:
        log_samples(args, run_dir, 0, policy, tokenizer, eval_dataset)
        log(args, run_dir, 0, evaluate(args, policy, eval_dataset))

    for iteration in range(start + 1, num_iterations + 1):
        began = time.perf_counter()

        # 3. Batch: the examples of this optimizer step, over all ranks, and the number of tokens to learn
        rows = choose_rows(args, dataset, iteration)
        num_tokens = sum(row["completion_mask"].count(True) for row in rows)

        # 4. Update: one optimizer step, its gradient summed over micro-batches and ranks
        lr_factor = min(1.0, iteration / max(1, args.warmup_iterations))
        if args.anneal_lr:
            lr_factor = min(lr_factor, 1 - (iteration - 1) / num_iterations)
        learning_rate = args.learning_rate * lr_factor
        step_loss = torch.zeros((), device=args.device)  # of this rank's micro-batches
        for batch in micro_batches(args, rows):
            with autocast(args):
                loss = completion_loss(policy, batch, num_tokens)
            loss.backward()
            step_loss += loss.detach()
        grad_norm = optimizer_step(args, policy, optimizer, learning_rate)

        # 5. Metrics, over all ranks
        metrics = {
            "loss": total(step_loss),
            "grad_norm": float(grad_norm),
            "learning_rate": learning_rate,
            "tokens_per_second": num_tokens / (time.perf_counter() - began),
        }

        # 6. Evaluate, log and save
        is_last = iteration == num_iterations
        if eval_dataset and (is_last or iteration % args.eval_every == 0):
            log_samples(args, run_dir, iteration, policy, tokenizer, eval_dataset)
            metrics |= evaluate(args, policy, eval_dataset)
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
    """Refuse what cannot work before anything is loaded."""
    remedy = f"use a multiple of {WORLD_SIZE}, the number of ranks"
    check(args.batch_size % WORLD_SIZE == 0, f"--batch_size {args.batch_size}: {remedy}")
    check(args.max_grad_norm > 0, f"--max_grad_norm {args.max_grad_norm}: use inf for no clipping")
    check(args.micro_batch_size > 0, f"--micro_batch_size {args.micro_batch_size}: use 1 or more")
    if args.model != Args.model and args.learning_rate == Args.learning_rate:
        say(f"warning: --learning_rate {args.learning_rate} is for the toy; a real model needs about 1e-5")


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


def load_rows(args, policy, tokenizer):
    """The encoded examples of the dataset. Those with more than --max_length tokens are left out."""
    name = args.dataset
    if name.endswith(".jsonl"):
        rows = json.loads(f"[{','.join(open(name))}]")  # as one list, so that an error names the line
    else:
        # Local data is streamed, since the cache of `datasets` may hold an older version of it.
        rows = list(datasets.load_dataset(name, split="train", streaming=Path(name).exists()))
    examples = []
    for number, row in enumerate(rows):
        prompt, completion = row.get("prompt"), row.get("completion")
        if row.get("messages"):
            *prompt, answer = row["messages"]
            completion = answer["content"] if answer["role"] == "assistant" else None
        is_complete = prompt and isinstance(completion, str)
        remedy = "give it `prompt` and `completion`, or `messages` that end with the assistant's"
        check(is_complete, f"--dataset {name}: row {number} is not complete; {remedy}")
        example = encode(tokenizer, prompt, completion)
        examples.append(example | {"prompt": prompt, "length": len(example["input_ids"])})
    # A prompt without tokens, such as a lone EOS, would leave nothing to predict the first token from.
    kept = [row for row in examples if row["length"] <= args.max_length and not row["completion_mask"][0]]
    summary = f"--dataset {name}: {len(kept)} of {len(rows)} examples fit --max_length {args.max_length}"
    needed = args.batch_size + args.eval_size
    check(len(kept) >= needed, f"{summary}; give {needed} or more, for --batch_size and --eval_size")
    say(f"{summary}, {args.eval_size} are held out")
    longest = max(row["length"] for row in kept)
    limit = getattr(policy.config, "max_position_embeddings", longest)
    check(longest <= limit, f"--max_length: lower it; a text has {longest} tokens, the model takes {limit}")
    return kept


@torch.no_grad()
def evaluate(args, policy, dataset):
    """The loss on held-out examples, over all ranks."""
    num_tokens = sum(row["completion_mask"].count(True) for row in dataset)
    loss = torch.zeros((), device=args.device)
    for batch in micro_batches(args, dataset):
        with autocast(args):
            loss += completion_loss(policy, batch, num_tokens)
    return {"eval/loss": total(loss)}


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
