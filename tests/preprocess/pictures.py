"""Pictures for tests, made by code: smooth ones, in every format, mode and orientation."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any, Final

import numpy as np
from PIL import Image

FORMATS: Final = {
    "jpeg": ("JPEG", {}),
    "jpeg-progressive": ("JPEG", {"progressive": True}),
    "jpeg-444": ("JPEG", {"subsampling": 0}),
    "png": ("PNG", {}),
    "webp": ("WEBP", {}),
    "webp-lossless": ("WEBP", {"lossless": True}),
    "gif": ("GIF", {}),
    "bmp": ("BMP", {}),
    "tiff": ("TIFF", {}),
    "tiff-lzw": ("TIFF", {"compression": "tiff_lzw"}),
    "tiff-deflate": ("TIFF", {"compression": "tiff_adobe_deflate"}),
    "avif": ("AVIF", {}),
}
"""Name → Pillow's format and save options."""

ANIMATED: Final = {"gif": "GIF", "webp": "WEBP", "png": "PNG", "avif": "AVIF"}


def smooth(width: int, height: int, seed: int = 0) -> Image.Image:
    """A soft RGB picture without symmetry, as photographs are soft."""
    noise = np.random.default_rng(seed).integers(0, 256, (max(height // 12, 3), max(width // 12, 3), 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def encode(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    """The picture as a file."""
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def encode_as(image: Image.Image, name: str) -> bytes:
    """The picture in one of `FORMATS`."""
    format, options = FORMATS[name]
    return encode(image, format, **options)


def with_orientation(image: Image.Image, orientation: object, format: str = "JPEG", **options: Any) -> bytes:
    """A file whose EXIF says `orientation`."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(image, format, exif=exif.tobytes(), **options)


def png(
    width: int, height: int, colour_type: int, bit_depth: int, rows: list[bytes], *chunks: tuple[bytes, bytes]
) -> bytes:
    """A PNG file of raw rows (without filter bytes), for what Pillow cannot write."""
    body = zlib.compress(b"".join(b"\0" + row for row in rows))
    header = struct.pack(">IIBBBBB", width, height, bit_depth, colour_type, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", body), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )


def pixels(image: Image.Image) -> np.ndarray[Any, np.dtype[np.int16]]:
    """As signed integers, to subtract."""
    return np.asarray(image).astype(np.int16)


def mean_error(one: Image.Image, other: Image.Image) -> float:
    """Mean absolute difference, of 255."""
    return float(np.abs(pixels(one) - pixels(other)).mean())
