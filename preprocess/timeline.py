"""When the frames of a clip are shown. Knows times only: no pixels, no files.

    frame        0         1    2              3            end
    ticks        0 ────── 40 ─ 60 ────────── 200 ────────── 240        tick = 1/1000 s

Times are whole ticks, as in the file, so that nothing is rounded: a clip of 250 frames at 25 per second takes exactly
10 seconds, and sampling picks the same frames as it would from frame numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Self

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Timeline:
    """Start of every frame and the end of the last.

    Attributes:
        ticks: Start of each frame (at least one), ascending, the first at 0.
        end: End of the last frame, at least its start.
        tick: Seconds of one tick.
    """

    ticks: npt.NDArray[np.int64]
    end: int
    tick: Fraction

    @classmethod
    def of(cls, starts: npt.NDArray[np.int64], last_ticks: int, tick: Fraction) -> Self:
        """From frame starts in any order and how long the last frame is shown (0: as long as the others on average)."""
        ticks = np.unique(starts)
        ticks -= ticks[0]
        if last_ticks <= 0 and len(ticks) > 1:
            last_ticks = round(int(ticks[-1]) / (len(ticks) - 1))
        return cls(ticks, int(ticks[-1]) + max(last_ticks, 0), tick)

    @property
    def num_frames(self) -> int:
        """How many."""
        return len(self.ticks)

    @property
    def duration_s(self) -> Fraction:
        """From the first frame's start to the last one's end, in seconds."""
        return self.end * self.tick

    @property
    def rate(self) -> Fraction:
        """Frames per second, on average; 1 for a lone frame that is shown for no time."""
        return Fraction(self.num_frames) / self.duration_s if self.end else Fraction(1)

    def time_s(self, frame: int) -> Fraction:
        """When a frame is first shown, in seconds from the first."""
        return int(self.ticks[frame]) * self.tick

    @property
    def is_even(self) -> bool:
        """Whether frames follow each other at one rate, but for the rounding of their times."""
        if self.num_frames < 3 or not self.end:
            return True
        interval = self.end / self.num_frames
        expected = np.arange(self.num_frames) * interval
        return bool(np.abs(self.ticks - expected).max() < max(0.45 * interval, 1))

    def frames_at(self, frame_numbers: npt.NDArray[np.int64]) -> list[int]:
        """What a clip of one steady rate (`rate`) would show at these frame numbers: frames, ascending, once each.

        Where the rate is steady these are the numbers themselves; elsewhere the frames shown at those times.
        """
        if self.is_even:
            return [int(number) for number in np.unique(frame_numbers)]
        times = frame_numbers * (self.end / self.num_frames) + 0.5
        return [int(frame) for frame in np.unique(np.searchsorted(self.ticks, times, side="right") - 1)]

    def between(self, start_s: Fraction, end_s: Fraction) -> tuple[Timeline, int]:
        """What is shown from `start_s` until `end_s`, as a clip of its own, and which frame is its first one here.

        A frame that is already being shown when the part starts counts as starting then.
        """
        start, end = min(round(start_s / self.tick), self.end), min(round(end_s / self.tick), self.end)
        first = max(int(np.searchsorted(self.ticks, start, side="right")) - 1, 0)
        stop = max(int(np.searchsorted(self.ticks, end, side="left")), first + 1)
        ticks = np.maximum(self.ticks[first:stop], start) - start
        return Timeline(ticks, max(end - start, int(ticks[-1])), self.tick), first
