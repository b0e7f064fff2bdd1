"""What a step computed for each token, gathered for the stored traces. No forward pass is made for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from plumbob.trainer.algorithm.advantages import Advantages
from plumbob.trainer.rollouts.batch import Batch
from plumbob.trainer.run_files.token_record import TokenRecord
from plumbob.trainer.training.minibatches import Minibatch
from plumbob.trainer.training.run import Run


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
    if run.config.keep_traces == "none":
        return {}
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
