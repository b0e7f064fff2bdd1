"""Parse a retriever's name, without loading a model."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from plumbob.retrieval.kinds import BY_NAME, KINDS, Kind
from plumbob.retrieval.models import DEFAULT_MODEL

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class Spec:
    """A parsed name. Example: "hybrid/rrf//models/e5" is kind "hybrid", fusion "rrf", model "/models/e5"."""

    kind: str
    fusion: str | None = None
    """The kind's variant: how hybrid fuses its two rankings."""
    model: str | None = None
    """Id or directory of the embedding model; None for a kind that takes none."""


def parse_name(name: str) -> Spec:
    """Parse a retriever's name, KIND[/VARIANT][/MODEL]. Raises ValueError, with one sentence, for a wrong name.

    A model is not loaded: of a hub id only the form is checked, and of a path only that it is a directory.
    """
    first, slash, rest = name.partition("/")
    syntax = ", ".join(kind.syntax for kind in KINDS)
    if first not in BY_NAME:
        near = difflib.get_close_matches(first.lower(), BY_NAME, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"there is no retriever {name!r}; {hint}The names are {syntax}")
    kind = BY_NAME[first]
    if slash and not (kind.takes_model or kind.variants):
        raise ValueError(
            f"the retriever {first!r} takes no options after its name, got {name!r}; the names are {syntax}"
        )
    if slash and not rest:
        raise ValueError(f"the retriever name {name!r} ends in a slash; give a model after it or write {first!r}")
    variant, rest = _variant(name, kind, rest, syntax)
    if not kind.takes_model:
        return Spec(kind.name, variant)
    return Spec(kind.name, variant, checked_model(f"retriever {name!r}", rest) if rest else DEFAULT_MODEL)


def _variant(name: str, kind: Kind, rest: str, syntax: str) -> tuple[str | None, str]:
    """The variant that `rest` begins with, or the kind's default, and the remaining text."""
    if not kind.variants:
        return None, rest
    first, slash, after = rest.partition("/")
    if first in kind.variants:
        if slash and not after:
            raise ValueError(f"the retriever name {name!r} ends in a slash; give a model after it or leave it out")
        return first, after
    near = difflib.get_close_matches(first.lower(), kind.variants, n=1, cutoff=0.5)
    if near and not slash:
        raise ValueError(
            f"there is no retriever {name!r}; did you mean '{kind.name}/{near[0]}'? The names are {syntax}"
        )
    return kind.variants[0], rest


def checked_model(what: str, model: str) -> str:
    """The model's full id, or its absolute directory. `what` names it in the message. Raises ValueError."""
    path = Path(model).expanduser()
    if path.is_dir():
        return str(path.absolute())
    if model.startswith(("/", "~", ".")):
        raise ValueError(f"{what}: there is no directory {model}")
    if not _HUB_ID.fullmatch(model):
        raise ValueError(f"{what}: {model!r} is neither a directory nor a model id such as {DEFAULT_MODEL!r}")
    return DEFAULT_MODEL if model == DEFAULT_MODEL.partition("/")[2] else model
