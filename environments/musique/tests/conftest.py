"""A question, scripted rollouts through the real runner, and the real records, for all tests."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import verifiers.v1 as vf
from plumbob.rollout import Limits, ScriptedChat, run_rollout
from vf_musique import MusiqueTaskset
from vf_musique.taskset import MusiqueConfig

REAL = Path(__file__).resolve().parents[4] / "shared/data/musique/musique_ans_train_100.jsonl"


def say(content="", *calls):
    """One assistant turn; a call is (name, arguments), the arguments an object or raw text."""
    return vf.AssistantMessage(
        content=content,
        tool_calls=[
            vf.ToolCall(id=str(i), name=name, arguments=given if isinstance(given, str) else json.dumps(given))
            for i, (name, given) in enumerate(calls)
        ]
        or None,
    )


def search(query="song", **arguments):
    return ("retrieve_documents", {"query": query, **arguments})


def get(doc_id):
    return ("get_document", {"doc_id": doc_id})


def final(answer, cited=(), style="tags"):
    """The last turn, well-formed in either style."""
    cited = [str(doc_id) for doc_id in cited]
    if style == "complete":
        return say("", ("complete", {"reasoning": "so", "final_answer": answer, "cited_doc_ids": cited}))
    return say(f"<think>so</think><cite>{', '.join(cited)}</cite><answer>{answer}</answer>")


async def rollout(task, messages, **limits):
    return await run_rollout(task, ScriptedChat.of_messages(messages), None, limits=Limits(max_context=10**9, **limits))


def play(task, messages, **limits):
    """A real rollout of scripted turns, which must not fail."""
    trace = asyncio.run(rollout(task, messages, **limits))
    assert trace.ok, trace.errors
    return trace


def tasks(**settings):
    return list(MusiqueTaskset(MusiqueConfig(id="musique", **{"datasets": "synthetic", **settings})))


def record(question_id="2hop__1_2", **changes):
    """A small official record: four paragraphs, of which 1 and 3 support."""
    paragraphs = [
        ("Pine Moor", "Pine Moor is a town.", False),
        ("The Long Song", "The Long Song was written by Ada Reed.", True),
        ("Bea Reed", "Bea Reed was born in Pine Moor.", False),
        ("Ada Reed", "Ada Reed was born in Oak Hill.", True),
    ]
    return {
        "id": question_id,
        "paragraphs": [
            {"idx": i, "title": title, "paragraph_text": text, "is_supporting": supporting}
            for i, (title, text, supporting) in enumerate(paragraphs)
        ],
        "question": "Where was the author of The Long Song born?",
        "question_decomposition": [
            {"id": 1, "question": "Who wrote The Long Song?", "answer": "Ada Reed", "paragraph_support_idx": 1},
            {"id": 2, "question": "Where was #1 born?", "answer": "Oak Hill", "paragraph_support_idx": 3},
        ],
        "answer": "Oak Hill",
        "answer_aliases": ["Oakhill"],
        "answerable": True,
        **changes,
    }


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """Test modules cannot import from here, so they get the helpers as one fixture."""
    helpers = (say, search, get, final, rollout, play, tasks, record)
    return SimpleNamespace(**{helper.__name__: helper for helper in helpers})


@pytest.fixture
def write(tmp_path):
    """Writes rows (objects, or text as it is) to a JSONL file and returns its path."""

    def run(*rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
        return str(path)

    return run


@pytest.fixture
def small(write):
    """Tasks of one small record, with any settings."""

    def run(record_changes=(), **settings):
        (task,) = tasks(datasets=write(record(**dict(record_changes))), **settings)
        return task

    return run


@pytest.fixture(scope="session")
def real() -> str:
    if not REAL.exists():
        pytest.skip("needs the 100 real records, which the project does not ship")
    return str(REAL)
