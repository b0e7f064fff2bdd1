"""Did the engine compute with another prompt than the one that it was given, and with which?"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from plumbob.rollout import Sample, verifiers_messages
from plumbob.rollout.chat import assistant_header
from plumbob.rollout.control_tokens import added_tokens
from plumbob.trainer.doctor.subject import Subject
from plumbob.trainer.doctor.third_opinion import Explanation, Ids, Third, by_turn, turn_of


def other_prompts(
    subject: Subject, third: Third, rows: Sequence[Sample], wrong: Sequence[torch.Tensor]
) -> Iterator[Explanation]:
    """The engine may have seen another prompt, in each turn, than the one it was given, which is the one in the row."""
    tokenizer = subject.run.tokenizer
    header = len(tokenizer.encode(assistant_header(tokenizer), add_special_tokens=False))
    turns = [turn for row in rows for turn in by_turn(row)]
    ways: list[tuple[str, str, Callable[[Ids], Ids]]] = [
        ("prompt-replaced", "without the first token of prompts", lambda ids: ids[1:]),
        ("prompt-replaced", "without the last token of prompts", lambda ids: ids[:-1]),
        ("prompt-replaced", "with the last token of prompts twice", lambda ids: ids + ids[-1:]),
        ("prompt-replaced", "with the first token of prompts twice", lambda ids: ids[:1] + ids),
        ("prompt-replaced", "with the first token of prompts three times", lambda ids: 2 * ids[:1] + ids),
        ("truncated-context", "without the first quarter of prompts", lambda ids: ids[len(ids) // 4 :]),
        ("truncated-context", "without the first half of prompts", lambda ids: ids[len(ids) // 2 :]),
        ("assistant-header-missing", "without the assistant header at the end of prompts", lambda ids: ids[:-header]),
    ]
    special = added_tokens(tokenizer)
    ways.append(
        ("prompt-replaced", "without special tokens in prompts", lambda ids: [i for i in ids if i not in special])
    )
    found = Counter(token for prompt, _ in turns for token in prompt if token in special)
    if len(found) > 1:
        for token, _ in found.most_common(SPECIAL):
            name = tokenizer.convert_ids_to_tokens(token)
            ways.append(("prompt-replaced", f"without the tokens {name!r} in prompts", partial(_lacking, token)))
    ways.append(
        (
            "prompt-replaced",
            "with prompts that are decoded and encoded again",
            lambda ids: tokenizer(tokenizer.decode(ids)).input_ids,
        )
    )
    ways.append(
        (
            "prompt-replaced",
            "with the arguments of earlier calls as a string that holds their JSON",
            lambda ids: _called_by_strings(tokenizer, ids),
        )
    )
    if (start := tokenizer.bos_token_id) is not None:
        ways.append(("prompt-replaced", "with one more start token", lambda ids: [start, *ids]))
    openings = _toolless(subject, rows)
    if openings:
        ways.append(("tools-not-in-prompt", "without tools in prompts", lambda ids: _reopened(ids, openings)))
    tried = [(cause, name, [(change(prompt), reply) for prompt, reply in turns]) for cause, name, change in ways]
    for name, roles, texts, kept in LEFT_OUT:
        spans = [_places(subject, row, roles, texts) for row in rows]
        changed = [
            (_left(prompt, [r for r in own if r.stop <= len(prompt)], kept), reply)
            for row, own in zip(rows, spans, strict=True)
            for prompt, reply in by_turn(row)
        ]
        if changed != turns:
            tried.append(("prompt-replaced", name, changed))
    for cause, name, changed in tried:
        if all(prompt for prompt, _ in changed):
            scores = [third.scores(turn_of(prompt, reply)) for prompt, reply in changed]
            yield Explanation(cause, name, (torch.cat(scores) - torch.cat(list(wrong))).abs().mean().item())


LEFT_OUT = (
    ("without earlier tool results in prompts", ("tool",), True, 1),
    ("without tool results in prompts", ("tool",), True, 0),
    ("without the system message in prompts", ("system",), False, 0),
    ("without the text of the system message in prompts", ("system",), True, 0),
    ("without the texts of messages in prompts", ("system", "user", "tool"), True, 0),
    ("without the texts of user messages in prompts", ("user",), True, 0),
)
"""(what is left out, roles of the messages, whether their texts alone are left out, how many of the last ones stay), as a
server's own template may do."""
SPECIAL = 4
"""Most special tokens, the most frequent ones of prompts, each of which is tried to be missing by itself."""
ARGUMENTS = re.compile(r'("arguments": ?)(\{[^{}]*\})')
"""The arguments of a call, as most chat templates write them."""


def _lacking(token: int, ids: Ids) -> Ids:
    return [i for i in ids if i != token]


def _called_by_strings(tokenizer: Any, ids: Ids) -> Ids:
    """The prompt with the arguments of each call encoded as JSON twice; `ids` if there is none."""
    text = tokenizer.decode(ids)
    changed = ARGUMENTS.sub(lambda found: found[1] + json.dumps(found[2]), text)
    return ids if changed == text else tokenizer.encode(changed, add_special_tokens=False)


def _places(subject: Subject, row: Sample, roles: Collection[str], texts: bool) -> list[range]:
    """Places of the row's tokens that belong to given messages of these roles, or with `texts` to their texts alone."""
    drawn, places, start = subject.drawn, [], 0
    trace = next((t for s, t in zip(drawn.samples, drawn.traces, strict=True) if s is row), None)
    for node in trace.nodes if trace is not None else ():
        size = len(node.token_ids)
        if not node.sampled and node.message.role in roles:
            marks = node.is_content if texts else [True] * size
            if own := [start + i for i, kept in enumerate(marks) if kept]:
                places.append(range(own[0], own[-1] + 1))
        start += size
    return places


def _left(ids: Ids, texts: Sequence[range], kept: int) -> Ids:
    """`ids` without these texts, but for the last `kept` of them."""
    gone = {i for text in texts[: len(texts) - kept] for i in text}
    return [token for i, token in enumerate(ids) if i not in gone]


def _toolless(subject: Subject, rows: Sequence[Sample]) -> list[tuple[Ids, Ids]]:
    """(first prompt, the same rendered without tools) of each row whose task has tools."""
    drawn, pairs = subject.drawn, []
    for row in rows:
        trace = next((t for s, t in zip(drawn.samples, drawn.traces, strict=True) if s is row), None)
        if trace is None or not trace.tools:
            continue
        opening = itertools.takewhile(lambda node: not node.sampled, trace.nodes)
        messages = [verifiers_messages.to_wire(node.message) for node in opening]
        bare = subject.run.sampler.chat.prompt(messages, tools=[]).token_ids
        pairs.append((row.token_ids[: row.loss_mask.index(True)], list(bare)))
    return pairs


def _reopened(ids: Ids, openings: Sequence[tuple[Ids, Ids]]) -> Ids:
    """The prompt with the second opening in place of the first, where it begins with the first."""
    return next((bare + ids[len(full) :] for full, bare in openings if ids[: len(full)] == full), ids)
