"""What guessing takes beside checking: looking, learning, and what begins and ends of answers cost. All of it is paid
from the account that bounds what drafting may lose (`engine.speculation.account`).

On a CPU a step takes a quarter of a millisecond, and reading a clock a part of what is to be measured. So of what is
done before or behind each step one piece of work of several is timed, and those between are taken to last as long.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Final

TIMED: Final = 4
"""One of so many looks is timed, or of steps of which something is learnt."""
LEARNING: Final = 0.3
"""What one measurement counts in how long the next is expected to take."""
HICCUP: Final = 3.0
"""A measurement counts as no more than so many times what was expected: a busy machine is no fault of the work."""


def smoothed(usual_s: float, taken_s: float, hiccup: float = HICCUP) -> float:
    """What work is expected to take that was taken for `usual_s`, 0 where nothing was known, and took `taken_s`."""
    if not usual_s:
        return taken_s
    usual_s = min(usual_s, hiccup * taken_s)  # the first may have been one
    return usual_s + LEARNING * (min(taken_s, hiccup * usual_s) - usual_s)


class Work(enum.IntEnum):
    """Kinds of it."""

    LOOK = 0
    """A look for guesses, or choosing some of those that were found."""
    LEARN = 1
    """Taking in what came of a step that has checked guesses."""
    GREET = 2
    """Finding out what an answer that begins may repeat."""
    BEGIN = 3
    """Telling the sources of its prompt."""
    END = 4
    """What is remembered of one that ends."""
    ASK = 5
    """A look of sources in Python, each of which takes long."""


class Upkeep:
    """Times are in seconds of the clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts = [0] * len(Work)
        self._usual_s = [0.0] * len(Work)

    def start(self, work: Work) -> float | None:
        """A piece of work begins: what `stop` wants to know of that."""
        count = self._counts[work]
        self._counts[work] = count + 1
        return None if work <= Work.LEARN and count % TIMED else self._clock()

    def stop(self, work: Work, started_s: float | None) -> float:
        """It is done; how long such work takes."""
        usual_s = self._usual_s[work]
        if started_s is not None:
            taken_s = self._clock() - started_s
            usual_s = self._usual_s[work] = smoothed(usual_s, taken_s)
        return usual_s
