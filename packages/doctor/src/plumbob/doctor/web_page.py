"""An examination as one self-contained HTML page, without scripts and without external fonts or images."""

from __future__ import annotations

import html
from collections.abc import Iterator

from plumbob.doctor.causes import CAUSES
from plumbob.doctor.examine import Examination
from plumbob.doctor.findings import STAGES, Finding
from plumbob.doctor.page import AREAS, area, conclusion, open_checks

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .5rem .75rem .5rem 0; border-bottom: 1px solid #8884; }
td:last-child { overflow-wrap: anywhere; }
.answer { border-left: 4px solid; padding-left: 1rem; }
.pass { color: #2da44e; } .fail { color: #cf222e; } .unsure { color: #9a6700; } .error { color: #8250df; }
.answer > * { color: CanvasText; }
"""


def render(x: Examination, title: str) -> str:
    """The page: the answer, each area, every check."""
    answer = "".join(
        f"<p>{f'<strong>{_text(label)}</strong> ' if label.isalpha() else ''}{_text(text)}</p>"
        for label, text in conclusion(x)
    )
    verdict = {0: "pass", 1: "fail", 2: "error"}[x.code]
    body = "\n".join(
        [
            f"<h1>{_text(title)}</h1>",
            f'<div class="answer {verdict}">{answer}</div>',
            *(f"<p>{_text(note)}</p>" for note in x.notes),
            "<table>",
            "<thead><tr><th>Verdict</th><th>Check</th><th>Evidence</th></tr></thead>",
            *_areas(x),
            "</table>",
            "<h2>Not examined, or not for certain</h2>",
            "<ul>",
            *(f"<li>{_text(limit)}</li>" for limit in dict.fromkeys([*open_checks(x, True), *x.limits])),
            "</ul>",
        ]
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_text(title)}</title>
<style>{STYLE}</style>
</head>
<body>
{body}
</body>
</html>
"""


def _areas(x: Examination) -> Iterator[str]:
    for stage in STAGES:
        if found := x.of_stage(stage):
            verdict, said = area(found)
            yield f'<tbody><tr><th class="{verdict}">{verdict}</th><th>{AREAS[stage]}</th><th>{_text(said)}</th></tr>'
            yield from (_row(x, finding) for finding in found)
            yield "</tbody>"


def _row(x: Examination, finding: Finding) -> str:
    step = f" <small>step {finding.step}</small>" if finding.step is not None else ""
    told = [f"Where: <code>{_text(finding.place)}</code>"] if finding.place else []
    if finding.cause:
        cause = CAUSES[finding.cause]
        told.append(f"<strong>{cause.id}</strong>: {_text(cause.sentence)} {_text(x.advice(cause))}")
    return (
        f'<tr><td class="{finding.verdict}">{finding.verdict}</td>'
        f"<td>{'expected: ' if finding.cause else ''}{_text(finding.check)}{step}</td>"
        f'<td><span class="evidence">{_text(finding.evidence)}</span>{"".join(f"<div>{one}</div>" for one in told)}</td></tr>'
    )


def _text(text: str) -> str:
    return html.escape(text)
