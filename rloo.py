"""RLOO: several responses per prompt, each with the mean of the others as its baseline; plain REINFORCE, no clip.

Arash Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in
LLMs", arXiv 2402.14740, section 2 and the RLOO estimator.

k = samples_per_prompt responses o_1 ... o_k to a prompt are sampled from pi and get scores r_1 ... r_k. With
beta = kl_coef:

    R_i  = r_i - beta * sum_t log(pi(o_t) / pi_ref(o_t))       one reward per response, the KL inside it
    A_i  = R_i - 1/(k-1) * sum_{j != i} R_j                    the others are the baseline
    loss = -1/N_seq * sum_i A_i sum_t log pi_theta(o_t)        a response is one action: no 1/T, no ratio, no clip

N_seq counts the responses of one optimizer step over all ranks and micro-batches; the sampled EOS is a token of its
response. There is exactly one optimizer step per rollout, since nothing here corrects for a policy that has moved. The
gradient is unbiased: the baseline of a response does not depend on it, and A_i = k/(k-1) * (R_i - mean(R)).

What sets it apart: grpo.py divides by the group's std and the response's length and clips a ratio; remax.py takes one
greedy response as the baseline; reinforce_pp.py gives the KL to each token and normalizes over the batch.

    python rloo.py
    torchrun --nproc-per-node 8 rloo.py --model Qwen/Qwen3-0.6B --dataset prompts.jsonl --eval_dataset None
"""

import contextlib
import functools
import hashlib
import importlib.util
import inspect
import json
import math
import os
import re
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field, make_dataclass
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import ClassVar, Literal

import torch
import torch.distributed as dist
import torch.utils.checkpoint
import transformers  # loads its classes when they are first named, so --help need not wait for them
import tyro
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

TOY = Path(__file__).resolve().parent / "toy"  # the embedded default: a small model and its prompts, see toy/README.md
MAX_LOGITS = 2**26  # log-probs take so many at once, 256 MiB in float32, whatever the size of batch and vocabulary


@dataclass
class Experiment:
    exp_name: str = Path(__file__).stem
    """Name of the run; its folder is <runs_dir>/<exp_name>__<seed>__<time>."""
    seed: int = 1
    """Seeds the order of the prompts and every token sampled."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes CUDA if there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the forward passes (autocast). What is trained, and its optimizer state, is float32 either way."""


@dataclass
class ModelsAndData:
    model: str = str(TOY / "policy")
    """Policy to start from: hub id or folder of a causal LM with its tokenizer."""
    ref_model: str | None = None
    """Frozen reference of the KL: hub id or folder; None takes --model."""
    dataset: str = str(TOY / "train.jsonl")
    """Hub id, .jsonl or .parquet with a column `prompt` (text or chat messages) and, for exact_answer, `answer`."""
    dataset_split: str = "train"
    """Split of a hub dataset."""
    eval_dataset: str | None = str(TOY / "heldout.jsonl")
    """Held-out prompts, as --dataset (set both); a column `group` splits the results. None evaluates nothing."""
    eval_split: str = "test"
    """Split of a hub dataset for evaluation."""
    chat_template_kwargs: str = "{}"
    """JSON for the chat template that prompts go through: '{"enable_thinking": false}' is known to Qwen3's."""


@dataclass
class Rollout:
    batch_size: int = 128
    """Responses per rollout, over all ranks."""
    max_prompt_length: int = 512
    """Longer prompts (in tokens) are left out, and counted in the first lines of output."""
    max_response_length: int = 40
    """Tokens sampled at most; a response without EOS by then counts as truncated."""
    temperature: float = 1.0
    """Sampling temperature; log-probs and KL are taken at it too. No top-k, no top-p, no repetition penalty."""


@dataclass
class Reward:
    reward: str = "exact_answer"
    """The rule exact_answer (1 or -1); file.py:function, called by keyword with the lists prompts, completions (texts)
    and every other column, which returns a list of numbers; or a reward model: hub id or folder."""
    monitor: str | None = None
    """A second score of every response, named as in --reward; logged, never trained on. The rule beside a reward model
    shows whether the policy gets better, or better at pleasing the model."""
    answer_marker: str = "answer"
    """For exact_answer: the sign before the answer. A word or mark (answer, ####): the answer is all that follows; an
    open brace (\\boxed{): up to the one that closes it; a tag (<answer>): up to </answer>. The last one counts."""
    missing_eos_penalty: float = 0.0
    """Subtracted from the score of a truncated response."""
    reward_scale: float = 1.0
    """The score is multiplied by this, after the penalty."""
    reward_zscore: bool = False
    """Normalize scores to mean 0, std 1 over the rollout of all ranks, after the scale."""
    reward_clip: float | None = None
    """Clip scores to [-c, c], last of all; None does not."""


@dataclass
class Optimization:
    num_iterations: int = 80
    """Rollouts in all; update_epochs * num_minibatches optimizer steps follow each."""
    micro_batch_size: int = 64
    """Responses per forward pass of log-probs, reward model and update on each rank: memory only, same results."""
    learning_rate: float = 2e-4
    """AdamW's peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Factor on the learning rate beside the warm-up: 1, or falling from 1 at first to 0 after the last iteration."""
    warmup_iterations: int = 0
    """The learning rate rises linearly over so many iterations."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = 1.0
    """The gradient is clipped to this norm, over all parameters."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time in the update."""
    shard_optimizer: bool = False
    """Each rank keeps a share of AdamW's state (ZeRO stage 1), in whole tensors: memory only, same results."""


@dataclass
class EvaluationAndLogging:
    runs_dir: str = "runs"
    """Parent of the run folder, which gets args.json, metrics.jsonl, samples.jsonl, checkpoints/ and model/."""
    eval_every: int = 40
    """Greedy evaluation every so many iterations, before the first and after the last; 0 never."""
    log_every: int = 10
    """A line of output and samples of the rollout every so many iterations; metrics.jsonl gets every iteration."""
    num_samples: int = 3
    """So many prompts with their responses go to samples.jsonl, and at each evaluation to the terminal."""
    save_every: int = 50
    """Checkpoint every so many iterations, and after the last; 0 only then."""
    keep_checkpoints: int = 2
    """Older checkpoints are deleted."""
    resume: str | None = None
    """Run folder to go on with: from its last checkpoint, under the same flags (a constant rate may go on longer)."""
    track: bool = False
    """Log to Weights & Biases too; WANDB_MODE=offline works."""
    wandb_project: str = "rlhf-by-diff"
    """Project of --track."""
    wandb_entity: str | None = None
    """Team of --track; None is your own."""


# --- estimator: begin ------------------------------------------------------------------------------------------------
@dataclass
class Estimator:
    samples_per_prompt: int = 8
    """k: responses per prompt; the k - 1 others are the baseline of each."""
    min_samples_per_prompt: ClassVar[int] = 2  # a group of one has no others
    kl_coef: float = 0.01
    """beta: weight of the KL penalty in the reward of a response."""
    num_minibatches: ClassVar[int] = 1  # one optimizer step per rollout: there is no ratio to correct a second
    update_epochs: ClassVar[int] = 1


def compute_advantages(args, rollout: dict) -> dict:
    """Rewards minus the mean of the others in the group, the same for every token of a response, without gradient.

    Reads scores (B,), prompt-major: rows p*k ... p*k+k-1 belong to prompt p, kl (B, T) and response_mask (B, T); gives
    {"advantages": (B, T)}, 0 on padding.
    """
    mask, k = rollout["response_mask"], args.samples_per_prompt
    rewards = rollout["scores"] - args.kl_coef * rollout["kl"].masked_fill(~mask, 0.0).sum(1)  # (B,)
    groups = rewards.view(-1, k)  # (B/k, k)
    others = (groups.sum(1, keepdim=True) - groups) / (k - 1)
    return {"advantages": ((groups - others).view(-1, 1) * mask).detach()}


def policy_loss(args, mb: dict, logprobs: torch.Tensor, num_sequences, num_tokens) -> tuple[torch.Tensor, dict]:
    """REINFORCE on whole responses: the sum over tokens, the mean over responses.

    logprobs (B, T) are differentiated; mb holds advantages and response_mask (B, T). num_sequences counts the whole
    optimizer step: added up over micro-batches and ranks, what each call returns is the mean over all its responses.
    """
    mask = mb["response_mask"]
    loss = -(mb["advantages"][mask] * logprobs[mask]).sum() / num_sequences
    return loss, {"policy_loss": loss.detach()}


# --- estimator: end --------------------------------------------------------------------------------------------------


@dataclass
class Args(Estimator, EvaluationAndLogging, Optimization, Reward, Rollout, ModelsAndData, Experiment):
    """Every flag, flat. The groups are base classes only so that --help can show them as groups."""


def parse_args() -> Args:
    """The command line as Args. tyro draws a box of --help around each nested group; flags carry no prefix."""
    groups = [base for base in reversed(Args.__mro__) if base not in (object, Args)]
    flags = make_dataclass("Flags", [(group.__name__, group, field(default_factory=group)) for group in groups])
    flags = tyro.cli(tyro.conf.OmitArgPrefixes[flags], description=__doc__, use_underscores=True)
    return Args(**{name: value for group in vars(flags).values() for name, value in vars(group).items()})


def printable(text: str) -> str:
    """Without control characters, which text from a dataset or a model could steer a terminal with."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def say(text: str) -> None:
    """Print on rank 0, above the progress bar."""
    if int(os.environ.get("RANK", 0)) == 0:
        tqdm.write(printable(text))
        sys.stdout.flush()  # into a pipe or a file too, where a kill would lose what waits


def fail(message: str) -> None:
    """End with one sentence and exit code 2. Until the ranks have met they fail alike, and the first of each node says
    it; later any of them may be alone with its trouble."""
    if int(os.environ.get("LOCAL_RANK", 0)) == 0 or dist.is_initialized():
        print(f"error: {printable(' '.join(message.split()))}", file=sys.stderr, flush=True)
    sys.exit(2)


def check_args(args, world_size: int) -> None:
    """Refuse numbers and sizes that do not work out, before anything is loaded."""
    for name, value in vars(args).items():
        if isinstance(value, int | float) and not 0 <= value < math.inf:
            fail(f"--{name} {value}: must be a number of 0 or more")
        if isinstance(value, tuple) and not all(0 <= x < 1 for x in value):
            fail(f"--{name} {' '.join(map(str, value))}: must be numbers from 0 to below 1")
    positive = "batch_size micro_batch_size num_minibatches update_epochs num_iterations log_every keep_checkpoints "
    positive += "max_prompt_length max_response_length temperature learning_rate max_grad_norm"
    for name in positive.split():
        if not getattr(args, name) > 0:
            fail(f"--{name} {getattr(args, name)}: must be more than 0")
    k, least, size, steps = args.samples_per_prompt, args.min_samples_per_prompt, args.batch_size, args.num_minibatches
    if k < least:
        fail(f"--samples_per_prompt {k}: must be at least {least}, the smallest group that can be compared")
    if size % (world_size * k):
        near = -(-size // (world_size * k)) * world_size * k
        fail(f"--batch_size {size}: is no multiple of {world_size} ranks x {k} --samples_per_prompt; {near} would be")
    if size // world_size % steps:
        fail(f"--num_minibatches {steps}: does not divide the {size // world_size} responses of a rank; take a divisor")
    if args.device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda: torch finds no CUDA device; take cpu or auto")
    try:
        if not isinstance(json.loads(args.chat_template_kwargs), dict):
            raise ValueError("no object")
    except ValueError as error:
        text = f"is no JSON object ({error}); give one such as '{{\"enable_thinking\": false}}'"
        fail(f"--chat_template_kwargs {args.chat_template_kwargs!r}: {text}")
    if not args.answer_marker:
        fail("--answer_marker '': must not be empty; give the word or sign that stands before the answer")
    if args.track and not importlib.util.find_spec("wandb"):
        fail("--track: wandb is not installed; pip install wandb, or leave --track out")
    if "/" in args.exp_name or not args.exp_name:
        fail(f"--exp_name {args.exp_name!r}: must be a name and no path; --runs_dir says where")
    flag, folder = ("resume", args.resume) if args.resume else ("runs_dir", args.runs_dir)
    there = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if os.path.exists(path))
    if not there.is_dir() or not os.access(there, os.W_OK):
        fail(f"--{flag} {folder}: nothing can be written in {there}; give a folder that is yours")


def all_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum of x over all ranks; x itself on one rank. Every rank must call it."""
    if dist.is_initialized():
        x = x.clone()  # all_reduce works in place and returns nothing
        dist.all_reduce(x)
    return x


def mean_std(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and (biased) standard deviation of the masked entries of x over all ranks."""
    n = all_sum(mask.sum())
    mean = all_sum(x.masked_fill(~mask, 0.0).sum()) / n
    return mean, (all_sum((x - mean).masked_fill(~mask, 0.0).square().sum()) / n).sqrt()


def load(auto_class, name: str, flag: str, **options):
    """auto_class.from_pretrained, ending with a sentence where that does not work. Code that lies beside the weights is
    not run, and weights are safetensors only: pickles can hold code."""
    safe = {} if auto_class in (transformers.AutoTokenizer, transformers.AutoConfig) else {"use_safetensors": True}
    try:
        return auto_class.from_pretrained(name, trust_remote_code=False, **safe, **options)
    except Exception as error:  # files and the hub can fail in many ways
        reason = str(error).strip().partition("\n")[0]
        kinds = "exact_answer, file.py:function, a folder" if flag in ("reward", "monitor") else "a folder"
        fail(f"--{flag} {name}: {auto_class.__name__} cannot load it ({reason}); give {kinds} or a hub id")


def load_policy(name: str, flag: str, device: torch.device):
    """A causal LM in float32 and in eval mode for good: with dropout pi_theta would not be pi_old at the start."""
    kind = ", ".join(load(transformers.AutoConfig, name, flag).architectures or [])
    if "SequenceClassification" in kind:
        fail(f"--{flag} {name}: is a {kind}, which cannot generate; give a causal LM")
    options = {"dtype": torch.float32, "output_loading_info": True}
    model, info = load(transformers.AutoModelForCausalLM, name, flag, **options)
    if info["missing_keys"]:
        fail(f"--{flag} {name}: has no weights for {min(info['missing_keys'])}; give a causal LM that is whole")
    if lacks := {"past_key_values", "logits_to_keep"} - inspect.signature(model.forward).parameters.keys():
        fail(f"--{flag} {name}: {type(model).__name__} takes no {min(lacks)}, which sampling needs; give another model")
    if not all(x.isfinite().all() for x in model.state_dict().values()):
        fail(f"--{flag} {name}: has weights that are NaN or infinite; give a model that is well")
    for module in model.modules():  # a few layers (OPT's) drop out by themselves, and checkpoint_layers sets their mode
        for rate in [key for key, value in vars(module).items() if "drop" in key and isinstance(value, float)]:
            setattr(module, rate, 0.0)
    return model.to(device).eval()


def freeze(args, model) -> None:
    """No gradients; and with --dtype bfloat16 the matrices in the form that autocast would give them in every forward
    pass: half the memory, the same numbers, so that the KL still starts at 0. Embeddings and norms stay float32."""
    matrices = torch.nn.Linear, transformers.pytorch_utils.Conv1D
    for module in model.requires_grad_(False).modules():
        tied = getattr(module, "weight", None) is model.get_input_embeddings().weight
        if args.dtype == "bfloat16" and isinstance(module, matrices) and not tied:
            module.bfloat16()


def make_optimizer(args, model, learning_rate: float, world_size: int):
    """AdamW for all of the model's parameters; its state whole on every rank, or with --shard_optimizer a share."""
    options = {"lr": learning_rate, "betas": args.adam_betas, "weight_decay": args.weight_decay, "fused": True}
    if args.shard_optimizer and world_size > 1:
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)
    return torch.optim.AdamW(model.parameters(), **options)


def state_of(part) -> dict:
    """part.state_dict(), of a shared optimizer on rank 0 the whole of it; every rank must call it. Not by
    consolidate_state_dict, which takes minutes for a gigabyte."""
    if not isinstance(part, ZeroRedundancyOptimizer):
        return part.state_dict()
    parameters, mine, state = part.param_groups[0]["params"], part.optim.state, {}
    step = torch.tensor(max((float(x["step"]) for x in mine.values()), default=0.0))
    for number, parameter in enumerate(parameters):
        state[number] = {"step": step.clone()}
        for moment in ("exp_avg", "exp_avg_sq"):  # all but the owner add zeros
            x = mine[parameter][moment].clone() if parameter in mine else torch.zeros_like(parameter)
            dist.reduce(x, 0)
            state[number][moment] = x.cpu()
    return {"state": state, "param_groups": [part.param_groups[0] | {"params": [*range(len(parameters))]}]}


def set_state(part, state: dict) -> None:
    """part.load_state_dict; a shared optimizer takes its share of what state_of gave."""
    if isinstance(part, ZeroRedundancyOptimizer):
        numbers = {parameter: number for number, parameter in enumerate(part.param_groups[0]["params"])}
        mine = [numbers[parameter] for parameter in part.optim.param_groups[0]["params"]]
        groups = [part.optim.param_groups[0] | {"params": [*range(len(mine))]}]
        part, state = part.optim, {"state": {i: state["state"][n] for i, n in enumerate(mine)}, "param_groups": groups}
    part.load_state_dict(state)


def load_rows(args, name: str | None, split: str, flag: str, tokenizer) -> list[dict]:
    """The dataset as a list of its rows, each with `prompt_ids` added; prompts that are too long left out."""
    if name is None:
        return []
    import datasets  # here, since --help need not wait for it

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what goes wrong is said below, in one sentence
    file_type = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}.get(Path(name).suffix)
    source = {"path": name, "split": split}
    if file_type:
        source = {"path": file_type, "data_files": name, "split": "train"}
    try:
        with tempfile.TemporaryDirectory() as fresh:  # the cache would take a folder for an older one of its name
            cache = {"cache_dir": fresh} if Path(name).is_dir() else {}
            rows = datasets.load_dataset(**source, **cache).to_list()
    except Exception as error:  # a file or the hub can fail in many ways
        fail(f"--{flag} {name}: cannot be read ({error!r:.100}); give a .jsonl, a .parquet or a hub id")
    rule = "exact_answer" in (args.reward, args.monitor)
    for column, user in {"prompt": "a rollout", **({"answer": "exact_answer"} if rule else {})}.items():
        if not rows or column not in rows[0]:
            fail(f"--{flag} {name}: has no column `{column}`, which {user} needs; rename or add it")
        if None in (values := [row[column] for row in rows]):
            fail(f"--{flag} {name}: row {values.index(None)} has no `{column}`; fill it in, or leave the row out")
    for number, row in enumerate(rows):
        prompt, where = row["prompt"], f"--{flag} {name}: row {number}"
        is_chat = isinstance(prompt, list) and all(
            isinstance(x, dict) and {"role", "content"} <= x.keys() for x in prompt
        )
        if not prompt or not (isinstance(prompt, str) or is_chat):
            fail(f"{where} has the prompt {prompt!r:.60}; give a text, or messages with role and content, not empty")
        if is_chat and not tokenizer.chat_template:
            fail(f"{where} is a chat, and --model {args.model} has no chat template; give texts, or another model")
        try:
            if is_chat:
                options = {"add_generation_prompt": True, "return_dict": True} | json.loads(args.chat_template_kwargs)
                chat = tokenizer.apply_chat_template(prompt, **options)
            row["prompt_ids"] = (chat if is_chat else tokenizer(prompt))["input_ids"]
        except Exception as error:  # a template may refuse a chat: roles that do not alternate, a system message
            fail(f"{where} cannot be made tokens ({error!r:.100}); mend it, or leave it out")
        if not row["prompt_ids"]:
            fail(f"{where} has the prompt {prompt!r:.60}, which is no token at all; leave it out")
    kept = [row for row in rows if len(row["prompt_ids"]) <= args.max_prompt_length]
    if not kept:
        fail(f"--max_prompt_length {args.max_prompt_length}: no prompt of --{flag} {name} is so short; raise it")
    say(f"{flag}: {len(kept)} prompts, {len(rows) - len(kept)} left out as longer than {args.max_prompt_length} tokens")
    return kept


def eos_ids(model, tokenizer) -> torch.Tensor:
    """The ids that end a response: the tokenizer's EOS and the generation config's (chat models have several)."""
    ids = model.generation_config.eos_token_id
    ids = {tokenizer.eos_token_id, *(ids if isinstance(ids, list) else [ids])} - {None}
    return torch.tensor(sorted(ids), device=model.device)


def left_pad(prompts: list[list[int]], pad_id: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """input_ids (B, P) and attention_mask (B, P) of B lists of ids, padded so that all end in the last column."""
    width = max(map(len, prompts))
    input_ids = torch.tensor([[pad_id] * (width - len(ids)) + ids for ids in prompts], device=device)
    padding = torch.tensor([[width - len(ids)] for ids in prompts], device=device)  # (B, 1)
    return input_ids, (torch.arange(width, device=device) >= padding).long()


@torch.no_grad()
def generate(model, tokenizer, prompts, args, greedy: bool = False):
    """Sample a response to each prompt from softmax(logits / temperature), or decode greedily.

    prompts: B texts or lists of token ids. Gives sequences (B, P+T), prompts left-padded; attention_mask (B, P+T); and
    response_mask (B, T) bool, true on the sampled tokens up to the first EOS and on it. T is the longest response.

    A loop of our own and not model.generate, so that no generation config can bend the distribution. A prompt is read
    once for all of its responses. Rows leave the batch when a quarter of it has finished, so that the long tail of a
    rollout costs only what still runs.
    """
    prompts = [tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt for prompt in prompts]
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    stop_ids = eos_ids(model, tokenizer)
    numbers = {}  # of the distinct prompts, in order
    copies = [numbers.setdefault(tuple(ids), len(numbers)) for ids in prompts]  # B numbers
    prompt_ids, prompt_mask = left_pad([[*ids] for ids in numbers], pad_id, model.device)  # (b, P)

    cache = transformers.DynamicCache(config=model.config)
    if torch.is_autocast_enabled(model.device.type):
        # Rotary cosines are float32 and would make the keys so: twice the memory, for attention to cast at each step.
        dtype, update = torch.get_autocast_dtype(model.device.type), cache.update
        cache.update = lambda keys, values, *rest, **more: update(keys.to(dtype), values.to(dtype), *rest, **more)
    positions = (prompt_mask.cumsum(1) - 1).clamp(min=0)  # (b, P), later (b, 1); padding does not count
    inputs = {"input_ids": prompt_ids, "attention_mask": prompt_mask, "position_ids": positions}
    inputs |= {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    copies = torch.tensor(copies, device=model.device)  # (B,)
    logits = model(**inputs).logits[copies]  # (B, 1, V)
    cache.reorder_cache(copies)  # every kind of cache layer has it, batch_select_indices not
    prompt_ids, prompt_mask, positions = prompt_ids[copies], prompt_mask[copies], positions[copies, -1:]

    size = len(prompts), args.max_response_length
    responses = torch.full(size, -1, device=model.device)  # (B, max T), -1 where nothing is sampled
    mask = torch.cat([prompt_mask, torch.ones_like(responses)], dim=1)  # (b, P + max T), read up to the column due
    rows = torch.arange(len(prompts), device=model.device)  # (b,) rows still in the batch, b <= B
    running = torch.ones_like(rows, dtype=torch.bool)  # (b,) those rows of the batch without EOS so far
    for t in range(args.max_response_length):
        logits = logits[:, -1].float()  # (b, V)
        if greedy:
            tokens = logits.argmax(-1)  # (b,)
        else:
            probs = (logits / args.temperature).softmax(-1)  # (b, V)
            # torch.multinomial without its checks, for which a GPU would have to be waited for
            tokens = (probs / torch.empty_like(probs).exponential_()).argmax(-1)  # (b,)
        responses[rows, t] = tokens.where(running, -1)
        running = running & ~torch.isin(tokens, stop_ids)
        num_running = int(running.sum())
        if num_running == 0 or t + 1 == args.max_response_length:
            break
        if num_running <= 0.75 * len(rows):
            cache.reorder_cache(running.nonzero()[:, 0])
            rows, tokens, mask, positions = rows[running], tokens[running], mask[running], positions[running]
            running = running[running]
        positions = positions + 1
        inputs |= {"input_ids": tokens[:, None], "position_ids": positions}
        inputs |= {"attention_mask": mask[:, : prompt_ids.shape[1] + t + 1]}
        logits = model(**inputs).logits  # (b, 1, V)

    responses = responses[:, : t + 1]  # (B, T)
    response_mask = responses >= 0  # (B, T)
    responses = responses.where(response_mask, pad_id)
    attention_mask = torch.cat([prompt_mask, response_mask.to(prompt_mask)], dim=1)  # (B, P+T)
    return torch.cat([prompt_ids, responses], dim=1), attention_mask, response_mask


def is_truncated(model, tokenizer, sequences, response_mask) -> torch.Tensor:
    """(B,) bool: the response in sequences (B, P+T) has no EOS, sampling stopped at max_response_length."""
    ends = torch.isin(sequences[:, -response_mask.shape[1] :], eos_ids(model, tokenizer))  # (B, T)
    return ~(ends & response_mask).any(1)


def token_logprobs(model, sequences, attention_mask, response_length: int, temperature: float, with_entropy=True):
    """Log-probs (B, T) of the last T = response_length tokens of sequences (B, P+T), and the entropy (B, T) of the
    distributions they are drawn from: nats, at the sampling temperature, 0 on padding. The entropy carries no gradient.

    A vocabulary of 150,000 would make logits (B, T, V) the largest tensor of all. Here they are taken of response
    tokens only, MAX_LOGITS at a time, and where that means in pieces they are made again in the backward pass.
    """
    policy = getattr(model, "module", model)  # DistributedDataParallel has the model as its module
    called = []
    bodies = {policy.base_model, policy.get_decoder()}  # mostly one; OPT's head calls the decoder in the base model
    hooks = [x.register_forward_hook(lambda body, inputs, output: called.append((body, output))) for x in bodies]
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)  # (B, P+T): left padding does not count
    inputs = {"input_ids": sequences, "attention_mask": attention_mask, "position_ids": positions}
    try:
        model(**inputs, use_cache=False, logits_to_keep=1)  # and not policy(...): gradients of all ranks are to meet
    finally:
        for hook in hooks:
            hook.remove()
    body, output = called[-1]
    mask = attention_mask[:, -response_length:].bool()  # (B, T)
    hidden = output.last_hidden_state[:, -response_length - 1 : -1][mask]  # (N, H), before each response token
    targets = sequences[:, -response_length:][mask]  # (N,)

    def head(hidden: torch.Tensor) -> torch.Tensor:
        """The model's own way from hidden states (n, H) to logits (n, V), since some scale or cap what the matrix
        gives: the model itself, with a body that has the hidden states already."""
        body.forward = lambda *args, **kwargs: type(output)(last_hidden_state=hidden[None])
        try:
            return policy().logits[0]
        finally:
            del body.forward

    def one_piece(hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = head(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        all_logprobs = logits.log_softmax(-1)  # (n, V)
        entropy = all_logprobs.new_zeros(len(targets))  # (n,)
        if with_entropy:
            with torch.no_grad():
                entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
        return all_logprobs.gather(1, targets[:, None])[:, 0], entropy

    size = max(1, MAX_LOGITS // len(policy.get_output_embeddings().weight))
    pieces = [*zip(hidden.split(size), targets.split(size), strict=True)]
    if len(pieces) > 1:
        again = {"use_reentrant": False, "preserve_rng_state": False}
        pieces = [torch.utils.checkpoint.checkpoint(one_piece, *piece, **again) for piece in pieces]
    else:
        pieces = [one_piece(*piece) for piece in pieces]
    logprobs, entropy = (torch.cat(x) for x in zip(*pieces, strict=True))  # (N,)
    zeros = logprobs.new_zeros(mask.shape)  # (B, T)
    return zeros.masked_scatter(mask, logprobs), zeros.masked_scatter(mask, entropy)


def find_answer(text: str, marker: str) -> str | None:
    """What stands behind the last marker: up to the brace that closes it, if the marker ends in one; up to the closing
    tag, if it is a tag; else to the end of the text. None if there is no such thing."""
    _, found, rest = text.rpartition(marker)
    if not found:
        return None
    if tag := re.fullmatch(r"<(\w+)>", marker):
        rest, closed, _ = rest.partition(f"</{tag[1]}>")
        return rest if closed else None
    if marker.endswith("{"):
        depth = 1
        for i, c in enumerate(rest):
            depth += (c == "{") - (c == "}")
            if depth == 0:
                return rest[:i]
        return None
    return rest


def as_value(text: str) -> Decimal | str:
    """A number for what reads as one, so that 1,000 is 1000.0 and $18; other text with single spaces."""
    text = " ".join(text.split())
    digits = text.replace("\\$", "$").strip("$")  # of money, or of mathematics in TeX
    digits = digits[0] + digits[2:] if digits[:2] in ("-$", "+$") else digits
    if re.fullmatch(r"[-+]?((\d{1,3}(,\d{3})+|\d+)(\.\d*)?|\.\d+)", digits, re.ASCII):
        return Decimal(digits.replace(",", ""))
    return text


def exact_answer(completions, answer, answer_marker, **columns) -> list[float]:
    """1 where the completion's answer (see find_answer) is the column's, as text or as a number; else -1. Where the
    column holds whole solutions, as GSM8K's does, what stands behind the marker there counts."""
    scores = []
    for text, expected in zip(completions, map(str, answer), strict=True):
        found = find_answer(text, answer_marker)
        expected = (find_answer(expected, answer_marker) or "").strip() or expected
        scores.append(1.0 if found is not None and as_value(found) == as_value(expected) else -1.0)
    return scores


def load_reward(args, device: torch.device, flag: str = "reward"):
    """What --reward, or --monitor, names: a function of prompts, completions and columns, or a reward model with its
    tokenizer."""
    name = getattr(args, flag)
    if name == "exact_answer":
        return functools.partial(exact_answer, answer_marker=args.answer_marker)
    path, _, function_name = name.rpartition(":")
    if name.endswith(".py") or path.endswith(".py"):
        try:
            function = runpy.run_path(path).get(function_name) if Path(path).is_file() else None
        except Exception as error:
            fail(f"--{flag} {name}: running {path} raises {error!r:.200}; mend it")
        if not callable(function):
            reason = f"there is no function {function_name} in a file {path}"
            fail(f"--{flag} {name}: {reason}; give path/to/file.py:function")
        return function
    config = load(transformers.AutoConfig, name, flag)
    kind = ", ".join(config.architectures or [])
    if kind and "SequenceClassification" not in kind:
        fail(f"--{flag} {name}: is a {kind}, which has no score; make a reward model of it with reward_model.py")
    if config.num_labels != 1:
        fail(f"--{flag} {name}: has {config.num_labels} outputs, a reward model has 1; give another")
    options = {"dtype": torch.float32, "output_loading_info": True}
    model, info = load(transformers.AutoModelForSequenceClassification, name, flag, **options)
    if info["missing_keys"]:
        fail(f"--{flag} {name}: has no weights for {min(info['missing_keys'])}; give a reward model that is whole")
    if not hasattr(model, "score"):
        fail(f"--{flag} {name}: {type(model).__name__} has no `score` head; give a decoder's, such as Llama's")
    if not all(x.isfinite().all() for x in model.state_dict().values()):
        fail(f"--{flag} {name}: has weights that are NaN or infinite, and so would its scores; train it again")
    freeze(args, model)
    return model.to(device).eval(), load(transformers.AutoTokenizer, name, flag)


def autocast(args, device: torch.device):
    """The context of every forward pass: bfloat16 arithmetic if --dtype says so."""
    return torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")


@functools.cache  # a vocabulary may have 150,000 entries
def same_ids_mean_the_same(reward_tokenizer, tokenizer) -> bool:
    """Whether the reward model can read the policy's ids as they are."""
    return tokenizer.get_vocab().items() <= reward_tokenizer.get_vocab().items()


def read_again(reward_tokenizer, tokenizer, rows, texts, sequences, attention_mask) -> list[list[int]]:
    """Token ids of the prompts with their responses, as a reward model with reward_tokenizer has learned to read them.

    Where the policy's ids mean the same to it they stay; a chat gets what the template writes behind its EOS (often a
    newline). Otherwise the text goes through its own template and tokenizer, and ends with its own EOS.
    """
    eos, has_template = reward_tokenizer.eos_token_id, bool(reward_tokenizer.chat_template)
    same_ids, behind_eos = same_ids_mean_the_same(reward_tokenizer, tokenizer), []

    def template(chat: list[dict]) -> list[int]:
        return reward_tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]

    if same_ids and has_template:
        ids = template([{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}])
        behind_eos = ids[len(ids) - ids[::-1].index(eos) :] if eos in ids else []
    result = []
    for row, text, ids, mask in zip(rows, texts, sequences, attention_mask, strict=True):
        prompt, ids = row["prompt"], ids[mask.bool()].tolist()
        ended = ids[-1] in tokenizer.all_special_ids  # EOS, of whatever kind; a truncated response has none
        if same_ids:
            result.append(ids + behind_eos * (ended and not isinstance(prompt, str)))
        elif has_template:
            chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            ids = template([*chat, {"role": "assistant", "content": text}])
            result.append(ids if eos is None or eos in ids else [*ids, eos])
        else:
            if not isinstance(prompt, str):
                prompt = tokenizer.decode(row["prompt_ids"], skip_special_tokens=True)
            ids = reward_tokenizer(prompt)["input_ids"] + reward_tokenizer(text, add_special_tokens=False)["input_ids"]
            result.append(ids + [eos] * (ended and eos is not None))
    return result


@torch.no_grad()
def score(args, reward, tokenizer, rows, sequences, attention_mask, response_mask, flag: str = "reward"):
    """Scores (B,) float32 by reward (see load_reward) of the responses in sequences (B, P+T) to the prompts of rows."""
    responses = sequences[:, -response_mask.shape[1] :]  # (B, T)
    ids = [row[:length] for row, length in zip(responses.tolist(), response_mask.sum(1).tolist(), strict=True)]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    if callable(reward):
        names = rows[0].keys() - {"prompt", "prompt_ids", "prompts", "completions"}
        columns = {name: [row[name] for row in rows] for name in names}
        try:
            scores = reward(prompts=[row["prompt"] for row in rows], completions=texts, **columns)
            scores = torch.tensor(scores, dtype=torch.float32)
        except Exception as error:  # the user's code
            at = traceback.extract_tb(error.__traceback__)[-1]
            fail(f"--{flag} {getattr(args, flag)}: raises {error!r:.200} in line {at.lineno} of {at.filename}; mend it")
    else:
        model, reward_tokenizer = reward
        try:
            readings = read_again(reward_tokenizer, tokenizer, rows, texts, sequences, attention_mask)
        except Exception as error:  # a template may refuse a chat: roles that do not alternate, a system message
            fail(f"--{flag} {getattr(args, flag)}: its chat template refuses a prompt ({error!r:.200}); give another")
        longest, limit = max(map(len, readings)), getattr(model.config, "max_position_embeddings", None)
        if limit and longest > limit:
            reason = f"takes {limit} tokens, prompt and response are {longest}"
            fail(f"--{flag} {getattr(args, flag)}: {reason}; lower --max_response_length")
        pieces = []
        for start in range(0, len(readings), args.micro_batch_size):
            ids, mask = left_pad(readings[start : start + args.micro_batch_size], 0, sequences.device)  # (b, L)
            inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
            # Not model(...).logits, which takes the last token that is not the pad id: the wrong one where pad is EOS.
            with autocast(args, ids.device):
                hidden = model.base_model(**inputs, use_cache=False)[0][:, -1]  # (b, H)
                pieces.append(model.score(hidden)[:, 0].float())
        scores = torch.cat(pieces)
    if scores.shape != (len(rows),):
        fail(f"--{flag} {getattr(args, flag)}: must give {len(rows)} numbers, one for each completion; mend it")
    return scores.to(sequences.device)


def score_by_all(args, judges: dict, tokenizer, rows, *generated) -> dict:
    """Scores (B,) by each judge; the keys are what its metrics' names begin with, "" for --reward, monitor_."""
    flags = {prefix: prefix.removesuffix("_") or "reward" for prefix in judges}
    return {prefix: score(args, judge, tokenizer, rows, *generated, flags[prefix]) for prefix, judge in judges.items()}


def process_scores(args, scores: torch.Tensor, truncated: torch.Tensor) -> torch.Tensor:
    """Scores (B,) after truncation penalty, scale, z-score over all ranks and clip, in this order."""
    scores = (scores - args.missing_eos_penalty * truncated) * args.reward_scale
    if args.reward_zscore:
        mean, std = mean_std(scores, torch.ones_like(truncated))
        scores = (scores - mean) / std.clamp(min=1e-4)
    return scores if args.reward_clip is None else scores.clamp(-args.reward_clip, args.reward_clip)


def micro_batches(rollout: dict, rows: torch.Tensor, size: int):
    """Yield (rows, their part of the rollout) in pieces of at most size rows.

    The rows are taken in order of length and each piece is cut to its own longest prompt and response: less padding,
    same numbers. Tensors of the rollout are (B,), (B, T) or (B, P+T).
    """
    T = rollout["response_mask"].shape[1]
    P = rollout["sequences"].shape[1] - T
    lengths = rollout["response_mask"][rows].sum(1)
    for piece in rows[lengths.argsort(stable=True)].split(size):
        end = int(rollout["response_mask"][piece].sum(1).max())
        start = int(rollout["attention_mask"][piece].any(0).int().argmax())
        mb = {}
        for name, x in rollout.items():
            x = x[piece]
            mb[name] = x if x.dim() == 1 else x[:, :end] if x.shape[1] == T else x[:, start : P + end]
        yield piece, mb


def learning_rate_at(args, iteration: int) -> float:
    """Learning rate of an iteration, counted from 1."""
    progress = (iteration - 1) / args.num_iterations
    decay = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
    return args.learning_rate * min(1.0, iteration / (args.warmup_iterations + 1)) * decay[args.lr_schedule]


def checkpoint_layers(model, on: bool) -> None:
    """Switch gradient checkpointing on for the update, off for generation, which needs its cache.

    transformers checkpoints a layer in training mode. That is set on the layers alone, so that dropout stays off below.
    """
    layer = transformers.modeling_layers.GradientCheckpointingLayer
    for module in model.modules():
        if isinstance(module, layer):
            module.training = on


def describe(tokenizer, rows, scores: dict, sequences, attention_mask, response_mask) -> list[dict]:
    """Prompts, responses with their special tokens, and the scores of each judge, for samples.jsonl."""
    responses = sequences[:, -response_mask.shape[1] :]
    samples = [
        {"prompt": row["prompt"], "response": tokenizer.decode(ids[mask])}
        for row, ids, mask in zip(rows, responses, response_mask, strict=True)
    ]
    for prefix, values in scores.items():
        samples = [x | {f"{prefix}score": value} for x, value in zip(samples, values.tolist(), strict=True)]
    return samples


def evaluate(args, model, tokenizer, judges: dict, rows, rank: int, world_size: int) -> tuple[dict, list[dict]]:
    """Greedy responses to rows: mean score and pass rate of each group, by each judge, over all ranks, and samples."""
    groups = sorted({str(row.get("group", "all")) for row in rows})
    totals = torch.zeros(len(judges), len(groups), 3, device=model.device)  # of each group: score, passed, count
    mine, samples = rows[rank::world_size], []
    for start in range(0, len(mine), args.batch_size // world_size):
        chunk = mine[start : start + args.batch_size // world_size]
        with autocast(args, model.device):
            generated = generate(model, tokenizer, [row["prompt_ids"] for row in chunk], args, greedy=True)
        scores = score_by_all(args, judges, tokenizer, chunk, *generated)
        index = torch.tensor([groups.index(str(row.get("group", "all"))) for row in chunk], device=model.device)
        for total, x in zip(totals, scores.values(), strict=True):
            total.index_add_(0, index, torch.stack([x, x > 0, torch.ones_like(x)], dim=1))
        samples += describe(tokenizer, chunk, scores, *generated)
    totals, metrics = all_sum(totals), {}
    if not totals.isfinite().all():  # of all ranks, so that none is left waiting for another
        fail("a score of a held-out response is NaN or infinite; see to --reward and --monitor")
    for prefix, total in zip(judges, totals.tolist(), strict=True):
        for group, (x, passed, count) in zip(groups, total, strict=True):
            metrics |= {f"eval/{prefix}score/{group}": x / count, f"eval/{prefix}pass_rate/{group}": passed / count}
    return metrics, samples[:: max(1, len(samples) // max(1, args.num_samples))][: args.num_samples]


def write_file(path: Path, write) -> None:
    """write(file) under a temporary name, sync, rename: whatever happens, path holds the old content or the new."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError, SystemExit) as error:  # torch.save meets a full disk with either of the first two
        temporary.unlink(missing_ok=True)
        if isinstance(error, SystemExit):
            raise
        fail(f"cannot write {path} ({error!s:.100}); make room there, and go on with --resume")


def append_lines(path: Path, lines: list[dict]) -> None:
    """Add lines of JSON to a file; one that a crash cuts short is dropped by --resume."""
    try:
        with path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    except OSError as error:
        fail(f"cannot write {path} ({error!s:.100}); make room there, and go on with --resume")


def save_checkpoint(args, run_dir: Path, iteration: int, world_size: int, state: dict) -> None:
    """All that the next iteration needs. No generator's state: every iteration seeds its own.

    Its SHA-256 stands beside it, as sha256sum writes it, since torch.load takes a file with a flipped bit; it is
    written first, so that no checkpoint is without.
    """
    state = state | {"iteration": iteration, "world_size": world_size}
    path = run_dir / "checkpoints" / f"{iteration:06d}.pt"

    def write(file) -> None:
        torch.save(state, file)
        file.flush()
        with Path(file.name).open("rb") as written:
            line = f"{hashlib.file_digest(written, 'sha256').hexdigest()}  {path.name}\n".encode()
        write_file(path.with_name(path.name + ".sha256"), lambda digest: digest.write(line))

    write_file(path, write)
    for old in sorted(path.parent.glob("*.pt"))[: -args.keep_checkpoints]:
        old.unlink()
        old.with_name(old.name + ".sha256").unlink(missing_ok=True)


def launch_id() -> str:
    """What a run under torchrun keeps over its restarts: the rendezvous' id, or torchrun's process if that has none."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return run_id if run_id != "none" else f"process {os.getppid()}"


def find_run(args) -> str | None:
    """The run folder to go on with: --resume; or, where torchrun starts the ranks again, the one they had."""
    if args.resume or not int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
        return args.resume
    found = [path.parent for path in Path(args.runs_dir).glob("*/launch.txt") if path.read_text() == launch_id()]
    return str(max(found)) if found else None


def load_checkpoint(args, resume: str, world_size: int) -> dict | None:
    """The last checkpoint of the run to resume, on the CPU; None if that ended before its first. Refuses flags that
    would make the rest of it another run, and files that are not what was written."""
    run_dir, script = Path(resume), Path(__file__).name
    try:
        before = json.loads((run_dir / "args.json").read_text())
    except (OSError, ValueError):
        fail(f"--resume {run_dir}: is no run folder, it has no args.json that can be read; give one that has")
    if not (run_dir / script).exists():
        fail(f"--resume {run_dir}: was not made by {script}; resume it with the script that lies in it")
    free = {"resume", "runs_dir", "eval_every", "log_every", "num_samples", "save_every", "keep_checkpoints"}
    free |= {"track", "wandb_project", "wandb_entity"}
    free |= {"num_iterations"} if args.lr_schedule == "constant" else set()
    now = json.loads(json.dumps(asdict(args)))
    changed = [
        f"--{name} {now[name]} was {before.get(name)}"
        for name in sorted(now.keys() - free)
        if now[name] != before.get(name)
    ]
    if changed:
        fail(f"--resume {run_dir}: other flags would make it another run ({', '.join(changed)}); give the old ones")
    checkpoints = sorted((run_dir / "checkpoints").glob("*.pt"))
    if not checkpoints:
        return None
    path = checkpoints[-1]
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if path.with_name(path.name + ".sha256").read_text().split()[:1] != [digest]:
            raise ValueError("its SHA-256 is another one")
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not {"iteration", "world_size", "optimizer"} <= state.keys():
            raise ValueError("something is missing in it")
    except Exception as error:
        before = (
            f"to go on from {checkpoints[-2].name}" if len(checkpoints) > 1 else "to start over, it is the only one"
        )
        fail(f"--resume {run_dir}: {path.name} is damaged ({error!s:.100}); delete it {before}")
    if state["iteration"] > args.num_iterations:
        fail(f"--num_iterations {args.num_iterations}: the run to resume is at {state['iteration']}; give more")
    if state["world_size"] != world_size:
        fail(f"--resume {run_dir}: ran on {state['world_size']} ranks, not {world_size}; start it on as many")
    return state


def open_run_folder(args, run_dir: Path, iteration: int) -> None:
    """Make the run folder with args.json and this script in it, or take up the old one, cut back to iteration."""
    try:
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--runs_dir {args.runs_dir}: cannot make {run_dir} ({error.strerror}); give another folder")
    write_file(run_dir / Path(__file__).name, lambda file: file.write(Path(__file__).read_bytes()))
    for path in (run_dir / "checkpoints").glob("*.tmp"):  # what a kill has left
        path.unlink()
    logs = [path for path in (run_dir / "metrics.jsonl", run_dir / "samples.jsonl") if path.exists()]
    for path in logs if iteration < args.num_iterations else ():
        lines = [json.loads(line) for line in path.open() if line.endswith("\n")]  # a crash may have cut the last one
        lines = [line for line in lines if line["iteration"] <= iteration and iteration]  # at 0 it all starts again
        if args.eval_every and iteration % args.eval_every:  # the shorter run ended here and was evaluated for that
            lines = [line for line in lines if line["iteration"] < iteration or line.get("split") != "held out"]
            lines[-1:] = [{k: v for k, v in line.items() if not k.startswith("eval/")} for line in lines[-1:]]
        text = "".join(json.dumps(line) + "\n" for line in lines).encode()
        write_file(path, lambda file, text=text: file.write(text))
    text = json.dumps(asdict(args) | {"resume": None}, indent=2).encode()
    write_file(run_dir / "args.json", lambda file: file.write(text + b"\n"))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        write_file(run_dir / "launch.txt", lambda file: file.write(launch_id().encode()))


def save_model(folder: Path, *parts) -> None:
    """save_pretrained of model and tokenizer into a folder that is there as a whole or not at all."""
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        for part in parts:
            part.save_pretrained(temporary)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.replace(folder)
    except Exception as error:  # safetensors has its own kind for a full disk
        shutil.rmtree(temporary, ignore_errors=True)
        fail(f"cannot write {folder} ({error!s:.100}); make room there, and go on with --resume")


def start_tracking(args, run_dir: Path):
    """A Weights & Biases run with its files in the run folder; after --resume the same one goes on, and ignores what it
    is told twice, the iterations between the checkpoint and the end."""
    import wandb  # here, since without --track it need not be there

    project = {"project": args.wandb_project, "entity": args.wandb_entity}
    try:
        return wandb.init(**project, id=run_dir.name, resume="allow", dir=run_dir, config=asdict(args))
    except Exception as error:  # not logged in, no network, no such project
        fail(f"--track: wandb says {error!r:.200}; mend that, set WANDB_MODE=offline, or leave --track out")


def main(args) -> None:
    """Train. Every rank runs this; rank 0 speaks and writes."""
    # 1. Setup: device and ranks, data, reward, models, optimizer
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    check_args(args, world_size)
    resume = find_run(args)
    checkpoint = load_checkpoint(args, resume, world_size) if resume else None
    use_cuda = torch.cuda.is_available() if args.device == "auto" else args.device == "cuda"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if use_cuda else torch.device("cpu")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if use_cuda and here > torch.cuda.device_count():
        fail(f"--device {args.device}: {here} ranks on {torch.cuda.device_count()} GPUs; start as many as there are")
    if use_cuda:
        torch.cuda.set_device(device)

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # what matters is checked here
    tokenizer = load(transformers.AutoTokenizer, args.model, "model")
    if tokenizer.eos_token_id is None:
        fail(f"--model {args.model}: its tokenizer has no EOS token, so no response could end; set one and save it")
    rows = load_rows(args, args.dataset, args.dataset_split, "dataset", tokenizer)
    eval_rows = load_rows(args, args.eval_dataset, args.eval_split, "eval_dataset", tokenizer)
    num_prompts, local_batch = args.batch_size // args.samples_per_prompt, args.batch_size // world_size
    if len(rows) < num_prompts:
        fail(f"--dataset {args.dataset}: its {len(rows)} prompts are fewer than the {num_prompts} of a rollout")
    judges = {"": load_reward(args, device)}
    if args.monitor:
        judges["monitor_"] = load_reward(args, device, "monitor")
    policy = load_policy(args.model, "model", device)
    reference = load_policy(args.ref_model or args.model, "ref_model", device)
    freeze(args, reference)
    largest, size = (
        max(max(row["prompt_ids"]) for row in rows + eval_rows),
        policy.get_input_embeddings().num_embeddings,
    )
    if largest >= size:
        fail(f"--model {args.model}: its tokenizer writes id {largest}, it has {size} embeddings; give the right pair")
    if (
        args.ref_model
        and load(transformers.AutoTokenizer, args.ref_model, "ref_model").get_vocab() != tokenizer.get_vocab()
    ):
        fail(f"--ref_model {args.ref_model}: reads other token ids than --model; give one that shares its tokenizer")
    limits = [getattr(x.config.get_text_config(), "max_position_embeddings", None) for x in (policy, reference)]
    limit = min((x for x in limits if x), default=None)
    longest = max(len(row["prompt_ids"]) for row in rows + eval_rows)
    if limit and longest + args.max_response_length > limit:
        text = f"{longest} tokens of the longest prompt and so many of response are more than the model's {limit}"
        fail(f"--max_response_length {args.max_response_length}: {text}; lower it, or --max_prompt_length")
    if args.gradient_checkpointing:
        policy.activation_checkpointing_enable({"use_reentrant": False})
    if world_size > 1:
        store, *_ = next(dist.rendezvous("env://"))  # torchrun keeps it over restarts, with the addresses of the dead
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group("nccl" if use_cuda else "gloo", store=store, rank=rank, world_size=world_size)
    optimizer = make_optimizer(args, policy, args.learning_rate, world_size)
    stateful = {"policy": policy, "optimizer": optimizer}

    start = checkpoint["iteration"] if checkpoint else 0
    for name in stateful if checkpoint else ():
        try:
            set_state(stateful[name], checkpoint[name])
        except Exception as error:
            fail(f"--resume {resume}: its {name} does not fit ({error!r:.100}); give a run of this script and model")
    checkpoint = None  # a second copy of everything, which need not stay
    ddp = {"broadcast_buffers": False, "gradient_as_bucket_view": True}  # the latter: gradients once, not twice
    model = DistributedDataParallel(policy, **ddp) if world_size > 1 else policy

    # 2. The run folder, and the arithmetic of the run
    started = all_sum(torch.tensor(time.time() if rank == 0 else 0.0, dtype=torch.float64, device=device))  # for all
    name = f"{args.exp_name}__{args.seed}__{datetime.fromtimestamp(float(started)):%Y%m%d-%H%M%S-%f}"
    run_dir = Path(resume or Path(args.runs_dir, name))
    if rank == 0:
        open_run_folder(args, run_dir, start)
    tracker = start_tracking(args, run_dir) if rank == 0 and args.track else None
    say(f"{args.exp_name}: {policy.num_parameters():,} parameters on {world_size} x {device.type}, writes to {run_dir}")
    if resume:
        say(f"goes on after iteration {start}")
    k, per_step = args.samples_per_prompt, args.batch_size // args.num_minibatches
    say(f"rollout: {num_prompts} prompts x {k} = {args.batch_size} responses, {local_batch} of them on each rank")
    say(f"update: {args.update_epochs} x {args.num_minibatches} optimizer steps of {per_step} responses")
    hide_bar = rank > 0 or not sys.stderr.isatty()
    bar = tqdm(total=args.num_iterations, initial=start, disable=hide_bar, dynamic_ncols=True)

    def clock() -> float:
        if use_cuda:
            torch.cuda.synchronize()  # kernels run behind: without this a phase would pay for the one before
        return time.perf_counter()

    def evaluate_and_log(iteration: int, metrics: dict, samples: list[dict]) -> None:
        due = args.eval_every and (iteration % args.eval_every == 0 or iteration == args.num_iterations)
        if eval_rows and due:
            results, held_out = evaluate(args, policy, tokenizer, judges, eval_rows, rank, world_size)
            for key in [f"{prefix}pass_rate" for prefix in judges]:
                rates = {k.removeprefix(f"eval/{key}/"): v for k, v in results.items() if k.startswith(f"eval/{key}/")}
                rates = "    ".join(f"{group}: {rate:.3f}" for group, rate in rates.items())
                say(f"held out, greedy, after {iteration} iterations    {key.replace('_', ' ')}    {rates}")
            for sample in held_out:
                numbers = "  ".join(f"{sample[f'{prefix}score']:5.2f}" for prefix in judges)
                say(f"    {numbers}  {sample['prompt']!r} -> {sample['response']!r}")
            metrics, samples = metrics | results, samples + [{"split": "held out"} | sample for sample in held_out]
        for name, lines in {"metrics.jsonl": [metrics], "samples.jsonl": samples}.items() if rank == 0 else ():
            append_lines(run_dir / name, [{"iteration": iteration} | line for line in lines])
        if tracker:
            tracker.log(metrics, step=iteration)

    def stop_if_not_finite(what: str, numbers: torch.Tensor, rollout: dict) -> None:
        """End on all ranks alike, weights untouched and the batch saved, if numbers of any rank are NaN or infinite."""
        if all_sum((~numbers.isfinite()).sum()) == 0:
            return
        path = run_dir / f"not_finite.{rank}.pt"
        write_file(path, lambda file: torch.save(rollout | {"iteration": iteration}, file))
        if rank > 0:
            sys.exit(2)
        fail(f"iteration {iteration}: {what}; {path} has the batch, nothing was learned from it")

    warned = set()

    def warn_once(key: str, text: str) -> None:
        if key not in warned:
            warned.add(key)
            say(f"warning, iteration {iteration}: {text}")

    signals, handlers = [], {}

    def finish_iteration(number: int, frame) -> None:
        """Stop at the end of the iteration; at once if told again. What comes within seconds is one and the same wish:
        schedulers signal the rank, and torchrun's agent, which passes it on."""
        if signals and time.monotonic() - signals[-1][1] > 3:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        signals.append((number, signals[-1][1] if signals else time.monotonic()))

    for number in (signal.SIGINT, signal.SIGTERM):
        handlers[number] = signal.signal(number, finish_iteration)

    if start == 0:
        evaluate_and_log(0, {}, [])
    for iteration in range(start + 1, args.num_iterations + 1):
        # Every draw of an iteration follows from (seed, iteration, rank): a resumed run needs no generator's state.
        seed = ((args.seed * 1_000_003 + iteration) * 65_537 + rank) % 2**63
        (torch.manual_seed if use_cuda else torch.default_generator.manual_seed)(seed)  # the former looks for devices
        times = [clock()]

        # 3. Rollout: this rank's prompts, each samples_per_prompt times in a row, and a response to each
        epoch, step = divmod(iteration - 1, len(rows) // num_prompts)
        order = torch.randperm(
            len(rows), generator=torch.Generator().manual_seed((args.seed * 1_000_003 + epoch) % 2**63)
        )
        order = order[step * num_prompts : (step + 1) * num_prompts].chunk(world_size)[rank]
        batch = [rows[i] for i in order.tolist() for _ in range(args.samples_per_prompt)]
        with autocast(args, device):
            generated = generate(policy, tokenizer, [row["prompt_ids"] for row in batch], args)

        sequences, attention_mask, response_mask = generated  # (B, P+T), (B, P+T), (B, T)
        rollout = {"sequences": sequences, "attention_mask": attention_mask, "response_mask": response_mask}
        times.append(clock())

        # 4. Scores
        scores = score_by_all(args, judges, tokenizer, batch, *generated)
        raw_scores = scores[""]  # (B,)
        rollout |= {f"{prefix}scores": x for prefix, x in scores.items()}
        stop_if_not_finite(
            "a score is NaN or infinite, see to --reward and --monitor", torch.cat([*scores.values()]), rollout
        )
        truncated = is_truncated(policy, tokenizer, sequences, response_mask)  # (B,)
        rollout["scores"] = process_scores(args, raw_scores, truncated)  # (B,)

        times.append(clock())

        # 5. Log-probs of the policy that sampled and of the reference; their difference is the KL (k1)
        logprobs, ref_logprobs, entropy = (torch.zeros(response_mask.shape, device=device) for _ in range(3))  # (B, T)
        with torch.no_grad(), autocast(args, device):
            for index, mb in micro_batches(rollout, torch.arange(local_batch, device=device), args.micro_batch_size):
                inputs = mb["sequences"], mb["attention_mask"], mb["response_mask"].shape[1], args.temperature
                here = index, slice(inputs[2])
                logprobs[here], entropy[here] = token_logprobs(policy, *inputs)
                ref_logprobs[here], _ = token_logprobs(reference, *inputs, with_entropy=False)

        kl = (logprobs - ref_logprobs).masked_fill(~response_mask, 0.0)  # (B, T)
        rollout |= {"logprobs": logprobs, "ref_logprobs": ref_logprobs, "kl": kl}
        stop_if_not_finite("log-probs are NaN or infinite, start anew with a lower --learning_rate", kl, rollout)
        times.append(clock())

        # 6. Advantages
        rollout |= compute_advantages(args, rollout)

        # 7. Update: each minibatch is one optimizer step, its gradient summed over micro-batches and ranks
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(args, iteration)
        steps, grad_norms, deviations = [], [], torch.zeros(world_size, device=device)
        checkpoint_layers(policy, args.gradient_checkpointing)
        for _ in range(args.update_epochs):
            for minibatch in torch.randperm(local_batch, device=device).chunk(args.num_minibatches):
                # Counted over the whole step: neither micro-batches nor ranks change a token's weight.
                num_sequences = len(minibatch) * world_size
                num_tokens = all_sum(response_mask[minibatch].sum())
                stats, remaining = {}, len(minibatch)

                for index, mb in micro_batches(rollout, minibatch, args.micro_batch_size):
                    inputs = mb["sequences"], mb["attention_mask"], mb["response_mask"].shape[1], args.temperature
                    remaining -= len(index)
                    # Ranks exchange gradients once per step, after its last micro-batch.
                    with model.no_sync() if world_size > 1 and remaining else contextlib.nullcontext():
                        with autocast(args, device):
                            new_logprobs, _ = token_logprobs(model, *inputs, with_entropy=False)  # (b, t)
                        loss, mb_stats = policy_loss(args, mb, new_logprobs, num_sequences, num_tokens)
                        (loss * world_size).backward()  # DistributedDataParallel averages over ranks, we want the sum

                    stats = {name: stats.get(name, 0.0) + value for name, value in mb_stats.items()}
                    if not steps:  # the policy is still the one that sampled: a ratio other than 1 would be a defect
                        ratio = (new_logprobs.detach() - mb["logprobs"]).masked_fill(~mb["response_mask"], 0.0).exp()
                        deviations[rank] = deviations[rank].maximum((ratio - 1).abs().max())

                grad_norms.append(torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm))
                numbers = torch.stack([grad_norms[-1], *(x.detach() for x in stats.values())])
                stop_if_not_finite(
                    "loss or gradient is NaN or infinite, start anew with a lower --learning_rate", numbers, rollout
                )

                optimizer.step()
                optimizer.zero_grad(set_to_none=world_size == 1)  # those of DistributedDataParallel stay in its buckets
                steps.append(stats)

        checkpoint_layers(policy, False)
        times.append(clock())

        # 8. Log, evaluate, save
        every, lengths = torch.ones_like(truncated), response_mask.sum(1)
        means = {
            **{f"{prefix}score": (x, every) for prefix, x in scores.items()},
            **{f"{prefix}pass_rate": (x > 0, every) for prefix, x in scores.items()},
            "kl": (kl.sum(1), every),
            "kl_per_token": (kl, response_mask),
            "entropy": (entropy, response_mask),
            "response_length": (lengths, every),
            "truncated": (truncated, every),
        }
        sums = [(x * mask).sum().float() for x, mask in means.values()] + [
            mask.sum().float() for _, mask in means.values()
        ]
        sums, counts = all_sum(torch.stack(sums)).chunk(2)
        metrics = dict(zip(means, sums / counts, strict=True))
        metrics["score_std"] = mean_std(raw_scores, every)[1]
        metrics["advantage_std"] = mean_std(rollout["advantages"], response_mask)[1]
        metrics |= {name: all_sum(sum(stats[name] for stats in steps)) / len(steps) for name in steps[0]}
        metrics["ratio_deviation"] = all_sum(deviations).max()
        metrics["grad_norm"] = sum(grad_norms) / len(grad_norms)
        metrics["learning_rate"] = learning_rate_at(args, iteration)
        if use_cuda:
            metrics["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        metrics["tokens_per_second"] = all_sum(lengths.sum()) / (times[-1] - times[0])
        phases = zip(("rollout", "score", "logprobs", "update"), times, times[1:])
        metrics = {name: float(x) for name, x in metrics.items()} | {f"seconds/{p}": b - a for p, a, b in phases}

        names = {"score": "score", "pass_rate": "pass rate", "monitor_score": "monitor score", "kl": "KL"}
        names = {k: v for k, v in (names | {"response_length": "length"}).items() if k in metrics}
        line = "   ".join(f"{label} {metrics[name]:6.3f}" for name, label in names.items())
        line += f"   {metrics['tokens_per_second']:6.0f} tokens/s"
        bar.update()
        bar.set_postfix_str(line)
        if iteration % args.log_every == 0 or iteration in (1, args.num_iterations):
            say(f"iteration {iteration:4d}   {line}")
        some = slice(0, 0 if iteration % args.log_every else args.num_samples * k, k)  # one response a prompt
        shown = {prefix: x[some] for prefix, x in scores.items()}
        evaluate_and_log(iteration, metrics, describe(tokenizer, batch[some], shown, *(x[some] for x in generated)))
        groups = rollout["scores"].view(-1, k)
        spread = all_sum((groups.amax(1) - groups.amin(1)).sum()) if k > 1 else mean_std(rollout["scores"], every)[1]
        if spread <= 1e-6 * groups.abs().max():
            who = "the responses to each prompt" if k > 1 else "all responses"
            warn_once("scores", f"{who} have equal scores, which tell nothing about what is better")
        if metrics["truncated"] > 0.9:
            warn_once("length", f"{metrics['truncated']:.0%} of the responses are cut; raise --max_response_length")
        if metrics["ratio_deviation"] > {"float32": 1e-3, "bfloat16": 0.5}[args.dtype]:
            warn_once(
                "ratio", f"the first-step ratio is off 1 by {metrics['ratio_deviation']:.2g}: see docs/metrics.md"
            )
        if metrics["kl_per_token"] > 0.5:
            warn_once(
                "kl", f"the KL is {metrics['kl_per_token']:.2f} nats a token; raise --kl_coef, or lower --learning_rate"
            )
        stopped = bool(all_sum(torch.tensor(float(len(signals)), device=device)))  # on any rank, so on all
        last = stopped or iteration == args.num_iterations
        if last or (args.save_every and iteration % args.save_every == 0):
            state = {name: state_of(part) for name, part in stateful.items()}
            if rank == 0:
                save_checkpoint(args, run_dir, iteration, world_size, state)
            state = None
        if last:
            break

    # 9. The result, as a Hugging Face folder
    bar.close()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    finished = start >= args.num_iterations or iteration == args.num_iterations
    if not finished:
        say(f"stopped by a signal after iteration {iteration}; the same flags and --resume {run_dir} go on")
    elif rank == 0:
        save_model(run_dir / "model", policy, tokenizer)
        say(f"saved {run_dir / 'model'}")
    if tracker:
        tracker.finish()

    if world_size > 1:
        del model, optimizer  # hold the process group: if they went last, joining its threads could hang on the GIL
        stateful.clear()
        dist.destroy_process_group()
    if not finished:
        sys.exit(128 + (signals[0][0] if signals else signal.SIGTERM))  # as the shell says it


if __name__ == "__main__":
    main(parse_args())
