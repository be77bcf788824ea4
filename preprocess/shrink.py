"""A picture made smaller before a model's own processing, where a client says how many pixels it may have at most."""

from __future__ import annotations

from math import isqrt

from PIL import Image


def size_within(width: int, height: int, max_pixels: int) -> tuple[int, int]:
    """The largest size of about the same shape that has at most `max_pixels` pixels; 0 is no bound.

    A side has at least one pixel; the other one then gives way.
    """
    if not max_pixels or width * height <= max_pixels:
        return width, height
    short, long = sorted((width, height))
    less = max(isqrt(max_pixels * short // long), 1)
    more = max(min(max_pixels // less, less * long // short), 1)
    return (less, more) if width <= height else (more, less)


def shrunk(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The image in exactly that size, every pixel of it counted (bicubic, with antialiasing)."""
    return image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)
