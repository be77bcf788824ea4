"""Turns a ``data:`` URL into the bytes it carries (RFC 2397), as browsers and clients really write them."""

from __future__ import annotations

import binascii
import re
from typing import Final, Literal
from urllib.parse import unquote_to_bytes

import msgspec

from preprocess.errors import ClientError

_WHITESPACE: Final = re.compile(rb"[ \t\r\n\f\v]+")
_URL_SAFE: Final = bytes.maketrans(b"-_", b"+/")
_EXPECTED: Final = {
    "picture": "expected data:image/jpeg;base64,… with the encoded picture after the comma",
    "clip": "expected data:video/mp4;base64,… with the encoded clip after the comma",
}


def decode_data_url(url: str, max_bytes: int, what: Literal["picture", "clip"] = "picture") -> bytes:
    """The bytes of a data URL.

    The declared type is not looked at: what counts is what the bytes are. Whitespace, percent-encoding, the URL-safe
    alphabet and missing padding are understood. Raises `ClientError` for what is none, or larger than `max_bytes`; its
    words are about `what` was expected.
    """
    expected = _EXPECTED[what]
    url = url.strip()
    if url[:5].lower() != "data:":
        scheme = url.split(":", 1)[0][:16] if ":" in url[:17] else ""
        if scheme.lower() in ("http", "https"):
            raise ClientError(
                f"{scheme.lower()} addresses of {what}s are not fetched; send the {what} itself in a data: URL.",
                code="remote_image_refused",
            )
        raise ClientError(f"The {what}'s address is not a data: URL; {expected}.", code="invalid_data_url")
    comma = url.find(",", 0, 1024)
    if comma < 0:
        raise ClientError(f"The data: URL has no comma; {expected}.", code="invalid_data_url")
    is_base64 = url[5:comma].lower().rstrip().endswith(";base64") or url[5:comma].lower() == "base64"
    text = url[comma + 1 :]
    if is_base64 and len(text) <= 4 * max_bytes:
        try:  # the usual spelling, which this reads four times as fast as `binascii`
            return _checked(msgspec.convert(text, bytes), max_bytes, what)
        except (msgspec.ValidationError, UnicodeEncodeError):
            pass  # an unusual one, or none
    try:
        payload = text.encode("ascii")
    except UnicodeEncodeError as error:
        raise ClientError(
            f"The data: URL holds characters that are neither base64 nor percent-encoded; {expected}.",
            code="invalid_data_url",
        ) from error
    if not is_base64:
        return _checked(unquote_to_bytes(payload), max_bytes, what)
    if len(payload) > 4 * max_bytes:  # far beyond any encoding of that many bytes: refuse before working on it
        raise too_large(len(payload) * 3 // 4, max_bytes, what)
    return _checked(_decode_base64(payload), max_bytes, what)


def too_large(size: int, max_bytes: int, what: str = "picture") -> ClientError:
    """The error for too many encoded bytes."""
    code = "image_too_large" if what == "picture" else "video_too_large"
    return ClientError(f"The {what} has {size:,} bytes; at most {max_bytes:,} are accepted.", code=code, status=413)


def _checked(data: bytes, max_bytes: int, what: str) -> bytes:
    if len(data) > max_bytes:
        raise too_large(len(data), max_bytes, what)
    return data


def _decode_base64(payload: bytes) -> bytes:
    """In any of its spellings."""
    if b"%" in payload:
        payload = unquote_to_bytes(payload)
    payload = _WHITESPACE.sub(b"", payload).translate(_URL_SAFE).rstrip(b"=")
    try:
        return binascii.a2b_base64(payload + b"=" * (-len(payload) % 4), strict_mode=True)
    except binascii.Error as error:
        raise ClientError("The data: URL's base64 is damaged or cut off.", code="invalid_data_url") from error
