"""The retrieval tools plus `complete`, which submits the answer and ends the rollout.

This toolset has its own module, because verifiers starts a toolset's MCP server by running its module. The module must
not have `from __future__ import annotations`: it turns annotations into strings, and the MCP server needs the types
themselves.
"""

from typing import Annotated, Any

import verifiers.v1 as vf
from pydantic import BeforeValidator

from vf_musique.submission import parse_ids
from vf_musique.tools import Completion, MusiqueToolset, Text


def _as_ids(value: Any) -> Any:
    return list(parse_ids(value))


DocumentIds = Annotated[list[str], BeforeValidator(_as_ids)]


class MusiqueCompleteToolset(MusiqueToolset):
    @vf.tool
    async def complete(self, reasoning: Text, final_answer: Text, cited_doc_ids: DocumentIds) -> str:
        """Hand in the final answer, in a few words, with the IDs of the documents that support it. Call it once, last."""
        if self.completion is not None:
            return "The answer was handed in already; the first one counts."
        self.completion = Completion(reasoning=reasoning, final_answer=final_answer, cited=cited_doc_ids)
        self.record("complete", final_answer, [])
        return "The answer is handed in."


if __name__ == "__main__":
    MusiqueCompleteToolset.run()
