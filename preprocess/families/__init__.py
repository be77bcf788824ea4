"""One file a model family. This one says what a family is and finds it by `model_type` of `config.json`.

A new family is a new file here and a line in `_FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from preprocess.config import PictureBound
from preprocess.families.idefics3 import Idefics3
from preprocess.families.qwen2_vl import qwen2_5_vl, qwen2_vl
from preprocess.families.qwen3_vl import qwen3_vl
from preprocess.model_folder import ModelFolder, bad_folder

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from PIL import Image

    from preprocess.families.clips import ClipFamily
    from preprocess.families.encoder_cost import EncoderCost
    from preprocess.families.layout import Normalisation, PictureLayout
    from preprocess.wire import Detail


class Family(Protocol):
    """How one model family wants its pictures. Knows sizes and spellings; nothing of decoding or tokenising.

    Attributes:
        name: `model_type` of the folder.
        image_token_id: Placeholder id that vision tokens replace.
        normalisation: What the encoder does to uint8 pixels on its device.
        max_pixel_bytes: Bound of `PictureLayout.num_bytes` for any picture.
        default_context: Positions of its language model where `config.json` does not say.
        has_three_axes: Whether the language model takes positions of three axes (`preprocess.families.mrope`).
        cost: What a picture costs its encoder; None where pictures are cut into tiles, of one size each.
        clips: How it wants clips; None where it only looks at pictures.
    """

    name: str
    image_token_id: int
    normalisation: Normalisation
    max_pixel_bytes: int
    default_context: int
    has_three_axes: bool
    cost: EncoderCost | None
    clips: ClipFamily | None

    def bound(self, num_tokens: int) -> None:
        """Make pictures and frames smaller where the encoder would attend over more vision tokens at once."""
        ...

    def layout(self, width: int, height: int, detail: Detail) -> PictureLayout:
        """How a picture of this size (upright) is resized and cut. Raises `ClientError` for one of impossible shape."""
        ...

    def fill(self, image: Image.Image, layout: PictureLayout, out: npt.NDArray[np.uint8]) -> None:
        """Resize an upright RGB picture, and cut it, into `out` (tiles, height, width, 3)."""
        ...

    def placeholder(self, layout: PictureLayout) -> str:
        """The text that stands for the picture in a prompt, special tokens spelled out."""
        ...

    def protected_tokens(self) -> list[str]:
        """Spellings that only `placeholder` may bring into a prompt, besides the tokenizer's own special tokens."""
        ...


_LARGE: Final = 16_384
"""Side of a picture in pixels that every family makes smaller."""

_FAMILIES: Final[dict[str, Callable[[ModelFolder], Family]]] = {
    "idefics3": Idefics3,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen2_vl": qwen2_vl,
    "smolvlm": Idefics3,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl,
}


def load_family(folder: ModelFolder, largest: PictureBound | None = None) -> Family:
    """The family of a model folder, with pictures and frames no larger than `largest`.

    Raises `ServiceError` for one that is not known.
    """
    make = _FAMILIES.get(folder.model_type)
    if make is None:
        known = ", ".join(sorted(_FAMILIES))
        code = "; code that comes with a model (auto_map) is never run" if folder.brings_code else ""
        raise bad_folder(folder.path, f"its model_type is {folder.model_type!r}; known are {known}{code}")
    family = make(folder)
    if largest is not None:
        by_cost = family.cost.tokens_within(largest.operations) if largest.operations and family.cost is not None else 0
        num_tokens = min(filter(None, (largest.tokens, by_cost)), default=0)
        if num_tokens:
            family.bound(num_tokens)
    return family


def largest_item_tokens(family: Family) -> int:
    """Bound of the vision tokens of any picture and of any item of a clip. A token takes equally many pixels in all."""
    picture = family.layout(_LARGE, _LARGE, "high")
    most = -(-family.max_pixel_bytes * picture.num_tokens // picture.num_bytes)
    if family.clips is not None:
        most = max(most, family.clips.layout(_LARGE, _LARGE, family.clips.frames_per_item).num_tokens)
    return most
