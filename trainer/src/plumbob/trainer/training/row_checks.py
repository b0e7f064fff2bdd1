"""Metrics that compare a step's training rows with the rollouts that they come from: all are 0 in a correct run."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from plumbob.rollout import Sample
from plumbob.rollout.chat import ChatTemplateError, assistant_header
from plumbob.trainer.algorithm.advantages import AdvantageSettings
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.training.expected_advantages import differing, expected_advantages

if TYPE_CHECKING:
    import verifiers.v1 as vf

LARGEST_REWARD = 1e100
"""Size of a reward above which advantages are not computed a second time: squares of larger ones are beyond floats."""


def row_checks(
    samples: Sequence[Sample],
    traces: Sequence[vf.Trace],
    advantages: Sequence[float],
    settings: AdvantageSettings,
    kl_sums: Sequence[float] | None = None,
    *,
    whole: bool,
) -> dict[str, float]:
    """Compare rows [B] and their advantages [B] with the traces that have the same token ids.

    `traces`: the step's rollouts of this process. `kl_sums` [B]: see `expected_advantages`. `whole`: whether the traces are
    those of all processes; if not, rows without a trace are left out, and advantages are not compared. Returns only what can
    be computed:

    `reward/misplaced`: share of the rows with a trace whose reward is not the trace's.
    `rollout/unmatched`: share of the rows that are no rollout of this step.
    `rollout/changed`: share of the rows whose token ids are not those of their rollout.
    `rollout/copied`: share of the rows that have the token ids of a rollout which has as many rows as it should without them.
    `rollout/other_logprobs`: share of the rows with a trace whose log-probabilities are not the trace's, in any order.
    `rollout/sampled_untrained`: share of the sampled tokens that the loss mask leaves out.
    `rollout/context_trained`: tokens that the loss mask includes although nobody sampled them, as a share of the sampled ones.
    `groups/mixed`: share of the groups whose rollouts are of more than one task.
    `advantage/wrong`: share of the rows whose advantage is not what the settings say of the traces' rewards.
    """
    by_tokens: dict[tuple[int, ...], list[vf.Trace]] = defaultdict(list)
    for trace in traces:
        by_tokens[tuple(t for node in trace.nodes for t in node.token_ids)].append(trace)
    # Rollouts of different tasks can have the same tokens, so a row's own trace comes first.
    rows = [tuple(s.token_ids) for s in samples]
    pairs = [
        (s, sorted(by_tokens.get(row, []), key=lambda t: t.id != s.trace_id))
        for s, row in zip(samples, rows, strict=True)
    ]
    matched = [(s, found) for s, found in pairs if found]
    result: dict[str, float] = {}
    if whole and samples:
        ids = {trace.id for trace in traces}
        changed = sum(not found and s.trace_id in ids for s, found in pairs)
        result["rollout/unmatched"] = (len(samples) - len(matched) - changed) / len(samples)
        result["rollout/changed"] = changed / len(samples)
        rollouts = (own for own, found in by_tokens.items() for _ in found)
        result["rollout/copied"] = surplus(rows, rollouts) / len(samples)
    if not matched:
        return result
    rewards = [next((t.reward for t in found if _same(s.reward, t.reward)), found[0].reward) for s, found in matched]
    misplaced = sum(not _same(s.reward, reward) for (s, _), reward in zip(matched, rewards, strict=True))
    result["reward/misplaced"] = misplaced / len(matched)
    result |= _tokens(matched) | _groups(matched)
    sizes = map(abs, [*rewards, *(value for s in samples for value in s.rewards.values())])
    if whole and len(matched) == len(samples) and max(sizes) < LARGEST_REWARD:
        wrong = differing(advantages, expected_advantages(samples, rewards, settings, kl_sums))
        result["advantage/wrong"] = len(wrong) / len(samples)
    return result


def surplus(rows: Iterable[tuple[int, ...]], rollouts: Iterable[tuple[int, ...]]) -> int:
    """Number of rows that are copies: beyond as many rows with these token ids as there are rollouts with them.

    Rows without a rollout do not count.
    """
    there = Counter(rollouts)
    return sum(max(count - there[ids], 0) for ids, count in Counter(rows).items() if ids in there)


PROMPTS_READ = 4
"""Number of prompts of a step in which the names of the tools are looked for: decoding all would take time."""


def first_prompts(traces: Sequence[vf.Trace], tokenizer: Any) -> dict[str, float]:
    """What up to `PROMPTS_READ` first prompts of rollouts lack. Only what can be known.

    `rollout/prompts_cut`: share of the prompts that lack the beginning of a message. `rollout/tools_unshown`: share of the
    prompts of rollouts with tools that leave out the name of a tool or of one of its parameters. `rollout/headless`: share of
    the prompts that do not end with the chat template's header of an assistant turn.
    """
    sampled = [t for t in traces if any(node.sampled for node in t.nodes)]
    with_tools = [t for t in sampled if t.tools]
    chosen, of_tools = (own[:: max(len(own) // PROMPTS_READ, 1)][:PROMPTS_READ] for own in (sampled, with_tools))
    read = {id(t): tokenizer.decode([i for n in opening_of(t) for i in n.token_ids]) for t in [*chosen, *of_tools]}
    found: dict[str, float] = {}
    if chosen:
        cut = sum(begins_late(read[id(t)], beginnings_of(t, tokenizer)) for t in chosen)
        found["rollout/prompts_cut"] = cut / len(chosen)
        if (header := header_of(tokenizer)) is not None:
            ends = [tokenizer.decode(before_first_turn(t)[-HEADER:]) for t in chosen]
            found["rollout/headless"] = sum(not opens_turn(end, header) for end in ends) / len(chosen)
    if of_tools:
        unshown = sum(bool(unshown_names(t, read[id(t)])) for t in of_tools)
        found["rollout/tools_unshown"] = unshown / len(of_tools)
    return found


def unshown_names(trace: vf.Trace, text: str) -> set[str]:
    """The names of a rollout's tools, and of their parameters, that a text leaves out.

    Where a tool stands as a JSON schema, its parameters do, too: elsewhere in a prompt their names may be ordinary words.
    """
    absent = set()
    for tool in trace.tools or ():
        schema = re.search(rf'"name"\s*:\s*"{re.escape(tool.name)}"', text)
        form = '"{}"' if schema else "{}"
        names = (tool.name, *((tool.parameters or {}).get("properties") or ()))
        absent |= {name for name in names if form.format(name) not in text}
    return absent


HEADER = 64
"""Number of a prompt's last tokens in which the header of an assistant turn is looked for."""


def header_of(tokenizer: Any) -> str | None:
    """The chat template's header of an assistant turn, without white space at its end; None without such a header."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    try:
        return assistant_header(tokenizer).rstrip() or None
    except ChatTemplateError:
        return None


def opens_turn(prompt: str, header: str) -> bool:
    """Whether a prompt ends with the header of an assistant turn, with whatever thought a template opens or closes after it."""
    stem = re.escape(header.partition("<think>")[0].rstrip())
    return re.search(stem + r"\s*(?:<think>\s*(?:</think>)?)?\s*$", prompt) is not None


def before_first_turn(trace: vf.Trace) -> list[int]:
    """The token ids before a rollout's first sampled token, with the header of its turn, which the turn's node has."""
    opening = opening_of(trace)
    turn = trace.nodes[len(opening)]
    header = itertools.takewhile(lambda pair: not pair[1], zip(turn.token_ids, turn.mask, strict=True))
    return [*(i for node in opening for i in node.token_ids), *(i for i, _ in header)]


def opening_of(trace: vf.Trace) -> list[Any]:
    """The nodes of a rollout before its first sampled turn: those of its first prompt."""
    return list(itertools.takewhile(lambda node: not node.sampled, trace.nodes))


def beginnings_of(trace: vf.Trace, tokenizer: Any) -> list[str]:
    """The beginnings of the first prompt's messages, as the tokenizer can write them."""
    texts = [node.message.content for node in opening_of(trace)]
    ids = [tokenizer.encode(t[:BEGINNING], add_special_tokens=False) for t in texts if isinstance(t, str)]
    return list(map(tokenizer.decode, ids))


BEGINNING = 200
"""Number of characters of a message that are looked at."""
WORDS = 6
"""Number of words at a message's beginning that are looked for in a prompt."""


def begins_late(prompt: str, messages: Sequence[str]) -> bool:
    """Whether a prompt lacks the beginning of one of its messages. Case, punctuation and spacing may differ."""
    prompt = " ".join(re.findall(r"\w+", prompt.casefold()))
    every = [re.findall(r"\w+", message.casefold()) for message in messages]
    return any(" ".join(words[:WORDS]) not in prompt for words in every if len(words) >= WORDS)


def end_tokens(tokenizer: Any, stops: Sequence[int]) -> frozenset[int]:
    """The tokens that end a turn: those at which a run stops, and the tokenizer's own end of text."""
    own = tokenizer.eos_token_id
    return frozenset([*stops, *([] if own is None else [own])])


def run_on(traces: Sequence[vf.Trace], ends: frozenset[int]) -> dict[str, float]:
    """How sampled turns end; empty without a turn.

    `rollout/run_on`: share of the turns that go on after an end token. `rollout/unlikely_ends`: share of the turns whose end
    token is less likely than 1e-5 by its own log-probability, so that something else than the policy has ended them.
    """
    # What follows a turn in the template, such as a line end after the end token, is in its node but was not sampled.
    turns = [
        ([token for token, mask in zip(node.token_ids, node.mask, strict=True) if mask], node.logprobs)
        for trace in traces
        for node in trace.nodes
        if node.sampled
    ]
    if not turns:
        return {}
    beyond = sum(not ends.isdisjoint(ids[:-1]) for ids, _ in turns)
    unlikely = sum(unlikely_end(ids, logprobs, ends) for ids, logprobs in turns)
    return {"rollout/run_on": beyond / len(turns), "rollout/unlikely_ends": unlikely / len(turns)}


def unlikely_end(ids: Sequence[int], logprobs: Sequence[float], ends: Collection[int]) -> bool:
    """Whether the last of these sampled tokens, and no other, is one that the policy hardly ever samples, and an end token.

    A sampler that is too hot draws other unlikely tokens as well.
    """
    unlikely = [logprob < thresholds.UNLIKELY_END for logprob in logprobs]
    return bool(ids and unlikely) and ids[-1] in ends and unlikely[-1] and not any(unlikely[:-1])


def _same(a: float, b: float) -> bool:
    return math.isclose(a, b, abs_tol=1e-9)


def _tokens(matched: Sequence[tuple[Sample, Sequence[vf.Trace]]]) -> dict[str, float]:
    """How the rows' loss masks and log-probabilities differ from those of their traces.

    What is masked has no log-probability, so that of a row with another mask they are not compared.
    """
    sampled = untrained = extra = scored = 0
    for sample, (trace, *_) in matched:
        own = [m for node in trace.nodes for m in node.mask]
        sampled += sum(own)
        if own == sample.loss_mask:  # as nearly always, and quicker than to look at each token
            mine, theirs = sample.sampled_logprobs, [x for node in trace.nodes for x in node.logprobs]
            scored += mine != theirs and not np.array_equal(np.sort(mine), np.sort(theirs), equal_nan=True)
            continue
        untrained += sum(mine and not loss for mine, loss in zip(own, sample.loss_mask, strict=True))
        extra += sum(loss and not mine for mine, loss in zip(own, sample.loss_mask, strict=True))
    return {
        "rollout/sampled_untrained": untrained / max(sampled, 1),
        "rollout/context_trained": extra / max(sampled, 1),
        "rollout/other_logprobs": scored / len(matched),
    }


def _groups(matched: Sequence[tuple[Sample, Sequence[vf.Trace]]]) -> dict[str, float]:
    tasks: dict[str, set[str | None]] = defaultdict(set)
    for sample, (trace, *_) in matched:
        tasks[sample.group].add(trace.task.hash)
    return {"groups/mixed": sum(len(found) > 1 for found in tasks.values()) / len(tasks)}
