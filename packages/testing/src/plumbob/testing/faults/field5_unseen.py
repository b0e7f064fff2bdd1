"""The unseen half of the fifth set of the field's faults: only for measuring. Rule writers must not read this file."""

from __future__ import annotations

from plumbob.testing.faults import field5_unseen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, MISMATCH, FieldFault, ids
from plumbob.testing.faults.field2_parts import losses
from plumbob.testing.faults.field_parts import engine_logits, engine_prompts, graded, tasks_changed

UNSEEN = (
    # Tasks and rewards
    FieldFault(
        "only tasks that the model solves",
        "The training tasks are those that the model solves already, and all rollouts of a group earn the same.",
        "modelscope/ms-swift#3130",
        ids("task-solved", "too-little-signal", "groups-without-variety"),
        ("lookup",),
        start=tasks_changed(doubles.only_short),
    ),
    FieldFault(
        "held-out scored from minus one to one",
        "Held-out rollouts are scored by the settings of another score, from minus one to one.",
        "TIGER-AI-Lab/verl-tool#149",
        ids("evaluation-parses-differently"),
        ("lookup",),
        start=graded(correct=doubles.held_out_centred),
        watch=False,
    ),
    FieldFault(
        "rewards above one become zero",
        "The environment pays 2 for a right answer, and rewards above 1 do not reach the trainer.",
        "microsoft/agent-lightning#405",
        ids("oracle-fails", "reward-constant"),
        ("lookup", "gsm8k"),
        start=graded(correct=doubles.none_above_one),
        watch_causes=ids("never-succeeds"),
    ),
    # Trainer
    FieldFault(
        "one missing reward makes every advantage NaN",
        "A reward function gives nothing for some replies, and the mean of the step's rewards is NaN.",
        "modelscope/ms-swift#8123, huggingface/trl#5775",
        ids("advantages-wrong", "gradient-not-finite", "reward-not-finite", "no-gradient"),
        EVERYWHERE,
        start=doubles.one_missing,
    ),
    FieldFault(
        "credit discounted by a tenth per token",
        "A discount of 0.9 per token is meant for turns, so that the first tokens of a reply get hardly any credit.",
        "OpenRLHF/OpenRLHF#944, natolambert/rlhf-book#364",
        ids("advantages-wrong", "sampled-tokens-masked", "loss-differs-from-settings"),
        ("gsm8k", "musique", "lookup"),
        start=losses(doubles.discounted),
        watch=False,
    ),
    FieldFault(
        "reference taken from the resumed policy",
        "A resumed run takes its reference policy from the trained weights in place of the initial ones.",
        "NVIDIA-NeMo/RL#2955",
        ids("reference-is-another-policy"),
        EVERYWHERE,
        inject=doubles.reference_resumed,
        options="--kl-beta 0.1",
        probes=False,
        steps=8,
    ),
    FieldFault(
        "warm-up begins again after a resume",
        "The schedule's place is not restored, and a resumed run begins its warm-up again.",
        "PrimeIntellect-ai/prime-rl#1095, bghira/SimpleTuner#3045",
        ids("schedule-hides-rate", "warmup-too-long"),
        EVERYWHERE,
        start=doubles.warmed_again,
        options="--warmup-steps 4",
        probes=False,
        steps=8,
    ),
    FieldFault(
        "KL coefficient tightens without end",
        "The controller of the KL coefficient is updated with a wrong KL, and raises the coefficient in every step.",
        "CarperAI/trlx#361, OpenRLHF/OpenRLHF#1289",
        ids("kl-too-large", "gradient-explodes"),
        EVERYWHERE,
        start=doubles.kl_tightened,
        options="--kl-beta 0.02",
        probes=False,
        steps=8,
    ),
    # Engine
    FieldFault(
        "weights sent in every third step only",
        "The trainer sends weights at an interval of its own, and rollouts in between come from older weights.",
        "huggingface/trl#3189, huggingface/trl#6513",
        ids("engine-stale", "weights-not-synced"),
        EVERYWHERE,
        start=doubles.every_third_sync,
        watch_causes=MISMATCH,
    ),
    FieldFault(
        "prompts sampled with their padding",
        "The engine gets prompts with the padding of their batch, and takes it for a part of them.",
        "huggingface/trl#5351",
        ids("prompt-replaced") | MISMATCH,
        EVERYWHERE,
        start=engine_prompts(doubles.padded),
    ),
    FieldFault(
        "draft tokens accepted by agreement",
        "Speculative decoding takes a drafted token if the model samples the same one, which favours likely tokens.",
        "ShopeeLLM/Spec-RL#14, ml-explore/mlx-swift-lm#459",
        ids("temperature-not-applied", "sampling-truncated") | MISMATCH,
        EVERYWHERE,
        start=engine_logits(doubles.drafted, raw=True),
    ),
)
