"""How many times as long as their curves say parts of steps take by now, from sums alone: a Kalman filter.

    a step took  Σ factor × part by its curve  +  noise            parts: decoding, prompts, slices of pictures

`engine.step_costs` asks. While pictures come all the time no step decodes alone any more, yet texts grow, and clocks
fall under load: only as mixtures change can it be told what takes longer. The filter (Kalman 1960, for factors that
wander) weighs how sure it is of each: two mixtures that differ tell the parts apart that they differ in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

NOISE: Final = 0.05
"""Of what a step takes, as a part of it; standard deviations, as all of these."""
DOUBTS: Final = (0.3, 0.1, 0.1)
"""In the factors at first, and at most. Decoding was measured behind short texts."""
DRIFTS: Final = (0.01, 0.003, 0.003)
"""Of the factors from step to step."""
MOST_OFF: Final = 0.1
"""Of what a step should have taken; beyond that something else was going on, and no more counts."""
LEAST: Final = 0.25
MOST: Final = 8.0


class Factors:
    """Attributes:
    decode, prompt, slices: The factors.
    """

    def __init__(self) -> None:
        self.decode = self.prompt = self.slices = 1.0
        self._doubt = np.diag(np.square(DOUBTS))  # covariance of the factors, (3, 3)

    def expected_s(self, parts_s: Sequence[float]) -> float:
        """What a step takes whose parts take so long by their curves."""
        return self.decode * parts_s[0] + self.prompt * parts_s[1] + self.slices * parts_s[2]

    def correct(self, parts_s: Sequence[float], step_s: float) -> None:
        """Such a step took so long."""
        expected_s = self.expected_s(parts_s)
        if expected_s <= 0.0:
            return
        off = min(max(step_s / expected_s - 1.0, -MOST_OFF), MOST_OFF)
        parts = np.array(parts_s) / expected_s
        shared = self._doubt @ parts
        gain = shared / (parts @ shared + NOISE**2)
        self._doubt -= np.outer(gain, shared)
        self._doubt += np.diag(np.where(self._doubt.diagonal() < np.square(DOUBTS), np.square(DRIFTS), 0.0))
        factors = np.clip((self.decode, self.prompt, self.slices) + gain * off, LEAST, MOST)
        self.decode, self.prompt, self.slices = factors.tolist()
