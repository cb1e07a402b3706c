# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.23.0", "datasets==5.2.0", "tyro==1.0.17", "wandb==0.31.0"]
# ///
"""SFT: supervised fine-tuning on demonstrations. Stage 1, which makes the policy that RL starts from.

Long Ouyang et al., "InstructGPT", arXiv 2203.02155, section 3.5. With a prompt x and its completion y,

    loss = -1/N_tok sum_t log pi_theta(y_t | x, y_<t)

over the tokens of completions and the EOS that ends each, not over prompts and padding. N_tok counts them in
one optimizer step over all ranks. Prompt and completion are tokenized apart, since a policy is later given a
prompt's tokens alone; of a chat the last message is learned. Left out: packing, LoRA, sharded models, tools.

    python sft.py
    OMP_NUM_THREADS=8 torchrun --nproc-per-node 8 sft.py --model Qwen/Qwen2.5-1.5B \
        --dataset trl-lib/Capybara --max_length 4096 --num_epochs 2 --micro_batch_size 2 \
        --learning_rate 1e-5 --dtype bfloat16 --gradient_checkpointing --run_dir runs/sft
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
from unittest import mock

import datasets
import torch
import torch.distributed as dist
import transformers
import tyro
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint as recompute

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun
LOGS = "metrics.jsonl", "samples.jsonl"
MAX_LOGITS = 2**26  # computed at a time by completion_loss: 256 MiB in float32


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of the run
    seed: int = 1  # for the order of the examples
    device: str = str(torch.accelerator.current_accelerator(True) or "cpu")  # cuda, mps, ... as torch finds
    dtype: Literal["float32", "bfloat16"] = "float32"  # bfloat16 is autocast; weights and AdamW stay float32
    # Model and data
    model: str = "toy/base"  # model to start from: folder or hub id of a causal LM
    dataset: str = "toy/demonstrations.jsonl"  # hub id or path with `prompt` and `completion`, or `messages`
    dataset_split: str = "train"  # split of a hub id or folder
    eval_size: int = 256  # examples at the end of the dataset that are held out for evaluation; 0: none
    max_length: int = 1024  # longer examples (in tokens, with prompt and EOS) are left out
    # Optimization
    num_epochs: int = 4  # passes over the examples
    shuffle: bool = True  # a new order for each pass; --no_shuffle keeps that of the file, for a curriculum
    batch_size: int = 128  # examples per optimizer step, over all ranks
    micro_batch_size: int = 128  # examples per forward pass on each rank: memory only
    learning_rate: float = 1e-3  # peak learning rate of AdamW
    lr_schedule: str = "linear"  # or constant_with_warmup, cosine: transformers.get_scheduler's names
    warmup_iterations: int = 20  # the learning rate rises linearly over these
    max_grad_norm: float = 1.0  # the gradient is clipped to this norm
    gradient_checkpointing: bool = False  # recompute activations: less memory, a slower update
    # Run
    run_dir: str | None = None  # the same command goes on with the run in it; None: a new one in runs/
    eval_every: int = 100  # iterations between evaluations; also before the first and after the last; 0: none
    log_every: int = 20  # iterations between printed lines; metrics.jsonl has every iteration
    save_every: int = 200  # iterations between checkpoints; the last is always saved; 0: only that
    track: bool = False  # log to Weights & Biases too; WANDB_PROJECT names the project


def completion_loss(model, input_ids, attention_mask, completion_mask, num_tokens):
    """-log pi of the completion tokens of input_ids (b, L), summed, over num_tokens of the optimizer step."""
    decoder = model.get_decoder()
    output = decoder(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
    mask = completion_mask[:, 1:]  # (b, L-1): each position predicts the next token
    hidden, targets = output.last_hidden_state[:, :-1][mask], input_ids[:, 1:][mask]  # (N, H) and (N,)

    def head(hidden, targets):
        # The model with its decoder stubbed out: lm_head alone would miss the scaling or cap that some have.
        done = type(output)(last_hidden_state=hidden[None])
        with mock.patch.object(decoder, "forward", lambda *args, **kwargs: done):
            logits = model(input_ids=targets[None]).logits[0]  # (n, V)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")

    # Logits would be the largest tensor of all: MAX_LOGITS at a time, and again in the backward pass.
    size = max(1, MAX_LOGITS // model.config.get_text_config().vocab_size)
    pieces = zip(hidden.split(size), targets.split(size))
    return sum(recompute(head, *piece, use_reentrant=False) for piece in pieces) / num_tokens


def micro_batches(rows, size, device):
    """Yield input_ids, attention_mask and completion_mask (b, L) of at most size rows of like length."""
    rows = sorted(rows, key=lambda row: len(row["ids"]))
    for part in (rows[i : i + size] for i in range(0, len(rows), size)):
        ids = pad_sequence([torch.tensor(row["ids"]) for row in part], True, -1).to(device)  # -1 on padding
        starts = torch.tensor([[row["prompt_length"]] for row in part], device=device)  # (b, 1)
        completion_mask = (ids >= 0) & (torch.arange(ids.shape[1], device=device) >= starts)
        yield ids.clamp(min=0), (ids >= 0).long(), completion_mask


def all_sum(x):
    """The sum of x over all ranks; x itself on one rank. Every rank must call it."""
    if dist.is_initialized():
        x = x.clone()  # all_reduce works in place and returns nothing
        dist.all_reduce(x)
    return x


def main(args):
    # 1. Setup: the run folder, model, data, optimizer, ranks
    for name, value in vars(args).items():
        in_range = not isinstance(value, int | float) or 0 <= value < math.inf
        check(in_range, f"--{name} {value}: use a number of 0 or more")
    right = args.batch_size and args.batch_size % WORLD_SIZE == 0
    check(right, f"--batch_size {args.batch_size}: use a multiple of the number of ranks, {WORLD_SIZE}")
    run_dir, flags, checkpoint = find_run(args)
    start = checkpoint["iteration"] if checkpoint else 0
    device = torch.device(args.device)
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
    policy, tokenizer = load(args, device)
    rows, eval_rows = load_rows(args, policy, tokenizer)
    steps_per_epoch = len(rows) // args.batch_size
    num_iterations = args.num_epochs * steps_per_epoch
    if start >= num_iterations and (run_dir / "model").exists():
        return say(f"{run_dir} is finished after {start} iterations: nothing to do")
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0)
    schedule = args.lr_schedule, optimizer, args.warmup_iterations, num_iterations + 1
    lr_factor = transformers.get_scheduler(*schedule).lr_lambdas[0]  # a function of the iteration: no state
    state = {"policy": policy, "optimizer": optimizer}
    for name, part in state.items() if checkpoint else ():
        part.load_state_dict(checkpoint[name])
    track = start_run(args, run_dir, flags, checkpoint) if RANK == 0 else None
    checkpoint = None  # frees its memory
    if WORLD_SIZE > 1:
        dist.init_process_group()
    say(f"{policy.num_parameters():,} parameters on {WORLD_SIZE} x {device.type}, writes to {run_dir}")

    for done in range(start, num_iterations + 1):
        # 2. Evaluation on held-out examples, before the first iteration and after the last too
        if eval_rows and args.eval_every and (done % args.eval_every == 0 or done == num_iterations):
            log(run_dir, track, done, *evaluate(args, policy, tokenizer, eval_rows))
        if done == num_iterations:
            break
        iteration, began = done + 1, time.time()

        # 3. Batch: the examples of all ranks, since their tokens are counted, and this rank's part of them
        epoch, step = divmod(done, steps_per_epoch)
        generator = torch.Generator().manual_seed(hash((args.seed, epoch)))
        order = torch.randperm(len(rows), generator=generator) if args.shuffle else torch.arange(len(rows))
        order = order[step * args.batch_size : (step + 1) * args.batch_size]
        num_tokens = sum(rows[i]["num_tokens"] for i in order)
        batch = [rows[i] for i in order.chunk(WORLD_SIZE)[RANK]]

        # 4. Update: one optimizer step, its gradient summed over micro-batches and ranks
        lr = optimizer.param_groups[0]["lr"] = args.learning_rate * lr_factor(iteration)
        total_loss = torch.zeros((), device=device)
        for mb in micro_batches(batch, args.micro_batch_size, device):
            loss = completion_loss(policy, *mb, num_tokens)
            loss.backward()
            total_loss += loss.detach()
        for parameter in policy.parameters():
            if parameter.grad is not None:  # some models have weights that nothing uses
                parameter.grad = all_sum(parameter.grad)
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
        finite = (norm + total_loss).isfinite()
        check(finite, "the loss or its gradient is not finite; use a lower --learning_rate")
        optimizer.step()
        optimizer.zero_grad()

        # 5. Log and save
        metrics = {"loss": float(all_sum(total_loss)), "grad_norm": float(norm), "learning_rate": lr}
        metrics["tokens_per_second"] = num_tokens / (time.time() - began)
        due = iteration % args.log_every == 0 or began // 60 < time.time() // 60  # a new minute
        log(run_dir, track, iteration, metrics, [], due)
        due = args.save_every and iteration % args.save_every == 0
        if RANK == 0 and (due or iteration == num_iterations):
            save_checkpoint(run_dir, iteration, state)

    # 6. The result, a folder that from_pretrained opens
    if RANK == 0:
        with replacing(run_dir / "model") as path:
            policy.save_pretrained(path)
            tokenizer.save_pretrained(path)
    if WORLD_SIZE > 1:
        dist.destroy_process_group()


# --- plumbing: data, evaluation, checkpoints; nothing of the algorithm stands below ---


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


def locate(name):
    """The full path of a file or folder, here or beside the script. Else the name."""
    paths = [path for path in (Path(name), Path(__file__).parent / name) if path.exists()]
    check(paths or not name.startswith("toy/"), f"no {name} beside this script; give --model and --dataset")
    return str(paths[0].resolve()) if paths else name


def load(args, device):
    """A model in eval mode, so without dropout, and its tokenizer. Weights are float32."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    path, where = locate(args.model), f"--model {args.model}"
    options = {"dtype": torch.float32, "use_safetensors": True, "output_loading_info": True}
    with explain(where, "use a folder or a hub id of a model"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(path, **options)
    # transformers does not refuse missing weights, or a reward model as policy: it makes random weights
    kind, missing = str(model.config.architectures), len(info["missing_keys"])
    right = not missing and "SequenceClassification" not in kind
    check(right, f"{where}: is {kind}, {missing} weights missing; use a whole causal LM")
    check(tokenizer.eos_token, f"{where}: has no EOS token; save one in its tokenizer")
    for layer in model.modules() if args.gradient_checkpointing else ():
        if isinstance(layer, transformers.modeling_layers.GradientCheckpointingLayer):
            layer.forward = functools.partial(recompute, layer.forward, use_reentrant=False)
    for part in {model, model.get_decoder()} if args.dtype == "bfloat16" else ():
        part.forward = torch.autocast(device.type, torch.bfloat16)(part.forward)
    return model.to(device).eval(), tokenizer


def encode(tokenizer, row, where):
    """The ids of prompt, completion and EOS. The first prompt_length are given, the others learned."""
    if row.get("messages"):
        row = {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]}
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(completion, list) and [message["role"] for message in completion] == ["assistant"]:
        completion = completion[0]["content"]
    right, is_text = prompt and isinstance(completion, str), isinstance(prompt, str)
    check(right, f"{where} lacks prompt or completion; fill in `prompt` and `completion`, or `messages`")
    check(is_text or tokenizer.chat_template, f"{where} is a chat, --model has no chat template; use texts")
    template = functools.partial(tokenizer.apply_chat_template, add_generation_prompt=True)
    start = (tokenizer if is_text else template)(prompt)["input_ids"]
    end = tokenizer(completion, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    return {"prompt": prompt, "ids": start + end, "prompt_length": len(start), "num_tokens": len(end)}


def load_rows(args, model, tokenizer):
    """The examples to learn and those held out, without what is too long."""
    path, where, longest = locate(args.dataset), f"--dataset {args.dataset}", args.max_length
    kind = {".jsonl": "json", ".parquet": "parquet"}.get(Path(path).suffix)
    source = {"path": kind, "data_files": path} if kind else {"path": path}
    with explain(where, "use a .jsonl, a .parquet, a folder or a hub id, and its --dataset_split"):
        # what is local is streamed, since the cache may hold an older folder of that name
        rows = list(datasets.load_dataset(**source, split=args.dataset_split, streaming=Path(path).exists()))
    rows = [encode(tokenizer, row, f"{where}: row {number}") for number, row in enumerate(rows)]
    kept = [row for row in rows if row["prompt_length"] and len(row["ids"]) <= longest]
    cut = len(kept) - args.eval_size
    text = f"{len(kept)} of {len(rows)} examples have up to --max_length {longest} tokens"
    check(cut >= args.batch_size, f"{where}: {text}; give --batch_size + --eval_size or more")
    say(f"dataset: {text}, {args.eval_size} are held out")
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    text = f"--max_length {longest}: keeps examples longer than the {limit} positions of the model"
    check(max(len(row["ids"]) for row in kept) <= limit, f"{text}; use {limit} or less")
    return kept[:cut], kept[cut:]


@torch.no_grad()
def evaluate(args, policy, tokenizer, rows):
    """The loss of held-out rows over all ranks, and greedy responses to three of their prompts."""
    num_tokens, loss, samples = sum(row["num_tokens"] for row in rows), 0.0, []
    for mb in micro_batches(rows[RANK::WORLD_SIZE], args.micro_batch_size, policy.device):
        loss += float(completion_loss(policy, *mb, num_tokens))
    greedy = {"do_sample": False, "repetition_penalty": 1.0, "eos_token_id": tokenizer.eos_token_id}
    longest = max(len(row["ids"]) for row in rows)  # for which the model has positions
    for row in rows[:3]:
        start = row["prompt_length"]
        ids = torch.tensor([row["ids"][:start]], device=policy.device)
        output = policy.generate(ids, max_new_tokens=min(256, longest - start), **greedy)
        samples.append({"prompt": row["prompt"], "response": tokenizer.decode(output[0, start:])})
    return {"eval/loss": float(all_sum(torch.tensor(loss, device=policy.device)))}, samples


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
    flags = vars(args) | {"model": locate(args.model), "dataset": locate(args.dataset), "ranks": WORLD_SIZE}
    before = json.loads(file.read_text()) if file.exists() else flags
    free = "run_dir eval_every log_every save_every track micro_batch_size gradient_checkpointing".split()
    free += ["num_epochs"] * (args.lr_schedule == "constant_with_warmup")  # others depend on it
    changed = [f"--{k} {before.get(k)}" for k, v in flags.items() if v != before.get(k) and k not in free]
    check(not changed, f"--run_dir {run_dir}: is a run with {changed}; use these flags or a new folder")
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


def log(run_dir, track, iteration, metrics, samples, due=True):
    """Add to metrics.jsonl and samples.jsonl, and print both if due; on rank 0."""
    for path, lines in zip([run_dir / x for x in LOGS], ([metrics], samples)) if RANK == 0 else ():
        with explain(path, "make room and give the same command again"), open(path, "a") as file:
            file.writelines(json.dumps({"iteration": iteration} | line) + "\n" for line in lines)
    if track:
        track.log(metrics, step=iteration)
    if due:
        say(f"iteration {iteration:4d}   " + "   ".join(f"{k} {v:.4g}" for k, v in metrics.items()))
    for x in samples:
        say(f"    {str(x['prompt'])[-80:]!r} -> {x['response']!r}")


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
