"""The large weight change of the sync probe: large enough to be seen, and not so large that it breaks the model."""

import math

from hypothesis import given
from hypothesis import strategies as st
from plumbob.trainer.doctor.weight_change import LARGE_CHANGE, TOO_LARGE, scale_for


@given(st.floats(1e-3, 0.25), st.floats(1.0, 10.0))
def test_a_change_is_found_that_is_seen_and_breaks_nothing(at_one: float, power: float) -> None:
    """Seen with Qwen2.5-Coder-0.5B in bfloat16: twice a change too small to be seen moved it by 13 nats."""
    trials: list[float] = []

    def moved(factor: float) -> float:
        trials.append(factor)
        return at_one * factor**power

    nats = at_one * scale_for(moved) ** power
    assert LARGE_CHANGE <= nats <= TOO_LARGE or at_one * 2.0 ** (8 * power) < LARGE_CHANGE
    assert len(trials) <= 14


def test_where_no_change_lies_between_the_one_that_is_seen_is_taken() -> None:
    assert 1.0 < scale_for(lambda factor: 13.0 if factor > 1.0 else 0.2) <= 2.0
    assert math.isclose(scale_for(lambda factor: 0.5), 1.0)
    assert scale_for(lambda factor: 0.0) >= 128
