"""More places where faults of the field are injected, for the third set: names that many modules import, tools."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from plumbob.rollout import verifiers_adapter as adapter
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field import Start


def everywhere(stack: ExitStack, original: Any, value: Any) -> None:
    """Replace a function in its own module and in all modules that have imported it by name."""
    name = original.__name__
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is original:
            put(stack, module, name, value)


def tools_called(change: Callable[[Callable[[], Any], str, dict[str, Any]], tuple[Any, dict[str, Any]]]) -> Start:
    """Each tool call runs the function and the arguments that `change(the tool's function, its name, arguments)` returns.

    Unlike `tools_answer`, the changed function runs under the time limit of a tool call.
    """

    def start(stack: ExitStack, env: str) -> None:
        original, specs = adapter.BoundTool.call, {}

        def forget() -> None:
            for spec in specs.values():  # what is known of a tool's calls, which other runs of this process share
                spec.calls = type(spec.calls)()

        stack.callback(forget)

        async def call(self: Any, arguments: dict[str, Any], caller: Any = None) -> str:
            specs[id(self.spec)] = self.spec
            fn, changed = change(self.fn, self.spec.declared.name, arguments)
            return await original(dataclasses.replace(self, fn=fn), changed, caller)

        put(stack, adapter.BoundTool, "call", call)

    return start
