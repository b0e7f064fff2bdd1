"""Makes a record of what a GRPOTrainer of TRL did in one optimizer step."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from plumbob.doctor import record as records
from plumbob.doctor.measuring import numbers
from plumbob.doctor.trl.settings import settings_of
from plumbob.doctor.trl.watching import Microbatch, Round, Turn, Watch, loss_mask


def trained(trainer: Any) -> dict[str, torch.nn.Parameter]:
    """Name -> tensor that the run trains."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def record_of(watch: Watch, tensors: Sequence[records.TensorSample], step: int) -> records.StepRecord:
    """The record of step `step` (from 0), which has just been taken."""
    trainer, made = watch.trainer, watch.round
    made = made and replace(made, output=on_cpu(made.output))
    record = records.StepRecord(step, settings_of(trainer, step), trainer=f"trl {version('trl')}")
    if made is None or not made.output:
        return record
    record.tools = [tools] if (tools := _schemas(trainer)) else []
    fresh = made.step == step  # else weights of earlier steps have sampled them
    played = [_rollout(trainer, made, i, bool(tools), fresh) for i in range(len(made.inputs))]
    record.rollouts, record.rows = played, _rows(trainer, made)
    update = records.Update(tensors=list(tensors), norm=math.sqrt(sum(t.gradient_norm**2 for t in tensors)))
    update.trial = next((one.trial for one in watch.microbatches if one.trial is not None), None)
    left = _keys(made.output)
    for k, one in enumerate(watch.microbatches):
        one = Microbatch(**on_cpu(vars(one)))
        for j, (key, own) in enumerate(zip(_keys(one.inputs).elements(), one.weights, strict=True)):
            row = left.take(key, float(one.inputs["advantages"][j].float().mean()))
            update.members.append(row)
            if (given := _trained_row(record, row, k, j, one, own)) is not None:
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


def on_cpu(given: Any) -> Any:
    """The same with its tensors on the host: one transfer for each, not one for each row."""
    if isinstance(given, torch.Tensor):
        return given.detach().cpu()
    if isinstance(given, Mapping):
        return {name: on_cpu(value) for name, value in given.items()}
    return [on_cpu(one) for one in given] if isinstance(given, list) else given


class _keys:
    """Rows of padded tensors by their content: the loss is given the same rows in another order."""

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1).numpy()
        self._keys = [row.tobytes() for row in ids]
        self._places: dict[bytes, list[tuple[int, float]]] = defaultdict(list)
        for i, (key, advantage) in enumerate(zip(self._keys, inputs["advantages"], strict=True)):
            self._places[key].append((i, float(advantage.float().mean())))

    def elements(self) -> Sequence[bytes]:
        return self._keys

    def take(self, key: bytes, advantage: float) -> int:
        """Index of a row of this content, each once, one with the same advantage first; -1 if there is none."""
        places = self._places.get(key, [])
        place = min(places, key=lambda one: abs(one[1] - advantage), default=None)
        if place is None:
            return -1
        places.remove(place)
        return place[0]


def _trained_row(
    record: records.StepRecord, row: int, k: int, j: int, one: Microbatch, weights: torch.Tensor
) -> records.TrainedRow | None:
    """What microbatch `k` did with row `row` of the record, the `j`th of the microbatch."""
    if one.logprobs is None or row < 0:
        return None
    whole = record.rows[row].loss_mask
    at = torch.zeros(one.logprobs.shape[1], dtype=torch.bool)
    length = int(len(whole) - _first(one.inputs["prompt_mask"][j]))
    at[:length] = torch.from_numpy(whole[len(whole) - length :])

    def column(tensor: torch.Tensor | None) -> np.ndarray | None:
        return None if tensor is None else numbers(tensor.cpu().expand(at.shape)[at])

    own, old = one.logprobs[j], one.inputs.get("old_per_token_logps")
    reference, corrections = (one.inputs.get(name) for name in ("ref_per_token_logps", "importance_sampling_ratio"))
    values = [
        column(tensor)
        for tensor in (
            one.inputs["advantages"][j],
            weights,
            own,
            own if old is None else old[j],
            torch.ones(1) if corrections is None else corrections[j],
        )
    ]
    return records.TrainedRow(
        row,
        k,
        *values,  # ty: ignore[invalid-argument-type]
        reference_logprobs=None if reference is None else column(reference[j]),
        slopes=column(one.slopes[0][j]) if one.slopes else None,
    )


def _first(prompt_mask: torch.Tensor) -> int:
    return int(prompt_mask.sum())


def _rows(trainer: Any, made: Round) -> list[records.Row]:
    output, names = made.output, list(trainer.reward_func_names)
    masks, size, rows = loss_mask(output).cpu(), trainer.num_generations, []
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
        parts, reward = reward_of(trainer, made, i)
        sampling = output.get("sampling_per_token_logps")
        rows.append(
            records.Row(
                rollout=str(i),
                group=str(i // size),
                member=i % size,
                token_ids=np.array([*prompt, *ids[:length]], np.int32),
                loss_mask=np.array([False] * len(prompt) + counted[:length].tolist(), bool),
                reward=reward,
                advantage=float(output["advantages"][i].float().mean()),
                rewards=dict(zip(names, parts, strict=True)) if parts else {},
                truncated=cut_off(trainer, sampled),
                sampling_logprobs=None if sampling is None else numbers(sampling[i][: len(counted)][counted]),
            )
        )
    return rows


def reward_of(trainer: Any, made: Round, i: int) -> tuple[list[float], float]:
    """(weighted components, sum) of a completion's reward; NaN if no reward function gave one."""
    if made.rewards is None:
        return [], math.nan
    own = made.rewards[i] * made.reward_weights
    return np.nan_to_num(own).tolist(), float(np.nansum(own)) if not np.isnan(own).all() else math.nan


def cut_off(trainer: Any, ids: Sequence[int]) -> bool:
    ends = [*trainer.eos_token_ids, trainer._tokenizer.pad_token_id]
    return bool(ids) and ids[-1] not in ends


def _rollout(trainer: Any, made: Round, i: int, tools: bool, fresh: bool) -> records.Rollout:
    parts, reward = reward_of(trainer, made, i)
    prompt, messages = made.prompts[i] if i < len(made.prompts) else made.inputs[i].get("prompt"), []
    # A conversation that begins with turns of the assistant cannot be told from one in which the model has spoken.
    known = getattr(trainer, "environment_factories", None) is None  # environments change prompts and tools
    if known and isinstance(prompt, list) and not any(message.get("role") == "assistant" for message in prompt):
        messages = [*prompt, *(made.completions[i] if i < len(made.completions) else [])]
    return records.Rollout(
        name=str(i),
        task=json.dumps(made.inputs[i].get("prompt"), sort_keys=True, default=str),
        reward=reward,
        rewards=dict(zip(trainer.reward_func_names, parts, strict=True)) if parts else {},
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


def _schemas(trainer: Any) -> list[dict[str, Any]]:
    """The tools, as chat templates take them."""
    from transformers.utils import get_json_schema

    if getattr(trainer, "environment_factories", None) is not None:
        return []
    return [tool if isinstance(tool, dict) else get_json_schema(tool) for tool in trainer.tools or ()]
