"""Warnings of settings: biased sampling and other rewards. Imports nothing heavy."""

from __future__ import annotations

from plumbob.trainer.config.train import TrainConfig


def sampling_warnings(config: TrainConfig) -> list[str]:
    """One warning for each active sampling setting that the trainer cannot reproduce, which names the bias, and one for turns
    that may be longer than a rollout.

    Measured (huggingface/trl#6789, #7269): with top-p 0.8 the mean of p(trainer) / p(engine) is 0.896, and for 52% of
    tokens the ratio is off by more than a tenth; with top-k 20 the mean is 0.965.
    """
    settings = [
        (config.top_p < 1, f"--top-p {config.top_p}", "the likeliest tokens only"),
        (config.top_k > 0, f"--top-k {config.top_k}", f"the {config.top_k} likeliest tokens only"),
        (config.min_p > 0, f"--min-p {config.min_p}", "tokens near the likeliest only"),
    ]
    longer = (
        f"--max-tokens {config.max_tokens} is more than --max-context {config.max_context}, the limit of a whole rollout, so no "
        "turn can be that long"
        + ("; --loss-type dr_grpo divides by it, so gradients are that much smaller" * (config.loss_type == "dr_grpo"))
    )
    return [longer] * (config.max_tokens > config.max_context) + [
        f"{setting} samples from {what}, but the trainer computes log-probabilities over the whole vocabulary: each is "
        "lower than the engine's by the log of the kept probability, so the gradient is not that of the policy that "
        f"samples; leave {setting.split()[0]} out to avoid this bias"
        for active, setting, what in settings
        if active
    ]


def reward_warnings(config: TrainConfig) -> list[str]:
    """A loud line if the run trains on other rewards than the environment's own."""
    still = "reward/... and evaluations show the environment's own reward"
    if config.trained_reward is None:
        return []
    if config.trained_reward == "random":
        return [f"CONTROL RUN: --trained-reward random trains on rewards of 0 or 1 drawn by lot; {still}"]
    return [f"OTHER REWARD: --trained-reward trains on {config.trained_reward}; {still}"]
