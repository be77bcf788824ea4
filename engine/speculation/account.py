"""What drafting may lose, in seconds: an account that bounds it whatever was promised.

Every step pays a hundredth of a plain step in. What drafting takes, looking for guesses included, is taken out, and
what plain steps for the same tokens would have taken is put in. Who wants to spend asks whether the account would bear
that guesses are wrong; what is lost beyond it must come in again first. So estimates that are wrong, shapes of steps
that were never measured and guesses that turn bad cost no more than that hundredth and what the account begins with.
What begins and ends of answers take, and learning from steps, is taken out as well. Not in it: deciding whether to
look, a microsecond or two a step.
"""

from __future__ import annotations

from typing import Final

ALLOWANCE: Final = 0.01
"""Part of a plain step that every step pays in."""
SURPRISE: Final = 4.0
"""A step that took longer than so many times what was expected tells of the machine, not of guesses."""
MOST_DEBT: Final = 8.0
"""In plain steps: what was lost beyond, though the account was asked before, is the machine's doing as well."""


class Account:
    """Amounts are in seconds, bounds in plain steps of the row count in question.

    Args:
        first: What it begins with.
        most: The most that it holds.
        share: Part of what is left that one step may lose.
        least: So many plain steps one step may lose if so much is left, whatever its share is.
    """

    def __init__(self, first: float, most: float, share: float = 1.0, least: float = 1.0) -> None:
        self._first = first
        self._most = most
        self._share = share
        self._least = least
        self._credit: float | None = None

    def pay_in(self, plain_s: float, num_steps: int = 1) -> None:
        """Steps went by, of a row count whose plain step takes so long."""
        self._credit = min(self.left_s(plain_s) + num_steps * ALLOWANCE * plain_s, self._most * plain_s)

    def settle(self, gain_s: float, plain_s: float) -> None:
        """Drafting has saved so much, or cost it where that is below 0."""
        self._credit = min(max(self.left_s(plain_s) + gain_s, -MOST_DEBT * plain_s), self._most * plain_s)

    def stake(self, steps: float, plain_s: float) -> None:
        """So many plain steps may be lost, whatever was lost before."""
        self._credit = max(self.left_s(plain_s), steps * plain_s)

    def bears(self, cost_s: float, plain_s: float) -> bool:
        """Whether one step may lose so much."""
        return cost_s <= self.stake_s(plain_s)

    def stake_s(self, plain_s: float) -> float:
        """What one step may lose."""
        left_s = self.left_s(plain_s)
        return max(self._share * left_s, min(left_s, self._least * plain_s))

    def steps_until(self, cost_s: float, plain_s: float) -> float:
        """How many steps must go by until so much may be lost; 0: none."""
        return max(cost_s - self.left_s(plain_s), 0.0) / (ALLOWANCE * plain_s)

    def left_s(self, plain_s: float) -> float:
        """What may be lost."""
        return self._first * plain_s if self._credit is None else self._credit
