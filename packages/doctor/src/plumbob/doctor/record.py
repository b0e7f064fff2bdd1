"""`StepRecord`: what one training step did, from its requests to the engine to the weights that it left.

A trainer fills it, and nothing in it depends on which trainer that is: every field has a neutral name, a shape and a unit.
`write` and `read` store it as one `.npz` file, of about 20 bytes a token.

Notation: B rows of the step; T tokens of a row, n of them sampled; W sampled entries of a weight tensor.
"""

from __future__ import annotations

import dataclasses
import json
import math
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from pydantic import TypeAdapter
from pydantic_core import core_schema

FORMAT = 1
"""Version of the file format. A reader refuses files of another version."""


@dataclass(frozen=True)
class Of:
    """What an array of a record holds: the type that it is stored with, and its number of dimensions."""

    dtype: str
    dimensions: int = 1

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        stored = core_schema.plain_serializer_function_ser_schema(_stored, info_arg=True)
        return core_schema.with_info_plain_validator_function(self._given, serialization=stored)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        items: dict[str, Any] = {"type": {"f": "number", "b": "boolean"}.get(np.dtype(self.dtype).kind, "integer")}
        for _ in range(self.dimensions):
            items = {"type": "array", "items": items}
        return items

    def _given(self, value: Any, info: Any) -> np.ndarray:
        """The array of lists of numbers, or of its place among the arrays of a file, which are the context."""
        if info.context is not None:
            name, start, *shape = value
            value = info.context[name][start : start + math.prod(shape)].reshape(shape)
        try:
            array = np.asarray(value)
        except ValueError:
            raise ValueError("its lists have different lengths") from None
        if array.size and (array.ndim != self.dimensions or array.dtype.kind not in "biuf"):
            raise ValueError(f"should be {'a list' if self.dimensions == 1 else 'lists'} of numbers")
        made = array.astype(self.dtype)
        if made.dtype.kind != "f" and not np.array_equal(made, array):
            raise ValueError(f"holds numbers that are not of type {self.dtype}")
        return made


def _stored(array: np.ndarray, info: Any) -> list[Any]:
    """The place of an array among those of its type, which are the context: a file for each array would take seconds."""
    name = array.dtype.str.lstrip("<|")
    parts, length = info.context.setdefault(name, ([], 0))
    parts.append(array.reshape(-1))
    info.context[name] = (parts, length + array.size)
    return [name, length, *array.shape]


Ids = Annotated[np.ndarray, Of("int32")]
Numbers = Annotated[np.ndarray, Of("float32")]
Mask = Annotated[np.ndarray, Of("bool")]


@dataclass
class Sampling:
    """How one completion was to be sampled."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: list[int] = field(default_factory=list)
    seed: int | None = None


@dataclass
class Request:
    """One request to the engine, and its reply."""

    prompt_ids: Ids
    """[.] int32"""
    token_ids: Ids
    """[n] int32: the sampled ids."""
    logprobs: Numbers
    """[n] float32: the engine's log-probability of each sampled id, in nats, under the distribution it was sampled from."""
    sampling: Sampling
    finish_reason: str = "stop"
    """"stop": at a stop token; "length": at `sampling.max_tokens`."""


@dataclass
class Rollout:
    """One attempt of the model at a task, as the environment knows it."""

    name: str
    """An id of its own, by which its row names it."""
    task: str
    """Key of its task: two rollouts have the same one exactly if they were given the same task."""
    reward: float
    requests: list[Request] = field(default_factory=list)
    """In order. Empty if another process played this rollout."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The conversation, in the form that chat templates take."""
    tools: int = -1
    """Index in `StepRecord.tools` of the tools that the model had; -1: none."""
    truncated: bool = False


@dataclass
class Row:
    """One training row."""

    rollout: str
    """`Rollout.name` of the rollout that it was made of."""
    group: str
    """Rows of one group are compared with each other."""
    member: int
    """Number of the row in its group, from 0."""
    token_ids: Ids
    """[T] int32"""
    loss_mask: Mask
    """[T] bool: true where the loss is. The mask says nothing about what attention sees."""
    reward: float
    """The reward that the advantage is computed from, before any penalty."""
    advantage: float
    """As the step computed it."""
    rewards: dict[str, float] = field(default_factory=dict)
    reward_weights: dict[str, float] = field(default_factory=dict)
    """Weight of each component in `rewards`; 1 for a missing name."""
    truncated: bool = False
    """Whether a limit cut the rollout off."""
    sampling_logprobs: Numbers | None = None
    """[n] float32: the engine's log-probabilities, as the trainer uses them."""
    logprobs: Numbers | None = None
    """[n] float32: the trainer's, under the step's first weights. None if this process did not compute the row."""
    reference_logprobs: Numbers | None = None
    """[n] float32: under the reference policy."""


@dataclass
class TrainedRow:
    """What one optimizer step did with one row. [n]: one value for each of the row's sampled tokens."""

    row: int
    """Index in `StepRecord.rows`."""
    microbatch: int
    """Number of the forward and backward pass that computed it."""
    advantages: Numbers
    """[n] float32"""
    weights: Numbers
    """[n] float32: weight of each token in the loss."""
    logprobs: Numbers
    """[n] float32: under the weights of this optimizer step."""
    old_logprobs: Numbers
    """[n] float32: the denominator of the importance ratio."""
    corrections: Numbers
    """[n] float32: importance weight, the trainer's probability over the engine's, as bounded by the settings."""
    reference_logprobs: Numbers | None = None
    slopes: Numbers | None = None
    """[n] float32: derivative of the step's loss in the token's log-probability."""


@dataclass
class LossTrial:
    """The step's own loss, asked about made-up inputs: [N], one value per token of a microbatch.

    Where a step begins all ratios are 1 and a KL term has no slope, so that a wrong loss shows nothing there.
    """

    rows: Ids
    """[N] int32: index of each token's row among those of the microbatch."""
    logprobs: Numbers
    old_logprobs: Numbers
    advantages: Numbers
    weights: Numbers
    corrections: Numbers
    slopes: Numbers
    """[N] float32: derivative of the loss in each log-probability."""
    reference_logprobs: Numbers | None = None


@dataclass
class TensorSample:
    """W entries of one trained tensor: before and after an optimizer step, and what the optimizer had of them."""

    name: str
    indices: Annotated[np.ndarray, Of("int64")]
    """[W] int64: of the entries in the flattened tensor."""
    before: Numbers
    """[W] float32"""
    after: Numbers
    gradient: Numbers | None
    """[W] float32: before clipping. None if the tensor has no gradient."""
    gradient_norm: float
    """Norm of the whole tensor's gradient; 0 without one."""
    learning_rate: float
    """That the optimizer has for this tensor. NaN if it does not have the tensor at all."""
    weight_decay: float = 0.0
    moments_before: Annotated[np.ndarray, Of("float32", 2)] | None = None
    """[2, W]: Adam's first and second moment; None before the first update."""
    updates: int = 0
    """Number of updates that the optimizer has applied to this tensor, this one included."""


@dataclass
class Update:
    """One optimizer step."""

    trained: list[TrainedRow] = field(default_factory=list)
    members: list[int] = field(default_factory=list)
    """Indices of all rows of the minibatch, those without a gradient included: token weights are computed from them."""
    tensors: list[TensorSample] = field(default_factory=list)
    trial: LossTrial | None = None


@dataclass
class Served:
    """What the engine serves after the step's weight sync, beside what was trained."""

    token_ids: Ids
    """[T] fixed ids."""
    trained: Numbers
    """[T - 1] the trainer's log-probability of each id but the first, at temperature 1."""
    served: Numbers
    """[T - 1] the engine's."""


@dataclass
class Settings:
    """What the step was meant to do: all that a reference needs to compute it again."""

    model: str = ""
    """Folder or name of the model that the run began with."""
    precision: Literal["float32", "bfloat16"] = "float32"
    adapter: Literal["", "lora"] = ""
    """"lora": an adapter is trained; "": all weights."""
    lora_rank: int = 0
    lora_alpha: float = 0.0
    lora_dropout: float = 0.0
    lora_targets: list[str] = field(default_factory=list)

    # Sampling
    temperature: float = 1.0
    max_tokens: int = 0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    chat_template: str = ""
    """The template that prompts are rendered with."""

    # Advantages
    group_size: int = 0
    baseline: Literal["mean", "leave_one_out"] = "mean"
    scale: Literal["none", "group", "batch", "batch_rewards"] = "none"
    """What advantages are divided by: the standard deviation of their group, of all advantages, or of all rewards."""
    scale_epsilon: float = 1e-4
    components: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    reward_weights: dict[str, float] = field(default_factory=dict)
    """Weights of reward components in place of the environment's."""
    random_rewards: bool = False
    """Whether rewards are drawn by lot."""
    overlong: Literal["keep", "mask", "penalise"] = "keep"
    overlong_penalty: float = 0.0
    own: dict[str, str] = field(default_factory=dict)
    """What the user's own function computes, "advantages" or "loss", and where that function is. It is not examined."""

    # Loss
    reduction: Literal["rows", "constant", "minibatch_tokens", "step_tokens"] = "rows"
    """A token's weight: 1 / (rows of the minibatch x tokens of its row), 1 / (rows x max_tokens), 1 / tokens of the minibatch,
    or number of minibatches / tokens of the step."""
    ratio: Literal["token", "sequence"] = "token"
    bound: Literal["clip", "cap"] = "clip"
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    kl_beta: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_ratio: bool = True
    """Whether the KL term is multiplied with the importance ratio, which has no slope of its own there."""
    correction: str = "none"
    """How importance weights are bounded: none, token_truncate, token_mask, sequence_truncate or sequence_mask."""
    correction_cap: float = 0.0

    # Optimizer
    learning_rate: float = 0.0
    """The peak."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int = 0
    """Steps over which the rate rises in a line."""
    num_steps: int = 0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon_adam: float = 1e-8
    weight_decay: float = 0.0
    max_norm: float = 0.0
    """0: no clipping."""
    num_minibatches: int = 1
    num_iterations: int = 1


@dataclass
class StepRecord:
    """What one training step did."""

    step: int
    """From 0."""
    settings: Settings
    rollouts: list[Rollout] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    """[B] in the order in which the trainer has them."""
    tools: list[list[dict[str, Any]]] = field(default_factory=list)
    """The different lists of tools that rollouts had, as chat templates take them."""
    updates: list[Update] = field(default_factory=list)
    served: Served | None = None
    processes: int = 1
    trainer: str = ""
    """Name and version of what wrote it."""


class RecordSink(Protocol):
    """What a trainer is handed to record steps: which ones, and what becomes of the records."""

    def wants(self, step: int) -> bool:
        """Whether step `step` (from 0) is to be recorded. The same answer on every process."""

    def keep(self, made: Callable[[], StepRecord]) -> None:
        """Take the record of a finished step, which `made` returns when it is called, perhaps later and in a thread."""


FIRST = 3
"""Number of steps that a run records when it begins, or goes on after an interruption."""
EVERY = 25
"""Number of steps from one recorded step to the next after them."""


@dataclass
class RecordFolder:
    """A sink that writes a file for each of a run's first steps and for every `EVERY`th one."""

    folder: Path
    report: Callable[[str], None]
    """Told of a record that cannot be written, which ends no run."""
    began: int = 0
    """Number of steps that the run had finished when this process began."""
    writes: bool = True
    """False on all processes but one."""
    start: Callable[[Callable[[], None]], object] = lambda work: work()
    """Is given what writes a record, and calls it, perhaps in a thread; by default at once."""

    def wants(self, step: int) -> bool:
        return step - self.began < FIRST or (step + 1) % EVERY == 0

    def keep(self, made: Callable[[], StepRecord]) -> None:
        if self.writes:
            self.start(lambda: self._write(made))

    def _write(self, made: Callable[[], StepRecord]) -> None:
        what = "The record of a step"
        try:
            record = made()
            what = f"The record of step {record.step + 1}"
            self.folder.mkdir(exist_ok=True)
            write(record, self.folder / f"step_{record.step + 1:05}.npz")
        except Exception as error:
            self.report(f"{what}, by which doctor examines it, is lost: {type(error).__name__}: {error}")


@cache
def adapter() -> TypeAdapter[StepRecord]:
    """pydantic's reader of records."""
    for kind in globals().values():
        if dataclasses.is_dataclass(kind):
            kind.__pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}
    return TypeAdapter(StepRecord)


def write(record: StepRecord, path: Path) -> None:
    """Write the record to `path`, an `.npz` file. A reader never sees half of it."""
    stored: dict[str, tuple[list[np.ndarray], int]] = {}
    made = adapter().dump_python(record, context=stored, warnings=False)
    header = json.dumps(
        {"format": FORMAT, "record": made}, default=lambda v: v.item() if isinstance(v, np.generic) else str(v)
    )
    arrays = {name: np.concatenate(parts) for name, (parts, _) in stored.items()}
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        arrays["header"] = np.frombuffer(header.encode(), np.uint8)
        np.savez(file, allow_pickle=False, **arrays)  # compressed, it takes fifty times as long for a seventh less
    partial.replace(path)


def read(path: Path) -> StepRecord:
    """Read what `write` wrote. Raises ValueError for a file of another format or version."""
    try:
        with np.load(path) as file:
            header = json.loads(file["header"].tobytes())
            arrays = {name: file[name] for name in file.files if name != "header"}
    except (KeyError, OSError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is no record of a training step: {error}") from None
    if header.get("format") != FORMAT:
        raise ValueError(f"{path} has format {header.get('format')} of records; this version reads format {FORMAT}")
    return adapter().validate_python(header["record"], extra="ignore", context=arrays)
