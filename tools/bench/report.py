"""Measure how long a report takes to open in headless Chromium, by its number of rollouts.

    uv run python tools/bench/report.py                       # 10,000 rollouts, five times
    uv run python tools/bench/report.py runs/NAME/report.html # a page of your own

Prints the time from asking for the page until its list of rollouts can be used. Needs Chromium and its driver (apt-get
install chromium chromium-driver).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from plumbob.testing.handmade_runs import make_run
from plumbob.trainer.report.write import read, write
from selenium import webdriver

TIMES = 5


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else Path(folder) / "report.html"
        if len(sys.argv) > 1 and not page.is_file():
            sys.exit(f"report.py: there is no file {page}")
        if len(sys.argv) == 1:
            write(read([make_run(Path(folder), "large", steps=100, groups=25)], checked=False), page)
        options = webdriver.ChromeOptions()
        for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
            options.add_argument(argument)
        browser = webdriver.Chrome(options=options)
        try:
            opened = []
            for _ in range(TIMES):
                browser.get("about:blank")
                start = time.perf_counter()
                browser.get(f"{page.as_uri()}#view=rollouts")
                while browser.execute_script("return document.documentElement.dataset.ready") != "yes":
                    time.sleep(0.01)
                opened.append(time.perf_counter() - start)
            shown = browser.execute_script("return document.querySelector('.count').textContent")
        finally:
            browser.quit()
        size = page.stat().st_size / 1e6
        print(
            f"{shown}, {size:.1f} MB: open after {statistics.median(opened):.2f} s (median of {TIMES}, largest "
            f"{max(opened):.2f} s)"
        )


if __name__ == "__main__":
    main()
