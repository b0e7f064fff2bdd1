"""What a retriever's name says, read without loading anything."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
KINDS = ("bm25", "lexical", "semantic", "hybrid", "golden")
FUSIONS = ("minmax", "rrf")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_NAMES = "bm25 (or lexical), semantic[/MODEL], hybrid[/minmax|/rrf][/MODEL], golden"


@dataclass(frozen=True)
class Spec:
    """A parsed name. Example: "hybrid/rrf//models/e5" is kind "hybrid", fusion "rrf", model "/models/e5"."""

    kind: str
    fusion: str | None = None
    model: str | None = None


def parse_name(name: str) -> Spec:
    """The parts of a retriever's name. Raises ValueError with one sentence for a name that means nothing.

    Reads no model: a hub id is only checked for its form, a path for being a directory.
    """
    kind, slash, rest = name.partition("/")
    if kind not in KINDS:
        near = difflib.get_close_matches(kind.lower(), KINDS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"there is no retriever {name!r}; {hint}The names are {_NAMES}")
    if kind in ("bm25", "lexical", "golden"):
        if slash:
            raise ValueError(
                f"the retriever {kind!r} takes nothing after its name, got {name!r}; the names are {_NAMES}"
            )
        return Spec("bm25" if kind == "lexical" else kind)
    if slash and not rest:
        raise ValueError(f"the retriever name {name!r} ends in a slash; give a model after it or write {kind!r}")
    fusion = None
    if kind == "hybrid":
        first, _, after = rest.partition("/")
        fusion = first if first in FUSIONS else "minmax"
        near = difflib.get_close_matches(first.lower(), FUSIONS, n=1, cutoff=0.5)
        if first in FUSIONS:
            if rest != first and not after:
                raise ValueError(f"the retriever name {name!r} ends in a slash; give a model after it or leave it out")
            rest = after
        elif near and rest == first:
            raise ValueError(f"there is no retriever {name!r}; did you mean 'hybrid/{near[0]}'? The names are {_NAMES}")
    return Spec(kind, fusion, _checked_model(name, rest) if rest else DEFAULT_MODEL)


def _checked_model(name: str, model: str) -> str:
    path = Path(model).expanduser()
    if path.is_dir():
        return str(path.absolute())
    if model.startswith(("/", "~", ".")):
        raise ValueError(f"retriever {name!r}: there is no directory {model}")
    if not _HUB_ID.fullmatch(model):
        raise ValueError(
            f"retriever {name!r}: {model!r} is neither a directory nor a model id such as {DEFAULT_MODEL!r}"
        )
    return DEFAULT_MODEL if model == DEFAULT_MODEL.partition("/")[2] else model
