"""Probes that compare what is paired: rewards, advantages, log-probabilities, positions, learning rates, the saved model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plumbob.rollout import Sample
from plumbob.testing.faults.doubles import Inject, put
from plumbob.trainer.algorithm.advantages import AdvantageSettings, step_advantages
from plumbob.trainer.algorithm.importance_weights import CAPS
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.doctor.probes import pairing
from plumbob.trainer.doctor.probes.movement import divergence
from plumbob.trainer.doctor.rehearsal import trained_positions
from plumbob.trainer.doctor.run_probes import PROBES
from plumbob.trainer.doctor.schedule import scheduled_rate
from plumbob.trainer.doctor.subject import Subject
from plumbob.trainer.policy import policy
from plumbob.trainer.rollouts import collect
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training import step as training_step
from plumbob.trainer.training.expected_advantages import expected_advantages
from plumbob.trainer.training.step import set_learning_rate


@pytest.fixture
def subject_with(tmp_path, set_up_subject):
    with ExitStack() as stack:

        def make(inject: Inject | None = None, **settings: Any) -> Subject:
            config = TrainConfig(**{"num_generations": 4, "eval_examples": 4, **settings})
            subject = set_up_subject(config, tmp_path)
            stack.callback(subject.close)
            if inject is not None:
                inject(stack, subject.run)
            return subject

        yield make


def advantages_of(change: Callable[[list[Sample], list[float]], list[float]]) -> Inject:
    """The training step's advantages become what `change` makes of its samples and their right advantages."""

    def inject(stack: ExitStack, run: Any) -> None:
        original = training_step.step_advantages

        def changed(samples: Any, *args: Any) -> Any:
            right = original(samples, *args)
            return dataclasses.replace(right, values=change(list(samples), right.values))

        put(stack, training_step, "step_advantages", changed)

    return inject


def less_the_batch_mean(samples: list[Sample], values: list[float]) -> list[float]:
    return [s.reward - sum(t.reward for t in samples) / len(samples) for s in samples]


def of_the_next(samples: list[Sample], values: list[float]) -> list[float]:
    return [*values[1:], values[0]]


def rewards_rolled(stack: ExitStack, run: Any) -> None:
    """Rollouts get the reward of the one before, between scoring and training."""
    add_round = collect._add_round

    async def rolled(*args: Any) -> None:
        await add_round(*args)
        batch = args[-1]
        rewards = [sample.reward for sample in batch.drawn]
        batch.drawn[:] = [dataclasses.replace(s, reward=rewards[i - 1]) for i, s in enumerate(batch.drawn)]

    put(stack, collect, "_add_round", rolled)


def mask_moved_with_gradients_on(stack: ExitStack, run: Any) -> None:
    score = run.policy.score

    def moved(rows: Any, temperature: float) -> Any:
        if torch.is_grad_enabled():
            rows = [dataclasses.replace(row, loss_mask=[*row.loss_mask[1:], False]) for row in rows]
        return score(rows, temperature)

    put(stack, run.policy, "score", moved)


def old_logprobs_backwards(stack: ExitStack, run: Any) -> None:
    score = forward_backward.score_old_policy

    def backwards(run: Any, minibatch: Any) -> None:
        score(run, minibatch)
        minibatch.old_logprobs.update({i: values.flip(0) for i, values in minibatch.old_logprobs.items()})

    put(stack, training_step, "score_old_policy", backwards)


def rate_stuck_after_three_updates(stack: ExitStack, run: Any) -> None:
    step, taken = run.optimizer.step, []

    def stuck(*args: Any, **kwargs: Any) -> Any:
        taken.append(1)
        for group in run.optimizer.param_groups:
            group["lr"] *= 1.0 if len(taken) <= 3 else 1e-3
        return step(*args, **kwargs)

    put(stack, run.optimizer, "step", stuck)


def adapter_merged_at_half_scale(stack: ExitStack, run: Any) -> None:
    merged = policy.merged_state

    def halved(model: Any) -> Any:
        layers = [m for m in model.modules() if hasattr(m, "lora_A")]
        with ExitStack() as inner:
            for layer in layers:
                put(inner, layer, "scaling", {name: s / 2 for name, s in layer.scaling.items()})
            return merged(model)

    put(stack, policy, "merged_state", halved)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("probe", "fault", "cause", "settings"),
    [
        ("pairing", rewards_rolled, "rewards-of-other-rollouts", {}),
        ("pairing", advantages_of(of_the_next), "rewards-of-other-rollouts", {}),
        ("pairing", advantages_of(less_the_batch_mean), "advantages-wrong", {}),
        ("pairing", advantages_of(lambda _, values: [-v for v in values]), "advantages-wrong", {"num_generations": 8}),
        ("training_step", advantages_of(less_the_batch_mean), "advantages-wrong", {}),
        ("training_step", mask_moved_with_gradients_on, "loss-mask-shifted", {}),
        ("training_step", old_logprobs_backwards, "logprobs-permuted", {"num_minibatches": 2}),
        ("movement", rate_stuck_after_three_updates, "schedule-hides-rate", {}),
        ("saved", adapter_merged_at_half_scale, "saved-model-differs", {"peft": True}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_is_paired_wrongly_is_named(subject_with, probe, fault, cause, settings):
    found = [finding for finding in PROBES[probe](subject_with(fault, **settings)) if finding.cause]
    assert found and found[0].cause == cause, found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moved", "beta", "cause"),
    [(False, 0.0, "no-gradient"), (False, 0.02, "policy-term-missing"), (True, 0.02, "policy-term-missing")],
    ids=["there is no KL term", "the policy is the reference", "the policy is another"],
)
def test_a_loss_without_the_advantages_is_named(subject_with, monkeypatch, moved, beta, cause):
    """Only the KL term has a gradient, and none as long as the policy is the reference."""
    subject = subject_with(kl_beta=beta)
    loss = forward_backward.policy_loss

    def without(inputs: Any, objective: Any) -> Any:
        reference = inputs.ref_logprobs + 0.1 if moved else inputs.ref_logprobs
        zero = torch.zeros_like(inputs.advantages)
        return loss(dataclasses.replace(inputs, advantages=zero, ref_logprobs=reference), objective)

    monkeypatch.setattr(forward_backward, "policy_loss", without)
    finding, *rest = (f for f in PROBES["training_step"](subject) if f.cause)
    assert finding.cause == cause and finding.check == "rewards reach the gradient" and not rest


def test_rollouts_that_the_settings_take_out_of_the_loss_show_no_missing_gradient(subject_with):
    subject = subject_with(overlong="mask")
    for cut in subject.drawn.samples:
        object.__setattr__(cut, "truncated", True)
    first = next(PROBES["training_step"](subject))
    assert (first.check, first.cause) == ("rewards reach the gradient", "signal-masked")


@pytest.mark.slow
def test_a_correction_that_takes_every_token_is_named_and_not_the_missing_gradient(subject_with, monkeypatch):
    """The bound lies below the difference of engine and trainer."""
    monkeypatch.setitem(CAPS, "sequence_mask", 1 + 1e-6)
    subject = subject_with(importance_correction="sequence_mask")
    for row in subject.drawn.samples:
        row.sampling_logprobs[:] = [
            x + 1e-5 if m else x for x, m in zip(row.sampling_logprobs, row.loss_mask, strict=True)
        ]
    for probe in ("training_step", "gradient"):
        named = {f.cause for f in PROBES[probe](subject) if f.cause}
        assert named == {"correction-mutes-rollouts"}


def kl_times(factor: float) -> Inject:
    """The KL divergence of the reward arrives multiplied by `factor`."""

    def inject(stack: ExitStack, run: Any) -> None:
        original = training_step.reference_kl
        put(stack, training_step, "reference_kl", lambda *args: [factor * kl for kl in original(*args)])

    return inject


@pytest.mark.parametrize(
    ("factor", "cause", "estimator"),
    [
        (0.0, "advantages-wrong", "k1"),
        pytest.param(1.0, None, "k1", marks=pytest.mark.slow),
        pytest.param(1.0, None, "k3", marks=pytest.mark.slow),
        pytest.param(0.5, "advantages-wrong", "k3", marks=pytest.mark.slow),
        pytest.param(-1.0, "kl-backwards", "k1", marks=pytest.mark.slow),
    ],
)
def test_a_kl_penalty_that_is_not_subtracted_from_rewards_is_named(subject_with, factor, cause, estimator):
    subject = subject_with(kl_times(factor), kl_beta=0.05, kl_placement="reward", kl_estimator=estimator)
    findings = list(PROBES["training_step"](subject))
    named = [f for f in findings if f.cause]
    assert [f.cause for f in named] == ([cause] if cause else []), named
    last = findings[-1]
    assert last.check == "the KL divergence is subtracted from each rollout's reward" and last.verdict != "unsure"


def test_a_change_of_one_task_alone_is_not_certain():
    """The same mean divergence, of all tasks or of one."""
    rows = [sample(0.0, i // 4, False, {}) for i in range(16)]
    old = [torch.zeros(10) for _ in rows]
    everywhere = divergence(rows, old, [torch.full((10,), 0.5 + 0.01 * i) for i in range(16)])
    in_one = divergence(rows, old, [torch.full((10,), 1.0) * (i < 4) for i in range(16)])
    assert everywhere.low > 0.1 and everywhere.low < everywhere.mean < everywhere.high
    assert in_one.mean == pytest.approx(0.125) and in_one.low < 0
    assert divergence(rows, old, [torch.full((10,), math.nan) for _ in rows]).low == math.inf


@pytest.mark.field
@pytest.mark.parametrize(
    "settings",
    [
        {"bf16": True, "num_iterations": 2, "num_minibatches": 2},
        {"bf16": True, "peft": True, "lora_r": 1},
        {"scale_rewards": "group", "baseline": "leave_one_out", "warmup_steps": 10, "lr_scheduler_type": "cosine"},
        {"scale_rewards": "batch", "weight_decay": 0.1, "max_grad_norm": 0.1, "kl_beta": 0.04},
        {"num_generations": 2, "loss_type": "gspo", "num_iterations": 4},
        {"env": "musique", "model": "tiny-musique", "env_args": ("datasets=synthetic", "hops=2"), "kl_beta": 0.04},
    ],
    ids=str,
)
def test_unusual_settings_give_no_alarm(subject_with, settings):
    subject = subject_with(**settings)
    names = ("pairing", "parity", "training_step", "gradient", "movement", "saved", "sync")
    assert [(f.check, f.evidence) for name in names for f in PROBES[name](subject) if f.cause] == []


@pytest.mark.slow
@pytest.mark.long
def test_without_a_signal_nothing_that_needs_one_is_judged(subject_with):
    subject = subject_with(env_args=("difficulty=hard",))
    assert not subject.advantages.with_signal
    findings = [f for name in ("training_step", "sync", "gradient", "movement", "saved") for f in PROBES[name](subject)]
    assert [(f.check, f.evidence) for f in findings if f.cause] == []
    unsure = {f.check for f in findings if f.verdict == "unsure" and "no group has a signal" in f.evidence}
    assert len(unsure) >= 3


@pytest.mark.slow
def test_a_gradient_predicts_the_change_of_a_small_step(subject_with):
    subject = subject_with()
    findings = {f.check: f for f in PROBES["gradient"](subject)}
    for check in ("an advantage of +1 raises log-probabilities", "an advantage of -1 lowers log-probabilities"):
        assert findings[check].verdict == "pass"
        assert "+1.00 times what the gradient's norm" in findings[check].evidence


@pytest.mark.slow
def test_trained_positions_are_those_of_the_mask(subject_with):
    subject = subject_with()
    row = next(s for s in subject.drawn.samples if sum(s.loss_mask) > 4)
    mask = {i for i, m in enumerate(row.loss_mask) if m}
    found = trained_positions(subject, row)
    assert found is not None and found <= mask and len(found) >= 0.9 * len(mask)


def sample(reward: float, group: int, truncated: bool, parts: dict[str, float]) -> Sample:
    return Sample([0, 1], [False, True], [0.0, -1.0], reward, str(group), "", truncated, rewards=parts)


@given(
    st.lists(
        st.tuples(st.integers(-50, 50), st.integers(0, 2), st.booleans(), st.integers(-8, 8)), min_size=1, max_size=16
    ),
    st.sampled_from(["none", "group", "batch"]),
    st.sampled_from(["mean", "leave_one_out"]),
    st.sampled_from(["keep", "penalise"]),
    st.sampled_from([None, 7]),
    st.booleans(),
)
def test_two_independent_computations_of_advantages_agree(rows, scale, baseline, overlong, random_rewards, whole):
    settings = AdvantageSettings(scale=scale, baseline=baseline, overlong=overlong, random_rewards=random_rewards)
    parts = [{} if whole else {"a": float(a), "b": float(r - a)} for r, _, _, a in rows]
    samples = [sample(float(r), g, cut, p) for (r, g, cut, _), p in zip(rows, parts, strict=True)]
    expected = expected_advantages(samples, [s.reward for s in samples], settings)
    assert expected == pytest.approx(step_advantages(samples, settings).values, abs=1e-9)


@given(st.floats(0.1, 1e9), st.integers(2, 9), st.sampled_from(["group", "batch"]))
def test_equal_rewards_have_no_advantage_however_large_they_are(reward, size, scale):
    settings = AdvantageSettings(scale=scale, scale_epsilon=1e-8)
    assert expected_advantages([sample(reward, 0, False, {})] * size, [reward] * size, settings) == [0.0] * size


@given(
    st.sampled_from(["linear", "cosine", "constant", "constant_with_warmup"]), st.integers(0, 20), st.integers(1, 60)
)
def test_two_independent_schedules_agree(kind, warmup, total):
    config = TrainConfig(lr_scheduler_type=kind, warmup_steps=warmup, max_steps=total, learning_rate=1e-3)
    for step in range(total):
        state = type("State", (), {"step": step})
        run: Any = type("Run", (), {"config": config, "state": state, "optimizer": torch.optim.SGD([torch.zeros(1)])})
        assert math.isclose(set_learning_rate(run), scheduled_rate(config, step), rel_tol=1e-9, abs_tol=1e-18)


def test_what_is_said_of_an_unreadable_call_is_no_tool_result():
    """A script's call is read otherwise than the model's text, so that the words may differ without a fault."""
    nodes = [
        SimpleNamespace(sampled=False, message=SimpleNamespace(role="tool", content=text))
        for text in ("Error: this tool call could not be read: <tool_call> was never closed.", "next=1000")
    ]
    assert pairing._results(cast(Any, SimpleNamespace(nodes=nodes))) == ["next=1000"]
