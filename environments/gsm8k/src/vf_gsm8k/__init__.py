"""vf-gsm8k: grade-school math word problems, one turn, an exact reward.

`extract_answer` and `is_correct` load in milliseconds; only the classes that verifiers asks for load verifiers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vf_gsm8k.answers import Answer, extract_answer, is_correct

if TYPE_CHECKING:
    from plumbob.rollout.harness import InProcessHarness, LocalEnv

    from vf_gsm8k.taskset import GSM8KTaskset

# verifiers takes the one subclass of each kind from here: the taskset, and how upstream's own runners play it cheaply.
# Names that are no plugins it passes over.
__all__ = ["Answer", "GSM8KTaskset", "InProcessHarness", "LocalEnv", "extract_answer", "is_correct"]


def __getattr__(name: str) -> Any:
    if name == "GSM8KTaskset":
        from vf_gsm8k.taskset import GSM8KTaskset

        return GSM8KTaskset
    if name in ("InProcessHarness", "LocalEnv"):
        from plumbob.rollout import harness

        return getattr(harness, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
