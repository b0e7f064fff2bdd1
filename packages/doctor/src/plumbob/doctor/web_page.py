"""An examination as one self-contained HTML page, without scripts and without external fonts or images."""

from __future__ import annotations

import html
from collections.abc import Iterator
from urllib.parse import quote

from plumbob.doctor.causes import CAUSES, is_symptom
from plumbob.doctor.examine import Examination
from plumbob.doctor.findings import STAGES, Finding
from plumbob.doctor.page import AREAS, area, open_checks

STYLE = """
:root { color-scheme: light dark; --line: #8884; --pass: #1a7f37; --fail: #cf222e; --unsure: #9a6700; --error: #8250df; }
@media (prefers-color-scheme: dark) { :root { --pass: #3fb950; --fail: #f85149; --unsure: #d29922; --error: #a371f7; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; }
h2 { font-size: 1.1rem; }
.answer { font-size: 1.1rem; border-left: 4px solid; padding: .25rem 0 .25rem 1rem; margin: 1.5rem 0; }
.answer p { margin: .25rem 0; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .5rem .75rem .5rem 0; border-bottom: 1px solid var(--line); }
.pass { color: var(--pass); } .fail { color: var(--fail); } .unsure { color: var(--unsure); }
.error { color: var(--error); }
.pass, .fail, .unsure, .error { font-weight: 600; white-space: nowrap; }
.answer.pass, .answer.fail, .answer.unsure, .answer.error { white-space: normal; font-weight: inherit; }
.answer > * { color: CanvasText; }
.evidence { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.cause { margin: .25rem 0 0; }
small { color: GrayText; }
code { font-size: .95em; }
"""


def render(x: Examination, title: str, report: str) -> str:
    """The page: the answer, each area, every check. `report`: path of the run's report, from the page's folder."""
    body = "\n".join(
        [
            f"<h1>{_text(title)}</h1>",
            _answer(x),
            *(f"<p>{_text(note)}</p>" for note in x.notes),
            "<table>",
            "<thead><tr><th>Verdict</th><th>Check</th><th>Evidence</th></tr></thead>",
            *_areas(x, report),
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


def _answer(x: Examination) -> str:
    if not x.causes:
        broken = any(f.verdict == "error" for _, f in x.found)
        said = "No check failed, but some could not be completed." if broken else "No check failed."
        return f'<div class="answer {"error" if broken else "pass"}"><p>{said}</p></div>'
    first = x.causes[0]
    what = "No cause found, but a symptom: " if is_symptom(first) else ""
    rest = f"<p>It may explain: {_text(', '.join(x.causes[1:]))}</p>" if x.causes[1:] else ""
    return f'<div class="answer fail"><p>{what}<strong>{_text(first)}</strong></p>{_reason(x, first)}{rest}</div>'


def _reason(x: Examination, name: str) -> str:
    cause = CAUSES[name]
    note = f"<p><small>Reported in {_text(cause.source)}</small></p>" if cause.source else ""
    likely = f"<p>One of: {_text(', '.join(cause.includes))}</p>" if cause.includes else ""
    advice = _text(cause.advice(x.env, x.model))
    return f"<p>{_text(cause.sentence)}</p>{likely}<p><strong>What to do:</strong> {advice}</p>{note}"


def _areas(x: Examination, report: str) -> Iterator[str]:
    for stage in STAGES:
        if found := x.of_stage(stage):
            verdict, said = area(found)
            yield (
                f'<tbody><tr><th class="{verdict}">{verdict}</th><th>{AREAS[stage]}</th><th>{_text(said)}</th></tr>'
                + "".join(_row(x, finding, report) for finding in found)
                + "</tbody>"
            )


def _row(x: Examination, finding: Finding, report: str) -> str:
    step = f" <small>step {finding.step}</small>" if finding.step is not None else ""
    expected = "expected: " if finding.verdict == "fail" else ""
    why = (
        f'<div class="cause"><strong>{_text(finding.cause)}</strong>{_reason(x, finding.cause)}</div>'
        if finding.cause
        else ""
    )
    return (
        f'<tr><td class="{finding.verdict}">{finding.verdict}</td><td>{expected}{_text(finding.check)}{step}</td>'
        f'<td><span class="evidence">{_text(finding.evidence)}</span>{_shown(finding, report)}{why}</td></tr>'
    )


def _shown(finding: Finding, report: str) -> str:
    """The user's functions, links to rollouts in the run's report, and the command that shows it again."""
    links = [
        f'<a href="{_text(quote(report))}#{_text(place.fragment)}">step {place.step}, {_text(place.task)}</a>'
        for place in finding.places
    ]
    parts = [f"Where: <code>{_text(str(code))}</code>" for code in finding.code]
    parts += [f"Look at {', '.join(links)}"] if links else []
    parts += [f"Shown again by <code>{_text(finding.command)}</code>"] if finding.command else []
    return "".join(f"<div>{part}</div>" for part in parts)


def _text(text: str) -> str:
    return html.escape(text)
