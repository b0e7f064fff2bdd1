"""Training rows are compared with the rollouts they come from: every metric is 0 until one thing is changed."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plumbob.rollout import Sample
from plumbob.trainer.algorithm.advantages import AdvantageSettings, step_advantages
from plumbob.trainer.policy.loading import load_tokenizer
from plumbob.trainer.training.row_checks import first_prompts, header_of, opens_turn, row_checks

SETTINGS = [
    AdvantageSettings(),
    AdvantageSettings(scale="group", baseline="leave_one_out"),
    AdvantageSettings(scale="batch", overlong="penalise"),
    AdvantageSettings(reward_weights={"a": 2.0}),
    AdvantageSettings(random_rewards=3),
]


LOGPROBS = (0.0, 0.0, -0.5, -1.0, 0.0, -1.5, -2.0)
"""Log-probabilities of each row, 0 where nothing was sampled."""


def step(seed: int, groups: int = 3, size: int = 4) -> tuple[list[Sample], list[Any]]:
    """A step's rows and the traces that they were made of: a prompt, a turn, a tool result, a turn."""
    rng = random.Random(seed)
    samples, traces = [], []
    for group in range(groups):
        for i in range(size):
            nodes = [
                SimpleNamespace(token_ids=[1, group], mask=[False, False], logprobs=[]),
                SimpleNamespace(token_ids=[rng.randrange(99), i], mask=[True, True], logprobs=[-0.5, -1.0]),
                SimpleNamespace(token_ids=[7], mask=[False], logprobs=[]),
                SimpleNamespace(token_ids=[rng.randrange(99)] * 2, mask=[True, True], logprobs=[-1.5, -2.0]),
            ]
            parts = {"a": rng.choice([0.0, 1.0]), "b": rng.random() / 8}
            reward = sum(parts.values())
            name = f"{group}-{i}"
            traces.append(SimpleNamespace(nodes=nodes, reward=reward, task=SimpleNamespace(hash=group), id=name))
            ids = [t for node in nodes for t in node.token_ids]
            mask = [m for node in nodes for m in node.mask]
            sample = Sample(ids, mask, list(LOGPROBS), reward, f"0/{group}", "", rng.random() < 0.2)
            samples.append(dataclasses.replace(sample, rewards=parts, trace_id=name))
    return samples, traces


def checked(
    samples: Sequence[Sample], traces: Sequence[Any], settings: AdvantageSettings = SETTINGS[0], whole: bool = True
) -> dict[str, float]:
    return row_checks(samples, traces, step_advantages(samples, settings).values, settings, whole=whole)


@given(st.integers(0, 1000), st.sampled_from(SETTINGS), st.booleans())
def test_rows_of_the_step_s_own_rollouts_differ_in_nothing(seed, settings, whole):
    samples, traces = step(seed)
    random.Random(seed).shuffle(traces)
    found = checked(samples, traces, settings, whole)
    assert set(found.values()) == {0.0} and len(found) == (9 if whole else 5)


def test_rollouts_of_different_tasks_may_have_the_same_tokens():
    samples, traces = step(0)
    ids = list(samples[0].token_ids)
    for i in (0, 4, 8):
        traces[i].nodes = [
            SimpleNamespace(token_ids=ids, mask=list(samples[0].loss_mask), logprobs=[-0.5, -1.0, -1.5, -2.0])
        ]
        samples[i] = dataclasses.replace(samples[i], token_ids=ids)
    assert set(checked(samples, traces).values()) == {0.0}


def changed(index: int, **values: Any) -> Callable[[list[Sample]], list[Sample]]:
    def change(samples: list[Sample]) -> list[Sample]:
        samples[index] = dataclasses.replace(samples[index], **values)
        return samples

    return change


@pytest.mark.parametrize(
    ("metric", "share", "change"),
    [
        ("rollout/unmatched", 1 / 12, changed(5, token_ids=[9] * 7, trace_id="of another step")),
        ("rollout/changed", 1 / 12, changed(5, token_ids=[9] * 7)),
        ("rollout/copied", 1 / 12, lambda rows: [*rows[:3], rows[2], *rows[4:]]),
        ("rollout/copied", 11 / 12, lambda rows: [dataclasses.replace(rows[0], group=row.group) for row in rows]),
        ("rollout/other_logprobs", 1 / 12, changed(5, sampling_logprobs=[0.0, 0.0, -0.5, -1.0, 0.0, -1.5, -2.1])),
        ("rollout/other_logprobs", 1 / 12, changed(5, sampling_logprobs=[0.0, 0.0, -0.5, -1.0, 0.0, -1.5, math.nan])),
        ("rollout/sampled_untrained", 1 / 48, changed(0, loss_mask=[False, False, False, True, False, True, True])),
        ("rollout/context_trained", 1 / 48, changed(0, loss_mask=[False, False, True, True, True, True, True])),
        ("reward/misplaced", 1 / 12, changed(3, reward=9.0, rewards={"a": 9.0})),
        ("groups/mixed", 1 / 2, lambda rows: [dataclasses.replace(s, group=s.group.replace("2", "1")) for s in rows]),
    ],
)
def test_each_change_is_seen_as_what_it_is(metric, share, change):
    samples, traces = step(0)
    found = checked(change(samples), traces)
    assert found[metric] == pytest.approx(share)
    others = {name for name, value in found.items() if value and name != metric}
    # Copies may be in the groups of other tasks, and the rewards of a group may differ from its rollouts'.
    assert others <= {"advantage/wrong", *(["groups/mixed"] if metric == "rollout/copied" else [])}


def test_the_log_probabilities_of_other_tokens_of_the_row_are_not_other_ones():
    samples, traces = step(0)
    samples[5] = dataclasses.replace(samples[5], sampling_logprobs=[0.0, 0.0, -2.0, -0.5, 0.0, -1.0, -1.5])
    assert set(checked(samples, traces).values()) == {0.0}


def test_log_probabilities_that_are_not_numbers_on_both_sides_are_the_same():
    samples, traces = step(0)
    traces[5].nodes[1].logprobs = [math.nan, -1.0]
    samples[5] = dataclasses.replace(samples[5], sampling_logprobs=[0.0, 0.0, math.nan, -1.0, 0.0, -1.5, -2.0])
    assert set(checked(samples, traces).values()) == {0.0}


@pytest.mark.parametrize(
    ("wrong", "change"),
    [
        (12, lambda values: [-v - 0.01 for v in values]),
        (1, lambda values: [values[0] + 0.1, *values[1:]]),
    ],
)
def test_other_advantages_than_follow_from_the_rewards_are_counted(wrong, change):
    samples, traces = step(1)
    values = step_advantages(samples, SETTINGS[0]).values
    found = row_checks(samples, traces, change(values), SETTINGS[0], whole=True)
    assert found["advantage/wrong"] == pytest.approx(wrong / 12)


@pytest.mark.parametrize(("applied", "wrong"), [(1.0, 0), (0.0, 12), (-1.0, 12)])
def test_a_kl_penalty_of_the_reward_must_be_in_the_advantages(applied, wrong):
    samples, traces = step(1)
    settings = dataclasses.replace(SETTINGS[0], kl_beta=0.1)
    sums = [float(i * i) for i in range(len(samples))]
    values = step_advantages(samples, settings, [applied * kl for kl in sums]).values
    found = row_checks(samples, traces, values, settings, sums, whole=True)
    assert found["advantage/wrong"] == pytest.approx(wrong / 12)


def test_what_cannot_be_known_is_left_out():
    samples, traces = step(2)
    values = step_advantages(samples, SETTINGS[0]).values
    part = row_checks(samples, traces[:6], values, SETTINGS[0], whole=False)  # the others are on another process
    assert part == dict.fromkeys(part, 0.0) and "rollout/unmatched" not in part
    assert row_checks(samples, [], values, SETTINGS[0], whole=False) == {}
    huge = [dataclasses.replace(s, reward=1e300, rewards={}) for s in samples]
    for trace in traces:
        trace.reward = 1e300
    assert "advantage/wrong" not in row_checks(huge, traces, values, SETTINGS[0], whole=True)


class Letters:
    """A tokenizer whose tokens are characters; letters other than a to z become a question mark."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) if c.isascii() else ord("?") for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def opened(text: str, prompt: str | None = None, tools: Any = None) -> Any:
    """A rollout whose first prompt has one message, and is `prompt` if that is given."""
    message = SimpleNamespace(content=text)
    first = SimpleNamespace(
        sampled=False, token_ids=Letters().encode(text if prompt is None else prompt), message=message
    )
    spoken = SimpleNamespace(sampled=True, token_ids=Letters().encode("look_up answer"))
    return SimpleNamespace(tools=tools, nodes=[first, spoken])


@pytest.mark.parametrize(
    ("prompt", "share"),
    [
        ("use look_up(key) or answer", 0.0),
        ("use look_up(key)", 1.0),
        ("use look_up or answer", 1.0),
        ('{"name": "look_up", "properties": {"key": {}}}, {"name": "answer"}', 0.0),
        ('{"name": "look_up"}, {"name": "answer"}: look for the key', 1.0),
        ('use the tools "look_up" and "answer": <name>look_up</name> <parameter>key</parameter>', 0.0),
    ],
)
def test_a_prompt_must_name_each_tool_that_the_rollout_has_and_its_parameters(prompt, share):
    parameters = {"type": "object", "properties": {"key": {"type": "string"}}}
    tools = [SimpleNamespace(name="look_up", parameters=parameters), SimpleNamespace(name="answer", parameters=None)]
    found = first_prompts([opened(prompt, tools=tools)] * 9, Letters())
    assert found == {"rollout/tools_unshown": share, "rollout/prompts_cut": 0.0}
    silent: Any = SimpleNamespace(tools=tools, nodes=opened(prompt).nodes[:1])
    assert first_prompts([silent], Letters()) == {}


LONG = "Follow the chain of tables, one after the other, and give the value at its end."


@pytest.mark.parametrize(
    ("text", "prompt", "cut"),
    [
        (LONG, f"<user>\n{LONG}<end>", 0.0),
        (LONG, f"<user>{LONG.upper()}", 0.0),
        (LONG, LONG[30:], 1.0),
        (LONG, "", 1.0),
        ("Go.", "", 0.0),  # too short to be sure
        (f"Öl für dich {LONG}", f"?l f?r dich {LONG}", 0.0),  # what the tokenizer cannot write
    ],
)
def test_a_prompt_must_have_the_beginning_of_its_messages(text, prompt, cut):
    assert first_prompts([opened(text, prompt)], Letters())["rollout/prompts_cut"] == cut


def test_a_first_prompt_must_end_with_the_header_of_an_assistant_turn():
    """The header is read with the turn that it opens, whose ids the mask leaves out."""
    tokenizer = load_tokenizer("tiny")
    header = header_of(tokenizer)
    assert header and header_of(Letters()) is None

    def asked(opening: str) -> Any:
        ids = tokenizer.encode(opening, add_special_tokens=False)
        question = SimpleNamespace(sampled=False, token_ids=[5, 6, 7], message=SimpleNamespace(content="x"))
        turn = SimpleNamespace(sampled=True, token_ids=[*ids, 8], mask=[False] * len(ids) + [True])
        return SimpleNamespace(tools=None, nodes=[question, turn])

    assert first_prompts([asked(header + "\n")], tokenizer)["rollout/headless"] == 0.0
    assert first_prompts([asked(header + "\n"), asked("")], tokenizer)["rollout/headless"] == 0.5


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("a question<|im_end|>\n<|im_start|>assistant\n", True),
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", True),
        ("<|im_start|>assistant\nThe answer", False),
        ("a question<|im_end|>\n", False),
    ],
)
def test_a_template_may_open_or_close_a_thought_after_its_header(prompt, opens):
    for header in ("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n"):
        assert opens_turn(prompt, header) == opens
