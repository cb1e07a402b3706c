# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.23.0", "datasets==5.2.0", "tyro==1.0.17", "wandb==0.31.0"]
# ///
"""DPO: from preference pairs to a policy, without a reward model and without sampling.

Rafael Rafailov et al., "Direct Preference Optimization", arXiv 2305.18290. The best policy for a reward
under a KL penalty is pi_ref exp(reward / beta), up to a factor that depends on the prompt alone. So a policy
is the best one for its reward h, and the Bradley-Terry loss of reward_model.py is a loss of the policy:

    h(o) = beta sum_t log(pi_theta(o_t) / pi_ref(o_t))          the implicit reward      (section 4)
    loss = -1/N sum_i log sigmoid(h(c_i) - h(r_i))                                       (Eq. 7)

    o_t       token t of a response, including its end      pi_theta  the policy being trained
    c_i, r_i  chosen and rejected response of pair i        pi_ref    the frozen --model
    N         pairs of an optimizer step, on all ranks

Nothing is divided by the length. The log-probs of pi_ref are computed once, so that one model is in memory.
Not implemented: dropout, LoRA, sharded models.
Train a toy model (half a minute, held-out loss 0.69 to 0.66, accuracy 0.83), or a real model:

    python dpo.py
    OMP_NUM_THREADS=8 torchrun --nproc-per-node 8 dpo.py --model Qwen/Qwen2.5-1.5B-Instruct \
        --dataset trl-lib/ultrafeedback_binarized --eval_dataset trl-lib/ultrafeedback_binarized \
        --max_length 2048 --num_epochs 1 --micro_batch_size 2 --learning_rate 5e-7 --dtype bfloat16 \
        --gradient_checkpointing --run_dir runs/dpo
"""

import copy
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
from array import array
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Literal

import datasets
import filelock
import torch
import torch.distributed as dist
import transformers
import tyro
from torch.nn.utils.rnn import pad_sequence

RANK = int(os.environ.get("RANK", 0))  # set by torchrun
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


@dataclass
class Args:  # the comment after a flag becomes its --help text
    # General
    seed: int = 1  # random seed for the order of pairs
    device: str = str(torch.accelerator.current_accelerator(check_available=True) or "cpu")  # cpu, cuda, mps
    dtype: Literal["float32", "bfloat16"] = "float32"  # bfloat16: autocast; weights and AdamW stay float32
    # Model and data
    model: str = "toy/policy"  # starting policy and frozen reference: local folder or Hub id of a causal LM
    dataset: str = "toy/preferences_train.jsonl"  # .jsonl, folder or Hub id; `prompt`, `chosen`, `rejected`
    eval_dataset: str | None = None  # held-out pairs (split test); a column `group` gives accuracy per group
    max_length: int = 1024  # texts with more tokens are cut at their end
    chat_template_kwargs: dict[str, bool | str] | None = None  # chat template options: enable_thinking False
    # Optimization
    num_epochs: int = 2  # passes over the pairs
    batch_size: int = 64  # pairs per optimizer step, over all ranks
    micro_batch_size: int = 64  # pairs per forward and backward pass; changes only memory and speed
    learning_rate: float = 5e-5  # peak learning rate of AdamW; 5e-5 is for the toy, a real model needs 5e-7
    warmup_iterations: int = 20  # iterations of linear warmup
    anneal_lr: bool = True  # decay the learning rate linearly to 0 over the run
    max_grad_norm: float = 1.0  # clip the gradient to this norm; inf: no clipping
    gradient_checkpointing: bool = False  # recompute activations, which saves memory and takes longer
    # Run
    run_dir: str | None = None  # folder of the run, resumed if it holds one; by default a new one in runs/
    eval_every: int = 70  # evaluate every n iterations, before the first and after the last; 0: never
    save_every: int = 200  # save model and checkpoint every n iterations and after the last; 0: only then
    keep_models: bool = False  # keep each saved model in model-<iteration>/; model/ is always the latest
    track: bool = False  # log to Weights & Biases too; WANDB_PROJECT names the project

    # The method: its flags and its loss
    beta: float = 0.1  # weight of the KL penalty; a smaller one lets the policy move farther from pi_ref


def dpo_loss(chosen_logprobs, rejected_logprobs, ref_chosen_logprobs, ref_rejected_logprobs, beta):
    """Return -log sigmoid(h(c) - h(r)) (Eq. 7), the mean over pairs with the log-probs (b,) of responses."""
    chosen_rewards = beta * (chosen_logprobs - ref_chosen_logprobs)  # h(c), (b,)
    rejected_rewards = beta * (rejected_logprobs - ref_rejected_logprobs)  # h(r)
    return torch.nn.functional.softplus(rejected_rewards - chosen_rewards).mean()


def main(args):
    check_args(args)
    start_ranks(args)
    # The model stays in eval mode, without dropout, as in the policy scripts.
    policy, tokenizer = load_model(args, args.model, transformers.AutoModelForCausalLM)
    reference = copy.deepcopy(policy)  # before a checkpoint is loaded
    dataset = load_rows(args, args.dataset, "train", policy, tokenizer, args.batch_size)
    if args.dataset == Args.dataset:  # the toy has held-out pairs
        args.eval_dataset = args.eval_dataset or f"{Path(args.dataset).parent}/preferences_heldout.jsonl"
    eval_dataset = []
    if args.eval_dataset and args.eval_every:
        eval_dataset = load_rows(args, args.eval_dataset, "test", policy, tokenizer)
    num_iterations = args.num_epochs * (len(dataset) // args.batch_size)
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0, fused=True)  # `update` sets the lr
    state = {"policy": policy, "optimizer": optimizer}  # what `update` changes and a checkpoint holds
    run_dir, start = open_run(args, state, dataset)  # loads the last checkpoint; start is its iteration, or 0
    ref_logprobs = all_logprobs(args, reference, dataset)  # (2, pairs), of chosen and rejected responses
    eval_ref_logprobs = all_logprobs(args, reference, eval_dataset)
    del reference  # one model stays in memory
    if eval_dataset and start == 0:
        log(args, run_dir, 0, evaluate(args, policy, eval_dataset, eval_ref_logprobs))
        log_samples(args, run_dir, 0, policy, tokenizer, eval_dataset)

    for iteration in range(start + 1, num_iterations + 1):
        began = time.perf_counter()

        # 1. Choose this rank's pairs
        rows = choose_rows(args, dataset, args.batch_size, iteration)

        # 2. Update the policy, with one optimizer step
        metrics = update(args, state, rows, ref_logprobs, lr_schedule(args, iteration, num_iterations))

        # 3. Measure, evaluate and log
        metrics["pairs_per_second"] = args.batch_size / (time.perf_counter() - began)
        left = (time.perf_counter() - began) * (num_iterations - iteration)  # seconds, at this pace
        is_last = iteration == num_iterations
        is_eval = eval_dataset and (is_last or iteration % args.eval_every == 0)
        if is_eval:
            metrics |= evaluate(args, policy, eval_dataset, eval_ref_logprobs)
        log(args, run_dir, iteration, metrics, left)
        if is_eval:
            log_samples(args, run_dir, iteration, policy, tokenizer, eval_dataset)

        # 4. Save the model, a folder that from_pretrained opens, and a checkpoint, from which a run resumes
        if is_last or (args.save_every and iteration % args.save_every == 0):
            save_model(args, run_dir, iteration, policy, tokenizer)
            save_checkpoint(run_dir, iteration, state)  # last: after a kill, both are saved again

    say_result(run_dir, "accuracy", f"--num_epochs {2 * args.num_epochs}")
    if dist.is_initialized():
        dist.destroy_process_group()


@torch.no_grad()
def all_logprobs(args, model, dataset):
    """Return the log-probs (2, pairs) of the chosen and rejected responses of a dataset, over all ranks."""
    result = torch.zeros(2, len(dataset), device=args.device)
    for number, batch in enumerate(micro_batches(args, dataset[RANK::WORLD_SIZE]), 1):
        show(f"log-probs of {number * args.micro_batch_size * WORLD_SIZE} of {len(dataset)} pairs")
        with autocast(args):
            result[:, batch["index"]] = response_logprobs(model, batch)
    return all_sum(result)  # each rank has filled in its pairs


def micro_batches(args, rows):
    """Yield pairs of similar lengths: input_ids and response_mask (2b, L), chosen texts, then rejected ones.

    index (b,): the places of the pairs in their dataset.
    """
    rows = sorted(rows, key=lambda row: row["length"])
    for first in range(0, len(rows), args.micro_batch_size):
        part = rows[first : first + args.micro_batch_size]
        texts = [torch.tensor(row[name]) for name in ("chosen_ids", "rejected_ids") for row in part]
        prompt_lengths = 2 * [row["prompt_length"] for row in part]
        masks = [torch.arange(len(text)) >= length for text, length in zip(texts, prompt_lengths)]
        batch = {
            "input_ids": pad_sequence(texts, batch_first=True),
            "response_mask": pad_sequence(masks, batch_first=True),
            "index": torch.tensor([row["index"] for row in part]),
        }
        yield {name: tensor.to(args.device) for name, tensor in batch.items()}


def response_logprobs(model, batch):
    """Return the log-probs (2, b) of chosen and rejected responses, summed over their tokens."""
    # Logits take the most memory, so they are computed only where some row has a token of a response.
    columns = batch["response_mask"].any(0).nonzero()[:, 0]  # (T,)
    tokens = batch["input_ids"][:, columns]  # (2b, T)
    mask = batch["response_mask"][:, columns]
    # A token's logits are one position earlier. No attention mask: padding on the right is not attended to.
    output = model(input_ids=batch["input_ids"], use_cache=False, logits_to_keep=columns - 1)
    logits = output.logits.to(model.dtype)  # (2b, T, V); under autocast they may be bfloat16
    logprobs = logits.log_softmax(-1).gather(2, tokens.unsqueeze(2)).squeeze(2)
    return logprobs.masked_fill(~mask, 0.0).sum(1).view(2, -1)


def choose_rows(args, dataset, num_prompts, iteration):
    """Return this rank's rows. Each epoch shuffles anew, and drops an incomplete last batch."""
    epoch, batch_number = divmod(iteration - 1, len(dataset) // num_prompts)
    generator = torch.Generator().manual_seed(1_000_000 * args.seed + epoch)
    chosen = torch.randperm(len(dataset), generator=generator).split(num_prompts)[batch_number]
    return [dataset[i] for i in chosen.chunk(WORLD_SIZE)[RANK]]


def update(args, state, rows, ref_logprobs, lr_factor):
    """Make one optimizer step on the pairs of all ranks (step 2 of an iteration). Return its metrics."""
    policy, optimizer = state["policy"], state["optimizer"]
    learning_rate = args.learning_rate * lr_factor
    step_loss = torch.zeros((), device=args.device)  # of this rank's micro-batches
    step_rewards = []  # h of the responses
    for batch in micro_batches(args, rows):
        with autocast(args):
            logprobs = response_logprobs(policy, batch)  # (2, b)
        ref = ref_logprobs[:, batch["index"]]
        chosen, rejected = logprobs
        ref_chosen, ref_rejected = ref
        part_loss = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, args.beta)
        loss = part_loss * len(chosen) / args.batch_size  # the part's share in the mean over the step
        loss.backward()  # adds to the gradient of the earlier micro-batches
        step_loss += loss.detach()
        step_rewards.append(args.beta * (logprobs.detach() - ref))
    grad_norm = optimizer_step(args, policy, optimizer, learning_rate)
    chosen_rewards, rejected_rewards = torch.cat(step_rewards, 1)  # (pairs of this rank,) each
    return {
        "loss": total(step_loss),
        "accuracy": total(chosen_rewards > rejected_rewards) / args.batch_size,
        "margin": total(chosen_rewards - rejected_rewards) / args.batch_size,
        "chosen_reward": total(chosen_rewards) / args.batch_size,
        "rejected_reward": total(rejected_rewards) / args.batch_size,
        "grad_norm": float(grad_norm),
        "learning_rate": learning_rate,
    }


def autocast(args):
    """Compute in bfloat16 with --dtype bfloat16. The weights stay float32."""
    is_on = args.dtype == "bfloat16"
    # Sampling casts each weight once for all tokens. In training, a cache would only keep the copies longer.
    is_cached = not torch.is_grad_enabled()
    return torch.autocast(torch.device(args.device).type, torch.bfloat16, is_on, cache_enabled=is_cached)


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


def evaluate(args, policy, dataset, ref_logprobs):
    """Return loss, margin and accuracy on held-out pairs, over all ranks."""
    logprobs = all_logprobs(args, policy, dataset)  # (2, pairs)
    chosen, rejected = logprobs
    ref_chosen, ref_rejected = ref_logprobs
    loss = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, args.beta)
    chosen_rewards, rejected_rewards = args.beta * (logprobs - ref_logprobs)
    metrics = {"eval/loss": float(loss), "eval/margin": float((chosen_rewards - rejected_rewards).mean())}
    return metrics | accuracies(dataset, chosen_rewards > rejected_rewards)


def accuracies(dataset, is_right):
    """Return the share of held-out pairs that are right, of all and for each `group`."""
    groups = defaultdict(list)
    for row, x in zip(dataset, is_right.tolist()):
        groups["eval/accuracy"].append(x)
        if row.get("group") is not None:
            groups[f"eval/accuracy/{row['group']}"].append(x)
    return {name: sum(x) / len(x) for name, x in groups.items()}


def total(x):
    """Return the sum of all elements of x on all ranks, as a number. Every rank must call it."""
    return float(all_sum(x.sum()))


def all_sum(x):
    """Sum the tensor x over all ranks, in place, and return it. Every rank must call it."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


# --- plumbing: models, data, logs, checkpoints. The algorithm ends above this line ---


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
    """Refuse flags that cannot work, before anything is loaded, and name those that only suit the toy."""
    for name, value in (args.chat_template_kwargs or {}).items():
        check(value not in ("true", "false"), f"--chat_template_kwargs {name} {value}: write True or False.")
    for name in ("beta", "num_epochs", "batch_size", "micro_batch_size", "max_length", "max_grad_norm"):
        check(getattr(args, name) > 0, f"--{name} {getattr(args, name)}: must be above 0.")
    for name in ("learning_rate", "warmup_iterations"):
        check(getattr(args, name) >= 0, f"--{name} {getattr(args, name)}: must be 0 or more.")
    size = args.batch_size
    remedy = f"Use a multiple of {WORLD_SIZE}, such as {-(-size // WORLD_SIZE) * WORLD_SIZE}."
    excess = size % WORLD_SIZE
    check(not excess, f"--batch_size {size}: cannot be divided evenly (ranks: {WORLD_SIZE}). {remedy}")
    if args.model != Args.model and args.learning_rate == Args.learning_rate:
        say(f"warning: --learning_rate {args.learning_rate} is for the toy; a real model needs about 5e-7")


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
    say(f"  model       {name}: {model.num_parameters():,} parameters")
    return model, tokenizer


def checkpointed(forward, *args, **kwargs):
    """Run a layer, and with gradients forget its activations, which backward() then computes again."""
    if not torch.is_grad_enabled():  # around each layer, checkpoint() slows sampling by a quarter
        return forward(*args, **kwargs)
    checkpoint = torch.utils.checkpoint.checkpoint
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def encode(tokenizer, prompt, response, **options):
    """Return the ids of a prompt, its response and the response's end."""
    prompt_ids = token_ids(tokenizer, prompt, **options)
    if not isinstance(prompt, str):
        response = without_opening(tokenizer, prompt_ids, response)
    return prompt_ids + completion_ids(tokenizer, prompt, response)


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


def completion_ids(tokenizer, prompt, completion):
    """Return the ids of a completion with its end: EOS after a text, in a chat what its template writes."""
    ids = tokenizer(completion, add_special_tokens=False)["input_ids"]
    end = [] if isinstance(prompt, str) else turn_end(tokenizer)
    if tokenizer.decode(end) == tokenizer.decode(end, skip_special_tokens=True):
        end = [*end, tokenizer.eos_token_id]  # sampling stops at special tokens only
    # A completion can bring its end, or only the beginning of it, such as <|im_end|> without the newline.
    known = max(n for n in range(len(end) + 1) if ids[len(ids) - n :] == end[:n])
    return ids + end[known:]


def template_options(args, row):
    """Return what the chat template of a row gets besides the messages."""
    options = {"tools": row.get("tools")} | (args.chat_template_kwargs or {})
    own = row.get("chat_template_kwargs") or {}  # parquet fills in None
    return options | {name: value for name, value in own.items() if value is not None}


def without_opening(tokenizer, prompt_ids, response):
    """Return a response without the tag, such as <think>, with which the template has ended the prompt."""
    tag = re.match(r"\s*(<\w+>)\s*", response)
    has_tag = tag and tokenizer.decode(prompt_ids).rstrip().endswith(tag[1])
    return response[tag.end() :] if has_tag else response


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


def load_rows(args, name, split, model, tokenizer, min_rows=1):
    """Return the pairs of a dataset, with the token ids of both texts, without those equal after the cut."""
    flag = f"--{'dataset' if split == 'train' else 'eval_dataset'} {name}"
    rows = read_rows(flag, name, split)
    for number, row in enumerate(rows):
        where = f"{flag}, row {number}"
        needs = f"{where}: needs `chosen` and `rejected`, responses to one `prompt`. The row is {row!s:.100}"
        check(isinstance(row, dict), needs)
        prompt, chosen = split_chat(where, tokenizer, row.get("prompt"), row.get("chosen"))
        other_prompt, rejected = split_chat(where, tokenizer, row.get("prompt"), row.get("rejected"))
        is_pair = prompt == other_prompt and isinstance(chosen, str) and isinstance(rejected, str)
        check(is_pair and isinstance(prompt, str | list) and prompt, needs)
        options = template_options(args, row)
        row |= {"prompt": prompt, "prompt_length": len(token_ids(tokenizer, prompt, **options))}
        for column, response in {"chosen_ids": chosen, "rejected_ids": rejected}.items():
            ids = encode(tokenizer, prompt, response, **options)[: args.max_length]
            row[column] = array("i", ids)  # a list would take ten times the memory
        row["length"] = max(len(row["chosen_ids"]), len(row["rejected_ids"]))
    kept = [row for row in rows if row["chosen_ids"] != row["rejected_ids"]]
    for index, row in enumerate(kept):
        row["index"] = index
    fit = f"{len(kept):,} of {len(rows):,} pairs differ in their first {args.max_length} tokens"
    say(f"  {'pairs' if split == 'train' else 'held out':12}{name}: {fit}")
    remedy = "Add pairs, or use a lower --batch_size or a higher --max_length."
    check(len(kept) >= min_rows, f"{flag}: {fit}, but {min_rows} are needed. {remedy}")
    what = f"--max_length {args.max_length}: in the longest text"
    check_positions(what, model, max(row["length"] for row in kept))
    return kept


def split_chat(where, tokenizer, prompt, response):
    """Return a prompt and a response, a string. A chat as response follows the prompt, or contains it."""
    if isinstance(response, list) and response:
        check_chat(where, tokenizer, response)
        if response[0]["role"] == "assistant":
            check(isinstance(prompt, list), f"{where}: has a chat without a prompt. Give `prompt` as a chat.")
            response = [*prompt, *response]
        *prompt, answer = response
        check(answer["role"] == "assistant", f"{where}: the last message must be the assistant's.")
        others = [name for name, value in answer.items() if value and name not in ("role", "content")]
        check(not others, f"{where}: {others} of the last message would be ignored. Use `content` alone.")
        response = answer.get("content")
    elif isinstance(prompt, list):
        check_chat(where, tokenizer, prompt)
    return prompt, response


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


COLUMNS = ["loss", "accuracy", "margin", "chosen_reward", "rejected_reward", "grad_norm", "pairs_per_second"]
HEADER = " iter      loss  accuracy    margin    chosen  rejected grad norm   pairs/s      left"


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


@torch.no_grad()
def log_samples(args, run_dir, iteration, policy, tokenizer, dataset):
    """Print and log greedy responses to three held-out prompts."""
    longest = max(row["length"] for row in dataset)  # the model has positions for it
    for row in dataset[:3]:
        P = row["prompt_length"]
        prompt_ids = torch.tensor([row["chosen_ids"][:P]], device=args.device)
        options = {"max_new_tokens": min(256, longest - P), "eos_token_id": eos_ids(policy, tokenizer)}
        with autocast(args):
            output = policy.generate(prompt_ids, do_sample=False, repetition_penalty=1.0, **options)
        response = tokenizer.decode(output[0, P:])
        prompt = row["prompt"]
        text = " ".join((prompt if isinstance(prompt, str) else prompt[-1]["content"]).split())
        say(f"            {text[-24:]:24}  ->  {' '.join(response.split())[-58:]}")
        append(f"{run_dir}/samples.jsonl", {"iteration": iteration, "prompt": prompt, "response": response})


def eos_ids(model, tokenizer):
    """Return the ids that end a response: EOS, those of the generation config, the end of a chat's turn."""
    configured = model.generation_config.eos_token_id  # an id, a list of ids, or None
    ids = configured if isinstance(configured, list) else [configured]
    if tokenizer.chat_template:
        # Only special tokens, and not a newline after them. They decode to nothing.
        ids = ids + [x for x in turn_end(tokenizer) if not tokenizer.decode([x], skip_special_tokens=True)]
    return sorted({tokenizer.eos_token_id, *ids} - {None})


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
    main(tyro.cli(Args, use_underscores=True))
