"""Give a script the feature of a variant: make variant SCRIPT=rloo FEATURE=lora writes variants/rloo_lora.py.

The difference between grpo.py and grpo_lora.py is merged into rloo.py. FEATURE=lora,vllm adds two features, and so does
SCRIPT=rloo_lora FEATURE=vllm. If a script and a feature do not go together, the reason is printed, nothing is written,
and the exit code is 1.
"""

import re
import sys
from pathlib import Path
from textwrap import fill

import sync

HEADER = re.compile(r"\A(# /// script\n.*?\n)(.*?)^# ///\n(?:# variant of .*?\n)?", re.MULTILINE | re.DOTALL)
# The end of a docstring: the commands, and the sentence before them
COMMANDS = re.compile(r"\s*(?:Made by|Train a|A) (?:`make|toy|small)\b(?:(?!\n\n).)*:\n\n    .*", re.DOTALL)
# Pairs that do not go together, also where they merge
REFUSED = {
    ("remax", "async"): "the trainers would wait for greedy responses of their own",
    ("distill", "tools"): "the toy's teacher does not know the tokens of the toy with a calculator",
    ("lora", "fsdp"): "both change what the checkpoint and `model/` hold",
    ("tools", "vllm"): "vLLM samples whole responses, and a tool is called in the middle of one",
}
# What vLLM gets, and what it gets beside LoRA: the weights with the adapter added
WEIGHTS = "dict(policy.named_parameters(remove_duplicate=False))"
MERGED_WEIGHTS = "merged_weights(policy)"
LINES = {"width": 108, "break_long_words": False, "break_on_hyphens": False}


def parts(source: str) -> tuple[str, dict[str, str], list[str], dict[str, str]]:
    """The skeleton, the packages, the commands in the docstring, and the flags of the last one."""
    packages = dict(re.findall(r'"(\w+)([=<>][^"]*)"', HEADER.match(source)[2]))
    text = re.sub(r" \\\n +", " ", sync.OWN.findall(source)[0])
    commands = re.findall(r"^    (.*\b(?:python|torchrun) .*)$", text, re.MULTILINE)
    flags = dict(re.findall(r" --(\w+)((?: (?!--)\S+)?)", commands[-1].partition(".py")[2]))
    return HEADER.sub("", sync.skeleton(source)), packages, commands, flags


def combine(name: str, chosen: list[str], root: Path = sync.ROOT) -> str:
    """The source of a script with more features. A ValueError says why there is none."""
    sources = {name: path.read_text() for name, path in sync.paths(root).items()}
    features, parents = sync.features(root), sync.variants(root)
    if name not in sources or {*chosen} - {*features}:
        raise ValueError(f"use a SCRIPT of this folder, and a FEATURE of {', '.join(features)}")
    present, script = sync.features_of(name, root), parents.get(name, name)
    text, packages, [toy, *_], flags = parts(sources[name])
    for feature in chosen:
        for other in (script, *present):
            reason = REFUSED.get((other, feature)) or REFUSED.get((feature, other))
            if reason or other == feature:
                raise ValueError(f"{other} with {feature}: {reason or 'has it'}")
        before, old_packages, _, old_flags = parts(sources[parents[features[feature]]])
        after, new_packages, commands, new_flags = parts(sources[features[feature]])
        text, is_clean = sync.merge(text, before, after)
        if not is_clean:
            conflicts = re.findall(r"^<<<<<<< .*?^>>>>>>> .*?$", text, re.MULTILINE | re.DOTALL)
            raise ValueError("\n".join([f"{name} with {feature}: both change the same lines", *conflicts]))
        packages |= {key: value for key, value in new_packages.items() if old_packages.get(key) != value}
        flags |= {key: value for key, value in new_flags.items() if old_flags.get(key) != value}
        toy, present = toy + commands[0], [*present, feature]
    if "lora" in present and "vllm" in present:
        text = text.replace(WEIGHTS, MERGED_WEIGHTS)

    result = "_".join([name, *chosen])
    pins = ", ".join(f'"{package}{version}"' for package, version in packages.items())
    pins = fill(f"# dependencies = [{pins}]", subsequent_indent="#" + " " * 17, **LINES)
    header = f"{HEADER.match(sources[name])[1]}{pins}\n# ///\n"
    header += f"# variant of {script}.py with {', '.join(present)}\n"
    made = f"Made by `make variant SCRIPT={name} FEATURE={','.join(chosen)}`. The feature is explained in "
    made += " and ".join(f"{features[feature]}.py" for feature in chosen) + ". A toy, and a model on 8 GPUs:"
    start = commands[-1].partition(".py")[0].rpartition(" ")[0]
    flags["run_dir"] = flags.pop("run_dir")  # the last one, as everywhere
    words = [f"--{flag}{value}".replace(" ", "\0") for flag, value in flags.items()]  # no line ends at a \0
    command = fill(
        " ".join([f"    {start} variants/{result}.py", *words]), subsequent_indent=" " * 8, **LINES
    )
    command = f"    python variants/{result}.py\n" + command.replace("\n", " \\\n").replace("\0", " ")
    if " --" in toy:  # a feature whose toy is another one
        made, command = made.replace("A toy, and a", "A"), command.partition("\n")[2]
    docstring, block = sync.OWN.findall(sources[name])
    docstring = f'{COMMANDS.sub("", docstring).rstrip()}\n\n{fill(made, **LINES)}\n\n{command}\n"""'
    return header + text.replace("# own", docstring, 1).replace("# own", block, 1)


def answer(name: str, feature: str) -> str:
    """Whether a script takes a feature, or why not, for the table in docs/variants.md."""
    try:
        combine(name, [feature])
    except ValueError as error:
        reason = str(error).partition("\n")[0].partition(": ")[2]
        return reason if feature in sync.features_of(name) else f"no: {reason}"
    return "yes"


if __name__ == "__main__":
    name, chosen = sys.argv[1], sys.argv[2].split(",")
    path = sync.ROOT / "variants" / f"{'_'.join([name, *chosen])}.py"
    if path.exists():
        sys.exit(f"error: {path.name} exists; delete it to make it anew")
    try:
        path.write_text(combine(name, chosen))
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(f"{path.name}: make diff A={name} B={path.stem} shows the feature")
