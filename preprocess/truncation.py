"""Tells, of a picture that did not decode, whether its end is missing, so that the client hears the reason.

Looks at the container only: every format says somewhere how long it is or how it ends.
"""

from __future__ import annotations

from typing import Final, Literal

from preprocess.formats import PictureFormat

_MOVIE_BOX_HEADER: Final = 8
_TIFF_TYPE_BYTES: Final = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8}
_STRIP_OFFSETS, _STRIP_SIZES = {273, 324}, {279, 325}


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
    if found.pillow == "TIFF":
        return _directory_cut_off(data)
    return _boxes_cut_off(data)


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


def _directory_cut_off(data: bytes) -> bool:
    """Whether the first directory of a TIFF file, a value in it, or a strip of pixels ends behind the data.

    BigTIFF is left out: such large files are refused by their size.
    """
    order: Literal["little", "big"] = "little" if data[:2] == b"II" else "big"

    def number(at: int, size: int) -> int:
        return int.from_bytes(data[at : at + size], order)

    start = number(4, 4)
    num_entries = number(start, 2)
    if start + 2 + 12 * num_entries > len(data):
        return True
    offsets: list[int] = []
    sizes: list[int] = []
    for entry in range(start + 2, start + 2 + 12 * num_entries, 12):
        tag, kind, amount = number(entry, 2), number(entry + 2, 2), number(entry + 4, 4)
        each = _TIFF_TYPE_BYTES.get(kind, 1)
        values = entry + 8 if each * amount <= 4 else number(entry + 8, 4)
        if values + each * amount > len(data):
            return True
        if tag in _STRIP_OFFSETS | _STRIP_SIZES:
            found = [number(values + index * each, each) for index in range(amount)]
            (offsets if tag in _STRIP_OFFSETS else sizes).extend(found)
    return any(offset + size > len(data) for offset, size in zip(offsets, sizes, strict=False))
