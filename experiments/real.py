"""SmolLM2-135M learns to reverse lists of words: `make real`, 20 minutes on two cores.

Runs rloo.py and prints accuracy and responses before and after. It needs data/smollm2 and data/reversal, which
data/smollm2.py and data/reversal.py write.
"""

import subprocess
import sys
import time

from common import ROOT, read_jsonl, words_of

FLAGS = {
    "model": "data/smollm2",
    "dataset": "data/reversal/train.jsonl",
    "eval_dataset": "data/reversal/test.jsonl",
}
FLAGS |= {
    "reward": "data/reversal.py:score",
    "max_response_length": 16,
    "batch_size": 32,
    "samples_per_prompt": 8,
}
FLAGS |= {"micro_batch_size": 16, "learning_rate": 1e-5, "warmup_iterations": 2, "num_iterations": 20}
FLAGS |= {"eval_every": 1000, "log_every": 5, "save_every": 0}
FLAGS |= {"kl_coef": 0.3}  # large enough to keep the answers to plain questions


def print_run(metrics: list[dict], samples: list[dict]) -> None:
    """Print accuracy and responses of the first and of the last evaluation."""
    before, *_, after = (line for line in metrics if "eval/score/plain questions" in line)
    print(f"{'held out, greedy':20}before  after")
    for name in before:
        if name.startswith("eval/score/"):
            print(f"{name.removeprefix('eval/score/'):20}{before[name]:.2f}    {after[name]:.2f}")
    for when, part in {"before": samples[:3], "after": samples[-3:]}.items():
        print(f"\n{when}:")
        for sample in part:
            print(f"    {sample['prompt'][-1]['content']} -> {sample['response']}")


if __name__ == "__main__":
    run_dir = f"runs/real__{time.strftime('%Y%m%d-%H%M%S')}"
    words = ["rloo.py", *words_of(FLAGS | {"run_dir": run_dir})]
    print("python", *words, flush=True)
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True)
    print_run(*(read_jsonl(ROOT / run_dir / f"{name}.jsonl") for name in ("metrics", "samples")))
