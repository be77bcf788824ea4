"""How often guesses are right: counts that forget, so that they follow what is said now.

A first guess that is wrong mostly means that the source has lost its place, and one that is right that those behind it
are right too; so the first and the later ones are counted apart.
"""

from __future__ import annotations

from typing import Final, NamedTuple

MOST: Final = 0.995
"""Nobody is believed more than this."""


class Rates(NamedTuple):
    """How probably the first guess is right, and each later one given that those before it were."""

    first: float
    later: float

    def expected(self, length: int) -> float:
        """How many of `length` guesses are right on average: f + f l + f l² + …"""
        first, later = self.first, self.later
        if later > MOST:  # not `min`, which would take half of the time
            later = MOST
        return (first if first < MOST else MOST) * (1.0 - later**length) / (1.0 - later)

    def gains(self, length: int) -> list[float]:
        """How probably each of `length` guesses stands: f, f l, f l², …"""
        first, later = min(self.first, MOST), min(self.later, MOST)
        return [first * later**index for index in range(length)]


class _Share:
    """A share of right ones among trials, of which about the newest `memory` count."""

    __slots__ = ("_memory", "_right", "_trials")

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._right = 0.0
        self._trials = 0.0

    def add(self, right: int, trials: int) -> None:
        self._right += right
        self._trials += trials
        if self._trials > self._memory:
            kept = self._memory / self._trials
            self._right *= kept
            self._trials *= kept

    def rate(self, prior: float, weight: float) -> float:
        """The share, where `prior` counts as much as `weight` trials."""
        return (self._right + prior * weight) / (self._trials + weight)


class Acceptance:
    """What came of one source's guesses.

    Args:
        memory: About so many of the newest trials count.
    """

    __slots__ = ("_first", "_later")

    def __init__(self, memory: int) -> None:
        self._first = _Share(memory)
        self._later = _Share(memory)

    def add(self, right: int, guessed: int) -> None:
        """Of `guessed` tokens in a row, at least one, the first `right` were right."""
        self._first.add(min(right, 1), 1)
        if right and guessed > 1:
            self._later.add(right - 1, min(right, guessed - 1))

    def add_later(self, right: int) -> None:
        """Of one guess behind others that were right."""
        self._later.add(right, 1)

    def rates(self, prior: Rates, weight: float) -> Rates:
        """The rates, where `prior` counts as much as `weight` trials."""
        return Rates(self._first.rate(prior.first, weight), self._later.rate(prior.later, weight))
