"""The unseen half of the twenty-first set of healthy settings: what threads and other trainers' settings have, without a
fault."""

from __future__ import annotations

from plumbob.testing.faults.field import HealthySetting

UNSEEN = (
    # areal-project/AReaL#303: group means, and one standard deviation for the whole step.
    HealthySetting("group means over the standard deviation of the step", "gsm8k", "--scale-rewards batch", steps=6),
    # huggingface/trl#5889: a first-order KL estimate is right in the reward.
    HealthySetting(
        "leave-one-out baseline with a KL penalty in the reward",
        "lookup",
        "--baseline leave_one_out --kl-beta 0.001 --kl-placement reward",
        steps=6,
    ),
    # NVIDIA-NeMo/RL#602
    HealthySetting(
        "wider upper clip with groups sampled again",
        "gsm8k",
        "--loss-type dapo --epsilon-high 0.28 --zero-signal refill",
        steps=6,
    ),
    # oumi-ai/oumi#107: without the reentrant form, recomputing leaves the adapter's gradients as they are.
    HealthySetting("recomputed activations under an adapter", "gsm8k", "--peft --gradient-checkpointing", steps=6),
    # PrimeIntellect-ai/prime-rl#190
    HealthySetting("gradients clipped at a tenth", "lookup", "--max-grad-norm 0.1", steps=6),
)
