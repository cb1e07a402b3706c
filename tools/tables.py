"""The tables and the diff that `make tables` writes into README.md, docs/ and patches/ with cog."""

import ast
import dataclasses
import difflib
import importlib
import re

import sync

# The policy scripts in the order of the tables
METHODS = [*sync.CORE, *(name for name in sync.policy_scripts() if name not in sync.CORE)]
# Flags that the last column of print_flags leaves out
SHOWN_APART = ("samples_per_prompt", "kl_coef", "num_minibatches", "update_epochs", "learning_rate")

# What a script has besides an advantage and a loss
NEEDS = {
    "ppo": "a critic, which is trained with its own loss",
    "remax": "a greedy response to each prompt",
    "dapo": "dynamic sampling, which replaces groups of equal scores",
    "gdpo": "several rewards per response",
    "distill": "a teacher, which rates the sampled tokens",
    "gkd": "a teacher, whose whole distribution is compared",
    "sdpo": "a second pass of the policy, after a demonstration",
}


def print_scripts(folder: str) -> None:
    """Print a table of the scripts in a folder, with the first lines of their docstrings, for README.md."""
    print("\n| script | what it does |\n|---|---|")
    own = [*sync.policy_scripts(), *sync.features().values()]  # without those that `make variant` has made
    names = [name for name, path in sync.paths().items() if path.parent.name == folder and name in own]
    for name in names or [*sync.STAGES, *sync.CORE]:
        path = sync.paths()[name]
        [title] = re.findall(r'^"""(.*)\.$', path.read_text(), re.MULTILINE)
        page = f"{'stages' if name in sync.STAGES else 'methods'}.md#{name}"
        if folder == "variants":
            page = f"variants.md#{sync.features_of(name)[0]}"
        print(f"| [`{name}.py`]({path.relative_to(sync.ROOT)}) | {title} ([more](docs/{page})) |")
    print()


def print_diff(a: str, b: str, function: str) -> None:
    """Print how the code of a function differs between two scripts, for the beginning of README.md."""
    texts = (sync.functions(sync.paths()[name].read_text())[function] for name in (a, b))
    old, new = (re.sub(r'\n *""".*?"""', "", text, flags=re.DOTALL).splitlines() for text in texts)
    lines = difflib.unified_diff(old, new, f"{a}.py", f"{b}.py", "", "", n=99, lineterm="")
    lines = [line.rstrip() for line in lines if line[:2] not in ("@@", " @")]
    print("\n```diff", *lines, "```\n", sep="\n")


def print_patches() -> None:
    """Print the table of patches/README.md, with the text above each diff and the scripts that it fits."""
    print("\n| patch | what it does | source | shipped by | for |\n|---|---|---|---|---|")
    for path in sorted((sync.ROOT / "patches").glob("*.patch")):
        what, source, shipped = path.read_text().partition("\n--- ")[0].splitlines()
        scripts = sync.fits(path.stem)
        names = " ".join(f"`{name}`" for name in scripts)
        names = "all policy scripts" if scripts == sync.policy_scripts() else names
        print(f"| [`{path.stem}`]({path.name}) | {what} | {source} | {shipped} | {names} |")
    print()


def print_refused() -> None:
    """Print the scripts and features that cannot be combined, for docs/variants.md."""
    lines = [f"- `{a}` with `{b}`: {reason}." for (a, b), reason in sync.REFUSED.items()]
    print("", *lines, "", sep="\n")


def code_of(name: str, function: str) -> str:
    """A function of a script without its docstring and comments."""
    tree = ast.parse(sync.functions(sync.paths()[name].read_text())[function])
    if ast.get_docstring(tree.body[0]):
        tree.body[0].body.pop(0)
    return ast.unparse(tree)


def print_map() -> None:
    """Print whose advantage and whose loss each script has, for docs/methods.md, in the order of its sections.

    An advantage or a loss is named after the first script that has it.
    """
    sections = re.findall(r"^### (\w+)$", (sync.ROOT / "docs" / "methods.md").read_text(), re.MULTILINE)
    advantages, losses = {}, {}
    print("\n| method | advantage of | loss of | what else it needs |\n|---|---|---|---|")
    for name in sections:
        advantage = advantages.setdefault(code_of(name, "compute_advantages"), name)
        loss = losses.setdefault(code_of(name, "policy_loss"), name)
        advantage = "none" if name == "gkd" else f"`{advantage}`"
        print(f"| [`{name}`](#{name}) | {advantage} | `{loss}` | {NEEDS.get(name, '')} |")
    print(f"\n{len(advantages) - 1} advantages, {len(losses)} losses.\n")  # gkd.py has none


def print_flags() -> None:
    """Print default flags and the share of clipped steps, for docs/methods.md."""
    from common import load, print_provenance

    norms = load("norms")
    clipped = {row["script"]: f"{100 * row['steps clipped']:.0f} %" for row in norms}
    print("\n| method | k | KL in, β | steps | norm clipped | other flags |")
    print("|" + "---|" * 6)
    for name in METHODS:
        block = sync.OWN.findall(sync.paths()[name].read_text())[1]
        fields = dataclasses.fields(importlib.import_module(name).Args)
        flags = {field.name: field.default for field in fields}
        place = "reward" if 'rollout["kl"]' in block else "loss" if 'batch["ref_logprobs"]' in block else ""
        kl = f"{place}, {flags['kl_coef']}" if place else "none"
        steps = "1, fixed"
        if "num_minibatches" in flags:
            steps = flags["num_minibatches"] * flags["update_epochs"]
        own = [x for x in flags if f"\n    {x}: float" in block or f"\n    {x}: int" in block]
        own = " ".join(f"`{x} {flags[x]}`" for x in own if x not in SHOWN_APART)
        cells = [flags["samples_per_prompt"], kl, steps, clipped.get(name, ""), own]
        print(f"| `{name}` | {' | '.join(map(str, cells))} |")
    print()
    print_provenance(norms)
