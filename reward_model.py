# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.23.0", "datasets==5.2.0", "tyro==1.0.17", "wandb==0.31.0"]
# ///
"""Reward model: stage 2, from pairs of a better and a worse response to a model that scores responses.

Bradley-Terry (REINFORCE++, arXiv 2501.03262v9, Eq. 14; InstructGPT, arXiv 2203.02155, Eq. 1): a response of
score s_c is preferred to one of s_r with probability sigmoid(s_c - s_r). A language model with a head of one
output learns the scores by maximum likelihood:

    loss = 1/N sum_i [softplus(-(s_c - s_r - margin)) + center_rewards_coefficient (s_c + s_r)^2]

N counts the pairs of one optimizer step over all ranks. The first term sees differences only, and the second
keeps the scores near 0 (arXiv 2312.09244, Eq. 2). The score is read at the last token, EOS. Texts become the
ids of the prompt, of the response, and EOS, as in the policy scripts; chats go through the chat template.
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
import transformers
import tyro
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint as recompute

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun
LOGS = "metrics.jsonl", "samples.jsonl"


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of the run
    seed: int = 1  # for the new head and the order of the pairs
    # cpu, cuda, mps, ...; by default the accelerator that torch finds
    device: str = str(torch.accelerator.current_accelerator(True) or "cpu")
    dtype: Literal["float32", "bfloat16"] = "float32"  # bfloat16 is autocast; weights and AdamW stay float32
    # Model and data
    model: str = "toy/policy"  # folder or hub id of a causal LM, or of a reward model, which keeps its head
    dataset: str = "toy/preferences_train.jsonl"  # hub id, folder, .jsonl, .parquet with `chosen`, `rejected`
    # and `prompt`, texts or chat messages; `prompt` may be part of the others
    dataset_split: str = "train"  # split of a hub id or folder
    eval_dataset: str | None = None  # held-out pairs; a column `group` splits the result; the toy has its own
    eval_split: str = "test"  # split of a hub id or folder
    max_length: int = 1024  # longer texts (in tokens) are cut at their end, as a rollout cuts a response
    # Optimization
    num_epochs: int = 2  # passes over the pairs
    batch_size: int = 64  # pairs per optimizer step, over all ranks
    micro_batch_size: int = 64  # pairs per forward pass on each rank: memory only
    margin: float = 0.0  # the chosen score should be higher by so much; a column `margin` says it per pair
    center_rewards_coefficient: float = 0.01  # weight of the term that keeps scores near 0
    learning_rate: float = 1e-3  # peak learning rate of AdamW
    lr_schedule: str = "linear"  # or constant_with_warmup, cosine: transformers.get_scheduler's names
    warmup_iterations: int = 20  # the learning rate rises linearly over these
    max_grad_norm: float = 1.0  # the gradient is clipped to this norm
    gradient_checkpointing: bool = False  # recompute activations: less memory, a slower update
    # Run
    run_dir: str | None = None  # the same command goes on with the run in it; None: a new one in runs/
    eval_every: int = 70  # iterations between evaluations; also before the first and after the last; 0: none
    log_every: int = 20  # iterations between printed lines; metrics.jsonl has every iteration
    save_every: int = 200  # iterations between checkpoints; the last is always saved; 0: only that
    track: bool = False  # log to Weights & Biases too; WANDB_PROJECT names the project


def preference_loss(chosen_scores, rejected_scores, margin=0.0, center=0.0, num_pairs=None):
    """Bradley-Terry loss and centering of pairs (b,), over num_pairs of the optimizer step, by default b."""
    losses = torch.nn.functional.softplus(-(chosen_scores - rejected_scores - margin))  # (b,)
    losses = losses + center * (chosen_scores + rejected_scores).square()
    return losses.sum() / (num_pairs or len(losses))


def score(model, input_ids, attention_mask):
    """Scores (B,) of sequences (B, L), padded on either side: what the head gives at the last attended token.

    Not model(...).logits, which are those of the last token that is not the pad id: EOS may have this id.
    """
    output = model.get_decoder()(**with_positions(input_ids, attention_mask), use_cache=False)
    last = (torch.arange(input_ids.shape[1], device=input_ids.device) * attention_mask).argmax(1)  # (B,)
    hidden = output.last_hidden_state[torch.arange(len(last)), last]  # (B, H)
    return model.score(hidden.to(model.score.weight.dtype))[:, 0]


def micro_batches(rows, index, size, device):
    """Yield (part of index, input_ids and attention_mask (2b, L), margins (b,)) of size pairs of like length.

    First all chosen, then all rejected, padded on the right.
    """
    index = sorted(index, key=lambda i: rows[i]["length"])
    for part in (index[i : i + size] for i in range(0, len(index), size)):
        lists = [rows[i]["ids"][side] for side in (0, 1) for i in part]
        ids = pad_sequence([torch.tensor(x) for x in lists], True, -1).to(device)  # -1 on padding
        margins = torch.tensor([rows[i]["margin"] for i in part], device=device)
        yield part, ids.clamp(min=0), (ids >= 0).long(), margins


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
    model, tokenizer = load(args, device)
    rows = load_rows(args, "dataset", args.dataset, args.dataset_split, model, tokenizer, args.batch_size)
    name = args.eval_dataset or ("toy/preferences_heldout.jsonl" if args.dataset == Args.dataset else None)
    eval_rows = load_rows(args, "eval_dataset", name, args.eval_split, model, tokenizer) if name else []
    center, steps_per_epoch = args.center_rewards_coefficient, len(rows) // args.batch_size
    num_iterations = args.num_epochs * steps_per_epoch
    if start >= num_iterations and (run_dir / "model").exists():
        return say(f"{run_dir} is finished after {start} iterations: nothing to do")
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    schedule = args.lr_schedule, optimizer, args.warmup_iterations, num_iterations + 1
    lr_factor = transformers.get_scheduler(*schedule).lr_lambdas[0]  # a function of the iteration: no state
    state = {"reward_model": model, "optimizer": optimizer}

    for name, part in state.items() if checkpoint else ():
        part.load_state_dict(checkpoint[name])
    track = start_run(args, run_dir, flags, checkpoint) if RANK == 0 else None
    checkpoint = None  # frees its memory
    if WORLD_SIZE > 1:
        dist.init_process_group()
    say(f"{model.num_parameters():,} parameters on {WORLD_SIZE} x {device.type}, writes to {run_dir}")

    for done in range(start, num_iterations + 1):
        # 2. Evaluation on held-out pairs, before the first iteration and after the last too
        if eval_rows and args.eval_every and (done % args.eval_every == 0 or done == num_iterations):
            log(run_dir, track, done, *evaluate(args, model, eval_rows))
        if done == num_iterations:
            break
        iteration, began = done + 1, time.time()

        # 3. Batch: this rank's part of the next pairs
        epoch, step = divmod(done, steps_per_epoch)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(hash((args.seed, epoch))))
        order = order[step * args.batch_size : (step + 1) * args.batch_size].chunk(WORLD_SIZE)[RANK]

        # 4. Update: one optimizer step, its gradient summed over micro-batches and ranks
        lr = optimizer.param_groups[0]["lr"] = args.learning_rate * lr_factor(iteration)
        total_loss, scores = torch.zeros((), device=device), []
        for _, *inputs, margins in micro_batches(rows, order.tolist(), args.micro_batch_size, device):
            chosen, rejected = score(model, *inputs).chunk(2)  # (b,) each
            loss = preference_loss(chosen, rejected, margins, center, args.batch_size)
            loss.backward()
            total_loss += loss.detach()
            scores.append(torch.stack([chosen, rejected], dim=1).detach())  # (b, 2)
        for parameter in model.parameters():
            if parameter.grad is not None:  # some models have weights that nothing uses
                parameter.grad = all_sum(parameter.grad)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        check((norm + total_loss).isfinite(), "the loss or gradient is not finite; lower --learning_rate")
        optimizer.step()
        optimizer.zero_grad()

        # 5. Log and save
        scores = torch.cat(scores)  # (B / WORLD_SIZE, 2): every rank has the same number
        margin, mean = scores[:, 0] - scores[:, 1], all_sum(scores.mean()) / WORLD_SIZE
        means = {"accuracy": (margin > 0).float(), "margin": margin, "score_std": (scores - mean).square()}
        metrics = {"loss": float(all_sum(total_loss)), "grad_norm": float(norm), "learning_rate": lr}
        metrics |= {name: float(all_sum(x.mean())) / WORLD_SIZE for name, x in means.items()}
        metrics |= {"score_mean": float(mean), "score_std": metrics["score_std"] ** 0.5}
        metrics["pairs_per_second"] = args.batch_size / (time.time() - began)
        due = iteration % args.log_every == 0 or began // 60 < time.time() // 60  # a new minute
        log(run_dir, track, iteration, metrics, [], due)
        due = args.save_every and iteration % args.save_every == 0
        if RANK == 0 and (due or iteration == num_iterations):
            save_checkpoint(run_dir, iteration, state)

    # 6. The result, a folder that from_pretrained opens
    if RANK == 0:
        with replacing(run_dir / "model") as path:
            model.save_pretrained(path)
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
    """A model with one output in eval mode, so without dropout, and its tokenizer. Weights are float32."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    path, where = locate(args.model), f"--model {args.model}"
    options = {"dtype": torch.float32, "use_safetensors": True, "output_loading_info": True}
    options |= {"num_labels": 1, "ignore_mismatched_sizes": True}
    with explain(where, "use a folder or a hub id of a model"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        model, info = transformers.AutoModelForSequenceClassification.from_pretrained(path, **options)
    missing, other = set(info["missing_keys"]), info["mismatched_keys"]
    right = hasattr(model, "score") and missing <= {"score.weight"} and not other
    check(right, f"{where}: lacks {missing}, has other sizes {other}; use a causal LM, or a reward model")
    check(tokenizer.eos_token, f"{where}: has no EOS token; save one in its tokenizer")
    torch.manual_seed(args.seed)
    if missing:  # a new head, small enough that the scores start near 0
        model.score.weight.data.normal_(std=1 / (model.score.in_features + 1))
    # Others read the score at the last token that is not the pad id, so that this must not be EOS.
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
        if len(tokenizer) > model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    for layer in model.modules() if args.gradient_checkpointing else ():
        if isinstance(layer, transformers.modeling_layers.GradientCheckpointingLayer):
            layer.forward = functools.partial(recompute, layer.forward, use_reentrant=False)
    for part in {model, model.get_decoder()} if args.dtype == "bfloat16" else ():
        part.forward = torch.autocast(device.type, torch.bfloat16)(part.forward)
    return model.to(device).eval(), tokenizer


def with_positions(input_ids, attention_mask):
    """The model's inputs (B, L), with positions for which left padding does not count."""
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": positions}


def encode(tokenizer, prompt, response):
    """The ids of a prompt with its response and EOS, as the policy scripts give them to a reward model."""
    if isinstance(prompt, str) and isinstance(response, str):
        tokenizer.chat_template = None  # it is saved without, so that a model of texts is given texts
        ids = tokenizer(prompt)["input_ids"] + tokenizer(response, add_special_tokens=False)["input_ids"]
    else:
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        response = [{"role": "assistant", "content": response}] if isinstance(response, str) else response
        chat = chat + response if response[0]["role"] == "assistant" else response  # which is a whole chat
        ids = tokenizer.apply_chat_template(chat)["input_ids"]
    return ids if tokenizer.eos_token_id in ids[-2:] else [*ids, tokenizer.eos_token_id]


def load_rows(args, flag, name, split, model, tokenizer, least=1):
    """The pairs of a dataset with the ids of chosen and rejected; equal ones are left out."""
    path, where, longest = locate(name), f"--{flag} {name}", args.max_length
    kind = {".jsonl": "json", ".parquet": "parquet"}.get(Path(path).suffix)
    source = {"path": kind, "data_files": path, "split": "train"} if kind else {"path": path, "split": split}
    with explain(where, "use a .jsonl, a .parquet, a folder or a hub id"):
        # what is local is streamed, since the cache may hold an older folder of that name
        rows = list(datasets.load_dataset(**source, streaming=Path(path).exists()))
    for number, row in enumerate(rows):
        with explain(f"{where}: row {number}", "fill in `chosen` and `rejected`, texts or chats"):
            row["prompt"] = row.get("prompt") or ""
            row["ids"] = [encode(tokenizer, row["prompt"], row[x])[:longest] for x in ("chosen", "rejected")]
        row["length"] = max(map(len, row["ids"]))
        row["margin"] = args.margin if row.get("margin") is None else row["margin"]
    kept = [row for row in rows if row["ids"][0] != row["ids"][1]]
    text = f"{len(kept)} of {len(rows)} pairs differ in their first --max_length {longest} tokens"
    check(len(kept) >= least, f"{where}: {text}; give {least} or more")
    say(f"{flag}: {text}")
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    text = f"--max_length {longest}: keeps more tokens than the {limit} positions of the model"
    check(max(row["length"] for row in kept) <= limit, f"{text}; use {limit} or less")
    return kept


@torch.no_grad()
def evaluate(args, model, rows):
    """Loss, margin and accuracy on held-out pairs, also of each group, over all ranks; three pairs."""
    scores, mine = torch.zeros(len(rows), 2, device=model.device), range(len(rows))[RANK::WORLD_SIZE]
    for index, *inputs, _ in micro_batches(rows, mine, args.micro_batch_size, model.device):
        scores[index] = score(model, *inputs).view(2, -1).T
    chosen, rejected = all_sum(scores).T  # (N,) each
    margins = torch.tensor([row["margin"] for row in rows], device=model.device)
    metrics = {"eval/loss": float(preference_loss(chosen, rejected, margins))}
    metrics["eval/margin"] = float((chosen - rejected).mean())
    groups = {"eval/accuracy": (chosen > rejected).tolist()}
    for row, right in zip(rows, groups["eval/accuracy"]):
        if "group" in row:
            groups.setdefault(f"eval/accuracy/{row['group']}", []).append(right)
    metrics |= {name: sum(x) / len(x) for name, x in groups.items()}
    samples = []
    for row, *scores in zip(rows[:3], chosen.tolist(), rejected.tolist()):
        for name, x in zip(("chosen", "rejected"), scores):
            samples.append({"prompt": row["prompt"], "response": row[name], "score": x})
    return metrics, samples


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
    paths = "model dataset eval_dataset".split()
    flags = {k: locate(v) if v and k in paths else v for k, v in vars(args).items()} | {"ranks": WORLD_SIZE}
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
