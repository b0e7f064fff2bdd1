"""The seen half of the eleventh set of healthy settings: what threads, papers and other trainers' defaults have, without a
fault."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field_parts import graded

LONGEST, LAST_PART = 320, 160
"""Number of characters of a reply that is as long as it may be, and of the part before that in which length costs."""


def softly_punished(task: Any, trace: vf.Trace, correct: float) -> float:
    """DAPO's soft punishment: the reward falls by up to 1 in the last part of the length that a reply may have."""
    beyond = len(trace.last_reply or "") - (LONGEST - LAST_PART)
    return correct - min(1.0, max(0.0, beyond / LAST_PART))


def scored_as_in_toolrl(task: Any, trace: vf.Trace, correct: float) -> float:
    """From -3 to 3 for the answer, and 1 for a rollout with a tool call."""
    return 6 * correct - 3 + any(turn.tool_calls for turn in trace.assistant_messages)


SEEN = (
    # huggingface/trl#3804, huggingface/open-r1#567.
    HealthySetting(
        "punishment in the last part of a reply's length", "gsm8k", start=graded(correct=softly_punished), steps=6
    ),
    # qiancheng0/ToolRL#51: rewards that are high from the first steps on are expected there.
    HealthySetting("scores of ToolRL", "lookup", start=graded(correct=scored_as_in_toolrl), steps=6),
    # IDEA-Research/Rex-Omni#193: a hundred tasks were enough.
    HealthySetting("two passes over a hundred problems", "gsm8k", "-a num_examples=100 --max-steps -1 --num-epochs 2"),
    # datawhalechina/hello-agents#771: a smaller rate for a small model.
    HealthySetting("full training at three quarters of the usual rate", "lookup", "--learning-rate 2.25e-4", steps=6),
    # The notebooks of unsloth.
    HealthySetting("LoRA with an alpha as large as its rank", "gsm8k", "--peft --lora-r 16 --lora-alpha 16", steps=6),
    HealthySetting(
        "LoRA of rank 32 on attention alone",
        "lookup",
        "--peft --lora-r 32 --lora-targets q_proj,k_proj,v_proj,o_proj",
        steps=6,
    ),
    HealthySetting("cosine from the first step on word problems", "gsm8k", "--lr-scheduler-type cosine", steps=6),
    HealthySetting(
        "KL of three thousandths with the k3 estimator", "gsm8k", "--kl-beta 0.003 --kl-estimator k3", steps=6
    ),
    # sunblaze-ucb/Intuitor#26.
    HealthySetting(
        "KL of five thousandths in the reward of chains", "lookup", "--kl-placement reward --kl-beta 0.005", steps=6
    ),
    HealthySetting(
        "upper clip bound of 0.272 in two minibatches", "gsm8k", "--epsilon-high 0.272 --num-minibatches 2", steps=6
    ),
    HealthySetting("held-out chains after every second step", "lookup", "--eval-steps 2 --eval-examples 6", steps=6),
    HealthySetting("temperature of 0.85 over documents", "musique", "--temperature 0.85", steps=6),
    HealthySetting("microbatches of a thousand tokens", "gsm8k", "--microbatch-tokens 1024", steps=6),
    # DAPO's overlong filtering (huggingface/trl#3248) with room enough.
    HealthySetting(
        "dapo in two passes with cut rollouts masked",
        "gsm8k",
        "--loss-type dapo --num-iterations 2 --overlong mask --max-tokens 256",
        steps=6,
    ),
    HealthySetting("checkpoints after every second step", "lookup", "--save-steps 2", steps=6),
)
