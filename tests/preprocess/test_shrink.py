"""`max_pixels`: the size that a picture is made, and that the model sees exactly that picture and no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from clips import clip
from hypothesis import given
from hypothesis import strategies as st
from pictures import encode, smooth
from PIL import Image

from preprocess.shrink import shrunk, size_within
from preprocess.wire import ImagePart, Message, Prepared, Refused, VideoPart

Prepare = Callable[..., Prepared | Refused]
PHOTO = smooth(320, 240)


def seen(prepare: Prepare, part: ImagePart | VideoPart) -> Prepared:
    answer = prepare([Message("user", [part])])
    assert isinstance(answer, Prepared), answer
    return answer


@given(st.integers(1, 20_000), st.integers(1, 20_000), st.integers(1, 10**8))
def test_the_size_is_within_the_bound_and_nearly_of_the_same_shape(width: int, height: int, most: int) -> None:
    size = size_within(width, height, most)
    assert 1 <= size[0] <= width
    assert 1 <= size[1] <= height
    assert size[0] * size[1] <= most
    if width * height <= most:
        assert size == (width, height)
    elif min(size) > 1:  # no larger picture of this shape would do
        assert (min(size) + 1) ** 2 * max(width, height) > most * min(width, height)
        assert abs(size[0] * height - size[1] * width) <= max(width, height)


def test_without_a_bound_nothing_changes() -> None:
    assert size_within(640, 480, 0) == (640, 480)
    assert shrunk(PHOTO, PHOTO.size) is PHOTO


@pytest.mark.parametrize("max_pixels", [1, 77, 5000, 320 * 240 - 1])
def test_the_model_sees_what_it_would_see_of_a_picture_sent_so_small(prepare: Prepare, max_pixels: int) -> None:
    small = PHOTO.resize(size_within(320, 240, max_pixels), Image.Resampling.BICUBIC)
    bounded = seen(prepare, ImagePart(encode(PHOTO, "PNG"), max_pixels=max_pixels)).request.media
    alone = seen(prepare, ImagePart(encode(small, "PNG"))).request.media
    assert [item.pixels for item in bounded] == [item.pixels for item in alone]
    assert [item.spans for item in bounded] == [item.spans for item in alone]


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_each_bound_is_another_picture_and_one_that_does_nothing_is_none(prepare: Prepare, kind: str) -> None:
    data = encode(PHOTO, kind)
    digests = [
        seen(prepare, ImagePart(data, max_pixels=most)).request.media[0].digest for most in (0, 10**6, 9000, 8000, 9000)
    ]
    assert digests[0] == digests[1]
    assert digests[2] == digests[4]
    assert len({*digests}) == 3
    info = seen(prepare, ImagePart(data, max_pixels=9000)).images[0]
    assert (info.width, info.height) == (320, 240)  # what was sent


def test_frames_of_a_clip_are_made_as_small(prepare: Prepare) -> None:
    data = clip("mp4", 10)
    plain = seen(prepare, VideoPart(data)).request.media
    bounded = seen(prepare, VideoPart(data, max_pixels=100)).request.media
    assert len(plain) == len(bounded)
    assert {item.digest for item in plain}.isdisjoint({item.digest for item in bounded})
    assert all(one.pixels != other.pixels for one, other in zip(plain, bounded, strict=True))
