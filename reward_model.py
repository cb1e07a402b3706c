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
Train a toy model (half a minute, held-out accuracy 0.54 to 0.76), or a real one on 8 GPUs:

    python reward_model.py
    OMP_NUM_THREADS=8 torchrun --nproc-per-node 8 reward_model.py --model Qwen/Qwen2.5-1.5B-Instruct \
        --dataset trl-lib/ultrafeedback_binarized --eval_dataset trl-lib/ultrafeedback_binarized \
        --max_length 2048 --num_epochs 1 --micro_batch_size 4 --learning_rate 1e-5 --dtype bfloat16 \
        --gradient_checkpointing --run_dir runs/reward_model
"""

import atexit
import json
import math
import os
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
from typing import Literal

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
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint as recompute

RANK = int(os.environ.get("RANK", 0))  # set by torchrun
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


@dataclass
class Args:
    # The comment behind a flag is its --help text.
    exp_name: str = Path(__file__).stem  # name of the run
    seed: int = 1  # of the new head and the order of pairs
    device: str = str(torch.accelerator.current_accelerator(check_available=True) or "cpu")  # cuda, mps, ...
    dtype: Literal["float32", "bfloat16"] = "float32"  # bfloat16 is autocast; weights and AdamW stay float32
    # Model and data
    model: str = "toy/policy"  # folder or hub id of a causal LM, or of a reward model, which keeps its head
    # .jsonl, .parquet, folder or hub id; `chosen` and `rejected`, text or chat, follow `prompt` or contain it
    dataset: str = "toy/preferences_train.jsonl"
    dataset_split: str = "train"  # split of a hub id or folder
    eval_dataset: str | None = None  # held-out pairs, compared by column `group`; the toy has some by default
    eval_split: str = "test"  # split of a hub id or folder
    max_length: int = 1024  # longer texts (in tokens) are cut at their end, as a rollout cuts a response
    # Optimization
    num_epochs: int = 2  # passes over the pairs
    batch_size: int = 64  # pairs per optimizer step, over all ranks
    micro_batch_size: int = 64  # pairs per forward pass on a rank: memory only
    margin: float = 0.0  # by this the chosen score should be higher; a column `margin` gives it for each pair
    center_rewards_coefficient: float = 0.01  # weight of the term that keeps scores near 0
    learning_rate: float = 1e-3  # peak learning rate of AdamW
    warmup_iterations: int = 20  # the learning rate rises linearly to its peak over this many iterations
    anneal_lr: bool = True  # the learning rate falls linearly over the run, to 0 after it
    max_grad_norm: float = 1.0  # the gradient is clipped to this norm
    gradient_checkpointing: bool = False  # recompute activations: less memory, a slower update
    # Run
    run_dir: str | None = None  # resume the run in this folder, or start it; None: a new folder in runs/
    eval_every: int = 70  # iterations between evaluations, also before the first and after the last; 0: none
    log_every: int = 20  # iterations between printed lines; metrics.jsonl has every iteration
    save_every: int = 200  # iterations between checkpoints; the last is always saved; 0: only the last
    track: bool = False  # log to Weights & Biases too; WANDB_PROJECT names the project


def preference_loss(chosen_scores, rejected_scores, margins=None, center=0.0, num_pairs=None):
    """Bradley-Terry loss and centering of pairs (b,), over num_pairs of the optimizer step, by default b."""
    if margins is None:
        margins = torch.zeros_like(chosen_scores)
    if margins.shape != chosen_scores.shape:  # it would be compared with the margins of other pairs
        raise ValueError(f"margins {margins.shape} of scores {chosen_scores.shape}")
    losses = torch.nn.functional.softplus(-(chosen_scores - rejected_scores - margins))  # (b,)
    losses = losses + center * (chosen_scores + rejected_scores).square()
    return losses.sum() / (num_pairs or len(losses))


def encode(tokenizer, prompt, response):
    """The token ids of a prompt, its response and EOS, as a policy script gives them to a reward model."""
    if isinstance(prompt, str):
        ids = token_ids(tokenizer, prompt) + tokenizer(response, add_special_tokens=False)["input_ids"]
    else:
        chat = [*prompt, {"role": "assistant", "content": response}]
        ids = tokenizer.apply_chat_template(chat)["input_ids"]
    # A template may end the turn with EOS, or with EOS and a newline.
    if tokenizer.eos_token_id not in ids[-2:]:
        ids = [*ids, tokenizer.eos_token_id]
    return ids


def score(args, model, batch):
    """Scores (2, b) of chosen and rejected texts: the output of the head at the last token of each."""
    with autocast(args):
        # No attention mask: padding on the right is not attended to.
        output = model.base_model(input_ids=batch["input_ids"], use_cache=False)
    texts = torch.arange(len(batch["last"]), device=model.device)
    last = output.last_hidden_state[texts, batch["last"]].to(model.dtype)  # (2b, hidden_size)
    # The head is outside of autocast: in bfloat16, a score has three digits.
    return model.score(last).view(2, -1)


def all_sum(x):
    """The sum of the tensor x over all ranks; x itself on one rank. Every rank must call it."""
    if dist.is_initialized():
        x = x.clone()  # all_reduce works in place
        dist.all_reduce(x)
    return x


def total(x):
    """The sum of all elements of x on all ranks, as a number."""
    return float(all_sum(x.sum()))


def choose_rows(args, dataset, iteration):
    """The indices of this rank's rows for an iteration. Each epoch has a new order, less a remainder."""
    epoch, batch_number = divmod(iteration - 1, len(dataset) // args.batch_size)
    generator = torch.Generator().manual_seed(1_000_000 * args.seed + epoch)
    shuffled = torch.randperm(len(dataset), generator=generator)
    chosen = shuffled.split(args.batch_size)[batch_number]
    return chosen.chunk(WORLD_SIZE)[RANK].tolist()


def micro_batches(dataset, indices, size, device):
    """Yield (part, batch): up to `size` of the indices of rows, and their tensors.

    input_ids (2b, L): chosen, then rejected texts, padded on the right. last (2b,): where each text ends.
    margins (b,)
    """
    by_length = sorted(indices, key=lambda i: dataset[i]["length"])  # similar lengths go together
    for first in range(0, len(by_length), size):
        part = by_length[first : first + size]
        chosen = [torch.tensor(dataset[i]["chosen_ids"]) for i in part]
        rejected = [torch.tensor(dataset[i]["rejected_ids"]) for i in part]
        texts = chosen + rejected
        batch = {
            "input_ids": pad_sequence(texts, batch_first=True),
            "last": torch.tensor([len(ids) - 1 for ids in texts]),
            "margins": torch.tensor([dataset[i]["margin"] for i in part]),
        }
        yield part, {name: tensor.to(device) for name, tensor in batch.items()}


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
    # 1. Setup: run folder, ranks, model, data, optimizer
    check_args(args)
    run_dir = find_run(args)
    device = start_ranks(args)

    model, tokenizer = load_model(args, device)
    dataset = load_rows(args, "dataset", args.dataset, args.dataset_split, model, tokenizer, args.batch_size)
    eval_dataset = load_eval_rows(args, model, tokenizer)  # None: no evaluation
    if isinstance(dataset[0]["prompt"], str):
        tokenizer.chat_template = None  # a policy script would put texts through it
    num_iterations = args.num_epochs * (len(dataset) // args.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, fused=True)
    state = {"model": model, "optimizer": optimizer}  # what a checkpoint holds

    # Resume the run, or start it. `start` counts the finished iterations.
    start, log_sizes = load_checkpoint(run_dir, state)
    weights = [float(weight.detach().sum()) for weight in model.parameters()]
    check_ranks_agree(args, {"weights": weights, "rows of --dataset": dataset, "checkpoint.pt": log_sizes})
    open_run(args, run_dir, log_sizes)
    say(f"{model.num_parameters():,} parameters on {WORLD_SIZE} x {device.type}, writes to {run_dir}")

    # 2. Evaluation on held-out pairs, before the first iteration; the later evaluations are in step 6
    if eval_dataset and start == 0:
        metrics, samples = evaluate(args, model, eval_dataset)
        log(args, run_dir, 0, metrics, samples)

    for iteration in range(start + 1, num_iterations + 1):
        began = time.time()

        # 3. Batch: this rank's pairs
        indices = choose_rows(args, dataset, iteration)

        # 4. Update: one optimizer step, its gradient summed over micro-batches and ranks
        lr_factor = min(1.0, iteration / max(1, args.warmup_iterations))
        if args.anneal_lr:
            lr_factor = min(lr_factor, 1 - (iteration - 1) / num_iterations)
        step_loss = torch.zeros((), device=device)  # of this rank's micro-batches
        step_scores = []
        center = args.center_rewards_coefficient
        for _, batch in micro_batches(dataset, indices, args.micro_batch_size, device):
            scores = score(args, model, batch)  # (2, b), of chosen and rejected texts
            loss = preference_loss(scores[0], scores[1], batch["margins"], center, args.batch_size)
            loss.backward()
            step_loss += loss.detach()
            step_scores.append(scores.detach())
        grad_norm = optimizer_step(args, model, optimizer, args.learning_rate * lr_factor)

        # 5. Metrics, over all ranks
        scores = torch.cat(step_scores, 1)  # (2, pairs of this rank)
        differences = scores[0] - scores[1]
        score_mean = total(scores) / (2 * args.batch_size)
        score_variance = total((scores - score_mean).square()) / (2 * args.batch_size)
        seconds = time.time() - began
        metrics = {
            "loss": total(step_loss),
            "accuracy": total(differences > 0) / args.batch_size,
            "margin": total(differences) / args.batch_size,
            "score_mean": score_mean,
            "score_std": math.sqrt(score_variance),
            "grad_norm": float(grad_norm),
            "learning_rate": args.learning_rate * lr_factor,
            "seconds": seconds,
            "pairs_per_second": args.batch_size / seconds,
        }

        # 6. Evaluate, log and save
        is_last = iteration == num_iterations
        samples = []
        if eval_dataset and (is_last or iteration % args.eval_every == 0):
            eval_metrics, samples = evaluate(args, model, eval_dataset)
            metrics |= eval_metrics
        log(args, run_dir, iteration, metrics, samples)
        if is_last or (args.save_every and iteration % args.save_every == 0):
            save_checkpoint(run_dir, iteration, state)

    # 7. The result, a folder that from_pretrained opens
    if RANK == 0:
        save_model(run_dir, model, tokenizer)
    if dist.is_initialized():
        dist.destroy_process_group()


# --- plumbing: models, data, evaluation, checkpoints; nothing of the algorithm stands below ---

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


def check_args(args):
    """Refuse numbers that cannot work before anything is loaded."""
    positive = ["batch_size", "micro_batch_size", "max_length", "max_grad_norm", "log_every"]
    for name, value in vars(args).items():
        if isinstance(value, int | float):
            check(0 <= value < math.inf, f"--{name} {value}: use a finite number, 0 or more")
            check(value > 0 or name not in positive, f"--{name} {value}: use a number above 0")
    multiple = f"use a multiple of {WORLD_SIZE}, the number of ranks"
    check(args.batch_size % WORLD_SIZE == 0, f"--batch_size {args.batch_size}: {multiple}")
    toy_flags = ["learning_rate", "max_length"]
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


def load_model(args, device):
    """A model with one output and float32 weights, in eval mode and so without dropout, and its tokenizer."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    where = f"--model {args.model}"
    is_hub_id = args.model.count("/") <= 1 and not args.model.startswith(("toy/", "."))
    remedy = "there is no such folder; for toy/, start the script in the repository"
    check(is_hub_id or Path(args.model).is_dir(), f"{where}: {remedy}")
    with explain(where, "use a folder or a hub id"):
        # Without trust_remote_code=False, transformers would ask on stdin whether to run code of the model.
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
        auto_class = transformers.AutoModelForSequenceClassification
        options = {"use_safetensors": True, "trust_remote_code": False, "output_loading_info": True}
        options |= {"num_labels": 1, "ignore_mismatched_sizes": True}  # a head of another size: refused below
        model, info = auto_class.from_pretrained(args.model, dtype=torch.float32, **options)
    # transformers fills in missing weights at random, which is right for those of a new head only.
    missing = set(info["missing_keys"])
    is_right = hasattr(model, "score") and missing <= {"score.weight"} and not info["mismatched_keys"]
    message = "is no decoder, lacks weights, or has several outputs"
    check(is_right, f"{where}: {message}; use a policy, or a reward model with one output")
    is_finite = all(weight.isfinite().all() for weight in model.parameters())
    check(is_finite, f"{where}: has weights that are not finite; use another model")
    check(tokenizer.eos_token, f"{where}: has no EOS token; save one in its tokenizer")
    torch.manual_seed(args.seed)  # the same new weights on all ranks
    if missing:
        # Scores start near 0.
        model.score.weight.data.normal_(std=1 / (model.score.in_features + 1))
    add_pad_token(model, tokenizer)
    if args.gradient_checkpointing:
        # transformers' own checkpointing works in train mode only, which would switch dropout on.
        for layer in model.modules():
            if isinstance(layer, transformers.modeling_layers.GradientCheckpointingLayer):
                layer.forward = partial(recompute, layer.forward, use_reentrant=False)
    return model.to(device).eval(), tokenizer


def add_pad_token(model, tokenizer):
    """Add a pad token that is not EOS: transformers takes the score at the last token that is not pad."""
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
        if tokenizer.pad_token_id >= len(model.get_input_embeddings().weight):
            model.resize_token_embeddings(tokenizer.pad_token_id + 1, mean_resizing=False)
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id


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
    if not all(message.get("role") and message.get("content") for message in prompt):
        raise ValueError("a message has no role or no content")
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]


def split_response(prompt, response):
    """The prompt, and the text of a response, which may be messages that follow the prompt or contain it."""
    if isinstance(response, list):
        chat = response
        if response[0]["role"] == "assistant":  # without its prompt
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            chat = messages + response
        if chat[-1]["role"] != "assistant":
            raise ValueError("the last message is not the assistant's")
        prompt = chat[:-1]
        response = chat[-1]["content"]
    if not isinstance(response, str):
        raise ValueError(f"the response is {response!r}, not text")
    return prompt, response


def load_rows(args, flag, name, split, model, tokenizer, min_rows=1):
    """The pairs of a dataset, with the token ids of both texts. Those equal after the cut are left out."""
    where = f"--{flag} {name}"
    with explain(where, "use a .jsonl, a .parquet, a folder or a hub id"):
        rows = read_rows(where, name, split)
    num_embeddings = len(model.get_input_embeddings().weight)
    for number, row in enumerate(rows):
        with explain(f"{where}: row {number}", "fix its columns, or leave it out"):
            prompt = row.get("prompt") or ""
            row["prompt"], row["chosen"] = split_response(prompt, row["chosen"])
            other_prompt, row["rejected"] = split_response(prompt, row["rejected"])
            if row["prompt"] != other_prompt:
                raise ValueError("`chosen` and `rejected` have different prompts")
            token_ids(tokenizer, row["prompt"])  # an exception if it is a chat that cannot be read
            for side in ["chosen", "rejected"]:
                row[f"{side}_ids"] = encode(tokenizer, row["prompt"], row[side])[: args.max_length]
            row["length"] = max(len(row["chosen_ids"]), len(row["rejected_ids"]))
            if row.get("margin") is None:
                row["margin"] = args.margin
            if not isinstance(row["margin"], int | float) or not math.isfinite(row["margin"]):
                raise ValueError(f"`margin` is {row['margin']!r}, not a finite number")
        is_known = max(row["chosen_ids"] + row["rejected_ids"]) < num_embeddings
        message = f"{where}: row {number} has a token beyond the {num_embeddings} of --model"
        check(is_known, f"{message}; use its tokenizer")
    kept = [row for row in rows if row["chosen_ids"] != row["rejected_ids"]]
    summary = f"{len(kept)} of {len(rows)} pairs differ in their first --max_length {args.max_length} tokens"
    check(len(kept) >= min_rows, f"{where}: {summary}; give {min_rows} or more, or lower --batch_size")
    say(f"{flag}: {summary}")
    longest = max(row["length"] for row in kept)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    message = f"--max_length {args.max_length}: the longest text has {longest} tokens"
    check(longest <= limit, f"{message}, the model has {limit} positions; lower it")
    return kept


def load_eval_rows(args, model, tokenizer):
    """The held-out pairs, or None. Only the toy has some by default."""
    name = args.eval_dataset
    if args.dataset == Args.dataset and not name:
        name = "toy/preferences_heldout.jsonl"
    if not name or not args.eval_every:
        return None
    return load_rows(args, "eval_dataset", name, args.eval_split, model, tokenizer)


@torch.no_grad()
def evaluate(args, model, dataset):
    """Loss, margin and accuracy on held-out pairs, over all ranks, and the scores of three pairs."""
    scores = torch.zeros(2, len(dataset), device=model.device)
    indices = range(RANK, len(dataset), WORLD_SIZE)
    for part, batch in micro_batches(dataset, indices, args.micro_batch_size, model.device):
        scores[:, part] = score(args, model, batch)
    chosen, rejected = all_sum(scores)  # (N,) each; each rank has filled in its part
    margins = torch.tensor([row["margin"] for row in dataset], device=model.device)
    metrics = {
        "eval/loss": float(preference_loss(chosen, rejected, margins)),
        "eval/margin": float((chosen - rejected).mean()),
    }
    groups = defaultdict(list)
    for row, is_right in zip(dataset, (chosen > rejected).tolist()):
        groups["eval/accuracy"].append(is_right)
        if row.get("group") is not None:
            groups[f"eval/accuracy/{row['group']}"].append(is_right)
    metrics |= {name: sum(x) / len(x) for name, x in groups.items()}
    samples = []
    for i, row in enumerate(dataset[:3]):
        samples.append({"prompt": row["prompt"], "response": row["chosen"], "score": float(chosen[i])})
        samples.append({"prompt": row["prompt"], "response": row["rejected"], "score": float(rejected[i])})
    return metrics, samples


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
        may_change += ["num_epochs"]  # a longer run
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
    """On rank 0, add to the logs of the run. Print every log_every iterations, with samples, or if slow."""
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
    if samples or iteration % args.log_every == 0 or metrics.get("seconds", 0) > 10:
        shown = ["loss", "accuracy", "margin", "tokens_per_second", "pairs_per_second"]
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


def save_model(run_dir, model, tokenizer):
    """Write model/, which is complete or absent."""
    with replacing(run_dir / "model") as folder:
        shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        shutil.rmtree(run_dir / "model", ignore_errors=True)  # of an earlier, shorter run
    run_lock(run_dir).release()
    say(f"finished: {run_dir / 'model'}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, use_underscores=True))
