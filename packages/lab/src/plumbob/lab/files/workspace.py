"""A lab: the folder that `lab init` lays out, and the files in it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from plumbob.console import UserError
from plumbob.lab.files.hypothesis import Hypothesis, read_hypothesis
from plumbob.lab.run_files import RunFiles

LOG = "01-experiments-log.md"
RESULTS = "experimental-results"
DIR_VARIABLE = "PLUMBOB_LAB"
"""Environment variable with the folder of the lab, for commands without --dir."""


@dataclass(frozen=True)
class Entry:
    """A hypothesis, its file, and the verdict that its runs gave, if any."""

    hypothesis: Hypothesis
    path: Path
    verdict: dict[str, Any]
    """verdict.json of the experiment; empty before the first verdict."""

    @property
    def status(self) -> str:
        """What the evidence says; without a verdict pending or testing, whatever a person typed into the file."""
        written = self.hypothesis.status
        return self.verdict.get("status") or (written if written == "testing" else "pending")

    @property
    def confidence(self) -> str:
        return self.verdict.get("confidence") or "low"

    @property
    def evidence(self) -> str:
        return self.verdict.get("evidence") or "none yet"

    @property
    def notes(self) -> list[str]:
        """What a reader of the status must know: it was typed in, or the criteria are not those of the verdict."""
        h, notes = self.hypothesis, []
        if h.status != self.status:
            notes.append(f"{self.path.name} says {h.status}, but the runs say {self.status}")
        criteria = [list(h.validated_if), list(h.invalidated_if)]
        if self.verdict and self.verdict.get("criteria") != criteria:
            notes.append(f"the criteria of {h.id} changed after its verdict; evaluate them with:  lab verdict {h.id}")
        return notes


@dataclass(frozen=True)
class Lab:
    """The folder of a lab."""

    root: Path

    @cached_property
    def entries(self) -> list[Entry]:
        """All hypotheses, in the order of their ids. Raises UserError, also if two files have one id."""
        found: dict[str, Entry] = {}
        for path in sorted((self.root / "hypotheses").glob("*.md")):
            hypothesis = read_hypothesis(path)
            if hypothesis.id in found:
                raise UserError(f"{path} and {found[hypothesis.id].path} have the same id {hypothesis.id}; change one")
            found[hypothesis.id] = Entry(hypothesis, path, self._verdict(hypothesis))
        return [found[name] for name in sorted(found)]

    @property
    def in_test_order(self) -> list[Entry]:
        return sorted(self.entries, key=lambda e: (e.hypothesis.phase, e.hypothesis.order, e.hypothesis.id))

    def entry(self, name: str) -> Entry:
        """The hypothesis of this id, or of this file. Raises UserError."""
        wanted = Path(name).stem.lower()
        for entry in self.entries:
            if wanted in (entry.hypothesis.number, entry.path.stem.lower()):
                return entry
        known = ", ".join(entry.hypothesis.id for entry in self.entries) or "none"
        raise UserError(f"there is no hypothesis {name} in {self.root}; there are: {known}")

    def folder(self, hypothesis: Hypothesis) -> Path:
        """Where the runs of a hypothesis are."""
        return self.root / RESULTS / hypothesis.number

    def _verdict(self, hypothesis: Hypothesis) -> dict[str, Any]:
        try:
            return json.loads((self.folder(hypothesis) / "verdict.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def runs(self) -> Iterator[tuple[str, RunFiles]]:
        """(hypothesis or "", run) of every run directory under experimental-results/."""
        for path in sorted((self.root / RESULTS).glob("**/config.toml")):
            inside = path.relative_to(self.root / RESULTS).parts
            if "checkpoints" not in inside:
                yield (inside[0].upper() if len(inside) > 2 else ""), RunFiles(path.parent)


def find_lab(given: Path | None) -> Lab:
    """The lab of --dir, of $PLUMBOB_LAB, or of the current folder or one above it. Raises UserError."""
    named = given or (Path(os.environ[DIR_VARIABLE]) if os.environ.get(DIR_VARIABLE) else None)
    here = Path.cwd()
    for folder in [named] if named is not None else [here, *here.parents]:
        if (folder / "hypotheses").is_dir() and (folder / LOG).is_file():
            return Lab(Path(os.path.relpath(folder)))
    where = f"{named} is no lab" if named is not None else "there is no lab here or in a folder above"
    raise UserError(f"{where}: name one with --dir, or start one with:  lab init DIR")


def slug(title: str) -> str:
    """A title as part of a file's name. Example: slug("KL divergence bug") == "kl-divergence-bug"."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:60] or "untitled"
