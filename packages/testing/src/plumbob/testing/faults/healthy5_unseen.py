"""The unseen half of the fifth set of healthy settings: unusual, and without a fault."""

from __future__ import annotations

from plumbob.testing.faults import field5_unseen_doubles as doubles
from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field_parts import graded, tasks_changed

UNSEEN = (
    HealthySetting(
        "one task in eight pays eightfold", "lookup", start=graded(correct=doubles.sometimes_eightfold), steps=6
    ),
    HealthySetting(
        "rewards from minus 100 to 100", "lookup", start=graded(correct=lambda t, r, c: 200 * c - 100), steps=6
    ),
    HealthySetting(
        "no clipping of gradients and a warm-up of three steps", "gsm8k", "--max-grad-norm 0 --warmup-steps 3", steps=8
    ),
    HealthySetting(
        "a discount for each further turn", "lookup", start=graded(correct=lambda t, r, c: c * 0.95**r.num_turns)
    ),
    HealthySetting("cispo scaled by the batch", "lookup", "--loss-type cispo --scale-rewards batch", steps=6),
    HealthySetting(
        "KL of 0.01 in the reward with a leave-one-out baseline",
        "lookup",
        "--kl-beta 0.01 --kl-placement reward --baseline leave_one_out",
        steps=6,
    ),
    HealthySetting("numbered questions", "gsm8k", start=tasks_changed(doubles.numbered)),
    HealthySetting(
        "dr_grpo in two minibatches with wide clipping",
        "lookup",
        "--num-minibatches 2 --epsilon 0.3 --epsilon-high 0.5",
    ),
)
