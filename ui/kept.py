"""Gradio's files whose names tell what is in them (`assets/core-Bdx9080F.js`) are asked of it once, and kept.

A page loads some thirty of them, and Gradio reads and compresses each anew for everybody who comes: 2.4 ms where 0.5
do, in the process in which live streams run too.
"""

from __future__ import annotations

from typing import Final

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_BYTES: Final = 16 << 20
"""Of all that is kept: many times what a page loads. What comes when it is full is asked for each time."""
_STAND: Final = frozenset({b"etag", b"vary", b"last-modified"})
"""Headers that a client hears too who has the file already."""


class Kept:
    """ASGI application: `app`, of whose answers those below `path` are kept that hold a whole file."""

    def __init__(self, app: ASGIApp, path: str) -> None:
        self._app = app
        self._path = f"{path}/assets/"
        self._room = MOST_BYTES
        self._answers: dict[tuple[str, str], tuple[Message, bytes]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers = Headers(scope=scope)
        if scope["method"] != "GET" or not scope["path"].startswith(self._path) or "range" in headers:
            await self._app(scope, receive, send)
            return
        key = scope["path"], headers.get("accept-encoding", "")
        if key not in self._answers:
            await self._app(scope, receive, self._keeping(key, send))
            return
        start, body = self._answers[key]
        etag = Headers(raw=start["headers"]).get("etag")
        if etag is not None and etag in headers.get("if-none-match", ""):
            known = Response(status_code=304)
            known.raw_headers = [header for header in start["headers"] if header[0] in _STAND]
            await known(scope, receive, send)
            return
        await send({**start, "headers": list(start["headers"])})
        await send({"type": "http.response.body", "body": body})

    def _keeping(self, key: tuple[str, str], send: Send) -> Send:
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
                body = b"".join(pieces)
                if len(body) <= self._room and key not in self._answers:
                    self._room -= len(body)
                    self._answers[key] = start, body

        return passing
