"""The report of `hub check`: one result for each check."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

from plumbob.console.text import table

Status = Literal["ok", "FAIL", "skip"]


@dataclass(frozen=True)
class Result:
    """The result of one check. Example: Result("load", "ok", "64 tasks in 0.2 s")."""

    check: str
    status: Status
    measured: str = ""
    """What the check has measured; for a skipped check, why it was skipped."""
    problems: tuple[str, ...] = ()
    """One sentence for each problem; empty unless the check failed."""


def judged(check: str, measured: str, problems: list[str]) -> Result:
    """Return the result of a check that ran: "FAIL" if there are problems, else "ok"."""
    return Result(check, "FAIL" if problems else "ok", measured, tuple(problems))


@dataclass(frozen=True)
class Report:
    """The results of all checks, in their order."""

    target: str
    results: tuple[Result, ...]

    @property
    def failed(self) -> list[Result]:
        return [r for r in self.results if r.status == "FAIL"]

    @property
    def failures(self) -> list[str]:
        """All problems, each with the name of its check.

        Example: ["dependencies: pyarrow>=15 has no upper bound, ..."].
        """
        return [f"{r.check}: {problem}" for r in self.failed for problem in r.problems]

    def text(self) -> str:
        """Return the report as text: a line for each check, further problems indented below it, and the counts."""
        width = max(len(r.check) for r in self.results)
        rows = []
        for r in self.results:
            first, *others = r.problems or (r.measured,)
            rows.append((f"{r.status:<4}  {r.check:<{width}}", first))
            rows += [(" " * (width + 6), problem) for problem in others]
        made = [r for r in self.results if r.status != "skip"]
        skipped = len(self.results) - len(made)
        verdict = (
            f"{len(self.failed)} of {len(made)} checks failed" if self.failed else f"all {len(made)} checks passed"
        )
        return "\n".join([table(rows), verdict + (f", {skipped} skipped" if skipped else "")])

    def as_json(self) -> str:
        return json.dumps(
            {"target": self.target, "failed": len(self.failed), "checks": [asdict(r) for r in self.results]}, indent=2
        )
