"""Advantages from rewards, token weights, importance weights, the slopes of the loss, and updates by AdamW, in float64.

Advantages are those of GRPO (arXiv:2402.03300, sec. 4.1.2), Dr. GRPO (arXiv:2503.20783) and RLOO (arXiv:2402.14740).
The loss is sum_t w_t (-c_t J_t + beta r_t KL_t): PPO's clipped objective J (arXiv:1707.06347, eq. 7) with DAPO's two bounds
(arXiv:2503.14476, eq. 8), CISPO's capped one (arXiv:2506.13585, eq. 4), or GSPO's ratio of a whole row (arXiv:2507.18071,
eq. 14); c_t is the trainer's probability over the engine's. Its slope in a token's log-probability is what trains.

AdamW is that of Loshchilov & Hutter, arXiv:1711.05101, algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from plumbob.doctor.record import Row, Settings, TensorSample

LARGEST = 20.0
"""Logarithm of the largest ratio: beyond it every trainer clamps."""
CLIP_EPSILON = 1e-6
"""What torch adds to the norm that it divides by."""


def advantages(rows: Sequence[Row], settings: Settings) -> np.ndarray:
    """[B] the advantage of each row, of the sum of its rewards' components. NaN for a row whose reward is not finite."""
    return centred(np.array([shaped_reward(row, settings) for row in rows]), [row.group for row in rows], settings)


def shaped_reward(row: Row, settings: Settings) -> float:
    """The reward with the settings' weights of its components, less the penalties."""
    reward = row.reward
    for name, weight in settings.reward_weights.items():
        before = row.reward_weights.get(name, 1.0)
        if name in row.rewards and before:
            reward += row.rewards[name] * (weight / before - 1)
    if settings.overlong == "penalise" and row.truncated:
        reward -= settings.overlong_penalty
    return reward


def centred(rewards: np.ndarray, groups: Sequence[str], settings: Settings) -> np.ndarray:
    """Rewards less their group's baseline, divided as the settings say."""
    values, scale = np.where(np.isfinite(rewards), 0.0, math.nan), settings.scale
    for group in dict.fromkeys(groups):
        at = np.array([i for i, g in enumerate(groups) if g == group and math.isfinite(rewards[i])], int)
        own = rewards[at]
        if not len(own) or own.max() - own.min() == 0:
            continue
        baseline = np.full(len(own), math.fsum(own) / len(own))
        if settings.baseline == "leave_one_out":
            baseline = (math.fsum(own) - own) / (len(own) - 1)
        values[at] = own - baseline
        if scale == "group":
            values[at] /= own.std(ddof=1) + settings.scale_epsilon
    known = (rewards if scale == "batch_rewards" else values)[np.isfinite(values)]
    if scale.startswith("batch") and len(known) > 1 and known.any():
        values = values / (known.std(ddof=1) + settings.scale_epsilon)
    return values


@dataclass(frozen=True)
class Tokens:
    """What the loss is given of N sampled tokens, [N] each, float64."""

    advantages: np.ndarray
    weights: np.ndarray
    corrections: np.ndarray
    logprobs: np.ndarray
    old: np.ndarray
    rows: np.ndarray
    """Index of each token's row."""
    reference: np.ndarray | None = None


def in_loss(row: Row, settings: Settings) -> int:
    """Number of the row's tokens that are in the loss."""
    return 0 if settings.overlong == "mask" and row.truncated else int(row.loss_mask.sum())


def weights(minibatch: Sequence[Row], step: Sequence[Row], settings: Settings) -> list[float]:
    """The weight of each token of each row of a minibatch."""
    lengths = [in_loss(row, settings) for row in minibatch]
    tokens = sum(in_loss(row, settings) for row in step)

    def weight(length: int) -> float:
        match settings.reduction:
            case "rows":
                return 1 / (len(minibatch) * length)
            case "constant":
                return 1 / (len(minibatch) * settings.max_tokens)
            case "minibatch_tokens":
                return 1 / sum(lengths)
        return settings.num_minibatches / tokens

    return [weight(length) if length else 0.0 for length in lengths]


def corrections(trainer: np.ndarray, engine: np.ndarray, settings: Settings) -> np.ndarray:
    """[n] importance weights of one row. `trainer`, `engine`: log-probabilities [n]."""
    if settings.correction == "none":
        return np.ones(len(trainer))
    log_ratio = trainer.astype(float) - engine
    if settings.correction.startswith("sequence"):  # the geometric mean of the row's ratios
        log_ratio = np.full(len(log_ratio), log_ratio.mean() if len(log_ratio) else 0.0)
    ratio, cap = np.exp(np.minimum(log_ratio, LARGEST)), settings.correction_cap
    if settings.correction.endswith("truncate"):
        return np.minimum(ratio, cap)
    return np.where((ratio < 1 / cap) | (ratio > cap), 0.0, ratio)


def policy_slopes(tokens: Tokens, settings: Settings) -> np.ndarray:
    """[N] slope of the loss without its KL term."""
    ratio = np.exp(np.minimum(tokens.logprobs - tokens.old, LARGEST))
    if settings.ratio == "sequence":
        sums = np.bincount(tokens.rows, tokens.logprobs - tokens.old)
        counts = np.maximum(np.bincount(tokens.rows), 1)
        ratio = np.exp(np.minimum((sums / counts)[tokens.rows], LARGEST))
    high, low = ratio > 1 + settings.epsilon_high, ratio < 1 - settings.epsilon
    if settings.bound == "cap":
        pull = np.minimum(ratio, 1 + settings.epsilon_high)
    else:
        flat = (high & (tokens.advantages > 0)) | (low & (tokens.advantages < 0))
        if settings.delta is not None:
            flat |= (ratio > settings.delta) & (tokens.advantages < 0)
        pull = np.where(flat, 0.0, ratio)
    return -tokens.weights * tokens.corrections * tokens.advantages * pull


def kl_slopes(tokens: Tokens, settings: Settings, estimator: str | None = None) -> np.ndarray:
    """[N] slope of the loss's KL term. The estimates are those of Schulman, "Approximating KL Divergence", 2020."""
    if tokens.reference is None or not settings.kl_beta:
        return np.zeros(len(tokens.weights))
    apart = tokens.logprobs - tokens.reference
    slope = {"k1": np.ones_like(apart), "k2": apart, "k3": 1 - np.exp(np.minimum(-apart, LARGEST))}
    ratio = np.exp(np.minimum(tokens.logprobs - tokens.old, LARGEST)) if settings.kl_ratio else 1.0
    return settings.kl_beta * tokens.weights * ratio * slope[estimator or settings.kl_estimator]


def slopes(tokens: Tokens, settings: Settings) -> np.ndarray:
    """[N] derivative of the loss in each token's log-probability."""
    return policy_slopes(tokens, settings) + kl_slopes(tokens, settings)


def rate(settings: Settings, step: int) -> float:
    """The learning rate of training step `step`, from 0."""
    step = max(step, 0)
    if step < settings.warmup:
        return settings.learning_rate * (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(settings.num_steps - settings.warmup, 1)
    match settings.schedule:
        case "linear":
            return settings.learning_rate * max(1 - done, 0.0)
        case "cosine":
            return settings.learning_rate * (1 + math.cos(math.pi * min(done, 1.0))) / 2
    return settings.learning_rate


def change(
    tensors: Sequence[TensorSample], norm: float, step: int, settings: Settings, times: float = 1.0
) -> np.ndarray:
    """[E] change of the recorded entries of tensors with a gradient, one tensor's after the other's, in one update.

    `norm`: of the whole gradient, before clipping. `step`: the training step. `times`: of the learning rate.
    """
    s, lr, found = settings, times * rate(settings, step), []
    stated = any(t.weight_decay for t in tensors)  # trainers leave it out for norms and biases
    clipping = min(1.0, s.max_norm / (norm + CLIP_EPSILON)) if s.max_norm else 1.0
    for t in tensors:
        w, g = t.before.astype(float), np.asarray(t.gradient, float) * clipping
        known = t.moments_before is not None
        first, second = t.moments_before.astype(float) if known else np.zeros((2, len(w)))
        k = max(t.updates, 1) if known else 1
        first, second = s.beta1 * first + (1 - s.beta1) * g, s.beta2 * second + (1 - s.beta2) * g**2
        adam = first / (1 - s.beta1**k) / (np.sqrt(second / (1 - s.beta2**k)) + s.epsilon_adam)
        decay = s.weight_decay if t.weight_decay or not stated else 0.0
        found.append(-lr * decay * w - lr * adam)
    return np.concatenate(found)
