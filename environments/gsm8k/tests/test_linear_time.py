"""Reading a reply takes time linear in it, whatever a policy that loops has written.

Each test compares the time of two sizes, so that it does not depend on the machine: work that grows with the square of
the size takes 16 times as long for 4 times the text, linear work 4 times.
"""

import gc
import time

import pytest
from vf_gsm8k.answers import _markers, find_answer, is_lenient_match, is_well_formatted, remembered_answer

PIECES = [
    r"\boxed{", r"\boxed{}", r"\boxed{1 or 2}", r"\boxed{a}", r"\boxed 1 ", "{", "}", "<answer>", "</answer>",
    "<answer>1 2</answer>",
    "####", "#### ", "#### 1 ", "#### a1\n", "#### 1 or 2\n", "#### Step 2\n", "#### 1.", "the answer is ",
    "the answer is 1 or 2.\n",
    "Answer: ", "answer ", "the ", "final ", "\n", "</think>", "<think>", " ", "9", "9,999,", "1 000 ", ",", "-",
    "*", "**", "*a", "$", "\\",
    "wait, ", "that's wrong. ", "actually 1 ", "it is 1, ", "42 is wrong ", "no: ", "Correction: ", "let me check: ",
    "½", "²", r"\frac{1}{2}", r"\text{", "=", "1=", "x = ", "(", "1/", "\u00a0", "if ", "a total of ", "not 1 ",
]  # fmt: skip


SIZE = 100_000
READERS = (
    find_answer,
    is_well_formatted,
    lambda text: is_well_formatted(text, "boxed"),
    lambda text: is_lenient_match(text, "42"),
)


def assert_linear(reply_of):
    """`reply_of(share)`: the reply at this share of its full size. Below 20 ms a time says nothing about growth."""
    reply = reply_of(1)
    for read in READERS:
        for _attempt in range(10):  # what other processes and Python's own housekeeping add only ever makes it slower
            if (whole := seconds(read, reply)) < 9 * 0.02:  # then it passes, however long a quarter takes
                break
            if whole < 9 * (quarter := seconds(read, reply_of(0.25))):
                break
        else:
            pytest.fail(f"{whole:.2f} s for the whole reply, {quarter:.2f} s for a quarter of it")


def seconds(read, reply):
    for remembered in (remembered_answer, _markers):
        remembered.cache_clear()
    gc.disable()  # garbage of other tests is not the reader's
    start = time.thread_time()
    try:
        read(reply)
        return time.thread_time() - start
    finally:
        gc.enable()


def filled(text, share):
    """Whole pieces only: a piece that is cut off at the end could make the quarter another kind of reply."""
    return text * (int(SIZE * share) // len(text))


@pytest.mark.parametrize(
    "piece", [pytest.param(p, marks=[pytest.mark.slow] if k % 3 else []) for k, p in enumerate(PIECES)]
)
def test_a_degenerate_reply_takes_linear_time(piece):
    """A policy that loops fills its whole context with one piece; the reward must not hang on it."""
    for place in ("{}", "{}\n#### 42", "#### 42\n{}", "The answer is {}", r"\boxed{{{}}}", r"\boxed{{42}}{}"):
        assert_linear(lambda share, place=place: place.format(filled(piece, share)))


# After a box, before and after a marker, inside an answer: where each pattern has its runs.
PLACES = (
    r"\boxed{{42}}{}x", r"\boxed{{42}}\]{}x", r"\boxed{{42{}x", "#### {}x", "####{}x", "####\n{}#", "#### 42{}x",
    r"\boxed{}x", "#### 42 ({}x", "{}x\n#### 42", "{}answer: 42", "\nanswer{}x", "\nAnswer:\n{}x", "<answer>{}</answer>",
)  # fmt: skip
RUNS = [
    *" .$*\n\t-#_:,;!?()[]{}+/^=<>~`'\"%&|@1a\\—•",
    ".$", "$ ", "* ", "\\]", "\\)", ". ", ", ", "; ", "# ", "- ", "\n- ", "\n ", "\n\n", " \n\t", "1,", "1,000,", "1.", "1/",
    "1 ", "(1", "a ", "so ", "so: ", r"\,", r"1\,", "—", " — ", "i.e. ", "= ", "x1",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_no_run_of_one_sign_takes_more_than_linear_time(run):
    """A regular expression keeps the GIL until it ends, so one that backtracks stops every rollout of the process."""
    for place in PLACES:
        assert_linear(lambda share, place=place: place.format(filled(run, share)))


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    "marker", ["\nAnswer for {}", "\nAnswer{}", "\nThe {} answer", "\n#### 42{}x", "\n\\boxed{{42{}x}}"]
)
def test_no_run_beside_many_markers_takes_long(run, marker):
    """What sees a bounded text may cost its square, but for every marker once."""
    assert_linear(lambda share: marker.format((run * 490)[:490]) * int(400 * share))
