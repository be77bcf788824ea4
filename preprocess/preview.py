"""What the model sees of a picture or clip, made visible: the very pixels that the encoder would get, as pictures.

The way there is that of a request (`Media`), so a preview cannot differ from what is looked at.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Final

import numpy as np
from PIL import Image

from preprocess.media import Item, Media
from preprocess.wire import Previewed, SeenTile

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

_QUALITY: Final = 90


def previewed(request_id: str, media: Media) -> Previewed:
    """The answer for the one picture or clip in `media`, whose pixels must be inline (no arena)."""
    if media.clips:
        clip = media.clips[0]
        frames = [pixels for item in media.items for pixels in _pixels(item)]
        # a family that encodes frames in pairs repeats the last of an odd number: that one has no time
        tiles = [_tile(pixels, time_s=time_s) for pixels, time_s in zip(frames, clip.frame_times_s, strict=False)]
        return Previewed(request_id, tiles, clip=clip)
    item = media.items[0]
    rows, columns = item.layout.rows, item.layout.columns
    places = [(row, column) for row in range(1, rows + 1) for column in range(1, columns + 1)]
    tiles = [
        _tile(pixels, row=row, column=column)
        for pixels, (row, column) in zip(_pixels(item), [*places, (0, 0)], strict=True)
    ]
    return Previewed(request_id, tiles, image=media.images[0], rows=rows, columns=columns)


def _pixels(item: Item) -> Iterator[npt.NDArray[np.uint8]]:
    """An item's tiles or frames, each (height, width, 3)."""
    yield from np.frombuffer(item.pixels.inline, dtype=np.uint8).reshape(item.pixels.shape)


def _tile(pixels: npt.NDArray[np.uint8], *, row: int = 0, column: int = 0, time_s: float | None = None) -> SeenTile:
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "WEBP", quality=_QUALITY, method=2)
    height, width, _ = pixels.shape
    return SeenTile(width, height, encoded.getvalue(), row, column, time_s)
