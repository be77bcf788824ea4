"""Where the seconds of a start go, part by part: for the table that people see when it is ready."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Lap(Protocol):
    """Told at the end of each part of a start what the part was."""

    def __call__(self, part: str) -> None: ...


def no_lap(part: str) -> None:
    """Where nobody asks."""


class StartTimes:
    """A `Lap` that adds up.

    Args:
        since_s: Seconds that have passed before; they belong to the first part.
        clock: Seconds.
    """

    def __init__(self, since_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at_s = clock() - since_s
        self._parts: dict[str, float] = {}

    def __call__(self, part: str) -> None:
        """All time since the last call was `part`'s."""
        now = self._clock()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._at_s
        self._at_s = now

    def seconds(self) -> dict[str, float]:
        """Of each part, in the order in which they first ended."""
        return {part: round(seconds, 2) for part, seconds in self._parts.items()}
