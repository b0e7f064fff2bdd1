"""vf-gsm8k: grade-school math word problems, one turn, an exact reward."""

from vf_gsm8k.taskset import GSM8KTaskset

# verifiers finds the taskset through `__all__`, and wants nothing else there.
__all__ = ["GSM8KTaskset"]
