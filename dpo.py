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
MAX_LOGITS = 2**26  # computed at a time by response_logprobs: 256 MiB in float32


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of the run
    seed: int = 1  # for the order of the pairs
    # cpu, cuda, mps, ...; by default the accelerator that torch finds
    device: str = str(torch.accelerator.current_accelerator(True) or "cpu")
    dtype: Literal["float32", "bfloat16"] = "float32"  # bfloat16 is autocast; weights and AdamW stay float32
    # Model and data
    model: str = "toy/policy"  # policy to start from, and reference: folder or hub id of a causal LM
    dataset: str = "toy/preferences_train.jsonl"  # hub id, folder, .jsonl, .parquet with `chosen`, `rejected`
    # and `prompt`, texts or chat messages; of chats it may be part of the others
    dataset_split: str = "train"  # split of a hub id or folder
    eval_dataset: str | None = None  # held-out pairs; a column `group` splits the result; the toy has its own
    eval_split: str = "test"  # split of a hub id or folder
    max_length: int = 1024  # longer texts (in tokens) are cut at their end
    # Optimization
    num_epochs: int = 2  # passes over the pairs
    batch_size: int = 64  # pairs per optimizer step, over all ranks
    micro_batch_size: int = 64  # pairs per forward pass on each rank: memory only
    beta: float = 0.1  # the KL penalty whose best policy is sought; smaller moves farther from the reference
    learning_rate: float = 5e-5  # peak learning rate of AdamW
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


def dpo_loss(
    chosen_logprobs, rejected_logprobs, ref_chosen_logprobs, ref_rejected_logprobs, beta, num_pairs=None
):
    """Eq. 7 on pairs (b,), over num_pairs of the optimizer step, by default b. Log-probs are of responses."""
    margins = (chosen_logprobs - ref_chosen_logprobs) - (rejected_logprobs - ref_rejected_logprobs)  # (b,)
    return torch.nn.functional.softplus(-beta * margins).sum() / (num_pairs or len(margins))


def response_logprobs(model, input_ids, attention_mask, response_mask):
    """Log-probs (B,) of responses, summed over the tokens of input_ids (B, L) where response_mask is true."""
    decoder = model.get_decoder()
    output = decoder(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
    mask = response_mask[:, 1:]  # (B, L-1): each position predicts the next token
    hidden, targets = output.last_hidden_state[:, :-1][mask], input_ids[:, 1:][mask]  # (N, H) and (N,)

    def head(hidden, targets):
        # The model with its decoder stubbed out: lm_head alone would miss the scaling or cap that some have.
        done = type(output)(last_hidden_state=hidden[None])
        with mock.patch.object(decoder, "forward", lambda *args, **kwargs: done):
            logits = model(input_ids=targets[None]).logits[0]  # (n, V)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]

    # Logits would be the largest tensor of all: MAX_LOGITS at a time, and again in the backward pass.
    size = max(1, MAX_LOGITS // model.config.get_text_config().vocab_size)
    pieces = zip(hidden.split(size), targets.split(size))
    logprobs = torch.cat([recompute(head, *piece, use_reentrant=False) for piece in pieces])
    return logprobs.new_zeros(mask.shape).masked_scatter(mask, logprobs).sum(1)


def micro_batches(rows, index, size, device):
    """Yield part of index, references (2b,), (input_ids, attention_mask, response_mask), (2b, L) each.

    Of size pairs of like length: first all chosen, then all rejected, padded on the right.
    """
    index = sorted(index, key=lambda i: rows[i]["length"])
    for part in (index[i : i + size] for i in range(0, len(index), size)):
        sides = [(rows[i], side) for side in (0, 1) for i in part]
        ids = pad_sequence([torch.tensor(row["ids"][x]) for row, x in sides], True, -1).to(device)
        starts = torch.tensor([[row["starts"][x]] for row, x in sides], device=device)  # (2b, 1)
        response_mask = (ids >= 0) & (torch.arange(ids.shape[1], device=device) >= starts)  # -1 is padding
        references = torch.tensor([row["references"][x] for row, x in sides], device=device)
        yield part, references, (ids.clamp(min=0), (ids >= 0).long(), response_mask)


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
    rows = load_rows(args, "dataset", args.dataset, args.dataset_split, policy, tokenizer, args.batch_size)
    name = args.eval_dataset or ("toy/preferences_heldout.jsonl" if args.dataset == Args.dataset else None)
    eval_rows = load_rows(args, "eval_dataset", name, args.eval_split, policy, tokenizer) if name else []
    steps_per_epoch = len(rows) // args.batch_size
    num_iterations = args.num_epochs * steps_per_epoch
    if start >= num_iterations and (run_dir / "model").exists():
        return say(f"{run_dir} is finished after {start} iterations: nothing to do")
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0)
    schedule = args.lr_schedule, optimizer, args.warmup_iterations, num_iterations + 1
    lr_factor = transformers.get_scheduler(*schedule).lr_lambdas[0]  # a function of the iteration: no state
    state = {"policy": policy, "optimizer": optimizer}
    if WORLD_SIZE > 1:
        dist.init_process_group()
    # The policy is still the reference: what it gives now is kept with the rows.
    for row, pair in zip(rows + eval_rows, log_ratios(args, policy, rows + eval_rows).T.tolist()):
        row["references"] = pair

    for name, part in state.items() if checkpoint else ():
        part.load_state_dict(checkpoint[name])
    track = start_run(args, run_dir, flags, checkpoint) if RANK == 0 else None
    checkpoint = None  # frees its memory
    say(f"{policy.num_parameters():,} parameters on {WORLD_SIZE} x {device.type}, writes to {run_dir}")

    for done in range(start, num_iterations + 1):
        # 2. Evaluation on held-out pairs, before the first iteration and after the last too
        if eval_rows and args.eval_every and (done % args.eval_every == 0 or done == num_iterations):
            log(run_dir, track, done, *evaluate(args, policy, tokenizer, eval_rows))
        if done == num_iterations:
            break
        iteration, began = done + 1, time.time()

        # 3. Batch: this rank's part of the next pairs
        epoch, step = divmod(done, steps_per_epoch)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(hash((args.seed, epoch))))
        order = order[step * args.batch_size : (step + 1) * args.batch_size].chunk(WORLD_SIZE)[RANK]

        # 4. Update: one optimizer step, its gradient summed over micro-batches and ranks
        lr = optimizer.param_groups[0]["lr"] = args.learning_rate * lr_factor(iteration)
        total_loss, rewards = torch.zeros((), device=device), []
        for _, references, inputs in micro_batches(rows, order.tolist(), args.micro_batch_size, device):
            logprobs = response_logprobs(policy, *inputs)  # (2b,)
            loss = dpo_loss(*logprobs.chunk(2), *references.chunk(2), args.beta, args.batch_size)
            loss.backward()
            total_loss += loss.detach()
            rewards.append(args.beta * (logprobs.detach() - references).view(2, -1))  # (2, b)
        for parameter in policy.parameters():
            if parameter.grad is not None:  # some models have weights that nothing uses
                parameter.grad = all_sum(parameter.grad)
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
        finite = (norm + total_loss).isfinite()
        check(finite, "the loss or its gradient is not finite; use a lower --learning_rate")
        optimizer.step()
        optimizer.zero_grad()

        # 5. Log and save
        chosen, rejected = torch.cat(rewards, 1)  # (B / WORLD_SIZE,): every rank has the same number
        means = {"accuracy": (chosen > rejected).float(), "margin": chosen - rejected}
        means |= {"chosen_reward": chosen, "rejected_reward": rejected}
        metrics = {"loss": float(all_sum(total_loss)), "grad_norm": float(norm), "learning_rate": lr}
        metrics |= {name: float(all_sum(x.mean())) / WORLD_SIZE for name, x in means.items()}
        metrics["pairs_per_second"] = args.batch_size / (time.time() - began)
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
    """The policy in eval mode, so without dropout, and its tokenizer. Weights are float32."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    path, where = locate(args.model), f"--model {args.model}"
    with explain(where, "use a folder or a hub id of a model"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
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


def encode(tokenizer, prompt, response):
    """The ids of a prompt with its response and EOS, and how many of them are the prompt's."""
    if isinstance(response, list):  # what follows the prompt, or a whole chat; it ends with the assistant
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        prompt = (chat if response[0]["role"] == "assistant" else []) + response[:-1]
        response = response[-1]["content"]
    template = functools.partial(tokenizer.apply_chat_template, add_generation_prompt=True)
    start = (tokenizer if isinstance(prompt, str) else template)(prompt)["input_ids"]
    end = tokenizer(response, add_special_tokens=False)["input_ids"]
    return [*start, *end, tokenizer.eos_token_id], len(start)


def load_rows(args, flag, name, split, model, tokenizer, least=1):
    """The pairs of a dataset with the ids of chosen and rejected; equal and cut away ones are left out."""
    path, where, longest = locate(name), f"--{flag} {name}", args.max_length
    kind = {".jsonl": "json", ".parquet": "parquet"}.get(Path(path).suffix)
    source = {"path": kind, "data_files": path, "split": "train"} if kind else {"path": path, "split": split}
    with explain(where, "use a .jsonl, a .parquet, a folder or a hub id"):
        # what is local is streamed, since the cache may hold an older folder of that name
        rows = list(datasets.load_dataset(**source, streaming=Path(path).exists()))
    for number, row in enumerate(rows):
        with explain(f"{where}: row {number}", "fill in `chosen` and `rejected`, texts or chats"):
            row["prompt"] = row.get("prompt") or ""
            pairs = [encode(tokenizer, row["prompt"], row[x]) for x in ("chosen", "rejected")]
        row["ids"], row["starts"] = [ids[:longest] for ids, _ in pairs], [start for _, start in pairs]
        check(min(row["starts"]), f"{where}: row {number} has an empty prompt; fill in the column `prompt`")
        row["length"], row["references"] = max(map(len, row["ids"])), (0.0, 0.0)  # until they are known
    kept = [row for row in rows if row["ids"][0] != row["ids"][1] and max(row["starts"]) < longest]
    text = f"{len(kept)} of {len(rows)} pairs differ in their first --max_length {longest} tokens"
    check(len(kept) >= least, f"{where}: {text}; give {least} or more")
    say(f"{flag}: {text}")
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    text = f"--max_length {longest}: keeps more tokens than the {limit} positions of the model"
    check(max(row["length"] for row in kept) <= limit, f"{text}; use {limit} or less")
    return kept


@torch.no_grad()
def log_ratios(args, policy, rows):
    """Log-probs minus the reference's (2, N) of chosen and rejected responses, computed over all ranks."""
    ratios, mine = torch.zeros(2, len(rows), device=policy.device), range(len(rows))[RANK::WORLD_SIZE]
    for part, references, inputs in micro_batches(rows, mine, args.micro_batch_size, policy.device):
        ratios[:, part] = (response_logprobs(policy, *inputs) - references).view(2, -1)
    return all_sum(ratios)


def evaluate(args, policy, tokenizer, rows):
    """Loss, margin and accuracy on held-out pairs, also of each group; greedy responses to three prompts."""
    chosen, rejected = log_ratios(args, policy, rows)  # (N,) each
    metrics = {"eval/loss": float(dpo_loss(chosen, rejected, 0, 0, args.beta))}
    metrics["eval/margin"] = args.beta * float((chosen - rejected).mean())
    groups, samples = {"eval/accuracy": (chosen > rejected).tolist()}, []
    for row, right in zip(rows, groups["eval/accuracy"]):
        if "group" in row:
            groups.setdefault(f"eval/accuracy/{row['group']}", []).append(right)
    metrics |= {name: sum(x) / len(x) for name, x in groups.items()}
    greedy = {"do_sample": False, "repetition_penalty": 1.0, "eos_token_id": tokenizer.eos_token_id}
    for row in rows[:3]:
        start = row["starts"][0]
        ids = torch.tensor([row["ids"][0][:start]], device=policy.device)
        output = policy.generate(ids, max_new_tokens=min(256, row["length"] - start), **greedy)
        texts = tokenizer.batch_decode(output[0].tensor_split([start]))
        samples.append(dict(zip(("prompt", "response"), texts)))
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
