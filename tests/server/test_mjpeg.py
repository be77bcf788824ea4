"""Pictures are cut out of a stream of bytes, wherever its chunks end and whatever lies between them."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from server.mjpeg import Pictures


def jpeg(seed: int, size: tuple[int, int] = (48, 40), **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise(size, 20 + seed).convert("RGB").save(buffer, "JPEG", **options)
    return buffer.getvalue()


def with_thumbnail() -> bytes:
    """With a whole JPEG in its EXIF, as many cameras have it."""
    picture, thumbnail = jpeg(1), b"Exif\0\0" + jpeg(9, (16, 16))
    return picture[:2] + b"\xff\xe1" + (len(thumbnail) + 2).to_bytes(2) + thumbnail + picture[2:]


KINDS = [
    jpeg(1),
    jpeg(2, progressive=True),
    jpeg(3, restart_marker_blocks=1),
    jpeg(4, comment=b"\xff\xd8\xff\xd9 a comment"),
    with_thumbnail(),
]


def cut(data: bytes, size: int, max_bytes: int = 1 << 20) -> list[bytes]:
    pictures = Pictures(max_bytes)
    return [picture for at in range(0, len(data), size) for picture in pictures.feed(data[at : at + size])]


@given(
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
    st.sampled_from(
        [b"", b"\r\n--frame\r\nContent-Type: image/jpeg\r\n\r\n", b"\xff", b"\xff\xd8", b"\xff\xd9", b"\x00" * 9]
    ),
    st.integers(1, 700),
)
def test_the_same_pictures_come_out_however_they_come_in(pictures: list[bytes], between: bytes, size: int) -> None:
    data = between + between.join(pictures) + between
    assert cut(data, size) == pictures


@pytest.mark.parametrize("picture", KINDS)
def test_a_picture_is_whole_with_its_last_byte_and_not_before(picture: bytes) -> None:
    pictures = Pictures()
    assert list(pictures.feed(picture[:-1])) == []
    assert list(pictures.feed(picture[-1:])) == [picture]


@pytest.mark.parametrize("kept", [1, 10, 300, -1, -2, -200])
def test_one_that_was_cut_off_costs_no_other(kept: int) -> None:
    good = jpeg(5)
    found = cut(jpeg(1)[:kept] + b"\r\n--frame\r\n\r\n" + good + good, 100)
    assert found[-1] == good
    assert len(found) >= (2 if kept < 0 else 1)  # a header that was cut off takes its length from the next picture


def test_one_that_is_too_large_is_passed_over_and_noise_is_none() -> None:
    small, large = jpeg(1), jpeg(2, (200, 200))
    assert cut(small + large + small, 64, max_bytes=len(large) // 2) == [small, small]
    pictures = Pictures()
    assert list(pictures.feed(b"\xff\xd8 no picture" * 1000)) == []
    assert pictures.num_skipped > 10_000


@given(st.binary(max_size=300), st.integers(1, 50))
def test_noise_never_fails(noise: bytes, size: int) -> None:
    cut(noise.replace(b"\x01", b"\xff").replace(b"\x02", b"\xd8"), size)
