"""uvicorn's WebSocket connection with what live sessions need: a way to cut it, its round trip, a quiet drain, and no
more patience with a client's frames than with its messages.

uvicorn closes WebSockets with 1012 the moment it shuts down. Here a session says farewell itself: it is told of the
drain, lets its response finish, and closes with 1001.
"""

from __future__ import annotations

import logging
from typing import Any, Final, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.http11 import Request

EXTENSION: Final = "beholder.connection"
"""Key in an ASGI scope's `extensions`: the `WebSocketProtocol` of the connection."""
MAX_FRAGMENTS: Final = 4096
"""Of one message: their number costs memory too, and empty ones never reach any bound on bytes."""
MAX_UNREAD_BYTES: Final = 1 << 20
"""What may wait to be written when a ping comes: each is answered, whether the client reads or not."""
TOO_LARGE: Final = 1009
_OF_CLIENTS: Final = ("Invalid UTF-8", "ASGI callable returned without completing handshake")


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """What uvicorn runs for one WebSocket connection."""

    def handle_connect(self, event: Request) -> None:
        """Let the application, which starts with the loop's next turn, find this object."""
        super().handle_connect(event)
        scope = getattr(self, "scope", None)
        if scope is not None:
            cast("dict[str, Any]", scope["extensions"])[EXTENSION] = self

    def handle_cont(self, event: Frame) -> None:
        """More of a message that comes in parts."""
        if self.close_sent:
            return
        if len(self.frames) >= MAX_FRAGMENTS:
            self.conn.fail(TOO_LARGE, f"a message in more than {MAX_FRAGMENTS} parts")
            self.handle_parser_exception()
            return
        super().handle_cont(event)

    def handle_ping(self) -> None:
        """Answer it, unless nobody takes the answers."""
        if self.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.cut()
        else:
            super().handle_ping()

    def shutdown(self) -> None:
        """The server drains: an open session ends itself."""
        if not self.handshake_complete or self.close_sent:
            super().shutdown()

    def cut(self) -> None:
        """Drop the connection and what waits to be written: its reader takes nothing."""
        self.transport.abort()

    @property
    def rtt_ms(self) -> float | None:
        """Round trip of the last ping; None before the first."""
        return self.last_ping_rtt * 1e3 or None


def log_no_faults_of_clients() -> None:
    """uvicorn writes a traceback for every message that is no UTF-8, and an error for every handshake that is answered
    with a refusal: as many as clients like to send.
    """
    logging.getLogger("uvicorn.error").addFilter(lambda record: not record.getMessage().startswith(_OF_CLIENTS))
