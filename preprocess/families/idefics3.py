"""Idefics3 and SmolVLM: square tiles, optionally a grid of them before the whole picture.

Sizes, cuts and placeholder strings follow the reference processors of transformers (`Idefics3ImageProcessorPil`,
`Idefics3Processor` and their SmolVLM twins) to the last rounding: every step of resizing there ends in uint8, so it
does here. No attention mask travels with the pixels: the reference pads tiles only up to the largest of a batch, and
all our tiles have one size (a picture is squashed to a square, or cut from a multiple of the tile), so its mask is
always full.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np
from PIL import Image

from preprocess.blocks.fields import Fields
from preprocess.families.layout import PictureLayout
from preprocess.families.settings import check_alike, normalisation, resampling, switch
from preprocess.families.smolvlm_clips import SmolVLMClips
from preprocess.model_folder import ModelFolder, bad_folder

if TYPE_CHECKING:
    import numpy.typing as npt

    from preprocess.families.clips import ClipFamily
    from preprocess.families.encoder_cost import EncoderCost
    from preprocess.wire import Detail

_MAX_RESIZED_SIDE: Final = 4096
"""The reference never resizes to more than this."""

_DEFAULT_LONGEST_EDGE: Final = 4 * 364
_DEFAULT_TILE: Final = 364
_HALVES: Final = (0.5, 0.5, 0.5)


class Idefics3:
    """See `Family`."""

    has_three_axes = False
    default_context = 2048

    def __init__(self, folder: ModelFolder) -> None:
        settings = folder.image_settings
        self.name = folder.model_type
        self.image_token_id = folder.fields.integer("image_token_id", 128_257, minimum=0)
        self.normalisation = normalisation(settings, _HALVES, _HALVES)
        self._splits_by_default = switch(settings, "do_image_splitting", True)
        self._resample = resampling(settings, Image.Resampling.LANCZOS)
        self._longest_edge, self._fixed_size = _size(settings)
        self._tile = _edge(settings, "max_image_size", _DEFAULT_TILE)
        self._tokens_per_tile = _tokens_per_tile(folder, self._tile)
        names = folder.named_tokens
        self._image = names.get("image_token", "<image>")
        self._fake = names.get("fake_image_token", "<fake_token_around_image>")
        self._global = names.get("global_image_token", "<global-img>")
        self.max_pixel_bytes = self._max_tiles() * self._tile * self._tile * 3
        self.cost: EncoderCost | None = None
        self.clips: ClipFamily | None = None
        if self.name == "smolvlm":
            check_alike(self.normalisation, normalisation(folder.video_settings, _HALVES, _HALVES))
            self.clips = SmolVLMClips(
                folder.video_settings,
                self._tile,
                self._tokens_per_tile,
                self.image_token_id,
                self.placeholder,
            )

    def bound(self, num_tokens: int) -> None:
        """See `Family.bound`. The encoder attends over one tile at a time, whose size the model was trained for."""

    def layout(self, width: int, height: int, detail: Detail) -> PictureLayout:
        """See `Family.layout`. ``high`` cuts into tiles, ``low`` does not, ``auto`` is the folder's own choice."""
        steps: list[tuple[int, int]] = []
        if self._fixed_size is not None:
            width, height = self._fixed_size
            steps.append((width, height))
        elif self._longest_edge is not None:
            width, height = _fit_longest_edge(width, height, self._longest_edge)
            steps.append((width, height))
        rows = columns = 0
        if detail == "high" or (detail == "auto" and self._splits_by_default):
            width, height = _round_up_to_tiles(width, height, self._tile)
            steps.append((width, height))
            if width > self._tile or height > self._tile:
                rows, columns = height // self._tile, width // self._tile
        else:
            steps.append((self._tile, self._tile))
        return PictureLayout(tuple(steps), rows, columns, self._tile, self._tile, self._tokens_per_tile)

    def fill(self, image: Image.Image, layout: PictureLayout, out: npt.NDArray[np.uint8]) -> None:
        """See `Family.fill`."""
        for step in layout.steps:
            image = image.resize(step, self._resample)
        if layout.num_tiles > 1:
            height, width = layout.tile_height, layout.tile_width
            pixels = np.asarray(image).reshape(layout.rows, height, layout.columns, width, 3)
            grid = out[:-1].reshape(layout.rows, layout.columns, height, width, 3)
            grid[...] = pixels.transpose(0, 2, 1, 3, 4)
            image = image.resize((width, height), self._resample)
        out[-1] = np.asarray(image)

    def placeholder(self, layout: PictureLayout) -> str:
        """See `Family.placeholder`."""
        tile = self._image * layout.tokens_per_tile
        whole = f"{self._fake}{self._global}{tile}{self._fake}"
        if layout.num_tiles == 1:
            return whole
        grid = (
            "".join(f"{self._fake}<row_{row}_col_{column}>{tile}" for column in range(1, layout.columns + 1)) + "\n"
            for row in range(1, layout.rows + 1)
        )
        return "".join(grid) + "\n" + whole

    def protected_tokens(self) -> list[str]:
        """See `Family.protected_tokens`."""
        side = math.ceil(_MAX_RESIZED_SIDE / self._tile)
        cells = [f"<row_{row}_col_{column}>" for row in range(1, side + 1) for column in range(1, side + 1)]
        return [self._image, self._fake, self._global, *cells]

    def _max_tiles(self) -> int:
        """Of any picture with ``detail: high``, which every client may ask for."""
        if self._fixed_size is not None:
            width, height = self._fixed_size
        elif self._longest_edge is not None:
            width = height = min(_even(self._longest_edge), _MAX_RESIZED_SIDE)
        else:
            width = height = _MAX_RESIZED_SIDE
        return math.ceil(width / self._tile) * math.ceil(height / self._tile) + 1


# ---- the reference's arithmetic, in its own order: float rounding decides sizes --------------------------------------


def _fit_longest_edge(width: int, height: int, longest_edge: int) -> tuple[int, int]:
    """The picture's longest side becomes `longest_edge`, the other one even, and none above 4,096."""
    aspect = width / height
    if width >= height:
        width, height = longest_edge, _even(int(longest_edge / aspect))
    else:
        width, height = _even(int(longest_edge * aspect)), longest_edge
    width, height = max(width, 1), max(height, 1)
    aspect = width / height
    if width >= height and width > _MAX_RESIZED_SIDE:
        width, height = _MAX_RESIZED_SIDE, int(_MAX_RESIZED_SIDE / aspect)
    elif height > width and height > _MAX_RESIZED_SIDE:
        width, height = int(_MAX_RESIZED_SIDE * aspect), _MAX_RESIZED_SIDE
    return max(width, 1), max(height, 1)


def _round_up_to_tiles(width: int, height: int, tile: int) -> tuple[int, int]:
    """Both sides become multiples of `tile`, the longer one first; at least one tile."""
    aspect = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / aspect) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * aspect) / tile) * tile
    return max(width, tile), max(height, tile)


def _even(side: int) -> int:
    return side + side % 2


# ---- the folder's settings -------------------------------------------------------------------------------------------


def _edge(settings: Fields, name: str, default: int) -> int:
    """The longest edge of a size, which is an object or the edge itself."""
    size = settings.section(name) if isinstance(settings.values.get(name), dict) else settings
    return size.integer("longest_edge") if size is not settings else settings.integer(name, default)


def _size(settings: Fields) -> tuple[int | None, tuple[int, int] | None]:
    """(longest edge, None), (None, (width, height)), or neither where `do_resize` is off."""
    if not switch(settings, "do_resize", True):
        return None, None
    if isinstance(settings.values.get("size"), dict):
        size = settings.section("size")
        if size.has("height") and size.has("width") and not size.has("longest_edge"):
            return None, (size.integer("width"), size.integer("height"))
    return _edge(settings, "size", _DEFAULT_LONGEST_EDGE), None


def _tokens_per_tile(folder: ModelFolder, tile: int) -> int:
    """What the model makes of a tile; the processor's `image_seq_len` must agree, or prompt and pixels would not."""
    side = tile // folder.vision_fields.square("patch_size", 32)
    scale = folder.fields.integer("scale_factor", 2)
    if not side or side % scale:
        raise bad_folder(
            folder.path,
            f"a tile of {tile} pixels has {side} patches a side, no multiple of scale_factor {scale}",
        )
    per_tile = (side // scale) ** 2
    declared = Fields(folder.processor_config, "processor_config.json: ").integer("image_seq_len", per_tile)
    if declared != per_tile:
        raise bad_folder(
            folder.path,
            f"processor_config.json says image_seq_len {declared}, but a tile of {tile} pixels gives {per_tile} tokens",
        )
    return per_tile
