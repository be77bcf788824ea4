"""Whether a step checks trees in place of chains: where their likeliest guesses promise more tokens a second.

    rate(n) = (rows + sum of the n likeliest guesses of each tree)
              / (time of a step with so many tokens, some in trees + of making the trees)

Chains are the rule: trees must promise `MARGIN` more than they to begin, and `STAY` to go on.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Final

from engine.speculation.account import SURPRISE
from engine.speculation.step_times import StepTimes
from engine.speculation.upkeep import smoothed
from engine.step_costs import size_class

MARGIN: Final = 1.05
STAY: Final = 1.02
REFRESH: Final = 32
"""After so many steps with trees one with chains is taken, to know what that costs now."""
LONGEST_PAUSE: Final = 64
"""Trees that do not pay are made at least once in so many steps."""


@dataclass(slots=True)
class _Watch:
    """What is known of one row count: steps with trees in a row, and steps until trees are made again; how many times
    as many tokens a second as chains they promised last, 1 where chains were checked; how long they take to make.
    """

    num_steps: int = 0
    lift: float = 1.0
    pause: int = 0
    next_pause: int = 1
    making_s: float = 0.0


class Branching:
    """Part of the `Controller`.

    Args:
        times: What steps take.
        lengths: How many guesses a row may check, rising.
    """

    def __init__(self, times: StepTimes, lengths: Ordered[int]) -> None:
        self._times = times
        self._lengths = lengths
        self._watches: dict[int, _Watch] = {}

    def may_branch(self, rows: int) -> bool:
        """Whether to make trees before the next step of so many rows."""
        watch = self._watches.setdefault(size_class(rows), _Watch())
        watch.pause = max(watch.pause - 1, 0)
        return not watch.pause

    def lift(self, rows: int) -> float:
        """How many times as many tokens a second the next step may yield as chains do: what pays with trees need not
        pay without.
        """
        watch = self._watches.get(size_class(rows))
        return 1.0 if watch is None else watch.lift

    def made(self, rows: int, elapsed_s: float) -> None:
        """Trees of so many rows were made, which took so long."""
        watch = self._watches.setdefault(size_class(rows), _Watch())
        if elapsed_s > 0.0:
            watch.making_s = smoothed(watch.making_s, elapsed_s, SURPRISE)

    def choose(
        self, lengths: Ordered[int], chains: Ordered[float], gains: Ordered[Ordered[float] | None], room: int
    ) -> tuple[list[int], float] | None:
        """How many guesses of each row to check if some are taken from trees, and tokens a second then; None where
        chains shall be checked.

        Args:
            lengths: Of the chains that would be checked, at least one of them above 0.
            chains: How many guesses of each are expected to be right.
            gains: How probably each guess of a row's tree stands, falling; None where the row has only its chain.
            room: Most guesses of all rows.
        """
        rows = len(lengths)
        watch = self._watches.setdefault(size_class(rows), _Watch())
        chain_s = self._times.step_s(rows, rows + sum(lengths))
        assert chain_s is not None
        chain_rate = (rows + sum(chains)) / chain_s
        best, best_rate = None, chain_rate * (STAY if watch.num_steps else MARGIN)
        for longest in self._lengths:
            widths = [
                own if tree is None else fitting(len(tree), longest, self._lengths, rows)
                for own, tree in zip(lengths, gains, strict=True)
            ]
            if sum(widths) > room:
                break
            right = sum(
                chain if tree is None else sum(tree[:width])
                for chain, tree, width in zip(chains, gains, widths, strict=True)
            )
            step_s = self._times.tree_s(rows, rows + sum(widths))
            assert step_s is not None
            rate = (rows + right) / (step_s + watch.making_s)
            if rate > best_rate:
                best, best_rate = widths, rate
        if best is None:
            watch.num_steps, watch.lift = 0, 1.0
            watch.next_pause = min(2 * watch.next_pause, LONGEST_PAUSE)
            watch.pause = watch.next_pause
            return None
        watch.next_pause = 1
        watch.num_steps += 1
        watch.lift = best_rate / chain_rate if self._times.knows_trees(rows) else 1.0
        return (best, best_rate) if watch.num_steps % REFRESH else None


def fitting(available: int, longest: int, lengths: Ordered[int], rows: int) -> int:
    """How many of a row's guesses are checked where `longest` is the limit. Alone, a row need not be like any other."""
    if rows == 1 or available >= longest:
        return min(available, longest)
    return max((length for length in lengths if length <= available), default=0)
