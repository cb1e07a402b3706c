"""Build the site from README.md, docs/, the scripts and web/: make docs, then open site/index.html.

Each Markdown page, and each file of the repository that a page links to, becomes a page of the site.
"""

import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from latex2mathml.converter import convert
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

ROOT = Path(__file__).resolve().parent.parent
WEB, WORK, SITE = ROOT / "web", ROOT / ".site", ROOT / "site"
sys.path.append(str(ROOT / "tools"))
import sync  # noqa: E402

GUIDE = "bugs metrics exact methods variants stages recipes results scaling".split()  # then the others
PAGES = {"Compare": "compare", "Train it": "train"}  # of web/
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")  # the file in [text](file#anchor)
HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", re.MULTILINE)  # of git diff
TEX = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def hunks(a: Path, b: Path) -> list[list[int]]:
    """What `make diff` shows, as [first, end) of the lines of a and of b, counted from 0."""
    command = ["git", "diff", "--no-index", "--no-ext-diff", "--no-color", "--unified=0", "--", a, b]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    found = []
    for groups in HUNK.findall(output):
        a_first, a_count, b_first, b_count = (int(x or 1) for x in groups)
        # "-5,0" stands behind line 5, "-5,2" begins with it.
        a_start, b_start = a_first - (a_count > 0), b_first - (b_count > 0)
        found.append([a_start, a_start + a_count, b_start, b_start + b_count])
    return found


def page_of(path: Path) -> Path:
    """The page that a file of the repository becomes, before zensical makes HTML of it."""
    if path.suffix == ".html":
        return WORK / "pages" / f"{path.stem}.md"
    name = path.relative_to(ROOT).as_posix().removeprefix("docs/").replace("README.md", "index.md")
    return WORK / "pages" / (name if path.suffix in (".md", ".png") else f"{name}.md")


def write_pages(scripts: dict[str, Path]) -> None:
    """README.md, docs/, the scripts and what they link to."""
    todo = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *scripts.values()]
    for path in todo:  # link appends to it

        def link(match: re.Match, path: Path = path) -> str:
            file = (path.parent / match[0]).resolve()
            file = file / "README.md" if file.is_dir() else file
            if not file.is_file() or not file.is_relative_to(ROOT):
                return match[0]
            if file not in todo and file.suffix != ".html":
                todo.append(file)
            return os.path.relpath(page_of(file), page_of(path).parent)

        target = page_of(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".png":
            shutil.copy(path, target)
        elif path.suffix == ".md":
            target.write_text(LINK.sub(link, path.read_text()))
        else:
            language = "python" if path.suffix == ".py" else "text"  # colours make data nine times as large
            head = f"---\nhide: [toc]\nsearch: {{exclude: true}}\n---\n# {path.relative_to(ROOT)}\n\n"
            target.write_text(f"{head}~~~~~{language}\n{path.read_text()}~~~~~\n")


def write_settings() -> None:
    """web/zensical.yml with the navigation."""
    pages = sorted({path.stem for path in ROOT.glob("docs/*.md")} - {"learn", *GUIDE})
    guide = [f"{name}.md" for name in [*GUIDE, *pages] if (ROOT / "docs" / f"{name}.md").exists()]
    nav = [{title: f"{name}.md"} for title, name in [("Home", "index"), ("Learn", "learn"), *PAGES.items()]]
    nav.append({"Guide": [*guide, "CONTRIBUTING.md"]})
    (WORK / "zensical.yml").write_text(f"{(WEB / 'zensical.yml').read_text()}nav: {json.dumps(nav)}\n")


def mathml(match: re.Match) -> str:
    tag, tex = match[1], html.unescape(match[2])
    result = convert(tex, display="block" if tag == "div" else "inline")
    if "\\" in result:
        raise ValueError(f"latex2mathml does not know a command of {tex}")
    return f'<{tag} class="math">{result}</{tag}>'


def write_data(scripts: dict[str, Path]) -> None:
    """What Compare shows, as a script: a page that is opened from disk may not fetch.

    The scripts have most lines in common, so each line stands there once, in colours, and a script has its numbers.
    A letter says what a line is: code of the method, other code, a flag, text, or nothing. `head` is the number of
    lines up to the end of the docstring.
    """
    numbers, data, methods = {}, {}, (ROOT / "docs" / "methods.md").read_text()
    for name, path in scripts.items():
        source = path.read_text()
        lines = highlight(source, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)).splitlines()
        title = re.search(r'^"""(.*)$', source, re.MULTILINE)[1]
        own = [numbers.setdefault(line, len(numbers)) for line in lines]
        kinds = sync.kinds(source)
        letters = ["m" if kind == ("method", "code") else kind[1][0] for kind in kinds]
        letters = "".join(x if line.strip() else " " for x, line in zip(letters, source.splitlines()))
        head = len(kinds) - [part for part, _ in reversed(kinds)].index("docstring")
        data[name] = {"path": path.relative_to(ROOT).as_posix(), "title": html.escape(title), "lines": own}
        data[name] |= {"kinds": letters, "head": head}
    families = sorted(sync.policy_scripts(), key=lambda name: methods.find(f"\n### {name}\n"))
    differences = {f"{a}..{b}": hunks(scripts[a], scripts[b]) for a in scripts for b in scripts if a != b}
    values = {"LINES": list(numbers), "SCRIPTS": data, "HUNKS": differences, "METHODS": families}
    constants = (f"const {key} = {json.dumps(value)};\n" for key, value in values.items())
    (WORK / "pages" / "data.js").write_text("".join(constants))


def main() -> None:
    shutil.rmtree(WORK, ignore_errors=True)
    readme = (ROOT / "README.md").read_text()
    scripts = dict(sorted(sync.paths().items(), key=lambda item: readme.find(f"| [`{item[0]}.py`]")))
    write_pages(scripts)
    for title, name in PAGES.items():
        body = (WEB / f"{name}.html").read_text().rpartition("<body>\n")[2]
        head = f"---\ntitle: {title}\nhide: [navigation, toc, footer]\n---\n"
        (WORK / "pages" / f"{name}.md").write_text(head + body)
    for path in [WEB / "site.css", *WEB.glob("*.js")]:
        shutil.copy(path, WORK / "pages")
    write_data(scripts)
    write_settings()
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", WORK / "zensical.yml"]
    subprocess.run(command, check=True)
    for path in (WORK / "html").rglob("*.html"):
        path.write_text(TEX.sub(mathml, path.read_text()))
    for path in (WORK / "html").glob("search.js*"):  # it shows no formulas
        path.write_text(re.sub(r'\\\\[(\[][^"]*?\\\\[)\]]', "", path.read_text()))
    (WORK / "html" / "404.html").unlink()  # its links are a server's
    shutil.rmtree(SITE, ignore_errors=True)
    shutil.move(WORK / "html", SITE)
    print(f"open {SITE / 'index.html'}")


if __name__ == "__main__":
    main()
