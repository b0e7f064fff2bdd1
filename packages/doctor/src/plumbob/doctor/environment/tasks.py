"""What must hold of the tasks themselves, and of held-out tasks beside training tasks.

Near copies and order are two of the three ideas that no matrix of rewards sees; the third is in own_data.py.
"""

from __future__ import annotations

import math
import random
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import correlation, fmean
from typing import Any

from plumbob.doctor.environment.inequality import Evidence, Inequality
from plumbob.doctor.environment.matrix import HELD, Matrix, alike
from plumbob.doctor.environment.player import Played, Task
from plumbob.doctor.environment.texts import (
    after,
    begins,
    chosen,
    common_places,
    normalised,
    places,
    short,
    squeezed,
    strings,
)
from plumbob.doctor.environment.transcripts import EMPTY, PERFECT

FEW, OFTEN = 32, 3
"""Smallest number of different training tasks, if each is taken so often: with fewer, the share of solved tasks is known to
no better than 9 percent points (one standard error)."""
COPIES = 0.2
"""Largest share of training tasks that may be copies of other ones."""
NEAREST, AMONG = 64, 2000
"""Number of training tasks whose nearest ones are looked for, and of those among which these are looked for."""
NEAR_COPIES = 4
"""Fewest held-out tasks that must be nearer to a training task than any of `NEAREST` training tasks is to another one: by
chance each of 24 is so once in 65 times, and 4 are in less than one of 2,000 examinations."""
SORTED = 5.0
"""Rank correlation of a task's place and its length, in standard deviations of an order by chance, from which on tasks are
sorted: by chance in one of two million orders."""
COMPARED = 4
"""Fewest training prompts, and held-out ones, that are compared."""
CAPITALS = 0.3
"""Largest difference of the share of capitals in training and in held-out prompts."""
GIVEN, GIVEN_TASKS, GIVEN_SHARE = 0.9, 6, 0.15
"""Share of the prompts with a certain text in which the answer follows it, so that it gives the answer away; number and share
of all prompts in which that must be so. Where a prompt lists options, one follows in half of the prompts at most."""
CUT, WHOLE, FEWEST = 0.25, 0.9, 8
"""Largest share of questions that may break off where `WHOLE` of the others end with a mark, and fewest that are judged."""
ALIKE_PROMPTS = 0.2
"""Largest share of tasks without tools whose prompts other tasks with other answers have, too."""
WRONG_ALIKE = 0.4
"""Largest difference between what wrong answers earn in held-out and in training tasks, as a share of the right ones."""
_LABEL = r"\W*(?:(?:the\s+)?(?:final\s+|correct\s+|right\s+)?(?:answer|a|solution|output)\b(?:\s+is)?)?\W*"
"""What may stand between a worked example's question and its answer."""


# Training tasks


def _content(task: Task) -> tuple[str, ...]:
    """What a task says, without case, punctuation and spacing."""
    return (
        normalised(task.prompt),
        *(f"{name} {normalised(' '.join(strings(task.fields[name])))}" for name in sorted(task.fields)),
    )


def _different(m: Matrix) -> tuple[int, int, float]:
    """(number of training tasks, number of different ones, how often the run takes each)."""
    by_prompt: dict[str, list[Task]] = defaultdict(list)
    for task in m.player.train:
        by_prompt[task.prompt].append(task)
    alone = sum(len(tasks) == 1 for tasks in by_prompt.values())
    if alone == len(by_prompt):  # contents may be long
        contents = len({normalised(prompt) for prompt in by_prompt})
    else:
        contents = len({_content(task) for task in m.player.train})
    return len(m.player.train), contents, m.player.settings.taken / max(contents, 1)


def _enough(m: Matrix) -> Evidence | None:
    _, different, times = _different(m)
    few = different < FEW and times >= OFTEN
    return (
        Evidence(f"{different} different training tasks, each of which the run takes about {times:.3g} times")
        if few
        else None
    )


def _distinct(m: Matrix) -> Evidence | None:
    count, different, _ = _different(m)
    copies = count - different
    return (
        Evidence(f"{copies:,} of {count:,} training tasks equal another one but for case, spacing and names")
        if copies > COPIES * count
        else None
    )


def _order(m: Matrix) -> Evidence | None:
    """Length is the number of turns of the perfect transcript."""
    turns = [len(own) for own in m.hand.turns if own]
    if not m.player.settings.as_given or len(turns) < FEW:
        return None
    found = rank_correlation(turns)
    if abs(found) * math.sqrt(len(turns) - 1) <= SORTED:
        return None
    part = max(len(turns) // 6, 1)
    return Evidence(
        f"tasks are taken as given; perfect transcripts have {fmean(turns[:part]):.3g} turns at the start and "
        f"{fmean(turns[-part:]):.3g} at the end; rank correlation with the task's place {found:+.2f}"
    )


def rank_correlation(values: Sequence[float]) -> float:
    """Spearman's correlation of values and their places; equal values have the mean of their ranks. 0 if all are equal."""
    order = sorted(values)
    ranks = [(bisect_left(order, v) + bisect_right(order, v) - 1) / 2 for v in values]
    return correlation(ranks, list(range(len(values)))) if len(set(values)) > 1 else 0.0


def _cut(m: Matrix) -> Evidence | None:
    """Questions are cut if they break off where whole ones end with a mark: held-out ones, or those of another length."""

    def questions(of: Matrix | None) -> list[str]:
        texts = [p.opening[-1].text for p in of.kind(EMPTY).values() if p.opening] if of else []
        return list(dict.fromkeys(text for text in texts if text))

    def breaks(text: str) -> bool:
        return text.rstrip()[-1:].isalnum()

    def whole(texts: Sequence[str]) -> bool:
        return len(texts) >= FEWEST and sum(map(breaks, texts)) <= (1 - WHOLE) * len(texts)

    train, held = questions(m), questions(m.held_out)
    broken = [text for text in train if breaks(text)]
    if len(broken) < max(FEWEST, CUT * len(train)):
        return None
    length, count = Counter(map(len, train)).most_common(1)[0]
    same = [text for text in train if len(text) == length]
    rest = [text for text in (*train, *held) if len(text) != length]
    at_length = count >= max(FEWEST, CUT * len(train)) and all(map(breaks, same)) and whole(rest)
    if not whole(held) and not at_length:
        return None
    return Evidence(
        f"{len(broken)} of {len(train)} training questions break off, such as {short(broken[0][-40:])}, where others end with a mark"
    )


def _alike(m: Matrix) -> Evidence | None:
    """What tells tasks without tools apart must be in the prompt."""
    played = [(i, p) for i, p in m.kind(EMPTY).items() if m.hand.golds[i]]
    if any(p.tools for _, p in played):
        return None
    answers: dict[str, set[str]] = defaultdict(set)
    for i, p in played:
        answers[p.prompt].add(m.hand.golds[i])
    several = [p for _, p in played if len(answers[p.prompt]) > 1]
    bad = len(several) >= max(FEWEST, ALIKE_PROMPTS * len(played))
    return (
        Evidence(
            f"{len(several)} of {len(played)} prompts are those of another task with another right answer", several[0]
        )
        if bad
        else None
    )


def _hidden(m: Matrix) -> Evidence | None:
    """A place that gives answers away: what follows it is the own answer almost wherever it stands, and not one of others.

    That the answer's words are in the prompt is no fault: in reading comprehension and multiple choice they must be.
    """
    pairs = [(p.prompt, m.hand.golds[i]) for i, p in m.kind(EMPTY).items() if m.hand.golds[i]]
    least = max(GIVEN_TASKS, GIVEN_SHARE * len(pairs))
    golds = [gold for _, gold in pairs]
    for place in common_places(((text, [gold]) for text, gold in pairs), 200, math.ceil(least)):
        follows = [(i, text) for i, (prompt, _) in enumerate(pairs) if (text := after(place, prompt)) is not None]
        own = sum(begins(text, golds[i]) for i, text in follows)
        others = [begins(text, golds[j]) for i, text in follows for j in chosen(len(golds), 16) if j != i]
        if own >= least and own >= GIVEN * len(follows) and fmean(others or [1.0]) < own / len(follows) / 2:
            return Evidence(f"after {place!r} stands the answer in {own} of {len(follows)} first prompts")
    asked = [
        i
        for i, (prompt, gold) in enumerate(pairs)
        if _answered(prompt, gold, [p for j, (p, _) in enumerate(pairs) if j != i])
    ]
    return (
        Evidence(f"in {len(asked)} of {len(pairs)} prompts the question stands before, with its answer right after it")
        if len(asked) >= least
        else None
    )


def _answered(prompt: str, gold: str, others: Sequence[str]) -> bool:
    """Whether what a prompt ends with, and none of `others` does, stands in it before, followed by the answer at once."""
    prompt = prompt.rstrip()
    end, at = prompt[-40:], -1
    if len(set(end)) < 8:
        return False
    for _ in range(20):
        at = prompt.find(end, at + 1)
        if not 0 <= at < len(prompt) - len(end):
            return False
        size = len(end)
        while size < min(at + len(end), 2000) and prompt[at + len(end) - size - 1] == prompt[-size - 1]:
            size += 1
        told = prompt[at + len(end) :][: 60 + len(gold)]
        right = re.match(_LABEL + re.escape(gold) + r"(?!\w)", told, re.IGNORECASE)
        if right and not any(other.rstrip().endswith(prompt[-size:]) for other in others):
            return True
    return False


# Held-out tasks


def _apart(m: Matrix) -> Evidence | None:
    held = m.player.held_out
    wanted = {normalised(task.prompt) for task in held}
    trained = {_content(task) for task in m.player.train if normalised(task.prompt) in wanted}
    both = [task for task in held if _content(task) in trained]
    return (
        Evidence(
            f"{len(both)} of {len(held)} held-out tasks are among {len(m.player.train):,} training tasks, such as {both[0].key}"
        )
        if both
        else None
    )


def _near_copies(m: Matrix) -> Evidence | None:
    """Held-out tasks in other words: nearer to a training task, by their rare words, than training tasks are to each other."""
    train, held = list(m.player.train), list(m.player.held_out)
    draw = random.Random("near copies")
    train = draw.sample(train, min(AMONG, len(train)))
    if len(train) < NEAREST or not held:
        return None
    words = [_rare(task) for task in train]
    counts = Counter(word for own in words for word in own)
    weight: Mapping[str, float] = defaultdict(
        lambda: math.log(len(words)), {w: math.log(len(words) / c) for w, c in counts.items()}
    )
    own = [_nearest(words[k], words, weight, k)[0] for k in draw.sample(range(len(words)), NEAREST)]
    found = [(task, *_nearest(_rare(task), words, weight)) for task in held]
    near = [(task, share, at) for task, share, at in found if share > max(own) and share > 0.5]
    if len(near) < NEAR_COPIES or len(near) < len(held) / 8:
        return None
    task, share, at = max(near, key=lambda one: one[1])
    return Evidence(
        f"{len(near)} of {len(held)} held-out tasks are nearer to a training task than any of {NEAREST} training tasks is to another "
        f"one ({share:.0%} of their rare words in common at most, {max(own):.0%} among training tasks), such as {task.key} and {train[at].key}"
    )


def _rare(task: Task) -> frozenset[str]:
    return frozenset(normalised(" ".join([task.prompt, *strings(dict(task.fields))])).split())


def _nearest(
    words: frozenset[str], among: Sequence[frozenset[str]], weight: Mapping[str, float], but: int = -1
) -> tuple[float, int]:
    """(weighted share of words in common with the nearest of `among`, its number)."""
    best, total = (0.0, 0), {word: weight[word] for word in words}
    size = sum(total.values())
    for k, other in enumerate(among):
        if k != but:
            common = sum(total[word] for word in words & other)
            # Their union weighs at least as much as the larger of the two.
            if common > best[0] * size:
                union = size + sum(weight[word] for word in other - words)
                best = max(best, (common / union if union else 0.0, k))
    return best


def _one_prompt(m: Matrix) -> Evidence | None:
    train, held = _prompts(m), _prompts(m.held_out)
    one = min(len(train), len(held)) >= COMPARED and len(set(train)) >= COMPARED and len(set(held)) == 1
    return Evidence(f"all {len(held)} held-out prompts are the same one") if one else None


def _prompts(m: Matrix | None) -> list[str]:
    return [p.prompt for p in m.kind(EMPTY).values()] if m else []


def _prompted(m: Matrix) -> Evidence | None:
    """Training and held-out tasks are put to the model in the same words. Their content may differ."""
    sides = {"training": m.kind(EMPTY), "held-out": m.held_out.kind(EMPTY) if m.held_out else {}}
    prompts = {name: [p.prompt for p in played.values()] for name, played in sides.items()}
    if min(map(len, prompts.values())) < COMPARED:
        return None
    tools = [set(next(iter(played.values())).tools) for played in sides.values()]
    if tools[0] != tools[1]:
        return Evidence(f"tools that only one of the two kinds of tasks has: {', '.join(sorted(tools[0] ^ tools[1]))}")
    for name, other in (("training", "held-out"), ("held-out", "training")):
        if (text := _only_in(prompts[name], prompts[other])) is not None:
            return Evidence(
                f"every {name} prompt has {text!r}, and no prompt of the others has it",
                next(iter(sides[name].values())),
            )
    capitals = [fmean(map(_capitals, texts)) for texts in prompts.values()]
    if abs(capitals[0] - capitals[1]) > CAPITALS:
        return Evidence(
            f"{capitals[0]:.0%} of the letters of training prompts are capitals, of held-out prompts {capitals[1]:.0%}"
        )
    return None


def _capitals(text: str) -> float:
    """Share of the letters that are capitals, of those that have both forms."""
    letters = [letter for letter in text if letter.lower() != letter.upper()]
    return sum(letter.isupper() for letter in letters) / max(len(letters), 1)


def _only_in(prompts: Sequence[str], rest: Sequence[str]) -> str | None:
    """An instruction that is in all prompts and in none of the rest: a line, or what all of them begin or end with."""
    lines = Counter(line for prompt in prompts for line in {line.strip() for line in prompt.splitlines()})
    fixed = [line for line, count in lines.items() if count == len(prompts) and len(line) > 1]
    fixed += [_shared(prompts), _shared([text[::-1] for text in prompts])[::-1]]
    for text in fixed:
        wording = len(re.findall(r"[^\W\d]{2,}", text)) >= 2  # not a word or a number that all samples happen to have
        if wording and not any(squeezed(text) in squeezed(prompt) for prompt in rest):
            return text.strip()[:60]
    return None


def _shared(texts: Sequence[str]) -> str:
    """What all texts begin with, up to a whole word."""
    low, high = min(texts), max(texts)
    length = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
    return low[:length] if length == len(low) else re.sub(r"\S*$", "", low[:length])


def _scored_alike(m: Matrix) -> Evidence | None:
    """Training tasks' data earn the same as held-out tasks."""
    pairs = [
        (m.cells[kind][i], p)
        for kind in (PERFECT, EMPTY)
        for i, p in m.kind(f"{kind}, {HELD}").items()
        if m.cells[kind][i].ok
    ]
    bad = [(a, b) for a, b in pairs if not alike(a.reward, b.reward) and bool(a.tools) == bool(b.tools)]
    if not bad:
        return None
    gap = max(abs(a.reward - b.reward) for a, b in bad)
    return Evidence(
        f"{len(bad)} of {len(pairs)} transcripts of training tasks earn something else as held-out tasks, by up to {gap:.3g}",
        bad[0][1],
    )


def _held_kind(m: Matrix) -> str:
    known = m.held_out.cells if m.held_out else {}
    return next((kind for kind in known if "another task's answer" in kind), "")


def _wrong_alike(m: Matrix) -> Evidence | None:
    """Wrong answers earn in held-out tasks what they earn in training tasks: data may tell the two kinds of tasks apart."""
    kind = _held_kind(m)
    own, held = ([*of.shares(kind).values()] if of else [] for of in (m, m.held_out))
    if min(len(own), len(held)) < GIVEN_TASKS:
        return None
    means = fmean(own), fmean(held)
    if abs(means[0] - means[1]) <= WRONG_ALIKE or min(means) >= 0.5:
        return None
    return Evidence(
        f"{kind} earns {means[0]:.0%} of the right answer's reward in training tasks and {means[1]:.0%} in held-out tasks"
    )


def _held_paid(m: Matrix) -> Evidence | None:
    """Perfect transcripts of held-out tasks are paid where those of nearly all training tasks are."""
    if m.held_out is None or not m.held_out.lifts or len(m.paid) < 0.9 * len(m.lifts):
        return None
    unpaid = m.held_out.unpaid
    if len(unpaid) < COMPARED or len(unpaid) < 0.3 * len(m.held_out.lifts):
        return None
    text = f"perfect transcripts earn no more than empty replies in {len(unpaid)} of {len(m.held_out.lifts)} held-out tasks"
    return Evidence(
        f"{text}, and in {len(m.unpaid)} of {len(m.lifts)} training tasks", m.held_out.kind(PERFECT)[unpaid[0]]
    )


def _row(
    id: str, statement: str, cause: str, check: Callable[[Matrix], Evidence | None], *needs: str, where: Any = "tasks"
) -> Inequality:
    return Inequality(id, statement, cause, check, where, needs)


HELD_EMPTY = f"held-out:{EMPTY}"
TASKS = (
    _row("enough", "There are enough different training tasks", "few-distinct-tasks", _enough),
    _row("distinct", "Training tasks differ from each other", "duplicate-tasks", _distinct),
    _row("order", "The order of tasks does not change how hard they are", "task-order-drifts", _order),
    _row("apart", "No held-out task is a training task", "held-out-in-training", _apart, HELD_EMPTY),
    _row("hidden", "Prompts do not give answers away", "answer-in-prompt", _hidden, EMPTY),
    _row("one-prompt", "Held-out prompts differ from each other", "few-distinct-tasks", _one_prompt, HELD_EMPTY),
    _row("prompted", "Held-out tasks are prompted as training tasks are", "evaluation-prompted-differently", _prompted, HELD_EMPTY),
    _row("near-copies", "Held-out tasks are no nearer to training tasks than these are to each other", "held-out-in-training", _near_copies, HELD_EMPTY),
    _row("questions", "Questions end where sentences end", "truncated-context", _cut, EMPTY),
    _row("told-apart", "Tasks that look alike have one answer", "truncated-context", _alike, EMPTY),
)  # fmt: skip
EVALUATION = (
    _row("scored", "Training and held-out tasks score a transcript alike", "evaluation-parses-differently", _scored_alike, f"{EMPTY}, {HELD}", where="reward"),
    _row("held-out-paid", "Perfect transcripts of held-out tasks are paid as those of training tasks are", "evaluation-differs", _held_paid, f"held-out:{PERFECT}", where="reward"),
    _row("wrong-alike", "Wrong answers earn as little in held-out tasks as in training tasks", "evaluation-parses-differently", _wrong_alike, HELD_EMPTY, where="reward"),
)  # fmt: skip
