"""The seen half of the twenty-seventh set of healthy settings: what recipes and threads have, without a fault."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field_parts import graded


def answer_and_mark(task: Any, trace: vf.Trace, own: float) -> float:
    """Four fifths for the right number, and a fifth for an answer after the mark."""
    return 0.8 * own + 0.2 * ("####" in (trace.last_reply or ""))


def from_a_half_below(task: Any, trace: vf.Trace, own: float) -> float:
    """A linear map of the rewards to a range from minus a half to two."""
    return 2.5 * own - 0.5


def fewer_turns_pay(task: Any, trace: vf.Trace, own: float) -> float:
    """The reward falls by up to a fifth with the number of turns, of which ten are the most that count."""
    return own * (1 - 0.2 * min(1.0, trace.num_turns / 10))


SEEN = (
    # huggingface/trl#3801: the beta that its RLOO trainer has by default.
    HealthySetting(
        "leave-one-out with a twentieth of k1 in the reward",
        "lookup",
        "--baseline leave_one_out --kl-placement reward --kl-beta 0.05 --kl-estimator k1",
        steps=6,
    ),
    # huggingface/trl#7096: the estimator of lower variance in RLOO's reward.
    HealthySetting(
        "leave-one-out with k3 in the reward",
        "lookup",
        "--baseline leave_one_out --kl-placement reward --kl-beta 0.01 --kl-estimator k3",
        steps=6,
    ),
    # huggingface/trl#3798: no KL penalty, and four minibatches.
    HealthySetting(
        "sequence ratios over sixteen rollouts and four minibatches",
        "lookup",
        "--loss-type gspo --num-generations 16 --batch-size 64 --gradient-accumulation-steps 4 --num-minibatches 4",
        steps=6,
    ),
    # huggingface/trl#4732: IcePop.
    # NVIDIA-NeMo/RL#1348; alibaba.github.io/ROLL, off-policy settings.
    HealthySetting(
        "token weights cut at four in four minibatches",
        "lookup",
        "--bf16 --importance-correction token_truncate --num-minibatches 4 --scale-rewards batch",
        steps=6,
    ),
    # docs.nvidia.com/nemo/rl, the walkthrough of DAPO.
    HealthySetting(
        "DAPO with refills and a bound of ten for bad rollouts",
        "lookup",
        "--loss-type dapo --epsilon-high 0.28 --num-minibatches 4 --zero-signal refill",
        steps=6,
    ),
    # pytorch/torchtitan#3602: what keeps Search-R1 stable.
    HealthySetting(
        "search with a small penalty and a raised upper bound",
        "musique",
        "--kl-beta 0.001 --kl-estimator k3 --epsilon-high 0.28 --num-minibatches 2",
        steps=6,
    ),
    # pytorch/torchtitan#3602: Search-R1's retriever; groups of five.
    HealthySetting(
        "three documents for each search",
        "musique",
        "-a max_top_k=3 --num-generations 5 --batch-size 40 --gradient-accumulation-steps 2",
        steps=6,
    ),
    # om-ai-lab/VLM-R1#26.
    HealthySetting(
        "rank eight with fourfold alpha over documents", "musique", "--peft --lora-r 8 --lora-alpha 32", steps=6
    ),
    # huggingface/trl#4181: LoRA without regret.
    HealthySetting(
        "rank one on all linear layers at a constant rate",
        "lookup",
        "--peft --lora-r 1 --lora-alpha 32 --lora-targets all-linear --lr-scheduler-type constant",
        steps=6,
    ),
    # groundlight/r1_vlm#8.
    HealthySetting(
        "norm of ten and a beta2 of 0.98 under a cosine",
        "lookup",
        "--max-grad-norm 10 --adam-beta2 0.98 --lr-scheduler-type cosine --warmup-steps 2",
        steps=6,
    ),
    # mlcommons/training_policies#590.
    HealthySetting(
        "sixteen rollouts with a beta2 of 0.999",
        "lookup",
        "--num-generations 16 --batch-size 64 --gradient-accumulation-steps 4 --adam-beta2 0.999",
        steps=6,
    ),
    # Algorineko/AgenticArXiv-RL#15: outcome and form are added.
    HealthySetting(
        "four fifths for the number and a fifth for the mark", "gsm8k", start=graded(correct=answer_and_mark), steps=6
    ),
    # docs.nvidia.com/nemo/rl, scale_rewards.
    HealthySetting(
        "rewards mapped to a range from minus a half to two", "lookup", start=graded(correct=from_a_half_below), steps=6
    ),
    # verl-project/verl#3307: right answers earn more in less context.
    HealthySetting("fewer turns pay more over documents", "musique", start=graded(correct=fewer_turns_pay), steps=6),
    # asuzukosi/post-training-experiments#9: a budget with which published runs gain.
    HealthySetting(
        "four rollouts of at most 256 tokens",
        "gsm8k",
        "--num-generations 4 --batch-size 32 --gradient-accumulation-steps 2 --max-tokens 256",
        steps=6,
    ),
    # erfanzar/EasyDeL#246.
    HealthySetting("sequence ratios over documents", "musique", "--loss-type gspo --num-minibatches 2", steps=6),
    # huggingface/trl#4557.
    HealthySetting(
        "sequence ratios with an adapter in two passes", "gsm8k", "--loss-type gspo --peft --num-iterations 2", steps=6
    ),
    # redai-studio/Relax#190.
    HealthySetting("leave-one-out without clipping", "lookup", "--baseline leave_one_out --loss-type cispo", steps=6),
    # swift.readthedocs.io, DAPO.
    HealthySetting(
        "cut searches masked and silent groups refilled",
        "musique",
        "--overlong mask --zero-signal refill --loss-type dapo --epsilon-high 0.28",
        steps=6,
    ),
    # docs.fireworks.ai, the RL cookbook.
    HealthySetting(
        "two hundred word problems in groups of four",
        "gsm8k",
        "-a num_examples=200 --num-generations 4 --batch-size 64 --gradient-accumulation-steps 1",
        steps=6,
    ),
    # docs.nvidia.com/nemo/rl, advantage_estimator: ProRLv2.
    # POLARIS-Project/Polaris-4B-Preview: tasks that all rollouts solve are left out.
    # pytorch/torchtitan#3602: each evaluation has the same set.
    HealthySetting(
        "the same twelve held-out chains each time",
        "lookup",
        "--eval-steps 2 --eval-examples 12 --eval-rollouts 4 --keep-best eval/pass@4",
        steps=6,
    ),
    # verl-project/verl#2953: GSM8K and boxed answers in bfloat16.
    HealthySetting("boxed answers in bfloat16", "gsm8k", "-a answer_style=boxed --bf16", steps=6),
)
