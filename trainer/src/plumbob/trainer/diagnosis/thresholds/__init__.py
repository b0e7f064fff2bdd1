"""The numbers that verdicts depend on, with their meanings. docs/reference/causes.md is generated from these files.

A threshold that differs between float32 and bfloat16 is indexed by whether the computation is in bfloat16, as in
`SAMPLING_GAP[config.bf16]`.
"""

# ruff: noqa: F403
from plumbob.trainer.diagnosis.thresholds.changes import *
from plumbob.trainer.diagnosis.thresholds.environment import *
from plumbob.trainer.diagnosis.thresholds.kinds import *
from plumbob.trainer.diagnosis.thresholds.run import *
