"""Tells what the first bytes of a clip are: a container that we open with one demuxer, an animation, or something else.

Containers are an allow-list, and so are the codecs inside. FFmpeg is never asked to guess: it is told the one demuxer
that the first bytes name, so playlists (HLS, DASH, ffconcat) and everything else that names further files or addresses
cannot be reached. Animated pictures are Pillow's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from preprocess.errors import ClientError
from preprocess.formats import describe, picture_format

ACCEPTED: Final = "MP4, MOV, WebM, MKV or AVI, or an animated GIF, WebP or PNG"

CODECS: Final = frozenset(
    {"h264", "hevc", "av1", "libdav1d", "vp8", "vp9", "mpeg4", "msmpeg4v3", "mpeg1video", "mpeg2video"}
    | {"h263", "mjpeg", "prores", "theora", "rawvideo"}
)
"""Decoders that may run, by FFmpeg's names."""


@dataclass(frozen=True, slots=True)
class ClipFormat:
    """An accepted format: FFmpeg's demuxer or Pillow's plugin (the other is empty), and the name that people know."""

    demuxer: str
    pillow: str
    name: str


_MP4: Final = ClipFormat("mp4", "", "MP4")
_MATROSKA: Final = ClipFormat("matroska", "", "Matroska or WebM")
_AVI: Final = ClipFormat("avi", "", "AVI")
_ANIMATIONS: Final = {
    name: ClipFormat("", name, shown) for name, shown in {"GIF": "GIF", "WEBP": "WebP", "PNG": "PNG"}.items()
}
_QUICKTIME_ATOMS: Final = (b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")


def is_video(head: bytes) -> bool:
    """Whether a file that begins so is a video (an animated picture is a picture)."""
    return _container(head) is not None


def detect_clip(data: bytes) -> ClipFormat:
    """The accepted format of a clip; raises `ClientError` that names what arrived instead."""
    if not data:
        raise ClientError("The clip is empty (0 bytes).", code="video_empty")
    container = _container(data)
    if container is not None:
        return container
    picture = picture_format(data)
    if picture is not None and picture.pillow in _ANIMATIONS:
        return _ANIMATIONS[picture.pillow]
    article = "an" if picture is not None and picture.name.startswith("A") else "a"
    what = f"{article} {picture.name} picture" if picture is not None else describe(data, "video")
    hint = "; send it as a picture" if picture is not None else f"; send {ACCEPTED}"
    raise ClientError(f"This is {what}, not a clip that can be read{hint}.", code="video_format_unsupported")


def _container(head: bytes) -> ClipFormat | None:
    if head.startswith(b"\x1aE\xdf\xa3"):
        return _MATROSKA
    if head.startswith(b"RIFF") and head[8:12] == b"AVI ":
        return _AVI
    if head[4:8] == b"ftyp":
        return _MP4 if picture_format(head) is None else None
    return _MP4 if head[4:8] in _QUICKTIME_ATOMS else None
