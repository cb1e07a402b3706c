"""TRL's GRPOTrainer with a clock, started by speed.py with flags of grpo.py. Writes the metrics that speed.py reads."""

import time
from itertools import pairwise
from pathlib import Path

import datasets
import transformers
import trl.rewards
import tyro
from common import read_jsonl
from make_toy import write_jsonl

import grpo

flags = tyro.cli(grpo.Args, use_underscores=True)
steps = flags.num_minibatches
ends = [time.perf_counter()]  # of optimizer steps


class Clock(transformers.TrainerCallback):
    def on_step_end(self, *args, **kwargs):
        ends.append(time.perf_counter())


# TRL's defaults, except for the sizes, the KL, the dtype, and checkpointing of activations, which is on by default,
# saves memory and costs time.
options = {"beta": 0.01, "bf16": False, "gradient_checkpointing": False, "use_cpu": True}
options |= {"seed": flags.seed, "learning_rate": flags.learning_rate, "output_dir": flags.run_dir}
options |= {"generation_batch_size": flags.batch_size, "per_device_train_batch_size": flags.micro_batch_size}
options |= {"gradient_accumulation_steps": flags.batch_size // steps // flags.micro_batch_size}
options |= {"num_generations": flags.samples_per_prompt, "max_completion_length": flags.max_response_length}
options |= {"max_steps": flags.num_iterations * steps, "logging_steps": 1}
reward = trl.rewards.get_soft_overlong_punishment(flags.max_response_length, flags.max_response_length)
prompts, config = datasets.Dataset.from_list(read_jsonl(Path(flags.dataset))), trl.GRPOConfig(**options)
trainer = trl.GRPOTrainer(flags.model, reward, config, prompts, callbacks=[Clock()])
trainer.train()
# An iteration is a rollout with its optimizer steps. Only its first step generates and logs a length.
lengths = [x["completions/mean_length"] for x in trainer.state.log_history if "completions/mean_length" in x]
lines = []
for length, (start, end) in zip(lengths, pairwise(ends[::steps])):
    lines.append({"response_length": length, "tokens_per_second": flags.batch_size * length / (end - start)})
write_jsonl(Path(flags.run_dir, "metrics.jsonl"), lines)
