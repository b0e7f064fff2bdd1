"""No module of the workspace imports itself by way of others, wherever the import is written.

import-linter's contracts are about folders; this looks at files, and also at imports inside functions and under
`TYPE_CHECKING`, which Python never complains about: two files that need each other are one file, or a third is missing.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Literal

import pytest

ROOT = Path(__file__).resolve().parents[1]
Kind = Literal["at import", "inside a function", "for types"]


def modules() -> dict[str, Path]:
    """The file of each module of the packages, the environments and the trainer, by its dotted name."""
    found = {}
    for source in sorted([*ROOT.glob("packages/*/src"), *ROOT.glob("environments/*/src"), ROOT / "trainer/src"]):
        for path in source.rglob("*.py"):
            parts = path.relative_to(source).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


class Imports(ast.NodeVisitor):
    """The modules that one file imports, each with the kinds of places where the import stands."""

    def __init__(self, module: str, path: Path, known: dict[str, Path]) -> None:
        self.module, self.known = module, known
        self.package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        self.kind: Kind = "at import"
        self.found: dict[str, set[Kind]] = {}
        self.visit(ast.parse(path.read_text()))

    def add(self, name: str) -> None:
        if name in self.known and name != self.module:
            self.found.setdefault(name, set()).add(self.kind)

    def within(self, kind: Kind, nodes: list[ast.stmt]) -> None:
        before, self.kind = self.kind, kind
        for node in nodes:
            self.visit(node)
        self.kind = before

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            package = self.package.split(".")
            base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
        for alias in node.names:
            submodule = f"{base}.{alias.name}"
            self.add(submodule if submodule in self.known else base)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.within("inside a function", node.body)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            self.within("for types", node.body)
            self.within(self.kind, node.orelse)
        else:
            self.generic_visit(node)


def graph() -> dict[str, dict[str, set[Kind]]]:
    known = modules()
    return {module: Imports(module, path, known).found for module, path in known.items()}


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """The sets of two or more modules of which each imports each, directly or by way of others (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def connect(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(imports.get(module, ())):
            if other not in index:
                connect(other)
            if other in stack:
                low[module] = min(low[module], low[other])
        if low[module] == index[module]:
            place = stack.index(module)
            component = set(stack[place:])
            del stack[place:]
            if len(component) > 1:
                found.append(component)

    for module in sorted(imports):
        if module not in index:
            connect(module)
    return found


@pytest.fixture(scope="module")
def imports() -> dict[str, dict[str, set[Kind]]]:
    return graph()


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param({"at import"}, id="when a module is imported"),
        pytest.param({"at import", "inside a function"}, id="when the code runs"),
        pytest.param({"at import", "inside a function", "for types"}, id="for types as well"),
    ],
)
def test_no_module_imports_itself_by_way_of_others(imports: dict[str, dict[str, set[Kind]]], kinds: set[Kind]) -> None:
    chosen = {module: {other for other, found in to.items() if found & kinds} for module, to in imports.items()}
    assert circles(chosen) == []


def test_imports_are_told_apart_by_the_place_where_they_stand(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nfrom p import b\nif TYPE_CHECKING:\n    from . import c\n"
        "def f():\n    import p.d\n    if TYPE_CHECKING:\n        from .b import name\n"
    )
    known = dict.fromkeys(("p", "p.a", "p.b", "p.c", "p.d"), file)
    assert Imports("p.a", file, known).found == {
        "p.b": {"at import", "for types"},
        "p.c": {"for types"},
        "p.d": {"inside a function"},
    }


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [{"a", "b", "c"}]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
