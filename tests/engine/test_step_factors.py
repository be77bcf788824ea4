"""Which part of steps takes longer than was known, from sums alone."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.step_factors import LEAST, MOST, MOST_OFF, MOST_READING, Factors

PLAIN = ((1.0, 0.5, 0.0, 0.0), (1.0, 0.0, 0.6, 0.0), (1.0, 0.2, 0.0, 0.0), (1.0, 0.3, 0.2, 0.0), (1.0, 0.0, 0.4, 0.0))
MIXTURES = (*PLAIN, (1.0, 0.3, 0.0, 0.1), (1.0, 0.3, 0.0, 0.3))


@pytest.mark.parametrize("truth", [(1.3, 1.0, 1.0), (1.0, 1.2, 1.25), (0.9, 0.8, 1.0), (1.0, 1.0, 1.0)])
def test_mixtures_tell_parts_apart(truth: tuple[float, float, float]) -> None:
    factors = Factors()
    for step in range(200):
        parts_s = PLAIN[step % len(PLAIN)]
        factors.correct(parts_s, sum(factor * part_s for factor, part_s in zip((*truth, 1.0), parts_s, strict=True)))
    assert (factors.decode, factors.prompt, factors.slices) == pytest.approx(truth, rel=0.05)
    assert factors.reading == 1.0, "nothing was read"


@pytest.mark.parametrize("truth", [(1.3, 1.0, 1.0, 1.0), (1.0, 1.2, 1.25, 3.0), (0.9, 0.8, 1.0, 0.5)])
def test_nor_is_reading_taken_for_prompts(truth: tuple[float, float, float, float]) -> None:
    factors = Factors()
    for step in range(200):
        parts_s = MIXTURES[step % len(MIXTURES)]
        factors.correct(parts_s, sum(factor * part_s for factor, part_s in zip(truth, parts_s, strict=True)))
    assert (factors.decode, factors.prompt, factors.slices, factors.reading) == pytest.approx(truth, rel=0.05)


def test_what_did_not_come_for_long_is_not_in_more_doubt_than_at_first() -> None:
    """Then one odd step does not make slices twice as dear."""
    factors = Factors()
    for _ in range(20_000):
        factors.correct((1.0, 0.0, 0.0, 0.0), 1.0)
    factors.correct((1.0, 0.0, 0.1, 0.0), 5.0)
    assert factors.decode == pytest.approx(1.0, abs=MOST_OFF)
    assert factors.slices == pytest.approx(1.0, abs=0.05)


@given(
    st.lists(
        st.tuples(*[st.one_of(st.just(0.0), st.floats(1e-6, 10.0))] * 4, st.floats(-1.0, 1e3)),
        max_size=60,
    )
)
def test_whatever_steps_take_factors_stay_within_bounds(steps: list[tuple[float, float, float, float, float]]) -> None:
    factors = Factors()
    for *parts_s, step_s in steps:
        factors.correct(parts_s, step_s)
        assert all(LEAST <= factor <= MOST for factor in (factors.decode, factors.prompt, factors.slices))
        assert LEAST <= factors.reading <= MOST_READING
        assert math.isfinite(factors.expected_s(parts_s))
