"""The official MuSiQue metrics of one answer, as defined by Trivedi et al. (2022) in evaluate_v1.0.py."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from plumbob.retrieval import folded

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize(text: str) -> str:
    """Return lower-case text without punctuation, articles and extra blanks, as in SQuAD (Rajpurkar et al. 2016)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def distinct(prediction: str, answers: Sequence[str]) -> list[str]:
    """Return the answers with which a reward may compare a prediction.

    The official normalisation leaves nothing of an answer such as "A", "!!!" or "The The", and would make it equal to any
    text of punctuation and articles. Such an answer counts only for a prediction that reads the same (`folded`).
    """
    return [answer for answer in answers if normalize(answer) or _spelled(answer) == _spelled(prediction)]


def _spelled(text: str) -> str:
    """Return the folded text without punctuation, or with it if there is nothing else."""
    return folded(text.translate(_PUNCTUATION)) or folded(text)


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """Return 1.0 if the prediction equals one of the answers after normalisation, else 0.0.

    `answers`: the gold answer and its aliases. Raises ValueError if it is empty.
    """
    _need(answers)
    return float(normalize(prediction) in {normalize(answer) for answer in answers})


def answer_f1(prediction: str, answers: Sequence[str]) -> float:
    """Return the F1 score (harmonic mean of token precision and recall) with the best of the answers, in [0, 1].

    If the prediction or the answer has no token left after normalisation, F1 is 1.0 if both have none, else 0.0. Raises
    ValueError if `answers` is empty.
    """
    _need(answers)
    return max(_token_f1(normalize(prediction).split(), normalize(answer).split()) for answer in answers)


def _need(answers: Sequence[str]) -> None:
    if isinstance(answers, str) or not answers:
        raise ValueError("answers must be a list of at least one string")


def _token_f1(predicted: list[str], gold: list[str]) -> float:
    if not predicted or not gold:
        return float(predicted == gold)
    common = (Counter(predicted) & Counter(gold)).total()
    return f1(common / len(predicted), common / len(gold))


def f1_above(prediction: str, answers: Sequence[str], known: Collection[str], floor: float) -> float:
    """Return how far F1 lies above what needs no evidence, for the best of the answers, in [0, 1]; 1.0 for a match.

    For an answer of n words of which k are in `known` (normalised words that are given away, such as the question's),
    no text whose only words of the answer are known ones has an F1 above 2k / (k + n). With b = max(floor, 2k / (k + n))
    the result is (F1 - b) / (1 - b), and 0.0 where that is negative or b is 1. Raises ValueError if `answers` is empty.
    """
    if exact_match(prediction, answers):
        return 1.0
    predicted = normalize(prediction).split()
    best = 0.0
    for gold in (normalize(answer).split() for answer in answers):
        given = sum(word in known for word in gold)
        bar = max(floor, 2 * given / (given + len(gold)) if gold else 1.0)
        if bar < 1:
            best = max(best, (_token_f1(predicted, gold) - bar) / (1 - bar))
    return best


def support_f1(predicted_ids: Iterable[int | str], gold_ids: Iterable[int | str]) -> float:
    """Return F1 of two sets of paragraph ids, in [0, 1]; 1.0 if both are empty. 3 and "3" are the same id."""
    predicted, gold = set(map(str, predicted_ids)), set(map(str, gold_ids))
    if not predicted and not gold:
        return 1.0
    common = predicted & gold
    return f1(share(common, predicted), share(common, gold))


def share(part: Collection[str], whole: Collection[str]) -> float:
    """Return the size of `part` divided by that of `whole`; 0.0 if `whole` is empty."""
    return len(part) / len(whole) if whole else 0.0


def f1(precision: float, recall: float) -> float:
    """Return the harmonic mean of precision and recall; 0.0 if both are 0."""
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0
