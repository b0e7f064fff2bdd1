"""What must hold of the tasks themselves, and of held-out tasks beside training tasks.

Order, and answers that a task's own data contradict, are the two ideas that no matrix of rewards sees.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from statistics import correlation, fmean
from typing import NamedTuple

from plumbob.doctor.environment.matrix import TOLERANCE, Evidence, Matrix, refuted
from plumbob.doctor.environment.player import Task
from plumbob.doctor.environment.texts import begins, chosen, followed, normalised, places, short, squeezed, strings
from plumbob.doctor.environment.transcripts import EMPTY, PERFECT

FEW, OFTEN = 32, 3
"""Smallest number of different training tasks, if each is taken so often: with fewer, the share of solved tasks is known to
no better than 9 percent points (one standard error)."""
COPIES = 0.2
"""Largest share of training tasks that may be copies of other ones."""
SORTED = 5.0
"""Correlation of a task's place and its length, in standard deviations of an order by chance, from which on tasks are
sorted: by chance in one of two million orders."""
COMPARED = 4
"""Fewest training prompts, and held-out ones, that are compared."""
GIVEN, GIVEN_TASKS, GIVEN_SHARE = 0.9, 6, 0.15
"""Share of the prompts with a certain text in which the answer follows it, so that it gives the answer away; number and share
of all prompts in which that must be so. Where a prompt lists options, one follows in half of the prompts at most."""
HELD_UNPAID, PAID = 0.3, 0.9
"""Largest share of held-out tasks whose right answer may earn nothing, where so many of the training tasks' are paid."""
LEAST = 12
"""Fewest tasks whose answer must follow a place."""
CONTRADICTED, CONTRADICTED_SHARE = 3, 0.05
"""Fewest tasks whose answer must be contradicted, and largest share that may be."""
READ = "the tool results of perfect transcripts"
OF_OTHERS = 0.9
"""Smallest share of texts in which another task's answer stands at a place, if tasks have the answers of others."""

# Training tasks


@cache
def _content(task: Task) -> tuple[str, ...]:
    """What a task says, without case, punctuation and spacing."""
    return normalised(task.prompt), *(normalised(" ".join(strings(task.fields[name]))) for name in sorted(task.fields))


def distinct(m: Matrix) -> Evidence | None:
    count, different = len(m.player.train), len({_content(task) for task in m.player.train})
    times = m.player.settings.taken / max(different, 1)
    few = (different < FEW and times >= OFTEN) or count - different > COPIES * count
    said = f"of {count} training tasks {different} differ in more than case and spacing, and the run takes each {times:.3g} times"
    return Evidence(said) if few else None


def order(m: Matrix) -> Evidence | None:
    """Length is the number of turns of the perfect transcript."""
    turns = [len(own) for own in m.hand.turns if own]
    if not m.player.settings.as_given or len(turns) < FEW or len(set(turns)) == 1:
        return None
    found, part = correlation(turns, range(len(turns))), max(len(turns) // 6, 1)
    if abs(found) * math.sqrt(len(turns) - 1) <= SORTED:
        return None
    return Evidence(
        f"tasks are taken as given; perfect transcripts have {fmean(turns[:part]):.3g} turns at the start and "
        f"{fmean(turns[-part:]):.3g} at the end; correlation with the task's place {found:+.2f}"
    )


def hidden(m: Matrix) -> Evidence | None:
    """A place that gives answers away: what follows it is the own answer almost wherever it stands, and not one of others.

    That the answer's words are in the prompt is no fault: in reading comprehension and multiple choice they must be.
    """
    pairs = [(p.prompt, m.hand.golds[i]) for i, p in m.kind(EMPTY).items() if m.hand.golds[i]]
    least, golds = math.ceil(max(GIVEN_TASKS, GIVEN_SHARE * len(pairs))), [gold for _, gold in pairs]
    for place, follows in followed([(prompt, [gold]) for prompt, gold in pairs], least):
        own = [text for i, text in follows.items() if begins(text, golds[i])]
        others = [begins(text, golds[j]) for i, text in follows.items() for j in chosen(len(golds), 16) if j != i]
        if own and fmean(others or [1.0]) < len(own) / len(follows) / 2:
            text = f"after {place!r} stands the answer in {{}} first prompts"
            if found := refuted(own, follows, text, least=least, share=GIVEN - 1e-9):
                return found
    return None


# Answers that a task's own data contradict: in most tasks they stand at one place of what is read, in some something else does


class _Told(NamedTuple):
    """A task, its right answer, and a text that should hold it."""

    task: Task
    gold: str
    text: str


def _texts(m: Matrix) -> Mapping[str, list[_Told]]:
    """What a text is -> the tasks with their answers and that text."""
    found = defaultdict[str, list[_Told]](list)
    gold_field = m.hand.gold_field.name if m.hand.gold_field else ""
    for i, p in (m.kind(PERFECT) or m.kind(EMPTY)).items():
        gold, task = m.hand.golds[i], m.hand.tasks[i]
        texts = {f"the field {name!r}": value for name, value in task.fields.items() if name != gold_field}
        for name, text in {READ: "\n".join(p.results), **texts}.items() if gold else ():
            if isinstance(text, str) and text:
                found[name].append(_Told(task, gold, text))
    return found


def contradicted(m: Matrix) -> Evidence | None:
    for name, told in _texts(m).items():
        # Other fields may name answers that are none; what perfect transcripts read is what answers are taken from.
        if found := _something_else(told) or (_of_others(told, m.hand.vocabulary) if name == READ else ""):
            return Evidence(f"in {name} {found}")
    return None


def _something_else(told: Sequence[_Told]) -> str:
    """Evidence that something else stands where most tasks have their answer, while their own stands nowhere; "" if not.

    The place is that which most answers follow, of those which they follow in most of the texts that have it.
    """
    for place, follows in followed([(one.text, [one.gold]) for one in told], LEAST):
        own = sum(begins(text, told[k].gold) for k, text in follows.items())
        other = [k for k, t in follows.items() if re.match(r"\s*\w", t) and not places(told[k].gold, told[k].text)]
        if 2 * own <= len(told) or own + len(other) < len(follows):
            continue
        if len(other) < CONTRADICTED or len(other) <= CONTRADICTED_SHARE * len(follows):
            return ""
        first, instead = told[other[0]], follows[other[0]].split("\n")[0][:40]
        return (
            f"the answer stands after {place!r} in {own} tasks; in {len(other)} something else does and it stands nowhere, such as "
            f"{short(instead)} in task {first.task.key}, whose answer is {short(first.gold)}"
        )
    return ""


def _of_others(told: Sequence[_Told], golds: Sequence[str]) -> str:
    """Evidence that tasks have the answers of other tasks; "" if there is none.

    After some place stands an answer of another task in nearly all texts, while the task's own stands nowhere. It may be that
    the answer has to be worked out of it, as its opposite, for example. But then it is the same where the same is read.
    """
    low, least = [one.text.casefold() for one in told], int(max(LEAST, OF_OTHERS * len(told)))
    named = [[g for g in golds if g != one.gold and g.casefold() in text] for one, text in zip(told, low, strict=True)]
    for place, follows in followed([(one.text, own) for one, own in zip(told, named, strict=True)], least):
        read, count = defaultdict[str, set[str]](set), 0
        for k, text in follows.items():
            said = next((gold for gold in golds if text and text[0] == gold[0] and begins(text, gold)), None)
            if said is not None and not places(told[k].gold, told[k].text):
                read[said].add(told[k].gold)
                count += 1
        different = [said for said, answers in read.items() if len(answers) > 1]
        if count >= least and len(different) >= CONTRADICTED:
            example = ", ".join(sorted(read[different[0]])[:3])
            return (
                f"answers of other tasks stand after {place!r}, the task's own nowhere; {len(different)} of them belong to tasks "
                f"with different answers, as {different[0]!r} to {example}"
            )
    return ""


# Held-out tasks


def apart(m: Matrix) -> Evidence | None:
    held = m.player.held_out
    trained = {_content(task) for task in m.player.train}
    both = [task.key for task in held if _content(task) in trained]
    return refuted(both, held, "{} held-out tasks are among the training tasks, such as ", str)


def prompted(m: Matrix) -> Evidence | None:
    """Training and held-out tasks are put to the model in the same words. Their content may differ."""
    train, held = ([p.prompt for p in of.kind(EMPTY).values()] if of else [] for of in (m, m.held_out))
    if min(len(train), len(held)) < COMPARED:
        return None
    for name, own, rest in (("training", train, held), ("held-out", held, train)):
        for text in sorted(set.intersection(*({line.strip() for line in prompt.splitlines()} for prompt in own))):
            # Not a word or a number that all samples happen to have.
            wording = len(re.findall(r"[^\W\d]{2,}", text)) >= 2
            if wording and not any(squeezed(text) in squeezed(prompt) for prompt in rest):
                return Evidence(f"every {name} prompt has {text[:60]!r}, and no prompt of the others has it")
    return None


def same_range(m: Matrix) -> Evidence | None:
    """Right answers are paid in held-out tasks if they are in training tasks."""
    # Whether each perfect transcript earns no more than an empty reply.
    train, held = ([lift <= TOLERANCE for lift in of.lifts.values()] if of else [] for of in (m, m.held_out))
    text = f"{PERFECT} earns nothing in {{}} held-out tasks, and in {sum(train)} of {len(train)} training tasks"
    if sum(train) > (1 - PAID) * len(train) or len(train) < COMPARED:
        return None
    return refuted([gone for gone in held if gone], held, text, least=COMPARED, share=HELD_UNPAID)
