"""Faults of the prompt and of the trained row: other tokens, another mask or other log-probabilities than were sampled."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from plumbob.rollout import Chat, Sample
from plumbob.rollout.chat import Rendered, assistant_header
from plumbob.testing.faulty import sites as at
from plumbob.testing.faulty.fault import WITH_TOOLS, Fault, table
from plumbob.testing.faulty.helpers import by_group, regrouped, turns
from plumbob.testing.faulty.sites import Site, anew

Token = tuple[int, bool, float]
"""An id of a row, whether it is in the loss, and its sampling log-probability."""


def tokens(row: Sample) -> list[Token]:
    return list(zip(row.token_ids, row.loss_mask, row.sampling_logprobs, strict=True))


def made_of(row: Sample, found: Iterable[Token]) -> Sample:
    ids, mask, logprobs = (list(column) for column in zip(*found, strict=True))
    return replace(row, token_ids=ids, loss_mask=mask, sampling_logprobs=logprobs)


def without(row: Sample, dropped: Callable[[int], bool]) -> Sample:
    """The row without the tokens at these indices; a row of which nothing would be left stays as it is."""
    kept = [token for i, token in enumerate(tokens(row)) if not dropped(i)]
    return made_of(row, kept) if any(mask for _, mask, _ in kept) else row


def masked(row: Sample, indices: Iterable[int]) -> Sample:
    """The row with these indices left out of the loss."""
    left = set(indices)
    return made_of(row, ((t, m and i not in left, 0.0 if i in left else x) for i, (t, m, x) in enumerate(tokens(row))))


def trained(row: Sample, indices: Iterable[int]) -> Sample:
    """The row with these indices in the loss as well."""
    more = set(indices)
    return replace(row, loss_mask=[m or (i in more and i > 0) for i, m in enumerate(row.loss_mask)])


def inserted(row: Sample, ids: Sequence[int], places: Iterable[int]) -> Sample:
    """The row with these ids, which are not in the loss, before each of these places."""
    found = tokens(row)
    for i in sorted(places, reverse=True):
        found[i:i] = [(token, False, 0.0) for token in ids]
    return made_of(row, found)


def resampled(row: Sample, rewrite: Callable[[list[int]], list[int]]) -> Sample:
    """The row with `rewrite(ids)` in place of the ids of each turn."""
    found: list[Token] = []
    for sampled, part in itertools.groupby(tokens(row), key=lambda token: token[1]):
        span = list(part)
        ids = rewrite([token for token, _, _ in span]) if sampled else []
        own = [x for _, _, x in span]
        if sampled:
            span = [(token, True, x) for token, x in zip(ids, (own + own[-1:] * len(ids))[: len(ids)], strict=True)]
        found += span
    return made_of(row, found)


def start(row: Sample) -> int:
    """Index of the first sampled token."""
    return row.loss_mask.index(True) if any(row.loss_mask) else len(row.loss_mask)


def encoded(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def last_tokens_only(original: Any, chat: Any, *args: Any, **kwargs: Any) -> Rendered:
    whole = original(chat, *args, **kwargs)
    lost = max(0, len(whole.token_ids) - 48)
    ends = [max(0, end - lost) for end in whole.ends]
    return replace(whole, token_ids=whole.token_ids[lost:], is_content=whole.is_content[lost:], ends=ends)


def headerless(original: Any, chat: Any, messages: Any) -> Any:
    rendered = original(chat, messages)
    end = rendered.ends[-1]
    return replace(rendered, token_ids=rendered.token_ids[:end], is_content=rendered.is_content[:end])


def rows_without_tools(stack: ExitStack, env: str, change: None) -> None:
    """The prompt of each row is the one that the chat template renders without tools."""
    bare: dict[tuple[int, ...], list[int]] = {}

    def prompt(original: Any, self: Chat, messages: Any, tools: Any, *rest: Any, **how: Any) -> Any:
        full = original(self, messages, tools, *rest, **how)
        bare[tuple(full.token_ids)] = original(self, messages, [], *rest, **how).token_ids
        return full

    def row(row: Sample, trace: Any) -> Sample:
        whole, first = tokens(row), start(row)
        ids = bare.get(tuple(row.token_ids[:first]), row.token_ids[:first])
        return made_of(row, [*((token, False, 0.0) for token in ids), *whole[first:]])

    at.chat("prompt").install(stack, env, prompt)
    at.row.install(stack, env, row)


def drifting(row: Sample, trace: Any) -> Sample:
    moved = {i + k for k, turn in enumerate(turns(row)) for i in turn}
    return replace(row, loss_mask=[i in moved for i in range(len(row.loss_mask))])


def with_another_writer(row: Sample, tokenizer: Any) -> Sample:
    return resampled(row, lambda ids: encoded(tokenizer, tokenizer.decode(ids).replace('": ', '":')))


def headers_missing(row: Sample, tokenizer: Any) -> Sample:
    length = len(encoded(tokenizer, assistant_header(tokenizer)))
    starts = [turn.start for turn in turns(row)[1:]]
    return without(row, {i for first in starts for i in range(first - length, first)}.__contains__)


def filled(row: Sample, trace: Any) -> Sample:
    """The row filled up to a multiple of 32 with its last token, in the loss."""
    return made_of(row, [*tokens(row), *[(row.token_ids[-1], True, 0.0)] * (-len(row.token_ids) % 32)])


def rolled(row: Sample, trace: Any) -> Sample:
    values = row.sampled_logprobs
    moved = iter(values[1:] + values[:1])
    return replace(row, sampling_logprobs=[next(moved) if m else 0.0 for m in row.loss_mask])


def replayed() -> Callable[[list[Sample]], list[Sample]]:
    before: list[list[Sample]] = []

    def change(rows: list[Sample]) -> list[Sample]:
        groups, old = by_group(rows), list(before)
        before[:] = groups
        return [
            replace(row, group=new[0].group, policy_version=new[0].policy_version)
            for new, group in zip(groups, old or groups, strict=False)
            for row in group
        ]

    return change


def remasked(row: Sample, mask: Iterable[bool]) -> Sample:
    """The row with another mask, and without the sampling log-probabilities of what is not in it."""
    return made_of(row, ((t, m, x if m else 0.0) for (t, _, x), m in zip(tokens(row), mask, strict=True)))


# fmt: off
FAULTS = table("rows",
    Fault("beginning of each prompt cut off",
          "A limit on prompts keeps their last tokens, and the instructions and tools at their beginning are lost.",
          at.chat("prompt"), last_tokens_only, "engine-trainer-mismatch prompt-incomplete truncated-rollouts",
          "verl-project/verl#3948", WITH_TOOLS, run_causes="never-succeeds calls-not-read"),
    Fault("tools absent from both prompts from the start",
          "The chat template renders no tools, in the engine and in the trained row.", at.chat("prompt"),
          lambda original, chat, messages, tools, *rest, **how: original(chat, messages, [], *rest, **how),
          "prompt-incomplete", "verifiers' GRPOTrainer, July-October 2025", WITH_TOOLS),
    Fault("missing assistant header in the prompt",
          "The header that opens an assistant turn is missing in prompts after the first, in the engine and in "
          "the row.", at.chat("suffix"), headerless, "prompt-incomplete", "verifiers' GRPOTrainer, July-October 2025",
          WITH_TOOLS),
    Fault("missing assistant header in the row",
          "The assistant header is missing in the row before every turn but the first.", at.row_text, headers_missing,
          "row-not-what-was-sampled prompt-incomplete", "verifiers' GRPOTrainer, July-October 2025", WITH_TOOLS),
    Fault("tools absent from the trained prompt",
          "The trained prompt is rendered without the tools that the engine's prompt describes.",
          Site("row", rows_without_tools), None, "row-not-what-was-sampled prompt-incomplete",
          "verifiers' GRPOTrainer, July-October 2025", WITH_TOOLS),
    Fault("turns encoded again by another writer of JSON",
          "Sampled turns are decoded and encoded again, with the spacing of another JSON writer.", at.row_text,
          with_another_writer, "row-not-what-was-sampled", "huggingface/trl#5224", WITH_TOOLS),
    Fault("system prompt before each tool result of the row",
          "Tool results are rendered one by one for the row, and the template begins each with the system prompt.",
          at.row, lambda row, trace: inserted(row, row.token_ids[:16], [turn.stop for turn in turns(row)[:-1]]),
          "row-not-what-was-sampled", "NovaSky-AI/SkyRL#404", WITH_TOOLS, run_causes="engine-trainer-mismatch"),
    Fault("beginning of each tool message cut from the row",
          "A system prompt that is not there is cut off each message after a turn, whose first tokens the row "
          "then lacks.", at.row,
          lambda row, trace: without(row, {turn.stop + k for turn in turns(row)[:-1] for k in range(4)}.__contains__),
          "row-not-what-was-sampled", "verl-project/verl#6501", WITH_TOOLS, run_causes="engine-trainer-mismatch"),
    Fault("end tokens removed from the rows",
          "The engine takes the end token off what it returns, so that rows have turns without an end.", at.row,
          lambda row, trace: without(row, {turn[-1] for turn in turns(row)[: -1 if row.truncated else None]}.__contains__),
          "row-not-what-was-sampled loss-mask-wrong", "vllm-project/vllm#2611, vllm-project/vllm#28185",
          run_causes="engine-trainer-mismatch stop-token-wrong"),
    Fault("rows cut at a length of the trainer's own",
          "A row of several turns is cut at the most tokens of one reply, and its later turns are not trained.",
          at.row,
          lambda row, trace: without(row, lambda i: i >= (480 if hasattr(trace.task.data, "question_id") else 225)),
          "row-not-what-was-sampled loss-mask-wrong truncated-rollouts", "rllm-org/rllm#575", WITH_TOOLS),
    Fault("one row in every place of the batch",
          "The buffer between sampling and training has room for one row, of which a step then consists.", at.batch,
          lambda rows: regrouped([rows[-1]] * len(rows), [row.group for row in rows]),
          "groups-without-variety row-not-what-was-sampled too-little-signal",
          "meta-pytorch/torchtune#2981, Itomigna2/Muesli-lunarlander#1"),
    Fault("rollouts of the step before are trained again",
          "The trainer runs ahead of the rollouts: each step trains on the rows of the step before.", anew(at.batch),
          replayed, "rewards-of-other-rollouts row-not-what-was-sampled signal-left-out",
          "PrimeIntellect-ai/prime-rl#491", steps=8, only="run",
          run_causes="weights-not-synced engine-trainer-mismatch advantages-wrong"),
    Fault("sampling log-probabilities rolled by one",
          "Each sampled token carries the sampling log-probability of the next one.", at.row, rolled,
          "loss-differs-from-settings row-not-what-was-sampled", "the review's table, pytorch/torchtune#2934",
          run_causes="engine-trainer-mismatch"),
    Fault("loss on all that follows the first prompt",
          "The mask is zeros for the first prompt and ones for the rest: tool results and later prompts are "
          "trained.", at.row, lambda row, trace: trained(row, range(start(row), len(row.token_ids))),
          "loss-mask-wrong", "THUDM/slime#1563, unslothai/unsloth#5673", WITH_TOOLS,
          run_causes="engine-trainer-mismatch"),
    Fault("reward given to the tokens of the prompt too",
          "The batch has a mask of padding alone, so that every token of the row counts as an action, and the "
          "prompt is trained.", at.row, lambda row, trace: trained(row, range(len(row.token_ids))), "loss-mask-wrong",
          "NVIDIA-NeMo/Megatron-Bridge#5959", run_causes="engine-trainer-mismatch"),
    Fault("padding of short rows in the loss",
          "Rows are filled up, and the filling counts as sampled where no end token is found.", at.row, filled,
          "loss-mask-wrong row-not-what-was-sampled", "verl-project/verl#3805", run_causes="engine-trainer-mismatch"),
    Fault("newline and header around each turn in the loss",
          "Turns are found by their headers in the tokens: the header's last token and the one after each end are "
          "trained as well.", at.row,
          lambda row, trace: trained(row, (i for turn in turns(row) for i in (turn.start - 1, turn.stop))),
          "loss-mask-wrong", "OpenHands/codescout#60", run_causes="engine-trainer-mismatch"),
    Fault("mask of the loss one token early",
          "The mask is not moved by one as the log-probabilities are, so that a turn's last token is left out and "
          "the token before its first one is trained.", at.row,
          lambda row, trace: remasked(row, [*row.loss_mask[1:], False]), "loss-mask-wrong", "CarperAI/trlx#509",
          run_causes="engine-trainer-mismatch"),
    Fault("loss mask drifts by a token per tool result",
          "The loss mask is computed from text that is tokenised again, and is off by one token more after each "
          "result.", at.row, drifting, "loss-mask-wrong row-not-what-was-sampled", "PeterGriffinJin/Search-R1#21",
          WITH_TOOLS, run_causes="engine-trainer-mismatch"),
    Fault("end of each turn left out of the loss",
          "The token that ends a turn is never in the loss, so nothing teaches the model when to stop.", at.row,
          lambda row, trace: masked(row, (turn[-1] for turn in turns(row))), "loss-mask-wrong",
          "rasbt/reasoning-from-scratch#185, verl-project/verl#3562"),
    Fault("first token of each turn left out of the loss",
          "The loss mask is sliced one token too late, so the first token of each turn is not trained.", at.row,
          lambda row, trace: masked(row, (turn[0] for turn in turns(row) if len(turn) > 1)), "loss-mask-wrong",
          "verl-project/verl#3287"),
    Fault("loss on the final turn alone",
          "Without a loss mask of its own, a conversation is trained on its last turn only.", at.row,
          lambda row, trace: masked(row, (i for turn in turns(row)[:-1] for i in turn)), "loss-mask-wrong",
          "modelscope/ms-swift#7838", WITH_TOOLS),
)
