"""The seen half of the tenth set of healthy settings: what threads, papers and other trainers' defaults have, without a
fault."""

from __future__ import annotations

from plumbob.testing.faults.field import HealthySetting

SEEN = (
    # TRL's default for some months of 2025.
    HealthySetting("bnpo in one minibatch", "gsm8k", "--loss-type bnpo", steps=6),
    # GRPO as its paper has it.
    HealthySetting("scaled groups and means of row means", "gsm8k", "--loss-type grpo --scale-rewards group", steps=6),
    HealthySetting("KL of a hundredth in the reward", "lookup", "--kl-placement reward --kl-beta 0.01", steps=6),
    HealthySetting("clip bounds of a tenth in two minibatches", "lookup", "--epsilon 0.1 --num-minibatches 2", steps=6),
    HealthySetting(
        "upper clip bound of 0.28 in two passes", "gsm8k", "--epsilon-high 0.28 --num-iterations 2", steps=6
    ),
    HealthySetting(
        "constant rate with a beta2 of 0.95", "lookup", "--lr-scheduler-type constant --adam-beta2 0.95", steps=6
    ),
    # Schulman et al., "LoRA Without Regret": rank 1 is enough for policy gradients, with an alpha of 32 for all ranks.
    HealthySetting("LoRA of rank one", "gsm8k", "--peft --lora-r 1 --learning-rate 1e-3", steps=6),
    HealthySetting("no clipping of the gradient norm", "gsm8k", "--max-grad-norm 0", steps=6),
    HealthySetting("temperature of 1.1 on word problems", "gsm8k", "--temperature 1.1", steps=6),
    HealthySetting("no held-out tasks at all", "gsm8k", "--eval-examples 0"),
    # The longest chain takes six turns.
    HealthySetting("turn limit of eight", "lookup", "--max-turns 8", steps=6),
    HealthySetting(
        "leave-one-out baseline with token means of the step",
        "lookup",
        "--loss-type dapo --baseline leave_one_out",
        steps=6,
    ),
    HealthySetting("beta1 of 0.95", "lookup", "--adam-beta1 0.95", steps=6),
    HealthySetting("three passes over each step's rollouts", "gsm8k", "--num-iterations 3", steps=6),
)
