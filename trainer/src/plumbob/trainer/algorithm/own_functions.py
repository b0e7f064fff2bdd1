"""The user's own loss, advantages or rewards: FILE.py:FUNCTION in place of a built-in choice. Imports nothing heavy.

One contract holds for all three. The function is called with two arguments, what it computes on and the settings of the
built-in computation, and gives numbers. It has no effects and no random numbers of its own: every process calls it, for
advantages and rewards with the same samples, for a loss with its own tokens, and nothing compares what they give. What goes
wrong in it is said in one sentence with file and line.

    --loss FILE.py:FUNCTION       (LossInputs, Objective) -> tensor of shape [], the sum over the N tokens of a microbatch
                                  that is minimised. Called once for each microbatch, so it must be a plain sum over
                                  tokens, each times its `weights` entry: then gradients do not depend on microbatches.
    --advantage FILE.py:FUNCTION  (Samples [B], AdvantageSettings) -> B advantages, in the order of the samples
    --trained-reward FILE.py:FUNCTION    (Samples [B], AdvantageSettings) -> B rewards to train on

B: the usable rollouts of the step with finite rewards. `Sample`: plumbob.rollout.types; `Sample.group` names the task.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from plumbob.console import UserError, counted, first_line

ARGUMENTS = 2
"""Number of arguments that each function is called with."""


class OwnFunctionError(UserError):
    """A mistake in the user's file. The message names file and line."""


@dataclass(frozen=True)
class OwnFunction:
    """A function in a file. Example: `own("--loss", "my.py:loss")(inputs, objective)`."""

    option: str
    """The option that names it, for messages."""
    path: Path
    """Absolute, so that a run can be resumed from another folder."""
    name: str

    @property
    def written(self) -> str:
        """As it is written on the command line, with the whole path."""
        return f"{self.path}:{self.name}"

    def line(self) -> int:
        """The line of the function's definition, without executing the file.

        Raises OwnFunctionError if there is no such file, if it is no Python, or if it has no such function of two arguments.
        """
        try:
            tree = ast.parse(self.path.read_text(encoding="utf-8"), str(self.path))
        except SyntaxError as error:
            raise self.error(f"SyntaxError: {error.msg}", error.lineno or 1) from None
        except FileNotFoundError:
            raise OwnFunctionError(f"{self.option}: there is no file {self.path}") from None
        except (OSError, ValueError) as error:
            raise OwnFunctionError(f"{self.option}: cannot read {self.path}: {first_line(error)}") from None
        found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        if self.name not in found:
            near = difflib.get_close_matches(self.name, found, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise OwnFunctionError(f"{self.option}: {self.path} has no function {self.name!r}{hint}")
        node, given = found[self.name], found[self.name].args
        if isinstance(node, ast.AsyncFunctionDef):
            raise self.error(f"{self.name} must be a plain function: `def`, not `async def`", node.lineno)
        most = len(given.posonlyargs) + len(given.args)
        if not most - len(given.defaults) <= ARGUMENTS <= (math.inf if given.vararg else most):
            raise self.error(f"{self.name} must take {ARGUMENTS} arguments: docs/guides/training.md", node.lineno)
        return node.lineno

    def error(self, said: str, line: int | None = None) -> OwnFunctionError:
        """What is wrong in this file, as an error. `line`: by default that of the function's definition."""
        return OwnFunctionError(f"{self.option}: {self.path}, line {line or self.line()}: {said}")

    def __call__(self, given: Any, settings: Any) -> Any:
        """What the function gives. Raises OwnFunctionError for what it raises, memory that runs out excepted."""
        with self._told():
            found = _load(self)(given, settings)
            return list(found) if inspect.isgenerator(found) else found

    def load(self) -> None:
        """Execute the file, which a call would do otherwise. Raises OwnFunctionError like a call."""
        with self._told():
            _load(self)

    @contextmanager
    def _told(self) -> Generator[None]:
        """Turn what the file raises in this context into an OwnFunctionError, memory that runs out excepted."""
        try:
            yield
        except (UserError, MemoryError):
            raise
        except (Exception, SystemExit) as error:
            if type(error).__name__ == "OutOfMemoryError":  # torch's: the trainer answers it with smaller microbatches
                raise
            kind = "it ended the program" if isinstance(error, SystemExit) else type(error).__name__
            lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(self.path)]
            raise self.error(f"{kind}: {first_line(error)}", lines[-1] if lines else None) from error

    def numbers(self, given: Any, settings: Any, count: int) -> list[float]:
        """`count` finite numbers that the function gives, a tensor or any other sequence. Raises OwnFunctionError."""
        found = self(given, settings)
        try:
            listed = list(found)
            values = [float(value) for value in listed]
        except (TypeError, ValueError):
            shown = type(found).__name__
            if isinstance(found, list | tuple):
                shown += " with " + next(
                    (repr(v)[:40] for v in listed if not isinstance(v, int | float)), "something else"
                )
            raise self.error(f"{self.name} must give {count} numbers, one for each rollout, not a {shown}") from None
        if len(values) != count:
            raise self.error(f"{self.name} gives {counted(len(values), 'number')} for {counted(count, 'rollout')}")
        for i, value in enumerate(values):
            if not math.isfinite(value):
                raise self.error(f"{self.name} gives {value} for rollout {i} of {count}")
        return values


def is_file(written: str | None) -> bool:
    """Whether the value of an option is FILE.py:FUNCTION."""
    return ".py:" in (written or "")


def own(option: str, written: str | None) -> OwnFunction | None:
    """The function that the option's value names, which may not exist; None if the value is no FILE.py:FUNCTION."""
    if written is None or not is_file(written):
        return None
    file, _, name = written.rpartition(":")
    return OwnFunction(option, Path(file).expanduser().absolute(), name)


@lru_cache
def _load(function: OwnFunction) -> Callable[[Any, Any], Any]:
    """Import the file, which finds modules beside it."""
    sys.path.append(str(function.path.parent))
    name = f"plumbob_own_{function.path.stem}"
    spec = importlib.util.spec_from_file_location(name, function.path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    given = sys.argv
    sys.argv = [str(function.path)]  # a file that reads a command line gets none: this one is not its own
    try:
        spec.loader.exec_module(module)
    finally:
        sys.argv = given
    return getattr(module, function.name)
