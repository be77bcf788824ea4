"""What steps are expected to take before they were measured, where drafts wait for results and where they do not."""

from __future__ import annotations

import pytest

from engine.speculation.step_times import StepTimes


def _times(*, waits: bool, **widths: float) -> StepTimes:
    """After steps of one row: `w4=2.0` are two of 4 tokens that took 2 s each."""
    times = StepTimes(waits=waits)
    for name, elapsed_s in widths.items():
        for _ in range(2):
            times.add(1, int(name[1:]), elapsed_s)
    return times


def test_where_drafts_wait_many_are_expected_to_cost_hardly_more_than_one() -> None:
    times = _times(waits=True, w1=1.0)
    one, many = times.step_s(1, 2), times.step_s(1, 16)
    assert one is not None
    assert many is not None
    assert 1.3 < one < many < 1.2 * one
    assert many < (_times(waits=False, w1=1.0).step_s(1, 16) or 0.0) / 2


def test_what_one_draft_cost_is_not_taken_for_the_price_of_each() -> None:
    """Most of it was waiting."""
    times = _times(waits=True, w1=1.0, w2=1.5)
    assert times.step_s(1, 2) == 1.5
    assert times.step_s(1, 16) == pytest.approx(1.5, rel=0.15)
    assert (_times(waits=False, w1=1.0, w2=1.5).step_s(1, 16) or 0.0) > 4


@pytest.mark.parametrize("waits", [False, True])
def test_what_was_measured_counts(waits: bool) -> None:
    times = _times(waits=waits, w1=1.0, w2=1.5, w8=5.0)
    assert times.step_s(1, 8) == 5.0
    assert 1.5 < (times.step_s(1, 4) or 0.0) < 5.0
    assert (times.step_s(1, 16) or 0.0) > 5.0


@pytest.mark.parametrize("waits", [False, True])
def test_trees_are_not_held_to_be_dear_where_chains_of_their_size_were_only_hoped_to_be_cheap(waits: bool) -> None:
    """With the size of chains between plain steps and 7 drafts unknown, trees of 3 that take as long as those 7."""
    times = _times(waits=waits, w1=1.0, w8=1.6)
    hoped = times.step_s(1, 4)
    assert hoped is not None
    for _ in range(3):
        times.add_tree(1, 4, 1.6 if waits else 1.0 + 0.6 * 3 / 7)
    assert hoped < 1.2
    assert (times.tree_s(1, 8) or 0.0) == pytest.approx(1.6, rel=0.1)
