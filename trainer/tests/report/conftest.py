"""Headless Chromium, and pages for it to look at."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from plumbob.testing.handmade_runs import make_run
from plumbob.trainer.report.write import read, write


def _program(*names: str) -> str | None:
    return next((path for name in names if (path := shutil.which(name))), None)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A headless Chromium, which counts how often a page unpacks data."""
    program, driver = _program("chromium", "chromium-browser", "google-chrome"), _program("chromedriver")
    if program is None or driver is None:
        pytest.skip("there is no Chromium with its driver: apt-get install chromium chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1280,900",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(driver))
    browser.set_script_timeout(60)
    counter = (
        "window.unpacked = 0; const D = DecompressionStream;"
        "window.DecompressionStream = function (kind) { window.unpacked++; return new D(kind); };"
    )
    browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": counter})
    yield browser
    browser.quit()


class Page:
    """A page in the browser. `js` runs a function's body there and returns its value; `until` waits for one to be true."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser

    def open(self, address: Path | str, fragment: str = "") -> None:
        where = address if isinstance(address, str) else address.as_uri()
        self.browser.get("about:blank")
        self.browser.get(where + fragment)
        self.until("return document.documentElement.dataset.ready === 'yes'")

    def js(self, body: str, *args: Any) -> Any:
        return self.browser.execute_script(body, *args)

    def until(self, body: str, *args: Any) -> Any:
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.browser, 30, poll_frequency=0.02).until(lambda _: self.js(body, *args))

    def key(self, key: str) -> None:
        event = "new KeyboardEvent('keydown', { key: arguments[0], bubbles: true })"
        self.js(f"document.activeElement.dispatchEvent({event})", key)

    def go(self, fragment: str) -> None:
        self.js("location.hash = arguments[0]", fragment)

    def texts(self, selector: str) -> list[str]:
        return self.js("return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector)

    def width(self, pixels: int) -> None:
        self.browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": pixels, "height": 844, "deviceScaleFactor": 1, "mobile": pixels < 500},
        )

    def requests(self) -> list[str]:
        """Addresses that the browser asked for since the last call."""
        messages = [json.loads(entry["message"])["message"] for entry in self.browser.get_log("performance")]
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


@pytest.fixture
def page(chromium: Any) -> Iterator[Page]:
    """A page; at the end of a test it must have written nothing to the console, and asked nobody for anything."""
    chromium.get_log("browser"), chromium.get_log("performance")
    shown = Page(chromium)
    shown.width(1280)
    yield shown
    assert [entry for entry in chromium.get_log("browser") if entry["level"] == "SEVERE"] == []
    allowed = ("file:", "data:", "blob:", "about:", "http://127.0.0.1:")
    assert [address for address in shown.requests() if not address.startswith(allowed)] == []
    if screenshots := os.environ.get("PLUMBOB_SCREENSHOTS"):
        chromium.save_screenshot(str(Path(screenshots) / "last.png"))


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """`one` and `two`: run directories that differ in their seed; `page` of the first, `both` of the two."""
    folder = tmp_path_factory.mktemp("runs")
    one, two = make_run(folder, "one"), make_run(folder, "two", seed=1)
    finding = {
        "check": "the tools work",
        "verdict": "fail",
        "evidence": "4 of 8",
        "cause": "tools-fail",
        "step": 2,
        "command": "doctor lookup",
    }
    (one / "warnings.jsonl").write_text(json.dumps(finding) + "\n")
    (one / "start.json").write_text('{"imports": 6.0, "model": 1.5, "first step": 4.5}')
    write(read([one], checked=False), folder / "one.html")
    write(read([one, two], checked=False), folder / "both.html")
    return SimpleNamespace(one=one, two=two, page=folder / "one.html", both=folder / "both.html")
