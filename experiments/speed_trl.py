"""TRL's GRPOTrainer with a clock, started by speed.py with the flags of grpo.py. Prints a line for each iteration."""

import json
import sys
import time

import transformers
import trl
from common import versions
from datasets import load_dataset

flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
sizes = ("num_minibatches", "micro_batch_size", "batch_size", "samples_per_prompt", "max_response_length")
steps, micro_batch, batch, samples, length = (int(flags[f"--{name}"]) for name in sizes)


def exact_answer(completions, answer, **columns):
    return [float(text.strip().endswith(str(expected))) for text, expected in zip(completions, answer)]


class Clock(transformers.TrainerCallback):
    """An iteration is a rollout with its optimizer steps. Only its first step generates and logs a length."""

    length = last_end = None

    def on_log(self, args, state, control, logs, **kwargs):
        self.length = logs.get("completions/mean_length", self.length)
        if "train_runtime" not in logs and state.global_step % steps == 0:
            seconds = self.last_end and time.perf_counter() - self.last_end
            line = {"seconds": seconds, "response_length": self.length, "versions": versions("trl")}
            print(json.dumps(line), flush=True)
            self.last_end = time.perf_counter()


# TRL's defaults, except for the sizes, sampling from the softmax itself, the dtype, and checkpointing of activations,
# which is on by default, saves memory and costs time.
options = {"temperature": 1.0, "top_k": 0, "beta": 0.01, "bf16": False, "gradient_checkpointing": False}
options |= {"lr_scheduler_type": "constant", "save_strategy": "no", "report_to": "none", "use_cpu": True}
options |= {"learning_rate": float(flags["--learning_rate"]), "seed": int(flags["--seed"])}
options |= {"per_device_train_batch_size": micro_batch}
options |= {"gradient_accumulation_steps": batch // steps // micro_batch}
options |= {"generation_batch_size": batch, "num_generations": samples, "max_completion_length": length}
options |= {"max_steps": int(flags["--num_iterations"]) * steps, "logging_steps": 1, "disable_tqdm": True}
cache = f"{flags['--run_dir']}/cache"  # grpo.py too reads the prompts in every run
trl.GRPOTrainer(
    model=flags["--model"],
    args=trl.GRPOConfig(output_dir=flags["--run_dir"], **options),
    reward_funcs=exact_answer,
    train_dataset=load_dataset("json", data_files=flags["--dataset"], split="train", cache_dir=cache),
    processing_class=transformers.AutoTokenizer.from_pretrained(flags["--model"], padding_side="left"),
    callbacks=[Clock()],
).train()
