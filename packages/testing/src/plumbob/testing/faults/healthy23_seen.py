"""The seen half of the twenty-third set of healthy settings: what threads, papers and other trainers have, without a fault."""

from __future__ import annotations

from plumbob.testing.faults.field import HealthySetting

SEEN = (
    # huggingface/trl#3187: the mean over all tokens of the update is meant, and no fault.
    HealthySetting("bnpo with group scaling over problems", "gsm8k", "--loss-type bnpo --scale-rewards group", steps=6),
    # huggingface/trl#3834: the bounds of GSPO's paper.
    HealthySetting(
        "gspo with its own small bounds in two minibatches",
        "lookup",
        "--loss-type gspo --epsilon 3e-4 --epsilon-high 4e-4 --num-minibatches 2",
        steps=6,
    ),
    # huggingface/trl#1066: recomputation must work although the model's own dropout stays off.
    HealthySetting("adapter with gradient checkpointing", "lookup", "--peft --gradient-checkpointing", steps=6),
    # huggingface/trl#463: the difference of log-probabilities may be negative where the penalty is right.
    HealthySetting(
        "k1 penalty of a hundredth in the reward", "lookup", "--kl-beta 0.01 --kl-placement reward", steps=6
    ),
    # redai-studio/Relax#205: leave-one-out without PPO's clip.
    HealthySetting(
        "leave-one-out baseline with capped ratios",
        "musique",
        "--baseline leave_one_out --loss-type cispo --num-minibatches 2",
        steps=6,
    ),
)
