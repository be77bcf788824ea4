"""uvicorn's WebSocket protocol with what ASGI has no word for: cutting a connection, its round trip, a quiet drain.

uvicorn closes WebSockets with 1012 the moment it shuts down. Here a session says farewell itself: it is told of the
drain, lets its response finish, and closes with 1001.
"""

from __future__ import annotations

from typing import Any, Final, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request

EXTENSION: Final = "beholder.connection"
"""Key in an ASGI scope's `extensions`: the `WebSocketProtocol` of the connection."""


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """What uvicorn runs for one WebSocket connection."""

    def handle_connect(self, event: Request) -> None:
        """Let the application, which starts with the loop's next turn, find this object."""
        super().handle_connect(event)
        scope = getattr(self, "scope", None)
        if scope is not None:
            cast("dict[str, Any]", scope["extensions"])[EXTENSION] = self

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
