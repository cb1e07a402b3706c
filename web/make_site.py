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
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parent.parent
WEB, WORK, SITE = ROOT / "web", ROOT / ".site", ROOT / "site"
sys.path.append(str(ROOT / "tools"))
import sync  # noqa: E402

PAGES = {"Train it": "train", "Compare": "compare"}  # of web/
GROUPS = {  # of the navigation. Other pages of docs/ come last
    "Understand": ["bugs", "methods", "exact"],
    "Use": "recipes metrics variants patches/index stages names conformance/index CONTRIBUTING".split(),
    "Evidence": ["results", "experiments/index"],
}
BUTTONS = """[Learn](learn.md){ .md-button } [Train it in your browser](train.md){ .md-button }
[Compare two scripts](compare.md){ .md-button }"""  # of the first page
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")  # the file in [text](file#anchor)
HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", re.MULTILINE)  # of git diff


def hunks(a: Path, b: Path) -> list[list[int]]:
    """The hunks of `make diff`, as [first, end) of the lines of a and of b, counted from 0."""
    command = ["git", "diff", "--no-index", "--no-ext-diff", "--no-color", "--unified=0", "--", a, b]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    found = []
    for groups in HUNK.findall(output):
        a_first, a_count, b_first, b_count = (int(x or 1) for x in groups)
        # "-5,0" is after line 5, and "-5,2" begins with line 5.
        a_start, b_start = a_first - (a_count > 0), b_first - (b_count > 0)
        found.append([a_start, a_start + a_count, b_start, b_start + b_count])
    return found


def page_of(path: Path) -> Path:
    """The path of the page for a file of the repository, before zensical converts it to HTML."""
    if path.suffix == ".html":
        return WORK / "pages" / f"{path.stem}.md"
    name = path.relative_to(ROOT).as_posix().removeprefix("docs/").replace("README.md", "index.md")
    return WORK / "pages" / (name if path.suffix in (".md", ".png") else f"{name}.md")


def links_of(name: str, scripts: dict[str, Path]) -> str:
    """A line of links from the page of a script: its section, the page Compare, and its neighbors in README.md."""
    rows = re.findall(r"^\| \[`(\w+)`\].* (\w+) \|$", (ROOT / "docs" / "learn.md").read_text(), re.MULTILINE)
    head, _, feature = name.rpartition("_")
    if name in dict(rows):
        page, anchor, other = "methods", name, dict(rows)[name]
    elif scripts[name].parent.name == "variants":
        page, anchor, other = "variants", feature, head
    else:
        page, anchor, other = "stages", name, "grpo"
    top = os.path.relpath(ROOT, scripts[name].parent)
    links = [f"[{page.title()}]({top}/{page}.md#{anchor})"]
    links.append(f"[Compare with {other}]({top}/compare.md#{other}..{name})")
    at, names = [*scripts].index(name), [*scripts]
    near = {"Previous": names[at - 1 : at], "Next": names[at + 1 : at + 2]}
    for word, found in near.items():
        links += [f"{word}: [{x}]({top}/{scripts[x].relative_to(ROOT)}.md)" for x in found]
    return " · ".join(links)


def write_pages(scripts: dict[str, Path]) -> None:
    """Write pages for README.md, docs/, the scripts, and the files that they link to."""
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
            text = re.sub("π_(old|ref|θ)", r"π<sub>\1</sub>", path.read_text())
            target.write_text(LINK.sub(link, text))
        else:
            # Colors and numbers would make data larger.
            language = '{ .python linenums="1" }' if path.suffix == ".py" else "text"
            links = links_of(path.stem, scripts) if path in scripts.values() else ""
            head = f"---\nhide: [toc]\nsearch: {{exclude: true}}\n---\n# {path.relative_to(ROOT)}\n\n"
            target.write_text(f"{head}{links}\n\n~~~~~ {language}\n{path.read_text()}~~~~~\n")


def write_settings() -> None:
    """Write web/zensical.yml with the navigation."""
    nav = [{title: f"{name}.md"} for title, name in [("Home", "index"), ("Learn", "learn"), *PAGES.items()]]
    others = {path.stem for path in ROOT.glob("docs/*.md")}.difference(["learn"], *GROUPS.values())
    for title, names in GROUPS.items():
        nav.append({title: [f"{name}.md" for name in names]})
    nav[-1]["Evidence"] += [f"{name}.md" for name in sorted(others)]
    (WORK / "zensical.yml").write_text(f"{(WEB / 'zensical.yml').read_text()}nav: {json.dumps(nav)}\n")


def mathml(match: re.Match) -> str:
    tag, tex = match[1], html.unescape(match[2])
    tex = re.sub(r"_\{(?!ij)([a-z]{2,})\}", r"_{\\mathrm{\1}}", tex)  # seq is a word, and ij are two indices
    tex = tex.replace("KL", r"\mathrm{KL}")
    result = convert(tex, display="block" if tag == "div" else "inline")
    if "\\" in result:
        raise ValueError(f"latex2mathml does not know a command of {tex}")
    return f'<{tag} class="math">{result}</{tag}>'


def finish(folder: Path) -> None:
    """Edit the pages of zensical where no setting can. A new version of zensical may need other patterns.

    Formulas become MathML, because scripts that draw TeX would need a network. Names may wrap after an underscore.
    site.css must know which code is a drawing, which must not wrap, which cells of tables contain sentences, which must
    be wide on a phone, and which contain numbers, which must not wrap. Search results show no formulas, and the links
    of 404.html would need a server.
    """
    tex = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
    drawing = re.compile(r"<pre(?=><span></span><code>[^\n]*[─█])")
    sentences = re.compile(r"<td(?=>.{50,}</td>$)", re.MULTILINE)
    numbers = re.compile(r"<td(?=>[-+\u2212]?\d[^<]{0,24}</td>$)", re.MULTILINE)  # 0.788 ± 0.004
    name = re.compile(r"<code>[^<\n]*</code>")
    for path in folder.rglob("*.html"):
        text = tex.sub(mathml, path.read_text())
        text = name.sub(lambda match: match[0].replace("_", "_<wbr>"), text)
        text = numbers.sub('<td class="number"', sentences.sub('<td class="text"', text))
        path.write_text(drawing.sub('<pre class="drawing"', text))
    for path in folder.glob("search.js*"):
        path.write_text(re.sub(r'\\\\[(\[][^"]*?\\\\[)\]]', "", path.read_text()))
    (folder / "404.html").unlink()


def write_data(scripts: dict[str, Path]) -> None:
    """Write the data of the page Compare as a script, because a page that is opened from disk may not fetch files.

    The scripts share most lines, so each line is written once, in colors, and a script lists the numbers of its lines.
    A letter says whether a line is code of the method, other code, a flag, text, or empty. `head` is the number of
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
    home = WORK / "pages" / "index.md"
    title, claim, rest = home.read_text().split("\n\n", 2)
    home.write_text("\n\n".join([title, claim, BUTTONS, rest]))
    headings = re.findall(r"^## ((\d+)\. .*)", (ROOT / "docs" / "learn.md").read_text(), re.MULTILINE)
    lessons = {number: slugify(case="lower")(heading, "-") for heading, number in headings}
    for title, name in PAGES.items():
        body = (WEB / f"{name}.html").read_text().rpartition("<body>\n")[2]
        body = re.sub(
            r"\.\./docs/learn\.md#?(\d*)", lambda match: f"learn.html#{lessons.get(match[1], '')}", body
        )
        head = f"---\ntitle: {title}\nhide: [navigation, toc, footer]\n---\n"
        (WORK / "pages" / f"{name}.md").write_text(head + body)
    for path in [WEB / "site.css", *WEB.glob("*.js")]:
        shutil.copy(path, WORK / "pages")
    write_data(scripts)
    write_settings()
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", WORK / "zensical.yml"]
    subprocess.run(command, check=True)
    finish(WORK / "html")
    shutil.rmtree(SITE, ignore_errors=True)
    shutil.move(WORK / "html", SITE)
    print(f"open {SITE / 'index.html'}")


if __name__ == "__main__":
    main()
