"""Two rewards for a finished rollout.

`shaped_reward` is bounded and depends on evidence; `original_reward` is the predecessor environment's, for comparison.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from vf_musique.metrics import answer_f1, distinct, exact_match, f1, f1_above, normalize, share, support_f1
from vf_musique.submission import Submission

MAX_HOPS = 4
F1_FLOOR = 0.5
"""F1 up to which an answer earns nothing: one right word of two is as often another thing as a part of the right one."""


class Weights(BaseModel):
    """The weight of each component of the shaped reward; only their proportions matter.

    `retrieval_precision` is 0 by default, because otherwise a perfect answer would score less than 1.0 if a search
    returned two documents for a hop that needs one.
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
        """Accept text such as "f1=0.5,format=0"; components that are not named keep their default."""
        if isinstance(value, str):
            pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
            if bad := [name for name, equals, _ in pairs if not equals]:
                raise ValueError(f'weights are written "f1=0.5,format=0"; {bad[0].strip()!r} has no value')
            value = {name.strip(): number.strip() for name, _, number in pairs}
        if isinstance(value, Mapping):
            for name, number in value.items():
                if name not in cls.model_fields:
                    raise ValueError(
                        f"there is no reward component {name!r}; the components are {', '.join(cls.model_fields)}"
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
        """The weight of the answer: exact match and F1 together."""
        return self.exact_match + self.f1

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return sum((self.answer, self.citation, self.retrieval_recall, self.retrieval_precision, self.format))


def _is_weight(value: Any) -> bool:
    try:
        return 0 <= float(value) < math.inf
    except (TypeError, ValueError):
        return False


@dataclass(frozen=True)
class Gold:
    """The gold data of one question. Example: Gold(("Oak Hill",), frozenset({"3", "7"}), hops=2)"""

    answers: tuple[str, ...]
    """The gold answer, followed by its aliases."""
    supporting: frozenset[str]
    """Ids of the supporting documents."""
    hops: int
    answerable: bool = True
    known: frozenset[str] = frozenset()
    """Words that earn no partial credit; see `known_words`."""


def known_words(question: str, intermediate: Iterable[str], titles: Iterable[str]) -> frozenset[str]:
    """Return the normalised words of the question, of the intermediate answers and of the supporting titles.

    Who knows them need not have found the answer, so they earn nothing unless they are the whole answer.
    """
    return frozenset(word for text in (question, *intermediate, *titles) for word in normalize(text).split())


@dataclass(frozen=True)
class Components:
    """The components of the rewards and the official metrics, each in [0, 1].

    A citation is correct if the document is supporting and was retrieved in this rollout.
    """

    exact_match: float
    f1: float
    f1_credit: float
    """What the shaped reward takes for F1: its part above the F1 that needs no evidence (`metrics.f1_above`)."""
    retrieval_recall: float
    retrieval_precision: float
    citation_precision: float
    citation_recall: float
    citation_f1: float
    support_f1: float
    """The official metric: F1 of the cited documents, whether they were retrieved or not."""
    format: float
    sufficiency: float
    """1 if the question was correctly judged as answerable or unanswerable; 0 if there is no answer."""


def components(
    gold: Gold, submission: Submission, retrieved: frozenset[str], *, f1_floor: float = F1_FLOOR
) -> Components:
    """Compute the components of one submission. `retrieved`: ids of the documents that the tools returned."""
    cited = set(submission.cited)
    right = cited & retrieved & gold.supporting
    precision, recall = share(right, cited), share(right, gold.supporting)
    if not gold.answerable:  # the correct set of citations is empty
        precision, recall = float(not cited), 1.0
    found = retrieved & gold.supporting
    judged_answerable = not submission.says_unanswerable
    answer = (submission.answer or "") if judged_answerable else ""
    golds = distinct(answer, gold.answers) if answer else []
    return Components(
        exact_match=exact_match(answer, golds) if golds else 0.0,
        f1=answer_f1(answer, golds) if golds else 0.0,
        f1_credit=f1_above(answer, golds, gold.known, f1_floor) if golds else 0.0,
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
    blind: float = 0.0,
    grounding: float = 0.5,
    hop_factor: bool = False,
    blind_reading_cost: float = 1.0,
) -> float:
    """Return the shaped reward, in [0, 1].

    `searched`: whether the rollout made a search. `invented`: whether it cited a document that was not retrieved.
    `blind`: share of the retrieved documents that were read by id before any search had returned them.

    Answerable questions, with a = the weighted mean of exact match and `f1_credit`, g = `grounding`, and
    e = 1 - `blind_reading_cost` * `blind`, what the evidence is worth:

        [w_answer * a * (1 - g * (1 - e * citation_f1)) + e * w_citation * citation_f1 + e * w_recall * retrieval_recall
         + e * w_precision * retrieval_precision + w_format * format] / sum of weights

    With the default settings this is 1 only if the answer and the citations are correct, which includes that searches
    returned the supporting documents.

    Unanswerable questions have no evidence to find. With j = 1 - g * (1 - e) if the answer is "unanswerable", j = 1 - g
    if also nothing was searched or a document was cited that was not retrieved (`invented`), and j = 0 for any other
    answer:

        [(w_answer + w_recall + w_precision) * j + w_citation * j * (nothing was cited) + w_format * format]
         / sum of weights

    `hop_factor`: multiply the reward by min(1, hops / 4).
    """
    evidence = 1 - blind_reading_cost * blind
    if gold.answerable:
        answer = weights.exact_match * c.exact_match + weights.f1 * c.f1_credit
        earned = (
            answer * (1 - grounding * (1 - evidence * c.citation_f1)),
            evidence * weights.citation * c.citation_f1,
            evidence * weights.retrieval_recall * c.retrieval_recall,
            evidence * weights.retrieval_precision * c.retrieval_precision,
            weights.format * c.format,
        )
    else:
        judged = c.sufficiency * (1 - grounding * (1 - evidence if searched and not invented else 1))
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
    """Return the answers and a lower-case variant of each, with digits: "Nine" adds "9", "First War" adds "1st war"."""
    variants = [_ORDINAL.sub(lambda m: _ORDINALS[m[0]], low) for low in map(str.lower, answers)]
    return tuple(dict.fromkeys([*answers, *(_DIGITS.get(variant, variant) for variant in variants)]))


def original_reward(gold: Gold, submission: Submission, retrieved: frozenset[str]) -> float:
    """Return the combined reward of the predecessor environment in its last tag version, in [0, hops / 2].

    It serves for comparison only: citations are judged by recall alone and need not be retrieved, wrong answers keep
    all rewards for evidence, and the sum is scaled by the number of supporting documents. As in the predecessor,
    citations are split at commas only (`submission.cited_pieces`). Repeated tags, and tags inside thinking, are treated
    as in `submission.read_tags`.
    """
    answer = submission.answer or ""
    answers = distinct(answer, original_answers(gold.answers))
    found = retrieved & gold.supporting
    scores = {
        "exact_match": exact_match(answer, answers) if answers else 0.0,
        "f1": answer_f1(answer, answers) if answers else 0.0,
        "retrieval_recall": share(found, gold.supporting),
        "retrieval_precision": share(found, retrieved),
        "citation_recall": share(gold.supporting.intersection(submission.cited_pieces), gold.supporting)
        if gold.supporting
        else 1.0,
        "format": submission.parts / 3,
    }
    total = sum(ORIGINAL_WEIGHTS[name] * score for name, score in scores.items())
    return len(gold.supporting) / 2 * (total / sum(ORIGINAL_WEIGHTS.values()))
