"""Checks of stored rollouts: tools that say nothing, tasks that are few, and where a finding can be looked at."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from plumbob.rollout.toolcalls import NOT_READ
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.diagnosis.unread_calls import call_like
from plumbob.trainer.watch.change import of_same_tasks
from plumbob.trainer.watch.places import with_places
from plumbob.trainer.watch.stored_rollouts import Rollout
from plumbob.trainer.watch.traces import calls_read, copies, distinct_tasks, examine_traces, permuted, tool_results


def _rollout(
    step: int = 1,
    task: str = "t",
    number: int = 0,
    reward: float = 0.0,
    results: tuple[tuple[str, str], ...] = (),
    prompt: str = "",
    **extra: Any,
) -> Rollout:
    """A stored rollout of one call per (arguments, result)."""
    nodes: list[dict[str, Any]] = [
        {"message": {"role": "user", "content": prompt or task}, "sampled": False, "token_ids": [1, 2, 3]}
    ]
    for i, (arguments, result) in enumerate(results):
        name = "submit" if arguments.startswith("submit") else "search"
        call = {"id": f"c{i}", "name": name, "arguments": json.dumps({"q": arguments})}
        nodes.append(
            {
                "message": {"role": "assistant", "content": "", "tool_calls": [call]},
                "sampled": True,
                "token_ids": [4, 5],
            }
        )
        nodes.append(
            {
                "message": {"role": "tool", "tool_call_id": f"c{i}", "content": result},
                "sampled": False,
                "token_ids": [6],
            }
        )
    nodes.append({"message": {"role": "assistant", "content": "so"}, "sampled": True, "token_ids": [7, 8]})
    record = {
        "task": {"key": task, "data": {"answer": "paris"}},
        "nodes": nodes,
        "ok": True,
        "metrics": {},
        "rewards": {"r": {"score": reward, "weight": 1.0}},
        **extra,
    }
    return Rollout.of(record, step, number + 1, 0, number)


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (lambda i: "", "tools-return-nothing"),
        (lambda i: "Result of the search:", "tools-return-nothing"),
        (lambda i: f"page {i}: paris", None),
        (lambda i: "" if i % 2 else f"page {i}", None),  # programs that print nothing
        (lambda i: "HTTP 503: try again" if i % 3 == 0 else f"page {i}", "tools-fail"),
        (lambda i: "Error: unknown page" if i % 3 else f"page {i}", None),  # the policy's own mistakes
    ],
)  # fmt: skip
def test_tools_that_return_nothing(answer: Callable[[int], str], cause: str | None) -> None:
    rollouts = [
        _rollout(task=f"t{i}", results=((f"who {i}", answer(2 * i)), (f"where {i}", answer(2 * i + 1))))
        for i in range(12)
    ]
    found = tool_results(rollouts)
    assert found is not None and found.cause == cause
    if cause:
        place = found.places[0]
        assert (place.step, place.task, place.rollout, place.tokens) == (
            1,
            "t0",
            0,
            (5, 5),
        )  # the tool's message itself
    assert tool_results([_rollout(results=(("the same", ""),)) for _ in range(30)]) is None


def test_a_tool_that_always_says_ok_is_not_blamed_when_the_other_tools_are_no_longer_called() -> None:
    early = [_rollout(1, f"t{i}", results=((f"who {i}", f"page {i}"), (f"submit {i}", "ok"))) for i in range(30)]
    late = [_rollout(30, f"t{i}", results=((f"submit {i}", "ok"),)) for i in range(30)]
    found = tool_results([*early, *late])
    assert found is not None and found.cause is None
    silent = [_rollout(30, f"t{i}", results=((f"who {i}", "ok"),)) for i in range(30)]
    found = tool_results([*early, *silent])
    assert found is not None and found.cause == "tools-return-nothing" and "from step 30 on" in found.evidence


def test_what_is_told_of_a_call_that_was_not_read_is_no_tool_result() -> None:
    """A destroyed policy writes nothing but such calls, and no tool is to blame."""
    rollouts = [_rollout(task=f"t{i}", results=((f"who {i}", f"{NOT_READ}it is not valid JSON."),)) for i in range(30)]
    assert all(rollout.results == [] for rollout in rollouts) and tool_results(rollouts) is None


def test_what_is_told_of_a_tool_that_the_policy_made_up_is_no_tool_result() -> None:
    """Seen: SmolLM2-135M calls the `tool_name` of the example that describes the form of a call."""
    told = "Error: there is no tool 'search'; the tools are: lookup."
    rollouts = [_rollout(task=f"t{i}", results=((f"who {i}", told),), tools=[{"name": "lookup"}]) for i in range(30)]
    assert all(rollout.results == [] for rollout in rollouts) and tool_results(rollouts) is None
    offered = [_rollout(task=f"t{i}", results=((f"who {i}", told),), tools=[{"name": "search"}]) for i in range(30)]
    found = tool_results(offered)
    assert found is not None and found.cause == "tools-fail"


def test_duplicate_prompts_are_few_tasks_whatever_their_keys_are() -> None:
    def stored(different: int) -> list[Rollout]:
        rows = [_rollout(task=f"key-{i}", prompt=f"question {i % different}") for i in range(32)]
        return [dataclasses.replace(row, group=i) for i, row in enumerate(rows)]

    found, healthy = distinct_tasks(stored(8)), distinct_tasks(stored(32))
    assert found is not None and found.cause == "few-distinct-tasks" and "32 stored groups have 8" in found.evidence
    assert healthy is not None and healthy.cause is None
    assert distinct_tasks(stored(8)[:10]) is None


def test_games_that_begin_with_the_same_rules_are_different_tasks() -> None:
    """Seen: the wordle of verifiers' repository, where only the seed of the hidden word differs."""

    def stored(seeds: int, role: str = "user") -> list[Rollout]:
        rows = []
        for i in range(32):
            told = {"message": {"role": role, "content": "X X G X X"}, "sampled": False, "token_ids": [9]}
            guess = {"message": {"role": "assistant", "content": "[apple]"}, "sampled": True, "token_ids": [8]}
            rules = {"message": {"role": "user", "content": "rules"}, "sampled": False, "token_ids": [1]}
            record = {
                "task": {"key": f"key-{i}", "data": {"idx": i, "name": f"game {i}", "info": {"seed": i % seeds}}},
                "nodes": [rules, guess, told, guess],
                "ok": True,
                "metrics": {},
                "rewards": {},
            }  # fmt: skip
            rows.append(Rollout.of(record, 1, i + 1, i, 0))
        return rows

    healthy, few, silent = (distinct_tasks(rows) for rows in (stored(32), stored(8), stored(32, "tool")))
    assert healthy is not None and healthy.cause is None and "1 different prompts and 32" in healthy.evidence
    assert few is not None and few.cause == "few-distinct-tasks"
    assert silent is not None and silent.cause == "few-distinct-tasks"  # a template that has lost its question


UNREAD = {"turn": 0, "text": "<tools>{}", "explained": False}


def test_findings_say_where_to_look_and_how(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces/step_1.jsonl").write_text("")
    rollouts = [
        _rollout(number=0, stop_condition="agent_completed"),
        _rollout(number=1, stop_condition="max_turn_tokens", info={"unread_calls": [UNREAD]}),
    ]  # fmt: skip
    cut = with_places(Finding("c", "fail", "e", "truncated-turns", 5), rollouts, tmp_path)
    assert [(p.rollout, p.tokens) for p in cut.places] == [(1, (3, 4))]
    assert "step_1.jsonl" in cut.command and "sed -n 2p" in cut.command
    unread = with_places(Finding("c", "fail", "e", "calls-in-unread-form", 5), rollouts, tmp_path)
    assert [(p.rollout, p.tokens) for p in unread.places] == [(1, (3, 4))]
    numbers = with_places(Finding("c", "fail", "e", "learning-rate-too-low", 5), rollouts, tmp_path)
    assert numbers.places == () and numbers.command == f"doctor --config {tmp_path / 'config.toml'}"
    assert with_places(Finding("c", "pass", "e"), rollouts, tmp_path).command == ""


def test_tasks_that_were_seen_twice_are_compared_with_themselves() -> None:
    """The later half has harder tasks as well, so that the plain mean falls; on the same tasks the reward rises."""
    early = [_rollout(step=1, task=f"t{i}", number=j, reward=0.1 * (i % 5)) for i in range(10) for j in range(2)]
    late = [
        _rollout(step=9, task=f"t{i}", number=j, reward=0.1 * (i % 5) + 0.3 + 0.01 * i)
        for i in range(10)
        for j in range(2)
    ]
    hard = [_rollout(step=9, task=f"h{i}", number=0, reward=0.0) for i in range(50)]
    change = of_same_tasks([*early, *late, *hard])
    assert change is not None and change.difference == pytest.approx(0.345) and change.low > 0
    assert of_same_tasks([*early, *hard]) is None


def _scored(engine: list[float], trainer: list[float], number: int) -> Rollout:
    node = {"sampled": True, "mask": [True] * len(engine), "logprobs": engine, "trainer_logprobs": trainer}
    message = {"role": "assistant", "content": "so"}
    return _rollout(number=number, nodes=[{**node, "message": message, "token_ids": [7] * len(engine)}])


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda values, draw: values[::-1], "logprobs-permuted"),
        (lambda values, draw: [values[-1], *values[:-1]], "logprobs-permuted"),
        (lambda values, draw: [v - 0.5 for v in values], None),  # another context
        (lambda values, draw: [v + draw.gauss(0, 0.005) for v in values], None),  # rounding in bfloat16
    ],
)
def test_log_probabilities_of_other_tokens_are_told_from_other_log_probabilities(change, cause):
    draw, rows = random.Random(0), []
    for number in range(32):
        values = [-draw.expovariate(2.0) for _ in range(40)]
        rows.append(_scored(values, change(values, draw), number))
    found = permuted(rows, {}, 1)
    assert (found.cause if found else None) == cause


def test_a_step_that_trained_with_other_numbers_than_it_stored_is_told():
    rows = [_scored([-0.1, -2.0, -0.5], [-0.1, -2.0, -0.5], number) for number in range(32)]
    assert permuted(rows, {1: 1e-6}, 1) is None
    found = permuted(rows, {1: 0.04}, 1)
    assert found and found.cause == "logprobs-permuted"
    # With several updates in a step, old log-probabilities may be those of weights between them.
    found = permuted(rows, {1: 0.04}, 4)
    assert found and found.cause == "ratio-to-reference"
    found = permuted(rows, {1: 0.5}, 4)  # as far apart, no update of a step takes them
    assert found and found.cause == "logprobs-permuted"


def test_a_call_that_is_no_json_any_more_is_in_no_other_form():
    broken = '{"name": "search", "arguments": "arguments": "paris"}}"q": "arguments"'
    whole = '{"name": "search", "arguments": {"q": "paris"}}'
    assert not call_like(f"Let me see. {broken}", "search", ["q"])
    assert call_like(f"Let me see. {whole}", "search", ["q"])


def test_replies_that_name_a_tool_and_its_arguments_are_calls_that_were_not_read():
    tools = [{"name": "search", "parameters": {"properties": {"q": {"type": "string"}}}}]
    said = '<function_call name="search">{"q": "paris"}</function_call>'
    node = {"sampled": True, "token_ids": [7, 8], "message": {"role": "assistant", "content": said}}
    rows = [_rollout(number=i, nodes=[node], tools=tools) for i in range(8)]
    found = calls_read(rows)
    assert found and found.cause == "calls-in-unread-form" and found.places[0].rollout == 0
    # Words about a tool are no call, and neither is a call of a tool that the task does not have.
    node = {**node, "message": {"role": "assistant", "content": "I will search for paris."}}
    assert calls_read([_rollout(number=i, nodes=[node], tools=tools) for i in range(8)]) is None
    node = {**node, "message": {"role": "assistant", "content": said}}
    assert calls_read([_rollout(number=i, nodes=[node], tools=[]) for i in range(8)]) is None


def test_copies_within_groups_are_told_from_likely_replies() -> None:
    """16 groups of 4: pairs of equal rollouts are copies if each was unlikely, and none if the policy is nearly certain."""

    def rollout(group: int, number: int, reply: int, logprob: float) -> Rollout:
        return dataclasses.replace(
            _rollout(task=f"t{group}", number=number), group=group, token_ids=(1, reply), logprob=logprob
        )

    def group_of(replies: Sequence[int], logprob: float) -> list[Rollout]:
        return [rollout(g, k, g * 10 + reply, logprob) for g in range(16) for k, reply in enumerate(replies)]

    found = copies(group_of((0, 0, 1, 1), -20.0))
    assert found and found.cause == "groups-without-variety" and "32 of 64" in found.evidence and found.places
    for innocent in (group_of((0, 0, 0, 0), -0.05), group_of((0, 1, 2, 3), -20.0)):
        assert (found := copies(innocent)) and found.verdict == "pass"
    assert copies([_rollout(number=k) for k in range(4)]) is None


@pytest.mark.parametrize(("copied", "cause"), [(True, "groups-without-variety"), (False, "engine-trainer-mismatch")])
def test_copies_are_not_taken_for_a_sampler_that_prefers_their_tokens(tmp_path, copied, cause) -> None:
    """64 rollouts whose tokens are likelier than entropies say: one draw of each of eight tasks, or draws of their own."""
    rollouts = []
    for k in range(64):
        group, reply = k // 8, 0 if copied else k
        own = {"group": group, "token_ids": (1, group, reply), "logprob": -20.0, "gap": 1e-7, "entropy": 2.0}
        excess = 1.0 + 0.01 * (k % 8)
        rollouts.append(dataclasses.replace(_rollout(task=f"t{group}", number=k), excess=excess, **own))
    found = {f.cause for f in examine_traces(tmp_path, TrainConfig(), rollouts)}
    assert found & {"groups-without-variety", "engine-trainer-mismatch"} == {cause}


def test_rows_with_other_tokens_than_their_rollouts_are_not_blamed_on_log_probabilities(tmp_path):
    """Padding in the loss has log-probabilities of its own, which no stored rollout has."""
    rows = [_scored([-0.1, -2.0, -0.5], [-0.1, -2.0, -0.5], number) for number in range(32)]
    metrics = [{"step": 1.0, "sync/sampling_gap": 3.6}]
    assert "logprobs-permuted" in {f.cause for f in examine_traces(tmp_path, TrainConfig(), rows, metrics)}
    for name in ("rollout/changed", "rollout/context_trained"):
        found = examine_traces(tmp_path, TrainConfig(), rows, [{**metrics[0], name: 0.5}])
        assert "logprobs-permuted" not in {f.cause for f in found}
