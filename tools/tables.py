"""The tables and the diff that cog writes into README.md, docs/ and patches/: make tables."""

import difflib
import re

from sync import CORE, REFUSED, ROOT, STAGES, features, features_of, fits, functions, paths, policy_scripts


def print_scripts(folder: str) -> None:
    """Print a table of the scripts in a folder: what their docstrings begin with. README.md shows it."""
    print("\n| script | what it does |\n|---|---|")
    own = [*policy_scripts(), *features().values()]  # not those that `make variant` has made
    names = [name for name, path in paths().items() if path.parent.name == folder and name in own]
    for name in names or [*STAGES, *CORE]:
        path = paths()[name]
        [title] = re.findall(r'^"""(.*)\.$', path.read_text(), re.MULTILINE)
        page = f"{'stages' if name in STAGES else 'methods'}.md#{name}"
        if folder == "variants":
            page = f"variants.md#{features_of(name)[0]}"
        print(f"| [`{name}.py`]({path.relative_to(ROOT)}) | {title} ([more](docs/{page})) |")
    print()


def print_diff(a: str, b: str, function: str) -> None:
    """Print how the code of a function differs between two scripts, as Markdown. README.md begins with it."""
    texts = (functions(paths()[name].read_text())[function] for name in (a, b))
    old, new = (re.sub(r'\n *""".*?"""', "", text, flags=re.DOTALL).splitlines() for text in texts)
    lines = difflib.unified_diff(old, new, f"{a}.py", f"{b}.py", "", "", n=99, lineterm="")
    lines = [line.rstrip() for line in lines if line[:2] not in ("@@", " @")]
    print("\n```diff", *lines, "```\n", sep="\n")


def print_patches() -> None:
    """Print the table of patches/README.md: what stands before the diffs, and the scripts that they fit."""
    print("\n| patch | what it does | source | shipped by | for |\n|---|---|---|---|---|")
    for path in sorted((ROOT / "patches").glob("*.patch")):
        what, source, shipped = path.read_text().partition("\n--- ")[0].splitlines()
        scripts = fits(path.read_text())
        names = " ".join(f"`{name}`" for name in scripts)
        names = "all policy scripts" if scripts == policy_scripts() else names
        print(f"| [`{path.stem}`]({path.name}) | {what} | {source} | {shipped} | {names} |")
    print()


def print_refused() -> None:
    """Print the scripts and features that do not go together, in docs/variants.md."""
    print("\n" + "\n".join(f"- `{a}` with `{b}`: {reason}." for (a, b), reason in REFUSED.items()) + "\n")
