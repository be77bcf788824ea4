"""Refusals of clips that are larger or longer than they may be."""

from __future__ import annotations

from fractions import Fraction

from preprocess.config import MediaLimits
from preprocess.errors import ClientError


def check_size(width: int, height: int, limits: MediaLimits) -> None:
    """Refuse frames with no pixels or too many."""
    if width < 1 or height < 1:  # FFmpeg forgets the size of what has too many
        raise ClientError(
            f"The clip's frames have no pixels, or more than the {limits.max_video_pixels:,} that are accepted.",
            code="video_too_large",
        )
    if max(width, height) > limits.max_image_side or width * height > limits.max_video_pixels:
        raise ClientError(
            f"The clip is {width:,} × {height:,} pixels; at most {limits.max_video_pixels:,} in all and "
            f"{limits.max_image_side:,} on a side are accepted.",
            code="video_too_large",
        )


def check_duration(duration_s: Fraction, limits: MediaLimits) -> None:
    """Refuse what is too long."""
    if duration_s > limits.max_video_s:
        raise ClientError(
            f"The clip takes {float(duration_s):,.0f} seconds; at most {limits.max_video_s:,.0f} are accepted.",
            code="video_too_long",
            status=413,
        )
