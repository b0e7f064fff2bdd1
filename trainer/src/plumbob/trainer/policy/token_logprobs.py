"""Log-probabilities and entropies of sampled tokens from hidden states, with the logits of one chunk at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from plumbob.trainer.policy.gpu_memory import total_memory

CHUNK_LOGITS = 1 << 25
"""Most logits of one chunk on a CPU: 128 MiB in float32, or 220 tokens of a 152k vocabulary."""

CHUNK_LOGITS_CUDA = 1 << 28
"""Most logits of one chunk on a GPU, which needs longer ones: 1 GiB in float32, or 1766 tokens of a 152k vocabulary."""

COMPILED_LOGITS = 1 << 26
"""Fewest logits of one chunk that are worth compiled kernels: 441 tokens of a 152k vocabulary.

To compile takes seconds, which passes over a few short rows, as those that measure a model, never make up for.
"""


def most_logits(memory: int) -> int:
    """Most logits of one chunk on a GPU of which so many bytes may be used: they and their gradients take a 32nd of it."""
    return min(CHUNK_LOGITS_CUDA, memory // 256)


def score_tokens(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float, cap: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [N] of `targets` and entropies [N] under softmax(z), z = hidden @ weight.T / temperature.

    With `cap` c above 0, z becomes c tanh(z / c). Both are float32, in nats. `hidden` [N, D]; `weight` [V, D], the
    output embedding; `targets` [N]. Gradients flow from the log-probabilities to `hidden` and `weight`; the entropies
    have no gradient. Under autocast the products are computed in its type and their sums in float32: logits are not
    rounded, and the gradient of `weight` is float32 from the start.
    """
    if not len(hidden):
        empty = hidden.sum() * 0 + torch.zeros(0, device=hidden.device)
        return empty, empty.detach()
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    logprobs, entropies = _ScoreTokens.apply(hidden, weight, targets, temperature, cap, dtype, torch.is_grad_enabled())
    return logprobs, entropies


def score_logits(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`score_tokens` from logits [N, V] that a model has computed itself, and that all are in memory at once."""
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    with torch.no_grad():
        # A model may give ids that it never writes a logit of -inf, whose share of the entropy is 0.
        entropies = -(logprobs.exp() * logprobs.clamp(min=torch.finfo(torch.float32).min)).sum(dim=-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], entropies


class _ScoreTokens(torch.autograd.Function):
    """The forward and backward pass of `score_tokens`. With z = hidden @ weight.T / temperature and p = softmax(z):

    d logprob_t / d hidden_t = (weight[y_t] - p_t @ weight) / temperature,
    d logprob_t / d weight = (onehot(y_t) - p_t) hidden_t^T / temperature,

    where a capped logit z' = c tanh(z / c) multiplies its entry of onehot(y_t) - p_t by 1 - (z' / c)^2.

    The gradient of `hidden` depends on the incoming gradient only by a factor per token. So where `weight` is frozen
    (LoRA), it is computed in the forward pass, while the logits exist. The gradient of `weight` is a sum over tokens
    with these factors, so the logits are computed again in the backward pass, when the factors are known.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        cap: float,
        dtype: torch.dtype,
        with_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.temperature, ctx.cap, ctx.hidden_dtype = temperature, cap, hidden.dtype
        ctx.weight_trained = with_grad and ctx.needs_input_grad[1]
        now = with_grad and ctx.needs_input_grad[0] and not ctx.weight_trained
        with torch.autocast(hidden.device.type, enabled=False):
            hidden, weight = hidden.to(dtype), weight.to(dtype)
            logprobs, normalisers, entropies = (torch.empty(len(hidden), device=hidden.device) for _ in range(3))
            slopes = torch.empty_like(hidden) if now else None
            for part in _chunks(len(hidden), weight):
                logits = _product(hidden[part], weight.T)
                stats = _compiled(_statistics, logits, targets[part], temperature, cap)
                logprobs[part], normalisers[part], entropies[part] = stats
                if slopes is not None:
                    factors = torch.ones_like(normalisers[part])
                    d = _compiled(
                        _logit_gradient, logits, targets[part], normalisers[part], factors, temperature, cap, dtype
                    )
                    slopes[part] = d @ weight
                del logits
        if slopes is not None:
            ctx.save_for_backward(slopes)
        elif with_grad:
            ctx.save_for_backward(hidden, weight, targets, normalisers)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if not ctx.weight_trained:
            (slopes,) = ctx.saved_tensors
            return (slopes * grads[0][:, None]).to(ctx.hidden_dtype), None, None, None, None, None, None
        hidden, weight, targets, normalisers = ctx.saved_tensors
        d_hidden = torch.empty(hidden.shape, dtype=ctx.hidden_dtype, device=hidden.device)
        d_weight: torch.Tensor | None = None
        with torch.autocast(hidden.device.type, enabled=False):
            for part in _chunks(len(hidden), weight):
                logits = _product(hidden[part], weight.T)
                d = _compiled(
                    _logit_gradient,
                    logits,
                    targets[part],
                    normalisers[part],
                    grads[0][part],
                    ctx.temperature,
                    ctx.cap,
                    weight.dtype,
                )
                del logits
                d_hidden[part] = d @ weight
                d_weight = _product(d.T, hidden[part], add_to=d_weight)
        return d_hidden, d_weight, None, None, None, None, None


def _statistics(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, cap: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logits [N, V] -> log-probabilities of the targets, log-normalisers and entropies, [N] each."""
    logits = logits / temperature
    if cap:
        logits = cap * torch.tanh(logits / cap)
    # Logits relative to the largest one make the entropy's terms small. With the logits themselves, large terms would
    # cancel and leave rounding errors.
    shifts = logits.amax(dim=-1)
    relative = logits - shifts[:, None]
    weights = relative.exp()
    sums = weights.sum(dim=-1)
    entropies = sums.log() - (weights * relative).sum(dim=-1) / sums
    normalisers = shifts + sums.log()
    return logits.gather(-1, targets[:, None])[:, 0] - normalisers, normalisers, entropies


def _logit_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    normalisers: torch.Tensor,
    factors: torch.Tensor,
    temperature: float,
    cap: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The gradient of the logits, factor_t (onehot(y_t) - p_t) / temperature without a cap: [N, V] in `dtype`."""
    logits = logits / temperature
    if cap:
        logits = cap * torch.tanh(logits / cap)
    p = (logits - normalisers[:, None]).exp()
    hit = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    gradient = (hit.to(p.dtype) - p) * (factors[:, None] / temperature)
    return (gradient * (1 - (logits / cap).square()) if cap else gradient).to(dtype)


def _chunks(n: int, weight: torch.Tensor) -> list[slice]:
    """Divide n tokens into chunks of about equal size within the limit of logits."""
    limit = most_logits(total_memory(weight.device)) if weight.is_cuda else CHUNK_LOGITS
    count = -(-n // max(1, limit // weight.shape[0]))
    size = -(-n // count)  # chunks have equal sizes, because a short last one would waste most of a matrix tile
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def _product(a: torch.Tensor, b: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
    """a @ b with a float32 result, added to `add_to` in place if that is given."""
    if a.is_cuda and a.dtype != torch.float32:
        if add_to is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.addmm(add_to, a, b, out_dtype=torch.float32, out=add_to)
    return (a @ b).float() if add_to is None else add_to.add_(a @ b)


@functools.cache
def _compiler(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def _compiled(function: Callable[..., Any], logits: torch.Tensor, *args: Any) -> Any:
    """Call `function`, on a GPU compiled into one or two kernels, because each of its steps would move all memory."""
    if not logits.is_cuda or logits.numel() < COMPILED_LOGITS:
        return function(logits, *args)
    for tensor in (logits, *(a for a in args if isinstance(a, torch.Tensor))):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return _compiler(function)(logits, *args)


def compile_for(device: torch.device, vocab: int, temperature: float, bf16: bool) -> None:
    """Compile what scores tokens of a vocabulary of `vocab` ids on `device`, by scoring a chunk of the usual size."""
    n = CHUNK_LOGITS_CUDA // vocab
    with torch.no_grad():
        logits, targets = torch.zeros(n, vocab, device=device), torch.zeros(n, dtype=torch.long, device=device)
        _, normalisers, _ = _compiled(_statistics, logits, targets, temperature, 0.0)
        dtype = torch.bfloat16 if bf16 else torch.float32
        factors = torch.ones_like(normalisers)  # one tensor for both would be other code
        _compiled(_logit_gradient, logits, targets, normalisers, factors, temperature, 0.0, dtype)
