"""Encoded pictures, friendly and hostile: the right upright RGB picture, or a `ClientError` in the client's words."""

from __future__ import annotations

import importlib.util
import io
import random
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pictures import ANIMATED, FORMATS, encode, encode_as, mean_error, pixels, png, smooth, with_orientation
from PIL import Image

from preprocess.config import MediaLimits
from preprocess.errors import ClientError
from preprocess.image import Picture, decode, encoded_bytes
from preprocess.wire import ImagePart

LIMITS = MediaLimits()


def refusal(data: bytes, limits: MediaLimits = LIMITS) -> ClientError:
    with pytest.raises(ClientError) as caught:
        decode(data, limits)
    assert 400 <= caught.value.status < 500
    return caught.value


def outcome(data: bytes) -> Picture | ClientError:
    """Whatever the bytes are, one of these two."""
    try:
        return decode(data, LIMITS)
    except ClientError as error:
        return error


# ---- formats ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_every_accepted_format_is_read(name: str) -> None:
    original = smooth(96, 64)
    picture = decode(encode_as(original, name), LIMITS)
    assert picture.image.mode == "RGB"
    assert (picture.width, picture.height) == picture.image.size == (96, 64)
    assert mean_error(picture.image, original) < 9  # GIF has 256 colours


@pytest.mark.parametrize("name", ANIMATED)
def test_an_animation_gives_its_first_frame(name: str) -> None:
    first = smooth(64, 48)
    others = [Image.new("RGB", (64, 48), "red"), Image.new("RGB", (64, 48), "blue")]
    picture = decode(encode(first, ANIMATED[name], save_all=True, append_images=others), LIMITS)
    assert mean_error(picture.image, first) < 9


def test_a_phone_picture_with_a_second_one_inside_gives_the_first() -> None:
    data = encode(smooth(64, 48), "MPO", save_all=True, append_images=[Image.new("RGB", (64, 48), "red")])
    assert mean_error(decode(data, LIMITS).image, smooth(64, 48)) < 6


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", "a PDF document"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "a PostScript document"),
        (b"\xc5\xd0\xd3\xc6" + bytes(40), "a PostScript document"),
        (b"8BPS\x00\x01" + bytes(40), "a Photoshop document"),
        (b"\x00\x00\x00\x0cjP  \r\n\x87\n" + bytes(20), "a JPEG 2000 picture"),
        (b"\x00\x00\x00\x20ftypisom\x00\x00\x02\x00isomiso2avc1mp41", "an MP4 or QuickTime video"),
        (b"\x1aE\xdf\xa3\x01\x00\x00\x00", "a Matroska or WebM video"),
        (b"RIFF\x24\x00\x00\x00AVI LIST", "an AVI video"),
        (b"RIFF\x24\x00\x00\x00WAVEfmt ", "a WAV audio file"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "an HTML page"),
        (b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "an SVG drawing"),
        (b'{"error": "not found"}', "JSON text"),
        (b"BMW is a car, not a bitmap", "text"),
        ("Größe, 写真".encode(), "text"),
        (("é" * 600).encode()[:-1], "text"),
        (b"PK\x03\x04" + bytes(30), "a ZIP archive or office document"),
        (bytes(range(200, 256)) * 4, "data of no known picture format"),
        (b"\x00" * 100, "data of no known picture format"),
    ],
)
def test_what_is_no_picture_is_named(data: bytes, named: str) -> None:
    error = refusal(data)
    assert error.code == "image_format_unsupported"
    assert named in error.message
    assert "JPEG, PNG, WebP" in error.message


def test_nothing_is_refused_as_empty() -> None:
    assert refusal(b"").code == "image_empty"


@pytest.mark.parametrize("brand", [b"heic", b"mif1"])
def test_heic_names_the_extra_that_reads_it(brand: bytes) -> None:
    data = b"\x00\x00\x00\x18ftyp" + brand + b"\x00\x00\x00\x00" + brand + b"heic" + bytes(64)
    if importlib.util.find_spec("pillow_heif") is None:
        assert "`pip install pillow-heif`" in refusal(data).message
    else:
        assert refusal(data).code in ("image_undecodable", "image_truncated")


def test_no_other_pillow_plugin_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """EPS behind the first bytes of an accepted format: Ghostscript must not be started."""

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a decoder started a program")

    monkeypatch.setattr(subprocess, "Popen", forbidden)
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    for magic in (b"", b"\xff\xd8\xff\xe0", b"GIF89a", b"II*\x00", b"\x89PNG\r\n\x1a\n"):
        assert isinstance(outcome(magic + eps), ClientError)


def test_other_plugins_are_not_even_loaded() -> None:
    names = ", ".join(repr(encode_as(smooth(8, 8), name)) for name in FORMATS)
    code = (
        "import sys\n"
        "from preprocess.config import MediaLimits\n"
        "from preprocess.image import decode\n"
        f"for data in ({names}): decode(data, MediaLimits())\n"
        "assert not [name for name in ('Eps', 'Wmf', 'Ico', 'Psd') if f'PIL.{name}ImagePlugin' in sys.modules]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


# ---- modes and transparency ------------------------------------------------------------------------------------------

GREY = np.tile(np.linspace(0, 255, 64).round().astype(np.uint8), (16, 1))


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB"])
@pytest.mark.parametrize("format", ["PNG", "TIFF", "BMP"])
def test_plain_modes_are_converted_as_the_reference_does(mode: str, format: str) -> None:
    image = smooth(40, 24).convert(mode)
    assert np.array_equal(pixels(decode(encode(image, format), LIMITS).image), pixels(image.convert("RGB")))


def test_cmyk_jpeg_and_tiff() -> None:
    image = smooth(40, 24).convert("CMYK")
    for format in ("JPEG", "TIFF"):
        data = encode(image, format, quality=95)
        expected = Image.open(io.BytesIO(data)).convert("RGB")
        assert np.array_equal(pixels(decode(data, LIMITS).image), pixels(expected))
        assert mean_error(decode(data, LIMITS).image, smooth(40, 24)) < 6


def test_lab_tiff_keeps_its_colours() -> None:
    lab = Image.new("LAB", (8, 8), (136, 208, 195))  # pure sRGB red: L 53.2, a 80.1, b 67.2
    red = pixels(decode(encode(lab, "TIFF"), LIMITS).image)[0, 0]
    assert red[0] > 245
    assert red[1:].max() < 25


@pytest.mark.parametrize("mode", ["YCbCr"])
def test_ycbcr_tiff(mode: str) -> None:
    image = smooth(40, 24).convert(mode)
    assert mean_error(decode(encode(image, "TIFF"), LIMITS).image, smooth(40, 24)) < 3


def test_16_bit_grey_is_scaled_not_clipped() -> None:
    deep = Image.fromarray((GREY.astype(np.uint16) * 257).astype(np.uint16))
    for format in ("PNG", "TIFF"):
        image = decode(encode(deep, format), LIMITS).image
        assert np.array_equal(pixels(image)[..., 1], GREY)


def test_big_endian_16_bit_tiff() -> None:
    deep = Image.frombytes("I;16B", (64, 16), (GREY.astype(">u2") * 257).astype(">u2").tobytes())
    assert np.array_equal(pixels(decode(encode(deep, "TIFF"), LIMITS).image)[..., 0], GREY)


def test_16_bit_colour_png() -> None:
    wide = smooth(8, 4)
    rows = [(np.asarray(wide)[row].astype(">u2") * 257).astype(">u2").tobytes() for row in range(4)]
    assert np.array_equal(pixels(decode(png(8, 4, 2, 16, rows), LIMITS).image), pixels(wide))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (GREY.astype(np.int32), GREY),
        (GREY.astype(np.int32) * 257, GREY),
        (GREY.astype(np.int32) * 1_000_000, GREY),
        (GREY.astype(np.int32) - 128, GREY),
        (GREY.astype(np.float32) / 255, GREY),
        (GREY.astype(np.float32), GREY),
        (GREY.astype(np.float32) * 1e6 - 7, GREY),
    ],
)
def test_32_bit_and_float_grey_find_their_range(values: np.ndarray, expected: np.ndarray) -> None:
    image = decode(encode(Image.fromarray(values), "TIFF"), LIMITS).image
    assert np.abs(pixels(image)[..., 0] - expected).max() <= 1


def test_floats_that_are_no_numbers() -> None:
    values = GREY.astype(np.float32) / 255
    values[0, :3] = (np.nan, np.inf, -np.inf)
    red = pixels(decode(encode(Image.fromarray(values), "TIFF"), LIMITS).image)[..., 0]
    assert red[0, :3].tolist() == [0, 255, 0]
    assert np.abs(red[1:] - GREY[1:]).max() <= 1
    assert isinstance(outcome(encode(Image.fromarray(np.full((4, 4), np.nan, np.float32)), "TIFF")), Picture)


def half_transparent(mode: str) -> Image.Image:
    """Left: black and clear; right: black and opaque. A decoder that drops alpha shows black on both sides."""
    image = Image.new("RGBA", (8, 4), (0, 0, 0, 255))
    image.paste((0, 0, 0, 0), (0, 0, 4, 4))
    return image.convert(mode) if mode != "RGBA" else image


@pytest.mark.parametrize(("mode", "format"), [("RGBA", "PNG"), ("LA", "PNG"), ("RGBA", "WEBP"), ("RGBA", "TIFF")])
def test_transparency_shows_white(mode: str, format: str) -> None:
    options = {"lossless": True, "exact": True} if format == "WEBP" else {}
    shown = pixels(decode(encode(half_transparent(mode), format, **options), LIMITS).image)
    assert (shown[:, :4] == 255).all()
    assert (shown[:, 4:] == 0).all()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "La", "RGBa"])
def test_transparency_of_every_mode_in_memory(mode: str) -> None:
    from preprocess.colour import to_rgb

    source = half_transparent("LA" if mode in ("La", "LA") else "RGBA")
    shown = pixels(to_rgb(source if source.mode == mode else source.convert(mode)))
    assert (shown[:, :4] == 255).all()
    assert (shown[:, 4:] == 0).all()


def test_half_transparency_is_mixed_with_white() -> None:
    shown = pixels(decode(encode(Image.new("RGBA", (2, 2), (0, 0, 0, 128))), LIMITS).image)
    assert np.abs(shown - 127).max() <= 1


def test_palette_transparency_as_bytes_and_as_one_index() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)
    for transparency in (0, b"\x00\xff"):
        shown = pixels(decode(encode(image, "PNG", transparency=transparency), LIMITS).image)
        assert shown[0].tolist() == [[255, 255, 255], [40, 50, 60]]
    shown = pixels(decode(encode(image, "GIF", transparency=0), LIMITS).image)
    assert shown[0].tolist() == [[255, 255, 255], [40, 50, 60]]


@pytest.mark.parametrize(
    ("colour_type", "bit_depth", "row", "key"),
    [
        (0, 1, b"\x80", struct.pack(">H", 1)),
        (0, 2, b"\x10", struct.pack(">H", 0)),
        (0, 4, b"\xf0", struct.pack(">H", 15)),
        (0, 8, b"\x07\x00", struct.pack(">H", 7)),
        (0, 16, b"\x12\x34\x00\x00", struct.pack(">H", 0x1234)),
        (2, 8, b"\x01\x02\x03\x00\x00\x00", struct.pack(">HHH", 1, 2, 3)),
        (2, 16, b"\x01\x02\x03\x04\x05\x06" + bytes(6), struct.pack(">HHH", 0x102, 0x304, 0x506)),
    ],
)
def test_png_colour_key_at_every_depth(colour_type: int, bit_depth: int, row: bytes, key: bytes) -> None:
    data = png(2, 1, colour_type, bit_depth, [row], (b"tRNS", key))
    shown = pixels(decode(data, LIMITS).image)
    assert shown[0, 0].tolist() == [255, 255, 255]
    assert shown[0, 1].max() < 255


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "I;16", "LA",
                                  "PA", "RGBX", "RGBa", "La", "I;16B", "I;16L"])  # fmt: skip
def test_every_mode_becomes_rgb(mode: str) -> None:
    from preprocess.colour import to_rgb

    rgb = to_rgb(Image.new(mode, (5, 3)))
    assert (rgb.mode, rgb.size) == ("RGB", (5, 3))


# ---- orientation -----------------------------------------------------------------------------------------------------

TURNED = {  # how a camera that notes this orientation stores an upright picture
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.mark.parametrize("orientation", TURNED)
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_every_orientation_stands_upright(orientation: int, format: str) -> None:
    upright = smooth(64, 40)
    turn = TURNED[orientation]
    stored = upright.transpose(turn) if turn is not None else upright
    options = {"lossless": True} if format == "WEBP" else {}
    picture = decode(with_orientation(stored, orientation, format, **options), LIMITS)
    assert (picture.width, picture.height) == picture.image.size == (64, 40)
    assert mean_error(picture.image, upright) < 5


@pytest.mark.parametrize("orientation", TURNED)
def test_a_reduced_decode_stands_upright_too(orientation: int) -> None:
    upright = smooth(1200, 800)
    turn = TURNED[orientation]
    stored = upright.transpose(turn) if turn is not None else upright
    picture = decode(with_orientation(stored, orientation), LIMITS, lambda width, height: (width // 4, height // 4))
    assert (picture.width, picture.height) == (1200, 800)
    assert picture.image.size == (300, 200)
    assert mean_error(picture.image, upright.resize((300, 200), Image.Resampling.BOX)) < 3


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_orientation_that_makes_no_sense_is_none(orientation: int) -> None:
    assert decode(with_orientation(smooth(32, 16), orientation), LIMITS).image.size == (32, 16)


@pytest.mark.parametrize(
    "exif",
    [
        b"",
        b"Exif\x00\x00",
        b"Exif\x00\x00MM\x00*",
        b"Exif\x00\x00II*\x00\xff\xff\xff\xff",
        b"Exif\x00\x00" + b"\xff" * 60,
    ]
    + [b"Exif\x00\x00MM\x00*\x00\x00\x00\x08\x00\x01\x01\x12" + tail for tail in (b"", b"\x00\x03", b"\xff" * 10)],
)
def test_damaged_exif_does_not_matter(exif: bytes) -> None:
    assert decode(encode(smooth(32, 16), "JPEG", exif=exif), LIMITS).image.size == (32, 16)


# ---- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (5000, 1), (3, 200), (200, 3), (20_000, 30), (30, 20_000)])
def test_thin_and_tiny_pictures(size: tuple[int, int]) -> None:
    picture = decode(encode(Image.new("RGB", size, "green")), LIMITS)
    assert picture.image.size == size


def bomb(width: int, height: int) -> bytes:
    """A small PNG file that claims to be large."""
    return png(width, height, 2, 8, [b"\0" * 30])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (bomb(20_000, 20_000), "400,000,000 pixels"),
        (bomb(11_000, 10_000), "11,000 × 10,000"),
        (bomb(100_000, 100_000), "at most"),
        (bomb(2**31 - 1, 2**31 - 1), "at most"),
        (bomb(40_000, 10), "at most 32,768"),
    ],
)
def test_a_bomb_is_refused_by_its_header(data: bytes, words: str) -> None:
    error = refusal(data)
    assert error.code == "image_too_large"
    assert words in error.message


def test_a_picture_over_a_limit_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow decodes a PNG to look for EXIF behind the pixels; the limits come first."""
    from PIL import ImageFile

    def forbidden(*_: object) -> None:
        raise AssertionError("decoded before the limits were checked")

    data = encode(smooth(60, 50))
    monkeypatch.setattr(ImageFile.ImageFile, "load", forbidden)
    assert refusal(data, MediaLimits(max_image_pixels=100)).code == "image_too_large"


@pytest.mark.parametrize("name", ["jpeg", "gif", "webp", "bmp", "tiff", "avif"])
def test_limits_hold_for_every_format(name: str) -> None:
    data = encode_as(smooth(60, 50), name)
    assert refusal(data, MediaLimits(max_image_pixels=2_999)).code == "image_too_large"
    assert refusal(data, MediaLimits(max_image_side=59)).code == "image_too_large"
    assert decode(data, MediaLimits(max_image_pixels=3_000, max_image_side=60)).width == 60


def test_too_many_bytes() -> None:
    with pytest.raises(ClientError) as caught:
        encoded_bytes(ImagePart(data=b"x" * 101), MediaLimits(max_image_bytes=100))
    assert (caught.value.status, caught.value.code) == (413, "image_too_large")
    assert "101" in caught.value.message


def test_a_png_of_zeros_that_inflates_beyond_its_header_is_bounded() -> None:
    body = zlib.compress(b"\0" * 10_000_000)
    data = png(4, 4, 2, 8, [])
    data = data.replace(zlib.compress(b""), body)  # lengths and checksums are now wrong as well
    assert isinstance(outcome(data), Picture | ClientError)


# ---- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_a_cut_off_picture_is_whole_or_refused(name: str) -> None:
    """Never half grey: whatever the byte where it ends, the full picture or an error."""
    data = encode_as(smooth(70, 46), name)
    whole = pixels(decode(data, LIMITS).image)
    codes = set()
    for end in range(1, len(data), max(1, len(data) // 60)):
        result = outcome(data[:end])
        if isinstance(result, Picture):
            assert np.array_equal(pixels(result.image), whole), end
        else:
            codes.add(result.code)
    assert "image_truncated" in codes
    assert codes <= {"image_truncated", "image_undecodable", "image_format_unsupported", "image_empty"}


def test_a_cut_off_photo_says_so() -> None:
    data = encode(smooth(640, 480), "JPEG")
    error = refusal(data[: len(data) // 2])
    assert error.code == "image_truncated"
    assert "cut off" in error.message


def test_refusals_carry_no_decoder_text() -> None:
    for name in FORMATS:
        data = encode_as(smooth(70, 46), name)
        for end in (20, len(data) // 2):
            error = outcome(data[:end])
            if isinstance(error, ClientError):
                assert not any(
                    word in error.message.lower() for word in ("0x", "object", "pil", "buffer", "errno", "<_io")
                )


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(name=st.sampled_from(sorted(FORMATS)), seed=st.integers(0, 2**32))
def test_damaged_pictures_never_crash(name: str, seed: int) -> None:
    chance = random.Random(seed)
    data = bytearray(_SMALL[name])
    for _ in range(chance.choice((1, 3, 30))):
        position = chance.randrange(len(data) if chance.random() < 0.5 else min(64, len(data)))
        data[position] = chance.choice((0, 255, chance.randrange(256)))
    if chance.random() < 0.2:
        data = data[: chance.randrange(len(data))]
    result = outcome(bytes(data))
    if isinstance(result, Picture):
        assert result.image.mode == "RGB"


_SMALL = {name: encode_as(smooth(33, 21), name) for name in FORMATS}


@settings(max_examples=150, deadline=None)
@given(magic=st.sampled_from([b"", *{data[:16] for data in _SMALL.values()}]), rest=st.binary(max_size=200))
def test_garbage_is_refused(magic: bytes, rest: bytes) -> None:
    assert isinstance(outcome(magic + rest), Picture | ClientError)


# ---- reduced-scale decoding ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "target"), [((1600, 1200), (400, 300)), ((1601, 1203), (200, 150)), ((999, 777), (130, 99))]
)
def test_a_reduced_decode_never_goes_below_the_target(size: tuple[int, int], target: tuple[int, int]) -> None:
    data = encode(smooth(*size), "JPEG")
    picture = decode(data, LIMITS, lambda _width, _height: target)
    assert picture.image.width >= target[0]
    assert picture.image.height >= target[1]
    assert picture.image.size < size
    assert (picture.width, picture.height) == size
