"""How long a decode step takes, by how many sequences it serves and how many tokens it checks: measured as it goes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from engine.step_costs import size_class

NEWS: Final = 0.01
"""A median that changes by less leaves what was concluded from it."""
SHIFT: Final = 0.04
"""A median that changes by more, or one of few measurements, has what many steps go by thought over at once."""
SAMPLES: Final = 7
"""The median of so many of the newest measurements counts, since machines are noisy."""
ENOUGH: Final = 2
HICCUP: Final = 1.5
"""Of the first two measurements the least counts where the other is so many times as long: a machine that was busy
would else keep a width from ever being tried again.
"""
OLD: Final = 256
"""The same of a width that nothing has renewed for so many steps: its median may be that of a busy machine."""
MAX_AGE: Final = 2048
"""A figure that nothing has renewed for so many steps of its row count is forgotten."""
FIRST_GUESS: Final = 0.25
"""Before anything is measured, a draft is taken to cost this part of a token."""
HOPED: Final = 0.5
"""Of two widths that were measured, one in between is taken to cost so much less than a straight line says."""
EXTRAPOLATED: Final = 0.5
"""More drafts than were measured are taken to cost this part of what those cost: the first are the dearest."""
WAITING: Final = 0.4
"""Where plain steps run ahead of their results, a step with drafts is taken to wait for this part of a plain one."""
BESIDE: Final = 0.01
TOGETHER: Final = 0.005
"""And drafts to cost these parts of a plain step, each of a row and each of all rows: such a device reads the weights,
whatever it checks, as long as that is not much. All until it was measured.
"""
ELSEWHERE: Final = 0.75
"""What drafts cost where no width was measured, by what as many cost other row counts: so that they are tried."""


def usual(times: Iterable[float]) -> float:
    """The median of the newest measurements; of two that differ much the lesser one: see `HICCUP`."""
    known = sorted(times)
    is_doubtful = len(known) == ENOUGH and known[1] > HICCUP * known[0] > 0.0
    return known[0] if is_doubtful else known[len(known) // 2]


@dataclass(slots=True)
class _Figure:
    """Seconds a row of the newest steps and their median, those which were concluded from and which `SHIFT` is counted
    from, tokens a row, and when that was.
    """

    times: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    time: float = 0.0
    told: float = 0.0
    settled: float = 0.0
    width: float = 1.0
    renewed: int = 0

    def add(self, elapsed_s: float) -> bool:
        """Whether that is news."""
        is_new = len(self.times) < SAMPLES
        self.times.append(elapsed_s)
        self.time = usual(self.times)
        if is_new or abs(self.time - self.told) > NEWS * self.told:
            self.told = self.time
            return True
        return False

    def has_shifted(self) -> bool:
        """Whether it is far from where it was when this was last so."""
        if len(self.times) == SAMPLES and abs(self.time - self.settled) <= SHIFT * self.settled:
            return False
        self.settled = self.time
        return True

    def at(self, num_steps: int) -> float:
        """What counts after so many steps."""
        least = min(self.times)
        return least if num_steps - self.renewed >= OLD and self.time > HICCUP * least else self.time


@dataclass(slots=True)
class _Rows:
    """All figures of row counts that are alike; `rows` is the newest."""

    rows: int = 1
    num_steps: int = 0
    figures: dict[int, _Figure] = field(default_factory=dict)
    known: list[tuple[float, float]] | None = None  # widths with drafts and what counts of them; None: not made yet
    trees: _Figure = field(default_factory=_Figure)


class StepTimes:
    """Times are per row, so that row counts that are alike can share a figure.

    Args:
        waits: Whether plain steps run ahead of their results, so that any drafts at all cost waiting for them.

    Attributes:
        version: Rises with everything new but medians that change little.
    """

    def __init__(self, *, waits: bool = False) -> None:
        self.version = 0
        self._waits = waits
        self._rows: dict[int, _Rows] = {}
        self._told: dict[tuple[int, int], float | None] = {}  # until something is measured

    def add(self, rows: int, tokens: int, elapsed_s: float) -> None:
        """A step of `rows` sequences checked `tokens` tokens, at least one a row."""
        own = self._rows.get(size_class(rows))
        if own is None:
            own = self._rows[size_class(rows)] = _Rows()
        own.rows = rows
        own.num_steps += 1
        key = _width_class(rows, tokens)
        figure = own.figures.get(key)
        if figure is None:
            figure = own.figures[key] = _Figure()
        is_news = abs(figure.width - tokens / rows) > 1e-9
        is_due = own.num_steps % 64 == 0
        if figure.add(elapsed_s / rows) or is_news or is_due:
            self._told.clear()
            own.known = None
            self.version += figure.has_shifted() or is_due
        figure.width = tokens / rows
        figure.renewed = own.num_steps
        if is_due:
            for key in [key for key, old in own.figures.items() if own.num_steps - old.renewed > MAX_AGE]:
                del own.figures[key]

    def add_tree(self, rows: int, tokens: int, elapsed_s: float) -> None:
        """The same of a step in which drafts of some rows were trees. Counts by how much longer it took than one with
        as many in chains.
        """
        chain_s = self._step_s(rows, tokens, is_hopeful=False)
        if chain_s is None:
            return
        own = self._rows[size_class(rows)]
        own.num_steps += 1
        own.trees.add(elapsed_s / chain_s)
        own.trees.renewed = own.num_steps

    def tree_s(self, rows: int, tokens: int) -> float | None:
        """A step that checks `tokens`, some in trees: as long as with chains until more is known."""
        chain_s = self.step_s(rows, tokens)
        if chain_s is None:
            return None
        own = self._rows[size_class(rows)]
        if own.num_steps - own.trees.renewed > MAX_AGE:
            own.trees = _Figure(renewed=own.num_steps)
        is_known = len(own.trees.times) >= ENOUGH
        return chain_s * (max(own.trees.time, 1.0) if is_known else 1.0)

    def knows_trees(self, rows: int) -> bool:
        """Whether as many steps with trees were measured as count."""
        own = self._rows.get(size_class(rows))
        return own is not None and len(own.trees.times) == SAMPLES

    def plain_s(self, rows: int) -> float | None:
        """A step without drafts; None while that is not known."""
        figure = self._figure(rows, 0)
        return None if figure is None else figure.time * rows

    def is_measured(self, rows: int, tokens: int) -> bool:
        """Whether steps of about this width were, so that what is said of them is no guess."""
        return self._figure(rows, _width_class(rows, tokens)) is not None

    def is_known_well(self, rows: int, tokens: int) -> bool:
        """Whether as many steps of about this width were measured as count."""
        figure = self._figure(rows, _width_class(rows, tokens))
        return figure is not None and len(figure.times) == SAMPLES

    def plain_age(self, rows: int) -> int:
        """Steps of this row count since the last one without drafts."""
        own = self._rows.get(size_class(rows))
        figure = None if own is None else own.figures.get(0)
        return 0 if own is None or figure is None else own.num_steps - figure.renewed

    def step_s(self, rows: int, tokens: int) -> float | None:
        """A step that checks `tokens`: as measured, but no longer than one that checks more; or by what was measured
        for more and for fewer. None while not even the plain step is known.
        """
        key = rows, tokens
        if key not in self._told:
            self._told[key] = self._step_s(rows, tokens)
        return self._told[key]

    def _step_s(self, rows: int, tokens: int, *, is_hopeful: bool = True) -> float | None:
        """`is_hopeful`: what was not measured is taken to be so cheap that it is tried."""
        plain = self._figure(rows, 0)
        if plain is None or tokens <= rows:
            return None if plain is None else plain.time * rows
        exact = self._figure(rows, _width_class(rows, tokens))
        width = tokens / rows
        own = self._rows[size_class(rows)]
        if own.known is None:
            own.known = sorted(
                (figure.width, figure.at(own.num_steps))
                for key, figure in own.figures.items()
                if key and len(figure.times) >= ENOUGH
            )
        known = own.known
        if exact is not None and abs(exact.width - width) < 0.02 * width:
            return rows * min(time for other, time in known if other >= exact.width)
        low = max((point for point in known if point[0] <= width), default=(1.0, plain.time))
        high = min((point for point in known if point[0] > width), default=None)
        if high is not None:
            if self._waits and low[0] == 1.0 and not is_hopeful:  # a few drafts wait as many do
                low = 1.0, min((1.0 + WAITING) * plain.time, high[1])
            share = (width - low[0]) / (high[0] - low[0])
            if exact is None and is_hopeful:
                share *= HOPED  # so that it is tried once
            return (low[1] + share * (high[1] - low[1])) * rows
        if low[0] == 1.0 and (extra_s := self._elsewhere_s(rows, tokens - rows)) is not None:
            return plain.time * rows + ELSEWHERE * extra_s
        if self._waits:
            start = low[1] if low[0] > 1.0 else (1.0 + WAITING) * plain.time
            return (start + (BESIDE + TOGETHER * rows) * plain.time * (width - low[0])) * rows
        if low[0] > 1.0:
            slope = EXTRAPOLATED * max((low[1] - plain.time) / (low[0] - 1.0), 0.0)
        else:
            slope = FIRST_GUESS * plain.time
        return (low[1] + slope * (width - low[0])) * rows

    def _elsewhere_s(self, rows: int, drafts: int) -> float | None:
        """What so many drafts add to a step by what they do for other row counts: the nearest number that is known."""
        best = None
        for key, own in self._rows.items():
            plain = own.figures.get(0)
            if key == size_class(rows) or plain is None or len(plain.times) < ENOUGH:
                continue
            for width, figure in own.figures.items():
                if width and len(figure.times) >= ENOUGH:
                    count = (figure.width - 1.0) * own.rows
                    extra_s = max(figure.time - plain.time, 0.0) * own.rows
                    found = abs(math.log(count / drafts)), extra_s * drafts / count
                    best = found if best is None else min(best, found)
        return None if best is None else best[1]

    def _figure(self, rows: int, key: int) -> _Figure | None:
        own = self._rows.get(size_class(rows))
        figure = None if own is None else own.figures.get(key)
        return figure if figure is not None and len(figure.times) >= ENOUGH else None


@lru_cache(4096)
def _width_class(rows: int, tokens: int) -> int:
    """Widths (tokens a row) that are taken to be alike: 0 is no drafts, beyond two an octave."""
    return 0 if tokens <= rows else 1 + round(2 * math.log2(tokens / rows))
