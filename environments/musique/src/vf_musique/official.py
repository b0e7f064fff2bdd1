"""Score prediction rows as the official evaluation does, including the group scores of the `full` set.

A prediction row is {"id", "predicted_answer", "predicted_support_idxs", "predicted_answerable"}; a gold row is an
official record. Definitions: Trivedi et al. 2022 and the official evaluation script.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from vf_musique.metrics import answer_f1, exact_match, support_f1

PREDICTION_FIELDS = {
    "id": str,
    "predicted_answer": str,
    "predicted_support_idxs": list,
    "predicted_answerable": bool,
}


def score_predictions(
    gold_rows: Sequence[Mapping[str, Any]], prediction_rows: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Return mean scores in [0, 1] over the gold rows. The predictions must have the same ids in the same order.

    `answer_em`, `answer_f1`, `support_em` and `support_f1` are means over the answerable rows. If the gold rows include
    unanswerable twins (each id twice), there are also `sufficiency` (mean over all rows),
    `group_answer_sufficiency_em`, `group_answer_sufficiency_f1`, `group_support_sufficiency_em` and
    `group_support_sufficiency_f1`: the score of the answerable twin if both twins were judged correctly as answerable
    or unanswerable, else 0, averaged over the pairs. Raises ValueError that names the first row that does not fit.
    """
    _check(gold_rows, prediction_rows)
    rows = [_score(gold, predicted) for gold, predicted in zip(gold_rows, prediction_rows, strict=True)]
    answerable = [row for row in rows if row["answerable"]]
    names = ("answer_em", "answer_f1", "support_em", "support_f1")
    scores = {name: fmean(row[name] for row in answerable) if answerable else 0.0 for name in names}
    if len(answerable) == len(rows):
        return scores
    groups = defaultdict(list)
    for row in rows:
        groups[row["id"]].append(row)
    scores["sufficiency"] = fmean(row["sufficient"] for row in rows)
    for name in names:
        kind, _, measure = name.partition("_")
        scores[f"group_{kind}_sufficiency_{measure}"] = fmean(_group(group, name) for group in groups.values())
    return scores


def _score(gold: Mapping[str, Any], predicted: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"id": gold["id"], "answerable": gold.get("answerable", True)}
    row["sufficient"] = float(predicted["predicted_answerable"] == row["answerable"])
    if row["answerable"]:
        answers = [gold["answer"], *gold.get("answer_aliases", ())]
        support = {p["idx"] for p in gold["paragraphs"] if p["is_supporting"]}
        chosen = set(predicted["predicted_support_idxs"])
        row["answer_em"] = exact_match(predicted["predicted_answer"], answers)
        row["answer_f1"] = answer_f1(predicted["predicted_answer"], answers)
        row["support_em"] = float(chosen == support)
        row["support_f1"] = support_f1(chosen, support)
    return row


def _group(twins: list[dict[str, Any]], name: str) -> float:
    if not all(twin["sufficient"] for twin in twins):
        return 0.0
    return next(twin[name] for twin in twins if twin["answerable"])


def _check(gold_rows: Sequence[Mapping[str, Any]], prediction_rows: Sequence[Mapping[str, Any]]) -> None:
    if len(gold_rows) != len(prediction_rows):
        raise ValueError(
            f"there must be as many predictions as gold rows, {len(gold_rows)}, not {len(prediction_rows)}"
        )
    if not gold_rows:
        raise ValueError("there are no gold rows")
    for number, (gold, predicted) in enumerate(zip(gold_rows, prediction_rows, strict=True), start=1):
        for field, kind in PREDICTION_FIELDS.items():
            if not isinstance(predicted.get(field), kind):
                raise ValueError(f"prediction {number}: '{field}' is missing or not a {kind.__name__}")
        if any(type(idx) is not int for idx in predicted["predicted_support_idxs"]):
            raise ValueError(f"prediction {number}: 'predicted_support_idxs' must hold integers")
        if gold["id"] != predicted["id"]:
            raise ValueError(
                f"prediction {number} is for {predicted['id']!r}, but gold row {number} is {gold['id']!r}; predict with "
                "shuffle=false to keep the file's order"
            )
    answerable = Counter(row["id"] for row in gold_rows if row.get("answerable", True))
    if len(answerable) == len(gold_rows):
        return
    for question_id, count in Counter(row["id"] for row in gold_rows).items():
        if count != 2 or answerable[question_id] != 1:
            raise ValueError(
                f"the question {question_id!r} must be in the gold rows exactly twice, once answerable and once "
                "unanswerable"
            )
