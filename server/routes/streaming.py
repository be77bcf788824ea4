"""Streams an answer as server-sent events or text, each step's piece as soon as the step is heard of.

    OpenCalls ── delta ──▶ Generation ──▶ take ──▶ HttpConnection.write_chunk       usually: no task wakes
                                └─ queue ──▶ the stream's task ──▶ ASGI's `send`    ends, failures, slow readers

A step brings a delta to each of the streams, and the last of them waits until all before it have been written. So a
delta of a stream that waits for one is written where it is heard of, in a third of the time that waking its task and
going through all layers of ASGI takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from preprocess.errors import BeholderError
from preprocess.wire import Delta
from server.faults import error_body, internal_error
from server.http_connection import HttpConnection
from server.routes.answering import Answer
from server.routes.connection import ClientGone, Heartbeat, while_connected

HEARTBEAT_S = 10.0
LAST_WORD_S = 5.0
"""What a client that stopped reading gets to take the end of its stream."""
_log = logging.getLogger("beholder.server")


def event_of(data: bytes) -> bytes:
    """A server-sent event whose data is one line."""
    return b"data: " + data + b"\n\n"


DONE: Final = event_of(b"[DONE]")


class Told(Protocol):
    """What a stream says of an answer. Pieces may be empty; nothing here waits."""

    def begin(self) -> bytes:
        """Before anything has come."""

    def add(self, index: int, delta: Delta) -> bytes:
        """Of a choice's next delta."""

    def end(self) -> bytes:
        """After all of them."""


class Stream(Response):
    """Response that sends pieces as they come, and stops the generation when the client leaves.

    In an event stream a failure becomes a last event ``data: {"error": …}`` without ``[DONE]``, since clients take a
    cut stream for a whole answer. Plain text has no such word: there the connection is cut, and HTTP's chunks tell.

    Args:
        answer: What is streamed.
        told: What is said of it.
        media_type: ``text/event-stream`` or plain text.
    """

    def __init__(self, answer: Answer, told: Told, media_type: str = "text/event-stream") -> None:
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._answer = answer
        self._told = told
        self._is_events = media_type == "text/event-stream"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything; return early when the client leaves."""
        try:
            with contextlib.suppress(ClientGone):
                await while_connected(receive, self._send_all(scope, send))
        finally:
            self._answer.generation.cancel()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        heartbeat = Heartbeat(lambda: _send_piece(send, b": ping\n\n"), HEARTBEAT_S)
        beating = asyncio.ensure_future(heartbeat.run()) if self._is_events else None
        failure: BeholderError | None = None
        try:
            async with self._answer.arrival.time_limit():
                await self._send_pieces(send, scope["state"].get("connection", _nowhere)(), heartbeat)
        except BeholderError as error:
            failure = error
        except Exception:
            request_id = scope["state"]["request_id"]
            _log.exception("request %s: the stream failed", request_id)
            failure = internal_error(request_id)
        finally:
            if beating is not None:
                beating.cancel()
        if failure is not None:
            self._answer.context.metrics.refused(failure)
            if not self._is_events:
                return  # without its last message the response is cut
        try:
            async with asyncio.timeout(LAST_WORD_S):
                if failure is not None:
                    await _send_piece(send, event_of(error_body(failure)))
                await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            return  # it reads no more: cut the connection

    async def _send_pieces(self, send: Send, connection: HttpConnection | None, heartbeat: Heartbeat) -> None:
        """All that is told, the usual pieces by `connection` where there is one."""
        answer, told = self._answer, self._told

        async def tell(piece: bytes) -> None:
            if piece:
                await _send_piece(send, piece)
                heartbeat.sent()

        def take(index: int, delta: Delta) -> bool:
            if connection is None or not connection.takes_chunks:
                return False
            if delta.finish_reason is not None or delta.error is not None:
                return False
            answer.count(index, delta)
            piece = told.add(index, delta)
            if piece:
                connection.write_chunk(piece)
                heartbeat.sent()
            return True

        await tell(told.begin())
        async with contextlib.aclosing(answer.deltas(take)) as deltas:
            async for index, delta in deltas:
                await tell(told.add(index, delta))
        await tell(told.end())


def _nowhere() -> None:
    """The connection of an application that runs without `HttpConnection`."""


async def _send_piece(send: Send, piece: bytes) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": True})
