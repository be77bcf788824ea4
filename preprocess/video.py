"""Encoded bytes → a clip: its size, its timeline, and those of its frames that somebody asks for, upright and RGB.

Runs in a preprocess worker, like `preprocess.image`: what arrives is hostile until it is decoded, and no decoder text
gets out. First bytes → limits → timeline → sampling (a family's business) → decode.

The timeline comes from the time stamps of every packet, read without decoding: neither the container's frame rate nor
its count or duration is believed, and no index is needed. Frames are then decoded from the last key frame before each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from preprocess.animation import Animation
from preprocess.config import MediaLimits
from preprocess.data_url import decode_data_url, too_large
from preprocess.video_formats import detect_clip
from preprocess.video_limits import check_duration

if TYPE_CHECKING:
    from PIL import Image

    from preprocess.timeline import Timeline
    from preprocess.wire import VideoPart


class Clip(Protocol):
    """An opened clip."""

    timeline: Timeline

    def frames(self, wanted: Sequence[int]) -> Iterator[tuple[int, Image.Image]]:
        """Decode frames of the timeline, given ascending: (which one, its picture).

        A damaged frame is replaced by the good one before it, or left out; the number tells which one came. Raises
        `ClientError` when there is none at all.
        """
        ...


def encoded_clip(part: VideoPart, limits: MediaLimits) -> bytes:
    """The encoded clip of a message part, within the byte limit."""
    if part.data_url and not part.data:
        return decode_data_url(part.data_url, limits.max_video_bytes, "clip")
    if len(part.data) > limits.max_video_bytes:
        raise too_large(len(part.data), limits.max_video_bytes, "clip")
    return part.data


def open_clip(data: bytes, limits: MediaLimits) -> Clip:
    """Read the header and the timeline of a clip. Raises `ClientError`."""
    found = detect_clip(data)
    clip: Clip
    if found.pillow:
        clip = Animation(data, found, limits)
    else:
        from preprocess.video_stream import VideoStream  # loads FFmpeg

        clip = VideoStream(data, found, limits)
    check_duration(clip.timeline.duration_s, limits)
    return clip


def load_decoders() -> None:
    """Load FFmpeg now, so that no clip waits for it, nor finds that there is no memory left for it."""
    import preprocess.video_stream  # noqa: F401
