"""Fills the doctor's record of one training step. Nothing of it runs in a step that is not recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import verifiers.v1 as vf
from plumbob.doctor import record as records
from plumbob.doctor.measuring import APART, MOVED, SampledTensors, keep_gradient, moved, on_host
from plumbob.rollout import EngineError, Sample, verifiers_messages
from plumbob.rollout.verifiers_adapter import schemas_of
from plumbob.trainer.algorithm.advantages import OVERLONG_PENALTY
from plumbob.trainer.algorithm.losses import LossInputs

if TYPE_CHECKING:
    from plumbob.trainer.config.train import TrainConfig
    from plumbob.trainer.inference.weight_sync import SyncReport
    from plumbob.trainer.rollouts.batch import Batch
    from plumbob.trainer.rollouts.requests import Request
    from plumbob.trainer.training.run import Run

REDUCTIONS: dict[str, Any] = {"grpo": "rows", "gspo": "rows", "dr_grpo": "constant", "bnpo": "minibatch_tokens"}
"""Loss types whose token weights do not come from the whole step's number of tokens."""


class Recording:
    """The record of the training step that is under way. `train_step` calls its methods in the order in which they stand."""

    def __init__(self, run: Run, step: int) -> None:
        self.run = run
        self.record = records.StepRecord(
            step, settings_of(run), processes=run.world.size, trainer=f"plumbob-trainer {version('plumbob-trainer')}"
        )
        self._row_of: dict[int, int] = {}
        self._rows: list[tuple[Sample, int, float]] = []
        """The step's rows, each with its number in its group and its advantage."""
        self._slopes: list[list[torch.Tensor]] = []
        self._inputs: list[tuple[list[Sample], LossInputs]] = []
        self._tensors: SampledTensors | None = None

    def begin(self, batch: Batch, advantages: Sequence[float]) -> None:
        """The step's rows and advantages, before any code of training can change them."""
        members: dict[str, int] = {}
        for i, (sample, advantage) in enumerate(zip(batch.samples, advantages, strict=True)):
            self._row_of[id(sample)] = i
            member = members[sample.group] = members.get(sample.group, -1) + 1
            lists = {name: list(getattr(sample, name)) for name in ("token_ids", "loss_mask", "sampling_logprobs")}
            dicts = {name: dict(getattr(sample, name)) for name in ("rewards", "reward_weights")}
            self._rows.append((replace(sample, **lists, **dicts), member, advantage))

    def _rollout(self, trace: vf.Trace, requests: Sequence[Request]) -> records.Rollout:
        tools = schemas_of(trace.tools or [])
        if tools and tools not in self.record.tools:
            self.record.tools.append(tools)
        return records.Rollout(
            name=trace.id,
            task=str(trace.task.hash or trace.task.key),
            reward=trace.reward,
            requests=[
                records.Request(
                    np.array(asked.prompt_ids, np.int32),
                    np.array(asked.completion.token_ids, np.int32),
                    np.array(asked.completion.logprobs, np.float32),
                    records.Sampling(
                        asked.sampling.max_tokens,
                        asked.sampling.temperature,
                        asked.sampling.top_p,
                        asked.sampling.top_k,
                        asked.sampling.min_p,
                        list(asked.sampling.stop_token_ids),
                        asked.sampling.seed,
                    ),
                    asked.completion.finish_reason,
                )
                for asked in requests
            ],
            messages=[verifiers_messages.to_openai(node.message) for node in trace.nodes],
            tools=self.record.tools.index(tools) if tools else -1,
            truncated=trace.is_truncated or trace.is_timeout,
        )

    def update_begins(self, rows: Sequence[Sample]) -> None:
        """An optimizer step on these rows begins."""
        self.record.updates.append(records.Update(members=[self._row_of.get(id(row), -1) for row in rows]))

    def passes_begin(self) -> None:
        """The passes of the optimizer step begin: for the first time, or again in smaller microbatches."""
        self._slopes.clear()
        self._inputs.clear()
        self.record.updates[-1].trial = None

    def microbatch(
        self, rows: Sequence[Sample], inputs: LossInputs, loss: Callable[[LossInputs], torch.Tensor]
    ) -> None:
        """The inputs of a microbatch's loss, before its backward pass. `loss`: the same loss of other inputs."""
        slopes: list[torch.Tensor] = []
        if inputs.logprobs.requires_grad:
            keep_gradient(inputs.logprobs, slopes)
        self._slopes.append(slopes)
        # Without its graph, which is freed after the backward pass.
        self._inputs.append((list(rows), replace(inputs, logprobs=inputs.logprobs.detach())))
        update = self.record.updates[-1]
        made_up = len(self.record.updates) == 1 and self.run.objective.own is None  # nothing is known of another loss
        if update.trial is None and made_up and inputs.logprobs.requires_grad:
            with suppress(RuntimeError, TypeError, AttributeError):  # a loss that takes other inputs
                update.trial = trial_of(inputs, loss)

    def gradients(self) -> None:
        """The gradient is complete, and the weights are not yet updated."""
        update, sharding = self.record.updates[-1], self.run.policy.sharding
        update.trained = self._trained_rows()
        self._slopes.clear()
        self._inputs.clear()
        self._tensors = None
        if sharding.kind != "replicated" or self.run.world.size > 1:
            return  # a process knows its own part of the gradient alone
        self._tensors = SampledTensors(sharding.trainable, self.run.optimizer)
        update.tensors = self._tensors.samples

    def updated(self) -> None:
        """The optimizer step has been taken."""
        if self._tensors is not None:
            self._tensors.updated()

    def finish(self, synced: SyncReport | None, batch: Batch) -> Callable[[], records.StepRecord]:
        """What makes the whole record, after the weight sync: the rest of it can wait. `synced`: None if it was refused."""
        run, record = self.run, self.record
        if record.updates and not record.updates[0].trained:  # no row had a gradient: the rows were scored nevertheless
            record.updates[0].trained = self._trained_rows()
        if run.world.size == 1:
            ids = run.parity_row.token_ids
            with suppress(EngineError), torch.no_grad():
                served = run.engine.checked if synced else run.engine.score(ids)
                trained = synced.trained if synced else run.policy.score([run.parity_row], 1.0).logprobs.tolist()
                of_trainer, of_engine = (np.array(values, np.float32) for values in (trained, served))
                record.served = records.Served(np.array(ids, np.int32), of_trainer, of_engine)
        self._tensors = None  # what waits for its turn holds no memory of the GPU
        self._slopes.clear()
        self._inputs.clear()
        traces, answered = batch.traces, batch.requests or ()  # the batch is about to let go of them

        def whole() -> records.StepRecord:
            record.rows = [row_of(*row) for row in self._rows]
            for one in reversed([one for update in record.updates for one in update.trained]):
                row = record.rows[one.row]
                row.logprobs = one.old_logprobs if run.config.updates_per_step > 1 else one.logprobs
                row.reference_logprobs = one.reference_logprobs
            requests = {name: own for by_trace in answered for name, own in by_trace().items()}
            record.rollouts = [self._rollout(trace, requests.get(trace.id, ())) for trace in traces if trace.num_turns]
            return record

        return whole

    def _trained_rows(self) -> list[records.TrainedRow]:
        """What the microbatches' losses were given and gave, row by row."""
        found = []
        for k, ((rows, inputs), slopes) in enumerate(zip(self._inputs, self._slopes, strict=True)):
            counts = [row.num_sampled for row in rows]
            columns = (inputs.advantages, inputs.weights, inputs.logprobs, inputs.old_logprobs, inputs.corrections)
            optional = (inputs.ref_logprobs, slopes[0] if slopes else None)
            if any(t is not None and len(t) != sum(counts) for t in (*columns, *optional)):
                continue  # rows that cannot be told apart: the record says nothing of them
            # One transfer: one for each row would take as long as the microbatch's passes.
            ends = np.cumsum(counts).tolist()
            of = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
            whole = on_host((*columns, *optional))
            parts = [[None if values is None else values[at] for at in of] for values in whole]
            for row, *values in zip(rows, *parts, strict=True):
                found.append(records.TrainedRow(self._row_of.get(id(row), -1), k, *values))
        return found


def row_of(sample: Sample, member: int, advantage: float) -> records.Row:
    return records.Row(
        rollout=sample.trace_id,
        group=sample.group,
        member=member,
        token_ids=np.array(sample.token_ids, np.int32),
        loss_mask=np.array(sample.loss_mask, bool),
        reward=sample.reward,
        advantage=advantage,
        rewards=dict(sample.rewards),
        reward_weights=dict(sample.reward_weights),
        truncated=sample.truncated,
        sampling_logprobs=np.array(sample.sampled_logprobs, np.float32),
    )


SAME_NAMES = (
    *("temperature", "max_tokens", "top_p", "top_k", "min_p", "kl_beta", "weight_decay"),
    *("num_minibatches", "num_iterations"),
)
"""Settings that have the same name in a record."""


def settings_of(run: Run) -> records.Settings:
    """The run's settings by the record's names."""
    config: TrainConfig = run.config
    objective, advantages, (correction, cap) = run.objective, config.advantages(), config.correction()
    schedule: Any = "constant" if config.lr_scheduler_type == "constant_with_warmup" else config.lr_scheduler_type
    lora: dict[str, Any] = {}
    if config.peft:
        lora = {
            "adapter": "lora",
            "lora_rank": config.lora_r,
            "lora_alpha": float(config.lora_alpha),
            "lora_dropout": config.lora_dropout,
            "lora_targets": config.lora_targets.split(","),
        }
    return records.Settings(
        model=str(run.policy.model.name_or_path),
        precision="bfloat16" if config.bf16 else "float32",
        chat_template=run.tokenizer.chat_template,
        group_size=config.num_generations,
        baseline=advantages.baseline,
        scale=advantages.scale,
        scale_epsilon=advantages.scale_epsilon,
        reward_weights=dict(advantages.reward_weights),
        random_rewards=advantages.random_rewards is not None,
        own={
            stage: function.written
            for stage, function in (
                ("loss", objective.own),
                ("advantages", advantages.own_advantages or advantages.own_rewards),
            )
            if function is not None
        },
        overlong=advantages.overlong,
        overlong_penalty=OVERLONG_PENALTY,
        reduction=REDUCTIONS.get(config.loss_type, "step_tokens"),
        ratio="sequence" if config.loss_type == "gspo" else "token",
        bound="cap" if config.loss_type == "cispo" else "clip",
        epsilon=objective.epsilon,
        epsilon_high=objective.epsilon_high,
        kl_estimator=objective.kl_estimator,
        correction=correction,
        correction_cap=cap,
        learning_rate=config.learning_rate or 0.0,
        schedule=schedule,
        warmup=config.warmup_steps,
        num_steps=config.max_steps,
        beta1=config.adam_beta1,
        beta2=config.adam_beta2,
        max_norm=config.max_grad_norm,
        **{name: getattr(config, name) for name in SAME_NAMES},
        **lora,
    )


def trial_of(inputs: LossInputs, loss: Callable[[LossInputs], torch.Tensor]) -> records.LossTrial:
    """Ask the loss for the slopes of the microbatch's tokens with moved old and reference log-probabilities."""
    own = inputs.logprobs.detach().clone().requires_grad_()
    old, reference = moved(own, MOVED), None if inputs.ref_logprobs is None else moved(own, APART)
    asked = LossInputs(own, old, inputs.advantages, inputs.weights, inputs.rows, inputs.corrections, reference)
    with torch.enable_grad():
        (slopes,) = torch.autograd.grad(loss(asked), own)
    # One transfer: each waits for what a GPU has been given to compute.
    columns = (own, old, inputs.advantages, inputs.weights, inputs.corrections, slopes, reference, inputs.rows)
    *numbers_of, rows = on_host(columns)
    return records.LossTrial(rows.astype(np.int32), *numbers_of)
