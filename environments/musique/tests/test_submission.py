"""What counts as handed in, from whatever a model writes."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vf_musique.submission import Submission, parse_ids, read_completion, read_tags

GOOD = "<think>because</think>\n<cite>3, 7</cite>\n<answer>Oak Hill</answer>"


@pytest.mark.parametrize(
    ("text", "answer", "cited", "parts"),
    [
        (GOOD, "Oak Hill", "3 7", 3),
        (GOOD.upper(), "OAK HILL", "3 7", 3),
        ("because</think> <cite>3</cite><answer>x</answer>", "x", "3", 3),  # a template wrote the opening
        ("<cite>3</cite><answer>x</answer>", "x", "3", 2),
        ("<think> </think><cite>3</cite><answer>x</answer>", "x", "3", 2),  # no thought in it
        ("<answer>x</answer>", "x", "", 1),
        ("x", None, "", 0),
        ("", None, "", 0),
        # Tags inside thinking are thoughts.
        ("<think><cite>1</cite><answer>no</answer></think>", None, "", 1),
        ("<answer>no</answer></think><cite>3</cite><answer>x</answer>", "x", "3", 3),
        ("<think>a</think><answer>no</answer></think><answer>x</answer>", "x", "", 2),
        ("<think>one<think>two</think><answer>x</answer>", "x", "", 2),
        ("<think>a</think><answer>x</answer><think>b</think>", "x", "", 2),
        ("<answer>x</answer><think>it goes on <answer>no</answer>", "x", "", 1),
        ("<think>never closed <cite>1</cite><answer>no</answer>", None, "", 0),
        # Of repeated tags the last complete pair counts.
        ("<answer>no</answer><answer>x</answer>", "x", "", 1),
        ("<answer>x</answer> and <answer>no", "x", "", 1),
        ("<answer>no <answer>x</answer>", "x", "", 1),
        ("<answer>x</answer> no</answer>", "x", "", 1),
        ("</answer>no<answer>", None, "", 0),
        ("<cite>1</cite><cite>2</cite><answer>x</answer>", "x", "2", 2),
        ("<answer></answer>", "", "", 0),
        ("<think>\u200b</think><answer>\u200b \u3164</answer>", "", "", 0),  # nothing that is seen
        ("<cite></cite><answer>x</answer>", "x", "", 2),
        ("<answer>a < b > c</answer>", "a < b > c", "", 1),
        ("<answer>x</cite>", None, "", 0),
    ],
)
def test_tags(text, answer, cited, parts):
    assert read_tags(text) == Submission(answer, tuple(cited.split()), parts)


def test_reasoning_that_came_apart_from_the_text_is_the_thinking():
    assert read_tags("<cite>3</cite><answer>x</answer>", reasoned=True).parts == 3
    assert read_tags(GOOD, reasoned=True).parts == 3


@pytest.mark.parametrize(
    ("value", "ids"),
    [
        ("1, 2,3", "1 2 3"),
        ("[1], [2] 3", "1 2 3"),
        ("[1, 2]", "1 2"),
        ("Document 3, document ID: 4", "3 4"),
        ("doc3, doc7", "3 7"),
        ("D3 and Document7, DOC_11, doc-12", "3 7 11 12"),
        ("3 (2010), 7", "3 7"),
        ("3(Ada Reed, 1905) 7 (see 4), (5), (6)", "3 7 5 6"),
        ("3 (2010", "3 2010"),
        ("#5; (6) {7} '8' \"9\" 10.", "5 6 7 8 9 10"),
        ("1\n2\t3", "1 2 3"),
        ("3, 3, 03", "3"),
        ("0, 00", "0"),
        ("none", ""),
        ("", ""),
        ("the 1990s, v2, 1.5, x3, add3, doc3b, doc 1.5", ""),  # not ids
        ("1234567890", ""),  # more digits than an id has
        ("１２", ""),
        (4, "4"),
        (4.0, "4"),
        (4.5, ""),
        (float("nan"), ""),
        (float("inf"), ""),
        (True, ""),
        (None, ""),
        ({"id": 1}, ""),
        ([1, "2", [3, "4, 5"], None], "1 2 3 4 5"),
    ],
)
def test_ids(value, ids):
    assert parse_ids(value) == tuple(ids.split())


def test_a_number_too_long_to_print_is_no_id():
    assert parse_ids([10**5000, -(10**5000), 1e300, 2]) == ("2",)


def test_a_completion():
    assert read_completion("because", " Oak Hill ", ["3", "7", "3"]) == Submission("Oak Hill", ("3", "7"), 3)
    assert read_completion(" ", "", []) == read_completion("\u2060", "\u200b", []) == Submission("", (), 1)


@pytest.mark.parametrize(
    ("answer", "says"),
    [("unanswerable", True), ("Unanswerable.", True), ("the unanswerable", True), ("no idea", False)],
)
def test_the_phrase(answer, says):
    assert Submission(answer).says_unanswerable is says


NASTY = [
    "<think>",
    "</think>",
    "<cite>",
    "</cite>",
    "<answer>",
    "</answer>",
    "<",
    "</",
    "1" * 50,
    "1, ",
    "x",
    "[",
    " ",
    "1 (",
    ")",
    "doc",
]


@settings(deadline=None)
@given(st.lists(st.sampled_from(NASTY), max_size=40).map("".join))
def test_anything_is_read(text):
    submission = read_tags(text)
    assert 0 <= submission.parts <= 3
    assert len(set(submission.cited)) == len(submission.cited)
    assert all(piece in text for piece in (submission.answer or "").split("\n"))


def test_thinking_within_a_word_or_a_tag_does_not_join_its_halves():
    assert read_tags("<answer>Oak <think>or Elm?</think>Hill</answer>").answer == "Oak \nHill"
    assert read_tags("<answer>Oa<think></think>k</answer>").answer == "Oa\nk"
    assert read_tags("<ans<think>x</think>wer>Oak Hill</answer>").answer is None


@pytest.mark.parametrize(
    "piece", [*NASTY, "<think></think>", "<cite>1", "1x", "1.", "<answer></answer>", "<<answer>", "1(2)", "d1 "]
)
def test_200_kb_of_anything_are_read_at_once(piece):
    """Work that grew with the square of the length would take minutes."""
    many = piece * (200_000 // len(piece))
    start = time.process_time()
    for text in (many, f"<cite>{many}</cite>", f"<answer>{many}"):
        read_tags(text)
    assert time.process_time() - start < 20


def test_200_kb_of_everything_are_read_at_once():
    text = "".join(random.Random(0).choices(NASTY, k=40_000))
    start = time.process_time()
    read_tags(text)
    assert time.process_time() - start < 20
