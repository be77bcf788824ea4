"""Pixels of a Pillow picture, put where they shall lie: in shared memory, mostly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from PIL import Image

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_BLOCK_BYTES: Final = 64 << 10


def write_pixels(image: Image.Image, out: npt.NDArray[np.uint8]) -> None:
    """Write an RGB picture's pixels, row by row, into `out` (…, height, width, 3), which lies in one piece.

    `numpy.asarray` gives the same, but has Pillow collect all pixels in pieces, join those, and then copy the whole:
    twice the time. This is `Image.tobytes`, each piece of which goes where it belongs at once; what that uses is not
    public, and the same in Pillow 11.3 to 12.3. A picture that is not loaded yet is loaded.

    Raises:
        ValueError: The picture is no RGB picture of that size.
        RuntimeError: Pillow could not tell its pixels.
    """
    if image.mode != "RGB" or out.shape[-3:] != (image.height, image.width, 3):
        raise ValueError(f"expected an RGB picture for pixels {out.shape}, not one in {image.mode} of {image.size}")
    room = out.data.cast("B")
    encoder_of = getattr(Image, "_getencoder", None)
    if encoder_of is None:  # another Pillow
        room[:] = image.tobytes()
        return
    image.load()
    encoder = encoder_of(image.mode, "raw", image.mode)
    encoder.setimage(image.im, (0, 0, *image.size))
    start = status = 0
    while not status:
        _, status, piece = encoder.encode(max(_BLOCK_BYTES, 3 * image.width))
        room[start : start + len(piece)] = piece
        start += len(piece)
    if status < 0 or start != len(room):
        raise RuntimeError(f"Pillow's encoder ended with status {status} after {start:,} of {len(room):,} bytes")
