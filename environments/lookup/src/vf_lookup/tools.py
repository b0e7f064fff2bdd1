"""The environment's only tool. verifiers can run this module as an MCP server; plumbob calls the method directly.

This module must not have `from __future__ import annotations`: it turns annotations into strings, and the MCP server
needs the types themselves.
"""

from typing import Annotated, Any

import verifiers.v1 as vf
from pydantic import BeforeValidator, Field

# A key that the model writes as a JSON number is accepted too.
Key = Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, int) else value)]


class LookupState(vf.State):
    """What the tool records during one rollout; the task's metrics read it."""

    calls: int = 0
    links_followed: int = 0
    """Number of keys of the chain that were looked up in the chain's order."""
    repeated_calls: int = 0
    """Number of calls with a key that was looked up before."""
    unknown_keys: int = 0
    """Number of calls with a key that is not in the table."""
    seen: list[str] = Field(default_factory=list)
    """The different keys that were looked up, in order."""


class LookupToolset(vf.Toolset[vf.ToolsetConfig, LookupState]):
    TOOL_PREFIX = None

    async def setup_task(self, task: Any) -> None:
        self.table: dict[str, str] = task.table
        self.chain: list[str] = task.chain

    @vf.tool
    def lookup(self, key: Key) -> str:
        """Look up a key in the table. Returns the next key or the value."""
        state = self.state
        state.calls += 1
        if key in state.seen:
            state.repeated_calls += 1
        else:
            state.seen.append(key)
        if key not in self.table:
            state.unknown_keys += 1
            return f"unknown key: {key}"
        if state.links_followed < len(self.chain) and key == self.chain[state.links_followed]:
            state.links_followed += 1
        return self.table[key]


if __name__ == "__main__":
    LookupToolset.run()
