"""Pixels are written where they shall lie as Pillow tells them."""

from __future__ import annotations

import io

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


@pytest.mark.parametrize("has_encoder", [True, False])
def test_a_picture_that_is_not_loaded_yet_is_and_another_pillow_gives_the_same(
    has_encoder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    out = np.zeros((1, 40, 30, 3), np.uint8)
    if not has_encoder:
        monkeypatch.delattr(Image, "_getencoder")
        monkeypatch.setattr(Image.Image, "tobytes", lambda _: pixels.tobytes())
    write_pixels(Image.open(file), out)
    assert (out[0] == pixels).all()


@pytest.mark.parametrize("status", [-2, 1])
def test_pixels_that_do_not_come_to_their_end_are_an_error(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def setimage(self, *_: object) -> None:
            pass

        def encode(self, _: int) -> tuple[int, int, bytes]:
            return 0, status, b"123"

    monkeypatch.setattr(Image, "_getencoder", lambda *_: Broken())
    with pytest.raises(RuntimeError, match=f"status {status} after 3 of 192 bytes"):
        write_pixels(Image.new("RGB", (8, 8)), np.zeros((1, 8, 8, 3), np.uint8))


@pytest.mark.parametrize(("mode", "size"), [("L", (8, 8)), ("RGBA", (8, 8)), ("RGB", (8, 7)), ("RGB", (9, 8))])
def test_others_are_refused(mode: str, size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="expected an RGB picture"):
        write_pixels(Image.new(mode, size), np.zeros((1, 8, 8, 3), np.uint8))
