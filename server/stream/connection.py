"""One WebSocket connection of `vlm.stream.v1`: reads messages into a session, writes its events, ends with it.

The writer takes an event from the session's outbox only when the socket has room, so what a slow reader leaves waits in
the outbox, where it is bounded, and nowhere else. The reader never waits for the writer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from typing import Any, Final

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from preprocess.errors import BeholderError, ServiceError
from server.stream.client_events import SessionResume
from server.stream.hub import Hub
from server.stream.incoming import decode_event
from server.stream.lifetime import Lifetime
from server.stream.live import Live
from server.stream.outbox import encode
from server.stream.websocket import EXTENSION, WebSocketProtocol
from server.stream.work import Close, CloseCode

_log = logging.getLogger("beholder.stream")
PROTOCOL: Final = "vlm.stream.v1"
RESUME_WAIT_S: Final = 5.0
"""How long a connection beyond the limit on sessions may take to say that it resumes one."""
CLOSE_WAIT_S: Final = 5.0
LEAVING: Final = (1000, 1001)
"""Close codes of a client that has had enough, or of a page that is left; after any other a session is kept."""


class Connection:
    """An accepted connection."""

    def __init__(self, websocket: WebSocket, hub: Hub, kind: type[Lifetime[Any]]) -> None:
        self._websocket = websocket
        self._hub = hub
        self._kind = kind
        self._live: Live | None = None
        self._direct: deque[bytes] = deque()
        """Events that belong to the connection; they go before the session's."""
        self._close: Close | None = None
        self._wake = asyncio.Event()
        self._left = False
        """The client closed as one who does not mean to come back."""
        self._send_timeout_s = hub.context.settings.stream_send_timeout_s
        protocol = websocket.scope.get("extensions", {}).get(EXTENSION)
        self._protocol: WebSocketProtocol | None = protocol

    @property
    def rtt_ms(self) -> float | None:
        """Round trip of the connection, if it is known."""
        return self._protocol.rtt_ms if self._protocol is not None else None

    async def run(self) -> None:
        """Serve until one side closes. Afterwards nothing of it is left but, perhaps, a session that may be resumed."""
        writer = asyncio.ensure_future(self._write())
        reader = asyncio.ensure_future(self._read())
        try:
            await asyncio.wait({writer, reader}, return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                self._let_go()  # before anything is awaited
            if writer.done() and not reader.done():  # the client's closing frame
                await asyncio.wait({reader}, timeout=CLOSE_WAIT_S)
        finally:
            self._let_go()
            for task in (writer, reader):
                task.cancel()
            for outcome in await asyncio.gather(writer, reader, return_exceptions=True):
                if isinstance(outcome, Exception):
                    await self._apologise(outcome)

    async def _apologise(self, fault: Exception) -> None:
        """A fault of ours: the log is told everything, the client that it was not its doing."""
        _log.error("a live connection failed", exc_info=fault)
        if self._live is not None and self._live.close is None:
            self._live.end(CloseCode.INTERNAL, "the server made a mistake")
        with contextlib.suppress(WebSocketDisconnect, RuntimeError, TimeoutError):
            async with asyncio.timeout(1):
                await self._websocket.close(int(CloseCode.INTERNAL), "the server made a mistake")

    def _let_go(self) -> None:
        live = self._live
        if live is None:
            return
        if self._left and live.connection is self:
            live.end(CloseCode.NORMAL, "the client left")
        live.detach(self)

    def wake(self) -> None:
        """There is something to write, or the session has ended."""
        self._wake.set()

    def dismiss(self, code: CloseCode, reason: str, error: BeholderError | None = None) -> None:
        """Close this connection without ending its session."""
        if error is not None:
            self._direct.append(encode(self._kind.refusal(error, fatal=True)))
        self._close = self._close or Close(code, reason)
        self.wake()

    # ---- reading ---------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        with contextlib.suppress(WebSocketDisconnect):
            message = await self._first()
            while message is not None and self._close is None:
                if self._live is not None:
                    self._live.receive(message)
                message = await self._next()
            while message is not None:  # the closing handshake
                message = await self._next()

    async def _first(self) -> str | bytes | None:
        """Find the session of this connection: a new one, or the one that the first message resumes."""
        if not self._hub.is_full:
            self._take(self._hub.begin(self._kind))
            message = await self._next()
        else:
            message = None
            if not self._kind.resumable:
                self._dismiss_surplus()
                return await self._next()
            with contextlib.suppress(TimeoutError):
                message = await asyncio.wait_for(self._next(), RESUME_WAIT_S)
        event = _resume_event(message) if self._kind.resumable else None
        if event is not None:
            self._resume(event)
            return await self._next()
        if self._live is None:
            self._dismiss_surplus()
        return message

    def _dismiss_surplus(self) -> None:
        limit = self._hub.context.settings.stream_max_sessions
        error = ServiceError(
            f"{limit} live sessions are open, the most that this server allows (--stream-max-sessions).",
            code="too_many_sessions",
            retry_after_s=10.0,
        )
        self.dismiss(CloseCode.OVERLOAD, "too many sessions", error)

    def _resume(self, event: SessionResume) -> None:
        fresh, self._live = self._live, None
        if fresh is not None:
            fresh.connection = None
            fresh.end(CloseCode.NORMAL, "another session was resumed")
        self._direct.clear()
        try:
            live, told = self._hub.resume(event)
        except BeholderError as error:
            self.dismiss(CloseCode.NO_SUCH_SESSION, "no such session", error)
            return
        self._direct.append(encode(told))
        self._take(live)

    def _take(self, live: Live) -> None:
        self._live = live
        live.attach(self)

    async def _next(self) -> str | bytes | None:
        """The client's next message; None when it is gone."""
        message = await self._websocket.receive()
        if message["type"] != "websocket.receive":
            self._left = message.get("code") in LEAVING
            return None
        text: str | None = message.get("text")
        return text if text is not None else message["bytes"]

    # ---- writing ---------------------------------------------------------------------------------------------------

    async def _write(self) -> None:
        try:
            while True:
                data = self._take_event()
                if data is not None:
                    async with asyncio.timeout(self._send_timeout_s):
                        await self._websocket.send_text(data.decode())
                elif self._ending is not None:
                    break
                else:
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            error = ServiceError(
                f"The client took nothing for {self._send_timeout_s:g} s (--stream-send-timeout-s).",
                code="slow_reader",
            )
            if self._live is not None and self._live.connection is self:
                self._live.end(CloseCode.OVERLOAD, "too slow a reader", error)
        except (WebSocketDisconnect, RuntimeError):  # gone while we wrote; the reader sees it too
            return
        await self._say_goodbye()

    @property
    def _ending(self) -> Close | None:
        """Why this connection shall be closed, or None."""
        live = self._live
        return self._close or (live.close if live is not None else None)

    def _take_event(self) -> bytes | None:
        if self._direct:
            return self._direct.popleft()
        live = self._live
        if live is None or live.connection is not self:
            return None
        ending = live.close
        if ending is not None and ending.code == CloseCode.OVERLOAD:
            return live.session.outbox.take_last()
        return live.session.outbox.take()

    async def _say_goodbye(self) -> None:
        """The closing frame; a connection that has no room for it is cut."""
        ending = self._ending or Close(CloseCode.INTERNAL, "")
        try:
            async with asyncio.timeout(CLOSE_WAIT_S):
                await self._websocket.close(int(ending.code), ending.reason)
        except TimeoutError:
            if self._protocol is not None:
                self._protocol.cut()
        except (WebSocketDisconnect, RuntimeError):
            return


def _resume_event(message: str | bytes | None) -> SessionResume | None:
    """The `session.resume` in a first message, if it is one that can be read; else the session says what is wrong."""
    if not isinstance(message, str) or "session.resume" not in message[:4096]:
        return None
    with contextlib.suppress(BeholderError, msgspec.MsgspecError):
        event = decode_event(message.encode("utf-8", "replace"))
        if isinstance(event, SessionResume):
            return event
    return None
