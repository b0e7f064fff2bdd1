import asyncio
import math
import re
import string
import unicodedata
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plumbob.retrieval import Document, build
from plumbob.retrieval import bm25 as module
from plumbob.retrieval.bm25 import Lexical
from plumbob.retrieval.words import STOP_WORDS, folded, words


@pytest.fixture(params=["rank-bm25", "bm25s"])
def library(request, monkeypatch):
    monkeypatch.setattr(module, "SMALL", 10**9 if request.param == "rank-bm25" else -1)


def test_scores_are_those_of_the_formula(fruit, library):
    # Words: "apple" is once in a's text and once in its title, which counts three times; |a| = 2 + 3 * 2, |b| the same,
    # |c| = 1 + 3. Pairs: |a| = |b| = 1 + 3 * 1, |c| = 0.
    idf = math.log(1 + (3 - 1 + 0.5) / (1 + 0.5))
    words_norm = 1.2 * (0.5 + 0.5 * 8 / (20 / 3))
    pairs_norm = 1.2 * (0.5 + 0.5 * 4 / (8 / 3))
    retriever = Lexical("bm25", fruit)
    assert retriever.scores("apple").tolist() == pytest.approx([idf * 4 / (4 + words_norm), 0, 0])
    assert retriever.scores("apple").tolist() == pytest.approx([0.737466, 0, 0], abs=1e-6)
    green_pear = idf * 3 / (3 + words_norm) + idf * 4 / (4 + words_norm) + 0.5 * idf * 3 / (3 + pairs_norm)
    assert retriever.scores("the green pear?").tolist() == pytest.approx([0, green_pear, 0])
    assert green_pear == pytest.approx(1.745540, abs=1e-5)
    # A word of the query counts once, however often it is there.
    assert retriever.scores("apple, APPLE").tolist() == retriever.scores("apple").tolist()


def test_pairs_do_not_reach_from_title_to_text(library):
    documents = [Document("1", "tower bridge", "london river"), Document("2", "bridge tower", "river london")]
    scores = Lexical("bm25", documents).scores("bridge london")
    assert scores[0] == pytest.approx(scores[1])


@pytest.mark.parametrize("query", ["", "  ", "the of and", "?!", "zyzzyva", "\udcff \x00", "日本"])
def test_a_query_that_matches_nothing_gives_the_documents_in_order(fruit, library, query):
    assert [(h.doc_id, h.score, h.rank) for h in Lexical("bm25", fruit).search(query, 2)] == [("a", 0, 1), ("b", 0, 2)]


def test_empty_documents_and_no_documents(library):
    empty = [Document("1", "", ""), Document("2", "", "")]
    assert [hit.doc_id for hit in Lexical("bm25", empty).search("word", 5)] == ["1", "2"]
    assert Lexical("bm25", []).search("word", 5) == []
    mixed = [Document("1", "", ""), Document("2", "", "word")]
    assert [hit.doc_id for hit in Lexical("bm25", mixed).search("word", 5)] == ["2", "1"]


def test_words():
    assert words("Where was Malcolm X's mother born?") == ["malcolm", "x", "s", "mother", "born"]
    assert words("São Paulo, ÉCOLE naïve — ２０") == ["sao", "paulo", "ecole", "naive", "20"]
    assert words("The Who") == ["the", "who"] and words("") == []
    assert words("don't snake_case 3.5") == ["t", "snake_case", "3", "5"]
    assert all(word == word.lower() and word.isalpha() for word in STOP_WORDS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Marks that are letters stay in their word.
        ("বাংলা ভাষা", ["বাংলা", "ভাষা"]),
        ("किताब, क़लम", ["किताब", "क़लम"]),
        ("தமிழ் மொழி", ["தமிழ்", "மொழி"]),
        # Katakana runs are words; half-width ones are the same.
        ("この窓は厚いガラスで", ["この", "窓", "は", "厚", "い", "ガラス", "で"]),
        ("ｶﾞﾗｽ iPhone15を", ["ガラス", "iphone15", "を"]),
        # Scripts without spaces, and Korean particles: pairs of neighbours.
        ("東京都の人々", ["東京", "京都", "の", "人々"]),
        ("ภาษาไทยง่าย", ["ภา", "าษ", "ษา", "าไ", "ไท", "ทย", "ยง่", "ง่า", "าย"]),
        ("서울은", ["서울", "울은"]),
        # What writers leave out, write in other ways or do not see.
        ("Straße ΌΣΟΣ Łódź ISTANBUL İstanbul", ["strasse", "οσοσ", "lodz", "istanbul", "istanbul"]),
        ("مُحَمَّد שָׁלוֹם", ["محمد", "שלום"]),
        ("Влади́мир ёлка чай Київ", ["владимир", "елка", "чай", "київ"]),
        ("می\u200cخواهم co\u00adoperate new\u200bline", ["میخواهم", "cooperate", "new", "line"]),
        ("٢٠٢٤ ४२", ["2024", "42"]),
        ("\u0308 \u200b\u3164", []),
    ],
)
def test_words_of_other_scripts(text, expected):
    assert words(text) == [unicodedata.normalize("NFC", word) for word in expected]


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("ガラス", "この窓は厚い ガラス で作られた古い家のものです"),
        ("বাংলা", "আমি প্রতিদিন বাংলা বই পড়ি এবং গান শুনি"),
        ("किताब", "मेरे पास एक किताब है"),
        ("தமிழ்", "நான் தமிழ் படிக்கிறேன்"),
        ("図書館", "駅前の図書館で本を読む"),
        ("มะม่วง", "ฉันชอบกินมะม่วงสุกทุกวัน"),
        ("서울", "수도는 서울이다"),
    ],
)
def test_a_document_with_a_word_is_found_and_one_with_only_its_characters_scores_nothing(query, text, library):
    apart = " ".join(reversed(unicodedata.normalize("NFC", query)))
    scores = Lexical("bm25", [Document("1", "", apart), Document("2", "", text)]).scores(query)
    assert scores[1] > 0 == scores[0]


@given(st.text())
def test_normal_forms_and_case_are_no_difference(text):
    for form in ("NFC", "NFD"):
        other = unicodedata.normalize(form, text)
        assert words(other) == words(text) and folded(other) == folded(text)
    assert folded(folded(text)) == folded(text)


@given(st.text(alphabet=string.printable))
def test_the_quick_way_for_ascii_is_the_regex(text):
    plain = re.findall(r"\w+", text.lower())
    assert words(text) == ([word for word in plain if word not in STOP_WORDS] or plain)


def test_a_title_of_stop_words_can_be_found(library):
    documents = [Document("1", "Oasis", "a band from Manchester"), Document("2", "The Who", "a band from London")]
    assert Lexical("bm25", documents).search("The Who", 1)[0].doc_id == "2"


VOCABULARY = ["red", "green", "blue", "apple", "pear", "pie", "tart", "sky", "the", "of", "Élan"]
text = st.lists(st.sampled_from(VOCABULARY), max_size=8).map(" ".join)
corpora = st.lists(st.tuples(text, text), min_size=1, max_size=12).map(
    lambda pairs: [Document(str(i), title, body) for i, (title, body) in enumerate(pairs)]
)


@given(corpora, text, st.randoms())
def test_the_order_of_the_documents_changes_only_ties(documents, query, random):
    shuffled = random.sample(documents, len(documents))
    one = {hit.doc_id: hit.score for hit in Lexical("bm25", documents).search(query, 99)}
    other = Lexical("bm25", shuffled).search(query, 99)
    assert {hit.doc_id: hit.score for hit in other} == one
    assert [hit.score for hit in other] == sorted(one.values(), reverse=True)


@given(corpora, text)
def test_fewer_hits_are_a_prefix_of_more(documents, query):
    retriever = Lexical("bm25", documents)
    whole = retriever.search(query, len(documents) + 3)
    assert [hit.rank for hit in whole] == list(range(1, len(documents) + 1))
    for top_k in range(1, len(documents) + 1):
        assert retriever.search(query, top_k) == whole[:top_k]


@given(corpora, text)
@settings(max_examples=60)
def test_both_libraries_give_the_same_scores(documents, query):
    small, large = module.SMALL, -1
    first = Lexical("bm25", documents).scores(query)
    try:
        module.SMALL = large
        second = Lexical("bm25", documents).scores(query)
    finally:
        module.SMALL = small
    assert first.tolist() == pytest.approx(second.tolist(), abs=1e-9)


def test_a_large_corpus_keeps_ties_in_order_and_prefixes():
    documents = [Document(str(i), f"title {i % 7}", f"word{i % 5} common") for i in range(1500)]
    retriever = build("bm25", documents)
    whole = retriever.search("common word3 title", 1500)
    assert len(whole) == 1500
    for top_k in (1, 2, 5, 299, 300, 301, 1499):
        assert retriever.search("common word3 title", top_k) == whole[:top_k]
    for one, two in pairwise(whole):
        assert one.score > two.score or (one.score == two.score and int(one.doc_id) < int(two.doc_id))


def test_asearch_is_search(fruit):
    many = [Document(str(i), f"title {i}", f"word{i % 5}") for i in range(500)]
    for documents in (fruit, many):
        retriever = Lexical("bm25", documents)
        assert asyncio.run(retriever.asearch("pear word3", 3)) == retriever.search("pear word3", 3)
