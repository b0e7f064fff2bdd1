"""Does the grader take answers for right that are wrong, but near to the right one?

The perfect transcript is played with its answer changed by little. A reward that pays such answers in full teaches no more than
the neighbourhood of the right one; a reward that falls with the distance pays them less, and is no fault.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.before_model.rewritten_turns import replaced, rewritten
from plumbob.trainer.doctor.environment import Environment, Played, said, spread, text_of

TASKS = 24
"""Number of tasks in which changed answers are played."""
OFF = 1.06
"""Factor between a wrong number and the right one: rounding to three digits changes a number by less."""
SMALLEST = 20
"""Smallest number that can be changed by about `OFF` and stay a whole number."""
SHORTEST = 4
"""Fewest letters of a text of which the first letter is another answer; shorter ones may be names of options."""
_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?$")


def checks(environment: Environment) -> Iterator[Finding]:
    if environment.has_oracle and environment.gold_field is not None:
        yield near(environment)


def near(environment: Environment) -> Finding:
    """Play each kind of near answer; the finding names the first that most tasks pay in full."""
    check, counts = "wrong answers that are near to the right one earn less", list[str]()
    for name, change in KINDS.items():
        pairs = _played(environment, change)
        full = [p for best, p in pairs if p.reward >= best.reward - thresholds.REWARD_TOLERANCE]
        if len(pairs) < thresholds.CHEAP_PLAYED:
            continue
        counts.append(f"{name} earns as much as the right answer in {len(full)} of {len(pairs)} tasks")
        if len(full) > thresholds.NEAR_ACCEPTED * len(pairs):
            example = full[0]
            wrong, right = text_of(example.trace.assistant_messages[-1])[-40:], environment.gold(example.task)[-40:]
            evidence = f"{counts[-1]}, such as {wrong!r} in {example.task.key}, where the right answer is {right!r}"
            return Finding(check, "fail", evidence, "reward-exploitable")
    return Finding(
        check, "pass", "; ".join(counts) or "no answer is a number or a text that could be changed by little"
    )


def _played(environment: Environment, change: Callable[[str], str | None]) -> list[tuple[Played, Played]]:
    """(the oracle, the same with a changed answer) of tasks whose oracle earns more than an empty reply."""
    best = {id(p.task): p for p in environment.oracles if p.trace.ok}
    found = []
    for number in spread(len(environment.sample), TASKS):
        task = environment.sample[number]
        turns, gold = environment.turns_of(task), environment.gold(task)
        kept = best.get(id(task))
        if kept is None or kept.reward <= environment.floors.get(id(task), 0.0) + thresholds.REWARD_TOLERANCE:
            continue
        # An answer in an earlier turn would stay right, as in tasks that are solved by calls.
        wrong, told = change(gold), [gold in said(turn) for turn in turns]
        if wrong is None or not told[-1] or any(told[:-1]):
            continue
        final = rewritten(turns[-1], lambda text, gold=gold, wrong=wrong: replaced(text, gold, wrong))
        played = environment.say(task, *turns[:-1], final)
        if played.trace.ok:
            found.append((kept, played))
    return found


def _off(gold: str) -> str | None:
    """The answer with its last number a little larger; None if it does not end with a large enough one."""
    match = _NUMBER.search(gold)
    if match is None:
        return None
    digits = match[0].replace(",", "")
    if abs(float(digits)) < SMALLEST:
        return None
    decimals = len(digits.partition(".")[2])
    return f"{gold[: match.start()]}{float(digits) * OFF:.{decimals}f}"


def _longer(gold: str) -> str | None:
    """The answer with one more digit, which a grader that looks for the right answer inside the reply takes for right."""
    return f"{gold}7" if _NUMBER.search(gold) else None


def _first_digit(gold: str) -> str | None:
    """The answer's last number with every digit but the first another one; None if it has fewer than two digits."""
    match = _NUMBER.search(gold)
    digits = match[0] if match else ""
    if match is None or not digits.isdigit() or len(digits) < 2:
        return None
    return f"{gold[: match.start()]}{digits[0]}{''.join(str((int(digit) + 5) % 10) for digit in digits[1:])}"


def _first_letter(gold: str) -> str | None:
    """The answer's first letter, which a grader that looks for the reply inside the right answer takes for right."""
    return gold[0] if gold.isalpha() and len(gold) >= SHORTEST else None


KINDS: dict[str, Callable[[str], str | None]] = {
    "a number that is 6% too large": _off,
    "the right number with one more digit": _longer,
    "a number of as many digits with the right first one": _first_digit,
    "the right word's first letter": _first_letter,
}
"""What a wrong answer is -> the right answer to the wrong one, or None if there is none of that kind."""
