"""The entries of a catalog: made from wheels, and checked when they are read."""

from __future__ import annotations

from typing import Any

from packaging.version import InvalidVersion, Version
from plumbob.console import UserError
from plumbob.hub.index.wheels import Wheel, readme

# Characters of a README that the catalog stores.
_README_HEAD = 2_000


def entry(wheel: Wheel, yanked: str | None = None) -> dict[str, Any]:
    """Return the catalog's entry for a wheel.

    Example: entry(wheel)["entry_points"] == {"gsm8k": "vf_gsm8k:GSM8KTaskset"}.
    """
    fields = wheel.fields
    return {
        "name": wheel.name,
        "version": wheel.version,
        "summary": fields["Summary"] or "",
        "keywords": [k.strip() for k in (fields["Keywords"] or "").split(",") if k.strip()],
        "entry_points": wheel.entry_points,
        "requires_python": fields["Requires-Python"],
        "dependencies": fields.get_all("Requires-Dist", []),
        "filename": wheel.filename,
        "sha256": wheel.sha256,
        "yanked": yanked,
        "readme": readme(fields)[:_README_HEAD],
    }


_FIELDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("name", "version", "summary", "filename", "sha256", "readme"), str),
    **dict.fromkeys(("requires_python", "yanked"), (str, type(None))),
    **dict.fromkeys(("keywords", "dependencies"), list),
    "entry_points": dict,
}


def checked(entries: Any, where: str) -> list[dict[str, Any]]:
    """Return the entries of a catalog that was read from `where`. Raises UserError if one of them is not whole."""
    for e in entries if isinstance(entries, list) else [None]:
        given = e if isinstance(e, dict) else {}
        wrong = [name for name, kind in _FIELDS.items() if not isinstance(given.get(name, ...), kind)]
        if not wrong:
            try:
                Version(given["version"])
            except InvalidVersion:
                wrong = ["version"]
        if wrong:
            raise UserError(f"{where} is damaged (an entry has no usable {wrong[0]}); make it again with `hub index`")
    return entries
