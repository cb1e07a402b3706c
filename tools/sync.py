"""What keeps the scripts alike: make sync, make diff, make variant and make patch.

    python tools/sync.py                            copy an edit of grpo.py's skeleton into the other scripts
    python tools/sync.py diff grpo rloo             show how two scripts differ
    python tools/sync.py variant rloo lora          write variants/rloo_lora.py, with the feature of grpo_lora.py
    python tools/sync.py variant sft lora           write runs/sft_lora.py; lora is the only feature for a stage
    python tools/sync.py patch rloo entropy_bonus   write runs/rloo_entropy_bonus.py, with a patch of patches/

The skeleton is everything except the docstring and the estimator block. Most policy scripts have exactly grpo.py's
skeleton. The scripts in INSERTS have a few more lines, and variants change some, so an edit is carried line by line. A
variant also gets its parent's estimator block, a stage (sft.py, reward_model.py, dpo.py) gets the functions that it
shares with grpo.py, and every script gets the versions of requirements.txt and of the group "variants" in
pyproject.toml. The patches get new line numbers and neighboring lines. If an edited line has no place in a script, or
if only that script has an edit, the script is named and not written, and the exit code is 1.
"""

import ast
import json
import os
import pydoc
import re
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import suppress
from difflib import SequenceMatcher
from functools import cache
from itertools import product
from pathlib import Path
from textwrap import fill

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (".", "methods", "variants")
CORE = ["reinforce", "reinforce_pp", "reinforce_pp_baseline", "rloo", "grpo", "ppo", "remax"]
STAGES = ["sft", "reward_model", "dpo"]
# A variant is its parent with a system feature. If `variant` made it, its marker also names its features.
VARIANT = re.compile(r"(?:#.*\n)*# variant of (\w+)\.py(?: with (.+))?$", re.MULTILINE)
# The number of lines of code that a script may have beyond grpo.py's skeleton
INSERTS = {"distill": 5, "gdpo": 6, "gkd": 15, "remax": 6, "dapo": 10, "sdpo": 12, "ppo": 25}
# Scripts, features and patches that cannot be combined, with the reason
REFUSED = {
    ("remax", "async"): "the trainers would wait for greedy responses, which they sample themselves",
    ("flash_reinforce", "correction"): "its ratio and its gate already compare the policy with the sampler",
    ("sdpo", "correction"): "its teacher and pi_old would be computed by different code",
    ("gkd", "correction"): "its loss contains no advantage that a weight could multiply",
    ("distill", "tools"): "the teacher does not know the tokens of the toy task with a calculator",
    ("gkd", "tools"): "the teacher does not know the tokens of the toy task with a calculator",
    ("process", "tools"): "a token of the tool would need a score",
    ("lora", "fsdp"): "both change what the checkpoint and `model/` contain",
    ("async", "fsdp"): "both change the same lines",
    ("async", "tools"): "both change the same lines",
    ("async", "vllm"): "every rank would start an engine, even a rank that only trains",
    ("vllm", "top_entropy_tokens"): "vLLM returns no entropy, so it is only estimated from the sampled token",
    ("vllm", "negative_tokens"): "vLLM returns no entropy, so it is only estimated from the sampled token",
    ("vllm", "float32_head"): "vLLM uses its own output layer",
    ("lora", "chunked_head"): "the reference of LoRA is a function, which has no layers",
    ("fsdp", "chunked_head"): "it would call layers before their weights are gathered",
    ("gkd", "chunked_head"): "its divergence needs the log-probs of all possible tokens",
    ("entropy_bonus", "chunked_head"): "the entropy needs the log-probs of all possible tokens",
    ("tools", "vllm"): "vLLM samples whole responses, and a tool is called in the middle of one",
}
# Features that change the estimator of their parent, and by how many lines
ESTIMATOR_LINES = {"process": 2}
DOCSTRING = r'^""".*?^"""$'
BLOCK = r"^    # --- estimator: begin.*?^# --- estimator: end[^\n]*$"
OWN = re.compile(f"{DOCSTRING}|{BLOCK}", re.MULTILINE | re.DOTALL)
HEADER = re.compile(r"\A# /// script\n.*?^# ///\n(?:# variant of .*?\n)?", re.MULTILINE | re.DOTALL)
HUNK = re.compile(r"^@@ .*\n((?:[ +-].*\n)+)", re.MULTILINE)  # of a patch
RATE = re.compile(r"((?:real model needs|--learning_rate)(?: about)? \de-)(\d)")  # of a real model
FUNCTION = re.compile(r"^(?:@\w[^\n]*\n)*(?:def|class) (\w+)\b.*?(?=\n\n\n)", re.MULTILINE | re.DOTALL)


def paths(root: Path = ROOT) -> dict[str, Path]:
    """The path of each script by its name, which is the same in all folders: `dapo` is methods/dapo.py."""
    found = [path for folder in FOLDERS for path in (root / folder).glob("*.py")]
    heads = {path: path.open("rb").read(20) for path in found}
    if marked := [str(path) for path, head in heads.items() if head.startswith(b"\xef\xbb\xbf# /// script")]:
        sys.exit(f"error: {marked[0]} begins with a byte order mark. Save it as UTF-8 without one.")
    found = [path for path, head in heads.items() if head.startswith(b"# /// script")]  # no my_reward.py
    names = Counter(path.stem for path in found)
    if twice := [str(path) for path in found if names[path.stem] > 1]:
        sys.exit(f"error: give each script another name: {', '.join(twice)}")
    return {path.stem: path for path in sorted(found, key=lambda path: path.stem)}


def policy_scripts(root: Path = ROOT) -> list[str]:
    """The names of the scripts that have their own estimator block."""
    found = {name for name, path in paths(root).items() if "\n    # --- estimator: begin" in path.read_text()}
    return sorted(found - {*variants(root)})


def variants(root: Path = ROOT) -> dict[str, str]:
    """The parent of each variant, by name."""
    found = {name: VARIANT.match(path.read_text()) for name, path in paths(root).items()}
    return {name: match[1] for name, match in found.items() if match}


def features(root: Path = ROOT) -> dict[str, str]:
    """The variant that defines each feature. A feature is the last word of its name, such as lora in grpo_lora."""
    markers = {name: VARIANT.match(path.read_text()) for name, path in paths(root).items()}
    return {name.rpartition("_")[2]: name for name, marker in markers.items() if marker and not marker[2]}


def features_of(name: str, root: Path = ROOT) -> list[str]:
    """The features that a script has."""
    marker = VARIANT.match(paths(root)[name].read_text())
    if marker and marker[2]:
        return marker[2].split(", ")
    return [feature for feature, variant in features(root).items() if variant == name]


def inserting(name: str) -> str:
    """The script of INSERTS whose lines a script contains: itself, or the advantage of a mix such as ppo_gspo."""
    return next((script for script in INSERTS if f"{name}_".startswith(f"{script}_")), "")


def skeleton(source: str) -> str:
    """The source with docstring and estimator block replaced by a line each."""
    bare, count = OWN.subn("# own", source)
    if count != 2:
        raise ValueError(f"a policy script has a docstring and an estimator block; found {count} of the two")
    return bare


@cache
def pairs(old: str, new: str) -> dict[int, int]:
    """The number of the same line in new, for lines of old.

    Equal lines may occur several times. So a run of equal lines counts only if it contains a line that occurs once in
    both texts, or once in both between such runs.
    """
    olds, news = old.splitlines(True), new.splitlines(True)
    blocks = SequenceMatcher(None, olds, news, autojunk=False).get_matching_blocks()
    known = {-1: -1, len(olds): len(news)}
    for _ in range(2):
        found = {}
        for i, j, size in blocks:
            first, last = max(k for k in known if k < i), min(k for k in known if k >= i)
            counts = Counter(olds[first + 1 : last]), Counter(news[known[first] + 1 : known[last]])
            if any(counts[0][line] == counts[1][line] == 1 for line in olds[i : i + size]):
                found |= {i + k: j + k for k in range(size)}
        known |= found
    return known


@cache
def edits(before: str, after: str) -> list[tuple[int, int, list[str]]]:
    """The changes as (first, end, new): `new` replaces the lines [first, end) of before, one by one if it can."""
    olds, news, found = before.splitlines(True), after.splitlines(True), []
    for _, first, end, start, stop in SequenceMatcher(None, olds, news, autojunk=False).get_opcodes():
        if end - first == stop - start:
            found += [(first + k, first + k + 1, [news[start + k]]) for k in range(end - first)]
        else:
            found.append((first, end, news[start:stop]))
    return [(first, end, new) for first, end, new in found if olds[first:end] != new]


def shown(before: str, edit: tuple[int, int, list[str]]) -> str:
    """An edit as a diff."""
    first, end, new = edit
    old = before.splitlines(True)[first:end]
    return "".join([*(f"    -{line}" for line in old), *(f"    +{line}" for line in new)])


def where(part: list[str], lines: list[str]) -> list[int]:
    """The places where lines contain this part."""
    return [k for k in range(len(lines)) if lines[k : k + len(part)] == part]


def carry(mine: str, before: str, after: str, then: str = "") -> tuple[str, list[str]]:
    """The text `mine` with the change from before to after, and the edits that have no place in it.

    git merge-file would refuse an edit next to a line that only `mine` has. An edit that `mine` already contains is
    left out. So is an edit without a place if `mine` differs there from `then`, because somebody made it by hand.
    """
    known, lines, lost = pairs(before, mine), mine.splitlines(True), []
    result, was = [[line] for line in [*lines, ""]], then.splitlines(True)

    def place(text: str, first: int, end: int) -> slice:
        """The lines of text that correspond to the lines [first, end) of before."""
        known = pairs(before, text)
        return slice(known[max(k for k in known if k < first)] + 1, known[min(k for k in known if k >= end)])

    for edit in edits(before, after):
        first, end, new = edit
        old, there = before.splitlines(True)[first:end], place(mine, first, end)
        here, inside = [known[k] for k in range(first, end) if k in known], lines[there]
        if new and not here and Counter(new) <= Counter(inside):  # perhaps with a line of its own among them
            continue
        # The lines may have moved to another function.
        is_moved = old and not here and len(where(old, before.splitlines(True))) == 1
        if is_moved and len(moved := where(old, lines)) == 1:
            here = [moved[0] + k for k in range(len(old))]
        if here and len(old) == len(here) == here[-1] + 1 - here[0]:
            for k in here:
                result[k] = new if k == here[0] else []
        elif is_moved and where(old, was) and where(new, lines):
            continue
        elif not new and len(here) == len(inside):  # some of the lines, or none
            for k in here:
                result[k] = []
        elif not old and {first - 1, first} & {*known}:
            slot = there.start if first - 1 in known else there.stop
            result[slot] = [*new, *result[slot]]
        elif not then or inside == was[place(then, first, end)]:
            lost.append(shown(before, edit))
    return "".join(line for part in result for line in part), lost


def pin(source: str, requirements: str) -> str:
    """The source with these versions in its inline metadata."""
    header, end, rest = source.partition("\n# ///\n")
    for name, version in re.findall(r"^(\w+)==(\S+)", requirements, re.MULTILINE):
        header = re.sub(f'"{name}==[^"]*"', f'"{name}=={version}"', header)
    return header + end + rest


def functions(source: str) -> dict[str, str]:
    """The text of each function and class at the top level, with its decorators."""
    return {match[1]: match[0] for match in FUNCTION.finditer(source)}


def git(root: Path, *words: str) -> str:
    """The output of git, which is empty if git fails."""
    try:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True).stdout
    except FileNotFoundError:
        sys.exit("error: make sync and make diff need git")


def last_agreement(root: Path, copies: list[str]) -> str:
    """The last commit in which most copies have grpo.py's skeleton."""
    found = {name: path.relative_to(root) for name, path in paths(root).items()}
    for commit in git(root, "rev-list", "--first-parent", "-200", "HEAD").split():
        texts = {name: git(root, "show", f"{commit}:./{found[name]}") for name in ["grpo", *copies]}
        bare = {name: skeleton(text) for name, text in texts.items() if text}
        counts = Counter(text for name, text in bare.items() if name != "grpo")
        if counts and counts.most_common(1)[0][0] == bare.get("grpo"):
            return commit
    sys.exit("error: make sync needs git, and a commit in which most scripts have grpo.py's skeleton")


def distance(a: str, b: str) -> int:
    """The number of lines that only one of them has."""
    lines = Counter(a.splitlines()), Counter(b.splitlines())
    return ((lines[0] - lines[1]) + (lines[1] - lines[0])).total()


def sync(root: Path = ROOT) -> int:
    """Carry an edit of grpo.py, or of requirements.txt, into the other scripts. Returns the exit code."""
    found, scripts, parents, known = paths(root), policy_scripts(root), variants(root), features(root)
    groups = (root / "pyproject.toml").read_text()
    requirements = (root / "requirements.txt").read_text()
    requirements += "".join(f"{x}\n" for x in tomllib.loads(groups)["dependency-groups"]["variants"])
    texts = {name: path.read_text() for name, path in found.items()}
    for name, text in texts.items():
        file = found[name].name
        if parents.get(name, name) not in found:
            sys.exit(f"error: {file}: there is no {parents[name]}.py, of which it is a variant.")
        try:
            ast.parse(text, file)
            if name not in STAGES:
                skeleton(text)
        except (SyntaxError, ValueError) as error:
            sys.exit(f"error: {file}: {error}. Nothing was written.")
    sources = {name: pin(text, requirements) for name, text in texts.items()}
    bare = {name: OWN.sub("# own", text) for name, text in sources.items()}
    blocks = {name: OWN.findall(sources[name])[1] for name in [*scripts, *parents]}
    commit = last_agreement(root, [name for name in scripts if name != "grpo" and not inserting(name)])
    # What the last `make sync` has written, perhaps without a commit: for each script its own skeleton, grpo.py's, its
    # estimator block, and its parent's block
    memory_path = root / git(root, "rev-parse", "--git-path", "sync.json").strip()
    memory = json.loads(memory_path.read_text()) if memory_path.exists() else {}

    def at_commit(name: str) -> str:
        return git(root, "show", f"{commit}:./{found[name].relative_to(root)}")

    after, agreed = bare["grpo"], OWN.sub("# own", at_commit("grpo"))
    lost, own = {name: [] for name in found}, {name: [] for name in found}
    for name in [known[feature] for feature in ESTIMATOR_LINES]:  # some lines differ from the parent's block
        before = memory[name][3] if name in memory else OWN.findall(at_commit(parents[name]))[1]
        blocks[name], lost[name] = carry(blocks[name], before, blocks[parents[name]])
    for name, source in sources.items():
        pairs_then = [(OWN.sub("# own", at_commit(name)), agreed), memory.get(name, ["", agreed])[:2]]
        pairs_then = [[pin(text, requirements) for text in pair] for pair in pairs_then]
        then, before = min(pairs_then, key=lambda pair: distance(pair[0], bare[name]))
        if name in STAGES:
            old, new = functions(before), functions(after)
            for function, text in functions(source).items():
                if text == old.get(function):
                    sources[name] = sources[name].replace(text, new.get(function, text))
            continue
        docstring, block = OWN.findall(source)
        text, missing = carry(bare[name], before, after, then)
        lost[name] += missing
        if name in scripts and not missing:
            own[name] = [shown(after, x) for x in edits(after, text) if not inserting(name) or x[0] < x[1]]
        if own[name] and inserting(name):  # it may keep the lines that it had before
            then = then or pin(OWN.sub("# own", at_commit(inserting(name))), requirements)  # for a new mix
            own[name] = [x for x in own[name] if x not in {shown(before, y) for y in edits(before, then)}]
        if name in parents:
            changed = [known[feature] for feature in features_of(name, root) if feature in ESTIMATOR_LINES]
            parent = changed[0] if changed else parents[name]
            history = ["log", "-1", "--format=%h", f"-S{block}", "--", str(found[parent])]
            is_old = block == memory.get(name, [""] * 4)[2] or git(root, *history)
            if name != parent and not is_old:
                own[name] = [shown(blocks[parent], x) for x in edits(blocks[parent], block)]
            block = blocks[parent]
        sources[name] = text.replace("# own", docstring, 1).replace("# own", block, 1)
    for name, path in found.items():
        file = path.relative_to(root)
        if lost[name]:
            remedy = "If it needs this edit, make it there by hand. If not, commit, and run make sync again"
            print(f"{file}: not written. These lines have no place in it. {remedy}:")
        elif own[name]:
            remedy = "Undo them, or make them in grpo.py (or, in a variant's estimator block, in its parent)"
            print(f"{file}: not written. Only this script has these lines. {remedy}.")
            print("If the method needs them, enter their number in INSERTS in tools/sync.py:")
        elif sources[name] != texts[name]:
            path.write_text(sources[name])
            print(f"{file}: updated")
        print(*lost[name], *own[name], sep="\n", end="")
        if not lost[name] and not own[name]:
            block = [*OWN.findall(sources[name]), ""][1]
            memory[name] = [OWN.sub("# own", sources[name]), after, block, blocks.get(parents.get(name), "")]
    memory_path.with_suffix(".tmp").write_text(json.dumps(memory))
    memory_path.with_suffix(".tmp").replace(memory_path)  # at once, because a part of it would be of no use
    before = "".join(texts.values())
    new_groups = groups
    for package, version in re.findall(r"^(\w+)==(\S+)", requirements, re.MULTILINE):
        # Only where a group has the version of the scripts, because it may have another one on purpose
        for old in set(re.findall(f'"{package}==([^"]*)"', before)):
            new_groups = new_groups.replace(f'"{package}=={old}"', f'"{package}=={version}"')
    if new_groups != groups:
        (root / "pyproject.toml").write_text(new_groups)
        print("pyproject.toml: updated")
    misfits = refresh_patches(root)
    return int(any([*lost.values(), *own.values(), misfits]))


def refresh_patches(root: Path) -> list[str]:
    """Give patches the line numbers and the neighboring lines of their script. Returns those that no longer fit."""
    lost = []
    for name, path in patches(root).items():
        diff = path.read_text()
        file = root / re.search(r"^--- a/(.+)$", diff, re.MULTILINE)[1]
        source, fresh, shift = file.read_text(), diff[: diff.index("\n@@ ") + 1], 0
        here = [f" {line}" for line in source.splitlines(True)]
        try:
            for hunk in HUNK.findall(diff):
                number, first, last, lines = find(source, hunk, f"{path.name} no longer fits {file.name}")
                end = number + sum(x[0] != "+" for x in lines)
                lines = [*here[number - first : number], *lines, *here[end : end + last]]
                old, new = (sum(x[0] != skip for x in lines) for skip in "+-")
                start = number - first + 1
                fresh += "".join([f"@@ -{start},{old} +{start + shift},{new} @@\n", *lines])
                shift += new - old
        except ValueError as error:
            print(f"{error}Change the patch by hand.")
            lost.append(name)
            continue
        if fresh != diff:
            path.write_text(fresh)
            print(f"{path.relative_to(root)}: updated")
    for path in sorted(root.glob("variants/*.patch")):  # a feature of a stage
        name, _, feature = path.stem.rpartition("_")
        try:
            combine(name, [feature], root)
        except ValueError as error:
            print(f"{error}Change variants/{path.name} by hand.")
            lost.append(path.stem)
    return lost


def packages(source: str) -> dict[str, str]:
    """The packages of a script's inline metadata, with their versions."""
    return dict(re.findall(r'"(\w+)([=<>][^"]*)"', HEADER.match(source)[0]))


def combine(name: str, chosen: list[str], root: Path = ROOT) -> str:
    """The source of a script with more features. If they cannot be combined, raise a ValueError."""
    sources = {name: path.read_text() for name, path in paths(root).items()}
    known, parents = features(root), variants(root)
    check_words(name, (*policy_scripts(root), *parents, *STAGES), chosen, known, "FEATURE")
    script, present, pins = parents.get(name, name), features_of(name, root), packages(sources[name])
    bare = {x: HEADER.sub("", skeleton(sources[x])) for x in (*policy_scripts(root), *parents)}
    text = HEADER.sub("", OWN.sub("# own", sources[name]))
    halves = [x for x in bare if f"{script}_".startswith(f"{x}_") or script.endswith(f"_{x}")]  # of a mix
    for feature in chosen:
        for other in (*halves, *present):
            reason = REFUSED.get((other, feature)) or REFUSED.get((feature, other))
            if reason or other == feature:
                raise ValueError(f"{other} with {feature}: {reason or f'{name}.py has this feature already'}")
        variant, parent = known[feature], parents[known[feature]]
        if feature in ESTIMATOR_LINES:
            raise ValueError(f"{feature} changes the estimator of {parent}.py: use SCRIPT={variant}")
        text, lost = carry(text, bare[parent], bare[variant])
        if name in STAGES:  # it replaces the lost lines
            path = root / "variants" / f"{name}_{feature}.patch"
            if not path.exists():
                raise ValueError(f"{name} with {feature}: only policy scripts can have this feature")
            text, lost = apply(text, path.read_text(), f"{path.name} does not fit {name}.py"), []
        # If both change a default, the script keeps its own.
        lost = [x for x in lost if not re.fullmatch(r" +-    \w+: .* = .*\n +\+    \w+: .* = .*\n", x)]
        if lost:
            raise ValueError("\n".join([f"{name} with {feature}: both change the same lines", *lost]))
        pins |= dict(packages(sources[variant]).items() - packages(sources[parent]).items())
        present = [*present, feature]
    if {"lora", "vllm"} <= {*present}:  # vLLM needs the weights with the adapter merged
        merged = "merged = copy.deepcopy(policy.base_model).merge_and_unload()\n    weights = dict(merged."
        text = text.replace("weights = dict(policy.", merged)
    dependencies = ", ".join(f'"{package}{version}"' for package, version in pins.items())
    dependencies = fill(f"# dependencies = [{dependencies}]", 110, subsequent_indent="#" + " " * 17)
    first_lines = sources[name].partition("# dependencies")[0]
    header = f"{first_lines}{dependencies}\n# ///\n# variant of {script}.py with {', '.join(present)}\n"
    docstring, *block = OWN.findall(sources[name])
    docstring = started_as(docstring, name, Path(folder_of(name), f"{'_'.join([name, *chosen])}.py"))
    if name in STAGES:  # If only the adapter is trained, a real model needs ten times the learning rate.
        docstring, text = (RATE.sub(lambda x: f"{x[1]}{int(x[2]) - 1}", part) for part in (docstring, text))
        docstring = docstring.replace(" LoRA,", "", 1)
    return header + text.replace("# own", docstring, 1).replace("# own", "".join(block), 1)


def check_words(
    name: str, scripts: Iterable[str], chosen: list[str], known: Iterable[str], what: str
) -> None:
    """If a script or a word of `chosen` is unknown, or a word is there twice, raise a ValueError that names it."""
    for word, words, flag in ((name, scripts, "SCRIPT"), *((x, known, what) for x in chosen)):
        if word not in words:
            is_private = flag == "SCRIPT" and (ROOT / "runs" / f"{word}.py").exists()
            remedy = f"Use one of {', '.join(words)}"
            if is_private:
                remedy = "A script in runs/ is a private copy. Make the mix with TO=methods"
            raise ValueError(f"{flag}={word}: there is no {flag.lower()} of this name. {remedy}")
    if len({*chosen}) < len(chosen):
        raise ValueError(f"{what}={','.join(chosen)}: give each name once")


def folder_of(name: str) -> str:
    """Where `variant` writes a script with a feature. `sync` updates only those in variants/."""
    return "runs" if name in STAGES else "variants"


def started_as(text: str, name: str, path: Path) -> str:
    """The text with the path of the new script in its launch lines."""
    return re.sub(rf"(python|node \d+) \S*\b{name}\.py", rf"\1 {path}", text)


def patches(root: Path = ROOT) -> dict[str, Path]:
    """The path of each patch by its name."""
    return {path.stem: path for path in sorted(root.glob("patches/*.patch"))}


def find(source: str, hunk: str, name: str) -> tuple[int, int, int, list[str]]:
    """The number of the line where a hunk belongs, the neighbors cut off before and after it, and its other lines.

    These occur once, with as many neighbors as fit. If there is no such place, raise a ValueError.
    """
    before, after = re.match(r"((?: .*\n)*)", hunk)[0], re.search(r"((?:(?<=\n) .*\n)*)\Z", hunk)[0]
    for first, last in sorted(product(range(before.count("\n") + 1), range(after.count("\n") + 1)), key=sum):
        lines = hunk.splitlines(True)[first : hunk.count("\n") - last]
        old = "".join(x[1:] for x in lines if x[0] != "+")
        if old and f"\n{source}".count(f"\n{old}") == 1:  # whole lines
            return f"\n{source}".partition(f"\n{old}")[0].count("\n"), first, last, lines
    raise ValueError(f"{name}: the script has no single place for this hunk\n{hunk}")


def apply(source: str, diff: str, name: str = "") -> str:
    """The source with a patch."""
    for hunk in HUNK.findall(diff):
        *_, lines = find(source, hunk, name)
        old, new = ("".join(x[1:] for x in lines if x[0] != skip) for skip in "+-")
        source = f"\n{source}".replace(f"\n{old}", f"\n{new}")[1:]
    return source


def patched(name: str, chosen: list[str], root: Path = ROOT) -> str:
    """The source of a script with patches. If they do not fit, raise a ValueError."""
    known = patches(root)
    check_words(name, paths(root), chosen, known, "PATCH")
    for pair in product([name, *features_of(name, root), *chosen], chosen):
        if pair in REFUSED:
            raise ValueError(f"{pair[0]} with {pair[1]}: {REFUSED[pair]}")
    text = paths(root)[name].read_text()
    for x in chosen:
        text = apply(text, known[x].read_text(), f"{x}.patch does not fit {name}.py")
    return text


def fits(patch: str) -> list[str]:
    """The stages and policy scripts that a patch fits."""
    found = []
    for name in [*STAGES, *policy_scripts()]:
        with suppress(ValueError):
            patched(name, [patch])
            found.append(name)
    return found


def kinds(source: str, file: str = "") -> list[tuple[str, str]]:
    """For each line, its part of the script (docstring, method or rest) and its kind (code, flags or text)."""
    lines, tree = source.splitlines(), ast.parse(source, file)
    found = [["rest", "text" if line.strip()[:1] in ("", "#") else "code"] for line in lines]
    for node in ast.walk(tree):
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_args = isinstance(node, ast.ClassDef) and node.name == "Args"
        for part in [node] if is_docstring else node.body if is_args else []:
            for i in range(part.lineno - 1, part.end_lineno):
                found[i][1] = "text" if is_docstring else "flags"
    for pattern, name in ((DOCSTRING, "docstring"), (BLOCK, "method")):
        if match := re.search(pattern, source, re.MULTILINE | re.DOTALL):
            first, last = (source.count("\n", 0, x) for x in match.span())
            for i in range(first, last + 1):
                found[i][0] = name
    return [(part, kind) for part, kind in found]


def summary(counts: Counter) -> str:
    """Numbers of lines, in words."""
    text = ", ".join(f"{counts[kind]} of {kind}" for kind in ("code", "flags", "text") if counts[kind])
    return text.replace(" of", " line of" if text[:2] == "1 " else " lines of", 1) or "the same"


def diff(a: str = "", b: str = "", root: Path = ROOT) -> int:
    """Show how two scripts differ, the method first and the docstring last. Returns the exit code."""
    found = {path.stem: path for path in (root / "runs").glob("*.py")}  # by make mix
    found |= paths(root)
    for letter, name in {"A": a, "B": b}.items():
        if name not in found:
            remedy = f"Use one of {', '.join(found)}"
            print(f"error: {letter}={name}: there is no script of this name. {remedy}", file=sys.stderr)
            return 2
    files = [str(found[name].relative_to(root)) for name in (a, b)]
    text = git(root, "diff", "--no-index", "--no-ext-diff", "--no-color", *files)
    try:
        of_line = [kinds(found[name].read_text(), file) for name, file in zip((a, b), files)]
    except SyntaxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    hunks, counts = defaultdict(str), defaultdict(Counter)
    for match in re.finditer(r"^@@ -(\d+)\S* \+(\d+).*\n((?:[ +\\-].*\n)+)", text, re.MULTILINE):
        here, number = set(), [int(match[1]) - 1, int(match[2]) - 1]
        for line in match[3].splitlines():
            if line[0] in "+-":
                side = "-+".index(line[0])
                part, kind = of_line[side][number[side]]
                here.add(part)
                counts[part][kind] += bool(line[1:].strip())
            number = [number[0] + (line[0] in " -"), number[1] + (line[0] in " +")]
        hunks[min(here, key=["method", "docstring", "rest"].index)] += match[0]
    output = f"--- {files[0]}\n+++ {files[1]}\n"
    titles = {"method": "The method", "rest": "The rest of the script", "docstring": "The docstring"}
    for part, title in titles.items():
        output += f"\n{title}: {summary(counts[part])}\n{hunks[part]}"
    if sys.stdout.isatty():
        for pattern, color in {r"^-.*": 31, r"^\+.*": 32, r"^@@.*": 36, r"^The .*": 1}.items():
            output = re.sub(pattern, rf"\033[{color}m\g<0>\033[m", output, flags=re.MULTILINE)
        os.environ.setdefault("LESS", "FRX")  # as git does
    pydoc.pager(output)
    return 0


def write(make, name: str, chosen: str, folder: str, root: Path) -> int:
    """Write the result of `make` into a new file, or print why there is none. Returns the exit code."""
    words = [word.strip() for word in chosen.split(",")]
    path = Path(folder, f"{'_'.join([name, *words])}.py")
    try:
        if (root / path).exists():
            raise ValueError(f"{path} exists. If you want to replace it, delete it first")
        text = make(name, words, root)
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(started_as(text, name, path))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{path}: start it from the top folder, python {path}")
    return 0


def variant(name: str, chosen: str, root: Path = ROOT) -> int:
    """Write a script with more features, such as lora,vllm, into variants/ or runs/. Returns the exit code."""
    return write(combine, name, chosen, folder_of(name), root)


def patch(name: str, chosen: str, folder: str = "runs", root: Path = ROOT) -> int:
    """Write a script with patches, such as dual_clip,entropy_bonus, into a folder. Returns the exit code."""
    return write(patched, name, chosen, folder, root)


COMMANDS = {"sync": (sync, 0, 0), "diff": (diff, 0, 2), "variant": (variant, 2, 2), "patch": (patch, 2, 3)}

if __name__ == "__main__":
    command, *words = sys.argv[1:] or ["sync"]
    function, least, most = COMMANDS.get(command, (None, 0, -1))
    if not least <= len(words) <= most:
        print(__doc__)
        sys.exit(0 if command in ("-h", "--help") else 2)
    sys.exit(function(*words))
