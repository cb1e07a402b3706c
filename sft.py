"""Supervised fine-tuning: stage 1, from demonstrations to the policy that reinforcement starts from.

Maximum likelihood of the completion y of a prompt x, as in the first step of InstructGPT (Ouyang et al.,
arXiv 2203.02155, section 3.5):

    loss = -1/N_tok * sum_t log pi_theta(y_t | x, y_<t)

The sum runs over the tokens of the completion and the EOS that ends it, and over nothing else: not the prompt, not
padding. N_tok counts them over the whole batch of all ranks and micro-batches. Prompt and completion are tokenized
apart, since later the policy sees the prompt's tokens alone and goes on from there.

Left out: dropout, packing of examples into one row (rows of like length go together instead), LoRA, sharded models.

    python sft.py
    torchrun --nproc-per-node 8 sft.py --model Qwen/Qwen3-0.6B-Base --dataset train.jsonl --learning_rate 1e-5
"""

import contextlib
import functools
import hashlib
import importlib.util
import inspect
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, make_dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import torch.utils.checkpoint
import transformers  # loads its classes when they are first named, so --help need not wait for them
import tyro
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

TOY = Path(__file__).resolve().parent / "toy"  # the embedded default: a small model and its data, see toy/README.md
MAX_LOGITS = 2**26  # log-probs take so many at once, 256 MiB in float32, whatever the size of batch and vocabulary


@dataclass
class Experiment:
    exp_name: str = Path(__file__).stem
    """Name of the run; its folder is <runs_dir>/<exp_name>__<seed>__<time>."""
    seed: int = 1
    """Seeds the order of the examples."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes CUDA if there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the forward passes (autocast). Weights and optimizer state are float32 either way."""


@dataclass
class ModelAndData:
    model: str = str(TOY / "base")
    """Model to start from: hub id or folder of a causal LM with its tokenizer."""
    dataset: str = str(TOY / "demonstrations.jsonl")
    """Hub id, .jsonl or .parquet with `prompt` and `completion` (texts or chat messages), or a chat in `messages`."""
    dataset_split: str = "train"
    """Split of a hub dataset."""
    eval_size: int = 256
    """So many examples, the last of the dataset, are held out for evaluation; 0 holds out none."""
    max_length: int = 1024
    """Longer examples (in tokens) are left out."""


@dataclass
class Optimization:
    num_epochs: int = 4
    """Passes over the examples."""
    shuffle: bool = True
    """A new order for each pass; --no_shuffle keeps the order of the file, for a curriculum."""
    batch_size: int = 128
    """Examples per optimizer step, over all ranks."""
    micro_batch_size: int = 128
    """Examples per forward pass on each rank: memory only, results do not depend on it."""
    learning_rate: float = 1e-3
    """AdamW's peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Factor on the learning rate beside the warm-up: 1, or falling from 1 at first to 0 after the last step."""
    warmup_iterations: int = 20
    """The learning rate rises linearly over so many optimizer steps."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = 1.0
    """The gradient is clipped to this norm, over all parameters."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""


@dataclass
class EvaluationAndLogging:
    runs_dir: str = "runs"
    """Parent of the run folder, which gets args.json, metrics.jsonl, samples.jsonl, checkpoints/ and model/."""
    eval_every: int = 100
    """Loss on the held-out examples every so many optimizer steps, before the first and after the last; 0 never."""
    log_every: int = 20
    """A line of output every so many optimizer steps; metrics.jsonl gets every one."""
    num_samples: int = 3
    """So many held-out prompts with greedy completions go to samples.jsonl and the terminal at each evaluation."""
    save_every: int = 200
    """Checkpoint every so many optimizer steps, and after the last; 0 only then."""
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


@dataclass
class Args(EvaluationAndLogging, Optimization, ModelAndData, Experiment):
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
    positive = (
        "batch_size micro_batch_size num_epochs log_every keep_checkpoints max_length learning_rate max_grad_norm"
    )
    for name in positive.split():
        if not getattr(args, name) > 0:
            fail(f"--{name} {getattr(args, name)}: must be more than 0")
    if args.batch_size % world_size:
        near = -(-args.batch_size // world_size) * world_size
        fail(f"--batch_size {args.batch_size}: is no multiple of {world_size} ranks; {near} would be")
    if args.device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda: torch finds no CUDA device; take cpu or auto")
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


def load(auto_class, name: str, flag: str, **options):
    """auto_class.from_pretrained, ending with a sentence where that does not work. Code that lies beside the weights is
    not run, and weights are safetensors only: pickles can hold code."""
    safe = {} if auto_class in (transformers.AutoTokenizer, transformers.AutoConfig) else {"use_safetensors": True}
    try:
        return auto_class.from_pretrained(name, trust_remote_code=False, **safe, **options)
    except Exception as error:  # files and the hub can fail in many ways
        reason = str(error).strip().partition("\n")[0]
        fail(f"--{flag} {name}: {auto_class.__name__} cannot load it ({reason}); give a folder or a hub id")


def load_policy(name: str, flag: str, device: torch.device):
    """A causal LM in float32 and in eval mode for good: fine-tuning runs without dropout."""
    kind = ", ".join(load(transformers.AutoConfig, name, flag).architectures or [])
    if "SequenceClassification" in kind:
        fail(f"--{flag} {name}: is a {kind}, which cannot generate; give a causal LM")
    options = {"dtype": torch.float32, "output_loading_info": True}
    model, info = load(transformers.AutoModelForCausalLM, name, flag, **options)
    if info["missing_keys"]:
        fail(f"--{flag} {name}: has no weights for {min(info['missing_keys'])}; give a causal LM that is whole")
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        fail(
            f"--{flag} {name}: {type(model).__name__} takes no logits_to_keep, which the loss needs; give another model"
        )
    if not all(x.isfinite().all() for x in model.state_dict().values()):
        fail(f"--{flag} {name}: has weights that are NaN or infinite; give a model that is well")
    for module in model.modules():  # a few layers (OPT's) drop out by themselves, and checkpoint_layers sets their mode
        for rate in [key for key, value in vars(module).items() if "drop" in key and isinstance(value, float)]:
            setattr(module, rate, 0.0)
    return model.to(device).eval()


def encode(tokenizer, row: dict) -> dict:
    """An example as its tokens: `ids` of prompt, completion and EOS, of which the first `prompt_length` are given."""
    prompt, completion = row.get("prompt"), row.get("completion")
    if "messages" in row:
        prompt, completion = row["messages"][:-1], row["messages"][-1:]
    if isinstance(prompt, str):
        prompt_ids = tokenizer(prompt)["input_ids"]
    else:
        prompt_ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
    text = completion if isinstance(completion, str) else completion[0]["content"]
    ids = prompt_ids + tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    return {"ids": ids, "prompt_length": len(prompt_ids), "prompt": prompt, "completion": text}


def load_rows(args, tokenizer) -> list[dict]:
    """The dataset as encoded examples, those that are too long left out."""
    import datasets  # here, since --help need not wait for it

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what goes wrong is said below, in one sentence
    file_type = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}.get(Path(args.dataset).suffix)
    source = {"path": args.dataset, "split": args.dataset_split}
    if file_type:
        source = {"path": file_type, "data_files": args.dataset, "split": "train"}
    try:
        with tempfile.TemporaryDirectory() as fresh:  # the cache would take a folder for an older one of its name
            cache = {"cache_dir": fresh} if Path(args.dataset).is_dir() else {}
            rows = datasets.load_dataset(**source, **cache).to_list()
    except Exception as error:  # a file or the hub can fail in many ways
        fail(f"--dataset {args.dataset}: cannot be read ({error!r:.100}); give a .jsonl, a .parquet or a hub id")
    if not rows or not ({"prompt", "completion"} <= rows[0].keys() or "messages" in rows[0]):
        fail(
            f"--dataset {args.dataset}: needs the columns `prompt` and `completion`, or `messages`; rename or add them"
        )
    encoded = []
    for number, row in enumerate(rows):
        try:
            encoded.append(encode(tokenizer, row))
        except Exception as error:  # no text, no messages, or no chat template for them
            reason = f"row {number} cannot be made tokens ({error!r:.100})"
            fail(f"--dataset {args.dataset}: {reason}; mend it, or leave it out")
    kept = [row for row in encoded if len(row["ids"]) <= args.max_length]
    say(f"dataset: {len(kept)} examples, {len(rows) - len(kept)} left out as longer than {args.max_length} tokens")
    return kept


def collate(rows: list[dict], pad_id: int, device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """input_ids, attention_mask and completion_mask of examples, each (b, L), padded on the right."""
    width = max(len(row["ids"]) for row in rows)
    lengths = torch.tensor([len(row["ids"]) for row in rows], device=device)
    starts = torch.tensor([row["prompt_length"] for row in rows], device=device)
    input_ids = torch.tensor([row["ids"] + [pad_id] * (width - len(row["ids"])) for row in rows], device=device)
    column = torch.arange(width, device=device)
    attended = column < lengths[:, None]
    return input_ids, attended.long(), attended & (column >= starts[:, None])


def completion_loss(model, input_ids, attention_mask, completion_mask, num_tokens) -> torch.Tensor:
    """Negative log-likelihood of the completions: the sum over their tokens here, over num_tokens of the whole batch.

    The label of a position is the next token, so the mask moves with it: the last prompt position predicts the first
    token of the completion, and the last of its words predicts EOS. Logits are taken of those positions only,
    MAX_LOGITS at a time, and where that means in pieces they are made again in the backward pass.
    """
    policy = getattr(model, "module", model)  # DistributedDataParallel has the model as its module
    called = []
    bodies = {policy.base_model, policy.get_decoder()}  # mostly one; OPT's head calls the decoder in the base model
    hooks = [x.register_forward_hook(lambda body, inputs, output: called.append((body, output))) for x in bodies]
    try:
        model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    body, output = called[-1]
    mask = completion_mask[:, 1:]  # (b, L-1)
    hidden, targets = output.last_hidden_state[:, :-1][mask], input_ids[:, 1:][mask]  # (N, H), (N,)

    def one_piece(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The model's own way from hidden states (n, H) to logits (n, V), since some scale or cap what the matrix
        gives: the model itself, with a body that has the hidden states already. Then the sum of the losses."""
        body.forward = lambda *args, **kwargs: type(output)(last_hidden_state=hidden[None])
        try:
            logits = policy().logits[0]
        finally:
            del body.forward
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")

    size = max(1, MAX_LOGITS // len(policy.get_output_embeddings().weight))
    pieces = [*zip(hidden.split(size), targets.split(size), strict=True)]
    if len(pieces) == 1:
        return one_piece(*pieces[0]) / num_tokens
    again = {"use_reentrant": False, "preserve_rng_state": False}
    return sum(torch.utils.checkpoint.checkpoint(one_piece, *piece, **again) for piece in pieces) / num_tokens


def num_completion_tokens(rows: list[dict]) -> int:
    return sum(len(row["ids"]) - row["prompt_length"] for row in rows)


def learning_rate_at(args, iteration: int, num_iterations: int) -> float:
    """Learning rate of an iteration, counted from 1."""
    progress = (iteration - 1) / num_iterations
    decay = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
    return args.learning_rate * min(1.0, iteration / (args.warmup_iterations + 1)) * decay[args.lr_schedule]


def checkpoint_layers(model, on: bool) -> None:
    """Switch gradient checkpointing on for the update, off for generation, which needs its cache.

    transformers checkpoints a layer in training mode. That is set on the layers alone, so that dropout stays off below.
    """
    for module in model.modules():
        if isinstance(module, transformers.modeling_layers.GradientCheckpointingLayer):
            module.training = on


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


def save_checkpoint(args, run_dir: Path, iteration: int, world_size: int, stateful: dict) -> None:
    """All that the next step needs. No generator's state: the order of the examples follows from seed and epoch.

    Its SHA-256 stands beside it, as sha256sum writes it, since torch.load takes a file with a flipped bit; it is
    written first, so that no checkpoint is without.
    """
    state = {name: part.state_dict() for name, part in stateful.items()}
    state |= {"iteration": iteration, "world_size": world_size}
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
    free |= {"num_epochs"} if args.lr_schedule == "constant" else set()
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
    if state["world_size"] != world_size:
        fail(f"--resume {run_dir}: ran on {state['world_size']} ranks, not {world_size}; start it on as many")
    return state


def open_run_folder(args, run_dir: Path, iteration: int, num_iterations: int) -> None:
    """Make the run folder with args.json and this script in it, or take up the old one, cut back to iteration."""
    try:
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--runs_dir {args.runs_dir}: cannot make {run_dir} ({error.strerror}); give another folder")
    write_file(run_dir / Path(__file__).name, lambda file: file.write(Path(__file__).read_bytes()))
    for path in (run_dir / "checkpoints").glob("*.tmp"):  # what a kill has left
        path.unlink()
    logs = [path for path in (run_dir / "metrics.jsonl", run_dir / "samples.jsonl") if path.exists()]
    for path in logs if iteration < num_iterations else ():
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
    # 1. Setup: device and ranks, data, model, optimizer
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
        fail(f"--model {args.model}: its tokenizer has no EOS token, so no completion could end; set one and save it")
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    rows = load_rows(args, tokenizer)
    split = max(0, len(rows) - args.eval_size)
    rows, eval_rows = rows[:split], rows[split:]
    if len(rows) < args.batch_size:
        fail(f"--batch_size {args.batch_size}: more than the {len(rows)} examples (after --eval_size {args.eval_size})")
    steps_per_epoch = len(rows) // args.batch_size
    num_iterations = args.num_epochs * steps_per_epoch
    if checkpoint and checkpoint["iteration"] > num_iterations:
        fail(
            f"--num_epochs {args.num_epochs}: the run to resume is at step {checkpoint['iteration']} already; give more"
        )
    policy = load_policy(args.model, "model", device)
    if args.gradient_checkpointing:
        policy.activation_checkpointing_enable({"use_reentrant": False})
    adam = {"betas": args.adam_betas, "weight_decay": args.weight_decay, "fused": True}
    optimizer = torch.optim.AdamW(policy.parameters(), args.learning_rate, **adam)
    stateful = {"policy": policy, "optimizer": optimizer}
    start = checkpoint["iteration"] if checkpoint else 0
    for name, part in stateful.items() if checkpoint else ():
        try:
            part.load_state_dict(checkpoint[name])
        except Exception as error:
            fail(f"--resume {resume}: its {name} does not fit ({error!r:.100}); give a run of this script and model")
    checkpoint = None  # a second copy of everything, which need not stay
    model = policy
    if world_size > 1:
        store, *_ = next(dist.rendezvous("env://"))  # torchrun keeps it over restarts, with the addresses of the dead
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group("nccl" if use_cuda else "gloo", store=store, rank=rank, world_size=world_size)
        model = DistributedDataParallel(policy, broadcast_buffers=False, gradient_as_bucket_view=True)
    autocast = functools.partial(torch.autocast, device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")

    # 2. The run folder, and the arithmetic of the run
    started = all_sum(torch.tensor(time.time() if rank == 0 else 0.0, dtype=torch.float64, device=device))  # for all
    name = f"{args.exp_name}__{args.seed}__{datetime.fromtimestamp(float(started)):%Y%m%d-%H%M%S-%f}"
    run_dir = Path(resume or Path(args.runs_dir, name))
    if rank == 0:
        open_run_folder(args, run_dir, start, num_iterations)
    tracker = start_tracking(args, run_dir) if rank == 0 and args.track else None
    local_batch = args.batch_size // world_size
    say(f"{args.exp_name}: {policy.num_parameters():,} parameters on {world_size} x {device.type}, writes to {run_dir}")
    if resume:
        say(f"goes on after step {start}")
    say(f"{args.num_epochs} epochs x {steps_per_epoch} steps on {args.batch_size} examples, {local_batch} a rank")
    bar = tqdm(total=num_iterations, initial=start, disable=rank > 0 or not sys.stderr.isatty(), dynamic_ncols=True)

    @torch.no_grad()
    def evaluate_and_log(iteration: int, metrics: dict) -> None:
        samples = []
        due = args.eval_every and (iteration % args.eval_every == 0 or iteration == num_iterations)
        if eval_rows and due:
            num_tokens, loss = num_completion_tokens(eval_rows), torch.zeros((), device=device)
            mine = eval_rows[rank::world_size]
            for i in range(0, len(mine), args.micro_batch_size):
                with autocast():
                    batch = collate(mine[i : i + args.micro_batch_size], pad_id, device)
                    loss += completion_loss(policy, *batch, num_tokens)
            metrics["eval/loss"] = float(all_sum(loss))
            say(f"held out, after {iteration} steps    loss {metrics['eval/loss']:.4f}")
        if eval_rows and due and rank == 0:
            for row in eval_rows[: args.num_samples]:
                prompt_ids = torch.tensor([row["ids"][: row["prompt_length"]]], device=device)
                room = args.max_length - row["prompt_length"]
                # All said here: what is left out would come from the model's own generation config.
                plain = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
                ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": pad_id}
                greedy = transformers.GenerationConfig(max_new_tokens=min(room, 256), **plain, **ends)
                inputs = {"inputs": prompt_ids, "attention_mask": torch.ones_like(prompt_ids)}
                output = policy.generate(**inputs, generation_config=greedy)
                text = tokenizer.decode(output[0, row["prompt_length"] :])
                samples.append(
                    {"split": "held out", "prompt": row["prompt"], "response": text, "right": row["completion"]}
                )
                say(f"    {row['prompt']!r} -> {text!r}")
        for name, lines in {"metrics.jsonl": [metrics], "samples.jsonl": samples}.items() if rank == 0 else ():
            append_lines(run_dir / name, [{"iteration": iteration} | line for line in lines])
        if tracker:
            tracker.log(metrics, step=iteration)

    signals, handlers = [], {}

    def finish_step(number: int, frame) -> None:
        """Stop at the end of the step; at once if told again. What comes within seconds is one and the same wish:
        schedulers signal the rank, and torchrun's agent, which passes it on."""
        if signals and time.monotonic() - signals[-1][1] > 3:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        signals.append((number, signals[-1][1] if signals else time.monotonic()))

    for number in (signal.SIGINT, signal.SIGTERM):
        handlers[number] = signal.signal(number, finish_step)

    if start == 0:
        evaluate_and_log(0, {})
    for iteration in range(start + 1, num_iterations + 1):
        # 3. The batch: this rank's part of the next examples, those of like length together
        began = time.perf_counter()
        epoch, step = divmod(iteration - 1, steps_per_epoch)
        order = torch.arange(len(rows))
        if args.shuffle:
            order = torch.randperm(
                len(rows), generator=torch.Generator().manual_seed((args.seed * 1_000_003 + epoch) % 2**63)
            )
        order = order[step * args.batch_size : (step + 1) * args.batch_size]
        num_tokens = num_completion_tokens([rows[i] for i in order])  # of all ranks: each knows the whole batch
        mine = sorted((rows[i] for i in order.chunk(world_size)[rank]), key=lambda row: len(row["ids"]))

        # 4. The optimizer step, its gradient summed over micro-batches and ranks
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(args, iteration, num_iterations)
        loss = torch.zeros((), device=device)
        checkpoint_layers(policy, args.gradient_checkpointing)
        for i in range(0, local_batch, args.micro_batch_size):
            batch = collate(mine[i : i + args.micro_batch_size], pad_id, device)
            more = world_size > 1 and i + args.micro_batch_size < local_batch
            with model.no_sync() if more else contextlib.nullcontext():  # ranks exchange gradients once per step
                with autocast():
                    mb_loss = completion_loss(model, *batch, num_tokens)
                (mb_loss * world_size).backward()  # DistributedDataParallel averages over ranks, we want the sum
            loss += mb_loss.detach()
        checkpoint_layers(policy, False)
        grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
        if all_sum((~torch.stack([loss, grad_norm]).isfinite()).sum()) > 0:  # on any rank, so on all
            path = run_dir / f"not_finite.{rank}.json"
            text = json.dumps(mine, indent=1).encode()
            write_file(path, lambda file, text=text: file.write(text))
            if rank > 0:
                sys.exit(2)
            reason = "loss or gradient is NaN or infinite, start anew with a lower --learning_rate"
            fail(f"step {iteration}: {reason}; {path} has the batch")
        optimizer.step()
        optimizer.zero_grad()

        # 5. Log, evaluate, save
        metrics = {"loss": float(all_sum(loss)), "grad_norm": float(grad_norm)}  # waits for the device
        seconds = time.perf_counter() - began
        metrics["learning_rate"] = learning_rate_at(args, iteration, num_iterations)
        metrics |= {"tokens_per_second": num_tokens / seconds, "seconds/update": seconds}
        line = f"loss {metrics['loss']:.4f}   {metrics['tokens_per_second']:6.0f} tokens/s"
        bar.update()
        bar.set_postfix_str(line)
        if iteration % args.log_every == 0 or iteration in (1, num_iterations):
            say(f"step {iteration:5d} of {num_iterations}   {line}")
        evaluate_and_log(iteration, metrics)
        stopped = bool(all_sum(torch.tensor(float(len(signals)), device=device)))  # on any rank, so on all
        last = stopped or iteration == num_iterations
        if rank == 0 and (last or (args.save_every and iteration % args.save_every == 0)):
            save_checkpoint(args, run_dir, iteration, world_size, stateful)
        if last:
            break

    # 6. The result, as a Hugging Face folder
    bar.close()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    finished = start >= num_iterations or iteration == num_iterations
    if not finished:
        say(f"stopped by a signal after step {iteration}; the same flags and --resume {run_dir} go on")
    elif rank == 0:
        save_model(run_dir / "model", policy, tokenizer)
        say(f"saved {run_dir / 'model'}")
    if tracker:
        tracker.finish()
    if world_size > 1:
        del model  # holds the process group: if it went last, joining the group's threads could hang on the GIL
        dist.destroy_process_group()
    if not finished:
        sys.exit(128 + (signals[0][0] if signals else signal.SIGTERM))  # as the shell says it


if __name__ == "__main__":
    main(parse_args())
