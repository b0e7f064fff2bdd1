"""vf-gsm8k: grade-school math word problems (GSM8K) as a single-turn environment with an exact reward.

Importing this package to use `extract_answer` and `is_correct` takes milliseconds: verifiers is imported only when one
of the environment's classes is accessed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vf_gsm8k.answers import Answer, extract_answer, is_correct

if TYPE_CHECKING:
    from plumbob.rollout.harness import InProcessHarness, LocalEnv

    from vf_gsm8k.taskset import GSM8KTaskset

# verifiers takes the only subclass of each kind from here: the taskset, and the Env and Harness with which verifiers'
# own runners play it in one process. It ignores all other names.
__all__ = ["Answer", "GSM8KTaskset", "InProcessHarness", "LocalEnv", "extract_answer", "is_correct"]


def __getattr__(name: str) -> Any:
    if name == "GSM8KTaskset":
        from vf_gsm8k.taskset import GSM8KTaskset

        return GSM8KTaskset
    if name in ("InProcessHarness", "LocalEnv"):
        from plumbob.rollout import harness

        return getattr(harness, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
