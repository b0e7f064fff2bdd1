"""The unseen half of the sixth set of healthy settings: unusual, and without a fault."""

from __future__ import annotations

from plumbob.testing.faults.field import HealthySetting

UNSEEN = (
    HealthySetting("groups of five", "lookup", "--num-generations 5 --batch-size 40", steps=6),
    HealthySetting(
        "grpo scaled by the group in three minibatches",
        "lookup",
        "--loss-type grpo --scale-rewards group --num-minibatches 3",
        steps=6,
    ),
    HealthySetting(
        "short momentum under a cosine schedule", "gsm8k", "--adam-beta1 0.5 --lr-scheduler-type cosine", steps=6
    ),
    HealthySetting(
        "temperature of 1.2 with truncated importance weights",
        "lookup",
        "--temperature 1.2 --importance-correction token_truncate",
    ),
    HealthySetting("five hundred tasks", "lookup", "-a num_examples=512"),
    HealthySetting("no weight on the format of MuSiQue", "musique", "-a weights=format=0"),
    HealthySetting("thirty paragraphs per question", "musique", "-a synthetic_paragraphs=30"),
    HealthySetting("chains of two or three links", "lookup", "-a min_hops=2 -a max_hops=3"),
    HealthySetting("upper clip bound raised alone", "lookup", "--epsilon-high 0.6 --num-iterations 2"),
    HealthySetting("doubled reward weights", "gsm8k", "--reward-weights correct=2", steps=6),
)
