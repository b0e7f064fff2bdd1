"""The unseen half of the eighth set of healthy settings: values of published recipes and documentation, without a fault."""

from __future__ import annotations

from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field_parts import graded

UNSEEN = (
    # verl's examples: a KL loss of 0.001, "low_var_kl".
    HealthySetting(
        "KL of one thousandth with the k3 estimator", "lookup", "--kl-beta 0.001 --kl-estimator k3", steps=6
    ),
    # The convention of verl's and torchrl's GSM8K: 1 for a right answer, a tenth for another one in the right form.
    HealthySetting(
        "a tenth for an answer in the right form",
        "gsm8k",
        start=graded(correct=lambda t, r, c: c or 0.1 * ("####" in (r.last_reply or ""))),
        steps=6,
    ),
    HealthySetting("bfloat16 with LoRA of rank 32", "lookup", "--bf16 --peft --lora-r 32 --lora-alpha 32", steps=6),
    HealthySetting("cispo in two minibatches", "gsm8k", "--loss-type cispo --num-minibatches 2", steps=6),
    # kalomaze's notes on GRPO: no decay, a short warm-up, and a gradient norm of 0.2.
    HealthySetting(
        "constant rate after a short warm-up and a norm of a fifth",
        "lookup",
        "--lr-scheduler-type constant_with_warmup --warmup-steps 1 --max-grad-norm 0.2",
        steps=8,
    ),
    HealthySetting("easiest tasks first", "lookup", "--task-order curriculum"),
    # Unsloth's notebooks.
    HealthySetting(
        "gradient norm of a tenth with a cosine", "gsm8k", "--max-grad-norm 0.1 --lr-scheduler-type cosine", steps=6
    ),
    HealthySetting("gspo in four minibatches", "gsm8k", "--loss-type gspo --num-minibatches 4", steps=6),
    HealthySetting("half of the credit for the citations", "musique", "-a grounding=0.8"),
    # NeMo RL's tutorial.
    HealthySetting(
        "leave-one-out baseline with scaled groups",
        "lookup",
        "--baseline leave_one_out --scale-rewards group --num-generations 4",
        steps=6,
    ),
    HealthySetting("overlong rollouts masked with room enough", "gsm8k", "--overlong mask --max-tokens 512", steps=6),
    HealthySetting("rewards on a scale of a hundred", "lookup", start=graded(correct=lambda t, r, c: 100 * c), steps=6),
    HealthySetting("scaling over the whole step", "gsm8k", "--scale-rewards batch", steps=6),
    HealthySetting(
        "sequence weights masked beyond their cap", "lookup", "--importance-correction sequence_mask", steps=6
    ),
    # DAPO's soft penalty of overlong replies: nothing up to a length, and then more and more.
    HealthySetting(
        "soft price of long replies",
        "gsm8k",
        start=graded(correct=lambda t, r, c: c - min(0.5, max(0, len(r.last_reply or "") - 150) / 200)),
        steps=6,
    ),
    HealthySetting("two passes over each step's rollouts", "lookup", "--num-iterations 2", steps=6),
    # DAPO.
    HealthySetting(
        "upper clip bound of 0.28 with token means of the step",
        "gsm8k",
        "--loss-type dapo --epsilon-high 0.28 --num-minibatches 2",
        steps=6,
    ),
    HealthySetting("zero-signal groups refilled", "lookup", "--zero-signal refill", steps=6),
)
