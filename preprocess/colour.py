"""Any Pillow mode → RGB as a person would see it: transparency on white, deep pixels scaled rather than clipped.

Where a mode has one obvious meaning (L, P, CMYK, YCbCr, HSV) the result is Pillow's own `convert("RGB")`, which is what
the reference processors use. Work on deep pixels goes through bands of rows, so that a huge picture stays bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageCms

from preprocess.errors import ClientError

_WHITE: Final = (255, 255, 255)
_BAND_PIXELS: Final = 1 << 20

Deep = npt.NDArray[Any]
Scale = Callable[[Deep], npt.NDArray[np.uint8]]


def to_rgb(image: Image.Image) -> Image.Image:
    """A loaded picture of any mode, as RGB."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _deep_to_rgb(image)
    if image.mode == "LAB":
        return _lab_to_rgb(image)
    if image.mode == "La":
        image = image.convert("LA")
    if image.mode in ("RGBA", "LA", "PA", "RGBa") or "transparency" in image.info:
        return _on_white(image)
    return image.convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode in ("CMYK", "YCbCr", "HSV", "RGBX"):  # they have no transparent colour, whatever the file says
        return image.convert("RGB")
    with_alpha = image if image.mode == "RGBA" else image.convert("RGBA")
    canvas = Image.new("RGB", image.size, _WHITE)
    canvas.paste(with_alpha, mask=with_alpha)
    return canvas


def _lab_to_rgb(image: Image.Image) -> Image.Image:
    converted = ImageCms.profileToProfile(
        image, ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB"), outputMode="RGB"
    )
    if converted is None:
        raise ClientError("The picture's Lab colours cannot be converted; send it as RGB.", code="image_undecodable")
    return converted


def _deep_to_rgb(image: Image.Image) -> Image.Image:
    """Grey of 16 bits, 32 bits or floats → RGB."""
    scale = _scale_16_bit if image.mode.startswith("I;16") else _scale_by_range(image)
    transparent = image.info.get("transparency") if image.mode.startswith("I;16") else None
    grey = Image.new("L", image.size)
    for box, band in _bands(image):
        values = scale(band)
        if isinstance(transparent, int):
            values[band == transparent] = 255
        grey.paste(Image.fromarray(values), box)
    return grey.convert("RGB")


def _bands(image: Image.Image) -> Iterator[tuple[tuple[int, int, int, int], Deep]]:
    """Boxes of whole rows, and their pixels (rows, width)."""
    step = max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, step):
        box = (0, top, image.width, min(top + step, image.height))
        yield box, np.asarray(image.crop(box))


def _scale_16_bit(band: Deep) -> npt.NDArray[np.uint8]:
    """0 … 65,535 → 0 … 255, rounded."""
    return ((band.astype(np.uint32) * 255 + 32_767) // 65_535).astype(np.uint8)


def _scale_by_range(image: Image.Image) -> Scale:
    """How to read grey values of no declared range: the smallest usual range that holds them, else stretched to it.

    Integers: 8 bits, 16 bits. Floats: 0 … 1, 0 … 255. Not-a-number is black.
    """
    low, high = _range(image)
    if image.mode == "I" and low >= 0 and 255 < high <= 65_535:
        return _scale_16_bit
    if image.mode == "F" and low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    elif low >= 0 and high <= 255:
        low, high = 0.0, 255.0
    factor = 255.0 / (high - low) if high > low else 0.0

    def scale(band: Deep) -> npt.NDArray[np.uint8]:
        values = (np.nan_to_num(band.astype(np.float64), nan=low, posinf=high, neginf=low) - low) * factor
        return np.rint(np.clip(values, 0, 255)).astype(np.uint8)

    return scale


def _range(image: Image.Image) -> tuple[float, float]:
    """Smallest and largest finite value; (0, 0) where there is none."""
    low, high = np.inf, -np.inf
    for _, band in _bands(image):
        finite = band[np.isfinite(band)] if image.mode == "F" else band
        if finite.size:
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
    return (low, high) if low <= high else (0.0, 0.0)
