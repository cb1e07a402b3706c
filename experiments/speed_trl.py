"""TRL's GRPOTrainer with a clock. speed.py starts this in experiments/.trl, with the flags of grpo.py as JSON.

Prints a JSON line for each iteration, a rollout with its optimizer steps.
"""

import json
import sys
import time

import transformers
import trl
from common import versions
from datasets import load_dataset

flags = json.loads(sys.argv[1])
steps = flags["num_minibatches"]


def exact_answer(completions, answer, **columns):
    # The completion of a chat is a list of messages.
    texts = [x if isinstance(x, str) else x[-1]["content"] for x in completions]
    return [float(text.strip().endswith(str(expected))) for text, expected in zip(texts, answer)]


class Clock(transformers.TrainerCallback):
    """Prints a line for each iteration. Only its first step generates and logs a length."""

    length = last_end = None

    def on_log(self, args, state, control, logs, **kwargs):
        self.length = logs.get("completions/mean_length", self.length)
        if "train_runtime" not in logs and state.global_step % steps == 0:
            now = time.perf_counter()
            line = {"seconds": self.last_end and now - self.last_end, "response_length": self.length}
            print(json.dumps(line | {"versions": versions("trl")}), flush=True)
            self.last_end = time.perf_counter()


# TRL's defaults, except for the sizes, sampling from the softmax itself, the dtype, and checkpointing of activations,
# which is on by default, saves memory and costs time.
options = {"temperature": 1.0, "top_k": 0, "beta": 0.01, "bf16": False, "gradient_checkpointing": False}
options |= {"lr_scheduler_type": "constant", "save_strategy": "no", "report_to": "none"}
config = trl.GRPOConfig(
    output_dir=flags["run_dir"],
    max_steps=flags["num_iterations"] * steps,
    per_device_train_batch_size=flags["micro_batch_size"],
    gradient_accumulation_steps=flags["batch_size"] // steps // flags["micro_batch_size"],
    generation_batch_size=flags["batch_size"],
    num_generations=flags["samples_per_prompt"],
    max_completion_length=flags["max_response_length"],
    learning_rate=flags["learning_rate"],
    seed=flags["seed"],
    use_cpu=True,
    logging_steps=1,
    disable_tqdm=True,
    **options,
)
cache = f"{flags['run_dir']}/cache"  # grpo.py too reads the prompts in every run
trl.GRPOTrainer(
    model=flags["model"],
    args=config,
    reward_funcs=exact_answer,
    train_dataset=load_dataset("json", data_files=flags["dataset"], split="train", cache_dir=cache),
    processing_class=transformers.AutoTokenizer.from_pretrained(flags["model"], padding_side="left"),
    callbacks=[Clock()],
).train()
