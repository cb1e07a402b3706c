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

ROOT = Path(__file__).resolve().parent.parent
WEB = ROOT / "web"
WORK, SITE = ROOT / ".site", ROOT / "site"
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")
MATH = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
HUNK = re.compile(r"^(\d+)(?:,(\d+))?([acd])(\d+)(?:,(\d+))?$", re.MULTILINE)  # of diff: 3,4c5
EQUATIONS = re.compile(r'<h2 id="equations">.*?</h2>(.*?)(?=<h2|</article>)', re.DOTALL)
PLAYGROUND = re.compile(r"In the Playground \(`make docs`\), preset\s+`(\w+)`")
COG = re.compile(r"^<!-- \[\[\[.*?-->\n+", re.DOTALL | re.MULTILINE)  # the code that fills a table
GUIDE = "toy real hacking estimators questions metrics recipes scaling speed reliability".split()


def script_names() -> list[str]:
    """In the order of the README's table, which has every script (tests/test_docs.py)."""
    return re.findall(r"^\| \[`(\w+)\.py`\]", (ROOT / "README.md").read_text(), re.MULTILINE)


def hunks(a: str, b: str) -> list[list[int]]:
    """What `diff a.py b.py` reports, as [first, end) of the lines of a and of b, counted from 0."""
    command = ["diff", f"{a}.py", f"{b}.py"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    found = []
    for a0, a1, kind, b0, b1 in HUNK.findall(output):
        a0, a1, b0, b1 = int(a0), int(a1 or a0), int(b0), int(b1 or b0)
        found.append([a0 - (kind != "a"), a1, b0 - (kind != "d"), b1])
    return found


def page_of(path: Path) -> str:
    """The page of the site that a file of the repository becomes, under its name as Markdown."""
    name = path.relative_to(ROOT).as_posix().removeprefix("docs/").replace("README.md", "index.md")
    return name if path.suffix in (".md", ".png") else f"{name}.md"


def home_page() -> str:
    """web/index.md, with a diff and sections of README.md. Links are relative to the root, as in README.md."""
    readme = COG.sub("", (ROOT / "README.md").read_text())
    diff = re.search(r"^```diff.*?^```$", readme, re.DOTALL | re.MULTILINE)[0]
    demo = (ROOT / "experiments" / "results" / "demo.txt").read_text()
    sections = readme[readme.index("## The scripts") :]
    text = (WEB / "index.md").read_text()
    return text.replace("{diff}", diff).replace("{demo}", demo).replace("{sections}", sections)


def write_pages() -> None:
    """The home page, docs/ and what they link to, with links that lead from page to page."""
    todo = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("*.py"))]
    for path in todo:  # grows while it is read
        target = WORK / "pages" / page_of(path)
        target.parent.mkdir(parents=True, exist_ok=True)

        def relink(match: re.Match, path=path, target=target) -> str:
            file = (path.parent / match[0]).resolve()
            if file in (ROOT / "docs" / "compare.html", ROOT / "docs" / "playground.html"):
                return os.path.relpath(WORK / "pages" / f"{file.stem}.md", target.parent)
            if not file.is_file() or not file.is_relative_to(ROOT):
                return match[0]
            if file not in todo:
                todo.append(file)
            return os.path.relpath(WORK / "pages" / page_of(file), target.parent)

        if path.suffix == ".png":
            shutil.copy(path, target)
        elif path.suffix == ".md":
            text = home_page() if path == ROOT / "README.md" else path.read_text()
            if PLAYGROUND.search(text):  # with the script, and the one that its page compares it with
                other = re.search(rf"make diff A=(\w+) B={path.stem}`", text)[1]
                address = rf"../playground.html#preset=\1&pin={path.stem},{other}"
                text = PLAYGROUND.sub(rf"In the [Playground]({address}), preset `\1`", text)
            target.write_text(LINK.sub(relink, COG.sub("", text)))
        else:
            name, language = path.relative_to(ROOT), path.suffix[1:] or "text"
            head = "---\nhide: [toc]\nsearch: {exclude: true}\n---\n"
            target.write_text(f"{head}# {name}\n\n~~~~~{language}\n{path.read_text()}~~~~~\n")


def write_compare(names: list[str], differences: dict[str, list]) -> None:
    """The page of web/compare.html, and the matrix of all pairs on it and on the home page."""
    counts = {}
    for pair, found in differences.items():
        counts[pair] = sum(a1 - a0 + b1 - b0 for a0, a1, b0, b1 in found)
    most = max(counts.values())

    def cell(a: str, b: str) -> str:
        if a == b:
            return "<td></td>"
        count = counts[f"{a}..{b}"]
        share = round(100 * (count / most) ** 0.5)
        return f'<td style="--share:{share}%"><a href="compare.html#{a}..{b}">{count}</a></td>'

    head = "".join(f'<th scope="col"><span>{name}</span></th>' for name in names)
    rows = "".join(f'<tr><th scope="row">{a}</th>{"".join(cell(a, b) for b in names)}</tr>' for a in names)
    options = "".join(f"<option>{name}</option>" for name in names)
    matrix = f'<table class="matrix"><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table>'
    text = (WEB / "compare.html").read_text().replace("{options}", options)
    (WORK / "pages" / "compare.md").write_text(text.replace("{matrix}", matrix))
    home = WORK / "pages" / "index.md"
    home.write_text(home.read_text().replace("{matrix}", f'<div id="matrix" tabindex="0">{matrix}</div>'))


def write_settings(names: list[str]) -> None:
    nav = [
        {"Home": "index.md"},
        {"Compare": "compare.md"},
        {"Playground": "playground.md"},
        {"Scripts": [{name: f"scripts/{name}.md"} for name in names]},
        {"Guide": [*(f"{name}.md" for name in GUIDE), "toy/index.md", "CONTRIBUTING.md"]},
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
        source = (ROOT / f"{name}.py").read_text()
        title = re.search(r'^"""(.*)$', source, re.MULTILINE)[1]
        page = f"scripts/{name}.html"
        equations = EQUATIONS.search((WORK / "html" / page).read_text())[1]
        scripts[name] = {"source": source, "title": title, "link": page, "equations": equations}
    data = f"const SCRIPTS = {json.dumps(scripts)};\nconst HUNKS = {json.dumps(differences)};\n"
    (WORK / "html" / "assets" / "data.js").write_text(data)


def main() -> None:
    shutil.rmtree(WORK, ignore_errors=True)
    names = script_names()
    differences = {f"{a}..{b}": hunks(a, b) for a in names for b in names}
    write_pages()
    write_compare(names, differences)
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
