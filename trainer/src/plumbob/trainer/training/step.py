"""One GRPO step, from top to bottom: `train_step`.

Notation:
    P  tasks (prompts) of a step            --batch-size x --gradient-accumulation-steps x processes / --num-generations
    G  rollouts of one task: a group        --num-generations
    B  rollouts of a step, P x G            one training row each, before any is discarded
    T  tokens of one row                    prompt, completions and tool results; the loss is on sampled tokens alone
    N  sampled tokens of one microbatch     what the model computes at once
    V  vocabulary
A *minibatch* is the rows of one optimizer step. A *microbatch* is the rows of one forward and backward pass.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
from plumbob.doctor.record import RecordSink
from plumbob.rollout import Sample
from plumbob.trainer.algorithm.advantages import step_advantages
from plumbob.trainer.algorithm.learning_rate import learning_rate as learning_rate_of
from plumbob.trainer.inference.weight_sync import sync_weights
from plumbob.trainer.rollouts.batch import Batch, RunFailed
from plumbob.trainer.rollouts.collect import RolloutSource
from plumbob.trainer.rollouts.interruption import Interruption
from plumbob.trainer.training.capacity.out_of_memory import fit_microbatch_tokens, rest_engine, wake_engine
from plumbob.trainer.training.forward_backward import (
    MicrobatchLoss,
    accumulate,
    score_old_policy,
)
from plumbob.trainer.training.metrics import metrics_before_training, training_metrics
from plumbob.trainer.training.minibatches import Minibatch, make_minibatches, token_records
from plumbob.trainer.training.policy_shift import good_rollouts_shift, rows_to_score_again, step_kl
from plumbob.trainer.training.recording import Recording
from plumbob.trainer.training.run import MOST_SKIPPED, Run
from plumbob.trainer.training.tally import Tally, WeightSample


def train_step(
    run: Run,
    source: RolloutSource,
    interruption: Interruption,
    status: Callable[[str], None],
    sink: RecordSink | None = None,
) -> tuple[dict[str, float], Batch]:
    """Take training step number `run.state.step` (from 0); returns its metrics and its rollouts.

    `sink`: takes the record of the step if it wants it; nothing is recorded otherwise. Collective: every process takes
    the same step. Raises RunFailed, SyncError and Interrupted; the step then does not count as finished.
    """
    config, policy, state, world = run.config, run.policy, run.state, run.world
    step, clock = state.step, Stopwatch()
    recording = Recording(run, step) if sink is not None and sink.wants(step) else None

    # 1. Rollouts. The engine samples P x G rollouts with the weights of the last sync (with --max-staleness, perhaps of
    #    an earlier sync).
    status("rollouts")
    batch = source.take(step, state.cursor)
    state.cursor = batch.cursor
    clock.lap("rollout")
    # With --max-staleness only: samples the next rollouts while this step trains.
    source.begin(step + 1, state.cursor)

    # 2. Advantages [B]: each reward compared with its group's rewards. Every process has all samples, so every process
    #    computes the same advantages.
    if config.vllm_sleep or state.engine_rests:
        rest_engine(run)
    if not state.microbatch_tokens_fitted:
        status("measuring how many tokens of a microbatch fit into memory")
        fit_microbatch_tokens(run)
    advantages = step_advantages(batch.samples, config.advantages())

    # 3. Optimizer steps, each on one minibatch of whole groups. The loss is a plain sum over tokens, and token weights
    #    come from the whole minibatch, so the gradient does not depend on microbatches or on the number of processes.
    minibatches = make_minibatches(
        batch.samples, advantages, config, world, count=config.num_minibatches, recording=recording
    )
    if recording is not None:
        recording.begin(batch, advantages.values)
    num_trained = sum(len(minibatch.trained) for minibatch in minibatches)
    status(f"training on {num_trained} of {batch.num_rollouts} rollouts")
    if run.config.updates_per_step > 1:
        # The importance ratio compares the current weights with the step's first weights, so every minibatch is scored
        # before the first update. The first minibatch needs no extra pass: its training pass comes before any update.
        score_old_policy(run, minibatches[1:])
    set_learning_rate(run)
    weights_before = WeightSample.of(policy.sharding)
    measured: dict[str, float] = {}

    def meanwhile() -> None:
        """What Python can do while a GPU computes the first update's passes."""
        measured.update(metrics_before_training(run, batch, advantages))

    tallies = [
        # Once weights have moved, an interruption waits for the step's end: half a step could not be resumed.
        optimizer_step(run, minibatch, interruption if k == 0 else None, meanwhile=meanwhile if k == 0 else None)
        for k, minibatch in enumerate(minibatches * config.num_iterations)
    ]
    tallies.append(Tally.of_movement(weights_before, WeightSample.of(policy.sharding)))
    tally = Tally.total(world.gather(Tally.total(tallies)))
    rescored = rows_to_score_again(batch.samples, step, run.rollouts_per_step // world.size)
    after: dict[str, torch.Tensor] = {}
    moved = step_kl(policy, rescored, config.temperature, state.microbatch_tokens, after)
    good_moved = good_rollouts_shift(world, minibatches, after)
    batch.token_records = token_records(run, batch, advantages, minibatches, after)
    clock.lap("train")

    # 4. Weight sync. The engine gets the new weights and acknowledges them with its log-probabilities of fixed ids.
    if source.under_way:
        source.settle()
        clock.lap("rollout")
    wake_engine(run)
    report = None
    try:
        report = sync_weights(policy, run.engine, run.parity_row, under_way=source.under_way)
        clock.lap("sync")
    finally:  # what a sync that is refused leaves behind is worth a record
        if sink is not None and recording is not None:
            sink.keep(recording.finish(report, batch))

    metrics = {
        "step": step + 1,
        **measured,
        **training_metrics(run, tally, report),
        **({} if moved is None else {"policy/step_kl": moved}),
        **({} if good_moved is None else {"policy/good_rollouts_shift": good_moved}),
        "optimizer/learning_rate": run.optimizer.param_groups[0]["lr"],  # not what it should be: what it is
        "train/rows": num_trained,
        **clock.seconds,
        "time/sampling": batch.seconds,
        **tool_times(batch.drawn),
        "time/rollout_tokens_per_second": batch.generated_tokens / batch.seconds,
        "time/train_tokens_per_second": tally.row_tokens / clock.seconds["time/train"],
    }
    del minibatches, rescored, recording  # for the reason that `Batch.release` gives
    return metrics, batch


def tool_times(samples: Sequence[Sample]) -> dict[str, float]:
    """How long rollouts waited for their tools."""
    waited = sum(s.tool_seconds for s in samples)
    lasted = sum(s.seconds for s in samples)
    return {"time/tools": waited / max(len(samples), 1), "time/tools_share": waited / lasted if lasted else 0.0}


def optimizer_step(
    run: Run,
    minibatch: Minibatch,
    interruption: Interruption | None,
    loss: MicrobatchLoss | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> Tally:
    """Forward, backward and one update of the weights. An update whose gradient is not finite is skipped and counted.

    If no row of the minibatch is trained, nothing is updated, but a few rows are scored for metrics. Raises RunFailed
    if `MOST_SKIPPED` updates in a row were skipped. `meanwhile`: see `accumulate`.
    """
    state, sharding = run.state, run.policy.sharding
    if minibatch.recording is not None:
        minibatch.recording.update_begins(minibatch.rows)
    tally = accumulate(run, minibatch, interruption, loss, meanwhile)
    if minibatch.trained:
        if minibatch.recording is not None:
            minibatch.recording.gradients()
        norm = sharding.update()
        if minibatch.recording is not None:
            minibatch.recording.updated()
        finite = math.isfinite(norm)
        state.skipped_in_a_row = 0 if finite else state.skipped_in_a_row + 1
        if run.world.is_main:  # only rank 0 counts the update, because tallies are added up over the processes
            tally.updates, tally.skipped, tally.grad_norm = 1, int(not finite), norm if finite else 0.0
        if state.skipped_in_a_row >= MOST_SKIPPED:
            raise RunFailed(
                f"{state.skipped_in_a_row} optimizer steps in a row had a gradient that is not finite "
                f"({sharding.not_finite()}); none of them was applied",
                cause="not-finite",
            )
    sharding.zero_grad()
    return tally


def set_learning_rate(run: Run) -> float:
    """Set and return the learning rate of the step that is under way, which all its optimizer steps have."""
    config = run.config
    assert config.learning_rate is not None, "set_up fills in the default"
    rate = learning_rate_of(
        config.lr_scheduler_type,
        config.learning_rate,
        run.state.step,
        warmup=config.warmup_steps,
        total=config.max_steps,
    )
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    return rate


class Stopwatch:
    """Seconds of each phase of a step. Calling `lap` ends a phase and names it; one that comes twice is added up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now, key = time.perf_counter(), f"time/{phase}"
        self.seconds[key] = self.seconds.get(key, 0.0) + now - self._last
        self._last = now
