"""Gradio's files whose names tell what is in them (`assets/core-Bdx9080F.js`) are asked of it once, and kept.

A page loads some thirty of them, and Gradio reads and compresses each anew for everybody who comes: 2.4 ms where 0.5
do, in the process in which live streams run too. What is kept has a bound, whatever is asked: a file is kept by its own
name and in three encodings at most, and what was not asked for longest leaves when there is no more room.
"""

from __future__ import annotations

import re
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_BYTES: Final = 16 << 20
"""Of all that is kept: many times what a page loads."""
ENTRY_BYTES: Final = 2048
"""What an answer takes besides its body and headers: those objects, and its place."""
_NOT_MODIFIED_HEADERS: Final = frozenset(
    {b"cache-control", b"content-location", b"expires", b"vary", b"etag", b"last-modified"}
)
"""Headers that a client hears too who has the file already (RFC 9110, section 15.4.5)."""

_Key = tuple[str, str]
"""Path and encoding."""


class Kept:
    """ASGI application: `app`, of whose answers those are kept that hold a whole file of `path`'s `assets`."""

    def __init__(self, app: ASGIApp, path: str) -> None:
        self._app = app
        self._is_file = re.compile(rf"{re.escape(path)}/assets/[\w.-]+", re.ASCII).fullmatch
        self._room = MOST_BYTES
        self._answers: dict[_Key, tuple[Message, bytes]] = {}  # what was asked for last stands last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers = Headers(scope=scope)
        if scope["method"] != "GET" or not self._is_file(scope["path"]) or "range" in headers or "origin" in headers:
            await self._app(scope, receive, send)
            return
        key = scope["path"], _encoding(headers.get("accept-encoding", ""))
        answer = self._answers.pop(key, None)
        if answer is None:
            await self._app(scope, receive, self._keeping(key, send))
            return
        start, body = self._answers[key] = answer
        etag = Headers(raw=start["headers"]).get("etag")
        if etag is not None and _is_among(etag, headers.getlist("if-none-match")):
            known = Response(status_code=304)
            known.raw_headers = [header for header in start["headers"] if header[0] in _NOT_MODIFIED_HEADERS]
            await known(scope, receive, send)
            return
        await send({**start, "headers": list(start["headers"])})
        await send({"type": "http.response.body", "body": body})

    def _keeping(self, key: _Key, send: Send) -> Send:
        """Passes an answer on, and keeps it once all of it has passed."""
        start: Message = {}
        pieces: list[bytes] = []

        async def passing(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = {**message, "headers": list(message["headers"])}
            elif start.get("status") == 200:
                pieces.append(message.get("body", b""))
            await send(message)
            if start.get("status") == 200 and message["type"] == "http.response.body" and not message.get("more_body"):
                self._keep(key, start, b"".join(pieces))

        return passing

    def _keep(self, key: _Key, start: Message, body: bytes) -> None:
        needed = _num_bytes(start, body)
        if key in self._answers or needed > MOST_BYTES:
            return
        while self._room < needed:
            self._room += _num_bytes(*self._answers.pop(next(iter(self._answers))))
        self._room -= needed
        self._answers[key] = start, body


def _encoding(accepted: str) -> str:
    """What Gradio answers in (`gradio.brotli_middleware`), as it reads what a client accepts."""
    return next((encoding for encoding in ("br", "gzip") if encoding in accepted), "identity")


def _is_among(etag: str, fields: list[str]) -> bool:
    """Whether `If-None-Match` names it, by the weak comparison (RFC 9110, section 13.1.2)."""
    named = {tag.strip().removeprefix("W/") for field in fields for tag in field.split(",")}
    return "*" in named or etag.removeprefix("W/") in named


def _num_bytes(start: Message, body: bytes) -> int:
    return ENTRY_BYTES + len(body) + sum(len(name) + len(value) for name, value in start["headers"])
