"""The check of an environment's tools: names, schemas, descriptions, and whether verifiers can serve them over MCP."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from plumbob.hub.check.sandbox.loading import Checked
from plumbob.hub.check.sandbox.playing import Stage
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.rollout import verifiers_messages

if TYPE_CHECKING:
    import verifiers.v1 as vf

# The tool names that OpenAI's API accepts, and so every server that is compatible with it.
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# A JSON schema that has one of these keys restricts its value.
_TYPED = {"type", "anyOf", "oneOf", "allOf", "enum", "const", "$ref"}


async def tools(stage: Stage) -> Checked:
    """Check that tool names and schemas are valid, that tools are described, and that toolsets can run as servers."""
    task = stage.tasks[0]
    async with stage.open() as shared:

        async def opened() -> adapter.ToolBox:
            return await adapter.open_tools(task, verifiers_messages.new_trace(task), shared)

        try:
            box = await asyncio.wait_for(asyncio.create_task(opened()), stage.max_seconds)
        except TimeoutError:
            return Checked(problems=[f"setting up the task and its tools takes more than {stage.max_seconds:g} s"])
        except Exception as error:
            return Checked(problems=[f"setting up the task and its tools fails: {type(error).__name__}: {error}"])
        problems = [problem for tool in box.declared for problem in _of_tool(tool)]
        for toolset in (*shared, *type(task).toolsets(task.config)):
            problems += _of_toolset(toolset)
    return Checked(", ".join(box.tools) or "the environment has no tools", problems)


def _of_tool(tool: Any) -> list[str]:
    import jsonschema

    problems, schema = [], tool.parameters
    if not _NAME.fullmatch(tool.name):
        problems.append(f"the tool name {tool.name!r} is not valid; use at most 64 letters, digits, '_' and '-'")
    if not (tool.description or "").strip():
        problems.append(f"the tool {tool.name} has no description; write a docstring, which the model sees")
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        problems.append(f"the schema of {tool.name} is not valid: {error.message}")
    if schema.get("type") != "object":
        problems.append(f"the schema of {tool.name} must have the type object, because a call's arguments are one")
    for name, field in schema.get("properties", {}).items():
        if not (_TYPED & set(field) or field.get("description")):
            problems.append(f"the parameter {name!r} of {tool.name} has neither a type nor a description")
    return problems


def _of_toolset(toolset: vf.Toolset) -> Sequence[str]:
    """Check that a toolset can run as a server: with other harnesses, verifiers serves it over MCP from its module."""
    from mcp.server.mcpserver import MCPServer

    name, module = type(toolset).__name__, sys.modules[type(toolset).__module__]
    problems = []
    try:
        toolset.register(MCPServer(name))
    except Exception as error:
        problems.append(
            f"verifiers' MCP server cannot read the tools of {name}: {type(error).__name__}: {error}; "
            "leave out `from __future__ import annotations` in its module"
        )
    try:
        source = inspect.getsource(module)
    except OSError:
        return problems
    if not any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in ast.parse(source).body):
        problems.append(
            f'{module.__name__} cannot be run as a server; end it with `if __name__ == "__main__": {name}.run()`'
        )
    return problems
