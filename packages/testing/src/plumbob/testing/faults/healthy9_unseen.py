"""The unseen half of the ninth set of healthy settings: what threads, papers and other trainers' defaults have, without a
fault."""

from __future__ import annotations

from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field_parts import graded

UNSEEN = (
    # The default of verifiers' trainer, PrimeIntellect-ai/verifiers#82.
    HealthySetting("gradient norm of a thousandth", "gsm8k", "--max-grad-norm 0.001", steps=6),
    HealthySetting("LoRA of rank 8 with an alpha of 32", "lookup", "--peft --lora-r 8 --lora-alpha 32", steps=6),
    HealthySetting(
        "cosine after a warm-up of two steps", "gsm8k", "--lr-scheduler-type cosine --warmup-steps 2", steps=8
    ),
    HealthySetting(
        "KL of a hundredth with groups of six",
        "lookup",
        "--kl-beta 0.01 --num-generations 6 --batch-size 48 --gradient-accumulation-steps 1",
        steps=6,
    ),
    HealthySetting("temperature of 0.9 in all turns", "musique", "--temperature 0.9", steps=6),
    HealthySetting(
        "groups of six problems",
        "gsm8k",
        "--num-generations 6 --batch-size 48 --gradient-accumulation-steps 1",
        steps=6,
    ),
    # The shaping of radixark/miles#1573.
    HealthySetting(
        "price per character for right answers alone",
        "gsm8k",
        start=graded(correct=lambda t, r, c: c and c - 5e-4 * len(r.last_reply or "")),
        steps=6,
    ),
    # The shaping of PrimeIntellect-ai/prime-rl#2265.
    HealthySetting(
        "brevity paid only to right answers",
        "gsm8k",
        start=graded(correct=lambda t, r, c: c * (1 + 0.1 * max(0.0, 1 - len(r.last_reply or "") / 200))),
        steps=6,
    ),
    HealthySetting(
        "half a point off for a wrong answer in the right form",
        "gsm8k",
        start=graded(correct=lambda t, r, c: c or (-0.5 if "####" in (r.last_reply or "") else -1.0)),
        steps=6,
    ),
    # The bounds of GSPO's paper.
    HealthySetting(
        "gspo with its own bounds",
        "lookup",
        "--loss-type gspo --epsilon 3e-4 --epsilon-high 4e-4 --num-minibatches 2",
        steps=6,
    ),
    HealthySetting("two epochs over 96 chains", "lookup", "-a num_examples=96 --max-steps -1 --num-epochs 2"),
    HealthySetting("gradient checkpointing with an adapter", "lookup", "--peft --gradient-checkpointing", steps=6),
    HealthySetting("beta2 of 0.999 and no decay", "gsm8k", "--adam-beta2 0.999 --weight-decay 0", steps=6),
    HealthySetting("no momentum of the first moment", "lookup", "--adam-beta1 0", steps=6),
)
