"""How many times as long as their curves say parts of steps take by now, from sums alone: a Kalman filter.

    a step took  Σ factor × part by its curve  +  noise     parts: decoding, prompts, slices, reading what is behind

`engine.step_costs` asks. While pictures come all the time no step decodes alone any more, yet texts grow, and clocks
fall under load: only as mixtures change can it be told what takes longer. The filter (Kalman 1960, for factors that
wander) weighs how sure it is of each: two mixtures that differ tell the parts apart that they differ in. What surprises
it counts in part (Huber 1964), and leaves as much more of the doubt.

The room beside decoding grows with what decoding is taken to cost. So prompts are the first to be blamed: if it was
not they, the room shrinks, and steps that hold less of them tell what it was; the other way round steps would grow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul
from typing import Final

NOISE: Final = 0.05
"""Of what a step takes, as a part of it; standard deviations, as all of these."""
DOUBTS: Final = (0.3, 1.0, 0.1, 1.0)
"""In the factors at first. Decoding was measured behind short texts, prompts by few steps, reading by one size; slices
correct themselves where they are far off.
"""
MOST_DOUBTS: Final = (0.3, 0.2, 0.1, 0.2)
"""To which they grow again."""
DRIFTS: Final = (0.01, 0.006, 0.003, 0.006)
"""Of the factors from step to step."""
MOST_OFF: Final = 0.1
"""Of what a step should have taken; or `SURPRISE` deviations of that while there is more doubt. Beyond it something
else was going on, and no more counts.
"""
SURPRISE: Final = 1.5
LEAST: Final = 0.25
MOST: Final = 8.0
MOST_READING: Final = 1000.0
"""It may not have been measured: then next to nothing is taken for it at first."""
MOST_DECODE: Final = 2.0
"""Texts that grow seldom make a step longer than that before it is seen alone."""


class Factors:
    """Attributes:
    decode, prompt, slices, reading: The factors, in the order of parts.
    """

    def __init__(self) -> None:
        self.decode = self.prompt = self.slices = self.reading = 1.0
        self._doubt = [[0.0] * len(DOUBTS) for _ in DOUBTS]  # covariance of the factors
        for index, doubt in enumerate(DOUBTS):
            self._doubt[index][index] = doubt**2

    @property
    def decode_doubt(self) -> float:
        """Standard deviation of the factor of decoding."""
        return math.sqrt(self._doubt[0][0])

    def expected_s(self, parts_s: Sequence[float]) -> float:
        """What a step takes whose parts take so long by their curves."""
        decode_s, prompt_s, slices_s, reading_s = parts_s
        return self.decode * decode_s + self.prompt * prompt_s + self.slices * slices_s + self.reading * reading_s

    def correct(self, parts_s: Sequence[float], step_s: float) -> None:
        """Such a step took so long."""
        expected_s = self.expected_s(parts_s)
        if expected_s <= 0.0:
            return
        shares = [part_s / expected_s for part_s in parts_s]
        shared = [sum(map(mul, row, shares)) for row in self._doubt]
        variance = sum(map(mul, shares, shared)) + NOISE**2
        most_off = max(MOST_OFF, SURPRISE * math.sqrt(variance))
        off = step_s / expected_s - 1.0
        surprise = max(abs(off) / most_off, 1.0)
        step = off / surprise / variance
        self.decode = min(max(self.decode + shared[0] * step, LEAST), MOST_DECODE)
        self.prompt = min(max(self.prompt + shared[1] * step, LEAST), MOST)
        self.slices = min(max(self.slices + shared[2] * step, LEAST), MOST)
        self.reading = min(max(self.reading + shared[3] * step, LEAST), MOST_READING)
        for index, row in enumerate(self._doubt):
            known = shared[index] / (variance * surprise)
            for other, share in enumerate(shared):
                row[other] -= known * share
            if row[index] < MOST_DOUBTS[index] ** 2:
                row[index] += DRIFTS[index] ** 2
