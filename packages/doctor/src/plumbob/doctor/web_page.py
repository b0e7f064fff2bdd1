"""An examination as one self-contained HTML page: the text that a terminal shows, without scripts, fonts or images."""

from __future__ import annotations

import html

from plumbob.doctor.examine import Examination
from plumbob.doctor.page import MOST_WIDTH, lines

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
pre {{ font-size: 14px; white-space: pre-wrap; overflow-wrap: anywhere; }}
.ok {{ color: #2da44e; }} .FAIL {{ color: #cf222e; }} .ERROR {{ color: #8250df; }}
</style>
<h1>{title}</h1>
<pre>
{text}
</pre>
</html>
"""


def render(x: Examination, title: str) -> str:
    """The page: each area with every check, the answer, and what was not examined."""
    return PAGE.format(
        title=html.escape(title), text="\n".join(map(_coloured, lines(x, everything=True, width=MOST_WIDTH)))
    )


def _coloured(line: str) -> str:
    mark, text = (line.split() or [""])[0], html.escape(line)
    return f'<span class="{mark}">{text}</span>' if mark in ("ok", "FAIL", "ERROR") else text
