"""Reward model: stage 2, from pairs of a better and a worse response to a model that scores responses.

The Bradley-Terry model of preferences (Eq. 14 of REINFORCE++, arXiv 2501.03262v9; InstructGPT, arXiv 2203.02155, Eq. 1)
says that the response with score s_c is preferred to the one with s_r with probability sigmoid(s_c - s_r). A language
model with a head of one output learns s by maximum likelihood:

    loss = 1/N * sum_i [ softplus(-(s_c - s_r - margin)) + center_rewards_coefficient * (s_c + s_r)^2 ]

N counts the pairs of a batch over all ranks and micro-batches. The first term sees differences only, so the level of
the scores would drift; the second keeps it near 0 (Eisenstein et al., "Helping or Herding?", arXiv 2312.09244, Eq. 2;
TRL has it under the same name). The score is read at the last attended token, which is the EOS of a response.

A pair is `prompt`, `chosen` and `rejected`. Texts are tokenized as a rollout of the policy scripts is: the tokens of
the prompt, those of the response, EOS. Chats go through the chat template as a whole. What is saved opens with
AutoModelForSequenceClassification and gives the same scores there; its README.md says what they were in training.

Left out: dropout, packing, LoRA, sharded models, ensembles.

    python reward_model.py
    torchrun --nproc-per-node 8 reward_model.py --model Qwen/Qwen3-0.6B --dataset trl-lib/ultrafeedback_binarized \
        --eval_dataset trl-lib/ultrafeedback_binarized --learning_rate 1e-5 --num_epochs 1
"""

import contextlib
import hashlib
import importlib.util
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
import transformers  # loads its classes when they are first named, so --help need not wait for them
import tyro
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

TOY = Path(__file__).resolve().parent / "toy"  # the embedded default: a small model and its data, see toy/README.md


@dataclass
class Experiment:
    exp_name: str = Path(__file__).stem
    """Name of the run; its folder is <runs_dir>/<exp_name>__<seed>__<time>."""
    seed: int = 1
    """Seeds the head and the order of the pairs."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes CUDA if there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the forward passes (autocast). Weights and optimizer state are float32 either way."""


@dataclass
class ModelAndData:
    model: str = str(TOY / "policy")
    """Model to start from: hub id or folder of a causal LM, which gets a new head, or of a reward model, which keeps
    its own; with a tokenizer."""
    dataset: str = str(TOY / "preferences_train.jsonl")
    """Hub id, .jsonl or .parquet with `chosen` and `rejected` (texts or chat messages) and `prompt`, unless those are
    whole chats or texts."""
    dataset_split: str = "train"
    """Split of a hub dataset."""
    eval_dataset: str | None = str(TOY / "preferences_heldout.jsonl")
    """Held-out pairs, as --dataset (set both); a column `group` splits the results. None evaluates nothing."""
    eval_split: str = "test"
    """Split of a hub dataset for evaluation."""
    max_length: int = 1024
    """Longer examples (prompt and response, in tokens) are cut at their end, as a rollout cuts a response."""


@dataclass
class Optimization:
    num_epochs: int = 2
    """Passes over the pairs."""
    batch_size: int = 64
    """Pairs per optimizer step, over all ranks."""
    micro_batch_size: int = 64
    """Pairs per forward pass on each rank: memory only, results do not depend on it."""
    margin: float = 0.0
    """The chosen score should be higher by so much; a column `margin` of the dataset says it pair by pair."""
    center_rewards_coefficient: float = 0.01
    """Weight of the term that keeps scores centred around 0; 0 turns it off."""
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
    eval_every: int = 70
    """Loss, accuracy and margin on the held-out pairs every so many optimizer steps, before the first and after the
    last; 0 never."""
    log_every: int = 20
    """A line of output every so many optimizer steps; metrics.jsonl gets every one."""
    num_samples: int = 3
    """So many held-out pairs with their scores go to samples.jsonl and the terminal at each evaluation."""
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


def mean_std(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and (biased) standard deviation of all entries of x over all ranks."""
    n = all_sum(torch.tensor(float(x.numel()), device=x.device))
    mean = all_sum(x.sum()) / n
    return mean, (all_sum((x - mean).square().sum()) / n).sqrt()


def load(auto_class, name: str, flag: str, **options):
    """auto_class.from_pretrained, ending with a sentence where that does not work. Code that lies beside the weights is
    not run, and weights are safetensors only: pickles can hold code."""
    safe = {} if auto_class in (transformers.AutoTokenizer, transformers.AutoConfig) else {"use_safetensors": True}
    try:
        return auto_class.from_pretrained(name, trust_remote_code=False, **safe, **options)
    except Exception as error:  # files and the hub can fail in many ways
        reason = str(error).strip().partition("\n")[0]
        fail(f"--{flag} {name}: {auto_class.__name__} cannot load it ({reason}); give a folder or a hub id")


class RewardModel(torch.nn.Module):
    """A sequence classifier with one output, which it reads at the last attended token of each sequence."""

    def __init__(self, classifier):
        super().__init__()
        self.classifier = classifier

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Scores (B,) of sequences (B, L), padded on either side.

        Not classifier(...).logits: that takes the last token that is not the pad id, the wrong one where pad is EOS.
        """
        positions = (attention_mask.cumsum(1) - 1).clamp(min=0)  # (B, L): left padding does not count
        last = (torch.arange(input_ids.shape[1], device=input_ids.device) * attention_mask).argmax(1)  # (B,)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": positions}
        hidden = self.classifier.base_model(**inputs, use_cache=False)[0]  # (B, L, H)
        scores = self.classifier.score(hidden[torch.arange(len(last), device=last.device), last])[:, 0]  # (B,)
        return scores.to(torch.promote_types(scores.dtype, torch.float32))


def load_reward_model(args, tokenizer, device: torch.device) -> RewardModel:
    """The classifier in float32 and in eval mode for good, so that it scores here as it will later, without dropout."""
    config = load(transformers.AutoConfig, args.model, "model")
    trained = any("SequenceClassification" in name for name in config.architectures or [])
    if trained and config.num_labels != 1:
        fail(f"--model {args.model}: has {config.num_labels} outputs, a reward model has 1; give that, or a causal LM")
    options = {"num_labels": 1, "dtype": torch.float32}
    classifier = load(transformers.AutoModelForSequenceClassification, args.model, "model", **options)
    if not hasattr(classifier, "score"):
        fail(f"--model {args.model}: {type(classifier).__name__} has no `score` head; give a decoder such as Llama")
    torch.manual_seed(args.seed % 2**63)
    if not trained:  # small enough that scores start near 0, where a pair counts log 2
        width = classifier.score.in_features
        classifier.score.weight.data = torch.randn(1, width) / (width + 1)

    # Elsewhere the score is read at the last token that is not padding, so padding needs an id that ends no response.
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
        if len(tokenizer) > classifier.get_input_embeddings().num_embeddings:
            classifier.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    classifier.config.get_text_config().pad_token_id = tokenizer.pad_token_id

    for module in classifier.modules():  # a few layers (OPT's) drop out by themselves, and checkpoint_layers sets that
        for rate in [key for key, value in vars(module).items() if "drop" in key and isinstance(value, float)]:
            setattr(module, rate, 0.0)
    return RewardModel(classifier).to(device).eval()


def encode(tokenizer, prompt, response) -> list[int]:
    """The tokens that are scored, prompt and response, each a text or chat messages; the response may be a whole chat.

    Of texts these are the tokens that a policy sees and samples: the prompt's, the response's, EOS.
    """
    if isinstance(prompt, list) or isinstance(response, list):
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
        response = [{"role": "assistant", "content": response}] if isinstance(response, str) else response
        chat = chat + response if response[0]["role"] == "assistant" else response
        ids = tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
        return ids if tokenizer.eos_token_id in ids else [*ids, tokenizer.eos_token_id]
    ids = tokenizer(prompt or "")["input_ids"] + tokenizer(response, add_special_tokens=False)["input_ids"]
    return [*ids, tokenizer.eos_token_id]


def load_rows(args, name: str | None, split: str, flag: str, tokenizer) -> list[dict]:
    """The dataset as its rows, with the lists of token ids `chosen_ids` and `rejected_ids`; pairs that are equal after
    the cut at max_length are left out, since they say nothing."""
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
    for column in ("chosen", "rejected"):
        if not rows or column not in rows[0]:
            fail(f"--{flag} {name}: has no column `{column}`; rename or add it")
    kept, cut = [], 0
    for number, row in enumerate(rows):
        try:
            ids = [encode(tokenizer, row.get("prompt"), row[column]) for column in ("chosen", "rejected")]
        except Exception as error:  # no text, no messages, or no chat template for them
            fail(f"--{flag} {name}: row {number} cannot be made tokens ({error!r:.100}); mend it, or leave it out")
        cut += sum(len(x) > args.max_length for x in ids)
        row["chosen_ids"], row["rejected_ids"] = (x[: args.max_length] for x in ids)
        if row["chosen_ids"] != row["rejected_ids"]:
            kept.append(row)
    counts = f"{len(kept)} pairs, {len(rows) - len(kept)} left out as both responses are equal"
    say(f"{flag}: {counts}, {cut} responses cut to {args.max_length} tokens")
    if not kept:
        fail(f"--{flag} {name}: has no pair with two different responses; give one that has, or raise --max_length")
    return kept


def collate(rows: list[dict], pad_id: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """input_ids and attention_mask (2b, L) of b pairs, padded on the right: first all chosen, then all rejected."""
    examples = [row["chosen_ids"] for row in rows] + [row["rejected_ids"] for row in rows]
    width = max(map(len, examples))
    input_ids = torch.tensor([ids + [pad_id] * (width - len(ids)) for ids in examples], device=device)
    attention_mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in examples], device=device)
    return input_ids, attention_mask


def margins(args, rows: list[dict], device) -> torch.Tensor:
    """(b,) by how much the chosen score should be higher: the column `margin`, or the flag where there is none."""
    return torch.tensor([args.margin if row.get("margin") is None else row["margin"] for row in rows], device=device)


def preference_loss(chosen_scores, rejected_scores, margin=0.0, num_pairs=None) -> torch.Tensor:
    """-log sigmoid(chosen - rejected - margin), the Bradley-Terry loss of pairs (b,) (Eq. 14 with margin 0): their sum
    over num_pairs, those of the whole batch; their mean if that is None."""
    losses = torch.nn.functional.softplus(-(chosen_scores - rejected_scores - margin))  # (b,)
    return losses.sum() / (len(losses) if num_pairs is None else num_pairs)


def centering_loss(chosen_scores, rejected_scores, num_pairs=None) -> torch.Tensor:
    """(chosen + rejected)^2 of pairs (b,), added up as in preference_loss (arXiv 2312.09244, Eq. 2)."""
    losses = (chosen_scores + rejected_scores).square()  # (b,)
    return losses.sum() / (len(losses) if num_pairs is None else num_pairs)


@torch.no_grad()
def score_pairs(args, model, rows: list[dict], pad_id: int) -> torch.Tensor:
    """Scores (N, 2), chosen and rejected, of N rows in their order; the rows are taken in order of length."""
    device = model.classifier.device
    scores = torch.zeros(len(rows), 2, device=device)
    order = sorted(range(len(rows)), key=lambda i: pair_length(rows[i]))
    for start in range(0, len(order), args.micro_batch_size):
        index = order[start : start + args.micro_batch_size]
        with autocast(args, device):
            scores[index] = model(*collate([rows[i] for i in index], pad_id, device)).view(2, -1).T
    return scores


def pair_length(row: dict) -> int:
    """Tokens of the longer response with its prompt."""
    return max(len(row["chosen_ids"]), len(row["rejected_ids"]))


def evaluate(args, model, rows, pad_id: int, rank: int, world_size: int) -> tuple[dict, list[dict]]:
    """Loss, accuracy and margin on held-out pairs over all ranks, accuracy of each group too, and a few samples."""
    groups = sorted({str(row.get("group", "all")) for row in rows})
    mine, device = rows[rank::world_size], model.classifier.device
    scores = score_pairs(args, model, mine, pad_id)  # (n, 2)
    difference = scores[:, 0] - scores[:, 1]
    losses = torch.nn.functional.softplus(-(difference - margins(args, mine, device)))
    index = torch.tensor([groups.index(str(row.get("group", "all"))) for row in mine], dtype=torch.long, device=device)
    totals = torch.zeros(len(groups), 4, device=device)  # of each group: loss, right, margin, count
    totals.index_add_(0, index, torch.stack([losses, difference > 0, difference, torch.ones_like(losses)], dim=1))
    totals = all_sum(totals)
    loss, right, margin = (totals.sum(0)[:3] / totals.sum(0)[3]).tolist()
    metrics = {"eval/loss": loss, "eval/accuracy": right, "eval/margin": margin}
    if len(groups) > 1:
        metrics |= {f"eval/accuracy/{group}": t[1] / t[3] for group, t in zip(groups, totals.tolist())}
    samples = [
        {name: row.get(name) for name in ("prompt", "chosen", "rejected")} | {"chosen_score": c, "rejected_score": r}
        for row, (c, r) in zip(mine[: args.num_samples], scores.tolist())
    ]
    return metrics, samples


def model_card(args, results: dict, mean: float, std: float) -> str:
    """README.md of the saved folder."""
    base, data = (Path(name).name if Path(name).exists() else name for name in (args.model, args.dataset))
    lines = ["# Reward model", "", f"`{base}` with a head of one output, trained on the pairs of `{data}`", ""]
    lines[-2] += " by `reward_model.py` of RLHF by diff."
    lines += ["The score stands at the last token of a response. Differences between scores are log-odds of being"]
    lines += ["preferred (Bradley-Terry); their level means nothing.", "", "| | |", "|---|---|"]
    lines += [f"| scores of the training responses, mean | {mean:.4f} |", f"| standard deviation | {std:.4f} |"]
    lines += [f"| held out, {name.removeprefix('eval/')} | {value:.4f} |" for name, value in results.items()]
    return "\n".join(lines) + "\n"


def autocast(args, device: torch.device):
    """The context of every forward pass: bfloat16 arithmetic if --dtype says so."""
    return torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")


def learning_rate_at(args, iteration: int, num_iterations: int) -> float:
    """Learning rate of an iteration, counted from 1."""
    progress = (iteration - 1) / num_iterations
    decay = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
    return args.learning_rate * min(1.0, iteration / (args.warmup_iterations + 1)) * decay[args.lr_schedule]


def checkpoint_layers(model, on: bool) -> None:
    """Switch gradient checkpointing on for the update, off for evaluation.

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


def save_model(folder: Path, model, tokenizer, card: str) -> None:
    """Model, tokenizer and card in a folder that is there as a whole or not at all."""
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        (temporary / "README.md").write_text(card)
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
    transformers.utils.logging.set_verbosity_error()  # that the head is new is no news
    tokenizer = load(transformers.AutoTokenizer, args.model, "model")
    if tokenizer.eos_token_id is None:
        fail(f"--model {args.model}: its tokenizer has no EOS token, which the score stands at; set one and save it")
    rows = load_rows(args, args.dataset, args.dataset_split, "dataset", tokenizer)
    eval_rows = load_rows(args, args.eval_dataset, args.eval_split, "eval_dataset", tokenizer)
    if len(rows) < args.batch_size:
        fail(f"--batch_size {args.batch_size}: more than the {len(rows)} pairs of --dataset {args.dataset}; lower it")
    steps_per_epoch = len(rows) // args.batch_size
    num_iterations = args.num_epochs * steps_per_epoch
    if checkpoint and checkpoint["iteration"] > num_iterations:
        at = checkpoint["iteration"]
        fail(f"--num_epochs {args.num_epochs}: the run to resume is at step {at} already; give more")
    reward_model = load_reward_model(args, tokenizer, device)
    limit = getattr(reward_model.classifier.config.get_text_config(), "max_position_embeddings", None)
    longest = max(pair_length(row) for row in rows + eval_rows)
    if limit and longest > limit:
        fail(f"--max_length {args.max_length}: an example has {longest} tokens, the model takes {limit}; lower it")
    if args.gradient_checkpointing:
        reward_model.classifier.activation_checkpointing_enable({"use_reentrant": False})
    adam = {"betas": args.adam_betas, "weight_decay": args.weight_decay, "fused": True}
    optimizer = torch.optim.AdamW(reward_model.parameters(), args.learning_rate, **adam)
    stateful = {"reward_model": reward_model, "optimizer": optimizer}
    start = checkpoint["iteration"] if checkpoint else 0
    for name, part in stateful.items() if checkpoint else ():
        try:
            part.load_state_dict(checkpoint[name])
        except Exception as error:
            fail(f"--resume {resume}: its {name} does not fit ({error!r:.100}); give a run of this script and model")
    checkpoint = None  # a second copy of everything, which need not stay
    model = reward_model
    if world_size > 1:
        store, *_ = next(dist.rendezvous("env://"))  # torchrun keeps it over restarts, with the addresses of the dead
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group("nccl" if use_cuda else "gloo", store=store, rank=rank, world_size=world_size)
        model = DistributedDataParallel(reward_model, broadcast_buffers=False, gradient_as_bucket_view=True)

    # 2. The run folder, and the arithmetic of the run
    started = all_sum(torch.tensor(time.time() if rank == 0 else 0.0, dtype=torch.float64, device=device))  # for all
    name = f"{args.exp_name}__{args.seed}__{datetime.fromtimestamp(float(started)):%Y%m%d-%H%M%S-%f}"
    run_dir = Path(resume or Path(args.runs_dir, name))
    if rank == 0:
        open_run_folder(args, run_dir, start, num_iterations)
    tracker = start_tracking(args, run_dir) if rank == 0 and args.track else None
    local_batch, pad_id = args.batch_size // world_size, tokenizer.pad_token_id
    size = sum(parameter.numel() for parameter in reward_model.parameters())
    say(f"{args.exp_name}: {size:,} parameters on {world_size} x {device.type}, writes to {run_dir}")
    if resume:
        say(f"goes on after step {start}")
    say(f"{args.num_epochs} epochs x {steps_per_epoch} steps on {args.batch_size} pairs, {local_batch} a rank")
    bar = tqdm(total=num_iterations, initial=start, disable=rank > 0 or not sys.stderr.isatty(), dynamic_ncols=True)

    def evaluate_and_log(iteration: int, metrics: dict) -> None:
        samples = []
        due = args.eval_every and (iteration % args.eval_every == 0 or iteration == num_iterations)
        if eval_rows and due:
            held_out, samples = evaluate(args, reward_model, eval_rows, pad_id, rank, world_size)
            text = "    ".join(f"{name.removeprefix('eval/')} {value:.3f}" for name, value in held_out.items())
            say(f"held out, after {iteration} steps    {text}")
            for sample in samples:
                for name in ("chosen", "rejected"):
                    say(f"    {sample[f'{name}_score']:6.2f}  {sample['prompt']!r} -> {sample[name]!r}")
            metrics = metrics | held_out
            samples = [{"split": "held out"} | sample for sample in samples]
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
        # 3. The batch: this rank's part of the next pairs, those of like length together
        began = time.perf_counter()
        epoch, step = divmod(iteration - 1, steps_per_epoch)
        order = torch.randperm(
            len(rows), generator=torch.Generator().manual_seed((args.seed * 1_000_003 + epoch) % 2**63)
        )
        order = order[step * args.batch_size : (step + 1) * args.batch_size].chunk(world_size)[rank]
        mine = sorted((rows[i] for i in order), key=pair_length)

        # 4. The optimizer step, its gradient summed over micro-batches and ranks
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(args, iteration, num_iterations)
        loss, scores = torch.zeros((), device=device), []
        checkpoint_layers(reward_model, args.gradient_checkpointing)
        for i in range(0, local_batch, args.micro_batch_size):
            piece = mine[i : i + args.micro_batch_size]
            more = world_size > 1 and i + args.micro_batch_size < local_batch
            with model.no_sync() if more else contextlib.nullcontext():  # ranks exchange gradients once per step
                with autocast(args, device):
                    chosen, rejected = model(*collate(piece, pad_id, device)).chunk(2)  # (b,) each
                mb_loss = preference_loss(chosen, rejected, margins(args, piece, device), args.batch_size)
                centering = centering_loss(chosen, rejected, args.batch_size)
                objective = mb_loss + args.center_rewards_coefficient * centering
                (objective * world_size).backward()  # DistributedDataParallel averages over ranks, we want the sum
            loss += mb_loss.detach()
            scores.append(torch.stack([chosen, rejected], dim=1).detach())  # (b, 2)
        checkpoint_layers(reward_model, False)
        grad_norm = torch.nn.utils.clip_grad_norm_(reward_model.parameters(), args.max_grad_norm)
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
        scores = torch.cat(scores)  # (B / world_size, 2)
        difference = scores[:, 0] - scores[:, 1]
        metrics = {"loss": float(all_sum(loss)), "grad_norm": float(grad_norm)}  # waits for the device
        seconds = time.perf_counter() - began
        metrics["accuracy"] = float(mean_std((difference > 0).float())[0])
        metrics["margin"] = float(mean_std(difference)[0])
        metrics["score_mean"], metrics["score_std"] = map(float, mean_std(scores))
        metrics["learning_rate"] = learning_rate_at(args, iteration, num_iterations)
        metrics |= {"pairs_per_second": args.batch_size / seconds, "seconds/update": seconds}
        line = f"loss {metrics['loss']:.4f}   accuracy {metrics['accuracy']:.3f}   margin {metrics['margin']:6.3f}"
        line += f"   {metrics['pairs_per_second']:5.0f} pairs/s"
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

    # 6. The result, as a Hugging Face folder, with what a score of the training responses looks like
    bar.close()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    finished = start >= num_iterations or iteration == num_iterations
    if finished:
        mean, std = map(float, mean_std(score_pairs(args, reward_model, rows[rank::world_size], pad_id)))
        results, _ = evaluate(args, reward_model, eval_rows, pad_id, rank, world_size) if eval_rows else ({}, [])
        say(f"scores of the training responses: mean {mean:.3f}, standard deviation {std:.3f}")
    if not finished:
        say(f"stopped by a signal after step {iteration}; the same flags and --resume {run_dir} go on")
    elif rank == 0:
        if isinstance(rows[0]["chosen"], str) and not isinstance(rows[0].get("prompt"), list):
            tokenizer.chat_template = None  # it has learned from plain texts, and is to be asked about such
        card = model_card(args, results, mean, std)
        save_model(run_dir / "model", reward_model.classifier, tokenizer, card)
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
