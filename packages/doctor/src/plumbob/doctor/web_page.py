"""An examination as one self-contained HTML page, without scripts and without external fonts or images."""

from __future__ import annotations

import html
from collections.abc import Iterator

from plumbob.doctor.examine import Examination
from plumbob.doctor.findings import STAGES
from plumbob.doctor.page import AREAS, area, conclusion, open_checks

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; overflow-wrap: anywhere; }}
.answer {{ border-left: 4px solid; padding-left: 1rem; }}
.pass {{ color: #2da44e; }} .fail {{ color: #cf222e; }} .unsure {{ color: #9a6700; }} .error {{ color: #8250df; }}
.answer > * {{ color: CanvasText; }}
</style>
<h1>{title}</h1>
{body}
</html>
"""


def render(x: Examination, title: str) -> str:
    """The page: the answer, each area with every check, what was not examined."""
    return PAGE.format(title=html.escape(title), body="\n".join(_body(x)))


def _body(x: Examination) -> Iterator[str]:
    yield f'<div class="answer {({0: "pass", 1: "fail", 2: "error"})[x.code]}">'
    for label, text in conclusion(x):
        yield f"<p>{f'<strong>{html.escape(label)}</strong> ' if label.isalpha() else ''}{html.escape(text)}</p>"
    yield "</div>"
    yield from (f"<p>{html.escape(note)}</p>" for note in x.notes)
    for stage in STAGES:
        if found := x.of_stage(stage):
            verdict, said = area(found)
            yield f'<h2 class="{verdict}">{AREAS[stage]}: {html.escape(said)}</h2>\n<ul>'
            for one in found:
                told = [
                    one.check,
                    one.evidence,
                    one.cause,
                    one.place,
                    f"step {one.step}" if one.step is not None else "",
                ]
                said = " | ".join(html.escape(text) for text in told if text)
                yield f'<li><strong class="{one.verdict}">{one.verdict}</strong> {said}</li>'
            yield "</ul>"
    yield "<h2>Not examined, or not for certain</h2>\n<ul>"
    yield from (f"<li>{html.escape(limit)}</li>" for limit in dict.fromkeys([*open_checks(x, True), *x.limits]))
    yield "</ul>"
