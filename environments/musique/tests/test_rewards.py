"""The reward: bounded, 1 only for the right answer with the right evidence, and none of the attacks pays."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from vf_musique.rewards import (
    Gold,
    Weights,
    components,
    original_answers,
    original_reward,
    shaped_reward,
)
from vf_musique.submission import Submission, read_tags

IDS = [str(i) for i in range(20)]
id_sets = st.sets(st.sampled_from(IDS))
golds = st.builds(
    lambda supporting, answerable: Gold(("Oak Hill", "seven"), frozenset(supporting), len(supporting), answerable),
    st.sets(st.sampled_from(IDS), min_size=2, max_size=4),
    st.booleans(),
)
submissions = st.builds(
    lambda answer, cited, parts: Submission(answer, tuple(sorted(cited)), parts),
    st.sampled_from([None, "", "Oak Hill", "the oak hill", "seven", "Oak", "Pine Moor", "unanswerable"]),
    id_sets,
    st.integers(0, 3),
)
positive = st.floats(0.01, 10)
weights = st.builds(
    Weights,
    **dict.fromkeys(("exact_match", "f1", "citation", "retrieval_recall", "format"), positive),
    retrieval_precision=st.just(0.0) | positive,
)
any_weights = st.fixed_dictionaries({}, optional=dict.fromkeys(Weights.model_fields, st.floats(0, 10))).filter(
    lambda chosen: sum({**Weights().model_dump(), **chosen}.values()) > 0.01
)
groundings = st.floats(0, 1)


def score(gold, submission, retrieved, weights=None, *, searched=True, **settings):
    retrieved = frozenset(retrieved)
    c = components(gold, submission, retrieved)
    invented = bool(set(submission.cited) - retrieved)
    return shaped_reward(c, gold, weights or Weights(), searched=searched, invented=invented, **settings)


@settings(deadline=None)
@given(golds, submissions, id_sets, any_weights, groundings, st.booleans(), st.booleans())
def test_the_reward_is_between_0_and_1(gold, submission, retrieved, chosen, grounding, hop_factor, searched):
    w = Weights(**chosen)
    reward = score(gold, submission, retrieved, w, grounding=grounding, hop_factor=hop_factor, searched=searched)
    assert 0 <= reward <= 1
    for value in vars(components(gold, submission, frozenset(retrieved))).values():
        assert 0 <= value <= 1


@settings(deadline=None)
@given(golds, submissions, id_sets, weights, groundings)
def test_1_is_for_the_right_answer_with_the_right_citations_alone(gold, submission, retrieved, w, grounding):
    perfect = (
        submission.answer in ("Oak Hill", "the oak hill", "seven")
        and set(submission.cited) == gold.supporting <= retrieved
        and (not w.retrieval_precision or retrieved == gold.supporting)
        if gold.answerable
        else submission.answer == "unanswerable" and not submission.cited
    )
    assert (score(gold, submission, retrieved, w, grounding=grounding) == 1) == (perfect and submission.parts == 3)


@settings(deadline=None)
@given(golds, st.integers(0, 3), weights, groundings)
def test_a_perfect_rollout_scores_exactly_1(gold, parts, w, grounding):
    answer = "Oak Hill" if gold.answerable else "unanswerable"
    cited = gold.supporting if gold.answerable else ()
    submission = Submission(answer, tuple(cited), 3)
    assert score(gold, submission, gold.supporting, w, grounding=grounding) == 1
    less = Submission(answer, tuple(cited), parts)
    assert (score(gold, less, gold.supporting, w, grounding=grounding) == 1) == (parts == 3)


@settings(deadline=None)
@given(golds, submissions, id_sets, any_weights, groundings, st.sampled_from(IDS))
def test_one_more_unretrieved_citation_never_pays(gold, submission, retrieved, chosen, grounding, extra):
    retrieved -= {extra}
    more = Submission(submission.answer, tuple(dict.fromkeys((*submission.cited, extra))), submission.parts)
    before, after = (score(gold, s, retrieved, Weights(**chosen), grounding=grounding) for s in (submission, more))
    assert after <= before + 1e-12


@settings(deadline=None)
@given(golds, submissions, id_sets, st.permutations(IDS))
def test_what_the_ids_are_does_not_matter(gold, submission, retrieved, order):
    def rename(ids):
        return [order[int(i)] for i in ids]

    other = Gold(gold.answers, frozenset(rename(gold.supporting)), gold.hops, gold.answerable)
    renamed = Submission(submission.answer, tuple(reversed(rename(submission.cited))), submission.parts)
    assert components(gold, submission, frozenset(retrieved)) == components(
        other, renamed, frozenset(rename(retrieved))
    )


@settings(deadline=None)
@given(golds, submissions, id_sets, id_sets)
def test_finding_more_of_the_support_never_costs(gold, submission, retrieved, more):
    more &= gold.supporting
    assert score(gold, submission, retrieved | more) >= score(gold, submission, retrieved) - 1e-12


# --- attacks --------------------------------------------------------------------------------------------------------


def attack_table(hops, documents=20):
    """Rewards (ours, the original's) of typical transcripts of an answerable question."""
    support = IDS[:hops]
    gold = Gold(("Oak Hill",), frozenset(support), hops)
    half = support[: -(-hops // 2)]
    right, wrong, everything = "Oak Hill", "Pine Moor", IDS[:documents]
    cases = {
        "perfect": (right, support, support),
        "right, all retrieved, half of the support cited": (right, everything, half),
        "right, all retrieved, all cited": (right, everything, everything),
        "right, all retrieved, nothing cited": (right, everything, []),
        "right, support cited but never retrieved": (right, [], support),
        "right, nothing retrieved or cited": (right, [], []),
        "wrong, all retrieved, support cited": (wrong, everything, support),
        "wrong, all retrieved, all cited": (wrong, everything, everything),
        "wrong, nothing retrieved, all cited": (wrong, [], everything),
    }
    rows = {}
    for name, (answer, retrieved, cited) in cases.items():
        submission = Submission(answer, tuple(cited), 3)
        ours = score(gold, submission, retrieved, searched=bool(retrieved))
        rows[name] = (ours, original_reward(gold, submission, frozenset(retrieved)))
    return rows


TABLE = {
    # transcript: (ours at 2, 3, 4 hops), (the original's)
    "perfect": ((1, 1, 1), (1, 1.5, 2)),
    "right, all retrieved, half of the support cited": ((0.833, 0.900, 0.833), (0.835, 1.2975, 1.69)),
    "right, all retrieved, all cited": ((0.591, 0.630, 0.667), (0.91, 1.3725, 1.84)),
    "right, all retrieved, nothing cited": ((0.5, 0.5, 0.5), (0.76, 1.1475, 1.54)),
    "right, support cited but never retrieved": ((0.42, 0.42, 0.42), (0.65, 0.975, 1.3)),
    "right, nothing retrieved or cited": ((0.42, 0.42, 0.42), (0.5, 0.75, 1.0)),
    "wrong, all retrieved, support cited": ((0.24, 0.24, 0.24), (0.435, 0.66, 0.89)),
    "wrong, all retrieved, all cited": ((0.142, 0.151, 0.160), (0.435, 0.66, 0.89)),
    "wrong, nothing retrieved, all cited": ((0.04, 0.04, 0.04), (0.175, 0.2625, 0.35)),
}


@pytest.mark.parametrize("column", range(3))
def test_the_attack_table_of_the_readme(column):
    rows = attack_table(hops=column + 2)
    assert {name: ours for name, (ours, _) in rows.items()} == pytest.approx(
        {name: ours[column] for name, (ours, _) in TABLE.items()}, abs=6e-4
    )
    assert {name: theirs for name, (_, theirs) in rows.items()} == pytest.approx(
        {name: theirs[column] for name, (_, theirs) in TABLE.items()}, abs=1e-9
    )


@pytest.mark.parametrize(("hops", "documents"), list(itertools.product([2, 3, 4], range(4, 21))))
def test_a_wrong_answer_earns_at_most_a_quarter_whatever_is_retrieved_and_cited(hops, documents):
    gold = Gold(("Oak Hill",), frozenset(IDS[:hops]), hops)
    for cited in (IDS[:documents], IDS[:hops], []):
        submission = Submission("Pine Moor", tuple(cited), 3)
        for hop_factor in (False, True):
            assert score(gold, submission, IDS[:documents], hop_factor=hop_factor) <= 0.25
    noiseless = Submission("Pine Moor", tuple(IDS[:hops]), 3)
    assert score(gold, noiseless, IDS[:hops]) <= 0.25


def test_any_wrong_4_hop_rollout_is_below_any_right_2_hop_one():
    worst_right = score(Gold(("x",), frozenset("12"), 2), Submission("x", tuple(IDS), 1), [])
    best_wrong = score(Gold(("x",), frozenset("1234"), 4), Submission("y", tuple("1234"), 3), "1234")
    assert best_wrong < worst_right


def test_an_unanswerable_question():
    gold = Gold(("Oak Hill",), frozenset("1"), 2, answerable=False)
    says, guesses, silent = (
        Submission("unanswerable", (), 3),
        Submission("Oak Hill", ("1",), 3),
        Submission(None, (), 0),
    )
    assert score(gold, says, "123") == 1
    assert score(gold, says, [], searched=False) == pytest.approx(0.52)  # said without looking
    cites = Submission("unanswerable", ("1",), 3)
    assert score(gold, cites, "123") == pytest.approx(0.88)  # no evidence is right, were it ever so well retrieved
    assert score(gold, cites, "23") == pytest.approx(1 - 0.96 / 2 - 0.06)  # never retrieved
    assert score(gold, Submission("unanswerable", tuple(IDS), 3), "123") == pytest.approx(0.46)
    assert score(gold, cites, [], searched=False) == pytest.approx(0.46)
    assert score(gold, guesses, "123") == pytest.approx(0.04)
    assert score(gold, silent, "123") == 0
    # And to give up on a question that has an answer earns what a wrong answer does.
    answerable = Gold(("Oak Hill",), frozenset("12"), 2)
    assert score(answerable, Submission("unanswerable", ("1", "2"), 3), "12") == pytest.approx(0.24)
    assert components(answerable, says, frozenset()).sufficiency == 0


def test_an_empty_answer_never_equals_a_gold_answer_that_normalises_to_nothing():
    gold = Gold(("A",), frozenset("1"), 1)
    assert components(gold, Submission("", (), 0), frozenset()).exact_match == 0
    assert components(gold, Submission("A", (), 0), frozenset()).exact_match == 1


@pytest.mark.parametrize(
    ("golds", "right", "wrong"),
    [
        (["A"], ["A", "a", " A. "], [".", "the", "the a", "\u200b", "B"]),
        (["!!!"], ["!!!"], ["!", "the", "-", "a"]),
        (["The The"], ["The The", "the  the"], ["the", "-", "the the the"]),
        (["Oak Hill", "An"], ["oak hill", "An"], [".", "the", "a"]),
    ],
)
def test_a_gold_answer_of_which_the_official_normalisation_leaves_nothing(golds, right, wrong):
    gold = Gold(tuple(golds), frozenset("12"), 2)
    for answer in right + wrong:
        submission = read_tags(f"<answer>{answer}</answer>")
        found = components(gold, submission, frozenset())
        assert (found.exact_match, found.f1, found.f1_credit) == ((1, 1, 1) if answer in right else (0, 0, 0)), answer
        # Two are the supporting documents, so the predecessor's reward is not scaled.
        assert (original_reward(gold, submission, frozenset()) > 0.3) == (answer in right), answer


def test_the_hop_factor_keeps_the_bounds():
    perfect = Submission("x", tuple("12345"), 3)
    factors = [
        score(
            Gold(("x",), frozenset("12345"[:n]), n),
            Submission("x", tuple("12345"[:n]), 3),
            "12345"[:n],
            hop_factor=True,
        )
        for n in (2, 3, 4)
    ]
    assert factors == [0.5, 0.75, 1.0]
    assert score(Gold(("x",), frozenset("12345"), 5), perfect, "12345", hop_factor=True) == 1


# --- weights --------------------------------------------------------------------------------------------------------


def test_weights_are_read_from_text():
    read = Weights.model_validate(" f1=0.5, format = 0,")
    assert (read.f1, read.format, read.exact_match) == (0.5, 0, Weights().exact_match)
    assert Weights.model_validate("") == Weights()
    assert Weights.model_validate({"citation": 1}).citation == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f2=1", "there is no reward component 'f2'; the components are exact_match, f1, citation, retrieval_recall"),
        ("f1", "weights are written \"f1=0.5,format=0\"; 'f1' has no value"),
        ("f1=x", "the weight of f1 must be a number that is not negative, not 'x'"),
        ("f1=-1", "the weight of f1 must be a number that is not negative"),
        ("f1=nan", "the weight of f1 must be a number that is not negative"),
        ("f1=inf", "the weight of f1 must be a number that is not negative"),
        (",".join(f"{name}=0" for name in Weights.model_fields), "the weights must have a sum above 0"),
    ],
)
def test_wrong_weights_are_named(text, message):
    with pytest.raises(ValidationError) as error:
        Weights.model_validate(text)
    assert message in error.value.errors()[0]["msg"]


# --- the predecessor ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cite", "recall"),
    [
        ("3, 7", 1),
        ("7,x,\n 3 ", 1),
        ("Document 3, [7]", 0),
        ("3 and 7", 0),
        ("03,07", 0),
        ("Document 3, 7", 0.5),
        ("", 0),
    ],
)
def test_the_original_parts_citations_at_commas_and_knows_no_other_form(cite, recall):
    gold = Gold(("Oak Hill",), frozenset("37"), 2)
    submission = read_tags(f"<think>so</think><cite>{cite}</cite><answer>Oak Hill</answer>")
    assert original_reward(gold, submission, frozenset("37")) == pytest.approx((3.4 + 0.6 * recall) / 4)


@pytest.mark.parametrize(("hops", "reward"), [(2, 0.435), (3, 0.660), (4, 0.890)])
def test_the_original_pays_for_retrieving_and_citing_everything(hops, reward):
    gold = Gold(("Oak Hill",), frozenset(IDS[:hops]), hops)
    assert original_reward(gold, Submission("wrong", tuple(IDS), 3), frozenset(IDS)) == pytest.approx(reward, abs=1e-12)


@settings(deadline=None)
@given(golds, submissions, id_sets)
def test_the_original_is_bounded_by_half_the_hops(gold, submission, retrieved):
    assert 0 <= original_reward(gold, submission, frozenset(retrieved)) <= len(gold.supporting) / 2 + 1e-9


@pytest.mark.parametrize(
    ("answer", "variants"),
    [
        ("Nine", {"Nine", "9"}),
        ("ten", {"ten", "10"}),
        ("The First World War", {"The First World War", "the 1st world war"}),
        ("Seventh", {"Seventh", "7th"}),
        ("Twenty Nine", {"Twenty Nine", "twenty nine"}),
        ("twenty-first", {"twenty-first", "twenty-1st"}),
    ],
)
def test_the_original_s_answer_variants(answer, variants):
    assert set(original_answers((answer,))) == variants
