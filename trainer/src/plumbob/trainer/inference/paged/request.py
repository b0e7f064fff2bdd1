"""A completion that the paged engine draws: its own random numbers, and where it ends."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from plumbob.trainer.inference.in_process import Request


@dataclass(eq=False)
class PagedRequest(Request):
    pages: list[int] = field(default_factory=list)
    uniforms: list[float] = field(default_factory=list)

    @property
    def ids(self) -> np.ndarray:
        """Prompt and completion so far."""
        return np.concatenate([self.prompt, np.asarray(self.token_ids, dtype=np.int64)])

    @cached_property
    def plain(self) -> bool:
        """Whether it samples from the whole vocabulary."""
        s = self.sampling
        return s.temperature == 0 or (s.top_p >= 1 and s.top_k <= 0 and s.min_p <= 0)

    def next_uniforms(self, count: int) -> list[float]:
        """The numbers that draw the next `count` tokens: they depend on the seed and on the tokens' places alone.

        `token_ids` must be complete.
        """
        start = len(self.token_ids)
        number = self.random.random
        self.uniforms += [number() for _ in range(start + count - len(self.uniforms))]
        return self.uniforms[start : start + count]

    def cut(self, new: int) -> tuple[int, Literal["stop", "length", "nan"] | None]:
        """Remove what was sampled behind the end of the completion, which may be in its last `new` tokens.

        Returns the number of tokens removed, and why the completion ends; None if it does not.
        """
        s, start = self.sampling, len(self.token_ids) - new
        stop = next(
            (i for i in range(start, len(self.token_ids)) if self.token_ids[i] in s.stop_token_ids), s.max_tokens
        )
        end = min(stop + 1, s.max_tokens)
        surplus = max(len(self.token_ids) - end, 0)
        del self.token_ids[end:], self.logprobs[end:]
        if any(map(math.isnan, self.logprobs[start:])):
            return surplus, "nan"
        if stop < end:
            return surplus, "stop"
        return surplus, "length" if len(self.token_ids) >= s.max_tokens else None
