"""What counts as an answer, and what equals the gold one. The shapes one by one are in test_golden.py."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vf_gsm8k import answers
from vf_gsm8k.answers import (
    Answer,
    answer_value,
    extract_answer,
    find_answer,
    gold_answer,
    is_correct,
    is_lenient_match,
    is_well_formatted,
)
from vf_gsm8k.numbers import format_number, parse_number

GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k"

MARKERS = {
    "#### {}": "hash",
    "####{}": "hash",
    "so:\n#### **{}**\n": "hash",
    r"\boxed{{{}}}": "boxed",
    r"\[\boxed{{\text{{{}}}}}\]": "boxed",
    r"Cut off: \boxed{{{}": "boxed",
    "<answer>{}</answer>": "answer_tag",
    "The answer is {}.": "phrase",
    "So the final answer is: **{}**": "phrase",
    "**Final Answer:** {}": "phrase",
    "### Final Answer\n\n{}\n": "phrase",
    "Answer: x = {} apples": "phrase",
}
SPELLINGS = (
    "{:d}",
    "{:,d}",
    "{:d}.0",
    "{:,d}.00",
    "${:,d}",
    "€ {:,d}",
    "{:d}%",
    "\\${:d}",
    "${:d}$",
    r"\({:d}\)",
)
BEFORE = (
    "",
    "First 3 + 4 = 7.\n",
    r"\boxed{7}, no. ",
    "<think>the answer is 7</think>",
    "#### Step 1\nThink.\n",
    "<answer>7</answer>\n",
)
AFTER = ("", "\n", "\nGood luck with all 7!", "\n\n---")

markers, spellings = st.sampled_from(list(MARKERS)), st.sampled_from(SPELLINGS)


@settings(deadline=None, max_examples=400)
@given(st.integers(), markers, spellings, st.sampled_from(BEFORE), st.sampled_from(AFTER))
def test_an_integer_verifies_under_every_marker_spelling_and_wrapping(number, marker, spelling, before, after):
    if "Cut off" in marker:
        before, after = "", ""
    reply = before + marker.format(spelling.format(number)) + after
    assert is_correct(reply, str(number))
    assert not is_correct(reply, str(number + 1))
    assert extract_answer(reply).extracted_by == MARKERS[marker]


@settings(deadline=None)
@given(
    st.integers(min_value=1000, max_value=10**15),
    markers,
    st.sampled_from(["\u00a0", "\u2009", "\u202f", r"\,", "{,}", r",\!"]),
)
def test_every_thousands_separator_is_read(number, marker, separator):
    reply = marker.format(f"{number:,}".replace(",", separator))
    assert is_correct(reply, f"{number:,}")
    assert not is_correct(reply, str(number // 1000))
    assert not is_correct(reply, str(number % 1000))


@settings(deadline=None)
@given(st.decimals(allow_nan=False, allow_infinity=False, places=3), markers)
def test_a_decimal_equals_its_exact_fraction_and_nothing_near_it(number, marker):
    fraction = Fraction(number)
    assert is_correct(marker.format(f"{number:f}"), f"{fraction.numerator}/{fraction.denominator}")
    # As fractions, because Decimal("1e28") + 1 is rounded to 1e28.
    assert not is_correct(marker.format(f"{number:f}"), str(fraction + 1))
    assert not is_correct(marker.format(f"{number:f}0000000000000000001"), f"{number:f}")


@settings(deadline=None)
@given(st.integers(), st.integers(min_value=2))
def test_a_fraction_may_be_unreduced_latex_or_mixed(top, bottom):
    gold = str(Fraction(top, bottom))
    assert is_correct(f"#### {3 * top}/{3 * bottom}", gold)
    sign = "-" if top < 0 else ""
    assert is_correct(rf"\boxed{{{sign}\frac{{{abs(top)}}}{{{bottom}}}}}", gold)
    assert not is_correct(rf"\boxed{{{sign}\frac{{{abs(top)}}}{{{bottom + 1}}}}}", gold) or top == 0
    part = abs(top) % min(bottom, 999)
    if part:
        for mixed in ("7 {}/{}", r"7\frac{{{}}}{{{}}}", "-7 {}/{}"):
            value = (7 + Fraction(part, min(bottom, 999))) * (-1 if mixed[0] == "-" else 1)
            assert is_correct("#### " + mixed.format(part, min(bottom, 999)), str(value))


@settings(deadline=None)
@given(st.fractions())
def test_a_number_is_printed_so_that_it_reads_the_same(value):
    assert parse_number(format_number(value)) == value


@pytest.mark.parametrize(
    ("value", "text"),
    [(42, "42"), (0, "0"), (Fraction(-1, 2), "-0.5"), (Fraction(1, 80), "0.0125"), (Fraction(-4, 3), "-4/3")],
)
def test_a_number_is_printed_short(value, text):
    assert format_number(Fraction(value)) == text


@settings(deadline=None)
@given(
    st.integers(),
    st.integers(),
    markers,
    st.sampled_from([" or ", " and ", ", ", "-", " to ", ":", "; ", " apples, ", " - "]),
)
def test_two_numbers_are_never_taken_for_one_of_them(first, second, marker, between):
    reply = marker.format(f"{first}{between}{second}")
    for number in (first, second):
        assert not is_correct(reply, str(number))


SCRAPS = [
    *("\\boxed{", "}", "####", "\\frac", "\\sqrt", "{", "<answer>", "</answer>", "the answer is", "Answer:", "1", "2"),
    *("=", "\\text{", "$", "\\times", "^", "42", "1,000", "**", " ", "\n"),
]


@settings(deadline=None, max_examples=300)
@given(
    st.text()
    | st.text(alphabet="0123456789 .,abc\n=+-*/^(){}[]<>$%#:\\")
    | st.lists(st.sampled_from(SCRAPS)).map("".join)
)
def test_any_text_is_read_without_an_error(text):
    for reply in (text, *(marker.format(text) for marker in MARKERS)):
        found = find_answer(reply)
        assert extract_answer(reply) == (found and found[0])
        assert found is None or answer_value(found[0].text) == found[1]
        for style in ("hash", "boxed"):
            assert not is_well_formatted(reply, style) or found is not None
        is_lenient_match(reply, "42")


@settings(deadline=None)
@given(st.text(alphabet="0123456789 .,abc\n=+-*"))
def test_a_number_without_a_marker_is_no_answer(text):
    assert extract_answer(text + "\nThat makes 42.") is None
    assert is_lenient_match(text + "\nThat makes 42.", "42")


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("#### 5\nno, wait\n#### 1,234", Answer("1,234", "hash")),
        ("#### **42**", Answer("42", "hash")),
        (r"\boxed{41} then \boxed{\frac{3}{4}}", Answer(r"\frac{3}{4}", "boxed")),
        ("<answer>\n 42 apples\n</answer>", Answer("42 apples", "answer_tag")),
        ("The answer is not 41. The answer is 42. Easy!", Answer("42", "phrase")),
        ("Therefore the final answer is:\n\n$42.50 per week.", Answer("$42.50 per week", "phrase")),
    ],
)
def test_the_answer_is_given_as_the_reply_wrote_it(reply, expected):
    assert extract_answer(reply) == expected


@pytest.mark.parametrize(
    "reply", ["\\boxed{x} = 42", "\\boxed{} 42", "\\boxed{a}42", "\\boxed{apples}: 42", "\\boxed{x = {y}} 42"]
)
def test_what_follows_a_closed_box_is_not_what_was_cut_off_inside_it(reply):
    assert extract_answer(reply) is None


def test_only_a_box_that_is_never_closed_is_read_to_the_end_of_its_line():
    assert extract_answer(r"First \boxed{x}, so \boxed{42") == Answer("42", "boxed")
    assert extract_answer("so \\boxed{42\nWait, that's wrong.") is None


@pytest.mark.parametrize("reply", ["#### 40 + 2", r"\boxed{6 \times 7}", r"\boxed{\sqrt{1764}}", r"so \boxed{40 + 2"])
def test_strict_reads_no_arithmetic(reply):
    assert is_correct(reply, "42") and not is_correct(reply, "42", strict=True)
    assert extract_answer(reply, strict=True) is None


@pytest.mark.parametrize(
    ("reply", "gold"),
    [
        ("#### $42 a day", "42"),
        ("#### 40 + 2 = 42", "42"),
        (r"\boxed{\frac{1}{2}}", "1/2"),
        ("#### 1.2 x 10^3", "1200"),
    ],
)
def test_strict_reads_every_number(reply, gold):
    assert is_correct(reply, gold, strict=True)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-$5", -5), ("$-5", -5), ("\N{MINUS SIGN}5", -5), ("+5", 5), (".5", Fraction(1, 2)),
        ("-3/4", Fraction(-3, 4)),
        ("42%", 42), (r"42\%", 42), (r"1{,}000", 1000), (r"10\,000", 10000), (r"1,\!000", 1000),
        (r"3\,4", None), (r"4\)2", None), (r"\(42\)", 42), ("`42`", 42), ("1e5", 100000), ("1.5E-1", Fraction(3, 20)),
        ("2 1/2", Fraction(5, 2)), (r"-2\frac{1}{2}", Fraction(-5, 2)), ("2 3/2", None), ("2 0/2", None),
        ("3/0", None), ("3/0,000", None), ("1,23", None), ("1,2345", None), ("12,34,567", None), ("1.2.3", None),
        ("1 0000", None), ("1000 000", None), ("1e500", None), ("1e5.5", None), ("--5", None), ("-$-5", None),
        ("1/2/3", None),
        ("0x10", None), ("٤٢", None), ("𝟒𝟐", 42), ("42。", 42), ("nan", None), ("inf", None), ("", None), ("-", None),
        ("x=42", None), ("9" * 5000, None), ("42 apples", None), ("5!", None), ("5.", 5),
    ],
)  # fmt: skip
def test_a_bare_number_is_read_exactly_or_not_at_all(text, value):
    assert parse_number(text) == value


def test_the_gold_answer_may_be_a_worked_solution():
    assert is_correct("#### 1200", "4 * 300 = 1,200\n#### 1,200")


@pytest.mark.parametrize("gold", ["many", "", "42 apples", "x = 42", "4 * 3\n#### many"])
def test_a_gold_answer_that_is_no_number_is_an_error(gold):
    with pytest.raises(ValueError, match="the gold answer .* is not a number"):
        is_correct("#### 42", gold)


@pytest.mark.parametrize(
    ("solution", "gold"),
    [("a\n#### 1,234", "1234"), ("#### $1,000.50", "1000.50"), ("#### -3/4 ", "-3/4"), ("#### 1\n#### 2", "2"),
     ("#### 7 apples", None), ("#### 7\nchecked", None), ("seven: 7", None), ("####", None), ("#### 3/0", None)],
)  # fmt: skip
def test_the_gold_answer_is_the_bare_number_that_ends_the_solution(solution, gold):
    assert gold_answer(solution) == gold


@pytest.mark.parametrize(
    ("reply", "ok"),
    [
        ("3 + 4 = 7\n#### 7", True),
        ("#### -1,234.5\n\n", True),
        ("#### Step 1\nadd\n#### 3/4", True),
        ("#### 1. Add\nadd\n#### 3/4", True),
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
def test_the_hash_format_is_one_line_at_the_end(reply, ok):
    assert is_well_formatted(reply) is ok


@pytest.mark.parametrize(
    ("reply", "ok"),
    [
        (r"\boxed{7}", True),
        ("3 + 4 = 7\n\\boxed{-1,234.5}\n", True),
        (r"So it is $\boxed{3/4}$.", True),
        ("\\[\n\\boxed{7}\n\\]", True),
        (r"**\boxed{7}**", True),
        (r"\boxed{6} \boxed{7}", False),
        (r"\boxed{7} apples", False),
        (r"\boxed{7 \text{ apples}}", False),
        (r"\boxed{7", False),
        (r"\boxed{3/0}", False),
        (r"\boxed{}", False),
        ("#### 7", False),
        ("", False),
    ],
)
def test_the_boxed_format_is_one_box_at_the_end(reply, ok):
    assert is_well_formatted(reply, "boxed") is ok


@pytest.mark.parametrize(
    ("reply", "lenient"),
    [
        ("That makes 42.", True),
        ("That makes 1,042.0.", False),
        ("40 + 2 = 42", True),
        ("42 is less than 43", False),
        ("#### 41, or rather 42", True),
        ("#### 42\nin 3 days", True),
        ("<think>42</think>dunno", False),
        ("none", False),
        ("9" * 5000, False),
    ],
)
def test_lenient_takes_the_last_number_too(reply, lenient):
    assert is_lenient_match(reply, "42") is lenient


def test_lenient_reads_a_sign_but_no_hyphen():
    assert is_lenient_match("it is -5", "-5")
    assert is_lenient_match("from 3-5", "5")


def test_every_thread_reads_the_same():
    replies = [rf"\boxed{{{a} \times {b}}}" for a in range(1, 13) for b in range(1, 9)] + [
        f"#### {n}" for n in range(96)
    ]
    golds = [str(a * b) for a in range(1, 13) for b in range(1, 9)] + [str(n) for n in range(96)]
    with ThreadPoolExecutor(32) as threads:
        assert all(threads.map(is_correct, replies, golds))
        assert not any(threads.map(is_correct, replies, [f"{gold}.5" for gold in golds]))


def test_reading_replies_loads_no_verifiers():
    """A script that only scores replies need not wait for what a taskset needs."""
    code = "import sys; from vf_gsm8k import is_correct; assert is_correct('#### 42', '42'); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"verifiers", "torch", "sympy", "datasets", "pydantic"} & set(loaded)


STYLES = (
    "#### {}",
    r"It is \boxed{{{}}}",
    r"$$\boxed{{\text{{{} apples}}}}$$",
    r"\boxed{{\${}}}",
    "The answer is {}.",
    "**Answer:** {} dollars",
    "<answer>{}</answer>",
)


@pytest.mark.slow
@pytest.mark.skipif(not GSM8K.exists(), reason="the real data lies beside the repository, if anywhere")
@pytest.mark.parametrize(("split", "size"), [("train", 7473), ("test", 1319)])
def test_every_real_gold_verifies_against_itself_in_every_style(split, size):
    solutions = [json.loads(line)["answer"] for line in (GSM8K / f"{split}.jsonl").open()]
    assert len(solutions) == size
    for solution in solutions:
        gold = gold_answer(solution)
        assert is_correct(solution, gold) and is_correct(solution, solution) and is_well_formatted(solution)
        for number, style in enumerate(STYLES):
            # As it is, and with commas, by turns.
            written = gold if number % 2 else f"{int(gold):,}"
            assert is_correct(style.format(written), gold), style.format(written)
        latex = f"{int(gold):,}".replace(",", "{,}")
        assert is_correct(rf"\boxed{{{latex}.00}}", gold) and is_well_formatted(rf"\boxed{{{gold}}}", "boxed")
        assert not is_correct(f"#### {int(gold) + 1}", gold)
        assert gold == "0" or not is_correct(rf"\boxed{{{gold}0}}", gold)


WORDS = [
    r"answer",
    r"Anſwer:",
    r"ANS.",
    r"İ",
    r"ß",
    r" is ",
    r"correction: ",
    r"\boxed{",
    r"\fbox {",
    r"xboxed{",
    r"box",
    r"}",
    r"####",
    r"#",
    r"-",
    r"4",
    r"1,000",
    r".5",
    r")-3.",
    r" ",
    r"=",
    r"٣",
]


@given(reply=st.lists(st.sampled_from([*WORDS, "\n", "\t", "\boxed{"]), max_size=12).map("".join))
def test_what_is_found_from_the_first_place_on_is_all_that_there_is(reply):
    """Patterns begin where a word of theirs stands, because they take most of the time of a reward on a whole reply."""
    found = answers._LAST_NUMBER.findall(reply)
    assert answers._last_number(reply) == (found[-1] if found else None)
    assert [m.span() for m in answers._boxes(reply)] == [m.span() for m in answers._BOX.finditer(reply)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "_after", lambda pattern, reply, first: list(pattern.finditer(reply)))
        everywhere = answers._markers.__wrapped__(reply)
    assert answers._markers.__wrapped__(reply) == everywhere
