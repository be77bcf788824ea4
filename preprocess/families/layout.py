"""How a picture is cut into tiles, and what the device does to its pixels: plain values that families fill in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

_DRAFT_MARGIN: Final = 2.75
"""How much larger than needed a reduced-scale decode must be. libjpeg clips what overshoots in a reduced block, so a
scale nearer to the target moves small sharp print by several of 255; from here on the mean error is below 1."""


@dataclass(frozen=True, slots=True)
class Normalisation:
    """Pixels become ``(pixel * scale - mean) / std`` by channel (red, green, blue)."""

    scale: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class PictureLayout:
    """Where a picture's pixels go: it is resized through `steps` (width, height), then cut.

    `rows` × `columns` tiles of the last step and one of the whole picture follow; 0 × 0 is the whole picture alone.
    Every tile is `tile_height` × `tile_width` and stands for `tokens_per_tile` vision tokens.

    `frames`: of a clip, that the encoder sees as one; there is a tile of each, and the tokens are those of one.
    `token_columns`: vision tokens in a row, where positions tell rows and columns apart; else 0.
    """

    steps: tuple[tuple[int, int], ...]
    rows: int
    columns: int
    tile_height: int
    tile_width: int
    tokens_per_tile: int
    frames: int = 1
    token_columns: int = 0

    @property
    def num_tiles(self) -> int:
        """Tiles, the whole picture's among them."""
        return self.rows * self.columns + 1

    @property
    def num_tokens(self) -> int:
        """Vision tokens."""
        return self.num_tiles * self.tokens_per_tile

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the pixels: (tiles or frames, height, width, 3)."""
        return (self.num_tiles * self.frames, self.tile_height, self.tile_width, 3)

    @property
    def num_bytes(self) -> int:
        """Of the pixels, uint8."""
        return self.num_tiles * self.frames * self.tile_height * self.tile_width * 3

    @property
    def draft_size(self) -> tuple[int, int]:
        """(width, height) that a reduced-scale decode must at least have, to lose nothing that is seen."""
        widths, heights = zip(*self.steps, strict=True)
        return (  # the smallest step decides what is seen
            max(*widths, math.ceil(min(widths) * _DRAFT_MARGIN)),
            max(*heights, math.ceil(min(heights) * _DRAFT_MARGIN)),
        )
