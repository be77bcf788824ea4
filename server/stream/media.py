"""Binary WebSocket messages: a header and a payload, or a bare JPEG or PNG. Looks at no more than the first bytes.

    u16 big-endian: header length │ header: UTF-8 JSON │ payload

A bare picture cannot be mistaken for this: read as a length its first two bytes are above the header's limit.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from preprocess.errors import ClientError
from server.complaints import decode

Kind = Literal["frame", "image", "video"]

MAX_HEADER_BYTES: Final = 4096
MAX_ID: Final = (1 << 53) - 1
MAX_TS: Final = float(1 << 53)
"""Of larger ones a number loses parts of milliseconds; they are no milliseconds but, say, nanoseconds."""
_BARE: Final = (b"\xff\xd8", b"\x89P")
_KINDS: Final[dict[str, Kind]] = {"frame": "frame", "image": "image", "video": "video"}
_MIME_OF: Final = {"frame": ("image/",), "image": ("image/",), "video": ("video/", "image/")}


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a payload is. `ts`: capture time in milliseconds of the client's own clock, whatever its zero is."""

    k: str = "frame"
    id: int | None = None
    ts: float | None = None
    mime: str = ""
    last: bool = False


class Media(msgspec.Struct, frozen=True):
    """A received payload."""

    kind: Kind
    id: int | None
    ts: float | None
    payload: bytes
    last: bool = False


_header_decoder: Final = msgspec.json.Decoder(Header)


def parse(message: bytes) -> Media:
    """Take a binary message apart.

    Raises:
        ClientError: Its header is not right, or of a kind that does not exist.
    """
    if message.startswith(_BARE):
        return Media("frame", None, None, message)
    if len(message) < 2:
        raise _bad_header(f"it has {len(message)} bytes; expected a header or a JPEG or PNG picture")
    length = int.from_bytes(message[:2], "big")
    if length > MAX_HEADER_BYTES or len(message) < 2 + length:
        raise _bad_header(
            f"its first two bytes announce a header of {length} bytes, and {len(message) - 2} follow; expected at most "
            f"{MAX_HEADER_BYTES}, or a bare JPEG or PNG picture"
        )
    try:
        header = decode(_header_decoder, message[2 : 2 + length])
    except ClientError as error:
        error.message = error.message.replace("The body", "The header", 1)
        raise
    kind = _KINDS.get(header.k)
    if kind is None:
        raise ClientError(f"`k` is {header.k[:40]!r}; expected frame, image or video.", code="invalid_value", param="k")
    if header.id is not None and not 0 <= header.id <= MAX_ID:
        raise ClientError(f"`id` is {header.id}; expected 0 to 2^53 - 1.", code="invalid_value", param="id")
    if header.ts is not None and abs(header.ts) > MAX_TS:
        raise ClientError(
            f"`ts` is {header.ts:g}; expected milliseconds, at most 2^53.", code="invalid_value", param="ts"
        )
    if header.mime and not header.mime.lower().startswith(_MIME_OF[header.k]):
        raise ClientError(
            f"`mime` is {header.mime[:80]!r}; expected {'… or '.join(_MIME_OF[header.k])}… for a {header.k}.",
            code="unsupported_media_type",
            param="mime",
        )
    if header.last and kind != "video":
        raise ClientError(
            f"`last` is of a clip that comes in parts, and this is a {header.k}.", code="invalid_value", param="last"
        )
    payload = message[2 + length :]
    if not payload:
        raise ClientError(f"The {header.k} is empty.", code="image_empty", param="payload")
    return Media(kind, header.id, header.ts, payload, header.last)


def _bad_header(what: str) -> ClientError:
    return ClientError(f"The binary message cannot be read: {what}.", code="invalid_header")
