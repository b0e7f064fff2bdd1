"""A right record passes every stage, and what is changed at one stage is found there, named, and found at no earlier one."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from plumbob.doctor import record as records
from plumbob.doctor import stages
from plumbob.doctor.explain import explain, of_gradient

Made = Callable[..., Any]

Change = Callable[[records.StepRecord], object]


def outcomes(record: records.StepRecord) -> list[stages.Outcome]:
    return [stage(stages.Examined(record)) for stage in stages.STAGES]


def test_a_right_record_passes(made_record: Made) -> None:
    assert [str(o) for o in outcomes(made_record()) if o.verdict == "fail"] == []


def rows_of(change: Callable[[records.Row], object]) -> Change:
    return lambda record: [change(row) for row in record.rows]


def trained(change: Callable[[records.TrainedRow], object]) -> Change:
    return lambda record: [change(t) for t in record.updates[0].trained]


def tensors(change: Callable[[records.TensorSample], object]) -> Change:
    return lambda record: [change(t) for t in record.updates[0].tensors]


def put(name: str, value: Callable[..., object]) -> Callable[..., None]:
    return lambda one: setattr(one, name, value(one))


def regrouped(record: records.StepRecord) -> None:
    for i, row in enumerate(record.rows):
        row.group = str(i % 3)


def rolled(record: records.StepRecord) -> None:
    rewards = [row.reward for row in record.rows]
    for row, reward in zip(record.rows, rewards[1:] + rewards[:1], strict=True):
        row.reward = reward


def marked_as_cut(record: records.StepRecord) -> None:
    record.settings.overlong = "mask"
    record.rows[0].truncated = True


def by_microbatch(record: records.StepRecord) -> None:
    for t in record.updates[0].trained:
        t.weights = t.weights * np.float32(1 + t.microbatch)


CHANGES: list[tuple[str, Change, str, str, str]] = [
    (
        "mask shifted",
        rows_of(put("loss_mask", lambda r: np.roll(r.loss_mask, -1))),
        "rows",
        "loss-mask-wrong",
        "shifted",
    ),
    ("first ids cut", rows_of(put("token_ids", lambda r: r.token_ids[1:])), "rows", "row-not-what-was-sampled", ""),
    (
        "sampling log-probabilities moved",
        rows_of(put("sampling_logprobs", lambda r: np.roll(r.sampling_logprobs, 1))),
        "rows",
        "row-not-what-was-sampled",
        "",
    ),
    (
        "no stop",
        lambda record: [setattr(r.requests[0], "finish_reason", "stop") for r in record.rollouts],
        "sampling",
        "stop-token-wrong",
        "",
    ),
    ("rewards of the next row", rolled, "advantages", "rewards-of-other-rollouts", ""),
    ("a row that is marked as cut", marked_as_cut, "advantages", "signal-left-out", ""),
    ("groups in turn", regrouped, "advantages", "advantages-wrong", ""),
    (
        "bare rewards",
        rows_of(put("advantage", lambda r: r.reward)),
        "advantages",
        "advantages-wrong",
        "without a baseline",
    ),
    ("weights by microbatch", by_microbatch, "loss", "normaliser-depends-on-microbatches", "each microbatch"),
    (
        "a row that is left out",
        lambda record: record.updates[0].trained.pop(),
        "loss",
        "loss-differs-from-settings",
        "",
    ),
    (
        "importance weights",
        trained(put("corrections", lambda t: t.corrections * 1.1)),
        "loss",
        "loss-differs-from-settings",
        "",
    ),
    (
        "the opposite sign",
        trained(put("slopes", lambda t: -t.slopes)),
        "loss",
        "loss-differs-from-settings",
        "slopes times -1",
    ),
    ("no slopes", trained(put("slopes", lambda t: None)), "loss", "no-gradient", ""),
    (
        "an entropy bonus",
        trained(put("slopes", lambda t: t.slopes + 0.01 * t.weights * (t.logprobs + 1))),
        "loss",
        "loss-differs-from-settings",
        "",
    ),
    ("no update", tensors(put("after", lambda t: t.before)), "optimizer", "update-differs-from-settings", "no change"),
    (
        "half the rate",
        tensors(put("after", lambda t: t.before + 0.5 * (t.after - t.before))),
        "optimizer",
        "schedule-hides-rate",
        "0.5 times",
    ),
    (
        "uphill",
        tensors(put("after", lambda t: 2 * t.before - t.after)),
        "optimizer",
        "update-differs-from-settings",
        "",
    ),
    (
        "other weights are served",
        lambda record: setattr(record.served, "served", record.served.served - 0.1),
        "sync",
        "weights-not-synced",
        "",
    ),
]


@pytest.mark.parametrize(("change", "stage", "cause", "what"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES])
def test_a_change_is_found_where_it_was_made(
    made_record: Made, change: Change, stage: str, cause: str, what: str
) -> None:
    record = made_record()
    change(record)
    found = stages.first(outcomes(record))
    assert found is not None
    assert (found.stage, found.cause) == (stage, cause), found
    assert what in found.what


def test_a_difference_in_some_rows_alone_is_found(made_record: Made) -> None:
    """Positive slopes of one member of every group: no choice of rows by a fixed step may miss it."""
    record = made_record()
    for t in record.updates[0].trained:
        if record.rows[t.row].member == 2:
            assert t.slopes is not None
            t.slopes = t.slopes * np.float32(1.7)
    found = stages.first(outcomes(record))
    assert found is not None and found.stage == "loss"


def test_gradients_that_are_kept_from_the_step_before() -> None:
    expected, before = np.random.default_rng(0).normal(size=(2, 64))
    before[:4] = np.nan
    observed = expected + 0.5 * np.nan_to_num(before, nan=1.0)
    found = explain(of_gradient(observed, [expected], before), observed, expected)
    assert found == ("update-differs-from-settings", "a gradient that contains that of the step before")


def test_advantages_of_components_that_are_normalised_one_by_one_are_not_examined(made_record: Made) -> None:
    record = made_record(components="normalize_then_sum", scale="group")
    assert stages.advantage(stages.Examined(record)).verdict == "not examined"


def test_rollouts_that_are_copies(made_record: Made) -> None:
    record = made_record(tokens=120)
    for rollout in record.rollouts:
        rollout.requests[0].token_ids = record.rollouts[0].requests[0].token_ids
        rollout.requests[0].logprobs = record.rollouts[0].requests[0].logprobs
    found = stages.draws(stages.Examined(record))
    assert found.cause == "groups-without-variety"


def test_rows_are_drawn_at_random_over_members(made_record: Made) -> None:
    x = stages.Examined(made_record(groups=16, members=4), rows=12)
    assert {x.record.rows[i].member for i in x.drawn} == {0, 1, 2, 3}
    other = stages.Examined(made_record(groups=16, members=4), rows=12, seed=1)
    assert x.drawn != other.drawn
    assert dataclasses.replace(x).drawn == x.drawn
