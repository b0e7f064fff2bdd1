"""One step of supervised fine-tuning, from top to bottom: `sft_step`.

The loss is the mean cross-entropy, in nats, of the tokens that the demonstrations' own turns consist of: prompts, tool
results and the template's text are context. As in GRPO it is a plain sum over tokens, whose weights come from totals over
all processes, so its gradient does not depend on microbatches or on the number of processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from plumbob.rollout import Sample
from plumbob.trainer.algorithm.losses import row_weights
from plumbob.trainer.distributed.world import World, balanced_shares
from plumbob.trainer.inference.weight_sync import sync_weights
from plumbob.trainer.rollouts.batch import Batch
from plumbob.trainer.rollouts.interruption import Interruption
from plumbob.trainer.rollouts.task_order import epoch_order, walk
from plumbob.trainer.training.capacity.out_of_memory import fit_microbatch_tokens, rest_engine, wake_engine
from plumbob.trainer.training.metrics import memory_metrics
from plumbob.trainer.training.minibatches import Minibatch
from plumbob.trainer.training.run import Run
from plumbob.trainer.training.step import Stopwatch, optimizer_step, set_learning_rate
from plumbob.trainer.training.tally import MicrobatchSums, Tally, WeightSample, sums_of


class SftSteps:
    """The steps of a run of `sft`: see `training/steps.py:GrpoSteps`."""

    def __init__(self, run: Run, interruption: Interruption) -> None:
        self.run, self.interruption = run, interruption

    def take(self, status: Callable[[str], None]) -> tuple[dict[str, float], Batch]:
        if self.run.config.vllm_sleep or self.run.state.engine_rests:
            rest_engine(self.run)  # until the next evaluation
        return sft_step(self.run, self.interruption, status), Batch()

    def before_evaluation(self) -> None:
        """Give the engine the trained weights, which it needs for evaluations alone. Raises SyncError."""
        wake_engine(self.run)
        sync_weights(self.run.policy, self.run.engine, self.run.parity_row)

    def close(self) -> None:
        """Nothing is under way between two steps."""


def sft_step(run: Run, interruption: Interruption, status: Callable[[str], None]) -> dict[str, float]:
    """Take training step number `run.state.step` (from 0), which is one optimizer step; returns its metrics.

    Collective. Raises RunFailed and Interrupted; the step then does not count as finished.
    """
    state, policy, world, clock = run.state, run.policy, run.world, Stopwatch()
    rows = rows_at(run.demonstrations, state.cursor, run.sampler.groups_per_step, run.config.seed)
    state.cursor += len(rows)
    if not state.microbatch_tokens_fitted:
        status("measuring how many tokens of a microbatch fit into memory")
        fit_microbatch_tokens(run)
    status(f"training on {len(rows)} demonstrations")
    learning_rate, weights_before = set_learning_rate(run), WeightSample.of(policy.sharding)
    tally = optimizer_step(run, sft_minibatch(rows, world), interruption, cross_entropy)
    moved = Tally.of_movement(weights_before, WeightSample.of(policy.sharding))
    tally = Tally.total(world.gather(Tally.total([tally, moved])))
    clock.lap("train")
    return {
        "step": state.step + 1,
        "sft/loss": tally.loss,
        "sft/epoch": state.cursor / len(run.demonstrations),
        "policy/entropy": tally.entropy / max(tally.tokens, 1),
        **tally.optimizer_metrics(),
        "optimizer/learning_rate": learning_rate,
        "train/rows": len(rows),
        "train/microbatch_tokens": state.microbatch_tokens,
        "train/out_of_memory": state.out_of_memory,
        **memory_metrics(world, state),
        **clock.seconds,
        "time/train_tokens_per_second": tally.row_tokens / clock.seconds["time/train"],
    }


def rows_at(rows: Sequence[Sample], cursor: int, count: int, seed: int) -> list[Sample]:
    """The next `count` rows after `cursor` earlier ones. Each epoch takes every row once, in an order of its own."""
    places = walk(cursor, len(rows), lambda epoch: epoch_order("shuffle", seed, epoch, len(rows)))
    return [rows[index] for _, index in itertools.islice(places, count)]


def sft_minibatch(rows: Sequence[Sample], world: World) -> Minibatch:
    """The rows of one optimizer step, each token with the weight 1 / number of trained tokens of all processes."""
    weights = row_weights("bnpo", [row.num_sampled for row in rows], max_tokens=0)
    shares = balanced_shares([len(row.token_ids) for row in rows], world.size)
    everything = list(range(len(rows)))
    return Minibatch(list(rows), [0.0] * len(rows), weights, trained=everything, mine=shares[world.rank])


def cross_entropy(run: Run, minibatch: Minibatch, indices: Sequence[int]) -> tuple[torch.Tensor, MicrobatchSums]:
    """-sum_t w_t log p(t | the tokens before t), over the N sampled tokens of one microbatch: (loss, what it adds up to).

    The temperature is 1, as in every cross-entropy; --temperature is for sampling.
    """
    rows = [minibatch.rows[i] for i in indices]
    scores = run.policy.score(rows, 1.0)
    lengths = torch.tensor([row.num_sampled for row in rows])
    weights_N = torch.tensor([minibatch.weights[i] for i in indices]).repeat_interleave(lengths)
    loss = -(weights_N.to(scores.logprobs.device) * scores.logprobs).sum()
    return loss, sums_of(rows, scores, loss=loss.detach())
