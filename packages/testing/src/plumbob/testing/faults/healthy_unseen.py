"""The unseen half of the healthy settings: unusual, and without a fault."""

from __future__ import annotations

from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field_parts import graded

UNSEEN = (
    HealthySetting("rewards of at most 0.05", "lookup", start=graded(correct=lambda t, r, c: 0.05 * c), steps=6),
    HealthySetting("rewards from minus one to zero", "gsm8k", start=graded(correct=lambda t, r, c: c - 1), steps=6),
    HealthySetting(
        "a bonus of a tenth for any reply",
        "gsm8k",
        start=graded(correct=lambda t, r, c: c, style=lambda t, r, c: 0.1 * bool(r.last_reply)),
        steps=6,
    ),
    HealthySetting(
        "a bonus of a tenth for short replies",
        "lookup",
        start=graded(correct=lambda t, r, c: c, short=lambda t, r, c: 0.1 * (len(r.last_reply or "") < 20)),
    ),
    HealthySetting(
        "partial credit for links that were followed",
        "lookup",
        start=graded(correct=lambda t, r, c: 0.5 * c + 0.5 * min(r.num_turns / (len(t.data.chain) + 1), 1)),
    ),
    HealthySetting("a table of 40 entries", "lookup", "-a table_size=40"),
    HealthySetting("distractors in every result", "lookup", "-a distractors=1 -a max_hops=3"),
    HealthySetting("groups of two", "lookup", "--num-generations 2"),
    HealthySetting("grpo scaled by the group", "lookup", "--loss-type grpo --scale-rewards group"),
    HealthySetting("cispo on MuSiQue", "musique", "--loss-type cispo"),
    HealthySetting(
        "dapo with refilled groups", "lookup", "--loss-type dapo --zero-signal refill --epsilon-high 0.28", steps=6
    ),
    HealthySetting("dr_grpo with a leave-one-out baseline", "musique", "--baseline leave_one_out"),
    HealthySetting("KL of 0.02 in the reward", "lookup", "--kl-beta 0.02 --kl-placement reward"),
    HealthySetting("KL of 0.001 with the k3 estimator", "lookup", "--kl-beta 0.001 --kl-estimator k3"),
    HealthySetting(
        "LoRA of rank 4 on attention alone", "lookup", "--peft --lora-r 4 --lora-targets q_proj,k_proj,v_proj,o_proj"
    ),
    HealthySetting("LoRA of rank 64", "lookup", "--peft --lora-r 64 --lora-alpha 64", steps=6),
    HealthySetting("LoRA on GSM8K with dropout of a twentieth", "gsm8k", "--peft --lora-dropout 0.05"),
    HealthySetting("bfloat16 on MuSiQue", "musique", "--bf16"),
    HealthySetting("two minibatches", "lookup", "--num-minibatches 2", steps=6),
    HealthySetting("half the learning rate", "lookup", "--lr 1.5e-4"),
    HealthySetting("three times the learning rate", "lookup", "--lr 1e-3", steps=6),
    HealthySetting("overlong rollouts masked", "musique", "--overlong mask"),
    HealthySetting("overlong rollouts penalised", "gsm8k", "--overlong penalise"),
    HealthySetting("microbatches of 1000 tokens", "lookup", "--microbatch-tokens 1000"),
    HealthySetting("no evaluation", "gsm8k", "--eval-examples 0"),
    HealthySetting("boxed answers", "gsm8k", "-a answer_style=boxed"),
    HealthySetting("three hops of MuSiQue", "musique", "-a hops=2,3"),
    HealthySetting("the golden retriever", "musique", "-a retriever=golden"),
    HealthySetting("steps of 512 rollouts", "lookup", "--batch-size 128"),
    HealthySetting("optimizer moments of a short memory", "lookup", "--adam-beta1 0.8 --adam-beta2 0.95"),
    HealthySetting(
        "SmolLM2-135M on easy lookup chains",
        "lookup",
        "-a max_hops=1 --batch-size 8 --gradient-accumulation-steps 2 --max-tokens 64",
        pretrained=True,
    ),
)
