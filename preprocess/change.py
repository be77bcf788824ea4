"""How much two frames of a camera differ, cheaply: what lets a still scene cost the engine nothing.

A frame becomes a thumbnail of 32 × 32 cells; a cell averages hundreds of pixels, so a sensor's noise is gone. Change is
the mean absolute difference of one colour channel (red, green or blue) inside one sixteenth of the picture (8 × 8
cells): of the sixteenth and the channel where it is largest, in percent of the channel's range. Something small in a
corner therefore counts as much as something large; a lamp that turns from grey to an equally bright red counts; a
camera that adjusts its exposure a little does not.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from PIL import Image

from preprocess.config import MediaLimits
from preprocess.image import decode

SIDE: Final = 32
REGION: Final = 8


def thumbnail(data: bytes, limits: MediaLimits) -> bytes:
    """RGB bytes of the 32 × 32 cells of an encoded picture, row by row.

    A JPEG is decoded at an eighth of its scale where that still has the cells. Raises `ClientError`.
    """
    picture = decode(data, limits, lambda width, height: (min(SIDE, width), min(SIDE, height)))
    return picture.image.resize((SIDE, SIDE), Image.Resampling.BOX).tobytes()


def change(before: bytes, after: bytes) -> float:
    """Percent, 0 to 100, between two thumbnails."""
    regions = SIDE // REGION
    old, new = (np.frombuffer(seen, np.uint8).astype(np.int16) for seen in (before, after))
    difference = np.abs(old - new).reshape(regions, REGION, regions, REGION, 3)  # region row, row, column, channel
    return float(difference.mean(axis=(1, 3)).max()) * 100 / 255
