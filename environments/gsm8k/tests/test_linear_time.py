"""Reading a reply takes time linear in it, whatever a policy that loops has written."""

import time

import pytest
from vf_gsm8k.answers import extract_answer, find_answer, is_lenient_match, is_well_formatted

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


@pytest.mark.parametrize("piece", PIECES)
def test_a_degenerate_reply_takes_linear_time(piece):
    """A policy that loops fills its whole context with one piece; the reward must not hang on it."""
    filler = (piece * 200_000)[:200_000]
    for reply in (
        filler,
        filler + "\n#### 42",
        "The answer is " + filler,
        r"\boxed{" + filler + "}",
        r"\boxed{" + filler[:900] + "}",
    ):
        start = time.thread_time()
        extract_answer(reply)
        assert time.thread_time() - start < 1.0
        for style in ("hash", "boxed"):
            is_well_formatted(reply, style)
        is_lenient_match(reply, "42")
        assert time.thread_time() - start < 2.0


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


@pytest.mark.parametrize("run", RUNS)
def test_no_run_of_one_sign_takes_more_than_linear_time(run):
    """A regular expression keeps the GIL until it ends, so one that backtracks stops every rollout of the process."""
    filler = (run * 200_000)[:200_000]
    for place in PLACES:
        reply = place.format(filler)
        for read in (find_answer, is_well_formatted, lambda text: is_well_formatted(text, "boxed")):
            start = time.thread_time()
            read(reply)
            assert time.thread_time() - start < 0.5, place


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    "marker", ["\nAnswer for {}", "\nAnswer{}", "\nThe {} answer", "\n#### 42{}x", "\n\\boxed{{42{}x}}"]
)
def test_no_run_beside_many_markers_takes_long(run, marker):
    """What sees a bounded text may cost its square, but for every marker once."""
    reply = marker.format((run * 490)[:490]) * 400
    for read in (find_answer, is_well_formatted, lambda text: is_well_formatted(text, "boxed")):
        start = time.thread_time()
        read(reply)
        assert time.thread_time() - start < 0.5
