"""How fast things come and how old they are: a token bucket, the camera's clock, and a median of recent values."""

from __future__ import annotations

import statistics
from collections import deque


class Bucket:
    """Admits `per_s` a second on average, and `burst` at once."""

    def __init__(self, per_s: float, burst: float, now_s: float) -> None:
        self.per_s = per_s
        self.burst = max(burst, 1.0)
        self._level = self.burst
        self._last_s = now_s

    def level(self, now_s: float) -> float:
        """How much may pass now."""
        return min(self.burst, self._level + (now_s - self._last_s) * self.per_s)

    def admits(self, now_s: float, amount: float = 1.0) -> bool:
        """Whether `amount` more may pass now. What may not is not charged."""
        self._level, self._last_s = self.level(now_s), now_s
        if self._level + 1e-9 < amount:  # a camera at exactly the limit must not lose a frame to rounding
            return False
        self._level -= amount
        return True


class CaptureClock:
    """When a frame was captured, on our clock, from time stamps of a clock that we know nothing about.

    The frame that took the least time to come defines the offset between the two clocks. Its own travel is not known;
    what later frames took longer is. The offset is the least of the last one to two minutes, so drift stays small; a
    camera whose clock jumps starts again.
    """

    WINDOW_S = 60.0
    JUMP_S = 30.0

    def __init__(self) -> None:
        self._offset_s: float | None = None
        self._recent_s: float | None = None
        self._window_ends_s = 0.0

    def captured_s(self, ts_ms: float | None, received_s: float) -> float:
        """Never later than `received_s`, which it is without a time stamp."""
        if ts_ms is None:
            return received_s
        offset_s = received_s - ts_ms / 1e3
        if self._offset_s is None or abs(offset_s - self._offset_s) > self.JUMP_S:
            self._offset_s = self._recent_s = offset_s
            self._window_ends_s = received_s + self.WINDOW_S
        elif received_s > self._window_ends_s:
            self._offset_s = min(self._recent_s if self._recent_s is not None else offset_s, offset_s)
            self._recent_s = offset_s
            self._window_ends_s = received_s + self.WINDOW_S
        else:
            self._offset_s = min(self._offset_s, offset_s)
            self._recent_s = min(self._recent_s if self._recent_s is not None else offset_s, offset_s)
        return min(received_s, ts_ms / 1e3 + self._offset_s)


class Recent:
    """The median of the last 64 values; None before the first."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=64)
        self.median: float | None = None

    def add(self, value: float) -> None:
        """One more."""
        self._values.append(value)
        self.median = statistics.median(self._values)
