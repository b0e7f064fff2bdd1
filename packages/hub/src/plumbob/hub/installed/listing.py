"""`hub list`: print the installed environments. Imports no command-line library, so that it answers at once."""

from __future__ import annotations

import json

from plumbob.console.text import table
from plumbob.hub.installed.interrupted import half_installed, read_journal, under_way, undo_folder
from plumbob.hub.installed.registry import Environment, conflicts, scan
from plumbob.hub.names import normalise


def rows(*, check: bool = False, timeout: float | None = None) -> list[dict[str, str]]:
    """Return one row for each installed environment, and one for each distribution whose metadata cannot be read.

    `check`: import each environment in a process of its own, for at most `timeout` seconds; one that fails gets the
    status "broken" and a reason.
    """
    environments, unreadable = scan()
    cut_off = read_journal(undo_folder()) or {}
    claimed = conflicts(environments)
    states = [_state(e, claimed) for e in environments]
    here = {normalise(e.distribution) for e in environments}
    if check:
        from concurrent.futures import ThreadPoolExecutor

        from plumbob.console.working import Working
        from plumbob.hub.installed.loading import LOAD_SECONDS, why_it_does_not_load

        with ThreadPoolExecutor() as pool, Working("importing the environments, as a test"):
            limit = LOAD_SECONDS if timeout is None else timeout
            reasons = list(pool.map(lambda e: why_it_does_not_load(e, limit), environments))
        loaded = zip(states, reasons, strict=True)
        states = [("broken", r) if r is not None and s[0] != "broken" else s for s, r in loaded]
    listed = [
        {
            "name": e.name,
            "distribution": e.distribution,
            "version": e.version,
            "summary": e.summary,
            "status": status,
            "reason": reason,
        }
        for e, (status, reason) in zip(environments, states, strict=True)
    ]
    unknown = {"name": "?", "version": "?", "summary": "", "status": "broken"}
    broken = [(b.distribution, b.reason) for b in unreadable]
    broken += [(name, _was_cut_off(was)) for name, was in cut_off.items() if was["version"] and name not in here]
    return listed + [unknown | {"distribution": name, "reason": reason} for name, reason in broken]


def _was_cut_off(was: dict) -> str:
    if under_way(undo_folder()):
        return "it is being installed at this moment"
    return f"its installation was cut off; the next `vf-install` puts {was['version']}, which was there before, back"


def _state(environment: Environment, claimed: dict[str, list[Environment]]) -> tuple[str, str]:
    for owners in claimed.values():
        if environment in owners:
            others = " and ".join(e.distribution for e in owners if e != environment)
            return "conflict", f"{others} also provides an environment of this name; uninstall one of these packages"
    distribution = environment.entry_point.dist
    lacks = half_installed(distribution) if distribution is not None else None
    return ("broken", lacks) if lacks else ("ok", "")


def show(*, as_json: bool = False, check: bool = False, timeout: float | None = None) -> None:
    """Print the installed environments, as a table or as JSON."""
    listed = rows(check=check, timeout=timeout)
    if as_json:
        print(json.dumps(listed, indent=2))
        return
    if not listed:
        print("no environment is installed; find one with `hub search`, and install it with `vf-install NAME`")
        return
    texts = [r["summary"] if r["status"] == "ok" else f"{r['status'].upper()}: {r['reason']}" for r in listed]
    print(
        table(
            (row["name"], f"{row['distribution']} {row['version']}  {text}")
            for row, text in zip(listed, texts, strict=True)
        )
    )
