"""Does a task's right answer stand where the answers of other tasks stand: in what the perfect transcript read, or in another
field of the task's data, such as a worked solution?

A place is the text before an answer, such as "value=" or "####". If answers follow a place in most tasks, and in some tasks
something else does while the answer stands nowhere, then the answer of these tasks is contradicted by their own evidence:
either of them is wrong.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import verifiers.v1 as vf
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.before_model.answer_places import after, before, begins, places
from plumbob.trainer.doctor.environment import LABELLED, Environment, Played, tool_texts

PLACES = 100
"""Most places that are looked at."""
VARIED = 12
"""Fewest different answers by which it is judged whether they stand at a place by chance."""


@dataclass(frozen=True)
class Told:
    """A task, its right answer, and a text that should hold it."""

    task: vf.Task
    gold: str
    text: str


@dataclass(frozen=True)
class Standing:
    """Where the answers of tasks stand in a text: see `_best_place`."""

    told: list[Told]
    """All tasks with this text."""
    place: str
    own: list[Told]
    """Those whose answer follows the place; empty if there is no place."""
    other: list[Told]
    """Those in which something else follows it."""


def checks(environment: Environment) -> Iterator[Finding]:
    if environment.gold_field is None:
        return
    # With the settings for which oracles are made, their calls find what the answer needs.
    played = environment.own_oracles or (environment.oracles if environment.has_oracle else environment.silent)
    found = standing(environment, [p for p in played if p.trace.ok])
    if (finding := contradicted(environment, found)) is not None:
        yield finding
        if finding.verdict == "pass" and (other := held_out_contradicted(environment, found)) is not None:
            yield other


def standing(environment: Environment, played: Sequence[Played]) -> dict[str, Standing]:
    """What a text is -> where the answers of these tasks stand in it."""
    texts = _texts(environment, played)
    return {name: Standing(told, *_best_place(told, environment.vocabulary)) for name, told in texts.items()}


def contradicted(environment: Environment, found: Mapping[str, Standing]) -> Finding | None:
    """Compare the answers of tasks with what was read, and with other fields of their data.

    None if no text has a place after which most answers stand.
    """
    check, known = "answers agree with what their tasks say", list[str]()
    for name, stands in found.items():
        if shifted := _of_others(stands.told, environment.vocabulary):
            return Finding(check, "fail", f"in {name} {shifted}", "oracle-fails")
        place, own, other = stands.place, stands.own, stands.other
        if not own:
            continue
        known.append(f"in {name} {len(own)} of {len(own) + len(other)} answers stand after {place!r}")
        if len(other) >= thresholds.CONTRADICTED and len(other) > thresholds.CONTRADICTED_SHARE * (
            len(own) + len(other)
        ):
            first = other[0]
            instead = (after(place, first.text) or "").split("\n")[0][:40]
            evidence = (
                f"{known[-1]}; in the other {len(other)} something else does, and the answer stands nowhere: in task "
                f"{first.task.key} {instead!r}, where the answer is {first.gold!r}"
            )
            return Finding(check, "fail", evidence, "oracle-fails")
    return Finding(check, "pass", "; ".join(known)) if known else None


def held_out_contradicted(environment: Environment, found: Mapping[str, Standing]) -> Finding | None:
    """Do held-out answers stand where those of training tasks stand? None if training answers stand at no place.

    `found`: where these stand.
    """
    check, known = "held-out answers agree with what their tasks say", list[str]()
    held_out = _texts(environment, [p for p in environment.held_out_oracles if p.trace.ok])
    for name, stands in found.items():
        place, own = stands.place, stands.own
        follows = [(one, text) for one in held_out.get(name, ()) if (text := after(place, one.text)) is not None]
        if not own or not follows:
            continue
        other = [(one, text) for one, text in follows if not begins(text, one.gold) and not places(one.gold, one.text)]
        known.append(
            f"in {name} {len(own)} training answers stand after {place!r}; of {len(follows)} held-out tasks, in {len(other)} "
            "something else does, and the answer stands nowhere"
        )
        if len(other) >= thresholds.CONTRADICTED and len(other) > thresholds.CONTRADICTED_SHARE * len(follows):
            one, text = other[0]
            instead = text.split("\n")[0][:40]
            evidence = f"{known[-1]}: in task {one.task.key} {instead!r}, where the answer is {one.gold!r}"
            return Finding(check, "fail", evidence, "evaluation-differs")
    return Finding(check, "pass", "; ".join(known)) if known else None


def _texts(environment: Environment, played: Sequence[Played]) -> Mapping[str, list[Told]]:
    """What the text is -> the tasks with their answers and that text."""
    found: dict[str, list[Told]] = {"the tool results of perfect transcripts": []}
    (read,) = found.values()
    for p in played:
        gold = environment.gold(p.task)
        results = tool_texts(p.trace)
        if gold and results:
            read.append(Told(p.task, gold, "\n".join(results)))
        for name, text in _fields(environment, p.task) if gold else ():
            found.setdefault(f"the field {name!r}", []).append(Told(p.task, gold, text))
    return found


def _fields(environment: Environment, task: vf.Task) -> Iterator[tuple[str, str]]:
    """(name, text) of the other fields of a task's data that are texts. Prompts may name answers that are none."""
    for name in type(task.data).model_fields.keys() - LABELLED - {environment.gold_field}:
        value = getattr(task.data, name, None)
        if isinstance(value, str):
            yield name, value


def _best_place(told: Sequence[Told], golds: Sequence[str]) -> tuple[str, list[Told], list[Told]]:
    """(a place, tasks whose answer follows it, tasks in which something else follows it and the answer stands nowhere).

    Of the places that answers follow in most of the texts that have them, the one that most answers follow; empty lists
    if there is none. `golds`: the answers of many tasks.
    """
    counts: Counter[str] = Counter()
    for one in told:
        counts.update(before([one.gold], one.text))
    for place, count in counts.most_common(PLACES):
        if count < thresholds.CONTRADICTED_LEAST:
            break
        follows = [(one, text) for one in told if (text := after(place, one.text)) is not None]
        own = [one for one, text in follows if begins(text, one.gold)]
        other = [one for one, text in follows if re.match(r"\s*\w", text) and not places(one.gold, one.text)]
        most = len(own) > len(told) / 2 or _exchanged(golds, follows, own, other)
        if most and len(own) + len(other) == len(follows):
            return place, own, other
    return "", [], []


def _exchanged(
    golds: Sequence[str], follows: Sequence[tuple[Told, str]], own: Sequence[Told], other: Sequence[Told]
) -> bool:
    """Whether what stands at a place, where it is not the task's own answer, is that of another task, and its own far more often
    than chance has it.
    """
    ids = {id(one) for one in other}
    texts = [text for one, text in follows if id(one) in ids]
    theirs = sum(any(begins(text, gold) for gold in golds) for text in texts)
    # Of so many different answers, one that is drawn at random is the right one once in as many times.
    far = len(golds) >= VARIED and len(own) > 3 * len(follows) / len(golds)
    return far and theirs >= thresholds.GIVEN_AWAY * max(len(texts), 1)


def _of_others(told: Sequence[Told], golds: Sequence[str]) -> str:
    """Evidence that tasks have the answers of other tasks; "" if there is none. `golds`: all answers, long ones first.

    After some place stands an answer of another task in nearly all texts, while the task's own stands nowhere. It may be
    that the answer has to be worked out of it, as its opposite, for example. But then it is the same where the same is read.
    """
    counts: Counter[str] = Counter()
    for one in told:
        low = one.text.casefold()
        counts.update(before((gold for gold in golds if gold != one.gold and gold.casefold() in low), one.text))
    for place, count in counts.most_common(PLACES):
        if count < max(thresholds.CONTRADICTED_LEAST, thresholds.GIVEN_AWAY * len(told)):
            break
        read: dict[str, set[str]] = {}
        for one in told:
            text = after(place, one.text)
            said = next((gold for gold in golds if text and text[0] == gold[0] and begins(text, gold)), None)
            if said is not None and not places(one.gold, one.text):
                read.setdefault(said, set()).add(one.gold)
                count -= 1
        different = [said for said, answers in read.items() if len(answers) > 1]
        if count <= 0 and len(different) >= thresholds.CONTRADICTED:
            example = ", ".join(sorted(read[different[0]])[:3])
            return (
                f"answers of other tasks stand after {place!r} and the task's own nowhere, and {len(different)} of them belong "
                f"to tasks with different answers, as {different[0]!r} to {example}"
            )
    return ""
