"""The official metrics, on cases whose value follows from their definition."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vf_musique import answer_f1, exact_match, support_f1
from vf_musique.metrics import normalize
from vf_musique.official import score_predictions

words = st.text(alphabet="abc the.,!", max_size=20)


@pytest.mark.parametrize(
    ("prediction", "answers", "em", "f1"),
    [
        ("Green", ["Green"], 1, 1),
        ("the  green!", ["Green"], 1, 1),
        ("An apple a day", ["apple day"], 1, 1),
        ("U.S.", ["US"], 1, 1),
        ("well-known", ["wellknown"], 1, 1),
        ("Theresa", ["resa"], 0, 0),  # an article is a word, not a prefix
        ("", ["Green"], 0, 0),
        ("the", ["a"], 1, 1),  # both are empty once normalised
        ("the", ["Green"], 0, 0),
        ("Green", ["the"], 0, 0),
        ("Steve Hillage", ["Miquette Giraudy", "Hillage"], 0, 2 / 3),  # the best alias
        ("Miquette", ["Miquette Giraudy", "Hillage"], 0, 2 / 3),
        ("red red blue", ["red blue blue"], 0, 2 / 3),  # tokens count as often as they occur
        ("Stanley Hall", ["G. Stanley Hall", "Stanley Hall"], 1, 1),
        ("in the year 1905", ["1905"], 0, 0.5),
        ("20 May 1990", ["May 20, 1990"], 0, 1),
    ],
)
def test_answer_metrics(prediction, answers, em, f1):
    assert exact_match(prediction, answers) == em
    assert answer_f1(prediction, answers) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("predicted", "gold", "f1"),
    [
        ([], [], 1),
        ([], [1], 0),
        ([1], [], 0),
        ([1, 2], ["2", "1"], 1),
        ([1, 1, "1"], [1], 1),
        ([1, 2], [1], 2 / 3),
        ([1, 2, 3], [3, 4], 2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2)),
        (range(20), [3, 4], 2 * 0.1 / 1.1),
    ],
)
def test_support_f1(predicted, gold, f1):
    assert support_f1(predicted, gold) == pytest.approx(f1)


@pytest.mark.parametrize("answers", [[], "Green"])
def test_answers_are_a_list(answers):
    with pytest.raises(ValueError, match="list of at least one string"):
        exact_match("Green", answers)


@settings(deadline=None)
@given(words, st.lists(words, min_size=1, max_size=4))
def test_bounds_and_order(prediction, answers):
    em, f1 = exact_match(prediction, answers), answer_f1(prediction, answers)
    assert 0 <= em <= f1 <= 1
    assert answer_f1(prediction, answers[::-1]) == f1
    assert answer_f1(prediction, [*answers, prediction]) == exact_match(prediction, [*answers, prediction]) == 1
    assert normalize(normalize(prediction)) == normalize(prediction)


# --- files of predictions -------------------------------------------------------------------------------------------


def gold(question_id, answer, support=(0, 1), answerable=True, aliases=()):
    paragraphs = [{"idx": i, "is_supporting": i in support} for i in range(4)]
    return {
        "id": question_id,
        "answer": answer,
        "answer_aliases": list(aliases),
        "answerable": answerable,
        "paragraphs": paragraphs,
    }


def predicted(question_id, answer, support=(0, 1), answerable=True):
    return {
        "id": question_id,
        "predicted_answer": answer,
        "predicted_support_idxs": list(support),
        "predicted_answerable": answerable,
    }


def test_an_answerable_set():
    scores = score_predictions(
        [gold("a", "Oak Hill"), gold("b", "seven", aliases=["7"])],
        [predicted("a", "the hill", support=[0]), predicted("b", "7", support=[1, 0, 1])],
    )
    assert scores == pytest.approx(
        {"answer_em": 0.5, "answer_f1": (2 / 3 + 1) / 2, "support_em": 0.5, "support_f1": (2 / 3 + 1) / 2}
    )


def test_groups_count_only_if_both_twins_were_judged_rightly():
    rows = [
        # (id, gold answerable, predicted answer, predicted answerable)
        ("a", True, "Oak Hill", True),
        ("b", True, "Oak Hill", True),
        ("a", False, "", False),  # both of a are right
        ("b", False, "Oak Hill", True),  # b's twin is not
        ("c", True, "Oak", False),
        ("c", False, "", False),
    ]
    scores = score_predictions(
        [gold(i, "Oak Hill", answerable=answerable) for i, answerable, _, _ in rows],
        [predicted(i, answer, answerable=judged, support=[0]) for i, _, answer, judged in rows],
    )
    assert scores == pytest.approx(
        {
            "answer_em": 2 / 3,
            "answer_f1": (1 + 1 + 2 / 3) / 3,
            "support_em": 0,
            "support_f1": 2 / 3,
            "sufficiency": 4 / 6,
            "group_answer_sufficiency_em": 1 / 3,
            "group_answer_sufficiency_f1": 1 / 3,
            "group_support_sufficiency_em": 0,
            "group_support_sufficiency_f1": 2 / 9,
        }
    )


A, TWIN = gold("a", "x"), gold("a", "x", answerable=False)


@pytest.mark.parametrize(
    ("golds", "predictions", "message"),
    [
        ([A], [], "there must be as many predictions as gold rows, 1, not 0"),
        ([], [], "there are no gold rows"),
        ([A], [predicted("b", "x")], "prediction 1 is for 'b', but gold row 1 is 'a'; predict with shuffle=false"),
        ([A], [predicted("a", None)], "prediction 1: 'predicted_answer' is missing or not a str"),
        ([A], [{"id": "a"}], "prediction 1: 'predicted_answer' is missing"),
        ([A], [predicted("a", "x", support=["1"])], "'predicted_support_idxs' must hold integers"),
        (
            [TWIN],
            [predicted("a", "x")],
            "'a' must be in the gold rows exactly twice, once answerable and once unanswerable",
        ),
        ([A, TWIN, TWIN], [predicted("a", "x")] * 3, "'a' must be in the gold rows exactly twice"),
    ],
)
def test_rows_that_do_not_fit_are_named(golds, predictions, message):
    with pytest.raises(ValueError, match=message):
        score_predictions(golds, predictions)


def test_scores_are_plain_json():
    assert json.loads(json.dumps(score_predictions([A], [predicted("a", "x")])))["answer_em"] == 1
