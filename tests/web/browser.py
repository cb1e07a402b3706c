"""Fixtures, which a test imports: a browser, and a function that opens a page of the site in it."""

import shutil
from pathlib import Path

import pytest

# make test collects the tests of the site, too, and has no playwright.
playwright = pytest.importorskip("playwright.sync_api", reason="make test-docs installs playwright")
playwright.expect.set_options(timeout=30_000)
ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "site"


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert path, "install Chromium, on Debian with apt-get install chromium"
    assert (SITE / "index.html").exists(), "build the site: make docs"
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser):
    """A function that opens a page. It may cause no error in the console and no request to a network."""
    wrong, pages = [], []

    def open_page(address, size=None):
        page = browser.new_page(viewport=size or {"width": 1440, "height": 900})
        pages.append(page)
        page.on("console", lambda said: said.type in ("error", "warning") and wrong.append(said.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda r: r.url.startswith(("file:", "data:", "blob:")) or wrong.append(r.url))
        page.goto(f"{SITE.as_uri()}/{address}")
        return page

    yield open_page
    for page in pages:
        page.close()
    assert wrong == []
