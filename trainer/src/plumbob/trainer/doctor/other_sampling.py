"""What an engine may sample from in place of the requested distribution, and how likely its tokens are then.

Two questions are answered with it. If the engine's log-probabilities differ from the trainer's: are they those of one of
these distributions? If they agree: were the tokens drawn from the distribution that both report? An engine may report the
model's log-probabilities and sample with other settings (vLLM's raw_logprobs, its default).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from plumbob.rollout import Sample

MOST_LOGITS = 2**26
"""Largest number of logits of a row that are looked at: of a longer row with a large vocabulary, the first tokens."""
JOINED_LOGITS = 2**22
"""Number of logits, and of counts of a text's tokens, up to which rows are looked at together."""
FINER = tuple(1.1 ** (k / 4) for k in range(-8, 9))
"""Multiples of the number that fits best which are tried then."""


class View:
    """Sampled tokens of a row, or of several, with the trainer's logits before each of them."""

    def __init__(self, row: Sample, logits: torch.Tensor, temperature: float) -> None:
        """`logits` [T, V]: after each token of the row. `temperature`: the one that was asked for."""
        places = [i for i, sampled in enumerate(row.loss_mask) if sampled]
        at = torch.tensor(places[: MOST_LOGITS // logits.shape[-1]], device=logits.device)
        ids = torch.tensor(row.token_ids, device=logits.device)
        self.temperature, self.tokens = temperature, ids[at]
        self.logits = logits[at - 1].float()
        self.logprobs = self._of(self.logits / temperature)
        # Penalties change the logits of tokens that the text has already, so only these columns are needed for them.
        self.seen, index = ids.unique(return_inverse=True)
        one_hot = torch.nn.functional.one_hot(index, len(self.seen))
        sampled = torch.tensor(row.loss_mask, device=logits.device)
        self.any = (one_hot.cumsum(0) - one_hot)[at]
        own = one_hot * sampled[:, None]
        before = own.cumsum(0) - own
        self.own = before[at]
        starts = [i for i in range(len(row.loss_mask)) if row.loss_mask[i] and not (i and row.loss_mask[i - 1])]
        turn = torch.bucketize(at, torch.tensor(starts, device=logits.device), right=True) - 1
        self.turn = self.own - before[torch.tensor(starts, device=logits.device)[turn]]
        self.column = index[at]
        self._rows = [(row.token_ids, at.tolist())]
        """Of each row its ids, and the places of its sampled tokens."""

    @classmethod
    def joined(cls, views: Sequence[View]) -> View:
        """All tokens of these views, in order: what is computed of many short rows at once takes a fraction of the time."""
        view = cls.__new__(cls)
        view.temperature, view._rows = views[0].temperature, [row for v in views for row in v._rows]
        view.tokens, view.logits, view.logprobs = (
            torch.cat([getattr(v, name) for v in views]) for name in ("tokens", "logits", "logprobs")
        )
        view.seen = torch.cat([v.seen for v in views]).unique()
        places = [torch.searchsorted(view.seen, v.seen) for v in views]
        view.column = torch.cat([at[v.column] for v, at in zip(views, places, strict=True)])
        for name in ("any", "own", "turn"):
            wide = [getattr(v, name).new_zeros(len(v.tokens), len(view.seen)) for v in views]
            for v, counts, at in zip(views, wide, places, strict=True):
                counts[:, at] = getattr(v, name)
            setattr(view, name, torch.cat(wide))
        return view

    def _of(self, scaled: torch.Tensor) -> torch.Tensor:
        return scaled.gather(-1, self.tokens[:, None])[:, 0] - scaled.logsumexp(-1)

    @cached_property
    def _column_of(self) -> dict[int, int]:
        """Token id -> its place in `seen`."""
        return {token: column for column, token in enumerate(self.seen.tolist())}

    @cached_property
    def _seen_mass(self) -> torch.Tensor:
        """Probabilities [n, seen] of the tokens that the text has."""
        return (self.logits / self.temperature).log_softmax(-1)[:, self.seen].exp()

    @cached_property
    def _sorted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Probabilities [n, V], highest first, and their sums before each."""
        p = (self.logits / self.temperature).softmax(-1).sort(-1, descending=True).values
        return p, p.cumsum(-1) - p

    def at_temperature(self, value: float) -> torch.Tensor:
        """Log-probabilities [n] of the tokens at this temperature."""
        return self._of(self.logits / value)

    def shifted(self, change: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [n] after `change` [n, seen] is added to the logits of tokens that the text has."""
        change = change / self.temperature
        rest = (self._seen_mass * change.expm1()).sum(-1).clamp(min=-1 + 1e-6).log1p()
        return self.logprobs + change.gather(-1, self.column[:, None])[:, 0] - rest

    def repetition(self, value: float, counts: torch.Tensor) -> torch.Tensor:
        """Transformers' repetition penalty: logits above 0 are divided by `value`, others multiplied."""
        logits = self.logits[:, self.seen]
        return self.shifted((torch.where(logits > 0, logits / value, logits * value) - logits) * (counts > 0))

    def without_repeats(self, size: int) -> torch.Tensor:
        """Log-probabilities [n] if no `size` tokens in a row may stand in the text twice; -inf for those that then do.

        transformers' no_repeat_ngram_size, which counts the prompt.
        """
        banned = torch.zeros(len(self.tokens), len(self.seen), dtype=torch.bool)
        first = 0
        for ids, places in self._rows:
            followers = dict[tuple[int, ...], set[int]]()
            numbers = {place: first + number for number, place in enumerate(places)}
            first += len(places)
            for place in range(size - 1, places[-1] + 1 if places else 0):
                before = tuple(ids[place - size + 1 : place])
                if place in numbers and before in followers:
                    banned[numbers[place], [self._column_of[i] for i in followers[before]]] = True
                followers.setdefault(before, set()).add(ids[place])
        banned = banned.to(self.logits.device)
        rest = -(self._seen_mass * banned).sum(-1).clamp(max=1 - 1e-6)
        own = banned.gather(-1, self.column[:, None])[:, 0]
        return torch.where(own, -torch.inf, self.logprobs - rest.log1p())

    def cut(
        self, keep: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], temperature: float | None = None
    ) -> torch.Tensor:
        """Log-probabilities [n] if only some tokens can be sampled; -inf for those that cannot.

        `keep`: from probabilities [n, V], highest first, and their sums before each, to whether each can be sampled.
        `temperature`: of these probabilities, where it is not that of the sampler.
        """
        p, before = self._sorted
        if temperature is None:
            kept = keep(p, before)
        else:
            own = (p.log() * (self.temperature / temperature)).softmax(-1)
            kept = keep(own, own.cumsum(-1) - own)
        least = torch.where(kept, p, torch.inf).amin(-1)
        mass = (p * kept).sum(-1).log()
        return torch.where(self.logprobs.exp() >= least * (1 - 1e-5), self.logprobs - mass, -torch.inf)


@dataclass(frozen=True)
class Way:
    """A family of distributions with one number."""

    cause: str
    name: str
    """What the engine does, with `{}` for the number."""
    numbers: tuple[float, ...]
    of: Callable[[View, float], torch.Tensor]
    """Log-probabilities [n] of a row's tokens with this number."""
    whole: bool = False
    """Whether the number has to be an integer."""


def _top_k(view: View, k: float) -> torch.Tensor:
    return view.cut(lambda p, before: torch.arange(p.shape[-1], device=p.device).expand_as(p) < k)


def _top_p_before(view: View, share: float) -> torch.Tensor:
    return view.cut(lambda p, before: before < share, 1.0)


_COLD, _CUT, _PENALTY = "temperature-not-applied", "sampling-truncated", "sampling-penalised"
_TEMPERATURES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 1.8, 2.0, 2.2, 2.5, 3.0, 4.0, 6.0)
_STRENGTHS = (0.1, 0.2, 0.5, 1.0, 1.5, 2.0)
_FACTORS = (1.02, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0)

WAYS = (
    Way(_COLD, "at temperature {:.3g}", _TEMPERATURES, View.at_temperature),
    Way(_COLD, "the likeliest token only", (1.0,), _top_k),
    Way(_CUT, "with top-k {:.0f}", (2.0, 5.0, 10.0, 20.0, 50.0, 100.0), _top_k),
    Way(_CUT, "with top-p {:g}", (0.5, 0.7, 0.8, 0.9, 0.95, 0.99), lambda v, x: v.cut(lambda p, before: before < x)),
    Way(_CUT, "with top-p {:g} of the probabilities at temperature 1", (0.8, 0.9, 0.95), _top_p_before),
    Way(_CUT, "with min-p {:g}", (0.01, 0.05, 0.1, 0.2), lambda v, x: v.cut(lambda p, before: p >= x * p[:, :1])),
    Way(_PENALTY, "with a repetition penalty of {:.3g}", _FACTORS, lambda v, x: v.repetition(x, v.any)),
    Way(_PENALTY, "with a repetition penalty of {:.3g} on sampled tokens", _FACTORS, lambda v, x: v.repetition(x, v.own)),
    Way(_PENALTY, "with a penalty of {:.3g} on each token of the text", _STRENGTHS, lambda v, x: v.shifted(-x * (v.any > 0))),
    Way(_PENALTY, "with a presence penalty of {:.3g}", _STRENGTHS, lambda v, x: v.shifted(-x * (v.turn > 0))),
    Way(_PENALTY, "with a presence penalty of {:.3g} over all turns", _STRENGTHS, lambda v, x: v.shifted(-x * (v.own > 0))),
    Way(_PENALTY, "with a frequency penalty of {:.3g}", _STRENGTHS, lambda v, x: v.shifted(-x * v.turn.clamp(max=50))),
    Way(_PENALTY, "without a repetition of {:.0f} tokens", (2.0, 3.0, 4.0, 5.0, 6.0), lambda v, x: v.without_repeats(int(x)), True),
)  # fmt: skip
"""Other distributions that engines are known to sample from. Penalties come with names as in OpenAI's and vLLM's APIs."""

Scores = Mapping[tuple[Way, float], torch.Tensor]


def joined(views: Iterable[View]) -> Iterator[View]:
    """The views with as many neighbours joined as `JOINED_LOGITS` allows."""
    some: list[View] = []
    for view in views:
        size = sum(len(v.tokens) for v in (*some, view)) * max(
            view.logits.shape[-1], sum(len(v.seen) for v in (*some, view))
        )
        if some and size > JOINED_LOGITS:
            yield View.joined(some)
            some = []
        some.append(view)
    if some:
        yield View.joined(some)


@torch.no_grad()
def all_scores(view: View) -> dict[tuple[Way, float], torch.Tensor]:
    """Log-probabilities [n] of a row's tokens under every way and number, but the distribution that was asked for."""
    return {
        (way, x): way.of(view, x).cpu()
        for way in WAYS
        for x in way.numbers
        if not (way.of is View.at_temperature and abs(x - view.temperature) < 0.05)
    }


@dataclass(frozen=True)
class Evidence:
    """How much likelier sampled tokens are under other distributions than under the reported one."""

    log_ratio: float
    """Logarithm of the mean likelihood ratio over all ways and numbers."""
    best: str
    """The likeliest way, in words."""
    cause: str
    next_cause: float
    """Logarithm of the likelihood ratio of the best way against the best way with another cause."""
    temperature: float | None
    """That of the best way, if it is another temperature."""


def weigh(reported: Sequence[torch.Tensor], others: Sequence[Scores]) -> Evidence:
    """Compare the log-probabilities [n] of each row as reported with those under other distributions.

    If the tokens were drawn as reported, the expected ratio is 1 for every way, since each factor has expectation 1 given
    all tokens before it (at most 1 if the way leaves tokens out). So the mean over ways exceeds k with a probability of at
    most 1/k, whatever the model and however few tokens there are (Ville's inequality); a number of standard deviations has
    no such bound.
    """
    ratios = {
        key: math.fsum(
            (other[key].double() - own.double()).sum().item() for own, other in zip(reported, others, strict=True)
        )
        for key in others[0]
    }
    (way, number), top = max(ratios.items(), key=lambda pair: pair[1])
    rest = max((r for (w, _), r in ratios.items() if w.cause != way.cause), default=-math.inf)
    mean = torch.tensor(list(ratios.values()), dtype=torch.float64).logsumexp(0).item() - math.log(len(ratios))
    temperature = number if way.of is View.at_temperature else None
    return Evidence(mean, way.name.format(number), way.cause, top - rest, temperature)


@torch.no_grad()
def closest(views: Sequence[View], wrong: Sequence[torch.Tensor]) -> tuple[str, str, float]:
    """(cause, way in words, mean |difference| in nats) under which log-probabilities come closest to `wrong`'s.

    The numbers of each way are tried first as they are, then others around the best one.
    """
    theirs = torch.cat([logprobs[: len(view.tokens)] for view, logprobs in zip(views, wrong, strict=True)])

    def apart(way: Way, number: float) -> float:
        own = torch.cat([way.of(view, number).cpu() for view in views])
        return (own - theirs).abs().mean().item()

    found = {(way, x): apart(way, x) for way in WAYS for x in way.numbers}
    best, number = min(found, key=lambda key: found[key])
    if best.cause != _CUT and not best.whole:
        for finer in (FINER, tuple(1 + (f - 1) / 8 for f in FINER)):
            near = number
            found |= {(best, near * f): apart(best, near * f) for f in finer}
            _, number = min((key for key in found if key[0] is best), key=lambda key: found[key])
    gap = found[best, number]
    return best.cause, best.name.format(number), gap
