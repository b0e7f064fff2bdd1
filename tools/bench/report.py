"""Measure how soon a report can be used in headless Chromium, at the width of a desk's screen and of a phone.

    uv run python tools/bench/report.py                                   # a made-up run of 10,000 rollouts
    uv run python tools/bench/report.py runs/NAME/report.html ...         # pages of your own, and the made-up one
    uv run python tools/bench/report.py PAGE --screenshots FOLDER         # each view, light and dark, as pictures

Of each page and width it prints medians, counted from asking for the page: until something is painted, until the list
of rollouts can be used, and until the tokens of a rollout in the middle of the list are shown (counted from the click).
The pages take turns, so that a busy machine slows all of them. Exits with 1 if a page wrote an error to the console or
asked for anything but itself. Needs Chromium and its driver (apt-get install chromium chromium-driver).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from plumbob.testing.handmade_runs import make_run
from plumbob.trainer.report.write import read, write
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

WIDTHS = {"desk": (1280, 900), "phone": (390, 844)}
"""Width and height in CSS pixels."""
VIEWS = ("#view=curves", "#view=findings", "#view=rollouts", "#view=settings")
SECONDS = 60
"""Longest wait for a page."""
MARKS = """
window.marks = {};
const mark = (name, found) => { if (window.marks[name] === undefined && found) window.marks[name] = performance.now(); };
const look = () => {
  mark("list", document.documentElement.dataset.ready === "yes" && document.querySelector(".row"));
  if (window.marks.click !== undefined) mark("tokens", document.querySelector(".tokens .t"));
  requestAnimationFrame(look);
};
requestAnimationFrame(look);
"""
"""Runs in each page before its own scripts: looks in every frame for what a reader waits for."""
CLICK = """
const list = document.querySelector(".list"), done = arguments[0];
list.scrollTop = list.scrollHeight / 2;
requestAnimationFrame(() => requestAnimationFrame(() => {
  const rows = document.querySelectorAll(".row");
  window.marks.click = performance.now();
  rows[Math.floor(rows.length / 2)].click();
  done();
}));
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--screenshots", type=Path)
    options = parser.parse_args()
    for page in options.pages:
        if not page.is_file():
            sys.exit(f"report.py: there is no file {page}")
    with tempfile.TemporaryDirectory() as folder:
        made_up = Path(folder) / "made_up.html"
        write(read([make_run(Path(folder), "large", steps=100, groups=25)], checked=False), made_up)
        pages = [*(page.absolute() for page in options.pages), made_up]
        browser = _chromium()
        try:
            wrong = _measure(browser, pages, options.times)
            if options.screenshots:
                options.screenshots.mkdir(parents=True, exist_ok=True)
                for page in pages[:-1] or pages:
                    _screenshots(browser, page, options.screenshots)
        finally:
            browser.quit()
    if wrong:
        sys.exit("\n".join(wrong))


def _chromium() -> Any:
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.binary_location = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
    )
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # Named, because Selenium would ask the network for a driver otherwise.
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    browser.set_script_timeout(SECONDS)
    browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": MARKS})
    print(f"Chromium {browser.capabilities['browserVersion']}")
    return browser


def _measure(browser: Any, pages: list[Path], times: int) -> list[str]:
    """Print the times of all pages; returns what the pages did that they must not do."""
    seconds: dict[tuple[Path, str], list[dict[str, float]]] = defaultdict(list)
    counts: dict[Path, str] = {}
    wrong = []
    for _ in range(times):
        for width in WIDTHS:
            for page in pages:
                _resize(browser, width)
                _open(browser, page, "#view=rollouts")
                seconds[page, width].append(_until_tokens(browser))
                counts[page] = browser.execute_script("return document.querySelector('.count').textContent")
                wrong += [f"{page.name}: {what}" for what in _forbidden(browser, page)]
    print("| page | MB | rollouts | width | first paint s | list s | tokens after click s | slowest list s |")
    print("|---|---|---|---|---|---|---|---|")
    for (page, width), all_of in seconds.items():
        paint, list_, tokens = (statistics.median(one[name] for one in all_of) for name in ("paint", "list", "tokens"))
        slowest = max(one["list"] for one in all_of)
        print(
            f"| {page.name} | {page.stat().st_size / 1e6:.1f} | {counts[page]} | {width} {WIDTHS[width][0]} | {paint:.2f} | "
            f"{list_:.2f} | {tokens:.2f} | {slowest:.2f} |"
        )
    return wrong


def _resize(browser: Any, width: str) -> None:
    pixels, height = WIDTHS[width]
    size = {"width": pixels, "height": height, "deviceScaleFactor": 1, "mobile": width == "phone"}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def _open(browser: Any, page: Path, fragment: str) -> None:
    browser.get("about:blank")
    browser.get(page.as_uri() + fragment)
    _wait(browser, "document.documentElement.dataset.ready === 'yes'")


def _wait(browser: Any, condition: str) -> None:
    WebDriverWait(browser, SECONDS, poll_frequency=0.02).until(lambda _: browser.execute_script(f"return {condition}"))


def _until_tokens(browser: Any) -> dict[str, float]:
    """Seconds until the first paint, the list, and from the click until the tokens, of the page that is open."""
    _wait(browser, "window.marks.list !== undefined")
    browser.execute_async_script(CLICK)
    _wait(browser, "window.marks.tokens !== undefined")
    marks = browser.execute_script(
        "return { ...window.marks, paint: performance.getEntriesByName('first-contentful-paint')[0].startTime }"
    )
    return {
        "paint": marks["paint"] / 1e3,
        "list": marks["list"] / 1e3,
        "tokens": (marks["tokens"] - marks["click"]) / 1e3,
    }


def _forbidden(browser: Any, page: Path) -> list[str]:
    """Errors in the console, and requests for anything but the page itself, since the last call."""
    errors = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    allowed = (page.as_uri(), "about:", "data:", "blob:")
    return errors + [f"asked for {address}" for address in asked if not address.startswith(allowed)]


def _screenshots(browser: Any, page: Path, folder: Path) -> None:
    """A picture of each view, of the tokens of a rollout and of its group, at each width, light and dark."""
    for scheme in ("light", "dark"):
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        for width in WIDTHS:
            _resize(browser, width)
            for view in VIEWS:
                _open(browser, page, view)
                _picture(browser, folder / f"{page.stem}-{view.removeprefix('#view=')}-{width}-{scheme}.png")
            _open(browser, page, "#view=rollouts")
            _until_tokens(browser)
            _picture(browser, folder / f"{page.stem}-tokens-{width}-{scheme}.png")
            browser.execute_script("document.querySelector('.links a').click()")
            _wait(browser, "document.querySelector('.column') !== null")
            _picture(browser, folder / f"{page.stem}-group-{width}-{scheme}.png")


def _picture(browser: Any, path: Path) -> None:
    browser.save_screenshot(str(path))
    print(path)


if __name__ == "__main__":
    main()
