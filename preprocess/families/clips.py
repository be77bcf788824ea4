"""What a family must say of clips to be able to watch them: which frames, how large, and what stands between them."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from preprocess.families.layout import PictureLayout
    from preprocess.timeline import Timeline


class ClipFamily(Protocol):
    """How one model family wants its clips.

    Attributes:
        fps: Frames a second that are looked at, unless the client asks for another rate.
        max_frames: Frames that are looked at, at most, likewise.
        frame_bytes: Of one frame's pixels.
        frame_tokens: Vision tokens of one frame.
    """

    fps: float
    max_frames: int
    frame_bytes: int
    frame_tokens: int

    def sample(self, timeline: Timeline, fps: float, max_frames: int) -> list[int]:
        """The frames to look at, ascending. 0 for `fps` or `max_frames` takes the family's own."""
        ...

    def layout(self, width: int, height: int) -> PictureLayout:
        """How a frame of this size (upright) is resized: always to one tile."""
        ...

    def placeholder(self, layout: PictureLayout, times_s: Sequence[Fraction], duration_s: Fraction) -> str:
        """The text that stands for a clip with frames at these times, special tokens spelled out."""
        ...
