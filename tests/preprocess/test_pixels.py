"""Pixels are written where they shall lie as Pillow tells them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from preprocess.pixels import write_pixels


@given(st.integers(1, 300), st.integers(1, 200))
def test_they_are_those_of_the_picture(width: int, height: int) -> None:
    pixels = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    out = np.zeros((1, height, width, 3), np.uint8)
    write_pixels(Image.fromarray(pixels), out)
    assert (out[0] == pixels).all()


def test_a_row_may_be_longer_than_a_block() -> None:
    pixels = np.arange(2 * 30_000 * 3, dtype=np.uint32).astype(np.uint8).reshape(2, 30_000, 3)
    out = np.zeros((1, 2, 30_000, 3), np.uint8)
    write_pixels(Image.fromarray(pixels), out)
    assert (out[0] == pixels).all()


@pytest.mark.parametrize(("mode", "size"), [("L", (8, 8)), ("RGBA", (8, 8)), ("RGB", (8, 7)), ("RGB", (9, 8))])
def test_others_are_refused(mode: str, size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="expected an RGB picture"):
        write_pixels(Image.new(mode, size), np.zeros((1, 8, 8, 3), np.uint8))
