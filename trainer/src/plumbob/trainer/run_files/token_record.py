"""What training computed for the tokens of one rollout, and how its stored trace holds it.

verifiers' nodes have fields for it: `advantages`, `trainer_logprobs`, `reference_logprobs` and `entropies`, each with
one number per sampled token of the node. What they have no field for is in the trace's `info["training"]`. A row whose
loss is not on exactly the sampled tokens has its `loss_mask` there, as run lengths.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, repeat
from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticSerializationError, to_json

if TYPE_CHECKING:
    import verifiers.v1 as vf

DECIMALS = 4
"""Decimals that are stored of each number, as verifiers stores the sampling log-probabilities."""


@dataclass(frozen=True)
class TokenRecord:
    """One row of a training step. Lists of numbers have one per token in the loss; None: not computed for this row."""

    advantage: float
    trained: bool
    """Whether the row added to the gradient."""
    trainer_logprobs: Sequence[float] | None = None
    """Log-probabilities in the trainer under the step's first weights, in nats."""
    entropies: Sequence[float] | None = None
    """Entropies of the policy, in nats."""
    reference_logprobs: Sequence[float] | None = None
    """Log-probabilities under the reference policy, in nats."""
    logprobs_after: Sequence[float] | None = None
    """Log-probabilities in the trainer after the step's last update, in nats."""
    env: str = ""
    """The row's environment, in a run of several."""
    loss_mask: Sequence[bool] | None = None
    """[T] whether each token of the row is in the loss; None: exactly the sampled ones."""


def as_line(trace: vf.Trace | str, tokens: Mapping[str, TokenRecord] | None = None) -> str:
    """A trace as a line of JSON, with what training computed if `tokens` has it under the trace's id.

    `trace`: the trace, or its line of JSON without that.
    """
    if isinstance(trace, str) and not tokens:
        return trace
    record = json.loads(trace) if isinstance(trace, str) else record_of(trace)
    if tokens and (found := tokens.get(record["id"])) is not None:
        annotate(record, found)
    try:
        return to_json(record, inf_nan_mode="constants").decode()  # four times as fast as the standard library
    except PydanticSerializationError:  # text with half a surrogate pair, which UTF-8 cannot hold
        return json.dumps(record)


def record_of(trace: vf.Trace) -> dict[str, Any]:
    """`trace.to_record()`, whose log-probabilities are not rounded one by one: that takes most of its time."""
    record = trace.to_record(float_decimals=None)
    for node in record["nodes"]:
        node["logprobs"] = _rounded(node["logprobs"])
    return record


def annotate(trace: dict[str, Any], found: TokenRecord) -> None:
    """Write what training computed into the nodes of a stored trace with one branch, and into its `info`."""
    sampled = [bool(value) for node in trace["nodes"] for value in node["mask"]]
    loss = sampled if found.loss_mask is None else [bool(value) for value in found.loss_mask]
    start = 0
    columns = {
        name: values if loss == sampled else _of_sampled(values, sampled, loss)
        for name in ("trainer_logprobs", "entropies", "reference_logprobs")
        if (values := getattr(found, name)) is not None
    }
    for node in trace["nodes"]:
        end = start + sum(node["mask"])
        if end > start:
            node["advantages"] = [round(found.advantage, DECIMALS)] * (end - start)
            node |= {name: _rounded(values[start:end]) for name, values in columns.items()}
        start = end
    training: dict[str, Any] = {"advantage": round(found.advantage, DECIMALS), "trained": found.trained}
    if loss != sampled:
        training["loss_mask"] = run_lengths(loss)
    if found.logprobs_after is not None:
        after = found.logprobs_after
        training["logprobs_after"] = _rounded(after if loss == sampled else _of_sampled(after, sampled, loss))
    if found.env:
        training["env"] = found.env
    trace.setdefault("info", {})["training"] = training


def _of_sampled(values: Sequence[float], sampled: Sequence[bool], loss: Sequence[bool]) -> list[float]:
    """Numbers of the tokens in the loss -> of the sampled ones; NaN for one that is not in the loss.

    Of a row that is longer or shorter than its rollout nobody knows which token is which: all are NaN then.
    """
    left = chain(values, repeat(float("nan")))
    of_row = [next(left) if used and len(loss) == len(sampled) else float("nan") for used in loss]
    return [value for value, mine in zip(chain(of_row, repeat(float("nan"))), sampled, strict=False) if mine]


def run_lengths(values: Sequence[bool]) -> list[int]:
    """Lengths of runs of equal values, beginning with one of false. Example: run_lengths([True, False]) == [0, 1, 1]."""
    runs = [(value, len(list(group))) for value, group in groupby(values)]
    lengths = [length for _, length in runs]
    return [0, *lengths] if runs and runs[0][0] else lengths


def expand(lengths: Sequence[int]) -> list[bool]:
    """The values of `run_lengths`."""
    return [bool(i % 2) for i, length in enumerate(lengths) for _ in range(length)]


def _rounded(values: Sequence[float]) -> list[float]:
    import numpy  # here, because commands that refuse a wrong option import this file, and numpy takes .2 s

    return numpy.asarray(values, dtype=numpy.float64).round(DECIMALS).tolist()
