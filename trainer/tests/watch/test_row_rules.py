"""Rules of the watch about rows, gradients, rates and evaluations, on a recorded healthy run with one metric changed."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plumbob.testing.recorded_runs import FIRST, config_of, rows_of, said
from plumbob.trainer.algorithm.learning_rate import learning_rate
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.watch.update_rules import left_by_decay
from plumbob.trainer.watch.watch import Watch

Row = dict[str, float]


def causes(rows: list[Row], config: TrainConfig | None = None) -> set[str | None]:
    return {finding.cause for finding in said(Watch(config or config_of(FIRST)), rows)}


COMPARED = (
    "rollout/unmatched",
    "rollout/changed",
    "rollout/copied",
    "rollout/other_logprobs",
    "rollout/sampled_untrained",
    "rollout/context_trained",
    "rollout/tools_unshown",
    "rollout/prompts_cut",
    "rollout/headless",
    "groups/mixed",
    "reward/misplaced",
    "advantage/wrong",
    "loss/other_weights",
    "rollout/run_on",
    "rollout/unlikely_ends",
    "loss/misweighted",
    "optimizer/strayed_share",
    "optimizer/still_tensors",
)


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        ({}, None),
        ({"rollout/unmatched": 1.0}, "rollouts-repeated"),
        ({"rollout/changed": 0.1}, "row-not-what-was-sampled"),
        ({"rollout/other_logprobs": 0.1}, "row-not-what-was-sampled"),
        ({"rollout/copied": 0.1}, "rollouts-repeated"),
        ({"rollout/copied": 0.9}, "groups-without-variety"),
        ({"rollout/sampled_untrained": 0.06}, "sampled-tokens-masked"),
        ({"rollout/context_trained": 0.5}, "context-tokens-trained"),
        ({"rollout/sampled_untrained": 0.2, "rollout/context_trained": 0.2}, "loss-mask-shifted"),
        ({"rollout/sampled_untrained": 1.0, "rollout/context_trained": 0.8}, "context-tokens-trained"),
        ({"rollout/tools_unshown": 0.25}, "tools-not-in-prompt"),
        ({"rollout/prompts_cut": 0.25, "rollout/tools_unshown": 0.25}, "truncated-context"),
        ({"rollout/headless": 0.25}, "assistant-header-missing"),
        ({"groups/mixed": 0.5}, "groups-mixed"),
        ({"reward/misplaced": 0.5}, "rewards-of-other-rollouts"),
        ({"advantage/wrong": 0.5}, "advantages-wrong"),
        ({"loss/other_weights": 0.5}, "loss-differs-from-settings"),
        ({"rollout/run_on": 0.5}, "stop-token-wrong"),
        ({"rollout/unlikely_ends": 0.5}, "stop-token-wrong"),
        ({"loss/misweighted": 0.5}, "loss-differs-from-settings"),
        ({"loss/misweighted": 1.0, "loss/negated": 1.0}, "gradient-backwards"),
        ({"loss/misweighted": 1.0, "loss/without_policy_term": 1.0, "optimizer/grad_norm": 0.0}, "no-gradient"),
        (
            {"loss/misweighted": 0.5, "loss/without_policy_term": 1.0},
            "loss-differs-from-settings",
        ),  # of one sign, for example
        ({"loss/misweighted": 0.5, "loss/unpulled_parts": 1.0}, "loss-differs-from-settings"),
        ({"loss/misweighted": 0.5, "loss/unpulled_parts": 0.5}, "loss-differs-from-settings"),
        ({"loss/misweighted": 0.5, "policy/clip_fraction": 0.1}, "loss-differs-from-settings"),
        ({"optimizer/strayed_share": 0.5}, "weights-lost"),
    ],
)
def test_what_is_compared_exactly_is_named_in_its_first_step(values, cause):
    rows = [{**row, **dict.fromkeys(COMPARED, 0.0)} for row in rows_of(FIRST)]
    rows[7] |= values
    assert causes(rows[:7]) == set()
    assert causes(rows[:8]) == causes(rows) == ({cause} if cause else set())


@pytest.mark.parametrize(
    ("share", "cause"), [(0.0, None), (0.1, None), (0.5, "does-not-overfit"), (1.0, "gradient-backwards")]
)
def test_a_first_update_against_its_gradient_is_named_at_once(share, cause):
    rows = [dict(row) for row in rows_of(FIRST)]
    rows[0]["optimizer/uphill_share"] = share
    assert causes(rows[:1]) == causes(rows) == ({cause} if cause else set())


def test_gradients_that_are_never_cleared_rise_from_step_to_step():
    rows = rows_of(FIRST)
    total = 0.0
    for row in rows:
        total += row["optimizer/grad_norm"]
        row["optimizer/grad_norm"] = total
    assert causes(rows) == {"gradients-not-cleared"}


@pytest.mark.parametrize(("cut", "cause"), [(0.0, "tools-never-used"), (1.0, "truncated-context")])
def test_rollouts_that_a_limit_ends_before_their_first_call_show_nothing_of_tools(cut, cause):
    rows = rows_of(FIRST)
    for row in rows:
        row |= {"reward/mean": 0.0, "rollout/tools": 2.0, "rollout/tool_calls": 0.0}
        row |= {"rollout/truncated_share": cut, "rollout/stopped/max_total_tokens": cut}
    found = causes(rows)
    assert cause in found and len({"tools-never-used", "truncated-context"} & found) == 1


@pytest.mark.parametrize(("change", "low"), [(1.4e-8, True), (3.7e-8, True), (1e-6, False)])
def test_a_policy_that_a_hundred_steps_cannot_move_has_too_low_a_rate(change, low):
    """As LoRA at 1e-6 on synthetic GSM8K and MuSiQue, and as all weights at 1e-6, which would move in a hundred steps."""
    rows = rows_of(FIRST)
    for row in rows:
        row |= {"policy/step_kl": change, "sync/mismatch_kl": 0.0, "optimizer/relative_update": 1.4e-6}
        row |= {"optimizer/moved_share": 1.0, "optimizer/update_rms": 2e-4, "optimizer/grad_norm": 0.01}
    assert ("learning-rate-too-low" in causes(rows)) == low


@pytest.mark.parametrize(("calls", "cause"), [(1.4, "tools-fail"), (0.4, "tools-fail"), (0.05, "tools-abandoned")])
def test_a_tool_that_breaks_is_blamed_for_fewer_calls_but_not_for_the_last_ones(calls, cause):
    """A policy whose calls fail calls less; the last calls of one that gave them up are its own mistakes."""
    rows = rows_of(FIRST)
    for step, row in enumerate(rows):
        row |= {"reward/mean": 0.3, "rollout/tools": 1.0}
        row["rollout/tool_calls"] = calls if step > 5 else 1.4
        row["rollout/tool_errors"] = calls if step > 5 else 0.0
    assert causes(rows) & {"tools-fail", "tools-abandoned"} == {cause}


def test_gradients_of_a_policy_that_breaks_are_no_sum():
    """The norms of a run on MuSiQue whose adapter never reached the engine."""
    rows = rows_of(FIRST)[:10]
    norms = [0.0072, 0.0137, 0.0262, 0.0733, 0.1971, 0.1978, 0.2327, 0.5676, 0.3834, 0.4675]
    for row, norm in zip(rows, norms, strict=True):
        row["optimizer/grad_norm"] = norm
    assert "gradients-not-cleared" not in causes(rows)


def test_gradients_that_grow_with_the_signal_are_no_sum():
    """A reward that is rare at first: with every group that has a signal, the gradient is longer."""
    rows = rows_of(FIRST)[:15]
    for step, row in enumerate(rows):
        row |= {"optimizer/grad_norm": 0.12 + 0.03 * step, "advantage/mean_abs": 0.03 + 0.01 * step}
    assert "gradients-not-cleared" not in causes(rows)
    for row in rows:
        row |= {"advantage/mean_abs": 0.1}
    assert "gradients-not-cleared" in causes(rows)


@pytest.mark.parametrize("kind", ["linear", "constant"])
def test_the_size_of_a_step_is_not_judged_while_the_rate_rises(kind):
    config = dataclasses.replace(config_of(FIRST), lr_scheduler_type=kind, warmup_steps=50, max_steps=200)
    rows = rows_of(FIRST)
    for row in rows:
        rate = learning_rate(kind, config.learning_rate, int(row["step"]) - 1, warmup=50, total=200)
        row |= {"policy/step_kl": 2e-8, "sync/mismatch_kl": 0.0, "optimizer/relative_update": 1e-6}
        row |= {"optimizer/moved_share": 1.0, "optimizer/update_rms": rate, "optimizer/learning_rate": rate}
    assert "learning-rate-too-low" not in causes(rows, config)


@given(st.integers(0, 2000))
def test_gradient_norms_in_any_order_are_no_sum(seed):
    rows = rows_of(FIRST)
    norms = [row["optimizer/grad_norm"] for row in rows]
    random.Random(seed).shuffle(norms)
    for row, norm in zip(rows, norms, strict=True):
        row["optimizer/grad_norm"] = norm
    assert "gradients-not-cleared" not in causes(rows)


def test_a_rate_that_jumps_above_every_setting_is_named_and_a_resumed_run_with_a_lower_one_is_not():
    rows = rows_of(FIRST)
    config = config_of(FIRST)
    for row in rows[8:]:
        row["optimizer/learning_rate"] *= 30
    assert "schedule-hides-rate" in causes(rows, config)
    assert config.learning_rate is not None
    lower = dataclasses.replace(config, learning_rate=config.learning_rate / 30)
    resumed = rows_of(FIRST)
    for row in resumed[8:]:
        row["optimizer/learning_rate"] /= 30
    assert "schedule-hides-rate" not in causes(resumed, lower)


@pytest.mark.parametrize(("finished", "rate", "named"), [(True, 1.0, True), (True, 0.2, False), (False, 1.0, False)])
def test_a_rate_that_stays_at_its_peak_is_named_at_the_end_of_a_run(finished, rate, named):
    rows = [dict(row) for row in rows_of(FIRST)[:10]]
    config = dataclasses.replace(config_of(FIRST), lr_scheduler_type="cosine", warmup_steps=0, max_steps=10)
    assert config.learning_rate is not None
    for step, row in enumerate(rows):
        falling = 0.5 * (1 + math.cos(math.pi * step / 10))
        row["optimizer/learning_rate"] = config.learning_rate * (1 if rate == 1 else falling)
    assert ("schedule-hides-rate" in causes(rows if finished else rows[:8], config)) == named


@pytest.mark.parametrize(("times", "cause"), [(1, None), (4, "schedule-hides-rate")])
def test_a_schedule_of_more_steps_than_the_run_is_named(times, cause):
    rows = rows_of(FIRST)[:6]
    config = dataclasses.replace(config_of(FIRST), lr_scheduler_type="linear", warmup_steps=0, max_steps=6)
    assert config.learning_rate is not None
    for step, row in enumerate(rows):
        row["optimizer/learning_rate"] = config.learning_rate * (1 - step / (6 * times))
    assert ("schedule-hides-rate" in causes(rows, config)) == (cause is not None)


def test_slopes_that_are_no_numbers_are_not_blamed_on_advantages():
    rows = [{**row, **dict.fromkeys(COMPARED, 0.0)} for row in rows_of(FIRST)]
    for skipped, named in (({7}, set()), ({7, 8}, {"gradient-not-finite"})):
        wrong = {"loss/misweighted": 0.5, "optimizer/skipped": 1.0}
        assert causes([{**row, **wrong} if i in skipped else row for i, row in enumerate(rows)]) == named


def test_a_ratio_that_is_clipped_in_the_only_update_is_that_of_another_policy():
    rows = rows_of(FIRST)
    for step, row in enumerate(rows):
        row["policy/clip_fraction"] = 0.002 * step
    assert causes(rows) == {"loss-differs-from-settings"}
    twice = dataclasses.replace(config_of(FIRST), num_iterations=2)
    assert "loss-differs-from-settings" not in causes(rows, twice)


@pytest.mark.parametrize(("size", "lost"), [(0.93, True), (0.65, True), (0.3, False)])
def test_an_optimizer_without_memory_moves_all_weights_by_the_learning_rate(size, lost):
    rows = rows_of(FIRST)
    for row in rows:
        row["optimizer/update_rms"] = size * row["optimizer/learning_rate"]
    assert ("optimizer-state-lost" in causes(rows)) == lost


def test_the_memory_of_adam_shows_in_the_size_of_its_updates():
    """Golden numbers of the optimizer itself, on gradients that differ from step to step."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.zeros(1000, requires_grad=True)
    for forgetful in (False, True):
        optimizer, sizes = torch.optim.AdamW([weight], lr=1.0, weight_decay=0.0), []
        for _ in range(12):
            weight.grad = torch.randn(1000, generator=generator)
            if forgetful:
                optimizer.state.clear()
            before = weight.detach().clone()
            optimizer.step()
            sizes.append((weight.detach() - before).square().mean().sqrt().item())
        assert (min(sizes[-5:]) > thresholds.FIRST_UPDATES * max(sizes[:5])) == forgetful


@given(st.sampled_from(["linear", "cosine", "constant"]), st.floats(0.0, 50.0), st.integers(0, 5), st.integers(1, 2))
def test_what_decay_leaves_is_what_adamw_leaves_of_a_weight_without_a_gradient(kind, decay, warmup, iterations):
    settings = {"lr_scheduler_type": kind, "weight_decay": decay, "warmup_steps": warmup, "num_iterations": iterations}
    config = dataclasses.replace(config_of(FIRST), learning_rate=1e-2, max_steps=12, num_minibatches=1, **settings)
    weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.AdamW([weight], lr=0.0, weight_decay=decay)
    for step in range(config.max_steps):
        rate = learning_rate(config.lr_scheduler_type, 1e-2, step, warmup=warmup, total=config.max_steps)
        optimizer.param_groups[0]["lr"] = rate
        for _ in range(iterations):
            optimizer.step()
    assert left_by_decay(config) == pytest.approx(weight.item(), rel=1e-9, abs=1e-12)
    named = "weight-decay-too-high" in causes(rows_of(FIRST)[:1], config)
    assert named == (weight.item() < thresholds.DECAYED)  # the run has fewer than a hundred updates


@pytest.mark.parametrize(("decay", "steps", "named"), [(0.1, 4000, False), (0.1, 40_000, True), (5.0, 4000, True)])
def test_decay_that_thousands_of_updates_make_up_for_is_healthy(decay, steps, named):
    settings = {"lr_scheduler_type": "constant", "learning_rate": 3e-4, "weight_decay": decay, "max_steps": steps}
    config = dataclasses.replace(config_of(FIRST), **settings)
    assert ("weight-decay-too-high" in causes(rows_of(FIRST)[:1], config)) == named


@pytest.mark.parametrize(
    ("gap", "parity", "cause"),
    [
        (3e-3, 2e-7, "engine-trainer-mismatch"),
        (3e-3, 3e-2, "weights-not-synced"),
        (4.8e-5, 4.8e-5, "weights-not-synced"),  # both grow alike
    ],
)
def test_a_gap_with_weights_that_arrive_is_no_missing_sync(gap, parity, cause):
    rows = rows_of(FIRST)
    for row in rows[5:]:
        row |= {"sync/sampling_gap": gap, "sync/mismatch_kl": gap / 3, "sync/parity": parity}
    assert causes(rows) == {cause}


@pytest.mark.parametrize("cut", [(1.0, 0.0), (0.0, 0.9)])
def test_held_out_rollouts_with_other_limits_are_named_unless_their_data_are_others(cut):
    rows = rows_of(FIRST)
    rows[3] |= {"eval/cut_off": cut[0], "rollout/truncated_share": cut[1]}
    config = dataclasses.replace(config_of(FIRST), eval_examples=32)
    assert "evaluation-prompted-differently" in causes(rows, config)
    for settings in ({"eval_datasets": "other"}, {"task_order": "curriculum"}):
        assert "evaluation-prompted-differently" not in causes(rows, dataclasses.replace(config, **settings))


def test_two_tasks_that_are_cut_off_by_chance_show_no_other_limits():
    rows = rows_of(FIRST)
    rows[3] |= {"eval/cut_off": 0.4, "rollout/truncated_share": 1.0, "groups/count": 2.0}
    assert "evaluation-prompted-differently" not in causes(
        rows, dataclasses.replace(config_of(FIRST), eval_examples=32)
    )


@pytest.mark.parametrize(("still", "named"), [([0.5] * 5, True), ([0.5] * 4 + [0.0], False), ([0.1] * 5, False)])
def test_tensors_that_stand_still_in_five_steps_are_named(still, named):
    rows = rows_of(FIRST)[:8]
    rows = [*rows[:3], *({**row, "optimizer/still_tensors": s} for row, s in zip(rows[3:], still, strict=True))]
    assert causes(rows) == ({"optimizer-moves-nothing"} if named else set())
    # Tensors without a gradient stand still whatever the optimizer does, or move with weight decay alone.
    without = [{**row, "optimizer/no_gradient_share": row.get("optimizer/still_tensors", 0.0)} for row in rows]
    assert causes(without) == ({"no-gradient"} if named else set())


def test_weights_that_change_while_a_gradient_is_computed_are_named_before_the_gap_that_follows():
    def judged(early: float) -> list[str | None]:
        watch = Watch(config_of(FIRST))
        for row in rows_of(FIRST)[:6]:
            watch.update({**row, "optimizer/early_share": early, "sync/sampling_gap": 0.003 if early else 0.0})
        return [f.cause for f in watch.findings() if f.cause]

    assert judged(0.0) == []
    assert judged(0.9)[:2] == ["normaliser-depends-on-microbatches", "engine-trainer-mismatch"]
