"""Do stored rewards follow right answers: are right ones paid, and do they count for more than their form?"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Sequence

from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.watch.history import RIGHT
from plumbob.trainer.watch.reward_rules import is_format
from plumbob.trainer.watch.stored_rollouts import Rollout, groups_of

MOST_PLACES = 3
"""Most rollouts that a finding names."""
FEWEST_BY_LENGTH = 16
"""Fewest different tasks by which it is judged whether the reward follows lengths."""
SIZES = 6
"""Fewest different rewards by which it is judged."""
OTHER_ANSWERS = 16
"""Most answers of other tasks that are looked for in each reply, to know what occurs by chance."""


def parsing(rollouts: Sequence[Rollout]) -> Finding | None:
    """In a run that never succeeds, do replies end with the right answer nevertheless?

    Then it is read wrongly or graded wrongly; rollouts alone do not tell which.
    None if the check does not apply. It does not apply if all rollouts earn the same reward above 0, because such a
    reward is constant and parses no answer.
    """
    rewards = {round(r.reward, 9) for r in rollouts}
    asked = [r for r in rollouts if r.gold and r.reply]
    if len(rewards) > 1 or len(asked) < 20 or max(rewards) > 0:
        return None
    found = [r for r in asked if _ends_with(r, r.gold)]
    others = list(dict.fromkeys(r.gold for r in asked))[:OTHER_ANSWERS]
    wrong = [_ends_with(r, gold) for r in asked for gold in others if not set(gold) & set(r.gold)]
    by_chance = sum(wrong) / len(wrong) if wrong else 0.0
    check = "a right answer counts as right"
    evidence = (
        f"all {len(rollouts)} rollouts earned {rewards.pop():g}; "
        f"the task's answer ends {len(found)} of {len(asked)} last messages, that of another task {by_chance:.0%}"
    )
    noise = 3 * math.sqrt(by_chance * (1 - by_chance) / len(asked))
    if len(found) / len(asked) - by_chance < max(thresholds.ANSWERS_UNREAD, noise):
        return Finding(check, "pass", evidence)
    places = tuple(r.place(r.parts[-1]) for r in found[:MOST_PLACES])
    return Finding(check, "fail", evidence, "reward-wrong", found[0].step, places)


def _ends_with(rollout: Rollout, golds: Sequence[str]) -> bool:
    """Whether one of the answers stands at the reply's end, where answers are given.

    In the steps before it, a number may occur by chance. Arithmetic that has an answer as its value stands for it.
    """
    end = rollout.reply[-100:]
    values = [value for text in _ARITHMETIC.findall(end) if (value := value_of(text)) is not None]
    return any(stands_in(gold, end) or number_in(gold) in values for gold in golds)


_ARITHMETIC = re.compile(r"[\d(][\d(). ]*(?:[-+*/] *[\d(). ]+)+")
_OPERATIONS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def value_of(text: str) -> float | None:
    """The value of a text of numbers, + - * / and brackets; None for any other text.

    Example: value_of("12 + 13 * 2") -> 38.0
    """
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError):
        return None


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    raise ValueError("not arithmetic")


def number_in(gold: str) -> float | str:
    """The number that an answer is; the text itself if it is none, which no value equals."""
    try:
        return float(gold.replace(",", ""))
    except ValueError:
        return gold


def stands_in(gold: str, reply: str) -> bool:
    """Whether an answer stands in a text as whole words."""
    return (
        bool(gold.strip()) and re.search(rf"(?<!\w){re.escape(gold.strip())}(?!\w)", reply, re.IGNORECASE) is not None
    )


def dominance(rollouts: Sequence[Rollout]) -> Finding | None:
    """Within groups, does the reward follow whether a reply is right, or how it is written?

    Compares correlations with the environment's metrics; None if it has no metric of both kinds, or rewards are
    constant.
    """
    groups = [g for g in groups_of(rollouts) if len(g) > 1]
    names = {name for r in rollouts for name in r.metrics}
    rewards = _centred([[r.reward for r in g] for g in groups])
    if sum(map(abs, rewards)) < 1e-9:
        return None
    share = {
        name: correlation(rewards, _centred([[r.metrics.get(name, 0.0) for r in g] for g in groups])) for name in names
    }
    right = max((n for n in names if n.split("/")[-1] in RIGHT), key=lambda n: share[n], default=None)
    if (by_length := _by_length(groups, right)) is not None:
        return by_length
    form = max((n for n in names if is_format(n)), key=lambda n: share[n], default=None)
    if form is None or right is None:
        return None
    check = "the reward follows the answer"
    evidence = (
        f"within groups, the reward correlates {share[form]:.2f} with {form!r} and {share[right]:.2f} with {right!r}"
    )
    solved = sum(r.metrics.get(right, 0.0) >= 0.5 for r in rollouts)
    if share[form] > 0.8 and share[right] < 0.5 and solved < thresholds.EVER_RIGHT * len(rollouts):
        return Finding(
            check, "unsure", f"{evidence}; {solved} of {len(rollouts)} are right, so that little else can differ"
        )
    if share[form] > 0.8 and share[right] < 0.5:
        best = sorted(rollouts, key=lambda r: (r.reward, -r.metrics.get(right, 0.0)))[-MOST_PLACES:]
        places = tuple(r.place() for r in reversed(best))
        return Finding(check, "fail", evidence, "reward-format-dominated", rollouts[0].step, places)
    return Finding(check, "pass", evidence)


def _by_length(groups: Sequence[Sequence[Rollout]], metric: str | None) -> Finding | None:
    """Among rollouts of a group that are equally right, does the reward follow their length, and most of it? None if not.

    Wrong answers are often longer than right ones, so lengths count only among rollouts that are both right, or both wrong.
    `metric`: the one that says whether an answer is right; without it, a reply that ends with the task's answer is. None as well
    if that is not known.
    """
    # Rewards of a few different sizes, such as 0 and 1, are not paid by length.
    if len({round(r.reward, 6) for g in groups for r in g}) < SIZES:
        return None
    if len({g[0].task for g in groups}) < FEWEST_BY_LENGTH or (
        metric is None and not all(r.gold for g in groups for r in g)
    ):
        return None

    def right(rollout: Rollout) -> float:
        return float(_ends_with(rollout, rollout.gold)) if metric is None else rollout.metrics.get(metric, 0.0)

    told = [[(right(r), r) for r in g] for g in groups]
    every_one = [own for g in told for own, _ in g]
    # Where answers have another form than the gold one, none seems right, and right ones may be the short ones.
    if not thresholds.TOLD_RIGHT < sum(every_one) / len(every_one) < 1 - thresholds.TOLD_RIGHT:
        return None
    alike = [[r for own, r in g if own == value] for g in told for value in {own for own, _ in g}]
    sizes = [[float(sum(part.size for part in r.turns)) for r in some] for some in alike]
    # A reward for length differs wherever lengths do; an answer that is read otherwise here than there differs now and then.
    may = [some for some, own in zip(alike, sizes, strict=True) if len(set(own)) > 1]
    if sum(len({r.reward for r in some}) > 1 for some in may) <= thresholds.LENGTH_FITS * len(may):
        return None
    lengths = _centred(sizes)
    rewards = _centred([[r.reward for r in some] for some in alike])
    every = _centred([[r.reward for r in g] for g in groups])
    found = correlation(rewards, lengths)
    share = sum(x * x for x in rewards) / max(sum(x * x for x in every), 1e-30)
    if abs(found) <= thresholds.LENGTH_FITS or share <= thresholds.LENGTH_PAID:
        return None
    what = "replies that end with the task's answer" if metric is None else repr(metric)
    evidence = (
        f"{share:.0%} of the variance of rewards within groups is among rollouts that are equally right (by {what}), whose rewards "
        f"correlate {found:+.2f} with the number of sampled tokens"
    )
    most = sorted((r for g in groups for r in g), key=lambda r: -r.reward)[:MOST_PLACES]
    places = tuple(r.place() for r in most)
    return Finding("the reward follows the answer", "fail", evidence, "reward-wrong", most[0].step, places)


def _centred(groups: Sequence[Sequence[float]]) -> list[float]:
    """All values, minus the mean of their group."""
    return [value - sum(g) / len(g) for g in groups for value in g]


def correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Pearson correlation of two lists of centred values; 0 if one of them does not vary."""
    size = math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / size if size else 0.0
