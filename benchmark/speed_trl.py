"""TRL's GRPOTrainer or RLOOTrainer on the work of speed.py, which starts this in TRL's own environment.

Arguments: one JSON object, see speed.py. Prints one JSON line at the end of each iteration: seconds since the epoch,
responses' mean length, peak memory in GiB.
"""

import json
import re
import sys
import time

import torch
import transformers
import trl
from datasets import load_dataset
from peak import peak_gib

work = json.loads(sys.argv[1])
use_cuda = torch.cuda.is_available() and work["device"] == "cuda"


def exact_answer(completions, answer, **columns):
    return [
        1.0 if re.search(rf"(answer\s+)?{re.escape(str(a))}\s*$", str(c)) else 0.0
        for c, a in zip(completions, answer)
    ]


class Clock(transformers.TrainerCallback):
    """Tells when each iteration (a rollout with its optimizer steps) ended. Only the step that generates logs a
    length, which is the first of an iteration."""

    length = None

    def on_step_end(self, args, state, control, **kwargs):
        if use_cuda:
            torch.cuda.synchronize()
        self.time = time.time()

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.length = (logs or {}).get("completions/mean_length", self.length)
        if "train_runtime" not in (logs or {}) and state.global_step % work["steps"] == 0:
            line = {"time": self.time, "length": self.length, "peak": peak_gib(use_cuda)}
            print(json.dumps(line), flush=True)


classes = {"grpo": (trl.GRPOConfig, trl.GRPOTrainer), "rloo": (trl.RLOOConfig, trl.RLOOTrainer)}
config, trainer = classes[work["script"]]
# Its defaults but for what makes the work the same: sizes, sampling from the softmax itself, float32 or bfloat16 as
# ours, no checkpointing of activations (its default: more time, less memory).
config = config(
    output_dir=work["folder"],
    max_steps=work["iterations"] * work["steps"],
    per_device_train_batch_size=work["micro_batch_size"],
    gradient_accumulation_steps=work["batch_size"] // work["steps"] // work["micro_batch_size"],
    generation_batch_size=work["batch_size"],
    num_generations=work["k"],
    max_completion_length=work["max_response_length"],
    temperature=1.0,
    top_k=0,
    beta=0.01,
    learning_rate=work["learning_rate"],
    lr_scheduler_type="constant",
    bf16=work["dtype"] == "bfloat16",
    gradient_checkpointing=False,
    use_cpu=not use_cuda,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    seed=work["seed"],
)
trainer(
    model=work["model"],
    args=config,
    reward_funcs=exact_answer,
    train_dataset=load_dataset("json", data_files=work["dataset"], split="train"),
    processing_class=transformers.AutoTokenizer.from_pretrained(work["model"], padding_side="left"),
    callbacks=[Clock()],
).train()
