"""Prompts by the plain chat template, and rows from requests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plumbob.doctor.record import Request, Rollout, Settings, StepRecord
from transformers import AutoTokenizer


@dataclass(frozen=True)
class Truth:
    """What a row must be, from the requests of its rollout."""

    token_ids: list[int]
    loss_mask: list[bool]
    logprobs: list[float]
    """Of the sampled ids alone."""


def load_tokenizer(settings: Settings) -> Any:
    """The model's tokenizer with the run's chat template. Raises ValueError for a folder of a model that holds none, for which
    transformers makes up an empty one.
    """
    folder = Path(settings.model)
    files = [f for kind in ("token*", "vocab*", "*.model", "*.tiktoken") for f in folder.glob(kind)]
    if folder.is_dir() and not files:
        raise ValueError(f"{folder} holds no tokenizer")
    tokenizer: Any = AutoTokenizer.from_pretrained(settings.model)
    tokenizer.chat_template = settings.chat_template or tokenizer.chat_template
    return tokenizer


def row_of(requests: Sequence[Request]) -> Truth:
    """The row of a rollout: the last prompt and its completion, with the loss where each request's completion stands."""
    last = requests[-1]
    ids = [*last.prompt_ids.tolist(), *last.token_ids.tolist()]
    known = {i: p for one in requests for i, p in enumerate(one.logprobs.tolist(), len(one.prompt_ids)) if i < len(ids)}
    return Truth(ids, [i in known for i in range(len(ids))], [known[i] for i in sorted(known)])


def render(
    tokenizer: Any, messages: Sequence[dict[str, Any]], tools: Sequence[Any] = (), *, header: bool = True
) -> list[int]:
    """The ids of a conversation by the tokenizer's own template. `header`: that which opens the assistant's next turn."""
    return tokenizer.apply_chat_template(
        list(messages), tools=list(tools) or None, add_generation_prompt=header, tokenize=True, return_dict=False
    )


def opening(rollout: Rollout) -> list[dict[str, Any]]:
    """The messages before the model's first turn."""
    return list(itertools.takewhile(lambda message: message.get("role") != "assistant", rollout.messages))


def prompts(record: StepRecord, rollout: Rollout, tokenizer: Any) -> Iterator[tuple[str, list[int]]]:
    """What the first prompt may be: ("", as it should be), and (what is missing, without one of its parts)."""
    messages, tools = opening(rollout), record.tools[rollout.tools] if rollout.tools >= 0 else []
    yield "", render(tokenizer, messages, tools)
    if tools:
        yield "the tools' descriptions", render(tokenizer, messages)
    yield "the header that opens the assistant's turn", render(tokenizer, messages, tools, header=False)
    system = [m for m in messages if m.get("role") != "system"]
    if len(system) < len(messages) and system:
        yield "the system message", render(tokenizer, system, tools)


def header_of(tokenizer: Any, rollout: Rollout) -> list[int]:
    """The ids that open the assistant's turn; empty if the template makes none at the end of a conversation, or there is none."""
    messages = opening(rollout)
    if not messages:  # a template may raise then
        return []
    whole, without = render(tokenizer, messages), render(tokenizer, messages, header=False)
    return whole[len(without) :] if whole[: len(without)] == without else []


def end_of_turn(tokenizer: Any) -> int | None:
    """The id with which the template ends an assistant's turn; None if it cannot be told."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        ids = render(tokenizer, messages, header=False)
    except Exception:  # a template raises what it likes
        return None
    # A token stays special for the template if another one is made the end token.
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if getattr(token, "special", False))}
    own = [i for i, t in enumerate(ids) if t not in special and tokenizer.decode([t]).strip() == "b"]
    return next((t for t in ids[own[-1] + 1 :] if t in special), None) if own else None
