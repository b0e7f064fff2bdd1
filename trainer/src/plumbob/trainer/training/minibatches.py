"""A step's samples -> the rows of each optimizer step, with token weights; and what was computed of them, for the traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from plumbob.rollout import Sample
from plumbob.trainer.algorithm.advantages import Advantages
from plumbob.trainer.algorithm.losses import row_weights
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.distributed.world import World
from plumbob.trainer.policy.shared_beginnings import balanced_by_prompt
from plumbob.trainer.rollouts.batch import Batch
from plumbob.trainer.run_files.token_record import TokenRecord
from plumbob.trainer.training.recording import Recording
from plumbob.trainer.training.run import Run


@dataclass
class Minibatch:
    """The rows of one optimizer step, with what the loss needs of each. Lists are parallel to `rows`."""

    rows: list[Sample]
    advantages: list[float]
    weights: list[float]
    """Weight in the loss of each sampled token of a row: see `row_weights`."""
    trained: list[int]
    """Indices of the rows that add to the gradient."""
    mine: list[int]
    """Indices of the trained rows that this process computes; if no row is trained, of a few rows to measure on."""
    old_logprobs: dict[int, torch.Tensor] = field(default_factory=dict)
    """Index of a row -> log-probabilities [n] under the step's first weights; empty if a step has one update only."""
    reference_logprobs: dict[int, torch.Tensor] = field(default_factory=dict)
    """Index of a row -> log-probabilities [n] under the reference policy."""
    first_scores: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Index of a row -> its log-probabilities under the step's first weights and its entropies, [n] each, as its first
    training pass computed them, for the stored traces."""
    recording: Recording | None = None
    """What records the optimizer step that is under way; None in a step that is not recorded."""
    seen: bool = False
    """Whether this minibatch's rows have been computed once; `reference_logprobs` is complete then."""


def make_minibatches(
    samples: Sequence[Sample],
    advantages: Advantages,
    config: TrainConfig,
    world: World,
    *,
    count: int,
    recording: Recording | None = None,
) -> list[Minibatch]:
    """Divide whole groups, in order, among `count` minibatches, and each minibatch's rows among the processes.

    A row is trained if its advantage is not 0, or if the loss has terms that may not depend on the advantage: a KL term,
    or whatever a loss of the user's own has. A row that is masked out of the loss is not trained. Token weights are
    computed from totals over all rows of all processes, so they do not depend on how rows are divided.
    """
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
        every = config.kl_beta > 0 or config.loss is not None
        trained = [j for j, i in enumerate(members) if lengths[i] and (values[j] != 0.0 or every)]
        # If no row of the minibatch is trained, a few rows are scored nevertheless, to measure gap and entropy.
        scored = trained or [j for j, i in enumerate(members) if samples[i].num_sampled][: config.batch_size]
        shares = balanced_by_prompt([samples[members[j]] for j in scored], world.size)
        mine = [scored[j] for j in shares[world.rank]]
        rows = [samples[i] for i in members]
        result.append(Minibatch(rows, values, weights, trained, mine, recording=recording))
    return result


def token_records(
    run: Run,
    batch: Batch,
    advantages: Advantages,
    minibatches: Sequence[Minibatch],
    after: Mapping[str, torch.Tensor],
) -> dict[str, TokenRecord]:
    """On rank 0: id of a trace -> what the step computed for its tokens; empty on other ranks. Collective.

    `after`: log-probabilities [n] after the step's last update, by the id of the trace, as far as they were computed.
    """
    mine: dict[str, np.ndarray] = {}
    for minibatch in minibatches:
        mine |= _scores_by_trace(minibatch)
    gathered = run.world.gather_to_main(mine)
    if gathered is None:
        return {}
    scores = {name: values.tolist() for part in gathered for name, values in part.items()}
    environments = run.sampler.environments
    names = [tasks.name for tasks in environments] if len(environments) > 1 else [""]
    trained = {minibatch.rows[i].trace_id for minibatch in minibatches for i in minibatch.trained}
    masks = {row.trace_id: row.loss_mask for minibatch in minibatches for row in minibatch.rows}
    result = {}
    for sample, advantage in zip(batch.samples, advantages.values, strict=True):
        logprobs, entropies, reference = (*scores.get(sample.trace_id, ()), None, None, None)[:3]
        moved = after.get(sample.trace_id)
        result[sample.trace_id] = TokenRecord(
            advantage,
            sample.trace_id in trained,
            logprobs,
            entropies,
            reference,
            None if moved is None else moved.tolist(),
            names[batch.taken[int(sample.group.split("/")[1])].env],
            masks.get(sample.trace_id),
        )
    return result


def _scores_by_trace(minibatch: Minibatch) -> dict[str, np.ndarray]:
    """Id of a trace -> [2 or 3, n]: log-probabilities, entropies, and those under the reference policy if there is one.

    All rows come from the device at once, because each transfer waits for it.
    """
    rows = list(minibatch.first_scores)
    if not rows:
        return {}
    columns = [*zip(*minibatch.first_scores.values(), strict=True)]
    if minibatch.reference_logprobs:
        columns.append(tuple(minibatch.reference_logprobs[i] for i in rows))
    values = torch.stack([torch.cat(column).float() for column in columns]).cpu().numpy()
    ends = np.cumsum([len(logprobs) for logprobs in columns[0]])[:-1]
    return {minibatch.rows[i].trace_id: part for i, part in zip(rows, np.split(values, ends, axis=1), strict=True)}
