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
same pairs, let it learn from its own mistakes. Left out: LoRA, sharded models. Train a toy model
(half a minute, held-out loss 0.69 to 0.66, accuracy 0.83), or a real one on 8 GPUs:

    python dpo.py
    OMP_NUM_THREADS=8 torchrun --nproc-per-node 8 dpo.py --model Qwen/Qwen2.5-1.5B-Instruct \
        --dataset trl-lib/ultrafeedback_binarized --eval_dataset trl-lib/ultrafeedback_binarized \
        --max_length 2048 --num_epochs 1 --micro_batch_size 2 --learning_rate 5e-7 --dtype bfloat16 \
        --gradient_checkpointing --run_dir runs/dpo
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
    seed: int = 1  # of the order of pairs
    device: str = str(torch.accelerator.current_accelerator(check_available=True) or "cpu")  # cuda, mps, ...
    dtype: Literal["float32", "bfloat16"] = "float32"  # bfloat16 is autocast; weights and AdamW stay float32
    # Model and data
    model: str = "toy/policy"  # starting policy and reference: folder or hub id of a causal LM
    # .jsonl, .parquet, folder or hub id; `chosen` and `rejected`, text or chat, follow `prompt` or contain it
    dataset: str = "toy/preferences_train.jsonl"
    dataset_split: str = "train"  # split of a hub id or folder
    eval_dataset: str | None = None  # held-out pairs, compared by column `group`; the toy has some by default
    eval_split: str = "test"  # split of a hub id or folder
    max_length: int = 1024  # longer texts (in tokens) are cut at their end
    # Optimization
    num_epochs: int = 2  # passes over the pairs
    batch_size: int = 64  # pairs per optimizer step, over all ranks
    micro_batch_size: int = 64  # pairs per forward pass on a rank: memory only
    beta: float = 0.1  # weight of the KL penalty; a smaller one lets the policy move farther from pi_ref
    learning_rate: float = 5e-5  # peak learning rate of AdamW
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


def dpo_loss(
    chosen_logprobs, rejected_logprobs, ref_chosen_logprobs, ref_rejected_logprobs, beta, num_pairs=None
):
    """Eq. 7 on pairs (b,), over num_pairs of the optimizer step, by default b. Log-probs are of responses."""
    chosen_rewards = beta * (chosen_logprobs - ref_chosen_logprobs)  # h(c_i), (b,)
    rejected_rewards = beta * (rejected_logprobs - ref_rejected_logprobs)
    losses = torch.nn.functional.softplus(rejected_rewards - chosen_rewards)  # -log sigmoid(h(c_i) - h(r_i))
    return losses.sum() / (num_pairs or len(losses))


def encode(tokenizer, prompt_ids, response, max_length):
    """The first token ids of prompt, response and EOS, and a mask that is True on the last two."""
    response_ids = tokenizer(response, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    mask = [False] * len(prompt_ids) + [True] * len(response_ids)
    return {"input_ids": (prompt_ids + response_ids)[:max_length], "response_mask": mask[:max_length]}


def response_logprobs(model, batch):
    """Log-probs (2, b) of chosen and rejected responses, summed over their tokens."""
    columns = batch["response_mask"].any(0).nonzero().squeeze(1)  # (T,) those with tokens of a response
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
    result = torch.zeros(2, len(dataset), device=policy.device)
    indices = range(RANK, len(dataset), WORLD_SIZE)
    for part, batch in micro_batches(dataset, indices, args.micro_batch_size, policy.device):
        with autocast(args):
            result[:, part] = response_logprobs(policy, batch)
    return all_sum(result)  # each rank has filled in its part


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

    input_ids, response_mask (2b, L): chosen, then rejected texts, padded on the right
    """
    by_length = sorted(indices, key=lambda i: dataset[i]["length"])  # similar lengths go together
    for first in range(0, len(by_length), size):
        part = by_length[first : first + size]
        chosen = [dataset[i]["chosen_text"] for i in part]
        rejected = [dataset[i]["rejected_text"] for i in part]
        batch = {}
        for name in ["input_ids", "response_mask"]:
            tensors = [torch.tensor(text[name]) for text in chosen + rejected]
            batch[name] = pad_sequence(tensors, batch_first=True).to(device)
        yield part, batch


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

    policy, tokenizer = load_model(args, "model", transformers.AutoModelForCausalLM, device)
    dataset = load_rows(args, "dataset", args.dataset, args.dataset_split, policy, tokenizer, args.batch_size)
    eval_dataset = load_eval_rows(args, policy, tokenizer)  # None: no evaluation
    check_ranks_agree(args, {"rows of --dataset": dataset, "rows of --eval_dataset": eval_dataset})
    # The policy is the reference until a checkpoint is loaded.
    ref_logprobs = all_logprobs(args, policy, dataset)  # (2, N), of chosen and rejected responses
    eval_ref_logprobs = all_logprobs(args, policy, eval_dataset) if eval_dataset else None

    num_iterations = args.num_epochs * (len(dataset) // args.batch_size)
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0, fused=True)
    state = {"policy": policy, "optimizer": optimizer}  # what a checkpoint holds

    # Resume the run, or start it. `start` counts the finished iterations.
    start, log_sizes = load_checkpoint(run_dir, state)
    weights = [float(weight.detach().sum()) for weight in policy.parameters()]
    check_ranks_agree(args, {"weights": weights, "rows of --dataset": dataset, "checkpoint.pt": log_sizes})
    open_run(args, run_dir, log_sizes)
    say(f"{policy.num_parameters():,} parameters on {WORLD_SIZE} x {device.type}, writes to {run_dir}")

    # 2. Evaluation on held-out pairs, before the first iteration; the later evaluations are in step 6
    if eval_dataset and start == 0:
        metrics, samples = evaluate(args, policy, tokenizer, eval_dataset, eval_ref_logprobs)
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
        step_rewards = []
        for part, batch in micro_batches(dataset, indices, args.micro_batch_size, device):
            with autocast(args):
                logprobs = response_logprobs(policy, batch)  # (2, b), of chosen and rejected responses
            ref = ref_logprobs[:, part]
            loss = dpo_loss(logprobs[0], logprobs[1], ref[0], ref[1], args.beta, args.batch_size)
            loss.backward()
            step_loss += loss.detach()
            step_rewards.append(args.beta * (logprobs.detach() - ref))
        grad_norm = optimizer_step(args, policy, optimizer, args.learning_rate * lr_factor)

        # 5. Metrics, over all ranks
        rewards = torch.cat(step_rewards, 1)  # (2, pairs of this rank), the implicit ones
        differences = rewards[0] - rewards[1]
        seconds = time.time() - began
        metrics = {
            "loss": total(step_loss),
            "accuracy": total(differences > 0) / args.batch_size,
            "margin": total(differences) / args.batch_size,
            "chosen_reward": total(rewards[0]) / args.batch_size,
            "rejected_reward": total(rewards[1]) / args.batch_size,
            "grad_norm": float(grad_norm),
            "learning_rate": args.learning_rate * lr_factor,
            "seconds": seconds,
            "pairs_per_second": args.batch_size / seconds,
        }

        # 6. Evaluate, log and save
        is_last = iteration == num_iterations
        samples = []
        if eval_dataset and (is_last or iteration % args.eval_every == 0):
            eval_metrics, samples = evaluate(args, policy, tokenizer, eval_dataset, eval_ref_logprobs)
            metrics |= eval_metrics
        log(args, run_dir, iteration, metrics, samples)
        if is_last or (args.save_every and iteration % args.save_every == 0):
            save_checkpoint(run_dir, iteration, state)

    # 7. The result, a folder that from_pretrained opens
    if RANK == 0:
        save_model(run_dir, policy, tokenizer)
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
    positive = ["batch_size", "micro_batch_size", "max_length", "max_grad_norm", "log_every", "beta"]
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


def load_rows(args, flag, name, split, policy, tokenizer, min_rows=1):
    """The encoded pairs of a dataset. Those equal after the cut, such as without a response, are left out."""
    where = f"--{flag} {name}"
    with explain(where, "use a .jsonl, a .parquet, a folder or a hub id"):
        rows = read_rows(where, name, split)
    num_embeddings = len(policy.get_input_embeddings().weight)
    for number, row in enumerate(rows):
        with explain(f"{where}: row {number}", "fix its `prompt`, `chosen` and `rejected`, or leave it out"):
            prompt = row.get("prompt") or ""
            row["prompt"], row["chosen"] = split_response(prompt, row["chosen"])
            other_prompt, row["rejected"] = split_response(prompt, row["rejected"])
            if row["prompt"] != other_prompt:
                raise ValueError("`chosen` and `rejected` have different prompts")
            row["prompt_ids"] = token_ids(tokenizer, row["prompt"])
            if not row["prompt_ids"]:
                raise ValueError("the prompt is empty")
            for side in ["chosen", "rejected"]:
                row[f"{side}_text"] = encode(tokenizer, row["prompt_ids"], row[side], args.max_length)
            row["length"] = max(len(row[f"{side}_text"]["input_ids"]) for side in ["chosen", "rejected"])
        ids = row["chosen_text"]["input_ids"] + row["rejected_text"]["input_ids"]
        message = f"{where}: row {number} has a token beyond the {num_embeddings} of --model"
        check(max(ids) < num_embeddings, f"{message}; use its tokenizer")
    kept = [row for row in rows if row["chosen_text"] != row["rejected_text"]]
    summary = f"{len(kept)} of {len(rows)} pairs differ in their first --max_length {args.max_length} tokens"
    check(len(kept) >= min_rows, f"{where}: {summary}; give {min_rows} or more, or lower --batch_size")
    say(f"{flag}: {summary}")
    longest = max(row["length"] for row in kept)
    limit = getattr(policy.config.get_text_config(), "max_position_embeddings", None) or math.inf
    message = f"--max_length {args.max_length}: the longest text has {longest} tokens"
    check(longest <= limit, f"{message}, the model has {limit} positions; lower it")
    return kept


def load_eval_rows(args, policy, tokenizer):
    """The held-out pairs, or None. Only the toy has some by default."""
    name = args.eval_dataset
    if args.dataset == Args.dataset and not name:
        name = "toy/preferences_heldout.jsonl"
    if not name or not args.eval_every:
        return None
    return load_rows(args, "eval_dataset", name, args.eval_split, policy, tokenizer)


def describe(args, policy, tokenizer, dataset):
    """Greedy responses to the first three prompts."""
    longest = max(row["length"] for row in dataset)  # the model has positions for it
    greedy = {"do_sample": False, "repetition_penalty": 1.0, "eos_token_id": tokenizer.eos_token_id}
    samples = []
    for row in dataset[:3]:
        P = len(row["prompt_ids"])
        prompt_ids = torch.tensor([row["prompt_ids"]], device=policy.device)
        with autocast(args):
            output = policy.generate(prompt_ids, max_new_tokens=min(256, longest - P), **greedy)
        samples.append({"prompt": row["prompt"], "response": tokenizer.decode(output[0, P:])})
    return samples


def evaluate(args, policy, tokenizer, dataset, ref_logprobs):
    """Loss, margin and accuracy on held-out pairs, over all ranks, and greedy responses to three prompts."""
    logprobs = all_logprobs(args, policy, dataset)  # (2, N)
    loss = dpo_loss(logprobs[0], logprobs[1], ref_logprobs[0], ref_logprobs[1], args.beta)
    rewards = args.beta * (logprobs - ref_logprobs)
    chosen, rejected = rewards
    metrics = {"eval/loss": float(loss), "eval/margin": float((chosen - rejected).mean())}
    groups = defaultdict(list)
    for row, is_right in zip(dataset, (chosen > rejected).tolist()):
        groups["eval/accuracy"].append(is_right)
        if row.get("group") is not None:
            groups[f"eval/accuracy/{row['group']}"].append(is_right)
    metrics |= {name: sum(x) / len(x) for name, x in groups.items()}
    return metrics, describe(args, policy, tokenizer, dataset)


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
        say(f"    {str(sample['prompt'])[-80:]!r} -> {sample['response']!r}")


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
