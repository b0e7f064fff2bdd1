"""Tasksets that verifiers finds by the name of their module, such as upstream's own, without an entry point of ours."""

from __future__ import annotations

import itertools
import sys
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, EntryPoint, distributions
from pathlib import Path
from typing import Any

from plumbob.console import UserError

_MOST_FILES = 200
"""Most files of a package that are searched for an import of verifiers."""


def module_of(name: str) -> str | None:
    """The module that verifiers would import for a taskset's id; None if there is none that uses verifiers.

    Nothing is imported. Example: "alphabet-sort", "owner/alphabet-sort@1.0" -> "alphabet_sort".
    """
    module = name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    if not module.isidentifier() or module in (*sys.stdlib_module_names, "verifiers", "plumbob"):
        return None
    verifiers = PathFinder.find_spec("verifiers")
    if verifiers is None:
        return None
    builtin = Path(verifiers.origin or ".").parent / "v1" / "tasksets" / module
    if (builtin / "__init__.py").is_file():
        return module
    origin = _file_of(module)
    if origin is None:
        return None
    files = origin.parent.rglob("*.py") if origin.name == "__init__.py" else [origin]
    return module if any(_mentions_verifiers(file) for file in itertools.islice(files, _MOST_FILES)) else None


def no_environment(name: str) -> str | None:
    """Why the module of this name is no environment, if there is one that uses no verifiers, as the end of a sentence."""
    module = name.replace("-", "_")
    origin = _file_of(module) if module.isidentifier() and module_of(name) is None else None
    if origin is None or module in sys.stdlib_module_names:
        return None
    return f"nothing in {origin} imports verifiers"


def _file_of(module: str) -> Path | None:
    spec = PathFinder.find_spec(module)
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _mentions_verifiers(file: Path) -> bool:
    try:
        return b"import verifiers" in (text := file.read_bytes()) or b"from verifiers" in text
    except OSError:
        return False


def entry_point_of(name: str, module: str, group: str) -> EntryPoint:
    """An entry point that names the module alone, because only importing it shows the name of the class."""
    point = EntryPoint(name, module, group)
    owner = distribution_of(module)
    if owner is not None:
        vars(point).update(dist=owner)
    return point


def distribution_of(module: str) -> Distribution | None:
    """The installed distribution that a top-level module belongs to; None if it was put on the path by hand."""
    for distribution in distributions():
        top = (distribution.read_text("top_level.txt") or "").split()
        files = distribution.files or ()
        if module in top or any(f.parts[0] in (module, f"{module}.py") for f in files if f.parts):
            return distribution
    return None


def load_class(module: str) -> Any:
    """Import a taskset's module as verifiers does; returns the only Taskset class in its `__all__`.

    Raises UserError if it exports none or several, and whatever importing it raises.
    """
    import verifiers.v1 as vf

    try:
        imported = vf.import_taskset(module)
    except ModuleNotFoundError as error:  # verifiers' own message hides which module is missing
        raise error.__cause__ or error from None
    names = getattr(imported, "__all__", ())
    exported = [getattr(imported, name, None) for name in names]
    found = [c for c in exported if isinstance(c, type) and issubclass(c, vf.Taskset) and c is not vf.Taskset]
    if len(found) != 1:
        raise UserError(
            f"the module {module} is installed but is no environment: its __all__ exports {len(found)} subclasses of "
            f'verifiers.v1.Taskset, and must export one; add the line `__all__ = ["YourTaskset"]` to {module}'
        )
    return found[0]
