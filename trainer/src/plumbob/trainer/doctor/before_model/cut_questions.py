"""Do the questions of training tasks end where sentences end, or were they cut off before the run?"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.environment import Environment, Played

FEWEST = 8
"""Fewest questions of a kind by which this is judged."""


def checks(environment: Environment) -> Iterator[Finding]:
    train, held_out = _questions(environment.silent), _questions(environment.silent_held_out)
    cause, evidence = judged(train, held_out)
    yield Finding.of("questions end where sentences end", (cause, evidence))
    first = environment.silent[0].trace if environment.silent else None
    if first is not None and not first.tools and environment.tasks.driver is None:
        shown = [("\n".join(text for _, text in p.opening), environment.gold(p.task)) for p in environment.silent]
        yield Finding.of("tasks that look alike have one answer", alike([pair for pair in shown if pair[1]]))


def alike(shown: Sequence[tuple[str, str]]) -> tuple[str | None, str]:
    """(cause or None, evidence) of (prompt, right answer) of tasks without tools: what tells them apart must be in the prompt."""
    answers: dict[str, set[str]] = defaultdict(set)
    for prompt, gold in shown:
        answers[prompt].add(gold)
    several = sum(len(answers[prompt]) > 1 for prompt, _ in shown)
    evidence = f"{several} of {len(shown)} prompts are those of another task as well, which has another right answer"
    bad = several >= max(FEWEST, thresholds.ALIKE_PROMPTS * len(shown))
    return ("truncated-context" if bad else None), evidence


def _questions(played: Sequence[Played]) -> list[str]:
    """The different last messages of these tasks' prompts."""
    return list(dict.fromkeys(p.opening[-1][1] for p in played if p.opening and p.opening[-1][1]))


def judged(train: Sequence[str], held_out: Sequence[str]) -> tuple[str | None, str]:
    """(cause or None, evidence). Questions are cut if they break off where whole ones end with a mark.

    Whole ones are held-out questions, or those with another number of characters than the most frequent one, at which the
    others may have been cut.
    """
    broken = sum(map(_breaks_off, train))
    others = f"{sum(map(_breaks_off, held_out))} of {len(held_out)} held-out ones"
    evidence = f"{broken} of {len(train)} training questions and {others} break off"
    if broken < max(FEWEST, thresholds.CUT_QUESTIONS * len(train)):
        return None, evidence
    if _whole(held_out):
        return "truncated-context", f"{evidence}: {_shown(train)}"
    length, count = Counter(map(len, train)).most_common(1)[0]
    same = [text for text in train if len(text) == length]
    rest = [text for text in (*train, *held_out) if len(text) != length]
    if count >= max(FEWEST, thresholds.CUT_QUESTIONS * len(train)) and all(map(_breaks_off, same)) and _whole(rest):
        return (
            "truncated-context",
            f"{evidence}: {count} of the former have {length} characters, such as {_shown(same)}",
        )
    return None, evidence


def _breaks_off(text: str) -> bool:
    """Whether a text ends with a letter or a digit."""
    return text.rstrip()[-1:].isalnum()


def _whole(texts: Sequence[str]) -> bool:
    return len(texts) >= FEWEST and sum(map(_breaks_off, texts)) <= (1 - thresholds.WHOLE_QUESTIONS) * len(texts)


def _shown(texts: Sequence[str]) -> str:
    return repr(next(text for text in texts if _breaks_off(text))[-40:])
