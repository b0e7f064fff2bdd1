"""The unseen half of the tenth set of healthy settings: what threads, papers and other trainers' defaults have, without a
fault."""

from __future__ import annotations

from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field_parts import graded

UNSEEN = (
    # verl's default of `tis_imp_ratio_cap` in its examples.
    HealthySetting(
        "token weights truncated at two",
        "lookup",
        "--importance-correction token_truncate",
        steps=6,
    ),
    # TRL's default until May 2025, and that of GRPO's paper.
    HealthySetting("KL of four hundredths", "lookup", "--kl-beta 0.04", steps=6),
    # verl's and DeepRetrieval's examples.
    HealthySetting(
        "groups of five in steps of eight tasks",
        "gsm8k",
        "--num-generations 5 --batch-size 40 --gradient-accumulation-steps 1",
        steps=6,
    ),
    # Logic-RL: 1 or -1 for the form, and 2, -1.5 or -2 for the answer.
    HealthySetting(
        "scores of Logic-RL",
        "gsm8k",
        start=graded(correct=lambda t, r, c: 3.0 if c else (-0.5 if "####" in (r.last_reply or "") else -3.0)),
        steps=6,
    ),
    HealthySetting("squared credit for partial answers", "musique", start=graded(correct=lambda t, r, c: c * c)),
    HealthySetting("one pass over two hundred problems", "gsm8k", "-a num_examples=200 --max-steps -1 --num-epochs 1"),
    HealthySetting(
        "keeping the best by greedy held-out reward",
        "gsm8k",
        "--keep-best eval/greedy --eval-steps 3 --eval-examples 8",
        steps=6,
    ),
    HealthySetting("context of a thousand tokens", "lookup", "--max-context 1024", steps=6),
    HealthySetting("cispo with a cap of three", "lookup", "--loss-type cispo --epsilon-high 2", steps=6),
    HealthySetting("weight decay of a tenth on an adapter", "gsm8k", "--peft --weight-decay 0.1", steps=6),
)
