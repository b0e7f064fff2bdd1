"""The doctor's findings as one self-contained HTML page, without scripts and without external fonts or images."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import get_args
from urllib.parse import quote

from plumbob.trainer.diagnosis.causes import CAUSES, named
from plumbob.trainer.diagnosis.findings import Cause, Finding, Verdict
from plumbob.trainer.report.write import REPORT

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


def render(findings: Sequence[Finding], title: str, limits: Sequence[str] = (), report: str = REPORT) -> str:
    """The HTML page: first the answer (the first cause, or else the first symptom), then every check with its evidence.

    `limits`: what was not examined and how sure the rest is, one sentence each. `report`: path of the run's report,
    from the page's folder.
    """
    rows = "\n".join(_row(finding, report) for finding in findings)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_text(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{_text(title)}</h1>
{_answer(findings)}
<table>
<thead><tr><th>Verdict</th><th>Check</th><th>Evidence</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
<p><small>{_counts(findings)}</small></p>
{_limits(limits)}
</body>
</html>
"""


def _answer(findings: Sequence[Finding]) -> str:
    if causes := named(findings):
        cause = CAUSES.get(causes[0]) or Cause(causes[0], "", "")
        what = "No cause found, but a symptom: " if cause.symptom else ""
        return f'<div class="answer fail"><p>{what}<strong>{_text(cause.id)}</strong></p>{_reason(cause)}</div>'
    if any(f.verdict == "error" for f in findings):
        return '<div class="answer error"><p>No check failed, but some could not be completed: no answer.</p></div>'
    if any(f.verdict == "unsure" for f in findings):
        return '<div class="answer unsure"><p>No check failed, but some were inconclusive (unsure).</p></div>'
    return '<div class="answer pass"><p>Every check passed.</p></div>'


def _row(finding: Finding, report: str) -> str:
    step = f" <small>step {finding.step}</small>" if finding.step is not None else ""
    cause = CAUSES.get(finding.cause) if finding.cause else None
    why = f'<div class="cause"><strong>{_text(cause.id)}</strong>{_reason(cause)}</div>' if cause else ""
    return (
        f'<tr><td class="{finding.verdict}">{finding.verdict}</td><td>{_text(finding.check)}{step}</td>'
        f'<td><span class="evidence">{_text(finding.evidence)}</span>{_shown(finding, report)}{why}</td></tr>'
    )


def _shown(finding: Finding, report: str) -> str:
    """Links to the rollouts that show the finding, in the run's report, and the command that shows it again."""
    if finding.verdict == "pass":
        return ""
    page = _text(quote(report))
    links = [
        f'<a href="{page}#{_text(place.fragment)}">step {place.step}, {_text(place.task)}, rollout {place.rollout}</a>'
        for place in finding.places
    ]
    shown = f"<div>Look at {', '.join(links)}</div>" if links else ""
    return shown + (f"<div>Shown again by <code>{_text(finding.command)}</code></div>" if finding.command else "")


def _limits(limits: Sequence[str]) -> str:
    items = "\n".join(f"<li>{_text(limit)}</li>" for limit in limits)
    return f"<h2>What was not examined, and how sure the rest is</h2>\n<ul>\n{items}\n</ul>" if limits else ""


def _reason(cause: Cause) -> str:
    origin = "; ".join(part for part in (", ".join(cause.hypotheses), cause.source) if part)
    note = f"<p><small>{_text(origin)}</small></p>" if origin else ""
    likely = f"<p>One of: {_text(', '.join(cause.includes))}</p>" if cause.includes else ""
    return f"<p>{_text(cause.sentence)}</p>{likely}<p><strong>What to do:</strong> {_text(cause.fix)}</p>{note}"


def _counts(findings: Sequence[Finding]) -> str:
    counts = {verdict: sum(f.verdict == verdict for f in findings) for verdict in get_args(Verdict)}
    return f"{len(findings)} checks: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items())


def _text(text: str) -> str:
    return html.escape(text)
