"""How a model's rows must be computed to be right, found by measurement when the model is loaded.

Nothing is decided by a model's name. The scores of a few short rows are compared with `model(row).logits` in float32,
and the fastest way that gives the same is taken.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from plumbob.console import first_line
from plumbob.rollout import Sample
from plumbob.trainer.policy import packed_attention as attention
from plumbob.trainer.policy.gpu_memory import has_room
from plumbob.trainer.policy.shared_beginnings import SHORTEST, share_beginnings
from plumbob.trainer.policy.token_scorer import Layout, LogitMap, TokenScorer, make_batch
from transformers import PreTrainedModel

LIMIT = 1e-5
"""Most that log-probabilities may differ, in nats. Float32 sums in another order differ by less in small models."""

NOISE = 10.0
"""In a large model the limit is this multiple of the difference that rounding alone makes, if that is larger."""

MOST = 1e-2
"""The limit is never more than this. Rows that see each other differ by far more."""

LENGTHS = (13, 5, 21)
"""Lengths of the measured rows, in tokens. The longest is not the first, so that a row can leak into it."""

NARROW = 4
"""The window, in tokens, that sliding windows are narrowed to while they are measured, so that short rows exceed it."""

_WINDOWS = ("sliding_window", "window_size", "attention_chunk_size")
"""Names under which transformers' configurations and attention modules hold the length of a window."""


@dataclass(frozen=True)
class ForwardPlan:
    """How the forward passes of one model are computed."""

    layout: Layout
    logits: LogitMap | None
    """How the model makes logits from hidden states; None: only its own forward pass knows."""
    own_attention: str
    """Transformers' name of the attention that the model is exact with, which padded rows and rows alone use."""
    num_ids: int
    """The ids of measured rows are below this."""
    seen: attention.Seen = field(default_factory=attention.Seen)
    """What the model's attention computes."""
    limit: float = LIMIT
    """Most that log-probabilities of two ways to compute them may differ, in nats."""
    differences: Mapping[str, float | str] = field(default_factory=dict)
    """Layout -> largest difference to rows alone in nats, or why it could not be computed; in the order of the trials."""
    shares: bool = False
    """Whether packed rows are exact if their common beginnings are computed once."""

    @property
    def attention(self) -> str:
        """Transformers' name of the attention to train with."""
        return attention.NAME if self.layout == "packed" else self.own_attention

    def lines(self) -> list[str]:
        """What the user should know: a sentence for each way in which this model is slower than others."""
        lines = []
        # If no layout is exact with `LogitMap`, all of them are tried again without: then "alone" has been tried as well.
        tried = self.differences.items()
        reasons = [f"{name} rows {difference_text(d)}" for name, d in tried if name not in (self.layout, "alone")]
        if self.layout == "padded":
            lines.append(f"rows of this model are padded instead of packed, because {', and '.join(reasons)}")
        elif self.layout == "alone":
            lines.append(f"rows of this model take one forward pass each, because {', and '.join(reasons)}")
        if self.logits is None:
            lines.append(
                "this model's logits are computed for whole microbatches at once, because they are not its hidden "
                "states times its output embeddings; if memory runs out, lower --microbatch-tokens"
            )
        return lines


def difference_text(difference: float | str) -> str:
    """The end of a sentence about log-probabilities, or rows of them, from what was measured."""
    if isinstance(difference, str):
        return f"cannot be computed ({difference})"
    return f"differ by {difference:.2g} nats from rows alone"


def vocabulary(model: PreTrainedModel) -> int:
    """Number of ids that the model can embed, as its configuration has it."""
    return model.config.get_text_config().vocab_size


def measured_rows(num_ids: int, lengths: Sequence[int] = LENGTHS) -> list[Sample]:
    """The same rows of random ids in every process and every run; every id but a row's first is scored."""
    generator = torch.Generator().manual_seed(0)
    return [_row(torch.randint(num_ids, (n,), generator=generator).tolist()) for n in lengths]


def rows_that_begin_alike(num_ids: int) -> list[Sample]:
    """`measured_rows` of which two begin with the same prompt of random ids, and a third one with a part of it."""
    prompt, *ends = (row.token_ids for row in measured_rows(num_ids, (2 * SHORTEST + 3, *LENGTHS)))
    return [_row(prompt[:n] + end, n) for n, end in zip((len(prompt), SHORTEST + 2, len(prompt)), ends, strict=True)]


def _row(token_ids: list[int], prompt: int = 1) -> Sample:
    """A row of which every id after the prompt, of so many tokens, is scored."""
    n = len(token_ids)
    return Sample(token_ids, [i >= prompt for i in range(n)], [0.0] * n, 0.0, "measured", "", False)


@torch.no_grad()
def plan_forward(model: PreTrainedModel, max_context: int, num_ids: int | None = None) -> ForwardPlan:
    """Measure how to compute `model`, as it was loaded, in float32 on its present device. It is left as it was.

    A window is narrowed while it is measured, if rows of up to `max_context` tokens could exceed it. The cost is that
    of about ten forward passes of 20 to 40 tokens. `num_ids`: the size of the tokenizer, by default all that the model can
    embed. Many models can embed more ids than their tokenizer has, but what they make of the others means nothing, and
    rounding errors may be far larger there.
    """
    num_ids = min(num_ids or vocabulary(model), vocabulary(model))
    given = model.config._attn_implementation
    try:
        with measuring(model, max_context) as lengths:
            return _plan(model, num_ids, lengths, given)
    except Exception as error:  # a model that cannot run on this device, for example: then nothing is assumed of it
        return ForwardPlan("alone", None, given, num_ids, differences={"packed": first_line(error)})


@contextmanager
def moved(model: PreTrainedModel, device: torch.device, *, back: bool = True) -> Generator[None]:
    """In this context the whole model is on `device`, if that is a GPU with room for it: it is measured faster there.

    `back`: afterwards it returns to where it was, which takes seconds for each few billion parameters.
    """
    home, size = model.device, sum(p.numel() * p.element_size() for p in model.parameters())
    if home.type == "cpu" and has_room(device, size):
        model.to(device)
    try:
        yield
    finally:
        if back:
            model.to(home)


@contextmanager
def measuring(model: PreTrainedModel, max_context: int) -> Generator[Sequence[int]]:
    """In this context the model is ready to be measured; gives the lengths of the rows to measure it with.

    Attention windows that rows of up to `max_context` tokens could exceed are narrowed to `NARROW` tokens, so that
    short rows exceed them.
    """
    training, given = model.training, model.config._attn_implementation
    windows = _windows(model, max_context)
    model.eval()
    try:
        with _windows_set(windows, NARROW):
            if windows and not _windows_matter(model):
                # The model keeps its windows where they cannot be narrowed, so that only a long row exceeds them.
                yield (*LENGTHS, max(value for _, _, value in windows) + NARROW)
            else:
                yield LENGTHS
    finally:
        model.set_attn_implementation(given)
        model.train(training)


def _plan(model: PreTrainedModel, num_ids: int, lengths: Sequence[int], given: str) -> ForwardPlan:
    rows, seen = measured_rows(num_ids, lengths), attention.Seen()
    packed = _try_score(model, rows, "packed", LogitMap(), attention.NAME, seen)
    # Transformers' fused attention ignores soft-capping and sinks; its plain one computes them.
    own = "eager" if seen.plain and given == "sdpa" else given
    model.set_attn_implementation(own)
    alone = torch.cat([own_logprobs(model, row.token_ids) for row in rows])
    noise = _noise(model, rows[-1].token_ids, alone[-rows[-1].num_sampled :])
    limit = min(max(LIMIT, NOISE * noise), MOST)
    found = measure_logits(model, rows[0], limit)
    differences: dict[str, float | str] = {}
    for logits in (found, None) if found is not None else (None,):
        for layout in get_args(Layout):
            name = attention.NAME if layout == "packed" else own
            done = layout == "packed" and logits == LogitMap()
            scores = packed if done else _try_score(model, rows, layout, logits, name)
            differences[layout] = d = scores if isinstance(scores, str) else (scores - alone).abs().max().item()
            if isinstance(d, float) and limit < d <= MOST and layout == "packed" and logits == found:
                model.set_attn_implementation(own)
                limit = limit_by_float64(model, rows, alone, limit)
            if isinstance(d, float) and d <= limit:
                plan = ForwardPlan(layout, logits, own, num_ids, seen, limit, differences)
                return replace(plan, shares=_shares(model, plan))
    return ForwardPlan("alone", None, own, num_ids, seen, limit, differences)


def _shares(model: PreTrainedModel, plan: ForwardPlan) -> bool:
    """Whether rows that begin alike are exact with their common beginnings computed once, which is tried for plain attention."""
    if plan.layout != "packed" or plan.logits is None or plan.seen.plain or plan.seen.windows:
        return False
    rows = rows_that_begin_alike(plan.num_ids)
    scores = _try_score(model, rows, "packed", plan.logits, attention.NAME, share=True)
    if isinstance(scores, str):
        return False
    model.set_attn_implementation(plan.own_attention)
    alone = torch.cat([own_logprobs(model, row.token_ids)[-row.num_sampled :] for row in rows])
    difference = (scores - alone).abs().max().item()
    limit = plan.limit
    if limit < difference <= MOST:
        limit = limit_by_float64(model, rows, alone, limit)
    return difference <= limit


@torch.no_grad()
def own_logprobs(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Log-probability of every id but the first by the model's own forward pass, [T - 1] in nats."""
    ids = torch.tensor([token_ids], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(dim=-1).gather(-1, ids[0, 1:, None])[:, 0]


def _noise(model: PreTrainedModel, token_ids: Sequence[int], logprobs: torch.Tensor) -> float:
    """The largest difference that the order of float32 sums makes: the row's beginnings, and copies of it, in other passes.

    No id sees a later one, and no row another. `token_ids` [T], its `logprobs` [T - 1].
    """
    differences = [
        (own_logprobs(model, token_ids[:n]) - logprobs[: n - 1]).abs().max().item()
        for n in (2, len(token_ids) // 2, len(token_ids) - 1)
    ]
    for copies in (2, 3):
        ids = torch.tensor([token_ids] * copies, device=model.device)
        scores = model(input_ids=ids, use_cache=False).logits[:, :-1].float().log_softmax(dim=-1)
        scores = scores.gather(-1, ids[:, 1:, None])[..., 0]
        differences.append((scores - logprobs).abs().max().item())
    return max(differences)


def limit_by_float64(model: PreTrainedModel, rows: Sequence[Sample], logprobs: torch.Tensor, limit: float) -> float:
    """`limit`, or a higher one if `logprobs` [N], the rows' by the model's own forward pass, have large rounding errors.

    `_noise` can miss them: in Qwen2.5-Coder-0.5B, whose hidden states have very large entries, beginnings and copies differ
    by 5e-5 nats, but all are 6e-4 from float64 (CPU); packed rows there differ by 1.1e-3 from rows alone (H200).
    """
    try:
        with in_type(model, torch.float64):
            exact = torch.cat([own_logprobs(model, row.token_ids)[-row.num_sampled :] for row in rows])
    except Exception:  # a kernel of the model does not take float64, or memory runs out
        return limit
    return min(max(limit, NOISE * (exact - logprobs).abs().max().item()), MOST)


@contextmanager
def in_type(model: PreTrainedModel, dtype: torch.dtype) -> Generator[None]:
    """In this context the model computes in `dtype`, but for what its code casts to float32 itself.

    Each module's weights have this type only while it runs: a copy of the whole model could exceed the memory.
    """
    given: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def widen(module: torch.nn.Module, args: object) -> None:
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        given[id(module)] = [(tensor, tensor.data) for tensor in own if tensor.is_floating_point()]
        for tensor, data in given[id(module)]:
            tensor.data = data.to(dtype)

    def narrow(module: torch.nn.Module, args: object, output: object) -> None:
        for tensor, data in given.pop(id(module), []):
            tensor.data = data

    hooks = []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(widen))
        hooks.append(module.register_forward_hook(narrow, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for kept in reversed(given.values()):  # modules that had not returned when something failed
            for tensor, data in kept:
                tensor.data = data


def measure_logits(model: PreTrainedModel, row: Sample, limit: float) -> LogitMap | None:
    """How the model makes its logits of `row` from hidden states and output embeddings; None if that is unknown.

    The scale is fitted by least squares, so that no configuration's name for it matters: one multiplies by what
    another divides by under the same name. Caps are tried as the configuration has them.
    """
    head: Any = model.get_output_embeddings()
    decoder: Any = model.get_decoder()
    if head is None or decoder is None or decoder is model:
        return None
    ids = torch.tensor([row.token_ids], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0].double()
    try:
        hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state
        products = head(hidden)[0].double()
    except (AttributeError, TypeError, RuntimeError):
        return None
    if products.shape != logits.shape:
        return None
    numbers = [
        v for v in model.config.get_text_config().to_dict().items() if isinstance(v[1], (int, float)) and v[1] > 0
    ]
    for cap in (0.0, *(float(value) for name, value in numbers if "cap" in name)):
        plain = cap * torch.atanh((logits / cap).clamp(-0.999, 0.999)) if cap else logits
        exact = logits.abs() < 0.9 * cap if cap else torch.ones_like(logits, dtype=torch.bool)
        scale = ((plain * products)[exact].sum() / products[exact].square().sum()).item()
        # The configuration's own number, without the rounding error of the fit.
        for number in (1.0, *(float(value) for _, value in numbers)):
            scale = next((s for s in (number, 1 / number) if abs(scale / s - 1) < 1e-5), scale)
        candidate = LogitMap(scale, cap)
        difference = candidate(products).log_softmax(dim=-1) - logits.log_softmax(dim=-1)
        if scale > 0 and difference.abs().max().item() <= limit:
            return candidate
    return None


def _try_score(
    model: PreTrainedModel,
    rows: list[Sample],
    layout: Layout,
    logits: LogitMap | None,
    attention_name: str,
    seen: attention.Seen | None = None,
    *,
    share: bool = False,
) -> torch.Tensor | str:
    """Log-probabilities [N] of the rows in this layout, or why they cannot be computed.

    `seen`: filled in. `share`: packed rows compute their common beginnings once.
    """
    try:
        model.set_attn_implementation(attention_name)
        scorer = TokenScorer(model, bf16=False, logits=logits)
        scores = []
        for part in [[row] for row in rows] if layout == "alone" else [rows]:
            batch = make_batch(part, layout, model.device)
            batch = share_beginnings(batch, part) if share else batch
            inputs = {**batch.inputs, **({} if seen is None else {"seen": seen})}
            scores.append(scorer(batch.ids, inputs, batch.wanted, batch.targets, 1.0)[0])
        return torch.cat(scores)
    except Exception as error:  # whatever a model raises that does not take these arguments
        return first_line(error)


@torch.no_grad()
def _windows_matter(model: PreTrainedModel) -> bool:
    """Whether the model's own forward pass looks at its narrowed windows: with wide ones its scores are others."""
    ids = measured_rows(vocabulary(model))[-1].token_ids
    narrow = own_logprobs(model, ids)
    with _windows_set(_windows(model, NARROW + 1), 1 << 20):
        return not torch.allclose(own_logprobs(model, ids), narrow, atol=LIMIT)


def _windows(model: PreTrainedModel, below: int) -> list[tuple[Any, str, int]]:
    """The attributes of configuration and modules that hold a window of less than `below` tokens: (object, name, value)."""
    places: list[Any] = [model.config, *model.modules()]
    if (text := model.config.get_text_config()) is not model.config:
        places.append(text)
    found = [(place, name, getattr(place, name, None)) for place in places for name in _WINDOWS]
    return [(place, name, value) for place, name, value in found if type(value) is int and 0 < value < below]


@contextmanager
def _windows_set(windows: list[tuple[Any, str, int]], length: int) -> Generator[None]:
    for place, name, _ in windows:
        setattr(place, name, length)
    try:
        yield
    finally:
        for place, name, value in windows:
            setattr(place, name, value)
