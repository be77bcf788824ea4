"""SmolVLM2's way with clips: frames as single tiles, with the time of each in the text.

Sampling, sizes and strings follow `SmolVLMVideoProcessor` and `SmolVLMProcessor` of transformers. There, times are
frame numbers divided by the rate; here they are the file's own, which is the same where the rate is steady.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from fractions import Fraction
from typing import TYPE_CHECKING, Final

import numpy as np

from preprocess.families.layout import PictureLayout
from preprocess.families.settings import count
from preprocess.number_words import in_words

if TYPE_CHECKING:
    from preprocess.blocks.fields import Fields
    from preprocess.timeline import Timeline

_MAX_RESIZED_SIDE: Final = 4096
_DEFAULT_FPS: Final = 1
_DEFAULT_MAX_FRAMES: Final = 64
_SKIP_S: Final = 1
"""Left out at both ends of a clip that has more to show than is looked at."""


class SmolVLMClips:
    """See `ClipFamily`.

    Args:
        settings: Of the video processor.
        tile: Side of a tile in pixels.
        tokens_per_tile: Vision tokens of a frame.
        token_id: Placeholder of vision tokens.
        single: The text that stands for a picture of one tile.
    """

    frames_per_item = 1

    def __init__(
        self, settings: Fields, tile: int, tokens_per_tile: int, token_id: int, single: Callable[..., str]
    ) -> None:
        sampling = settings.section("video_sampling")
        self.max_frames = count(sampling, "max_frames", count(settings, "num_frames", _DEFAULT_MAX_FRAMES))
        self.lease_bytes = self.max_frames * tile * tile * 3
        self.token_id = token_id
        self.fps = sampling.number("fps", settings.number("fps", _DEFAULT_FPS))
        size = settings.section("size") if settings.values.get("size") else sampling.section("video_size")
        self._longest = size.integer("longest_edge", 0, minimum=0)
        self._fixed_size = count(size, "width", tile), count(size, "height", tile)
        self._tile = tile
        self._frame_tokens = tokens_per_tile
        self._single = single

    def bound(self, num_tokens: int) -> None:
        """See `ClipFamily.bound`. A frame is one tile, whose size the model was trained for."""

    def fit_into(self, num_tokens: int) -> None:
        """See `ClipFamily.fit_into`. A frame is one tile, whose size the model was trained for."""

    def sample(self, timeline: Timeline, fps: float, max_frames: int) -> list[int]:
        """See `ClipFamily.sample`. In floats, as in the reference: halves are rounded as they come out there."""
        most, per_second = max_frames or self.max_frames, fps or self.fps
        num_frames, rate = timeline.num_frames, float(timeline.rate)
        duration = num_frames / rate
        wanted = max(min(round(per_second * duration), most), 1)
        first, last = 0, num_frames - 1
        if duration - 2 * _SKIP_S > most * per_second:
            first, last = int(_SKIP_S * rate), min(int(num_frames - _SKIP_S * rate), num_frames - 1)
        if first >= last:
            first, last = 0, num_frames - 1
        return timeline.frames_at(np.linspace(first, last, wanted, dtype=np.int64))

    def layout(self, width: int, height: int, num_frames: int) -> PictureLayout:
        """See `ClipFamily.layout`."""
        tile = (self._tile, self._tile)
        return PictureLayout((self._first_size(width, height), tile), 0, 0, *tile, self._frame_tokens)

    def item_times(self, times_s: Sequence[Fraction], duration_s: Fraction) -> list[int]:
        """See `ClipFamily.item_times`."""
        return [0] * len(times_s)

    def placeholder(self, layout: PictureLayout, times_s: Sequence[Fraction], duration_s: Fraction) -> str:
        """See `ClipFamily.placeholder`."""
        length = timedelta(seconds=int(duration_s))
        intro = f"You are provided the following series of {in_words(len(times_s))} frames from a {length} "
        frames = (f"\nFrame from {int(time) // 60:02d}:{int(time) % 60:02d}:{self._single(layout)}" for time in times_s)
        return f"{intro}[H:MM:SS] video.\n{''.join(frames)}\n\n"

    def _first_size(self, width: int, height: int) -> tuple[int, int]:
        """The reference's arithmetic in its own order: float rounding decides."""
        if not self._longest:
            return self._fixed_size
        longest = min(_MAX_RESIZED_SIDE, self._longest)
        aspect = width / height
        if width >= height:
            other = int(longest / aspect)
            return longest, max(other + other % 2, 1)
        other = int(longest * aspect)
        return max(other + other % 2, 1), longest
