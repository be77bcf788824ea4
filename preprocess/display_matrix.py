"""Makes decoded frames upright: FFmpeg gives them as the sensor lay, with a matrix that says how to show them."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from av.sidedata import sidedata
from PIL import Image

if TYPE_CHECKING:
    from av.buffer import Buffer
    from av.video.frame import VideoFrame

_Turn = Image.Transpose
_TURNS: Final = {
    (0, 1, -1, 0): _Turn.ROTATE_270,
    (-1, 0, 0, -1): _Turn.ROTATE_180,
    (0, -1, 1, 0): _Turn.ROTATE_90,
    (-1, 0, 0, 1): _Turn.FLIP_LEFT_RIGHT,
    (1, 0, 0, -1): _Turn.FLIP_TOP_BOTTOM,
    (0, 1, 1, 0): _Turn.TRANSPOSE,
    (0, -1, -1, 0): _Turn.TRANSVERSE,
}
"""What makes a frame upright, by the signs of its display matrix ((a, b), (c, d)): x' = a·x + c·y, y' = b·x + d·y."""

_BY_ANGLE: Final = {90: _Turn.ROTATE_90, 180: _Turn.ROTATE_180, 270: _Turn.ROTATE_270}
"""The same by how many degrees the frame is to be turned against the clock."""

_side_data_of: Final = cast("Any", sidedata.SideDataContainer)
"""Not `frame.side_data`: a frame keeps that, which keeps the frame, its pixels and threads, until Python's collector of
circles comes by. In a worker that is hardly ever."""


def upright(frame: VideoFrame) -> Image.Image:
    """A decoded frame as an RGB picture, the way it is to be shown."""
    image = Image.fromarray(frame.to_ndarray(format="rgb24", threads=1))  # two for every frame would take longer
    turn = _turn(frame)
    return image if turn is None else image.transpose(turn)


def _turn(frame: VideoFrame) -> Image.Transpose | None:
    """What makes the frame upright: FFmpeg decodes a phone's video as its sensor lay."""
    try:
        matrix = cast("Mapping[str, Buffer]", _side_data_of(frame)).get("DISPLAYMATRIX")
    except ValueError:  # something else is with the frame that PyAV has no name for, such as a JPEG's EXIF
        return _BY_ANGLE.get(round(frame.rotation) % 360)
    if matrix is None:
        return None
    a, b, _, c, d = struct.unpack("=5i", bytes(matrix)[:20])
    if abs(a) + abs(d) >= abs(b) + abs(c):
        b = c = 0
    else:
        a = d = 0
    return _TURNS.get((_sign(a), _sign(b), _sign(c), _sign(d)))


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)
