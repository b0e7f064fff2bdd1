"""The seen half of the second set of healthy settings: unusual, and without a fault."""

from __future__ import annotations

import torch
from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field2_parts import packed_positions
from plumbob.testing.faults.field_parts import graded, tasks_changed, with_data

LONG = "You are a careful assistant. Think about what you are asked, and keep to it. "

SEEN = (
    # huggingface/trl#6800: positions shifted by a constant change nothing in a model with rotary embeddings
    HealthySetting(
        "positions of the trainer's rows begin at 64",
        "lookup",
        start=packed_positions(lambda rows: [64 + torch.arange(len(row.token_ids)) for row in rows]),
        steps=6,
    ),
    HealthySetting(
        "leave-one-out baseline scaled by the group", "lookup", "--baseline leave_one_out --scale-rewards group"
    ),
    HealthySetting("a highest reward that differs by task", "musique", "-a hop_factor=true -a hops=2,3", steps=6),
    # huggingface/trl#5619: a loss that is divided by totals of the step does not depend on microbatches
    HealthySetting("tiny microbatches", "lookup", "--microbatch-tokens 512"),
    HealthySetting("four rollouts at a time", "lookup", "--max-concurrent 4"),
    HealthySetting("KL k3 in the reward", "gsm8k", "--kl-beta 0.02 --kl-placement reward --kl-estimator k3"),
    # huggingface/open-r1#255: several components, here two that always agree
    HealthySetting(
        "two equal reward components",
        "lookup",
        start=graded(correct=lambda t, r, c: c, again=lambda t, r, c: c),
        steps=6,
    ),
    HealthySetting(
        "an added reward that is always zero",
        "gsm8k",
        start=graded(correct=lambda t, r, c: c, penalty=lambda t, r, c: 0.0),
    ),
    HealthySetting("LoRA with alpha of 128", "lookup", "--peft --lora-alpha 128 --lr 1e-3"),
    # NVIDIA-NeMo/RL#3401: an evaluation that measures each task several times
    HealthySetting(
        "evaluation with two rollouts per task", "lookup", "--eval-rollouts 2 --eval-examples 8 --eval-steps 3", steps=6
    ),
    # openstory-so/openstory#1754: long prompts, in training and in evaluation alike
    HealthySetting(
        "long system prompt",
        "gsm8k",
        start=tasks_changed(
            lambda tasks, split: [with_data(t, system_prompt=LONG + t.data.system_prompt) for t in tasks]
        ),
    ),
)
