"""Perfect transcripts from the gold decomposition, which test the environment end to end and measure retrievers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import verifiers.v1 as vf

from vf_musique.prompts import AnswerStyle
from vf_musique.submission import UNANSWERABLE

if TYPE_CHECKING:
    from vf_musique.taskset import Hop, MusiqueData

_REFERENCE = re.compile(r"#([0-9]+)")


def sub_questions(steps: Sequence[Hop]) -> list[str]:
    """Return the gold sub-questions, with the earlier answers in place of #1, #2, ..."""
    answers = [step.answer for step in steps]

    def fill(match: re.Match[str]) -> str:
        number = int(match[1]) - 1 if len(match[1]) < 4 else -1
        return answers[number] if 0 <= number < len(answers) else match[0]

    return [_REFERENCE.sub(fill, step.question) for step in steps]


def oracle_messages(data: MusiqueData, style: AnswerStyle) -> list[vf.AssistantMessage]:
    """Return one search per gold hop, then the answer with the supporting documents.

    For an unanswerable question: the searches up to the hop that its documents do not support, then "unanswerable".
    """
    steps = data.decomposition
    missing = next((i for i, step in enumerate(steps) if step.support is None), len(steps))
    queries = sub_questions(steps)[: missing + 1] or [data.prompt_text]
    turns = [
        vf.AssistantMessage(content="", tool_calls=[_call(i, "retrieve_documents", query=query)])
        for i, query in enumerate(queries)
    ]
    answer, cited = (data.answers[0], data.supporting) if data.answerable else (UNANSWERABLE, [])
    reasoning = " ".join(f"{query} {step.answer}." for query, step in zip(queries, steps, strict=False)) or "Found."
    if style == "complete":
        call = _call(len(turns), "complete", reasoning=reasoning, final_answer=answer, cited_doc_ids=cited)
        return [*turns, vf.AssistantMessage(content="", tool_calls=[call])]
    final = f"<think>{reasoning}</think>\n<cite>{', '.join(cited)}</cite>\n<answer>{answer}</answer>"
    return [*turns, vf.AssistantMessage(content=final)]


def _call(number: int, name: str, **arguments: Any) -> vf.ToolCall:
    return vf.ToolCall(id=f"oracle_{number}", name=name, arguments=json.dumps(arguments, ensure_ascii=False))
