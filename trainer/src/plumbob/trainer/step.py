"""One training step, from top to bottom: `train_step`.

Roll out groups -> shape rewards -> advantages -> for each optimizer step: weigh tokens, forward and backward in packed
passes, sum over ranks, clip, update -> sync the engine, acknowledged -> metrics.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from plumbob.rollout import Sample
from plumbob.trainer.advantages import Advantages, compute_advantages, shape_rewards
from plumbob.trainer.corrections import importance_corrections
from plumbob.trainer.interruption import Interruption
from plumbob.trainer.kl import estimate_kl
from plumbob.trainer.losses import LossInputs, policy_loss, row_weights
from plumbob.trainer.memory import fit_pass_tokens, give_up_alone
from plumbob.trainer.metrics import (
    PassSums,
    Tally,
    advantage_metrics,
    batch_metrics,
    memory_metrics,
    scored_again,
    step_kl,
    sync_metrics,
    weight_sample,
)
from plumbob.trainer.packing import pack, to_device
from plumbob.trainer.ranks import share
from plumbob.trainer.rollouts import Batch, RolloutSource, RunFailed
from plumbob.trainer.setup import Run
from plumbob.trainer.sync import sync_weights

NO_ROW = Sample([0, 0], [False, True], [0.0, 0.0], 0.0, "", "", False)
"""What an empty pass computes."""


def train_step(
    run: Run, step: int, source: RolloutSource, interruption: Interruption, status: Callable[[str], None]
) -> tuple[dict[str, float], Batch]:
    """Step `step` (from 0). Raises RunFailed, SyncError and Interrupted; nothing of the step is kept then."""
    config, policy = run.config, run.policy

    # Rollouts, drawn by the engine with the weights of the last sync, or with --max-staleness of the one before.
    status("rollouts")
    start = time.perf_counter()
    batch = source.take(step)
    run.cursor = batch.cursor
    rollout_seconds = time.perf_counter() - start
    source.begin(step + 1, run.cursor)

    # Advantages, from everybody's rewards.
    start = time.perf_counter()
    if config.vllm_sleep:
        run.servers("sleep")
    if not run.pass_tokens_fitted:
        status("how many tokens of a pass fit into memory")
        fit_pass_tokens(run)
    samples = batch.samples
    kl_sums = _reference_kl(run, samples) if config.kl_beta and config.kl_placement == "reward" else None
    shaped = shape_rewards(
        samples,
        overlong=config.overlong,
        overlong_penalty=config.overlong_penalty,
        kl_beta=config.kl_beta,
        kl_sums=kl_sums,
    )
    advantages = compute_advantages(
        shaped,
        config.scale_rewards,
        epsilon=config.scale_epsilon,
        baseline=config.baseline,
        aggregation=config.multi_objective_aggregation,
    )

    # Optimizer steps: each sees a part of the groups, and its loss is one plain sum over tokens.
    minibatches = make_minibatches(run, samples, advantages)
    tally, rate = Tally(), run.scheduler.get_last_lr()[0]
    trained = sum(len(m.trained) for m in minibatches)
    status(f"training on {trained} of {batch.num_rollouts} rollouts")
    for minibatch in minibatches[1:] if run.updates_per_step > 1 else []:
        _score_old(run, minibatch)  # by then the weights will have moved on from those of the step's start
    weights = weight_sample(policy.sharding)
    for k, minibatch in enumerate(m for _ in range(config.num_iterations) for m in minibatches):
        # Once weights have moved, an interruption waits for the step's end: half a step could not be gone on with.
        _update(run, minibatch, tally, interruption if k == 0 else None)
    tally.add_movement(weights, weight_sample(policy.sharding))
    tally = Tally.total(run.ranks.gather(tally))
    watched = scored_again(samples, step, run.rollouts_per_step // run.ranks.size)
    moved = step_kl(policy, watched, config.temperature, run.pass_tokens)
    if config.ref_model_sync_steps and (step + 1) % config.ref_model_sync_steps == 0:
        policy.sync_reference(config.ref_model_mixup_alpha)
    train_seconds = time.perf_counter() - start

    # The engine gets the new weights, and shows that it serves them.
    start = time.perf_counter()
    if config.vllm_sleep:
        run.servers("wake_up")
    report = sync_weights(policy, run.engine, run.parity_row, under_way=source.under_way)
    sync_seconds = time.perf_counter() - start
    return {
        "step": step + 1,
        **batch_metrics(batch),
        **advantage_metrics(advantages),
        **tally.metrics(),
        **({} if kl_sums is None else {"policy/kl": sum(kl_sums) / max(sum(s.num_sampled for s in samples), 1)}),
        **({} if moved is None else {"policy/step_kl": moved}),
        **sync_metrics(report),
        **memory_metrics(run.ranks, run.peak_bytes),
        "optimizer/learning_rate": rate,
        "train/rows": trained,
        "train/pass_tokens": run.pass_tokens,
        "train/out_of_memory": run.out_of_memory,
        "time/rollout": rollout_seconds,
        "time/train": train_seconds,
        "time/sync": sync_seconds,
        "time/drawing": batch.seconds,
        "time/rollout_tokens_per_second": batch.generated_tokens / batch.seconds,
        "time/train_tokens_per_second": tally.row_tokens / train_seconds,
    }, batch


@dataclass
class Minibatch:
    """The rows of one optimizer step, with what the loss needs of each."""

    rows: list[Sample]
    advantages: list[float]
    weights: list[float]
    trained: list[int]
    """Indices of the rows that add to the gradient."""
    mine: list[int]
    """Those of them (or, without any, of a few watched rows) that this rank computes."""
    old: dict[int, torch.Tensor] = field(default_factory=dict)
    """Row -> log-probabilities [n] under the weights that the step started from, where these are not the current ones."""
    reference: dict[int, torch.Tensor] = field(default_factory=dict)
    seen: bool = False
    """All its passes have been taken once: `reference` is complete."""


def make_minibatches(run: Run, samples: Sequence[Sample], advantages: Advantages) -> list[Minibatch]:
    """Whole groups, in order, divided evenly; each token's weight comes from the totals that its loss type names."""
    config, count = run.config, run.config.num_minibatches
    masked = [config.overlong == "mask" and s.truncated for s in samples]
    lengths = [0 if m else s.num_sampled for s, m in zip(samples, masked, strict=True)]
    groups = list(dict.fromkeys(s.group for s in samples))
    result = []
    for k in range(count):
        names = set(groups[len(groups) * k // count : len(groups) * (k + 1) // count])
        members = [i for i, s in enumerate(samples) if s.group in names]
        weights = row_weights(
            config.loss_type,
            [lengths[i] for i in members],
            config.max_tokens,
            step_tokens=sum(lengths),
            num_minibatches=count,
        )
        values = [advantages.values[i] for i in members]
        # Without an advantage there is no gradient, unless the loss holds a KL term.
        trained = [j for j, i in enumerate(members) if lengths[i] and (values[j] != 0.0 or run.objective.kl_beta > 0)]
        # Without any signal there is nothing to train on; a few rows are scored all the same, to watch gap and entropy.
        scored = trained or [j for j, i in enumerate(members) if samples[i].num_sampled][: config.batch_size]
        shares = share([len(samples[members[j]].token_ids) for j in scored], run.ranks.size)
        mine = [scored[j] for j in shares[run.ranks.rank]]
        result.append(Minibatch([samples[i] for i in members], values, weights, trained, mine))
    return result


def _update(run: Run, minibatch: Minibatch, tally: Tally, interruption: Interruption | None) -> None:
    """One optimizer step. A gradient that is not finite is skipped. Raises RunFailed after too many in a row."""
    sharding = run.policy.sharding
    added = accumulate(run, minibatch, interruption)
    if minibatch.trained:
        norm = sharding.update()
        added.updates += run.ranks.is_main
        if math.isfinite(norm):
            run.skipped_in_a_row = 0
            added.grad_norm += norm * run.ranks.is_main
        else:
            run.skipped_in_a_row += 1
            added.skipped += run.ranks.is_main
        if run.skipped_in_a_row >= run.config.max_skipped_steps:
            raise RunFailed(
                f"{run.skipped_in_a_row} optimizer steps in a row had a gradient that is not finite ({sharding.not_finite()}); "
                "none of them was applied"
            )
    sharding.zero_grad()
    with warnings.catch_warnings():
        # That an update was skipped: it counts in the schedule all the same.
        warnings.simplefilter("ignore", UserWarning)
        run.scheduler.step()
    tally.add(added)


def accumulate(run: Run, minibatch: Minibatch, interruption: Interruption | None) -> Tally:
    """Forward and backward over this rank's rows: the gradient of a sum is the same however the sum is cut.

    If a pass runs out of memory, half of its gradient may have been added already: all begin again, with half the
    tokens in a pass, which holds for the rest of the run. Raises RunFailed if a row alone does not fit.
    """
    sharding = run.policy.sharding
    while True:
        sharding.zero_grad()
        sums: list[PassSums] = []
        failed = ""
        passes = _passes(run, minibatch)
        with torch.set_grad_enabled(bool(minibatch.trained)):
            try:
                for k, rows in enumerate(passes):
                    if interruption is not None:
                        interruption.check()
                    last = k == len(passes) - 1
                    if rows:
                        sums.append(_backward(run, minibatch, rows, last=last))
                    else:
                        _empty_pass(run, minibatch, last=last)
            except torch.OutOfMemoryError as error:
                failed = str(error).splitlines()[0]
                if sharding.lockstep:
                    give_up_alone(run, run.pass_tokens, failed)
        minibatch.seen = True
        if not run.ranks.any(bool(failed)):
            return Tally.of(sums)  # read at the end: each reading waits for the device
        longest = max(len(row.token_ids) for row in minibatch.rows)
        if run.pass_tokens < longest:
            raise RunFailed(
                f"a single rollout of up to {longest} tokens does not fit into memory; use --gradient-checkpointing, "
                f"--peft or a smaller --max-context than {run.config.max_context}. {failed}"
            )
        largest = max((sum(len(minibatch.rows[i].token_ids) for i in rows) for rows in passes), default=0)
        run.pass_tokens = min(run.pass_tokens, max(run.ranks.gather(largest))) // 2
        run.out_of_memory += 1
        if run.ranks.device.type == "cuda":
            torch.cuda.empty_cache()


def _passes(run: Run, minibatch: Minibatch) -> list[list[int]]:
    """This rank's rows, pass by pass. In lockstep, empty passes follow until every rank has as many."""
    lengths = [len(minibatch.rows[i].token_ids) for i in minibatch.mine]
    cut = pack(lengths, run.pass_tokens)
    return _padded(run, [[minibatch.mine[j] for j in rows] for rows in cut])


def _padded(run: Run, passes: list[list[int]]) -> list[list[int]]:
    most = max(run.ranks.gather(len(passes))) if run.policy.sharding.lockstep else 0
    return passes + [[] for _ in range(most - len(passes))]


def _empty_pass(run: Run, minibatch: Minibatch, *, last: bool) -> None:
    """What other ranks' passes wait for, with a gradient of zero."""
    if run.objective.kl_beta > 0 and not minibatch.seen:
        run.policy.reference_logprobs([NO_ROW], 1.0)
    logprobs = run.policy.score([NO_ROW], 1.0).logprobs
    if logprobs.requires_grad:
        run.policy.sharding.backward((logprobs * 0).sum(), last=last)


def _backward(run: Run, minibatch: Minibatch, indices: Sequence[int], *, last: bool) -> PassSums:
    """Add one pass's gradient; nothing but the measurements where gradients are off."""
    config, policy = run.config, run.policy
    rows = [minibatch.rows[i] for i in indices]
    device = policy.device
    lengths = torch.tensor([row.num_sampled for row in rows])
    of_row = torch.arange(len(rows)).repeat_interleave(lengths)
    row_of = to_device(of_row, device)

    def per_token(values: Sequence[float]) -> torch.Tensor:
        return to_device(torch.tensor([values[i] for i in indices])[of_row], device)

    reference = None
    if run.objective.kl_beta > 0:
        if any(i not in minibatch.reference for i in indices):
            logprobs = policy.reference_logprobs(rows, config.temperature)
            minibatch.reference.update(_by_row(indices, logprobs, lengths))
        reference = torch.cat([minibatch.reference[i] for i in indices])
    scores = policy.score(rows, config.temperature)
    current = scores.logprobs.detach()
    # Of any row, not of the first: after running out of memory, rows that had their turn share passes with others.
    if run.updates_per_step > 1 and any(i not in minibatch.old for i in indices):
        minibatch.old.update(_by_row(indices, current, lengths))
    old = torch.cat([minibatch.old[i] for i in indices]) if minibatch.old else current
    drawn = [lp for row in rows for lp, m in zip(row.sampling_logprobs, row.loss_mask, strict=True) if m]
    sampled = to_device(torch.tensor(drawn), device)
    # From the engine's distribution to the trainer's at the step's start; the ratio leads on from there to the current one.
    corrections = importance_corrections(old, sampled, row_of, *config.correction())
    outputs = policy_loss(
        LossInputs(
            logprobs=scores.logprobs,
            old_logprobs=old,
            advantages=per_token(minibatch.advantages),
            weights=per_token(minibatch.weights),
            rows=row_of,
            corrections=corrections.weights,
            ref_logprobs=reference,
        ),
        run.objective,
    )
    if outputs.loss.requires_grad:
        policy.sharding.backward(outputs.loss, last=last)
    return PassSums.of(rows, scores, old, sampled, corrections, outputs)


@torch.no_grad()
def _score_old(run: Run, minibatch: Minibatch) -> None:
    for indices in _passes(run, minibatch):
        rows = [minibatch.rows[i] for i in indices] or [NO_ROW]
        lengths = torch.tensor([row.num_sampled for row in rows])
        minibatch.old.update(_by_row(indices, run.policy.score(rows, run.config.temperature).logprobs, lengths))


@torch.no_grad()
def _reference_kl(run: Run, samples: Sequence[Sample]) -> list[float]:
    """Each row's KL estimate to the reference, summed over its sampled tokens, in nats."""
    mine = share([len(s.token_ids) for s in samples], run.ranks.size)[run.ranks.rank]
    sums: dict[int, float] = {}
    lengths = [len(samples[i].token_ids) for i in mine]
    for part in _padded(run, pack(lengths, run.pass_tokens)):
        indices = [mine[j] for j in part]
        rows = [samples[i] for i in indices] or [NO_ROW]
        logprobs = run.policy.score(rows, run.config.temperature).logprobs
        reference = run.policy.reference_logprobs(rows, run.config.temperature)
        kl = estimate_kl(logprobs, reference, run.objective.kl_estimator)
        by_row = _by_row(indices, kl, torch.tensor([row.num_sampled for row in rows]))
        sums.update({i: values.sum().item() for i, values in by_row.items()})
    everywhere: dict[int, float] = {}
    for part in run.ranks.gather(sums):
        everywhere.update(part)
    return [everywhere[i] for i in range(len(samples))]


def _by_row(indices: Sequence[int], values: torch.Tensor, lengths: torch.Tensor) -> dict[int, torch.Tensor]:
    """Of an empty pass nothing is kept."""
    return dict(zip(indices, values.split(lengths.tolist()), strict=bool(indices)))
