"""How many times as long as their curves say parts of steps take by now, from sums alone: a Kalman filter.

    a step took  Σ factor × part by its curve  +  noise            parts: decoding, prompts, slices of pictures

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
from typing import Final

NOISE: Final = 0.05
"""Of what a step takes, as a part of it; standard deviations, as all of these."""
DOUBTS: Final = (0.3, 1.0, 0.1)
"""In the factors at first. Decoding was measured behind short texts, prompts by few steps; slices correct themselves
where they are far off.
"""
MOST_DOUBTS: Final = (0.3, 0.2, 0.1)
"""To which they grow again."""
DRIFTS: Final = (0.01, 0.006, 0.003)
"""Of the factors from step to step."""
MOST_OFF: Final = 0.1
"""Of what a step should have taken; or `SURPRISE` deviations of that while there is more doubt. Beyond it something
else was going on, and no more counts.
"""
SURPRISE: Final = 1.5
LEAST: Final = 0.25
MOST: Final = 8.0
MOST_DECODE: Final = 2.0
"""Texts that grow seldom make a step longer than that before it is seen alone."""


class Factors:
    """Attributes:
    decode, prompt, slices: The factors.
    """

    def __init__(self) -> None:
        self.decode = self.prompt = self.slices = 1.0
        decode, prompt, slices = (doubt**2 for doubt in DOUBTS)
        self._doubt = [[decode, 0.0, 0.0], [0.0, prompt, 0.0], [0.0, 0.0, slices]]  # covariance of the factors

    @property
    def decode_doubt(self) -> float:
        """Standard deviation of the factor of decoding."""
        return math.sqrt(self._doubt[0][0])

    def expected_s(self, parts_s: Sequence[float]) -> float:
        """What a step takes whose parts take so long by their curves."""
        return self.decode * parts_s[0] + self.prompt * parts_s[1] + self.slices * parts_s[2]

    def correct(self, parts_s: Sequence[float], step_s: float) -> None:
        """Such a step took so long."""
        expected_s = self.expected_s(parts_s)
        if expected_s <= 0.0:
            return
        a, b, c = (part_s / expected_s for part_s in parts_s)
        shared = [row[0] * a + row[1] * b + row[2] * c for row in self._doubt]
        variance = a * shared[0] + b * shared[1] + c * shared[2] + NOISE**2
        most_off = max(MOST_OFF, SURPRISE * math.sqrt(variance))
        off = step_s / expected_s - 1.0
        surprise = max(abs(off) / most_off, 1.0)
        step = off / surprise / variance
        self.decode = min(max(self.decode + shared[0] * step, LEAST), MOST_DECODE)
        self.prompt = min(max(self.prompt + shared[1] * step, LEAST), MOST)
        self.slices = min(max(self.slices + shared[2] * step, LEAST), MOST)
        for index, row in enumerate(self._doubt):
            known = shared[index] / (variance * surprise)
            row[0] -= known * shared[0]
            row[1] -= known * shared[1]
            row[2] -= known * shared[2]
            if row[index] < MOST_DOUBTS[index] ** 2:
                row[index] += DRIFTS[index] ** 2
