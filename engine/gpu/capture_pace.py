"""When something may be captured between two steps, so that nobody's stream stands still for it.

    host     │ plan, slices, capture, launch n + 1 │ waits │ results of n │ …
    device   │ step n ────────────────────────────│ step n + 1 ────────│ …

The host is done with a step long before the device is. A capture that fits into what is left of the time costs nobody
anything, so one may come with every other step. One that takes longer keeps the device waiting: those come so seldom
that hardly any step has one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Final

LIGHT_S: Final = 0.002
"""A capture of so few launches hides behind a step of 5 ms, whose own work takes the host 1 to 2."""
EVERY: Final = 2
"""Steps from one such capture to the next."""
SELDOM: Final = 256
"""The same after one that took longer: fewer than one step in a hundred."""


class CapturePace:
    """Counts steps, and times captures.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._steps_left = 0

    @property
    def is_time(self) -> bool:
        """Whether one capture may come before the next step."""
        return not self._steps_left

    def stepped(self) -> None:
        """A step was sent."""
        self._steps_left = max(self._steps_left - 1, 0)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Around a capture; one that fails took its time as well."""
        start_s = self._clock()
        try:
            yield
        finally:
            self._steps_left = EVERY if self._clock() - start_s <= LIGHT_S else SELDOM
