"""make mix: a script with the advantage of one method and the loss of another.

    python tools/mix.py rloo reinforce_pp       write runs/rloo_reinforce_pp.py
    python tools/mix.py rloo dapo methods       write methods/rloo_dapo.py, which make variant and make patch take

The result is the first script with the function policy_loss of the second and the flags that this function reads. The
lines that a method inserts into the skeleton belong to its advantage.
"""

import re
import sys
from pathlib import Path

from sync import OWN, ROOT, functions, inserting, paths, policy_scripts, skeleton, write

STEPS = {"num_minibatches", "update_epochs"}  # from the loss: without a ratio, it allows only one step
NO_KL = "    kl_coef: ClassVar[float] = 0.0  # no KL, so no reference is loaded"
# The formulas of a docstring: for the advantage, for the loss, and after the loss, such as for the critic
FORMULAS = re.compile(r"\n\n((?:    .+\n)*    [AG]\w* .+\n)((?:    .+\n)*?    loss .+\n)((?:    .+\n)*)\n")
DOCSTRING = '''"""{title}'s advantage with {other}'s loss: a mix of two scripts.

`make mix ADVANTAGE={name} LOSS={loss}` wrote this file. {kl}
{formulas}
    python {name}.py
"""'''


def flags_of(block: str) -> dict[str, str]:
    """The lines of the flags in an estimator block, by name."""
    return {line.split(":")[0].strip(): line for line in block.partition("\n\n")[0].splitlines()[1:]}


def read_in(text: str, flags: dict[str, str]) -> set[str]:
    return {x for x in flags if re.search(rf"\bargs\.{x}\b", text)}


def describe(name: str, loss: str, sources: dict[str, str], kl: str) -> str:
    """The docstring of a mix. If FORMULAS finds the formulas of both scripts, it contains them."""
    titles = [re.search(r'^"""(.*?)(?::|\.?$)', sources[x], re.MULTILINE)[1] for x in (name, loss)]
    first, second = (FORMULAS.search(OWN.search(sources[x])[0]) for x in (name, loss))
    formulas = f"The advantage is from {name}.py, and the loss is from {loss}.py: see their docstrings.\n"
    if first and second:
        each = "in which A_i or A_t is the advantage of a token"
        if "A_t" in first[1] and "A_t" not in second[2]:
            each = "in which A_i becomes A_t, inside the sum or mean over t"
        formulas = (
            f"\nThe advantage, from {name}.py, whose docstring explains the symbols:\n\n{first[1]}{first[3]}"
            f"\nThe loss, from {loss}.py, {each}:\n\n{second[2]}"
        )
    return DOCSTRING.format(title=titles[0], other=titles[1], name=name, loss=loss, kl=kl, formulas=formulas)


def mixed(name: str, chosen: list[str], root: Path = ROOT) -> str:
    """The source of a script with the loss of another. If there can be none, raise a ValueError."""
    found = paths(root)
    sources = {x: found[x].read_text() for x in policy_scripts(root)}
    [loss, *others] = chosen
    if wrong := [x for x in (name, *chosen) if x not in sources]:
        flag, names = "ADVANTAGE" if wrong[0] == name else "LOSS", ", ".join(sources)
        raise ValueError(f"{flag}={wrong[0]}: there is no policy script of this name. Use one of {names}")
    if others or name == loss:
        raise ValueError(
            f"ADVANTAGE={name} LOSS={','.join(chosen)}: give one script for each, and not the same"
        )
    if skeleton(sources[loss]) != skeleton(sources[inserting(loss) or "grpo"]):
        remedy = "Mix the methods without it, and use make patch SCRIPT=... on the mix"
        raise ValueError(f"{loss}: it has a patch with lines outside its estimator block. {remedy}")
    source, block = sources[name], OWN.findall(sources[name])[1]
    mine, theirs = (functions(OWN.findall(sources[x])[1] + "\n\n\n") for x in (name, loss))
    for script, function in ((name, mine), (loss, theirs)):
        if "advantages" not in function["policy_loss"]:
            raise ValueError(f"{script}: its loss does not contain an advantage")
    for x in theirs.keys() - {"policy_loss"}:
        if re.search(rf"\b{x}\(", theirs["policy_loss"]):
            raise ValueError(f"{loss}: its loss calls {x}, and make mix copies policy_loss alone")

    block = block.replace(mine["policy_loss"], theirs["policy_loss"])
    rest = source.replace(OWN.search(source)[0], "").replace(mine["policy_loss"], "")

    # Remove the flags that only the old loss reads, and add the flags that the new loss reads.
    own, other = flags_of(block), flags_of(OWN.findall(sources[loss])[1])
    gone = (read_in(mine["policy_loss"], own) - read_in(rest, own)) | STEPS
    wanted = (read_in(theirs["policy_loss"], other) | STEPS) - {"kl_coef"}
    added = {x: line for x, line in other.items() if x in wanted}
    if twice := [x for x in added if x in own and x not in gone and added[x] != own[x]]:
        raise ValueError(f"{name} with {loss}: both have a flag {twice[0]}, and they differ")
    texts = "".join(text for x, text in mine.items() if x != "policy_loss"), theirs["policy_loss"]
    compares, is_compared = (re.search(r'"(kl|ref_logprobs)"', text) for text in texts)
    if compares and is_compared:
        remedy = "Use a loss without a KL, such as that of gdpo or reinforce_pp"
        raise ValueError(f"{name} with {loss}: both have a KL. {remedy}")
    if is_compared:
        own["kl_coef"] = other["kl_coef"]
    elif not compares and "ClassVar" not in own["kl_coef"]:
        own["kl_coef"] = NO_KL
    head = block.partition("\n\n")[0]
    flags = {x: line for x, line in own.items() if x not in gone} | added
    new_block = block.replace(head, "\n".join([head.partition("\n")[0], *flags.values()]))

    for x in re.findall(r'\bbatch\["(\w+)"\]', theirs["policy_loss"]):
        if f'"{x}"' not in rest:
            reason = f"the loss reads batch[{x!r}], which {name}.py does not compute"
            raise ValueError(f"{name} with {loss}: {reason}")
    kl = "There is no KL penalty."
    if "ClassVar" not in own["kl_coef"]:
        kl = f"The KL penalty is in the {'loss' if is_compared else 'reward'}."
    docstring, old_block = OWN.findall(source)
    return source.replace(docstring, describe(name, loss, sources, kl)).replace(old_block, new_block)


def mix(name: str, loss: str, folder: str = "runs", root: Path = ROOT) -> int:
    """Write a script with the loss of another into a folder. Returns the exit code."""
    return write(mixed, name, loss, folder, root)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        print(__doc__)
        sys.exit(0 if sys.argv[1:] in (["-h"], ["--help"]) else 2)
    sys.exit(mix(*sys.argv[1:]))
