"""How long a model takes to guess: a forward by how many sequences guess, and catching up by how many tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import Final

from engine.speculation.step_times import SAMPLES, usual
from engine.step_costs import size_class

FEW: Final = 16
"""So many tokens a sequence that the model has yet to compute cost about as much as one."""


class _Newest:
    """The newest measurements and their median, as of `usual`, which is asked for more often than it changes. The first
    time something may have been made ready.
    """

    __slots__ = ("median", "values")

    def __init__(self) -> None:
        self.values: deque[float] = deque(maxlen=SAMPLES)
        self.median = 0.0

    def add(self, value: float) -> None:
        self.values.append(value)
        self.median = usual(self.values)


class _Late:
    """Seconds of catching up by how many tokens it was, of which sizes that are alike share a figure. Some machines
    take as long for few as for many, others in proportion: so nothing is made of a token.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, _Newest]] = {}  # class of size → newest size, seconds
        self._sizes: list[int] = []
        self._times: list[float] = []

    def add(self, late: int, elapsed_s: float) -> None:
        _, newest = self._known.get(size_class(late), (late, _Newest()))
        newest.add(elapsed_s)
        self._known[size_class(late)] = late, newest
        points = sorted((size, own.median) for size, own in self._known.values())
        self._sizes = [size for size, _ in points]
        self._times = [time for _, time in points]
        for index in reversed(range(len(points) - 1)):  # fewer never take longer
            self._times[index] = min(self._times[index], self._times[index + 1])

    def at(self, late: int) -> float | None:
        """Between two sizes that were measured lies a straight line. Fewer than were measured take their part of the
        time, which may be too little, and is known once it was tried; more take as many times as long, which may be
        too much. None while nothing was measured.
        """
        sizes, times = self._sizes, self._times
        if not sizes:
            return None
        above = bisect_left(sizes, late)
        if above == 0 or above == len(sizes):
            nearest = min(above, len(sizes) - 1)
            return times[nearest] * late / sizes[nearest]
        low, high = above - 1, above
        share = (late - sizes[low]) / (sizes[high] - sizes[low])
        return times[low] + share * (times[high] - times[low])

    def knows(self, late: int) -> bool:
        """Whether about as many or more were measured as often as counts, so that no fewer are doubtful."""
        own = size_class(late)
        return any(known >= own and len(newest.values) == SAMPLES for known, (_, newest) in self._known.items())


class DraftTimes:
    """Medians of the newest measurements.

    Args:
        cost: See `Drafter.cost`.
        late_cost: See `Drafter.late_cost`.
    """

    def __init__(self, cost: float, late_cost: float) -> None:
        self._cost = cost
        self._late_cost = late_cost
        self._forwards: dict[int, _Newest] = {}
        self._late = _Late()
        self._prompts = _Newest()

    def add_prompt(self, tokens: int, elapsed_s: float) -> None:
        """A step of the target computed so many tokens of prompts and nothing else."""
        self._prompts.add(elapsed_s / tokens)

    def add(self, rows: int, late: int, num_forwards: int, first_s: float, others_s: float) -> None:
        """`rows` sequences guessed in `num_forwards` forwards, of which the first had `late` tokens more than rows."""
        is_late = late > FEW * rows
        others = num_forwards - 1
        if not is_late:
            forward_s = (first_s + others_s) / num_forwards
        elif others:
            forward_s = others_s / others
        else:
            self._late.add(late, first_s)
            return
        if forward_s > 0.0:
            self._forwards.setdefault(size_class(rows), _Newest()).add(forward_s)
        if is_late:
            self._late.add(late, max(first_s - forward_s, 0.0))

    def forward_s(self, rows: int, plain_s: float) -> float:
        """One guess of so many sequences, where a plain step takes `plain_s`."""
        own = self._forwards.get(size_class(rows))
        return self._cost * plain_s if own is None else own.median

    def knows_late(self, late: int) -> bool:
        """Whether measuring again what it takes to compute so many tokens more would tell nothing new."""
        return self._late.knows(late)

    def late_s(self, late: int, plain_s: float, rows: int) -> float:
        """What it costs to compute so many tokens more, where a plain step of `rows` sequences takes `plain_s`. Before
        it is measured: by what prompts cost the target, or else as if each were a sequence's.
        """
        if not late:
            return 0.0
        if (measured_s := self._late.at(late)) is not None:
            return measured_s
        return late * self._late_cost * (self._prompts.median if self._prompts.values else plain_s / rows)
