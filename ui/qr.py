"""`GET /ui/qr.svg?text=…`: a text as a QR code, for a phone to take along. Drawn by segno."""

from __future__ import annotations

import io
from typing import Final
from urllib.parse import parse_qs

from starlette.responses import Response
from starlette.types import Scope

from preprocess.errors import ClientError
from server.faults import error_response

MAX_BYTES: Final = 2000
"""Denser codes are hard to read from a wall."""


def answer(scope: Scope) -> Response:
    """The picture, or what is wrong with the text."""
    import segno

    text = parse_qs(scope["query_string"].decode("latin-1")).get("text", [""])[0]
    if not 0 < len(text.encode()) <= MAX_BYTES:
        return error_response(
            ClientError(f"text: expected 1 to {MAX_BYTES} bytes, got {len(text.encode())}", code="invalid_value")
        )
    out = io.BytesIO()
    # a screen is never torn or dirty: few spare signs make large ones
    segno.make(text, error="l", micro=False).save(out, kind="svg", xmldecl=False, border=2, scale=4, omitsize=True)
    return Response(out.getvalue(), media_type="image/svg+xml")
