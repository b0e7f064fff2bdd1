"""What a user reads: one line for each area, then what failed, then what was not examined. No line is wider than asked for.

`render` makes a self-contained HTML page of the same text, without scripts, fonts or images.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from plumbob.console import counted
from plumbob.console.text import wrap
from plumbob.doctor.causes import CAUSES, is_symptom
from plumbob.doctor.examine import Examination
from plumbob.doctor.findings import AREAS, STAGES, Finding

MARKS = {"pass": "ok", "fail": "FAIL", "error": "ERROR", "unsure": "-"}
BEFORE = {"pass": "", "fail": "not so: ", "error": "not completed: ", "unsure": "not examined: "}
"""What stands before the statement of a check, by its verdict."""
MOST_WIDTH = 100
"""Widest text, however wide a terminal is."""
LABEL, ITEM = 10, "-"
"""Columns for the labels of what failed, and the label of one of several."""


def lines(x: Examination, *, everything: bool = False, width: int = 80) -> Iterator[str]:
    """The text, line by line. `everything`: each check on a line of its own, too."""
    width = min(width, MOST_WIDTH)
    most = max(len(name) for name in AREAS.values())
    for stage in STAGES:
        if found := x.of_stage(stage):
            mark, said = area(found)
            yield from _wrapped(f"{MARKS[mark]:<5}  {AREAS[stage]:<{most}}  ", said, width)
            for finding in found if everything else ():
                evidence = f" ({finding.evidence})" if finding.evidence else ""
                said = f"{BEFORE[finding.verdict]}{finding.check}{evidence}"
                yield from _wrapped(f"  {MARKS[finding.verdict]:<5}  ", said, width)
    for label, text in conclusion(x):
        if not label:
            yield ""
        yield from _wrapped("" if not label else "  - " if label == ITEM else f"  {label:<{LABEL}}", text, width)
    if x.notes:
        yield ""
    for note in x.notes:
        yield from _wrapped("", note, width)
    if limits := list(dict.fromkeys([*open_checks(x, everything), *x.limits])):
        yield ""
        yield "Not examined, or not for certain:"
        for limit in limits:
            yield from _wrapped("  - ", limit, width)


def area(found: Sequence[Finding]) -> tuple[str, str]:
    """(verdict of an area, what is said of it)."""
    count = {verdict: [f for f in found if f.verdict == verdict] for verdict in MARKS}
    failed, known = count["fail"], len(found) - len(count["unsure"])
    if failed:
        causes = ", ".join(dict.fromkeys(str(f.cause) for f in failed))
        return "fail", f"{len(failed)} of {counted(known, 'check')} failed: {causes}"
    if count["error"]:
        return "error", f"{len(count['error'])} of {counted(known, 'check')} could not be completed"
    if not known:
        return "unsure", f"not examined: {found[0].evidence}"
    return "pass", f"{counted(known, 'check')} passed"


def conclusion(x: Examination) -> Iterator[tuple[str, str]]:
    """(label, text) of the answer and of what follows from it. Without a label: a heading; with `ITEM`: one of several."""
    ranked = [finding for _, finding in x.ranked()]
    if not ranked:
        broken = [f for _, f in x.found if f.verdict == "error"]
        known = counted(sum(f.verdict in ("pass", "error") for _, f in x.found), "check")
        said = f", but {len(broken)} of {known} could not be completed" if broken else f": {known} passed"
        yield "", f"No cause found{said}."
        yield from ((ITEM, f"{finding.check}: {finding.evidence}") for finding in broken)
        return
    first = ranked[0]
    cause = CAUSES[first.cause or ""]
    yield "", f"No cause found, but a symptom: {cause.id}" if cause.symptom else f"Cause: {cause.id}"
    yield " ", cause.sentence
    yield "expected", first.check
    yield "found", f"{first.evidence}{_step(first)}"
    if cause.includes and not cause.symptom:
        yield "one of", ", ".join(cause.includes)
    if first.place:
        yield "where", first.place
    yield "to do", x.advice(cause)
    if first.command:
        yield "again by", first.command
    if cause.source:
        yield "reported", cause.source
    title = "Further failures, which may be consequences of this cause:"
    for symptom in (False, True):
        if findings := [f for f in ranked[1:] if is_symptom(f.cause or "") is symptom]:
            yield "", title
        for finding in findings:
            where = f"; where: {finding.place}" if finding.place else ""
            yield ITEM, f"{finding.cause}: expected: {finding.check}; found: {finding.evidence}{_step(finding)}{where}"
        title = "Further symptoms:" if cause.symptom else "Symptoms, which it may explain:"


def _step(finding: Finding) -> str:
    return f" (step {finding.step})" if finding.step is not None else ""


def open_checks(x: Examination, everything: bool) -> Iterator[str]:
    """Areas of which nothing is known, and single checks of other areas that are open, by their reason."""
    waiting = [finding for source, finding in x.found if source == "trends" and finding.verdict == "unsure"]
    if waiting and not everything:
        yield f"{counted(len(waiting), 'check')} of the course of the run: it has too few steps for them, or not their metrics"
    for stage in STAGES:
        found = [f for f in x.of_stage(stage) if everything or not (f in waiting and len(waiting) > 1)]
        if not x.of_stage(stage):
            yield f"{AREAS[stage]}: nothing of it was examined"
        reasons: dict[str, list[str]] = {}
        for finding in found if any(f.verdict != "unsure" for f in found) else ():
            if finding.verdict == "unsure":
                reasons.setdefault(finding.evidence, []).append(finding.check)
        for why, checks in reasons.items():
            yield f"{AREAS[stage]}: {'; '.join(checks)}{f' ({why})' if why else ''}"


def _wrapped(start: str, text: str, width: int) -> list[str]:
    """The text in lines of `width` columns at most, but for words that are longer. Lines after the first are indented."""
    return wrap(" ".join(text.split()), max(width, len(start) + 20), start, " " * len(start))


PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; max-width: 60rem; margin: 2rem auto; }}
</style>
<h1>{title}</h1>
<pre>
{text}
</pre>
</html>
"""


def render(x: Examination, title: str) -> str:
    """The page: each area with every check, the answer, and what was not examined."""
    text = "\n".join(lines(x, everything=True, width=MOST_WIDTH))
    return PAGE.format(title=html.escape(title), text=html.escape(text))
