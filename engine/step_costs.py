"""How long parts of a step take, by their size: measured at start (`engine.step_measure`) and from every step since.

    step = decode of so many rows  +  so many tokens of prompts beside it, and what they read of the chunks before them
                                   +  so many slices of pictures

`engine.step_budget` plans by it. Shared machines are noisy, so what counts are medians of the newest measurements;
between sizes lie straight lines. Where steps are filled up the runner says what prompts add to each size, but for the
keys that they read. Where several parts come in one step only their sum is seen: `engine.step_factors` tells by how
much each is off.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from engine.step_factors import MOST_OFF, Factors

SAMPLES: Final = 7
"""The median of so many of the newest measurements counts."""
HICCUP: Final = 1.5
"""Of the first two the lesser counts where the other is so many times as long: libraries may have made something ready.
"""
FAR: Final = 100_000
"""Reading so many tokens takes at least as long as computing one: so that more can be learnt where noise hid what it
takes, or where there was no time to measure it.
"""
DOUBTFUL: Final = 0.04
"""Deviation of what decoding is taken to cost, as a part of it, beyond which a step alone tells more."""
CLASSES: Final = 4
"""Sizes of an octave that are told apart, above 8."""


@dataclass(slots=True)
class Load:
    """What a step computes: `rows` that decode, with their drafts `tokens`; `prompt_tokens` of others; `slices` of
    pictures, as (size, count); `pairs` of a token of prompts and one that it reads, computed in an earlier step.
    """

    rows: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    slices: list[tuple[float, int]] = field(default_factory=list)
    pairs: int = 0


class Costs(Protocol):
    """What is known of a runner's speed. All times in seconds."""

    def decode_s(self, rows: int, tokens: int) -> float:
        """A step of rows that check so many tokens, at least one each."""
        ...

    def prompt_s(self, tokens: int, rows: int = 0) -> float:
        """What so many tokens of prompts add to a step in which so many rows decode; never falls as tokens grow."""
        ...

    def reading_s(self, pairs: float) -> float:
        """What it adds that tokens of prompts read what was computed in earlier steps: so many pairs of one and one."""
        ...

    def slice_s(self, size: float) -> float:
        """A slice of a picture of `size` vision tokens a slice."""
        ...

    def knows_slice(self, size: float) -> bool:
        """Whether one of about that size was measured."""
        ...

    @property
    def doubts_decode(self) -> bool:
        """Whether a step that hardly does anything else would tell what decoding takes by now."""
        ...

    def stepped(self, load: Load, elapsed_s: float, encoding_s: float | None) -> None:
        """A step took so long, and so much of it the encoder; None: that ran on the device among the rest."""
        ...

    def encoded(self, size: float, num_slices: int, elapsed_s: float) -> None:
        """So many slices took so long."""
        ...


class Curve:
    """Seconds by size.

    Args:
        is_from_zero: Whether nothing takes no time; then sizes below the smallest cost their part of it. Otherwise they
            cost as much.
    """

    def __init__(self, *, is_from_zero: bool) -> None:
        self._is_from_zero = is_from_zero
        self._samples: dict[int, deque[tuple[float, float]]] = {}  # class of size → (size, seconds), newest last
        self._sizes: list[float] = []
        self._times: list[float] = []

    def add(self, size: float, elapsed_s: float, before: float = 1.0) -> None:
        """A measurement. Sizes are above 0. Earlier ones of about that size count as `before` times as long."""
        known = self._samples.get(size_class(size), ())
        own = deque(((known_size, before * time) for known_size, time in known), maxlen=SAMPLES)
        own.append((size, max(elapsed_s, 0.0)))
        self._samples[size_class(size)] = own
        points = sorted(_median(samples) for samples in self._samples.values())
        self._sizes = [point[0] for point in points]
        self._times = []
        for _, time in points:  # more work is never taken to be faster
            self._times.append(max(time, self._times[-1] if self._times else 0.0))

    def knows(self, size: float) -> bool:
        """Whether something of about that size was measured."""
        return size > 0 and size_class(size) in self._samples

    def at(self, size: float) -> float:
        """Seconds; 0 while nothing is known. Beyond the largest size that was measured the line goes on."""
        sizes, times = self._sizes, self._times
        if not sizes or size <= 0:
            return 0.0
        above = bisect_left(sizes, size)
        if above == 0:
            return times[0] * size / sizes[0] if self._is_from_zero else times[0]
        if above == len(sizes):
            if len(sizes) == 1:
                return times[0] * size / sizes[0] if self._is_from_zero else times[0]
            above -= 1
        low, high = above - 1, above
        slope = (times[high] - times[low]) / max(sizes[high] - sizes[low], 1e-9)
        return times[low] + slope * (size - sizes[low])


class StepCosts:
    """See `Costs`; measured.

    Args:
        added_s: See `Runner.added_s`.
    """

    def __init__(self, added_s: Callable[[int, int], float | None] = lambda rows, tokens: None) -> None:
        self._added_s = added_s
        self.decode = Curve(is_from_zero=False)
        self.prompt = Curve(is_from_zero=True)
        self.slice = Curve(is_from_zero=True)
        self._pair_s = 0.0
        self._beyond_s: list[float] = []  # of each measurement, rising
        self._keys_s = 0.0  # of which the median counts
        self._factors = Factors()  # of what the curves say

    def decode_s(self, rows: int, tokens: int) -> float:
        """See `Costs.decode_s`: drafts cost what tokens of prompts do, but nothing is filled up for them."""
        return self.decode.at(rows) * self._factors.decode + self.prompt.at(tokens - rows) * self._factors.prompt

    def prompt_s(self, tokens: int, rows: int = 0) -> float:
        """See `Costs.prompt_s`."""
        return self._prompt_at(tokens, rows) * self._factors.prompt

    def add_prompt(self, rows: int, tokens: int, elapsed_s: float) -> None:
        """A measurement at start: so many tokens of a prompt add so much to a step of so many rows."""
        self.prompt.add(tokens, elapsed_s)
        added_s = self._added_s(rows, tokens)
        if added_s is not None:
            self._beyond_s = sorted([*self._beyond_s, elapsed_s - added_s])
            self._keys_s = max(self._beyond_s[len(self._beyond_s) // 2], 0.0)

    def reading_s(self, pairs: float) -> float:
        """See `Costs.reading_s`."""
        return self._pair_s * pairs * self._factors.reading

    def add_reading(self, tokens: int, behind: int, elapsed_s: float) -> None:
        """A measurement at start: a prompt's tokens took so much longer behind others. 0: it was not made."""
        least_s = self.prompt.at(tokens) / tokens / FAR
        self._pair_s = max(elapsed_s / (tokens * behind), least_s)

    def _prompt_at(self, tokens: int, rows: int) -> float:
        added_s = self._added_s(rows, tokens)
        if added_s is None:
            return self.prompt.at(tokens)
        return added_s + self._keys_s if tokens else 0.0

    def slice_s(self, size: float) -> float:
        """See `Costs.slice_s`."""
        return self.slice.at(size) * self._factors.slices

    def knows_slice(self, size: float) -> bool:
        """See `Costs.knows_slice`."""
        return self.slice.knows(size)

    @property
    def doubts_decode(self) -> bool:
        """See `Costs.doubts_decode`."""
        return self._factors.decode_doubt > DOUBTFUL

    def stepped(self, load: Load, elapsed_s: float, encoding_s: float | None) -> None:
        """See `Costs.stepped`. A step without rows that decode is no measure of what others take beside them. Slices
        that are new, or make a step take something else altogether, are what the other parts leave.
        """
        if not load.rows:
            return
        slices = load.slices if encoding_s is None else []
        step_s = elapsed_s - (encoding_s or 0.0)
        if not slices and not load.prompt_tokens:
            if load.tokens == load.rows:
                self._decoded(load.rows, step_s)
            return
        prompt_s = self._prompt_at(load.prompt_tokens, load.rows) + self.prompt.at(load.tokens - load.rows)
        slices_s = sum(self.slice.at(size) * count for size, count in slices)
        parts_s = self.decode.at(load.rows), prompt_s, slices_s, self._pair_s * load.pairs
        if slices:
            expected_s = self._factors.expected_s(parts_s)
            is_off = abs(step_s - expected_s) > MOST_OFF * expected_s
            are_to_blame = is_off or not all(self.slice.knows(size) for size, _ in slices)
            if len(slices) == 1:
                size, count = slices[0]
                off_s = (step_s - expected_s) / self._factors.slices if are_to_blame else 0.0
                self.slice.add(size, (slices_s + off_s) / count)
            if are_to_blame:
                return
        self._factors.correct(parts_s, step_s)

    def _decoded(self, rows: int, step_s: float) -> None:
        """Nothing else ran. By and by it is the curve that knows what such a step takes, so that what mixtures left in
        the factor does not stay in those of other rows.
        """
        factors = self._factors
        factors.correct((self.decode.at(rows), 0.0, 0.0, 0.0), step_s)
        before = factors.decode
        factors.decode += (1.0 - before) / SAMPLES
        self.decode.add(rows, step_s / factors.decode, before / factors.decode)

    def encoded(self, size: float, num_slices: int, elapsed_s: float) -> None:
        """See `Costs.encoded`."""
        self.slice.add(size, elapsed_s / num_slices)


def size_class(size: float) -> int:
    """Sizes that are taken to be alike: up to 8 each is its own, beyond `CLASSES` an octave."""
    return round(size) if size <= 8 else 8 + round(CLASSES * math.log2(size / 8))


def _median(samples: deque[tuple[float, float]]) -> tuple[float, float]:
    """The newest size of a class, and its median time: the upper one of two, if the lower one is not far below, or
    nothing at all, which is what noise leaves of a difference.
    """
    times = sorted(time for _, time in samples)
    is_doubtful = len(times) == 2 and times[1] > HICCUP * times[0] > 0.0
    return samples[-1][0], times[0] if is_doubtful else times[len(times) // 2]
