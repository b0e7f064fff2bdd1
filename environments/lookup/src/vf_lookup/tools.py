"""The one tool. Upstream serves this module as an MCP server; plumbob calls the method directly.

No `from __future__ import annotations` here: upstream's server reads the tool's annotations as they stand.
"""

from typing import Annotated, Any

import verifiers.v1 as vf
from pydantic import BeforeValidator, Field

# A model that writes the key as a JSON number means the same key.
Key = Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, int) else value)]


class LookupState(vf.State):
    """What the tool saw during one rollout; the task's metrics read it."""

    calls: int = 0
    links_followed: int = 0
    """How far along the chain the calls went, in order."""
    repeated_calls: int = 0
    unknown_keys: int = 0
    seen: list[str] = Field(default_factory=list)


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
