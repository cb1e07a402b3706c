"""The README's pictures of the page Compare, after make test-docs: python tests_docs/screenshots.py."""

from playwright.sync_api import sync_playwright
from test_site import FLAGS, ROOT, SITE, browser_path

with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=browser_path(), args=FLAGS)
    for name, width, height in (("compare", 1320, 640), ("compare_phone", 390, 760)):
        page = browser.new_page(viewport={"width": width, "height": height})
        page.goto(f"{SITE.as_uri()}/compare.html#grpo..rloo")
        for _ in range(4):  # to the estimator's flags
            page.keyboard.press("n")
        page.wait_for_timeout(500)
        page.screenshot(path=ROOT / "docs" / f"{name}.png")
    browser.close()
