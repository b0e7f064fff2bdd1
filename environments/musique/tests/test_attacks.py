"""What must not pay: texts that hold no found answer, and documents that were read without a search.

The texts were written before the rule that they test, and half of them (by a hash of their names) were not looked at
until it was done.
"""

import asyncio
import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vf_musique.metrics import answer_f1, exact_match, f1_above, normalize
from vf_musique.rewards import F1_FLOOR, Gold, Weights, components, known_words, shaped_reward
from vf_musique.submission import Submission
from vf_musique.synthetic import generate

MOST = 0.25
"""What an attack may earn, with all evidence found and cited: .24 is the evidence and the format."""


def hops(row):
    return [step["answer"] for step in row["question_decomposition"]][:-1]


def support(row):
    return [p for p in row["paragraphs"] if p["is_supporting"]]


def titles(row):
    return [p["title"] for p in support(row)]


def asked(row):
    return row["question"].rstrip("?").split()


def runs(words, length):
    return [" ".join(words[i : i + length]) for i in range(len(words) - length + 1)]


def runs_of(texts, length):
    return [run for text in texts for run in runs(text.split(), length)]


def last_title(row):
    last = row["question_decomposition"][-1]
    return [p["title"] for p in row["paragraphs"] if p["idx"] == last["paragraph_support_idx"]]


def everything(row):
    return " ".join([*titles(row), *hops(row), row["question"]])


ATTACKS = {
    # an intermediate hop's answer
    "each": hops,
    "joined by blanks": lambda row: [" ".join(hops(row)), " ".join(hops(row)[::-1])],
    "joined": lambda row: [", ".join(hops(row)), " and ".join(hops(row))],
    "their words": lambda row: [run for n in (1, 2) for run in runs_of(hops(row), n)],
    "twice": lambda row: [f"{answer} {answer}" for answer in hops(row)],
    "with an article": lambda row: [f"the {answer}" for answer in hops(row)],
    "in upper case": lambda row: [answer.upper() for answer in hops(row)],
    "with a year": lambda row: [f"{answer} 1990" for answer in hops(row)],
    "the last sub-question": lambda row: [row["question_decomposition"][-1]["question"].replace("#1", hops(row)[0])],
    # the question's own words
    "the question": lambda row: [row["question"], 2 * row["question"], " ".join(asked(row)[1:])],
    "halves of the question": lambda row: [" ".join(asked(row)[: len(asked(row)) // 2]), " ".join(asked(row)[-3:])],
    "its capitalised words": lambda row: [" ".join(word for word in asked(row) if word[0].isupper())],
    "pieces of the question": lambda row: [run for n in (1, 2, 3, 5, 8) for run in runs(asked(row), n)],
    # the supporting titles
    "each title": lambda row: [*titles(row), *(re.sub(r"\s*\(.*?\)", "", title) for title in titles(row))],
    "titles joined": lambda row: [" ".join(titles(row)), ", ".join(titles(row)), " ".join(sorted(titles(row)))],
    "the last title": last_title,
    "their words and pairs": lambda row: [run for n in (1, 2) for run in runs_of(titles(row), n)],
    "all titles joined": lambda row: [" ".join(p["title"] for p in row["paragraphs"])],
    # together
    "title and answer": lambda row: [f"{title} {answer}" for title in titles(row) for answer in hops(row)],
    "question and answers": lambda row: [" ".join([row["question"], *hops(row)]), " ".join([row["question"], *titles(row)])],
    "word and answer": lambda row: [f"{word} {answer}" for word in asked(row) for answer in hops(row)],
    "all of it": lambda row: [everything(row), " ".join(dict.fromkeys(everything(row).split()))],
    # what needs no question
    "function words": lambda row: ["the of in and to a", "of", "in", "and", "of the"],
    "no answer": lambda row: ["unanswerable", "unknown", "yes", "no", "none", "I do not know", "", "...", "a", "the"],
    "numbers": lambda row: ["1 2 3 4 5 6 7 8 9 10", "1", "two three four five", " ".join(map(str, range(1900, 2000)))],
    "months and centuries": lambda row: ["January February March April May June", "May", "19th century", "1990"],
    "all colours": lambda row: ["black blue brown green grey orange pink purple red white yellow"],
}  # fmt: skip
CYRILLIC = str.maketrans("aeocpxyiAEOCPXBHKMT", "аеосрхуіАЕОСРХВНКМТ")


def gold_of(row):
    known = known_words(row["question"], hops(row), titles(row))
    ids = frozenset(str(p["idx"]) for p in support(row))
    return Gold((row["answer"], *row["answer_aliases"]), ids, len(ids), known=known)


def reward(row, answer):
    """With all the evidence: the supporting documents were found by searches and are cited, in the right format."""
    gold = gold_of(row)
    submission = Submission(answer.strip(), tuple(gold.supporting), 3)
    return shaped_reward(components(gold, submission, gold.supporting), gold, Weights(), searched=True, invented=False)


def is_right(row, answer):
    return bool(answer.strip()) and exact_match(answer, [row["answer"], *row["answer_aliases"]])


@pytest.fixture(scope="module", params=["synthetic", "real"])
def questions(request):
    if request.param == "synthetic":
        return list(itertools.islice(generate("validation", seed=5), 200))
    with open(request.getfixturevalue("real")) as file:
        return [json.loads(line) for line in file]


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_words_that_are_given_away_earn_no_more_than_a_wrong_answer(name, questions):
    """An intermediate hop's answer, the question's own words, the supporting titles; the right answer is right."""
    tried = 0
    for row in questions:
        for answer in ATTACKS[name](row):
            assert is_right(row, answer) or reward(row, answer) <= MOST, (answer, row["answer"], row["question"])
            tried += 1
    assert tried >= len(questions)


def test_nearly_right_answers_keep_a_signal(questions):
    """Right 1, a word too many about .42, a wrong name of another document almost never more than .25."""
    by_kind = {"right": [], "a word too many": [], "another title": []}
    for row in questions:
        by_kind["right"].append(reward(row, f"The {row['answer'].upper()}."))
        by_kind["a word too many"].append(reward(row, f"{row['answer']} indeed"))
        by_kind["another title"] += [
            reward(row, p["title"]) for p in row["paragraphs"] if not is_right(row, p["title"])
        ]
    assert set(by_kind["right"]) == {1.0}
    near = by_kind["a word too many"]
    assert 0.38 < sum(near) / len(near) < 0.48 and sum(value > MOST for value in near) > 0.9 * len(near)
    assert sum(value > MOST for value in by_kind["another title"]) < 0.002 * len(by_kind["another title"])


def test_a_word_with_a_look_alike_letter_is_a_wrong_word(questions):
    """As in the official metrics: what they call wrong must not be trained. The rest of the answer counts as usual."""
    for row in questions:
        spelt = [word.translate(CYRILLIC) for word in row["answer"].split()]
        other = ["Ω" if word != was else was for word, was in zip(spelt, row["answer"].split(), strict=True)]
        assert reward(row, " ".join(spelt)) == reward(row, " ".join(other))
        if all(word != was for word, was in zip(spelt, row["answer"].split(), strict=True)):
            assert reward(row, " ".join(spelt)) <= MOST
        assert reward(row, " ".join(f"\u200b{word}" for word in row["answer"].split())) <= MOST


WORDS = st.lists(st.sampled_from(["oak", "hill", "pine", "moor", "ada", "reed", "of", "the", "1905"]), max_size=5)


@settings(deadline=None, max_examples=300)
@given(
    WORDS, st.lists(WORDS.filter(lambda words: set(words) - {"the"}), min_size=1, max_size=3), WORDS, st.floats(0, 0.99)
)
def test_f1_counts_only_above_what_known_words_reach(predicted, answers, known, floor):
    text, golds = " ".join(predicted), [" ".join(words) for words in answers]
    credit = f1_above(text, golds, frozenset(known), floor)
    assert 0 <= credit <= answer_f1(text, golds) + 1e-12
    assert (credit == 1) or not exact_match(text, golds)
    if set(normalize(text).split()) <= set(known) and not exact_match(text, golds):
        assert credit == pytest.approx(0, abs=1e-12)
    if answer_f1(text, golds) <= floor and not exact_match(text, golds):
        assert credit == 0
    assert f1_above(text, golds, frozenset(), 0) == pytest.approx(answer_f1(text, golds))
    assert f1_above(text, golds, frozenset(known), F1_FLOOR) <= f1_above(text, golds, frozenset(), 0) + 1e-12


# --- reading --------------------------------------------------------------------------------------------------------


def blind_readings(kit, task):
    """Turns that read documents by id without having found them, by name; each is followed by the perfect answer."""
    ids = [document.id for document in task.data.documents]
    good = task.data.supporting
    every = [kit.get(doc_id) for doc_id in ids]
    searches = task.oracle()[:-1]
    junk = kit.search("zzz", top_k=1)
    last = max(map(ids.index, good))
    return {
        "all in one turn": [kit.say("", *every)],
        "one by one": [kit.say("", call) for call in every],
        "until the last one that is needed": [kit.say("", call) for call in every[: last + 1]],
        "only those that are needed": [kit.say("", *map(kit.get, good))],
        "all, after a search for nothing": [kit.say("", junk), kit.say("", *every)],
        "all, before a search for nothing": [kit.say("", *every), kit.say("", junk)],
        "all, beside a search for nothing": [kit.say("", junk, *every)],
        "all, then searches": [kit.say("", *every), *searches],
        "all, after the first search": [searches[0], kit.say("", *every)],
        "in other spellings, twice": [kit.say("", *(kit.get(f"Document {i}") for i in ids), *every)],
        "ids that do not exist too": [kit.say("", *map(kit.get, range(40)))],
    }


@pytest.mark.slow
@pytest.mark.parametrize("style", ["tags", "complete"])
def test_reading_without_searching_earns_less_than_searching(kit, style):
    tasks = kit.tasks(num_examples=6, answer_style=style, retriever="golden")

    async def score(task, turns):
        return (await kit.rollout(task, [*turns, task.oracle()[-1]], max_turns=64)).reward

    for task in tasks:
        assert asyncio.run(score(task, task.oracle()[:-1])) == 1
        for name, turns in blind_readings(kit, task).items():
            assert asyncio.run(score(task, turns)) <= 0.75, name


def test_a_document_that_a_search_found_may_be_read_again(kit, small):
    turns = [kit.say("", kit.search("Reed song", top_k=4)), kit.say("", kit.get(1), kit.get(3))]
    trace = kit.play(small(), [*turns, kit.final("Oak Hill", [1, 3])])
    assert trace.reward == 1 and trace.metrics["n_read_blindly"] == 0
    blind = kit.play(small(), [*turns[::-1], kit.final("Oak Hill", [1, 3])])
    assert blind.metrics["n_read_blindly"] == 2 and blind.metrics["n_retrieved"] == 4
    # Half of what it read was found: .76 * (1 - .5 * .5) + .5 * (.12 + .08) + .04
    assert blind.reward == pytest.approx(0.71)


@pytest.mark.parametrize("in_one_turn", [True, False])
@pytest.mark.parametrize(("answer", "cited"), [("Oak Hill", [1, 3]), ("Oak Hill", []), ("Pine Moor", [1, 3])])
def test_to_repeat_a_search_earns_what_it_earns_once(kit, small, in_one_turn, answer, cited):
    """It finds no new document, so that there is nothing to gain, and a metric counts it."""

    def earned(times: int):
        searches = [kit.search("long song", top_k=3)] * times
        turns = [kit.say("", *searches)] if in_one_turn else [kit.say("", search) for search in searches]
        return kit.play(small(), [*turns, kit.final(answer, cited)])

    once, often = earned(1), earned(12)
    assert often.reward == once.reward
    own = {name: value for name, value in often.metrics.items() if not name.startswith("rollout/")}
    assert own == {name: once.metrics[name] for name in own} | {"searches": 12, "repeated_queries": 11}


def test_blind_reading_costs_what_its_setting_says(kit, small):
    turns = [kit.say("", *map(kit.get, range(4))), kit.final("Oak Hill", [1, 3])]
    rewards = [kit.play(small(blind_reading_cost=cost), turns).reward for cost in (0, 0.5, 1)]
    assert rewards == pytest.approx([1, 0.71, 0.42])


@pytest.mark.parametrize("cost", [-0.1, 1.1])
def test_a_cost_outside_0_and_1_is_refused(small, cost):
    with pytest.raises(ValueError, match="blind_reading_cost"):
        small(blind_reading_cost=cost)


def test_f1_floor_reaches_the_reward_and_not_the_official_metric(kit, small):
    turns = [kit.say("", kit.search("Reed song", top_k=4)), kit.final("Oak Hill or nearby", [1, 3])]
    low, high = (kit.play(small(f1_floor=floor), turns) for floor in (0, 0.9))
    assert low.metrics["f1"] == high.metrics["f1"] == pytest.approx(2 / 3)
    assert low.metrics["f1_credit"] == pytest.approx(2 / 3) and high.metrics["f1_credit"] == 0
    assert low.reward == pytest.approx(0.24 + 0.36 * 2 / 3) and high.reward == pytest.approx(0.24)


def test_the_tools_show_no_more_documents_than_the_limit(kit, small):
    task = small(max_documents=2)
    turns = [
        kit.say("", kit.search("Reed", top_k=1)),
        kit.say("", kit.search("Reed song", top_k=4)),
        kit.say("", kit.get(0)),
    ]
    trace = kit.play(task, [*turns, kit.final("Oak Hill", [1, 3])])
    assert trace.metrics["n_retrieved"] == 2
    shown = [message.content for message in trace.messages if message.role == "tool"]
    assert "No more than 2 documents are shown." not in shown[0]
    assert shown[1].count("Document ID") == 2 and shown[1].endswith("Answer with what you have found.")
    assert shown[2] == "No more than 2 documents are shown. Answer with what you have found."
    again = kit.play(
        task, [*turns[:2], kit.say("", kit.get(trace.info["musique"]["uses"][0]["found"][0])), kit.final("x")]
    )
    assert "Document ID" in [message.content for message in again.messages if message.role == "tool"][-1]
