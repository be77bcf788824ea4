"""Qwen-VL's way with pictures, for all its versions, and with clips, for Qwen2-VL and Qwen2.5-VL.

Pictures keep their shape: both sides become multiples of a vision token's side, and the whole has between so many and
so many pixels. Sizes follow `Qwen2VLImageProcessorPil` and `Qwen2VLVideoProcessor` of transformers to the last
rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Final

import numpy as np
from PIL import Image

from preprocess.errors import ClientError
from preprocess.families.encoder_cost import EncoderCost
from preprocess.families.layout import PictureLayout
from preprocess.families.settings import count, normalisation, resampling, switch
from preprocess.model_folder import ModelFolder, bad_folder
from preprocess.pixels import write_pixels

if TYPE_CHECKING:
    import numpy.typing as npt

    from preprocess.blocks.fields import Fields
    from preprocess.families.clips import ClipFamily
    from preprocess.timeline import Timeline
    from preprocess.wire import Detail

CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Final = (0.26862954, 0.26130258, 0.27577711)

_MAX_ASPECT: Final = 200
_LOW_TOKENS: Final = 256
"""Vision tokens of a picture with ``detail: low``, at most."""
_DEFAULT_PICTURE_PIXELS: Final = (56 * 56, 1280 * 28 * 28)
_DEFAULT_FRAME_PIXELS: Final = (128 * 28 * 28, 768 * 28 * 28)
_DEFAULT_FPS: Final = 2.0
_DEFAULT_VIDEO_TOKENS: Final = 128_000
_CLIP_LEASE_BYTES: Final = 64 << 20


class QwenVL:
    """See `Family`. `clips` makes the version's way with clips."""

    has_three_axes = True

    def __init__(
        self,
        folder: ModelFolder,
        clips: Callable[[ModelFolder, int], ClipFamily],
        cost: EncoderCost,
        default_context: int = 32_768,
    ) -> None:
        settings = folder.image_settings
        if not switch(settings, "do_resize", True):
            raise bad_folder(folder.path, "its image processor does not resize (do_resize), but pictures must fit")
        self.name = folder.model_type
        self.default_context = default_context
        self.image_token_id = folder.fields.integer("image_token_id", 151_655, minimum=0)
        self._side = token_side(folder, settings)
        self._least, self._most = pixel_bounds(folder, settings, _DEFAULT_PICTURE_PIXELS)
        self._resample = resampling(settings, Image.Resampling.BICUBIC)
        self._image = folder.named_tokens.get("image_token", "<|image_pad|>")
        self.normalisation = normalisation(settings, CLIP_MEAN, CLIP_STD)
        self.max_pixel_bytes = 3 * _most_pixels(self._side, self._least, self._most)
        self.clips: ClipFamily | None = clips(folder, folder.fields.integer("video_token_id", 151_656, minimum=0))
        self.cost: EncoderCost | None = cost

    def bound(self, num_tokens: int) -> None:
        """See `Family.bound`."""
        self._most = max(min(self._most, num_tokens * self._side**2), self._least)
        self.max_pixel_bytes = 3 * _most_pixels(self._side, self._least, self._most)
        if self.clips is not None:
            self.clips.bound(num_tokens)

    def layout(self, width: int, height: int, detail: Detail) -> PictureLayout:
        """See `Family.layout`. ``low`` is at most 256 vision tokens, ``high`` and ``auto`` what the folder allows."""
        most = self._most
        if detail == "low":
            most = min(most, max(_LOW_TOKENS * self._side**2, self._least))
        return token_grid(fit(width, height, self._side, self._least, most), self._side)

    def fill(self, image: Image.Image, layout: PictureLayout, out: npt.NDArray[np.uint8]) -> None:
        """See `Family.fill`."""
        (size,) = layout.steps
        write_pixels(image if image.size == size else image.resize(size, self._resample), out)

    def placeholder(self, layout: PictureLayout) -> str:
        """See `Family.placeholder`. The template itself writes what stands around it."""
        return self._image * layout.num_tokens

    def protected_tokens(self) -> list[str]:
        """See `Family.protected_tokens`."""
        return ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]


class Qwen2VLClips:
    """See `ClipFamily`. The encoder sees two frames as one.

    The reference looks at every frame of a clip unless told how many. Nobody wants that of a server, so the rate is
    that of Qwen's own examples; and the pixels of all frames are bounded (`cap_pixels_per_frame`) unless the folder
    says otherwise, as they are there and will be in transformers 5.22.

    Args:
        folder: The model folder.
        token_id: Placeholder of vision tokens.
        tokens_per_second: How far positions of a clip go on in a second; None: one for every item (Qwen2-VL).
    """

    def __init__(self, folder: ModelFolder, token_id: int, tokens_per_second: int | None = None) -> None:
        settings = folder.video_settings
        self.token_id = token_id
        self.fps = settings.number("fps", _DEFAULT_FPS)
        self.max_frames = count(settings, "max_frames", 768)
        self.frames_per_item = frames_per_item(folder, settings)
        self._min_frames = count(settings, "min_frames", 4)
        self._num_frames = count(settings, "num_frames", 0)
        self._side = token_side(folder, settings)
        self._least, self._most = pixel_bounds(folder, settings, _DEFAULT_FRAME_PIXELS)
        self._is_capped = settings.flag("cap_pixels_per_frame", True)
        most_tokens = count(settings, "max_video_tokens", _DEFAULT_VIDEO_TOKENS)
        context = folder.text_fields.integer("max_position_embeddings", most_tokens)
        self._all_pixels = int(min(most_tokens, context) * self._side**2 * 0.9)
        self._tokens_per_second = tokens_per_second
        self.lease_bytes = min(3 * self.max_frames * self._most, _CLIP_LEASE_BYTES)

    def bound(self, num_tokens: int) -> None:
        """See `ClipFamily.bound`."""
        self._most = max(min(self._most, num_tokens * self._side**2), self._least)
        self.lease_bytes = min(3 * self.max_frames * self._most, _CLIP_LEASE_BYTES)

    def fit_into(self, num_tokens: int) -> None:
        """See `ClipFamily.fit_into`."""
        if self._is_capped:
            self._all_pixels = min(self._all_pixels, num_tokens * self._side**2)

    def sample(self, timeline: Timeline, fps: float, max_frames: int) -> list[int]:
        """See `ClipFamily.sample`. An even number of frames, unless there is but one."""
        total, together = timeline.num_frames, self.frames_per_item
        if self._num_frames and not fps and not max_frames:
            wanted = round(self._num_frames / together) * together
        else:
            most = min(max_frames or self.max_frames, total) // together * together
            by_time = total / float(timeline.rate) * (fps or self.fps)
            wanted = int(min(max(by_time, self._min_frames), most)) // together * together
        wanted = max(min(wanted, total), 1)
        # In float32, as torch.arange has it.
        numbers = (np.arange(wanted) * (total / wanted)).astype(np.float32).astype(np.int64)
        return timeline.frames_at(numbers)

    def layout(self, width: int, height: int, num_frames: int) -> PictureLayout:
        """See `ClipFamily.layout`. Raises `ClientError`."""
        most = self._most
        if self._is_capped:
            share = self._all_pixels * self.frames_per_item // max(num_frames, 1)
            most = max(min(most, share), int(self._least * 1.05))
        return token_grid(fit(width, height, self._side, self._least, most), self._side, self.frames_per_item)

    def item_times(self, times_s: Sequence[Fraction], duration_s: Fraction) -> list[int]:
        """See `ClipFamily.item_times`.

        Frames are sampled evenly, so that the k-th of n stands for k / n of the clip, as in the reference, and is the
        one that is shown then; where some are missing, a frame stands for its own time.
        """
        num_items = math.ceil(len(times_s) / self.frames_per_item)
        if self._tokens_per_second is None:
            return list(range(num_items))
        interval = duration_s / len(times_s)
        places = []
        for index in range(0, len(times_s), self.frames_per_item):
            expected, real = index * interval, times_s[index]
            places.append(expected if -interval / 4 <= expected - real < interval else real)
        return [math.floor(place * self._tokens_per_second) for place in places]

    def placeholder(self, layout: PictureLayout, times_s: Sequence[Fraction], duration_s: Fraction) -> str:
        """See `ClipFamily.placeholder`."""
        num_items = math.ceil(len(times_s) / self.frames_per_item)
        return f"<|vision_start|>{'<|video_pad|>' * (num_items * layout.num_tokens)}<|vision_end|>"


def qwen2_vl(folder: ModelFolder) -> QwenVL:
    """Qwen2-VL (arXiv:2409.12191)."""
    vision = folder.vision_fields
    width, layers = vision.integer("embed_dim", 1280), vision.integer("depth", 32)
    mlp = 2 * width * round(width * vision.number("mlp_ratio", 4))
    cost = EncoderCost(width, layers, mlp, vision.integer("spatial_merge_size", 2) ** 2, layers)
    return QwenVL(folder, Qwen2VLClips, cost)


def qwen2_5_vl(folder: ModelFolder) -> QwenVL:
    """Qwen2.5-VL (arXiv:2502.13923): positions of a clip follow its seconds."""
    vision = folder.vision_fields
    rate = vision.integer("tokens_per_second", 4)
    width, layers = vision.integer("hidden_size", 3584), vision.integer("depth", 32)
    full = vision.values.get("fullatt_block_indexes", [7, 15, 23, 31])
    full = full if isinstance(full, list) else []  # the encoder refuses it
    cost = EncoderCost(
        width,
        layers,
        mlp_weights=3 * width * vision.integer("intermediate_size", 3420),
        patches_per_token=vision.integer("spatial_merge_size", 2) ** 2,
        full_layers=sum(layer in full for layer in range(layers)),
        window=(vision.integer("window_size", 112) // vision.square("patch_size", 14)) ** 2,
    )
    return QwenVL(folder, lambda folder, token_id: Qwen2VLClips(folder, token_id, rate), cost)


# ---- sizes: the reference's arithmetic, in its own order, since float rounding decides -------------------------------


def fit(
    width: int,
    height: int,
    side: int,
    least: int,
    most: int,
    *,
    num_frames: int = 1,
    frames_counted: int = 1,
    what: str = "picture",
) -> tuple[int, int]:
    """(width, height) in multiples of `side`, about the same shape, with `least` to `most` pixels in all frames.

    Args:
        width: As it comes.
        height: As it comes.
        side: Of a vision token, in pixels.
        least: Pixels.
        most: Pixels.
        num_frames: Of this size.
        frames_counted: How many of them the bounds are held against; the reference rounds here.
        what: Has this size, in the words of an error.

    Raises:
        ClientError: It is far too narrow.
    """
    if max(width, height) / min(width, height) > _MAX_ASPECT:
        raise ClientError(
            f"The {what} is {width:,} × {height:,} pixels; this model takes none whose one side is more than "
            f"{_MAX_ASPECT} times the other. Crop it.",
            code="image_too_narrow",
        )
    rows, columns = round(height / side) * side, round(width / side) * side
    if frames_counted * rows * columns > most:
        shrink = math.sqrt(num_frames * height * width / most)
        rows = max(side, math.floor(height / shrink / side) * side)
        columns = max(side, math.floor(width / shrink / side) * side)
    elif frames_counted * rows * columns < least:
        grow = math.sqrt(least / (num_frames * height * width))
        rows, columns = math.ceil(height * grow / side) * side, math.ceil(width * grow / side) * side
    return columns, rows


def token_grid(size: tuple[int, int], side: int, frames: int = 1) -> PictureLayout:
    """The layout of a picture of this (width, height) whose vision tokens have this side."""
    width, height = size
    columns = width // side
    tokens = columns * (height // side)
    return PictureLayout((size,), 0, 0, height, width, tokens, frames=frames, token_columns=columns)


def _most_pixels(side: int, least: int, most: int) -> int:
    """Bound of what `fit` gives: narrow pictures are at least one token high, and small ones round up."""
    narrow = side * math.sqrt(_MAX_ASPECT * most)
    grown = (math.sqrt(_MAX_ASPECT * least) + side) * (math.sqrt(least / _MAX_ASPECT) + side)
    return math.ceil(max(most, narrow, grown))


# ---- the folder's settings -------------------------------------------------------------------------------------------


def token_side(folder: ModelFolder, settings: Fields) -> int:
    """Side of a vision token in pixels. The processor must cut patches as the encoder takes them."""
    return _of_encoder(folder, settings, "patch_size", "patch_size", 14) * _of_encoder(
        folder, settings, "merge_size", "spatial_merge_size", 2
    )


def frames_per_item(folder: ModelFolder, settings: Fields) -> int:
    """Frames that the encoder sees as one. The processor must put as many together."""
    return _of_encoder(folder, settings, "temporal_patch_size", "temporal_patch_size", 2)


def _of_encoder(folder: ModelFolder, settings: Fields, name: str, of_encoder: str, default: int) -> int:
    """A size that the processor's settings, where they have it, call `name`."""
    size = folder.vision_fields.square(of_encoder, default)
    declared = settings.square(name, size)
    if declared != size:
        raise bad_folder(folder.path, f"its processor has {name} {declared}, but its encoder {of_encoder} {size}")
    return size


def pixel_bounds(folder: ModelFolder, settings: Fields, default: tuple[int, int]) -> tuple[int, int]:
    """Fewest and most pixels, as `min_pixels` and `max_pixels` or as edges of `size`, which count pixels here."""
    size = settings.section("size")
    bounds = []
    for name, edge, pixels in zip(
        ("min_pixels", "max_pixels"), ("shortest_edge", "longest_edge"), default, strict=True
    ):
        given = (settings.values.get(name), size.values.get(edge), size.values.get(name), pixels)
        bounds.append(next(value for value in given if value is not None))
    least, most = bounds
    if not (isinstance(least, int) and isinstance(most, int) and 1 <= least <= most):
        raise bad_folder(
            folder.path, f"its processor allows {least!r} to {most!r} pixels, expected two ascending whole numbers"
        )
    return least, most
