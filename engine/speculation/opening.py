"""Guesses of an answer's first tokens, checked beside the last ones of its prompt: what they cost there, how many pay.

    prompt … prompt  guess guess guess …        one step; without guesses it would take as long less `draft_s` for each

A guess is worth checking there while the time that it probably saves is more than what it costs:

    gains[i] × value_s > draft_s        `value_s`: what a token takes that comes later, with guesses or without

What prompts take a token is measured of steps without such guesses, and what guesses take by how much longer steps with
them took than their prompts should have: the median of the newest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Ordered
from typing import Final

from engine.speculation.acceptance import Rates
from engine.speculation.chains import LENGTHS
from engine.speculation.step_times import SAMPLES, StepTimes
from engine.step_costs import size_class

PRIOR: Final = 2
"""What is expected of them counts as much as so many steps that were measured: one tells little, since its prompt takes
longer than they do.
"""
MEMORY: Final = 16
"""So many of the newest steps with such guesses count."""
FORGETTING: Final = 32
"""After so many steps without such guesses one less does, so that they are tried again."""
CHEAPEST: Final = 0.5
"""They are not taken to cost less than this part of what is expected."""
NARROW, WIDE = 8, 16
"""What a token costs beside others decode steps of so many tokens tell."""


class Openings:
    """Times are in seconds.

    Args:
        times: What decode steps take.
    """

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._prompts: dict[int, deque[float]] = {}
        self._newest: deque[float] = deque(maxlen=SAMPLES)
        self._seen: deque[float] = deque(maxlen=MEMORY)  # what guesses took, by what was expected
        self._num_without = 0

    def add_prompt(self, tokens: int, elapsed_s: float) -> None:
        """A step of so many tokens, most of them of prompts, none of them guesses."""
        if elapsed_s > 0.0:
            for known in (self._prompts.setdefault(size_class(tokens), deque(maxlen=SAMPLES)), self._newest):
                known.append(elapsed_s / tokens)
            self._num_without += 1
            if self._num_without % FORGETTING == 0 and self._seen:
                self._seen.popleft()

    def add(self, tokens: int, guesses: int, elapsed_s: float) -> None:
        """A step of so many tokens checked so many guesses of first tokens besides."""
        token_s = self._token_s(tokens)
        if token_s is None or elapsed_s <= 0.0:
            return
        ratio = (elapsed_s - tokens * token_s) / (guesses * max(token_s, self._marginal_s()))
        self._seen.append(ratio)

    def draft_s(self, tokens: int) -> float | None:
        """What one guess adds to a step of so many tokens; None while nothing is known of prompts."""
        token_s = self._token_s(tokens)
        if token_s is None:
            return None
        known = sorted([*[1.0] * PRIOR, *self._seen])
        ratio = known[(len(known) - 1) // 2]
        return max(ratio, CHEAPEST) * max(token_s, self._marginal_s())

    def later_s(self, rows: int, gains: Ordered[float], looking_s: float) -> float:
        """What a token takes at best that comes after the first, where guesses are as right then as `gains` say, and a
        look takes `looking_s`.
        """
        right = gains[-1] ** (1.0 / len(gains))
        rates, least = Rates(right, right), float("inf")
        for length in LENGTHS:
            step_s = self._times.step_s(rows, rows + rows * length)
            assert step_s is not None
            least = min(least, (step_s + looking_s) / (rows * (1.0 + rates.expected(length))))
        return least

    def _token_s(self, tokens: int) -> float | None:
        """A token of a prompt among so many."""
        known = self._prompts.get(size_class(tokens)) or self._newest
        return sorted(known)[len(known) // 2] if known else None

    def _marginal_s(self) -> float:
        """What one guess more takes in a decode step of several; 0 while that is not known."""
        times = self._times
        if not times.is_measured(1, NARROW) or not times.is_measured(1, WIDE):
            return 0.0
        narrow_s, wide_s = times.step_s(1, NARROW), times.step_s(1, WIDE)
        assert narrow_s is not None
        assert wide_s is not None
        return max(wide_s - narrow_s, 0.0) / (WIDE - NARROW)


def worth(gains: Ordered[float], draft_s: float, value_s: float) -> int:
    """How many guesses save more than they cost, where a guess that stands saves `value_s`. `gains`: how probably each
    stands, falling.
    """
    return next((index for index, right in enumerate(gains) if right * value_s <= draft_s), len(gains))
