"""Import verifiers without running the code of packages of which little is used.

verifiers takes two classes of anthropic and one function of prime_sandboxes, a rollout takes functions of one module of mcp,
and verifiers' own tasksets are only looked through by name. Importing these packages also imports half of what `train` loads.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import threading
from collections.abc import Mapping
from types import ModuleType
from typing import Any

_USED: dict[str, dict[str, str]] = {
    "anthropic": {},
    "anthropic.types": {"Message": "anthropic.types.message", "Usage": "anthropic.types.usage"},
    "mcp": {},
    "mcp.server": {},
    "mcp.server.mcpserver": {},
    "prime_sandboxes": {},
}
"""Package -> the names in it that verifiers asks it for, each with the module that defines it."""

_lock = threading.RLock()
_closed: set[str] = set()
"""Packages that only have the names they already have, to the thread that holds the lock."""


class OnDemand(ModuleType):
    """A package whose code runs when a name that it may have is first asked for, or set. Submodules can be imported before."""

    def __getattr__(self, name: str) -> Any:
        with _lock:
            if self.__name__ in _closed or not _may_define(self, name):
                raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
            _run(self)
        return getattr(self, name)

    def __dir__(self) -> list[str]:
        _run(self)
        return sorted(vars(self))

    def __setattr__(self, name: str, value: Any) -> None:
        # A submodule is set by Python itself when it is imported. Anything else would be lost when the code runs later.
        if getattr(value, "__name__", None) != f"{self.__name__}.{name}":
            _run(self)
        ModuleType.__setattr__(self, name, value)


@functools.cache
def _may_define(package: ModuleType, name: str) -> bool:
    """Whether the package may have this name: False for a module of this name that neither its code nor its folder has.

    pickle asks all modules for a name to find where something is from, `torch` when torch compiles: that would run them all.
    """
    loader: Any = package.__spec__ and package.__spec__.loader
    if name not in sys.modules or name in loader.get_code(package.__name__).co_names:
        return True
    return importlib.util.find_spec(f"{package.__name__}.{name}") is not None


def _run(package: ModuleType) -> None:
    """Run the package's code, unless that is done or under way."""
    with _lock:
        if type(package) is not OnDemand or package.__name__ in _closed:
            return
        spec = package.__spec__
        assert spec is not None and spec.loader is not None
        _closed.add(package.__name__)
        try:
            spec.loader.exec_module(package)
            object.__setattr__(package, "__class__", ModuleType)
        finally:
            _closed.discard(package.__name__)


def import_verifiers() -> None:
    """Import verifiers, and of the packages named above only what it asks them for."""
    put_off_clients()
    importlib.import_module("verifiers.v1")
    put_off({"verifiers.v1.tasksets": {}})


def put_off_clients() -> None:
    """Before verifiers is imported: let it import only what it uses of other packages."""
    put_off(_USED)


def put_off(packages: Mapping[str, Mapping[str, str]]) -> None:
    """Put these packages there without running their code, each with some names from its submodules.

    A package comes after the one it is in. Packages that are imported already stay as they are.
    """
    with _lock:
        new = [name for name in packages if _put_off(name)]
        _closed.update(new)
        for name in new:
            try:
                for part, module in packages[name].items():
                    vars(sys.modules[name])[part] = getattr(importlib.import_module(module), part)
            except (ImportError, AttributeError):  # another version, whose code runs when it is asked for the name
                continue
        _closed.difference_update(packages)


def _put_off(name: str) -> bool:
    """Put the package there without running its code; False if it is there already, or is not installed."""
    if name in sys.modules:
        return False
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None or name in sys.modules:  # finding it imports the package that it is in
        return False
    package = importlib.util.module_from_spec(spec)
    package.__class__ = OnDemand
    sys.modules[name] = package
    parent, _, last = name.rpartition(".")
    if parent:
        vars(sys.modules[parent])[last] = package
    return True
