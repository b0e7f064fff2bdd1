"""The unseen half of the twentieth set of healthy settings: what threads mention as unusual and right."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field20_parts import lines
from plumbob.testing.faults.field_parts import graded


def tidy(trace: vf.Trace) -> bool:
    """Whether the last line is in the form that the prompt asks for."""
    return bool(lines(trace)) and lines(trace)[-1].startswith("#### ")


def only_if_tidy(task: Any, trace: vf.Trace, own: float) -> float:
    """The answer counts only in the form that the prompt asks for."""
    return own if tidy(trace) else 0.0


def a_tenth(task: Any, trace: vf.Trace, own: float) -> float:
    """A tenth for the form that the prompt asks for."""
    return 0.1 * tidy(trace)


def signed(task: Any, trace: vf.Trace, own: float) -> float:
    """1 for a right answer and -1 for a wrong one."""
    return 2 * own - 1


UNSEEN = (
    # allenai/open-instruct#659: the answer is only judged if the form is right.
    HealthySetting("answer credited only in the asked form", "gsm8k", start=graded(correct=only_if_tidy), steps=6),
    # huggingface/OpenEnv#517: a server with few sessions, which the run does not exceed.
    HealthySetting("four sessions at a time", "lookup", "--max-concurrent 4", steps=6),
    # pytorch/torchtitan#3602: some credit if a search has found the gold document.
    HealthySetting(
        "partial credit for a search that finds the gold", "musique", "-a weights=retrieval_recall=0.3", steps=6
    ),
    # huggingface/open-r1#395: a small reward for the form, which is less strict than an answer.
    HealthySetting("a tenth for a tidy last line", "gsm8k", start=graded(form=a_tenth), steps=6),
    # rllm-org/rllm#63: wrong answers may as well earn -1 as 0.
    HealthySetting("minus one for wrong and one for right", "lookup", start=graded(correct=signed), steps=6),
)
