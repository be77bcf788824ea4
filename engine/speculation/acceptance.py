"""How often guesses are right: counts that forget, so that they follow what is said now."""

from __future__ import annotations

from typing import Final


class Acceptance:
    """Share of guessed tokens that were right, each given that those before it were.

    Args:
        memory: About so many of the newest trials count.
    """

    __slots__ = ("_memory", "right", "trials")

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self.right = 0.0
        self.trials = 0.0

    def add(self, right: int, trials: int) -> None:
        """`right` of `trials` more."""
        self.right += right
        self.trials += trials
        if self.trials > self._memory:
            kept = self._memory / self.trials
            self.right *= kept
            self.trials *= kept

    def rate(self, prior: float, weight: float) -> float:
        """The share, where `prior` counts as much as `weight` trials."""
        return (self.right + prior * weight) / (self.trials + weight)


def expected_tokens(rate: float, length: int) -> float:
    """How many of `length` guesses are right on average when each is with probability `rate`: r + r² + …"""
    rate = min(rate, MOST)
    return rate * (1.0 - rate**length) / (1.0 - rate)


MOST: Final = 0.995
"""Nobody is believed more than this."""
