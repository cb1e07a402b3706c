"""Build the site from README.md, docs/, the scripts and web/: make docs, then open site/index.html.

Each Markdown page, and each file of the repository that a page links to, becomes a page of the site. The differences
between scripts are those of `diff`. TeX is rendered at build time, so a page needs only a style sheet for it.
"""

import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import sync

ROOT = Path(__file__).resolve().parent.parent
WEB = ROOT / "web"
WORK, SITE = ROOT / ".site", ROOT / "site"

LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")  # the file in [text](file#anchor)
COG = re.compile(r"^<!-- \[\[\[.*?-->\n+", re.DOTALL | re.MULTILINE)  # the code that fills a table
PLAYGROUND = re.compile(r"In the Playground \(`make docs`\), preset\s+`(\w+)`")  # in the page of a script
HUNK = re.compile(r"^(\d+)(?:,(\d+))?([acd])(\d+)(?:,(\d+))?$", re.MULTILINE)  # of diff: 3,4c5
# In HTML: TeX that is to be rendered, and what stands under the heading Equations.
MATH = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
EQUATIONS = re.compile(r'<h2 id="equations">.*?</h2>(.*?)(?=<h2|</article>)', re.DOTALL)


def hunks(a: str, b: str) -> list[list[int]]:
    """What `diff a.py b.py` reports, as [first, end) of the lines of a and of b, counted from 0."""
    command = ["diff", sync.paths()[a], sync.paths()[b]]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    found = []
    for a_first, a_last, kind, b_first, b_last in HUNK.findall(output):
        a_end, b_end = int(a_last or a_first), int(b_last or b_first)
        # 5a6 adds behind line 5 of a, and has no line of a. 5d6 has no line of b.
        a_start = a_end if kind == "a" else int(a_first) - 1
        b_start = b_end if kind == "d" else int(b_first) - 1
        found.append([a_start, a_end, b_start, b_end])
    return found


def matrix_of(names: list[str], differences: dict[str, list]) -> str:
    """A table of all pairs of scripts with the number of lines that differ."""

    def cell(a: str, b: str) -> str:
        if a == b:
            return "<td></td>"
        found = differences[f"{a}..{b}"]
        count = sum(a_end - a_start + b_end - b_start for a_start, a_end, b_start, b_end in found)
        share = min(round(4 * count**0.5), 100)  # how strong the colour is
        return f'<td style="--share:{share}%"><a href="compare.html#{a}..{b}">{count}</a></td>'

    head = "".join(f'<th scope="col"><span>{name}</span></th>' for name in names)
    rows = "".join(f'<tr><th scope="row">{a}</th>{"".join(cell(a, b) for b in names)}</tr>' for a in names)
    return f'<table class="matrix"><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table>'


def home_page(matrix: str) -> str:
    """web/index.md, with a diff and sections of README.md. Links are relative to the root, as in README.md."""
    readme = COG.sub("", (ROOT / "README.md").read_text())
    diff = re.search(r"^```diff.*?^```$", readme, re.DOTALL | re.MULTILINE)[0]
    demo = (ROOT / "experiments" / "results" / "demo.txt").read_text()
    sections = readme[readme.index("## The scripts") :]
    text = (WEB / "index.md").read_text().replace("{matrix}", matrix)
    return text.replace("{diff}", diff).replace("{demo}", demo).replace("{sections}", sections)


def page_of(path: Path) -> Path:
    """The page that a file of the repository becomes, before zensical makes HTML of it."""
    name = path.relative_to(ROOT).as_posix().removeprefix("docs/").replace("README.md", "index.md")
    return WORK / "pages" / (name if path.suffix in (".md", ".png") else f"{name}.md")


def relink(text: str, path: Path, todo: list[Path]) -> str:
    """The links of a file lead from page to page. What they name gets a page, too."""

    def link(match: re.Match) -> str:
        file = (path.parent / match[0]).resolve()
        if not file.is_file() or not file.is_relative_to(ROOT):
            return match[0]
        if file not in todo:
            todo.append(file)
        return os.path.relpath(page_of(file), page_of(path).parent)

    return LINK.sub(link, text)


def write_pages(matrix: str) -> None:
    """The home page, docs/ and what they link to."""
    todo = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sync.paths().values()]
    for path in todo:  # relink appends to it
        target = page_of(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".png":
            shutil.copy(path, target)
        elif path.suffix == ".md":
            text = home_page(matrix) if path == ROOT / "README.md" else path.read_text()
            if path.parent == ROOT / "docs" / "scripts":
                pins = ",".join([path.stem, *re.findall(rf"make diff A=(\w+)\s+B={path.stem}`", text)])
                link = rf'<a href="../playground.html#preset=\1&pin={pins}">Playground</a>'
                text = PLAYGROUND.sub(rf"In the {link}, preset `\1`", text)
            target.write_text(relink(COG.sub("", text), path, todo))
        else:
            language = "python" if path.suffix == ".py" else "text"  # colours make data nine times as large
            code = f"~~~~~{language}\n{path.read_text()}~~~~~\n"
            head = "---\nhide: [toc]\nsearch: {exclude: true}\n---\n"
            target.write_text(f"{head}# {path.relative_to(ROOT)}\n\n{code}")


def write_settings(names: list[str]) -> None:
    pages = sorted({path.name for path in ROOT.glob("docs/*.md")} - {"learn.md"})
    guide = dict.fromkeys(["bugs.md", "exact.md", "toy.md", "estimators.md", *pages])  # in this order
    nav = [
        {"Home": "index.md"},
        {"Learn": "learn.md"},
        {"Compare": "compare.md"},
        {"Playground": "playground.md"},
        {"Scripts": [{name: f"scripts/{name}.md"} for name in names]},
        {"Guide": [*guide, "toy/index.md", "CONTRIBUTING.md"]},
    ]
    text = (WEB / "zensical.yml").read_text()
    (WORK / "zensical.yml").write_text(f"{text}nav: {json.dumps(nav)}\n")


def bundle() -> None:
    """web/compare.js, web/playground.js and web/site.css, with what they import, as classic script and style sheet."""
    esbuild = [WEB / "node_modules/.bin/esbuild", "--bundle", "--minify", "--log-level=warning"]
    assets = WORK / "pages" / "assets"
    fonts = ["--loader:.woff2=file", "--loader:.woff=empty", "--loader:.ttf=empty", "--asset-names=[name]"]
    for source in ("compare.js", "playground.js", "site.css"):
        subprocess.run([*esbuild, *fonts, source, f"--outdir={assets}"], cwd=WEB, check=True)
    shutil.copy(WEB / "node_modules/iframe-worker/shim/index.js", assets / "iframe-worker.js")


def render_math() -> None:
    """TeX to HTML in all pages, by one call of KaTeX; what the search shows goes without it."""
    for path in (WORK / "html").glob("search.js*"):
        path.write_text(re.sub(r'\\\\[(\[][^"]*?\\\\[)\]]', "", path.read_text()))
    pages = {path: path.read_text() for path in (WORK / "html").rglob("*.html")}
    formulas = []
    for text in pages.values():
        formulas += [[html.unescape(match[2]), match[1] == "div"] for match in MATH.finditer(text)]
    options = {"cwd": WEB, "input": json.dumps(formulas), "text": True}
    result = subprocess.run(["node", "math.mjs"], stdout=subprocess.PIPE, check=True, **options)
    rendered = iter(json.loads(result.stdout))
    for path, text in pages.items():
        path.write_text(MATH.sub(lambda match: next(rendered), text))


def write_data(names: list[str], differences: dict[str, list]) -> None:
    """What compare.html and playground.html show, as a script: a page that is opened from disk may not fetch."""
    scripts = {}
    for name in names:
        source = sync.paths()[name].read_text()
        title = re.search(r'^"""(.*)$', source, re.MULTILINE)[1]
        page = f"scripts/{name}.html"
        equations = EQUATIONS.search((WORK / "html" / page).read_text())[1]
        scripts[name] = {"source": source, "title": title, "link": page, "equations": equations}
    data = f"const SCRIPTS = {json.dumps(scripts)};\nconst HUNKS = {json.dumps(differences)};\n"
    (WORK / "html" / "assets" / "data.js").write_text(data)


def main() -> None:
    shutil.rmtree(WORK, ignore_errors=True)
    # In the order of the README's table, which has every script (tests/test_docs.py)
    names = re.findall(r"^\| \[`(\w+)\.py`\]", (ROOT / "README.md").read_text(), re.MULTILINE)
    differences = {f"{a}..{b}": hunks(a, b) for a in names for b in names}
    matrix = matrix_of(names, differences)
    write_pages(matrix)
    options = "".join(f"<option>{name}</option>" for name in names)
    text = (WEB / "compare.html").read_text().replace("{options}", options).replace("{matrix}", matrix)
    (WORK / "pages" / "compare.md").write_text(text)
    shutil.copy(WEB / "playground.html", WORK / "pages" / "playground.md")
    write_settings(names)
    bundle()
    zensical = Path(sys.executable).parent / "zensical"
    subprocess.run([zensical, "build", "--strict", "--config-file", WORK / "zensical.yml"], check=True)
    render_math()
    write_data(names, differences)
    (WORK / "html" / "404.html").unlink()  # its links are a server's
    shutil.rmtree(SITE, ignore_errors=True)
    shutil.move(WORK / "html", SITE)
    print(f"open {SITE / 'index.html'}")


if __name__ == "__main__":
    main()
