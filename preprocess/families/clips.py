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
        token_id: Placeholder id that vision tokens of frames replace.
        fps: Frames a second that are looked at, unless the client asks for another rate.
        max_frames: Frames that are looked at, at most, likewise.
        frames_per_item: Frames that the encoder sees as one; the last is repeated where they do not come out even.
        lease_bytes: Room in shared memory for the pixels of a usual clip; what does not fit travels in the message.
    """

    token_id: int
    fps: float
    max_frames: int
    frames_per_item: int
    lease_bytes: int

    def bound(self, num_tokens: int) -> None:
        """See `preprocess.families.Family.bound`."""
        ...

    def fit_into(self, num_tokens: int) -> None:
        """Make frames smaller where a whole clip would take more vision tokens, as far as frames may be small."""
        ...

    def sample(self, timeline: Timeline, fps: float, max_frames: int) -> list[int]:
        """The frames to look at, ascending. 0 for `fps` or `max_frames` takes the family's own."""
        ...

    def layout(self, width: int, height: int, num_frames: int) -> PictureLayout:
        """How frames of this size (upright) are resized where so many are looked at: always to one tile each."""
        ...

    def item_times(self, times_s: Sequence[Fraction], duration_s: Fraction) -> list[int]:
        """For each item of a clip with frames at these times: how far behind the clip's first its positions are."""
        ...

    def placeholder(self, layout: PictureLayout, times_s: Sequence[Fraction], duration_s: Fraction) -> str:
        """The text that stands for a clip with frames at these times, special tokens spelled out."""
        ...
