"""When the server's process looks for garbage: right after a step's events have gone out, when the next are furthest
away. Python would do so in the middle of anything, for half a millisecond and now and then for several, and a token of
every stream would wait for it.
"""

from __future__ import annotations

import gc
from typing import Final

YOUNG_OBJECTS: Final = 700
"""More of them than before are looked through: as many as Python waits for."""
OLDER_EVERY: Final = 10
"""Looks of which one goes through what has survived others, too, and of these one through what has survived them; again
Python's own number. Without the last, what requests leave would stay as long as there is always a stream."""
MOST_OBJECTS: Final = 10 * YOUNG_OBJECTS
"""Python looks by itself where so many come between two steps, such as with a large body, or without any."""


class Garbage:
    """Of this process; what was loaded when it was ready is frozen (`Child.ready`). `look` is called after each step's
    events.
    """

    def __init__(self) -> None:
        gc.set_threshold(MOST_OBJECTS, *gc.get_threshold()[1:])
        self._num_looks = 0

    def look(self) -> None:
        """If there may be some."""
        if gc.get_count()[0] > YOUNG_OBJECTS:
            self._num_looks += 1
            gc.collect(sum(self._num_looks % OLDER_EVERY**age == 0 for age in (1, 2)))
