"""The gradient of one minibatch: forward and backward passes over its microbatches, and their metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from plumbob.trainer.algorithm.importance_weights import importance_corrections
from plumbob.trainer.algorithm.losses import LossInputs, policy_loss
from plumbob.trainer.policy.packing import to_device
from plumbob.trainer.policy.policy import NO_ROW
from plumbob.trainer.rollouts.batch import RunFailed
from plumbob.trainer.rollouts.interruption import Interruption
from plumbob.trainer.run_files import start
from plumbob.trainer.training.capacity.out_of_memory import exit_out_of_memory, explanation, give_back, resume_with
from plumbob.trainer.training.minibatches import Minibatch
from plumbob.trainer.training.run import Run
from plumbob.trainer.training.tally import MicrobatchSums, Tally, grpo_sums, sums_of

MicrobatchLoss = Callable[[Run, Minibatch, Sequence[int]], tuple[torch.Tensor, MicrobatchSums]]
"""(run, minibatch, indices of a microbatch's rows) -> (the microbatch's loss, what it adds to the step's measurements)."""


def accumulate(
    run: Run,
    minibatch: Minibatch,
    interruption: Interruption | None,
    loss: MicrobatchLoss | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> Tally:
    """Compute the gradient of this process's rows of the minibatch, and leave it in the trained weights.

    Returns what was measured. `loss`: `grpo_loss` by default. A loss is a plain sum over tokens, so its gradient is the
    same however the rows are divided into microbatches. If a microbatch runs out of memory, some of its gradient may
    have been added already, so the whole minibatch begins again with half as many tokens in a microbatch; the lower
    limit holds for the rest of the run. If a single row does not fit, the engine gives back what it can, and the row is tried
    again. `interruption`: None once the step has changed weights. `meanwhile` is called once, when all passes are queued: a
    GPU still computes then. Raises RunFailed if a single row does not fit beside such an engine.
    """
    policy, state = run.policy, run.state
    start.wait_for_compiled(lambda: interruption is not None and interruption.requested)
    while True:
        policy.sharding.zero_grad()
        sums: list[MicrobatchSums] = []
        failed = ""
        if minibatch.recording is not None:
            minibatch.recording.passes_begin()
        microbatches = _microbatches(run, minibatch)
        with torch.set_grad_enabled(bool(minibatch.trained)):
            try:
                for k, indices in enumerate(microbatches):
                    if interruption is not None:
                        interruption.check()
                    last = k == len(microbatches) - 1
                    if indices:
                        value, measured = (loss or grpo_loss)(run, minibatch, indices)
                        if value.requires_grad:
                            policy.sharding.backward(value, last=last)
                        sums.append(measured)
                        del value  # it holds the microbatch's graph, which must not stay through the next forward pass
                    else:
                        _empty_microbatch(run, minibatch, last=last)
            except torch.OutOfMemoryError as error:
                failed, value = str(error).splitlines()[0], None  # the graph must not stay while the engine makes room
                if policy.sharding.collective_forward:
                    exit_out_of_memory(run, state.microbatch_tokens, failed)
        minibatch.seen = True
        if not run.world.any(bool(failed)):
            if meanwhile is not None:
                meanwhile()
            return Tally.of(sums)  # sums are read only now, because reading waits for the device
        _make_room(run, minibatch, microbatches, failed, unmoved=interruption is not None)


def _make_room(run: Run, minibatch: Minibatch, microbatches: list[list[int]], failed: str, *, unmoved: bool) -> None:
    """Halve the limit of tokens on every process; if it is below the longest row already, let the engine give memory back.

    Raises RunFailed if the engine has done so already, or has none to give. `unmoved`: whether the step has not changed
    weights yet.
    """
    longest = max(len(row.token_ids) for row in minibatch.rows)
    if run.state.microbatch_tokens >= longest:
        largest = max((sum(len(minibatch.rows[i].token_ids) for i in rows) for rows in microbatches), default=0)
        run.state.microbatch_tokens = min(run.state.microbatch_tokens, max(run.world.gather(largest))) // 2
    elif not give_back(run):
        raise RunFailed(
            f"training on a single rollout of up to {longest} tokens runs out of memory{explanation(run, longest)}. "
            f"{failed}",
            unmoved=unmoved,
            resume_with=resume_with(run, longest),
        )
    run.state.out_of_memory += 1
    if run.world.device.type == "cuda":
        torch.cuda.empty_cache()


def _microbatches(run: Run, minibatch: Minibatch) -> list[list[int]]:
    """This process's rows of the minibatch, microbatch by microbatch."""
    packed = run.policy.microbatches([minibatch.rows[i] for i in minibatch.mine], run.state.microbatch_tokens)
    return [[minibatch.mine[j] for j in indices] for indices in packed]


def _empty_microbatch(run: Run, minibatch: Minibatch, *, last: bool) -> None:
    """Take part in the other processes' microbatch with a gradient of zero, because its passes are collectives."""
    if run.objective.kl_beta > 0 and not minibatch.seen:
        run.policy.reference_logprobs([NO_ROW], 1.0)
    logprobs = run.policy.score([NO_ROW], 1.0).logprobs
    if logprobs.requires_grad:
        run.policy.sharding.backward((logprobs * 0).sum(), last=last)


def grpo_loss(run: Run, minibatch: Minibatch, indices: Sequence[int]) -> tuple[torch.Tensor, MicrobatchSums]:
    """The policy loss of one microbatch of N sampled tokens, and what it adds to the step's measurements."""
    config, policy = run.config, run.policy
    device = policy.device
    rows = [minibatch.rows[i] for i in indices]
    lengths = torch.tensor([row.num_sampled for row in rows])
    row_of_token = torch.arange(len(rows)).repeat_interleave(lengths)  # [N]
    rows_N = to_device(row_of_token, device)

    def per_token(values: Sequence[float]) -> torch.Tensor:
        """One value per row of the minibatch -> [N], each row's value at every token of it."""
        return to_device(torch.tensor([values[i] for i in indices])[row_of_token], device)

    reference_N = None
    if run.objective.kl_beta > 0:
        if any(i not in minibatch.reference_logprobs for i in indices):
            logprobs = policy.reference_logprobs(rows, config.temperature)
            minibatch.reference_logprobs.update(_by_row(indices, logprobs, lengths))
        reference_N = torch.cat([minibatch.reference_logprobs[i] for i in indices])
    scores = policy.score(rows, config.temperature)
    current_N = scores.logprobs.detach()
    # Check every row: an out-of-memory retry can mix rows that were scored with rows that were not.
    if run.config.updates_per_step > 1 and any(i not in minibatch.old_logprobs for i in indices):
        minibatch.old_logprobs.update(_by_row(indices, current_N, lengths))
    # With one update per step the weights have not moved yet: the old policy is the current one.
    old_N = torch.cat([minibatch.old_logprobs[i] for i in indices]) if minibatch.old_logprobs else current_N
    for i, values in _by_row(
        indices, torch.stack([old_N.float(), scores.entropies.detach().float()], dim=1), lengths
    ).items():
        minibatch.first_scores.setdefault(i, (values[:, 0], values[:, 1]))
    sampling_N = to_device(torch.tensor([lp for row in rows for lp in row.sampled_logprobs]), device)
    # Two ratios multiply. The importance weight is the trainer's probability under the step's first weights over the
    # engine's. The importance ratio, inside the loss, is that under the current weights over that under the first ones.
    corrections = importance_corrections(old_N, sampling_N, rows_N, *config.correction())
    inputs = LossInputs(
        logprobs=scores.logprobs,
        old_logprobs=old_N,
        advantages=per_token(minibatch.advantages),
        weights=per_token(minibatch.weights),
        rows=rows_N,
        corrections=corrections.weights,
        ref_logprobs=reference_N,
    )
    outputs = policy_loss(inputs, run.objective)
    if minibatch.recording is not None:
        minibatch.recording.microbatch(rows, inputs, lambda other: policy_loss(other, run.objective).loss)
    return outputs.loss, sums_of(rows, scores, **grpo_sums(old_N, sampling_N, corrections, outputs))


def score_old_policy(run: Run, minibatches: Sequence[Minibatch]) -> None:
    """Store the log-probabilities of this process's rows under the step's first weights, before any optimizer step."""
    for minibatch in minibatches:
        rows = [minibatch.rows[i] for i in minibatch.mine]
        scored = run.policy.score_rows(rows, run.config.temperature, run.state.microbatch_tokens)
        minibatch.old_logprobs.update(zip(minibatch.mine, scored, strict=True))


def _by_row(indices: Sequence[int], values: torch.Tensor, lengths: torch.Tensor) -> dict[int, torch.Tensor]:
    """Values of N sampled tokens -> a tensor per row, by the row's index in the minibatch."""
    return dict(zip(indices, values.split(lengths.tolist()), strict=True))
