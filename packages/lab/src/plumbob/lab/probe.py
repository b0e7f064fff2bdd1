"""`lab probe`: the probes of `doctor` with a hypothesis's own settings, and whether they name one of its causes."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from plumbob.console import UserError
from plumbob.lab.experiment import conclude
from plumbob.lab.files import sections
from plumbob.lab.files.workspace import Entry, Lab
from plumbob.lab.runs.plan import options, program


def probe(lab: Lab, entry: Entry, name: str | None = None) -> int:
    """Run `doctor` with the settings of an arm, and write what it found into the experiment's folder.

    `name`: the arm; the first, which is the control, by default. Returns 1 if doctor found one of the hypothesis's causes,
    else 0. Raises UserError if there is no such arm, or if doctor could not start.
    """
    h, folder = entry.hypothesis, lab.folder(entry.hypothesis)
    if not h.arms:
        raise UserError(f"{h.id} has no arms; describe its experiment in its front matter, as H01 does")
    name = next(iter(h.arms)) if name is None else name
    if (arm := h.arms.get(name)) is None:
        raise UserError(f"{h.id} has no arm {name!r}; it has {', '.join(h.arms)}")
    command = ["doctor", *options(h, arm), "--all", "--json"]
    done = subprocess.run([*program(command[:1]), *command[1:]], stdout=subprocess.PIPE, text=True, check=False)
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise UserError(f"{h.id}: doctor ended with exit code {done.returncode} and reported nothing") from None
    sections.write(folder / "doctor.json", json.dumps(report, indent=2) + "\n")
    found = [f for f in report["findings"] if f["cause"] is not None]
    own = [f for f in found if f["cause"] in h.causes]
    lines = [f"- `{f['cause']}`: {f['check']}: {f['evidence']}" for f in own]
    others = ", ".join(sorted({f"`{f['cause']}`" for f in found if f not in own}))
    said = "names a cause of this hypothesis" if own else "names no cause of this hypothesis"
    shown = " ".join(command[:-1])
    also = [f"It also names {others}."] if others else []
    if arm.command:
        also.append(f"The arm runs `{arm.command}`; doctor examined plumbob's own trainer with the same options.")
    text = "\n".join(
        [f"**Doctor**, arm {name} (`{shown}`): {len(report['findings'])} checks; it {said}.", "", *lines, *also]
    )
    sections.write(folder / "doctor.md", text.strip() + "\n")
    print(text.strip())
    if conclude(lab, entry) is None:  # else the results section has it
        sections.write(entry.path, sections.with_section(sections.read(entry.path), "results", text))
    print(f"written into {entry.path}", file=sys.stderr)
    return 1 if own else 0
