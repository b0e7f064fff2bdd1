"""Two rewards of one finished rollout: ours, bounded and tied to evidence, and the predecessor's, for comparison."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from vf_musique.metrics import answer_f1, exact_match, f1, share, support_f1
from vf_musique.submission import Submission

MAX_HOPS = 4


class Weights(BaseModel):
    """What each component adds to the reward; only the proportions matter.

    `retrieval_precision` is 0 by default: a search that returns two documents for a hop that needs one would
    otherwise cost a perfect answer its 1.0.
    """

    model_config = ConfigDict(frozen=True)

    exact_match: float = 0.4
    f1: float = 0.36
    citation: float = 0.12
    retrieval_recall: float = 0.08
    retrieval_precision: float = 0.0
    format: float = 0.04

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        """Text is read as "f1=0.5,format=0"; components that it does not name keep their default."""
        if isinstance(value, str):
            pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
            if bad := [name for name, equals, _ in pairs if not equals]:
                raise ValueError(f'weights are written "f1=0.5,format=0"; {bad[0].strip()!r} has no value')
            value = {name.strip(): number.strip() for name, _, number in pairs}
        if isinstance(value, Mapping):
            for name, number in value.items():
                if name not in cls.model_fields:
                    raise ValueError(
                        f"there is no component {name!r}; the components are {', '.join(cls.model_fields)}"
                    )
                if not _is_weight(number):
                    raise ValueError(f"the weight of {name} must be a number that is not negative, not {number!r}")
        return value

    @model_validator(mode="after")
    def _not_all_zero(self) -> Weights:
        if not 0 < self.total < math.inf:
            raise ValueError("the weights must have a sum above 0")
        return self

    @property
    def answer(self) -> float:
        return self.exact_match + self.f1

    @property
    def total(self) -> float:
        return sum((self.answer, self.citation, self.retrieval_recall, self.retrieval_precision, self.format))


def _is_weight(value: Any) -> bool:
    try:
        return 0 <= float(value) < math.inf
    except (TypeError, ValueError):
        return False


@dataclass(frozen=True)
class Gold:
    """What is right. Example: Gold(("Oak Hill",), frozenset({"3", "7"}), hops=2)"""

    answers: tuple[str, ...]
    """The answer, then its aliases."""
    supporting: frozenset[str]
    """Ids of the supporting documents."""
    hops: int
    answerable: bool = True


@dataclass(frozen=True)
class Components:
    """Each in [0, 1]. A citation is right if it is supporting and was retrieved in this rollout."""

    exact_match: float
    f1: float
    retrieval_recall: float
    retrieval_precision: float
    citation_precision: float
    citation_recall: float
    citation_f1: float
    support_f1: float
    """The official metric: of what was cited, retrieved or not."""
    format: float
    sufficiency: float
    """1 if the question was judged answerable or unanswerable rightly; no answer is no judgement."""


def components(gold: Gold, submission: Submission, retrieved: frozenset[str]) -> Components:
    cited = set(submission.cited)
    right = cited & retrieved & gold.supporting
    precision, recall = share(right, cited), share(right, gold.supporting)
    if not gold.answerable:  # the right set of citations is the empty one
        precision, recall = float(not cited), 1.0
    found = retrieved & gold.supporting
    judged_answerable = not submission.says_unanswerable
    # Not left to the empty string: a gold answer such as "A" normalises to nothing, and would equal it.
    answer = submission.answer if submission.answered and judged_answerable else None
    return Components(
        exact_match=exact_match(answer, gold.answers) if answer else 0.0,
        f1=answer_f1(answer, gold.answers) if answer else 0.0,
        retrieval_recall=share(found, gold.supporting),
        retrieval_precision=share(found, retrieved),
        citation_precision=precision,
        citation_recall=recall,
        citation_f1=f1(precision, recall),
        support_f1=support_f1(cited, gold.supporting),
        format=submission.parts / 3,
        sufficiency=float(submission.answered and judged_answerable == gold.answerable),
    )


def shaped_reward(
    c: Components,
    gold: Gold,
    weights: Weights,
    *,
    searched: bool,
    invented: bool,
    grounding: float = 0.5,
    hop_factor: bool = False,
) -> float:
    """In [0, 1].

    Answerable: with a the weighted mean of exact match and F1, and g the grounding,

        [w_answer * a * (1 - g * (1 - citation_f1)) + w_citation * citation_f1 + w_recall * retrieval_recall
         + w_precision * retrieval_precision + w_format * format] / sum of weights

    so it is 1 only with the right answer, the right citations and, with those retrieved, everything else. Unanswerable:
    evidence cannot be right, so with j = 1 for saying so, times 1 - g if nothing was searched or if something was cited
    that was not retrieved (`invented`), and 0 for anything else,

        [(w_answer + w_recall + w_precision) * j + w_citation * j * (nothing was cited) + w_format * format]
         / sum of weights

    `hop_factor` multiplies by min(1, hops / 4).
    """
    if gold.answerable:
        answer = (weights.exact_match * c.exact_match + weights.f1 * c.f1) / weights.answer if weights.answer else 0.0
        earned = (
            weights.answer * (answer * (1 - grounding * (1 - c.citation_f1))),
            weights.citation * c.citation_f1,
            weights.retrieval_recall * c.retrieval_recall,
            weights.retrieval_precision * c.retrieval_precision,
            weights.format * c.format,
        )
    else:
        judged = c.sufficiency * (1 if searched and not invented else 1 - grounding)
        earned = (
            weights.answer * judged,
            weights.citation * judged * c.citation_f1,
            weights.retrieval_recall * judged,
            weights.retrieval_precision * judged,
            weights.format * c.format,
        )
    reward = min(1.0, sum(earned) / weights.total)
    return reward * min(1.0, gold.hops / MAX_HOPS) if hop_factor else reward


# --- the predecessor's reward ---------------------------------------------------------------------------------------

ORIGINAL_WEIGHTS = {
    "exact_match": 1.0,
    "f1": 0.9,
    "retrieval_recall": 1.0,
    "retrieval_precision": 0.4,
    "citation_recall": 0.6,
    "format": 0.1,
}
_COUNTED = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
_DIGITS = {word: str(number) for number, word in enumerate(_COUNTED)}
_ORDINALS = {
    "first": "1st",
    "second": "2nd",
    "third": "3rd",
    **{word: f"{i}th" for i, word in enumerate(["fourth", "fifth", "sixth", "seventh", "eighth", "ninth"], start=4)},
}
_ORDINAL = re.compile("|".join(_ORDINALS))


def original_answers(answers: tuple[str, ...]) -> tuple[str, ...]:
    """The answers, and of each a lower-cased variant: "Nine" is "9" as well, "First War" is "1st war" as well."""
    variants = [_ORDINAL.sub(lambda m: _ORDINALS[m[0]], low) for low in map(str.lower, answers)]
    return tuple(dict.fromkeys([*answers, *(_DIGITS.get(variant, variant) for variant in variants)]))


def original_reward(gold: Gold, submission: Submission, retrieved: frozenset[str]) -> float:
    """In [0, hops / 2]: the combined reward of the environment that this one replaces, in its last tag version.

    Its reader of citations knew nothing but commas: `submission.cited_pieces`. Of repeated tags, and of tags inside
    thinking, the submission's own rules hold.
    Citations are judged by recall alone and need not be retrieved, wrong answers keep all evidence rewards, and the
    hop count (of supporting documents) scales the sum; that is why it is here for comparison only.
    """
    answers = original_answers(gold.answers)
    found = retrieved & gold.supporting
    scores = {
        "exact_match": exact_match(submission.answer or "", answers),
        "f1": answer_f1(submission.answer or "", answers),
        "retrieval_recall": share(found, gold.supporting),
        "retrieval_precision": share(found, retrieved),
        "citation_recall": share(gold.supporting.intersection(submission.cited_pieces), gold.supporting)
        if gold.supporting
        else 1.0,
        "format": submission.parts / 3,
    }
    total = sum(ORIGINAL_WEIGHTS[name] * score for name, score in scores.items())
    return len(gold.supporting) / 2 * (total / sum(ORIGINAL_WEIGHTS.values()))
