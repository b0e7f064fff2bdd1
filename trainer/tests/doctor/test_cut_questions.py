"""Questions that were cut before the run are told from questions that end without a mark."""

import pytest
from plumbob.trainer.doctor.before_model import cut_questions

WHOLE = [f"How many are {i} and {'many ' * (i % 5)}more?" for i in range(40)]


@pytest.mark.parametrize(
    ("train", "held_out", "cut"),
    [
        (WHOLE, WHOLE, False),
        ([text[:20] for text in WHOLE], WHOLE, True),
        ([text[:20] if i % 2 else text for i, text in enumerate(WHOLE)], WHOLE, True),
        ([text[:20] if i % 2 else text for i, text in enumerate(WHOLE)], [text[:20] for text in WHOLE], True),
        ([text[:20] if i % 8 == 0 else text for i, text in enumerate(WHOLE)], WHOLE, False),  # too few to tell
        ([f"Start key: {i}" for i in range(1000, 1040)], [f"Start key: {i}" for i in range(2000, 2040)], False),
        ([f"Add {i} and {'1' * (i % 5)}7" for i in range(40)], [f"Add {i} and 7" for i in range(40, 80)], False),
    ],
)
def test_questions_that_break_off_where_others_end_are_cut(train, held_out, cut):
    assert (cut_questions.judged(train, held_out)[0] == "truncated-context") == cut


@pytest.mark.parametrize(("missing", "named"), [(3, True), (20, False), (100, False)])
def test_prompts_that_have_lost_their_questions_are_those_of_other_tasks_too(missing, named):
    shown = [("Please answer." if k % missing == 0 else f"What is {k} + 2?", str(k + 2)) for k in range(48)]
    assert (cut_questions.alike(shown)[0] == "truncated-context") == named
    assert cut_questions.alike([("Please answer.", "7")] * 48)[0] is None
