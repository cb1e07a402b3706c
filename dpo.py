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

N counts the pairs of one optimizer step over all ranks; EOS is a token of its response, nothing is divided by
the length. pi_ref is --model: its log-probs are computed at the start, so that one model is in memory.
Nothing is sampled: the policy learns from given responses. The policy scripts, with a reward model of the
same pairs, let it learn from its own mistakes. Left out: LoRA, sharded models.

    python dpo.py
    OMP_NUM_THREADS=8 torchrun --nproc-per-node 8 dpo.py --model Qwen/Qwen2.5-1.5B-Instruct \
        --dataset trl-lib/ultrafeedback_binarized --eval_dataset trl-lib/ultrafeedback_binarized \
        --max_length 2048 --num_epochs 1 --micro_batch_size 2 --learning_rate 5e-7 --dtype bfloat16 \
        --gradient_checkpointing --run_dir runs/dpo
"""

import functools
import json
import math
import os
import shutil
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import datasets
import torch
import torch.distributed as dist
import torch.distributed.nn  # imported after init_process_group, it would keep the process group alive
import transformers
import tyro
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint as checkpoint_activations

RANK = int(os.environ.get("RANK", 0))  # set by torchrun
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
LOGS = ("metrics.jsonl", "samples.jsonl")


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of the run
    seed: int = 1  # of the order of pairs
    device: str = str(torch.accelerator.current_accelerator(check_available=True) or "cpu")  # cuda, mps, ...
    dtype: Literal["float32", "bfloat16"] = "float32"  # bfloat16 is autocast; weights and AdamW stay float32
    # Model and data
    model: str = "toy/policy"  # starting policy and reference: folder or hub id of a causal LM
    # .jsonl, .parquet, folder or hub id; `chosen` and `rejected`, text or chat, follow `prompt` or contain it
    dataset: str = "toy/preferences_train.jsonl"
    dataset_split: str = "train"  # split of a hub id or folder
    eval_dataset: str | None = None  # held-out pairs; column `group` splits the result; the toy has its own
    eval_split: str = "test"  # split of a hub id or folder
    max_length: int = 1024  # longer texts (in tokens) are cut at their end
    # Optimization
    num_epochs: int = 2  # passes over the pairs
    batch_size: int = 64  # pairs per optimizer step, over all ranks
    micro_batch_size: int = 64  # pairs per forward pass, on each rank: memory only
    beta: float = 0.1  # weight of the KL penalty; a smaller one lets the policy move farther from pi_ref
    learning_rate: float = 5e-5  # peak learning rate of AdamW
    lr_schedule: str = "linear"  # or constant_with_warmup, cosine, ...: names of transformers.get_scheduler
    warmup_iterations: int = 20  # the learning rate rises linearly from 0 over these
    max_grad_norm: float = 1.0  # the gradient is clipped to this norm
    gradient_checkpointing: bool = False  # recompute activations: less memory, a slower update
    # Run
    run_dir: str | None = None  # resume the run in this folder, or start it there; None: a new one in runs/
    eval_every: int = 70  # iterations between evaluations, also before the first and after the last; 0: none
    log_every: int = 20  # iterations between printed lines; metrics.jsonl has every iteration
    save_every: int = 200  # iterations between checkpoints; the last is always saved; 0: only that
    track: bool = False  # log to Weights & Biases too; WANDB_PROJECT names the project


def dpo_loss(
    chosen_logprobs, rejected_logprobs, ref_chosen_logprobs, ref_rejected_logprobs, beta, num_pairs=None
):
    """Eq. 7 on pairs (b,), over num_pairs of the optimizer step, by default b. Log-probs are of responses."""
    chosen_rewards = beta * (chosen_logprobs - ref_chosen_logprobs)  # h(c_i), (b,)
    rejected_rewards = beta * (rejected_logprobs - ref_rejected_logprobs)
    losses = torch.nn.functional.softplus(rejected_rewards - chosen_rewards)  # -log sigmoid(h(c_i) - h(r_i))
    return losses.sum() / (num_pairs or len(losses))


def encode(tokenizer, prompt, response, max_length):
    """The first token ids of prompt, response and EOS, and a mask that is True on the last two."""
    if isinstance(response, list):  # messages, of which the last is the response
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        chat = chat + response if response[0]["role"] == "assistant" else response  # which has the prompt
        prompt = chat[:-1]
        response = chat[-1]["content"]
    if isinstance(prompt, str):
        prompt_ids = tokenizer(prompt)["input_ids"]
    else:
        prompt_ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
    response_ids = tokenizer(response, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    mask = [False] * len(prompt_ids) + [True] * len(response_ids)
    return {"input_ids": (prompt_ids + response_ids)[:max_length], "response_mask": mask[:max_length]}


def micro_batches(args, rows, device):
    """Yield this rank's part of the rows, micro_batch_size at a time, similar lengths together.

    index: which rows. input_ids, response_mask (2b, L): chosen, then rejected texts, padded on the right
    """
    by_length = sorted(range(RANK, len(rows), WORLD_SIZE), key=lambda i: rows[i]["length"])
    for first in range(0, len(by_length), args.micro_batch_size):
        index = by_length[first : first + args.micro_batch_size]
        chosen = [rows[i]["chosen_text"] for i in index]
        rejected = [rows[i]["rejected_text"] for i in index]
        batch = {"index": index}
        for name in ["input_ids", "response_mask"]:
            tensors = [torch.tensor(text[name]) for text in chosen + rejected]
            batch[name] = pad_sequence(tensors, batch_first=True).to(device)
        yield batch


def response_logprobs(model, batch):
    """Log-probs (2, b) of chosen and rejected responses, summed over their tokens."""
    columns = batch["response_mask"].any(0).nonzero().squeeze(1)  # (T,) those with tokens of a response
    tokens = batch["input_ids"][:, columns]  # (2b, T)
    mask = batch["response_mask"][:, columns]
    # A token's logits are one position earlier. No attention mask: padding on the right is not attended to.
    output = model(input_ids=batch["input_ids"], use_cache=False, logits_to_keep=columns - 1)
    logits = output.logits.to(model.dtype)  # (2b, T, V), as .float(), but float64 stays float64
    logprobs = logits.log_softmax(-1).gather(2, tokens.unsqueeze(2)).squeeze(2)
    return logprobs.masked_fill(~mask, 0.0).sum(1).view(2, -1)


@torch.no_grad()
def all_logprobs(args, policy, rows):
    """Log-probs (2, N) of the chosen and rejected responses of all rows, computed on all ranks."""
    logprobs = torch.zeros(2, len(rows), device=policy.device)
    for batch in micro_batches(args, rows, policy.device):
        logprobs[:, batch["index"]] = response_logprobs(policy, batch)
    return all_sum(logprobs)  # each rank has filled in its part


def all_sum(x):
    """The sum of the tensor x over all ranks; x itself on one rank. Every rank must call it."""
    if dist.is_initialized():
        x = x.clone()  # all_reduce works in place
        dist.all_reduce(x)
    return x


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
    # 1. Setup: ranks, run folder, model, data, optimizer
    check_args(args)
    device = choose_device(args)
    run_dir, saved_args, checkpoint = find_run(args)
    start = checkpoint["iteration"] if checkpoint else 0
    connect_ranks(device, run_dir, start)
    policy, tokenizer = load(args, device)
    dataset = load_rows(args, "dataset", args.dataset, args.dataset_split, policy, tokenizer, args.batch_size)
    eval_dataset = None
    if args.eval_dataset or args.dataset == Args.dataset:  # the toy has its own held-out pairs
        eval_name = args.eval_dataset or "toy/preferences_heldout.jsonl"
        eval_dataset = load_rows(args, "eval_dataset", eval_name, args.eval_split, policy, tokenizer)
    steps_per_epoch = len(dataset) // args.batch_size
    num_steps = args.num_epochs * steps_per_epoch
    if start >= num_steps and (run_dir / "model").exists():
        return say(f"{run_dir} is finished after {start} iterations: nothing to do")

    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate, weight_decay=0.0, fused=True)
    scheduler = transformers.get_scheduler(args.lr_schedule, optimizer, args.warmup_iterations, num_steps)
    state = {"policy": policy, "optimizer": optimizer, "scheduler": scheduler}
    # The policy is the reference until a checkpoint is loaded.
    ref_logprobs = all_logprobs(args, policy, dataset)  # (2, N)
    eval_ref_logprobs = all_logprobs(args, policy, eval_dataset) if eval_dataset else None
    if checkpoint:
        for name, part in state.items():
            part.load_state_dict(checkpoint[name])
    wandb_run = start_run(args, run_dir, saved_args, checkpoint) if RANK == 0 else None
    say(f"{policy.num_parameters():,} parameters on {WORLD_SIZE} x {device.type}, writes to {run_dir}")

    for completed in range(start, num_steps + 1):
        # 2. Evaluation on held-out pairs, also before the first iteration and after the last
        is_last = completed == num_steps
        if eval_dataset and args.eval_every and (completed % args.eval_every == 0 or is_last):
            metrics, samples = evaluate(args, policy, tokenizer, eval_dataset, eval_ref_logprobs)
            log(run_dir, wandb_run, completed, metrics, samples)
        if is_last:
            break
        iteration = completed + 1
        began = time.time()

        # 3. Batch: the next pairs, those of all ranks
        epoch, step = divmod(completed, steps_per_epoch)
        generator = torch.Generator().manual_seed(hash((args.seed, epoch)))
        order = torch.randperm(len(dataset), generator=generator)
        step_index = order.split(args.batch_size)[step]
        step_rows = [dataset[i] for i in step_index]
        step_ref = ref_logprobs[:, step_index]  # (2, batch_size)

        # 4. Update: one optimizer step, its gradient summed over micro-batches and ranks
        step_logprobs = torch.zeros_like(step_ref)
        for batch in micro_batches(args, step_rows, device):
            logprobs = response_logprobs(policy, batch)  # (2, b), of chosen and rejected responses
            ref = step_ref[:, batch["index"]]
            loss = dpo_loss(logprobs[0], logprobs[1], ref[0], ref[1], args.beta, args.batch_size)
            loss.backward()
            step_logprobs[:, batch["index"]] = logprobs.detach()
        grad_norm = optimizer_step(args, policy, optimizer)

        # 5. Log and save
        seconds = time.time() - began
        step_logprobs = all_sum(step_logprobs)  # each rank has filled in its part
        loss = dpo_loss(step_logprobs[0], step_logprobs[1], step_ref[0], step_ref[1], args.beta)
        rewards = args.beta * (step_logprobs - step_ref)  # the implicit ones
        metrics = {
            "loss": float(loss),
            "accuracy": float((rewards[0] > rewards[1]).float().mean()),
            "margin": float((rewards[0] - rewards[1]).mean()),
            "chosen_reward": float(rewards[0].mean()),
            "rejected_reward": float(rewards[1].mean()),
            "grad_norm": float(grad_norm),
            "learning_rate": scheduler.get_last_lr()[0],
            "pairs_per_second": args.batch_size / seconds,
        }
        scheduler.step()
        log(run_dir, wandb_run, iteration, metrics, [], show=iteration % args.log_every == 0 or seconds > 10)
        save_due = args.save_every and iteration % args.save_every == 0
        if save_due or iteration == num_steps:
            save_checkpoint(run_dir, iteration, state)

    # 6. The result, a folder that from_pretrained opens
    if RANK == 0:
        with replacing(run_dir / "model") as folder:
            policy.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    if dist.is_initialized():
        dist.destroy_process_group()


# --- plumbing: data, evaluation, checkpoints; nothing of the algorithm stands below ---


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
    positive = ["batch_size", "micro_batch_size", "max_length", "max_grad_norm", "log_every"]
    for name, value in vars(args).items():
        if isinstance(value, int | float):
            is_valid = math.isfinite(value) and (value > 0 or (value == 0 and name not in positive))
            check(is_valid, f"--{name} {value}: use a finite number above 0, or 0 where that means off")
    is_multiple = args.batch_size % WORLD_SIZE == 0
    check(is_multiple, f"--batch_size {args.batch_size}: use a multiple of {WORLD_SIZE}, the number of ranks")


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
    check(not name.startswith("toy/"), f"no {name} beside this script; give --model and --dataset")
    return name


def load(args, device):
    """A model with float32 weights, in eval mode and so without dropout, and its tokenizer."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    where = f"--model {args.model}"
    path = locate(args.model)
    with explain(where, "use a folder or a hub id of a model"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
    # transformers does not refuse a reward model, and fills in missing weights at random.
    kind = str(model.config.architectures)
    missing = info["missing_keys"]
    is_policy = "SequenceClassification" not in kind and not missing
    check(is_policy, f"{where}: is {kind}, {len(missing)} weights missing; use another model")
    check(tokenizer.eos_token, f"{where}: has no EOS token; save one in its tokenizer")
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
    """The encoded pairs of a dataset. Those equal, or without a response, after the cut are left out."""
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
        with explain(f"{where}: row {number}", "fill in `chosen` and `rejected`, texts or chats"):
            row["prompt"] = row.get("prompt") or ""
            for side in ["chosen", "rejected"]:
                row[f"{side}_text"] = encode(tokenizer, row["prompt"], row[side], args.max_length)
        chosen = row["chosen_text"]
        rejected = row["rejected_text"]
        has_prompts = not chosen["response_mask"][0] and not rejected["response_mask"][0]
        check(has_prompts, f"{where}: row {number} has an empty prompt; fill in the column `prompt`")
        has_responses = chosen["response_mask"][-1] and rejected["response_mask"][-1]  # not cut off
        row["is_kept"] = has_responses and chosen != rejected
        row["length"] = max(len(chosen["input_ids"]), len(rejected["input_ids"]))
    kept = [row for row in rows if row["is_kept"]]
    summary = f"{len(kept)} of {len(rows)} pairs differ in their first --max_length {args.max_length} tokens"
    check(len(kept) >= min_rows, f"{where}: {summary}; give {min_rows} or more")
    say(f"{flag}: {summary}")
    longest = max(row["length"] for row in kept)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    check(longest <= limit, f"--max_length {args.max_length}: --model has {limit} positions; lower it")
    return kept


def evaluate(args, policy, tokenizer, dataset, ref_logprobs):
    """Loss, margin and accuracy on held-out pairs, over all ranks, and greedy responses to three prompts."""
    logprobs = all_logprobs(args, policy, dataset)  # (2, N)
    loss = dpo_loss(logprobs[0], logprobs[1], ref_logprobs[0], ref_logprobs[1], args.beta)
    rewards = args.beta * (logprobs - ref_logprobs)
    metrics = {"eval/loss": float(loss), "eval/margin": float((rewards[0] - rewards[1]).mean())}
    groups = {"eval/accuracy": (rewards[0] > rewards[1]).tolist()}
    for row, is_right in zip(dataset, groups["eval/accuracy"]):
        if "group" in row:
            groups.setdefault(f"eval/accuracy/{row['group']}", []).append(is_right)
    metrics |= {name: sum(x) / len(x) for name, x in groups.items()}

    samples = []
    greedy = {"do_sample": False, "repetition_penalty": 1.0, "eos_token_id": tokenizer.eos_token_id}
    for row in dataset[:3]:
        P = row["chosen_text"]["response_mask"].index(True)
        prompt_ids = torch.tensor([row["chosen_text"]["input_ids"][:P]], device=policy.device)
        output = policy.generate(prompt_ids, max_new_tokens=min(256, row["length"] - P), **greedy)
        prompt = tokenizer.decode(prompt_ids[0])
        samples.append({"prompt": prompt, "response": tokenizer.decode(output[0, P:])})
    return metrics, samples


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
        if args.lr_schedule == "constant_with_warmup":  # others depend on num_epochs
            may_change += ["num_epochs"]
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
    """On rank 0, add to the logs of the run, and print metrics and samples if show is true."""
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
        texts = [f"{name} {x:.4g}" for name, x in metrics.items()]
        say(f"iteration {iteration:4d}   " + "   ".join(texts))
        for sample in samples:
            say(f"    {str(sample['prompt'])[-80:]!r} -> {sample['response']!r}")


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
