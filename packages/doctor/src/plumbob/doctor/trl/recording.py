"""Makes a record of what a GRPOTrainer of TRL did in one optimizer step."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from plumbob.doctor import record as records
from plumbob.doctor.environment.player import Played, Task
from plumbob.doctor.measuring import numbers
from plumbob.doctor.trl.before import messages_of, text_of
from plumbob.doctor.trl.settings import names_of, schemas, settings_of
from plumbob.doctor.trl.watching import ROW, Microbatch, Round, Turn, Watch, loss_mask


def trained(trainer: Any) -> dict[str, torch.nn.Parameter]:
    """Name -> tensor that the run trains."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def record_of(watch: Watch, tensors: Sequence[records.TensorSample], step: int) -> records.StepRecord:
    """The record of step `step` (from 0), which has just been taken."""
    trainer, made = watch.trainer, watch.round
    record = records.StepRecord(step, settings_of(trainer, step), trainer=f"trl {version('trl')}")
    if made is None or not made.output:
        return record
    made = replace(made, output=send_to_device(made.output, "cpu"))
    record.tools = [tools] if (tools := schemas(trainer)) else []
    fresh = made.step == step  # else weights of earlier steps have sampled them
    record.rollouts = [_rollout(trainer, made, i, bool(tools), fresh) for i in range(len(made.inputs))]
    record.rows = _rows(trainer, made)
    update = records.Update(tensors=list(tensors))
    update.trial = next((one.trial for one in watch.microbatches if one.trial is not None), None)
    for k, one in enumerate(watch.microbatches):
        one = Microbatch(**send_to_device(vars(one), "cpu"))
        rows = one.inputs[ROW].tolist() if ROW in one.inputs else [-1] * len(one.weights)
        update.members += rows
        for j, row in enumerate(rows):
            if (given := _trained_row(record, row, k, j, one, one.weights[j])) is not None:
                update.trained.append(given)
    record.updates.append(update)
    for row in () if fresh else record.rows:
        row.sampling_logprobs = None
    for given in update.trained:
        row = record.rows[given.row]
        if trainer.mask_truncated_completions and row.truncated:
            continue  # attention does not see its tokens, so that these numbers mean nothing
        row.logprobs, row.reference_logprobs = given.logprobs, given.reference_logprobs
    return record


def _trained_row(
    record: records.StepRecord, row: int, k: int, j: int, one: Microbatch, weights: torch.Tensor
) -> records.TrainedRow | None:
    """What microbatch `k` did with row `row` of the record, the `j`th of the microbatch."""
    if one.logprobs is None or row < 0:
        return None
    whole = record.rows[row].loss_mask
    at = torch.zeros(one.logprobs.shape[1], dtype=torch.bool)
    length = int(len(whole) - one.inputs["prompt_mask"][j].sum())
    at[:length] = torch.from_numpy(whole[len(whole) - length :])

    def column(tensor: torch.Tensor) -> np.ndarray:
        return numbers(tensor.expand(at.shape)[at])

    def given(name: str) -> np.ndarray | None:
        return None if one.inputs.get(name) is None else column(one.inputs[name][j])

    own, old, ratio = column(one.logprobs[j]), given("old_per_token_logps"), given("importance_sampling_ratio")
    return records.TrainedRow(
        row,
        k,
        advantages=column(one.inputs["advantages"][j]),
        weights=column(weights),
        logprobs=own,
        old_logprobs=own if old is None else old,
        corrections=np.ones_like(own) if ratio is None else ratio,
        reference_logprobs=given("ref_per_token_logps"),
        slopes=column(one.slopes[0][j]) if one.slopes else None,
    )


def _rows(trainer: Any, made: Round) -> list[records.Row]:
    output, rows = made.output, list[records.Row]()
    masks, size = loss_mask(output), trainer.num_generations
    for i in range(len(made.inputs)):
        prompt = output["prompt_ids"][i][output["prompt_mask"][i].bool()].tolist()
        ids, counted = output["completion_ids"][i].tolist(), masks[i]
        sampled = made.ids[i] if i < len(made.ids) else ids[: int(output["completion_mask"][i].sum())]
        if trainer.mask_truncated_completions and not counted.any():  # its tokens weigh nothing, but were sampled
            counted = torch.zeros(len(ids), dtype=torch.bool)
            counted[: len(sampled)] = torch.tensor(made.tool_masks[i] if made.tool_masks else [1] * len(sampled)).bool()
        length = max(int(counted.nonzero().max()) + 1 if counted.any() else 0, int(output["completion_mask"][i].sum()))
        if not output["completion_mask"][i].any() or ids[: len(sampled)] == sampled:
            length = max(length, len(sampled))  # what the mask leaves out was sampled nevertheless
        sampling = output.get("sampling_per_token_logps")
        rows.append(
            records.Row(
                rollout=str(i),
                group=str(i // size),
                member=i % size,
                token_ids=np.array([*prompt, *ids[:length]], np.int32),
                loss_mask=np.array([False] * len(prompt) + counted[:length].tolist(), bool),
                reward=reward_of(trainer, made, i)[1],
                advantage=float(output["advantages"][i].float().mean()),
                truncated=cut_off(trainer, sampled),
                sampling_logprobs=None if sampling is None else numbers(sampling[i][: len(counted)][counted]),
            )
        )
    return rows


def reward_of(trainer: Any, made: Round, i: int) -> tuple[dict[str, float], float]:
    """(weighted components, sum) of a completion's reward; NaN if no reward function gave one."""
    if made.rewards is None:
        return {}, math.nan
    own = made.rewards[i] * made.reward_weights
    parts = dict(zip(names_of(trainer), np.nan_to_num(own).tolist(), strict=True))
    return parts, math.nan if np.isnan(own).all() else float(np.nansum(own))


def played_of(trainer: Any, made: Round) -> list[tuple[Played, bool]]:
    """The completions as rollouts of the tasks that their prompts are, each with whether a limit has cut it off."""
    most = max(map(len, made.ids), default=0)  # what ends earlier without an end token is cut off by no limit
    found = list[tuple[Played, bool]]()
    for i, row in enumerate(made.inputs):
        parts, reward = reward_of(trainer, made, i)
        completion, ids = (of[i] if i < len(of) else "" for of in (made.completions, made.ids))
        messages = (*messages_of(row.get("prompt")), *messages_of(completion, "assistant", sampled=True))
        task = Task(f"{i // trainer.num_generations}", "train", row, text_of(row.get("prompt")))
        one = Played(task, reward, parts, messages, None if math.isfinite(reward) else "not-finite")
        found.append((one, cut_off(trainer, ids) and len(ids) == most))
    return found


def cut_off(trainer: Any, ids: Sequence[int]) -> bool:
    ends = [*trainer.eos_token_ids, trainer._tokenizer.pad_token_id]
    return bool(ids) and ids[-1] not in ends


def _rollout(trainer: Any, made: Round, i: int, tools: bool, fresh: bool) -> records.Rollout:
    prompt, messages = made.prompts[i] if i < len(made.prompts) else made.inputs[i].get("prompt"), []
    # A conversation that begins with turns of the assistant cannot be told from one in which the model has spoken.
    known = getattr(trainer, "environment_factories", None) is None  # environments change prompts and tools
    if known and isinstance(prompt, list) and not any(message.get("role") == "assistant" for message in prompt):
        messages = [*prompt, *(made.completions[i] if i < len(made.completions) else [])]
    return records.Rollout(
        name=str(i),
        task=json.dumps(made.inputs[i].get("prompt"), sort_keys=True, default=str),
        reward=reward_of(trainer, made, i)[1],
        requests=_requests(trainer, made, i) if fresh else [],
        messages=messages,
        tools=0 if tools else -1,
        truncated=cut_off(trainer, made.ids[i]) if i < len(made.ids) else False,
    )


def _requests(trainer: Any, made: Round, i: int) -> list[records.Request]:
    """The turns of a completion. A later turn belongs to it if its prompt goes on from the turn before."""
    found: list[records.Request] = []
    given = vars(config) if (config := getattr(trainer, "generation_config", None)) else vars(trainer.args)
    ends = given.get("eos_token_id") or trainer.eos_token_ids
    stops = [stop for stop in (ends if isinstance(ends, list) else [ends]) if stop is not None]
    sampling = records.Sampling(
        trainer.max_completion_length if config is None else config.max_new_tokens,
        given["temperature"] if given.get("do_sample", True) else 0.0,
        1.0 if given["top_p"] is None else given["top_p"],
        given["top_k"] or 0,
        given["min_p"] or 0.0,
        stops,
    )
    # Whether something else than the limit of tokens may end a completion without a stop token.
    limited = config is None or bool(config.stop_strings or config.max_time)
    start = 0
    for number, turn in enumerate(made.turns):
        if turn.logprobs is None:
            return []
        at = i if number == 0 else _goes_on(turn, found, made, i)
        if at is None or at >= len(turn.prompts):
            continue
        prompt, ids = turn.prompts[at], turn.completions[at]
        start = len(prompt) if number == 0 else start
        most = max(start + trainer.max_completion_length - len(prompt), 0)
        ids = ids[:most]  # TRL cuts what exceeds the limit
        full = len(ids) >= min(most, sampling.max_tokens) or limited
        reason = "stop" if (ids and ids[-1] in stops) or not full else "length"
        found.append(
            records.Request(
                np.array(prompt, np.int32), np.array(ids, np.int32), turn.logprobs[at][: len(ids)], sampling, reason
            )
        )
    return found


def _goes_on(turn: Turn, found: Sequence[records.Request], made: Round, i: int) -> int | None:
    """Which prompt of a later turn goes on from a completion's turns so far: of equal ones, that whose reply it has."""
    known = [*found[-1].prompt_ids.tolist(), *found[-1].token_ids.tolist()]
    whole = [*found[0].prompt_ids.tolist(), *made.ids[i]]
    places = [at for at, p in enumerate(turn.prompts) if len(p) > len(known) and p[: len(known)] == known]

    def has(at: int) -> bool:
        both = [*turn.prompts[at], *turn.completions[at]]
        return both[: len(whole)] == whole[: len(both)]

    return next((at for at in places if has(at)), None)
