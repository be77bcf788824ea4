"""Pictures to send. Each is made from a number, so that two servers see the same ones."""

from __future__ import annotations

import argparse
import base64
import io

import numpy as np
from PIL import Image


def picture(seed: int, width: int = 640, height: int = 480, *, shift: int = 0) -> bytes:
    """A JPEG with photo-like statistics: smooth colour fields, edges, mild noise.

    Args:
        seed: Every one is another picture.
        width: In pixels.
        height: In pixels.
        shift: Pixels by which what it shows has moved sideways, as before a camera that turns.
    """
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 255, (max(height // 80, 2), max(width // 80, 2), 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), np.float32)
    noisy = np.clip(smooth + rng.normal(0, 4, (height, width, 1)), 0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(np.roll(noisy, shift, axis=1)).save(out, "JPEG", quality=88)
    return out.getvalue()


def data_url(jpeg: bytes) -> str:
    """As chats carry it."""
    return "data:image/jpeg;base64," + base64.b64encode(jpeg).decode()


def size(text: str) -> tuple[int, int]:
    """Width and height of e.g. ``1024x768``, for argparse."""
    try:
        width, height = (int(side) for side in text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; expected e.g. 1024x768") from None
    if min(width, height) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} has no pixels; expected e.g. 1024x768")
    return width, height
