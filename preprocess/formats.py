"""Tells what the first bytes of an upload are: a picture format that we accept, or something else with a name.

Formats are an allow-list. Pillow is only ever asked to open the one format found here, so no other plugin of it can run
(its EPS plugin would start another program).
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Final

from preprocess.errors import ClientError

ACCEPTED: Final = "JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF"
HEIF_HINT: Final = "install the extra `heif` (`pip install pillow-heif` in the server's environment)"


@dataclass(frozen=True, slots=True)
class PictureFormat:
    """An accepted format: Pillow's name of the plugin that may open it, and the name that people know."""

    pillow: str
    name: str


_JPEG = PictureFormat("JPEG", "JPEG")
_PNG = PictureFormat("PNG", "PNG")
_WEBP = PictureFormat("WEBP", "WebP")
_GIF = PictureFormat("GIF", "GIF")
_BMP = PictureFormat("BMP", "BMP")
_TIFF = PictureFormat("TIFF", "TIFF")
_AVIF = PictureFormat("AVIF", "AVIF")
_HEIF = PictureFormat("HEIF", "HEIC")

_BMP_HEADER_SIZES: Final = {12, 40, 52, 56, 64, 108, 124}
_AVIF_BRANDS: Final = {b"avif", b"avis"}
_HEIF_BRANDS: Final = {b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1"}

_MP4: Final = "an MP4 or QuickTime video"
_MATROSKA: Final = "a Matroska or WebM video"
_AVI: Final = "an AVI video"
_CLIPS: Final = (_MP4, _MATROSKA, _AVI)
"""What `preprocess.video` reads."""

_OTHER_MAGIC: Final[tuple[tuple[bytes, str], ...]] = (
    (b"%PDF", "a PDF document"),
    (b"%!PS", "a PostScript document"),
    (b"\xc5\xd0\xd3\xc6", "a PostScript document"),
    (b"8BPS", "a Photoshop document"),
    (b"\x00\x00\x00\x0cjP  ", "a JPEG 2000 picture"),
    (b"\xff\x4f\xff\x51", "a JPEG 2000 picture"),
    (b"\xff\x0a", "a JPEG XL picture"),
    (b"\x00\x00\x00\x0cJXL ", "a JPEG XL picture"),
    (b"\x00\x00\x01\x00", "an icon file"),
    (b"qoif", "a QOI picture"),
    (b"DDS ", "a DDS texture"),
    (b"\x1aE\xdf\xa3", _MATROSKA),
    (b"\x00\x00\x01\xba", "an MPEG video"),
    (b"\x00\x00\x01\xb3", "an MPEG video"),
    (b"FLV\x01", "a Flash video"),
    (b"OggS", "an Ogg file"),
    (b"fLaC", "an audio file"),
    (b"ID3", "an audio file"),
    (b"PK\x03\x04", "a ZIP archive or office document"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"7z\xbc\xaf", "a 7-Zip archive"),
    (b"Rar!", "a RAR archive"),
    (b"\x7fELF", "a program"),
    (b"MZ", "a program"),
)


def detect(data: bytes) -> PictureFormat:
    """The accepted format of encoded bytes; raises `ClientError` that names what arrived instead."""
    if not data:
        raise ClientError("The picture is empty (0 bytes).", code="image_empty")
    found = picture_format(data)
    if found is _HEIF and importlib.util.find_spec("pillow_heif") is None:
        raise ClientError(
            f"This server does not read HEIC pictures; send {ACCEPTED}, or have its owner {HEIF_HINT}.",
            code="image_format_unsupported",
        )
    if found is None:
        what = describe(data)
        hint = ", or this one as a clip (video_url, or a file to /v1/captions)" if what in _CLIPS else ""
        raise ClientError(
            f"This is {what}, not a picture that can be read; send {ACCEPTED}{hint}.",
            code="image_format_unsupported",
        )
    return found


def picture_format(data: bytes) -> PictureFormat | None:
    """The accepted format of encoded bytes, or None."""
    if data.startswith(b"\xff\xd8\xff"):
        return _JPEG
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return _PNG
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return _WEBP
    if data.startswith((b"GIF87a", b"GIF89a")):
        return _GIF
    if data.startswith((b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+")):
        return _TIFF
    if data.startswith(b"BM") and int.from_bytes(data[14:18], "little") in _BMP_HEADER_SIZES:
        return _BMP
    brands = _iso_brands(data)
    if brands & _AVIF_BRANDS:
        return _AVIF
    if brands & _HEIF_BRANDS:
        return _HEIF
    return None


def _iso_brands(data: bytes) -> set[bytes]:
    """Brands of an ISO base media file (the family of MP4, HEIC and AVIF), major one included."""
    if data[4:8] != b"ftyp":
        return set()
    end = min(int.from_bytes(data[:4], "big"), 256)
    return {data[8:12]} | {data[start : start + 4] for start in range(16, end - 3, 4)}


def describe(data: bytes, wanted: str = "picture") -> str:
    """A name for what is no accepted picture (or whatever else was `wanted`)."""
    for magic, name in _OTHER_MAGIC:
        if data.startswith(magic):
            return name
    if data[4:8] == b"ftyp":
        return _MP4
    if data.startswith(b"RIFF"):
        return {b"AVI ": _AVI, b"WAVE": "a WAV audio file"}.get(data[8:12], "a RIFF file")
    return _describe_text(data[:1024], f"data of no known {wanted} format")


def _describe_text(head: bytes, unknown: str) -> str:
    try:
        text = head.decode("utf-8").strip().removeprefix("\ufeff").lower()
    except UnicodeDecodeError as error:
        if error.start < len(head) - 3:  # not merely a character cut at the end of `head`
            return unknown
        text = head[: error.start].decode("utf-8").strip().lower()
    if any(ord(character) < 32 and character not in "\t\r\n\f" for character in text):
        return unknown
    if "<svg" in text:
        return "an SVG drawing"
    if text.startswith(("<!doctype html", "<html", "<head", "<body")):
        return "an HTML page"
    if text.startswith("<?xml"):
        return "an XML document"
    if text.startswith(("{", "[")):
        return "JSON text"
    if text.startswith("data:"):
        return "the text of a data URL"
    return "text"
