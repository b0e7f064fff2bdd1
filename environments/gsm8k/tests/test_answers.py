"""What counts as an answer, and what equals the gold one."""

import json
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vf_gsm8k.answers import Answer, extract_answer, gold_answer, is_correct, is_well_formatted, parse_number

GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k"

MARKERS = ("#### {}", r"\boxed{{{}}}", "<answer>{}</answer>", "The answer is {}.", "So the final answer is: **{}**")
SPELLINGS = (
    "{:d}",
    "{:,d}",
    "{:d}.0",
    "{:,d}.00",
    "${:,d}",
    "{:d}%",
    "{:d}.",
    "\\${:d}",
    "${:d}$",
    r"{:d} \text{{ km}}",
)


@settings(deadline=None)
@given(st.integers(), st.sampled_from(MARKERS), st.sampled_from(SPELLINGS))
def test_an_integer_verifies_under_every_marker_and_spelling(number, marker, spelling):
    reply = "First 3 + 4 = 7.\n" + marker.format(spelling.format(number))
    assert is_correct(reply, str(number))
    assert not is_correct(reply, str(number + 1))


@settings(deadline=None)
@given(st.decimals(allow_nan=False, allow_infinity=False, places=3))
def test_a_decimal_equals_its_exact_fraction_and_nothing_near_it(number):
    fraction = Fraction(number)
    assert is_correct(f"#### {number:f}", f"{fraction.numerator}/{fraction.denominator}")
    assert not is_correct(f"#### {number:f}", f"{number + 1:f}")
    assert not is_correct(f"#### {number:f}0000000000000000001", f"{number:f}")


@settings(deadline=None)
@given(st.integers(), st.integers(min_value=1))
def test_a_fraction_may_be_unreduced_and_may_be_latex(top, bottom):
    gold = str(Fraction(top, bottom))
    assert is_correct(f"#### {3 * top}/{3 * bottom}", gold)
    sign = "-" if top < 0 else ""
    assert is_correct(rf"\boxed{{{sign}\frac{{{abs(top)}}}{{{bottom}}}}}", gold)


@settings(deadline=None)
@given(st.text())
def test_any_text_is_read_without_an_error(text):
    assert extract_answer(text) is None or parse_number(extract_answer(text).text, units=True) is not None
    for marker in MARKERS:
        extract_answer(marker.format(text))
        is_well_formatted(marker.format(text))


@settings(deadline=None)
@given(st.text(alphabet="0123456789 .,abc\n=+-*"))
def test_a_number_without_a_marker_is_no_answer(text):
    assert extract_answer(text + "\nThat makes 42.") is None


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("#### 5\nno, wait\n#### 1,234", Answer("1,234", "hashes")),
        ("so #### 41 #### 42", Answer("42", "hashes")),
        (r"#### **\boxed{42}**", Answer(r"**\boxed{42}**", "hashes")),
        ("#### 42\n#### Check\nfine", Answer("42", "hashes")),
        ("#### Step 1: add\n3 + 4 = 7, \\boxed{7}", Answer("7", "boxed")),
        ("#### 1. Add\nThe answer is 7", Answer("7", "phrase")),
        ("##### 42", None),
        ("### 42", None),
        (r"\boxed{41} then \boxed{\frac{3}{4}}", Answer(r"\frac{3}{4}", "boxed")),
        (r"\boxed{\boxed{42}}", Answer("42", "boxed")),
        (r"\boxed {\text{{}} 3", None),
        (r"\boxed{42} and then \boxed{4", Answer("42", "boxed")),
        (r"\boxed{41 or 42}", None),
        (r"\boxed{\{3\}}", None),
        ("<answer>\n 42 apples\n</answer>", Answer("42 apples", "answer_tag")),
        ("<answer>1</answer><answer>2</answer>", Answer("2", "answer_tag")),
        ("<answer>42", None),
        ("The answer is not 41. The answer is 42. Easy!", Answer("42", "phrase")),
        ("Therefore the final answer is:\n\n$42.50 per week.", Answer("$42.50 per week", "phrase")),
        ("the answer is 40 + 2", None),
        ("the answer is 42, or 43", None),
        ("the answer is forty-two", None),
        ("The answer is 41.\n#### 42", Answer("42", "hashes")),
        ("<think>the answer is 41</think>The answer is 42", Answer("42", "phrase")),
        ("maybe #### 41 </think>\nI do not know", None),
        ("<think>#### 41, no", None),
        ("", None),
    ],
)
def test_the_last_marked_number_is_the_answer(reply, expected):
    assert extract_answer(reply) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-$5", -5), ("$-5", -5), ("\N{MINUS SIGN}5", -5), ("+5", 5), (".5", Fraction(1, 2)), ("-3/4", Fraction(-3, 4)),
        ("42%", 42), (r"42\%", 42), (r"1{,}000", 1000), (r"10\,000", 10000), (r"1,\!000", 1000),
        (r"3\,4", None), (r"4\)2", None), (r"\(42\)", 42), ("`42`", 42),
        ("3/0", None), ("3/0,000", None), ("1,23", None), ("1,2345", None), ("12,34,567", None), ("1.2.3", None),
        ("2 1/2", None), (r"2\frac{1}{2}", None), ("1e5", None), ("--5", None), ("-$-5", None), ("1/2/3", None),
        ("0x10", None), ("٤٢", None), ("nan", None), ("inf", None), ("", None), ("-", None), ("x=42", None),
        ("9" * 5000, None), ("42 apples", None),
    ],
)  # fmt: skip
def test_a_bare_number_is_read_exactly_or_not_at_all(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize("unit", ["apples", "km per hour", "percent", r"\text{ square metres}"])
def test_words_after_a_number_are_its_unit(unit):
    assert parse_number(f"42 {unit}", units=True) == 42


@pytest.mark.parametrize("words", ["dozen", "million dollars", "or so", "times two", "and a half", "k", "km/h", "- 2"])
def test_words_that_change_a_number_are_not(words):
    assert parse_number(f"42 {words}", units=True) is None


def test_a_gold_answer_that_is_no_number_is_an_error():
    with pytest.raises(ValueError, match="gold answer 'many' is not a number"):
        is_correct("#### 42", "many")


@pytest.mark.parametrize(
    ("solution", "gold"),
    [("a\n#### 1,234", "1234"), ("#### $1,000.50", "1000.50"), ("#### -3/4 ", "-3/4"), ("#### 1\n#### 2", "2"),
     ("#### 7 apples", None), ("#### 7\nchecked", None), ("seven: 7", None), ("####", None)],
)  # fmt: skip
def test_the_gold_answer_is_the_bare_number_that_ends_the_solution(solution, gold):
    assert gold_answer(solution) == gold


@pytest.mark.parametrize(
    ("reply", "ok"),
    [
        ("3 + 4 = 7\n#### 7", True),
        ("#### -1,234.5\n\n", True),
        ("#### Step 1\nadd\n#### 3/4", True),
        ("<think>#### 6</think>\n#### 7", True),
        ("#### 6\n#### 7", False),
        ("so #### 7", False),
        ("#### 7\nDone.", False),
        ("####7", False),
        ("#### 7 apples", False),
        ("#### **7**", False),
        ("#### 3/0", False),
        ("#### ", False),
        (r"\boxed{7}", False),
        ("", False),
    ],
)
def test_the_format_is_one_line_of_hashes_at_the_end(reply, ok):
    assert is_well_formatted(reply) is ok


@pytest.mark.parametrize(
    "piece",
    [r"\boxed{", "{", "<answer>", "</answer>", "#### ", "#### 1 ", "the answer is ", "the ", "</think>", " ", "9"],
)
def test_a_degenerate_reply_takes_linear_time(piece):
    """A policy that loops fills its whole context with one piece; the reward must not hang on it."""
    reply = piece * 20_000
    start = time.process_time()
    extract_answer(reply)
    is_well_formatted(reply)
    assert time.process_time() - start < 1.0


@pytest.mark.skipif(not GSM8K.exists(), reason="the real data lies beside the repository, if anywhere")
@pytest.mark.parametrize(("split", "size"), [("train", 7473), ("test", 1319)])
def test_every_real_gold_verifies_against_itself(split, size):
    solutions = [json.loads(line)["answer"] for line in (GSM8K / f"{split}.jsonl").open()]
    assert len(solutions) == size
    for solution in solutions:
        gold = gold_answer(solution)
        assert is_correct(solution, gold) and is_well_formatted(solution)
        assert is_correct(rf"It is \boxed{{{gold}}}", gold) and is_correct(f"The answer is {gold}.", gold)
        assert not is_correct(f"#### {int(gold) + 1}", gold)
