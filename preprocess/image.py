"""Encoded bytes → an upright RGB picture. Runs in a preprocess worker: what arrives is hostile until it is decoded.

Header → limits → decode → EXIF orientation → RGB on white. Every refusal is a `ClientError` in the client's words; no
decoder text gets out, since it may carry addresses and file paths (CVE-2026-22778 began with such a text).
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from PIL import (  # loaded here, so that `Image.open` finds them and loads none of Pillow's other plugins
    AvifImagePlugin,  # noqa: F401
    BmpImagePlugin,  # noqa: F401
    GifImagePlugin,  # noqa: F401
    Image,
    JpegImagePlugin,  # noqa: F401
    MpoImagePlugin,  # noqa: F401
    PngImagePlugin,  # noqa: F401
    TiffImagePlugin,
    WebPImagePlugin,  # noqa: F401
)

from preprocess.colour import to_rgb
from preprocess.config import MediaLimits
from preprocess.data_url import decode_data_url, too_large
from preprocess.errors import ClientError
from preprocess.formats import PictureFormat, detect
from preprocess.truncation import looks_cut_off
from preprocess.wire import ImagePart

DraftSize = Callable[[int, int], tuple[int, int]]
"""Upright (width, height) → the (width, height) that a reduced-scale decode must at least give."""

_ORIENTATION_TAG: Final = 0x0112
_SUBSAMPLING: Final = 530
_YCBCR: Final = 6
_UPRIGHT: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True, slots=True)
class Picture:
    """An upright RGB picture. `width` and `height` are the file's, though `image` may be a reduced decode."""

    image: Image.Image
    width: int
    height: int


def encoded_bytes(part: ImagePart, limits: MediaLimits) -> bytes:
    """The encoded picture of a message part, within the byte limit."""
    if part.data_url and not part.data:
        return decode_data_url(part.data_url, limits.max_image_bytes)
    if len(part.data) > limits.max_image_bytes:
        raise too_large(len(part.data), limits.max_image_bytes)
    return part.data


def decode(data: bytes, limits: MediaLimits, draft_size: DraftSize | None = None) -> Picture:
    """Decode a picture, first frame of several.

    With `draft_size` a large JPEG may be decoded at 1/2, 1/4 or 1/8 of its scale, as long as nothing is lost that the
    asked size could show. Raises `ClientError`.
    """
    found = detect(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's remarks on odd files are not for our log
        image = _open(data, found, limits)
        with image:
            width, height = _check_size(image.size, limits)
            if draft_size is not None and found.pillow == "JPEG":
                _draft(image, _orientation(image), draft_size)
            rgb = _load(image, data, found)
            orientation = 1 if found.pillow == "TIFF" else _orientation(image)  # Pillow turns TIFF itself
    turn = _UPRIGHT.get(orientation)
    if turn is not None:
        rgb = rgb.transpose(turn)
        if orientation >= 5:
            width, height = height, width
    return Picture(rgb, width, height)


def _open(data: bytes, found: PictureFormat, limits: MediaLimits) -> Image.Image:
    """Read the header, with the one plugin that the first bytes name."""
    if found.pillow == "HEIF":
        import pillow_heif

        pillow_heif.register_heif_opener()
    try:
        image = Image.open(io.BytesIO(data), formats=[found.pillow])
        if found.pillow == "TIFF":
            _read_plain_ycbcr(image)
        return image
    except Image.DecompressionBombError as error:
        number = re.search(r"\((\d+) pixels\)", str(error))
        raise _too_many_pixels(f"{int(number[1]):,}" if number else "far too many", limits) from error
    except MemoryError:
        raise
    except Exception as error:  # plugins raise nearly every type there is on hostile bytes
        raise _unreadable(data, found) from error


def _read_plain_ycbcr(image: Image.Image) -> None:
    """Pillow before 13 takes uncompressed YCbCr of three bytes a pixel for RGB of four, and then finds it cut short."""
    tags, tiles = getattr(image, "tag_v2", {}), getattr(image, "tile", [])
    as_four_bytes = all(codec == "raw" and args[0] == "RGBX" for codec, _, _, args in tiles)
    if (
        as_four_bytes
        and tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == _YCBCR
        and tags.get(_SUBSAMPLING) == (1, 1)
    ):
        image._mode = "YCbCr"
        image.tile = [tile._replace(args=("YCbCr", *tile.args[1:])) for tile in tiles]  # type: ignore[attr-defined]


def _load(image: Image.Image, data: bytes, found: PictureFormat) -> Image.Image:
    """Decode all pixels and make them RGB."""
    try:
        image.load()
        if found.pillow == "PNG":
            _scale_transparent_colour(image, bit_depth=data[24])
        return to_rgb(image)
    except (ClientError, MemoryError):
        raise
    except Exception as error:  # as in `_open`
        raise _unreadable(data, found) from error


def _scale_transparent_colour(image: Image.Image, bit_depth: int) -> None:
    """PNG names the transparent colour in the file's own depth, but Pillow has brought the pixels to 8 bits."""
    colour = image.info.get("transparency")
    if image.mode == "L" and isinstance(colour, int) and bit_depth < 8:
        image.info["transparency"] = colour * 255 // (2**bit_depth - 1)
    elif image.mode == "RGB" and isinstance(colour, tuple) and bit_depth == 16:
        image.info["transparency"] = tuple(value >> 8 for value in colour)


def _check_size(size: tuple[int, int], limits: MediaLimits) -> tuple[int, int]:
    width, height = size
    if width < 1 or height < 1:
        raise ClientError(f"The picture has no pixels ({width} × {height}).", code="image_empty")
    if max(width, height) > limits.max_image_side:
        raise ClientError(
            f"The picture is {width:,} × {height:,} pixels; a side may have at most {limits.max_image_side:,}.",
            code="image_too_large",
        )
    if width * height > limits.max_image_pixels:
        raise _too_many_pixels(f"{width:,} × {height:,}", limits)
    return width, height


def _orientation(image: Image.Image) -> int:
    """EXIF orientation 1 … 8; 1 where there is none or it makes no sense."""
    try:
        value = image.getexif().get(_ORIENTATION_TAG, 1)
    except MemoryError:
        raise
    except Exception:  # damaged EXIF raises all sorts of errors, and says nothing about the picture
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _draft(image: Image.Image, orientation: int, draft_size: DraftSize) -> None:
    """Ask libjpeg for a reduced scale. It never goes below the size asked for, and leaves the colour mode alone."""
    width, height = image.size
    if orientation >= 5:
        height, width = draft_size(height, width)
    else:
        width, height = draft_size(width, height)
    image.draft(None, (width, height))


def _too_many_pixels(what: str, limits: MediaLimits) -> ClientError:
    return ClientError(
        f"The picture has {what} pixels; at most {limits.max_image_pixels:,} are accepted.", code="image_too_large"
    )


def _unreadable(data: bytes, found: PictureFormat) -> ClientError:
    if looks_cut_off(data, found):
        return ClientError(
            f"The {found.name} picture is cut off: it ends, incomplete, after {len(data):,} bytes; send it again.",
            code="image_truncated",
        )
    return ClientError(
        f"The {found.name} picture is damaged, or of a kind that cannot be decoded; save it again with another "
        "program.",
        code="image_undecodable",
    )
