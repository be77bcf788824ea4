"""Clips made by code, the same on every machine: what the video processors were shown, and what ours are shown."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True)
class CodedClip:
    """`num_frames` frames at a steady rate."""

    num_frames: int
    fps: Fraction
    width: int
    height: int

    @property
    def duration_s(self) -> Fraction:
        """How long it is shown."""
        return self.num_frames / self.fps

    def frame(self, number: int) -> npt.NDArray[np.uint8]:
        """uint8 (height, width, 3): slopes of colour, a bright bar that moves, and a dark square that grows."""
        y, x = np.mgrid[: self.height, : self.width]
        red = (x * 255 // max(self.width - 1, 1) + 3 * number) % 256
        green = (y * 255 // max(self.height - 1, 1) + 5 * number) % 256
        blue = (x * y + 40 * number) * 255 // (self.width * self.height) % 256
        pixels = np.stack([red, green, blue], axis=-1)
        pixels[:, number * 3 % self.width :][:, :5] = (250, 240, 20)
        side = 4 + number % 9
        pixels[2 : 2 + side, 3 : 3 + side] = (10, 20, 60)
        return pixels.astype(np.uint8)

    def frames(self) -> npt.NDArray[np.uint8]:
        """uint8 (frames, height, width, 3)."""
        return np.stack([self.frame(number) for number in range(self.num_frames)])


CLIPS: Final = {
    "four seconds": CodedClip(40, Fraction(10), 88, 60),
    "odd and upright": CodedClip(7, Fraction(3), 50, 92),
    "film": CodedClip(61, Fraction(24000, 1001), 64, 48),
    "slow": CodedClip(9, Fraction(1, 2), 70, 70),
    "two frames": CodedClip(2, Fraction(25), 60, 40),
    "long": CodedClip(1500, Fraction(15), 24, 16),
    "hours": CodedClip(4000, Fraction(1, 2), 12, 10),
}
