"""The system prompts. The user turn is the question alone."""

from __future__ import annotations

from typing import Literal

from vf_musique.submission import UNANSWERABLE

AnswerStyle = Literal["tags", "complete"]

_TASK = """\
Answer the question with what the tools return, not from memory. It takes several documents: find one fact, then use it \
to search for the next. Think step by step and call one tool per step. Keep searching until you have every fact.
"""
_ANSWERABLE = "The documents hold the answer."
_FULL = f'The documents may not suffice. If a fact is not in them, the answer is "{UNANSWERABLE}".'
_ENDINGS: dict[AnswerStyle, str] = {
    "tags": """\
Then write your last message: your reasoning, the IDs of the documents that support the answer, and the answer in a few \
words. For example:
<think>Document 3 says that Ada Reed wrote the book, and document 11 that she was born in Oak Hill.</think>
<cite>3, 11</cite>
<answer>Oak Hill</answer>""",
    "complete": """\
Then call complete with your reasoning, the answer in a few words, and the IDs of the documents that support it. For \
example: reasoning="Document 3 says that Ada Reed wrote the book, and document 11 that she was born in Oak Hill.", \
final_answer="Oak Hill", cited_doc_ids=["3", "11"].""",
}


def system_prompt(style: AnswerStyle, *, full: bool) -> str:
    """Return the system prompt. `full`: it says that the question may be unanswerable."""
    return f"{_TASK}{_FULL if full else _ANSWERABLE}\n{_ENDINGS[style]}"
