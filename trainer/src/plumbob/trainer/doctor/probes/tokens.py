"""Is the trained row, id by id, what the engine saw and sampled? The truth is in the requests to the engine."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import verifiers.v1 as vf
from plumbob.rollout import Sample
from plumbob.rollout.chat import assistant_header
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.subject import Call, Subject
from plumbob.trainer.training.row_checks import beginnings_of, begins_late, opening_of, opens_turn, unshown_names

ORDER = 30


def probe(subject: Subject) -> Iterator[Finding]:
    drawn = subject.drawn
    pairs = [(s, c) for s, c in zip(drawn.samples, drawn.calls, strict=True) if c]
    yield _once(subject)
    yield _beginnings(subject)
    yield _tools(subject)
    yield _headers(subject)
    yield _prefixes(subject, [calls for _, calls in pairs])
    yield _rows(subject, pairs)
    yield _masks(pairs)


def _once(subject: Subject) -> Finding:
    """The texts of first prompts must not hold the special tokens with which the chat template marks messages."""
    special = {i for i, token in subject.run.tokenizer.added_tokens_decoder.items() if token.special}
    firsts = [opening_of(trace) for trace in subject.drawn.traces]
    marks: set[int] = set()
    inside: list[set[int]] = []
    for nodes in firsts:
        pairs = [pair for node in nodes for pair in zip(node.token_ids, node.is_content, strict=False)]
        marks |= {token for token, content in pairs if not content and token in special}
        inside.append({token for token, content in pairs if content and token in special})
    found = [tokens & marks for tokens in inside]
    twice = sum(map(bool, found))
    evidence = f"{twice} of {len(firsts)} first prompts have a token of the chat template inside a message's text"
    bad = twice > thresholds.DOUBLE_TEMPLATE * len(firsts)
    if bad:
        names = subject.run.tokenizer.convert_ids_to_tokens(sorted(set.union(*found)))
        evidence += f": {', '.join(names)}"
    cause = "template-applied-twice" if bad else None
    return Finding("the chat template is applied once", "fail" if bad else "pass", evidence, cause)


def _first_prompts(subject: Subject) -> dict[tuple[int, ...], vf.Trace]:
    """The different first prompts, as sent to the engine -> a rollout of each."""
    drawn = subject.drawn
    return {tuple(calls[0].prompt_ids): trace for calls, trace in zip(drawn.calls, drawn.traces, strict=True) if calls}


def _beginnings(subject: Subject) -> Finding:
    """The first prompt of each rollout, as sent to the engine, must have the beginning of each of its messages."""
    tokenizer, firsts = subject.run.tokenizer, _first_prompts(subject)
    late = sum(
        begins_late(tokenizer.decode(list(ids)), beginnings_of(trace, tokenizer)) for ids, trace in firsts.items()
    )
    evidence = f"{late} of {len(firsts)} first prompts lack the beginning of one of their messages"
    cause = "truncated-context" if late > len(firsts) / 2 else None
    return Finding.of("first prompts have the beginning of their messages", (cause, evidence))


def _tools(subject: Subject) -> Finding:
    """The first prompt of each rollout, as sent to the engine, must name every declared tool and its parameters."""
    drawn, tokenizer = subject.drawn, subject.run.tokenizer
    names = {tool.name for trace in drawn.traces for tool in trace.tools or ()}
    firsts = _first_prompts(subject)
    absent = set()
    for ids, trace in firsts.items():
        text = tokenizer.decode(list(ids))
        absent |= unshown_names(trace, text)
    evidence = f"{len(names)} tools in {len(firsts)} prompts" if names else "the environment has no tools"
    if absent:
        evidence = f"the engine's prompts do not name {', '.join(sorted(absent))}"
    return Finding(
        "prompts name the environment's tools",
        "fail" if absent else "pass",
        evidence,
        "tools-not-in-prompt" if absent else None,
    )


def _headers(subject: Subject) -> Finding:
    """Each prompt must end with the chat template's header of an assistant turn."""
    header, tokenizer = assistant_header(subject.run.tokenizer), subject.run.tokenizer
    calls = [call for turns in subject.drawn.calls for call in turns]
    tails = {tuple(call.prompt_ids[-64:]) for call in calls}
    bare = {tail for tail in tails if not opens_turn(tokenizer.decode(list(tail)), header)}
    without = sum(tuple(call.prompt_ids[-64:]) in bare for call in calls)
    evidence = f"{len(calls) - without} of {len(calls)} turns were sampled after the chat template's header {header!r}"
    return Finding(
        "each turn follows the assistant header",
        "fail" if without else "pass",
        evidence,
        "assistant-header-missing" if without else None,
    )


def _prefixes(subject: Subject, rollouts: Sequence[Sequence[Call]]) -> Finding:
    """The prompt of turn k+1 must begin with the ids of the prompt and the completion of turn k."""
    turns = list(itertools.chain.from_iterable(itertools.pairwise(calls) for calls in rollouts))
    for before, after in turns:
        held = [*before.prompt_ids, *before.completion.token_ids]
        if after.prompt_ids[: len(held)] != held:
            at = _first_difference(held, after.prompt_ids)
            # What is lost at the beginning leaves the last turn as it was.
            lost = at < len(before.prompt_ids) // 2 and _holds(after.prompt_ids, before.completion.token_ids)
            if lost or len(after.prompt_ids) < len(held):
                cause = "truncated-context"
            else:
                cause = _explained(subject, after.prompt_ids[: len(held)], held, [before], at)
            evidence = (
                f"the prompt of a later turn differs from the turn before it at token {at} of {len(held)}: "
                f"{_around(subject, held, after.prompt_ids, at)}"
            )
            return Finding("each prompt continues the last turn's ids", "fail", evidence, cause)
    evidence = f"all {len(turns)} later prompts begin with the ids of the turn before them"
    return Finding("each prompt continues the last turn's ids", "pass", evidence)


def _holds(ids: Sequence[int], part: Sequence[int]) -> bool:
    """Whether `part` stands in `ids`, in one piece."""
    return any(list(ids[i : i + len(part)]) == list(part) for i in range(len(ids) - len(part) + 1))


def _rows(subject: Subject, pairs: Sequence[tuple[Sample, list[Call]]]) -> Finding:
    """Each trained row must hold the ids of its last prompt and completion."""
    check, different = "the trained row is what the engine saw and sampled", []
    for sample, calls in pairs:
        truth = _truth(calls)
        if sample.token_ids != truth:
            different.append((sample.token_ids, truth, calls))
    if not different:
        return Finding(check, "pass", f"{len(pairs)} rows equal the engine's ids")
    row, truth, calls = different[0]
    if (again := _rows_again(pairs)) and again == len(different):
        evidence = (
            f"{again} of {len(pairs)} rows have the ids of another rollout, which has a row of its own as well: it is "
            "trained on more than once, and theirs are not"
        )
        if _within_groups(pairs):
            return Finding(check, "fail", f"{evidence}; it is one of the same group", "groups-without-variety")
        return Finding(check, "fail", evidence, "rollouts-repeated")
    at = _first_difference(truth, row)
    evidence = (
        f"{len(different)} of {len(pairs)} rows differ from the engine's ids; the first differs at token {at} and has "
        f"{len(row)} ids against {len(truth)}: {_around(subject, truth, row, at)}"
    )
    return Finding(check, "fail", evidence, _explained(subject, row, truth, calls, at))


def _truth(calls: Sequence[Call]) -> list[int]:
    """The ids of a rollout's last prompt and completion, which hold all turns."""
    return [*calls[-1].prompt_ids, *calls[-1].completion.token_ids]


def _within_groups(pairs: Sequence[tuple[Sample, list[Call]]]) -> bool:
    """Whether most rows with the ids of another rollout have those of one of their own group."""
    owners: dict[tuple[int, ...], set[str]] = defaultdict(set)
    truths = [tuple(_truth(calls)) for _, calls in pairs]
    for truth, (sample, _) in zip(truths, pairs, strict=True):
        owners[truth].add(sample.group)
    moved = [sample for truth, (sample, _) in zip(truths, pairs, strict=True) if tuple(sample.token_ids) != truth]
    return 2 * sum(sample.group in owners[tuple(sample.token_ids)] for sample in moved) > len(moved)


def _rows_again(pairs: Sequence[tuple[Sample, list[Call]]]) -> int:
    """Number of rows with the ids of another rollout that has its own row too, beyond those of equal rollouts."""
    truths = [tuple(_truth(calls)) for _, calls in pairs]
    rows = [tuple(sample.token_ids) for sample, _ in pairs]
    wanted, found = Counter(truths), Counter(rows)
    surplus = {row for row in found if row in wanted and found[row] > wanted[row]}
    return sum(row != truth and row in surplus for row, truth in zip(rows, truths, strict=True))


def _explained(subject: Subject, row: list[int], truth: list[int], calls: Sequence[Call], at: int) -> str:
    """The cause that a difference points to.

    A part of what the engine saw comes first, because it lacks headers and tools, too.
    """
    if _is_part(row, truth):
        return "row-not-what-was-sampled"
    tokenizer = subject.run.tokenizer
    text, true_text = tokenizer.decode(row), tokenizer.decode(truth)
    names = {tool.name for trace in subject.drawn.traces for tool in trace.tools or ()}
    prompt = tokenizer.decode(calls[0].prompt_ids)
    opening = tokenizer.decode(row[: len(row) - (len(truth) - len(calls[0].prompt_ids))])
    # Where the first prompt is whole, the tools are there.
    in_prompt = at < len(calls[0].prompt_ids)
    if in_prompt and any(f'"{n}"' in prompt and f'"{n}"' not in opening for n in names):
        return "tools-not-in-prompt"
    header = assistant_header(tokenizer).strip()
    # Without headers the two must be equal: a reply that is missing takes the header of the next turn with it.
    same = _bare(text.replace(header, "")) == _bare(true_text.replace(header, ""))
    if same and text.count(header) < true_text.count(header):
        return "assistant-header-missing"
    # What is tokenised again says the same, but for white space; other text may come from anywhere.
    return "retokenised-turns" if _bare(text) == _bare(true_text) else "row-not-what-was-sampled"


def _masks(pairs: Sequence[tuple[Sample, list[Call]]]) -> Finding:
    """The loss mask must be true exactly where a token was sampled, and log-probabilities those of the engine."""
    check = "the loss covers exactly the sampled tokens"
    tokens = missing = extra = wrong = 0
    for sample, calls in pairs:
        truth = [0.0] * len(sample.token_ids)
        sampled = [False] * len(truth)
        for call in calls:
            start = len(call.prompt_ids)
            span = slice(start, start + len(call.completion.token_ids))
            if span.stop <= len(truth):
                truth[span] = call.completion.logprobs
                sampled[span] = [True] * len(call.completion.token_ids)
        tokens += sum(sampled)
        missing += sum(s and not m for s, m in zip(sampled, sample.loss_mask, strict=True))
        extra += sum(m and not s for s, m in zip(sampled, sample.loss_mask, strict=True))
        rows = zip(truth, sample.sampling_logprobs, sampled, sample.loss_mask, strict=True)
        wrong += sum(s and m and a != b for a, b, s, m in rows)
    evidence = (
        f"of {tokens} sampled tokens, {missing} are masked out and {wrong} have another log-probability than the "
        f"engine returned; {extra} other tokens are trained on"
    )
    cause = "context-tokens-trained" if extra else "sampled-tokens-masked" if missing else None
    cause = cause or ("row-not-what-was-sampled" if wrong else None)
    return Finding.of(check, (cause, evidence))


def _bare(text: str) -> str:
    """The text without white space."""
    return "".join(text.split())


def _is_part(row: Sequence[int], truth: Sequence[int]) -> bool:
    """Whether the row is the start or the end of what the engine saw."""
    return list(row) in (list(truth[-len(row) :]), list(truth[: len(row)]))


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _around(subject: Subject, a: Sequence[int], b: Sequence[int], at: int) -> str:
    """The texts of both id lists from position `at` on, for the evidence."""
    decode = subject.run.tokenizer.decode
    return f"{decode(list(a[at : at + 8]))!r} became {decode(list(b[at : at + 8]))!r}"
