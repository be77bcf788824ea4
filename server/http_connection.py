"""One HTTP connection, below the application: its limits in time and size, and how it refuses what is no HTTP.

Uvicorn's own protocol on h11 (whose heads are bounded, unlike those of httptools), with four things more: a client has
`HEAD_TIMEOUT_S` to send the head of a request, so that idle connections cannot use up the descriptors; what cannot be
read as HTTP is refused with the same error object as everything else; a large body is read in pieces, between which
other connections get their turn; and streams write what comes often without asking ASGI (`write_chunk`).
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from typing import Any, Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from preprocess.errors import ClientError
from server.faults import error_body

HEAD_TIMEOUT_S: Final = 30.0
MAX_HEAD_BYTES: Final = 64 << 10
READ_BYTES: Final = 64 << 10
"""Of a body at once. `asyncio` reads four times as much, which takes as much longer; after each piece that is larger
than this uvicorn would stop reading."""


class HttpConnection(H11Protocol):
    """What uvicorn makes for each connection; give it to `uvicorn.Config` as `http`. An application finds a weak
    reference to it in ``scope["state"]["connection"]``: scopes live as long as their connection.
    """

    _head_timer: asyncio.TimerHandle | None = None
    _is_upgraded = False

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, {**app_state, "connection": weakref.ref(self)}, _loop)

    @property
    def takes_chunks(self) -> bool:
        """Whether `write_chunk` may be called: a response is under way, in chunks, and its client reads it."""
        cycle = self.cycle
        return (
            cycle.response_started
            and not cycle.response_complete
            and not cycle.disconnected
            and not self.flow.write_paused
            and not self.transport.is_closing()
            and self.conn.their_http_version == b"1.1"
        )

    def write_chunk(self, data: bytes) -> None:
        """Send the next piece of a response without `content-length`, not empty: what ASGI's `send` does with a body,
        as h11 frames it (RFC 9112, 7.1), for a fifth of the time.
        """
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected: its first request is awaited."""
        # No public name of asyncio's: its sockets read so much, those of TLS do not look at it, and another loop's may
        # have no room for it. Without, larger bodies take longer turns.
        with contextlib.suppress(AttributeError):
            transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """Bytes came: more of a head, or the time is running no more."""
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._stop_watching()
        super().connection_lost(exc)
        if self.timeout_keep_alive_task is not None:  # of one that was reset, whom uvicorn's timer would keep
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, or has too long a head."""
        error = ClientError(
            f"This is no HTTP request that can be read, or its head is longer than {MAX_HEAD_BYTES >> 10} KiB.",
            code="invalid_http",
        )
        body = error_body(error)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        try:
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            pass  # an answer is on its way already: there is no place for another
        self.transport.close()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Another protocol takes the connection over, and with it the time."""
        self._stop_watching()
        self._is_upgraded = True
        super().handle_websocket_upgrade(event)

    def _watch_head(self) -> None:
        if self._is_upgraded:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_watching()
        elif self._head_timer is None and self.timeout_keep_alive_task is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _stop_watching(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.abort()
