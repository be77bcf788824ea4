"""The difference that decides whether anything happened before a camera."""

from __future__ import annotations

import io
import random

import pytest
from PIL import Image, ImageDraw

from preprocess.change import SIDE, change, thumbnail
from preprocess.config import MediaLimits
from preprocess.errors import ClientError

LIMITS = MediaLimits()


def frame(box: tuple[int, int, int, int] | None = None, *, level: int = 90, noise: int = 0, seed: int = 0) -> bytes:
    image = Image.effect_noise((640, 480), 0).convert("RGB")
    image.paste((level, level, level), (0, 0, 640, 480))
    if box is not None:
        ImageDraw.Draw(image).rectangle(box, fill=(230, 30, 30))
    if noise:
        random.seed(seed)
        image = Image.blend(image, Image.effect_noise((640, 480), noise).convert("RGB"), 0.1)
    encoded = io.BytesIO()
    image.save(encoded, "JPEG", quality=70)
    return encoded.getvalue()


def test_the_same_frame_has_not_changed() -> None:
    seen = thumbnail(frame((10, 10, 90, 90)), LIMITS)
    assert len(seen) == SIDE * SIDE * 3
    assert change(seen, seen) == 0


def test_black_to_white_is_100() -> None:
    black, white = (thumbnail(frame(level=level), LIMITS) for level in (0, 255))
    assert change(black, white) == pytest.approx(100, abs=0.5)
    assert change(white, black) == change(black, white)


def test_noise_and_compression_stay_far_below_a_small_object() -> None:
    still = [thumbnail(frame(noise=60, seed=seed), LIMITS) for seed in range(3)]
    moved = thumbnail(frame((600, 440, 639, 479), noise=60), LIMITS)
    assert max(change(still[0], other) for other in still[1:]) < 0.5
    assert change(still[0], moved) > 1.5


def test_a_frame_that_is_no_picture_is_refused() -> None:
    with pytest.raises(ClientError):
        thumbnail(b"nothing at all", LIMITS)


def test_a_lamp_that_turns_red_at_the_same_brightness_counts() -> None:
    red, grey = frame((300, 200, 360, 260)), frame()
    luma = [Image.open(io.BytesIO(data)).convert("L").resize((1, 1)).getpixel((0, 0)) for data in (red, grey)]
    assert luma[0] == pytest.approx(luma[1], abs=1)
    assert change(thumbnail(red, LIMITS), thumbnail(grey, LIMITS)) > 4
