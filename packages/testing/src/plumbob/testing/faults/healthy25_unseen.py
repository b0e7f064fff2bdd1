"""The unseen half of the twenty-fifth set of healthy settings: what threads about trainers recommend, without a fault."""

from __future__ import annotations

from plumbob.testing.faults.field import HealthySetting

UNSEEN = (
    # verl-project/verl#5625
    HealthySetting("token mean over small microbatches", "gsm8k", "--loss-type bnpo --microbatch-tokens 1500", steps=6),
    # OpenRLHF/OpenRLHF#1155
    HealthySetting("bfloat16 passes over a table", "lookup", "--bf16", steps=6),
    # huggingface/trl#4891
    HealthySetting(
        "geometric mean of a row's ratios masked", "lookup", "--importance-correction sequence_mask", steps=6
    ),
    # huggingface/transformers#4940
    HealthySetting("rise over two steps before a linear fall", "gsm8k", "--warmup-steps 2", steps=6),
    # verl-project/verl#791, BytedTsinghua-SIA/DAPO#11
    HealthySetting(
        "dapo bounds in a single pass", "lookup", "--loss-type dapo --epsilon 0.2 --epsilon-high 0.28", steps=6
    ),
)
