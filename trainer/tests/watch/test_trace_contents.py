"""Stored rollouts whose prompts were rendered twice, and tools that answer one call in two ways."""

import dataclasses
import json

import pytest
from plumbob.trainer.watch.stored_rollouts import Rollout
from plumbob.trainer.watch.trace_contents import alike, answered, once, says_failed


def rollout(task: str, number: int, results: list[str], prompt: str = "hello") -> Rollout:
    nodes = [{"message": {"role": "user", "content": prompt}, "sampled": False, "token_ids": [1]}]
    for i, text in enumerate(results):
        call = {"id": f"c{i}", "name": "search", "arguments": json.dumps({"q": i})}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        nodes.append({"message": said, "sampled": True, "token_ids": [2]})
        told = {"role": "tool", "tool_call_id": f"c{i}", "content": text}
        nodes.append({"message": told, "sampled": False, "token_ids": [3]})
    record = {"task": {"key": task, "data": {}}, "nodes": nodes, "ok": True, "metrics": {}, "rewards": {}}
    return Rollout.of(record, 1, number + 1, 0, number)


def pairs(second) -> list[Rollout]:
    """Two rollouts of each of twelve tasks, in which the same call gets "a0" and `second(task)`."""
    return [rollout(f"t{i}", n, ["a0" if n == 0 else second(i)]) for i in range(12) for n in (0, 1)]


@pytest.mark.parametrize(
    ("second", "cause"),
    [
        (lambda i: "a0", None),
        (lambda i: "already visited", "tool-results-wrong"),
        (lambda i: "already visited" if i < 3 else "a0", None),
        (lambda i: "Error: busy", "too few"),
    ],
)
def test_a_call_gets_one_answer_in_all_rollouts_of_a_task(second, cause):
    found = alike(pairs(second))
    assert (found and found.cause) == (None if cause in (None, "too few") else cause)
    assert (found is None) == (cause == "too few")


def test_calls_after_other_calls_are_not_compared():
    rows = [rollout(f"t{i}", n, [f"first {n}", f"second {n}"]) for i in range(12) for n in (0, 1)]
    found = alike(rows)
    assert found is not None and found.cause == "tool-results-wrong"
    assert alike(rows[:6]) is None


@pytest.mark.parametrize(
    ("prompt", "cause"),
    [
        ("What is 2 + 2?", None),
        ("<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n", "template-applied-twice"),
        ("[INST] What? [/INST]", "template-applied-twice"),
    ],
)
def test_a_prompt_that_was_rendered_already_is_named(prompt, cause):
    assert once([rollout("t", n, [], prompt) for n in range(4)]).cause == cause


def test_words_of_a_call_that_failed():
    assert says_failed("Error: no such key")
    assert says_failed("HTTP 429: quota exhausted")
    assert says_failed('{"isError": true, "content": []}') and says_failed('{"error": "401 Unauthorized"}')
    assert not says_failed('{"isError": false, "content": []}') and not says_failed('{"error": null, "value": 3}')
    assert not says_failed("no errors were found")


def test_a_call_has_one_result_in_its_conversation():
    rows = [rollout(f"t{i}", 0, ["a", "b"]) for i in range(12)]
    assert (found := answered(rows)) is not None and found.cause is None
    doubled = [
        dataclasses.replace(r, parts=tuple(p for p in r.parts for _ in range(1 + (p.role == "tool")))) for r in rows
    ]
    assert (found := answered(doubled)) is not None and found.cause == "tool-results-wrong"
    assert answered(rows[:2]) is None
