"""Qwen3-VL: pictures as in all Qwen-VL models, and a way with clips of its own.

Two frames make one item, and the time of each item stands before it in the prompt.

Sampling, sizes and strings follow `Qwen3VLVideoProcessor` and `Qwen3VLProcessor` of transformers. There, times are
frame numbers divided by the rate; here they are the file's own, which is the same where the rate is steady.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Final

import numpy as np

from preprocess.families.encoder_cost import EncoderCost
from preprocess.families.qwen2_vl import QwenVL, fit, frames_per_item, pixel_bounds, token_grid, token_side
from preprocess.families.settings import count, switch

if TYPE_CHECKING:
    from preprocess.families.layout import PictureLayout
    from preprocess.model_folder import ModelFolder
    from preprocess.timeline import Timeline

_DEFAULT_CLIP_PIXELS: Final = (128 * 32 * 32, 768 * 32 * 32)
_DEFAULT_FPS: Final = 2.0
_TIME_TOKENS: Final = 12
"""Of an item's time and what stands around the item, about."""


class Qwen3VLClips:
    """See `ClipFamily`. What may be large is the whole clip: the more frames, the smaller they are.

    Args:
        folder: The model folder.
        token_id: Placeholder of vision tokens.
    """

    def __init__(self, folder: ModelFolder, token_id: int) -> None:
        settings = folder.video_settings
        self.token_id = token_id
        self.fps = settings.number("fps", _DEFAULT_FPS)
        self.max_frames = count(settings, "max_frames", 768)
        self.frames_per_item = frames_per_item(folder, settings)
        self._min_frames = count(settings, "min_frames", 4)
        self._side = token_side(folder, settings)
        self._least, self._most = pixel_bounds(folder, settings, _DEFAULT_CLIP_PIXELS)
        self._most_a_frame = self._most
        self._room = self._most
        self._is_capped = switch(settings, "cap_pixels_per_frame", False)
        self._most_tokens = count(settings, "max_video_tokens", 768)
        self.lease_bytes = 3 * self._most

    def bound(self, num_tokens: int) -> None:
        """See `ClipFamily.bound`."""
        self._most_a_frame = num_tokens * self._side**2

    def fit_into(self, num_tokens: int) -> None:
        """See `ClipFamily.fit_into`."""
        self._room = num_tokens

    def sample(self, timeline: Timeline, fps: float, max_frames: int) -> list[int]:
        """See `ClipFamily.sample`."""
        wanted = int(timeline.num_frames / float(timeline.rate) * (fps or self.fps))
        wanted = min(max(wanted, self._min_frames), max_frames or self.max_frames, timeline.num_frames)
        return timeline.frames_at(np.linspace(0, timeline.num_frames - 1, wanted).round().astype(np.int64))

    def layout(self, width: int, height: int, num_frames: int) -> PictureLayout:
        """See `ClipFamily.layout`. Raises `ClientError`."""
        num_frames = max(num_frames, self.frames_per_item)  # a lone frame is repeated
        most = self._most
        if self._is_capped:
            share = min(self._most_tokens * self._side**2, most // num_frames)
            most = max(share, int(self._least * 1.05)) * num_frames
        most = min(most, max(self._most_a_frame * num_frames, self._least))
        room = self._room - _TIME_TOKENS * math.ceil(num_frames / self.frames_per_item)
        most = max(min(most, room * self._side**2 * self.frames_per_item), self._least)
        return token_grid(self._fit(width, height, num_frames, most), self._side, self.frames_per_item)

    def item_times(self, times_s: Sequence[Fraction], duration_s: Fraction) -> list[int]:
        """See `ClipFamily.item_times`: times are told in words, so that positions need not tell them."""
        return [0] * math.ceil(len(times_s) / self.frames_per_item)

    def placeholder(self, layout: PictureLayout, times_s: Sequence[Fraction], duration_s: Fraction) -> str:
        """See `ClipFamily.placeholder`."""
        times = [float(time) for time in times_s]
        times += times[-1:] * (-len(times) % self.frames_per_item)
        seen = "<|vision_start|>" + "<|video_pad|>" * layout.tokens_per_tile + "<|vision_end|>"
        items = (
            f"<{(first + last) / 2:.1f} seconds>{seen}"
            for first, last in zip(
                times[:: self.frames_per_item], times[self.frames_per_item - 1 :: self.frames_per_item], strict=True
            )
        )
        return f"<|vision_start|>{''.join(items)}<|vision_end|>"

    def _fit(self, width: int, height: int, num_frames: int, max_pixels: int) -> tuple[int, int]:
        """(width, height) in multiples of a token's side, so that all frames together have about as many pixels as are
        allowed. The reference's arithmetic in its own order: float rounding decides.
        """
        side = self._side
        if height < side or width < side:
            scale = max(side / height, side / width)
            height, width = int(height * scale), int(width * scale)
        frames = round(num_frames / self.frames_per_item) * self.frames_per_item
        return fit(
            width,
            height,
            side,
            self._least,
            max_pixels,
            num_frames=num_frames,
            frames_counted=frames,
            what="clip",
        )


def qwen3_vl(folder: ModelFolder) -> QwenVL:
    """Qwen3-VL (arXiv:2511.21631), dense or with experts."""
    vision = folder.vision_fields
    width, layers = vision.integer("hidden_size", 1152), vision.integer("depth", 27)
    mlp = 2 * width * vision.integer("intermediate_size", 4304)
    cost = EncoderCost(width, layers, mlp, vision.integer("spatial_merge_size", 2) ** 2, layers)
    return QwenVL(folder, Qwen3VLClips, cost, default_context=128_000)
