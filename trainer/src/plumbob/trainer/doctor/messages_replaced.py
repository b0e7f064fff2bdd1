"""Which message of its prompts does the engine replace? A chat template may put a default in place of a system prompt.

Asked where engine and trainer differ on sampled tokens and nothing else explains it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import torch
from plumbob.rollout import EngineError, Sampling, verifiers_messages
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.doctor.environment import spread
from plumbob.trainer.doctor.subject import Subject, mean_abs
from plumbob.trainer.doctor.third_opinion import Ids, Third, turn_of

PROMPTS = 8
"""Number of first prompts that are asked."""
SHORTEST = 3
"""Smallest number of tokens of a text that is put in another order."""
ASKED = Sampling(1, temperature=2.0, seed=0)
"""One token, at a temperature that keeps every token uncertain."""


def replaced_message(subject: Subject, third: Third, limit: float) -> str | None:
    """Evidence that the engine replaces the messages of one role in first prompts; None if there is none.

    The tokens of these messages are put in another order. If engine and third opinion, which differed by more than
    `limit` nats after the messages as they are, agree then, the engine does not take these messages as they are: no
    other defect of an engine ends with the order of words in one message.
    """
    chosen = [subject.drawn.samples[i] for i in spread(len(subject.drawn.samples), PROMPTS)]
    prompts = [row.token_ids[: row.loss_mask.index(True)] for row in chosen if row.num_sampled]
    texts = _texts(subject)
    try:
        before = _gap(subject, third, prompts)
        for role, own in texts.items() if before > max(limit, thresholds.BLIND) else ():
            changed = [_shuffled(ids, own) for ids in prompts]
            if changed != prompts and (after := _gap(subject, third, changed)) <= limit:
                return (
                    f"after first prompts the engine differs by {before:.2g} nats, and by {after:.2g} once the tokens of "
                    f"their {role} messages stand in another order: it replaces these messages"
                )
    except EngineError:
        return None
    return None


def _texts(subject: Subject) -> dict[str, list[Ids]]:
    """Role -> token ids of the texts of all messages before the first sampled one, longest first."""
    found: dict[str, set[str]] = {}
    for trace in subject.drawn.traces:
        for node in itertools.takewhile(lambda node: not node.sampled, trace.nodes):
            message = verifiers_messages.to_wire(node.message)
            if isinstance(content := message.get("content"), str) and content.strip():
                found.setdefault(str(message["role"]), set()).add(content.strip())
    encode = subject.run.tokenizer.encode
    return {
        role: sorted((list(encode(text, add_special_tokens=False)) for text in texts), key=len, reverse=True)
        for role, texts in found.items()
    }


def _shuffled(ids: Ids, texts: Sequence[Ids]) -> Ids:
    """The prompt with the earliest of these texts that it holds in another order of tokens.

    A text's outermost tokens stay: they may be merged with what stands around it.
    """
    found: tuple[int, Ids] | None = None
    for text in texts:
        inner = text[1:-1]
        at = next((i for i in range(len(ids) - len(inner)) if ids[i : i + len(inner)] == inner), None)
        if len(inner) >= SHORTEST and at is not None and (found is None or at < found[0]):
            found = at, inner
    if found is None:
        return ids
    at, inner = found
    return [*ids[:at], *random.Random(0).sample(inner, len(inner)), *ids[at + len(inner) :]]


def _gap(subject: Subject, third: Third, prompts: Sequence[Ids]) -> float:
    """Mean |difference| of engine and third opinion on one token after each prompt, in nats."""
    most = subject.run.config.max_context - 1
    asked = [ids[:most] for ids in prompts]
    replies = subject.generate(asked, ASKED)
    rows = [turn_of(p, list(reply.token_ids)) for p, reply in zip(asked, replies, strict=True)]
    own = [third.scores(row, temperature=ASKED.temperature) for row in rows]
    return mean_abs([torch.tensor(reply.logprobs) for reply in replies], own)
