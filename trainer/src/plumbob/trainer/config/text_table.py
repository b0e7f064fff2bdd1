"""Tables of prose, as text: a row is `name | ... | sentence` in a line with two blanks in front, and may go on in lines with
six. Lines without blanks are headings."""

from __future__ import annotations

import re


def table_rows(text: str) -> list[list[str]]:
    """The cells of each row."""
    rows = re.findall(r"^  \S.*(?:\n {6}.*)*", text, re.MULTILINE)
    return [[cell.strip() for cell in " ".join(row.split()).split(" | ")] for row in rows]
