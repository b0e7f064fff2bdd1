"""A parser for the HTML pages that tests check."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """What a page contains.

    `text`: the visible text; `tags`: names of its elements; `attributes`: (name, value) of all their attributes;
    `cells`: texts of the cells of each table row; `open`: elements that were never closed.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.cells: list[list[str]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        self.tags.add(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.text += data
        if "td" in self.open or "th" in self.open:
            self.cells[-1][-1] += data
