"""Sections of a Markdown file between markers. Everything outside of them stays as it is, byte for byte.

<!-- lab:results -->
written by lab
<!-- /lab:results -->
"""

from __future__ import annotations

import re
from pathlib import Path

from plumbob.console import UserError
from plumbob.console.files import write_whole


def read(path: Path) -> str:
    """The text of a file, with its own line ends; bytes that are no UTF-8 survive until `write`. Raises UserError."""
    try:
        return path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def write(path: Path, text: str) -> None:
    """Replace a file as a whole, so that an interruption leaves the old or the new one; unchanged text is not written."""
    content = text.encode("utf-8", "surrogateescape")
    try:
        if path.is_file() and path.read_bytes() == content:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def markers(name: str) -> tuple[str, str]:
    return f"<!-- lab:{name} -->", f"<!-- /lab:{name} -->"


def section(text: str, name: str) -> str | None:
    """What stands between the markers of a section; None without it. Raises UserError if its end is missing."""
    found = _find(text, name)
    return None if found is None else text[found[0] : found[1]].strip()


def with_section(text: str, name: str, content: str) -> str:
    """The text with this content between the markers of a section, which is added at the end if it is not there."""
    found = _find(text, name)
    if found is None:
        start, end = markers(name)
        return f"{text}\n{start}\n{content.strip()}\n{end}\n"
    return f"{text[: found[0]]}\n{content.strip()}\n{text[found[1] :]}"


def _find(text: str, name: str) -> tuple[int, int] | None:
    """Where the content of a section begins and ends."""
    start, end = markers(name)
    at = text.find(start)
    if at < 0:
        return None
    stop = text.find(end, at)
    if stop < 0:
        raise UserError(f"the section {start} has no end; put {end} after it")
    return at + len(start), stop


_FRONT = re.compile(r"\A---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)


def front_matter(text: str) -> str | None:
    """The YAML between the two lines `---` at the beginning of a file; None without them."""
    found = _FRONT.match(text)
    return None if found is None else found[1]


def with_field(text: str, name: str, value: str) -> str:
    """The text with this value of a top-level field of the front matter; the line's comment and all else stays."""
    found = _FRONT.match(text)
    if found is None:
        return text
    line = re.compile(rf"""^({name}:[ \t]*)(["']?[\w-]*["']?)""", re.MULTILINE)
    front, changed = line.subn(lambda old: f"{old[1].rstrip()} {value}", found[1], count=1)
    if not changed:
        front = f"{found[1]}{name}: {value}\n"
    return text[: found.start(1)] + front + text[found.end(1) :]
