"""When frames are shown: exact durations and rates, steady and not, and parts of a clip as clips of their own."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from preprocess.timeline import Timeline

MS = Fraction(1, 1000)


def timeline(*starts_ms: int, last_ms: int = 0) -> Timeline:
    return Timeline.of(np.array(starts_ms, np.int64), last_ms, MS)


def steady(num_frames: int, rate: Fraction | int, tick: Fraction = MS) -> Timeline:
    """As a file writes it that rounds times to ticks."""
    starts = [round(Fraction(number) / rate / tick) for number in range(num_frames)]
    return Timeline.of(np.array(starts, np.int64), round(1 / rate / tick), tick)


def test_duration_and_rate_are_exact() -> None:
    clip = steady(250, 25)
    assert (clip.num_frames, clip.duration_s, clip.rate) == (250, 10, 25)


def test_frames_come_in_any_order_and_start_anywhere() -> None:
    clip = timeline(1080, 1000, 1120, 1040, last_ms=40)
    assert clip.ticks.tolist() == [0, 40, 80, 120]
    assert clip.duration_s == Fraction(16, 100)


def test_a_last_frame_of_unknown_length_lasts_as_long_as_the_others() -> None:
    assert timeline(0, 100, 200).duration_s == Fraction(3, 10)
    assert timeline(0).duration_s == 0


def test_a_lone_frame_has_a_rate() -> None:
    assert timeline(0).rate == 1
    assert timeline(0, last_ms=40).rate == 25


@pytest.mark.parametrize("rate", [24, 25, 30, 60, Fraction(30000, 1001), Fraction(24000, 1001), 7])
def test_rounded_times_are_steady(rate: Fraction | int) -> None:
    clip = steady(500, rate)
    assert clip.is_even
    assert clip.frames_at(np.array([0, 17, 17, 499])) == [0, 17, 499]


def test_where_the_rate_varies_the_frames_shown_at_the_times_are_taken() -> None:
    clip = timeline(0, 1000, 1010, 1020, 1030, 9000, last_ms=1000)  # six frames in ten seconds
    assert not clip.is_even
    assert clip.frames_at(np.arange(6)) == [0, 4]  # 0, 1.67, 3.33, 5, 6.67 and 8.33 s


def test_a_part_starts_with_the_frame_that_is_being_shown() -> None:
    clip = timeline(0, 4000, 8000, last_ms=4000)
    part, first = clip.between(Fraction(5), Fraction(9))
    assert first == 1
    assert part.ticks.tolist() == [0, 3000]
    assert part.duration_s == 4


def test_parts_cover_a_steady_clip_without_a_frame_twice() -> None:
    clip = steady(100, 25)
    seen: list[int] = []
    for second in range(4):
        part, first = clip.between(Fraction(second), Fraction(second + 1))
        assert (part.num_frames, part.rate) == (25, 25)
        seen += range(first, first + part.num_frames)
    assert seen == list(range(100))


def test_a_part_in_which_no_frame_starts_has_one() -> None:
    part, first = timeline(0, 10_000, last_ms=1000).between(Fraction(2), Fraction(4))
    assert (first, part.num_frames, part.duration_s) == (0, 1, 2)
