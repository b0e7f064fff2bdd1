"""The seen half of the seventh set of healthy settings: unusual, and without a fault."""

from __future__ import annotations

from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field_parts import graded

SEEN = (
    HealthySetting("KL of 0.01 with the k3 estimator", "lookup", "--kl-beta 0.01 --kl-estimator k3", steps=6),
    HealthySetting("MuSiQue with ten paragraphs", "musique", "-a synthetic_paragraphs=10"),
    HealthySetting(
        "a reward in hundredths of the right answer", "gsm8k", start=graded(correct=lambda t, r, c: 0.01 * c), steps=6
    ),
    HealthySetting(
        "bnpo in two minibatches with group scaling",
        "gsm8k",
        "--loss-type bnpo --num-minibatches 2 --scale-rewards group",
    ),
    HealthySetting("cispo with LoRA and a cap of two", "lookup", "--loss-type cispo --peft --epsilon-high 2", steps=6),
    HealthySetting("cosine schedule over LoRA of rank 2", "lookup", "--peft --lora-r 2 --lr-scheduler-type cosine"),
    HealthySetting("dapo with overlong replies penalised", "gsm8k", "--loss-type dapo --overlong penalise", steps=6),
    HealthySetting("evaluation of eight rollouts per task", "lookup", "--eval-rollouts 8 --eval-examples 8", steps=4),
    HealthySetting("gspo in two iterations", "lookup", "--loss-type gspo --num-iterations 2", steps=6),
    HealthySetting("momentum of 0.98 and a beta2 of 0.999", "lookup", "--adam-beta1 0.98 --adam-beta2 0.999", steps=6),
    HealthySetting("replies of up to two thousand tokens", "gsm8k", "--max-tokens 2048"),
    HealthySetting(
        "upper clip bound of 0.28 with dr_grpo", "lookup", "--epsilon-high 0.28 --num-minibatches 2", steps=6
    ),
    HealthySetting(
        "weight decay of one hundredth with a constant rate",
        "lookup",
        "--weight-decay 0.01 --lr-scheduler-type constant",
        steps=6,
    ),
)
