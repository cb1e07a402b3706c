# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.23.0", "datasets==5.2.0", "tyro==1.0.17", "wandb==0.31.0"]
# ///
"""Reward model: stage 2, from pairs of a better and a worse response to a model that scores responses.

Bradley-Terry (REINFORCE++, arXiv 2501.03262v9, Eq. 14; InstructGPT, arXiv 2203.02155, Eq. 1): a response of
score s_c is preferred to one of s_r with probability sigmoid(s_c - s_r). A language model with a head of one
output learns the scores by maximum likelihood:

    loss = 1/N sum_i [softplus(-(s_c - s_r - margin)) + center_rewards_coefficient (s_c + s_r)^2]

N counts the pairs of one optimizer step over all ranks. The second term keeps the scores near 0, since the
first sees differences only (arXiv 2312.09244, Eq. 2). The score is read at the last token: EOS, unless
--max_length cuts it off. Texts are tokenized as in the policy scripts; chats go through the chat template.
AutoModelForSequenceClassification opens the result, with the same scores. Left out: LoRA, sharded models.

    python reward_model.py
    OMP_NUM_THREADS=8 torchrun --nproc-per-node 8 reward_model.py --model Qwen/Qwen2.5-1.5B-Instruct \
        --dataset trl-lib/ultrafeedback_binarized --eval_dataset trl-lib/ultrafeedback_binarized \
        --max_length 2048 --num_epochs 1 --micro_batch_size 4 --learning_rate 1e-5 --dtype bfloat16 \
        --gradient_checkpointing --run_dir runs/reward_model
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
    seed: int = 1  # of the new head and the order of pairs
    device: str = str(torch.accelerator.current_accelerator(check_available=True) or "cpu")  # cuda, mps, ...
    dtype: Literal["float32", "bfloat16"] = "float32"  # bfloat16 is autocast; weights and AdamW stay float32
    # Model and data
    model: str = "toy/policy"  # folder or hub id of a causal LM, or of a reward model, which keeps its head
    # .jsonl, .parquet, folder or hub id; `chosen` and `rejected`, text or chat, follow `prompt` or contain it
    dataset: str = "toy/preferences_train.jsonl"
    dataset_split: str = "train"  # split of a hub id or folder
    eval_dataset: str | None = None  # held-out pairs; column `group` splits the result; the toy has its own
    eval_split: str = "test"  # split of a hub id or folder
    max_length: int = 1024  # longer texts (in tokens) are cut at their end, as a rollout cuts a response
    # Optimization
    num_epochs: int = 2  # passes over the pairs
    batch_size: int = 64  # pairs per optimizer step, over all ranks
    micro_batch_size: int = 64  # pairs per forward pass, on each rank: memory only
    margin: float = 0.0  # by this the chosen score should be higher; a column `margin` gives it for each pair
    center_rewards_coefficient: float = 0.01  # weight of the term that keeps scores near 0
    learning_rate: float = 1e-3  # peak learning rate of AdamW
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


def preference_loss(chosen_scores, rejected_scores, margins=0.0, center=0.0, num_pairs=None):
    """Bradley-Terry loss and centering of pairs (b,), over num_pairs of the optimizer step, by default b."""
    losses = torch.nn.functional.softplus(-(chosen_scores - rejected_scores - margins))  # (b,)
    losses = losses + center * (chosen_scores + rejected_scores).square()
    return losses.sum() / (num_pairs or len(losses))


def encode(tokenizer, prompt, response):
    """The token ids of a prompt, its response and EOS, as a policy script gives them to a reward model."""
    if isinstance(prompt, str) and isinstance(response, str):
        tokenizer.chat_template = None  # saved without one, so that texts stay texts in a policy script
        ids = tokenizer(prompt)["input_ids"] + tokenizer(response, add_special_tokens=False)["input_ids"]
    else:
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if isinstance(response, str):
            response = [{"role": "assistant", "content": response}]
        chat = chat + response if response[0]["role"] == "assistant" else response  # which has the prompt
        ids = tokenizer.apply_chat_template(chat)["input_ids"]
    if tokenizer.eos_token_id not in ids[-2:]:  # the template may have added it
        ids += [tokenizer.eos_token_id]
    return ids


def score(model, texts):
    """Scores (b,) of texts, each a list of token ids: the output of the model at their last token."""
    tensors = [torch.tensor(ids) for ids in texts]
    # The model takes the last token that is not pad_id. Padding on the right needs no attention mask.
    pad_id = model.config.get_text_config().pad_token_id
    input_ids = pad_sequence(tensors, batch_first=True, padding_value=pad_id).to(model.device)  # (b, L)
    return model(input_ids=input_ids, use_cache=False).logits[:, 0]


def micro_batches(args, rows):
    """Yield this rank's part of the rows, micro_batch_size at a time: index, chosen and rejected texts."""
    by_length = sorted(range(RANK, len(rows), WORLD_SIZE), key=lambda i: rows[i]["length"])
    for first in range(0, len(by_length), args.micro_batch_size):
        index = by_length[first : first + args.micro_batch_size]
        chosen = [rows[i]["chosen_ids"] for i in index]
        rejected = [rows[i]["rejected_ids"] for i in index]
        yield {"index": index, "texts": chosen + rejected}


def add_head_and_pad_token(args, model, tokenizer, missing):
    """Start a new head with scores near 0, and add a pad token if there is none, or only EOS."""
    torch.manual_seed(args.seed)  # the same weights on all ranks
    if missing:
        model.score.weight.data.normal_(std=1 / (model.score.in_features + 1))
    # transformers takes the score at the last token that is not the pad token, so this must not be EOS.
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
        if len(tokenizer) > model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id


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
    model, tokenizer = load(args, device)
    dataset = load_rows(args, "dataset", args.dataset, args.dataset_split, model, tokenizer, args.batch_size)
    eval_dataset = None
    if args.eval_dataset or args.dataset == Args.dataset:  # the toy has its own held-out pairs
        eval_name = args.eval_dataset or "toy/preferences_heldout.jsonl"
        eval_dataset = load_rows(args, "eval_dataset", eval_name, args.eval_split, model, tokenizer)
    center = args.center_rewards_coefficient
    steps_per_epoch = len(dataset) // args.batch_size
    num_steps = args.num_epochs * steps_per_epoch
    if start >= num_steps and (run_dir / "model").exists():
        return say(f"{run_dir} is finished after {start} iterations: nothing to do")

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0, fused=True)
    scheduler = transformers.get_scheduler(args.lr_schedule, optimizer, args.warmup_iterations, num_steps)
    state = {"reward_model": model, "optimizer": optimizer, "scheduler": scheduler}
    if checkpoint:
        for name, part in state.items():
            part.load_state_dict(checkpoint[name])
    wandb_run = start_run(args, run_dir, saved_args, checkpoint) if RANK == 0 else None
    say(f"{model.num_parameters():,} parameters on {WORLD_SIZE} x {device.type}, writes to {run_dir}")

    for completed in range(start, num_steps + 1):
        # 2. Evaluation on held-out pairs, also before the first iteration and after the last
        is_last = completed == num_steps
        if eval_dataset and args.eval_every and (completed % args.eval_every == 0 or is_last):
            metrics, samples = evaluate(args, model, eval_dataset)
            log(run_dir, wandb_run, completed, metrics, samples)
        if is_last:
            break
        iteration = completed + 1
        began = time.time()

        # 3. Batch: the next pairs, those of all ranks
        epoch, step = divmod(completed, steps_per_epoch)
        generator = torch.Generator().manual_seed(hash((args.seed, epoch)))
        order = torch.randperm(len(dataset), generator=generator)
        step_rows = [dataset[i] for i in order.split(args.batch_size)[step]]
        margins = torch.tensor([row["margin"] for row in step_rows], device=device)

        # 4. Update: one optimizer step, its gradient summed over micro-batches and ranks
        step_scores = torch.zeros(2, args.batch_size, device=device)
        for batch in micro_batches(args, step_rows):
            scores = score(model, batch["texts"]).view(2, -1)  # (2, b), of chosen and rejected texts
            loss = preference_loss(scores[0], scores[1], margins[batch["index"]], center, args.batch_size)
            loss.backward()
            step_scores[:, batch["index"]] = scores.detach()
        grad_norm = optimizer_step(args, model, optimizer)

        # 5. Log and save
        seconds = time.time() - began
        step_scores = all_sum(step_scores)  # each rank has filled in its part
        chosen, rejected = step_scores
        metrics = {
            "loss": float(preference_loss(chosen, rejected, margins, center)),
            "accuracy": float((chosen > rejected).float().mean()),
            "margin": float((chosen - rejected).mean()),
            "score_mean": float(step_scores.mean()),
            "score_std": float(step_scores.std(correction=0)),
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
            model.save_pretrained(folder)
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
    """A model with one output and float32 weights, in eval mode and so without dropout, and its tokenizer."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    where = f"--model {args.model}"
    path = locate(args.model)
    with explain(where, "use a folder or a hub id of a model"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        auto_class = transformers.AutoModelForSequenceClassification
        options = {"num_labels": 1, "ignore_mismatched_sizes": True, "output_loading_info": True}
        model, info = auto_class.from_pretrained(path, dtype=torch.float32, use_safetensors=True, **options)
    # transformers fills in missing weights at random, which is right for those of the head only.
    missing = set(info["missing_keys"])
    mismatched = info["mismatched_keys"]
    is_usable = hasattr(model, "score") and missing <= {"score.weight"} and not mismatched
    check(is_usable, f"{where}: lacks weights {missing}, has others in {mismatched}; use another model")
    check(tokenizer.eos_token, f"{where}: has no EOS token; save one in its tokenizer")
    add_head_and_pad_token(args, model, tokenizer, missing)
    # cuDNN's bfloat16 attention gave NaN and wrong results on H100 and B200 (pytorch issues 196678, 193893).
    torch.backends.cuda.enable_cudnn_sdp(False)
    if args.gradient_checkpointing:
        # transformers' own checkpointing works in train mode only, which would switch dropout on.
        for layer in model.modules():
            if isinstance(layer, transformers.modeling_layers.GradientCheckpointingLayer):
                layer.forward = functools.partial(recomputed, layer.forward)
    if args.dtype == "bfloat16":  # without the head: in bfloat16 a score has three digits
        decoder = model.get_decoder()
        decoder.forward = torch.autocast(device.type, torch.bfloat16)(decoder.forward)
    return model.to(device).eval(), tokenizer


def recomputed(forward, *args, **kwargs):
    """Call forward. Its activations are computed again in the backward pass instead of being kept."""
    if torch.is_grad_enabled():
        return checkpoint_activations(forward, *args, use_reentrant=False, **kwargs)
    return forward(*args, **kwargs)


def load_rows(args, flag, name, split, model, tokenizer, min_rows=1):
    """The pairs of a dataset, with the token ids of both texts. Those equal after the cut are left out."""
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
                row[f"{side}_ids"] = encode(tokenizer, row["prompt"], row[side])[: args.max_length]
        row["length"] = max(len(row["chosen_ids"]), len(row["rejected_ids"]))
        row["margin"] = args.margin if row.get("margin") is None else row["margin"]
    kept = [row for row in rows if row["chosen_ids"] != row["rejected_ids"]]
    summary = f"{len(kept)} of {len(rows)} pairs differ in their first --max_length {args.max_length} tokens"
    check(len(kept) >= min_rows, f"{where}: {summary}; give {min_rows} or more")
    say(f"{flag}: {summary}")
    longest = max(row["length"] for row in kept)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    check(longest <= limit, f"--max_length {args.max_length}: --model has {limit} positions; lower it")
    return kept


@torch.no_grad()
def evaluate(args, model, dataset):
    """Loss, margin and accuracy on held-out pairs, over all ranks, and the scores of three pairs."""
    scores = torch.zeros(2, len(dataset), device=model.device)
    for batch in micro_batches(args, dataset):
        scores[:, batch["index"]] = score(model, batch["texts"]).view(2, -1)
    chosen, rejected = all_sum(scores)  # (N,) each; each rank has filled in its part
    margins = torch.tensor([row["margin"] for row in dataset], device=model.device)
    metrics = {"eval/loss": float(preference_loss(chosen, rejected, margins))}
    metrics["eval/margin"] = float((chosen - rejected).mean())
    groups = {"eval/accuracy": (chosen > rejected).tolist()}
    for row, is_right in zip(dataset, groups["eval/accuracy"]):
        if "group" in row:
            groups.setdefault(f"eval/accuracy/{row['group']}", []).append(is_right)
    metrics |= {name: sum(x) / len(x) for name, x in groups.items()}
    samples = []
    for i, row in enumerate(dataset[:3]):
        samples.append({"prompt": row["prompt"], "response": row["chosen"], "score": float(chosen[i])})
        samples.append({"prompt": row["prompt"], "response": row["rejected"], "score": float(rejected[i])})
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
