"""Rules of the watch about slopes of the loss, the reference policy, schedules and the optimizer."""

from __future__ import annotations

import dataclasses

import pytest
from plumbob.testing.recorded_runs import FIRST, config_of, rows_of, said
from plumbob.trainer.algorithm.learning_rate import learning_rate
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.watch.settings_rules import adapter_scale
from plumbob.trainer.watch.watch import Watch


def causes(rows: list[dict[str, float]], config: TrainConfig | None = None) -> set[str | None]:
    return {finding.cause for finding in said(Watch(config or config_of(FIRST)), rows)}


def test_a_loss_that_is_wrong_in_its_kl_term_alone_is_not_blamed_on_advantages():
    config = dataclasses.replace(config_of(FIRST), kl_beta=0.1)
    row = {"loss/misweighted": 0.03, "loss/without_policy_term": 0.0, "loss/other_kl_coefficient": 1.0}
    rows = [{**own, **row} for own in rows_of(FIRST)[:6]]
    assert {"kl-backwards"} <= causes(rows, config) and "loss-differs-from-settings" not in causes(rows, config)
    stronger = [{**own, "loss/stronger_kl_coefficient": 1.0} for own in rows]
    assert "kl-too-large" in causes(stronger, config) and "kl-backwards" not in causes(stronger, config)
    mixed = [{**own, "loss/other_kl_coefficient": 0.5} for own in rows]
    assert "loss-differs-from-settings" in causes(mixed, config)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"policy/kl": 0.01}, True),
        ({"policy/kl": -0.01}, True),
        ({"policy/kl": 0.0}, False),
        # Later updates of a step see a policy that has moved.
        ({"policy/kl": 0.01, "optimizer/updates": 4}, False),
        ({"policy/kl": 0.01, "step": 2}, False),
    ],
)
def test_a_policy_that_begins_away_from_its_reference_is_named(change, named):
    config = dataclasses.replace(config_of(FIRST), kl_beta=0.01)
    first, *rest = rows_of(FIRST)[:6]
    rows = [{**first, "optimizer/updates": 1, **change}, *({**row, "policy/kl": 0.02} for row in rest)]
    assert ("reference-is-another-policy" in causes(rows, config)) == named
    assert "reference-is-another-policy" not in causes(rows, dataclasses.replace(config, kl_beta=0.0))


@pytest.mark.parametrize(
    ("divergences", "named"),
    [
        # As a resumed run that takes its reference from its own weights.
        ([0.0, 5e-4, 2e-3, 1.7e-3, 0.0, 1e-5], True),
        ([0.0, 5e-4, 2e-3, 1.7e-3, 9e-4, 8e-4], False),
        ([0.0, 1e-6, 2e-5, 1e-5, 0.0, 1e-6], False),  # as little as rounding makes of a divergence of 0
    ],
)
def test_a_divergence_from_the_reference_that_vanishes_within_a_step_is_named(divergences, named):
    config = dataclasses.replace(config_of(FIRST), kl_beta=0.1)
    pairs = zip(rows_of(FIRST), divergences, strict=False)
    rows = [{**row, "optimizer/updates": 1, "policy/kl": kl} for row, kl in pairs]
    assert ("reference-is-another-policy" in causes(rows, config)) == named


def test_a_reference_that_changes_with_the_policy_is_named():
    config = dataclasses.replace(config_of(FIRST), kl_beta=0.1)
    rows = [{**row, "optimizer/updates": 1, "policy/kl": 0.0} for row in rows_of(FIRST)[:4]]
    moved = [{**row, "policy/step_kl": 1e-3} for row in rows]
    assert "reference-is-another-policy" in causes(moved, config)
    assert "reference-is-another-policy" not in causes([{**row, "policy/step_kl": 1e-7} for row in rows], config)
    apart = [{**row, "policy/kl": 1e-3 * k} for k, row in enumerate(moved)]
    assert "reference-is-another-policy" not in causes(apart, config)


@pytest.mark.parametrize(
    ("metrics", "cause"),
    [
        ({"loss/scaled": 1.0, "loss/scale_spread": 0.2}, "normaliser-depends-on-microbatches"),
        ({"loss/scaled": 1.0, "loss/scale_spread": 0.0}, "loss-differs-from-settings"),
        # With a row in each microbatch, it may as well be the rows' advantages.
        ({"loss/scaled": 1.0, "loss/scale_spread": 0.2, "train/microbatches": 32.0}, "loss-differs-from-settings"),
        ({"loss/unratioed": 1.0}, "ratio-to-reference"),
        ({"loss/negated": 1.0}, "gradient-backwards"),
    ],
)
def test_what_slopes_are_in_place_of_the_right_ones_names_the_cause(metrics, cause):
    own = {"loss/misweighted": 0.5, "train/rows": 32.0, "train/microbatches": 4.0}
    assert causes([{**row, **own, **metrics} for row in rows_of(FIRST)[:6]]) == {cause}


def test_an_update_as_large_as_the_first_one_tells_of_a_lost_state():
    """Sizes of updates, in learning rates, of a run whose optimizer began anew in its fourth step."""
    for sizes, named in (((0.94, 0.85, 0.69, 0.92, 0.88, 0.85), True), ((0.94, 0.85, 0.69, 0.74, 0.6, 0.62), False)):
        rows = rows_of(FIRST)[: len(sizes)]
        for row, size in zip(rows, sizes, strict=True):
            row |= {"optimizer/update_rms": size * row["optimizer/learning_rate"], "optimizer/updates": 1}
            row |= {"optimizer/grad_norm": 0.01}
        assert ("optimizer-state-lost" in causes(rows)) == named
        rows[3] |= {"optimizer/grad_norm": 0.05}  # a gradient that grows moves weights further
        assert "optimizer-state-lost" not in causes(rows)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_schedule_that_begins_anew_is_named(kind):
    config = dataclasses.replace(config_of(FIRST), lr_scheduler_type=kind, warmup_steps=2, max_steps=20)
    rates = [learning_rate(kind, config.learning_rate, step, warmup=2, total=20) for step in range(20)]
    for order, named in ((range(8), False), ((0, 1, 2, 3, 0, 1, 2, 3), True)):
        pairs = zip(rows_of(FIRST), order, strict=False)
        moved = [(row, rates[at]) for row, at in pairs]
        rows = [{**row, "optimizer/learning_rate": r, "optimizer/update_rms": 0.8 * r} for row, r in moved]
        assert ("schedule-hides-rate" in causes(rows, config)) == named


def test_a_held_out_task_that_is_trained_on_is_named():
    rows = rows_of(FIRST)[:6]
    assert "held-out-in-training" not in causes([{**row, "tasks/held_out": 0.0} for row in rows])
    rows[2] |= {"tasks/held_out": 0.25}
    assert "held-out-in-training" in causes(rows)


@pytest.mark.parametrize(("gap", "cause"), [(0.02, "weights-not-synced"), (3.0, "engine-trainer-mismatch")])
def test_a_gap_beyond_all_that_the_policy_has_changed_by_is_no_missing_sync(gap, cause):
    rows = rows_of(FIRST)[:8]
    for row in rows:
        row |= {"policy/step_kl": 1e-4}
    for row in rows[1:]:
        row |= {"sync/sampling_gap": gap, "sync/mismatch_kl": gap / 3, "sync/parity": gap}
    assert cause in causes(rows) and len({"weights-not-synced", "engine-trainer-mismatch"} & causes(rows)) == 1


@pytest.mark.parametrize(
    ("alpha", "rate", "named"), [(1, None, True), (1, 3e-3, True), (1, 0.2, False), (16, None, False)]
)
def test_an_adapter_of_a_small_scale_with_the_default_rate_is_named(alpha, rate, named):
    outcome = adapter_scale(TrainConfig(peft=True, lora_r=64, lora_alpha=alpha, learning_rate=rate))
    assert outcome and (outcome[0] == "learning-rate-too-low") == named
    assert adapter_scale(TrainConfig(lora_r=64, lora_alpha=alpha)) is None


@pytest.mark.parametrize(("size", "named"), [(0.07, True), (0.6, False)])
def test_a_first_update_that_is_far_smaller_than_adam_makes_it_is_named(size, named):
    rows = rows_of(FIRST)[:6]
    for row in rows:
        row |= {"optimizer/update_rms": size * row["optimizer/learning_rate"], "optimizer/moved_share": 0.96}
    assert ("optimizer-moves-nothing" in causes(rows)) == named


def test_a_gradient_that_explodes_is_not_blamed_on_advantages():
    """A loss far above its size in one step, and of its own size in the others."""
    rows = rows_of(FIRST)[:12]
    rows[9] |= {"optimizer/grad_norm": 500.0, "loss/misweighted": 1.0}
    assert causes(rows) == {"gradient-explodes"}
    rows[3] |= {"loss/misweighted": 1.0}
    assert "loss-differs-from-settings" in causes(rows)
