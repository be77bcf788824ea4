"""How long a model takes to guess: a forward by how many sequences guess, and what catching up costs a token."""

from __future__ import annotations

from collections import deque
from typing import Final

from engine.speculation.step_times import SAMPLES
from engine.step_costs import size_class

FEW: Final = 16
"""So many tokens a sequence that the model has yet to compute cost about as much as one."""


class _Newest:
    """The newest measurements and their median, which is asked for more often than it changes."""

    __slots__ = ("median", "values")

    def __init__(self) -> None:
        self.values: deque[float] = deque(maxlen=SAMPLES)
        self.median = 0.0

    def add(self, value: float) -> None:
        self.values.append(value)
        self.median = sorted(self.values)[len(self.values) // 2]


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
        self._late = _Newest()
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
            self._late.add(first_s / late)
            return
        if forward_s > 0.0:
            self._forwards.setdefault(size_class(rows), _Newest()).add(forward_s)
        if is_late:
            self._late.add(max(first_s - forward_s, 0.0) / late)

    def forward_s(self, rows: int, plain_s: float) -> float:
        """One guess of so many sequences, where a plain step takes `plain_s`."""
        own = self._forwards.get(size_class(rows))
        return self._cost * plain_s if own is None else own.median

    def late_s(self, late: int, plain_s: float, rows: int) -> float:
        """What it costs to compute so many tokens more, where a plain step of `rows` sequences takes `plain_s`. Before
        it is measured: by what prompts cost the target, or else as if each were a sequence's.
        """
        if not late:
            return 0.0
        if self._late.values:
            return late * self._late.median
        return late * self._late_cost * (self._prompts.median if self._prompts.values else plain_s / rows)
