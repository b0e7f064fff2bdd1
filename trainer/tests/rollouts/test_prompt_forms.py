"""How held-out tasks are asked, beside how training tasks are."""

from __future__ import annotations

import pytest
from plumbob.trainer.rollouts.prompt_forms import PromptForm, difference


@pytest.mark.parametrize(
    ("held_out", "training", "words"),
    [
        (["answer."] * 8, ["answer."] * 8, ""),
        (["think."] * 8, ["answer."] * 8, "the system prompt 'think.'"),
        ([f"you are {i}" for i in range(8)], ["answer."] * 8, None),  # of each task its own
        (["think."] * 2, ["answer."] * 8, None),
    ],
)
def test_prompts_side_by_side(held_out: list[str], training: list[str], words: str | None) -> None:
    def forms(texts: list[str], *tools: str) -> list[PromptForm]:
        return [PromptForm(text, tools) for text in texts]

    found = difference(forms(held_out), forms(training))
    assert found == words or (words and found and words in found)
    if words == "":
        assert "('search',)" in str(difference(forms(held_out, "search"), forms(training)))
