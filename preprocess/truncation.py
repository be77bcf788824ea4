"""Tells, of a picture that did not decode, whether its end is missing, so that the client hears the reason.

Looks at the container only: every format says somewhere how long it is or how it ends.
"""

from __future__ import annotations

from preprocess.formats import PictureFormat

_MOVIE_BOX_HEADER = 8


def looks_cut_off(data: bytes, found: PictureFormat) -> bool:
    """Whether the container promises more bytes than there are."""
    if found.pillow == "JPEG":
        return b"\xff\xd9" not in data[-1024:]
    if found.pillow == "PNG":
        return b"IEND" not in data[-1024:]
    if found.pillow == "GIF":
        return not data.rstrip(b"\x00").endswith(b"\x3b")
    if found.pillow == "WEBP":
        return len(data) < 12 or int.from_bytes(data[4:8], "little") + 8 > len(data)
    if found.pillow == "BMP":
        return int.from_bytes(data[2:6], "little") > len(data)
    if found.pillow in ("AVIF", "HEIF"):
        return _boxes_cut_off(data)
    return False


def _boxes_cut_off(data: bytes) -> bool:
    """Whether the last top-level box of an ISO base media file ends behind the data."""
    position = 0
    while position < len(data):
        size = int.from_bytes(data[position : position + 4], "big")
        if size == 1:
            size = int.from_bytes(data[position + 8 : position + 16], "big")
        if size == 0:  # to the end of the file
            return False
        if size < _MOVIE_BOX_HEADER:
            return len(data) - position < _MOVIE_BOX_HEADER
        position += size
    return position > len(data)
